//! How a file system answers, and the bytes of writes and reads, wherever the transport has them.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use remora_memory::Memory;
use rustix::io::Errno;

use crate::abi::{DIRENT_BYTES, ENTRY_BYTES, Put, opened};

// How a file system answers.
//
// Each call comes with an [`Answer`] of the kind that it wants. A file system that is done when the call returns
// gives it there, in the caller's thread. One that is done later makes a [`Later`] of it and returns. It may give
// this one from any thread, in any order; giving it waits for no other answer. An answer that is dropped says
// `EIO`, so that no process waits for ever.

/// The answer to a request, to be given before the call returns.
pub struct Answer<'a, R> {
    owed: Owed<&'a mut dyn Replier>,
    reply: PhantomData<fn(R)>,
}

/// The answer to a request, to be given from any thread. See [`Answer`].
pub struct Later<R> {
    owed: Owed<Box<dyn LaterReplier>>,
    reply: PhantomData<fn(R)>,
}

/// What an answer must know of its request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// Its number.
    pub(crate) unique: u64,
    /// The thread that waits; 0 if it is not known here.
    pub(crate) process: u32,
    /// Bytes of the answer, at most, without its head.
    pub(crate) most: usize,
}

/// Takes the answer to one request. Called once.
pub(crate) trait Replier {
    /// An answer in pieces, or an error.
    fn reply(&mut self, unique: u64, answer: Result<&[&[u8]], Errno>);

    /// An answer that is written where the transport has memory for it: at most as many bytes.
    fn fill(&mut self, asked: Asked, fill: &mut dyn FnMut(&mut Sink<'_>));

    /// The answer is given later.
    fn later(&mut self) -> Box<dyn LaterReplier>;
}

/// Takes the answer to one request, from any thread.
pub(crate) trait LaterReplier: Send {
    /// An answer in pieces, or an error.
    fn reply(self: Box<Self>, unique: u64, answer: Result<&[&[u8]], Errno>);

    /// Where the bytes of a read can be put by others, in the memory that the caller provided.
    fn place(&self) -> Option<Range<u64>> {
        None
    }

    /// They are there: this number of bytes, from the place's start.
    fn landed(self: Box<Self>, unique: u64, _length: usize) {
        self.reply(unique, Err(Errno::IO));
    }
}

/// An answer that is owed, with the one who takes it. If it is dropped, it says `EIO`.
struct Owed<T: Takes> {
    /// `None`: it was given.
    to: Option<T>,
    asked: Asked,
}

/// Takes the answer to one request, and is of no use afterwards.
trait Takes {
    fn take(self, unique: u64, answer: Result<&[&[u8]], Errno>);
}

impl Takes for &mut dyn Replier {
    fn take(self, unique: u64, answer: Result<&[&[u8]], Errno>) {
        self.reply(unique, answer);
    }
}

impl Takes for Box<dyn LaterReplier> {
    fn take(self, unique: u64, answer: Result<&[&[u8]], Errno>) {
        self.reply(unique, answer);
    }
}

impl<T: Takes> Owed<T> {
    fn give(mut self, result: Result<impl Reply, Errno>) {
        let Asked { unique, most, .. } = self.asked;
        match (self.to.take(), result) {
            (Some(to), Ok(reply)) => reply.pieces(|pieces| to.take(unique, checked(pieces, most))),
            (Some(to), Err(errno)) => to.take(unique, Err(errno)),
            (None, _) => {}
        }
    }
}

impl<T: Takes> Drop for Owed<T> {
    fn drop(&mut self) {
        if let Some(to) = self.to.take() {
            to.take(self.asked.unique, Err(NO_ANSWER));
        }
    }
}

impl<'a, R: Reply> Answer<'a, R> {
    pub(crate) fn new(asked: Asked, replier: &'a mut dyn Replier) -> Answer<'a, R> {
        Answer { owed: Owed { to: Some(replier), asked }, reply: PhantomData }
    }

    /// The request's number, which [`crate::FileSystem::interrupt`] says again.
    pub fn unique(&self) -> u64 {
        self.owed.asked.unique
    }

    /// It is done, and this is what was asked for.
    pub fn give(self, reply: R) {
        self.owed.give(Ok(reply));
    }

    /// It failed.
    pub fn fail(self, errno: Errno) {
        self.result(Err(errno));
    }

    /// One of both.
    pub fn result(self, result: Result<R, Errno>) {
        self.owed.give(result);
    }

    /// The answer is given later.
    pub fn later(mut self) -> Later<R> {
        let to = self.owed.to.take().map(|replier| replier.later());
        Later { owed: Owed { to, asked: self.owed.asked }, reply: PhantomData }
    }
}

impl Answer<'_, Data> {
    /// The bytes that were read: `fill` puts at most as many as were asked for. They are written where the transport
    /// has memory for them.
    pub fn fill(mut self, fill: impl FnOnce(&mut Sink<'_>)) {
        let mut fill = Some(fill);
        if let Some(replier) = self.owed.to.take() {
            replier.fill(self.owed.asked, &mut |sink| {
                if let Some(fill) = fill.take() {
                    fill(sink);
                }
            });
        }
    }
}

impl Answer<'_, Listing> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> Listing {
        Listing::new(self.owed.asked.most)
    }
}

impl Answer<'_, ListingPlus> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> ListingPlus {
        ListingPlus::new(self.owed.asked.most)
    }
}

