//! The publishing protocol: the order in which the words of a table are stored and loaded.
//!
//! Generic over the memory of the words ([`Cells`]), so that loom tries every interleaving of the very code that runs
//! on fabric memory. Not here: the meaning of the words (`layout`), and readers on another host, which get the same
//! words by reads of a transport and decode them with the same functions.
//!
//! ```text
//!   writer of slot i                                     reader of slot i
//!   retired := i - slots + 1        (if i reuses)        line: published > i ?          acquire, or a completed read
//!   entry(i) := "being written"                          copy the bytes of slot(i)
//!   ── fence, release ──                                 ── fence, acquire; or: those reads have completed ──
//!   bytes into slot(i)                                   entry(i) again, still "slot i" ?
//!   entry(i) := number, length, CRC                      CRC of the copy right?
//!   published := i + 1              release              then, and only then, the bytes are slot i
//! ```
//!
//! Because of the two fences, a reader that copied a byte of the next lap also sees the mark that was stored before it.
//! The CRC is the second line of defence: it would detect a transport that breaks this order.

use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Acquire, Release};

use remora_fabric::{Memory, View};

use crate::{
    error::Error,
    layout::{Entry, EntryWords, Geometry, LINE_OFFSET, LINE_WORDS, Line, SEALED_ENTRY_WORDS, State, entry_words},
    seal::Seal,
};

/// Words that other processes read while we write them.
pub(crate) trait Cells {
    fn load(&self, offset: u64, order: Ordering) -> Result<u64, Error>;
    fn fence(&self, order: Ordering);
}

/// Words that this process writes.
pub(crate) trait CellsMut: Cells {
    fn store(&self, offset: u64, value: u64, order: Ordering) -> Result<(), Error>;
}

/// The writer's side: the only one that stores into superblock and directory.
pub(crate) struct Publisher<C> {
    cells: C,
    geometry: Geometry,
    /// That of a sealed table.
    seal: Option<Arc<Seal>>,
    line: Line,
}

impl<C: CellsMut> Publisher<C> {
    /// Starts with an empty, open table, before any reader has access. The directory may hold anything: readers load an
    /// entry only for a slot below `published`, and `begin` and `complete` have stored it by then.
    pub(crate) fn new(cells: C, geometry: Geometry, seal: Option<Arc<Seal>>) -> Result<Publisher<C>, Error> {
        let publisher = Publisher { cells, geometry, seal, line: Line::NEW };
        publisher.store_line()?;
        Ok(publisher)
    }

    /// Continues where another writer of the same plain table has stopped for good.
    pub(crate) fn resume(cells: C, geometry: Geometry, line: Line) -> Publisher<C> {
        Publisher { cells, geometry, seal: None, line }
    }

    pub(crate) fn line(&self) -> &Line {
        &self.line
    }

    /// After this call the bytes of slot `number` may be stored. The slot that was there before must be retired.
    pub(crate) fn begin(&self, number: u64) -> Result<(), Error> {
        debug_assert!(number < self.line.retired + u64::from(self.geometry.slots));
        self.store_entry(Entry::writing(number))?;
        // Pairs with the reader's fence in `load_entry_again`: a reader that copied any byte stored after this sees the
        // entry above.
        self.cells.fence(Release);
        Ok(())
    }

    /// Stores the entry that readers will find. Call it before `publish`, after the bytes that it describes.
    pub(crate) fn complete(&self, entry: Entry) -> Result<(), Error> {
        self.store_entry(entry)
    }

    /// Everything below this table position may be read from now on: its bytes and entries are stored.
    pub(crate) fn publish(&mut self, published: u64) -> Result<(), Error> {
        debug_assert!(published >= self.line.published);
        self.line.published = published;
        self.store_line()
    }

    /// Slots below this number may be overwritten from now on.
    pub(crate) fn retire(&mut self, below: u64) -> Result<(), Error> {
        debug_assert!(below >= self.line.retired);
        self.line.retired = below;
        self.store_line()
    }

