//! Creates keys from the words of a field. Only this and `runs` write to the server's data.

use std::ops::Range;

use remora_fabric::View;
use remora_redis::rdb::{Usage, reference::Word};

use super::runs::{RunError, Runs};
use crate::api::{Context, Key, OwnedStr, warm};
use crate::fast::Offer;

/// Why a word can't be executed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StringError {
    #[error("the server has no database {0}, but the snapshot has keys in it: set databases to more than that")]
    Database(u32),
    #[error("a string begins while {missing} bytes of the one before it are missing")]
    Unfinished { missing: u64 },
    #[error("a piece has {given} bytes, the string lacks only {wanted}")]
    TooMany { given: u64, wanted: u64 },
    #[error("a piece comes before its string")]
    NoString,
    #[error("the server refused to create a string of {0} bytes")]
    Refused(u64),
    #[error("the field has a second greeting")]
    Greeting,
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("the snapshot refers to memory outside what was handed over: {0}")]
    Memory(#[from] remora_fabric::memory::Error),
}

/// Creates strings from memory.
pub(super) struct Strings {
    memory: View,
    open: Option<Open>,
    used: Used,
    heap: Heap,
    /// The same for runs: jemalloc puts small objects elsewhere, which must not count for long strings.
    heap_for_runs: Heap,
    runs: Runs,
    /// Whether the server takes a string as it is, without copying it again.
    takes_strings: bool,
    keys: u64,
    bytes: u64,
}

/// Bytes of the memory that were read approximately in sequence. They count as resident memory of this process until
/// they are released.
#[derive(Default)]
struct Used(Range<u64>);

/// A string that is not complete yet.
struct Open {
    name: OwnedStr,
    database: u32,
    length: u64,
    filled: u64,
    expires_ms: Option<u64>,
    usage: Option<Usage>,
}

impl Strings {
    pub(super) fn new(memory: View, fast: Option<Offer>) -> Strings {
        Strings {
            memory,
            open: None,
            used: Used::default(),
            heap: Heap::default(),
            heap_for_runs: Heap::default(),
            runs: Runs::new(fast),
            takes_strings: true,
            keys: 0,
            bytes: 0,
        }
    }

    /// Keys and bytes since the last call.
    pub(super) fn take_counts(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.keys), std::mem::take(&mut self.bytes))
    }

    pub(super) fn execute(&mut self, context: &Context<'_>, word: &Word<'_>) -> Result<(), StringError> {
        match *word {
            Word::Hello { .. } => Err(StringError::Greeting),
            Word::Text { database, key, length, expires_ms, usage } => {
                if let Some(open) = &self.open {
                    return Err(StringError::Unfinished { missing: open.length - open.filled });
                }
                let name = OwnedStr::new(context, key);
                self.open = Some(Open { name, database, length, filled: 0, expires_ms, usage });
                Ok(())
            }
            Word::Piece { offset, length } => self.piece(context, offset, u64::from(length)),
            Word::Verify => Ok(self.runs.verify(context)?),
            Word::Run { database, offset, length } => {
                if let Some(open) = &self.open {
                    return Err(StringError::Unfinished { missing: open.length - open.filled });
                }
                self.used.next(&self.memory, offset, u64::from(length));
                let memory = u64::from(length) * HEAP_BYTES_PER_RUN.0 / HEAP_BYTES_PER_RUN.1;
                self.heap_for_runs.prepare(memory, |bytes| warm(context, bytes));
                let (keys, bytes) = self.runs.add(context, &self.memory, database, offset, length)?;
                if let Some(address) = self.runs.made_at() {
                    self.heap_for_runs.note(memory, address, memory);
                }
                self.keys += keys;
                self.bytes += bytes;
                Ok(())
            }
        }
    }

    fn piece(&mut self, context: &Context<'_>, offset: u64, length: u64) -> Result<(), StringError> {
        let open = self.open.as_mut().ok_or(StringError::NoString)?;
        let missing = open.length - open.filled;
        if length > missing {
            return Err(StringError::TooMany { given: length, wanted: missing });
        }
        self.used.next(&self.memory, offset, length);
        let place = offset..offset.saturating_add(length);
        // A string is allocated with its first piece.
        if open.filled == 0 {
            self.heap.prepare(open.length, |bytes| warm(context, bytes));
        }
        let address = if self.takes_strings && open.length == length {
            let (address, taken) = open.make(context, &self.memory, &place)?;
            self.takes_strings = taken;
            address
        } else {
            open.append(context, &self.memory, &place)?
        };
        self.heap.note(open.length, address, length);
        self.bytes += length;
        if open.filled == open.length {
            self.keys += 1;
            self.open = None;
        }
        Ok(())
    }
}

