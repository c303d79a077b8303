//! The snapshot's bytes: from the connection into slots of the table.

use std::io;
use std::time::Duration;

use remora_fabric::Memory;
use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::client::EofMark;
use remora_table::{Identity, Kind, Origin, SnapshotWriter, State};

use super::Capture;
use super::journal::Journal;
use super::plan::{CaptureError, CaptureEvent};
use super::psync_link::Announced;
use super::sealing::Sealing;
use super::socket::{Received, Socket};
use crate::server::Facts;
use crate::source::output_buffer::OutputBuffer;

/// Pause of a writer whose ring is full, before it checks again whether a slot was retired.
const RETIRE_POLL: Duration = Duration::from_micros(500);

/// A read of fewer bytes is followed by a pause. A reader that is woken for every few kilobytes takes the processor
/// from the server's child, which writes them: measured, 20,000 times in one gigabyte, for a tenth of the whole time.
const WORTHWHILE_BYTES: usize = 512 * 1024;

/// The pause: the time in which a fast server sends [`WORTHWHILE_BYTES`], and longer for a slow one. The socket buffer
/// holds more than arrives in this time.
const PAUSE: Duration = Duration::from_micros(300);
const PAUSE_LONG: Duration = Duration::from_millis(1);

/// The phase of a capture that this module is about, for its errors.
pub(super) const DURING: &str = "snapshot";

/// The length in bytes of the mark that ends an `$EOF:` payload.
pub(super) const MARK_BYTES: u32 = 40;

impl Capture {
    /// Creates the tables, and reports that replicas may read them.
    pub(super) fn begin(&self, announced: &Announced) -> Result<(Taking<'_>, Option<Journal>), CaptureError> {
        let Announced { replid, offset, payload, .. } = announced;
        let (memory, geometry) = &self.plan.snapshot;
        let hold_back = if matches!(payload, Payload::Mark(_)) { MARK_BYTES } else { 0 };
        let identity = self.identity(Kind::Snapshot, *replid, *offset);
        let writer = SnapshotWriter::create(memory.clone(), *geometry, identity, hold_back)?;
        let Begun { journal, sealing } = self.begun(*replid, *offset)?;
        if let Payload::Length(bytes) = payload {
            self.plan.gauge.announced(*bytes);
        }
        Ok((Taking::new(self, writer, sealing), journal))
    }

    /// The snapshot's table exists: creates the journal, unless another capture writes one, begins to seal, and reports
    /// that replicas may read.
    pub(super) fn begun(&self, replid: ReplId, offset: u64) -> Result<Begun, CaptureError> {
        self.plan.tuning.end(&self.plan.runtime);
        self.check_imports()?;
        let journal = Journal::create(&self.plan, &self.identity(Kind::Journal, replid, offset))?;
        let sealing = Sealing::begin(&self.plan, self.identity(Kind::Snapshot, replid, offset))?;
        self.plan.gauge.snapshot_began(replid, offset, journal.is_some());
        self.report(CaptureEvent::Started { generation: self.plan.generation, replid, offset });
        Ok(Begun { journal, sealing })
    }

    /// The error of a snapshot that the server sends before the stream, on one connection: if the link broke because
    /// the server held back too much of the stream, the error says so.
    pub(super) fn explained(&self, error: CaptureError) -> CaptureError {
        let is_broken = matches!(error, CaptureError::Link { during: DURING, .. });
        if !is_broken || self.plan.journal.is_none() {
            return error;
        }
        let took = self.plan.gauge.capture_time();
        let asked = self.wait_for(async {
            let mut client = self.plan.server.connect().await?;
            let facts = Facts::read(&mut client).await?;
            let buffer = OutputBuffer::read(&mut client, &facts).await;
            Ok((facts.offset.unwrap_or(0), buffer))
        });
        let Ok((offset, buffer)) = asked else { return error };
        let held = offset.saturating_sub(self.plan.gauge.snapshot_offset());
        match buffer.reached(held, took) {
            Some(limit) => CaptureError::OutputBuffer { held, took, limit },
            None => error,
        }
    }

    pub(super) fn identity(&self, kind: Kind, replid: ReplId, first_offset: u64) -> Identity {
        Identity { kind, origin: Origin { generation: self.plan.generation, history: replid, offset: first_offset } }
    }
}

/// What begins with a snapshot.
pub(super) struct Begun {
    /// `None` if another capture follows the stream.
    pub(super) journal: Option<Journal>,
    /// `None` if replicas on other hosts read the plain table.
    pub(super) sealing: Option<Sealing>,
}

