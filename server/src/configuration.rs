//! Configuration: what a server's configuration file says, with the files that it includes.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

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

    use super::*;

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
