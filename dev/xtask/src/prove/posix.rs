//! pjdfstest: what POSIX says of system calls on files, a test for each sentence.

use std::fmt::Write as _;

use remora_bench::sync::Result;

use super::scene::{Scene, built};

/// Runs all of its tests. One that fails must be in [`OF_DEVICES`], and one that is there must fail.
pub(super) fn run(scene: &Scene<'_>) -> Result<String> {
    let configuration = scene.folder().join("pjdfstest.toml");
    std::fs::write(&configuration, text())?;
    let other = scene.folder().join("other");
    std::fs::create_dir(&other)?;
    let mut command = built("pjdfstest");
    command.env("NO_COLOR", "1").arg("--configuration-file").arg(&configuration);
    command.arg("--path").arg(scene.files()).arg("--secondary-fs").arg(&other);
    let said = scene.run(&mut command)?;
    let summary = said.lines().rev().find(|line| line.starts_with("Summary")).ok_or("it printed no summary")?;
    Ok(format!("{} (those that fail, and why: dev/xtask/src/prove/posix.rs)", summary.trim_start_matches("Summary: ")))
}

/// What the file system has, users that every Debian has, and what must fail.
fn text() -> String {
    let mut text = String::from(
        "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutime_now = {}\nutimensat = {}\n\n\
         [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n\n\
         [settings]\nnaptime = 0.01\nallow_remount = false\nexpected_failures = [\n",
    );
    for name in OF_DEVICES {
        let _ = writeln!(text, "  \"{name}::block\",\n  \"{name}::char\",");
    }
    text + "]\n"
}

/// Tests that fail here, once for block devices and once for character devices: a volume has none, and `mknod` says
/// `EPERM`. Everything else holds.
const OF_DEVICES: [&str; 43] = [
    "chmod::change_perm",
    "chmod::enotdir_component",
    "chmod::failed_chmod_unchanged_ctime",
    "chmod::update_ctime",
    "chown::enotdir_component",
    "chown::lchown::enotdir_component",
    "link::changed_ctime_success",
    "link::eexist_dest_exists",
    "link::enotdir_component_either",
    "link::remove_link",
    "link::share_metadata",
    "link::unchanged_ctime_fails",
    "mkdir::eexist_file_exists",
    "mkdir::enotdir_component",
    "mkfifo::eexist_file_exists",
    "mkfifo::enotdir_component",
    "mknod::changed_times_success",
    "mknod::device_files",
    "mknod::eexist_file_exists",
    "mknod::enotdir_comp_char_block",
    "mknod::enotdir_component",
    "mknod::privileged::eexist_file_exists",
    "open::eexist_file_exists",
    "rename::changed_ctime_success",
    "rename::eexist_enotempty_to_non_empty",
    "rename::eisdir_to_dir_from_not_dir",
    "rename::enotdir_component_either",
    "rename::enotdir_from_dir_to_not_dir",
    "rename::preserve_metadata",
    "rename::to_multiply_linked",
    "rename::unchanged_ctime_failed",
    "rmdir::eexist_enotempty_non_empty_dir",
    "rmdir::enotdir_component",
    "symlink::create_symlink",
    "symlink::eexist_file_exists",
    "symlink::enotdir_component",
    "truncate::enotdir_component",
    "unlink::enotdir_component",
    "unlink::remove_type",
    "unlink::unchanged_ctime_failed",
    "unlink::update_ctime_success",
    "unlink::update_mtime_ctime_success_folder",
    "utimensat::changes_timestamps",
];
