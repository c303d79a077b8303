//! The board: one page beside a snapshot's table whose writer is *another process*.
//!
//! Whoever wants the snapshot makes table and board and hands both over; the writer finds on the board what to write where, and
//! tells on it how far it is. Readers of the table never see it. Not here: how the page reaches the writer, and what it writes.
//!
//! ```text
//!    0  the order       magic, version, work, generation, geometry, least written once, before it is handed over
//!   64  the orderer     beat, slots not needed, cancel, permission        words with one writer: whoever wants the snapshot
//!  128  the writer      stage, beat, received, waits, keys, took,         words with one writer: the process that makes it
//!                       slots, offset, database, format, replid
//! 1024  a sentence      length, text: why it was declined, or failed
//! ```
//!
//! ```text
//!             ask             begin (permitted)        finish
//!   Armed ──────────▶ Asking ──────────────────▶ Begun ──────▶ Done
//!     │                  │                         │
//!     └──── decline ─────┴──▶ Declined             └── fail ──▶ Failed
//! ```
//!
//! What the writer declines is as if it had never been asked. What it has begun and not finished is lost, and it sees to it that nobody
//! takes the rest for the whole.
//!
//! Always true: each word has one writer. What belongs to a stage is stored before the stage is, with release, so that who has seen
//! the stage sees it whole. A beat that stands still for long means that the other end is gone.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use remora_fabric::{Memory, Pages};

use crate::error::Error;
use crate::layout::Geometry;
use crate::sentence::Sentence;

/// Bytes of a board.
pub const BOARD_BYTES: u64 = 4096;

/// What a writer is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Write the long strings into the table, and leave the rest to the server, which then writes everything else.
    Walk,
    /// Write nothing: only make cheaper what the server writes itself.
    Ease,
}

/// How far the writer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It has not begun.
    Armed,
    /// Replid and offset stand on the board, and it waits for the permission to begin.
    Asking,
    /// It has begun. For [`Work::Walk`] the table is laid out.
    Begun,
    /// It is done. The table is open: whoever ordered it writes the rest ([`crate::SnapshotWriter::resume`]).
    Done,
    /// It has done nothing, and the sentence says why: the server writes everything.
    Declined,
    /// It has begun and not finished; the sentence says why.
    Failed,
}

/// The order: what stands on the board before it is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// What is to be done.
    pub work: Work,
    /// The generation that the table will be.
    pub generation: u64,
    /// The table's shape.
    pub geometry: Geometry,
    /// For [`Work::Walk`]: strings of at least so many bytes are long.
    pub least_bytes: u64,
}

/// Which moment of a data set the snapshot is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The history.
    pub replid: [u8; 40],
    /// The last byte of the stream that the snapshot contains.
    pub offset: u64,
    /// The database that the stream writes to after it until it says otherwise.
    pub database: u32,
}

/// What the writer has told, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Bytes of the snapshot so far.
    pub received: u64,
    /// Slots that readers may read or have read.
    pub published_slots: u64,
    /// Slots below this number have been given up to make room.
    pub retired_slots: u64,
    /// How many times it found its ring full.
    pub waits: u64,
    /// Keys so far.
    pub keys: u64,
    /// Version of the format that it writes; 0 until it has begun.
    pub format: u64,
    /// Microseconds from beginning to end; 0 until then.
    pub took_micros: u64,
}

/// One board, as either end has it.
pub struct Board {
    memory: Arc<Memory>,
    order: Order,
}