impl<R: Reply> Later<R> {
    /// As [`Answer::unique`].
    pub fn unique(&self) -> u64 {
        self.owed.asked.unique
    }

    /// The thread that waits for it; 0 if it is not visible here.
    pub fn process(&self) -> u32 {
        self.owed.asked.process
    }

    /// As [`Answer::give`].
    pub fn give(self, reply: R) {
        self.owed.give(Ok(reply));
    }

    /// As [`Answer::fail`].
    pub fn fail(self, errno: Errno) {
        self.result(Err(errno));
    }

    /// As [`Answer::result`].
    pub fn result(self, result: Result<R, Errno>) {
        self.owed.give(result);
    }
}

impl<R: Reply> Later<R> {
    /// Calls a method that wants an [`Answer`], in a thread that may wait in it.
    pub fn answer_by(mut self, call: impl FnOnce(Answer<'_, R>)) {
        if let Some(replier) = self.owed.to.take() {
            let mut once = Once(Some(replier));
            call(Answer::new(self.owed.asked, &mut once));
        }
    }
}

/// A replier for later, now.
struct Once(Option<Box<dyn LaterReplier>>);

impl Replier for Once {
    fn reply(&mut self, unique: u64, answer: Result<&[&[u8]], Errno>) {
        if let Some(replier) = self.0.take() {
            replier.reply(unique, answer);
        }
    }

    fn fill(&mut self, asked: Asked, fill: &mut dyn FnMut(&mut Sink<'_>)) {
        let mut filled = vec![0; asked.most];
        let mut sink = Sink::new(SinkPlace::Slice(&mut filled), asked.most);
        fill(&mut sink);
        match sink.finish() {
            Some(length) => self.reply(asked.unique, Ok(&[&filled[..length]])),
            None => self.reply(asked.unique, Err(WRONG_LENGTH)),
        }
    }

    fn later(&mut self) -> Box<dyn LaterReplier> {
        // It is there: an answer takes one thing from its replier, once.
        self.0.take().unwrap_or_else(|| Box::new(Nowhere))
    }
}

/// Takes an answer that was given already.
struct Nowhere;

impl LaterReplier for Nowhere {
    fn reply(self: Box<Self>, _: u64, _: Result<&[&[u8]], Errno>) {}
}

impl Later<Data> {
    /// Where the bytes may be put, in the memory that the caller provided ([`crate::SessionOptions::memory`]): by a
    /// copy, a device, or another host. They are given by [`Later::landed`], or all the same by [`Later::give`].
    /// `None` if the answer is not made in that memory.
    pub fn place(&self) -> Option<Range<u64>> {
        self.owed.to.as_ref().and_then(|replier| replier.place())
    }

    /// This number of bytes is at the place's start, at most as many as were asked for. Nothing writes there any more.
    pub fn landed(mut self, length: usize) {
        let Asked { unique, most, .. } = self.owed.asked;
        match self.owed.to.take() {
            Some(replier) if length <= most => replier.landed(unique, length),
            Some(replier) => replier.reply(unique, Err(WRONG_LENGTH)),
            None => {}
        }
    }
}

impl Later<Listing> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> Listing {
        Listing::new(self.owed.asked.most)
    }
}

impl Later<ListingPlus> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> ListingPlus {
        ListingPlus::new(self.owed.asked.most)
    }
}

