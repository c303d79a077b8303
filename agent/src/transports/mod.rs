//! The transports that an agent offers or uses, and why not the others. `remora_fabric` has the transports themselves.
//!
//! ```text
//!   source   shm ── verbs ── tcp      what this host and `--listen` allow; every offer has a key for each
//!                                                │
//!   replica  shm ─▶ verbs ─▶ tcp      the first over which the tables can be read, or the requested one
//! ```
//!
//! - [`exporters`]: the source's RDMA. [`connectors`]: the replica's choice.
//! - [`devices`]: the command that reports on this host's transports.

pub(crate) mod connectors;
pub mod devices;
pub(crate) mod exporters;
