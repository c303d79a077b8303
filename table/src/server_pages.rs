//! Pages of shared memory on which an agent and our module in a server exchange orders and progress.
//!
//! ```text
//!   source agent  ── capture page ── the server's fork child, which writes long strings into the snapshot's table
//!   replica agent ── load page ───── the server, which loads long strings out of the agent's memory
//! ```
//!
//! * [`CapturePage`]: what the fork child is to write where, and how far it is.
//! * [`LoadPage`]: how many references into the memory the server has used.
//! * `StatusText`: a text on either page.
//!
//! Not here: how a page reaches the other process (`remora_fabric::Handover`).

use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use remora_fabric::{Memory, Pages, View};
use remora_redis::ReplId;

use crate::error::Error;
use crate::identity::Origin;
use crate::layout::Geometry;

// A text in shared memory: its length, then its bytes. One process writes it, another reads it. If either end has
// corrupted the page, the reader gets at most the bytes that there is space for.

/// The place of a text: at a multiple of eight, eight bytes of length and then the text.
#[derive(Clone, Copy)]
pub(crate) struct StatusText {
    /// Bytes from the start of the memory.
    pub(crate) at: u64,
    /// Maximum length of the text, in bytes.
    pub(crate) most: usize,
}

impl StatusText {
    /// Writes the text, truncated between characters to the space. A reader that sees the length also sees the bytes.
    pub(crate) fn write(self, memory: &Memory, text: &str) {
        let mut length = text.len().min(self.most);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        let bytes = text.as_bytes().get(..length).unwrap_or_default();
        let written =
            memory.write(self.at + 8, bytes).and_then(|()| memory.store_u64(self.at, bytes.len() as u64, Release));
        debug_assert!(written.is_ok(), "a text inside the page");
    }

    /// Reads the text; `None` if there is none.
    pub(crate) fn read(self, memory: &View) -> Option<String> {
        let length = usize::try_from(memory.load_u64(self.at, Acquire).ok()?).unwrap_or(0).min(self.most);
        let mut text = vec![0; length];
        memory.read(self.at + 8, &mut text).ok()?;
        (length > 0).then(|| String::from_utf8_lossy(&text).into_owned())
    }
}

// The capture page: a page of shared memory beside a snapshot's table whose writer is *another process*.
//
// The orderer (the source agent) creates table and page and hands both over. The writer (a fork child of the server,
// through our module) finds on the page what to write where, and reports its progress on it. Readers of the table
// never see the page. Not here: how the page reaches the writer, and what it writes.
//
// ```text
//    0  the order       magic, version, work, generation, geometry, least written once, before it is handed over
//   64  the orderer     beat, slots not needed, cancel, permission        words written only by the orderer
//  128  the writer      stage, beat, received, waits, keys, took,         words written only by the writer
//                       slots, offset, database, format, replid
// 1024  status text     length, text: why it was declined, or failed
// ```
//
// ```text
//             ask             begin (permitted)        finish
//   Armed ──────────▶ Asking ──────────────────▶ Begun ──────▶ Done
//     │                  │                         │
//     └──── decline ─────┴──▶ Declined             └── fail ──▶ Failed
// ```
//
// If the writer declines, it is as if it had never been asked. What it has begun and not finished is lost, and the
// writer makes sure that the incomplete snapshot is not taken for a complete one.
//
// Invariants: each word has one writer. The values that belong to a stage are stored before the stage, with release,
// so a process that sees the stage also sees them. If a beat does not change for a long time, the other end is gone.

/// Bytes of a capture page.
pub const CAPTURE_PAGE_BYTES: u64 = 4096;

/// The work that a writer is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Write the long strings into the table. The server writes everything else.
    Walk,
    /// The same in the fast way, for a server whose module offers it: nearly all keys, at once.
    FastWalk,
    /// Write nothing: only make the server's own writing cheaper.
    Ease,
}

