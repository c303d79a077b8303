//! `xtask dist`: what users install, for each architecture, with checksums.
//!
//! ```text
//!   cargo-zigbuild, for glibc 2.31 ──▶ programs ──▶ a tree as under / ──▶ remora-V-linux-ARCH.tar.gz
//!   man pages, completions, units ──────────────────────┘      ├──nfpm──▶ remora, remora-module: .deb, .rpm, .apk
//!                                                              └buildah─▶ remora-V-ARCH.oci.tar, an image
//!   cargo-sbom ──▶ remora-V.cdx.json, remora-module-V.cdx.json            SHA256SUMS, of everything
//!   deploy/kubernetes ──▶ remora-V-kubernetes.tar.gz      the checksums of the archives ──▶ remora.rb, for Homebrew
//!   deploy/chart/remora, with the version ──▶ remora-V-chart.tgz, for Helm
//! ```
//!
//! - [`build`]: programs that run on older systems than this one. [`check_needs`]: what a program asks of a system.
//! - [`plant`]: the files as they are installed. [`Package`]: packages of these files.
//!
//! `xtask release` is everything of a release but publishing it.
//!
//! `dev/lab/dist/tools` gets the programs that this one calls, into `.cache/dist`.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use object::elf::{DT_NEEDED, FileHeader64};
use object::read::elf::{Dyn, FileHeader};
use object::{Endianness, SectionIndex, StringTable};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::generate;
use crate::process::{cargo, said, succeed};
use remora_agent::args::Generated;
use remora_bench::sync::Result;

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
        let programs = build(architecture)?;
        let tree = tempfile::tempdir()?;
        plant(&programs, tree.path())?;
        let name = format!("remora-{version}-linux-{}", architecture.name());
        archive(tree.path(), &out.join(format!("{name}.tar.gz")), &name, &date)?;
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
    let name = format!("remora-{version}-kubernetes");
    archive(Path::new("deploy/kubernetes"), &out.join(format!("{name}.tar.gz")), &name, &date)?;
    chart(Path::new("deploy/chart/remora"), &out.join(format!("remora-{version}-chart.tgz")), version, &date)?;
    let formula = formula(version, env!("CARGO_PKG_REPOSITORY"), &sums(out)?);
    fs::write(out.join("remora.rb"), formula)?;
    fs::write(out.join("SHA256SUMS"), sums(out)?)?;
    print!("{}", fs::read_to_string(out.join("SHA256SUMS"))?);
    Ok(())
}

/// Packs a folder; in the archive it has that name.
fn archive(tree: &Path, file: &Path, name: &str, date: &str) -> Result<()> {
    let (rename, date) = (format!("s,^\\.,{name},"), format!("--mtime=@{date}"));
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "--numeric-owner", "--sort=name", &date, "--transform", &rename, "-czf"]);
    succeed(tar.arg(file).arg("-C").arg(tree).arg("."))
}

/// Packs the chart as `helm package` does, with this version.
fn chart(folder: &Path, file: &Path, version: &str, date: &str) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    succeed(Command::new("cp").arg("-r").arg(folder.join(".")).arg(scratch.path()))?;
    let about = scratch.path().join("Chart.yaml");
    let text = fs::read_to_string(&about)?;
    let mut of_version = text.clone();
    for key in ["version", "appVersion"] {
        of_version = of_version.replace(&format!("\n{key}: 0.0.0\n"), &format!("\n{key}: {version}\n"));
    }
    if of_version.matches(&format!(": {version}\n")).count() != 2 {
        return Err(format!("{} has another version than 0.0.0", folder.display()).into());
    }
    fs::write(about, of_version)?;
    archive(scratch.path(), file, "remora", date)
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

/// The formula for Homebrew on Linux, with the archives whose checksums are there.
fn formula(version: &str, repository: &str, sums: &str) -> String {
    let mut archives = String::new();
    for (architecture, brew) in [(Architecture::X86, "on_intel"), (Architecture::Arm, "on_arm")] {
        let file = format!("remora-{version}-linux-{}.tar.gz", architecture.name());
        let Some(sum) = sums.lines().find_map(|line| line.strip_suffix(&file)) else { continue };
        archives.push_str(&format!(
            "    {brew} do\n      url \"{repository}/releases/download/v{version}/{file}\"\n      sha256 \"{}\"\n    end\n",
            sum.trim()
        ));
    }
    format!(
        r##"# Exact replicas of a Redis or Valkey server, from one snapshot. Linux only. `brew install --formula ./remora.rb`
class Remora < Formula
  desc "Exact replicas of a Redis or Valkey server, any number of them from one snapshot"
  homepage "{repository}"
  version "{version}"
  license any_of: ["Apache-2.0", "MIT"]
  depends_on :linux
  on_linux do
{archives}  end

  def install
    bin.install "usr/bin/remora"
    (lib/"remora").install "usr/lib/remora/libremora_module.so"
    man1.install Dir["usr/share/man/man1/*"]
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/remora --version")
  end
end
"##
    )
}