    /// Everything is published, and nothing follows.
    pub(crate) fn seal(&mut self) -> Result<(), Error> {
        self.line.end = Some(self.line.published);
        self.line.state = State::Sealed;
        self.store_line()
    }

    pub(crate) fn abort(&mut self) -> Result<(), Error> {
        self.line.state = State::Aborted;
        self.store_line()
    }

    fn store_line(&self) -> Result<(), Error> {
        // Each word with release: a reader that loads any of them also sees what was stored before it.
        for (i, word) in (0..).zip(self.line.to_words(self.seal.as_deref())) {
            self.cells.store(LINE_OFFSET + i * 8, word, Release)?;
        }
        Ok(())
    }

    fn store_entry(&self, entry: Entry) -> Result<(), Error> {
        let at = self.geometry.entry_offset(entry.number);
        let words = entry.to_words(self.seal.as_deref());
        for (i, word) in (0..).zip(words.iter().copied().take(entry_words(self.seal.as_deref()))) {
            self.cells.store(at + i * 8, word, Release)?;
        }
        Ok(())
    }
}

/// The progress line. `None`: caught in the middle of a change; load it again.
pub(crate) fn load_line(cells: &impl Cells, seal: Option<&Seal>) -> Result<Option<Line>, Error> {
    let mut words = [0; LINE_WORDS];
    for (i, word) in (0..).zip(words.iter_mut()) {
        *word = cells.load(LINE_OFFSET + i * 8, Acquire)?;
    }
    Ok(Line::from_words(words, seal))
}

/// The entry at the place of slot `number`, of any lap. `None`: caught in the middle of a change; load it again.
pub(crate) fn load_entry(
    cells: &impl Cells,
    geometry: &Geometry,
    number: u64,
    seal: Option<&Seal>,
) -> Result<Option<Entry>, Error> {
    let at = geometry.entry_offset(number);
    let mut words: EntryWords = [0; SEALED_ENTRY_WORDS];
    for (i, word) in (0..).zip(words.iter_mut().take(entry_words(seal))) {
        *word = cells.load(at + i * 8, Acquire)?;
    }
    Ok(Entry::from_words(words, seal).filter(|entry| entry.belongs_to(number, geometry)))
}

/// The entry, loaded after everything that this thread has copied from the slot so far: if it still names the slot, the
/// copies are of that slot.
pub(crate) fn load_entry_again(
    cells: &impl Cells,
    geometry: &Geometry,
    number: u64,
    seal: Option<&Seal>,
) -> Result<Option<Entry>, Error> {
    // Pairs with the writer's fence in `begin`.
    cells.fence(Acquire);
    load_entry(cells, geometry, number, seal)
}

impl Cells for &View {
    fn load(&self, offset: u64, order: Ordering) -> Result<u64, Error> {
        Ok(View::load_u64(self, offset, order)?)
    }

    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }
}

impl Cells for std::sync::Arc<Memory> {
    fn load(&self, offset: u64, order: Ordering) -> Result<u64, Error> {
        Ok(View::load_u64(self, offset, order)?)
    }

    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }
}

impl CellsMut for std::sync::Arc<Memory> {
    fn store(&self, offset: u64, value: u64, order: Ordering) -> Result<(), Error> {
        Ok(Memory::store_u64(self, offset, value, order)?)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    #![allow(clippy::unwrap_used)]
    //! Every interleaving of one writer and one reader, on the code above.
    use std::sync::atomic::Ordering::Relaxed;

    use loom::sync::{Arc, atomic::AtomicU64};

    use super::*;
    use crate::layout::{SEALED_ENTRY_WORDS, SUPERBLOCK_BYTES};
    use crate::seal::{DIGEST_BYTES, SlotSeal, TAG_BYTES};
    use crate::{Algorithm, Identity, Kind, Origin, SealKey};

    /// A table of two slots whose content is two words each: only the words that the protocol uses exist.
    #[derive(Clone)]
    struct Small(Arc<Vec<AtomicU64>>);

    const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 2 };
    const LINE_AT: usize = 0;
    const ENTRIES_AT: usize = LINE_AT + LINE_WORDS;
    const DATA_AT: usize = ENTRIES_AT + 2 * SEALED_ENTRY_WORDS;
    const DATA_WORDS: usize = 2;

