//! Reading: any member can answer, as it has applied every write that was sent before the read when it answers. What it
//! answers is given out once every write that it returns is acknowledged. So nothing that was read is ever lost, and a
//! read of blocks that are not being written waits for no write.

use std::collections::BTreeMap;

#[cfg(test)]
use super::parts::Part;
use super::{Action, Writer};
use crate::message::{Request, ServerId};
#[cfg(test)]
use crate::mutant::Mutant;
use crate::version::Version;

/// Where a read is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    /// There is no member that could answer it.
    Waiting,
    /// A server was asked.
    Asked(ServerId),
    /// It was answered, and this write is not acknowledged yet.
    Answered(Version),
}

/// The reads under way, by number.
#[derive(Debug, Default)]
pub(super) struct Reads {
    last: u64,
    under_way: BTreeMap<u64, Read>,
}

impl Reads {
    fn begin(&mut self) -> u64 {
        self.last += 1;
        self.under_way.insert(self.last, Read::Waiting);
        self.last
    }

    /// A server has answered. An answer of another server than the one that was asked last does not count.
    pub(super) fn answered(&mut self, server: ServerId, number: u64, newest: Version) {
        if let Some(read) = self.under_way.get_mut(&number).filter(|read| **read == Read::Asked(server)) {
            *read = Read::Answered(newest);
        }
    }

    /// A server is out: what it was asked is asked elsewhere.
    pub(super) fn lost(&mut self, server: ServerId) {
        for read in self.under_way.values_mut().filter(|read| **read == Read::Asked(server)) {
            *read = Read::Waiting;
        }
    }

    /// The reads that wait for a member. This one is asked now.
    fn ask(&mut self, server: ServerId) -> Vec<u64> {
        let waiting = self.under_way.iter_mut().filter(|(_, read)| **read == Read::Waiting);
        let asked = waiting.map(|(&number, read)| {
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
            self.under_way.iter().filter(|(_, read)| is_ready(read)).map(|(&number, _)| number).collect();
        ready.iter().for_each(|number| _ = self.under_way.remove(number));
        ready
    }
}

impl Writer {
    /// Begins a read of any blocks. Returns its number; `None` if the volume cannot be read. [`Action::Read`] follows,
    /// unless the writer ends before.
    pub fn read(&mut self) -> Option<u64> {
        let number = self.is_serving().then(|| self.reads.begin())?;
        self.go_on_reading();
        Some(number)
    }

    /// Asks for the reads that wait, and gives out those that are ready. After everything that can change either.
    pub(super) fn go_on_reading(&mut self) {
        let acknowledged = self.acknowledged;
        let ready = self.reads.take_ready(acknowledged);
        self.actions.extend(ready.into_iter().map(Action::Read));
        // The one that is ahead answers soonest.
        let server = self.parts.members().into_iter().max().map(|(_, server)| server);
        #[cfg(test)]
        let server =
            self.parts.which(|part| part == Part::Behind).pop().filter(|_| Mutant::ReadBehind.is_active()).or(server);
        let (Some(holder), Some(server)) = (self.holder, server) else { return };
        for number in self.reads.ask(server) {
            self.send(server, Request::Read { holder, number });
        }
    }
}
