//! The protocols of Redis and Valkey: RESP, replication, RDB, `INFO`.
//!
//! Everything here is a pure function or a pure state machine: bytes in, bytes and events out. There is no socket, no
//! clock, no thread and no `unsafe`. The owner of the socket (the replica agent, the source, a test) feeds the machine
//! what it has read, writes what the machine returns, and decides how long to wait.
//!
//! ```text
//!            a primary's server                                       a replica's server
//!                   │  ▲                                                     │  ▲
//!       +FULLRESYNC │  │ PSYNC ? -1                      PSYNC <replid> <n>  │  │ +FULLRESYNC
//!       $EOF:<mark> │  │ REPLCONF ACK                    REPLCONF ACK        │  │ $EOF:<mark>
//!                   ▼  │                                                     ▼  │
//!            psync::client::Client                                    psync::server::Server
//!            (we play the replica)                                    (we play the primary)
//!                   │                                                        ▲
//!                   └── payload and stream: not ours, byte for byte ─────────┘
//!                       rdb reads the payload's head and tail, and finds its records
//! ```
//!
//! The modules, in reading order:
//!
//! - [`ReplId`]: the name of a replication history, 40 hexadecimal digits.
//! - [`resp`]: the wire format. [`resp::Decoder`] reads answers of servers, [`resp::CommandDecoder`] commands of
//!   clients. [`Refusal`] is an error that a server answers with.
//! - [`psync`]: the replication handshake, both ends. **Start here**: the drawings above the two state machines are the
//!   core of this crate.
//! - [`rdb`]: the envelope of a snapshot (magic, version, auxiliary fields, checksum) and the positions of its records.
//! - [`aof`]: the borders between the commands of an append-only file or a stream, and the manifest of such files.
//! - [`commands`]: a table of the commands that can stand in a stream: what they act on, and which servers have them.
//! - [`info`]: the answer to `INFO` as a map.
//!
//! Two examples drive the machines against real servers: `examples/snapshot.rs` takes a snapshot of a primary, and
//! `examples/feed.rs` makes a replica of it.
//!
//! What it is not: a Redis client (there is no connection), an RDB parser (values are decoded only to be converted), or
//! RESP3 (we never send `HELLO 3`, so no server answers in it).
//!
//! Everything read from a peer has a named limit. Exceeding a limit is an error that names it. Memory use grows with
//! the bytes that have arrived, never with a length that was only announced.
#![forbid(unsafe_code)]

/// The page of this crate: its example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Page;

pub mod aof;
pub mod commands;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod info;
pub mod psync;
pub mod rdb;
pub mod resp;

pub use info::{InvalidReplId, ReplId};
pub use resp::Refusal;

/// The highest replication offset: servers count offsets as signed 64-bit integers. An offset at most this high has a
/// next one.
pub const MAX_OFFSET: u64 = i64::MAX as u64;
