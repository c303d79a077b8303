//! The secret that both ends share, the file that holds it, and the proofs of holding it.
//!
//! The token keys HMACs and has no other use: it never crosses a wire, and people need not remember it.
//!
//! Files with secrets are opened, and read only if no other user could have read or changed them.

use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// A token. Debug output hides it, and it is overwritten when dropped.
///
/// Overwriting is best effort: without `unsafe` the compiler may drop the write, and copies made by the allocator or
/// the kernel are out of reach.
pub struct Token(Vec<u8>);

impl Token {
    /// Reads the token from a file: its content without trailing line ends.
    ///
    /// # Errors
    /// [`TokenError`]: the file cannot be read, another user owns it, its mode lets other users read or change it, or
    /// its content cannot be a token.
    pub fn read_file(path: impl AsRef<Path>) -> Result<Token, TokenError> {
        let path = path.as_ref();
        let read = read(path, READ_BYTES);
        let mut token = Token(read.map_err(|error| TokenError::File { path: path.to_owned(), error })?);
        while token.0.last().is_some_and(|byte| b"\r\n".contains(byte)) {
            token.0.pop();
        }
        token.checked(&path.display().to_string())
    }

    /// Makes a token from bytes in memory.
    ///
    /// # Errors
    /// [`TokenError::Length`] or [`TokenError::Weak`].
    pub fn new(bytes: &[u8]) -> Result<Token, TokenError> {
        Token(bytes.to_vec()).checked("the token")
    }

    /// The secret, as the key of an HMAC.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn checked(self, name: &str) -> Result<Token, TokenError> {
        if !(MIN_BYTES..=MAX_BYTES).contains(&self.0.len()) {
            return Err(TokenError::Length { name: name.to_owned(), length: self.0.len() });
        }
        let mut distinct = self.0.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let (found, copy) = (distinct.len(), Token(distinct)); // the copy is overwritten too
        drop(copy);
        if found < MIN_DISTINCT {
            return Err(TokenError::Weak { name: name.to_owned(), distinct: found });
        }
        Ok(self)
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
    /// The file cannot be read, or others could have read or changed it.
    #[error("token file {}: {error}{}", path.display(), remedy(error))]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: SecretFileError,
    },
    /// The token repeats few bytes and can be guessed.
    #[error(
        "{name}: a token has at least {MIN_DISTINCT} different bytes, this one has {distinct} and can be guessed; {REMEDY}"
    )]
    Weak {
        /// The file, or "the token".
        name: String,
        /// The number of different bytes.
        distinct: usize,
    },
    /// The token is too short to be secret, or too long.
    #[error("{name}: a token has {MIN_BYTES} to {MAX_BYTES} bytes, this one has {length}; {REMEDY}")]
    Length {
        /// The file, or "the token".
        name: String,
        /// Its length without line ends. One more than the maximum stands for any greater length.
        length: usize,
    },
}

/// Shortest token, in bytes. An attacker who records one handshake can try tokens offline; 16 random bytes resist that.
pub const MIN_BYTES: usize = 16;

/// Fewest different bytes in a token. This refuses `aaaaaaaaaaaaaaaa` and `1212121212121212`, and no random token: 32
/// random hexadecimal digits have fewer than 8 different ones once in 25 million times. Words and dates pass.
pub const MIN_DISTINCT: usize = 8;

/// What to do about a token that cannot be used.
const REMEDY: &str = "create one with: remora token new FILE";

/// What to do about a file that is not there. The other errors say it themselves.
fn remedy(error: &SecretFileError) -> String {
    match error {
        SecretFileError::Unreadable(error) if error.kind() == io::ErrorKind::NotFound => format!("; {REMEDY}"),
        _ => String::new(),
    }
}

/// Longest token, in bytes. Far more than a secret needs: a longer file is probably some other file.
pub const MAX_BYTES: usize = 1024;

/// The longest token, a `\r\n`, and one byte that shows that the file is longer.
const READ_BYTES: usize = MAX_BYTES + 3;

// Proofs of possession: HMAC-SHA256, keyed by a secret, over a label and a transcript; and keys derived from a
// session's key.
//
// A label says what an HMAC is for. Each label ends with its only zero byte, so no label is a prefix of another one
// and no two purposes can be given the same input.

/// Length of a proof and of a key, in bytes.
pub const PROOF_BYTES: usize = 32;

