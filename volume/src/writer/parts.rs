//! Parts: what each server is to the writer.

use std::collections::BTreeMap;

use crate::message::{ServerId, Standing};
use crate::shape::Copies;
use crate::version::Version;

/// What a server is to the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// It was not asked, or its connection is lost.
    Out,
    /// It was asked how it stands.
    Asked,
    /// It has answered.
    Answered(Standing),
    /// It was asked to promise.
    Promising,
    /// It has promised.
    Promised(Standing),
    /// It takes what differs from the source.
    Levelling,
    /// Its copy is the source's.
    Level,
    /// It was asked to mark the generation.
    Marking,
    /// It has lost its memory, and the others are asked whether this writer is still the one.
    Confirming { question: u64, confirmed: [bool; Copies::MOST] },
    /// It gets every write, and takes older blocks from another copy.
    Behind,
    /// It is whole, and has applied every write up to this version.
    Member(Version),
    /// It was whole up to this version and refused the next write, which is not acknowledged: its server has no space.
    /// Its connection is over and is made again.
    Refused(Version),
    /// It has refused a write, and its connection is there again. It is whole up to this version and can be read.
    Full {
        /// The last write that it has applied.
        applied: Version,
        /// Whether it was sent the next write again. It gets no other one.
        is_tried: bool,
    },
}

/// The part of each server.
#[derive(Debug)]
pub(super) struct Parts(BTreeMap<ServerId, Part>);

impl Parts {
    /// All servers were asked how they stand.
    pub(super) fn asked(number: usize) -> Parts {
        Parts((0..number).map(|number| (ServerId(number), Part::Asked)).collect())
    }

    pub(super) fn of(&self, server: ServerId) -> Part {
        self.0.get(&server).copied().unwrap_or(Part::Out)
    }

    pub(super) fn set(&mut self, server: ServerId, part: Part) {
        self.0.insert(server, part);
    }

    /// The servers of which this holds.
    pub(super) fn which(&self, holds: impl Fn(Part) -> bool) -> Vec<ServerId> {
        self.0.iter().filter(|&(_, &part)| holds(part)).map(|(&server, _)| server).collect()
    }

    /// The servers that have answered so, and what they said.
    pub(super) fn standings(&self, of: impl Fn(Part) -> Option<Standing>) -> Vec<(ServerId, Standing)> {
        self.0.iter().filter_map(|(&server, &part)| Some((server, of(part)?))).collect()
    }

    /// The whole copies, and what they have applied: the members, and those that lack space.
    pub(super) fn whole(&self) -> Vec<(Version, ServerId)> {
        self.applied(|part| match part {
            Part::Member(applied) | Part::Full { applied, .. } => Some(applied),
            _ => None,
        })
    }

    /// The members, and what they have applied.
    pub(super) fn members(&self) -> Vec<(Version, ServerId)> {
        self.applied(|part| if let Part::Member(applied) = part { Some(applied) } else { None })
    }

    /// Servers of a kind, and what they have applied.
    pub(super) fn applied(&self, of: impl Fn(Part) -> Option<Version>) -> Vec<(Version, ServerId)> {
        self.0.iter().filter_map(|(&server, &part)| Some((of(part)?, server))).collect()
    }
}
