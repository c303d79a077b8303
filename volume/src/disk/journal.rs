//! Journal: appends what changes a copy, and knows what of it is durable.
//!
//! A segment is a file of fixed length, whose space is taken when it is made. When a record does not fit any more, the
//! next segment begins, and the blocks of those before it are due for a checkpoint: one at a time.

use std::collections::BTreeSet;
use std::sync::Arc;

use remora_fabric::memory::crc::crc32c;

use super::{Failure, Files, Name};
use crate::layout::{self, ENTRY_BYTES, Entry, LINE_WORDS, Layout, Line};
use crate::rules::Standing;
use crate::shape::{BLOCK_BYTES, Shape};
use crate::wire::{MOST_BLOCKS, MOST_ENTRIES};

// The bytes of a store: a record is an event of a copy as the journal has it, and the superblock is what a recovery
// begins with.

// An event of a copy, as the journal has it.
//
// ```text
// 0       8       12        16       20      24      32        40         48         56       64     112   128
// │ magic │ check │ changes │ blocks │ flags │ store │ segment │ sequence │ previous │ synced │ line │ (0) │
// │ for each change: block 8, entry 16 │ (0) up to a multiple of 512 │ the blocks of entries that have bytes │
// ```
//
// The check is a CRC-32C of all that follows it in front of the blocks. The blocks have theirs in the entries, which
// the writer has computed: no byte is summed twice. `synced` is the last event that was known as durable when this one
// was appended: a record before it that is unreadable was not torn by a power cut.

/// Records begin at multiples of this: a sector, so that no record shares one.
pub(crate) const UNIT: usize = 512;

/// Bytes of the head, without its changes.
pub(crate) const HEAD_BYTES: usize = 128;

/// Bytes of a change.
pub(crate) const CHANGE_BYTES: usize = 8 + ENTRY_BYTES;

/// The longest head with its changes: the entries that are lent at once.
pub(crate) const MAX_HEAD_BYTES: usize = (HEAD_BYTES + MOST_ENTRIES * CHANGE_BYTES).next_multiple_of(UNIT);

/// The longest record: the changes of the most entries, and the most blocks of a message.
pub(crate) const MAX_RECORD_BYTES: usize = MAX_HEAD_BYTES + MOST_BLOCKS * BLOCK_BYTES;

const MAGIC: [u8; 8] = *b"REMORAJR";

/// Flag: writes may be missing since a power cut.
const CUT: u32 = 1;

/// A record without its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// The random number of the store. Bytes of another one are none of its records.
    pub(crate) store: u64,
    pub(crate) segment: u64,
    /// The number of the event.
    pub(crate) sequence: u64,
    /// The event before it.
    pub(crate) previous: u64,
    pub(crate) synced: u64,
    /// How the copy stands after it.
    pub(crate) standing: Standing,
    /// What it changed.
    pub(crate) changes: Vec<(u64, Entry)>,
}

impl Head {
    /// Bytes of the head with its changes.
    pub(crate) fn bytes(&self) -> usize {
        (HEAD_BYTES + self.changes.len() * CHANGE_BYTES).next_multiple_of(UNIT)
    }

