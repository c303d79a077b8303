//! Request: what the kernel asks, typed and checked.
//!
//! Nothing is believed, although the kernel says it: a name has 1 to [`MOST_NAME_BYTES`] bytes, without `/` and
//! NUL, and is neither `.` nor `..`; lengths lie inside what has arrived, offsets below 2^63. A request that breaks
//! this is answered with an errno and reaches no file system.
//!
//! Requests arrive in two parts: the operation's own fields, and what follows them. The device has them one behind
//! the other ([`operation_bytes`] says where to cut), the ring in two places.

mod parse;

use crate::payload::Payload;
use crate::reply::{FileKind, Timestamp};
pub use parse::{operation_bytes, parse, parse_write};

/// The longest name, as in most file systems.
pub const MOST_NAME_BYTES: usize = 255;

/// The longest target of a symbolic link: `PATH_MAX` with its NUL.
pub const MOST_TARGET_BYTES: usize = 4096;

/// Inodes that one message can forget: what fits the least buffer for requests with room to spare. The kernel sends
/// fewer.
pub const MOST_FORGOTTEN: usize = 1 << 16;

/// On whose behalf the kernel asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The process; 0 if it is not visible here.
    pub pid: u32,
}

/// Finds a name in a directory. Its answer counts: the kernel knows the inode until it has forgotten it as often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup<'a> {
    /// The directory.
    pub parent: u64,
    /// What is looked for.
    pub name: &'a [u8],
}

/// Asks for attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetAttributes {
    /// The inode.
    pub node: u64,
    /// The open file through which it is asked, if it is.
    pub handle: Option<u64>,
}

/// A time to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewTime {
    /// The time at which the request is done.
    Now,
    /// This one.
    At(Timestamp),
}

/// Changes attributes; `None` leaves one as it is. The answer has all of them. A change of size makes the file
/// shorter, or longer with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetAttributes {
    /// The inode.
    pub node: u64,
    /// The open file through which it is asked, if it is.
    pub handle: Option<u64>,
    /// Who asks.
    pub caller: Caller,
    /// The permission bits, 12 of them.
    pub permissions: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The length in bytes.
    pub size: Option<u64>,
    /// When it was last read.
    pub accessed: Option<NewTime>,
    /// When its content last changed.
    pub modified: Option<NewTime>,
    /// When its attributes last changed: said only with the kernel's write-back cache.
    pub changed: Option<Timestamp>,
}

/// Makes a file that is not opened, of any kind but directories and symbolic links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MakeNode<'a> {
    /// The directory.
    pub parent: u64,
    /// Its name.
    pub name: &'a [u8],
    /// Who asks, and owns it.
    pub caller: Caller,
    /// What it is.
    pub kind: FileKind,
    /// Its permission bits; the umask is already applied.
    pub permissions: u32,
    /// The device's number, for a device.
    pub device: u32,
}

/// Makes a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MakeDirectory<'a> {
    /// The directory in which it is made.
    pub parent: u64,
    /// Its name.
    pub name: &'a [u8],
    /// Who asks, and owns it.
    pub caller: Caller,
    /// Its permission bits; the umask is already applied.
    pub permissions: u32,
}

/// Makes a regular file and opens it. If the name is there and `flags` has no `O_EXCL`, opens that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Create<'a> {
    /// The directory.
    pub parent: u64,
    /// Its name.
    pub name: &'a [u8],
    /// Who asks, and owns it.
    pub caller: Caller,
    /// Its permission bits; the umask is already applied.
    pub permissions: u32,
    /// As for `open(2)`.
    pub flags: OpenFlags,
}

/// Makes a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symlink<'a> {
    /// The directory.
    pub parent: u64,
    /// Its name.
    pub name: &'a [u8],
    /// What it says: 1 to 4095 bytes.
    pub target: &'a [u8],
    /// Who asks, and owns it.
    pub caller: Caller,
}

/// Gives an inode another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link<'a> {
    /// The inode.
    pub node: u64,
    /// The directory of the new name.
    pub parent: u64,
    /// The new name.
    pub name: &'a [u8],
}

/// Removes a name: of a directory by `rmdir`, of everything else by `unlink`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remove<'a> {
    /// The directory that has it.
    pub parent: u64,
    /// The name.
    pub name: &'a [u8],
}

/// Renames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rename<'a> {
    /// The directory of the old name.
    pub parent: u64,
    /// The old name.
    pub name: &'a [u8],
    /// The directory of the new name.
    pub new_parent: u64,
    /// The new name.
    pub new_name: &'a [u8],
    /// What becomes of a file that has the new name.
    pub how: RenameHow,
}

/// What becomes of a file that has the new name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameHow {
    /// It is replaced.
    Replace,
    /// Nothing is renamed: `EEXIST`.
    NoReplace,
    /// It gets the old name.
    Exchange,
}

/// Opens a file or a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// The inode.
    pub node: u64,
    /// As for `open(2)`, without `O_CREAT` and `O_EXCL`.
    pub flags: OpenFlags,
}

/// Flags of `open(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFlags(pub u32);

impl OpenFlags {
    /// The file can be read.
    pub fn reads(self) -> bool {
        matches!(self.mode(), RDONLY | RDWR)
    }

