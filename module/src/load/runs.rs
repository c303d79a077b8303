//! Runs: whole records of small values that lie in an agent's memory, added many at a time in the fast way.
//!
//! The agent's memory may change while it is read, so a run is copied first, and then read as records. The copy stays
//! in the processor's cache. The agent finds out afterwards whether the memory had changed.

use remora_fabric::View;
use remora_redis::rdb::reference::{RUN_BYTES_MAX, RUN_VALUES_BELOW};
use remora_redis::rdb::{Collection, Content, Record, Records, Value};

use crate::api::{AddError, BATCH, Context, FastServer, Scratch};
use crate::fast::{self, Offer, Sample};

/// Why a run can't be added.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    #[error("the field has a run of small values, which this server was not offered for (fast_keys no)")]
    NotOffered,
    #[error("byte {at} of a run of {length} is not a record of a small value")]
    NotRecords { at: usize, length: u32 },
    #[error(transparent)]
    Add(#[from] AddError),
    #[error("what was loaded in the fast way is not as it should be: {0}")]
    Differs(String),
    #[error("the snapshot refers to memory outside what was handed over: {0}")]
    Memory(#[from] remora_fabric::memory::Error),
}

/// Adds runs.
pub(super) struct Runs {
    server: Option<(FastServer, Scratch)>,
    /// Of a load that must be verified.
    sample: Option<Sample>,
    buffer: Vec<u8>,
}

impl Runs {
    /// `server`: its functions, if the fast way was offered.
    pub(super) fn new(offer: Option<Offer>) -> Runs {
        let sample = offer.is_some_and(|offer| offer.verify).then(Sample::new);
        let server = offer.map(|offer| (offer.functions, offer.functions.scratch()));
        Runs { server, sample, buffer: Vec::new() }
    }

    /// Compares a sample of what was loaded with what the server has, if this load must be verified.
    pub(super) fn verify(&mut self, context: &Context<'_>) -> Result<(), RunError> {
        let (Some((server, _)), Some(sample)) = (&self.server, self.sample.take()) else { return Ok(()) };
        match sample.verify(context, *server) {
            Ok(()) => fast::verified(context),
            Err(trouble) => {
                fast::failed(context, &trouble);
                return Err(RunError::Differs(trouble.to_string()));
            }
        }
        Ok(())
    }

    /// Where the last value is that the server has made.
    pub(super) fn made_at(&self) -> Option<usize> {
        self.server.as_ref().map(|(_, scratch)| scratch.made_at())
    }

    /// Adds the records that lie there. Returns their number, and the bytes of their values.
    pub(super) fn add(
        &mut self,
        context: &Context<'_>,
        memory: &View,
        database: u32,
        offset: u64,
        length: u32,
    ) -> Result<(u64, u64), RunError> {
        let (server, scratch) = self.server.as_mut().ok_or(RunError::NotOffered)?;
        self.buffer.resize(RUN_BYTES_MAX as usize, 0);
        let run = self.buffer.get_mut(..length as usize).unwrap_or_default();
        memory.read(offset, run)?;
        let mut records = Records::new(run, RUN_VALUES_BELOW);
        let (mut keys, mut bytes) = (0, 0);
        let mut batch: Vec<Record<'_>> = Vec::with_capacity(BATCH);
        loop {
            batch.clear();
            batch.extend(records.by_ref().take(BATCH));
            if batch.is_empty() {
                break;
            }
            server.add(context, scratch, database, &batch)?;
            if let Some(sample) = &mut self.sample {
                sample.note(database, &batch);
            }
            keys += batch.len() as u64;
            bytes += batch.iter().map(|record| value_bytes(&record.value)).sum::<u64>();
        }
        if records.taken() != run.len() {
            return Err(RunError::NotRecords { at: records.taken(), length });
        }
        Ok((keys, bytes))
    }
}

fn value_bytes(value: &Value<'_>) -> u64 {
    match value {
        Value::String(Content::Bytes(bytes)) | Value::Collection(Collection { bytes, .. }) => bytes.len() as u64,
        Value::String(Content::Number(_)) => 0,
    }
}
