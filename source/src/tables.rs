//! The memory of a generation's tables: its geometry, its division, the sealed tables for other hosts, and its pages,
//! which the system provides when they are touched first.
//!
//! A snapshot that touched its pages itself would hold up the primary at each of them. Much memory takes minutes, so a
//! thread touches it step by step while the port is open, the source says how far it is, and the first snapshot follows
//! ([`Preparation`]).

use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use remora_base::pace::Random;
use remora_base::units::{Size, readable};
use remora_fabric::memory::Error as MemoryError;
use remora_fabric::{Memory, Pages, RegionId};
use remora_process::exit::Failure;
use remora_process::{host, service};
use remora_protocol::TableOffer;
use remora_server::{Facts, ServerUrl};
use remora_table::{Algorithm, Geometry, SealKey};
use remora_wire::derive;
use rustix::process::{Resource, getrlimit};
use tokio::sync::mpsc;

use super::Incoming;
use super::options::{Compress, ModuleCapture, ModuleOptions, Options, TableOptions};

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

/// Which table of another source is copied.
pub(super) struct Copied {
    pub(super) generation: u64,
    pub(super) geometry: Geometry,
    /// That of the table for other hosts, if it is ciphertext.
    pub(super) key: Option<SealKey>,
}

/// The memory of the two tables, which one generation after the other uses.
pub(super) struct Tables {
    pub(super) snapshot: (Arc<Memory>, Geometry),
    pub(super) journal: (Arc<Memory>, Geometry),
    /// What replicas on other hosts read instead; `None`: they read these.
    pub(super) remote: Option<RemoteTables>,
    /// Whether no slot of the current snapshot is reused ([`TableOffer::retained`]).
    pub(super) retained: bool,
    /// The generation of the current snapshot, if it is a copy of another source's.
    pub(super) copied: Option<u64>,
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
        let remote = remote.filter(|remote| matches!(remote.compress, Compress::Off | Compress::Auto));
        iter::once(snapshot)
            .chain(remote.map(|remote| &remote.snapshot))
            .map(|memory| (memory.clone(), bytes))
            .collect()
    }

    /// Tables whose memory no pages back yet. `is_sealed`: replicas on other hosts read ciphertext.
    pub(super) fn empty(options: &Options, is_sealed: bool) -> Result<Tables, Failure> {
        let shares = Shares::of(&Wanted::of(&options.tables, is_sealed))?;
        let snapshot = table("remora-snapshot", shares.snapshot, module_writes(&options.module))?;
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
        Ok(Tables { snapshot, journal, remote, retained: false, copied: None, outgrown: false, is_window_told: false })
    }

    /// Prepares the snapshot's memory for another generation. With `fresh`, a reader may still use the current memory.
    /// The reader keeps it, and it is freed when the last reader closes it.
    ///
    /// Returns the memory that is no longer used, if it was replaced.
    pub(super) fn prepare(
        &mut self,
        options: &Options,
        facts: &Facts,
        fresh: bool,
    ) -> Result<Option<Exported>, Failure> {
        let own = self.own_shape(options).map_err(Failure::refused)?;
        let replaced = self.renew(options, own, fresh)?;
        self.copied = None;
        self.retained = !self.is_windowed_for(facts);
        Ok(replaced)
    }

    /// The same for a copy of another source's table.
    pub(super) fn prepare_copy(
        &mut self,
        options: &Options,
        copied: Copied,
        fresh: bool,
    ) -> Result<Option<Exported>, Failure> {
        let replaced = self.renew(options, copied.geometry, fresh)?;
        if let Some(seals) = self.remote.as_mut().and_then(|remote| remote.seals.as_mut()) {
            seals.copied = copied.key.map(|key| (copied.generation, key));
        }
        self.copied = Some(copied.generation);
        self.retained = true;
        Ok(replaced)
    }

    /// Replaces the snapshot's memory, if a reader may still use it or it has another shape.
    fn renew(&mut self, options: &Options, shape: Geometry, fresh: bool) -> Result<Option<Exported>, Failure> {
        if !(fresh && self.retained) && self.snapshot.1 == shape {
            return Ok(None);
        }
        tracing::debug!(memory = %options.tables.memory, "a reader may still use the snapshot's memory, or it has another shape; allocating new memory");
        let fresh = table("remora-snapshot", shape, module_writes(&options.module))?;
        let former = self.memory(SNAPSHOT_REGION);
        if let Some(remote) = &mut self.remote {
            remote.snapshot = remote_memory("remora-sealed", &fresh.1)?;
        }
        self.snapshot = fresh;
        Ok(Some(former))
    }

    /// The shape of the snapshot's table as the options say.
    pub(super) fn own_shape(&self, options: &Options) -> Result<Geometry, String> {
        let shares = Shares::of(&Wanted::of(&options.tables, self.is_sealed()));
        shares.map(|shares| shares.snapshot).map_err(|failure| failure.message)
    }

    /// Whether a snapshot of this server is larger than its table, so that slots are reused.
    pub(super) fn is_windowed_for(&self, facts: &Facts) -> bool {
        self.outgrown || expected(facts, self.snapshot.1) > self.ring()
    }

    /// Says once that the snapshots of this server will be windowed, what that means, and how much memory would do.
    pub(super) fn warn_of_a_window(&mut self, options: &TableOptions, facts: &Facts, server: &ServerUrl) {
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
        let remedy = match enough(options, facts, self.is_sealed()) {
            Some(enough) if host::check_memory("--memory", enough).is_ok() => {
                format!("; --memory {enough} keeps it whole")
            }
            Some(enough) => format!("; --memory {enough} would keep it whole, and there is less than that here"),
            None => String::new(),
        };
        tracing::warn!(
            "the snapshot of {server} has {most} at most, and --memory {} has room for {held} of it{twice}: a window moves over \
             it, so replicas must join together, the primary's child lives as long as the slowest of them reads, and each \
             later replica costs another fork{remedy}",
            options.memory
        );
    }

    /// The bytes of all slots of the snapshot.
    pub(super) fn ring(&self) -> u64 {
        ring(&self.snapshot.1)
    }

    /// Bytes of the stream that the journal holds.
    pub(super) fn journal_ring(&self) -> u64 {
        ring(&self.journal.1)
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
    pub(super) fn compress(&self) -> Compress {
        self.remote.as_ref().map_or(Compress::Off, |remote| remote.compress)
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
            compressed: self.compress() != Compress::Off && (is_snapshot || self.is_sealed()),
        }
    }
}

