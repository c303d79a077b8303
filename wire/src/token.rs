//! The secret that both ends share, and the file that holds it. It keys HMACs and has no other use: it never crosses a
//! wire, and people need not remember it.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A token. Debug output hides it, and it is overwritten when dropped.
///
/// Overwriting is best effort: without `unsafe` the compiler may drop the write, and copies made by the allocator or
/// the kernel are out of reach.
pub struct Token(Vec<u8>);

impl Token {
    /// Reads the token from a file: its content without trailing line ends.
    ///
    /// # Errors
    /// [`TokenError`]: the file cannot be read, its mode lets other users read or change it, or its length is out of
    /// bounds.
    pub fn read_file(path: impl AsRef<Path>) -> Result<Token, TokenError> {
        let path = path.as_ref();
        let unreadable = |error| TokenError::Unreadable { path: path.to_owned(), error };
        let file = File::open(path).map_err(unreadable)?;
        check_mode(path, &file.metadata().map_err(unreadable)?)?;
        let mut token = Token(Vec::with_capacity(READ_BYTES)); // allocated at once: growing would leave copies behind
        file.take(READ_BYTES as u64).read_to_end(&mut token.0).map_err(unreadable)?;
        while token.0.last().is_some_and(|byte| b"\r\n".contains(byte)) {
            token.0.pop();
        }
        token.checked(&path.display().to_string())
    }

    /// Makes a token from bytes in memory.
    ///
    /// # Errors
    /// [`TokenError::Length`].
    pub fn new(bytes: &[u8]) -> Result<Token, TokenError> {
        Token(bytes.to_vec()).checked("the token")
    }

    /// The secret, as the key of an HMAC.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn checked(self, name: &str) -> Result<Token, TokenError> {
        if (MIN_BYTES..=MAX_BYTES).contains(&self.0.len()) {
            return Ok(self);
        }
        Err(TokenError::Length { name: name.to_owned(), length: self.0.len() })
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("Token(hidden)")
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.0.fill(0);
        std::hint::black_box(&mut self.0);
    }
}

/// Why a token cannot be used. The operator has to fix every one of these.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file does not exist or may not be read.
    #[error("token file {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// The mode of the file lets other users read or change it.
    #[error(
        "token file {} (mode {mode:04o}) can be read or changed by others: chmod 600 {}",
        path.display(), path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The token is too short to be secret, or too long.
    #[error(
        "{name}: a token has {MIN_BYTES} to {MAX_BYTES} bytes, this one has {length}; create one with: head -c 32 /dev/urandom | base64"
    )]
    Length {
        /// The file, or "the token".
        name: String,
        /// Its length without line ends. One more than the maximum stands for any greater length.
        length: usize,
    },
}

/// Checks that only the owner can write the file, and that only the owner and the group can read it (mode 0640).
fn check_mode(path: &Path, facts: &std::fs::Metadata) -> Result<(), TokenError> {
    let mode = facts.mode() & 0o7777;
    if facts.is_file() && mode & FORBIDDEN_MODE != 0 {
        return Err(TokenError::Exposed { path: path.to_owned(), mode });
    }
    Ok(()) // a pipe (`--token-file <(…)`) or a device: its mode does not say which users read it
}

/// Shortest token, in bytes. An attacker who records one handshake can try tokens offline; 16 random bytes resist that.
pub const MIN_BYTES: usize = 16;

/// Longest token, in bytes. Far more than a secret needs: a longer file is probably some other file.
pub const MAX_BYTES: usize = 1024;

/// The longest token, a `\r\n`, and one byte that shows that the file is longer.
const READ_BYTES: usize = MAX_BYTES + 3;

/// Permission bits that are not allowed: read by others, written by others, written by the group.
const FORBIDDEN_MODE: u32 = 0o026;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn file(name: &str, content: &[u8], mode: u32) -> PathBuf {
        let path = std::env::temp_dir().join(format!("remora-token-{}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn read(name: &str, content: &[u8], mode: u32) -> Result<Token, TokenError> {
        let path = file(name, content, mode);
        let token = Token::read_file(&path);
        std::fs::remove_file(path).unwrap();
        token
    }

    #[test]
    fn the_line_end_is_no_part_of_the_token() {
        for end in ["", "\n", "\r\n"] {
            let token = read("end", format!("0123456789abcdef{end}").as_bytes(), 0o600).unwrap();
            assert_eq!(token.bytes(), b"0123456789abcdef");
        }
    }

    #[test]
    fn a_file_that_others_may_read_or_change_is_refused_with_the_cure() {
        for mode in [0o644, 0o604, 0o602, 0o620, 0o660, 0o666] {
            let error = read("mode", b"0123456789abcdef", mode).unwrap_err();
            assert!(matches!(error, TokenError::Exposed { mode: found, .. } if found == mode));
            assert!(error.to_string().contains("chmod 600 "), "{error}");
        }
        for mode in [0o600, 0o400, 0o640] {
            read("mode", b"0123456789abcdef", mode).unwrap();
        }
    }

    #[test]
    fn a_token_too_short_or_too_long_is_refused() {
        for length in [0, 1, MIN_BYTES - 1, MAX_BYTES + 1, 5 * MAX_BYTES] {
            let error = read("length", &vec![b'x'; length], 0o600).unwrap_err();
            assert!(matches!(error, TokenError::Length { .. }), "{length}: {error}");
        }
        for length in [MIN_BYTES, MAX_BYTES] {
            read("length", &[&vec![b'x'; length][..], b"\r\n"].concat(), 0o600).unwrap();
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Token::read_file("/nonexistent/token").unwrap_err();
        assert!(error.to_string().contains("/nonexistent/token"), "{error}");
    }

    #[test]
    fn debug_output_hides_the_secret() {
        let token = Token::new(b"a very secret value").unwrap();
        assert_eq!(format!("{token:?}"), "Token(hidden)");
    }
}
