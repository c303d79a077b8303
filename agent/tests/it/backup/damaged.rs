//! Each byte that a backup has on the disk is covered by a checksum, and `remora restore` compares them all.

use std::fs;
use std::path::{Path, PathBuf};

use remora_lab::workload::fill_every_type;
use remora_lab::{Random, require};
use rustix::process::Signal;

use crate::kit::{Scene, Stage, ends, fill, primary, says};

/// Bytes of each file that are changed, besides the first and the last ones.
const SOMEWHERE: usize = 6;

/// All files below a folder, but for hidden ones, which hold no backup.
pub(super) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        match path.file_name().unwrap().to_str().unwrap() {
            hidden if hidden.starts_with('.') => {}
            _ if path.is_dir() => all.extend(files(&path)),
            _ => all.push(path),
        }
    }
    all.sort();
    all
}

/// Changes bytes of each file, one at a time: the command must refuse each change, and name the file.
pub(super) fn each_change_is_refused(stage: &Stage, files: &[PathBuf], args: &[&str]) {
    stage.end(args, 0);
    let mut random = Random::new(files.len() as u64);
    for file in files {
        let whole = fs::read(file).unwrap();
        let somewhere = (0..SOMEWHERE).map(|_| random.below(whole.len() as u64) as usize);
        let ends = [0, 5, whole.len().saturating_sub(20), whole.len() - 1];
        for at in somewhere.chain(ends).filter(|at| *at < whole.len()).collect::<Vec<_>>() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(file, &changed).unwrap();
            let mut agent = stage.start(None, args);
            let status = agent.wait(crate::kit::LONG).unwrap();
            let said = agent.output();
            assert_eq!(status.code(), Some(3), "byte {at} of {}:\n{said}", file.display());
            says(&said, &[file.file_name().unwrap().to_str().unwrap()]);
        }
        fs::write(file, &whole).unwrap();
    }
    stage.end(args, 0);
}

#[test]
#[ignore = "long: make test-all"]
fn a_changed_byte_of_any_file_of_a_backup_is_refused_and_the_file_named() {
    for kind in require::kinds() {
        // Without a checksum of the server's, only ours can tell.
        let server = primary(kind).config("rdbchecksum", "no").config("rdbcompression", "no").start().unwrap();
        fill(&server, 1, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let scene = Scene::new(server, &[]);
        let (snapshots, sets) = (scene.stage.path("snapshots"), scene.stage.path("sets"));
        ends(&mut scene.start("backup", &snapshots, &[]), 0);
        let options = ["--journal", "--file-size", "64KiB"];
        let mut backup = scene.start("backup", &sets, &options);
        backup.wait_for_line("the commands since are recorded", crate::kit::LONG).unwrap();
        fill(&scene.primary, 1, 2);
        scene.set(1, "the last one");
        scene.wait_until_recorded();
        backup.signal(Signal::TERM).unwrap();
        ends(&mut backup, 0);
        for (folder, least) in [(&snapshots, 2), (&sets, 5)] {
            let files = files(Path::new(folder));
            assert!(files.len() >= least, "{files:?}");
            // Of the many files of commands, the first and the last ones.
            let few: Vec<_> = files.iter().take(3).chain(files.iter().rev().take(4).rev()).cloned().collect();
            each_change_is_refused(&scene.stage, &few, &["restore", folder]);
        }
        // A source that begins with the file reads it in the same way.
        let rdb =
            files(Path::new(&snapshots)).into_iter().find(|file| file.extension().is_some_and(|end| end == "rdb"));
        let (rdb, url) = (rdb.unwrap(), scene.primary.url());
        let mut bytes = fs::read(&rdb).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&rdb, bytes).unwrap();
        let (token, path) = (scene.stage.token.display().to_string(), rdb.display().to_string());
        let args =
            ["source", "--server", &url, "--listen", "127.0.0.1:0", "--token-file", &token, "--from-file", &path];
        says(&scene.stage.end(&args, 3), &[&path, "is damaged"]);
    }
}

#[test]
fn a_damaged_manifest_is_in_no_new_backups_way_and_never_taken_for_none() {
    let Some(kind) = require::redis() else { return };
    let scene = Scene::new(primary(kind).start().unwrap(), &super::ALWAYS_NEW);
    let shelf = scene.stage.path("shelf");
    for round in 0..2 {
        scene.set(round, "there");
        ends(&mut scene.start("backup", &shelf, &[]), 0);
        super::next_second();
        super::next_second();
    }
    let manifest = files(Path::new(&shelf)).into_iter().rfind(|file| file.extension().is_some_and(|end| end == "json"));
    let manifest = manifest.unwrap();
    fs::write(&manifest, "").unwrap();
    // The older backup is not taken for the newest one.
    says(&scene.stage.end(&["restore", &shelf], 3), &[manifest.to_str().unwrap(), "is damaged"]);
    scene.set(2, "there");
    let said = ends(&mut scene.start("backup", &shelf, &["--keep", "1"]), 0);
    says(&said, &["WARN", manifest.to_str().unwrap()]);
    assert!(manifest.exists());
    fs::remove_file(&manifest).unwrap();
    fs::remove_file(manifest.with_extension("rdb")).unwrap();
    scene.stage.end(&["restore", &shelf], 0);
}
