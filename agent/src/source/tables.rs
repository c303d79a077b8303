//! The memory of the two tables, and their geometry.

use std::iter;
use std::sync::Arc;

use remora_fabric::{Memory, Pages, RegionId};
use remora_protocol::TableOffer;
use remora_table::Geometry;

pub(super) use super::regions::{JOURNAL_REGION, SNAPSHOT_REGION};
use super::sealing::{RemoteTables, Seals};
pub(super) use super::sizing::expected;
use super::sizing::{Shares, Wanted, least_memory, ring, within};
use crate::args::{CompressChoice, ModuleCapture, SourceArgs};
use crate::exit::Failure;
use crate::host_memory;
use crate::server::{Facts, ServerUrl};
use crate::service;
use crate::units::Size;

/// The memory of a region.
#[derive(Clone)]
pub(super) struct Exported {
    /// What this host's shared memory exports.
    pub(super) local: Arc<Memory>,
    /// What the transports to other hosts export: the same, or ciphertext, or compressed slots.
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
    pub(super) remote: Option<RemoteTables>,
    /// Whether no slot of the current snapshot is reused ([`TableOffer::retained`]).
    pub(super) retained: bool,
    /// A snapshot was larger than the server's INFO suggested. Later snapshots are windowed.
    pub(super) outgrown: bool,
    /// The log says that snapshots are windowed.
    is_window_told: bool,
}

impl Tables {
    /// The memory whose pages the first snapshot will need, and how many bytes of it.
    pub(super) fn to_prepare(&self, facts: &Facts) -> Vec<(Arc<Memory>, u64)> {
        let (snapshot, geometry) = &self.snapshot;
        let bytes = (geometry.data_offset() + expected(facts, *geometry)).min(snapshot.length());
        // Slots that are compressed for sure touch less of it.
        let remote = self.remote.as_ref();
        let remote = remote.filter(|remote| matches!(remote.compress, CompressChoice::Off | CompressChoice::Auto));
        iter::once(snapshot)
            .chain(remote.map(|remote| &remote.snapshot))
            .map(|memory| (memory.clone(), bytes))
            .collect()
    }

    /// Tables whose memory no pages back yet. `is_sealed`: replicas on other hosts read ciphertext.
    pub(super) fn empty(args: &SourceArgs, is_sealed: bool) -> Result<Tables, Failure> {
        let shares = Shares::of(&Wanted::of(args, is_sealed))?;
        let snapshot = table("remora-snapshot", shares.snapshot, module_writes(args))?;
        let journal = table("remora-journal", shares.journal, false)?;
        let seals = match is_sealed {
            true => Some(Seals::new(remote_memory("remora-sealed-journal", &journal.1)?)?),
            false => None,
        };
        let remote = match shares.is_twice() {
            true => {
                let snapshot = remote_memory("remora-sealed", &snapshot.1)?;
                Some(RemoteTables { snapshot, seals, compress: shares.compress })
            }
            false => None,
        };
        Ok(Tables { snapshot, journal, remote, retained: false, outgrown: false, is_window_told: false })
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
            let fresh = table("remora-snapshot", within(budget, slot_size)?, module_writes(args))?;
            let former = self.memory(SNAPSHOT_REGION);
            if let Some(remote) = &mut self.remote {
                remote.snapshot = remote_memory("remora-sealed", &fresh.1)?;
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

    /// Says once that the snapshots of this server will be windowed, what that means, and how much memory would do.
    pub(super) fn warn_of_a_window(&mut self, args: &SourceArgs, facts: &Facts, server: &ServerUrl) {
        if self.is_window_told || !self.is_windowed_for(facts) {
            return;
        }
        self.is_window_told = true;
        let (most, held) = (mebibytes(expected(facts, self.snapshot.1)), mebibytes(self.ring()));
        let twice = match (self.is_sealed(), &self.remote) {
            (true, _) => ", as it is held twice: plain for this host, and encrypted for others",
            (false, Some(_)) => ", as it is held twice: plain for this host, and compressed for others",
            (false, None) => "",
        };
        let remedy = match enough(args, facts, self.is_sealed()) {
            Some(enough) if host_memory::check("--memory", enough).is_ok() => {
                format!("; --memory {enough} keeps it whole")
            }
            Some(enough) => format!("; --memory {enough} would keep it whole, and there is less than that here"),
            None => String::new(),
        };
        tracing::warn!(
            "the snapshot of {server} has {most} at most, and --memory {} has room for {held} of it{twice}: a window moves over \
             it, so replicas must join together, the primary's child lives as long as the slowest of them reads, and each \
             later replica costs another fork{remedy}",
            args.memory
        );
    }

    /// The bytes of all slots of the snapshot.
    pub(super) fn ring(&self) -> u64 {
        ring(&self.snapshot.1)
    }

    /// The memory of a region.
    pub(super) fn memory(&self, region: u32) -> Exported {
        let (plain, _) = if region == SNAPSHOT_REGION { &self.snapshot } else { &self.journal };
        let remote = self.remote.as_ref();
        let remote = match region {
            SNAPSHOT_REGION => remote.map(|remote| &remote.snapshot),
            _ => remote.and_then(RemoteTables::journal),
        };
        Exported { local: plain.clone(), remote: remote.unwrap_or(plain).clone() }
    }

    /// Whether replicas on other hosts read ciphertext.
    pub(super) fn is_sealed(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.seals.is_some())
    }

    /// How slots are compressed for replicas on other hosts.
    pub(super) fn compress(&self) -> CompressChoice {
        self.remote.as_ref().map_or(CompressChoice::Off, |remote| remote.compress)
    }

    /// Bytes of memory that the tables use.
    pub(super) fn resident(&self) -> u64 {
        let plain = [&self.snapshot.0, &self.journal.0];
        let remote = self.remote.iter().flat_map(|remote| iter::once(&remote.snapshot).chain(remote.journal()));
        plain.into_iter().chain(remote).filter_map(|memory| memory.resident().ok()).sum()
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
            seal: self
                .remote
                .as_ref()
                .and_then(|remote| remote.key(id))
                .map_or(Vec::new(), |key| key.to_bytes().to_vec()),
            compressed: self.compress() != CompressChoice::Off && (is_snapshot || self.is_sealed()),
        }
    }
}