impl Board {
    /// A fresh one with this order on it.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is no memory.
    pub fn create(order: Order) -> Result<Board, Error> {
        let memory = Memory::create("remora-board", BOARD_BYTES, Pages::Small)?;
        let work = match order.work {
            Work::Walk => WORK_WALK,
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
        Ok(Board { memory: Arc::new(memory), order })
    }

    /// The one that was handed over.
    ///
    /// # Errors
    /// [`Error::Layout`] if it is none, or of another version, or its order makes no sense.
    pub fn adopt(memory: Memory) -> Result<Board, Error> {
        let load = |at| memory.load_u64(at, Acquire);
        if memory.length() < BOARD_BYTES || load(MAGIC_AT)? != MAGIC {
            return Err(Error::Layout("what was handed over as a board is none".into()));
        }
        let (version, work) = halves(load(WORK_AT)?);
        if u64::from(version) != VERSION {
            let text =
                format!("the board is of version {version}, this writer knows {VERSION}: upgrade the older of the two");
            return Err(Error::Layout(text));
        }
        let work = match u64::from(work) {
            WORK_WALK => Work::Walk,
            WORK_EASE => Work::Ease,
            other => {
                return Err(Error::Layout(format!("the board asks for work {other}, which this writer does not know")));
            }
        };
        let (slot_size, slots) = halves(load(GEOMETRY_AT)?);
        let geometry = Geometry { slot_size, slots }.checked()?;
        let order = Order { work, generation: load(GENERATION_AT)?, geometry, least_bytes: load(LEAST_AT)? };
        Ok(Board { memory: Arc::new(memory), order })
    }

    /// The page, to be handed over.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// What is to be done.
    pub fn order(&self) -> Order {
        self.order
    }

    // --- The orderer's side ------------------------------------------------------------------------------------

    /// We are still here. Call it at least once a second.
    pub fn beat(&self) {
        self.store(BEAT_AT, self.load(BEAT_AT).wrapping_add(1));
    }

    /// Slots below this number are not needed any more.
    pub fn allow_retiring(&self, below: u64) {
        self.store(RETIRE_AT, below);
    }

    /// The snapshot is not wanted any more: the writer shall give up.
    pub fn cancel(&self) {
        self.store(CANCEL_AT, 1);
    }

    /// The writer that asks may begin. To be given only when it is certain that nobody else relies on what that process saves.
    pub fn permit(&self) {
        self.store(PERMIT_AT, 1);
    }

    /// How far the writer is.
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

    /// The writer's beat: a number that grows while it lives.
    pub fn writer_beat(&self) -> u64 {
        self.load(WRITER_BEAT_AT)
    }

    /// Where in which history the snapshot is; `None` before the writer has asked.
    pub fn origin(&self) -> Option<Origin> {
        let mut replid = [0; 40];
        if self.stage() == Stage::Armed || self.memory.read(REPLID_AT, &mut replid).is_err() || replid == [0; 40] {
            return None;
        }
        Some(Origin { replid, offset: self.load(OFFSET_AT), database: self.load(DATABASE_AT) as u32 })
    }

    /// What the writer has told so far.
    pub fn told(&self) -> Told {
        Told {
            received: self.load(RECEIVED_AT),
            published_slots: self.load(PUBLISHED_AT),
            retired_slots: self.load(RETIRED_AT),
            waits: self.load(WAITS_AT),
            keys: self.load(KEYS_AT),
            format: self.load(FORMAT_AT),
            took_micros: self.load(TOOK_AT),
        }
    }

    /// Why it was declined, or failed.
    pub fn sentence(&self) -> String {
        SENTENCE.read(&self.memory).unwrap_or_else(|| "it did not say why".into())
    }

    // --- The writer's side --------------------------------------------------------------------------------------

    /// The orderer's beat: a number that grows while it lives.
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

    /// This is what the snapshot would be of: may it begin?
    ///
    /// # Errors
    /// [`Error::Misuse`] if it was asked already.
    pub fn ask(&self, origin: &Origin) -> Result<(), Error> {
        if self.stage() != Stage::Armed {
            return Err(Error::Misuse("a board is asked once"));
        }
        self.memory.write(REPLID_AT, &origin.replid)?;
        self.store(OFFSET_AT, origin.offset);
        self.store(DATABASE_AT, u64::from(origin.database));
        self.store(STAGE_AT, STAGE_ASKING);
        Ok(())
    }

    /// Whether it may begin.
    pub fn is_permitted(&self) -> bool {
        self.load(PERMIT_AT) != 0
    }

    /// It begins.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it has not asked, or has begun already.
    pub fn begin(&self) -> Result<(), Error> {
        if self.stage() != Stage::Asking {
            return Err(Error::Misuse("a board is begun once, after it was asked"));
        }
        self.store(STAGE_AT, STAGE_BEGUN);
        Ok(())
    }

    /// It does nothing, and why. What is longer than the board has room for is cut.
    pub fn decline(&self, sentence: &str) {
        SENTENCE.write(&self.memory, sentence);
        self.store(STAGE_AT, STAGE_DECLINED);
    }

    /// How far it is; also the writer's beat.
    pub fn tell(&self, told: &Told) {
        let words = [
            (RECEIVED_AT, told.received),
            (PUBLISHED_AT, told.published_slots),
            (RETIRED_AT, told.retired_slots),
            (WAITS_AT, told.waits),
            (KEYS_AT, told.keys),
            (FORMAT_AT, told.format),
            (TOOK_AT, told.took_micros),
        ];
        for (at, word) in words {
            self.store(at, word);
        }
        self.store(WRITER_BEAT_AT, self.load(WRITER_BEAT_AT).wrapping_add(1));
    }

    /// It is done.
    pub fn finish(&self) {
        self.store(STAGE_AT, STAGE_DONE);
    }

    /// It has failed, and why. What is longer than the board has room for is cut.
    pub fn fail(&self, sentence: &str) {
        SENTENCE.write(&self.memory, sentence);
        self.store(STAGE_AT, STAGE_FAILED);
    }

    fn load(&self, at: u64) -> u64 {
        // Inside the page, at a multiple of eight: checked when it was made, so that this can't fail.
        self.memory.load_u64(at, Acquire).unwrap_or(0)
    }

    fn store(&self, at: u64, word: u64) {
        // As above.
        let stored = self.memory.store_u64(at, word, Release);
        debug_assert!(stored.is_ok(), "a word of the board");
    }
}

fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// `REMORABD`, as its bytes lie in memory.
const MAGIC: u64 = u64::from_le_bytes(*b"REMORABD");
const VERSION: u64 = 2;
const WORK_WALK: u64 = 1;
const WORK_EASE: u64 = 2;

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

const SENTENCE_AT: u64 = 1024;
/// Bytes of a sentence, at most: a long one of a server's within one of ours.
const SENTENCE_BYTES: u64 = 1024;
const SENTENCE: Sentence = Sentence { at: SENTENCE_AT, most: SENTENCE_BYTES as usize };

const STAGE_ARMED: u64 = 0;
const STAGE_BEGUN: u64 = 1;
const STAGE_DONE: u64 = 2;
const STAGE_FAILED: u64 = 3;
const STAGE_ASKING: u64 = 4;
const STAGE_DECLINED: u64 = 5;

const _: () = {
    assert!(REPLID_AT + 40 <= SENTENCE_AT, "the writer's words end before the sentence");
    assert!(SENTENCE_AT + 8 + SENTENCE_BYTES <= BOARD_BYTES, "the sentence fits the page");
};

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

