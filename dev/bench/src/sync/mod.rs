//! One full sync, run and measured: a primary with data, empty servers, a method. The demo and `full_sync` use it.
//!
//! ```text
//!   Scene: one primary with data ──▶ Trial: N fresh servers, one Method, perhaps a writer ──▶ Outcome
//!                                       │
//!                                       ├─ watch: the same measurement for every method, from INFO of the replicas' servers
//!                                       ├─ agents: `remora source` and `remora replica`, as a user starts them
//!                                       ├─ copier: GET here, SET there
//!                                       └─ tools: programs of others
//!   Place: where all of it runs: this machine's loopback, or hosts of a test network with cables of a given rate
//! ```
//!
//! Equal for every method: the data, the writer, fresh replica servers, the moment of the end (the server's link to the
//! true primary is up, and it has reached the primary's offset of that moment). [`Method`] says what differs.

mod agents;
mod method;
mod scene;
mod summary;

pub use agents::{Program, Running, Show, Sight, Source};
pub use method::{Method, Setting, Upload};
pub(crate) use scene::available_memory;
pub use scene::{Compare, Content, Place, Scene, Shape, Trial};
pub use summary::{Outcome, Phases, Samples, Taken};

/// A sync can fail in many layers; the caller can only report the error.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
