//! Strings: keys made of the words of a field. The only place where data of the server is written.

use std::ops::Range;

use remora_fabric::View;
use remora_redis::rdb::{Usage, reference::Word};

use crate::api::{Context, Key, OwnedStr, warm};

/// Why a word can't be obeyed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StringError {
    #[error("the server has no database {0}, which the snapshot has keys in: set databases to more than that")]
    Database(u32),
    #[error("a string was begun {missing} bytes before the former one was whole")]
    Unfinished { missing: u64 },
    #[error("{given} bytes came where {wanted} were missing")]
    TooMany { given: u64, wanted: u64 },
    #[error("bytes came before a string was begun")]
    NoString,
    #[error("the server let us make no string of {0} bytes")]
    Refused(u64),
    #[error("a second greeting")]
    Greeting,
    #[error("the snapshot refers to memory that is not there: {0}")]
    Memory(#[from] remora_fabric::memory::Error),
}

/// Makes strings of memory.
pub(super) struct Strings {
    memory: View,
    open: Option<Open>,
    used: Used,
    heap: Heap,
    /// The server takes a string as it is, without copying it once more.
    takes_strings: bool,
    keys: u64,
    bytes: u64,
}

/// Bytes of the memory that were read more or less in a row, and count as this process's until they are let go.
#[derive(Default)]
struct Used(Range<u64>);

/// A string that is not whole yet.
struct Open {
    name: OwnedStr,
    database: u32,
    length: u64,
    filled: u64,
    expires_ms: Option<u64>,
    usage: Option<Usage>,
}

impl Strings {
    pub(super) fn new(memory: View) -> Strings {
        let heap = Heap::default();
        Strings { memory, open: None, used: Used::default(), heap, takes_strings: true, keys: 0, bytes: 0 }
    }

    /// Keys and bytes since this was last asked.
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
    /// These will be read next. Long pieces are mapped at once, and what was read is let go once it is worth a system call.
    fn next(&mut self, memory: &View, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        // Between two strings lies the beginning of a record.
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

/// A piece of so many bytes is mapped by one call rather than by a fault for every few pages.
const POPULATE_BYTES: u64 = 128 << 10;

/// Strings that lie no further apart are in a row. To let go of each by itself would cost a system call and a fault for every page.
const GAP_BYTES: u64 = 64 << 10;

/// So many bytes in a row are let go together: what we have mapped stays about as small.
const LET_GO_BYTES: u64 = 1 << 20;

/// Memory of the server's that is had from the system before it is needed.
#[derive(Default)]
struct Heap {
    /// The addresses that were made ready.
    ready: Range<usize>,
    /// Bytes of strings made since then, and how many of them lie there.
    made: u64,
    hit: u64,
    /// How often in a row the server's allocator took other memory.
    misses: u32,
}

impl Heap {
    /// A string of so many bytes will be made now. `warm` makes that many ready and says where, if the system can.
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

    /// So many bytes of such a string lie there. Nothing was made ready for longer ones, so that they say nothing.
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

/// Bytes made ready at a time: many pages for one call, and nothing that matters if it was in vain. No more, since jemalloc takes small
/// things out of free memory only where that is at most 64 times as large as the 16 KiB and more in which it keeps them.
const HEAP_BYTES: u64 = 1 << 20;

/// Longest string for which memory is made ready: what is longer jemalloc gives back to the system at once (8 MiB, rounded up from 7).
const STRING_BYTES_MAX: u64 = (7 << 20) - HEAD_BYTES;

/// What servers put before and behind the bytes of a string, at most.
const HEAD_BYTES: u64 = 64;

/// When so often in a row less than half of what was made lay in what was made ready, the allocator is taken to work otherwise.
const MISSES_MAX: u32 = 4;

impl Open {
    /// Makes a string whose bytes are all there, and says where they lie, and whether the server took the string as it was.
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

    /// Puts the next bytes into the key, and says where.
    fn append(&mut self, context: &Context<'_>, memory: &View, place: &Range<u64>) -> Result<usize, StringError> {
        let refused = || StringError::Refused(self.length);
        let mut key = self.key(context)?;
        let whole = usize::try_from(self.length).map_err(|_| refused())?;
        // Found again for every piece: while the server was busy with other things it may have moved the bytes.
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

    /// Its key, in its database.
    fn key<'c>(&self, context: &'c Context<'_>) -> Result<Key<'c>, StringError> {
        if !context.select(self.database) {
            return Err(StringError::Database(self.database));
        }
        context.open_to_write(self.name.borrow()).ok_or(StringError::Refused(self.length))
    }

    /// Its expiry and its age.
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

    /// Makes so many strings, which lie where `place` says of the block that is ready; how often a block was asked for.
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