    /// The number of its blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.changes.iter().filter(|(_, entry)| entry.has_bytes()).count()
    }

    /// Bytes of the record.
    pub(crate) fn record_bytes(&self) -> usize {
        self.bytes() + self.blocks() * BLOCK_BYTES
    }

    /// The bytes in front of the blocks.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.bytes());
        out.extend(MAGIC);
        out.extend([0; 4]);
        out.extend((self.changes.len() as u32).to_le_bytes());
        out.extend((self.blocks() as u32).to_le_bytes());
        out.extend(if self.standing.is_cut { CUT } else { 0 }.to_le_bytes());
        let numbers = [self.store, self.segment, self.sequence, self.previous, self.synced];
        let words = numbers.into_iter().chain(Line(self.standing).to_words());
        words.for_each(|word| out.extend(word.to_le_bytes()));
        out.resize(HEAD_BYTES, 0);
        for (block, entry) in &self.changes {
            let [version, sums] = entry.to_words();
            [*block, version, sums].iter().for_each(|word| out.extend(word.to_le_bytes()));
        }
        out.resize(self.bytes(), 0);
        let check = crc32c(&out[12..]);
        out[8..12].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// The bytes of the head with its changes, and of the record, as the beginning of a head says them. `None`: it is
    /// the beginning of no record.
    pub(crate) fn lengths(beginning: &[u8]) -> Option<(usize, usize)> {
        let beginning: &[u8; HEAD_BYTES] = beginning.first_chunk()?;
        let (changes, blocks) = (u32_at(beginning, 12) as usize, u32_at(beginning, 16) as usize);
        let is_head = beginning[..8] == MAGIC && changes <= MOST_ENTRIES && blocks <= changes && blocks <= MOST_BLOCKS;
        let head = (HEAD_BYTES + changes * CHANGE_BYTES).next_multiple_of(UNIT);
        is_head.then_some((head, head + blocks * BLOCK_BYTES))
    }

    /// Parses a head with its changes; `None` if it is damaged, or ends early.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Head> {
        let (length, _) = Head::lengths(bytes)?;
        let bytes = bytes.get(..length)?;
        let check = u32_at(bytes, 8);
        if check != crc32c(&bytes[12..]) {
            return None;
        }
        let [store, segment, sequence, previous, synced] = std::array::from_fn(|number| u64_at(bytes, 24 + number * 8));
        let words: [u64; LINE_WORDS] = std::array::from_fn(|number| u64_at(bytes, 64 + number * 8));
        let Line(standing) = Line::from_words(words)?;
        let standing = Standing { is_cut: u32_at(bytes, 20) & CUT != 0, ..standing };
        let changes = bytes[HEAD_BYTES..].chunks_exact(CHANGE_BYTES).take(u32_at(bytes, 12) as usize);
        let changes = changes.map(|change| {
            let [block, version, sums] = std::array::from_fn(|number| u64_at(change, number * 8));
            Some((block, Entry::from_words([version, sums])?))
        });
        let head =
            Head { store, segment, sequence, previous, synced, standing, changes: changes.collect::<Option<_>>()? };
        (head.blocks() == u32_at(bytes, 16) as usize).then_some(head)
    }

    /// The changes with their blocks, which follow the head; no bytes for a block that is zeros. `None`: a block has
    /// not its checksum, or is missing.
    pub(crate) fn with_blocks<'a>(&'a self, blocks: &'a [u8]) -> Option<Vec<(u64, Entry, &'a [u8])>> {
        let mut blocks = blocks.chunks_exact(BLOCK_BYTES);
        let changes = self.changes.iter().map(|&(block, entry)| {
            let bytes = if entry.has_bytes() { blocks.next()? } else { &[] };
            (!entry.has_bytes() || entry.is_of(bytes)).then_some((block, entry, bytes))
        });
        changes.collect()
    }
}

/// A field of bytes whose length was checked. Beyond the end it is 0.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().map_or(0, u32::from_le_bytes)
}

/// See [`u32_at`].
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().map_or(0, u64::from_le_bytes)
}

/// The body of properties: any bytes are a record, which is the same again as bytes, or not one.
#[cfg(test)]
pub(crate) fn fuzz(bytes: &[u8]) {
    let Some(head) = Head::parse(bytes) else { return };
    let again = head.encode();
    assert_eq!(Head::parse(&again).as_ref(), Some(&head), "a record that is written otherwise");
    assert!(head.record_bytes() <= MAX_RECORD_BYTES);
    let _ = head.with_blocks(&bytes[head.bytes()..]);
}

/// Bytes of a slot: a page, so that no write of one touches the other.
pub(crate) const SLOT_BYTES: usize = 4096;

/// Bytes of the fields.
const FIELDS: usize = 80 + layout::SUPERBLOCK_BYTES;

