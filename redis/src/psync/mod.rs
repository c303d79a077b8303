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
//! - [`EofMark`](client::EofMark): detects the end of a payload of unknown length.
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
            None => crate::info::decimal_u64(text).map(Payload::Length),
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
