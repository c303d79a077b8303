//! `xtask dist`: what users install: an archive and two Debian packages, with their checksums.
//!
//! ```text
//!   cargo build --release ──▶ a tree as under / ──▶ remora-V-ARCH.tar.gz
//!   man pages, completions ──┘        ├──────────▶ remora_V_ARCH.deb          the command, its units
//!                                     └──────────▶ remora-module_V_ARCH.deb   the module, for a server's `loadmodule`
//!                                                  SHA256SUMS
//! ```
//!
//! Packages are built by dpkg-deb, and the libraries that they depend on are found by dpkg-shlibdeps: a package fits
//! the release of the distribution on which it was built, and newer ones.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use remora_agent::args::Generated;
use remora_bench::sync::Result;
use sha2::{Digest, Sha256};

use crate::generate;
use crate::process::{cargo, said, succeed};

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Where the results are put.
    #[arg(long, value_name = "FOLDER", default_value = "target/dist")]
    out: PathBuf,
}

impl Options {
    /// Where the results are put.
    pub(crate) fn out(&self) -> &Path {
        &self.out
    }
}

/// The programs of the two packages, as built and as installed.
const PROGRAMS: [(&str, &str, u32); 2] =
    [("remora", "usr/bin/remora", 0o755), ("libremora_module.so", "usr/lib/remora/libremora_module.so", 0o644)];

/// A Debian package.
struct Package {
    name: &'static str,
    /// Its paths in the tree.
    paths: &'static [&'static str],
    /// The program whose libraries it depends on.
    program: &'static str,
    /// Further lines of its control file.
    fields: &'static str,
    about: &'static str,
    /// What is run after it was installed.
    after: Option<&'static str>,
}

const PACKAGES: [Package; 2] = [
    Package {
        name: "remora",
        paths: &["usr/bin", "usr/share", "lib/systemd"],
        program: "usr/bin/remora",
        fields: "Recommends: nftables\nSuggests: remora-module, ibverbs-providers, librdmacm1\n",
        about: "exact replicas of a Redis or Valkey server, any number of them from one snapshot\n \
                remora source lays one snapshot of a server into memory that others may read. remora\n \
                replica agents read it by shared memory, RDMA or TCP, load it into their servers, and\n \
                hand these over to native replication at the exact offset.\n",
        after: Some(AFTER),
    },
    Package {
        name: "remora-module",
        paths: &["usr/lib/remora"],
        program: "usr/lib/remora/libremora_module.so",
        fields: "Enhances: redis-server, valkey-server\n",
        about: "module of Remora for Redis and Valkey servers\n \
                With it a server's fork child writes values straight into the source's memory, and a\n \
                replica's server loads them from there. Load it with: loadmodule\n \
                /usr/lib/remora/libremora_module.so\n",
        after: None,
    },
];

/// Makes the user of the units. No unit is started or switched on.
const AFTER: &str = "\
#!/bin/sh
set -e
if [ \"$1\" = configure ] && ! getent passwd remora >/dev/null; then
    useradd --system --user-group --home-dir /var/lib/remora --no-create-home --shell /usr/sbin/nologin remora
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
fi
";

pub(crate) fn run(options: &Options) -> Result<()> {
    let words = "build --release --locked -p remora-agent -p remora-module --lib --bin remora";
    succeed(cargo().args(words.split(' ')))?;
    let made = make(&built(), &options.out)?;
    for path in made {
        println!("{}", path.display());
    }
    Ok(())
}

/// Where cargo puts a release.
fn built() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from).join("release")
}

/// Makes everything from the programs in that folder.
fn make(programs: &Path, out: &Path) -> Result<Vec<PathBuf>> {
    if out.exists() {
        fs::remove_dir_all(out)?;
    }
    fs::create_dir_all(out)?;
    let tree = tempfile::tempdir()?;
    plant(programs, tree.path())?;
    let (version, architecture) = (env!("CARGO_PKG_VERSION"), architecture()?);
    let mut made = vec![archive(tree.path(), out, &format!("remora-{version}-linux-{architecture}"))?];
    for package in &PACKAGES {
        made.push(package.build(tree.path(), out, version, &architecture)?);
    }
    let mut sums = String::new();
    for path in &made {
        let sum: String = Sha256::digest(fs::read(path)?).iter().map(|byte| format!("{byte:02x}")).collect();
        sums.push_str(&format!("{sum}  {}\n", path.file_name().unwrap_or_default().display()));
    }
    made.push(out.join("SHA256SUMS"));
    fs::write(out.join("SHA256SUMS"), sums)?;
    Ok(made)
}