fn checked<'p, 'b>(pieces: &'p [&'b [u8]], most: usize) -> Result<&'p [&'b [u8]], Errno> {
    let length = pieces.iter().map(|piece| piece.len()).sum::<usize>();
    if length <= most { Ok(pieces) } else { Err(WRONG_LENGTH) }
}

/// The file system has dropped the answer.
const NO_ANSWER: Errno = Errno::IO;

/// The file system has given more than was asked for.
pub(crate) const WRONG_LENGTH: Errno = Errno::IO;

// The bytes of a write, wherever the transport has them, and where the bytes of a read go.

/// The bytes of a write.
#[derive(Debug)]
pub struct Payload<'a> {
    place: Place<'a>,
    /// Memory for bytes that are kept.
    buffers: Option<&'a Arc<Buffers>>,
}

#[derive(Debug)]
enum Place<'a> {
    /// In the transport's memory, until the call returns.
    Borrowed(&'a [u8]),
    /// In a buffer that can be given away instead of being copied.
    Buffer { buffer: &'a mut Buffer, range: Range<usize> },
    /// In the caller's memory.
    Provided { memory: &'a Memory, range: Range<u64> },
}

impl<'a> Payload<'a> {
    /// Bytes that are there until the call returns.
    pub fn borrowed(bytes: &'a [u8]) -> Payload<'a> {
        Payload { place: Place::Borrowed(bytes), buffers: None }
    }

    /// A range of a buffer.
    pub(crate) fn in_buffer(buffer: &'a mut Buffer, range: Range<usize>) -> Payload<'a> {
        Payload { place: Place::Buffer { buffer, range }, buffers: None }
    }

    /// A range of the memory that the caller provided.
    pub(crate) fn provided(memory: &'a Memory, range: Range<u64>) -> Payload<'a> {
        Payload { place: Place::Provided { memory, range }, buffers: None }
    }

    /// With memory for bytes that are kept: buffers at least as long as the payload.
    pub(crate) fn kept_in(self, buffers: &'a Arc<Buffers>) -> Payload<'a> {
        Payload { buffers: Some(buffers), ..self }
    }

    /// How many bytes.
    pub fn length(&self) -> usize {
        match &self.place {
            Place::Borrowed(bytes) => bytes.len(),
            Place::Buffer { range, .. } => range.len(),
            Place::Provided { range, .. } => (range.end - range.start) as usize,
        }
    }

    /// The bytes, until the call returns. They are copied only out of memory that the caller provided.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.place {
            Place::Borrowed(bytes) => Cow::Borrowed(bytes),
            Place::Buffer { buffer, range } => Cow::Borrowed(&buffer.data[range.clone()]),
            Place::Provided { memory, range } => Cow::Owned(copy(memory, range)),
        }
    }

    /// The bytes, for as long as wanted. Long ones of the device are not copied, and long ones of the ring are copied
    /// to memory that is used again.
    pub fn into_bytes(self) -> Bytes {
        let length = self.length();
        match (self.place, self.buffers) {
            (Place::Buffer { buffer, range }, _) if length >= LEAST_GIVEN_BYTES => buffer.give_away().slice(range),
            (Place::Buffer { buffer, range }, _) => Bytes::copy_from_slice(&buffer.data[range]),
            (place, Some(buffers)) if (LEAST_GIVEN_BYTES..=buffers.length).contains(&length) => {
                let mut buffer = buffers.take();
                place.copy_to(&mut buffer.data[..length]);
                Bytes::from_owner(buffer).slice(..length)
            }
            (Place::Borrowed(bytes), _) => Bytes::copy_from_slice(bytes),
            (Place::Provided { memory, range }, _) => copy(memory, &range).into(),
        }
    }

    /// Where the bytes are in the memory that the caller provided ([`crate::SessionOptions::memory`]), if they are.
    /// They stay there until the write is answered.
    pub fn place(&self) -> Option<Range<u64>> {
        match &self.place {
            Place::Provided { range, .. } => Some(range.clone()),
            _ => None,
        }
    }
}

impl Place<'_> {
    fn copy_to(&self, into: &mut [u8]) {
        match self {
            Place::Borrowed(bytes) => into.copy_from_slice(bytes),
            Place::Buffer { buffer, range } => into.copy_from_slice(&buffer.data[range.clone()]),
            Place::Provided { memory, range } => {
                let inside = memory.read(range.start, into);
                debug_assert!(inside.is_ok(), "the ring has cut its places out of this memory");
            }
        }
    }
}

fn copy(memory: &Memory, range: &Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    let inside = memory.read(range.start, &mut bytes);
    debug_assert!(inside.is_ok(), "the ring has cut its places out of this memory");
    bytes
}

/// Shorter payloads are copied: that costs less than another buffer.
const LEAST_GIVEN_BYTES: usize = 64 << 10;

/// Where the bytes of a read go, up to as many as were asked for.
pub struct Sink<'a> {
    place: SinkPlace<'a>,
    length: usize,
    most: usize,
    /// More was put than was asked for.
    is_too_long: bool,
}

pub(crate) enum SinkPlace<'a> {
    Slice(&'a mut [u8]),
    Provided { memory: &'a Memory, at: u64 },
}

impl<'a> Sink<'a> {
    pub(crate) fn new(place: SinkPlace<'a>, most: usize) -> Sink<'a> {
        Sink { place, length: 0, most, is_too_long: false }
    }

    /// The next bytes.
    pub fn put(&mut self, bytes: &[u8]) {
        let Some(end) = self.end(bytes.len()) else { return };
        match &mut self.place {
            SinkPlace::Slice(slice) => slice[self.length..end].copy_from_slice(bytes),
            SinkPlace::Provided { memory, at } => {
                let inside = memory.write(*at + self.length as u64, bytes);
                debug_assert!(inside.is_ok(), "the ring has cut its places out of this memory");
            }
        }
        self.length = end;
    }

    /// The next bytes are zeros.
    pub fn put_zeros(&mut self, count: usize) {
        let Some(end) = self.end(count) else { return };
        match &mut self.place {
            SinkPlace::Slice(slice) => slice[self.length..end].fill(0),
            SinkPlace::Provided { memory, at } => {
                let range = *at + self.length as u64..*at + end as u64;
                let inside = memory.fill(range, 0);
                debug_assert!(inside.is_ok(), "the ring has cut its places out of this memory");
            }
        }
        self.length = end;
    }

    /// How many bytes may still be put.
    pub fn left(&self) -> usize {
        self.most - self.length
    }

    /// How many bytes were put. `None`: more than were asked for.
    pub(crate) fn finish(self) -> Option<usize> {
        (!self.is_too_long).then_some(self.length)
    }

    fn end(&mut self, count: usize) -> Option<usize> {
        let end = self.length.checked_add(count).filter(|end| *end <= self.most);
        self.is_too_long |= end.is_none();
        end
    }
}

/// Memory for requests, which is used again. New memory costs the system more than the copy into it: every page of
/// it is mapped and filled with zeros first.
#[derive(Debug)]
pub(crate) struct Buffers {
    free: Mutex<Vec<Vec<u8>>>,
    /// Bytes of each.
    length: usize,
}

/// Buffers that are kept beside those in use.
const MOST_KEPT: usize = 16;

impl Buffers {
    pub(crate) fn new(length: usize) -> Arc<Buffers> {
        Arc::new(Buffers { free: Mutex::default(), length })
    }

    pub(crate) fn take(self: &Arc<Buffers>) -> Buffer {
        let data = self.free().pop().unwrap_or_else(|| vec![0; self.length]);
        Buffer { data, buffers: Arc::clone(self) }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory of one request. It is free again when the last of its bytes is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    data: Vec<u8>,
    buffers: Arc<Buffers>,
}

impl Buffer {
    /// All of it, for a request to be received.
    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.data
    }

    /// All of it, for what was received.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.data
    }

    /// All of it, for as long as wanted. Another takes its place.
    fn give_away(&mut self) -> Bytes {
        let another = self.buffers.take();
        Bytes::from_owner(std::mem::replace(self, another))
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self.buffers.free();
        if free.len() < MOST_KEPT {
            free.push(std::mem::take(&mut self.data));
        }
    }
}

// Reply: what answers say, and their bytes.

/// A point in time: seconds since 1970, which may be negative, and nanoseconds after that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    /// Whole seconds since 1970.
    pub seconds: i64,
    /// Less than 1,000,000,000.
    pub nanoseconds: u32,
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Timestamp {
        match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => Timestamp { seconds: after.as_secs().cast_signed(), nanoseconds: after.subsec_nanos() },
            Err(before) => {
                let before = before.duration();
                let (seconds, nanoseconds) = (-before.as_secs().cast_signed(), before.subsec_nanos());
                match nanoseconds {
                    0 => Timestamp { seconds, nanoseconds },
                    _ => Timestamp { seconds: seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
                }
            }
        }
    }
}

/// What a file is.
#[allow(missing_docs)] // the names say it
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Pipe,
    Socket,
    CharacterDevice,
    BlockDevice,
}

impl FileKind {
    /// From the upper bits of a mode. No bits are a regular file, as for `mknod(2)`.
    pub fn of_mode(mode: u32) -> Option<FileKind> {
        Some(match mode >> KIND_SHIFT {
            0 | 0o10 => FileKind::File,
            0o04 => FileKind::Directory,
            0o12 => FileKind::Symlink,
            0o01 => FileKind::Pipe,
            0o14 => FileKind::Socket,
            0o02 => FileKind::CharacterDevice,
            0o06 => FileKind::BlockDevice,
            _ => return None,
        })
    }

    /// `DT_…`, which is the mode's upper four bits.
    pub(crate) fn code(self) -> u32 {
        match self {
            FileKind::File => 0o10,
            FileKind::Directory => 0o04,
            FileKind::Symlink => 0o12,
            FileKind::Pipe => 0o01,
            FileKind::Socket => 0o14,
            FileKind::CharacterDevice => 0o02,
            FileKind::BlockDevice => 0o06,
        }
    }
}

const KIND_SHIFT: u32 = 12;

/// What is known of a file, as `stat(2)` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Its number.
    pub node: u64,
    /// What it is.
    pub kind: FileKind,
    /// The permission bits, 12 of them.
    pub permissions: u32,
    /// Its names.
    pub links: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its length in bytes.
    pub size: u64,
    /// What it occupies, in units of 512 bytes.
    pub blocks: u64,
    /// The size of requests that suits it, in bytes.
    pub block_bytes: u32,
    /// Of a device its number, as [`crate::request::MakeNode::device`] says it; otherwise 0.
    pub device: u32,
    /// When it was last read.
    pub accessed: Timestamp,
    /// When its content last changed.
    pub modified: Timestamp,
    /// When its attributes last changed.
    pub changed: Timestamp,
}