/// The least `--memory` with which the snapshot of this server is kept whole; `None` if none does.
fn enough(options: &TableOptions, facts: &Facts, is_sealed: bool) -> Option<Size> {
    let bytes = least_memory(|memory| {
        let options = TableOptions { memory: Size::bytes(memory), ..options.clone() };
        Shares::of(&Wanted::of(&options, is_sealed)).is_ok_and(|shares| shares.hold(facts))
    });
    bytes.map(Size::bytes)
}

/// The size in whole MiB, rounded up.
fn mebibytes(bytes: u64) -> Size {
    Size::mebibytes(bytes.div_ceil(1 << 20))
}

/// Whether the server's module may write the snapshot.
fn module_writes(options: &ModuleOptions) -> bool {
    options.capture != ModuleCapture::Off
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
    let why = host::why_none();
    Failure::local(format!("cannot allocate the memory for the tables: {error}; give a smaller --memory{why}"))
}

/// Bits of a first generation's number that are drawn. With those of the time it stays below 2^53 until 2039: programs
/// that read JSON keep no more digits of a number.
const DRAWN_BITS: u32 = 12;

/// A generation number that no earlier run of a source on this host had, and very likely no source elsewhere that was
/// started in the same millisecond: a reader may go from one to the other. It is above those of earlier runs unless the
/// clock went back: nothing compares which one of two generations is higher.
pub(super) fn first_generation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    ((now.as_millis() as u64) << DRAWN_BITS) | (Random::from_system().draw() >> (u64::BITS - DRAWN_BITS))
}

