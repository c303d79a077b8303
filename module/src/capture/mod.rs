//! Capture: the server's fork child writes the snapshot into the table of the agent that armed it.
//!
//! ```text
//!   agent                           server                                   its fork child
//!   REMORA.ARM ────────────────────▶ takes page and table, keeps them
//!   PSYNC ─────────────────────────▶ +FULLRESYNC, fork ────────────────────▶ PERSISTENCE_RDB_START
//!        ◀══ page: asks, replid, offset ═════════════════════════════════════ exclusive?
//!        ═══ page: may begin, if +FULLRESYNC said the same ════════════════▶
//!        ◀══ table: slots, one after the other ═══════════════════════════════ walk: long strings into slots, and out of its memory
//!        ◀── the RDB of all the rest, the stream ◀──── pipe ◀──────────────── … saves what is left
//!   REMORA.DISARM, or the agent is gone: the server forgets
//! ```
//!
//! - [`armed`]: what the server keeps between arming and fork, and when it is dropped; whether anything else relies on
//!   the child; the version of the file format; why a capture fails. **Start there.**
//! - [`commands`]: the commands for agents and people.
//! - [`child`]: the work of a fork child before its first byte.
//! - [`walk`]: iterates over the data set. [`fast_walk`]: the same in the server's own tables, where its build is
//!   known.
//! - [`output`]: writes into the table, and waits while there is no space.
//! - [`record`]: the encoding.
//!
//! The server's own process only keeps two descriptors and checks once a second whether the agent is alive. All work is
//! done in the child, where a bug costs a snapshot and not the server.

pub(crate) mod armed;
pub(crate) mod child;
pub(crate) mod commands;
mod fast_walk;
mod output;
pub(crate) mod record;
mod walk;

pub(crate) use walk::shown;