impl Used {
    /// These bytes will be read next. Long pieces are mapped at once; bytes that were read are released once that is
    /// worth a system call.
    fn next(&mut self, memory: &View, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        // Between two strings is the beginning of a record.
        let follows = self.0.end <= offset && offset - self.0.end <= GAP_BYTES;
        if !follows || self.0.end - self.0.start >= LET_GO_BYTES {
            memory.forget(self.0.clone());
            self.0 = offset..offset;
        }
        self.0.end = end;
        if length >= POPULATE_BYTES {
            memory.populate(offset..end);
        }
    }
}

/// A piece of at least this many bytes is mapped by one call instead of a fault for every few pages.
const POPULATE_BYTES: u64 = 128 << 10;

/// Strings at most this far apart count as one sequence. Releasing each by itself would cost a system call and a fault
/// for every page.
const GAP_BYTES: u64 = 64 << 10;

/// This many bytes in a sequence are released together: our mapping stays about as small.
const LET_GO_BYTES: u64 = 1 << 20;

/// Memory for the server's allocator that is requested from the system before it is needed.
#[derive(Default)]
struct Heap {
    /// The addresses that were populated.
    ready: Range<usize>,
    /// Bytes of strings created since then, and how many of them are at these addresses.
    made: u64,
    hit: u64,
    /// How many times in a row the server's allocator used other memory.
    misses: u32,
}

impl Heap {
    /// Announces a string of this many bytes. `warm` populates that many bytes and returns where, if the system can.
    fn prepare(&mut self, string: u64, warm: impl FnOnce(usize) -> Option<Range<usize>>) {
        if string > STRING_BYTES_MAX || self.misses >= MISSES_MAX || self.made + string <= self.ready.len() as u64 {
            return;
        }
        self.misses = if self.hit * 2 < self.made { self.misses + 1 } else { 0 };
        if self.misses >= MISSES_MAX {
            return;
        }
        match warm((string + HEAD_BYTES).max(HEAP_BYTES) as usize) {
            Some(ready) => *self = Heap { ready, misses: self.misses, ..Heap::default() },
            None => self.misses = MISSES_MAX,
        }
    }

    /// That many bytes of such a string are at `address`. Nothing was populated for longer strings, so they prove
    /// nothing.
    fn note(&mut self, string: u64, address: usize, bytes: u64) {
        if string > STRING_BYTES_MAX {
            return;
        }
        self.made += bytes;
        if self.ready.contains(&address) {
            self.hit += bytes;
        }
    }
}

/// Bytes populated at a time: many pages for one call, and little is lost if it was in vain. Not more, since jemalloc
/// places small objects into free memory only if that is at most 64 times as large as the extents of 16 KiB and more in
/// which it keeps them.
const HEAP_BYTES: u64 = 1 << 20;

/// Memory that a server needs for the records of a run, as a share of their bytes: it has heads for objects, entries of
/// tables and the allocator's own. An estimate that is too high costs little: pages that are there already are only
/// looked at.
const HEAP_BYTES_PER_RUN: (u64, u64) = (3, 2);

/// Longest string for which memory is populated: jemalloc returns longer ones to the system at once (8 MiB, rounded up
/// from 7).
const STRING_BYTES_MAX: u64 = (7 << 20) - HEAD_BYTES;

/// Maximum size of what servers put before and after the bytes of a string.
const HEAD_BYTES: u64 = 64;

/// If less than half of the created bytes were in populated memory this many times in a row, the allocator is assumed
/// to work differently.
const MISSES_MAX: u32 = 4;

