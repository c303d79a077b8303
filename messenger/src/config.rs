//! Settings of a messenger, other than the behaviour of its sessions ([`Policy`](crate::Policy)).

use std::sync::Arc;
use std::time::Duration;

use crate::handshake::Versions;
use crate::keyring::Keyring;
use crate::stack::rdma::RdmaOptions;
use crate::stack::tls::TlsOptions;

/// Settings of a messenger, other than the behaviour of its sessions ([`Policy`](crate::Policy)).
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of threads. A connection lives on one of them.
    pub workers: usize,
    /// Whether bodies have checksums. They are left out only where both ends ask for that.
    pub summed: bool,
    /// The secrets that both ends share. With a token frames are sealed, unless `sealed` is false at both ends. Without
    /// one every peer is accepted.
    pub keys: Option<Arc<Keyring>>,
    /// The versions of the owner's protocol that this end speaks. The ends agree on the newest common one.
    pub versions: Versions,
    /// Whether frames have seals if there is a token.
    pub sealed: bool,
    /// Whether a worker polls before it sleeps.
    pub polling: Polling,
    /// Bytes of received data that the pool may keep for reuse.
    pub pool_bytes: usize,
    /// Greatest number of sessions.
    pub max_sessions: usize,
    /// What `tls:` addresses need.
    pub tls: TlsOptions,
    /// Settings of RDMA links.
    pub rdma: RdmaOptions,
    /// Greatest number of links per worker without a session. This bounds the memory that unauthenticated peers can
    /// take.
    pub max_unauthenticated: usize,
}

/// What a worker does when it has no work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polling {
    /// It sleeps at once: least processor time.
    Event,
    /// It never sleeps: least latency, at the price of one processor.
    Spin,
    /// It polls for up to this long, and for less where polling has rarely found something.
    Adaptive(Duration),
}

impl Default for Options {
    fn default() -> Options {
        Options {
            workers: 1,
            summed: true,
            keys: None,
            versions: Versions::only(1),
            sealed: true,
            polling: Polling::Event,
            pool_bytes: POOL_BYTES,
            max_sessions: MAX_SESSIONS,
            tls: TlsOptions::default(),
            rdma: RdmaOptions::default(),
            max_unauthenticated: MAX_UNAUTHENTICATED,
        }
    }
}

/// What this end brings into every handshake.
#[derive(Debug, Clone)]
pub(crate) struct HandshakeConfig {
    pub(crate) keys: Arc<Keyring>,
    pub(crate) versions: Versions,
    pub(crate) summed: bool,
    pub(crate) sealed: bool,
}

impl HandshakeConfig {
    /// What this end can do without. Only what both ends can do without is left out, so no peer weakens this end.
    pub(crate) fn features(&self) -> u64 {
        u64::from(!self.summed) * MAY_LEAVE_SUMS + u64::from(!self.sealed) * MAY_LEAVE_SEALS
    }
}

/// Feature bits of the handshake: this end can do without checksums over bodies, and without seals.
pub(crate) const MAY_LEAVE_SUMS: u64 = 1;
pub(crate) const MAY_LEAVE_SEALS: u64 = 2;

/// Twice what a fast link brings in a hundredth of a second.
const POOL_BYTES: usize = 64 << 20;

/// Each session costs a descriptor and a few kilobytes.
const MAX_SESSIONS: usize = 65_536;

/// As many connections as arrive at once when a server with very many clients comes back.
const MAX_UNAUTHENTICATED: usize = 16_384;
