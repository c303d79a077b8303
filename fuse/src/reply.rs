//! Reply: what answers say, and their bytes.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rustix::io::Errno;

use crate::abi::{DIRENT_BYTES, ENTRY_BYTES, Put, opened};

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