// The numbers of a source's regions: each generation has both.

/// The region number of the snapshot.
pub(super) const SNAPSHOT_REGION: u32 = 0;
/// The region number of the journal.
pub(super) const JOURNAL_REGION: u32 = 1;

// How the memory of a source is divided, and how long a snapshot will be. Pure.
//
// ```text
//   --memory ─┬─ --journal-memory (a quarter) ──▶ journal   (half of it, if other hosts read a sealed one)
//             └─ the rest ──────────────────────▶ snapshot  (half of it, if other hosts read a sealed or compressed one)
// ```
//
// A source makes its tables so, and `remora plan` says beforehand what they will be.

/// What a source is told about its memory.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Bytes in all.
    pub memory: u64,
    /// Bytes of the journal; `None`: the default share.
    pub journal: Option<u64>,
    /// Bytes of a slot.
    pub slot: u64,
    /// Other hosts read ciphertext.
    pub is_sealed: bool,
    /// How slots are to be compressed for other hosts.
    pub compress: Compress,
}

/// How the memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// The snapshot's table.
    pub snapshot: Geometry,
    /// The journal's table.
    pub journal: Geometry,
    /// How slots are compressed for other hosts.
    pub compress: Compress,
    is_sealed: bool,
}

/// The journal's default share of the memory: one in this many bytes.
const JOURNAL_SHARE: u64 = 4;

/// The largest slot of the journal, in bytes: small enough that late readers lose little when the oldest slot is
/// overwritten, large enough that readers load entries seldom.
const JOURNAL_SLOT: u32 = 1 << 20;

impl Wanted {
    /// What the options of a source say.
    pub fn of(options: &TableOptions, is_sealed: bool) -> Wanted {
        Wanted {
            memory: options.memory.get(),
            journal: options.journal.map(Size::get),
            slot: options.slot_size().get(),
            is_sealed,
            compress: options.compress,
        }
    }
}

impl Shares {
    /// Divides the memory.
    ///
    /// # Errors
    /// It is too small.
    pub fn of(wanted: &Wanted) -> Result<Shares, Failure> {
        let (total, is_sealed) = (wanted.memory, wanted.is_sealed);
        let journal = wanted.journal.unwrap_or(total / JOURNAL_SHARE);
        if journal >= total {
            let text = format!(
                "--journal-memory {} leaves nothing of --memory {} for the snapshot; set a smaller --journal-memory",
                Size::bytes(journal),
                Size::bytes(total)
            );
            return Err(Failure::refused(text));
        }
        let slot = |size: u64| u32::try_from(size).unwrap_or(u32::MAX);
        let compress = compressing(wanted.compress, is_sealed);
        // What other hosts read takes half of it.
        let (for_snapshot, for_journal) =
            ((total - journal) / copies(is_sealed, compress), journal / sealed(is_sealed));
        let journal_slot = slot((for_journal / 8).min(2 * u64::from(JOURNAL_SLOT))).next_power_of_two() / 2;
        Ok(Shares {
            snapshot: within(for_snapshot, slot(wanted.slot))?,
            journal: within(for_journal, journal_slot)?,
            compress,
            is_sealed,
        })
    }

    /// Whether other hosts read another snapshot than this host does.
    pub(super) fn is_twice(&self) -> bool {
        copies(self.is_sealed, self.compress) > 1
    }

    /// The bytes of all slots of the snapshot.
    pub fn ring(&self) -> u64 {
        ring(&self.snapshot)
    }

    /// Whether they hold the whole snapshot of this server, as far as its INFO tells.
    pub fn hold(&self, facts: &Facts) -> bool {
        expected(facts, self.snapshot) <= self.ring()
    }

    /// Bytes of memory that a snapshot of this length takes. Slots that are compressed for sure take less.
    pub fn in_use_by_a_snapshot(&self, bytes: u64) -> u64 {
        (self.snapshot.data_offset() + bytes.min(self.ring())) * copies(self.is_sealed, self.compress)
    }

