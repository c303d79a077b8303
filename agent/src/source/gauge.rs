//! Gauge: figures that the capture threads show while they run, and one number that the source's loop shows them.
//!
//! Each is an atomic with one writer. The capture threads write the figures of the snapshot and of the journal; the
//! source's loop writes `retire_below`, as the machine decides. They are for display, and for decisions that stay right
//! if a value is old. Only the tables themselves are exact.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use remora_protocol::Length;
use remora_redis::ReplId;
use remora_redis::aof::Seen;
use remora_table::server_pages::capture_page::WriterStatus;
use remora_table::{SnapshotWriter, State};

use super::arrivals::Arrivals;
use super::capture::Method;
use super::compression::Link;

/// The figures of the tables when an event arrived. The machine decides about one event by one reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The memory of the first snapshot is still being prepared.
    pub(crate) is_preparing: bool,
    /// Slots of the snapshot that have been published.
    pub(crate) published: u64,
    /// The writer has reused all slots below this one.
    pub(crate) retired: u64,
    /// How many times the writer found its ring full.
    pub(crate) writer_waits: u64,
    /// Offsets of the journal's oldest byte, and of its newest one or one that follows at once.
    pub(crate) journal_first: u64,
    pub(crate) journal_end: u64,
    /// The length of the snapshot, as far as it is known.
    pub(crate) length: Length,
    /// When the first command behind the snapshot arrived that must not be applied late, as the primary and the replica
    /// would then differ; and the first message.
    pub(crate) first_state: Option<Instant>,
    pub(crate) first_message: Option<Instant>,
}

/// The figures of the running captures. Counts are in bytes, except for those of slots.
// Larger than the bound: for each figure a method that writes it and one that reads it.
#[derive(Default)]
pub(crate) struct Gauge {
    offset: AtomicU64,
    received: AtomicU64,
    /// The length that was announced; 0 if none was.
    announced: AtomicU64,
    /// Keys that the module has written.
    walked: AtomicU64,
    published_slots: AtomicU64,
    retired_slots: AtomicU64,
    state: AtomicU8,
    took_millis: AtomicU64,
    waits: AtomicU64,
    method: AtomicU8,
    retire_below: AtomicU64,
    /// Whether slots are sealed, and below which number they are.
    is_sealing: AtomicBool,
    sealed_slots: AtomicU64,
    /// Bytes of the slots as other hosts read them, and whether they are compressed now.
    stored: AtomicU64,
    is_compressing: AtomicBool,
    journal_first: AtomicU64,
    journal_end: AtomicU64,
    /// What must not be applied late in the journal: the thread that follows the stream writes, the loop reads.
    late: Mutex<LateArrivals>,
    // Rarely used: set once per capture.
    replid: Mutex<Option<ReplId>>,
    no_fast_keys: Mutex<String>,
    /// How slots are compressed, in words; once for each slot.
    compression: Mutex<String>,
    /// The loop shows the link to the replicas.
    link: Mutex<Link>,
    began: Mutex<Option<Instant>>,
}

/// Commands in the journal that must not be applied late.
#[derive(Default)]
struct LateArrivals {
    state: Arrivals,
    messages: Arrivals,
}

impl Gauge {
    /// A journal begins, which has nothing yet.
    pub(super) fn journal_begins(&self) {
        *lock(&self.late) = LateArrivals::default();
    }

    /// Commands that must not be applied late have arrived in the journal, or did so at an earlier time.
    pub(super) fn arrived(&self, seen: Seen, at: Instant) {
        let mut late = lock(&self.late);
        if let Some(last) = seen.state {
            late.state.note(last, at);
        }
        if let Some(last) = seen.message {
            late.messages.note(last, at);
        }
    }

