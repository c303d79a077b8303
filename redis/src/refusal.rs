//! The errors that servers answer with, sorted by who can act on them.
//!
//! Not every `-CODE` there is: those that a user of replication meets, each with what to do about it. All others keep
//! the server's own words in [`Refusal::Other`].

use crate::text;

/// How much of a server's own words is kept. Those of servers that are kept stay below 200 bytes, unless
/// they quote a script; a peer that sends more is clipped.
const TEXT_BYTES_MAX: usize = 512;

/// A server understood the command and would not do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The user must give a password (`-NOAUTH`, and `-ERR operation not permitted` before Redis 6).
    #[error("the server asks for a password: give the user (if it has several) and the password")]
    NoAuth,
    /// The user must give another password (`-WRONGPASS`, or an `-ERR` in answer to `AUTH`).
    #[error("the server does not accept this user and password: {text}")]
    WrongPass {
        /// The server's words.
        text: String,
    },
    /// The administrator must grant a right (`-NOPERM`).
    #[error("the server's user may not do {command}: {text}. Grant it with ACL SETUSER")]
    NoPerm {
        /// What we asked for.
        command: String,
        /// The server's words; they name the user and the command.
        text: String,
    },
    /// The administrator must let this host in (`-DENIED`: protected mode).
    #[error("the server lets only its own host in (protected mode): give it a password or bind it to the network")]
    ProtectedMode,
    /// Nobody but time: the server reads its data set (`-LOADING`).
    #[error("the server is still loading its data set")]
    Loading,
    /// Nobody but time: a replica whose own link is down cannot serve others (`-NOMASTERLINK`).
    #[error("the server is a replica whose link to its own primary is down")]
    NoMasterLink,
    /// As above, said in answer to a command about data (`-MASTERDOWN`).
    #[error("the server is a replica without a primary, and is set not to serve old data")]
    MasterDown,
    /// Nobody but time, or `SCRIPT KILL`: a script runs (`-BUSY`).
    #[error("the server is busy with a script")]
    Busy,
    /// Time, or `maxclients` (`-ERR max number of clients reached`).
    #[error("the server has as many clients as it allows (maxclients)")]
    TooManyClients,
    /// Something else, in the server's words.
    #[error("the server refused {command}: {text}")]
    Other {
        /// What we asked for.
        command: String,
        /// The server's words.
        text: String,
    },
}

impl Refusal {
    /// Sorts the text of an error reply (without its leading `-`) to `command`.
    ///
    /// ```
    /// use remora_redis::Refusal;
    /// assert_eq!(Refusal::sort("PING", b"NOAUTH Authentication required."), Refusal::NoAuth);
    /// ```
    pub fn sort(command: &str, line: &[u8]) -> Refusal {
        let line = line.get(..TEXT_BYTES_MAX).unwrap_or(line);
        let text = String::from_utf8_lossy(line).into_owned();
        let code = text.split(' ').next().unwrap_or_default();
        match code {
            "NOAUTH" => Refusal::NoAuth,
            "WRONGPASS" => Refusal::WrongPass { text },
            "NOPERM" => Refusal::NoPerm { command: command.to_owned(), text },
            "DENIED" => Refusal::ProtectedMode,
            "LOADING" => Refusal::Loading,
            "NOMASTERLINK" => Refusal::NoMasterLink,
            "MASTERDOWN" => Refusal::MasterDown,
            "BUSY" => Refusal::Busy,
            "ERR" => Refusal::sort_err(command, text),
            _ => Refusal::Other { command: command.to_owned(), text },
        }
    }

    /// Whether the same request may succeed later without anybody doing anything.
    pub fn is_temporary(&self) -> bool {
        match self {
            Refusal::Loading
            | Refusal::NoMasterLink
            | Refusal::MasterDown
            | Refusal::Busy
            | Refusal::TooManyClients => true,
            Refusal::NoAuth
            | Refusal::WrongPass { .. }
            | Refusal::NoPerm { .. }
            | Refusal::ProtectedMode
            | Refusal::Other { .. } => false,
        }
    }

    /// The catch-all code hides three that have a better name.
    fn sort_err(command: &str, text: String) -> Refusal {
        let is = |wanted: &str| text.to_ascii_lowercase().starts_with(wanted);
        if is("err max number of clients") {
            return Refusal::TooManyClients;
        }
        if is("err operation not permitted") {
            return Refusal::NoAuth;
        }
        // "invalid password" (Redis 5), "AUTH <password> called without any password configured …" (Redis 6 on).
        if command == "AUTH" && (is("err invalid") || is("err auth") || is("err client sent auth")) {
            return Refusal::WrongPass { text };
        }
        Refusal::Other { command: command.to_owned(), text }
    }
}

/// The first line of what a peer sent that is no Redis, and a guess at what it is.
pub(crate) fn guess(received: &[u8]) -> (String, &'static str) {
    let hint = match received {
        [0x15 | 0x16, 0x03, ..] | [0x15 | 0x16] => " (it speaks TLS: use rediss://)",
        [b'H', b'T', b'T', b'P', ..] => " (it is a web server)",
        [b'S', b'S', b'H', ..] => " (it is a secure shell)",
        _ => "",
    };
    (text::excerpt(received), hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_of_the_servers_finds_its_kind() {
        let sorted = |line: &str| Refusal::sort("PSYNC", line.as_bytes());
        assert_eq!(sorted("NOAUTH Authentication required."), Refusal::NoAuth);
        assert_eq!(sorted("LOADING Redis is loading the dataset in memory"), Refusal::Loading);
        assert_eq!(sorted("NOMASTERLINK Can't SYNC while not connected with my master"), Refusal::NoMasterLink);
        assert_eq!(sorted("MASTERDOWN Link with MASTER is down"), Refusal::MasterDown);
        assert_eq!(sorted("BUSY Valkey is busy running a script."), Refusal::Busy);
        assert_eq!(sorted("DENIED Redis is running in protected mode"), Refusal::ProtectedMode);
        assert_eq!(sorted("ERR max number of clients reached"), Refusal::TooManyClients);
        assert_eq!(sorted("ERR operation not permitted"), Refusal::NoAuth);
    }

    #[test]
    fn a_missing_right_keeps_the_servers_words() {
        let text = "NOPERM User remora has no permissions to run the 'psync' command";
        let refusal = Refusal::sort("PSYNC", text.as_bytes());
        assert_eq!(refusal, Refusal::NoPerm { command: "PSYNC".into(), text: text.into() });
        assert!(refusal.to_string().contains("User remora"));
    }

    #[test]
    fn an_error_in_answer_to_auth_is_about_the_password() {
        for text in [
            "WRONGPASS invalid username-password pair or user is disabled.",
            "ERR invalid password",
            "ERR AUTH <password> called without any password configured for the default user. Are you sure?",
        ] {
            assert_eq!(Refusal::sort("AUTH", text.as_bytes()), Refusal::WrongPass { text: text.into() });
        }
        assert!(matches!(Refusal::sort("AUTH", b"ERR unknown command 'AUTH'"), Refusal::Other { .. }));
    }

    #[test]
    fn an_endless_error_text_is_clipped() {
        let Refusal::Other { text, .. } = Refusal::sort("PING", &[b'x'; 100_000]) else {
            panic!("an unknown code is sorted as other");
        };
        assert_eq!(text.len(), TEXT_BYTES_MAX);
    }
}