const SUPERBLOCK_MAGIC: [u8; 8] = *b"REMORAST";

/// Changes with every change of a store's files.
pub(crate) const LAYOUT_VERSION: u32 = 2;

/// Flag: the server has ended in peace, and everything is synced.
const CLEAN: u32 = 1;

/// Flag: a write or a sync has failed.
const LOST: u32 = 2;

/// What the recovery of a store begins with. Two slots are written in turn, so that one is always whole.
///
/// ```text
/// 0       8       12       16        24      32     40       48     64      68       72          80               132
/// │ magic │ check │ layout │ counter │ store │ base │ synced │ boot │ flags │ former │ scrubbed │ the volume's shape │
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Rises with every write. The higher one counts.
    pub(crate) counter: u64,
    /// A random number, which each record repeats.
    pub(crate) store: u64,
    pub(crate) shape: Shape,
    /// The first segment that is needed.
    pub(crate) base: u64,
    /// Events up to this one were synced.
    pub(crate) synced: u64,
    /// Of the system that ran when it was written.
    pub(crate) boot: [u8; 16],
    pub(crate) is_clean: bool,
    pub(crate) is_lost: bool,
    /// When all blocks were last read and checked, in seconds since 1970; 0: never.
    pub(crate) scrubbed: u64,
    /// The blocks before a growth that is not agreed, fewer than now; in the file, 0 is none.
    pub(crate) former: Option<u64>,
}

impl Superblock {
    /// Where it is written.
    pub(crate) fn at(&self) -> u64 {
        self.counter % 2 * SLOT_BYTES as u64
    }

    /// The bytes of its slot.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SLOT_BYTES);
        out.extend(SUPERBLOCK_MAGIC);
        out.extend([0; 4]);
        out.extend(LAYOUT_VERSION.to_le_bytes());
        [self.counter, self.store, self.base, self.synced].iter().for_each(|word| out.extend(word.to_le_bytes()));
        out.extend(self.boot);
        let flags = if self.is_clean { CLEAN } else { 0 } | if self.is_lost { LOST } else { 0 };
        out.extend(flags.to_le_bytes());
        // The most blocks have 33 bits, and these are fewer.
        let former = self.former.and_then(|former| u32::try_from(former).ok()).unwrap_or(0);
        out.extend(former.to_le_bytes());
        out.extend(self.scrubbed.to_le_bytes());
        out.extend(layout::Superblock(self.shape).to_bytes());
        let check = crc32c(&out[12..]);
        out[8..12].copy_from_slice(&check.to_le_bytes());
        out.resize(SLOT_BYTES, 0);
        out
    }

    /// The newest of the slots of these bytes; `None` if both are damaged, or of another release.
    pub(crate) fn newest(bytes: &[u8]) -> Option<Superblock> {
        bytes.chunks(SLOT_BYTES).filter_map(Superblock::parse).max_by_key(|superblock| superblock.counter)
    }

    /// The layout of these bytes, if they are whole and of another release.
    pub(crate) fn other_layout(bytes: &[u8]) -> Option<u32> {
        let fields = bytes.chunks(SLOT_BYTES).filter_map(fields);
        fields.map(|fields| u32_at(fields, 12)).find(|&layout| layout != LAYOUT_VERSION)
    }

    fn parse(slot: &[u8]) -> Option<Superblock> {
        let fields = fields(slot).filter(|fields| u32_at(fields, 12) == LAYOUT_VERSION)?;
        let [counter, store, base, synced] = std::array::from_fn(|number| u64_at(fields, 16 + number * 8));
        let flags = u32_at(fields, 64);
        let layout::Superblock(shape) = layout::Superblock::parse(fields.last_chunk()?).ok()?;
        let boot = *fields.get(48..)?.first_chunk()?;
        let (is_clean, is_lost) = (flags & CLEAN != 0, flags & LOST != 0);
        let former = Some(u64::from(u32_at(fields, 68))).filter(|former| *former > 0);
        let scrubbed = u64_at(fields, 72);
        Some(Superblock { counter, store, shape, base, synced, boot, is_clean, is_lost, scrubbed, former })
    }
}

