//! Reading: any member can answer, as it has applied every write that was sent before the read when it answers. What it
//! answers is given out once every write that it returns is acknowledged. So nothing that was read is ever lost, and a
//! read of blocks that are not being written waits for no write.
//!
//! ```text
//!   begin ─▶ Looking ─────────── what was seen ────────▶ Answered ── acknowledged ──▶ given out
//!     │         │ in vain                                    ▲
//!     ╰─────────┴──────▶ Waiting ──▶ Asked ── the answer ────╯
//! ```
//!
//! A member whose region can be read is not asked: the blocks are *looked at*, by rules of their own.
//!
//! - Only if the member is known to have applied the last write of these blocks. A look does not wait behind writes.
//! - The line is read after the blocks. It must say that the server obeys this writer: then it did so when the blocks
//!   were read, as a promise is not taken back. If it obeys a later writer, this one has ended.
//! - What was seen of a server that was out meanwhile does not count.

use std::collections::BTreeMap;

use super::parts::Part;
use super::{Action, End, Writer};
use crate::message::{Holder, Request, ServerId, Standing, State};
#[cfg(test)]
use crate::mutant::Mutant;
use crate::version::Version;

/// Where a read is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    /// There is no member that could answer it.
    Waiting,
    /// Its blocks are being read out of this server's region.
    Looking(ServerId),
    /// A server was asked.
    Asked(ServerId),
    /// It was answered, and this write is not acknowledged yet.
    Answered(Version),
}

/// The reads under way, by number.
#[derive(Debug, Default)]
pub(super) struct Reads {
    last: u64,
    /// Each with the last write of its blocks.
    under_way: BTreeMap<u64, (Read, Version)>,
    /// The servers whose regions can be read, and how near they are.
    regions: BTreeMap<ServerId, Nearness>,
}

/// How near a region is. The nearest one is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// It is read over a network.
    Far,
    /// It is mapped into this process.
    Here,
}

/// What was read out of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The last write of any of the blocks.
    pub newest: Version,
    /// How the copy stood, read after the blocks.
    pub line: Standing,
}

/// Whether blocks that were seen may be given out at once, by a reader who knows that every write of them is among
/// those which are `acknowledged`. `before` is the line before the blocks were read.
pub fn may_be_given_out(holder: Holder, acknowledged: Version, before: Standing, seen: Seen) -> bool {
    let obeys = |line: Standing| line.promised == Some(holder) && line.state == State::Whole;
    let has_all = before.applied >= acknowledged;
    #[cfg(test)]
    let has_all = has_all || Mutant::LookTooEarly.is_active();
    obeys(before) && has_all && obeys(seen.line) && seen.newest <= acknowledged
}

impl Reads {
    fn begin(&mut self, read: Read, after: Version) -> u64 {
        self.last += 1;
        self.under_way.insert(self.last, (read, after));
        self.last
    }

    /// A server has answered, or was looked at. What comes of another one than the last does not count.
    fn proceed(&mut self, number: u64, from: Read, to: Read) {
        if let Some((read, _)) = self.under_way.get_mut(&number).filter(|(read, _)| *read == from) {
            *read = to;
        }
    }

    /// A server has answered.
    pub(super) fn answered(&mut self, server: ServerId, number: u64, newest: Version) {
        self.proceed(number, Read::Asked(server), Read::Answered(newest));
    }

    /// A server is out: what it was asked is asked elsewhere.
    pub(super) fn lost(&mut self, server: ServerId) {
        self.regions.remove(&server);
        self.leave(Read::Asked(server));
        self.leave(Read::Looking(server));
    }

    /// Reads that are there wait for another way.
    fn leave(&mut self, there: Read) {
        for (read, _) in self.under_way.values_mut().filter(|(read, _)| *read == there) {
            *read = Read::Waiting;
        }
    }

    /// The reads that wait for a copy, of blocks that no write behind `through` changes. This server is asked now.
    fn ask(&mut self, server: ServerId, through: Version) -> Vec<u64> {
        let waiting = self.under_way.iter_mut();
        let waiting = waiting.filter(|(_, (read, after))| *read == Read::Waiting && *after <= through);
        let asked = waiting.map(|(&number, (read, _))| {
            *read = Read::Asked(server);
            number
        });
        asked.collect()
    }