    /// The file can be written.
    pub fn writes(self) -> bool {
        matches!(self.mode(), WRONLY | RDWR)
    }

    /// Its content is thrown away first.
    pub fn truncates(self) -> bool {
        self.has(rustix::fs::OFlags::TRUNC)
    }

    /// Only a file that was not there is wanted.
    pub fn is_exclusive(self) -> bool {
        self.has(rustix::fs::OFlags::EXCL)
    }

    /// Writes go to the end. The kernel says where that is, so this is only needed by file systems of many writers.
    pub fn appends(self) -> bool {
        self.has(rustix::fs::OFlags::APPEND)
    }

    /// The page cache is not to be used.
    pub fn is_direct(self) -> bool {
        self.has(rustix::fs::OFlags::DIRECT)
    }

    fn mode(self) -> u32 {
        self.0 & ACCESS_MODE
    }

    /// Each write must be safe when it is answered: `O_DSYNC`, which `O_SYNC` contains.
    pub fn is_synchronous(self) -> bool {
        self.has(rustix::fs::OFlags::DSYNC)
    }

    fn has(self, flag: rustix::fs::OFlags) -> bool {
        self.0 & flag.bits() != 0
    }
}

const RDONLY: u32 = 0;
const WRONLY: u32 = 1;
const RDWR: u32 = 2;
const ACCESS_MODE: u32 = 3;

/// Reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The inode.
    pub node: u64,
    /// The open file.
    pub handle: u64,
    /// From this byte on.
    pub offset: u64,
    /// As many bytes. Fewer are the end of the file.
    pub size: u32,
}

/// Writes.
#[derive(Debug)]
pub struct Write<'a> {
    /// The inode.
    pub node: u64,
    /// The open file.
    pub handle: u64,
    /// From this byte on.
    pub offset: u64,
    /// The bytes.
    pub data: Payload<'a>,
    /// The kernel writes its cache back. The handle may then be another's that has the file open for writing.
    pub is_from_cache: bool,
    /// How the file is open, and how the call wants it: with `O_DSYNC` or `O_SYNC` if it must be safe.
    pub flags: OpenFlags,
}

/// An open file whose descriptor is closed, or whose last one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Close {
    /// The inode.
    pub node: u64,
    /// The open file.
    pub handle: u64,
}

/// Makes a file or a directory safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fsync {
    /// The inode.
    pub node: u64,
    /// The open file.
    pub handle: u64,
    /// Attributes that are not needed to find the data may wait.
    pub data_only: bool,
}

/// Lists a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadDirectory {
    /// The inode.
    pub node: u64,
    /// The open directory.
    pub handle: u64,
    /// Behind the entry that was listed with this offset; 0 from the first on.
    pub offset: u64,
    /// Bytes of the answer, at most.
    pub size: u32,
}

/// Allocates or gives back room in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocate {
    /// The inode.
    pub node: u64,
    /// The open file.
    pub handle: u64,
    /// From this byte on.
    pub offset: u64,
    /// As many bytes; never 0.
    pub length: u64,
    /// `FALLOC_FL_…` as for `fallocate(2)`.
    pub mode: u32,
}

/// Finds data or a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seek {
    /// The inode.
    pub node: u64,
    /// The open file.
    pub handle: u64,
    /// From this byte on.
    pub offset: u64,
    /// Data is looked for, or else a hole.
    pub for_data: bool,
}

/// The fields of a write. Its bytes are where the transport has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteFields {
    /// The inode.
    pub node: u64,
    /// The open file.
    pub handle: u64,
    /// From this byte on.
    pub offset: u64,
    /// Bytes.
    pub size: u32,
    /// See [`Write::is_from_cache`].
    pub is_from_cache: bool,
    /// See [`Write::flags`].
    pub flags: OpenFlags,
}

/// One request.
#[allow(missing_docs)] // each is described where its fields are
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    Lookup(Lookup<'a>),
    /// Inodes, each with the number of lookups that the kernel forgets. Has no answer.
    Forget(Vec<(u64, u64)>),
    GetAttributes(GetAttributes),
    SetAttributes(SetAttributes),
    /// Of this inode.
    ReadLink(u64),
    Symlink(Symlink<'a>),
    MakeNode(MakeNode<'a>),
    MakeDirectory(MakeDirectory<'a>),
    Unlink(Remove<'a>),
    RemoveDirectory(Remove<'a>),
    Rename(Rename<'a>),
    Link(Link<'a>),
    Create(Create<'a>),
    Open(Open),
    Read(Read),
    Write(WriteFields),
    Flush(Close),
    Release(Close),
    Fsync(Fsync),
    OpenDirectory(Open),
    ReadDirectory(ReadDirectory),
    ReadDirectoryPlus(ReadDirectory),
    ReleaseDirectory(Close),
    FsyncDirectory(Fsync),
    /// Of the file system that has this inode.
    Statistics(u64),
    Allocate(Allocate),
    Seek(Seek),
    /// The process that waits for the answer to the request of this number has a signal. Has no answer.
    Interrupt(u64),
    /// The file system is not mounted any more.
    Destroy,
}
