//! The memory for the handshake's messages, and its layout. `lane_handshake` decides what is sent.

use std::sync::Arc;

use remora_rdma::objects::{Access, Domain, Registration};

use crate::{Error, Memory, Pages};

/// One page for the two messages that are sent over the connection, and for the reader's first READ. It is shared
/// memory, like all memory that is registered, so that a fork copies nothing. No remote end has rights to it.
pub(super) fn buffer(domain: &Arc<Domain>) -> Result<Arc<Registration>, Error> {
    let memory = Memory::create("remora-verbs-buffer", BUFFER_BYTES, Pages::Small)?;
    Ok(Registration::new(domain, &Arc::new(memory), Access::Landing)?)
}

const BUFFER_BYTES: u64 = 4096;

/// Offsets of the outgoing message, of the incoming one, and of the trial READ.
pub(super) const OUTGOING: u64 = 0;
pub(super) const INCOMING: u64 = 128;
pub(super) const TRIAL: u64 = 2048;

/// Maximum size of the trial READ.
pub(super) const TRIAL_BYTES: u64 = 1024;