/// The fields of a slot, if they have their checksum.
fn fields(slot: &[u8]) -> Option<&[u8]> {
    let fields = slot.get(..FIELDS)?;
    (fields[..8] == SUPERBLOCK_MAGIC && u32_at(fields, 8) == crc32c(&fields[12..])).then_some(fields)
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Journal<F> {
    files: Arc<F>,
    superblock: Superblock,
    /// Bytes of each segment.
    length: u64,
    /// The present segment, and where its next record begins.
    segment: u64,
    at: u64,
    /// The last event, and the last one that is durable.
    appended: u64,
    synced: u64,
    /// The number of the next event. A number is not used again, even if its event did not happen: a power cut can
    /// bring its record back, and the events after it must not take that for the one which they follow.
    next: u64,
    /// Segments with records that are not, and whether the name of one is not.
    unsynced: BTreeSet<Name>,
    has_new_names: bool,
    is_syncing: bool,
    /// Blocks that were changed since the last checkpoint was due.
    dirty: BTreeSet<u64>,
    due: Option<Due>,
}

/// A checkpoint that is due, or under way.
#[derive(Debug)]
pub(super) struct Due {
    /// The segment that is the first one needed after it.
    pub(super) base: u64,
    /// An event of that segment, the first one if not a later one: no block below was changed after it. When it is
    /// durable, so is everything before it.
    pub(super) event: u64,
    /// Blocks that were changed before; `None` once it is under way.
    pub(super) blocks: Option<BTreeSet<u64>>,
}

/// What must be synced so that everything up to an event is durable.
#[derive(Debug)]
pub(crate) struct Sync<F> {
    files: Arc<F>,
    names: BTreeSet<Name>,
    folder: bool,
    pub(crate) through: u64,
}

impl<F: Files> Sync<F> {
    /// Syncs. It takes its time: no lock should be held.
    ///
    /// # Errors
    /// It is not known what is durable.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        for &name in &self.names {
            self.files.sync(name).map_err(|error| Failure::of_sync(&*self.files, name, &error))?;
        }
        #[cfg(test)]
        if crate::rules::Mutant::NameNotSynced.is_active() {
            return Ok(());
        }
        if self.folder {
            let last = self.names.last().copied().unwrap_or(Name::Superblock);
            self.files.sync_folder().map_err(|error| Failure::of_sync(&*self.files, last, &error))?;
        }
        Ok(())
    }
}

impl<F: Files> Journal<F> {
    /// A journal whose next segment is this one, and begins now. Everything in it is durable, and what it says of the
    /// copy is found again.
    ///
    /// # Errors
    /// See [`Failure`].
    pub(super) fn begin(
        files: Arc<F>,
        superblock: Superblock,
        length: u64,
        segment: u64,
        (previous, sequence): (u64, u64),
        standing: Standing,
        dirty: BTreeSet<u64>,
    ) -> Result<Journal<F>, Failure> {
        let mut journal = Journal {
            files,
            superblock,
            length,
            segment,
            at: 0,
            appended: previous,
            synced: previous,
            next: sequence,
            unsynced: BTreeSet::new(),
            has_new_names: true,
            is_syncing: false,
            dirty: BTreeSet::new(),
            due: None,
        };
        let name = Name::Segment(segment);
        journal.files.create(name, length).map_err(|error| Failure::of(&*journal.files, name, &error))?;
        journal.put(segment, 0, standing, &[], &[])?;
        if !dirty.is_empty() {
            journal.due = Some(Due { base: segment, event: sequence, blocks: Some(dirty) });
        }
        if let Some(sync) = journal.begin_sync() {
            sync.run()?;
            journal.synced(&sync);
        }
        Ok(journal)
    }

    /// Bytes of the segments of a copy of this layout.
    pub(crate) fn segment_bytes(layout: Layout) -> u64 {
        (layout.length() / SEGMENTS_OF_A_COPY).clamp(LEAST_SEGMENT, MOST_SEGMENT).next_multiple_of(4096)
    }

