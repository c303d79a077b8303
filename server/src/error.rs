//! Errors of a server, by who can do something about them.
//!
//! - [`SetupError`]: an option, or a file that it names, is wrong. It is found before a connection is made.
//! - [`ServerError`]: the server cannot be reached, is not a Redis or Valkey server, or refused a command. A refusal
//!   has a [`RefusalKind`], so that callers can wait for a loading server and fail at once on a wrong password. What
//!   follows from each is in the table of [`refusals`].

use std::{fmt, io, path::PathBuf, time::Duration};

use super::acl::Task;
use super::refusals::{self, RefusalKind};
use remora_base::x509::words;

/// An option or a file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be read.
    #[error("cannot read the {what} {path}: {cause}", path = path.display())]
    File {
        /// What the file is for.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// Users other than the owner can read a file with a secret.
    #[error("other users can read the {what} {path} (mode {mode:03o}): run chmod 600 on it", path = path.display())]
    OpenToAll {
        /// What the file is for.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file has no usable content.
    #[error("the {what} {path} is empty, or holds nothing of that kind", path = path.display())]
    Empty {
        /// What the file is for.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
    },
    /// There is a user and no password, so no login would take place.
    #[error("the user {user} needs a password: give --password-file or set REMORA_PASSWORD")]
    UserWithoutPassword {
        /// The user as given.
        user: String,
    },
    /// The certificates or keys cannot be used.
    #[error("cannot set up TLS to the server: {0}")]
    Tls(String),
    /// There are TLS options, and the address has no TLS.
    #[error("{option} is given, but {url} does not use TLS: write rediss:// instead of redis://")]
    TlsUnused {
        /// The option as typed.
        option: String,
        /// The address as given.
        url: String,
    },
}

/// The server cannot be reached, is not a Redis or Valkey server, or refused a command.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No connection was established.
    #[error("cannot connect to the server {server}: {cause}; {}", hint(cause))]
    Unreachable {
        /// Its address.
        server: String,
        /// The system's error.
        cause: io::Error,
    },
    /// The TLS handshake failed.
    #[error("TLS with the server {server} failed: {}", words::with_server(cause, task.tls_prefix()))]
    Tls {
        /// Its address.
        server: String,
        /// What the connection is for.
        task: Task,
        /// The error of rustls.
        cause: io::Error,
    },
    /// The connection broke.
    #[error("the server {server} closed the connection during {command}: {cause}")]
    Lost {
        /// Its address.
        server: String,
        /// The command at that time.
        command: String,
        /// The system's error.
        cause: io::Error,
    },
    /// The server did not answer in time.
    #[error("the server {server} did not answer {command} within {seconds} s: it is overloaded, stopped or not a Redis server", seconds = limit.as_secs())]
    TimedOut {
        /// Its address.
        server: String,
        /// The command at that time.
        command: String,
        /// The time limit.
        limit: Duration,
    },
    /// The answer is not RESP.
    #[error("{server} is not a Redis or Valkey server: {found}")]
    NotRedis {
        /// Its address.
        server: String,
        /// The beginning of the answer.
        found: String,
    },
    /// The answer does not fit the command.
    #[error("the server {server} gave an unexpected answer to {command}: {found}")]
    Unexpected {
        /// Its address.
        server: String,
        /// The command's name.
        command: String,
        /// The answer, shortened.
        found: String,
    },
    /// The server answered with an error.
    #[error("{}", refusal_sentence(server, command, text, *task))]
    Refused {
        /// Its address.
        server: String,
        /// The command's name, never its arguments.
        command: String,
        /// The kind of the error.
        kind: RefusalKind,
        /// The server's text.
        text: String,
        /// What the connection is for.
        task: Task,
    },
}

impl ServerError {
    /// The kind of the refusal, if this is one.
    pub fn refusal(&self) -> Option<RefusalKind> {
        match self {
            Self::Refused { kind, .. } => Some(*kind),
            _ => None,
        }
    }