/// The writer's stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The writer has not begun.
    Armed,
    /// The writer has stored replid and offset, and waits for the permission to begin.
    Asking,
    /// The writer has begun. Unless its work was [`Work::Ease`], the table is laid out.
    Begun,
    /// The writer is done. The table is open: the orderer writes the rest ([`crate::SnapshotWriter::resume`]).
    Done,
    /// The writer has done nothing, and the status text says why: the server writes everything.
    Declined,
    /// The writer has begun and not finished; the status text says why.
    Failed,
}

/// The order: written on the page before it is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// The work to do.
    pub work: Work,
    /// The generation of the table.
    pub generation: u64,
    /// The table's shape.
    pub geometry: Geometry,
    /// For the walks: strings of at least this many bytes are written.
    pub least_bytes: u64,
}

/// The moment of a data set at which its server forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkPoint {
    /// The history of the data set.
    pub history: ReplId,
    /// Replication offset of the last byte of the stream that the data set contains.
    pub offset: u64,
    /// The database that the stream after the snapshot writes to until it selects one.
    pub database: u32,
}

impl ForkPoint {
    /// The origin of a snapshot of that moment.
    pub fn origin(&self, generation: u64) -> Origin {
        Origin { generation, history: self.history, offset: self.offset }
    }
}

/// The writer's progress at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriterStatus {
    /// Bytes of the snapshot so far.
    pub received: u64,
    /// Slots that readers may read or have read.
    pub published_slots: u64,
    /// Slots below this number have been retired to make space.
    pub retired_slots: u64,
    /// How many times the writer found its ring full.
    pub waits: u64,
    /// Keys so far.
    pub keys: u64,
    /// Version of the RDB format that it writes; 0 until it has begun.
    pub format: u64,
    /// Microseconds from beginning to end; 0 until the end.
    pub took_micros: u64,
}

/// One capture page, as mapped by either end.
pub struct CapturePage {
    memory: Arc<Memory>,
    order: Order,
}

impl CapturePage {
    /// Creates a page with this order.
    ///
    /// # Errors
    /// [`Error::Memory`] if the memory can't be allocated.
    pub fn create(order: Order) -> Result<CapturePage, Error> {
        let memory = Memory::create("remora-capture-page", CAPTURE_PAGE_BYTES, Pages::Small)?;
        let work = match order.work {
            Work::Walk => WORK_WALK,
            Work::FastWalk => WORK_FAST_WALK,
            Work::Ease => WORK_EASE,
        };
        let words = [
            (MAGIC_AT, MAGIC),
            (WORK_AT, VERSION | work << 32),
            (GENERATION_AT, order.generation),
            (GEOMETRY_AT, u64::from(order.geometry.slot_size) | u64::from(order.geometry.slots) << 32),
            (LEAST_AT, order.least_bytes),
        ];
        for (at, word) in words {
            memory.store_u64(at, word, Release)?;
        }
        Ok(CapturePage { memory: Arc::new(memory), order })
    }

    /// Opens the page that was handed over.
    ///
    /// # Errors
    /// [`Error::Layout`] if it is not a capture page, has another version, or its order is invalid.
    pub fn adopt(memory: Memory) -> Result<CapturePage, Error> {
        let load = |at| memory.load_u64(at, Acquire);
        if memory.length() < CAPTURE_PAGE_BYTES || load(MAGIC_AT)? != MAGIC {
            return Err(Error::Layout(
                "not a capture page: its first bytes are not the magic, or it is too short".into(),
            ));
        }
        let (version, work) = halves(load(WORK_AT)?);
        if u64::from(version) != VERSION {
            let text = format!(
                "the capture page has version {version}, this writer knows {VERSION}: upgrade the older of the two"
            );
            return Err(Error::Layout(text));
        }
        let work = match u64::from(work) {
            WORK_WALK => Work::Walk,
            WORK_FAST_WALK => Work::FastWalk,
            WORK_EASE => Work::Ease,
            other => {
                return Err(Error::Layout(format!(
                    "the capture page asks for work {other}, which this writer does not know"
                )));
            }
        };
        let (slot_size, slots) = halves(load(GEOMETRY_AT)?);
        let geometry = Geometry { slot_size, slots }.checked()?;
        let order = Order { work, generation: load(GENERATION_AT)?, geometry, least_bytes: load(LEAST_AT)? };
        Ok(CapturePage { memory: Arc::new(memory), order })
    }

