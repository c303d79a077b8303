//! The snapshot's bytes: from the connection into slots of the table.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_redis::psync::Payload;
use remora_redis::psync::client::EofMark;
use remora_table::{Identity, JournalWriter, Kind, Origin, SnapshotWriter, State};

use super::plan::{CaptureEvent, Fault, Plan};
use super::psync_link::{Announced, came};
use super::socket::{Received, Wire};

/// How long a full ring waits before it looks again whether a slot was retired.
const RETIRE_POLL: Duration = Duration::from_micros(500);

/// A read of less than this is followed by a pause. A reader that is woken for every few kilobytes takes the processor from the
/// server's child that writes them: twenty thousand times in one gigabyte, measured, for a tenth of the whole time.
const WORTHWHILE: usize = 512 * 1024;

/// How long: what a quick server needs for [`WORTHWHILE`] bytes, and longer where it is a slow one. Its socket holds more than
/// comes in that time.
const PAUSE: Duration = Duration::from_micros(300);
const PAUSE_LONG: Duration = Duration::from_millis(1);

/// The length of the mark that ends an `$EOF:` payload.
pub(super) const MARK_LENGTH: u32 = 40;

/// Makes the tables and tells that they are there to be read.
pub(super) fn begin<'p>(plan: &'p Plan, asked: &Announced) -> Result<(Taking<'p>, Option<JournalWriter>), Fault> {
    let Announced { replid, offset, payload, .. } = asked;
    let origin = Origin { generation: plan.generation, history: *replid, offset: *offset };
    let identity = |kind| Identity { kind, origin };
    let (memory, geometry) = &plan.snapshot;
    let hold_back = if matches!(payload, Payload::Mark(_)) { MARK_LENGTH } else { 0 };
    let snapshot = SnapshotWriter::create(memory.clone(), *geometry, identity(Kind::Snapshot), hold_back)?;
    let journal = match &plan.journal {
        Some((memory, geometry)) => Some(JournalWriter::create(memory.clone(), *geometry, identity(Kind::Journal))?),
        None => None,
    };
    plan.gauge.snapshot_began(*replid, *offset, journal.is_some());
    let (generation, replid, offset) = (plan.generation, *replid, *offset);
    let _ = plan.events.send(CaptureEvent::Started { generation, replid, offset });
    Ok((Taking::new(plan, snapshot), journal))
}

/// A snapshot that is being written. Its table is aborted when this is dropped, unless the snapshot was completed.
pub(super) struct Taking<'p> {
    plan: &'p Plan,
    writer: SnapshotWriter,
    is_complete: bool,
}

impl<'p> Taking<'p> {
    pub(super) fn new(plan: &'p Plan, writer: SnapshotWriter) -> Taking<'p> {
        Taking { plan, writer, is_complete: false }
    }

    /// Seals the snapshot without its last `trim` bytes, and reports it to the owner.
    pub(super) fn complete(mut self, trim: u64) -> Result<(), Fault> {
        let bytes = self.writer.finish(trim)?;
        self.is_complete = true;
        self.plan.gauge.snapshot_at(&self.writer);
        self.plan.gauge.snapshot_ended(State::Sealed);
        let _ = self.plan.events.send(CaptureEvent::Completed { generation: self.plan.generation, bytes });
        Ok(())
    }

    /// Appends all of it, at the readers' pace where the ring is full.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let mut rest = bytes;
        loop {
            let taken = self.writer.append(rest)?;
            rest = &rest[taken..];
            self.plan.gauge.snapshot_at(&self.writer);
            if rest.is_empty() {
                return Ok(());
            }
            if self.plan.retained {
                return Err(Fault::Outgrown);
            }
            if self.plan.stop.load(Ordering::Relaxed) {
                return Err(Fault::Stopped);
            }
            wait_for_room(self.plan, &mut self.writer);
        }
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        if !self.is_complete {
            self.writer.abort();
        }
    }
}

/// Takes the payload, and gives back the connection it came by.
pub(super) fn fill(mut taking: Taking<'_>, asked: Announced) -> Result<Wire, Fault> {
    let Announced { mut wire, payload, early, .. } = asked;
    let trim = receive_payload(taking.plan, &mut wire, &mut taking.writer, &payload, &early)?;
    taking.complete(trim)?;
    Ok(wire)
}

/// Where a payload ends: known beforehand, or recognised.
enum End {
    Length(u64),
    Mark(EofMark),
}

/// The payload, straight into slots. Returns how many bytes at its end are not the snapshot's.
fn receive_payload(
    plan: &Plan,
    wire: &mut Wire,
    snapshot: &mut SnapshotWriter,
    payload: &Payload,
    early: &[u8],
) -> Result<u64, Fault> {
    let memory = &plan.snapshot.0;
    let (mut end, trim) = match payload {
        Payload::Length(length) => (End::Length(*length), 0),
        Payload::Mark(mark) => (End::Mark(EofMark::new(*mark)), u64::from(MARK_LENGTH)),
    };
    let mut early = early;
    let mut heard = Instant::now();
    let mut done = matches!(end, End::Length(0));
    while !done {
        if plan.stop.load(Ordering::Relaxed) {
            return Err(Fault::Stopped);
        }
        let Some(space) = snapshot.space() else {
            if plan.retained {
                return Err(Fault::Outgrown);
            }
            wait_for_room(plan, snapshot);
            heard = Instant::now();
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
        let Some(n) = came(received, heard, "snapshot")? else { continue };
        heard = Instant::now();
        done = match &mut end {
            End::Length(left) => {
                *left -= n as u64;
                *left == 0
            }
            End::Mark(mark) => mark_seen(mark, memory, space.start, n)?,
        };
        snapshot.advance(n as u64)?;
        plan.gauge.snapshot_at(snapshot);
        if !done {
            pause_after(n);
        }
    }
    Ok(trim)
}

/// Pause after a read of this many bytes, so that the next read returns more.
pub(super) fn pause_after(read: usize) {
    if read < WORTHWHILE {
        std::thread::sleep(if read < WORTHWHILE / 8 { PAUSE_LONG } else { PAUSE });
    }
}

/// The ring is full: takes over what readers have passed, or waits a moment for them.
fn wait_for_room(plan: &Plan, snapshot: &mut SnapshotWriter) {
    let below = plan.gauge.retire_below();
    if below > snapshot.retired() {
        snapshot.retire(below);
        plan.gauge.snapshot_at(snapshot);
    } else {
        plan.gauge.writer_waits();
        std::thread::sleep(RETIRE_POLL);
    }
}

/// Looks at the last bytes that landed whether they are the payload's end.
fn mark_seen(mark: &mut EofMark, memory: &Memory, start: u64, landed: usize) -> Result<bool, Fault> {
    let mut tail = [0; MARK_LENGTH as usize];
    let n = landed.min(tail.len());
    let at = start + (landed - n) as u64;
    memory.read(at, &mut tail[..n]).map_err(remora_table::Error::from)?;
    Ok(mark.observe(&tail[..n], landed))
}