    /// The present segment.
    pub(super) fn segment(&self) -> u64 {
        self.segment
    }

    /// The last event that was appended.
    pub(crate) fn appended(&self) -> u64 {
        self.appended
    }

    /// The number that the next event will have if it happens at the first attempt.
    #[cfg(test)]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Appends an event: how the copy stands after it, what it changes, and the blocks of what is written.
    ///
    /// # Errors
    /// [`Failure::Full`]: it did not happen, unless the power fails before the next sync. [`Failure::Lost`]: the store
    /// is not to be believed any more.
    pub(crate) fn append(
        &mut self,
        standing: Standing,
        changes: &[(u64, Entry)],
        blocks: &[&[u8]],
    ) -> Result<u64, Failure> {
        self.put(self.segment, self.at, standing, changes, blocks)?;
        Ok(self.appended)
    }

    /// Writes a record there, or at the beginning of the next segment.
    fn put(
        &mut self,
        mut segment: u64,
        mut at: u64,
        standing: Standing,
        changes: &[(u64, Entry)],
        blocks: &[&[u8]],
    ) -> Result<(), Failure> {
        let (sequence, previous, synced, store) = (self.next, self.appended, self.synced, self.superblock.store);
        let mut head = Head { store, segment, sequence, previous, synced, standing, changes: changes.to_vec() };
        let bytes = head.record_bytes() as u64;
        let is_full = at + bytes > self.length;
        if is_full {
            (segment, at) = (segment + 1, 0);
            head.segment = segment;
            let name = Name::Segment(segment);
            if segment - self.superblock.base >= MOST_SEGMENTS || bytes > self.length {
                let why = format!("{MOST_SEGMENTS} segments wait for the checkpoint");
                return Err(Failure::Full { path: self.files.path(name), why });
            }
            self.files.create(name, self.length).map_err(|error| Failure::of(&*self.files, name, &error))?;
        }
        let name = Name::Segment(segment);
        let encoded = head.encode();
        let parts: Vec<&[u8]> = [encoded.as_slice()].into_iter().chain(blocks.iter().copied()).collect();
        if let Err(error) = self.files.write(name, at, &parts) {
            // A part that was written can be a whole record, whose end is zeros. It is gone for good before a later
            // event is durable, which may be in the next segment.
            self.unsynced.insert(name);
            self.next += 1;
            #[cfg(test)]
            if crate::rules::Mutant::NumberUsedAgain.is_active() {
                self.next -= 1;
            }
            self.files.clear(name, at).map_err(|error| Failure::of_sync(&*self.files, name, &error))?;
            return Err(Failure::of(&*self.files, name, &error));
        }
        if is_full {
            self.has_new_names = true;
            if self.due.is_none() {
                let blocks = Some(std::mem::take(&mut self.dirty));
                self.due = Some(Due { base: segment, event: sequence, blocks });
            }
        }
        (self.segment, self.at, self.appended, self.next) = (segment, at + bytes, sequence, sequence + 1);
        self.unsynced.insert(name);
        self.dirty.extend(changes.iter().map(|(block, _)| block));
        Ok(())
    }

    /// What must be synced; `None` if nothing, or as long as an earlier sync is under way.
    pub(crate) fn begin_sync(&mut self) -> Option<Sync<F>> {
        if self.is_syncing || self.synced == self.appended {
            return None;
        }
        self.is_syncing = true;
        Some(Sync {
            files: Arc::clone(&self.files),
            names: std::mem::take(&mut self.unsynced),
            folder: std::mem::take(&mut self.has_new_names),
            through: self.appended,
        })
    }

    /// It was synced.
    pub(crate) fn synced(&mut self, sync: &Sync<F>) {
        self.is_syncing = false;
        self.synced = sync.through;
    }

