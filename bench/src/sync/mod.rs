//! One full sync, staged and measured: a primary with data, empty servers, a method. What the demo and `full_sync` stand on.
//!
//! ```text
//!   Scene: one primary with data ──▶ Trial: N fresh servers, one Method, perhaps a writer ──▶ Outcome
//!                                       │
//!                                       ├─ watch: the same eyes for every method, by INFO of the replicas' servers
//!                                       ├─ agents: `remora source` and `remora replica`, as a user starts them
//!                                       └─ copier: GET here, SET there
//!   Place: where all of it runs: this machine's loopback, or hosts of a test network with cables of a given rate
//! ```
//!
//! What is the same for every method: the data, the writer, fresh replica servers, the moment that ends it (the server's link to the
//! true primary is up and the primary's offset of that moment is reached). What differs is said by [`Method`].

mod agents;
mod copier;
mod costs;
mod lost;
mod method;
mod outcome;
mod peak;
mod place;
mod scene;
mod summary;
mod watch;

pub use agents::{Program, Source, Stay};
pub use method::{Method, Setting};
pub use outcome::{Outcome, Phases};
pub use place::Place;
pub(crate) use scene::available_memory;
pub use scene::{Scene, Shape, Trial};
pub use summary::{Samples, Taken};
pub use watch::{Show, Sight};

/// A sync fails for reasons of many layers, and whoever staged it can only say so.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
