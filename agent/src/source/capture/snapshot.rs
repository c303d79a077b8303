//! The snapshot's bytes: from the connection into slots of the table.

use std::time::Duration;

use remora_fabric::Memory;
use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::client::EofMark;
use remora_table::{Identity, JournalWriter, Kind, SnapshotWriter, State};

use super::Capture;
use super::plan::{CaptureEvent, Fault};
use super::psync_link::Announced;
use super::socket::{Received, Wire};

/// Pause of a writer whose ring is full, before it checks again whether a slot was retired.
const RETIRE_POLL: Duration = Duration::from_micros(500);

/// A read of fewer bytes is followed by a pause. A reader that is woken for every few kilobytes takes the processor from the
/// server's child, which writes them: measured, 20,000 times in one gigabyte, for a tenth of the whole time.
const WORTHWHILE_BYTES: usize = 512 * 1024;

/// The pause: the time in which a fast server sends [`WORTHWHILE_BYTES`], and longer for a slow one. The socket buffer holds more
/// than arrives in this time.
const PAUSE: Duration = Duration::from_micros(300);
const PAUSE_LONG: Duration = Duration::from_millis(1);

/// The phase of a capture that this module is about, for its errors.
pub(super) const DURING: &str = "snapshot";

/// The length in bytes of the mark that ends an `$EOF:` payload.
pub(super) const MARK_BYTES: u32 = 40;

impl Capture {
    /// Creates the tables, and reports that replicas may read them.
    pub(super) fn begin(&self, announced: &Announced) -> Result<(Taking<'_>, Option<JournalWriter>), Fault> {
        let Announced { replid, offset, payload, .. } = announced;
        let (memory, geometry) = &self.plan.snapshot;
        let hold_back = if matches!(payload, Payload::Mark(_)) { MARK_BYTES } else { 0 };
        let identity = self.identity(Kind::Snapshot, *replid, *offset);
        let writer = SnapshotWriter::create(memory.clone(), *geometry, identity, hold_back)?;
        Ok((Taking::new(self, writer), self.begun(*replid, *offset)?))
    }

    /// The snapshot's table exists: creates the journal, unless another capture writes one, and reports that replicas may read.
    pub(super) fn begun(&self, replid: ReplId, offset: u64) -> Result<Option<JournalWriter>, Fault> {
        let journal = match &self.plan.journal {
            Some((memory, geometry)) => {
                let identity = self.identity(Kind::Journal, replid, offset);
                Some(JournalWriter::create(memory.clone(), *geometry, identity)?)
            }
            None => None,
        };
        self.plan.gauge.snapshot_began(replid, offset, journal.is_some());
        self.report(CaptureEvent::Started { generation: self.plan.generation, replid, offset });
        Ok(journal)
    }

    fn identity(&self, kind: Kind, replid: ReplId, first_offset: u64) -> Identity {
        Identity { generation: self.plan.generation, kind, replid: *replid.as_bytes(), first_offset }
    }
}

/// A snapshot that is being written. Its table is aborted when this is dropped, unless the snapshot was completed.
pub(super) struct Taking<'c> {
    capture: &'c Capture,
    writer: SnapshotWriter,
    is_complete: bool,
}

impl<'c> Taking<'c> {
    pub(super) fn new(capture: &'c Capture, writer: SnapshotWriter) -> Taking<'c> {
        Taking { capture, writer, is_complete: false }
    }

    /// Seals the snapshot without its last `trim` bytes, and reports it to the owner.
    pub(super) fn complete(mut self, trim: u64) -> Result<(), Fault> {
        let bytes = self.writer.finish(trim)?;
        self.is_complete = true;
        let plan = &self.capture.plan;
        plan.gauge.snapshot_at(&self.writer);
        plan.gauge.snapshot_ended(State::Sealed);
        self.capture.report(CaptureEvent::Completed { generation: plan.generation, bytes });
        Ok(())
    }

    /// Appends all of `bytes`. If the ring is full it waits for the readers.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let mut rest = bytes;
        loop {
            let taken = self.writer.append(rest)?;
            rest = &rest[taken..];
            self.show();
            if rest.is_empty() {
                return Ok(());
            }
            self.capture.stop.check()?;
            self.wait_for_room()?;
        }
    }

