//! What a test needs of its machine, and what happens if the machine lacks it.
//!
//! On a developer's machine the test prints what is missing and how to get it, and is skipped. Under `CI=true` a
//! skipped test is a failure: a green run there means that every test ran.
//!
//! ```no_run
//! # use remora_lab::{Kind, require};
//! let Some(kind) = require::valkey() else { return };
//! ```

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::net;
use crate::rdma::RdmaVm;
use crate::scratch::{add, this_test};
use crate::server::Kind;

/// Redis 7.
pub fn redis() -> Option<Kind> {
    kind(Kind::Redis7)
}

/// Valkey 9.1.
pub fn valkey() -> Option<Kind> {
    kind(Kind::Valkey9)
}

/// Every kind of server that is installed. A missing kind is reported as skipped.
pub fn kinds() -> Vec<Kind> {
    Kind::ALL.into_iter().filter_map(kind).collect()
}

/// The given kind of server.
pub fn kind(kind: Kind) -> Option<Kind> {
    match kind.binary() {
        Ok(_) => Some(kind),
        Err(error) => skip(&error.to_string()),
    }
}

/// Root rights.
pub fn root() -> Option<()> {
    if rustix::process::geteuid().is_root() { Some(()) } else { skip("needs root; run the tests as root or by sudo") }
}

/// File systems of this process: root, and the kernel's FUSE.
pub fn fuse() -> Option<()> {
    root()?;
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        Ok(_) => Some(()),
        Err(error) => skip(&format!("needs /dev/fuse ({error}); load the kernel's module `fuse`")),
    }
}

/// Overlays of directories: root, and the kernel's overlay file system.
pub fn overlay() -> Option<()> {
    root()?;
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    match known.split_whitespace().any(|word| word == "overlay") {
        true => Some(()),
        false => skip("needs overlays; load the kernel's module `overlay`"),
    }
}

/// File systems of this process by io_uring: the kernel has it, and allows it for as long as the value lives.
pub fn fuse_ring() -> Option<RingAllowed> {
    fuse()?;
    match RingAllowed::new() {
        Ok(allowed) => Some(allowed),
        Err(why) => skip(&format!("needs FUSE over io_uring ({why}): Linux 6.14, and root may allow it")),
    }
}

/// Loop devices with ext4: root, `losetup`, `mkfs.ext4`, `e2fsck` and `fstrim`, and a kernel that has both.
pub fn loop_devices() -> Option<()> {
    root()?;
    let has = |program: &str| {
        ["/usr/sbin", "/sbin", "/usr/bin"].iter().any(|folder| Path::new(folder).join(program).exists())
    };
    if let Some(missing) = ["losetup", "mkfs.ext4", "e2fsck", "fstrim"].into_iter().find(|program| !has(program)) {
        return skip(&format!("needs {missing}: Debian has it in util-linux, mount or e2fsprogs"));
    }
    if Path::new("/dev/loop-control").exists() {
        Some(())
    } else {
        skip("needs loop devices; load the kernel's module `loop`")
    }
}

/// Network namespaces: root, the `ip` program, and a kernel that allows them.
pub fn namespaces() -> Option<()> {
    root()?;
    match net::Net::new() {
        Ok(_) => Some(()),
        Err(error) => skip(&error.to_string()),
    }
}

/// Rate limits in a namespace: besides namespaces, the `tc` program and the kernel's token bucket.
pub fn shaping() -> Option<()> {
    namespaces()?;
    probe(|host| host.shape(net::Shape::rate(1 << 20)))
}

/// Loss in a namespace: besides namespaces, the `nft` program and the kernel's random numbers.
pub fn loss() -> Option<()> {
    namespaces()?;
    probe(|host| host.lossy(net::Loss::percent(1.0).unwrap_or_default()))
}

/// Delays in a namespace: besides namespaces, the kernel's `netem`. The machine of [`rdma_vm`] has it.
pub fn delay() -> Option<()> {
    namespaces()?;
    probe(|host| host.shape(net::Shape { rate: None, delay: Some(std::time::Duration::from_millis(1)) }))
}

/// iperf3.
pub fn iperf3() -> Option<()> {
    runs("iperf3")
}

/// Prometheus and promtool.
pub fn prometheus() -> Option<()> {
    for name in ["prometheus", "promtool"] {
        if let Err(error) = crate::browser::prometheus_program(name) {
            return skip(&error.to_string());
        }
    }
    Some(())
}

/// A browser.
pub fn browser() -> Option<()> {
    match crate::browser::program() {
        Ok(_) => Some(()),
        Err(error) => skip(&error.to_string()),
    }
}

/// fio.
pub fn fio() -> Option<()> {
    runs("fio")
}

/// Redis's load generator. It comes with Redis.
pub fn redis_benchmark() -> Option<()> {
    runs("redis-benchmark")
}

/// tcpdump, which records the packets on a network device.
pub fn tcpdump() -> Option<()> {
    runs("tcpdump")
}