    /// A snapshot has begun. It holds everything up to `offset`. With `with_journal`, the same capture follows the
    /// stream.
    pub(super) fn snapshot_began(&self, replid: ReplId, offset: u64, with_journal: bool) {
        self.offset.store(offset, Relaxed);
        self.received.store(0, Relaxed);
        self.announced.store(0, Relaxed);
        self.walked.store(0, Relaxed);
        self.published_slots.store(0, Relaxed);
        self.retired_slots.store(0, Relaxed);
        self.waits.store(0, Relaxed);
        self.state.store(State::Open as u8, Relaxed);
        if with_journal {
            self.journal_at(offset + 1, offset);
            *lock(&self.replid) = Some(replid);
        }
        *lock(&self.began) = Some(Instant::now());
    }

    /// The snapshot that has begun will have this many bytes.
    pub(super) fn announced(&self, bytes: u64) {
        self.announced.store(bytes, Relaxed);
    }

    /// The length of the snapshot, if it was announced.
    pub(super) fn announced_length(&self) -> Option<u64> {
        Some(self.announced.load(Relaxed)).filter(|bytes| *bytes > 0)
    }

    /// Keys that the module has written of the snapshot.
    pub(super) fn walked_keys(&self) -> u64 {
        self.walked.load(Relaxed)
    }

    /// The snapshot that has begun was completed by a former process.
    pub(super) fn snapshot_left(&self, bytes: u64, slots: u64) {
        self.received.store(bytes, Relaxed);
        self.published_slots.store(slots, Relaxed);
        self.snapshot_ended(State::Sealed);
    }

    /// Shows how far the snapshot's writer is.
    pub(super) fn snapshot_at(&self, writer: &SnapshotWriter) {
        self.received.store(writer.received(), Relaxed);
        self.published_slots.store(writer.published_slots(), Relaxed);
        self.retired_slots.store(writer.retired(), Relaxed);
    }

    /// Shows how far a writer in another process is.
    pub(super) fn snapshot_written(&self, status: &WriterStatus) {
        self.received.store(status.received, Relaxed);
        self.walked.store(status.keys, Relaxed);
        self.published_slots.store(status.published_slots, Relaxed);
        self.retired_slots.store(status.retired_slots, Relaxed);
        self.waits.store(status.waits, Relaxed);
    }

    /// How the snapshot is taken from the server.
    pub(super) fn set_method(&self, method: Method) {
        self.method.store(method as u8, Relaxed);
    }

    pub(super) fn method(&self) -> Method {
        Method::ALL.into_iter().find(|method| *method as u8 == self.method.load(Relaxed)).unwrap_or_default()
    }

    /// Why the snapshot is not taken in the fast way.
    pub(super) fn set_no_fast_keys(&self, why: impl Into<String>) {
        *lock(&self.no_fast_keys) = why.into();
    }

    /// Why the snapshot is not taken in the fast way; empty if it is.
    pub(super) fn no_fast_keys(&self) -> String {
        lock(&self.no_fast_keys).clone()
    }

    /// The snapshot was sealed or aborted.
    pub(super) fn snapshot_ended(&self, state: State) {
        let took = self.began().map_or(0, |began| began.elapsed().as_millis() as u64);
        self.took_millis.store(took, Relaxed);
        self.state.store(state as u8, Relaxed);
    }

    /// The writer found its ring full.
    pub(super) fn writer_waits(&self) {
        self.waits.fetch_add(1, Relaxed);
    }

    /// Shows the offsets of the oldest and the newest byte in the journal. The newest is shown before readers have it.
    pub(super) fn journal_at(&self, first: u64, end: u64) {
        self.journal_first.store(first, Relaxed);
        self.journal_end.store(end, Relaxed);
    }

    /// Allows the writer to reuse every slot below `slot`.
    pub(super) fn allow_retiring(&self, slot: u64) {
        self.retire_below.store(slot, Relaxed);
    }

