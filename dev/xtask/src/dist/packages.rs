//! Packages for Debian, Red Hat and apk, all from one description, by nfpm.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use remora_bench::sync::Result;
use serde_json::{Value, json};

use super::TOOLS;
use super::build::{Architecture, GLIBC};
use crate::process::{said, succeed};

/// The kinds of package, as nfpm calls them.
const KINDS: [&str; 3] = ["deb", "rpm", "apk"];

/// A package of each kind.
pub(super) struct Package {
    pub(super) name: &'static str,
    /// The member of the workspace that it brings.
    pub(super) member: &'static str,
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

pub(super) const PACKAGES: [Package; 2] = [
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
    pub(super) fn build(
        &self,
        tree: &Path,
        out: &Path,
        version: &str,
        architecture: Architecture,
        date: &str,
    ) -> Result<()> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

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
}