    /// Both ends of one board, each with a mapping of its own.
    fn ends() -> (Board, Board) {
        let ours = Board::create(order()).unwrap();
        let descriptor = ours.memory().as_fd().try_clone_to_owned().unwrap();
        let theirs = Board::adopt(Memory::adopt(descriptor, BOARD_BYTES).unwrap()).unwrap();
        (ours, theirs)
    }

    #[test]
    fn the_writer_finds_the_order_and_its_words_come_back() {
        let (ours, theirs) = ends();
        assert_eq!(theirs.order(), order());
        assert_eq!((ours.stage(), ours.origin()), (Stage::Armed, None));
        let origin = Origin { replid: [b'a'; 40], offset: 123, database: 4 };
        assert!(theirs.begin().is_err(), "asked first");
        theirs.ask(&origin).unwrap();
        assert_eq!((ours.stage(), ours.origin(), theirs.is_permitted()), (Stage::Asking, Some(origin), false));
        ours.permit();
        assert!(theirs.is_permitted());
        theirs.begin().unwrap();
        assert_eq!(ours.stage(), Stage::Begun);
        let told =
            Told { received: 1, published_slots: 5, retired_slots: 6, waits: 2, keys: 3, format: 80, took_micros: 4 };
        let before = ours.writer_beat();
        theirs.tell(&told);
        assert_eq!(ours.told(), told);
        assert_ne!(ours.writer_beat(), before);
        theirs.finish();
        assert_eq!(ours.stage(), Stage::Done);
        assert!(theirs.begin().is_err() && theirs.ask(&origin).is_err(), "asked and begun once");
    }

    #[test]
    fn what_is_declined_says_why() {
        let (ours, theirs) = ends();
        theirs.decline("another replica waits too");
        assert_eq!((ours.stage(), ours.sentence().as_str()), (Stage::Declined, "another replica waits too"));
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
        assert_eq!((ours.stage(), ours.sentence().as_str()), (Stage::Failed, "the ring is full"));
        theirs.fail(&format!("x{}", "ü".repeat(2000)));
        let sentence = ours.sentence();
        assert!(sentence.len() <= SENTENCE_BYTES as usize && sentence.chars().skip(1).all(|letter| letter == 'ü'));
    }

    #[test]
    fn what_is_no_board_is_refused() {
        let blank = Memory::create("blank", BOARD_BYTES, Pages::Small).unwrap();
        assert!(matches!(Board::adopt(blank), Err(Error::Layout(_))));
        for (at, word) in [(WORK_AT, VERSION + 1), (WORK_AT, VERSION | 9 << 32), (GEOMETRY_AT, 0), (GEOMETRY_AT, 3)] {
            let board = Board::create(order()).unwrap();
            let descriptor = board.memory().as_fd().try_clone_to_owned().unwrap();
            let memory = Memory::adopt(descriptor, BOARD_BYTES).unwrap();
            memory.store_u64(at, word, Relaxed).unwrap();
            assert!(matches!(Board::adopt(memory), Err(Error::Layout(_))), "{at}: {word}");
        }
    }
}