    /// Receives the payload, completes the snapshot, and returns the connection.
    pub(super) fn fill(mut self, announced: Announced) -> Result<Wire, Fault> {
        let Announced { mut wire, payload, early, .. } = announced;
        let trim = self.receive(&mut wire, &payload, &early)?;
        self.complete(trim)?;
        Ok(wire)
    }

    /// Receives the payload straight into slots. Returns how many bytes at its end do not belong to the snapshot.
    fn receive(&mut self, wire: &mut Wire, payload: &Payload, early: &[u8]) -> Result<u64, Fault> {
        let capture = self.capture;
        let memory = &capture.plan.snapshot.0;
        let (mut end, trim) = match payload {
            Payload::Length(length) => (End::Length(*length), 0),
            Payload::Mark(mark) => (End::Mark(EofMark::new(*mark)), u64::from(MARK_BYTES)),
        };
        let mut early = early;
        let mut silence = capture.silence(DURING);
        let mut done = matches!(end, End::Length(0));
        while !done {
            capture.stop.check()?;
            let Some(space) = self.writer.space() else {
                self.wait_for_room()?;
                silence.restart();
                continue;
            };
            let room = match end {
                End::Length(left) => left.min(space.end - space.start),
                End::Mark(_) => space.end - space.start,
            };
            let received = if early.is_empty() {
                wire.receive_into(memory, space.start, room as usize)
            } else {
                let n = early.len().min(room as usize);
                memory.write(space.start, &early[..n]).map_err(remora_table::Error::from)?;
                early = &early[n..];
                Ok(Received::Bytes(n))
            };
            let Some(n) = silence.check(received)? else { continue };
            done = match &mut end {
                End::Length(left) => {
                    *left -= n as u64;
                    *left == 0
                }
                End::Mark(mark) => mark_seen(mark, memory, space.start, n)?,
            };
            self.writer.advance(n as u64)?;
            self.show();
            if !done {
                pause_after(n);
            }
        }
        Ok(trim)
    }

    /// The ring is full: retires the slots that the owner has released, or waits a moment for the readers. Fails if no slot may
    /// be reused.
    fn wait_for_room(&mut self) -> Result<(), Fault> {
        let plan = &self.capture.plan;
        if plan.retained {
            return Err(Fault::Outgrown);
        }
        let below = plan.gauge.retire_below();
        if below > self.writer.retired() {
            self.writer.retire(below);
            self.show();
        } else {
            plan.gauge.writer_waits();
            std::thread::sleep(RETIRE_POLL);
        }
        Ok(())
    }

    /// Shows in the gauge how far the writer is.
    fn show(&self) {
        self.capture.plan.gauge.snapshot_at(&self.writer);
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        if !self.is_complete {
            self.writer.abort();
        }
    }
}

/// Where a payload ends.
enum End {
    /// After this many more bytes.
    Length(u64),
    /// After the mark.
    Mark(EofMark),
}

/// Pauses after a read of `read` bytes if they were few, so that the next read returns more.
pub(super) fn pause_after(read: usize) {
    if read < WORTHWHILE_BYTES {
        std::thread::sleep(if read < WORTHWHILE_BYTES / 8 { PAUSE_LONG } else { PAUSE });
    }
}

/// Whether the last bytes that were received are the payload's mark.
fn mark_seen(mark: &mut EofMark, memory: &Memory, start: u64, received: usize) -> Result<bool, Fault> {
    let mut tail = [0; MARK_BYTES as usize];
    let n = received.min(tail.len());
    let at = start + (received - n) as u64;
    memory.read(at, &mut tail[..n]).map_err(remora_table::Error::from)?;
    Ok(mark.observe(&tail[..n], received))
}