/// The least `--memory` with which the snapshot of this server is kept whole; `None` if none does.
fn enough(args: &SourceArgs, facts: &Facts, is_sealed: bool) -> Option<Size> {
    let bytes = least_memory(|memory| {
        let args = SourceArgs { memory: Size::bytes(memory), ..args.clone() };
        Shares::of(&Wanted::of(&args, is_sealed)).is_ok_and(|shares| shares.hold(facts))
    });
    bytes.map(Size::bytes)
}

/// The size in whole MiB, rounded up.
fn mebibytes(bytes: u64) -> Size {
    Size::mebibytes(bytes.div_ceil(1 << 20))
}

/// Whether the server's module may write the snapshot.
fn module_writes(args: &SourceArgs) -> bool {
    args.module_capture != ModuleCapture::Off
}

fn table(name: &str, geometry: Geometry, module_writes: bool) -> Result<(Arc<Memory>, Geometry), Failure> {
    // Memory that a service manager keeps is written by the next process of the service.
    let create = if module_writes || service::keeps() { Memory::create } else { Memory::create_single_writer };
    let memory = create(name, geometry.memory_len(), Pages::Small).map_err(no_memory)?;
    Ok((Arc::new(memory), geometry))
}

/// Memory for what other hosts read, which only this process writes, or the next one of its service.
fn remote_memory(name: &str, geometry: &Geometry) -> Result<Arc<Memory>, Failure> {
    let create = if service::keeps() { Memory::create } else { Memory::create_single_writer };
    create(name, geometry.memory_len(), Pages::Small).map(Arc::new).map_err(no_memory)
}

pub(super) fn no_memory(error: impl std::fmt::Display) -> Failure {
    let why = host_memory::why_none();
    Failure::local(format!("cannot allocate the memory for the tables: {error}; give a smaller --memory{why}"))
}

/// A generation number that no earlier run of a source on this host had. It is above theirs unless the clock went back:
/// nothing compares which one of two generations is higher.
pub(super) fn first_generation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (now.as_millis() as u64) << 8
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn args(more: &str) -> SourceArgs {
        let line = format!("remora source --server redis://127.0.0.1:1 --token-file t {more}");
        let Command::Source(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { panic!() };
        args
    }

    #[test]
    fn the_memory_that_is_said_to_be_enough_is_enough_and_not_much_more() {
        for more in ["", "--journal-memory 64MiB", "--slot-size 64KiB", "--compress zstd"] {
            for is_sealed in [false, true] {
                for data in [1 << 30, 60 << 30, 1_u64 << 42] {
                    let facts = Facts { used_memory_dataset: Some(data), ..Facts::default() };
                    let few = args(more);
                    let Some(enough) = enough(&few, &facts, is_sealed) else {
                        assert!(few.slot_size.is_some() && data > 1 << 40, "only so many slots can be: {more} {data}");
                        continue;
                    };
                    let held = |memory: u64| {
                        let args = SourceArgs { memory: Size::bytes(memory), ..few.clone() };
                        Shares::of(&Wanted::of(&args, is_sealed)).unwrap().ring()
                    };
                    assert!(held(enough.get()) > data, "{more} {is_sealed} {data}: {enough}");
                    assert!(held(enough.get()) < data + data / 3 + (256 << 20), "{more} {is_sealed} {data}: {enough}");
                }
            }
        }
    }

    #[test]
    fn no_figure_is_said_for_data_that_no_memory_holds() {
        let facts = Facts { used_memory_dataset: Some(u64::MAX), ..Facts::default() };
        assert_eq!(enough(&args(""), &facts, true), None);
    }
}
