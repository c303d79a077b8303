//! From bytes to messages: receives from a link, finds frames, gives messages memory to land in, and dispatches them.

use std::io::{self, IoSliceMut};
use std::sync::Arc;

use super::Context;
use super::inbox::Command;
use super::keys::LinkKey;
use super::link::{Incoming, LinkState};
use super::sessions::SessionEntry;
use crate::buffer::Buffer;
use crate::error::LinkError;
use crate::frame::{Malformed, NO_BODIES, Preamble, Step};
use crate::message::{Arrival, Delivery};
use crate::session::{Verdict, Violation};
use crate::signal::{Label, MESSAGE, Signal};
use crate::throttle::Permit;

/// A link and the session that it serves, if it serves one yet; resolved once for everything that came together.
pub(super) struct Served<'a> {
    pub(super) key: LinkKey,
    pub(super) link: &'a mut LinkState,
    pub(super) session: Option<&'a mut SessionEntry>,
    pub(super) cx: &'a Context,
}

/// What a receive brought.
pub(super) struct Received {
    /// Bytes in the buffer. Those that landed in a message's memory are not among them.
    pub(super) buffered: usize,
    /// There may be more to receive.
    pub(super) is_full: bool,
}

impl Served<'_> {
    /// Receives once: into the memory of the message that is coming, then into the buffer. `None` if there is nothing
    /// to receive, or the link is not to be read.
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Result<Option<Received>, LinkError> {
        if !self.link.wanted().readable {
            return Ok(None);
        }
        let (received, room, landed) = match self.link.reader.landing() {
            Some(landing) => {
                let direct = landing.len();
                let mut pieces = [IoSliceMut::new(landing), IoSliceMut::new(buffer)];
                (self.link.link.receive(&mut pieces), direct + RECEIVE_BYTES, direct)
            }
            None => (self.link.link.receive(&mut [IoSliceMut::new(buffer)]), RECEIVE_BYTES, 0),
        };
        let count = match received {
            Ok(0) => return Err(LinkError::Ended),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(LinkError::Io(error)),
        };
        let direct = count.min(landed);
        self.link.reader.landed(direct);
        self.note_received();
        Ok(Some(Received { buffered: count - direct, is_full: count == room }))
    }

    /// Notes for the session that its peer lives.
    pub(super) fn note_received(&mut self) {
        if let Some(session) = &mut self.session {
            session.note_received(self.cx);
        }
    }

    /// Finds frames in bytes that have come, and dispatches the messages among them. Returns at the first signal, which
    /// may change what the link serves: the caller handles it and goes on with the rest of `input`. `None`: everything
    /// is read, or kept because there is no room.
    pub(super) fn read(&mut self, input: &mut &[u8]) -> Result<Option<Signal>, LinkError> {
        loop {
            match self.link.reader.next(input)? {
                Step::Head(preamble) => self.head(preamble)?,
                Step::Whole => match self.link.incoming.take() {
                    Some(Incoming::Message(label, permit)) => self.deliver(&label, permit)?,
                    Some(Incoming::Signal(signal)) => return Ok(Some(signal)),
                    Some(Incoming::Blocked(..)) | None => {}
                },
                Step::Incomplete => {
                    self.link.held.extend_from_slice(input); // nothing is left unless the link is blocked
                    return Ok(None);
                }
            }
        }
    }

    fn head(&mut self, preamble: Preamble) -> Result<(), LinkError> {
        if preamble.tag == MESSAGE {
            let label = Label::decode(self.link.reader.head())?;
            self.link.incoming = Some(Incoming::Blocked(preamble, label));
            return self.admit();
        }
        let malformed = Malformed::Content { tag: preamble.tag };
        self.link.incoming = Some(Incoming::Signal(Signal::decode(preamble.tag, self.link.reader.head())?));
        self.link.reader.land(NO_BODIES).map_err(|_| LinkError::Malformed(malformed)) // signals have no bodies
    }

    /// Gives the message that blocks the link memory to land in, if there is room for it. Otherwise the link stays
    /// blocked, and the peer waits.
    pub(super) fn admit(&mut self) -> Result<(), LinkError> {
        let Some(Incoming::Blocked(preamble, label)) = &self.link.incoming else { return Ok(()) };
        let (preamble, label) = (*preamble, *label);
        let Some(session) = &self.session else {
            return Err(LinkError::Violation(Violation::OutOfTurn));
        };
        let (throttle, bytes) = (&session.receive, preamble.body_bytes() as usize);
        let wait = || {
            let (inbox, key) = (Arc::clone(&self.cx.inbox), self.key);
            throttle.take_or_wait(bytes, move || inbox.post(Command::Room(key)))
        };
        let Some(permit) = throttle.take(bytes).or_else(wait) else { return Ok(()) };
        let alignment = preamble.data_alignment();
        let [front, middle, data] = preamble.bodies.map(|length| length as usize);
        let arrival = Arrival { transaction: label.transaction, kind: label.kind, bodies: preamble.bodies, alignment };
        let chosen = match data {
            0 => None,
            _ => self.cx.common.dispatcher.memory(&session.connection, &arrival).filter(|buffer| buffer.len() == data),
        };
        let take =
            |length, alignment| if length == 0 { Buffer::EMPTY } else { self.cx.common.pool.take(length, alignment) };
        let data = chosen.unwrap_or_else(|| take(data, alignment));
        self.link.incoming = Some(Incoming::Message(label, permit));
        let landed = self.link.reader.land([take(front, 1), take(middle, 1), data]);
        landed.map_err(|_| LinkError::Malformed(Malformed::Content { tag: preamble.tag }))
    }

    fn deliver(&mut self, label: &Label, permit: Permit) -> Result<(), LinkError> {
        let [front, middle, data] = self.link.reader.bodies();
        let Some(session) = &mut self.session else { return Ok(()) };
        if session.session.handle_message(self.key.id(), label, self.cx.now)? == Verdict::Deliver {
            let Label { number, transaction, kind, .. } = *label;
            let delivery = Delivery { transaction, kind, number, front, middle, data, permit: Some(permit) };
            self.cx.common.dispatcher.message(&session.connection, delivery);
        }
        Ok(())
    }
}

/// One receive: enough for sixty messages of 4 KiB, small enough to stay in a second-level cache until they are read.
pub(super) const RECEIVE_BYTES: usize = 256 * 1024;

/// Full receives of one link in a row, after which other links have their turn: 4 MiB.
pub(super) const RECEIVES_PER_TURN: usize = 16;
