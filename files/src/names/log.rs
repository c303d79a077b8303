//! Log: frames one after the other in an area, as the blocks to be written; and the same when they are read.

use remora_memory::crc::{crc32c, crc32c_append};
use remora_volume::shape::BLOCK_BYTES;

use super::clusters::Run;
use super::inode::{Attributes, Kind, MOST_TARGET_BYTES, MOST_XATTR_BYTES, is_xattr_name};
use super::layout::{Area, Geometry, Head};

/// Blocks to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksToWrite {
    /// The first one.
    pub first: u64,
    /// Whole blocks.
    pub data: Vec<u8>,
}

/// Where a frame begins if what is before it ends at `at`.
fn next_place(at: u64) -> u64 {
    let left = BLOCK_BYTES as u64 - at % BLOCK_BYTES as u64;
    if left < FRAME_HEAD_BYTES as u64 { at + left } else { at }
}

/// The writing end.
#[derive(Clone, Debug)]
pub(super) struct Log {
    first: u64,
    length: u64,
    lap: u64,
    /// The number of the next frame.
    number: u64,
    /// The offset of `bytes` in the area, at the beginning of a block.
    base: u64,
    /// What is not written, behind the part of the last block that is.
    bytes: Vec<u8>,
}

impl Log {
    /// At the beginning of an area.
    pub(super) fn new(geometry: Geometry, area: Area, lap: u64) -> Log {
        let (first, length) = (geometry.area_at(area), geometry.area_bytes());
        Log { first, length, lap, number: 0, base: 0, bytes: Vec::new() }
    }

    /// Behind what was read.
    pub(super) fn behind(geometry: Geometry, area: Area, read: &LogReader) -> Log {
        let block = read.at - read.at % BLOCK_BYTES as u64;
        let tail = (block - read.base) as usize..(read.at - read.base) as usize;
        let bytes = read.bytes.get(tail).unwrap_or_default().to_vec();
        Log { number: read.number, base: block, bytes, ..Log::new(geometry, area, read.lap) }
    }

    /// Where the last frame ends.
    pub(super) fn at(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    /// Bytes that it has room for, in one frame.
    pub(super) fn room(&self) -> u64 {
        self.length.saturating_sub(next_place(self.at()))
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The next frame has this number.
    pub(super) fn continue_at(&mut self, number: u64) {
        self.number = number;
    }

    /// Appends a frame. Returns its bytes, with what is skipped before it.
    pub(super) fn append(&mut self, records: &[Record]) -> u64 {
        let before = self.at();
        let at = next_place(before);
        self.bytes.resize((at - self.base) as usize, 0);
        encode_frame(Place { lap: self.lap, at }, self.number, records, &mut self.bytes);
        self.number += 1;
        self.at() - before
    }

    /// Bytes in whole blocks that are not written.
    pub(super) fn whole_bytes(&self) -> usize {
        self.bytes.len() / BLOCK_BYTES * BLOCK_BYTES
    }

    /// The blocks in which something is new: whole ones only, or all. The rest of the last block is zeros.
    pub(super) fn take(&mut self, whole_only: bool) -> BlocksToWrite {
        let whole = self.whole_bytes();
        let end = if whole_only { whole } else { self.bytes.len() };
        let mut data = self.bytes[..end].to_vec();
        data.resize(end.next_multiple_of(BLOCK_BYTES), 0);
        let first = self.first + self.base / BLOCK_BYTES as u64;
        self.bytes.drain(..whole);
        self.base += whole as u64;
        BlocksToWrite { first, data }
    }
}

/// The reading end.
#[derive(Clone, Debug)]
pub(super) struct LogReader {
    length: u64,
    lap: u64,
    image_bytes: u64,
    /// The number of the first frame behind the image.
    first: u64,
    number: u64,
    at: u64,
    /// The offset of `bytes` in the area, at the beginning of a block.
    base: u64,
    bytes: Vec<u8>,
}

/// What follows in an area.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A frame of these records.
    Records(Vec<Record>),
    /// More bytes are needed.
    More,
    /// Nothing more was written.
    End,
}

impl LogReader {
    /// From the beginning of the area that a head names.
    pub(super) fn new(head: &Head) -> LogReader {
        let Head { geometry, lap, image_bytes, first, .. } = *head;
        let (number, at) = (if image_bytes == 0 { first } else { 0 }, 0);
        LogReader { length: geometry.area_bytes(), lap, image_bytes, first, number, at, base: 0, bytes: Vec::new() }
    }

