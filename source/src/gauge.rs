//! The figures that the capture threads show while they run, among them how fast the primary writes and when late
//! commands have arrived.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use std::time::{Duration, Instant};

use remora_protocol::Length;
use remora_redis::ReplId;
use remora_redis::aof::Seen;
use remora_table::server_pages::WriterStatus;
use remora_table::{SnapshotWriter, State};

use super::capture::Method;
use super::compression::Link;
use remora_base::pace::Growth;

// Figures that the capture threads show while they run, and one number that the source's loop shows them.
//
// Each is an atomic with one writer. The capture threads write the figures of the snapshot and of the journal; the
// source's loop writes `retire_below`, as the machine decides. They are for display, and for decisions that stay right
// if a value is old. Only the tables themselves are exact.

/// The figures of the tables when an event arrived. The machine decides about one event by one reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The memory of the first snapshot is still being prepared.
    pub is_preparing: bool,
    /// Slots of the current snapshot are reused when all its readers have passed them.
    pub is_windowed: bool,
    /// Slots of the snapshot that have been published.
    pub published: u64,
    /// The writer has reused all slots below this one.
    pub retired: u64,
    /// How many times the writer found its ring full.
    pub writer_waits: u64,
    /// The offset of the journal's oldest byte.
    pub journal_first: u64,
    /// The offset of the journal's newest byte, or of one that follows at once.
    pub journal_end: u64,
    /// The length of the snapshot, as far as it is known.
    pub length: Length,
    /// When the first command behind the snapshot arrived that must not be applied late, as the primary and the replica
    /// would then differ.
    pub first_state: Option<Instant>,
    /// When the first message behind the snapshot arrived.
    pub first_message: Option<Instant>,
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
            is_windowed: false,
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

// How fast the primary writes.

/// How fast the stream has grown in the last few seconds, and just now.
#[derive(Default)]
pub(super) struct Rate {
    growth: Growth,
    bytes_per_second: f64,
    now: Growth,
    bytes_per_second_now: f64,
}

impl Rate {
    /// The least time between two samples.
    const SPAN: Duration = Duration::from_millis(500);

    /// The least time between two samples of what happens just now. Clients that were kept waiting, by a busy host or a
    /// fork, write what they owe in a burst that is over in less than a second.
    const SPAN_NOW: Duration = Duration::from_millis(100);

    /// Takes the stream's offset at a time.
    pub(super) fn sample(&mut self, now: Instant, position: u64) {
        // The first sample of a new journal gives no rate: offsets are absolute.
        let is_new = [&self.growth, &self.now].map(|growth| growth.last() == Some(0));
        if let Some(fresh) = self.growth.look(now, position, Self::SPAN) {
            let fresh = if is_new[0] { 0.0 } else { fresh };
            self.bytes_per_second = (self.bytes_per_second + fresh) / 2.0;
        }
        if let Some(fresh) = self.now.look(now, position, Self::SPAN_NOW) {
            self.bytes_per_second_now = if is_new[1] { 0.0 } else { fresh };
        }
    }

    /// On the average of the last few seconds.
    pub(super) fn bytes_per_second(&self) -> u64 {
        self.bytes_per_second as u64
    }

    /// The average, or the present rate while that is higher: in a burst, the backlog is gone faster than the average
    /// says.
    pub(super) fn highest(&self) -> u64 {
        self.bytes_per_second.max(self.bytes_per_second_now) as u64
    }
}

// When commands that must not be applied late have arrived in the journal.
//
// A snapshot holds everything up to an offset, and replicas apply the stream behind it. Which snapshot that is shows
// later than the commands arrive: so all of them are noted, those of a short time together.

/// Commands that arrive within this time are one entry. A replica that joined in it is taken for one that came after
/// all of them.
const TOGETHER: Duration = Duration::from_millis(50);

/// The most entries. With more, neighbours become one. So the oldest become coarse, and a snapshot that is taken now
/// begins among the newest.
const ENTRIES_MAX: usize = 1024;

/// The commands of one kind.
#[derive(Debug, Default)]
pub struct Arrivals {
    /// In the order of the stream.
    entries: VecDeque<Entry>,
}

