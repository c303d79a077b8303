//! Capture: the server's fork child writes the snapshot into the table of whoever armed it.
//!
//! ```text
//!   agent                           server                                   its fork child
//!   REMORA.ARM ────────────────────▶ takes page and table, keeps them
//!   PSYNC ─────────────────────────▶ +FULLRESYNC, fork ────────────────────▶ PERSISTENCE_RDB_START
//!        ◀══ page: asks, replid, offset ═════════════════════════════════════ is it alone?
//!        ═══ page: may begin, if +FULLRESYNC said the same ════════════════▶
//!        ◀══ table: slots, one after the other ═══════════════════════════════ walk: long strings into slots, and out of its memory
//!        ◀── the RDB of all the rest, the stream ◀──── pipe ◀──────────────── … goes on as if nothing had been
//!   REMORA.DISARM, or it falls silent: the server forgets
//! ```
//!
//! - [`armed`]: what the server keeps between arming and fork, and when it forgets. **Start there.**
//! - [`commands`]: what agents and people ask.
//! - [`child`]: what happens in a fork child before its first byte. [`exclusive`]: whether anybody else relies on it.
//! - [`walk`]: the data set, key by key. [`output`]: where it goes, and what is done while there is no room.
//! - [`record`]: what it looks like there.
//!
//! In the server itself nothing is done but keeping two descriptors and looking once a second whether the agent still lives. All work
//! is done in the child, where a mistake costs a snapshot and not the server.

pub(crate) mod armed;
pub(crate) mod child;
pub(crate) mod commands;
mod exclusive;
mod output;
mod record;
mod walk;