/// Attributes, and for how long the kernel may use them without asking again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownAttributes {
    /// What they are.
    pub attributes: Attributes,
    /// How long.
    pub valid: Duration,
}

/// What a name means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its inode; `None`: there is no such name. With [`Entry::generation`] it is unique for as long as the file system
    /// is mounted.
    pub attributes: Option<Attributes>,
    /// Tells inodes apart that had the same number one after the other.
    pub generation: u64,
    /// For how long the kernel may use the name without asking again.
    pub name_valid: Duration,
    /// For how long the kernel may use the attributes.
    pub attributes_valid: Duration,
}

impl Entry {
    /// A name that is not there, and stays so for a while. `ENOENT` says the same for no time.
    pub fn absent(valid: Duration) -> Entry {
        Entry { attributes: None, generation: 0, name_valid: valid, attributes_valid: Duration::ZERO }
    }
}

/// How a file is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Its number in the requests to come.
    pub handle: u64,
    /// Reads and writes do not go through the page cache.
    pub direct: bool,
    /// What the page cache has of the file is still right.
    pub keeps_cache: bool,
    /// Several direct writes to this file may be under way at a time, if they do not make it longer.
    pub parallel_direct_writes: bool,
    /// No flush is needed when a descriptor is closed.
    pub without_flush: bool,
    /// The kernel may keep the directory's entries.
    pub caches_directory: bool,
}

