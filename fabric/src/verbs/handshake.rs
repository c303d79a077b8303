//! The memory that the handshake's messages pass through, and its layout. What is said is `lane_handshake`'s machine.

use std::sync::Arc;

use remora_rdma::objects::{Access, Domain, Registration};

use crate::{Error, Memory, Pages};

/// One page for the two messages that are sent over the connection, and for the reader's first READ. Shared memory like everything
/// that a card is told of here, so that a fork copies nothing; no remote end has any right to it.
pub(super) fn buffer(domain: &Arc<Domain>) -> Result<Arc<Registration>, Error> {
    let memory = Memory::create("remora-verbs-buffer", BUFFER_BYTES, Pages::Small)?;
    Ok(Registration::new(domain, &Arc::new(memory), Access::Landing)?)
}

const BUFFER_BYTES: u64 = 4096;

/// Where a message lies that goes out, and one that comes in, in the buffer; and where the trial READ lands.
pub(super) const OUTGOING: u64 = 0;
pub(super) const INCOMING: u64 = 128;
pub(super) const TRIAL: u64 = 2048;

/// Bytes of the trial READ, at most.
pub(super) const TRIAL_BYTES: u64 = 1024;
