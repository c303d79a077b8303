//! Local: what a server is on this host: its process, as the kernel shows it, and its configuration file.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
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

// Configuration: what a server's configuration file says, with the files that it includes.

/// Bytes of one file that are read at most. Redis's own, with all of its comments, has 100 KiB.
const FILE_LIMIT: u64 = 4 << 20;

/// Files that are read at most: a file can include itself.
const FILES: usize = 64;

/// The settings of a server's configuration file, in their order. A later one replaces an earlier one of that name.
#[derive(Debug, Default)]
pub struct Configuration {
    /// Name, in lower case, and values.
    settings: Vec<(String, Vec<String>)>,
    /// Included files that could not be read here, and patterns, which are not followed.
    unread: Vec<String>,
    files: usize,
}

impl Configuration {
    /// Reads the file and those that it includes.
    ///
    /// # Errors
    /// The file itself cannot be read. Those that it includes are noted.
    pub fn read(file: &Path) -> io::Result<Configuration> {
        let mut configuration = Configuration::default();
        configuration.add(file)?;
        Ok(configuration)
    }

    fn add(&mut self, file: &Path) -> io::Result<()> {
        self.files += 1;
        if self.files > FILES {
            return Err(io::Error::other(format!("more than {FILES} files are included")));
        }
        for line in read_configuration(file)?.lines() {
            let mut words = line.split_whitespace().map(|word| word.trim_matches(['"', '\'']).to_owned());
            let Some(name) = words.next().filter(|name| !name.starts_with('#')) else { continue };
            let values: Vec<String> = words.collect();
            if name.eq_ignore_ascii_case("include")
                && let Some(included) = values.first()
            {
                // A relative name is relative to the folder in which the server was started, which is not known.
                let path = Path::new(included);
                let is_pattern = included.contains(['*', '?', '[']);
                if is_pattern || !path.is_absolute() || self.add(path).is_err() {
                    self.unread.push(included.clone());
                }
            }
            self.settings.push((name.to_ascii_lowercase(), values));
        }
        Ok(())
    }

    /// The values of the last setting of this name.
    pub fn last(&self, name: &str) -> Option<&[String]> {
        self.last_of(&[name])
    }

    fn last_of(&self, names: &[&str]) -> Option<&[String]> {
        let last = self.settings.iter().rev().find(|(name, _)| names.contains(&name.as_str()));
        last.map(|(_, values)| values.as_slice())
    }

    /// Whether a setting is given as `yes`.
    pub fn is_yes(&self, name: &str) -> bool {
        self.last(name).and_then(<[String]>::first).is_some_and(|value| value.eq_ignore_ascii_case("yes"))
    }

    /// The primary that the server follows from its start.
    pub fn primary(&self) -> Option<(&str, u16)> {
        match self.last_of(&["replicaof", "slaveof"])? {
            [host, port] => Some((host, port.parse().ok()?)),
            _ => None,
        }
    }

    /// Whether it includes this file.
    pub fn includes(&self, file: &Path) -> bool {
        let mut included = self.settings.iter().filter(|(name, _)| name == "include");
        included.any(|(_, values)| values.first().is_some_and(|value| Path::new(value) == file))
    }

    /// Included files that are not known.
    pub fn unread(&self) -> &[String] {
        &self.unread
    }
}

/// Reads one file of a server's configuration.
///
/// # Errors
/// It cannot be read, or is far too long for one.
pub fn read_configuration(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(file)?.take(FILE_LIMIT + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_LIMIT {
        return Err(io::Error::other(format!("a server's configuration has at most {FILE_LIMIT} bytes")));
    }
    Ok(text)
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

    #[test]
    fn later_settings_and_included_files_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("more.conf"), "slaveof 10.0.0.1 6379\nAppendOnly \"yes\"\n").unwrap();
        let include = format!("include {}", path("more.conf").display());
        for (text, primary, is_aof) in [
            (format!("port 1\n{include}\n"), Some(("10.0.0.1", 6379)), true),
            (format!("{include}\nappendonly no\nreplicaof no one\n"), None, false),
            (format!("replicaof b 2\n{include}\nREPLICAOF c 3\n"), Some(("c", 3)), true),
            ("# replicaof b 2\n\n".to_owned(), None, false),
            ("replicaof b many\n".to_owned(), None, false),
        ] {
            std::fs::write(path("redis.conf"), &text).unwrap();
            let read = Configuration::read(&path("redis.conf")).unwrap();
            assert_eq!((read.primary(), read.is_yes("appendonly")), (primary, is_aof), "{text}");
            assert_eq!(read.includes(&path("more.conf")), text.contains("include"));
            assert!(read.unread().is_empty() && !read.includes(&path("other.conf")));
        }
    }

    #[test]
    fn included_files_that_are_not_known_are_named_and_circles_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("redis.conf");
        let text =
            format!("include relative.conf\ninclude /etc/redis/*.conf\ninclude /nowhere\ninclude {}\n", file.display());
        std::fs::write(&file, text).unwrap();
        let read = Configuration::read(&file).unwrap();
        for name in ["relative.conf", "/etc/redis/*.conf", "/nowhere", file.to_str().unwrap()] {
            assert!(read.unread().iter().any(|unread| unread == name), "{name}: {:?}", read.unread());
        }
    }

    #[test]
    fn what_is_no_configuration_is_not_read_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("redis.conf");
        std::fs::write(&file, vec![b'\n'; FILE_LIMIT as usize + 1]).unwrap();
        assert!(read_configuration(&file).unwrap_err().to_string().contains("at most"));
        assert!(Configuration::read(Path::new("/dev/zero")).is_err(), "without an end");
        assert!(Configuration::read(folder.path()).is_err() && Configuration::read(Path::new("/nowhere")).is_err());
    }
}
