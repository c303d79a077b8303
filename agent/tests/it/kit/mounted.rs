//! Directories at which something is mounted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use remora_lab::server::wait_until;
use rustix::mount::UnmountFlags;

use super::LONG;

/// A directory for a mount. No mount is left there.
pub(crate) struct Directory(pub(crate) String);

impl Directory {
    /// Makes it if it is missing. It may be there, and be what a killed process has left.
    pub(crate) fn new(path: String) -> Directory {
        let _ = fs::create_dir(&path);
        Directory(path)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &str {
        &self.0
    }

    /// A file in it.
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        Path::new(&self.0).join(name)
    }

    /// Unmounts it as an operator does. A process that another test starts at this moment holds this test's open
    /// files until it executes its program: so it is tried until no process uses it.
    #[track_caller]
    pub(crate) fn unmount(&self) {
        let unmount = || {
            let output = Command::new("umount").arg(&self.0).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            Ok(if output.status.success() { Ok(()) } else { Err(said) })
        };
        wait_until("it is unmounted", LONG, unmount).unwrap();
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&*self.0, UnmountFlags::DETACH); // usually nothing is mounted there any more
    }
}
