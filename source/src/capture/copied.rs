//! The snapshot as a copy of another source's, and the stream behind it from the server.
//!
//! ```text
//!   the first source:  journal ══ from the snapshot's offset up to now ══▶ journal ◀══ PSYNC at its end ── the server
//!                      slots ═══════════════ slot by slot ═══════════════▶ the same slots, sealed as they were there
//! ```
//!
//! The server's backlog need not reach back to the snapshot: what it lacks is in the first source's journal. The server
//! is asked by `INFO` before each `PSYNC`: one that it cannot continue would have it take a snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use remora_protocol::Offer;
use remora_reader::parts::Part;
use remora_reader::source::{Sinks, Way};
use remora_redis::psync::client::Options;
use remora_table::{Identity, JournalReader, Kind, Origin, SnapshotReader, SnapshotSealer, SnapshotWriter, State};

use super::method::Method;
use super::psync_link::is_same_history;
use super::snapshot::{Taking, long_ago};
use super::stream::{Following, Journal};
use super::{Capture, CaptureError, CaptureEvent};
use crate::copies::{continues, reaches};
use crate::options::Compress;
use remora_server::Facts;

/// Bytes of the buffers in which slots and records arrive, and of what is read at once.
const BUFFER_MEMORY: u64 = 96 << 20;

/// How long to wait for the next arrival before the stop is looked at again.
const WAIT: Duration = Duration::from_millis(20);

/// How long to wait for a source that has published nothing more.
const NEWS_PAUSE: Duration = Duration::from_millis(2);

/// What the first source offers, and how it is read.
pub(crate) struct Offered {
    pub(crate) offer: Offer,
    pub(crate) way: Way,
    /// The conversation in which it was offered has ended.
    pub(crate) is_over: Arc<AtomicBool>,
}

impl AsRef<Offer> for Offered {
    fn as_ref(&self) -> &Offer {
        &self.offer
    }
}

impl Capture {
    /// Copies the snapshot that another source offers, and follows the server's stream behind it.
    pub(super) fn take_copy(&self, first: &Offered) -> Result<Following, CaptureError> {
        self.plan.gauge.set_method(Method::Copied);
        let sinks = Sinks::new(BUFFER_MEMORY);
        let lost = |failure: remora_process::exit::Failure| CaptureError::First(failure.message);
        let (_, records, _) = first.way.journal(&first.offer, sinks).map_err(lost)?;
        let (id, part, _) = first.way.snapshot(&first.offer, sinks, None).map_err(lost)?;
        let Origin { history, offset, .. } = id.origin;
        if self.plan.journal.is_none() {
            reaches(self.plan.gauge.journal().0, offset).map_err(CaptureError::First)?;
        }
        let (memory, geometry) = &self.plan.snapshot;
        let identity = self.identity(Kind::Snapshot, history, offset);
        let writer = SnapshotWriter::create(memory.clone(), *geometry, identity.clone(), 0)?;
        let sealer = self.sealer_of_a_copy(identity)?;
        let journal = Journal::create(&self.plan, &self.identity(Kind::Journal, history, offset))?;
        self.plan.gauge.snapshot_began(history, offset, journal.is_some());
        self.report(CaptureEvent::Started { generation: self.plan.generation, replid: history, offset });
        let taking = Taking::new(self, writer, None);
        let Some(mut journal) = journal else {
            self.copy_slots(first, taking, part, sealer)?;
            return Ok(Following::AnotherCapture);
        };
        // When the server has written what is there already is not known.
        journal.written_since(long_ago(Instant::now()));
        self.copy_records(first, &mut journal, records)?;
        let end = journal.end_offset();
        let facts = self.wait_for(async { Facts::read(&mut self.plan.server.connect().await?).await })?;
        let next = continues(&facts, history, end - 1).map_err(CaptureError::First)?;
        let mut link = self.handshake(Options { resume: Some(next), ..Options::default() })?;
        let gone = || CaptureError::First("the server here does not continue its stream".into());
        let now = link.continued()?.ok_or_else(gone)?;
        is_same_history(history, now, end - 1)?;
        journal.written_since(Instant::now());
        self.beside_the_stream(link.into_socket(), journal, || self.copy_slots(first, taking, part, sealer))
    }