/// Some commands.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// When the first of them arrived.
    at: Instant,
    /// Offset of the last byte of the last one.
    last: u64,
}

impl Arrivals {
    /// A command whose last byte has this offset has arrived, and maybe others before it.
    pub fn note(&mut self, last: u64, at: Instant) {
        match self.entries.back_mut() {
            Some(entry) if at.saturating_duration_since(entry.at) < TOGETHER => entry.last = last,
            _ => self.entries.push_back(Entry { at, last }),
        }
        if self.entries.len() > ENTRIES_MAX {
            let all: Vec<Entry> = self.entries.drain(..).collect();
            let joined = all.chunks(2).filter_map(|pair| Some(Entry { at: pair.first()?.at, last: pair.last()?.last }));
            self.entries.extend(joined);
        }
    }

    /// When the first command behind a snapshot at this offset arrived, or a little before; `None`: there is none. What
    /// the snapshot holds is forgotten: the next one is taken later.
    pub fn first_behind(&mut self, offset: u64) -> Option<Instant> {
        while self.entries.front().is_some_and(|entry| entry.last <= offset) {
            self.entries.pop_front();
        }
        self.entries.front().map(|entry| entry.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sample_of_a_journal_is_not_a_rate_and_later_ones_are_averaged() {
        let (mut rate, start) = (Rate::default(), Instant::now());
        rate.sample(start, 0);
        rate.sample(start + Rate::SPAN, 1_000_000);
        assert_eq!(rate.bytes_per_second(), 0, "offsets are absolute");
        rate.sample(start + Rate::SPAN * 2, 1_000_500);
        assert_eq!(rate.bytes_per_second(), 500);
        rate.sample(start + Rate::SPAN * 2 + Rate::SPAN / 2, 9_000_000);
        assert_eq!(rate.bytes_per_second(), 500, "less than a span has passed");
    }

    #[test]
    fn a_burst_is_a_rate_while_it_lasts() {
        let (mut rate, start) = (Rate::default(), Instant::now());
        let mut at = |millis: u64, position| {
            rate.sample(start + Duration::from_millis(millis), position);
            (rate.bytes_per_second(), rate.highest())
        };
        at(0, 0);
        assert_eq!(at(100, 1_000_000), (0, 0), "offsets are absolute");
        assert_eq!(at(200, 1_000_100), (0, 1000));
        assert_eq!(at(300, 2_000_100), (0, 10_000_000));
        assert_eq!(at(350, 2_000_100), (0, 10_000_000), "less than a span has passed");
        assert_eq!(at(400, 2_000_100), (0, 0));
    }

    #[test]
    fn the_first_command_behind_a_snapshot_is_known_and_what_is_in_it_is_forgotten() {
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.first_behind(0), None);
        (1..=5).for_each(|step| arrivals.note(u64::from(step) * 100, began + second * step));
        arrivals.note(510, began + second * 5 + TOGETHER / 2);
        assert_eq!(arrivals.first_behind(99), Some(began + second));
        assert_eq!(arrivals.first_behind(100), Some(began + second * 2));
        assert_eq!(arrivals.first_behind(499), Some(began + second * 5));
        // A part of an entry is behind it: never later than in truth.
        assert_eq!(arrivals.first_behind(505), Some(began + second * 5));
        assert_eq!(arrivals.first_behind(510), None);
        assert!(arrivals.entries.is_empty());
    }

    #[test]
    fn memory_is_bounded_and_no_time_is_later_than_in_truth() {
        let (began, step) = (Instant::now(), TOGETHER * 2);
        let mut arrivals = Arrivals::default();
        for number in 1..=20_000_u32 {
            arrivals.note(u64::from(number), began + step * number);
            assert!(arrivals.entries.len() <= ENTRIES_MAX);
        }
        for offset in (0..19_900).step_by(777) {
            let first = arrivals.first_behind(u64::from(offset)).unwrap_or(began);
            assert!(first <= began + step * (offset + 1), "{offset}");
        }
        let first = arrivals.first_behind(19_900).unwrap_or(began);
        assert!(first + step * 4 >= began + step * 19_901, "the newest are coarse too");
    }
}