    /// The page, for handing it over.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The order.
    pub fn order(&self) -> Order {
        self.order
    }

    // --- The orderer's side ------------------------------------------------------------------------------------

    /// Shows that the orderer is alive. Call it at least once a second.
    pub fn beat(&self) {
        self.store(BEAT_AT, self.load(BEAT_AT).wrapping_add(1));
    }

    /// Slots below this number are not needed any more.
    pub fn allow_retiring(&self, below: u64) {
        self.store(RETIRE_AT, below);
    }

    /// The snapshot is not wanted any more: the writer must stop.
    pub fn cancel(&self) {
        self.store(CANCEL_AT, 1);
    }

    /// Permits the writer to begin. Call it only when it is certain that nothing else relies on what that process
    /// saves.
    pub fn permit(&self) {
        self.store(PERMIT_AT, 1);
    }

    /// The writer's stage.
    pub fn stage(&self) -> Stage {
        match self.load(STAGE_AT) {
            STAGE_ARMED => Stage::Armed,
            STAGE_ASKING => Stage::Asking,
            STAGE_DECLINED => Stage::Declined,
            STAGE_BEGUN => Stage::Begun,
            STAGE_DONE => Stage::Done,
            _ => Stage::Failed,
        }
    }

    /// The writer's beat: a number that grows while the writer is alive.
    pub fn writer_beat(&self) -> u64 {
        self.load(WRITER_BEAT_AT)
    }

    /// The moment that the snapshot would be of; `None` before the writer has asked.
    ///
    /// # Errors
    /// [`Error::Layout`] if the writer has stored something else.
    pub fn fork_point(&self) -> Result<Option<ForkPoint>, Error> {
        let mut replid = [0; 40];
        if self.stage() == Stage::Armed {
            return Ok(None);
        }
        self.memory.read(REPLID_AT, &mut replid)?;
        if replid == [0; 40] {
            return Ok(None);
        }
        let history = ReplId::try_from(replid)
            .map_err(|error| Error::Layout(format!("the module's writer reports an invalid replid: {error}")))?;
        let database = self.load(DATABASE_AT);
        let database = u32::try_from(database)
            .map_err(|_| Error::Layout(format!("the module's writer reports an invalid database: {database}")))?;
        Ok(Some(ForkPoint { history, offset: self.load(OFFSET_AT), database }))
    }

    /// The writer's progress so far.
    pub fn writer_status(&self) -> WriterStatus {
        WriterStatus {
            received: self.load(RECEIVED_AT),
            published_slots: self.load(PUBLISHED_AT),
            retired_slots: self.load(RETIRED_AT),
            waits: self.load(WAITS_AT),
            keys: self.load(KEYS_AT),
            format: self.load(FORMAT_AT),
            took_micros: self.load(TOOK_AT),
        }
    }

    /// Why the writer declined or failed.
    pub fn status_text(&self) -> String {
        STATUS_TEXT.read(&self.memory).unwrap_or_else(|| "it did not say why".into())
    }

    // --- The writer's side --------------------------------------------------------------------------------------

    /// The orderer's beat: a number that grows while the orderer is alive.
    pub fn orderer_beat(&self) -> u64 {
        self.load(BEAT_AT)
    }

    /// Slots below this number are not needed any more.
    pub fn retire_below(&self) -> u64 {
        self.load(RETIRE_AT)
    }

    /// Whether the snapshot is not wanted any more.
    pub fn is_cancelled(&self) -> bool {
        self.load(CANCEL_AT) != 0
    }