    /// Bytes of memory that the journal takes when it is full.
    pub fn in_use_by_the_journal(&self) -> u64 {
        self.journal.memory_len() * sealed(self.is_sealed)
    }

    /// Bytes of the stream that the journal holds.
    pub fn journal_ring(&self) -> u64 {
        ring(&self.journal)
    }
}

fn copies(is_sealed: bool, compress: Compress) -> u64 {
    if is_sealed || compress != Compress::Off { 2 } else { 1 }
}

fn sealed(is_sealed: bool) -> u64 {
    if is_sealed { 2 } else { 1 }
}

/// The bytes of all slots of a table.
pub(super) fn ring(geometry: &Geometry) -> u64 {
    u64::from(geometry.slot_size) * u64::from(geometry.slots)
}

/// The largest table within these bytes.
pub(super) fn within(budget: u64, slot_size: u32) -> Result<Geometry, Failure> {
    Geometry::within(budget, slot_size)
        .map_err(|error| Failure::refused(format!("--memory is too small for its slots: {error}")))
}

/// How slots are compressed. Where nothing is sealed, other hosts read the plain table, and `auto` leaves it at that:
/// compressed slots would need as much memory again.
fn compressing(choice: Compress, is_sealed: bool) -> Compress {
    match choice {
        Compress::Auto if !is_sealed => Compress::Off,
        choice => choice,
    }
}

/// An upper estimate of the snapshot's size in bytes, from the server's INFO. Data take more bytes in memory than in a
/// snapshot, except for large values, which take about as many.
pub fn expected(facts: &Facts, geometry: Geometry) -> u64 {
    let dataset = facts.used_memory_dataset.or(facts.used_memory).unwrap_or(0);
    dataset.saturating_add(dataset / 16).saturating_add(2 * u64::from(geometry.slot_size))
}

/// The least memory in bytes of which this is true, in whole MiB; `None` if there is none.
pub fn least_memory(is_enough: impl Fn(u64) -> bool) -> Option<u64> {
    let mebibytes = |count: u64| count << 20;
    let mut high = LEAST_MEBIBYTES;
    while !is_enough(mebibytes(high)) {
        if high >= MOST_MEBIBYTES {
            return None;
        }
        high *= 2;
    }
    let mut low = (high / 2).max(LEAST_MEBIBYTES - 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if is_enough(mebibytes(middle)) { high = middle } else { low = middle }
    }
    Some(mebibytes(high))
}

/// The least memory of an agent.
const LEAST_MEBIBYTES: u64 = 16;

/// More than any host has.
const MOST_MEBIBYTES: u64 = 1 << 40;

// The tables that replicas on other hosts read instead of the plain ones, in memory of their own: ciphertext,
// compressed slots, or both. Not here: the thread that fills them ([`super::capture`]).

/// The memory of these tables, of the same shapes as the plain ones.
pub(super) struct RemoteTables {
    pub(super) snapshot: Arc<Memory>,
    /// If they are ciphertext.
    pub(super) seals: Option<Seals>,
    /// Whether slots may be compressed, and how.
    pub(super) compress: Compress,
}

/// The journal as ciphertext, and the secret of the keys.
pub(super) struct Seals {
    pub(super) journal: Arc<Memory>,
    /// Drawn when the source starts, or that of a snapshot that a former process has left.
    snapshot_secret: [u8; SealKey::SECRET_BYTES],
    /// Drawn when the source starts.
    journal_secret: [u8; SealKey::SECRET_BYTES],
    algorithm: Algorithm,
    /// The key of a snapshot that is a copy of another source's, and its generation.
    copied: Option<(u64, SealKey)>,
}

/// A snapshot for replicas on other hosts, as its capture needs it.
#[derive(Clone)]
pub(crate) struct RemoteTable {
    pub(crate) memory: Arc<Memory>,
    /// If it is ciphertext: of this generation only.
    pub(crate) key: Option<SealKey>,
    pub(crate) compress: Compress,
}

