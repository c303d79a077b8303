//! The journal of a capture: the plain one, and the sealed one if replicas on other hosts read ciphertext. What is
//! appended is watched for commands that must not be applied late.

use std::time::Instant;

use remora_redis::aof::{Seen, Watch};
use remora_table::{Identity, JournalWriter, Kind, Origin};

use super::plan::{CaptureError, Plan};
use crate::source::gauge::Gauge;

/// The journals, which hold the same stream.
pub(crate) struct Journal {
    plain: JournalWriter,
    sealed: Option<JournalWriter>,
    watch: Watch,
    /// The server has written what is appended next at this time, or later.
    written: Instant,
}

impl Journal {
    /// Creates the journal, unless another capture writes one.
    pub(super) fn create(plan: &Plan, identity: &Identity) -> Result<Option<Journal>, CaptureError> {
        let Some((memory, geometry)) = &plan.journal else { return Ok(None) };
        let plain = JournalWriter::create(memory.clone(), *geometry, identity.clone())?;
        let sealed = plan.sealed_journal.as_ref().map(|sealed| {
            let create = match sealed.compressed {
                true => JournalWriter::create_compressed,
                false => JournalWriter::create_sealed,
            };
            create(sealed.memory.clone(), *geometry, identity.clone(), &sealed.key)
        });
        plan.gauge.journal_begins();
        let watch = Watch::new(plain.end_offset());
        Ok(Some(Journal { plain, sealed: sealed.transpose()?, watch, written: Instant::now() }))
    }

    /// The server may have written what follows at this time already.
    pub(crate) fn written_since(&mut self, at: Instant) {
        self.written = at;
    }

    /// When the server may have written what is appended next.
    pub(super) fn written(&self) -> Instant {
        self.written
    }

    /// Notes what must not be applied late, before readers have it.
    fn note(&mut self, bytes: &[u8], gauge: &Gauge) {
        let (seen, fed) = self.watch.feed(bytes);
        if let Err(error) = fed {
            tracing::warn!(%error, "the stream is not one of commands; replicas that join from now on get another snapshot");
        }
        if seen != Seen::default() {
            gauge.arrived(seen, self.written);
        }
    }

    /// Appends bytes of the stream; readers may take them at once. The gauge shows them before: a replica whose server
    /// has them may ask at once for what follows, and must not be taken for one that is ahead of the stream.
    pub(crate) fn append(&mut self, bytes: &[u8], gauge: &Gauge) -> Result<(), remora_table::Error> {
        self.note(bytes, gauge);
        let end = self.end_offset() + bytes.len() as u64;
        gauge.journal_at(self.first_offset(), end - 1);
        self.plain.append(bytes)?;
        if let Some(sealed) = &mut self.sealed {
            sealed.compress(gauge.is_compressing());
            sealed.append(bytes)?;
        }
        gauge.journal_at(self.first_offset(), end - 1);
        Ok(())
    }

    /// Aborts the journal: readers take what it holds and then find it aborted.
    pub(super) fn abort(&mut self) {
        self.plain.abort();
        if let Some(sealed) = &mut self.sealed {
            sealed.abort();
        }
    }

    /// Replication offset of the oldest byte that every reader can still read.
    pub(super) fn first_offset(&self) -> u64 {
        let sealed = self.sealed.as_ref().map_or(0, JournalWriter::first_offset);
        self.plain.first_offset().max(sealed)
    }

    /// Replication offset of the byte that will be appended next.
    pub(crate) fn end_offset(&self) -> u64 {
        self.plain.end_offset()
    }
}

impl Plan {
    /// An empty journal that begins there, for what a former process had of the stream.
    pub(crate) fn new_journal(&self, origin: Origin) -> Result<Journal, CaptureError> {
        Journal::create(self, &Identity { kind: Kind::Journal, origin })?.ok_or(CaptureError::HistoryGone)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::scripted::{Rig, history};
    use super::*;

    #[test]
    fn bytes_are_shown_before_a_reader_can_have_them() {
        let rig = Rig::new();
        let (plan, gauge) = (&rig.capture.plan, &rig.capture.plan.gauge);
        let identity =
            Identity { kind: Kind::Journal, origin: Origin { generation: 5, history: history(), offset: 77 } };
        let mut journal = Journal::create(plan, &identity).unwrap().unwrap();
        journal.append(b"PING", gauge).unwrap();
        assert_eq!(gauge.journal(), (78, 81));
        // The tables take nothing any more.
        journal.abort();
        journal.append(b"PING", gauge).unwrap_err();
        assert_eq!(gauge.journal(), (78, 85));
    }
}