    /// Reports what the snapshot would contain, and asks for the permission to begin.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the writer has asked already.
    pub fn ask(&self, point: &ForkPoint) -> Result<(), Error> {
        if self.stage() != Stage::Armed {
            return Err(Error::Misuse("ask() on a capture page whose writer has asked already"));
        }
        self.memory.write(REPLID_AT, point.history.as_bytes())?;
        self.store(OFFSET_AT, point.offset);
        self.store(DATABASE_AT, u64::from(point.database));
        self.store(STAGE_AT, STAGE_ASKING);
        Ok(())
    }

    /// Whether the orderer has permitted to begin.
    pub fn is_permitted(&self) -> bool {
        self.load(PERMIT_AT) != 0
    }

    /// The writer begins.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it has not asked, or has begun already.
    pub fn begin(&self) -> Result<(), Error> {
        if self.stage() != Stage::Asking {
            return Err(Error::Misuse("begin() on a capture page whose writer has not asked, or has begun already"));
        }
        self.store(STAGE_AT, STAGE_BEGUN);
        Ok(())
    }

    /// Records that the writer declined, with the reason (truncated to the space on the page).
    pub fn decline(&self, text: &str) {
        STATUS_TEXT.write(&self.memory, text);
        self.store(STAGE_AT, STAGE_DECLINED);
    }

    /// Stores the writer's progress; also its beat.
    pub fn report(&self, status: &WriterStatus) {
        let words = [
            (RECEIVED_AT, status.received),
            (PUBLISHED_AT, status.published_slots),
            (RETIRED_AT, status.retired_slots),
            (WAITS_AT, status.waits),
            (KEYS_AT, status.keys),
            (FORMAT_AT, status.format),
            (TOOK_AT, status.took_micros),
        ];
        for (at, word) in words {
            self.store(at, word);
        }
        self.store(WRITER_BEAT_AT, self.load(WRITER_BEAT_AT).wrapping_add(1));
    }

    /// The writer is done.
    pub fn finish(&self) {
        self.store(STAGE_AT, STAGE_DONE);
    }

    /// Records that the writer failed, with the reason (truncated to the space on the page).
    pub fn fail(&self, text: &str) {
        STATUS_TEXT.write(&self.memory, text);
        self.store(STAGE_AT, STAGE_FAILED);
    }

    fn load(&self, at: u64) -> u64 {
        // Inside the page, at a multiple of eight: checked when the page was created, so this can't fail.
        self.memory.load_u64(at, Acquire).unwrap_or(0)
    }

    fn store(&self, at: u64, word: u64) {
        // As in `load`.
        let stored = self.memory.store_u64(at, word, Release);
        debug_assert!(stored.is_ok(), "a word of the page");
    }
}

fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// `REMORABD`, in memory order.
const MAGIC: u64 = u64::from_le_bytes(*b"REMORABD");
const VERSION: u64 = 2;
const WORK_WALK: u64 = 1;
const WORK_EASE: u64 = 2;
const WORK_FAST_WALK: u64 = 3;

const MAGIC_AT: u64 = 0;
const WORK_AT: u64 = 8;
const GENERATION_AT: u64 = 16;
const GEOMETRY_AT: u64 = 24;
const LEAST_AT: u64 = 32;

const BEAT_AT: u64 = 64;
const RETIRE_AT: u64 = 72;
const CANCEL_AT: u64 = 80;
const PERMIT_AT: u64 = 88;

const STAGE_AT: u64 = 128;
const WRITER_BEAT_AT: u64 = 136;
const RECEIVED_AT: u64 = 144;
const WAITS_AT: u64 = 152;
const KEYS_AT: u64 = 160;
const TOOK_AT: u64 = 168;
const PUBLISHED_AT: u64 = 176;
const RETIRED_AT: u64 = 184;
const OFFSET_AT: u64 = 192;
const DATABASE_AT: u64 = 200;
const FORMAT_AT: u64 = 208;
const REPLID_AT: u64 = 216;

