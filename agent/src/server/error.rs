//! What can go wrong with a server, sorted by who can do something about it.
//!
//! - [`SetupError`]: what was typed, or a file it names. Found before any server is spoken to.
//! - [`ServerError`]: the server is away, is something else, or said no. A no carries a [`RefusalKind`], so that callers can wait
//!   out a loading server and give up at once on a wrong password.

use std::{fmt, io, path::PathBuf, time::Duration};

use remora_redis::Refusal;

use super::acl::Task;
use crate::exit::{Code, Failure};

/// A setting or a file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be read.
    #[error("the {what} {path} cannot be read: {cause}", path = path.display())]
    File {
        /// What the file is to us.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// A file with a secret may be read by everybody.
    #[error("the {what} {path} may be read by everybody (mode {mode:03o}): chmod 600 it first", path = path.display())]
    OpenToAll {
        /// What the file is to us.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file holds nothing.
    #[error("the {what} {path} holds nothing we can use", path = path.display())]
    Empty {
        /// What the file is to us.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
    },
    /// A user without a password would silently log nobody in.
    #[error("the user {user} needs a password: give --password-file or set REMORA_PASSWORD")]
    UserWithoutPassword {
        /// The user as given.
        user: String,
    },
    /// Certificates or keys that TLS cannot be set up with.
    #[error("TLS to the server cannot be set up: {0}")]
    Tls(String),
    /// TLS options beside an address without TLS.
    #[error("{option} is given, but {url} does not use TLS: write rediss:// instead of redis://")]
    TlsUnused {
        /// The option as typed.
        option: &'static str,
        /// The address as given.
        url: String,
    },
}

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Self {
        Self::new(Code::Refused, error.to_string())
    }
}

/// A server that is away, is something else, or refuses.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No connection came about.
    #[error("the server {server} cannot be reached: {cause}; {}", hint(cause))]
    Unreachable {
        /// Its address.
        server: String,
        /// What the system said.
        cause: io::Error,
    },
    /// TLS could not be agreed on.
    #[error(
        "TLS with the server {server} failed: {cause}; \
         check --tls-ca, --tls-server-name and the client certificate, and that the port is the server's tls-port"
    )]
    Tls {
        /// Its address.
        server: String,
        /// What rustls said.
        cause: io::Error,
    },
    /// It was connected and went away.
    #[error("the server {server} closed the connection during {command}: {cause}")]
    Lost {
        /// Its address.
        server: String,
        /// What we were about.
        command: String,
        /// What the system said.
        cause: io::Error,
    },
    /// It did not answer in time.
    #[error("the server {server} did not answer {command} within {seconds} s: it is overloaded, stopped or not a Redis server", seconds = limit.as_secs())]
    TimedOut {
        /// Its address.
        server: String,
        /// What we were about.
        command: String,
        /// How long we waited.
        limit: Duration,
    },
    /// What came back is no RESP.
    #[error("what answers at {server} is not a Redis or Valkey server: {found}")]
    NotRedis {
        /// Its address.
        server: String,
        /// What came instead.
        found: String,
    },
    /// It answered, but not what that command answers.
    #[error("the server {server} gave an unexpected answer to {command}: {found}")]
    Unexpected {
        /// Its address.
        server: String,
        /// The command's name.
        command: String,
        /// What came instead, shortened.
        found: String,
    },
    /// It said no.
    #[error("{}", refusal_sentence(server, command, *kind, text, *task))]
    Refused {
        /// Its address.
        server: String,
        /// The command's name, never its arguments.
        command: String,
        /// The kind of no.
        kind: RefusalKind,
        /// Its own words.
        text: String,
        /// What we were there for.
        task: Task,
    },
}

impl ServerError {
    /// The kind of no, if it was one.
    pub fn refusal(&self) -> Option<RefusalKind> {
        match self {
            Self::Refused { kind, .. } => Some(*kind),
            _ => None,
        }
    }

    /// Whether the same attempt may well succeed a little later without anybody doing anything.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { cause, .. } => cause.kind() != io::ErrorKind::PermissionDenied,
            Self::Lost { .. } | Self::TimedOut { .. } => true,
            Self::Refused { kind, .. } => {
                matches!(kind, RefusalKind::Loading | RefusalKind::NoMasterLink | RefusalKind::Busy)
            }
            Self::Tls { .. } | Self::NotRedis { .. } | Self::Unexpected { .. } => false,
        }
    }
}

impl From<ServerError> for Failure {
    fn from(error: ServerError) -> Self {
        Self::new(Code::Server, error.to_string())
    }
}

