//! The errors that servers answer with, grouped by who can act on them.
//!
//! Not every `-CODE` has a variant: only those that a user of replication meets, each with what to do about it. All
//! others keep the server's text in [`Refusal::Other`].

use crate::text;

/// Bytes of the server's error text that are kept. Servers' own errors stay below 200 bytes unless they quote a script;
/// a longer text is cut.
const TEXT_BYTES_MAX: usize = 512;

/// A server understood a command and refused to execute it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The user must supply a password (`-NOAUTH`, and `-ERR operation not permitted` before Redis 6).
    #[error("the server requires a password: supply the user (if it has several) and the password")]
    NoAuth,
    /// The user must supply a different password (`-WRONGPASS`, or an `-ERR` in answer to `AUTH`).
    #[error("the server does not accept this user and password: {text}")]
    WrongPass {
        /// The server's error text.
        text: String,
    },
    /// The administrator must grant a permission (`-NOPERM`).
    #[error("the server's user has no permission for {command}: {text}. Grant it with ACL SETUSER")]
    NoPerm {
        /// The command that was sent.
        command: String,
        /// The server's error text; it names the user and the command.
        text: String,
    },
    /// The administrator must allow this host (`-DENIED`: protected mode).
    #[error(
        "the server accepts connections from its own host only (protected mode): set a password or bind it to the \
         network"
    )]
    ProtectedMode,
    /// Nothing to do but wait: the server is reading its data set (`-LOADING`).
    #[error("the server is still loading its data set")]
    Loading,
    /// Nothing to do but wait: a replica whose own link is down cannot serve others (`-NOMASTERLINK`).
    #[error("the server is a replica whose link to its own primary is down")]
    NoMasterLink,
    /// As [`Refusal::NoMasterLink`], in answer to a command on data (`-MASTERDOWN`).
    #[error("the server is a replica without a link to its primary, and is configured not to serve stale data")]
    MasterDown,
    /// Wait, or `SCRIPT KILL`: a script is running (`-BUSY`).
    #[error("the server is busy running a script")]
    Busy,
    /// Wait, or raise `maxclients` (`-ERR max number of clients reached`).
    #[error("the server has reached its limit of clients (maxclients)")]
    TooManyClients,
    /// Any other error.
    #[error("the server refused {command}: {text}")]
    Other {
        /// The command that was sent.
        command: String,
        /// The server's error text.
        text: String,
    },
}

impl Refusal {
    /// Classifies the text of an error reply (without its leading `-`) to `command`.
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

    /// Whether the same request may succeed later without anyone changing anything.
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

    /// The general code covers three errors that have a variant of their own.
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

/// The first line of what a peer sent that is not a Redis server, and a guess at the protocol it speaks.
pub(crate) fn guess(received: &[u8]) -> (String, &'static str) {
    let hint = match received {
        [0x15 | 0x16, 0x03, ..] | [0x15 | 0x16] => " (it speaks TLS: use rediss://)",
        [b'H', b'T', b'T', b'P', ..] => " (it is a web server)",
        [b'S', b'S', b'H', ..] => " (it is a secure shell server)",
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
