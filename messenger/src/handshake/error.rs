//! Why a handshake failed, sorted by who can act on it.

use std::time::Duration;

use remora_wire::Malformed;

use super::Versions;

/// Why a handshake failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    // The operator of the two ends can act. Another attempt fails in the same way.
    /// The peer speaks another protocol.
    #[error("the peer speaks another protocol: it {looks_like}")]
    NotRemora {
        /// What the peer seems to be, as the end of a sentence that begins with "it".
        looks_like: String,
    },
    /// The two ends have no version in common.
    #[error("the peer speaks version {theirs}, this end {ours}")]
    NoCommonVersion {
        /// What the peer speaks.
        theirs: Versions,
        /// What this end speaks.
        ours: Versions,
    },
    /// One end could not prove that it holds the other end's token.
    #[error("the peer does not hold the same token as this end{}", if *.said_by_peer { " (reported by the peer)" } else { "" })]
    WrongToken {
        /// The peer rejected our proof and said so. Otherwise its proof failed here, which an altered handshake also
        /// causes.
        said_by_peer: bool,
    },

    // The owner of the peer refused.
    /// The peer's owner refused the connection. The layer attaches no meaning to the code.
    #[error("the peer refused the connection with code {code}{}{text}", if .text.is_empty() { "" } else { ": " })]
    Refused {
        /// The owner's code, at least [`super::FIRST_OWNER_REFUSAL`] if the peer keeps to the protocol.
        code: u8,
        /// The owner's explanation; may be empty.
        text: String,
    },

    // The network or the peer's host: a later attempt may succeed.
    /// The handshake did not complete in time.
    #[error("the handshake took longer than {limit:?}")]
    TimedOut {
        /// The limit that was exceeded.
        limit: Duration,
    },

    // The peer is broken, or the bytes were altered on their way.
    /// Bytes that are not a frame of the handshake.
    #[error("the peer sent a malformed frame: {0}")]
    Frame(#[from] FrameError),
    /// A valid frame that the current state does not allow.
    #[error("the peer sent a frame with tag {tag:#04x} out of turn")]
    OutOfTurn {
        /// The frame's tag.
        tag: u8,
    },
}

impl From<Malformed> for HandshakeError {
    fn from(malformed: Malformed) -> HandshakeError {
        FrameError::Payload(malformed).into()
    }
}

/// Bytes that are not a frame of the handshake, or a field of one with a value that is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes do not begin with a frame's magic.
    #[error("bad frame magic")]
    Magic,
    /// The checksum of a preamble or a payload is wrong.
    #[error("the checksum of a frame's {part} does not match")]
    Checksum {
        /// "preamble" or "payload".
        part: &'static str,
    },
    /// Flags that this version does not define.
    #[error("frame uses flags {flags:#04x}, which are not defined")]
    Flags {
        /// The preamble's flag byte.
        flags: u8,
    },
    /// The preamble gives a length above the limit.
    #[error("frame payload of {length} bytes exceeds the limit of {limit}")]
    TooLong {
        /// The length that the preamble gives, in bytes.
        length: u32,
        /// The bound, in bytes.
        limit: u32,
    },
    /// A field has a value that is not allowed.
    #[error("the handshake contains {what}")]
    Field {
        /// The value, in words.
        what: &'static str,
    },
    /// The payload is not what its tag says.
    #[error(transparent)]
    Payload(#[from] Malformed),
}

// Guesses what a peer is that does not speak this protocol, so that the error can name the mistake: usually a wrong
// port.

/// What the first bytes look like, as the end of a sentence that begins with "it".
pub(crate) fn looks_like(bytes: &[u8]) -> String {
    let known = KNOWN.iter().find(|(start, _)| bytes.starts_with(start));
    if let Some((_, what)) = known {
        return (*what).to_owned();
    }
    format!("began with \"{}\"", bytes[..bytes.len().min(SHOWN_BYTES)].escape_ascii())
}

/// First bytes of known protocols, longer ones before their prefixes.
const KNOWN: &[(&[u8], &str)] = &[
    (b"HTTP/", "answered as an HTTP server"),
    (b"GET ", "spoke HTTP"),
    (b"HEAD ", "spoke HTTP"),
    (b"POST ", "spoke HTTP"),
    (b"PUT ", "spoke HTTP"),
    (b"OPTIONS ", "spoke HTTP"),
    (b"PRI * HTTP/2", "spoke HTTP"),
    (b"SSH-", "spoke SSH"),
    (b"\x16\x03", "spoke TLS"),
    (b"\x15\x03", "answered in TLS"),
    (b"-NOAUTH", "answered as a Redis or Valkey server (which wants a password)"),
    (b"-DENIED", "answered as a Redis or Valkey server (in protected mode)"),
    (b"-ERR", "answered as a Redis or Valkey server"),
    (b"-LOADING", "answered as a Redis or Valkey server (which is loading)"),
    (b"+", "answered in RESP, as a Redis or Valkey server does"),
    (b"-", "answered in RESP, as a Redis or Valkey server does"),
    (b"*", "spoke RESP, as a client or replica of Redis or Valkey does"),
    (b"PING", "spoke RESP, as a client or replica of Redis or Valkey does"),
];

/// Number of unknown bytes that are shown.
const SHOWN_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_protocols_are_named() {
        for (bytes, what) in [
            (&b"HTTP/1.1 400 Bad Request\r\n"[..], "HTTP"),
            (b"GET / HTTP/1.1\r\n", "HTTP"),
            (b"-ERR unknown command 'REMORA'\r\n", "Redis or Valkey server"),
            (b"-NOAUTH Authentication required.\r\n", "password"),
            (b"*1\r\n$4\r\nPING\r\n", "client or replica of Redis"),
            (b"\x16\x03\x01\x02\x00", "TLS"),
            (b"SSH-2.0-OpenSSH_9.2", "SSH"),
        ] {
            assert!(looks_like(bytes).contains(what), "{}", looks_like(bytes));
        }
    }

    #[test]
    fn unknown_bytes_are_shown_but_cannot_play_tricks_on_a_terminal() {
        assert_eq!(looks_like(b"\x1b[2Jhi"), "began with \"\\x1b[2Jhi\"");
        assert!(looks_like(&[0xff; 1000]).len() < 100);
    }
}
