//! A simulated network in one process, driven by a seed. No socket, no thread, no clock.
//!
//! It does to its reader what real transports do, as often as its [`Faults`] say: it delays reads, completes them in
//! any order, takes the two halves of a read at different moments, loses answers, loses the source, revokes the region,
//! and leaves garbage where a failed read should have arrived.
//!
//! ```text
//!   Network (seed, faults)
//!     ├─ exporter() ─▶ SimExporter ── regions, grants
//!     └─ connector() ─▶ SimConnector ─ connect ─▶ SimPeer
//!                                                   post: draws the read's result from the peer's own random numbers
//!                                                   poll: one step of the peer's virtual time
//! ```
//!
//! - `faults`: the faults, as data. **Start here.**
//! - `exporter`, `connector`, `peer`: as in the other transports.
//! - `random`: the random numbers, which are part of what a seed means.
//!
//! **Time** is counted in steps; each poll of a peer is one step of that peer. Nothing depends on the machine's speed:
//! the same seed, the same order of connecting, and the same calls on a peer give the same completions, in any number
//! of threads. (Which bytes a read finds in a memory that is being written depends on the writer.)
//!
//! **A failure is a seed.** A [`Network`] that is dropped by a panicking test prints its seed and faults.
//! [`Network::new`] with these repeats the run.

mod connector;
mod exporter;
mod faults;
mod peer;
mod random;

#[cfg(test)]
mod tests;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

pub use connector::SimConnector;
pub use exporter::SimExporter;
pub use faults::{Chance, Faults};
pub use peer::SimPeer;
pub use random::Random;

use exporter::Source;

/// One simulated network.
pub struct Network {
    shared: Arc<Shared>,
}

impl Network {
    /// A network whose faults all follow from `seed`.
    pub fn new(seed: u64, faults: Faults) -> Network {
        let number = NETWORKS.fetch_add(1, Ordering::Relaxed);
        Network { shared: Arc::new(Shared { number, seed, faults, state: Mutex::new(State::default()) }) }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Connections that are made from now on lose nothing.
    pub fn calm(&self) {
        self.shared.state().is_calm = true;
    }

    /// A new source on this network.
    pub fn exporter(&self) -> SimExporter {
        SimExporter::new(self.shared.clone())
    }

    /// A reader's connector to this network.
    pub fn connector(&self) -> SimConnector {
        SimConnector::new(self.shared.clone())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("sim: to see this again: Network::new({:#x}, {:?})", self.shared.seed, self.shared.faults);
        }
    }
}

/// What exporters, connectors and peers of one network share.
struct Shared {
    /// Number of this network in the process: keys of other networks are refused.
    number: u64,
    seed: u64,
    faults: Faults,
    state: Mutex<State>,
}

/// The participants.
#[derive(Default)]
struct State {
    /// By number, which the keys carry; `None` for a source that was dropped.
    sources: Vec<Option<Source>>,
    /// Peers so far: each gets its own random numbers.
    peers: u64,
    /// New peers lose nothing.
    is_calm: bool,
}

impl Shared {
    /// Locks the state. A panic leaves it valid, because each method changes one thing.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Networks created in this process.
static NETWORKS: AtomicU64 = AtomicU64::new(1);
