//! What the workers of one messenger share.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buffer::Pool;
use crate::config::{HandshakeConfig, Polling};
use crate::dispatcher::Dispatcher;
use crate::policy::Policy;
use crate::registry::Registry;
use crate::signal::Entity;
use crate::stack::{Address, Stacks};

/// What all workers of a messenger share.
pub(crate) struct Common {
    pub(crate) entity: Entity,
    pub(crate) policy: Policy,
    pub(crate) handshake: HandshakeConfig,
    pub(crate) polling: Polling,
    pub(crate) stacks: Stacks,
    pub(crate) dispatcher: Arc<dyn Dispatcher>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) max_sessions: usize,
    pub(crate) max_unauthenticated: usize,
    pub(crate) serving: AtomicBool,
    /// Where peers can connect to, once the messenger listens.
    pub(crate) address: Mutex<Option<Address>>,
    pub(crate) next_worker: AtomicUsize,
    pub(crate) registry: Mutex<Registry>,
}

impl Common {
    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
