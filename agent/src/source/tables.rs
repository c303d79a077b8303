//! The memory of the two tables, and their geometry.

use std::sync::Arc;

use remora_fabric::{Memory, Pages, RegionId};
use remora_protocol::TableOffer;
use remora_table::Geometry;

use crate::args::{ModuleCapture, SourceArgs};
use crate::exit::Failure;
use crate::server::Facts;
use crate::units::Size;

/// The region number of the snapshot.
pub(super) const SNAPSHOT_REGION: u32 = 0;
/// The region number of the journal.
pub(super) const JOURNAL_REGION: u32 = 1;

/// The memory of the two tables, which one generation after the other uses.
pub(super) struct Tables {
    pub(super) snapshot: (Arc<Memory>, Geometry),
    pub(super) journal: (Arc<Memory>, Geometry),
    /// Whether no slot of the current snapshot is reused ([`TableOffer::retained`]).
    pub(super) retained: bool,
    /// A snapshot was larger than the server's INFO suggested. Later snapshots are windowed.
    pub(super) outgrown: bool,
}

impl Tables {
    pub(super) async fn create(args: &SourceArgs, facts: &Facts) -> Result<Tables, Failure> {
        let total = args.memory.get();
        let journal = args.journal_memory.map_or(total / JOURNAL_SHARE, Size::get);
        if journal >= total {
            let text = format!(
                "--journal-memory {} leaves nothing of --memory {} for the snapshot; set a smaller --journal-memory",
                Size::bytes(journal),
                args.memory
            );
            return Err(Failure::refused(text));
        }
        let slot = |size: u64| u32::try_from(size).unwrap_or(u32::MAX);
        let snapshot = table("remora-snapshot", total - journal, slot(args.slot_size().get()), module_writes(args))?;
        let journal =
            table("remora-journal", journal, JOURNAL_SLOT.min(slot(journal / 8).next_power_of_two() / 2), false)?;
        let touch = snapshot.1.data_offset() + expected(facts, snapshot.1);
        let memory = snapshot.0.clone();
        let touch = touch.min(memory.length());
        tracing::debug!(bytes = touch, "prefaulting the snapshot's memory");
        let touched = tokio::task::spawn_blocking(move || memory.prefault(0..touch)).await;
        match touched {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(no_memory(error)),
            Err(error) => return Err(no_memory(error)),
        }
        Ok(Tables { snapshot, journal, retained: false, outgrown: false })
    }

    /// Prepares the snapshot's memory for another generation. With `fresh`, a reader may still use the current memory.
    /// The reader keeps it, and it is freed when the last reader closes it.
    ///
    /// Returns the memory that is no longer used, if it was replaced.
    pub(super) fn prepare(
        &mut self,
        args: &SourceArgs,
        facts: &Facts,
        fresh: bool,
    ) -> Result<Option<Arc<Memory>>, Failure> {
        let mut replaced = None;
        if fresh && self.retained {
            let slot_size = self.snapshot.1.slot_size;
            let budget = self.snapshot.0.length();
            tracing::debug!(memory = %args.memory, "a replica disconnected while it was reading; allocating new memory for the snapshot");
            let fresh = table("remora-snapshot", budget, slot_size, module_writes(args))?;
            replaced = Some(std::mem::replace(&mut self.snapshot, fresh).0);
        }
        self.retained = !self.is_windowed_for(facts);
        Ok(replaced)
    }

    /// Whether a snapshot of this server is larger than its table, so that slots are reused.
    pub(super) fn is_windowed_for(&self, facts: &Facts) -> bool {
        self.outgrown || expected(facts, self.snapshot.1) > self.ring()
    }

    /// The bytes of all slots of the snapshot.
    pub(super) fn ring(&self) -> u64 {
        u64::from(self.snapshot.1.slot_size) * u64::from(self.snapshot.1.slots)
    }

    /// The memory of a region.
    pub(super) fn memory(&self, region: u32) -> &Arc<Memory> {
        if region == SNAPSHOT_REGION { &self.snapshot.0 } else { &self.journal.0 }
    }

    /// The offer of a table to its readers. `keys`: where it is, for each transport.
    pub(super) fn offer(&self, id: RegionId, first_offset: u64, keys: Vec<Vec<u8>>) -> TableOffer {
        let is_snapshot = id.region == SNAPSHOT_REGION;
        let geometry = if is_snapshot { self.snapshot.1 } else { self.journal.1 };
        TableOffer {
            generation: id.generation,
            first_offset,
            slot_size: geometry.slot_size,
            slots: geometry.slots,
            retained: is_snapshot && self.retained,
            keys,
        }
    }
}

/// An upper estimate of the snapshot's size in bytes, from the server's INFO. Data take more bytes in memory than in a
/// snapshot, except for large values, which take about as many.
pub(super) fn expected(facts: &Facts, geometry: Geometry) -> u64 {
    let dataset = facts.used_memory_dataset.or(facts.used_memory).unwrap_or(0);
    dataset + dataset / 16 + 2 * u64::from(geometry.slot_size)
}

/// The journal's default share of the memory: one in this many bytes.
const JOURNAL_SHARE: u64 = 4;

/// The largest slot of the journal, in bytes: small enough that late readers lose little when the oldest slot is
/// overwritten, large enough that readers load entries seldom.
const JOURNAL_SLOT: u32 = 1 << 20;

/// Whether the server's module may write the snapshot.
fn module_writes(args: &SourceArgs) -> bool {
    args.module_capture != ModuleCapture::Off
}

fn table(name: &str, budget: u64, slot_size: u32, module_writes: bool) -> Result<(Arc<Memory>, Geometry), Failure> {
    let geometry = Geometry::within(budget, slot_size)
        .map_err(|error| Failure::refused(format!("--memory is too small for its slots: {error}")))?;
    let create = if module_writes { Memory::create } else { Memory::create_single_writer };
    let memory = create(name, geometry.memory_len(), Pages::Small).map_err(no_memory)?;
    Ok((Arc::new(memory), geometry))
}

fn no_memory(error: impl std::fmt::Display) -> Failure {
    Failure::local(format!("cannot allocate the memory for the tables: {error}; give a smaller --memory"))
}

/// A generation number above those of all earlier runs of a source on this host.
pub(super) fn first_generation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (now.as_millis() as u64) << 8
}
