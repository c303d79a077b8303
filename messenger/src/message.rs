//! What an owner sends and is given.

use bytes::Bytes;

use crate::buffer::Buffer;
use crate::frame::MAX_SEGMENT_BYTES;
use crate::throttle::Permit;

/// A message to be sent: up to three bodies, shared rather than copied.
///
/// `front` is for the words, `data` for the bulk that should land in memory of the receiver's choice; `middle` is between.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// Which question this answers, or any other name that the owner gives it.
    pub transaction: u64,
    /// What the owner says it is.
    pub kind: u16,
    /// The first body.
    pub front: Bytes,
    /// The second.
    pub middle: Bytes,
    /// The third.
    pub data: Bytes,
    /// Where the data wants to begin at the receiver: a multiple of this, a power of two up to 4096; 0 counts as 1.
    pub alignment: u16,
}

impl Message {
    /// A message with one body.
    pub fn new(transaction: u64, kind: u16, front: impl Into<Bytes>) -> Message {
        Message { transaction, kind, front: front.into(), ..Message::default() }
    }

    /// With data.
    pub fn with_data(mut self, data: impl Into<Bytes>) -> Message {
        self.data = data.into();
        self
    }

    /// Bytes of all bodies.
    pub fn bytes(&self) -> usize {
        self.front.len() + self.middle.len() + self.data.len()
    }

    /// Whether a frame can carry it.
    pub(crate) fn fits(&self) -> bool {
        let most = MAX_SEGMENT_BYTES as usize;
        self.front.len() <= most && self.middle.len() <= most && self.data.len() <= most
    }
}

/// A message that came. While it is held, it counts against the receive throttle of its policy; drop it, or take its bodies
/// out of it, to let the next one in.
#[derive(Debug)]
pub struct Delivery {
    /// Which question this answers.
    pub transaction: u64,
    /// What its sender says it is.
    pub kind: u16,
    /// Its number in its session, from 1.
    pub number: u64,
    /// The first body.
    pub front: Buffer,
    /// The second.
    pub middle: Buffer,
    /// The third.
    pub data: Buffer,
    /// Its share of the throttle.
    pub permit: Option<Permit>,
}

impl Delivery {
    /// An answer to it: the same transaction and kind.
    pub fn reply(&self, front: impl Into<Bytes>) -> Message {
        Message::new(self.transaction, self.kind, front)
    }
}

/// A message whose head has come and whose bodies have not: what decides where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Which question it answers.
    pub transaction: u64,
    /// What its sender says it is.
    pub kind: u16,
    /// Bytes of front, middle and data.
    pub bodies: [u32; 3],
    /// Where the sender wants its data to begin: a multiple of this many bytes.
    pub alignment: usize,
}
