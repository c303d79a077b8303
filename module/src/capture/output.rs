//! Writes the walk's bytes into the table, through a small buffer for short items. It also decides what to do while
//! there is no space: wait as long as the agent is alive, and stop when the agent is gone or cancels.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_table::server_pages::capture_page::{ForkPoint, WriterStatus};
use remora_table::{CapturePage, Identity, Kind, SnapshotWriter};

use super::armed::{AGENT_TIMEOUT, CaptureError};

/// The snapshot being written.
pub(super) struct Output<'b> {
    writer: SnapshotWriter,
    page: &'b CapturePage,
    /// Bytes that are not in the table yet; short items are collected here and written together.
    pub(super) small: Vec<u8>,
    status: WriterStatus,
    began: Instant,
}

impl<'b> Output<'b> {
    /// Lays the table out: from now on it holds the snapshot of that moment.
    pub(super) fn new(
        page: &'b CapturePage,
        memory: Arc<Memory>,
        point: &ForkPoint,
    ) -> Result<Output<'b>, CaptureError> {
        let order = page.order();
        let identity = Identity { kind: Kind::Snapshot, origin: point.origin(order.generation) };
        let writer = SnapshotWriter::create(memory, order.geometry, identity, 0)?;
        let small = Vec::with_capacity(2 * SMALL_BYTES);
        Ok(Output { writer, page, small, status: WriterStatus::default(), began: Instant::now() })
    }

    /// The version of the format that is written.
    pub(super) fn format(&mut self, version: u16) {
        self.status.format = version.into();
    }

    /// One more key is complete.
    pub(super) fn key_done(&mut self) -> Result<(), CaptureError> {
        self.status.keys += 1;
        if self.small.len() < SMALL_BYTES { Ok(()) } else { self.flush() }
    }

    /// Appends bytes after those in the buffer: copied once, straight into the table, unless there are only a few.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
        if bytes.len() < SMALL_BYTES {
            self.small.extend_from_slice(bytes);
            return if self.small.len() < SMALL_BYTES { Ok(()) } else { self.flush() };
        }
        self.flush()?;
        self.append(bytes)
    }

    /// Everything is written. The table stays open: the source writes what the server saves.
    pub(super) fn finish(&mut self) -> Result<(), CaptureError> {
        self.flush()?;
        self.status.took_micros = self.began.elapsed().as_micros() as u64;
        self.report();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CaptureError> {
        let small = std::mem::take(&mut self.small);
        let appended = self.append(&small);
        self.small = small;
        self.small.clear();
        appended
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
        if self.page.is_cancelled() {
            return Err(CaptureError::Cancelled);
        }
        let mut rest = bytes;
        loop {
            let taken = self.writer.append(rest)?;
            rest = rest.get(taken..).unwrap_or_default();
            self.report();
            if rest.is_empty() {
                return Ok(());
            }
            self.wait_for_room()?;
        }
    }

    /// The ring is full: its readers are slower than this writer.
    fn wait_for_room(&mut self) -> Result<(), CaptureError> {
        let limit = Duration::from_secs(AGENT_TIMEOUT.get());
        let mut beat = self.page.orderer_beat();
        let mut heard = Instant::now();
        loop {
            if self.page.is_cancelled() {
                return Err(CaptureError::Cancelled);
            }
            let below = self.page.retire_below();
            if below > self.writer.retired() {
                self.writer.retire(below);
                if self.writer.space().is_some() {
                    return Ok(());
                }
            }
            let now = self.page.orderer_beat();
            if now != beat {
                (beat, heard) = (now, Instant::now());
            } else if heard.elapsed() > limit {
                return Err(CaptureError::Abandoned(limit.as_secs()));
            }
            self.status.waits += 1;
            self.report();
            thread::sleep(ROOM_POLL);
        }
    }

    fn report(&mut self) {
        self.status.received = self.writer.received();
        self.status.published_slots = self.writer.published_slots();
        self.status.retired_slots = self.writer.retired();
        self.page.report(&self.status);
    }
}

/// Bytes that are collected before they go to the table together, and from which on a value goes there by itself. Large
/// compared to the cost of one append (some hundred nanoseconds), small compared to a first-level cache.
const SMALL_BYTES: usize = 8 << 10;

/// How often a writer without space checks for it: readers release a slot of 4 MiB in a millisecond or two.
const ROOM_POLL: Duration = Duration::from_micros(200);
