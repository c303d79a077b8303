//! The login at a server: an ACL user and a password. The password never appears in an argument, a log or an error.

use std::{
    ffi::OsString,
    fmt, fs,
    io::Read,
    os::unix::{ffi::OsStringExt, fs::PermissionsExt},
    path::Path,
};

use super::error::SetupError;

/// The environment variable that holds the password if no file is given.
pub const PASSWORD_VARIABLE: &str = "REMORA_PASSWORD";

/// The most bytes of a password file that are read, far above any password in use: a wrong path may name a large file.
const PASSWORD_FILE_BYTES: u64 = 64 * 1024;

/// Mode bits that let users other than the owner and its group read or write a file.
const OTHERS: u32 = 0o007;

/// User and password. Without a password no `AUTH` is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The ACL user; `None` means the server's `default` user. Servers allow any bytes but spaces and NUL.
    pub user: Option<Vec<u8>>,
    /// Its password.
    pub password: Option<Password>,
}

impl Credentials {
    /// The login that the options describe: the password is read from the file if one is given, else from the
    /// environment.
    pub fn gather(user: Option<&str>, password_file: Option<&Path>) -> Result<Self, SetupError> {
        let password = match password_file {
            Some(path) => Some(Password::read_file(path)?),
            None => std::env::var_os(PASSWORD_VARIABLE)
                .map(OsString::into_vec)
                .filter(|bytes| !bytes.is_empty())
                .map(Password),
        };
        if let (Some(user), None) = (user, &password) {
            return Err(SetupError::UserWithoutPassword { user: user.to_owned() });
        }
        Ok(Self { user: user.map(|user| user.as_bytes().to_vec()), password })
    }
}

/// A password: any bytes, as servers allow them. Debug output hides it; only [`Password::expose`] returns it.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(Vec<u8>);

impl Password {
    /// Makes a password of these bytes.
    pub fn new(password: impl Into<Vec<u8>>) -> Self {
        Self(password.into())
    }

    /// Reads the first line of a file that only its owner and group can read.
    pub fn read_file(path: &Path) -> Result<Self, SetupError> {
        let unreadable = |cause| SetupError::File { what: "password file", path: path.to_owned(), cause };
        let file = fs::File::open(path).map_err(unreadable)?;
        let mode = file.metadata().map_err(unreadable)?.permissions().mode();
        if mode & OTHERS != 0 {
            return Err(SetupError::OpenToAll { what: "password file", path: path.to_owned(), mode: mode & 0o777 });
        }
        let mut bytes = Vec::new();
        file.take(PASSWORD_FILE_BYTES).read_to_end(&mut bytes).map_err(unreadable)?;
        let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return Err(SetupError::Empty { what: "password file", path: path.to_owned() });
        }
        Ok(Self(line.to_vec()))
    }

    /// The password itself, for the `AUTH` command.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(…)")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn file_with(content: impl AsRef<[u8]>, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn the_first_line_of_the_file_is_the_password() {
        let file = file_with("se cret\nnot this\n", 0o640);
        assert_eq!(Password::read_file(file.path()).unwrap().expose(), b"se cret");
        let bytes = file_with(b"\xFF\x80 \"'\\\r\nnot this", 0o600);
        assert_eq!(Password::read_file(bytes.path()).unwrap().expose(), b"\xFF\x80 \"'\\");
    }

    #[test]
    fn a_file_that_everybody_may_read_is_refused() {
        let file = file_with("secret\n", 0o644);
        let error = Password::read_file(file.path()).unwrap_err().to_string();
        assert!(error.contains("chmod") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn an_empty_file_is_refused() {
        let file = file_with("\n", 0o600);
        assert!(matches!(Password::read_file(file.path()), Err(SetupError::Empty { .. })));
    }

    #[test]
    fn a_user_without_password_is_refused_rather_than_ignored() {
        // Has no meaning if the environment sets the variable.
        if std::env::var_os(PASSWORD_VARIABLE).is_none() {
            let error = Credentials::gather(Some("copier"), None).unwrap_err();
            assert!(matches!(error, SetupError::UserWithoutPassword { .. }));
        }
    }

    #[test]
    fn a_password_does_not_show_itself() {
        let credentials = Credentials { user: Some("u".into()), password: Some(Password::new("hunter2")) };
        assert!(!format!("{credentials:?}").contains("hunter2"));
    }
}
