//! Borrower: brings a copy that is behind up to date, from the copy of another server, while the writer goes on.
//!
//! ```text
//!   for each 64 MiB:   Lend entries ──▶ compare with ours ──▶ Lend the blocks that differ ──▶ take them
//!   then:              wait until every write that the lender had applied is applied here too ──▶ whole
//! ```
//!
//! A thread of its own, as it waits for the lender. It holds the volume's lock only to compare and to take. It ends
//! when the copy is whole, when its writer's connection is over or has begun another catch-up, or when the lender
//! fails: then the writer is refused, and takes the copy back from another lender.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::{Address, Buffer, Connection};

use super::slot::{Abandoned, Slot};
use super::{answer, refuse};
use crate::layout::Entry;
use crate::link::{Caller, LOOK_AGAIN, Security};
use crate::rules::{Generation, Holder, Version};
use crate::shape::BLOCK_BYTES;
use crate::store::sums;
use crate::wire::{Call, Cause, MOST_ENTRIES, Mode, Reply, Run};

/// See the module's text.
pub(super) struct Borrower {
    pub(super) slot: Arc<Slot>,
    /// The number of this catch-up.
    pub(super) number: u64,
    pub(super) holder: Holder,
    /// What the lender must have applied.
    pub(super) since: Version,
    pub(super) lender: Address,
    /// The connection of the writer, which waits for the copy.
    pub(super) writer: Connection,
    pub(super) security: Security,
    pub(super) is_stopping: Arc<AtomicBool>,
}

/// Why a catch-up ends early.
enum Failure {
    /// See [`Abandoned`]; or this server ends.
    Abandoned,
    /// The lender obeys another writer.
    Fenced(Generation),
    /// The lender cannot lend.
    Lender(String),
    /// The store here has no space.
    Full(String),
}

impl From<String> for Failure {
    fn from(text: String) -> Failure {
        Failure::Lender(text)
    }
}

impl From<Abandoned> for Failure {
    fn from(abandoned: Abandoned) -> Failure {
        match abandoned {
            Abandoned::Replaced => Failure::Abandoned,
            Abandoned::Full(text) => Failure::Full(text),
        }
    }
}

impl Borrower {
    /// Catches up, and tells the writer.
    pub(super) fn run(self) {
        let began = Instant::now();
        let result = self.catch_up();
        self.slot.lock().end_catch_up(self.number);
        match result {
            Ok(blocks) => {
                tracing::info!(lender = %self.lender, blocks, took = ?began.elapsed(), "a copy has caught up")
            }
            Err(Failure::Abandoned) => tracing::debug!(lender = %self.lender, "a catch-up was abandoned"),
            Err(Failure::Fenced(by)) => answer(&self.writer, &Reply::Fenced { by }, Bytes::new()),
            Err(Failure::Full(text)) => refuse(&self.writer, Cause::NoMemory, &text),
            Err(Failure::Lender(text)) => {
                tracing::info!(lender = %self.lender, text, "a catch-up failed");
                refuse(&self.writer, Cause::OutOfStep, &format!("catching up from {}: {text}", self.lender));
            }
        }
    }

    /// Returns how many blocks were taken.
    fn catch_up(&self) -> Result<u64, Failure> {
        let shape = self.slot.lock().shape();
        let mut lender = Lender::connect(self)?;
        match lender.ask(&Call::Open { shape, mode: Mode::Borrow, writer: self.holder.writer })? {
            (Reply::Standing { .. }, _) => {}
            (reply, _) => return Err(unexpected(reply)),
        }
        let (mut first, mut taken) = (0, 0);
        while first < shape.blocks() {
            let count = (shape.blocks() - first).min(MOST_ENTRIES as u64) as u32;
            let (theirs, applied, _) = lender.borrow(Run { first, count }, false)?;
            let needed = self.slot.lock().compare((self.number, &self.writer), first, &theirs, applied)?;
            taken += needed.len() as u64;
            for run in runs(&needed, BORROWED_AT_ONCE) {
                let (theirs, applied, data) = lender.borrow(run, true)?;
                self.slot.lock().take((self.number, &self.writer), run.first, &theirs, applied, &data)?;
            }
            first += u64::from(count);
            lender.report.compared = first;
        }
        self.complete(&mut lender)?;
        Ok(taken)
    }

    /// Waits until what the lender had applied is applied here.
    fn complete(&self, lender: &mut Lender<'_>) -> Result<(), Failure> {
        let mut state = self.slot.lock();
        loop {
            if let Some(applied) = state.try_complete(self.number, &self.writer)? {
                // With the lock held: no answer to a later write overtakes this one.
                answer(&self.writer, &Reply::Whole { applied }, Bytes::new());
                return Ok(());
            }
            lender.report.due()?;
            state = self.slot.wait(state, LOOK_AGAIN);
        }
    }
}