    /// Takes out the reads whose writes are all acknowledged.
    fn take_ready(&mut self, acknowledged: Version) -> Vec<u64> {
        let is_ready = |read: &Read| match read {
            Read::Answered(newest) => {
                let is_ready = *newest <= acknowledged;
                #[cfg(test)]
                let is_ready = is_ready || Mutant::ReadUnacknowledged.is_active();
                is_ready
            }
            _ => false,
        };
        let ready: Vec<u64> =
            self.under_way.iter().filter(|(_, (read, _))| is_ready(read)).map(|(&number, _)| number).collect();
        ready.iter().for_each(|number| _ = self.under_way.remove(number));
        ready
    }
}

impl Writer {
    /// Begins a read of any blocks, of which `after` is the last write; any version at or below the first write that
    /// is under way says that there is none. Returns the read's number; `None` if the volume cannot be read.
    /// [`Action::Read`] follows, unless the writer ends before.
    pub fn read(&mut self, after: Version) -> Option<u64> {
        if !self.is_serving() {
            return None;
        }
        let number = match self.region(after) {
            Some(server) => {
                let number = self.reads.begin(Read::Looking(server), after);
                self.actions.push_back(Action::Look(server, number));
                number
            }
            None => self.reads.begin(Read::Waiting, after),
        };
        self.go_on_reading();
        Some(number)
    }

    /// From now on the region of a server can be read, until the server is lost.
    pub fn region_opened(&mut self, server: ServerId, nearness: Nearness) {
        if matches!(self.parts.of(server), Part::Member(_) | Part::Full { .. }) {
            self.reads.regions.insert(server, nearness);
        }
    }

    /// The region of a server cannot be read any more. What was to be read there is asked for.
    pub fn region_closed(&mut self, server: ServerId) {
        self.reads.regions.remove(&server);
        self.reads.leave(Read::Looking(server));
        self.go_on_reading();
    }

    /// The nearest region whose copy has applied this write.
    fn region(&self, after: Version) -> Option<ServerId> {
        let has_it = |applied: Version| {
            let has_it = applied >= after;
            #[cfg(test)]
            let has_it = has_it || Mutant::LookTooEarly.is_active();
            has_it
        };
        let members = self.parts.whole().into_iter().filter(|&(applied, _)| has_it(applied));
        let regions = members.filter_map(|(applied, server)| {
            let nearness = self.reads.regions.get(&server)?;
            Some((*nearness, applied, server))
        });
        regions.max().map(|(_, _, server)| server)
    }

    /// The blocks of a read were read out of a server's region; `None`: they could not be, so a server is asked.
    /// Returns whether this is what the read returns.
    pub fn looked(&mut self, server: ServerId, number: u64, seen: Option<Seen>) -> bool {
        let is_due = self.reads.under_way.get(&number).is_some_and(|(read, _)| *read == Read::Looking(server));
        let (Some(holder), true) = (self.holder, is_due && !self.has_ended()) else { return false };
        let mut found = Read::Waiting;
        if let Some(Seen { newest, line }) = seen {
            let obeys = line.promised == Some(holder);
            let later = line.promised.filter(|other| *other != holder && other.generation >= holder.generation);
            #[cfg(test)]
            let (obeys, later) = if Mutant::LineIgnored.is_active() { (true, None) } else { (obeys, later) };
            if let Some(other) = later {
                self.end(End::Fenced { by: other.generation });
                return false;
            }
            if obeys && line.state == State::Whole {
                found = Read::Answered(newest);
            }
        }
        self.reads.proceed(number, Read::Looking(server), found);
        self.go_on_reading();
        found != Read::Waiting
    }

