//! Guesses what a peer is that does not speak this protocol, so that the error can name the mistake: usually a wrong
//! port.

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