/// Computes the HMAC of `parts`, one after the other, keyed by `secret`.
///
/// It proves knowledge of `secret` and of all of `parts`.
pub fn proof(secret: &[u8], parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
    keyed(secret, parts).finalize().into_bytes().into()
}

/// Returns whether `candidate` is the proof over `parts`. The time it takes does not depend on the bytes compared.
pub fn verify(secret: &[u8], parts: &[&[u8]], candidate: &[u8]) -> bool {
    keyed(secret, parts).verify_slice(candidate).is_ok()
}

/// Derives another key from a session's key. Neither the session's key nor the key of another label can be computed
/// from it.
pub fn derive(session_key: &[u8; PROOF_BYTES], label: &[u8]) -> [u8; PROOF_BYTES] {
    proof(session_key, &[LABEL_DERIVE, label])
}

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

fn keyed(secret: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut hmac = <Hmac<Sha256> as Mac>::new_from_slice(secret).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| hmac.update(part));
    hmac
}

const LABEL_DERIVE: &[u8] = b"remora control: derived key\0";

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
            assert!(matches!(
                error,
                TokenError::File { error: SecretFileError::Exposed { mode: found, .. }, .. } if found == mode
            ));
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
            let token: Vec<u8> = (b'a'..=b'z').cycle().take(length).collect();
            read("length", &[&token[..], b"\r\n"].concat(), 0o600).unwrap();
        }
    }

    #[test]
    fn a_token_that_repeats_few_bytes_is_refused_with_the_cure() {
        for weak in ["aaaaaaaaaaaaaaaa", "1212121212121212", "passpasspasspass", "abcdefgabcdefgabcdefg"] {
            let error = read("weak", weak.as_bytes(), 0o600).unwrap_err();
            assert!(matches!(error, TokenError::Weak { .. }), "{weak}: {error}");
            let said = error.to_string();
            assert!(said.contains("remora token new") && !said.contains(weak), "{said}");
        }
        read("weak", b"abcdefghabcdefgh", 0o600).unwrap();
    }

    #[test]
    fn root_does_not_trust_a_file_that_another_user_can_change() {
        let path = file("root", b"0123456789abcdef", 0o600);
        if std::os::unix::fs::chown(&path, Some(65534), None).is_err() {
            return std::fs::remove_file(&path).unwrap(); // only root can give a file away
        }
        let error = Token::read_file(&path).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        let is_foreign = matches!(error, TokenError::File { error: SecretFileError::Foreign { owner: 65534, .. }, .. });
        assert!(is_foreign, "{error}");
        assert!(error.to_string().contains("chown 0 "), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Token::read_file("/proc/no-such-folder/token").unwrap_err();
        assert!(error.to_string().contains("/proc/no-such-folder/token"), "{error}");
    }

    #[test]
    fn debug_output_hides_the_secret() {
        let token = Token::new(b"a very secret value").unwrap();
        assert_eq!(format!("{token:?}"), "Token(hidden)");
    }

    #[test]
    fn a_proof_holds_for_its_secret_and_its_parts_only() {
        let made = proof(b"secret", &[b"label\0", b"transcript"]);
        assert!(verify(b"secret", &[b"label\0", b"transcript"], &made));
        assert!(!verify(b"other", &[b"label\0", b"transcript"], &made));
        assert!(!verify(b"secret", &[b"other\0", b"transcript"], &made));
        assert!(!verify(b"secret", &[b"label\0", b"transcript"], &made[..31]));
    }

    #[test]
    fn a_key_derived_for_one_purpose_is_not_the_key_of_another() {
        let key = [7; 32];
        let keys = [derive(&key, b"lane"), derive(&key, b"lanes"), derive(&[8; 32], b"lane"), key];
        for (index, one) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(one));
        }
        assert_eq!(derive(&key, b"lane"), derive(&key, b"lane"));
    }

    fn secret_file(name: &str, mode: u32) -> PathBuf {
        let path = std::env::temp_dir().join(format!("remora-secret-{}-{name}", std::process::id()));
        std::fs::write(&path, b"0123456789abcdef").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn no_more_is_read_than_the_caller_asked_for() {
        let path = secret_file("length", 0o600);
        let read = [15, 16, 17].map(|most| super::read(&path, most).unwrap().len());
        std::fs::remove_file(path).unwrap();
        assert_eq!(read, [15, 16, 16]);
        assert_eq!(super::read(Path::new("/dev/zero"), 100).unwrap().len(), 100);
    }

    #[test]
    fn a_file_of_another_user_is_refused_with_the_cure() {
        let path = secret_file("owner", 0o600);
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
