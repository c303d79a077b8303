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

mod batch;
mod completions;
mod domain;
mod queue_pair;
mod receives;
mod registration;

pub use batch::{Batch, RemoteRead};
pub use completions::{BATCH, Channel, Completed, Completions};
pub use domain::Domain;
pub use queue_pair::{Capacity, NO_RIGHTS, QueuePair};
pub(crate) use queue_pair::{PairOptions, no_attributes};
pub(crate) use receives::SharedReceives;
pub use registration::{Access, Registration};