/// A sealed journal as its writer needs it.
#[derive(Clone)]
pub(crate) struct SealedTable {
    pub(crate) memory: Arc<Memory>,
    /// Of this generation only.
    pub(crate) key: SealKey,
    /// Whether records may be compressed.
    pub(crate) compressed: bool,
}

impl RemoteTables {
    /// The key of a table, if it is sealed. No two generations share a number, so no key is used for two tables.
    pub(super) fn key(&self, id: RegionId) -> Option<SealKey> {
        self.seals.as_ref().map(|seals| seals.key(id))
    }

    /// The memory of the journal, if it is another one than that of the plain one.
    pub(super) fn journal(&self) -> Option<&Arc<Memory>> {
        self.seals.as_ref().map(|seals| &seals.journal)
    }

    /// The secret of the snapshot's keys, if it is sealed, for a process that goes on with it.
    pub(super) fn snapshot_secret(&self) -> Option<[u8; SealKey::SECRET_BYTES]> {
        self.seals.as_ref().map(|seals| seals.snapshot_secret)
    }

    /// The snapshot with this number, for its capture.
    pub(super) fn snapshot_table(&self, id: RegionId) -> RemoteTable {
        RemoteTable { memory: self.snapshot.clone(), key: self.key(id), compress: self.compress }
    }

    /// The journal with this number, for its capture, if it is sealed.
    pub(super) fn journal_table(&self, id: RegionId) -> Option<SealedTable> {
        let seals = self.seals.as_ref()?;
        let compressed = self.compress != Compress::Off;
        Some(SealedTable { memory: seals.journal.clone(), key: seals.key(id), compressed })
    }
}

impl Seals {
    pub(super) fn new(journal: Arc<Memory>) -> Result<Seals, Failure> {
        let secret = || {
            let mut secret = [0; SealKey::SECRET_BYTES];
            let drawn = getrandom::fill(&mut secret);
            drawn.map_err(|error| Failure::local(format!("no random bytes for the keys of the tables: {error}")))?;
            Ok::<_, Failure>(secret)
        };
        let (snapshot_secret, journal_secret) = (secret()?, secret()?);
        Ok(Seals { journal, snapshot_secret, journal_secret, algorithm: Algorithm::best(), copied: None })
    }

    /// The snapshot was sealed by a former process.
    pub(super) fn set_snapshot_secret(&mut self, secret: [u8; SealKey::SECRET_BYTES]) {
        self.snapshot_secret = secret;
    }

    fn key(&self, id: RegionId) -> SealKey {
        if let Some((generation, key)) = &self.copied
            && id == (RegionId { generation: *generation, region: SNAPSHOT_REGION })
        {
            return key.clone();
        }
        let mut label = [0; 12];
        label[..8].copy_from_slice(&id.generation.to_le_bytes());
        label[8..].copy_from_slice(&id.region.to_le_bytes());
        let secret = if id.region == SNAPSHOT_REGION { &self.snapshot_secret } else { &self.journal_secret };
        SealKey::new(self.algorithm, derive(secret, &label))
    }
}

/// Bytes that are touched between two looks at whether the source still wants them: some ten milliseconds' worth.
const STEP: u64 = 64 << 20;

/// A preparation that lasts longer is worth a line in the log.
const WORTH_SAYING: Duration = Duration::from_secs(1);

/// How often that line is repeated.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// The tables' memory while it is prepared. Dropping it ends that, at the next step.
#[derive(Debug)]
pub(super) struct Preparation {
    shared: Arc<Shared>,
    said: Option<Instant>,
}

#[derive(Debug)]
struct Shared {
    began: Instant,
    whole: u64,
    touched: AtomicU64,
    is_over: AtomicBool,
    is_stopped: AtomicBool,
}

