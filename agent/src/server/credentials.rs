//! The login at a server: an ACL user and a password. The password never appears in an argument, a log or an error.

use std::{fmt, fs, io::Read, os::unix::fs::PermissionsExt, path::Path};

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
    /// The ACL user; `None` means the server's `default` user.
    pub user: Option<String>,
    /// Its password.
    pub password: Option<Password>,
}

impl Credentials {
    /// The login that the options describe: the password is read from the file if one is given, else from the
    /// environment.
    pub fn gather(user: Option<&str>, password_file: Option<&Path>) -> Result<Self, SetupError> {
        let password = match password_file {
            Some(path) => Some(Password::read_file(path)?),
            None => std::env::var(PASSWORD_VARIABLE).ok().filter(|password| !password.is_empty()).map(Password),
        };
        if let (Some(user), None) = (user, &password) {
            return Err(SetupError::UserWithoutPassword { user: user.to_owned() });
        }
        Ok(Self { user: user.map(str::to_owned), password })
    }
}

/// A password. Debug output hides it; only [`Password::expose`] returns it.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// Makes a password of this text.
    pub fn new(password: impl Into<String>) -> Self {
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
        let mut text = String::new();
        file.take(PASSWORD_FILE_BYTES).read_to_string(&mut text).map_err(unreadable)?;
        let line = text.lines().next().unwrap_or_default();
        if line.is_empty() {
            return Err(SetupError::Empty { what: "password file", path: path.to_owned() });
        }
        Ok(Self(line.to_owned()))
    }

    /// The password itself, for the `AUTH` command.
    pub fn expose(&self) -> &str {
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

    fn file_with(content: &str, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn the_first_line_of_the_file_is_the_password() {
        let file = file_with("se cret\nnot this\n", 0o640);
        assert_eq!(Password::read_file(file.path()).unwrap().expose(), "se cret");
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
