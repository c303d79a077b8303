//! A folder as a store: objects are files, and keys are their paths.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::{Object, Store, Upload};
use crate::exit::Failure;
use crate::snapshot::beside;
use crate::snapshot::fetch::PRIVATE;

/// What files are called that have no name yet.
const ARRIVING: &str = ".remora-upload-";

/// A folder with objects.
#[derive(Debug)]
pub(in super::super) struct FolderStore {
    folder: PathBuf,
}

impl FolderStore {
    pub(in super::super) fn new(folder: &Path) -> FolderStore {
        FolderStore { folder: folder.to_owned() }
    }

    fn path(&self, key: &str) -> PathBuf {
        if key.is_empty() { self.folder.clone() } else { self.folder.join(key) }
    }

    fn failed(&self, key: &str) -> impl Fn(io::Error) -> Failure {
        let path = self.path(key);
        move |error| Failure::local(format!("{}: {error}", path.display()))
    }
}

impl Store for FolderStore {
    fn address(&self, key: &str) -> String {
        self.path(key).display().to_string()
    }

    fn list(&self, under: &str) -> Result<Vec<Object>, Failure> {
        let entries = match fs::read_dir(self.path(under)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(self.failed(under))?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let entry = entry.map_err(self.failed(under))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            // A file that has just been removed is not an object.
            let Ok(facts) = entry.metadata() else { continue };
            if facts.is_file() && !name.starts_with(ARRIVING) {
                let key = if under.is_empty() { name } else { format!("{under}/{name}") };
                all.push(Object { key, bytes: facts.len() });
            }
        }
        all.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(all)
    }

    fn read(&self, key: &str) -> Result<Option<Box<dyn Read + Send>>, Failure> {
        match File::open(self.path(key)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            file => Ok(Some(Box::new(file.map_err(self.failed(key))?))),
        }
    }

    fn upload(&self, key: &str, _: u64) -> Result<Box<dyn Upload>, Failure> {
        let to = self.path(key);
        if let Some(parent) = to.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(self.failed(key))?;
        }
        let file = tempfile::Builder::new().prefix(ARRIVING).tempfile_in(&self.folder).map_err(self.failed(key))?;
        Ok(Box::new(Arriving { file, to }))
    }

    fn remove(&self, keys: &[String]) -> Result<(), Failure> {
        for key in keys {
            let path = self.path(key);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(self.failed(key)(error)),
                _ => {}
            }
            // The folders that hold nothing more, up to the store's own. A store has none of its own without objects.
            let above = path.ancestors().skip(1).take_while(|folder| *folder != self.folder);
            for folder in above {
                if fs::remove_dir(folder).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    fn stop(&self) {
        // No call takes long.
    }

    fn recover(&self) -> Result<(), Failure> {
        for entry in fs::read_dir(&self.folder).map_err(self.failed(""))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(ARRIVING) {
                fs::remove_file(entry.path()).map_err(self.failed(&name))?;
            }
        }
        Ok(())
    }
}

/// A file that has no name yet.
struct Arriving {
    file: NamedTempFile,
    to: PathBuf,
}

impl Write for Arriving {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Upload for Arriving {
    fn finish(self: Box<Self>) -> Result<(), Failure> {
        let (file, fresh) = self.file.into_parts();
        beside::put(&file, &fresh, &self.to, &PRIVATE)?;
        _ = fresh.keep(); // it has another name by now
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::{get, put};
    use super::*;

    #[test]
    fn an_object_is_there_as_a_whole_and_what_was_arriving_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::new(folder.path());
        put(&store, "a/b/c", b"first").unwrap();
        put(&store, "a/b/c", b"second").unwrap();
        put(&store, "a/d", b"other").unwrap();
        assert_eq!(get(&store, "a/b/c").unwrap().unwrap(), b"second");
        assert_eq!(get(&store, "a/b/x").unwrap(), None);
        let mut half = store.upload("a/e", 9).unwrap();
        half.write_all(b"half").unwrap();
        assert_eq!(store.list("a").unwrap(), [Object { key: "a/d".into(), bytes: 5 }]);
        drop(half);
        fs::write(folder.path().join(".remora-upload-xyz"), b"of a killed process").unwrap();
        assert_eq!(store.list("").unwrap(), []);
        store.recover().unwrap();
        store.remove(&["a/b/c".into(), "a/b/x".into()]).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(!folder.path().join("a/b").exists());
        assert_eq!(store.list("nowhere").unwrap(), []);
    }
}
