//! Which transports an agent offers or takes, and why not the others. The transports themselves are `remora_fabric`'s.
//!
//! ```text
//!   source   shm ── verbs ── tcp      what this machine and `--listen` allow; a key for each goes into every offer
//!                                                │
//!   replica  shm ─▶ verbs ─▶ tcp      the first by which the tables can be read, or the one that was asked for
//! ```
//!
//! - [`offered`]: the source's RDMA. [`taken`]: the replica's choice.
//! - [`devices`]: the command that looks at this machine's transports alone.

pub mod devices;
pub(crate) mod offered;
pub(crate) mod taken;
