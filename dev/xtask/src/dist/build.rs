//! Programs that run on any system with the C library of Debian 11 or a newer one, whatever this machine has.
//!
//! cargo-zigbuild links with zig, which knows the symbols of each version of the GNU C library. A program that is
//! linked on Debian 12 in the usual way asks for version 2.34 and does not start on Debian 11.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;
use remora_bench::sync::Result;

use super::{TOOLS, needs};
use crate::process::{cargo, said, succeed};

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
        needs::check(&folder.join(program), GLIBC)?;
    }
    if architecture.name() == std::env::consts::ARCH {
        said(Command::new(folder.join(COMMAND)).arg("--version"))?;
    }
    Ok(folder)
}