impl Preparation {
    /// Begins to touch the first bytes of these memories. The end is told to the source's loop.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn begin(
        memories: Vec<(Arc<Memory>, u64)>,
        incoming: mpsc::Sender<Incoming>,
    ) -> Result<Preparation, Failure> {
        let preparation = Preparation::of(memories.iter().map(|(_, bytes)| bytes).sum());
        let shared = preparation.shared.clone();
        let thread = std::thread::Builder::new().name("preparation".into()).spawn(move || {
            let mut memories = memories.iter();
            let done = memories.try_for_each(|(memory, bytes)| shared.touch(*bytes, |range| memory.prefault(range)));
            shared.is_over.store(true, Relaxed);
            let _ = incoming.blocking_send(Incoming::Prepared(done.map_err(no_memory))); // the source may have ended
        });
        thread.map_err(|error| Failure::local(format!("cannot start a thread for the memory: {error}")))?;
        Ok(preparation)
    }

    /// Nothing is to be touched.
    pub(super) fn none() -> Preparation {
        let preparation = Preparation::of(0);
        preparation.shared.is_over.store(true, Relaxed);
        preparation
    }

    fn of(whole: u64) -> Preparation {
        let (touched, is_over, is_stopped) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
        Preparation {
            shared: Arc::new(Shared { began: Instant::now(), whole, touched, is_over, is_stopped }),
            said: None,
        }
    }

    /// Whether snapshots must wait for it.
    pub(super) fn is_under_way(&self) -> bool {
        !self.shared.is_over.load(Relaxed)
    }

    /// What the source does; empty once it is over.
    pub(super) fn words(&self) -> String {
        if !self.is_under_way() {
            return String::new();
        }
        words(self.shared.whole, self.shared.touched.load(Relaxed), self.shared.began.elapsed())
    }

    /// Logs how far it is, if it lasts. Called now and then.
    pub(super) fn say(&mut self, now: Instant) {
        let since = self.said.map_or(self.shared.began + WORTH_SAYING, |said| said + SAY_EVERY);
        if now >= since && self.is_under_way() {
            self.said = Some(now);
            tracing::info!("{}; replicas that join wait for it", self.words());
        }
    }

    /// Logs that it is over.
    pub(super) fn ended(&self) {
        let took = readable(self.shared.began.elapsed());
        let size = Size::bytes(self.shared.whole);
        match self.said {
            Some(_) => tracing::info!(%size, "the memory is prepared, after {took}"),
            None => tracing::debug!(%size, "the memory is prepared, after {took}"),
        }
    }
}

impl Drop for Preparation {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Relaxed);
    }
}

impl Shared {
    /// Touches this many bytes, by steps.
    fn touch(
        &self,
        bytes: u64,
        mut prefault: impl FnMut(Range<u64>) -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let mut at = 0;
        while at < bytes && !self.is_stopped.load(Relaxed) {
            let end = (at + STEP).min(bytes);
            prefault(at..end)?;
            self.touched.fetch_add(end - at, Relaxed);
            at = end;
        }
        Ok(())
    }
}

/// `preparing 160 GiB of memory, about 60 s left`.
fn words(whole: u64, touched: u64, took: Duration) -> String {
    let what = format!("preparing {} of memory", Size::bytes(whole.div_ceil(1 << 20) << 20));
    let left = whole.saturating_sub(touched);
    let left = Duration::try_from_secs_f64(took.as_secs_f64() * left as f64 / touched as f64);
    // Not a number as long as nothing is touched.
    left.map_or(what.clone(), |left| format!("{what}, about {} left", readable(left)))
}

// Whether this process may open as many as the replicas of `--max-replicas` need.
//
// A source that runs out of them in the middle of its work rejects replicas, and cannot even connect to its own
// server. So it refuses to start instead. The process has raised its soft limit to the hard one by then.

/// Descriptors of one replica: its control connection, a data lane for each of its two tables, and one for a lane that
/// replaces another before the source has found that one closed. With `--lanes` a replica may use more.
const PER_REPLICA: u64 = 4;