    /// What fills the table for other hosts, if there is one.
    fn sealer_of_a_copy(&self, identity: Identity) -> Result<Option<SnapshotSealer>, CaptureError> {
        let Some(remote) = &self.plan.remote else {
            self.plan.gauge.not_compressed();
            return Ok(None);
        };
        let ((plain, geometry), memory) = (self.plan.snapshot.clone(), remote.memory.clone());
        let sealer = match &remote.key {
            Some(key) if remote.compress == Compress::Off => {
                SnapshotSealer::create(plain, memory, geometry, identity, key)?
            }
            key => SnapshotSealer::create_compressed(plain, memory, geometry, identity, key.as_ref())?,
        };
        self.plan.gauge.sealing_begins();
        Ok(Some(sealer.as_a_copy()))
    }

    /// Copies what the first source has of the stream until now.
    fn copy_records(&self, first: &Offered, journal: &mut Journal, part: Part) -> Result<(), CaptureError> {
        let Part { mut peer, sink, layout, expect, .. } = part;
        let mut reader = JournalReader::new(None, sink, layout, expect, journal.end_offset()).map_err(lost)?;
        while !reader.is_caught_up() {
            self.check_first(first)?;
            reader.pump(&mut *peer).map_err(lost)?;
            let mut is_idle = true;
            while let Some(chunk) = reader.next_chunk() {
                is_idle = false;
                journal.append(&chunk.bytes, &self.plan.gauge)?;
            }
            if is_idle && !reader.is_caught_up() {
                peer.wait(WAIT).map_err(|error| CaptureError::First(error.to_string()))?;
            }
        }
        Ok(())
    }

    /// Copies slot after slot, each as it is stored there.
    fn copy_slots(
        &self,
        first: &Offered,
        mut taking: Taking<'_>,
        part: Part,
        mut sealer: Option<SnapshotSealer>,
    ) -> Result<(), CaptureError> {
        let (Part { mut peer, sink, layout, expect, .. }, mut bytes) = (part, Vec::new());
        let reader = SnapshotReader::new(None, sink, layout, expect, |_| false).map_err(lost)?;
        let mut reader = reader.keeping_encoded(sealer.is_some());
        let mut stored = 0;
        while !reader.is_complete() {
            self.check_first(first)?;
            reader.pump(&mut *peer).map_err(lost)?;
            let mut is_idle = true;
            while let Some(slot) = reader.next_slot() {
                is_idle = false;
                let (view, range) = slot.bytes();
                bytes.resize(slot.length as usize, 0);
                view.read(range.start, &mut bytes).map_err(remora_table::Error::from)?;
                if let Some(sealer) = &mut sealer {
                    sealer.store_as(slot.encoded().cloned());
                }
                reader.release(slot).map_err(lost)?;
                taking.append(&bytes)?;
                self.seal_copied(sealer.as_mut(), &mut stored)?;
            }
            if is_idle && reader.is_caught_up() {
                std::thread::sleep(NEWS_PAUSE);
            } else if is_idle {
                peer.wait(WAIT).map_err(|error| CaptureError::First(error.to_string()))?;
            }
        }
        taking.complete_with(|| {
            self.seal_copied(sealer.as_mut(), &mut stored)?;
            match sealer.is_none_or(|sealer| sealer.state() == State::Sealed) {
                true => Ok(()),
                false => Err(CaptureError::First("the copy for other hosts is not whole".into())),
            }
        })
    }

    /// Seals what is complete in the plain table.
    fn seal_copied(&self, sealer: Option<&mut SnapshotSealer>, stored: &mut u64) -> Result<(), CaptureError> {
        let Some(sealer) = sealer else { return Ok(()) };
        while sealer.pump()? {
            if let Some(slot) = sealer.take_stored() {
                *stored += u64::from(slot.stored);
                self.plan.gauge.stored(*stored, slot.method.is_some(), "as the first source has done it".into());
            }
            self.plan.gauge.sealed(sealer.sealed_slots());
        }
        Ok(())
    }

    /// Fails if the copy was stopped, or the first source's conversation has ended.
    fn check_first(&self, first: &Offered) -> Result<(), CaptureError> {
        self.stop.check()?;
        match first.is_over.load(Relaxed) {
            true => Err(CaptureError::First("its conversation has ended".into())),
            false => Ok(()),
        }
    }
}

fn lost(error: remora_table::Error) -> CaptureError {
    CaptureError::First(error.to_string())
}
