//! Programs that run on any system with the C library of Debian 11 or a newer one, whatever this machine has, and what a
//! program asks of the system on which it starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;
use object::elf::{DT_NEEDED, FileHeader64};
use object::read::elf::{Dyn, FileHeader};
use object::{Endianness, SectionIndex, StringTable};
use remora_bench::sync::Result;

use super::TOOLS;
use crate::process::{cargo, said, succeed};

// Programs that run on any system with the C library of Debian 11 or a newer one, whatever this machine has.
//
// cargo-zigbuild links with zig, which knows the symbols of each version of the GNU C library. A program that is
// linked on Debian 12 in the usual way asks for version 2.34 and does not start on Debian 11.

/// The oldest GNU C library on which the programs run: that of Debian 11. Ubuntu 20.04 and Red Hat 9 have it or a newer
/// one.
pub(super) const GLIBC: (u32, u32) = (2, 31);

/// The profile of Cargo.toml with which is built what users install.
const PROFILE: &str = "shipped";

/// The programs, as cargo names them.
pub(super) const COMMAND: &str = "remora";

pub(super) const MODULE: &str = "libremora_module.so";

/// A kind of processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Architecture {
    #[value(name = "x86_64")]
    X86,
    #[value(name = "aarch64")]
    Arm,
}

impl Architecture {
    pub(super) const ALL: [Architecture; 2] = [Architecture::X86, Architecture::Arm];

    /// As the kernel and Rust call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Architecture::X86 => "x86_64",
            Architecture::Arm => "aarch64",
        }
    }

    /// As Debian, Go and images of containers call it.
    pub(super) fn debian(self) -> &'static str {
        match self {
            Architecture::X86 => "amd64",
            Architecture::Arm => "arm64",
        }
    }

    fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// The compiler that has a standard library for this architecture: the usual one, or Debian's.
    ///
    /// # Errors
    /// Neither has it; the message says how to get it.
    pub(super) fn compiler(self) -> Result<PathBuf> {
        let usual = std::env::var_os("RUSTC").map_or_else(|| "rustc".into(), PathBuf::from);
        let debian = std::path::absolute(Path::new(TOOLS).join("rust/rustc"))?;
        [usual, debian].into_iter().find(|compiler| self.has_library(compiler)).ok_or_else(|| {
            let triple = self.triple();
            format!("no compiler has a standard library for {triple}: call rustup target add {triple}").into()
        })
    }

    fn has_library(self, compiler: &Path) -> bool {
        let folder = said(Command::new(compiler).args(["--print", "target-libdir", "--target", &self.triple()]));
        folder.is_ok_and(|folder| Path::new(&folder).is_dir())
    }
}

/// Builds the command and the module, and returns the folder in which they are.
///
/// # Errors
/// The build fails, or a program asks for more than [`GLIBC`].
pub(super) fn run(architecture: Architecture) -> Result<PathBuf> {
    let tools = std::path::absolute(TOOLS)?.join("python");
    let mut build = Command::new(tools.join("bin/cargo-zigbuild"));
    build.args(["zigbuild", "--locked", "--profile", PROFILE, "-p", "remora-agent", "-p", "remora-module"]);
    build.args(["--lib", "--bin", COMMAND, "--target", &format!("{}.{}.{}", architecture.triple(), GLIBC.0, GLIBC.1)]);
    build.env("CARGO_ZIGBUILD_ZIG_PATH", tools.join("ziglang/zig")).env("RUSTC", architecture.compiler()?);
    build.env("CARGO", cargo().get_program());
    succeed(&mut build)?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let folder = target.join(architecture.triple()).join(PROFILE);
    for program in [COMMAND, MODULE] {
        check(&folder.join(program), GLIBC)?;
    }
    if architecture.name() == std::env::consts::ARCH {
        said(Command::new(folder.join(COMMAND)).arg("--version"))?;
    }
    Ok(folder)
}

// What a program asks of the system on which it starts: libraries, and versions of the C library.

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
