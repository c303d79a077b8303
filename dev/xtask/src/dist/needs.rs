//! What a program asks of the system on which it starts: libraries, and versions of the C library.

use std::fs;
use std::path::Path;

use object::elf::{DT_NEEDED, FileHeader64};
use object::read::elf::{Dyn, FileHeader};
use object::{Endianness, SectionIndex, StringTable};
use remora_bench::sync::Result;

/// What a program needs before its first instruction.
#[derive(Debug, Default, PartialEq, Eq)]
struct Needs {
    libraries: Vec<String>,
    /// The newest version of the GNU C library of which it uses a symbol.
    glibc: (u32, u32),
}

/// The libraries of the GNU C library: a program that needs only these runs wherever it is installed.
const OF_GLIBC: [&str; 7] =
    ["libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "ld-linux"];

/// Checks that a program runs with the C library of that version, and needs no other library.
///
/// # Errors
/// It does not; the message names the library or the version.
pub(super) fn check(program: &Path, glibc: (u32, u32)) -> Result<()> {
    let bytes = fs::read(program).map_err(|error| format!("{} cannot be read: {error}", program.display()))?;
    let needs = read(&bytes).map_err(|error| format!("{}: {error}", program.display()))?;
    for library in &needs.libraries {
        if !OF_GLIBC.iter().any(|known| library.starts_with(known)) {
            return Err(format!("{} needs {library}, which not every system has", program.display()).into());
        }
    }
    if needs.glibc > glibc {
        let ((major, minor), (wanted, least)) = (needs.glibc, glibc);
        return Err(format!(
            "{} needs the C library {major}.{minor}, and must run with {wanted}.{least}",
            program.display()
        )
        .into());
    }
    Ok(())
}

/// Reads what a program needs out of its file.
fn read(bytes: &[u8]) -> Result<Needs> {
    let header = FileHeader64::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let strings = |section: SectionIndex| -> Result<StringTable<'_>> { Ok(sections.strings(endian, bytes, section)?) };
    let mut needs = Needs::default();
    if let Some((entries, link)) = sections.dynamic(endian, bytes)? {
        let strings = strings(link)?;
        for entry in entries.iter().filter(|entry| entry.tag32(endian) == Some(DT_NEEDED)) {
            needs.libraries.push(String::from_utf8_lossy(entry.string(endian, strings)?).into_owned());
        }
    }
    if let Some((mut files, link)) = sections.gnu_verneed(endian, bytes)? {
        let strings = strings(link)?;
        while let Some((_, mut versions)) = files.next()? {
            while let Some(version) = versions.next()? {
                let name = String::from_utf8_lossy(version.name(endian, strings)?);
                needs.glibc = needs.glibc.max(glibc(&name).unwrap_or_default());
            }
        }
    }
    Ok(needs)
}

/// The version of the GNU C library in the name of a symbol's version; `None` for other libraries.
fn glibc(name: &str) -> Option<(u32, u32)> {
    let mut numbers = name.strip_prefix("GLIBC_")?.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn versions_of_the_c_library_are_compared_by_their_numbers() {
        assert!(glibc("GLIBC_2.4").unwrap() < glibc("GLIBC_2.31").unwrap());
        assert_eq!(glibc("GLIBC_2.2.5"), Some((2, 2)));
        for other in ["GCC_3.3", "GLIBC_PRIVATE", "GLIBCXX_3.4.11", ""] {
            assert_eq!(glibc(other), None, "{other}");
        }
    }

    #[test]
    fn this_test_program_needs_the_c_library_and_is_refused_where_it_is_older() {
        let program = std::env::current_exe().unwrap();
        let needs = read(&fs::read(&program).unwrap()).unwrap();
        assert!(needs.libraries.iter().any(|library| library == "libc.so.6"), "{needs:?}");
        assert!(needs.glibc > (2, 10), "{needs:?}");
        assert!(check(&program, (2, 3)).is_err());
    }

    #[test]
    fn a_file_that_is_not_a_program_is_refused() {
        assert!(read(b"#!/bin/sh\n").is_err());
        assert!(read(&[0x7f, b'E', b'L', b'F']).is_err());
    }
}
