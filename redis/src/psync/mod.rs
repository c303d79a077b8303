//! The replication handshake, both ends of it, as state machines without I/O.
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
//!      │  REPLCONF ACK <offset>, every second        │   after a full sync no stream before the first of these
//!      │ ──────────────────────────────────────────▶ │
//! ```
//!
//! - [`client`]: we are the replica. It stops at the first byte of payload or stream and never touches it.
//! - [`server`]: we are the primary. It writes up to the payload's header; body, mark and stream are the driver's.
//! - [`EofMark`](client::EofMark): finds the end of a payload whose length nobody knew.
//!
//! Both machines are fed with `handle_input`, asked with `poll_event` and drained with `take_output`. Neither knows the
//! time: how long to wait, and when to send a keep-alive or an acknowledgement, is the driver's affair.
//!
//! Not here: `SYNC` (before Redis 2.8), and the second connection that Valkey (`dual-channel`) and Redis 8
//! (`rdb-channel-repl`) open for the payload; it is used only between two ends that both claim it, and we never do.

pub mod client;
mod eof_mark;
pub mod server;

/// How long the mark is that ends a payload of unknown length (`CONFIG_RUN_ID_SIZE` in the servers).
pub const MARK_BYTES: usize = 40;

/// How the end of the payload will be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// `$<length>`: after so many bytes.
    Length(u64),
    /// `$EOF:<mark>`: when these forty random bytes have come. They are not part of the RDB.
    Mark([u8; MARK_BYTES]),
}

impl Payload {
    /// Reads what stands between `$` and the line's end.
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