/// The kinds of no that a client of a server meets. `remora_redis` sorts those of replication; the rest is sorted here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// It wants a password.
    NoAuth,
    /// The password, or the user, is wrong.
    WrongPass,
    /// The user may not run this command or see these keys.
    NoPerm,
    /// It lets only its own host in.
    ProtectedMode,
    /// It is still reading its data set.
    Loading,
    /// It is a replica whose own link is down.
    NoMasterLink,
    /// It is a replica and takes no writes, or cannot write safely.
    ReadOnly,
    /// A script or a function runs without end, or there are too many clients.
    Busy,
    /// It has reached its maxmemory.
    OutOfMemory,
    /// It doesn't know the command, or a part of it.
    Unknown,
    /// Anything else.
    Other,
}

impl RefusalKind {
    /// Sorts the text of an error reply to `command`.
    pub fn of(command: &str, text: &[u8]) -> Self {
        match Refusal::sort(command, text) {
            Refusal::NoAuth => Self::NoAuth,
            Refusal::WrongPass { .. } => Self::WrongPass,
            Refusal::NoPerm { .. } => Self::NoPerm,
            Refusal::ProtectedMode => Self::ProtectedMode,
            Refusal::Loading => Self::Loading,
            Refusal::NoMasterLink | Refusal::MasterDown => Self::NoMasterLink,
            Refusal::Busy | Refusal::TooManyClients => Self::Busy,
            Refusal::Other { text, .. } => Self::of_other(&text),
        }
    }

    fn of_other(text: &str) -> Self {
        let begins = |words: &str| text.get(..words.len()).is_some_and(|head| head.eq_ignore_ascii_case(words));
        match text.split(' ').next().unwrap_or_default() {
            "READONLY" | "MISCONF" | "NOREPLICAS" => Self::ReadOnly,
            "OOM" => Self::OutOfMemory,
            _ if begins("ERR unknown command") || begins("ERR unknown subcommand") => Self::Unknown,
            _ => Self::Other,
        }
    }
}

/// What to look at when no connection came about.
fn hint(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::ConnectionRefused => "is it running, and on this port?",
        io::ErrorKind::NotFound => "is the path of its socket right (`CONFIG GET unixsocket`)?",
        io::ErrorKind::PermissionDenied => "may this user open the socket (`unixsocketperm`)?",
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "is the host up, and does a firewall let this port through?"
        }
        _ => "check the address",
    }
}

fn refusal_sentence(server: &str, command: &str, kind: RefusalKind, text: &str, task: Task) -> String {
    let advice = match kind {
        RefusalKind::NoAuth => "it wants a password: give --password-file (and --user), or set REMORA_PASSWORD".into(),
        RefusalKind::WrongPass => "check --user and the password file".into(),
        RefusalKind::NoPerm => format!("{} needs these ACL rules: {}", task.command(), task.rules()),
        RefusalKind::Loading => "it is still reading its data set: try again when it has".into(),
        RefusalKind::ProtectedMode => {
            "it is in protected mode and lets only its own host in: give it a password, or run this on its host".into()
        }
        RefusalKind::NoMasterLink => "it is a replica whose own link to its primary is down: repair that first".into(),
        RefusalKind::ReadOnly => "it takes no writes: is it a replica, or can it not save to its disk?".into(),
        RefusalKind::Busy => "wait, or end what keeps it busy (SCRIPT KILL, fewer clients)".into(),
        RefusalKind::OutOfMemory => "it has reached its maxmemory: raise it, or give it less data".into(),
        RefusalKind::Unknown => "the server is too old for this, or the command was renamed".into(),
        RefusalKind::Other => String::new(),
    };
    let separator = if advice.is_empty() { "" } else { "; " };
    format!("the server {server} refused {command}: {}{separator}{advice}", Shortened(text.as_bytes()))
}

/// Bytes from outside, fit for one line of a message: printable, and no longer than a reader wants.
pub(crate) struct Shortened<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (head, more) = match self.0.split_at_checked(SHOWN_BYTES) {
            Some((head, rest)) if !rest.is_empty() => (head, "…"),
            _ => (self.0, ""),
        };
        write!(f, "{}{more}", head.escape_ascii())
    }
}

/// Enough for every error text of the servers.
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
            ("ERR wrong number of arguments for 'get' command", RefusalKind::Other),
            ("", RefusalKind::Other),
        ];
        for (text, kind) in table {
            assert_eq!(RefusalKind::of("AUTH", text.as_bytes()), kind, "{text}");
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
        assert_eq!(Shortened(b"a\r\nb\xff").to_string(), "a\\r\\nb\\xff");
        assert!(Shortened(&[b'x'; 1000]).to_string().ends_with("x…"));
        assert_eq!(Shortened(&[b'x'; SHOWN_BYTES]).to_string().len(), SHOWN_BYTES);
    }
}
