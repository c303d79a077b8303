//! A network inside one process, driven by a seed: the transport that misbehaves on demand. No socket, no thread, no clock.
//!
//! Everything that a real transport may do to its reader, this one does, as often as its [`Faults`] say: it delays, completes in any
//! order, takes the two halves of one read at different moments, never answers, loses the source, revokes the region, and leaves
//! rubbish where a failed read should have landed. What the layers above survive here they survive on a wire.
//!
//! ```text
//!   Network (seed, faults)
//!     ├─ exporter() ─▶ SimExporter ── regions, grants
//!     └─ connector() ─▶ SimConnector ─ connect ─▶ SimPeer
//!                                                   post: draws its fate from the peer's own random numbers
//!                                                   poll: one step of the peer's virtual time
//! ```
//!
//! - `faults`: what may go wrong, as data. **Start here.**
//! - `exporter`, `connector`, `peer`: as in the sister transports.
//! - `random`: the random numbers, which are part of what a seed means.
//!
//! **Time** is counted in steps; each poll of a peer is one step of that peer. So nothing depends on the machine's speed: the same
//! seed, the same order of connecting, and the same calls on a peer give the same completions, in however many threads the peers
//! live. (What bytes a read finds in a memory that is being written at the same time is up to the writer.)
//!
//! **A failure is a seed.** A [`Network`] that is dropped by a panicking test prints its seed and faults; with
//! [`Network::new`] they bring the same run back.

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
    /// A network whose every accident follows from `seed`.
    pub fn new(seed: u64, faults: Faults) -> Network {
        let number = NETWORKS.fetch_add(1, Ordering::Relaxed);
        Network { shared: Arc::new(Shared { number, seed, faults, state: Mutex::new(State::default()) }) }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// A new source on this network.
    pub fn exporter(&self) -> SimExporter {
        SimExporter::new(self.shared.clone())
    }

    /// A reader's way into this network.
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
    /// Which network of this process: a key of another one is refused.
    number: u64,
    seed: u64,
    faults: Faults,
    state: Mutex<State>,
}

/// Who is on the network.
#[derive(Default)]
struct State {
    /// By number, which the keys carry; `None` is a source that is gone.
    sources: Vec<Option<Source>>,
    /// Peers so far: each gets its own stream of random numbers.
    peers: u64,
}

impl Shared {
    /// Each method changes one thing, so that what a panic leaves behind is whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Networks made by this process so far.
static NETWORKS: AtomicU64 = AtomicU64::new(1);
