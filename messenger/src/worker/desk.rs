//! Where a worker leaves its tables while it sleeps: a thread that sends finds them there, and sends by itself what is
//! the only message under way. To wake the worker for it would take longer than everything else that a small request
//! costs.
//!
//! Messages that follow each other go by the worker: it sends many of them in one system call.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use super::inbox::SendsNow;
use super::keys::SessionKey;
use super::tables::Tables;
use crate::connection::Connection;

/// See the module's documentation. Empty while the worker is awake, and after its end.
#[derive(Default)]
pub(super) struct Desk(Mutex<Option<Box<Tables>>>);

impl Desk {
    /// The worker is about to sleep.
    pub(super) fn lay(&self, tables: Box<Tables>) {
        *self.lock() = Some(tables);
    }

    /// The worker is awake. Waits for a thread that sends.
    pub(super) fn take(&self) -> Option<Box<Tables>> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<Tables>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SendsNow for Desk {
    fn send_now(&self, connection: &Connection) -> bool {
        let mut tables = match self.0.try_lock() {
            Ok(tables) => tables,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false, // the worker takes them, or another thread sends
        };
        let Some(tables) = tables.as_mut() else { return false };
        tables.cx.now = Instant::now();
        let (key, Tables { cx, links, sessions, transmitter, .. }) = (SessionKey::of(connection), &mut **tables);
        if !sessions.find(key).is_some_and(|entry| transmitter.send_now(entry, links, cx)) {
            return false;
        }
        sessions.schedule(key);
        // The worker has set the clock for what it knew of.
        if let Some(next) = [sessions.next_timer(), links.next_timer()].into_iter().flatten().min() {
            links.reactor.set_timer(next);
        }
        true
    }
}
