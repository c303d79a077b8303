//! Free space of a file system: whether something of a known length fits, before it is written.
// Stands alone: a disk is asked by several rooms.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::FsWord;

use crate::exit::Failure;
use remora_base::units::Size;

/// File systems that may keep bytes in less room than they have: btrfs, ZFS and bcachefs compress.
const COMPRESSING: [FsWord; 3] = [0x9123_683e, 0x2fc1_2fc1, 0xca45_1a4e];

/// XFS, where the copy of a file may share its blocks with the original.
const XFS: FsWord = 0x5846_5342;

/// Refuses to write this many bytes into a folder whose file system certainly has no room for them. `what`: that is
/// written.
///
/// # Errors
/// Its text has both figures. A file system that does not say what it has is not judged, nor is one that compresses.
pub fn check(what: &str, folder: &Path, bytes: u64) -> Result<(), Failure> {
    let Ok(room) = rustix::fs::statvfs(folder) else { return Ok(()) };
    if rustix::fs::statfs(folder).is_ok_and(|of| COMPRESSING.contains(&of.f_type)) {
        return Ok(());
    }
    // Some blocks are for root only.
    let blocks = if rustix::process::geteuid().is_root() { room.f_bfree } else { room.f_bavail };
    why_not(what, folder, bytes, blocks.saturating_mul(room.f_frsize))
}

/// The same for copies of files in this place.
///
/// # Errors
/// As [`check`].
pub fn check_copies(what: &str, from: &Path, folder: &Path, bytes: u64) -> Result<(), Failure> {
    let device = |path: &Path| path.metadata().map(|found| found.dev()).ok();
    if device(from) == device(folder) && rustix::fs::statfs(folder).is_ok_and(|of| of.f_type == XFS) {
        return Ok(());
    }
    check(what, folder, bytes)
}

fn why_not(what: &str, folder: &Path, bytes: u64, free: u64) -> Result<(), Failure> {
    if bytes <= free {
        return Ok(());
    }
    let (bytes, free) = (Size::bytes(bytes), Size::bytes(free));
    let text = format!("{what} needs {bytes}, and the file system of {} has {free} left: make room", folder.display());
    Err(Failure::local(text))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::exit::Code;

    #[test]
    fn what_does_not_fit_is_refused_with_both_figures() {
        let folder = Path::new("/data");
        assert!(why_not("the snapshot", folder, 3 << 30, 3 << 30).is_ok());
        let refused = why_not("the snapshot", folder, 3 << 30, 1 << 30).unwrap_err();
        assert_eq!(refused.code, Code::Local);
        assert_eq!(refused.message, "the snapshot needs 3 GiB, and the file system of /data has 1 GiB left: make room");
    }

    #[test]
    fn a_real_file_system_is_asked_and_one_that_is_not_there_is_not_judged() {
        let folder = tempfile::tempdir().unwrap();
        check("nothing", folder.path(), 0).unwrap();
        // This test may run on one that compresses.
        let is_judged = rustix::fs::statfs(folder.path()).is_ok_and(|of| !COMPRESSING.contains(&of.f_type));
        assert_eq!(check("everything", folder.path(), u64::MAX).is_err(), is_judged);
        assert_eq!(check_copies("everything", Path::new("/proc"), folder.path(), u64::MAX).is_err(), is_judged);
        check("everything", Path::new("/nowhere"), u64::MAX).unwrap();
    }
}