// Programs that run on any system with the C library of Debian 11 or a newer one, whatever this machine has.
//
// cargo-zigbuild links with zig, which knows the symbols of each version of the GNU C library. A program that is
// linked on Debian 12 in the usual way asks for version 2.34 and does not start on Debian 11.

/// The oldest GNU C library on which the programs run: that of Debian 11. Ubuntu 20.04 and Red Hat 9 have it or a newer
/// one.
const GLIBC: (u32, u32) = (2, 31);

/// The profile of Cargo.toml with which is built what users install.
const PROFILE: &str = "shipped";

/// The programs, as cargo names them.
const COMMAND: &str = "remora";

const MODULE: &str = "libremora_module.so";

/// A kind of processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Architecture {
    #[value(name = "x86_64")]
    X86,
    #[value(name = "aarch64")]
    Arm,
}

impl Architecture {
    const ALL: [Architecture; 2] = [Architecture::X86, Architecture::Arm];

    /// As the kernel and Rust call it.
    fn name(self) -> &'static str {
        match self {
            Architecture::X86 => "x86_64",
            Architecture::Arm => "aarch64",
        }
    }

    /// As Debian, Go and images of containers call it.
    fn debian(self) -> &'static str {
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
    fn compiler(self) -> Result<PathBuf> {
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
fn build(architecture: Architecture) -> Result<PathBuf> {
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
        check_needs(&folder.join(program), GLIBC)?;
    }
    if architecture.name() == std::env::consts::ARCH {
        said(Command::new(folder.join(COMMAND)).arg("--version"))?;
    }
    Ok(folder)
}

// The files of a release as they are installed, in a folder that stands for `/`.

/// Lays out everything.
fn plant(programs: &Path, tree: &Path) -> Result<()> {
    put(&programs.join(COMMAND), &tree.join("usr/bin").join(COMMAND), 0o755)?;
    // Redis loads no module that may not be executed.
    put(&programs.join(MODULE), &tree.join("usr/lib/remora").join(MODULE), 0o755)?;
    let man = tree.join("usr/share/man/man1");
    generate(Generated::Man { directory: man.clone() })?;
    for entry in fs::read_dir(man)? {
        succeed(Command::new("gzip").args(["-9", "-n"]).arg(entry?.path()))?;
    }
    for (shell, path) in [
        ("bash", "usr/share/bash-completion/completions/remora"),
        ("zsh", "usr/share/zsh/vendor-completions/_remora"),
        ("fish", "usr/share/fish/vendor_completions.d/remora.fish"),
    ] {
        // By this program, which has the same definitions: the one that was built may be for another processor.
        let output = Command::new(std::env::current_exe()?).args(["completions", shell]).output()?;
        if !output.status.success() {
            return Err(format!("the completions for {shell} cannot be made: {output:?}").into());
        }
        write(&tree.join(path), &output.stdout, 0o644)?;
    }
    for unit in fs::read_dir("deploy/systemd")? {
        let unit = unit?;
        put(&unit.path(), &tree.join("usr/lib/systemd/system").join(unit.file_name()), 0o644)?;
    }
    put(Path::new("deploy/packages/sysusers.conf"), &tree.join("usr/lib/sysusers.d/remora.conf"), 0o644)?;
    for package in ["remora", "remora-module"] {
        let pages = tree.join("usr/share/doc").join(package);
        put(Path::new("deploy/packages/copyright"), &pages.join("copyright"), 0o644)?;
        for page in ["LICENSE-APACHE", "LICENSE-MIT"] {
            put(Path::new(page), &pages.join(page), 0o644)?;
        }
    }
    for page in ["README.md", "CHANGELOG.md", "SECURITY.md"] {
        put(Path::new(page), &tree.join("usr/share/doc/remora").join(page), 0o644)?;
    }
    Ok(())
}