/// Lays out everything as it is installed.
fn plant(programs: &Path, tree: &Path) -> Result<()> {
    for (built, installed, mode) in PROGRAMS {
        let to = tree.join(installed);
        put(&programs.join(built), &to, mode)?;
        succeed(Command::new("strip").arg("--strip-unneeded").arg(&to))?;
    }
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
        // By the program itself: so it is known to start.
        let output = Command::new(programs.join("remora")).args(["generate", "completions", shell]).output()?;
        if !output.status.success() {
            return Err(format!("remora generate completions {shell} failed: {output:?}").into());
        }
        write(&tree.join(path), &output.stdout)?;
    }
    for unit in fs::read_dir("deploy/systemd")? {
        let unit = unit?;
        put(&unit.path(), &tree.join("lib/systemd/system").join(unit.file_name()), 0o644)?;
    }
    let pages = tree.join("usr/share/doc/remora");
    for page in ["README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE-APACHE", "LICENSE-MIT"] {
        put(Path::new(page), &pages.join(page), 0o644)?;
    }
    Ok(())
}

/// The name of this machine's architecture in packages.
fn architecture() -> Result<String> {
    said(Command::new("dpkg").arg("--print-architecture"))
}

fn archive(tree: &Path, out: &Path, name: &str) -> Result<PathBuf> {
    let path = out.join(format!("{name}.tar.gz"));
    let rename = format!("s,^\\.,{name},");
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "--numeric-owner", "--sort=name", "--transform", &rename, "-czf"]);
    succeed(tar.arg(&path).arg("-C").arg(tree).arg("."))?;
    Ok(path)
}

impl Package {
    fn build(&self, tree: &Path, out: &Path, version: &str, architecture: &str) -> Result<PathBuf> {
        let root = tempfile::tempdir()?;
        for path in self.paths {
            let to = root.path().join(path);
            fs::create_dir_all(to.parent().unwrap_or(root.path()))?;
            succeed(Command::new("cp").args(["-r", "--"]).arg(tree.join(path)).arg(&to))?;
        }
        let bytes = size(root.path())?;
        let control = format!(
            "Package: {}\nVersion: {version}-1\nArchitecture: {architecture}\nSection: database\nPriority: optional\n\
             Maintainer: The Remora authors <remora@localhost>\nInstalled-Size: {}\nDepends: {}\n{}Description: {}",
            self.name,
            bytes.div_ceil(1024),
            libraries(&root.path().join(self.program), self.name, architecture)?,
            self.fields,
            self.about,
        );
        write(&root.path().join("DEBIAN/control"), control.as_bytes())?;
        if let Some(script) = self.after {
            let path = root.path().join("DEBIAN/postinst");
            write(&path, script.as_bytes())?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755))?;
        let path = out.join(format!("{}_{version}-1_{architecture}.deb", self.name));
        succeed(Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(root.path()).arg(&path))?;
        Ok(path)
    }
}

/// The packages of the libraries that a program is linked with.
fn libraries(program: &Path, package: &str, architecture: &str) -> Result<String> {
    // dpkg-shlibdeps works in the folder of a source package.
    let source = tempfile::tempdir()?;
    let control = format!("Source: {package}\n\nPackage: {package}\nArchitecture: {architecture}\n");
    write(&source.path().join("debian/control"), control.as_bytes())?;
    let mut find = Command::new("dpkg-shlibdeps");
    let output = find.current_dir(source.path()).args(["-O", "-e"]).arg(program).output()?;
    let text = String::from_utf8(output.stdout)?;
    let found = text.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    found.map(str::to_owned).ok_or_else(|| {
        format!(
            "dpkg-shlibdeps found no libraries of {}: {}",
            program.display(),
            String::from_utf8_lossy(&output.stderr)
        )
        .into()
    })
}

/// Bytes of all files below a folder.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        bytes += if entry.file_type()?.is_dir() { size(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(bytes)
}

fn put(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let bytes = fs::read(from).map_err(|error| format!("{} cannot be read: {error}", from.display()))?;
    write(to, &bytes)?;
    Ok(fs::set_permissions(to, fs::Permissions::from_mode(mode))?)
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    Ok(fs::write(path, bytes)?)
}
