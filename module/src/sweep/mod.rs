//! Sweep: a snapshot without a fork. The server's main thread walks through its keys, a moment at a time, and writes
//! each one down as it was at the beginning, or before a client changes it.
//!
//! ```text
//!   agent                       server
//!   REMORA.SWEEP ──────────────▶ one moment: replid and offset, functions, numbers of keys; the filter is on
//!        ◀── replid, offset ──── PING into the stream
//!   PSYNC replid offset+1 ─────▶ the stream from that moment on ─────────────────────────────────────▶ journal
//!                                each millisecond: some of the keys ahead          ─▶ records ─▶ socket ─▶ slots
//!                                before a command changes a key ahead: that key    ─▶ records ─▶ socket ─▶ slots
//!                                every key passed: do the numbers agree? filter off ─▶ end
//! ```
//!
//! - [`commands`]: what each command of the servers means for a sweep. Pure.
//! - [`course`]: where the sweep is, and which keys need nothing more. Pure. **Start there.**
//! - [`large`]: one large value, which is taken down in pieces while clients change it. Pure.
//! - [`begin`]: `REMORA.SWEEP`, and every condition under which a server is not swept.
//! - [`running`]: the sweep in the server: its filter, its turns, its end.
//! - [`feed`]: the bytes on their way to the agent.
//!
//! The rule: **whatever is in doubt ends the sweep with its reason**, and the source takes the snapshot by a fork. An
//! agent takes a snapshot for whole only with the mark at its end, which is written after the numbers of keys agree.

pub(crate) mod begin;
mod commands;
mod course;
mod feed;
mod large;
#[cfg(test)]
mod large_model;
#[cfg(test)]
mod model;
pub(crate) mod running;
