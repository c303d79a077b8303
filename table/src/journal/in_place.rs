//! Records copied straight from the source's memory, for a peer that can map it.

use std::sync::Arc;

use remora_fabric::{Completion, Peer, View};

use super::{
    records::{Copied, Window},
    search::Search,
    track::{Cursor, Room, Track},
};
use crate::{
    error::Error,
    layout::{Entry, Geometry, HEAD_BYTES, Kind, Line},
    publish::{load_entry, load_entry_again, load_line},
    reads::{Caught, from_peer, the_line},
};

pub(super) struct InPlace {
    view: Arc<View>,
    head_checked: bool,
    /// How many times in a row the line was caught in the middle of a change.
    caught: Caught,
    completions: Vec<Completion>,
}

impl InPlace {
    pub(super) fn new(view: Arc<View>, geometry: &Geometry) -> Result<InPlace, Error> {
        let wanted = geometry.memory_len();
        if view.length() < wanted {
            return Err(Error::Layout(format!("the source's memory has {} bytes, its table {wanted}", view.length())));
        }
        Ok(InPlace { view, head_checked: false, caught: Caught::default(), completions: Vec::new() })
    }

    pub(super) fn pump(&mut self, track: &mut Track, peer: &mut dyn Peer) -> Result<(), Error> {
        // The connection still reports its end.
        peer.poll(&mut self.completions).map_err(from_peer)?;
        self.completions.clear();
        self.look(track)
    }

    /// Looks how far the writer is, and takes nothing.
    pub(super) fn glance(
        &mut self,
        track: &mut Track,
        peer: &mut dyn Peer,
        elsewhere: u64,
    ) -> Result<Option<Room>, Error> {
        peer.poll(&mut self.completions).map_err(from_peer)?;
        self.completions.clear();
        if let Some(line) = load_line(&&*self.view, None)? {
            track.learn(line);
        }
        track.place.map_or(Ok(None), |cursor| track.room_before(cursor.slot, elsewhere))
    }

    /// Takes what the memory holds now.
    pub(super) fn look(&mut self, track: &mut Track) -> Result<(), Error> {
        self.check_head(track)?;
        match load_line(&&*self.view, None)? {
            Some(line) => {
                self.caught.over();
                track.learn(line);
            }
            None => self.caught.again(None, the_line)?,
        }
        if let (None, Some(line)) = (track.place, track.line) {
            self.find(track, &line)?;
        }
        while let Some(cursor) = track.place {
            if !track.has_room() || cursor.inner >= track.limit(cursor.slot) {
                break;
            }
            self.read(track, cursor)?;
        }
        Ok(())
    }

    fn check_head(&mut self, track: &Track) -> Result<(), Error> {
        if !self.head_checked {
            let mut bytes = [0; HEAD_BYTES];
            self.view.read(0, &mut bytes)?;
            track.expect.check(&bytes, Kind::Journal)?;
            self.head_checked = true;
        }
        Ok(())
    }

    fn find(&self, track: &mut Track, line: &Line) -> Result<(), Error> {
        let geometry = &track.expect.geometry;
        let Some(mut search) = Search::new(track.start, line, geometry) else {
            return Ok(());
        };
        while let Some(number) = search.probe() {
            // The entry of a published slot changes for one reason only: the next lap.
            let entry = load_entry(&&*self.view, geometry, number, None)?.unwrap_or(Entry::writing(number));
            search.answer(number, &entry);
        }
        track.begin(search.found()?);
        Ok(())
    }

    fn read(&self, track: &mut Track, cursor: Cursor) -> Result<(), Error> {
        let window = Window {
            memory: &self.view,
            base: track.expect.geometry.slot_offset(cursor.slot),
            slot_size: track.expect.geometry.slot_size,
            limit: track.limit(cursor.slot),
            is_sealed: false,
        };
        let copied = self.copy(track, &cursor, &window)?;
        if track.accept(copied, &window).is_ok() {
            return Ok(());
        }
        let copied = self.copy(track, &cursor, &window)?;
        let slot = cursor.slot;
        track.accept(copied, &window).map_err(|damage| damage.of(slot))
    }

    /// Records that are proved to be of the cursor's slot: the entry still names it after they were copied.
    fn copy(&self, track: &Track, cursor: &Cursor, window: &Window<'_>) -> Result<Copied, Error> {
        let copied = window.copy(cursor.inner)?;
        let entry = load_entry_again(&&*self.view, &track.expect.geometry, cursor.slot, None)?;
        match entry {
            Some(entry) if cursor.is_of(&entry) => Ok(copied),
            _ => Err(track.overrun(cursor.slot)),
        }
    }
}