    /// Asks for the reads that wait, and gives out those that are ready. After everything that can change either.
    pub(super) fn go_on_reading(&mut self) {
        let acknowledged = self.acknowledged;
        let ready = self.reads.take_ready(acknowledged);
        self.actions.extend(ready.into_iter().map(Action::Read));
        // The one that is ahead answers soonest. It has applied what was sent before the read when it answers.
        let member = self.parts.members().into_iter().max().map(|(_, server)| server);
        #[cfg(test)]
        let member =
            self.parts.which(|part| part == Part::Behind).pop().filter(|_| Mutant::ReadBehind.is_active()).or(member);
        if let Some(server) = member {
            return self.ask(server, self.last);
        }
        for (server, through) in self.full_copies_to_read() {
            self.ask(server, through);
        }
    }

    /// Asks a server for the reads that wait, of blocks that no write behind `through` changes.
    fn ask(&mut self, server: ServerId, through: Version) {
        let Some(holder) = self.holder else { return };
        for number in self.reads.ask(server, through) {
            self.send(server, Request::Read { holder, number });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Answer;
    use crate::shape::Copies;

    /// An answer of a server without a store.
    fn written(applied: Version) -> Answer {
        Answer::Written { applied, durable: applied }
    }

    /// A writer with one copy, whose region can be read.
    fn looking() -> (Writer, Holder) {
        let copies = Copies::new(1, 1).unwrap_or_else(|| unreachable!("one copy"));
        let mut writer = Writer::open(copies, 5);
        let (server, whole) = (ServerId(0), Standing { state: State::Whole, ..Standing::default() });
        writer.answered(server, Answer::Standing(whole));
        writer.answered(server, Answer::Promised(whole));
        let holder = writer.holder().unwrap_or_else(|| unreachable!("it has promised"));
        writer.answered(server, written(holder.generation.start()));
        writer.region_opened(server, Nearness::Here);
        while writer.poll_action().is_some() {}
        (writer, holder)
    }

    fn line(promised: Option<Holder>, state: State) -> Standing {
        Standing { state, promised, ..Standing::default() }
    }

    #[test]
    fn blocks_with_a_write_under_way_are_asked_for_and_others_are_looked_at() {
        let (mut writer, holder) = looking();
        let (server, start) = (ServerId(0), holder.generation.start());
        let write = writer.write().unwrap_or_default();
        writer.poll_action();
        let asked = writer.read(write);
        let number = asked.unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Send(server, Request::Read { holder, number })));
        let number = writer.read(start).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
        // A later write was seen: it must be acknowledged first.
        writer.looked(server, number, Some(Seen { newest: write, line: line(Some(holder), State::Whole) }));
        assert_eq!(writer.poll_action(), None);
        writer.answered(server, written(write));
        assert_eq!(writer.poll_action(), Some(Action::Acknowledge(write)));
        assert_eq!(writer.poll_action(), Some(Action::Read(number)));
        assert_eq!(writer.poll_action(), Some(Action::Flushed(write)));
        let number = writer.read(write).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
    }

    #[test]
    fn a_look_in_vain_becomes_a_question_and_a_later_holder_ends_the_writer() {
        let (mut writer, holder) = looking();
        let server = ServerId(0);
        let behind = Seen { newest: Version::NONE, line: line(Some(holder), State::Behind) };
        for seen in [None, Some(behind)] {
            let number = writer.read(Version::NONE).unwrap_or_default();
            assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
            writer.looked(server, number, seen);
            assert_eq!(writer.poll_action(), Some(Action::Send(server, Request::Read { holder, number })));
            writer.looked(server, number, None); // twice is once
            assert_eq!(writer.poll_action(), None);
        }
        let number = writer.read(Version::NONE).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
        writer.region_closed(server);
        assert_eq!(writer.poll_action(), Some(Action::Send(server, Request::Read { holder, number })));
        let number = writer.read(Version::NONE).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Send(server, Request::Read { holder, number })));
        writer.region_opened(server, Nearness::Far);
        let number = writer.read(Version::NONE).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
        let by = holder.generation.next().unwrap_or_default();
        let later = line(Some(Holder { generation: by, writer: 6 }), State::Whole);
        writer.looked(server, number, Some(Seen { newest: Version::NONE, line: later }));
        assert_eq!(writer.poll_action(), Some(Action::End(End::Fenced { by })));
        assert!(writer.has_ended());
    }
}
