//! What both ends of a connection sign, and the memory that the handshake's messages pass through. Who is let in is `exporter`'s.

use std::sync::Arc;

use remora_rdma::objects::{Access, Domain, Registration};

use super::wire::{Challenge, Hello};
use crate::{
    Error, Memory, Pages, Secret,
    auth::{self, PROOF_BYTES},
};

/// What both ends have said so far, which is what they sign.
#[derive(Clone)]
pub(super) struct Transcript(Vec<u8>);

impl Transcript {
    pub(super) fn new(hello: &Hello, challenge: &Challenge) -> Transcript {
        Transcript([&hello.encode()[..], &challenge.encode()[..]].concat())
    }

    pub(super) fn prove(&self, end: End, secret: &Secret) -> [u8; PROOF_BYTES] {
        auth::prove(secret, end.label(), &self.0)
    }

    /// Whether `end` has signed this with `secret`. Without one the answer is no, after the same work.
    pub(super) fn is_proved(&self, end: End, secret: Option<&Secret>, proof: &[u8; PROOF_BYTES]) -> bool {
        auth::verify_known(secret, end.label(), &self.0, proof)
    }
}

/// Who signs.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    Reader,
    Source,
}

impl End {
    fn label(self) -> &'static [u8] {
        match self {
            End::Reader => b"remora verbs 1 reader",
            End::Source => b"remora verbs 1 source",
        }
    }
}

/// One page for the two messages that are sent over the connection, and for the reader's first READ. Shared memory like everything
/// that a card is told of here, so that a fork copies nothing; no remote end has any right to it.
pub(super) fn letter(domain: &Arc<Domain>) -> Result<Arc<Registration>, Error> {
    let memory = Memory::create("remora-verbs-letter", LETTER_BYTES, Pages::Small)?;
    Ok(Registration::new(domain, &Arc::new(memory), Access::Landing)?)
}

const LETTER_BYTES: u64 = 4096;

/// Where a message lies that goes out, and one that comes in, in the letter; and where the trial READ lands.
pub(super) const OUTGOING: u64 = 0;
pub(super) const INCOMING: u64 = 128;
pub(super) const TRIAL: u64 = 2048;

/// Bytes of the trial READ, at most.
pub(super) const TRIAL_BYTES: u64 = 1024;