const STATUS_TEXT_AT: u64 = 1024;
/// Maximum length of a status text, in bytes: enough for one of our sentences that quotes a long one of a server's.
const STATUS_TEXT_BYTES: u64 = 1024;
const STATUS_TEXT: StatusText = StatusText { at: STATUS_TEXT_AT, most: STATUS_TEXT_BYTES as usize };

const STAGE_ARMED: u64 = 0;
const STAGE_BEGUN: u64 = 1;
const STAGE_DONE: u64 = 2;
const STAGE_FAILED: u64 = 3;
const STAGE_ASKING: u64 = 4;
const STAGE_DECLINED: u64 = 5;

const _: () = {
    assert!(REPLID_AT + 40 <= STATUS_TEXT_AT, "the writer's words end before the status text");
    assert!(STATUS_TEXT_AT + 8 + STATUS_TEXT_BYTES <= CAPTURE_PAGE_BYTES, "the status text fits the page");
};

// The load page: a page of shared memory beside another memory, on which the process that *reads* that memory counts
// its progress.
//
// The agent hands memory to a server, and tells it by other means which bytes to take; the server counts on the load
// page what it has read. A count means that everything up to it has been read: only then may the agent verify that the
// bytes were still right, and reuse their place. Not here: the memory itself, and what is counted.
//
// ```text
//    0  magic, version      written once, by the agent
//   64  done                by the reader of the memory: a count that only grows
//   72  status text         length, text: why nothing more will be read
// ```

/// Bytes of a load page.
pub const LOAD_PAGE_BYTES: u64 = 4096;

/// One load page, as mapped by either end.
#[derive(Debug)]
pub struct LoadPage {
    memory: Memory,
}

impl LoadPage {
    /// Creates a page with a count of 0.
    ///
    /// # Errors
    /// [`Error::Memory`] if the memory can't be allocated.
    pub fn create() -> Result<LoadPage, Error> {
        let memory = Memory::create("remora-load-page", LOAD_PAGE_BYTES, Pages::Small)?;
        memory.store_u64(LOAD_MAGIC_AT, LOAD_MAGIC, Release)?;
        memory.store_u64(VERSION_AT, LOAD_VERSION, Release)?;
        Ok(LoadPage { memory })
    }

    /// Opens the page that was handed over.
    ///
    /// # Errors
    /// [`Error::Layout`] if it is not a load page, or has another version.
    pub fn adopt(memory: Memory) -> Result<LoadPage, Error> {
        if memory.length() < LOAD_PAGE_BYTES || memory.load_u64(LOAD_MAGIC_AT, Acquire)? != LOAD_MAGIC {
            return Err(Error::Layout("not a load page: its first bytes are not the magic, or it is too short".into()));
        }
        match memory.load_u64(VERSION_AT, Acquire)? {
            LOAD_VERSION => Ok(LoadPage { memory }),
            other => Err(Error::Layout(format!(
                "the load page has version {other}, this reader knows {LOAD_VERSION}: upgrade the older of the two"
            ))),
        }
    }

    /// The page, for handing it over.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    // --- The reader's side: one process, one thread ---------------------------------------------------------------

    /// Counts one more: nothing of it will be read again.
    pub fn count(&self) {
        self.store(DONE_AT, self.load(DONE_AT, Relaxed).wrapping_add(1));
    }

    /// Records that nothing more will be read, with the reason (truncated to the space on the page). The first reason
    /// stays.
    pub fn refuse(&self, text: &str) {
        if self.load(LOAD_STATUS_TEXT_AT, Relaxed) != 0 {
            return;
        }
        LOAD_STATUS_TEXT.write(&self.memory, text);
    }

    // --- The agent's side --------------------------------------------------------------------------------

    /// The count. Everything that the reader read for it was read before.
    pub fn done(&self) -> u64 {
        self.load(DONE_AT, Acquire)
    }