/// Neighbouring blocks as runs of at most `most` blocks. `blocks` ascend.
fn runs(blocks: &[u64], most: u32) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &block in blocks {
        match runs.last_mut() {
            Some(run) if run.blocks().end == block && run.count < most => run.count += 1,
            _ => runs.push(Run { first: block, count: 1 }),
        }
    }
    runs
}

/// The connection to the lender. One question at a time.
struct Lender<'a> {
    borrower: &'a Borrower,
    caller: Caller,
    report: Report<'a>,
}

/// What the writer is told from time to time.
struct Report<'a> {
    borrower: &'a Borrower,
    compared: u64,
    reported: Instant,
}

impl<'a> Lender<'a> {
    fn connect(borrower: &'a Borrower) -> Result<Lender<'a>, Failure> {
        let caller = Caller::connect(&borrower.lender, &borrower.security)?;
        Ok(Lender { borrower, caller, report: Report { borrower, compared: 0, reported: Instant::now() } })
    }

    /// Entries of these blocks, what the lender had applied, and the blocks. Asks again while the lender has not
    /// applied what is needed.
    fn borrow(&mut self, run: Run, with_blocks: bool) -> Result<(Vec<Entry>, Version, Buffer), Failure> {
        let Borrower { holder, since, .. } = *self.borrower;
        let deadline = Instant::now() + LENDER_LIMIT;
        loop {
            match self.ask(&Call::Lend { holder, since, run, with_blocks })? {
                (Reply::Lent { applied, entries }, data) if fits(run, with_blocks, &entries, &data) => {
                    return Ok((entries, applied, data));
                }
                (Reply::Lent { .. }, _) => {
                    return Err(Failure::Lender("what it lent is not what was asked for".into()));
                }
                (Reply::Refused { text, .. }, _) if Instant::now() >= deadline => return Err(Failure::Lender(text)),
                (Reply::Refused { cause: Cause::NotYet, .. }, _) => std::thread::sleep(NOT_YET_PAUSE),
                (reply, _) => return Err(unexpected(reply)),
            }
        }
    }

    /// The answer to a question.
    fn ask(&mut self, call: &Call) -> Result<(Reply, Buffer), Failure> {
        self.caller.ask(call, LENDER_LIMIT, || self.report.due())
    }
}

impl Report<'_> {
    /// Says to the writer from time to time that the catch-up goes on, and checks whether it should.
    fn due(&mut self) -> Result<(), Failure> {
        if self.borrower.is_stopping.load(Ordering::Acquire) {
            return Err(Failure::Abandoned);
        }
        if self.reported.elapsed() >= REPORT_EVERY {
            self.reported = Instant::now();
            answer(&self.borrower.writer, &Reply::Progress { compared: self.compared }, Bytes::new());
        }
        Ok(())
    }
}

/// Whether a loan is what was asked for, and its blocks are those of its entries.
fn fits(run: Run, with_blocks: bool, entries: &[Entry], data: &[u8]) -> bool {
    let is_right = |(entry, crc): (&Entry, u32)| !entry.is_written() || entry.crc == crc;
    entries.len() == run.count as usize
        && (!with_blocks || data.len() == entries.len() * BLOCK_BYTES)
        && (!with_blocks || entries.iter().zip(sums(data)).all(is_right))
}

fn unexpected(reply: Reply) -> Failure {
    match reply {
        Reply::Fenced { by } => Failure::Fenced(by),
        Reply::Refused { text, .. } => Failure::Lender(text),
        other => Failure::Lender(format!("an answer to another question: {other:?}")),
    }
}

/// Blocks in one loan, 1 MiB: the volume's locks at both ends are held for some tenths of a millisecond.
const BORROWED_AT_ONCE: u32 = 256;

/// Time limit for an answer of the lender, and for it to apply what the borrower is not sent. Below the time for which
/// a writer waits for a server.
const LENDER_LIMIT: Duration = Duration::from_secs(4);

/// Pause before a lender that is behind is asked again: some round trips.
const NOT_YET_PAUSE: Duration = Duration::from_millis(2);

/// Several times within the time for which a writer waits for a server.
const REPORT_EVERY: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_blocks_are_one_run_up_to_the_bound() {
        let run = |first, count| Run { first, count };
        assert_eq!(runs(&[], 3), []);
        assert_eq!(runs(&[1, 2, 3, 4, 6, 9, 10], 3), [run(1, 3), run(4, 1), run(6, 1), run(9, 2)]);
    }
}
