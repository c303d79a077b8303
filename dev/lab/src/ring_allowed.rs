//! The kernel's setting that allows FUSE over io_uring. It is off unless an administrator switches it on.
//!
//! Tests of several processes need it at a time. Each holds a shared lock of one file, which also has the setting as it
//! was before the first of them. A value that gets an exclusive lock is the first, or the last.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

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