    /// Why nothing more will be read; `None` if there is no such reason.
    pub fn refusal(&self) -> Option<String> {
        LOAD_STATUS_TEXT.read(&self.memory)
    }

    fn load(&self, at: u64, order: Ordering) -> u64 {
        // Inside the page, at a multiple of eight: checked when the page was created, so this can't fail.
        self.memory.load_u64(at, order).unwrap_or(0)
    }

    fn store(&self, at: u64, word: u64) {
        // As in `load`.
        let stored = self.memory.store_u64(at, word, Release);
        debug_assert!(stored.is_ok(), "a word of the page");
    }
}

/// `REMORATY`, in memory order.
const LOAD_MAGIC: u64 = u64::from_le_bytes(*b"REMORATY");
const LOAD_VERSION: u64 = 1;

const LOAD_MAGIC_AT: u64 = 0;
const VERSION_AT: u64 = 8;
const DONE_AT: u64 = 64;
const LOAD_STATUS_TEXT_AT: u64 = 72;
/// Maximum length of a status text, in bytes: enough for one of our sentences that quotes a long one of a server's.
const LOAD_STATUS_TEXT_BYTES: usize = 1024;
const LOAD_STATUS_TEXT: StatusText = StatusText { at: LOAD_STATUS_TEXT_AT, most: LOAD_STATUS_TEXT_BYTES };

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    fn order() -> Order {
        Order {
            work: Work::Walk,
            generation: 77,
            geometry: Geometry { slot_size: 1 << 16, slots: 9 },
            least_bytes: 4096,
        }
    }

    /// Both ends of one page, each with a mapping of its own.
    fn ends() -> (CapturePage, CapturePage) {
        let ours = CapturePage::create(order()).unwrap();
        let descriptor = ours.memory().as_fd().try_clone_to_owned().unwrap();
        let theirs = CapturePage::adopt(Memory::adopt(descriptor, CAPTURE_PAGE_BYTES).unwrap()).unwrap();
        (ours, theirs)
    }

    #[test]
    fn the_writer_finds_the_order_and_its_words_come_back() {
        let (ours, theirs) = ends();
        assert_eq!(theirs.order(), order());
        assert_eq!((ours.stage(), ours.fork_point().unwrap()), (Stage::Armed, None));
        let point = ForkPoint { history: ReplId::try_from([b'a'; 40]).unwrap(), offset: 123, database: 4 };
        assert!(theirs.begin().is_err(), "asked first");
        theirs.ask(&point).unwrap();
        let asked = (ours.stage(), ours.fork_point().unwrap(), theirs.is_permitted());
        assert_eq!(asked, (Stage::Asking, Some(point), false));
        ours.permit();
        assert!(theirs.is_permitted());
        theirs.begin().unwrap();
        assert_eq!(ours.stage(), Stage::Begun);
        let status = WriterStatus {
            received: 1,
            published_slots: 5,
            retired_slots: 6,
            waits: 2,
            keys: 3,
            format: 80,
            took_micros: 4,
        };
        let before = ours.writer_beat();
        theirs.report(&status);
        assert_eq!(ours.writer_status(), status);
        assert_ne!(ours.writer_beat(), before);
        theirs.finish();
        assert_eq!(ours.stage(), Stage::Done);
        assert!(theirs.begin().is_err() && theirs.ask(&point).is_err(), "asked and begun once");
    }

    #[test]
    fn a_fork_point_that_is_not_one_is_an_error() {
        let (ours, theirs) = ends();
        let point = ForkPoint { history: ReplId::try_from([b'a'; 40]).unwrap(), offset: 123, database: 4 };
        theirs.ask(&point).unwrap();
        theirs.store(DATABASE_AT, 1 << 32);
        assert!(matches!(ours.fork_point(), Err(Error::Layout(_))));
        theirs.store(DATABASE_AT, 4);
        theirs.memory.write(REPLID_AT, b"x").unwrap();
        assert!(matches!(ours.fork_point(), Err(Error::Layout(_))));
        theirs.memory.write(REPLID_AT, b"a").unwrap();
        assert_eq!(ours.fork_point().unwrap(), Some(point));
    }

    #[test]
    fn what_is_declined_says_why() {
        let (ours, theirs) = ends();
        theirs.decline("another replica waits too");
        assert_eq!((ours.stage(), ours.status_text().as_str()), (Stage::Declined, "another replica waits too"));
    }

    #[test]
    fn the_orderer_is_heard_too() {
        let (ours, theirs) = ends();
        let before = theirs.orderer_beat();
        ours.beat();
        ours.allow_retiring(5);
        assert!(theirs.orderer_beat() != before && theirs.retire_below() == 5 && !theirs.is_cancelled());
        ours.cancel();
        assert!(theirs.is_cancelled());
    }

    #[test]
    fn a_failure_has_a_sentence_and_a_long_one_is_cut_between_letters() {
        let (ours, theirs) = ends();
        theirs.fail("the ring is full");
        assert_eq!((ours.stage(), ours.status_text().as_str()), (Stage::Failed, "the ring is full"));
        theirs.fail(&format!("x{}", "ü".repeat(2000)));
        let text = ours.status_text();
        assert!(text.len() <= STATUS_TEXT_BYTES as usize && text.chars().skip(1).all(|letter| letter == 'ü'));
    }

    #[test]
    fn memory_that_is_not_a_capture_page_is_refused() {
        let blank = Memory::create("blank", CAPTURE_PAGE_BYTES, Pages::Small).unwrap();
        assert!(matches!(CapturePage::adopt(blank), Err(Error::Layout(_))));
        for (at, word) in [(WORK_AT, VERSION + 1), (WORK_AT, VERSION | 9 << 32), (GEOMETRY_AT, 0), (GEOMETRY_AT, 3)] {
            let page = CapturePage::create(order()).unwrap();
            let descriptor = page.memory().as_fd().try_clone_to_owned().unwrap();
            let memory = Memory::adopt(descriptor, CAPTURE_PAGE_BYTES).unwrap();
            memory.store_u64(at, word, Relaxed).unwrap();
            assert!(matches!(CapturePage::adopt(memory), Err(Error::Layout(_))), "{at}: {word}");
        }
    }

    /// Both load_ends of one page, each with a mapping of its own.
    fn load_ends() -> (LoadPage, LoadPage) {
        let ours = LoadPage::create().unwrap();
        let descriptor = ours.memory().as_fd().try_clone_to_owned().unwrap();
        let theirs = LoadPage::adopt(Memory::adopt(descriptor, LOAD_PAGE_BYTES).unwrap()).unwrap();
        (ours, theirs)
    }

    #[test]
    fn what_one_end_counts_the_other_sees() {
        let (watcher, reader) = load_ends();
        assert_eq!((watcher.done(), watcher.refusal()), (0, None));
        reader.count();
        reader.count();
        assert_eq!(watcher.done(), 2);
    }

    #[test]
    fn the_first_reason_stays_and_is_cut_to_what_fits() {
        let (watcher, reader) = load_ends();
        reader.refuse(&"é".repeat(LOAD_STATUS_TEXT_BYTES));
        reader.refuse("another");
        assert_eq!(watcher.refusal().unwrap(), "é".repeat(LOAD_STATUS_TEXT_BYTES / 2));
    }

    #[test]
    fn memory_that_is_not_a_load_page_is_refused() {
        let other = Memory::create("other", LOAD_PAGE_BYTES, Pages::Small).unwrap();
        assert!(matches!(LoadPage::adopt(other), Err(Error::Layout(_))));
        let newer = LoadPage::create().unwrap();
        newer.store(VERSION_AT, LOAD_VERSION + 1);
        assert!(LoadPage::adopt(newer.memory).unwrap_err().to_string().contains("upgrade the older"));
    }
}
