//! The reader of a journal: begins at any offset that is still held, and follows the end. No I/O and no clock of its
//! own.
//!
//! ```text
//!   line ─▶ Search: entries ─▶ Track: slot, place in it, offset ─▶ copy ─▶ entry again ─▶ CRCs ─▶ next_chunk()
//!            (once, to begin)      ▲ Fetch: slots in buffers of the sink
//!                                  └ or the source's memory itself (shm)
//! ```

use std::sync::Arc;

use remora_fabric::{Memory, Peer, View};

use super::fetch::{Fetch, InPlace};
use super::track::{Chunk, Room, Track};
use crate::error::Error;
use crate::expectation::Expectation;
use crate::snapshot::SinkLayout;

/// Follows one journal.
///
/// The caller's loop: [`pump`](Self::pump), then all of [`next_chunk`](Self::next_chunk). If nothing came, wait: with
/// [`Peer::wait`], or, if [`is_caught_up`](Self::is_caught_up), for as long as news may be late.
pub struct JournalReader {
    track: Track,
    fetch: Fetch,
    in_place: Option<InPlace>,
}

impl JournalReader {
    /// Creates a reader whose first byte is the one at replication offset `start`. If the journal has not reached it
    /// yet, the reader waits.
    ///
    /// `view`: the region itself, if the peer can provide it ([`Peer::view`]); the sink's buffers are then not used.
    /// Two buffers or more keep the wire busy while one is checked.
    ///
    /// # Errors
    /// [`Error::Layout`]: the geometry is outside its limits, the sink or the view too small.
    pub fn new(
        view: Option<Arc<View>>,
        sink: Arc<Memory>,
        layout: SinkLayout,
        expect: Expectation,
        start: u64,
    ) -> Result<JournalReader, Error> {
        let geometry = expect.geometry.checked()?;
        layout.check(&sink, &geometry)?;
        // A table that is sealed or compressed is opened in the sink.
        let view = view.filter(|_| !expect.needs_opening());
        let in_place = view.map(|view| InPlace::new(view, &geometry)).transpose()?;
        Ok(JournalReader { track: Track::new(expect, start), fetch: Fetch::new(sink, layout), in_place })
    }

    /// Continues with another peer of the same table, after [`Error::Peer`]. The former peer must be closed, so that
    /// none of its reads lands in the sink any more.
    ///
    /// # Errors
    /// [`Error::Layout`]: the view is too small.
    pub fn reconnect(&mut self, view: Option<Arc<View>>) -> Result<(), Error> {
        self.fetch.reset();
        let view = view.filter(|_| !self.track.expect.needs_opening());
        self.in_place = view.map(|view| InPlace::new(view, &self.track.expect.geometry)).transpose()?;
        Ok(())
    }

    /// Posts reads, takes those that have completed, verifies records. Never blocks. Reads the line of the source at
    /// most once per call.
    ///
    /// # Errors
    /// [`Error::Overrun`]: the ring has passed this reader, or the start is no longer held. [`Error::Aborted`], after
    /// the last chunk has been taken. [`Error::Peer`], [`Error::Fabric`]: get another peer and
    /// [`reconnect`](Self::reconnect).
    pub fn pump(&mut self, peer: &mut dyn Peer) -> Result<(), Error> {
        match &mut self.in_place {
            Some(in_place) => in_place.pump(&mut self.track, peer)?,
            None => self.fetch.pump(&mut self.track, peer)?,
        }
        self.track.check_alive()
    }

    /// Looks how far the writer is from the first slot that is still needed, and reads none. For a caller that takes no
    /// chunks for a while. `elsewhere`: how many of the last bytes the caller can get from someone else. `None`: not
    /// known yet. Never blocks.
    ///
    /// # Errors
    /// [`Error::Overrun`]: the ring has passed this reader, by more than is held elsewhere.
    /// [`Error::Peer`], [`Error::Fabric`]: as for [`pump`](Self::pump).
    pub fn look(&mut self, peer: &mut dyn Peer, elsewhere: u64) -> Result<Option<Room>, Error> {
        match &mut self.in_place {
            Some(in_place) => in_place.glance(&mut self.track, peer, elsewhere),
            None => self.fetch.look(&mut self.track, peer, elsewhere),
        }
    }

    /// The next bytes of the stream.
    pub fn next_chunk(&mut self) -> Option<Chunk> {
        self.track.take()
    }

    /// Replication offset of the first byte of the next chunk.
    pub fn position(&self) -> u64 {
        self.track.position()
    }

    /// Whether everything that we know to be published has been delivered: only the source can bring more.
    pub fn is_caught_up(&self) -> bool {
        self.track.is_at_end()
    }
}