/// A file that was made and opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Created {
    /// Its name.
    pub entry: Entry,
    /// How it is open.
    pub opened: Opened,
}

/// That it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done;

/// The bytes that were read, in pieces. At most as many as were asked for; fewer are the end of the file.
#[derive(Clone, Debug, Default)]
pub struct Data(pub Vec<Bytes>);

impl<B: Into<Bytes>> From<B> for Data {
    fn from(bytes: B) -> Data {
        Data(vec![bytes.into()])
    }
}

/// The value of an extended attribute, or the names of all of them, each with a NUL behind it; or how long that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Xattr {
    /// The bytes.
    Bytes(Bytes),
    /// How many there are: the caller wants to know no more.
    Length(u32),
}

impl Xattr {
    /// What is answered if the caller has room for `size` bytes. With 0 it asks how long they are.
    ///
    /// # Errors
    /// `ERANGE`: it has too little room.
    pub fn of(bytes: &[u8], size: u32) -> Result<Xattr, Errno> {
        match size {
            0 => Ok(Xattr::Length(u32::try_from(bytes.len()).unwrap_or(u32::MAX))),
            size if bytes.len() > size as usize => Err(Errno::RANGE),
            _ => Ok(Xattr::Bytes(Bytes::copy_from_slice(bytes))),
        }
    }
}

