//! The reader: how an offer of a source becomes slots that are verified, and how slots are passed on to other readers.
//!
//! ```text
//!   source ══ conversation ══▶ Source ── join ──▶ Session ── offer ──▶ Way ══ transports ══▶ Feed ──▶ slots, stream
//!                                │                   │                                        ▲
//!      is it the right one? ── DataSet               └── read from another replica ──▶ Relay ═╝   (which lends slots)
//! ```
//!
//! A replica gives what it reads to its server. `remora fetch` and `remora backup` write it to a file. All of them go
//! this way:
//!
//! - [`addresses`] are the sources that a reader goes to, one after the other, and why one cannot be used.
//! - [`source`] is the conversation with the source agent, and the task that has it. Its [`Way`](source::Way) connects
//!   to what the source offers. **Start here.**
//! - [`data_set`] is what the first conversation has agreed on. Each later one is compared with it, so that no other
//!   data set is ever read. It also says which primary a source may name.
//! - [`feed`] is a snapshot and a journal, each behind a connection ([`parts`], with what counts what arrives), and
//!   where the next feed must begin.
//! - [`relay`] is a reader's part in passing slots on: [`relay::reader`] reads slots of other replicas, and
//!   lends them.
//! - [`spool`] keeps slots in files that outlive the process.
//!
//! The crate decides what is believed: of a source its history, and of a slot its checksum or its seal. What follows
//! from a loss is for its users. It knows no command line.
#![forbid(unsafe_code)]

pub mod addresses;
pub mod data_set;
pub mod feed;
mod options;
pub mod parts;
pub mod relay;
pub mod source;
pub mod spool;

pub use self::options::{ReadOptions, RelayOptions};
