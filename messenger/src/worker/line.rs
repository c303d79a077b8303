//! One link on its worker: the greeting, then frames in and frames out. What the frames mean is the session's business; a line
//! only knows whom it serves.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Instant;

use remora_wire::Token;

use super::places::Key;
use crate::connection::Greeted;
use crate::error::Broken;
use crate::frame::{Limits, Preamble, Reader, Writer};
use crate::handshake::{Established, Handshake, Opening, Role, Versions};
use crate::seal::Seals;
use crate::signal::{Label, Signal};
use crate::stack::Link;
use crate::throttle::Permit;

/// A link and all that is half done on it.
pub(crate) struct Line {
    pub(super) link: Box<dyn Link>,
    pub(super) phase: Phase,
    pub(super) reader: Reader,
    pub(super) writer: Writer,
    /// The frame whose head has come.
    pub(super) coming: Option<Coming>,
    /// Bytes received and not yet read, because there is no room for what they hold.
    pub(super) held: Vec<u8>,
    /// What the greeting came to, until a session has it.
    pub(super) greeted: Option<Box<Greeted>>,
    /// By when the phase must be over.
    pub(super) deadline: Option<Instant>,
    /// Since when the peer has taken nothing of what we have for it.
    pub(super) stuck_since: Option<Instant>,
    /// The timer that is set, and what epoll has been asked for.
    pub(super) timer: Option<Instant>,
    pub(super) interest: Interest,
    /// The link tells of room to send by becoming readable: its descriptor is always writable.
    pub(super) glanceable: bool,
}

/// What a line is there for.
pub(super) enum Phase {
    /// The call for that talk is not answered yet.
    Calling(Key),
    /// Both ends prove what they know. The words still to be sent; the talk that called, if we did.
    Greeting { handshake: Box<Handshake<Arc<Token>>>, words: Vec<u8>, talk: Option<Key> },
    /// Greeted, and not yet told which session it is for.
    Unbound,
    /// The link of that talk.
    Serving(Key),
    /// What is written is sent, then the line is closed.
    Leaving,
}

/// A frame whose head was read.
pub(super) enum Coming {
    Signal(Signal),
    /// There is no room for it yet.
    Barred(Preamble, Label),
    Message(Label, Permit),
}

/// What a worker asks of epoll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interest {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

/// How both ends introduce themselves.
#[derive(Debug, Clone)]
pub(crate) struct Manners {
    pub(crate) token: Arc<Token>,
    pub(crate) versions: Versions,
    pub(crate) summed: bool,
    pub(crate) sealed: bool,
}

impl Line {
    pub(super) fn new(mut link: Box<dyn Link>, phase: Phase, deadline: Instant) -> Line {
        Line {
            glanceable: link.glance().is_some(),
            link,
            phase,
            reader: Reader::new(Limits::STRANGER, None),
            writer: Writer::new(true, None),
            coming: None,
            held: Vec::new(),
            greeted: None,
            deadline: Some(deadline),
            stuck_since: None,
            timer: None,
            interest: Interest { readable: true, writable: false },
        }
    }

    /// Whom it serves or will serve.
    pub(super) fn talk(&self) -> Option<Key> {
        match &self.phase {
            Phase::Calling(talk) | Phase::Serving(talk) => Some(*talk),
            Phase::Greeting { talk, .. } => *talk,
            Phase::Unbound | Phase::Leaving => None,
        }
    }

    /// Begins the greeting.
    pub(super) fn greet(&mut self, talk: Option<Key>, manners: &Manners, now: Instant) -> Result<(), Broken> {
        let opening = Opening { versions: manners.versions, features: manners.features(), nonce: random()? };
        let limit = self.deadline.map_or(std::time::Duration::ZERO, |deadline| deadline.saturating_duration_since(now));
        let token = Arc::clone(&manners.token);
        let mut handshake = match talk {
            Some(_) => Handshake::caller(token, opening, now, limit),
            None => Handshake::called(token, opening, u64::from_le_bytes(random()?), now, limit),
        };
        let words = handshake.take_output();
        self.phase = Phase::Greeting { handshake: Box::new(handshake), words, talk };
        Ok(())
    }

