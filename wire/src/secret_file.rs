//! Files with secrets: opened, and read only if no other user could have read or changed them.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Why the secret in a file cannot be used. The operator has to fix every one of these. The texts do not begin with the
/// file's name, so that the caller can say what kind of file it is.
#[derive(Debug, thiserror::Error)]
pub enum SecretFileError {
    /// The file does not exist or may not be read.
    #[error(transparent)]
    Unreadable(#[from] io::Error),
    /// The mode of the file lets other users read or change it.
    #[error("it can be read or changed by others (mode {mode:04o}): chmod 600 {}", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file belongs to a user who could replace the secret: neither the user of this process nor root.
    #[error(
        "it belongs to the user {owner}, who can change it, and this process runs as {user}: chown {user} {}",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The user ID of its owner.
        owner: u32,
        /// The effective user ID of this process.
        user: u32,
    },
}

/// Reads at most `most` bytes. One byte more than the caller permits shows it that the file is longer.
///
/// # Errors
/// The file cannot be read, another user owns it, or its mode lets other users read or change it.
pub fn read(path: &Path, most: usize) -> Result<Vec<u8>, SecretFileError> {
    let file = File::open(path)?;
    check_access(path, &file.metadata()?, rustix::process::geteuid().as_raw())?;
    let mut bytes = Vec::with_capacity(most); // allocated at once: growing would leave copies behind
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Checks that `user` or root owns the file, that only the owner can write it, and that only the owner and the group
/// can read it (mode 0640).
fn check_access(path: &Path, facts: &Metadata, user: u32) -> Result<(), SecretFileError> {
    let (mode, owner) = (facts.mode() & 0o7777, facts.uid());
    if !facts.is_file() {
        return Ok(()); // a pipe (`--token-file <(…)`) or a device: its mode does not say which users read it
    }
    if owner != user && owner != ROOT {
        return Err(SecretFileError::Foreign { path: path.to_owned(), owner, user });
    }
    if mode & FORBIDDEN_MODE != 0 {
        return Err(SecretFileError::Exposed { path: path.to_owned(), mode });
    }
    Ok(())
}

/// The user ID of root, who can read and change every file anyway.
const ROOT: u32 = 0;

/// Permission bits that are not allowed: read by others, written by others, written by the group.
const FORBIDDEN_MODE: u32 = 0o026;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(name: &str, mode: u32) -> PathBuf {
        let path = std::env::temp_dir().join(format!("remora-secret-{}-{name}", std::process::id()));
        std::fs::write(&path, b"0123456789abcdef").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn no_more_is_read_than_the_caller_asked_for() {
        let path = file("length", 0o600);
        let read = [15, 16, 17].map(|most| read(&path, most).unwrap().len());
        std::fs::remove_file(path).unwrap();
        assert_eq!(read, [15, 16, 16]);
        assert_eq!(super::read(Path::new("/dev/zero"), 100).unwrap().len(), 100);
    }

    #[test]
    fn a_file_of_another_user_is_refused_with_the_cure() {
        let path = file("owner", 0o600);
        let facts = std::fs::metadata(&path).unwrap();
        let us = facts.uid();
        check_access(&path, &facts, us).unwrap();
        let judged = check_access(&path, &facts, us + 1);
        std::fs::remove_file(&path).unwrap();
        if us == ROOT {
            return judged.unwrap(); // root's files are good for every user
        }
        let said = judged.unwrap_err().to_string();
        assert!(said.contains(&format!("chown {} ", us + 1)), "{said}");
    }
}