fn put(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let bytes = fs::read(from).map_err(|error| format!("{} cannot be read: {error}", from.display()))?;
    write(to, &bytes, mode)
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    fs::write(path, bytes)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

// Packages for Debian, Red Hat and apk, all from one description, by nfpm.

/// The kinds of package, as nfpm calls them.
const KINDS: [&str; 3] = ["deb", "rpm", "apk"];

/// A package of each kind.
struct Package {
    name: &'static str,
    /// The member of the workspace that it brings.
    member: &'static str,
    /// Its folders in the tree.
    paths: &'static [&'static str],
    /// Folders that belong to it, although they are empty or others write into them.
    folders: &'static [&'static str],
    /// Whether it makes the user of the units, and ends them when it is removed.
    scripts: bool,
    recommends: &'static [&'static str],
    suggests: &'static [&'static str],
    /// Debian's packages that it makes more useful.
    enhances: &'static str,
    about: &'static str,
}

const PACKAGES: [Package; 2] = [
    Package {
        name: "remora",
        member: "remora-agent",
        paths: &[
            "usr/bin",
            "usr/share/man",
            "usr/share/bash-completion",
            "usr/share/zsh",
            "usr/share/fish",
            "usr/share/doc/remora",
            "usr/lib/systemd",
            "usr/lib/sysusers.d",
        ],
        folders: &["/etc/remora"],
        scripts: true,
        recommends: &["nftables"],
        suggests: &["remora-module", "ibverbs-providers", "librdmacm1"],
        enhances: "redis-server, valkey-server",
        about: "exact replicas of a Redis or Valkey server, any number of them from one snapshot\n\
                remora source takes one snapshot of a server into memory that others may read.\n\
                remora replica agents read it by shared memory, RDMA or TCP, load it into their\n\
                servers, and hand these over to native replication at the exact offset.",
    },
    Package {
        name: "remora-module",
        member: "remora-module",
        paths: &["usr/lib/remora", "usr/share/doc/remora-module"],
        folders: &[],
        scripts: false,
        recommends: &[],
        suggests: &["remora"],
        enhances: "redis-server, valkey-server",
        about: "module of Remora for Redis and Valkey servers\n\
                With it a server's fork child writes values straight into the source's memory,\n\
                and a replica's server loads them from there. Load it with: loadmodule\n\
                /usr/lib/remora/libremora_module.so",
    },
];

impl Package {
    /// Makes the package of each kind.
    ///
    /// # Errors
    /// nfpm refuses the description, or a file cannot be read.
    fn build(&self, tree: &Path, out: &Path, version: &str, architecture: Architecture, date: &str) -> Result<()> {
        let date = said(Command::new("date").args(["-u", "-d", &format!("@{date}"), "+%Y-%m-%dT%H:%M:%SZ"]))?;
        let description = self.description(tree, version, architecture, &date)?;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("nfpm.yaml");
        // YAML contains JSON.
        fs::write(&path, serde_json::to_vec(&description)?)?;
        for kind in KINDS {
            let mut make = Command::new(Path::new(TOOLS).join("python/bin/nfpm"));
            make.arg("package").arg("--config").arg(&path).args(["--packager", kind, "--target"]).arg(out);
            succeed(&mut make)?;
        }
        Ok(())
    }

    /// The description that nfpm reads.
    fn description(&self, tree: &Path, version: &str, architecture: Architecture, date: &str) -> Result<Value> {
        let (major, minor) = GLIBC;
        let mut description = json!({
            "name": self.name,
            "arch": architecture.debian(),
            "platform": "linux",
            "version": version,
            "release": "1",
            "section": "database",
            "priority": "optional",
            "maintainer": "The Remora authors <remora@localhost>",
            "license": "Apache-2.0 OR MIT",
            "description": self.about,
            "mtime": date,
            "disable_globbing": true,
            "contents": self.contents(tree)?,
            "deb": { "compression": "xz", "fields": { "Enhances": self.enhances } },
            "overrides": {
                "deb": {
                    "depends": [format!("libc6 (>= {major}.{minor})")],
                    "recommends": self.recommends,
                    "suggests": self.suggests,
                },
                "rpm": { "depends": [format!("glibc >= {major}.{minor}")], "recommends": self.recommends },
                "apk": { "depends": [format!("glibc>={major}.{minor}")] },
            },
        });
        if self.scripts {
            let script = |name: &str| std::path::absolute(Path::new("deploy/packages").join(name));
            description["scripts"] = json!({
                "postinstall": script("after-install")?,
                "preremove": script("before-remove")?,
                "postremove": script("after-remove")?,
            });
        }
        Ok(description)
    }