/// What a symbolic link says.
#[derive(Clone, Debug)]
pub struct Target(pub Bytes);

/// How many bytes were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written(pub u32);

/// Where data or a hole is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position(pub u64);

/// What a file system has, as `statvfs(3)` shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The unit of the next three, in bytes.
    pub block_bytes: u32,
    /// All blocks.
    pub blocks: u64,
    /// Blocks that are free.
    pub free_blocks: u64,
    /// Free blocks for users without rights.
    pub available_blocks: u64,
    /// All inodes.
    pub files: u64,
    /// Inodes that are free.
    pub free_files: u64,
    /// The longest name.
    pub name_bytes: u32,
}

/// One entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryEntry<'a> {
    /// Its inode.
    pub node: u64,
    /// What it is.
    pub kind: FileKind,
    /// Its name.
    pub name: &'a [u8],
    /// A listing that goes on behind this entry begins with this offset: any number but 0.
    pub offset: u64,
}

/// Entries of a directory, up to the room that the request has. An empty one is the directory's end.
#[derive(Clone, Debug)]
pub struct Listing {
    bytes: Vec<u8>,
    room: usize,
}

impl Listing {
    /// Of at most this many bytes.
    pub(crate) fn new(room: usize) -> Listing {
        Listing { bytes: Vec::new(), room }
    }

    /// Adds an entry. Returns whether there was room.
    #[must_use = "an entry without room is to be listed by the next request"]
    pub fn push(&mut self, entry: &DirectoryEntry<'_>) -> bool {
        let has_room = self.has_room(DIRENT_BYTES + entry.name.len());
        if has_room {
            put_dirent(entry, &mut self.bytes);
        }
        has_room
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.bytes.len() + padded(bytes) <= self.room
    }
}

/// Entries of a directory, each with what a lookup would have said.
#[derive(Clone, Debug)]
pub struct ListingPlus(Listing);

impl ListingPlus {
    /// Of at most this many bytes.
    pub(crate) fn new(room: usize) -> ListingPlus {
        ListingPlus(Listing::new(room))
    }

    /// Adds an entry. Returns whether there was room. With `known` the kernel knows the inode as by a lookup: it
    /// will be forgotten as often. `.` and `..` are listed without.
    #[must_use = "an entry without room is to be listed by the next request"]
    pub fn push(&mut self, entry: &DirectoryEntry<'_>, known: Option<&Entry>) -> bool {
        let has_room = self.0.has_room(ENTRY_BYTES + DIRENT_BYTES + entry.name.len());
        if has_room {
            match known {
                Some(known) => put_entry(known, &mut self.0.bytes),
                None => self.0.bytes.resize(self.0.bytes.len() + ENTRY_BYTES, 0),
            }
            put_dirent(entry, &mut self.0.bytes);
        }
        has_room
    }
}

fn put_dirent(entry: &DirectoryEntry<'_>, out: &mut Vec<u8>) {
    out.put_u64(entry.node).put_u64(entry.offset);
    out.put_u32(entry.name.len() as u32).put_u32(entry.kind.code()).put(entry.name);
    out.resize(padded(out.len()), 0);
}

/// Records start at multiples of eight bytes.
fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(8)
}

/// What an answer consists of.
pub trait Reply {
    /// Its bytes, in pieces.
    fn pieces<R>(self, give: impl FnOnce(&[&[u8]]) -> R) -> R;
}

impl Reply for Done {
    fn pieces<R>(self, give: impl FnOnce(&[&[u8]]) -> R) -> R {
        give(&[])
    }
}

impl Reply for Data {
    fn pieces<R>(self, give: impl FnOnce(&[&[u8]]) -> R) -> R {
        match &self.0[..] {
            [one] => give(&[one]),
            several => give(&several.iter().map(|piece| &piece[..]).collect::<Vec<_>>()),
        }
    }
}

impl Reply for Target {
    fn pieces<R>(self, give: impl FnOnce(&[&[u8]]) -> R) -> R {
        give(&[&self.0])
    }
}

