//! The memory of the two tables, and their geometry.

use std::sync::Arc;

use remora_fabric::{Memory, Pages, RegionId};
use remora_protocol::TableOffer;
use remora_table::Geometry;

pub(super) use super::regions::{JOURNAL_REGION, SNAPSHOT_REGION};
use super::sealing::SealedTables;
use crate::args::{ModuleCapture, SourceArgs};
use crate::exit::Failure;
use crate::server::Facts;
use crate::service;
use crate::units::Size;

/// The memory of a region.
#[derive(Clone)]
pub(super) struct Exported {
    /// What this host's shared memory exports.
    pub(super) local: Arc<Memory>,
    /// What the transports to other hosts export: the same, or ciphertext.
    pub(super) remote: Arc<Memory>,
}

impl Exported {
    /// The same memory over every transport.
    pub(super) fn plain(memory: &Arc<Memory>) -> Exported {
        Exported { local: memory.clone(), remote: memory.clone() }
    }
}

/// The memory of the two tables, which one generation after the other uses.
pub(super) struct Tables {
    pub(super) snapshot: (Arc<Memory>, Geometry),
    pub(super) journal: (Arc<Memory>, Geometry),
    /// What replicas on other hosts read instead; `None`: they read these.
    pub(super) sealed: Option<SealedTables>,
    /// Whether no slot of the current snapshot is reused ([`TableOffer::retained`]).
    pub(super) retained: bool,
    /// A snapshot was larger than the server's INFO suggested. Later snapshots are windowed.
    pub(super) outgrown: bool,
}

impl Tables {
    /// `is_sealed`: replicas on other hosts read ciphertext. The pages that the snapshot will need are there already.
    pub(super) async fn create(args: &SourceArgs, facts: &Facts, is_sealed: bool) -> Result<Tables, Failure> {
        let tables = Tables::empty(args, is_sealed)?;
        let (snapshot, geometry) = &tables.snapshot;
        let touch = geometry.data_offset() + expected(facts, *geometry);
        let memory = snapshot.clone();
        let sealed_memory = tables.sealed.as_ref().map(|sealed| sealed.snapshot.clone());
        let touch = touch.min(memory.length());
        tracing::debug!(bytes = touch, "prefaulting the snapshot's memory");
        let touched = tokio::task::spawn_blocking(move || {
            memory.prefault(0..touch)?;
            sealed_memory.map_or(Ok(()), |memory| memory.prefault(0..touch))
        });
        let touched = touched.await;
        match touched {
            Ok(Ok(())) => Ok(tables),
            Ok(Err(error)) => Err(no_memory(error)),
            Err(error) => Err(no_memory(error)),
        }
    }

    /// Tables whose memory no pages back yet.
    pub(super) fn empty(args: &SourceArgs, is_sealed: bool) -> Result<Tables, Failure> {
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
        // The sealed tables take half of it.
        let copies = if is_sealed { 2 } else { 1 };
        let (snapshot, journal) = ((total - journal) / copies, journal / copies);
        let snapshot = table("remora-snapshot", snapshot, slot(args.slot_size().get()), module_writes(args))?;
        let journal =
            table("remora-journal", journal, JOURNAL_SLOT.min(slot(journal / 8).next_power_of_two() / 2), false)?;
        let sealed = match is_sealed {
            true => {
                let [snapshot, journal] = [("remora-sealed", &snapshot), ("remora-sealed-journal", &journal)]
                    .map(|(name, (_, geometry))| sealed_memory(name, geometry));
                Some(SealedTables::new(snapshot?, journal?)?)
            }
            false => None,
        };
        Ok(Tables { snapshot, journal, sealed, retained: false, outgrown: false })
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
    ) -> Result<Option<Exported>, Failure> {
        let mut replaced = None;
        if fresh && self.retained {
            let slot_size = self.snapshot.1.slot_size;
            let budget = self.snapshot.0.length();
            tracing::debug!(memory = %args.memory, "a replica disconnected while it was reading; allocating new memory for the snapshot");
            let fresh = table("remora-snapshot", budget, slot_size, module_writes(args))?;
            let former = self.memory(SNAPSHOT_REGION);
            if let Some(sealed) = &mut self.sealed {
                sealed.snapshot = sealed_memory("remora-sealed", &fresh.1)?;
            }
            self.snapshot = fresh;
            replaced = Some(former);
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
    pub(super) fn memory(&self, region: u32) -> Exported {
        let (plain, _) = if region == SNAPSHOT_REGION { &self.snapshot } else { &self.journal };
        let sealed = self.sealed.as_ref();
        let sealed = sealed.map(|sealed| if region == SNAPSHOT_REGION { &sealed.snapshot } else { &sealed.journal });
        Exported { local: plain.clone(), remote: sealed.unwrap_or(plain).clone() }
    }

    /// Bytes of memory that the tables use.
    pub(super) fn resident(&self) -> u64 {
        let plain = [&self.snapshot.0, &self.journal.0];
        let sealed = self.sealed.iter().flat_map(|sealed| [&sealed.snapshot, &sealed.journal]);
        plain.into_iter().chain(sealed).filter_map(|memory| memory.resident().ok()).sum()
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
            seal: self.sealed.as_ref().map(|sealed| sealed.key(id).to_bytes().to_vec()).unwrap_or_default(),
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
    // Memory that a service manager keeps is written by the next process of the service.
    let create = if module_writes || service::keeps() { Memory::create } else { Memory::create_single_writer };
    let memory = create(name, geometry.memory_len(), Pages::Small).map_err(no_memory)?;
    Ok((Arc::new(memory), geometry))
}

/// Memory for ciphertext, which only this process writes, or the next one of its service.
fn sealed_memory(name: &str, geometry: &Geometry) -> Result<Arc<Memory>, Failure> {
    let create = if service::keeps() { Memory::create } else { Memory::create_single_writer };
    create(name, geometry.memory_len(), Pages::Small).map(Arc::new).map_err(no_memory)
}

fn no_memory(error: impl std::fmt::Display) -> Failure {
    Failure::local(format!("cannot allocate the memory for the tables: {error}; give a smaller --memory"))
}

/// A generation number above those of all earlier runs of a source on this host.
pub(super) fn first_generation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (now.as_millis() as u64) << 8
}