    /// Whether everything is durable, and only the superblock can say so: no later record does. If the last one is not
    /// readable later, it would be taken for one that was torn.
    pub(crate) fn is_unsaid(&self) -> bool {
        !self.is_syncing && self.synced == self.appended && self.superblock.synced < self.synced
    }

    // ---- for checkpoints ----

    pub(super) fn files(&self) -> &Arc<F> {
        &self.files
    }

    pub(super) fn shape_layout(&self) -> Layout {
        Layout::of(self.superblock.shape)
    }

    /// Whether everything up to this event is durable.
    pub(crate) fn is_synced(&self, event: u64) -> bool {
        self.synced >= event
    }

    /// Whether a block was changed after the checkpoint was due: it is in segments that stay.
    pub(super) fn is_dirty(&self, block: u64) -> bool {
        self.dirty.contains(&block)
    }

    /// Whether the extents have the last write of a block.
    pub(crate) fn is_moved(&self, block: u64) -> bool {
        let is_due = self.due.as_ref().is_some_and(|due| match &due.blocks {
            Some(blocks) => blocks.contains(&block),
            None => true, // it is being moved
        });
        !is_due && !self.dirty.contains(&block)
    }

    /// When all blocks were last read and checked, in seconds since 1970; 0: never.
    pub(crate) fn scrubbed(&self) -> u64 {
        self.superblock.scrubbed
    }

    pub(super) fn due(&mut self) -> Option<&mut Due> {
        self.due.as_mut()
    }

    /// The first segment that is needed.
    pub(super) fn base(&self) -> u64 {
        self.superblock.base
    }

    /// The checkpoint is complete, or was given up: then these blocks are still to be moved.
    pub(super) fn end_checkpoint(&mut self, left: BTreeSet<u64>) {
        let was_given_up = !left.is_empty();
        self.due = None;
        self.dirty.extend(left);
        if !was_given_up && self.segment > self.superblock.base {
            // Segments became full meanwhile.
            let blocks = Some(std::mem::take(&mut self.dirty));
            self.due = Some(Due { base: self.segment, event: self.appended, blocks });
        }
    }

    /// The blocks of the copy before a growth that is not agreed.
    pub(crate) fn former(&self) -> Option<u64> {
        self.superblock.former
    }

    /// The superblock as it is to be written next. Each one that was taken is written.
    pub(crate) fn next_superblock(&mut self, change: impl FnOnce(&mut Superblock)) -> Superblock {
        self.superblock.counter += 1;
        self.superblock.synced = self.superblock.synced.max(self.synced);
        change(&mut self.superblock);
        self.superblock
    }

    /// Says in the files that nothing in them is to be believed, so that no later process of this system does: what a
    /// sync has lost is still in the page cache, and looks whole. After a power cut the files are what is durable.
    pub(crate) fn lose(&mut self) {
        #[cfg(test)]
        if crate::rules::Mutant::LostIsBelieved.is_active() {
            return;
        }
        let superblock = self.next_superblock(|superblock| superblock.is_lost = true);
        let written = self.files.write(Name::Superblock, superblock.at(), &[&superblock.encode()]);
        // Without its superblock it is no store either.
        if let Err(error) = written
            && self.files.remove(Name::Superblock).is_err()
        {
            let path = self.files.path(Name::Superblock);
            tracing::error!(path, %error, "a store that has failed cannot be marked: remove its folder before a restart");
        }
    }
}

/// Writes a superblock, and makes it durable.
pub(crate) fn write_superblock(files: &impl Files, superblock: Superblock) -> Result<(), Failure> {
    let name = Name::Superblock;
    files
        .write(name, superblock.at(), &[&superblock.encode()])
        .map_err(|error| Failure::of_sync(files, name, &error))?;
    files.sync(name).map_err(|error| Failure::of_sync(files, name, &error))
}

/// A segment is this part of a copy, within the bounds below: the journal takes about as much again while a checkpoint
/// is under way.
const SEGMENTS_OF_A_COPY: u64 = 8;

/// Fits the longest record, and some more.
const LEAST_SEGMENT: u64 = 8 << 20;

