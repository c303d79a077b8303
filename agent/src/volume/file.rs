//! File: what a client must know of a volume. It holds no secret.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use remora_volume::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
use serde::{Deserialize, Serialize};

use crate::args::HostPort;
use crate::checked_json::{self, Checksum};
use crate::exit::Failure;

/// The layout of the file.
const LAYOUT: u32 = 1;

/// Far more than five servers' names need.
const MOST_BYTES: u64 = 16 << 10;

/// A volume, as its file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VolumeFile {
    pub(super) shape: Shape,
    pub(super) servers: Vec<HostPort>,
}

/// A file that is written and has not taken its place. Otherwise it is removed.
pub(super) struct Prepared {
    beside: PathBuf,
    path: PathBuf,
}

impl Prepared {
    /// It takes its place. A reader finds the earlier one or this one.
    ///
    /// # Errors
    /// The earlier one is left.
    pub(super) fn replace(self) -> Result<(), Failure> {
        let failed = |error| Failure::local(format!("cannot write {}: {error}", self.path.display()));
        std::fs::rename(&self.beside, &self.path).map_err(failed)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.beside); // it is usually not there any more
    }
}

/// The words of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    remora_volume: u32,
    id: String,
    bytes: u64,
    acknowledge: usize,
    servers: Vec<String>,
    /// The checksum of the file, which [`checked_json`] writes.
    #[serde(default, skip_serializing)]
    checksum: Option<String>,
}

impl VolumeFile {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or it describes no volume.
    pub(super) fn read(path: &Path) -> Result<VolumeFile, Failure> {
        let name = path.display();
        let mut text = String::new();
        let read = OpenOptions::new().read(true).open(path).and_then(|file| {
            file.take(MOST_BYTES).read_to_string(&mut text) // a longer one is cut, and then is not JSON
        });
        read.map_err(|error| Failure::refused(format!("cannot read the volume's file {name}: {error}")))?;
        VolumeFile::parse(&text).map_err(|why| {
            Failure::refused(format!("{name} does not describe a volume: {why}; use a file of remora volume create"))
        })
    }

    fn parse(text: &str) -> Result<VolumeFile, String> {
        let words: Words = serde_json::from_str(text).map_err(|error| error.to_string())?;
        // A changed digit of an address would make another server a copy of the volume.
        if words.checksum.is_some() && checked_json::check(text.as_bytes()) != Checksum::Right {
            return Err(
                "its checksum is wrong, so it was damaged or edited (after an edit, take its \"checksum\" out)".into(),
            );
        }
        if words.remora_volume != LAYOUT {
            return Err(format!("its layout is {}, and this version knows {LAYOUT}", words.remora_volume));
        }
        let id = parse_id(&words.id).ok_or("its id must have 32 hexadecimal digits")?;
        let shape = shape(id, words.bytes, words.servers.len(), words.acknowledge)?;
        let servers = words
            .servers
            .iter()
            .map(|server| server.parse::<HostPort>().map_err(|error| format!("the server {server:?}: {error}")));
        Ok(VolumeFile { shape, servers: servers.collect::<Result<_, _>>()? })
    }

    /// Writes the file that is to take the place of the earlier one, beside it: whatever keeps it from being written is
    /// known before anything else changes.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn prepare(&self, path: &Path) -> Result<Prepared, Failure> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let beside = PathBuf::from(beside);
        // One is left if an earlier command was interrupted.
        match std::fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Failure::local(format!("cannot remove {}: {error}", beside.display())));
            }
            _ => {}
        }
        self.write(&beside)?;
        Ok(Prepared { beside, path: path.to_owned() })
    }

    /// Writes a new file. What is there already is left alone.
    ///
    /// # Errors
    /// The file exists, or cannot be written.
    pub(super) fn write(&self, path: &Path) -> Result<(), Failure> {
        let name = path.display();
        let words = Words {
            remora_volume: LAYOUT,
            id: self.shape.volume().to_string(),
            bytes: self.shape.blocks() * BLOCK_BYTES as u64,
            acknowledge: self.shape.copies().hold(),
            servers: self.servers.iter().map(HostPort::to_string).collect(),
            checksum: None,
        };
        let text = checked_json::to_json(&words).map_err(|error| Failure::local(error.to_string()))?;
        let created = OpenOptions::new().write(true).create_new(true).open(path);
        let mut file = created.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                Failure::refused(format!("{name} exists and may describe a volume: choose another file"))
            }
            _ => Failure::local(format!("cannot create {name}: {error}")),
        })?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(|error| {
            // Half a description must not be used.
            let _ = std::fs::remove_file(path);
            Failure::local(format!("cannot write {name}: {error}"))
        })
    }
}