    /// Behind the image.
    pub(super) fn behind_image(head: &Head) -> LogReader {
        let base = head.image_bytes - head.image_bytes % BLOCK_BYTES as u64;
        LogReader { number: head.first, at: head.image_bytes, base, ..LogReader::new(head) }
    }

    /// The number of the next frame of the log; `None` within the image.
    pub(super) fn number(&self) -> Option<u64> {
        (self.at >= self.image_bytes).then_some(self.number)
    }

    /// Where the last frame ends.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// The blocks of the area that are needed next: the first one, and how many there are up to the area's end.
    pub(super) fn wants(&self) -> (u64, u64) {
        let first = (self.base + self.bytes.len() as u64) / BLOCK_BYTES as u64;
        (first, self.length / BLOCK_BYTES as u64 - first)
    }

    /// These blocks of the area follow.
    pub(super) fn push(&mut self, blocks: &[u8]) {
        self.bytes.extend_from_slice(blocks);
    }

    /// Forgets what was pushed and not read as a frame: it may have been read while it was written.
    pub(super) fn look_again(&mut self) {
        self.base = self.at - self.at % BLOCK_BYTES as u64;
        self.bytes.clear();
    }

    /// The next frame.
    ///
    /// # Errors
    /// [`Malformed`]: what is there was not written like that. A reader that is not the writer may have read it in the
    /// middle of a write.
    pub(super) fn next(&mut self) -> Result<Next, Malformed> {
        let is_image = self.at < self.image_bytes;
        let at = next_place(self.at);
        if at >= self.length {
            return if is_image { Err(CUT) } else { Ok(Next::End) };
        }
        let bytes = self.bytes.get((at - self.base) as usize..).unwrap_or_default();
        let (number, found, length) = match find_frame(Place { lap: self.lap, at }, bytes) {
            Found::Short(length) if at + length as u64 <= self.length => return Ok(Next::More),
            Found::Frame { number, records, length } => (number, records, length),
            _ if is_image => return Err(CUT),
            Found::Nothing => return Ok(Next::End),
            // The block is of an earlier use of the area.
            _ if at.is_multiple_of(BLOCK_BYTES as u64) => return Ok(Next::End),
            _ => return Err(Malformed("what follows a frame of the log")),
        };
        if number != self.number {
            // A frame of this lap that is not the next one was not written behind this one.
            return Err(Malformed("the number of a frame"));
        }
        let (mut rest, mut records) = (found, Vec::new());
        while !rest.is_empty() {
            records.push(Record::decode(&mut rest)?);
        }
        self.at = at + length as u64;
        self.number += 1;
        if is_image && self.at >= self.image_bytes {
            self.number = self.first;
            if self.at > self.image_bytes {
                return Err(CUT);
            }
        }
        let done = self.at - self.at % BLOCK_BYTES as u64 - self.base;
        if done >= KEPT_BYTES {
            self.bytes.drain(..done as usize);
            self.base += done;
        }
        Ok(Next::Records(records))
    }
}

/// Bytes that were read are dropped in steps of so many.
const KEPT_BYTES: u64 = 256 << 10;

const CUT: Malformed = Malformed("the image: it ends too soon");

// What the log says, and how. Several records that belong together are a frame, which is all or nothing.
//
// ```text
// 0                                            4                   8          16
// │ CRC-32C of lap, place in the area, rest of the frame │ bytes of the frame │ number │ records …
// ```
//
// Its lap and its place are in the checksum and not in the frame. So a frame that an earlier use of the area has left
// is never taken for one of this use, and none counts at another place. The log's numbers are consecutive.
// A frame begins where 16 bytes are left in the block, or in the next block.
//
// A record is of one inode, and says how it is from then on: the image is made of the same records as the log. Numbers
// are little-endian, names have one byte for their length, and targets of links two.

/// Bytes before the records of a frame.
pub const FRAME_HEAD_BYTES: usize = 16;

/// The most bytes of a frame: so much is free in the log before any change begins. A change that needs more than one
/// frame is several.
pub const MOST_FRAME_BYTES: usize = 8 << 10;

/// Inodes whose ends are put off at most, and written with the next change.
pub(super) const MOST_PUT_OFF: usize = 64;

/// Bytes of the record that ends an inode.
const GONE_BYTES: usize = 9;

/// Bytes of the log that are free before a change: for the frame of what was put off, and for its own.
pub(super) const ROOM_OF_A_CHANGE: u64 = (MOST_FRAME_BYTES + 3 * FRAME_HEAD_BYTES + MOST_PUT_OFF * GONE_BYTES) as u64;

/// The most bytes of a record.
pub const MOST_RECORD_BYTES: usize = 1 + 8 + 1 + ATTRIBUTES_BYTES + 2 + MOST_TARGET_BYTES;

const ATTRIBUTES_BYTES: usize = 2 + 4 + 4 + 8 + 8 + 8;

const _: () = assert!(MOST_RECORD_BYTES + 1024 <= MOST_FRAME_BYTES); // a link's target, and its name in a directory

// A new directory with all extended attributes that it can have, and its name.
const _: () = assert!(FRAME_HEAD_BYTES + 48 + 281 + MOST_XATTR_BYTES + 2 * 12 <= MOST_FRAME_BYTES);

/// A name in a directory: 1 to 255 bytes, without `/` and zero bytes, and not `.` or `..`.
pub type Name = Box<[u8]>;

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// There is a new inode. Only the image says a file's size with it.
    Made {
        /// Its number.
        ino: u64,
        /// What it is.
        kind: Kind,
        /// Its attributes.
        attributes: Attributes,
        /// The number of a device; otherwise 0.
        device: u32,
        /// Where a symbolic link points; otherwise empty.
        target: Box<[u8]>,
    },
    /// An inode without names is no more, and its clusters are free.
    Gone {
        /// Its number.
        ino: u64,
    },
    /// A directory has another entry.
    Named {
        /// The directory.
        parent: u64,
        /// What the name stands for.
        ino: u64,
        /// The time of the change, for the directory and the inode. [`NO_TIME`]: in an image.
        time: i64,
        /// The name.
        name: Name,
    },
    /// A directory has an entry less.
    Unnamed {
        /// The directory.
        parent: u64,
        /// What the name stood for.
        ino: u64,
        /// The time of the change, for the directory and the inode.
        time: i64,
        /// The name.
        name: Name,
    },
    /// An inode has these attributes.
    Set {
        /// Its number.
        ino: u64,
        /// Its attributes.
        attributes: Attributes,
    },
    /// A file has this size.
    Sized {
        /// Its number.
        ino: u64,
        /// Bytes.
        size: u64,
        /// When it was changed. [`NO_TIME`]: in an image.
        time: i64,
    },
    /// A file has these clusters; it had none there.
    Mapped {
        /// Its number.
        ino: u64,
        /// Which ones.
        run: Run,
    },
    /// A file has no clusters there, and those that it had are free.
    Unmapped {
        /// Its number.
        ino: u64,
        /// The first cluster in the file.
        first: u32,
        /// How many.
        count: u32,
    },
    /// An inode has this extended attribute.
    Xattr {
        /// Its number.
        ino: u64,
        /// The attribute's name.
        name: Box<[u8]>,
        /// Its value.
        value: Box<[u8]>,
    },
    /// An inode does not have this extended attribute any more.
    NoXattr {
        /// Its number.
        ino: u64,
        /// The attribute's name.
        name: Box<[u8]>,
    },
    /// The image ends here.
    Complete {
        /// The lowest number that no inode ever had.
        next: u64,
    },
}

