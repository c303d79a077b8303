//! Memory that another process, or another host, may read.
//!
//! This crate exports *regions* of memory and reads ranges of them. It knows nothing of Redis, nor what the bytes mean.
//! It promises that bytes arrive, but not that they are consistent: `remora-table` detects torn reads.
//!
//! ```text
//!        source's host                                              reader's host
//!  ┌───────────────────────────┐                            ┌────────────────────────────┐
//!  │ Memory (one memfd)        │                            │ Memory: the sink           │
//!  │   ▲ written by its owner  │   key: by the messenger    │   ▲ bytes are written here │
//!  │   │                       │ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─▶ │   │                        │
//!  │ Exporter                  │                            │ Connector ── connect ──▶   │
//!  │   export, grant, revoke   │◀═══ post_read ═════════════│ Peer: post, poll, arm      │
//!  │                           │════ bytes ════════════════▶│                            │
//!  └───────────────────────────┘          shm | tcp | verbs └────────────────────────────┘
//! ```
//!
//! In reading order:
//!
//! - [`memory`]: [`Memory`], which this process writes, and [`View`], which is read-only. A crate of its own. **Start
//!   here.**
//! - [`region`]: names of exported memory: [`RegionId`], [`RegionKey`], and the [`Secret`] that grants access.
//! - [`transport`]: the three traits of every transport: [`Exporter`], [`Connector`], [`Peer`].
//! - [`admission`]: which sessions may read which regions; which connections may wait for their proof, when strangers
//!   connect too; and how a data connection proves its session, one machine for `shm`, `tcp` and `verbs`.
//! - [`shm`], [`tcp`], [`verbs`], and `sim` behind a feature: the transports. `tests/conformance/` tests all of them by
//!   one suite.
//! - [`error`]: errors outside a read, sorted by who can act on them.

#![deny(unsafe_code)]

mod address;
pub mod admission;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod region;
pub mod shm;
#[cfg(feature = "sim")]
pub mod sim;
pub mod tcp;
pub mod transport;
#[cfg(feature = "verbs")]
pub mod verbs;

pub use admission::Regions;
pub use error::{Denial, Error, ReadError};
pub use memory::{Claim, Handover, Memory, Pages, View, handover};
pub use region::{KeyError, RegionId, RegionKey, Secret, TransportKind};
pub use remora_memory as memory;
pub use transport::{Completion, Connector, Exporter, Peer, ReadRequest};