/// A snapshot that is being written. Its table is aborted when this is dropped, unless the snapshot was completed.
pub(super) struct Taking<'c> {
    capture: &'c Capture,
    writer: SnapshotWriter,
    sealing: Option<Sealing>,
    is_complete: bool,
}

impl<'c> Taking<'c> {
    pub(super) fn new(capture: &'c Capture, writer: SnapshotWriter, sealing: Option<Sealing>) -> Taking<'c> {
        Taking { capture, writer, sealing, is_complete: false }
    }

    /// Seals the snapshot without its last `trim` bytes, and reports it to the source's loop.
    pub(super) fn complete(mut self, trim: u64) -> Result<(), CaptureError> {
        let bytes = self.writer.finish(trim)?;
        self.sealing.take().map_or(Ok(()), Sealing::finish)?;
        self.is_complete = true;
        let plan = &self.capture.plan;
        plan.gauge.snapshot_at(&self.writer);
        plan.gauge.snapshot_ended(State::Sealed);
        self.capture.report(CaptureEvent::Completed { generation: plan.generation, bytes });
        Ok(())
    }

    /// Appends all of `bytes`. If the ring is full it waits for the readers.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
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
    pub(super) fn fill(mut self, announced: Announced) -> Result<Socket, CaptureError> {
        let Announced { mut socket, payload, .. } = announced;
        let trim = self.receive(&mut socket, &payload)?;
        self.complete(trim)?;
        Ok(socket)
    }

    /// Receives the payload. Returns how many bytes at its end do not belong to the snapshot.
    fn receive(&mut self, socket: &mut Socket, payload: &Payload) -> Result<u64, CaptureError> {
        let capture = self.capture;
        let memory = &capture.plan.snapshot.0;
        let mut intake = Intake::new(payload);
        let mut silence = capture.silence(DURING);
        while !intake.is_over() {
            capture.stop.check()?;
            let Some(received) = intake.read(socket, memory, &mut self.writer)? else {
                self.wait_for_room()?;
                silence.restart();
                continue;
            };
            let Some(n) = silence.check(received)? else { continue };
            self.show();
            if !intake.is_over() {
                pause_after(n);
            }
        }
        Ok(intake.trim())
    }

    /// The ring is full: retires the slots that the machine allows to be reused, or waits a moment for the readers.
    /// Fails if no slot may be reused.
    fn wait_for_room(&mut self) -> Result<(), CaptureError> {
        let plan = &self.capture.plan;
        if plan.retained {
            return Err(CaptureError::Outgrown);
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
    Reached,
}

/// Receives one payload straight into the slots of a table, and takes nothing of what follows it on the connection.
pub(crate) struct Intake {
    end: End,
    trim: u64,
}

impl Intake {
    pub(crate) fn new(payload: &Payload) -> Intake {
        match payload {
            Payload::Length(0) => Intake { end: End::Reached, trim: 0 },
            Payload::Length(length) => Intake { end: End::Length(*length), trim: 0 },
            Payload::Mark(mark) => Intake { end: End::Mark(EofMark::new(*mark)), trim: u64::from(MARK_BYTES) },
        }
    }

    /// Whether the payload's last byte has been received.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.end, End::Reached)
    }

    /// How many of the bytes that were received do not belong to the snapshot: the mark.
    pub(crate) fn trim(&self) -> u64 {
        self.trim
    }

    /// Reads once into the writer's free space. `None` if it has none.
    pub(crate) fn read(
        &mut self,
        socket: &mut Socket,
        memory: &Memory,
        writer: &mut SnapshotWriter,
    ) -> Result<Option<io::Result<Received>>, CaptureError> {
        let Some(space) = writer.space() else { return Ok(None) };
        let room = match self.end {
            // The bytes behind the last one are the stream's.
            End::Length(left) => left.min(space.end - space.start),
            // The server sends nothing behind the mark before it has an acknowledgement.
            End::Mark(_) | End::Reached => space.end - space.start,
        };
        let received = socket.receive_into(memory, space.start, room as usize);
        if let Ok(Received::Bytes(n)) = received {
            let is_over = match &mut self.end {
                End::Length(left) => {
                    *left -= n as u64;
                    *left == 0
                }
                End::Mark(mark) => mark_seen(mark, memory, space.start, n)?,
                End::Reached => true,
            };
            if is_over {
                self.end = End::Reached;
                #[cfg(any(test, feature = "simulation"))]
                if crate::mutation::Mutation::AheadDropped.is_active() {
                    socket.take(socket.ahead().len());
                }
            }
            writer.advance(n as u64)?;
        }
        Ok(Some(received))
    }
}

/// Pauses after a read of `read` bytes if they were few, so that the next read returns more.
pub(super) fn pause_after(read: usize) {
    if read < WORTHWHILE_BYTES {
        std::thread::sleep(if read < WORTHWHILE_BYTES / 8 { PAUSE_LONG } else { PAUSE });
    }
}

/// Whether the last bytes that were received are the payload's mark.
fn mark_seen(mark: &mut EofMark, memory: &Memory, start: u64, received: usize) -> Result<bool, CaptureError> {
    let mut tail = [0; MARK_BYTES as usize];
    let n = received.min(tail.len());
    let at = start + (received - n) as u64;
    memory.read(at, &mut tail[..n]).map_err(remora_table::Error::from)?;
    Ok(mark.observe(&tail[..n], received))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::thread::sleep;

    use remora_redis::psync::client::Options;

    use super::super::psync_link::Opening;
    use super::super::scripted::{FULL, MARK, Primary, Rig, SLOT_BYTES, SLOTS, content, link_cause};
    use super::*;

    /// Bytes of three and a half slots.
    const SOME_BYTES: usize = SLOT_BYTES as usize * 7 / 2;

    /// Bytes of all slots.
    const RING_BYTES: usize = (SLOT_BYTES * SLOTS) as usize;

    /// Takes a snapshot whose `PSYNC` is answered, and then the bytes of `behind` sent in these pieces.
    fn take(rig: &Rig, behind: &[&[u8]], end: impl FnOnce(Primary) + Send) -> Result<(), CaptureError> {
        let script = |mut primary: Primary| {
            primary.converse(&FULL);
            for (number, piece) in (0..).zip(behind) {
                // The pause has the capture read the pieces one by one.
                sleep(Duration::from_millis(if number == 0 { 0 } else { 20 }));
                primary.try_send(piece);
            }
            end(primary);
        };
        rig.play(script, |capture, socket| {
            let mut link = capture.handshake_over(socket, Options::default());
            let Opening::Full { replid, offset, payload } = link.opening()? else { panic!("another opening") };
            let announced = link.announced(replid, offset, payload);
            let (taking, journal) = capture.begin(&announced)?;
            assert_eq!(journal.map(|journal| journal.end_offset()), Some(78));
            taking.fill(announced).map(drop)
        })
    }

    /// Checks that the snapshot was not published as complete.
    #[track_caller]
    fn is_aborted(rig: &mut Rig) {
        assert_eq!(rig.snapshot_state(), (State::Aborted, None));
        assert_eq!(rig.reported(), ["started at 77"]);
    }

    #[track_caller]
    fn is_sealed(rig: &mut Rig, bytes: &[u8]) {
        let length = bytes.len();
        assert_eq!(rig.snapshot_state(), (State::Sealed, Some(length as u64)));
        assert!(rig.snapshot_bytes(length) == bytes, "the table holds other bytes");
        assert!(rig.sealed_bytes() == bytes, "the sealed table holds other bytes");
        assert_eq!(rig.reported(), ["started at 77".to_owned(), format!("completed with {length} bytes")]);
    }

    #[test]
    fn a_payload_of_known_length_fills_the_table_to_its_last_byte() {
        let bytes = content(SOME_BYTES);
        let header = format!("${SOME_BYTES}\r\n");
        let mut rig = Rig::new();
        take(&rig, &[header.as_bytes(), &bytes[..5000], &bytes[5000..]], drop).unwrap();
        is_sealed(&mut rig, &bytes);

        // In one piece with its header, and the stream behind it.
        let mut rig = Rig::new();
        take(&rig, &[&[header.as_bytes(), &bytes].concat()], drop).unwrap();
        is_sealed(&mut rig, &bytes);

        let mut rig = Rig::new();
        take(&rig, &[b"$0\r\n"], drop).unwrap();
        is_sealed(&mut rig, &[]);
    }

    #[test]
    fn a_payload_with_a_mark_ends_before_the_mark() {
        let bytes = content(SOME_BYTES);
        let header = format!("$EOF:{MARK}\r\n");
        let (first, second) = MARK.as_bytes().split_at(13);
        let whole = [header.as_bytes(), &bytes, MARK.as_bytes()].concat();
        let cut = [header.as_bytes(), &bytes[..1], &bytes[1..9000], &bytes[9000..], first, second];
        for pieces in [&[whole.as_slice()][..], &cut] {
            let mut rig = Rig::new();
            take(&rig, pieces, drop).unwrap();
            is_sealed(&mut rig, &bytes);
        }
        let mut rig = Rig::new();
        take(&rig, &[header.as_bytes(), MARK.as_bytes()], drop).unwrap();
        is_sealed(&mut rig, &[]);
    }

    #[test]
    fn a_primary_that_closes_in_the_middle_leaves_an_aborted_table() {
        let bytes = content(SOME_BYTES);
        let length = format!("${}\r\n", SOME_BYTES + 1);
        let mark = format!("$EOF:{MARK}\r\n");
        let part_of_mark = &MARK.as_bytes()[..39];
        for pieces in [[length.as_bytes(), &bytes, b""], [mark.as_bytes(), &bytes, part_of_mark]] {
            let mut rig = Rig::new();
            let error = take(&rig, &pieces, drop).unwrap_err();
            assert!(link_cause(&error).contains("closed the connection"), "{error}");
            is_aborted(&mut rig);
        }
    }

    #[test]
    fn a_silent_primary_leaves_an_aborted_table() {
        let mut rig = Rig::new();
        rig.capture.silence_limit = Duration::from_millis(400);
        let error = take(&rig, &[b"$100\r\n", b"REDIS"], |mut primary| primary.drain()).unwrap_err();
        assert!(error.to_string().starts_with("the link to the server broke during the snapshot"), "{error}");
        assert!(link_cause(&error).contains("no byte arrived within"), "{error}");
        is_aborted(&mut rig);
    }

    #[test]
    fn a_stopped_snapshot_leaves_an_aborted_table() {
        let mut rig = Rig::new();
        let stop = rig.capture.plan.stop.clone();
        let stopping = |mut primary: Primary| {
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            primary.drain();
        };
        let error = take(&rig, &[b"$100\r\n", b"REDIS"], stopping).unwrap_err();
        assert!(matches!(error, CaptureError::Stopped));
        is_aborted(&mut rig);
    }

    #[test]
    fn a_retained_snapshot_that_outgrows_its_table_is_aborted() {
        let bytes = content(RING_BYTES + 1);
        let header = format!("${}\r\n", bytes.len());
        let mut rig = Rig::new();
        let error = take(&rig, &[header.as_bytes(), &bytes], |mut primary| primary.drain()).unwrap_err();
        assert!(matches!(error, CaptureError::Outgrown) && error.is_transient());
        is_aborted(&mut rig);

        // One byte less fits.
        let mut rig = Rig::new();
        let bytes = &bytes[..RING_BYTES];
        take(&rig, &[format!("${RING_BYTES}\r\n").as_bytes(), bytes], drop).unwrap();
        is_sealed(&mut rig, bytes);
    }

    #[test]
    fn a_windowed_snapshot_waits_for_its_readers_and_reuses_their_slots() {
        let bytes = content(RING_BYTES + SOME_BYTES);
        let header = format!("${}\r\n", bytes.len());
        let mut rig = Rig::new();
        rig.capture.plan.retained = false;
        rig.capture.silence_limit = Duration::from_millis(500);
        let gauge = rig.capture.plan.gauge.clone();
        let reading = |mut primary: Primary| {
            while gauge.reading().writer_waits == 0 {
                sleep(Duration::from_millis(1));
            }
            // To wait for readers is no silence of the server.
            sleep(Duration::from_millis(600));
            assert_eq!(gauge.retired_slots(), 0);
            gauge.allow_retiring(4);
            primary.drain();
        };
        take(&rig, &[header.as_bytes(), &bytes], reading).unwrap();
        assert_eq!(rig.snapshot_state(), (State::Sealed, Some(bytes.len() as u64)));
        assert_eq!(gauge.retired_slots(), 4);
        assert_eq!(rig.reported()[1], format!("completed with {} bytes", bytes.len()));
    }

    #[test]
    fn what_is_appended_is_all_there_and_an_incomplete_snapshot_is_aborted() {
        let bytes = content(SOME_BYTES);
        let mut rig = Rig::new();
        // Only the writer is tried here: no thread seals what it writes.
        (rig.capture.plan.remote, rig.capture.plan.sealed_journal) = (None, None);
        let (memory, geometry) = rig.capture.plan.snapshot.clone();
        let create = || {
            let replid = super::super::scripted::history();
            let identity = rig.capture.identity(Kind::Snapshot, replid, 77);
            SnapshotWriter::create(memory.clone(), geometry, identity, 0).unwrap()
        };
        let mut taking = Taking::new(&rig.capture, create(), None);
        taking.append(&bytes).unwrap();
        drop(taking);
        assert_eq!(rig.snapshot_state(), (State::Aborted, None));
        let mut taking = Taking::new(&rig.capture, create(), None);
        taking.append(&bytes).unwrap();
        taking.complete(0).unwrap();
        assert_eq!(rig.snapshot_state(), (State::Sealed, Some(bytes.len() as u64)));
        assert!(rig.snapshot_bytes(bytes.len()) == bytes);
    }
}
