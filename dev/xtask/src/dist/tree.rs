//! The files of a release as they are installed, in a folder that stands for `/`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use remora_agent::args::Generated;
use remora_bench::sync::Result;

use super::build::{COMMAND, MODULE};
use crate::generate;
use crate::process::succeed;

/// Lays out everything.
pub(super) fn plant(programs: &Path, tree: &Path) -> Result<()> {
    put(&programs.join(COMMAND), &tree.join("usr/bin").join(COMMAND), 0o755)?;
    // Redis loads no module that may not be executed.
    put(&programs.join(MODULE), &tree.join("usr/lib/remora").join(MODULE), 0o755)?;
    let man = tree.join("usr/share/man/man1");
    generate(Generated::Man { directory: man.clone() })?;
    for entry in fs::read_dir(man)? {
        succeed(Command::new("gzip").args(["-9", "-n"]).arg(entry?.path()))?;
    }
    for (shell, path) in [
        ("bash", "usr/share/bash-completion/completions/remora"),
        ("zsh", "usr/share/zsh/vendor-completions/_remora"),
        ("fish", "usr/share/fish/vendor_completions.d/remora.fish"),
    ] {
        // By this program, which has the same definitions: the one that was built may be for another processor.
        let output = Command::new(std::env::current_exe()?).args(["completions", shell]).output()?;
        if !output.status.success() {
            return Err(format!("the completions for {shell} cannot be made: {output:?}").into());
        }
        write(&tree.join(path), &output.stdout, 0o644)?;
    }
    for unit in fs::read_dir("deploy/systemd")? {
        let unit = unit?;
        put(&unit.path(), &tree.join("usr/lib/systemd/system").join(unit.file_name()), 0o644)?;
    }
    put(Path::new("deploy/packages/sysusers.conf"), &tree.join("usr/lib/sysusers.d/remora.conf"), 0o644)?;
    for package in ["remora", "remora-module"] {
        let pages = tree.join("usr/share/doc").join(package);
        put(Path::new("deploy/packages/copyright"), &pages.join("copyright"), 0o644)?;
        for page in ["LICENSE-APACHE", "LICENSE-MIT"] {
            put(Path::new(page), &pages.join(page), 0o644)?;
        }
    }
    for page in ["README.md", "CHANGELOG.md", "SECURITY.md"] {
        put(Path::new(page), &tree.join("usr/share/doc/remora").join(page), 0o644)?;
    }
    Ok(())
}

fn put(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let bytes = fs::read(from).map_err(|error| format!("{} cannot be read: {error}", from.display()))?;
    write(to, &bytes, mode)
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    fs::write(path, bytes)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}