    impl Small {
        fn new() -> Small {
            Small(Arc::new((0..DATA_AT + 2 * DATA_WORDS).map(|_| AtomicU64::new(0)).collect()))
        }

        fn cell(&self, offset: u64) -> &AtomicU64 {
            let at = if offset < SUPERBLOCK_BYTES {
                LINE_AT + (offset - LINE_OFFSET) as usize / 8
            } else {
                let [entry, byte] = [(offset - SUPERBLOCK_BYTES) / 64, (offset - SUPERBLOCK_BYTES) % 64];
                ENTRIES_AT + entry as usize * SEALED_ENTRY_WORDS + byte as usize / 8
            };
            &self.0[at]
        }

        fn data(&self, number: u64, word: usize) -> &AtomicU64 {
            &self.0[DATA_AT + (number % 2) as usize * DATA_WORDS + word]
        }
    }

    impl Cells for Small {
        fn load(&self, offset: u64, order: Ordering) -> Result<u64, Error> {
            Ok(self.cell(offset).load(order))
        }

        fn fence(&self, order: Ordering) {
            loom::sync::atomic::fence(order);
        }
    }

    impl CellsMut for Small {
        fn store(&self, offset: u64, value: u64, order: Ordering) -> Result<(), Error> {
            self.cell(offset).store(value, order);
            Ok(())
        }
    }

    fn content(number: u64, word: usize) -> u64 {
        100 * (number + 1) + word as u64
    }

    fn write_slot(publisher: &mut Publisher<Small>, number: u64) {
        if number >= 2 {
            publisher.retire(number - 1).unwrap();
        }
        publisher.begin(number).unwrap();
        for word in 0..DATA_WORDS {
            publisher.cells.data(number, word).store(content(number, word), Relaxed);
        }
        let seal = publisher.seal.as_ref().map_or_else(SlotSeal::default, |_| slot_seal(number));
        let entry = Entry { seal, ..Entry::plain(number, number * 16, 16, 0) };
        publisher.complete(entry).unwrap();
        publisher.publish((number + 1) * 4096).unwrap();
    }

    /// The tag and the digest of a slot, of a sealed table: any bytes, but those of no other slot.
    fn slot_seal(number: u64) -> SlotSeal {
        let byte = 1 + number as u8;
        SlotSeal { tag: [byte; TAG_BYTES], digest: [byte; DIGEST_BYTES] }
    }

    type TableSeal = Option<std::sync::Arc<Seal>>;

    fn sealed() -> TableSeal {
        let key = SealKey::new(Algorithm::Aes256Gcm, [7; SealKey::SECRET_BYTES]);
        let origin = Origin { generation: 1, history: [b'a'; 40].try_into().unwrap(), offset: 0 };
        Some(std::sync::Arc::new(Seal::new(&key, &Identity { kind: Kind::Snapshot, origin }).unwrap()))
    }

    fn copy(cells: &Small, number: u64) -> [u64; DATA_WORDS] {
        std::array::from_fn(|word| cells.data(number, word).load(Relaxed))
    }

    fn right(number: u64) -> [u64; DATA_WORDS] {
        std::array::from_fn(|word| content(number, word))
    }

    /// With this many preemptions, loom's search takes seconds; one race needs one or two.
    fn model(body: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(body);
    }

    #[test]
    fn what_is_below_published_is_there() {
        check_published(None);
    }

    #[test]
    fn what_is_below_published_is_there_in_a_sealed_table() {
        check_published(sealed());
    }

