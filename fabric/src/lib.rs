//! Memory that another process, or another host, may read.
//!
//! Redis is unknown here, and so is what the bytes mean: this crate lends out *regions* of memory and fetches pieces of them.
//! It promises that bytes arrive, never that they are consistent; `remora-table` above it makes sense of them.
//! All unsafe code of Remora's data path lives in this crate.
//!
//! ```text
//!        source's host                                              reader's host
//!  ┌───────────────────────────┐                            ┌────────────────────────────┐
//!  │ Memory (one memfd)        │                            │ Memory: the sink           │
//!  │   ▲ written by its owner  │   key: by the messenger    │   ▲ pieces land here       │
//!  │   │                       │ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─▶ │   │                        │
//!  │ Exporter                  │                            │ Connector ── connect ──▶   │
//!  │   export, grant, revoke   │◀═══ post_read ═════════════│ Peer: post, poll, arm      │
//!  │                           │════ bytes ════════════════▶│                            │
//!  └───────────────────────────┘     sim | shm | tcp | verbs └────────────────────────────┘
//! ```
//!
//! In the order in which one should meet them:
//!
//! - [`memory`]: [`Memory`], which we own and write, and [`View`], a read-only window. **Start here.**
//! - [`region`]: the names of a piece of lent memory: [`RegionId`], [`RegionKey`], and the [`Secret`] that opens it.
//! - [`transport`]: the three traits that every transport has: [`Exporter`], [`Connector`], [`Peer`].
//! - [`auth`]: how a data connection proves its session, shared by `shm` and `tcp`.
//! - [`shm`], [`tcp`], [`verbs`], and `sim` behind a feature: the transports, sisters. `tests/conformance/` holds what none of them may fail.
//! - [`handover`]: memory given to another process of this host that shall write it.
//! - [`error`]: what can go wrong outside a read, sorted by who can act on it.

#![deny(unsafe_code)]

mod address;
pub mod auth;
pub mod error;
mod lane_handshake;
mod outstanding;
pub mod region;
pub mod shm;
#[cfg(feature = "sim")]
pub mod sim;
pub mod tcp;
pub mod transport;
#[cfg(feature = "verbs")]
pub mod verbs;

pub use error::{Denial, Error, ReadError};
pub use memory::{Claim, Handover, Memory, Pages, View, handover};
pub use region::{KeyError, RegionId, RegionKey, Secret, TransportKind};
pub use remora_memory as memory;
pub use transport::{Completion, Connector, Exporter, Peer, ReadRequest};