/// Of a record that changes no times.
pub const NO_TIME: i64 = i64::MIN;

const MADE: u8 = 1;

const GONE: u8 = 2;

const NAMED: u8 = 3;

const UNNAMED: u8 = 4;

const SET: u8 = 5;

const SIZED: u8 = 6;

const MAPPED: u8 = 7;

const UNMAPPED: u8 = 8;

const COMPLETE: u8 = 9;

const XATTR: u8 = 10;

const NO_XATTR: u8 = 11;

impl Record {
    /// The inode that it is of.
    pub fn subject(&self) -> u64 {
        match self {
            Record::Named { parent, .. } | Record::Unnamed { parent, .. } => *parent,
            Record::Made { ino, .. }
            | Record::Gone { ino }
            | Record::Set { ino, .. }
            | Record::Sized { ino, .. }
            | Record::Mapped { ino, .. }
            | Record::Unmapped { ino, .. }
            | Record::Xattr { ino, .. }
            | Record::NoXattr { ino, .. } => *ino,
            Record::Complete { .. } => 0,
        }
    }

    /// Appends the bytes.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Record::Made { ino, kind, attributes, device, target } => {
                into.push(MADE);
                into.extend_from_slice(&ino.to_le_bytes());
                into.push(kind.code());
                put_attributes(attributes, into);
                if kind.is_device() {
                    into.extend_from_slice(&device.to_le_bytes());
                }
                if *kind == Kind::Symlink {
                    into.extend_from_slice(&(target.len() as u16).to_le_bytes()); // MOST_TARGET_BYTES
                    into.extend_from_slice(target);
                }
            }
            Record::Gone { ino } => {
                into.push(GONE);
                into.extend_from_slice(&ino.to_le_bytes());
            }
            Record::Named { parent, ino, time, name } => put_entry(NAMED, *parent, *ino, *time, name, into),
            Record::Unnamed { parent, ino, time, name } => put_entry(UNNAMED, *parent, *ino, *time, name, into),
            Record::Set { ino, attributes } => {
                into.push(SET);
                into.extend_from_slice(&ino.to_le_bytes());
                put_attributes(attributes, into);
            }
            Record::Sized { ino, size, time } => {
                into.push(SIZED);
                [*ino, *size, *time as u64].iter().for_each(|word| into.extend_from_slice(&word.to_le_bytes()));
            }
            Record::Mapped { ino, run } => {
                into.push(MAPPED);
                into.extend_from_slice(&ino.to_le_bytes());
                [run.first, run.at, run.count].iter().for_each(|word| into.extend_from_slice(&word.to_le_bytes()));
            }
            Record::Unmapped { ino, first, count } => {
                into.push(UNMAPPED);
                into.extend_from_slice(&ino.to_le_bytes());
                [first, count].iter().for_each(|word| into.extend_from_slice(&word.to_le_bytes()));
            }
            Record::Xattr { ino, name, value } => {
                put_xattr(XATTR, *ino, name, into);
                into.extend_from_slice(&(value.len() as u16).to_le_bytes()); // MOST_XATTR_BYTES
                into.extend_from_slice(value);
            }
            Record::NoXattr { ino, name } => put_xattr(NO_XATTR, *ino, name, into),
            Record::Complete { next } => {
                into.push(COMPLETE);
                into.extend_from_slice(&next.to_le_bytes());
            }
        }
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        match self {
            Record::Made { target, kind, .. } => {
                let device = if kind.is_device() { 4 } else { 0 };
                10 + ATTRIBUTES_BYTES + device + if *kind == Kind::Symlink { 2 + target.len() } else { 0 }
            }
            Record::Gone { .. } | Record::Complete { .. } => 9,
            Record::Named { name, .. } | Record::Unnamed { name, .. } => 26 + name.len(),
            Record::Set { .. } => 9 + ATTRIBUTES_BYTES,
            Record::Sized { .. } => 25,
            Record::Mapped { .. } => 21,
            Record::Unmapped { .. } => 17,
            Record::Xattr { name, value, .. } => 12 + name.len() + value.len(),
            Record::NoXattr { name, .. } => 10 + name.len(),
        }
    }

    /// Takes a record off the beginning of `rest`. What decodes is encoded to the same bytes.
    ///
    /// # Errors
    /// [`Malformed`]: not a record.
    pub fn decode(rest: &mut &[u8]) -> Result<Record, Malformed> {
        let [tag] = take(rest)?;
        let ino = u64::from_le_bytes(take(rest)?);
        Ok(match tag {
            MADE => {
                let [kind] = take(rest)?;
                let kind = Kind::of_code(kind).ok_or(Malformed("what an inode is"))?;
                let attributes = take_attributes(rest)?;
                let device = if kind.is_device() { u32::from_le_bytes(take(rest)?) } else { 0 };
                let target = if kind == Kind::Symlink { take_target(rest)? } else { Box::default() };
                Record::Made { ino, kind, attributes, device, target }
            }
            GONE => Record::Gone { ino },
            NAMED | UNNAMED => {
                let (parent, ino) = (ino, u64::from_le_bytes(take(rest)?));
                let time = i64::from_le_bytes(take(rest)?);
                let [length] = take(rest)?;
                let name = take_slice(rest, length.into())?;
                if !is_name(name) {
                    return Err(Malformed("a name"));
                }
                let name = name.into();
                match tag {
                    NAMED => Record::Named { parent, ino, time, name },
                    _ => Record::Unnamed { parent, ino, time, name },
                }
            }
            SET => Record::Set { ino, attributes: take_attributes(rest)? },
            SIZED => {
                let size = u64::from_le_bytes(take(rest)?);
                Record::Sized { ino, size, time: i64::from_le_bytes(take(rest)?) }
            }
            MAPPED => {
                let first = u32::from_le_bytes(take(rest)?);
                let at = u32::from_le_bytes(take(rest)?);
                Record::Mapped { ino, run: Run { first, at, count: u32::from_le_bytes(take(rest)?) } }
            }
            UNMAPPED => {
                let first = u32::from_le_bytes(take(rest)?);
                Record::Unmapped { ino, first, count: u32::from_le_bytes(take(rest)?) }
            }
            COMPLETE => Record::Complete { next: ino },
            XATTR => {
                let name = take_xattr_name(rest)?;
                let length = u16::from_le_bytes(take(rest)?);
                Record::Xattr { ino, name, value: take_slice(rest, length.into())?.into() }
            }
            NO_XATTR => Record::NoXattr { ino, name: take_xattr_name(rest)? },
            _ => return Err(Malformed("the tag of a record")),
        })
    }
}

