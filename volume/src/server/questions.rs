//! Questions: what clients ask of a volume without opening it, each on a connection of its own: how its copy stands, a
//! scrub of it, its removal, its growth.

use std::sync::Arc;

use bytes::Bytes;
use remora_messenger::Connection;

use super::answers::{answer, refuse};
use super::growing::Asked;
use super::host::{Host, OTHER_SHAPE};
use super::slot::{GROWS, NO_WRITER, Slot, State};
use crate::link::AT_WORK;
use crate::shape::{Shape, VolumeId};
use crate::wire::{Cause, Reply, Status};

impl Host {
    /// How the copy of a volume stands, and what is used of the server. It may have none.
    pub(super) fn status(&self, connection: &Connection, shape: Shape) {
        let of_copy = match self.slot_of(shape.volume()) {
            Some(slot) => {
                let state = slot.lock();
                if state.shape() != shape {
                    return refuse(connection, Cause::Shape, OTHER_SHAPE);
                }
                state.status()
            }
            None => Status::default(),
        };
        let (memory, staging) = self.used();
        answer(connection, &Reply::Status(Box::new(Status { memory, staging, ..of_copy })), Bytes::new());
    }

    /// How each copy stands that there is.
    pub(super) fn statuses(&self) -> Vec<(VolumeId, Status)> {
        let slots = self.slots();
        let of = |slot: &Arc<Slot>| {
            let state = slot.lock();
            state.is_there().then(|| (state.shape().volume(), state.status()))
        };
        slots.iter().filter_map(of).collect()
    }

    /// Has the copy scrubbed. The keeper's thread answers.
    pub(super) fn scrub(&self, connection: &Connection, shape: Shape) {
        let Some(slot) = self.slot_of(shape.volume()) else {
            return refuse(connection, Cause::OutOfStep, "the server has no copy of this volume");
        };
        if !self.connect(connection, &slot) {
            return refuse(connection, Cause::Misuse, "the connection is open already");
        }
        let mut state = slot.lock();
        if state.shape() != shape {
            return refuse(connection, Cause::Shape, OTHER_SHAPE);
        }
        let done = state.ask_for_scrub(connection);
        drop(state);
        self.done(connection, done);
    }

    /// Whether no writer is at work with the copy, or the client consents. Otherwise the client is refused.
    fn is_free(&self, connection: &Connection, state: &State, takes_over: bool) -> bool {
        if state.is_growing() {
            refuse(connection, Cause::InUse, GROWS);
            return false;
        }
        let silent = state.writer_silent(NO_WRITER).filter(|silent| !takes_over && *silent < AT_WORK);
        if let Some(silent) = silent {
            let text = format!("a writer is at work, heard {} ms ago: the copy is left alone", silent.as_millis());
            refuse(connection, Cause::InUse, &text);
        }
        silent.is_none()
    }

    /// Copies the copy into a larger one, or into a smaller one if nothing was ever written behind its end: the way
    /// back from a size that not all servers have. A thread does it, and answers. If that is only asked, nothing
    /// changes.
    pub(super) fn grow(&self, connection: &Connection, shape: Shape, takes_over: bool, asked: Asked) {
        let slot = self.slot_or_unknown(shape);
        let mut state = slot.lock();
        let had = state.shape();
        if had.copies() != shape.copies() {
            return refuse(connection, Cause::Shape, "the volume has another number of copies here");
        }
        if had.blocks() > shape.blocks() && asked != Asked::Back {
            return refuse(connection, Cause::Shape, "the volume is larger here");
        }
        if state.has_written_from(shape.blocks()) {
            return refuse(connection, Cause::Shape, "the volume is larger here, and has data behind this size");
        }
        if had != shape && !self.is_free(connection, &state, takes_over) {
            return;
        }
        if had == shape || !state.is_there() {
            let is_there = state.is_there();
            if !is_there && asked != Asked::Could {
                state.reshape(shape);
            }
            let is_unused = state.is_unused();
            drop(state);
            if is_unused {
                self.forget(shape.volume(), &slot);
            }
            return answer(connection, &Reply::Grown { is_there }, Bytes::new());
        }
        if asked == Asked::Could {
            let could = self.could_have(shape);
            drop(state);
            return match could {
                Ok(()) => answer(connection, &Reply::Grown { is_there: true }, Bytes::new()),
                Err(why) => refuse(connection, Cause::NoMemory, &why),
            };
        }
        let larger = match self.larger(shape) {
            Ok(larger) => larger,
            Err(why) => return refuse(connection, Cause::NoMemory, &why),
        };
        state.begin_growth(self.exports());
        drop(state);
        self.begin_growing(connection, slot, larger);
    }

    /// Forgets the copy, and removes its store.
    pub(super) fn remove(&self, connection: &Connection, shape: Shape, takes_over: bool) {
        let slot = self.slot_or_unknown(shape);
        let mut state = slot.lock();
        if state.shape() != shape {
            return refuse(connection, Cause::Shape, OTHER_SHAPE);
        }
        if !self.is_free(connection, &state, takes_over) {
            return;
        }
        let was_there = state.remove(self.exports());
        // With the lock held: no new copy gets a folder meanwhile.
        let removed = self.stores().map_or(Ok(false), |stores| stores.remove(shape.volume()));
        let is_unused = state.is_unused();
        drop(state);
        if is_unused {
            self.forget(shape.volume(), &slot);
        }
        match removed {
            Ok(had_folder) => {
                answer(connection, &Reply::Removed { was_there: was_there || had_folder }, Bytes::new());
            }
            Err(error) => {
                tracing::error!(%error, "the store of a copy that is forgotten is left: remove it by hand");
                let text = format!("the copy is forgotten, and what is left of its store cannot be removed: {error}");
                refuse(connection, Cause::Lost, &text);
            }
        }
    }
}
