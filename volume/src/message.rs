//! Messages: what a writer asks of the servers, and what they answer. Blocks and their places are not modelled here.

use crate::version::{Generation, Version};

/// The number of a server of a volume, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(pub usize);

/// A writer, as servers know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its turn.
    pub generation: Generation,
    /// A random number of its process. Two writers that chose the same generation differ in it.
    pub writer: u64,
}

/// What a copy holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Nothing: its server is new, or has lost its memory. It does not remember what it promised.
    #[default]
    Empty,
    /// It lacks writes.
    Behind,
    /// Every write up to `applied`, and none behind it.
    Whole,
}

/// What a server says of its copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What the copy holds.
    pub state: State,
    /// The writer that the server obeys.
    pub promised: Option<Holder>,
    /// The highest version at which the copy ever was whole. It keeps that while it is behind.
    pub claim: Version,
    /// The last write that was applied.
    pub applied: Version,
    /// The server's power was cut, and with it went what its store had not synced: the copy is a prefix, and may lack
    /// writes that it has answered. Until a writer that has said so writes.
    pub is_cut: bool,
}

impl Standing {
    /// Whether the server remembers what it promised.
    pub fn remembers(&self) -> bool {
        self.state != State::Empty
    }
}

/// A message of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// How does the copy stand? Answered by [`Answer::Standing`].
    Ask,
    /// Obey no writer of a lower generation any more. Answered by [`Answer::Promised`].
    Promise(Holder),
    /// The copy lacks writes: take the blocks that differ from a copy that has applied `since`, and apply what is
    /// written from then on. Answered by [`Answer::Whole`] at its end.
    CatchUp {
        /// Who asks.
        holder: Holder,
        /// The server that lends its blocks.
        lender: ServerId,
        /// The last version before the writes that follow.
        since: Version,
    },
    /// The copy is whole, and the holder's first write follows. Answered by [`Answer::Written`].
    Mark {
        /// Who asks.
        holder: Holder,
        /// The generation may begin without what was lost with the power of servers: [`Standing::is_cut`].
        may_lack_tail: bool,
    },
    /// Apply this write. Answered by [`Answer::Written`].
    Write {
        /// Who writes.
        holder: Holder,
        /// The next version of the holder.
        version: Version,
    },
    /// Answer once everything that was applied is durable. Answered by [`Answer::Written`].
    Flush(Holder),
    /// Does the server still obey the holder? Answered by [`Answer::Confirmed`].
    Confirm {
        /// Who asks.
        holder: Holder,
        /// The number of the question.
        question: u64,
    },
    /// What is in these blocks? Answered by [`Answer::Read`]. A server answers in order, so a read returns every write
    /// that was sent before it.
    Read {
        /// Who asks.
        holder: Holder,
        /// The number of the read.
        number: u64,
    },
}

/// An answer of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Request::Ask`].
    Standing(Standing),
    /// To [`Request::Promise`].
    Promised(Standing),
    /// The server obeys another writer.
    Fenced {
        /// Its generation.
        by: Generation,
    },
    /// The copy has caught up, and is whole up to this version.
    Whole {
        /// The last write that was applied.
        applied: Version,
    },
    /// Every write up to this version was applied.
    Written {
        /// The last write that was applied.
        applied: Version,
        /// The copy is whole up to this version whatever happens to its server's process and power. A copy that has no
        /// store says what it has applied: it gets no safer.
        durable: Version,
    },
    /// To [`Request::Confirm`].
    Confirmed {
        /// The number of the question.
        question: u64,
    },
    /// To [`Request::Read`].
    Read {
        /// The number of the read.
        number: u64,
        /// The last write of any of the blocks.
        newest: Version,
    },
}