/// Whether a directory can have an entry of this name.
pub fn is_name(name: &[u8]) -> bool {
    (1..=MOST_NAME_BYTES).contains(&name.len())
        && name != b"."
        && name != b".."
        && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
}

/// The most bytes of a name, as on any Linux file system.
pub const MOST_NAME_BYTES: usize = 255;

fn put_entry(tag: u8, parent: u64, ino: u64, time: i64, name: &[u8], into: &mut Vec<u8>) {
    into.push(tag);
    [parent, ino, time as u64].iter().for_each(|word| into.extend_from_slice(&word.to_le_bytes()));
    into.push(name.len() as u8); // MOST_NAME_BYTES
    into.extend_from_slice(name);
}

fn put_xattr(tag: u8, ino: u64, name: &[u8], into: &mut Vec<u8>) {
    into.push(tag);
    into.extend_from_slice(&ino.to_le_bytes());
    into.push(name.len() as u8); // MOST_XATTR_NAME_BYTES
    into.extend_from_slice(name);
}

fn take_xattr_name(rest: &mut &[u8]) -> Result<Box<[u8]>, Malformed> {
    let [length] = take(rest)?;
    let name = take_slice(rest, length.into())?;
    if is_xattr_name(name) { Ok(name.into()) } else { Err(Malformed("the name of an extended attribute")) }
}

