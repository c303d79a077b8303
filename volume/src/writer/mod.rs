//! Writer: the one process that changes a volume. It opens the volume, numbers the writes, acknowledges them, and takes
//! copies back that were away. It decides only: events go in, actions come out.
//!
//! ```text
//!   Asking ──▶ Promising ──▶ Levelling ──▶ Marking ──▶ Serving
//!     who holds   obey no      as many copies   the         writes, acknowledged at `hold` copies
//!     what?       older        as must hold     generation
//!                 writer       a write are the  begins
//!                              same
//! ```
//!
//! - `opening`: from the first question to the mark.
//! - `serving`: writes, acknowledgements, copies that come and go. `reading`: reads. `flushing`: what is durable.
//!   `space`: copies that refuse a write for lack of space.

mod flushing;
mod opening;
mod parts;
mod reading;
mod serving;
mod space;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use self::flushing::Flushing;
use self::parts::{Part, Parts};
use self::reading::Reads;
pub use self::reading::{Nearness, Seen, may_be_given_out};
use crate::message::{Answer, Holder, Request, ServerId};
use crate::shape::Copies;
use crate::version::{Generation, Version};

/// What the writer wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this to that server, behind everything sent to it before.
    Send(ServerId, Request),
    /// Close the connection to that server: it is out of step, or has been given up.
    Disconnect(ServerId),
    /// The volume can be read and written. Until the first write, each of its blocks is as at this server.
    Serving {
        /// The copy from which all others were levelled.
        source: ServerId,
        /// Too many servers have lost power or did not answer: writes that were acknowledged and never flushed may be
        /// missing. What is there is what the volume held at one moment, at or after the last flush.
        may_lack_tail: bool,
    },
    /// Every write up to this one is held by as many copies as must hold it.
    Acknowledge(Version),
    /// Every write up to this one is durable at as many copies as must hold it.
    Flushed(Version),
    /// Read the blocks of this read out of the region of that server, and the line after them: [`Writer::looked`].
    Look(ServerId, u64),
    /// What was answered to this read, or seen, may be given to the reader.
    Read(u64),
    /// Nothing more can be done.
    End(End),
}

/// Why a writer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// Another writer has opened the volume.
    #[error("another writer has opened the volume, with generation {by}")]
    Fenced {
        /// Its generation.
        by: Generation,
    },
    /// Too few servers answered that remember the volume.
    #[error("{found} servers that hold the volume answered, and {needed} are needed")]
    TooFew {
        /// Servers that answered and remember.
        found: usize,
        /// Servers that are needed.
        needed: usize,
    },
    /// No copy that could be reached has every write that may have been acknowledged.
    #[error(
        "no copy within reach is whole up to {claim}, which another one once held; a server that holds it must come back"
    )]
    NoWholeCopy {
        /// The version up to which a copy is needed.
        claim: Version,
    },
    /// Every server was lost at once.
    #[error("no server of the volume can be reached any more; open the volume again")]
    NoCopyLeft,
    /// Generations have run out.
    #[error("the volume has had as many writers as it can have")]
    NoMoreGenerations,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Asking,
    Promising,
    Levelling { source: ServerId },
    Marking { source: ServerId },
    Serving,
    Ended,
}

/// See the module's text.
// Larger than the bound: a method for each step of opening, writing and reading, in the files named after them.
#[derive(Debug)]
pub struct Writer {
    copies: Copies,
    id: u64,
    holder: Option<Holder>,
    phase: Phase,
    parts: Parts,
    /// The last write.
    last: Version,
    /// The last write that was acknowledged.
    acknowledged: Version,
    /// The number of the last question for the others.
    questions: u64,
    /// The lenders that were given to a server which is not whole yet.
    tried: BTreeMap<ServerId, BTreeSet<ServerId>>,
    reads: Reads,
    flushing: Flushing,
    /// See [`Action::Serving`].
    may_lack_tail: bool,
    actions: VecDeque<Action>,
}

impl Writer {
    /// Begins to open a volume. `id` is a random number.
    pub fn open(copies: Copies, id: u64) -> Writer {
        let parts = Parts::asked(copies.number());
        let mut writer = Writer {
            copies,
            id,
            holder: None,
            phase: Phase::Asking,
            parts,
            last: Version::NONE,
            acknowledged: Version::NONE,
            questions: 0,
            tried: BTreeMap::new(),
            reads: Reads::default(),
            flushing: Flushing::default(),
            may_lack_tail: false,
            actions: VecDeque::new(),
        };
        for number in 0..copies.number() {
            writer.send(ServerId(number), Request::Ask);
        }
        writer
    }

    /// The next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether the volume can be written.
    pub fn is_serving(&self) -> bool {
        self.phase == Phase::Serving
    }

    /// Whether it does nothing more.
    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Its turn; `None` before it has one.
    pub fn generation(&self) -> Option<Generation> {
        self.holder.map(|holder| holder.generation)
    }

    /// The servers whose copies are whole: they get every write, or have refused one that is not acknowledged, for
    /// lack of space.
    pub fn members(&self) -> impl Iterator<Item = ServerId> {
        self.parts.whole().into_iter().map(|(_, server)| server)
    }

    /// Its turn, as servers know it; `None` before it has one.
    pub fn holder(&self) -> Option<Holder> {
        self.holder
    }

    /// An answer has arrived.
    pub fn answered(&mut self, server: ServerId, answer: Answer) {
        if self.has_ended() || self.parts.of(server) == Part::Out {
            return;
        }
        if let Answer::Fenced { by } = answer {
            return self.end(End::Fenced { by });
        }
        match self.phase {
            Phase::Serving => self.answered_serving(server, answer),
            _ => self.answered_opening(server, answer),
        }
    }

    /// A connection is lost, or a server takes too long: it is left out.
    pub fn lost(&mut self, server: ServerId) {
        if self.has_ended() || self.parts.of(server) == Part::Out {
            return;
        }
        self.parts.set(server, Part::Out);
        match self.phase {
            Phase::Serving => {
                if self.is_without_copies() {
                    return self.end(End::NoCopyLeft);
                }
                self.forget(server);
            }
            _ => self.go_on(),
        }
    }

    fn send(&mut self, server: ServerId, request: Request) {
        self.actions.push_back(Action::Send(server, request));
    }

    /// Whether no copy is left from which another one could be taken back.
    fn is_without_copies(&self) -> bool {
        let is_left = |part| matches!(part, Part::Member(_) | Part::Behind | Part::Refused(_) | Part::Full { .. });
        self.parts.which(is_left).is_empty()
    }

    /// What a server of a writer that serves was asked is not answered.
    fn forget(&mut self, server: ServerId) {
        self.reads.lost(server);
        self.flushing.lost(server);
        self.acknowledge();
        self.go_on_reading();
    }

    /// Gives a server up until it is taken back.
    fn leave_out(&mut self, server: ServerId) {
        self.parts.set(server, Part::Out);
        self.actions.push_back(Action::Disconnect(server));
    }

    fn end(&mut self, end: End) {
        self.phase = Phase::Ended;
        self.actions.push_back(Action::End(end));
    }
}