/// All others: 64 handshakes with two descriptors each, 16 connections that are turned away, listeners, the server's
/// connections, tables, and those of the runtime.
const OTHERS: u64 = 256;

/// Checks the limit of open descriptors.
///
/// # Errors
/// It is too low for this many replicas.
pub(super) fn check_descriptors(max_replicas: u32) -> Result<(), Failure> {
    match getrlimit(Resource::Nofile).current {
        Some(limit) => check_limit(limit, max_replicas),
        None => Ok(()),
    }
}

fn check_limit(limit: u64, max_replicas: u32) -> Result<(), Failure> {
    let needed = u64::from(max_replicas) * PER_REPLICA + OTHERS;
    if needed <= limit {
        return Ok(());
    }
    let fits = limit.saturating_sub(OTHERS) / PER_REPLICA;
    Err(Failure::local(format!(
        "--max-replicas {max_replicas} needs {needed} open descriptors, and this process may open {limit} (RLIMIT_NOFILE); raise \
         the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or set --max-replicas to at most {}",
        fits.max(1)
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_memory_that_is_said_to_be_enough_is_enough_and_not_much_more() {
        let usual = TableOptions::default();
        let many = [
            usual.clone(),
            TableOptions { journal: Some(Size::mebibytes(64)), ..usual.clone() },
            TableOptions { slot_size: Some(Size::bytes(64 << 10)), ..usual.clone() },
            TableOptions { compress: Compress::Zstd, ..usual },
        ];
        for few in many {
            for is_sealed in [false, true] {
                for data in [1 << 30, 60 << 30, 1_u64 << 42] {
                    let facts = Facts { used_memory_dataset: Some(data), ..Facts::default() };
                    let Some(enough) = enough(&few, &facts, is_sealed) else {
                        assert!(few.slot_size.is_some() && data > 1 << 40, "only so many slots can be: {few:?} {data}");
                        continue;
                    };
                    let held = |memory: u64| {
                        let options = TableOptions { memory: Size::bytes(memory), ..few.clone() };
                        Shares::of(&Wanted::of(&options, is_sealed)).unwrap().ring()
                    };
                    assert!(held(enough.get()) > data, "{few:?} {is_sealed} {data}: {enough}");
                    assert!(held(enough.get()) < data + data / 3 + (256 << 20), "{few:?} {is_sealed} {data}: {enough}");
                }
            }
        }
    }

    #[test]
    fn no_figure_is_said_for_data_that_no_memory_holds() {
        let facts = Facts { used_memory_dataset: Some(u64::MAX), ..Facts::default() };
        assert_eq!(enough(&TableOptions::default(), &facts, true), None);
    }

    const WANTED: Wanted =
        Wanted { memory: 1 << 30, journal: None, slot: 1 << 20, is_sealed: false, compress: Compress::Auto };

    #[test]
    fn what_other_hosts_read_takes_half_where_it_is_another_table() {
        let plain = Shares::of(&WANTED).unwrap();
        let sealed = Shares::of(&Wanted { is_sealed: true, ..WANTED }).unwrap();
        let packed = Shares::of(&Wanted { compress: Compress::Zstd, ..WANTED }).unwrap();
        assert_eq!((plain.is_twice(), sealed.is_twice(), packed.is_twice()), (false, true, true));
        assert_eq!((plain.compress, sealed.compress), (Compress::Off, Compress::Auto));
        assert_eq!((plain.ring() >> 20, sealed.ring() >> 20, packed.ring() >> 20), (767, 383, 383));
        assert!(sealed.journal_ring() < plain.journal_ring() && packed.journal_ring() == plain.journal_ring());
        for shares in [plain, sealed, packed] {
            let full = shares.in_use_by_a_snapshot(u64::MAX) + shares.in_use_by_the_journal();
            assert!(full <= WANTED.memory && full > WANTED.memory - (8 << 20), "{full}");
        }
    }

    #[test]
    fn a_journal_of_any_size_has_slots() {
        for memory in [16 << 20, 1 << 30, 64 << 30, 65 << 30, 1 << 40] {
            let shares = Shares::of(&Wanted { memory, slot: 1 << 20, ..WANTED }).unwrap();
            assert!((1 << 17..=JOURNAL_SLOT).contains(&shares.journal.slot_size), "{memory}: {:?}", shares.journal);
        }
    }

    #[test]
    fn a_journal_that_leaves_nothing_is_refused() {
        let why = |wanted| Shares::of(&wanted).unwrap_err().message;
        assert!(why(Wanted { journal: Some(1 << 30), ..WANTED }).contains("set a smaller --journal-memory"));
        assert!(why(Wanted { memory: 1 << 20, ..WANTED }).contains("too small for its slots"));
    }

    #[test]
    fn the_least_memory_is_the_border() {
        for border in [1, 16, 17, 1000, 4096, 123_456] {
            assert_eq!(least_memory(|memory| memory >= border << 20), Some(border.max(16) << 20), "{border}");
        }
        assert_eq!(least_memory(|_| false), None);
    }
}

#[cfg(test)]
mod preparation_tests {
    #![allow(clippy::unwrap_used)]

    use remora_fabric::Pages;

    use super::*;

    #[test]
    fn how_long_it_takes_is_known_from_what_has_been_touched() {
        let second = Duration::from_secs(1);
        assert_eq!(words(160 << 30, 0, second), "preparing 160 GiB of memory");
        assert_eq!(words(160 << 30, 40 << 30, 20 * second), "preparing 160 GiB of memory, about 60 s left");
        assert_eq!(words((1 << 30) - 1, 1 << 30, second), "preparing 1 GiB of memory, about 0.0 s left");
        assert!(words(u64::MAX >> 4, 1, second).ends_with(" left"));
        assert_eq!(words(1 << 30, 0, Duration::ZERO), "preparing 1 GiB of memory");
        assert!(words(u64::MAX >> 4, 1, Duration::MAX).ends_with("of memory"), "no overflow");
    }

    #[test]
    fn all_is_touched_by_steps_and_no_more_once_the_source_has_gone() {
        let preparation = Preparation::of(3 * STEP + 5);
        let mut touched = Vec::new();
        let all = preparation.shared.touch(3 * STEP + 5, |range| {
            touched.push(range);
            Ok(())
        });
        all.unwrap();
        assert_eq!(touched, [0..STEP, STEP..2 * STEP, 2 * STEP..3 * STEP, 3 * STEP..3 * STEP + 5]);
        assert!(preparation.is_under_way() && preparation.words().contains("about 0.0 s left"));
        let shared = preparation.shared.clone();
        drop(preparation);
        shared.touch(STEP, |_| panic!("it is stopped")).unwrap();
    }

    #[tokio::test]
    async fn the_loop_hears_of_the_end_and_of_memory_that_is_not_there() {
        let (incoming, mut inbox) = mpsc::channel(4);
        let memory = Arc::new(Memory::create("test", 1 << 20, Pages::Small).unwrap());
        for (bytes, is_there) in [(1 << 20, true), (2 << 20, false)] {
            let preparation = Preparation::begin(vec![(memory.clone(), bytes)], incoming.clone()).unwrap();
            let Some(Incoming::Prepared(done)) = inbox.recv().await else { panic!("another event") };
            assert_eq!(done.is_ok(), is_there);
            assert!(!preparation.is_under_way() && preparation.words().is_empty());
        }
        assert!(!Preparation::none().is_under_way());
    }

    #[test]
    fn a_limit_that_is_too_low_is_named_with_the_replicas_that_it_allows() {
        assert!(check_limit(1024, 64).is_ok(), "the defaults of most systems");
        assert!(check_limit(4352, 1024).is_ok());
        let refused = check_limit(4096, 1024).unwrap_err();
        assert_eq!(refused.code, remora_process::exit::Code::Local);
        for part in ["--max-replicas 1024", "4352", "may open 4096", "at most 960"] {
            assert!(refused.message.contains(part), "{}", refused.message);
        }
    }
}