fn put_attributes(attributes: &Attributes, into: &mut Vec<u8>) {
    let Attributes { mode, uid, gid, accessed, modified, changed } = attributes;
    into.extend_from_slice(&mode.to_le_bytes());
    into.extend_from_slice(&uid.to_le_bytes());
    into.extend_from_slice(&gid.to_le_bytes());
    [accessed, modified, changed].iter().for_each(|time| into.extend_from_slice(&time.to_le_bytes()));
}

fn take_attributes(rest: &mut &[u8]) -> Result<Attributes, Malformed> {
    let mode = u16::from_le_bytes(take(rest)?);
    if mode & !Attributes::MODE != 0 {
        return Err(Malformed("a mode"));
    }
    let [uid, gid] = [u32::from_le_bytes(take(rest)?), u32::from_le_bytes(take(rest)?)];
    let mut time = || take(rest).map(i64::from_le_bytes);
    Ok(Attributes { mode, uid, gid, accessed: time()?, modified: time()?, changed: time()? })
}

fn take_target(rest: &mut &[u8]) -> Result<Box<[u8]>, Malformed> {
    let length = u16::from_le_bytes(take(rest)?);
    let target = take_slice(rest, length.into())?;
    let is_target = (1..=MOST_TARGET_BYTES).contains(&target.len()) && !target.contains(&0);
    if is_target { Ok(target.into()) } else { Err(Malformed("the target of a link")) }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Malformed> {
    let (field, after) = rest.split_first_chunk().ok_or(SHORT)?;
    *rest = after;
    Ok(*field)
}

fn take_slice<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], Malformed> {
    let (field, after) = rest.split_at_checked(length).ok_or(SHORT)?;
    *rest = after;
    Ok(field)
}