impl Open {
    /// Creates a string whose bytes are all present. Returns their address, and whether the server took the string as
    /// it was.
    fn make(&mut self, context: &Context<'_>, memory: &View, place: &Range<u64>) -> Result<(usize, bool), StringError> {
        let refused = || StringError::Refused(self.length);
        let value = OwnedStr::of_memory(context, memory, place)?;
        let mut key = self.key(context)?;
        if !key.set_string(value.borrow()) {
            return Err(refused());
        }
        let made = value.borrow().as_bytes().as_ptr();
        let taken = key.string().ok_or_else(refused)?.as_ptr() == made;
        self.filled = self.length;
        self.qualify(&mut key);
        Ok((made.addr(), taken))
    }

    /// Copies the next bytes into the key, and returns their address.
    fn append(&mut self, context: &Context<'_>, memory: &View, place: &Range<u64>) -> Result<usize, StringError> {
        let refused = || StringError::Refused(self.length);
        let mut key = self.key(context)?;
        let whole = usize::try_from(self.length).map_err(|_| refused())?;
        // Looked up again for every piece: the server may have moved the bytes while it did other work.
        let bytes = key.string_to_fill(whole).ok_or_else(refused)?;
        let length = place.end - place.start;
        let range = self.filled as usize..(self.filled + length) as usize;
        let into = bytes.get_mut(range).ok_or_else(refused)?;
        memory.read(place.start, into)?;
        let address = into.as_ptr().addr();
        self.filled += length;
        if self.filled == self.length {
            self.qualify(&mut key);
        }
        Ok(address)
    }

    /// Opens the key in its database.
    fn key<'c>(&self, context: &'c Context<'_>) -> Result<Key<'c>, StringError> {
        if !context.select(self.database) {
            return Err(StringError::Database(self.database));
        }
        context.open_to_write(self.name.borrow()).ok_or(StringError::Refused(self.length))
    }

    /// Sets expiry and age.
    fn qualify(&self, key: &mut Key<'_>) {
        if let Some(at) = self.expires_ms {
            key.expire_at(at);
        }
        match self.usage {
            None => {}
            Some(Usage::Idle(seconds)) => key.set_idle_time(seconds.saturating_mul(1000)),
            Some(Usage::Frequency(count)) => key.set_frequency(count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates strings at the addresses that `place` chooses in the populated block; returns how often a block was
    /// requested.
    fn make(heap: &mut Heap, strings: usize, bytes: u64, place: impl Fn(&Range<usize>) -> usize) -> usize {
        let mut asked = 0;
        for _ in 0..strings {
            heap.prepare(bytes, |block| {
                asked += 1;
                Some(1 << 30..(1 << 30) + block)
            });
            heap.note(bytes, place(&heap.ready), bytes);
        }
        asked
    }

    #[test]
    fn a_block_is_made_ready_whenever_the_last_one_is_used_up() {
        let mut heap = Heap::default();
        assert_eq!(make(&mut heap, 4096, 1024, |ready| ready.start), 4);
        assert_eq!(make(&mut heap, 3, 3 << 20, |ready| ready.start), 3, "one for each that is larger");
    }

    #[test]
    fn an_allocator_that_takes_other_memory_is_left_alone_and_one_that_does_so_once_is_not() {
        let mut heap = Heap::default();
        make(&mut heap, 2, 1 << 20, |_| 7);
        make(&mut heap, 2, 1 << 20, |ready| ready.start);
        assert_eq!(heap.misses, 0);
        let asked = make(&mut heap, 100, 1 << 20, |_| 7);
        assert_eq!(asked, MISSES_MAX as usize);
    }

    #[test]
    fn strings_that_nothing_is_made_ready_for_say_nothing_about_the_allocator() {
        let mut heap = Heap::default();
        for _ in 0..20 {
            assert_eq!(make(&mut heap, 1, STRING_BYTES_MAX + 1, |_| 7), 0);
            make(&mut heap, 1, 1 << 20, |ready| ready.start);
        }
        assert_eq!(heap.misses, 0);
    }

    #[test]
    fn a_system_that_cannot_is_asked_once() {
        let mut heap = Heap::default();
        heap.prepare(1024, |_| None);
        heap.prepare(1024, |_| panic!("asked again"));
    }
}
