//! The objects of libibverbs, each with one owner that frees it: domains, registrations, completion queues, queue
//! pairs.
//!
//! ```text
//!   Device ◀── Domain ◀── Registration ──▶ Memory        an arrow is an Arc: no object is freed before its users
//!     ▲           ▲
//!     └ Channel ◀─┴─ Completions ◀── QueuePair
//! ```
//!
//! The SAFETY comments rely on this: *a pointer in one of these structs came from the library, is not null, and is
//! freed exactly once, in `drop`, after everything made from it*. The library's functions may be called by several
//! threads on the same object (ibv_get_device_list(3) and "Thread safety" of rdma-core), which is why all types are
//! `Send` and `Sync`.

mod completions;
mod domain;
mod queue_pair;

pub use completions::{BATCH, Channel, Completed, Completions};
pub use domain::{Access, Domain, Registration};
pub use queue_pair::{Batch, Capacity, NO_RIGHTS, QueuePair, RemoteRead};
pub(crate) use queue_pair::{PairOptions, SharedReceives, no_attributes};
