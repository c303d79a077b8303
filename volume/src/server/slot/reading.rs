//! Reading: the blocks of a copy, for its writer and for servers that catch up.

use bytes::Bytes;

use super::{Done, State, answer, beyond_the_end};
use crate::copy::Refusal;
use crate::layout::Entry;
use crate::message::Holder;
use crate::shape::BLOCK_BYTES;
use crate::store::Damaged;
use crate::version::Version;
use crate::wire::{Cause, MOST_BLOCKS, Reply, Run};

impl State {
    pub(super) fn read(&mut self, holder: Holder, number: u64, run: Run) -> Result<Done, Refusal> {
        self.copy.read(holder)?;
        Ok(self
            .blocks(run, true)
            .map_or_else(|done| done, |(entries, blocks)| Done::Answer(Reply::Data { number, entries }, blocks)))
    }

    pub(super) fn lend(
        &mut self,
        holder: Holder,
        since: Version,
        run: Run,
        with_blocks: bool,
    ) -> Result<Done, Refusal> {
        let applied = match self.copy.lend(holder, since) {
            Ok(applied) => applied,
            Err(Refusal::OutOfStep) => {
                let text = "the lender has not applied what the borrower needs".into();
                return Ok(answer(Reply::Refused { cause: Cause::NotYet, text }));
            }
            Err(refusal) => return Err(refusal),
        };
        Ok(self
            .blocks(run, with_blocks)
            .map_or_else(|done| done, |(entries, blocks)| Done::Answer(Reply::Lent { applied, entries }, blocks)))
    }

    /// The entries of a run, and its blocks.
    pub(super) fn blocks(&mut self, run: Run, with_blocks: bool) -> Result<(Vec<Entry>, Bytes), Done> {
        let Some(store) = &self.store else { return Err(Done::from(Refusal::OutOfStep)) };
        if !store.layout().has(run.first, run.count.into()) {
            return Err(beyond_the_end());
        }
        let taken = if with_blocks {
            // Not zeroed: each block is written as a whole, or nothing is answered.
            let mut bytes = self.answered.take(run.count as usize * BLOCK_BYTES, 1);
            let blocks = run.blocks().zip(bytes.chunks_exact_mut(BLOCK_BYTES));
            let entries: Result<Vec<Entry>, Damaged> = blocks.map(|(block, into)| store.get(block, into)).collect();
            entries.map(|entries| (entries, Bytes::from(bytes)))
        } else {
            let entries = run.blocks().map(|block| store.entry(block).ok_or(Damaged { block }));
            entries.collect::<Result<_, _>>().map(|entries| (entries, Bytes::new()))
        };
        taken.map_err(|damaged| {
            tracing::error!(volume = %self.shape.volume(), %damaged, "the copy must be taken back");
            self.damaged();
            Done::Refused(Cause::Damaged, damaged.to_string())
        })
    }
}

/// Memory of answers that is kept for the next ones: that of the longest, or of four as the kernel asks for.
pub(super) const IDLE_BYTES: usize = MOST_BLOCKS * BLOCK_BYTES;