    fn check_published(seal: TableSeal) {
        model(move || {
            let cells = Small::new();
            let mut publisher = Publisher::new(cells.clone(), GEOMETRY, seal.clone()).unwrap();
            let writer = loom::thread::spawn(move || write_slot(&mut publisher, 0));
            if let Some(line) = load_line(&cells, seal.as_deref()).unwrap() {
                if line.published > 0 {
                    assert_eq!(line.published, 4096);
                    assert_eq!(copy(&cells, 0), right(0));
                    let entry = load_entry(&cells, &GEOMETRY, 0, seal.as_deref()).unwrap().unwrap();
                    assert_eq!((entry.number, entry.writing, entry.length), (0, false, 16));
                    assert!(seal.is_none() || entry.seal == slot_seal(0));
                }
            }
            writer.join().unwrap();
        });
    }

    #[test]
    fn a_slot_overwritten_while_copied_is_never_accepted() {
        check_overwritten(None);
    }

    #[test]
    fn a_slot_of_a_sealed_table_overwritten_while_copied_is_never_accepted() {
        check_overwritten(sealed());
    }

    fn check_overwritten(seal: TableSeal) {
        model(move || {
            let cells = Small::new();
            let mut publisher = Publisher::new(cells.clone(), GEOMETRY, seal.clone()).unwrap();
            write_slot(&mut publisher, 0);
            write_slot(&mut publisher, 1);
            let writer = loom::thread::spawn(move || write_slot(&mut publisher, 2));
            let copied = copy(&cells, 0);
            if let Some(entry) = load_entry_again(&cells, &GEOMETRY, 0, seal.as_deref()).unwrap() {
                if entry.number == 0 && !entry.writing {
                    assert_eq!(copied, right(0));
                    assert!(seal.is_none() || entry.seal == slot_seal(0));
                }
            }
            writer.join().unwrap();
        });
    }

    #[test]
    fn a_line_caught_in_the_middle_of_a_change_is_seen_as_such() {
        check_line(None);
    }

    #[test]
    fn a_line_of_a_sealed_table_caught_in_the_middle_of_a_change_is_seen_as_such() {
        check_line(sealed());
    }

    fn check_line(seal: TableSeal) {
        model(move || {
            let cells = Small::new();
            let mut publisher = Publisher::new(cells.clone(), GEOMETRY, seal.clone()).unwrap();
            let writer = loom::thread::spawn(move || {
                write_slot(&mut publisher, 0);
                publisher.seal().unwrap();
            });
            if let Some(line) = load_line(&cells, seal.as_deref()).unwrap() {
                assert!(line.published == 0 || line.published == 4096);
                assert_eq!(line.state == State::Sealed, line.end == Some(4096));
            }
            writer.join().unwrap();
        });
    }

    /// An entry caught in the middle of a change is not taken for one of either slot: its words are stored one by one.
    #[test]
    fn an_entry_of_a_sealed_table_caught_in_the_middle_of_a_change_is_seen_as_such() {
        let seal = sealed();
        model(move || {
            let cells = Small::new();
            let mut publisher = Publisher::new(cells.clone(), GEOMETRY, seal.clone()).unwrap();
            write_slot(&mut publisher, 0);
            let writer = loom::thread::spawn(move || write_slot(&mut publisher, 2));
            if let Some(entry) = load_entry(&cells, &GEOMETRY, 0, seal.as_deref()).unwrap() {
                assert!(entry.writing || entry.seal == slot_seal(entry.number));
                assert!([0, 2].contains(&entry.number));
            }
            writer.join().unwrap();
        });
    }

    /// The canary: without the fence and the second load the same race is lost, so the tests above are able to fail.
    #[test]
    #[should_panic(expected = "torn")]
    fn an_entry_checked_before_the_copy_proves_nothing() {
        model(|| {
            let cells = Small::new();
            let mut publisher = Publisher::new(cells.clone(), GEOMETRY, None).unwrap();
            write_slot(&mut publisher, 0);
            write_slot(&mut publisher, 1);
            let writer = loom::thread::spawn(move || write_slot(&mut publisher, 2));
            let entry = load_entry(&cells, &GEOMETRY, 0, None).unwrap();
            let copied = copy(&cells, 0);
            if entry.is_some_and(|entry| entry.number == 0 && !entry.writing) {
                assert_eq!(copied, right(0), "torn");
            }
            writer.join().unwrap();
        });
    }
}