impl Reply for Xattr {
    fn pieces<R>(self, give: impl FnOnce(&[&[u8]]) -> R) -> R {
        match self {
            Xattr::Bytes(bytes) => give(&[&bytes]),
            Xattr::Length(length) => {
                let mut out = Vec::with_capacity(XATTR_LENGTH_BYTES);
                out.put_u32(length).put_u32(0);
                give(&[&out])
            }
        }
    }
}

/// `fuse_getxattr_out`.
pub(crate) const XATTR_LENGTH_BYTES: usize = 8;

impl Reply for Listing {
    fn pieces<R>(self, give: impl FnOnce(&[&[u8]]) -> R) -> R {
        give(&[&self.bytes])
    }
}

impl Reply for ListingPlus {
    fn pieces<R>(self, give: impl FnOnce(&[&[u8]]) -> R) -> R {
        self.0.pieces(give)
    }
}

/// Replies of a fixed length.
macro_rules! reply_of_fields {
    ($($reply:ty => $put:expr;)*) => {$(
        impl Reply for $reply {
            fn pieces<R>(self, give: impl FnOnce(&[&[u8]]) -> R) -> R {
                let mut out = Vec::with_capacity(MOST_FIXED_BYTES);
                let put: fn(&$reply, &mut Vec<u8>) = $put;
                put(&self, &mut out);
                give(&[&out])
            }
        }
    )*};
}

/// The longest reply of fields: [`Created`].
const MOST_FIXED_BYTES: usize = ENTRY_BYTES + 16;

reply_of_fields! {
    Entry => put_entry;
    KnownAttributes => |known, out| {
        put_valid(known.valid, out);
        out.put_u32(0);
        put_attributes(&known.attributes, out);
    };
    Opened => put_opened;
    Created => |created, out| {
        put_entry(&created.entry, out);
        put_opened(&created.opened, out);
    };
    Written => |written, out| {
        out.put_u32(written.0).put_u32(0);
    };
    Position => |position, out| {
        out.put_u64(position.0);
    };
    Statistics => |of, out| {
        out.put_u64(of.blocks).put_u64(of.free_blocks).put_u64(of.available_blocks);
        out.put_u64(of.files).put_u64(of.free_files);
        out.put_u32(of.block_bytes).put_u32(of.name_bytes).put_u32(of.block_bytes);
        out.put(&[0; 28]);
    };
}

fn put_entry(entry: &Entry, out: &mut Vec<u8>) {
    let node = entry.attributes.map_or(0, |attributes| attributes.node);
    out.put_u64(node).put_u64(entry.generation);
    out.put_u64(entry.name_valid.as_secs()).put_u64(entry.attributes_valid.as_secs());
    out.put_u32(entry.name_valid.subsec_nanos()).put_u32(entry.attributes_valid.subsec_nanos());
    match &entry.attributes {
        Some(attributes) => put_attributes(attributes, out),
        None => _ = out.put(&[0; ATTRIBUTES_BYTES]),
    }
}

fn put_valid(valid: Duration, out: &mut Vec<u8>) {
    out.put_u64(valid.as_secs()).put_u32(valid.subsec_nanos());
}

fn put_attributes(of: &Attributes, out: &mut Vec<u8>) {
    out.put_u64(of.node).put_u64(of.size).put_u64(of.blocks);
    let times = [of.accessed, of.modified, of.changed];
    times.iter().for_each(|time| _ = out.put_u64(time.seconds.cast_unsigned()));
    times.iter().for_each(|time| _ = out.put_u32(time.nanoseconds));
    out.put_u32(of.kind.code() << KIND_SHIFT | of.permissions & 0o7777);
    out.put_u32(of.links).put_u32(of.uid).put_u32(of.gid).put_u32(of.device).put_u32(of.block_bytes).put_u32(0);
}

const ATTRIBUTES_BYTES: usize = 88;

fn put_opened(of: &Opened, out: &mut Vec<u8>) {
    let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    let flags = flag(of.direct, opened::DIRECT_IO)
        | flag(of.keeps_cache, opened::KEEP_CACHE)
        | flag(of.parallel_direct_writes, opened::PARALLEL_DIRECT_WRITES)
        | flag(of.without_flush, opened::NOFLUSH)
        | flag(of.caches_directory, opened::CACHE_DIR);
    out.put_u64(of.handle).put_u32(flags).put_u32(0);
}