    /// Whether the same attempt may succeed a little later without anyone changing anything.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { cause, .. } => cause.kind() != io::ErrorKind::PermissionDenied,
            Self::Lost { .. } | Self::TimedOut { .. } => true,
            Self::Refused { command, text, .. } => refusals::line_for(command, text).verdict.passes(),
            // The server has closed the connection: it is stopping, or has as many clients as it allows.
            Self::Tls { cause, .. } => matches!(
                cause.kind(),
                io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::BrokenPipe
            ),
            Self::NotRedis { .. } | Self::Unexpected { .. } => false,
        }
    }
}

/// What to check if no connection was established.
fn hint(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::ConnectionRefused => "check that it is running, and on this port",
        io::ErrorKind::NotFound => "check the path of its socket (`CONFIG GET unixsocket`)",
        io::ErrorKind::PermissionDenied => "check that this user may open the socket (`unixsocketperm`)",
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "check that the host is up and that no firewall blocks the port"
        }
        _ => "check the address",
    }
}

fn refusal_sentence(server: &str, command: &str, text: &str, task: Task) -> String {
    format!(
        "the server {server} refused {command}: {}; {}",
        Shortened(text.as_bytes()),
        refusals::advice(command, text, task)
    )
}

/// Bytes from outside as text for one line of a message: printable, and shortened.
pub(crate) struct Shortened<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (head, more) = match self.0.split_at_checked(SHOWN_BYTES) {
            Some((head, rest)) if !rest.is_empty() => (head, "…"),
            _ => (self.0, ""),
        };
        for byte in head {
            match byte {
                b' '..=b'~' => fmt::Write::write_char(f, char::from(*byte))?,
                other => write!(f, "{}", other.escape_ascii())?,
            }
        }
        f.write_str(more)
    }
}

/// The most bytes shown: enough for every error text of the servers.
const SHOWN_BYTES: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_own_words_are_sorted() {
        let table = [
            ("NOAUTH Authentication required.", RefusalKind::NoAuth),
            ("WRONGPASS invalid username-password pair or user is disabled.", RefusalKind::WrongPass),
            ("ERR invalid password", RefusalKind::WrongPass),
            (
                "ERR AUTH <password> called without any password configured for the default user.",
                RefusalKind::WrongPass,
            ),
            ("NOPERM this user has no permissions to run the 'psync' command", RefusalKind::NoPerm),
            ("LOADING Redis is loading the dataset in memory", RefusalKind::Loading),
            ("NOMASTERLINK Can't SYNC while not connected with my master", RefusalKind::NoMasterLink),
            ("READONLY You can't write against a read only replica.", RefusalKind::ReadOnly),
            ("BUSY Redis is busy running a script.", RefusalKind::Busy),
            ("OOM command not allowed when used memory > 'maxmemory'.", RefusalKind::OutOfMemory),
            ("ERR unknown command 'FUNCTION', with args beginning with: ", RefusalKind::Unknown),
            ("ERR wrong number of arguments for 'get' command", RefusalKind::OwnMistake),
            ("ERR value is not an integer or out of range", RefusalKind::Other),
            ("", RefusalKind::Other),
        ];
        for (text, kind) in table {
            assert_eq!(refusals::line_for("AUTH", text).kind, kind, "{text}");
        }
    }

    #[test]
    fn a_missing_permission_names_the_rules_of_the_task() {
        let error = ServerError::Refused {
            server: "redis://a:1".into(),
            command: "PSYNC".into(),
            kind: RefusalKind::NoPerm,
            text: "NOPERM no".into(),
            task: Task::Source,
        };
        assert!(error.to_string().contains("+replconf +psync"), "{error}");
    }

    #[test]
    fn foreign_bytes_are_shown_on_one_short_line() {
        assert_eq!(Shortened(b"can't\r\nb\xff").to_string(), "can't\\r\\nb\\xff");
        assert!(Shortened(&[b'x'; 1000]).to_string().ends_with("x…"));
        assert_eq!(Shortened(&[b'x'; SHOWN_BYTES]).to_string().len(), SHOWN_BYTES);
    }
}
