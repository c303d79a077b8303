//! Both ends of the replication handshake, as state machines without I/O.
//!
//! ```text
//!   replica                                       primary
//!      │  PING, AUTH, REPLCONF capa eof capa psync2  │
//!      │ ──────────────────────────────────────────▶ │
//!      │  PSYNC <replid> <next offset>  |  PSYNC ? -1│
//!      │ ──────────────────────────────────────────▶ │
//!      │          +CONTINUE <replid>                 │   the stream follows at once, from <next offset> on
//!      │ ◀────────────────────────────────────────── │
//!      │     or   +FULLRESYNC <replid> <offset>      │   \n \n \n … while the server forks and saves
//!      │          $EOF:<mark>  or  $<length>         │
//!      │ ◀────────────────────────────────────────── │
//!      │          payload: an RDB                    │   (then <mark>, where there was one)
//!      │          stream, from <offset> + 1          │   the first byte of the stream has offset <offset> + 1
//!      │ ◀────────────────────────────────────────── │
//!      │  REPLCONF ACK <offset>, every second        │   after a mark no stream before the first of these; after
//!      │                                             │   a payload of known length it follows at once
//!      │ ──────────────────────────────────────────▶ │
//! ```
//!
//! - [`client`]: our side is the replica. It stops at the first byte of payload or stream and never consumes it.
//! - [`server`]: our side is the primary. It writes up to the payload's header; the driver writes body, mark and
//!   stream.
//! - [`EofMark`]: detects the end of a payload of unknown length.
//!
//! Both machines are fed with `handle_input`, queried with `poll_event` and drained with `take_output`. Neither knows
//! the time: the driver decides how long to wait, and when to send a keep-alive or an acknowledgement.
//!
//! Not here: `SYNC` as the whole handshake (before Redis 2.8), and the second connection of Redis 8
//! (`rdb-channel-repl`), which is used only if both ends claim it, and ours never does. The client does use the second
//! connection of Valkey (`dual-channel`).

pub mod client;
pub mod server;

/// Length of the mark that ends a payload of unknown length (`CONFIG_RUN_ID_SIZE` in the servers).
pub const MARK_BYTES: usize = 40;

/// How the end of the payload is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// `$<length>`: after this many bytes.
    Length(u64),
    /// `$EOF:<mark>`: when these 40 random bytes have arrived. They are not part of the RDB.
    Mark([u8; MARK_BYTES]),
}

impl Payload {
    /// Parses the text between `$` and the end of the line.
    fn parse(text: &[u8]) -> Option<Payload> {
        match text.strip_prefix(b"EOF:") {
            Some(mark) => mark.try_into().ok().map(Payload::Mark),
            None => crate::text::decimal_u64(text).map(Payload::Length),
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Payload::Length(length) => out.extend_from_slice(format!("${length}").as_bytes()),
            Payload::Mark(mark) => {
                out.extend_from_slice(b"$EOF:");
                out.extend_from_slice(mark);
            }
        }
        out.extend_from_slice(b"\r\n");
    }
}

// Detects the end of a payload of unknown length.

/// Compares the last 40 bytes received with the mark that `$EOF:` announced.
///
/// The primary sends nothing after the mark until it has received an acknowledgement. So it is enough to look at the
/// end of what has arrived, as the servers do: no chunk contains the mark *and* something after it. The payload can
/// therefore go from the socket to its final place without being searched.
#[derive(Debug, Clone)]
pub struct EofMark {
    mark: [u8; MARK_BYTES],
    /// The last bytes received, right-aligned; zeros where none were received.
    last: [u8; MARK_BYTES],
    /// How many bytes of `last` were received.
    received: usize,
}

impl EofMark {
    /// Starts before the first byte of the payload.
    pub fn new(mark: [u8; MARK_BYTES]) -> EofMark {
        EofMark { mark, last: [0; MARK_BYTES], received: 0 }
    }

    /// Takes the end of a chunk of `len` bytes: `tail` is its last `min(40, len)` bytes (more are allowed).
    ///
    /// True if the last 40 bytes received are the mark: the payload ended before them.
    pub fn observe(&mut self, tail: &[u8], len: usize) -> bool {
        debug_assert!(tail.len() >= len.min(MARK_BYTES), "the tail is shorter than the chunk's end");
        let skip = tail.len().saturating_sub(len.min(MARK_BYTES));
        let fresh = tail.get(skip..).unwrap_or_default();
        self.last.rotate_left(fresh.len());
        let kept = MARK_BYTES - fresh.len();
        if let Some(place) = self.last.get_mut(kept..) {
            place.copy_from_slice(fresh);
        }
        self.received = (self.received + fresh.len()).min(MARK_BYTES);
        self.received == MARK_BYTES && self.last == self.mark
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MARK: [u8; MARK_BYTES] = *b"0123456789abcdef0123456789abcdef01234567";

    fn tail(chunk: &[u8]) -> &[u8] {
        &chunk[chunk.len().saturating_sub(MARK_BYTES)..]
    }

    #[test]
    fn a_payload_shorter_than_the_mark_is_not_taken_for_one() {
        // A mark of zeros would equal the initial state.
        let mut watch = EofMark::new([0; MARK_BYTES]);
        assert!(!watch.observe(&[0; 39], 39));
        assert!(watch.observe(&[0], 1));
    }

    #[test]
    fn a_mark_in_the_middle_of_the_payload_is_content() {
        let mut watch = EofMark::new(MARK);
        let chunk = [&MARK[..], b"more"].concat();
        assert!(!watch.observe(tail(&chunk), chunk.len()));
        assert!(watch.observe(&MARK, MARK_BYTES));
    }

    proptest! {
        #[test]
        fn the_end_is_found_wherever_the_payload_is_cut(body in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..100) {
            let sent = [&body[..], &MARK].concat();
            let mut watch = EofMark::new(MARK);
            let pieces = sent.len().div_ceil(piece);
            for (number, chunk) in sent.chunks(piece).enumerate() {
                prop_assert_eq!(watch.observe(tail(chunk), chunk.len()), number + 1 == pieces);
            }
        }
    }
}