const SHORT: Malformed = Malformed("a record that ends too soon");

/// Where a frame is, for its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The use of the area.
    pub lap: u64,
    /// The offset in the area.
    pub at: u64,
}

impl Place {
    fn check(self, rest: &[u8]) -> u32 {
        crc32c_append(crc32c_append(crc32c(&self.lap.to_le_bytes()), &self.at.to_le_bytes()), rest)
    }
}

/// Bytes that are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not valid")]
pub struct Malformed(pub &'static str);

/// Appends a frame of these records, which are no more than [`MOST_FRAME_BYTES`].
pub fn encode_frame(place: Place, number: u64, records: &[Record], into: &mut Vec<u8>) {
    encode_frame_of(place, number, |into| records.iter().for_each(|record| record.encode(into)), into);
}

/// Appends a frame of what `put` appends.
pub(super) fn encode_frame_of(place: Place, number: u64, put: impl FnOnce(&mut Vec<u8>), into: &mut Vec<u8>) {
    let start = into.len();
    into.extend_from_slice(&[0; 8]);
    into.extend_from_slice(&number.to_le_bytes());
    put(into);
    let length = into.len() - start;
    debug_assert!(length <= MOST_FRAME_BYTES, "a frame of {length} bytes");
    into[start + 4..start + 8].copy_from_slice(&(length as u32).to_le_bytes());
    let check = place.check(&into[start + 4..]);
    into[start..start + 4].copy_from_slice(&check.to_le_bytes());
}

/// What is at a place where a frame may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found<'a> {
    /// A frame: its number, the bytes of its records, and its length.
    Frame {
        /// Its number.
        number: u64,
        /// Its records.
        records: &'a [u8],
        /// Bytes of the frame.
        length: usize,
    },
    /// Zeros: no frame was written here.
    Nothing,
    /// This number of bytes must be there to know.
    Short(usize),
    /// Neither.
    Other,
}

/// Looks for a frame at the beginning of these bytes.
pub fn find_frame(place: Place, bytes: &[u8]) -> Found<'_> {
    let Some((head, _)) = bytes.split_first_chunk::<FRAME_HEAD_BYTES>() else { return Found::Short(FRAME_HEAD_BYTES) };
    if *head == [0; FRAME_HEAD_BYTES] {
        return Found::Nothing;
    }
    let mut rest = head.as_slice();
    let (Ok(check), Ok(length), Ok(number)) = (take(&mut rest), take(&mut rest), take(&mut rest)) else {
        return Found::Other;
    };
    let length = u32::from_le_bytes(length) as usize;
    if !(FRAME_HEAD_BYTES..=MOST_FRAME_BYTES).contains(&length) {
        return Found::Other;
    }
    let Some(frame) = bytes.get(..length) else { return Found::Short(length) };
    if u32::from_le_bytes(check) != place.check(&frame[4..]) {
        return Found::Other;
    }
    Found::Frame { number: u64::from_le_bytes(number), records: &frame[FRAME_HEAD_BYTES..], length }
}
