//! A server's program, and the id of its build: the note that the linker wrote into it, or its SHA-256.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use object::Object;
use sha2::{Digest, Sha256};

/// The largest program, or file of debug information, that is read: the largest server known, with debug information,
/// has 40 MB. All of it is in memory while it is looked at.
pub const PROGRAM_BYTES_MAX: u64 = 256 << 20;

/// Bytes of the linker's id: 8 (lld's short form) to 64. Other notes are not believed, and the SHA-256 is used.
const ID_BYTES: std::ops::RangeInclusive<usize> = 8..=64;

/// A program in memory.
pub struct Program {
    bytes: Vec<u8>,
}

/// Which build a program is: the name of its layout's file, without the ending.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Build(String);

impl Program {
    /// Reads a program, or a file of debug information.
    ///
    /// # Errors
    /// It cannot be read, or is larger than [`PROGRAM_BYTES_MAX`].
    pub fn read(path: &Path) -> io::Result<Program> {
        let mut bytes = Vec::new();
        File::open(path)?.take(PROGRAM_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > PROGRAM_BYTES_MAX {
            return Err(io::Error::other(format!("it has more than {} MiB", PROGRAM_BYTES_MAX >> 20)));
        }
        Ok(Program { bytes })
    }

    /// A program of these bytes.
    pub fn of(bytes: Vec<u8>) -> Program {
        Program { bytes }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its SHA-256, hexadecimal.
    pub fn sha256(&self) -> String {
        hexadecimal(&Sha256::digest(&self.bytes))
    }

    /// The id that the linker wrote into it.
    pub fn linker_id(&self) -> Option<Vec<u8>> {
        let parsed = object::File::parse(&*self.bytes).ok()?;
        let id = parsed.build_id().ok().flatten().filter(|id| ID_BYTES.contains(&id.len()));
        id.map(<[u8]>::to_vec)
    }

    /// Which build it is.
    pub fn build(&self) -> Build {
        match self.linker_id() {
            Some(id) => Build(format!("build-id-{}", hexadecimal(&id))),
            None => Build(format!("sha256-{}", self.sha256())),
        }
    }
}

impl Build {
    /// The build of that name, if it is one: nothing else may become the name of a file.
    pub fn parse(name: &str) -> Option<Build> {
        let digits = name.strip_prefix("build-id-").or_else(|| name.strip_prefix("sha256-"))?;
        let is_hexadecimal = digits.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'));
        let fits = ID_BYTES.contains(&(digits.len() / 2)) && digits.len().is_multiple_of(2);
        (is_hexadecimal && fits).then(|| Build(name.to_owned()))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::names::Names;

    /// This test's own program: the linker gives it an id where the machine's does.
    fn own() -> Vec<u8> {
        std::fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    /// Everything that is asked of a file. No answer is expected, but none may end the process.
    fn look(bytes: Vec<u8>) {
        let program = Program::of(bytes);
        let build = program.build();
        assert_eq!(Build::parse(build.name()), Some(build));
        if let Ok(names) = Names::of(&program, None) {
            let _ = names.find("server");
            let _ = names.offset("main");
        }
        let _ = Names::of(&Program::of(Vec::new()), Some(&program)).map(drop);
        let _ = Names::of(&program, Some(&program)).map(drop);
    }

    #[test]
    fn a_program_keeps_its_build_when_bytes_follow_it_and_another_has_another() {
        let (one, mut bytes) = (Program::of(own()), own());
        bytes.extend_from_slice(b"a byte that no segment has");
        let more = Program::of(bytes);
        assert_ne!(one.sha256(), more.sha256());
        if one.linker_id().is_some() {
            assert_eq!(one.build(), more.build());
        }
        let script = Program::of(b"#!/bin/sh\nexec redis-server".to_vec());
        assert_eq!(script.build().name(), format!("sha256-{}", script.sha256()));
    }

    #[test]
    fn a_name_that_is_not_of_a_build_becomes_no_file() {
        for name in ["", "build-id-", "build-id-../../etc/passwd", "sha256-zz", "build-id-abc", "build-id-0011", "x"] {
            assert_eq!(Build::parse(name), None, "{name}");
        }
        assert!(Build::parse("build-id-a50d6825e71f1473").is_some());
    }

    #[test]
    fn a_program_that_is_too_large_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(PROGRAM_BYTES_MAX + 1).unwrap();
        assert!(Program::read(file.path()).err().unwrap().to_string().contains("256 MiB"));
    }

    /// The head of this test's own program and its tables of sections, whose fields are what a hostile file would
    /// change.
    fn small() -> Vec<u8> {
        let mut bytes = own();
        bytes.truncate(64 << 10);
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn a_hostile_file_ends_nothing(
            changes in proptest::collection::vec((0..4096_usize, any::<u8>()), 1..40),
            length in 0..(64_usize << 10),
        ) {
            let mut bytes = small();
            for (at, byte) in changes {
                if let Some(place) = bytes.get_mut(at) {
                    *place = byte;
                }
            }
            look(bytes.clone());
            bytes.truncate(length);
            look(bytes);
        }

        #[test]
        fn a_file_of_any_bytes_ends_nothing(mut bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            look(bytes.clone());
            // The magic of ELF, 64 bits, little endian.
            bytes.splice(..bytes.len().min(7), *b"\x7FELF\x02\x01\x01");
            look(bytes);
        }
    }

    /// Fields of the header and of the tables, in a whole program: other bits in each of the first 64 bytes, and in the
    /// tables of segments and of sections.
    #[test]
    fn a_whole_program_with_changed_tables_ends_nothing() {
        let whole = own();
        let sections = u64::from_le_bytes(whole[0x28..0x30].try_into().unwrap()) as usize;
        let places =
            (16..64).chain((64..700).step_by(9)).chain((sections..whole.len().min(sections + 2000)).step_by(41));
        for at in places {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xFF;
            look(bytes);
        }
    }
}
