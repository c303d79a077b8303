//! The memory of a process that runs a program: where the program is in it, and which parts of it are code.

// Stands alone: the finder asks it about a server that it has started, the module about its own process.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

/// The mappings of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Maps {
    mappings: Vec<Mapping>,
    /// Where the beginning of the program is.
    pub program: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    range: Range<u64>,
    is_readable: bool,
    is_writable: bool,
    is_code: bool,
}

impl Maps {
    /// Those of the process with this folder in `/proc`.
    ///
    /// # Errors
    /// The folder cannot be read: the process has ended, or belongs to another user.
    pub fn of(process: &Path) -> io::Result<Maps> {
        let program = fs::read_link(process.join("exe"))?;
        Ok(Maps::parse(&fs::read_to_string(process.join("maps"))?, &program.to_string_lossy()))
    }

    fn parse(text: &str, program: &str) -> Maps {
        let mut maps = Maps::default();
        for line in text.lines() {
            let mut words = line.splitn(6, ' ');
            let (Some(range), Some(rights), Some(offset)) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            let Some(range) = range.split_once('-').and_then(|(begin, end)| {
                Some(u64::from_str_radix(begin, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
            }) else {
                continue;
            };
            let path = words.nth(2).unwrap_or_default().trim_start();
            if path == program && u64::from_str_radix(offset, 16) == Ok(0) && maps.program.is_none() {
                maps.program = Some(range.start);
            }
            let has = |right| rights.contains(right);
            // Code of the program itself: of no library.
            let is_code = has('x') && path == program;
            maps.mappings.push(Mapping { range, is_readable: has('r'), is_writable: has('w'), is_code });
        }
        maps
    }

    /// Whether the program's own code is at that address.
    pub fn is_code(&self, address: u64) -> bool {
        self.mapping(address).is_some_and(|mapping| mapping.is_code)
    }

    /// Whether variables are at that address, and as many bytes behind it.
    pub fn is_data(&self, address: u64, bytes: u64) -> bool {
        let mut at = address;
        let Some(end) = address.checked_add(bytes) else { return false };
        // Initialized variables and others lie in mappings side by side.
        while let Some(mapping) = self.mapping(at).filter(|mapping| mapping.is_readable && mapping.is_writable) {
            if end <= mapping.range.end {
                return true;
            }
            at = mapping.range.end;
        }
        false
    }

    fn mapping(&self, address: u64) -> Option<&Mapping> {
        self.mappings.iter().find(|mapping| mapping.range.contains(&address))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const TEXT: &str = "\
55d0c0000000-55d0c0020000 r--p 00000000 fe:01 77   /usr/bin/a server (deleted)
55d0c0020000-55d0c0100000 r-xp 00020000 fe:01 77   /usr/bin/a server (deleted)
55d0c0100000-55d0c0110000 rw-p 00100000 fe:01 77   /usr/bin/a server (deleted)
55d0c0110000-55d0c0120000 rw-p 00000000 00:00 0 
7f0000000000-7f0000010000 r-xp 00000000 fe:01 78   /usr/lib/libc.so.6
nonsense
x-y rw-p";

    #[test]
    fn a_program_has_its_beginning_its_code_and_its_variables() {
        let maps = Maps::parse(TEXT, "/usr/bin/a server (deleted)");
        assert_eq!(maps.program, Some(0x55d0c0000000));
        assert!(maps.is_code(0x55d0c0020000) && !maps.is_code(0x55d0c0100000) && !maps.is_code(0x7f0000000000));
        assert!(maps.is_data(0x55d0c0100000, 0x20000) && !maps.is_data(0x55d0c0100000, 0x20001));
        assert!(!maps.is_data(0x55d0c0020000, 8) && !maps.is_data(u64::MAX, 8));
        assert_eq!(Maps::parse(TEXT, "/usr/bin/other").program, None);
    }

    #[test]
    fn this_process_is_found() {
        let maps = Maps::of(Path::new("/proc/self")).unwrap();
        assert!(maps.program.is_some());
    }
}