/// Clients of NBD: libnbd's, QEMU's, and fio with its engine for NBD.
pub fn nbd_clients() -> Option<()> {
    ["nbdinfo", "nbdcopy", "qemu-img", "qemu-io", "fio"].into_iter().try_for_each(runs)?;
    let engines = std::process::Command::new("fio").arg("--enghelp").output();
    let has_nbd =
        engines.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).lines().any(|l| l.trim() == "nbd"));
    if has_nbd { Some(()) } else { skip("needs fio with its engine for NBD, as Debian builds it") }
}

/// The checker of systemd's units.
pub fn systemd_analyze() -> Option<()> {
    runs("systemd-analyze")
}

fn runs(program: &str) -> Option<()> {
    let found = std::process::Command::new(program).arg("--version").output();
    let found = found.is_ok_and(|output| output.status.success());
    if found { Some(()) } else { skip(&format!("needs {program}; run `make setup`")) }
}

fn probe(what: impl FnOnce(&net::Host) -> crate::Result<()>) -> Option<()> {
    match net::Net::new().and_then(|net| what(&net.host("probe")?)) {
        Ok(()) => Some(()),
        Err(error) => skip(&error.to_string()),
    }
}

/// The virtual machine with RDMA devices: an x86-64 machine with QEMU. Prepares it, which takes a while the first time.
pub fn rdma_vm() -> Option<RdmaVm> {
    match RdmaVm::ready() {
        Ok(machine) => Some(machine),
        Err(error) => skip(&error.to_string()),
    }
}

/// Reports that a test is skipped. With `CI=true` the test fails instead.
pub fn skip<T>(why: &str) -> Option<T> {
    let test = this_test();
    assert!(!in_ci(), "{test} cannot run, and with CI=true that is a failure: {why}");
    add(&format!("SKIPPED: {test}: {why}"));
    None
}

fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true" || value == "1")
}

// The kernel's setting that allows FUSE over io_uring. It is off unless an administrator switches it on.
//
// Tests of several processes need it at a time. Each holds a shared lock of one file, which also has the setting as it
// was before the first of them. A value that gets an exclusive lock is the first, or the last.

/// FUSE over io_uring is allowed on this machine. When the last of these values is dropped, the setting is as before.
#[derive(Debug)]
pub struct RingAllowed {
    /// The former setting, with a shared lock.
    former: File,
    setting: PathBuf,
}

const SETTING: &str = "/sys/module/fuse/parameters/enable_uring";

/// The file with the former setting, in the folder for temporary files.
const FORMER: &str = "remora-lab-fuse-enable_uring";

/// 2: io_uring is forbidden to all processes.
const FORBIDDEN: &str = "/proc/sys/kernel/io_uring_disabled";

impl RingAllowed {
    /// Allows it.
    ///
    /// # Errors
    /// The kernel does not have it, or this process may not change the setting.
    pub fn new() -> io::Result<RingAllowed> {
        if fs::read_to_string(FORBIDDEN).is_ok_and(|value| value.trim() == "2") {
            return Err(io::Error::other(format!("{FORBIDDEN} is 2")));
        }
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{SETTING}: {error}"));
        RingAllowed::with(Path::new(SETTING), &std::env::temp_dir().join(FORMER)).map_err(named)
    }

    fn with(setting: &Path, former: &Path) -> io::Result<RingAllowed> {
        loop {
            let mut file = File::options().read(true).write(true).create(true).truncate(false).open(former)?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                // A process that was killed has left the former setting there.
                if file.metadata()?.len() == 0 {
                    write!(file, "{}", fs::read_to_string(setting)?.trim())?;
                }
                fs::write(setting, "Y")?;
            }
            flock(&file, FlockOperation::LockShared)?;
            // The last one may have put the former setting back just before.
            if fs::read_to_string(setting)?.trim() == "Y" {
                return Ok(RingAllowed { former: file, setting: setting.into() });
            }
        }
    }

    fn put_back(&mut self) -> io::Result<()> {
        if flock(&self.former, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(()); // others need it
        }
        let mut setting = String::new();
        self.former.rewind()?;
        self.former.read_to_string(&mut setting)?;
        fs::write(&self.setting, setting)?;
        self.former.set_len(0)
    }
}

impl Drop for RingAllowed {
    fn drop(&mut self) {
        let _ = self.put_back(); // the setting is harmless, and the next test puts it back
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_setting_is_as_before_after_the_last_also_if_one_was_killed() {
        let folder = tempfile::tempdir().unwrap();
        let (setting, former) = (folder.path().join("setting"), folder.path().join("former"));
        fs::write(&setting, "N\n").unwrap();
        let is = || fs::read_to_string(&setting).unwrap().trim().to_owned();
        let [one, two] = [(); 2].map(|()| RingAllowed::with(&setting, &former).unwrap());
        assert_eq!(is(), "Y");
        drop(one);
        assert_eq!(is(), "Y", "another one needs it");
        drop(two);
        assert_eq!(is(), "N");
        // What a killed process leaves.
        fs::write(&former, "N").unwrap();
        fs::write(&setting, "Y").unwrap();
        drop(RingAllowed::with(&setting, &former).unwrap());
        assert_eq!(is(), "N");
    }
}