    /// Goes on with the greeting as far as bytes allow; what both agreed on, when it is through.
    pub(super) fn go_on_greeting(&mut self) -> Result<Option<Established>, Broken> {
        let Phase::Greeting { handshake, words, .. } = &mut self.phase else { return Ok(None) };
        loop {
            if words.is_empty() && self.link.owes() {
                let _ = self.link.send(&[]); // what breaks it is found by receiving
            }
            while !words.is_empty() {
                match self.link.send(&[IoSlice::new(words)]) {
                    Ok(sent) => drop(words.drain(..sent)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(Broken::Io(error)),
                }
            }
            if let Some(established) = handshake.poll_established() {
                return Ok(Some(established));
            }
            let mut piece = [0; GREETING_PIECE_BYTES];
            match self.link.receive(&mut [IoSliceMut::new(&mut piece)]) {
                Ok(0) => return Err(Broken::Ended),
                Ok(count) => {
                    let heard = handshake.handle_input(&piece[..count]);
                    words.extend(handshake.take_output());
                    if let Err(fault) = heard {
                        let _ = self.link.send(&[IoSlice::new(words)]); // a last word, if it can be said at once
                        return Err(fault.into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(Broken::Io(error)),
            }
        }
    }

    /// The greeting is through: frames from here on.
    pub(super) fn settle_on(&mut self, established: &mut Established) {
        let summed = established.features() & MAY_LEAVE_SUMS == 0;
        let sealed = established.features() & MAY_LEAVE_SEALS == 0;
        let seals = |of: Role| sealed.then(|| Seals::new(&established.key(), of));
        self.writer = Writer::new(summed, seals(established.role()));
        self.reader = Reader::new(Limits::STRANGER, seals(established.role().peer()));
        self.greeted = Some(Box::new(Greeted {
            number: established.session(),
            key: established.key(),
            version: established.version(),
            local: self.link.local(),
        }));
        self.held = established.take_rest();
    }

    /// Sends what is written until all is gone (true) or the peer takes no more.
    pub(super) fn flush(&mut self, now: Instant) -> Result<bool, Broken> {
        while !self.writer.is_empty() {
            let sent = match self.writer.only_piece() {
                Some(piece) => self.link.send(&[IoSlice::new(piece)]),
                None => {
                    let mut slices = [IoSlice::new(&[]); SLICES_PER_SEND];
                    let count = self.writer.slices(&mut slices);
                    self.link.send(&slices[..count])
                }
            };
            match sent {
                Ok(sent) => {
                    self.writer.sent(sent);
                    self.stuck_since = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stuck_since.get_or_insert(now);
                    return Ok(false);
                }
                Err(error) => return Err(Broken::Io(error)),
            }
        }
        self.send_on(now)
    }

    /// Sends what the link took and could not pass on; whether all is gone.
    fn send_on(&mut self, now: Instant) -> Result<bool, Broken> {
        if self.link.owes() {
            match self.link.send(&[]) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(Broken::Io(error)),
                _ => {}
            }
        }
        let is_stuck = self.link.owes();
        self.stuck_since = is_stuck.then(|| self.stuck_since.unwrap_or(now));
        Ok(!is_stuck)
    }

    /// Puts a signal behind what is written.
    pub(super) fn say(&mut self, signal: Signal) {
        let (tag, head, length) = signal.encode();
        self.writer.frame(tag, &head[..length], Default::default(), 1);
    }

    /// Whether a look at the link, without a system call, finds something to do. What waits to be received is nothing to do
    /// while the line is not read.
    pub(super) fn has_something(&mut self) -> bool {
        self.link.glance() == Some(true) && !self.is_at_rest()
    }

    /// The worker is about to sleep: whether it had better not.
    pub(super) fn arm(&mut self) -> bool {
        self.link.arm() && !self.is_at_rest()
    }

    fn is_at_rest(&self) -> bool {
        matches!(self.coming, Some(Coming::Barred(..))) && self.writer.is_empty()
    }

    /// What epoll should tell of.
    pub(super) fn wanted(&self) -> Interest {
        match &self.phase {
            // A socket's call is answered when it is writable; of the others some know only readable.
            Phase::Calling(_) => Interest { readable: true, writable: true },
            Phase::Greeting { words, .. } => {
                let writable = (!words.is_empty() || self.link.owes()) && !self.glanceable;
                Interest { readable: true, writable }
            }
            _ => Interest {
                readable: !matches!(self.coming, Some(Coming::Barred(..))),
                writable: (!self.writer.is_empty() || self.link.owes()) && !self.glanceable,
            },
        }
    }
}

impl Manners {
    /// What this end could do without. Only what both can is left out, so nobody is talked into less than it wants.
    fn features(&self) -> u64 {
        u64::from(!self.summed) * MAY_LEAVE_SUMS + u64::from(!self.sealed) * MAY_LEAVE_SEALS
    }
}

fn random<const N: usize>() -> Result<[u8; N], Broken> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|_| Broken::Io(io::Error::other("no random bytes from the system")))?;
    Ok(bytes)
}

/// Feature bits of the greeting: this end can do without sums over bodies, and without seals.
const MAY_LEAVE_SUMS: u64 = 1;
const MAY_LEAVE_SEALS: u64 = 2;

/// A whole frame of the greeting and more.
const GREETING_PIECE_BYTES: usize = 512;

/// Pieces per vectored send. Two per message with data, and one behind the last: all that is written ahead in messages of 4 KiB goes in
/// one call. A call for the rest would cost a segment of its own, and at the peer another waking.
const SLICES_PER_SEND: usize = 128;