    /// Each file for itself: a folder that other packages have too belongs to none of ours.
    fn contents(&self, tree: &Path) -> Result<Vec<Value>> {
        let root = json!({ "owner": "root", "group": "root", "mode": 0o755 });
        let mut contents: Vec<Value> =
            self.folders.iter().map(|folder| json!({ "dst": folder, "type": "dir", "file_info": root })).collect();
        for path in self.paths {
            for file in files(&tree.join(path))? {
                let mode = fs::metadata(&file)?.permissions().mode() & 0o777;
                let installed = Path::new("/").join(file.strip_prefix(tree)?);
                contents.push(json!({
                    "src": file,
                    "dst": installed,
                    "file_info": { "owner": "root", "group": "root", "mode": mode },
                }));
            }
        }
        Ok(contents)
    }
}

/// All files below a folder, in the order of their names.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).map_err(|error| format!("{} cannot be read: {error}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(files(&entry.path())?);
        } else {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
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
fn check_needs(program: &Path, glibc: (u32, u32)) -> Result<()> {
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

// `xtask release`: everything of a release but publishing it.
//
// ```text
//   clean tree? newer version? changes written down? ──▶ programs that dist needs ──▶ .ci/run
//     ──▶ version in Cargo.toml and both lock files, CHANGELOG: a date ──▶ commit and tag ──▶ xtask dist
// ```
//
// A failure before the commit leaves all files as they were.

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct ReleaseOptions {
    /// The new version: three numbers with points between them.
    version: String,
    /// Do not run all checks and tests first: they passed on this very commit.
    #[arg(long)]
    checked: bool,
    #[command(flatten)]
    dist: Options,
}

/// The heading of changes that are in no release.
const UNRELEASED: &str = "## Unreleased";

/// The files that a release changes.
const FILES: [&str; 4] = ["CHANGELOG.md", "Cargo.toml", "Cargo.lock", "dev/fuzz/Cargo.lock"];

/// The host of a repository that nobody has named yet.
const UNKNOWN_FORGE: &str = "forge.example";

pub(crate) fn run_release(options: &ReleaseOptions) -> Result<()> {
    let changed = said(Command::new("git").args(["status", "--porcelain"]))?;
    if !changed.is_empty() {
        return Err(format!("commit or remove these first:\n{changed}").into());
    }
    let (new, old) = (&options.version, env!("CARGO_PKG_VERSION"));
    if numbers(new)? <= numbers(old)? {
        return Err(format!("{new} is not newer than {old}").into());
    }
    let name = format!("v{new}");
    if !said(Command::new("git").args(["tag", "--list", &name]))?.is_empty() {
        return Err(format!("the tag {name} is there already: take another version").into());
    }
    if env!("CARGO_PKG_REPOSITORY").contains(UNKNOWN_FORGE) {
        let text = "write the address of the repository into Cargo.toml first (repository in [workspace.package]): \
            the crates, the formula for Homebrew and cargo binstall have it";
        return Err(text.into());
    }
    let today = said(Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    // All that can be refused is refused before hours of checks.
    let written = || -> Result<[String; 2]> {
        let changes = dated(&fs::read_to_string("CHANGELOG.md")?, new, &today)?;
        Ok([changes, versioned(&fs::read_to_string("Cargo.toml")?, old, new)?])
    };
    written()?;
    succeed(Command::new("dev/lab/setup/setup").arg("--dist"))?;
    if !options.checked {
        succeed(&mut Command::new(".ci/run"))?;
    }
    if let Err(error) = commit(new, written()?) {
        let restored = succeed(Command::new("git").args(["checkout", "--quiet", "--"]).args(FILES));
        let state = if restored.is_ok() { "is as it was" } else { "has changed files" };
        return Err(format!("{error}; the tree {state}").into());
    }
    succeed(Command::new("git").args(["tag", "--annotate", "--message", &format!("Remora {new}"), &name]))?;
    // By a build of the new version: this program has the old one's.
    let mut make = cargo();
    make.args(["run", "--quiet", "--locked", "-p", "xtask", "--", "dist"]).args(options.dist.arguments());
    succeed(&mut make)
        .map_err(|error| format!("{error}; the commit and {name} stay: call xtask dist when this is mended"))?;
    println!(
        "tagged {name}; to publish it: push the branch and the tag, and upload what is in {}",
        options.dist.out().display()
    );
    Ok(())
}

/// Writes the new version and its changes down, and commits them.
fn commit(new: &str, [changes, manifest]: [String; 2]) -> Result<()> {
    fs::write("CHANGELOG.md", changes)?;
    fs::write("Cargo.toml", manifest)?;
    for manifest in ["Cargo.toml", "dev/fuzz/Cargo.toml"] {
        succeed(cargo().args(["update", "--quiet", "--workspace", "--offline", "--manifest-path", manifest]))?;
    }
    succeed(Command::new("git").args(["commit", "--quiet", "--message", &format!("release: {new}"), "--"]).args(FILES))
}

/// The three numbers of a version.
fn numbers(version: &str) -> Result<[u64; 3]> {
    let parts: Vec<u64> = version
        .split('.')
        .map(str::parse)
        .collect::<std::result::Result<_, _>>()
        .map_err(|_| format!("{version} is not a version: three numbers with points between them"))?;
    let count = parts.len();
    parts.try_into().map_err(|_| format!("{version} has {count} numbers: a version has three").into())
}

/// The changes, with those that were in no release under this version.
fn dated(changes: &str, version: &str, date: &str) -> Result<String> {
    let (before, after) = changes.split_once(UNRELEASED).ok_or("CHANGELOG.md has no section of unreleased changes")?;
    let section = after.split("\n## ").next().unwrap_or_default();
    if section.trim().is_empty() {
        return Err("CHANGELOG.md has no unreleased changes".into());
    }
    Ok(format!("{before}{UNRELEASED}\n\n## {version} ({date}){after}"))
}

/// The workspace's manifest with the new version, also where crates that can be published name each other.
fn versioned(manifest: &str, old: &str, new: &str) -> Result<String> {
    let (from, to) =
        (format!("[workspace.package]\nversion = \"{old}\""), format!("[workspace.package]\nversion = \"{new}\""));
    if !manifest.contains(&from) {
        return Err(format!("Cargo.toml does not say that the version is {old}").into());
    }
    let manifest = manifest.replacen(&from, &to, 1);
    let (from, to) = (format!("\", version = \"{old}\" }}"), format!("\", version = \"{new}\" }}"));
    let line = |line: &str| if line.starts_with("remora-") { line.replace(&from, &to) } else { line.to_owned() };
    Ok(manifest.lines().map(line).collect::<Vec<_>>().join("\n") + "\n")
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

    #[test]
    fn the_formula_has_the_archives_that_were_made_with_their_checksums() {
        let sums = "ab  remora-1.2.3-linux-x86_64.tar.gz\ncd  remora-1.2.3-linux-aarch64.tar.gz\nef  other\n";
        let both = formula("1.2.3", "https://forge/remora", sums);
        let url = "url \"https://forge/remora/releases/download/v1.2.3/remora-1.2.3-linux-x86_64.tar.gz\"";
        assert!(both.contains(url) && both.contains("sha256 \"ab\"") && both.contains("sha256 \"cd\""), "{both}");
        let one = formula("1.2.3", "https://forge/remora", sums.lines().next().unwrap());
        assert!(one.contains("on_intel") && !one.contains("on_arm"), "{one}");
    }

    /// Helm wants the chart's name as the folder, and takes the version from the file in it.
    #[test]
    fn the_charts_archive_has_its_folder_and_the_version() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("chart.tgz");
        chart(&crate_root().join("../../deploy/chart/remora"), &file, "1.2.3", "1700000000").unwrap();
        let mut read = Command::new("tar");
        let about = said(read.arg("-xzOf").arg(&file).args(["remora/Chart.yaml"])).unwrap();
        assert!(about.contains("\nversion: 1.2.3\nappVersion: 1.2.3\n"), "{about}");
        let names = said(Command::new("tar").arg("-tzf").arg(&file)).unwrap();
        for name in ["values.yaml", "values.schema.json", "templates/primary.yaml", "templates/_helpers.tpl"] {
            assert!(names.lines().any(|line| line == format!("remora/{name}")), "{name} is not in\n{names}");
        }
    }

    /// `cargo binstall` finds what is packed here.
    #[test]
    fn the_archive_has_the_name_that_the_agents_manifest_gives() {
        let manifest = fs::read_to_string(crate_root().join("../../agent/Cargo.toml")).unwrap();
        let name = "remora-{ version }-linux-{ target-arch }";
        for line in [format!("/v{{ version }}/{name}.tar.gz\""), format!("bin-dir = \"{name}/usr/bin/{{ bin }}")] {
            assert!(manifest.contains(&line), "{line}");
        }
    }

    fn crate_root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR"))
    }

    /// A tree with one file in each folder of each package, and one that belongs to no package.
    fn tree() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        let paths = PACKAGES.iter().flat_map(|package| package.paths).copied();
        for path in paths.chain(["usr/share/other"]) {
            fs::create_dir_all(tree.path().join(path).join("deep")).unwrap();
            fs::write(tree.path().join(path).join("deep/file"), path).unwrap();
        }
        tree
    }

    #[test]
    fn no_file_is_in_two_packages_and_only_those_of_their_folders_are_in_any() {
        let tree = tree();
        let mut installed = Vec::new();
        for package in &PACKAGES {
            for content in package.contents(tree.path()).unwrap() {
                installed.push(content["dst"].as_str().unwrap().to_owned());
            }
        }
        let count = installed.len();
        installed.sort();
        installed.dedup();
        assert_eq!(installed.len(), count);
        assert!(installed.contains(&"/usr/lib/remora/deep/file".to_owned()), "{installed:?}");
        assert!(!installed.iter().any(|path| path.contains("other")), "{installed:?}");
    }

    #[test]
    fn a_package_asks_for_the_c_library_with_which_it_was_linked_and_its_scripts_are_there() {
        let tree = tree();
        for package in &PACKAGES {
            let description = package.description(tree.path(), "7.0.1", Architecture::Arm, "x").unwrap();
            assert_eq!(description["arch"], "arm64");
            assert_eq!(description["overrides"]["deb"]["depends"][0], "libc6 (>= 2.31)");
            assert_eq!(description["overrides"]["rpm"]["depends"][0], "glibc >= 2.31");
            if package.scripts {
                let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/packages");
                for script in description["scripts"].as_object().unwrap().values() {
                    let name = Path::new(script.as_str().unwrap()).file_name().unwrap();
                    let mode = fs::metadata(folder.join(name)).unwrap().permissions().mode();
                    assert_eq!(mode & 0o111, 0o111, "{script}");
                }
            }
        }
    }

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
        assert!(check_needs(&program, (2, 3)).is_err());
    }

    #[test]
    fn a_file_that_is_not_a_program_is_refused() {
        assert!(read(b"#!/bin/sh\n").is_err());
        assert!(read(&[0x7f, b'E', b'L', b'F']).is_err());
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert!(numbers("0.10.0").unwrap() > numbers("0.9.9").unwrap());
        for wrong in ["1.2", "1.2.3.4", "v1.2.3", "1.2.x", ""] {
            assert!(numbers(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn unreleased_changes_get_the_version_and_leave_an_empty_section() {
        let changes = "# Changelog\n\n## Unreleased\n\n- a change\n\n## 0.1.0 (2026-01-01)\n\n- older\n";
        let dated = dated(changes, "0.2.0", "2026-11-26").unwrap();
        let wanted =
            "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-11-26)\n\n- a change\n\n## 0.1.0 (2026-01-01)\n\n- older\n";
        assert_eq!(dated, wanted);
        assert!(super::dated(&dated, "0.3.0", "2026-11-27").is_err(), "nothing is left");
        assert!(super::dated("# Changelog\n", "0.3.0", "2026-11-27").is_err());
    }

    #[test]
    fn the_version_stands_in_the_workspaces_manifest_and_with_the_crates_that_can_be_published() {
        let manifest = include_str!("../../../Cargo.toml");
        let new = versioned(manifest, env!("CARGO_PKG_VERSION"), "77.0.1").unwrap();
        assert!(new.contains("\nversion = \"77.0.1\"\n"));
        assert!(new.contains("\nremora-redis = { path = \"redis\", version = \"77.0.1\" }\n"));
        assert_eq!(new.matches("77.0.1").count(), 8);
        assert_eq!(new.lines().count(), manifest.lines().count());
        assert!(versioned(&new, env!("CARGO_PKG_VERSION"), "78.0.0").is_err());
    }
}