    /// The figures that the machine needs for its next decision.
    pub(super) fn reading(&self) -> Reading {
        let (journal_first, journal_end) = self.journal();
        let (mut late, offset) = (lock(&self.late), self.snapshot_offset());
        Reading {
            is_preparing: false,
            first_state: late.state.first_behind(offset),
            first_message: late.messages.first_behind(offset),
            published: self.published_slots(),
            retired: self.retired_slots(),
            writer_waits: self.waits.load(Relaxed),
            journal_first,
            journal_end,
            length: Length::default(),
        }
    }

    /// The history that the stream belongs to.
    pub(super) fn replid(&self) -> Option<ReplId> {
        *lock(&self.replid)
    }

    /// When the last snapshot began.
    pub(super) fn began(&self) -> Option<Instant> {
        *lock(&self.began)
    }

    /// Whether a snapshot is being taken.
    pub(super) fn is_capturing(&self) -> bool {
        self.state.load(Relaxed) == State::Open as u8
    }

    /// How long the snapshot took, or has taken so far.
    pub(super) fn capture_time(&self) -> Duration {
        if self.is_capturing() {
            return self.began().map_or(Duration::ZERO, |began| began.elapsed());
        }
        Duration::from_millis(self.took_millis.load(Relaxed))
    }

    pub(super) fn snapshot_offset(&self) -> u64 {
        self.offset.load(Relaxed)
    }

    pub(super) fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    pub(super) fn published_slots(&self) -> u64 {
        self.published_slots.load(Relaxed)
    }

    pub(super) fn retired_slots(&self) -> u64 {
        self.retired_slots.load(Relaxed)
    }

    /// The writer may reuse slots below this number: no replica needs them, and they are sealed.
    pub(super) fn retire_below(&self) -> u64 {
        let sealed = if self.is_sealing.load(Relaxed) { self.sealed_slots.load(Relaxed) } else { u64::MAX };
        self.retire_below.load(Relaxed).min(sealed)
    }

    /// A thread begins to seal the snapshot.
    pub(super) fn sealing_begins(&self) {
        self.sealed_slots.store(0, Relaxed);
        self.stored.store(0, Relaxed);
        lock(&self.compression).clear();
        self.is_sealing.store(true, Relaxed);
    }

    /// No thread stores slots for other hosts: they read the plain ones.
    pub(super) fn not_compressed(&self) {
        self.is_sealing.store(false, Relaxed);
        lock(&self.compression).clear();
    }

    /// Slots have been stored for other hosts, `is_compressing`: and are compressed now.
    pub(super) fn stored(&self, bytes: u64, is_compressing: bool, compression: String) {
        self.stored.store(bytes, Relaxed);
        self.is_compressing.store(is_compressing, Relaxed);
        *lock(&self.compression) = compression;
    }

    /// Whether slots are compressed now, or were when the snapshot was complete. Then the stream is too.
    pub(super) fn is_compressing(&self) -> bool {
        self.is_compressing.load(Relaxed)
    }

    /// Bytes that other hosts can read of the snapshot.
    pub(super) fn stored_bytes(&self) -> u64 {
        if self.is_sealing.load(Relaxed) { self.stored.load(Relaxed) } else { self.received() }
    }

    /// How slots are compressed; empty if no thread stores slots for other hosts.
    pub(super) fn compression(&self) -> String {
        lock(&self.compression).clone()
    }

    /// The link to the replicas, as far as it is known.
    pub(super) fn link(&self) -> Link {
        lock(&self.link).clone()
    }

    /// Shows what is known of the link.
    pub(super) fn show_link(&self, link: Link) {
        *lock(&self.link) = link;
    }

    /// All slots below this number are sealed.
    pub(super) fn sealed(&self, below: u64) {
        self.sealed_slots.store(below, Relaxed);
    }

    /// Replication offsets of the oldest and the newest byte that the journal holds.
    pub(super) fn journal(&self) -> (u64, u64) {
        (self.journal_first.load(Relaxed), self.journal_end.load(Relaxed))
    }
}

/// Locks a mutex whose holders never panic while they hold it. If one did, the value would still be complete.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
