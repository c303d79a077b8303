//! What an owner sends and receives.

use bytes::Bytes;

use crate::buffer::Buffer;
use crate::frame::MAX_SEGMENT_BYTES;
use crate::throttle::Permit;

/// A message to be sent: up to three bodies, shared and not copied.
///
/// `front` is for what the receiver parses, `data` for bulk data that should land in memory of the receiver's choice;
/// `middle` is for anything in between.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// The request that this answers, or any other number that the owner chooses.
    pub transaction: u64,
    /// The kind of message, chosen by the owner.
    pub kind: u16,
    /// The first body.
    pub front: Bytes,
    /// The second body.
    pub middle: Bytes,
    /// The third body.
    pub data: Bytes,
    /// Alignment of the data at the receiver: a power of two up to 4096; 0 counts as 1.
    pub alignment: u16,
}

impl Message {
    /// A message with one body.
    pub fn new(transaction: u64, kind: u16, front: impl Into<Bytes>) -> Message {
        Message { transaction, kind, front: front.into(), ..Message::default() }
    }

    /// Adds data.
    pub fn with_data(mut self, data: impl Into<Bytes>) -> Message {
        self.data = data.into();
        self
    }

    /// Length of all bodies, in bytes.
    pub fn bytes(&self) -> usize {
        self.front.len() + self.middle.len() + self.data.len()
    }

    /// Whether one frame can carry it.
    pub(crate) fn fits(&self) -> bool {
        let most = MAX_SEGMENT_BYTES as usize;
        self.front.len() <= most && self.middle.len() <= most && self.data.len() <= most
    }
}

/// A received message. It counts against the receive throttle of its policy while it is held: drop it, or take its
/// bodies out, to let the next one in.
#[derive(Debug)]
pub struct Delivery {
    /// The request that this answers.
    pub transaction: u64,
    /// The kind of message, chosen by its sender.
    pub kind: u16,
    /// Its number in the session, from 1.
    pub number: u64,
    /// The first body.
    pub front: Buffer,
    /// The second body.
    pub middle: Buffer,
    /// The third body.
    pub data: Buffer,
    /// Its share of the throttle.
    pub permit: Option<Permit>,
}

impl Delivery {
    /// A message that answers this one: same transaction, same kind.
    pub fn reply(&self, front: impl Into<Bytes>) -> Message {
        Message::new(self.transaction, self.kind, front)
    }
}

/// A message whose head has arrived and whose bodies have not. It decides where the bodies are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The request that it answers.
    pub transaction: u64,
    /// The kind of message, chosen by its sender.
    pub kind: u16,
    /// Lengths of front, middle and data, in bytes.
    pub bodies: [u32; 3],
    /// Alignment that the sender wants for its data, in bytes.
    pub alignment: usize,
}