/// Read again in a second after a restart.
const MOST_SEGMENT: u64 = 64 << 20;

/// Segments that wait for a checkpoint. With more, writes come faster than the device takes blocks: the copy refuses
/// them, and is taken back.
const MOST_SEGMENTS: u64 = 64;

const _: () = assert!(MAX_RECORD_BYTES as u64 <= LEAST_SEGMENT);

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::rules::State;
    use crate::rules::Version;
    use crate::shape::{Copies, VolumeId};

    fn heads() -> impl Strategy<Value = Head> {
        let version = || any::<u64>().prop_filter_map("the first bit is 0", |word| Version::from_word(word >> 1));
        let change =
            (any::<u64>(), version(), any::<u32>(), any::<bool>()).prop_map(|(block, version, crc, is_zero)| {
                let entry = if is_zero { Entry::zeros(version) } else { Entry::of(version, crc) };
                (block, if entry.is_written() { entry } else { Entry::NONE })
            });
        (any::<[u64; 5]>(), version(), any::<bool>(), vec(change, 0..20)).prop_map(
            |(numbers, applied, is_cut, changes)| {
                let [store, segment, sequence, previous, synced] = numbers;
                let standing = Standing { state: State::Whole, applied, is_cut, ..Standing::default() };
                Head { store, segment, sequence, previous, synced, standing, changes }
            },
        )
    }

    proptest! {
        #[test]
        fn a_head_comes_back_and_a_changed_bit_is_found(head in heads(), bit: prop::sample::Index) {
            let mut bytes = head.encode();
            prop_assert_eq!(bytes.len(), head.bytes());
            prop_assert_eq!(Head::lengths(&bytes), Some((head.bytes(), head.record_bytes())));
            fuzz(&bytes);
            prop_assert_eq!(Head::parse(&bytes), Some(head));
            let at = bit.index(bytes.len() * 8);
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert_eq!(Head::parse(&bytes), None);
        }

        #[test]
        fn any_bytes_are_a_head_or_none(bytes in vec(any::<u8>(), 0..700), numbers: [u8; 4]) {
            fuzz(&bytes);
            let mut bytes = [&MAGIC[..], &[0; 4], &numbers, &bytes].concat();
            let check = crc32c(&bytes[12..]);
            bytes[8..12].copy_from_slice(&check.to_le_bytes());
            fuzz(&bytes);
        }
    }

    #[test]
    fn the_newer_slot_counts_and_a_damaged_one_does_not() {
        let shape = Copies::new(3, 2).and_then(|copies| Shape::new(VolumeId([7; 16]), 9, copies));
        let Some(shape) = shape else { unreachable!("nine blocks") };
        let older = Superblock {
            counter: 6,
            store: 1,
            shape,
            base: 2,
            synced: 3,
            boot: [4; 16],
            is_clean: true,
            is_lost: false,
            scrubbed: 5,
            former: None,
        };
        let newer = Superblock { counter: 7, is_clean: false, is_lost: true, former: Some(1), ..older };
        let mut bytes = [older.encode(), newer.encode()].concat();
        assert_eq!((older.at(), newer.at()), (0, SLOT_BYTES as u64));
        assert_eq!(Superblock::newest(&bytes), Some(newer));
        bytes[SLOT_BYTES + 20] ^= 1;
        assert_eq!(Superblock::newest(&bytes), Some(older));
        bytes[100] ^= 1;
        assert_eq!(Superblock::newest(&bytes), None);
        assert_eq!((Superblock::newest(&[]), Superblock::other_layout(&bytes)), (None, None));
        // As an earlier release has written it.
        let mut bytes = newer.encode();
        bytes[12..16].copy_from_slice(&1_u32.to_le_bytes());
        let check = crc32c(&bytes[12..FIELDS]);
        bytes[8..12].copy_from_slice(&check.to_le_bytes());
        assert_eq!((Superblock::newest(&bytes), Superblock::other_layout(&bytes)), (None, Some(1)));
    }
}
