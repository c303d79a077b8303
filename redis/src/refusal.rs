//! The errors that servers answer with. What follows from each is decided by those who have sent the command.

use crate::text;

/// Bytes of the server's error text that are kept. Servers' own errors stay below 200 bytes unless they quote a script;
/// a longer text is cut.
const TEXT_BYTES_MAX: usize = 512;

/// A server understood a command and refused to execute it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the server refused {command}: {text}")]
pub struct Refusal {
    /// The command that was sent.
    pub command: String,
    /// The server's error text, without its leading `-`.
    pub text: String,
}

impl Refusal {
    /// The text of an error reply (without its leading `-`) to `command`.
    ///
    /// ```
    /// use remora_redis::Refusal;
    /// assert_eq!(Refusal::new("PING", b"NOAUTH Authentication required.").code(), "NOAUTH");
    /// ```
    pub fn new(command: &str, line: &[u8]) -> Refusal {
        let line = line.get(..TEXT_BYTES_MAX).unwrap_or(line);
        Refusal { command: command.to_owned(), text: String::from_utf8_lossy(line).into_owned() }
    }

    /// The first word of the text: `ERR`, or a code of its own.
    pub fn code(&self) -> &str {
        self.text.split(' ').next().unwrap_or_default()
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
    fn a_refusal_keeps_the_command_and_the_servers_words() {
        let text = "NOPERM User remora has no permissions to run the 'psync' command";
        let refusal = Refusal::new("PSYNC", text.as_bytes());
        assert_eq!(refusal.code(), "NOPERM");
        assert_eq!(refusal.to_string(), format!("the server refused PSYNC: {text}"));
        assert_eq!(Refusal::new("PSYNC", b"").code(), "");
    }

    #[test]
    fn an_endless_error_text_is_clipped() {
        assert_eq!(Refusal::new("PING", &[b'x'; 100_000]).text.len(), TEXT_BYTES_MAX);
    }
}
