//! Local: the processes of servers on this host, as the kernel shows them.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A process that uses a folder as a server uses its `dir`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its program, as its command line names it.
    program: String,
    id: u32,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {})", self.program, self.id)
    }
}

/// What the programs of the servers begin with. Their other programs have one of [`OTHER_PROGRAMS`] in their names.
const FAMILIES: [&str; 3] = ["redis", "valkey", "keydb"];
const OTHER_PROGRAMS: [&str; 5] = ["-cli", "-check", "-benchmark", "-sentinel", "exporter"];

/// A server that works in the folder, or a process that has a file of data in it open. `None`: there is none that this
/// user may see; a process of another user is seen by root only.
pub fn process_in(folder: &Path) -> Option<Process> {
    // The parent of a plain file name.
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let here = fs::metadata(folder).ok()?;
    let here = (here.dev(), here.ino());
    let name = fs::canonicalize(folder).ok()?;
    let ids = fs::read_dir("/proc").ok()?.flatten();
    let ids = ids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| *id != std::process::id()).find_map(|id| {
        let works_here =
            || fs::metadata(format!("/proc/{id}/cwd")).is_ok_and(|about| (about.dev(), about.ino()) == here);
        let program = program(id).unwrap_or_else(|| "a program without a name".to_owned());
        let uses_it = (is_server(&program) && works_here()) || has_data_open(id, &name);
        uses_it.then_some(Process { program, id })
    })
}

/// The name of a process's program. Servers change their command line to "PROGRAM ADDRESS:PORT".
fn program(id: u32) -> Option<String> {
    let line = fs::read(format!("/proc/{id}/cmdline")).ok()?;
    let first = line.split(|byte| matches!(byte, 0 | b' ')).next()?;
    let name = first.rsplit(|byte| *byte == b'/').next()?;
    (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
}

fn is_server(program: &str) -> bool {
    FAMILIES.iter().any(|family| program.starts_with(family))
        && !OTHER_PROGRAMS.iter().any(|other| program.contains(other))
}

/// Whether a process has an append-only file or a snapshot in the folder, or in a folder of it, open for writing.
fn has_data_open(id: u32, folder: &Path) -> bool {
    let files = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
    files.filter_map(|file| Some((fs::read_link(file.path()).ok()?, file))).any(|(to, file)| {
        to.starts_with(folder)
            && to.extension().is_some_and(|end| end == "aof" || end == "rdb")
            // The kernel shows the way in which a file was opened as the permissions of its link.
            && fs::symlink_metadata(file.path()).is_ok_and(|about| about.mode() & 0o200 != 0)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn servers_are_told_from_their_tools() {
        for server in ["redis-server", "valkey-server", "redis-6.2", "keydb-server"] {
            assert!(is_server(server), "{server}");
        }
        for other in ["redis-cli", "valkey-benchmark", "redis-check-aof", "redis_exporter", "bash", "vi"] {
            assert!(!is_server(other), "{other}");
        }
    }

    #[test]
    fn a_process_is_found_that_has_a_file_of_data_open_for_writing() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("journal");
        fs::create_dir(&inner).unwrap();
        assert_eq!(process_in(folder.path()), None);
        let file = fs::File::create(inner.join("appendonly.aof.1.incr.aof")).unwrap();
        let reader = fs::File::open(inner.join("appendonly.aof.1.incr.aof")).unwrap();
        let mut other = Command::new("sleep").arg("600").stdin(Stdio::from(reader)).spawn().unwrap();
        assert_eq!(process_in(folder.path()), None, "it reads only");
        other.kill().unwrap();
        other.wait().unwrap();
        let mut other = Command::new("sleep").arg("600").stdout(Stdio::from(file)).spawn().unwrap();
        let id = other.id();
        let found = process_in(folder.path());
        other.kill().unwrap();
        other.wait().unwrap();
        // The kernel may not show its name yet.
        assert_eq!(found.map(|process| process.id), Some(id));
    }
}
