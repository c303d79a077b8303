//! Catch-up: the steps by which a copy that is behind, or is not there yet, takes the blocks of another one. The
//! borrower's thread calls them, with the lock held for one step at a time.

use remora_messenger::Connection;

use super::{Done, Means, State};
use crate::copy::Refusal;
use crate::layout::{Entry, Need};
use crate::message::Holder;
use crate::shape::BLOCK_BYTES;
use crate::store::Store;
use crate::version::Version;
use crate::wire::Cause;

/// Why a borrower must end.
pub(in crate::server) enum Abandoned {
    /// Its writer has gone or has begun another catch-up, or the server obeys another writer.
    Replaced,
    /// The store has no space for what it takes.
    Full(String),
}

impl From<Done> for Abandoned {
    fn from(done: Done) -> Abandoned {
        match done {
            Done::Refused(_, text) => Abandoned::Full(text),
            _ => Abandoned::Replaced,
        }
    }
}

impl State {
    /// A copy that is behind begins to take blocks; one that is not there is made first.
    pub(super) fn begin_catch_up(
        &mut self,
        holder: Holder,
        since: Version,
        lender: String,
        means: Means<'_>,
    ) -> Result<Done, Refusal> {
        let mut next = self.copy;
        next.begin_catch_up(holder, since)?;
        if self.store.is_some() {
            if let Err(done) = self.commit(next, &[], &[]) {
                return Ok(done);
            }
        } else if let Err(text) = self.allocate(next.standing(), means.budget, means.exports, means.stores) {
            return Ok(Done::Refused(Cause::NoMemory, text));
        }
        self.copy = next;
        self.catch_ups += 1;
        self.compared = Some(0);
        Ok(Done::Borrow { number: self.catch_ups, holder, since, lender })
    }

    /// Whether this catch-up is the present one, and its writer is there.
    fn expect(&self, number: u64, writer: &Connection) -> Result<&Store, Abandoned> {
        let is_present = self.catch_ups == number && self.has(writer);
        self.store.as_ref().filter(|_| is_present).ok_or(Abandoned::Replaced)
    }

    /// Compares entries of the lender, which had applied `applied`, with those here. Returns the blocks that are
    /// needed. Blocks that are zeros there become so here: no bytes of them are needed.
    pub(in crate::server) fn compare(
        &mut self,
        (number, writer): (u64, &Connection),
        first: u64,
        theirs: &[Entry],
        applied: Version,
    ) -> Result<Vec<u64>, Abandoned> {
        self.expect(number, writer)?;
        let (mut needed, mut zeros) = (Vec::new(), Vec::new());
        for (block, &their) in (first..).zip(theirs) {
            let ours = self.store.as_ref().and_then(|store| store.entry(block));
            let is_taken = self.takes(ours, their, applied)?;
            match their.need(ours) {
                _ if !is_taken => {}
                Need::Nothing => {}
                Need::Entry => zeros.push((block, their)),
                Need::Block => needed.push(block),
            }
        }
        self.commit(self.copy, &zeros, &[]).map_err(Abandoned::from)?;
        for (block, entry) in zeros {
            if let Some(store) = &self.store {
                store.put(block, entry, &[]);
            }
        }
        self.compared = Some(first + theirs.len() as u64);
        Ok(needed)
    }

    /// Takes blocks of the lender, whose checksums are right.
    pub(in crate::server) fn take(
        &mut self,
        (number, writer): (u64, &Connection),
        first: u64,
        theirs: &[Entry],
        applied: Version,
        data: &[u8],
    ) -> Result<(), Abandoned> {
        self.expect(number, writer)?;
        let mut taken = Vec::new();
        for ((block, &their), bytes) in (first..).zip(theirs).zip(data.chunks_exact(BLOCK_BYTES)) {
            let ours = self.store.as_ref().and_then(|store| store.entry(block));
            if self.takes(ours, their, applied)? {
                taken.push((block, their, bytes));
            }
        }
        let changes: Vec<_> = taken.iter().map(|&(block, entry, _)| (block, entry)).collect();
        let with_bytes = taken.iter().filter(|(_, entry, _)| entry.has_bytes());
        let blocks: Vec<_> = with_bytes.map(|&(.., bytes)| bytes).collect();
        self.commit(self.copy, &changes, &blocks).map_err(Abandoned::from)?;
        for (block, entry, bytes) in taken {
            if let Some(store) = &self.store {
                store.put(block, entry, bytes);
            }
        }
        Ok(())
    }

    /// A catch-up is over, whatever became of it.
    pub(in crate::server) fn end_catch_up(&mut self, number: u64) {
        if self.catch_ups == number {
            self.compared = None;
        }
    }

    fn takes(&mut self, ours: Option<Entry>, theirs: Entry, applied: Version) -> Result<bool, Abandoned> {
        let ours = ours.map_or(Version::NONE, |entry| entry.version); // a damaged block is taken
        self.copy.takes(ours, theirs.version, applied).map_err(|_| Abandoned::Replaced)
    }

    /// All blocks were compared. Returns the version up to which the copy is whole, if it is.
    pub(in crate::server) fn try_complete(
        &mut self,
        number: u64,
        writer: &Connection,
    ) -> Result<Option<Version>, Abandoned> {
        self.expect(number, writer)?;
        let mut next = self.copy;
        if !next.try_complete() {
            return Ok(None);
        }
        self.commit(next, &[], &[]).map_err(Abandoned::from)?;
        self.say();
        self.compared = None;
        Ok(Some(self.copy.standing().applied))
    }
}
