//! Link failure: why the last connection to the link's port did not become the server's link.
//!
//! The delivery's thread notes it; the server's task reads it when the server stays away, to name the cause.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkFailure(Arc<Mutex<Option<String>>>);

impl LinkFailure {
    /// A connection from there was closed for this reason.
    pub(super) fn note(&self, peer: SocketAddr, why: &str) {
        let text = format!("connection from {} failed: {why}", peer.ip());
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }

    /// What was noted last; `None` if no connection has failed.
    pub(super) fn last(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
