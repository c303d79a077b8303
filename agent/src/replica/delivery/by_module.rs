//! The delivery to a server with the module: the introduction, and the payload that refers to shared memory.

use std::time::Instant;

use remora_table::Slot;

use super::orders::Notice;
use super::payload::WriteError;
use super::plain::{Piece, random_mark};
use super::referenced::{ReferencedPayload, Turn};
use super::server_link::{ServerLink, Stage};
use super::{Cause, Delivery};
use crate::replica::introduction::{self, Answer};
use crate::replica::parts::FeedError;

impl Delivery {
    /// Orders the memory of this slot, and of all that follow, to be given to the server's module.
    pub(super) fn introduce(&mut self, now: Instant, slot: Slot) -> Option<usize> {
        self.introductions += 1;
        let number = self.introductions;
        match introduction::prepare(slot.bytes().0, number) {
            Ok((shown, introduction)) => {
                self.link.as_mut()?.stage = Stage::Introducing { number, shown, slot };
                self.tell(Notice::Introduce(introduction));
            }
            Err(text) => self.go_by_the_link(now, slot, &text),
        }
        Some(0)
    }

    pub(super) fn introduced(&mut self, now: Instant, number: u64, answer: Result<Answer, String>) {
        let Some(link) = &mut self.link else { return };
        if !matches!(&link.stage, Stage::Introducing { number: awaited, .. } if *awaited == number) {
            return;
        }
        let Stage::Introducing { shown, slot, .. } = std::mem::replace(&mut link.stage, Stage::Asked) else { return };
        let answer = match answer {
            Ok(answer) => answer,
            Err(text) => return self.go_by_the_link(now, slot, &text),
        };
        let fast_keys = answer.fast_keys.is_ok();
        tracing::info!(fast_keys, "the server's module loads values out of shared memory");
        self.meter.by_module.set(1);
        let mark = random_mark();
        match ReferencedPayload::new(now, mark, shown, answer, slot) {
            Ok(payload) => drop(self.promise(mark, Stage::Referenced(Box::new(payload)))),
            Err(WriteError::Damaged(error)) => self.damaged(error),
            Err(_) => {
                self.by_module = false;
                self.drop_link("the first slot of the snapshot could not be parsed", Cause::Broken);
                self.begin_again();
            }
        }
    }

    /// Ends the delivery: the source's memory has other bytes than the source wrote.
    pub(super) fn damaged(&mut self, error: FeedError) {
        self.drop_link("a slot of the source's memory is damaged", Cause::Ours);
        self.tell(Notice::Damaged { error });
    }

    fn go_by_the_link(&mut self, now: Instant, slot: Slot, why: &str) {
        tracing::warn!("the server's module is not used: {why}");
        self.by_module = false;
        self.begin_plain(now, Some(Piece::Fresh(slot)));
    }

    /// Runs one turn of a payload that refers to memory.
    pub(super) fn write_referenced(&mut self, now: Instant) -> Result<Option<usize>, WriteError> {
        let Some(ServerLink { stage: Stage::Referenced(payload), socket, .. }) = &mut self.link else {
            return Ok(None);
        };
        let mut moved = false;
        for used in payload.settle()? {
            let length = u64::from(used.slot.length);
            self.input.used(used).map_err(WriteError::Feed)?;
            self.meter.bytes_delivered.add(length);
            moved = true;
        }
        if payload.wants_slot()
            && let Some(slot) = self.input.next_slot()
        {
            payload.take(slot)?;
            moved = true;
        }
        self.at.next_slot = self.meter.slots_below.get();
        match payload.write(now, socket, self.input.is_fetched())? {
            Turn::Nothing => Ok(moved.then_some(0)),
            Turn::Wrote(bytes) => {
                self.meter.bytes_given.add(bytes as u64);
                Ok(Some(bytes))
            }
            Turn::Whole(end) => {
                self.meter.referred.set(payload.referred());
                Ok(Some(self.end_payload(&end)))
            }
        }
    }
}