/// The shape of a volume of this size, with that many copies, of which `acknowledge` must hold a write.
///
/// # Errors
/// The text says which number is wrong.
pub(super) fn shape(id: VolumeId, bytes: u64, copies: usize, acknowledge: usize) -> Result<Shape, String> {
    if !bytes.is_multiple_of(BLOCK_BYTES as u64) {
        return Err(format!(
            "--size {bytes} is not a multiple of {BLOCK_BYTES} bytes: give whole KiB by fours, such as 4KiB or 1GiB"
        ));
    }
    let most = Copies::MOST;
    let copies = Copies::new(copies, acknowledge).ok_or_else(|| {
        format!("{acknowledge} of {copies} copies: give 1 to {most} servers, and acknowledge at 1 to all of them")
    })?;
    Shape::new(id, bytes / BLOCK_BYTES as u64, copies)
        .ok_or_else(|| format!("--size {bytes}: a volume has at least {BLOCK_BYTES} bytes and at most 16 TiB"))
}

fn parse_id(text: &str) -> Option<VolumeId> {
    let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u128::from_str_radix(text, 16).ok().filter(|_| digits)?;
    Some(VolumeId(number.to_be_bytes()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn described() -> VolumeFile {
        let shape = shape(VolumeId([7; 16]), 1 << 20, 3, 2).unwrap();
        let servers = ["10.0.0.1:7480", "db-2:7480", "[fd00::3]:7480"];
        VolumeFile { shape, servers: servers.iter().map(|server| server.parse().unwrap()).collect() }
    }

    #[test]
    fn a_file_is_read_as_it_was_written_and_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.volume");
        described().write(&path).unwrap();
        assert_eq!(VolumeFile::read(&path).unwrap(), described());
        let refused = described().write(&path).unwrap_err();
        assert!(refused.message.contains("exists"), "{refused}");
        let larger = VolumeFile { shape: shape(VolumeId([7; 16]), 2 << 20, 3, 2).unwrap(), ..described() };
        std::fs::write(folder.path().join("data.volume.new"), "left by a command that was interrupted").unwrap();
        drop(larger.prepare(&path).unwrap());
        assert_eq!(VolumeFile::read(&path).unwrap(), described(), "not in its place");
        larger.prepare(&path).unwrap().replace().unwrap();
        assert_eq!(VolumeFile::read(&path).unwrap(), larger);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_changed_bit_makes_no_other_volume() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.volume");
        described().write(&path).unwrap();
        let text = std::fs::read(&path).unwrap();
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut changed = text.clone();
                changed[at] ^= 1 << bit;
                std::fs::write(&path, &changed).unwrap();
                let refused = VolumeFile::read(&path).unwrap_err();
                assert!(refused.message.contains("data.volume"), "byte {at}, bit {bit}: {refused}");
            }
        }
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        VolumeFile::read(&path).unwrap_err();
    }

    #[test]
    fn what_does_not_describe_a_volume_is_refused_by_its_name() {
        let good = r#"{"remora_volume":1,"id":"07070707070707070707070707070707","bytes":4096,"acknowledge":1,
            "servers":["a:1"]}"#;
        VolumeFile::parse(good).unwrap();
        for (from, to, why) in [
            (":1,\"id\"", ":2,\"id\"", "layout"),
            ("0707070707070707", "07", "id"),
            ("0707070707", "+707070707", "id"),
            ("4096", "4097", "multiple"),
            ("4096", "0", "at least"),
            ("\"acknowledge\":1", "\"acknowledge\":2", "copies"),
            ("\"a:1\"", "\"a\"", "server"),
            ("\"a:1\"", "", "copies"),
            ("\"bytes\"", "\"size\"", "size"),
        ] {
            let text = good.replacen(from, to, 1);
            let error = VolumeFile::parse(&text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".*") {
            let _ = VolumeFile::parse(&text);
        }
    }
}
