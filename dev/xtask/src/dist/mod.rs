//! `xtask dist`: what users install, for each architecture, with checksums.
//!
//! ```text
//!   cargo-zigbuild, for glibc 2.31 ──▶ programs ──▶ a tree as under / ──▶ remora-V-linux-ARCH.tar.gz
//!   man pages, completions, units ──────────────────────┘      ├──nfpm──▶ remora, remora-module: .deb, .rpm, .apk
//!                                                              └buildah─▶ remora-V-ARCH.oci.tar, an image
//!   cargo-sbom ──▶ remora-V.cdx.json, remora-module-V.cdx.json            SHA256SUMS, of everything
//! ```
//!
//! - [`build`]: programs that run on older systems than this one. [`needs`]: what a program asks of a system.
//! - [`tree`]: the files as they are installed. [`packages`]: packages of these files.
//!
//! `dev/lab/dist/tools` gets the programs that this one calls, into `.cache/dist`.

mod build;
mod needs;
mod packages;
mod tree;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use remora_bench::sync::Result;
use sha2::{Digest, Sha256};

use crate::process::{said, succeed};
use build::Architecture;
use packages::PACKAGES;

/// Where `dev/lab/dist/tools` puts the programs that are called here.
const TOOLS: &str = ".cache/dist";

/// Command-line arguments.
#[derive(Args, Debug)]
#[group(skip)] // `release` has these too, and clap would call both groups `Options`
pub(crate) struct Options {
    /// Where the results are put.
    #[arg(long, value_name = "FOLDER", default_value = "target/dist")]
    out: PathBuf,
    /// The architectures, with commas between them. Without it: all for which this machine has a compiler.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    architectures: Vec<Architecture>,
    /// Make no image for containers.
    #[arg(long)]
    no_image: bool,
}

impl Options {
    /// Where the results are put.
    pub(crate) fn out(&self) -> &Path {
        &self.out
    }

    /// The same options for another run of this program.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments = vec!["--out".into(), self.out.clone().into()];
        for architecture in &self.architectures {
            arguments.extend(["--architectures".into(), architecture.name().into()]);
        }
        if self.no_image {
            arguments.push("--no-image".into());
        }
        arguments
    }

    /// The architectures for which to build.
    fn architectures(&self) -> Result<Vec<Architecture>> {
        if !self.architectures.is_empty() {
            return Ok(self.architectures.clone());
        }
        let mut found = Vec::new();
        for architecture in Architecture::ALL {
            match architecture.compiler() {
                Ok(_) => found.push(architecture),
                Err(error) => eprintln!("dist: nothing for {}: {error}", architecture.name()),
            }
        }
        if found.is_empty() { Err("there is a compiler for no architecture".into()) } else { Ok(found) }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let out = &options.out;
    if out.exists() {
        fs::remove_dir_all(out)?;
    }
    fs::create_dir_all(out)?;
    let (version, date) = (env!("CARGO_PKG_VERSION"), said(Command::new("git").args(["log", "-1", "--format=%ct"]))?);
    for architecture in options.architectures()? {
        let programs = build::run(architecture)?;
        let tree = tempfile::tempdir()?;
        tree::plant(&programs, tree.path())?;
        archive(tree.path(), out, &format!("remora-{version}-linux-{}", architecture.name()), &date)?;
        for package in &PACKAGES {
            package.build(tree.path(), out, version, architecture, &date)?;
        }
        if !options.no_image {
            let image = out.join(format!("remora-{version}-{}.oci.tar", architecture.name()));
            let mut make = Command::new("dev/lab/dist/image");
            succeed(make.args([architecture.debian(), version, &date]).arg(tree.path()).arg(image))?;
        }
    }
    for package in &PACKAGES {
        fs::write(out.join(format!("{}-{version}.cdx.json", package.name)), bill(package.member)?)?;
    }
    fs::write(out.join("SHA256SUMS"), sums(out)?)?;
    print!("{}", fs::read_to_string(out.join("SHA256SUMS"))?);
    Ok(())
}

fn archive(tree: &Path, out: &Path, name: &str, date: &str) -> Result<()> {
    let (rename, date) = (format!("s,^\\.,{name},"), format!("--mtime=@{date}"));
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "--numeric-owner", "--sort=name", &date, "--transform", &rename, "-czf"]);
    succeed(tar.arg(out.join(format!("{name}.tar.gz"))).arg("-C").arg(tree).arg("."))
}

/// The crates of which a member of the workspace is made, as CycloneDX.
fn bill(member: &str) -> Result<String> {
    let program = Path::new(TOOLS).join("bin/cargo-sbom");
    let mut list = Command::new(program);
    said(list.args(["sbom", "--cargo-package", member, "--output-format", "cyclone_dx_json_1_6"]))
}

/// The checksums of all files in a folder, as `sha256sum --check` reads them.
fn sums(folder: &Path) -> Result<String> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        paths.push(entry?.path());
    }
    paths.sort();
    let mut lines = String::new();
    for path in paths {
        let sum: String = Sha256::digest(fs::read(&path)?).iter().map(|byte| format!("{byte:02x}")).collect();
        lines.push_str(&format!("{sum}  {}\n", path.file_name().unwrap_or_default().display()));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn a_release_passes_all_options_on() {
        for line in [
            &["dist", "--out", "else", "--architectures", "x86_64,aarch64", "--no-image"][..],
            &["dist", "--architectures", "aarch64"],
            &["dist"],
        ] {
            let first = Line::parse_from(line).options;
            let passed = [OsString::from("dist")].into_iter().chain(first.arguments());
            assert_eq!(format!("{:?}", Line::parse_from(passed).options), format!("{first:?}"));
        }
    }

    #[test]
    fn sha256sum_accepts_the_checksums_and_finds_a_file_that_was_changed() {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in [("b.deb", "two"), ("a.tar.gz", "one")] {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        let lines = sums(folder.path()).unwrap();
        assert!(lines.lines().next().unwrap().ends_with("  a.tar.gz"), "{lines}");
        fs::write(folder.path().join("SHA256SUMS"), &lines).unwrap();
        let check = || {
            let mut command = Command::new("sha256sum");
            command.args(["--check", "--status", "--strict", "SHA256SUMS"]).current_dir(folder.path());
            command.status().unwrap().success()
        };
        assert!(check());
        fs::write(folder.path().join("b.deb"), "too").unwrap();
        assert!(!check());
    }
}
