//! Program: a server of any version, as a file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Kind;
use crate::error::{Doing, Error, Result};

/// A server's program, and what it says of itself.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    kind: Kind,
    /// `Redis`, `Valkey`, or a fork's name.
    family: String,
    version: [u32; 3],
}

impl Program {
    /// Asks the program for its version.
    ///
    /// # Errors
    /// It does not run, or is not a server.
    pub fn at(path: impl Into<PathBuf>) -> Result<Program> {
        let path = path.into();
        let ran = Command::new(&path).arg("--version").output().doing(|| format!("run {}", path.display()))?;
        let said = String::from_utf8_lossy(&ran.stdout).into_owned();
        let Some((family, version)) = parse(&said) else {
            return Err(Error::Garbled(format!("{} --version: {said}", path.display())));
        };
        let kind = if family == "Valkey" { Kind::Valkey9 } else { Kind::Redis7 };
        Ok(Program { path, kind, family, version })
    }

    /// Every server program in a folder and the folders in it, or the program itself, by family and version.
    ///
    /// # Errors
    /// A folder cannot be read, or a program does not run.
    pub fn all(below: &Path) -> Result<Vec<Program>> {
        let mut found = Vec::new();
        if below.is_dir() {
            for entry in std::fs::read_dir(below).doing(|| format!("read {}", below.display()))? {
                let path = entry.doing(|| format!("read {}", below.display()))?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if path.is_dir() {
                    found.extend(Program::all(&path)?);
                } else if name.ends_with("-server") {
                    found.push(Program::at(path)?);
                }
            }
        } else {
            found.push(Program::at(below)?);
        }
        found.sort_by(|one, other| {
            (&one.family, one.version, &one.path).cmp(&(&other.family, other.version, &other.path))
        });
        Ok(found)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of server that it is most like.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its family.
    pub fn family(&self) -> &str {
        &self.family
    }

    /// Its version.
    pub fn version(&self) -> [u32; 3] {
        self.version
    }

    /// Whether it can refuse dangerous commands, and then has to be told to accept them: Redis from 7.0 on.
    pub fn can_refuse_commands(&self) -> bool {
        self.family != "Redis" || self.version >= [7, 0, 0]
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.version;
        write!(f, "{} {major}.{minor}.{patch}", self.family)
    }
}

/// Family and version of `Redis server v=7.0.15 sha=… malloc=…`.
fn parse(said: &str) -> Option<(String, [u32; 3])> {
    // Valkey 7.2 leaves its name out.
    let (family, rest) = match said.strip_prefix("Server v=") {
        Some(rest) => ("Valkey", rest),
        None => said.split_once(" server v=")?,
    };
    let version = rest.split_whitespace().next()?;
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    Some((family.trim().to_owned(), [numbers.next()??, numbers.next()??, numbers.next()??]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_its_family_and_version() {
        let said = "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=2a\n";
        assert_eq!(parse(said), Some(("Redis".into(), [7, 0, 15])));
        assert_eq!(parse("Valkey server v=9.1.2 sha=0\n"), Some(("Valkey".into(), [9, 1, 2])));
        assert_eq!(parse("Server v=7.2.7 sha=0\n"), Some(("Valkey".into(), [7, 2, 7])));
        for wrong in ["", "bash 5", "Redis server v=", "Redis server v=7.0", "Redis server v=a.b.c d"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
