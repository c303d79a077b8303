//! Free space of a file system: whether something of a known length fits, before it is written.

use std::path::Path;

use crate::exit::Failure;
use crate::units::Size;

/// Refuses to write this many bytes into a folder whose file system has no room for them. `what`: that is written.
///
/// # Errors
/// Its text has both figures. A file system that does not say what it has is not judged.
pub(crate) fn check(what: &str, folder: &Path, bytes: u64) -> Result<(), Failure> {
    let Ok(found) = rustix::fs::statvfs(folder) else { return Ok(()) };
    // The blocks that only root may use are not counted, though an agent of root could.
    why_not(what, folder, bytes, found.f_bavail.saturating_mul(found.f_frsize))
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
        check("everything", folder.path(), u64::MAX).unwrap_err();
        check("everything", Path::new("/nowhere"), u64::MAX).unwrap();
    }
}
