//! Request: what the kernel asks, typed and checked.
//!
//! Nothing is believed, although the kernel says it: a name has 1 to [`MOST_NAME_BYTES`] bytes, without `/` and
//! NUL, and is neither `.` nor `..`; lengths lie inside what has arrived, offsets below 2^63. A request that breaks
//! this is answered with an errno and reaches no file system.
//!
//! Requests arrive in two parts: the operation's own fields, and what follows them. The device has them one behind
//! the other ([`operation_bytes`] says where to cut), the ring in two places.

use rustix::io::Errno;

use crate::abi::{self, Fields, InHeader, op, set};
use crate::answer::{FileKind, Payload, Timestamp};

/// The longest name, as in most file systems.
pub const MOST_NAME_BYTES: usize = 255;

/// The longest target of a symbolic link: `PATH_MAX` with its NUL.
pub const MOST_TARGET_BYTES: usize = 4096;

/// Inodes that one message can forget: what fits the least buffer for requests with room to spare. The kernel sends
/// fewer.
pub const MOST_FORGOTTEN: usize = 1 << 16;

/// The longest value of an extended attribute: `XATTR_SIZE_MAX`.
pub const MOST_VALUE_BYTES: usize = 64 << 10;

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
    /// The set-user-id bit goes, and so does the set-group-id bit if the group can execute the file. Said only if
    /// extended attributes are agreed; then a change of owner or size also takes the capabilities
    /// (`security.capability`).
    pub drops_set_id: bool,
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
    /// Its permission bits. The umask is applied already, unless [`crate::SessionOptions::xattrs`] are agreed.
    pub permissions: u32,
    /// The device's number, for a device: its lowest eight bits and the upper twelve are the minor, between them is the
    /// major.
    pub device: u32,
    /// Permission bits that the file does not get, unless the directory has a default ACL.
    pub umask: u32,
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
    /// Its permission bits. The umask is applied already, unless [`crate::SessionOptions::xattrs`] are agreed.
    pub permissions: u32,
    /// As [`MakeNode::umask`].
    pub umask: u32,
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
    /// Its permission bits. The umask is applied already, unless [`crate::SessionOptions::xattrs`] are agreed.
    pub permissions: u32,
    /// As [`MakeNode::umask`].
    pub umask: u32,
    /// As for `open(2)`.
    pub flags: OpenFlags,
    /// As [`SetAttributes::drops_set_id`], if a file that is there is truncated.
    pub drops_set_id: bool,
}

/// Makes a regular file without a name and opens it: `O_TMPFILE`. It may get a name later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateUnnamed {
    /// The directory whose group and default ACL it gets.
    pub parent: u64,
    /// Who asks, and owns it.
    pub caller: Caller,
    /// As [`Create::permissions`].
    pub permissions: u32,
    /// As [`MakeNode::umask`].
    pub umask: u32,
    /// As for `open(2)`. With `O_EXCL` it never gets a name.
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
    /// Who asks, and owns the whiteout.
    pub caller: Caller,
    /// What becomes of a file that has the new name.
    pub how: RenameHow,
    /// The old name then stands for a whiteout: a character device of number 0. Never with [`RenameHow::Exchange`].
    pub leaves_whiteout: bool,
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
    /// As [`SetAttributes::drops_set_id`], if it is truncated.
    pub drops_set_id: bool,
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
    /// As [`SetAttributes::drops_set_id`].
    pub drops_set_id: bool,
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

/// Asks for the value of an extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetXattr<'a> {
    /// The inode.
    pub node: u64,
    /// Who asks.
    pub caller: Caller,
    /// The attribute's name: 1 to 255 bytes.
    pub name: &'a [u8],
    /// Bytes that the caller has room for; 0 if it asks how long the value is.
    pub size: u32,
}

/// Sets an extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetXattr<'a> {
    /// The inode.
    pub node: u64,
    /// Who asks.
    pub caller: Caller,
    /// The attribute's name: 1 to 255 bytes.
    pub name: &'a [u8],
    /// Its value, of at most 64 KiB.
    pub value: &'a [u8],
    /// Whether it must be there before.
    pub how: SetXattrHow,
    /// It is an ACL, and the caller has no right to leave the set-group-id bit.
    pub drops_set_group_id: bool,
}

/// Whether an extended attribute must be there before it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetXattrHow {
    /// It may be.
    Any,
    /// It must not be: `EEXIST`.
    Create,
    /// It must be: `ENODATA`.
    Replace,
}

/// Asks for the names of all extended attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListXattrs {
    /// The inode.
    pub node: u64,
    /// Who asks.
    pub caller: Caller,
    /// Bytes that the caller has room for; 0 if it asks how long the list is.
    pub size: u32,
}

/// Removes an extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoveXattr<'a> {
    /// The inode.
    pub node: u64,
    /// Who asks.
    pub caller: Caller,
    /// The attribute's name: 1 to 255 bytes.
    pub name: &'a [u8],
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
    /// See [`Write::drops_set_id`].
    pub drops_set_id: bool,
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
    CreateUnnamed(CreateUnnamed),
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
    GetXattr(GetXattr<'a>),
    SetXattr(SetXattr<'a>),
    ListXattrs(ListXattrs),
    RemoveXattr(RemoveXattr<'a>),
    /// The process that waits for the answer to the request of this number has a signal. Has no answer.
    Interrupt(u64),
    /// The file system is not mounted any more.
    Destroy,
}

// Requests out of bytes.

/// Bytes of an operation's own fields. What follows them is its payload.
pub fn operation_bytes(opcode: u32) -> usize {
    match opcode {
        op::FORGET | op::RENAME | op::LINK | op::OPEN | op::OPENDIR | op::MKDIR => 8,
        op::BATCH_FORGET | op::INTERRUPT | op::GETXATTR | op::LISTXATTR => 8,
        op::GETATTR | op::MKNOD | op::CREATE | op::RENAME2 | op::FSYNC | op::FSYNCDIR => 16,
        op::TMPFILE | op::SETXATTR => 16,
        op::RELEASE | op::RELEASEDIR | op::FLUSH | op::LSEEK => 24,
        op::FALLOCATE => 32,
        op::READ | op::READDIR | op::READDIRPLUS | op::WRITE => 40,
        op::SETATTR => 88,
        _ => 0,
    }
}

/// Whether an operation is of extended attributes. Without an agreement about them, SETXATTR has fewer fields.
pub(crate) fn is_of_xattrs(opcode: u32) -> bool {
    matches!(opcode, op::SETXATTR | op::GETXATTR | op::LISTXATTR | op::REMOVEXATTR)
}

/// Reads a request: its head, its operation's fields and what follows.
///
/// # Errors
/// `ENOSYS` for an operation that is not known here; what the system says to names and lengths that cannot be.
pub fn parse<'a>(header: &InHeader, operation: &'a [u8], payload: &'a [u8]) -> Result<Request<'a>, Errno> {
    let wanted = operation_bytes(header.opcode);
    let fields = Fields(operation.get(..wanted).ok_or(Errno::INVAL)?);
    let parsed = Parser { header, fields, payload: Fields(payload) }.request();
    parsed.unwrap_or(Err(Errno::INVAL))
}

/// Reads the fields of a write, of which `length` bytes are there.
///
/// # Errors
/// As for [`parse`].
pub fn parse_write(header: &InHeader, operation: &[u8], length: usize) -> Result<WriteFields, Errno> {
    let wanted = operation_bytes(op::WRITE);
    let fields = Fields(operation.get(..wanted).ok_or(Errno::INVAL)?);
    let mut parser = Parser { header, fields, payload: Fields(&[]) };
    let fields = parser.place().and_then(|place| {
        let (how, _lock_owner) = (parser.fields.u32()?, parser.fields.u64()?);
        Some((place, how, OpenFlags(parser.fields.u32()?)))
    });
    let ((handle, offset, size), how, flags) = fields.ok_or(Errno::INVAL)?;
    if length < size as usize {
        return Err(Errno::INVAL);
    }
    range(offset, size.into())?;
    let (is_from_cache, drops_set_id) = (how & abi::WRITE_CACHE != 0, how & abi::WRITE_KILL_SUIDGID != 0);
    Ok(WriteFields { node: header.node, handle, offset, size, is_from_cache, flags, drops_set_id })
}

struct Parser<'h, 'a> {
    header: &'h InHeader,
    fields: Fields<'a>,
    payload: Fields<'a>,
}

impl<'a> Parser<'_, 'a> {
    /// `None`: too few bytes.
    fn request(mut self) -> Option<Result<Request<'a>, Errno>> {
        let node = self.header.node;
        let request = match self.header.opcode {
            op::LOOKUP => self.name().map(|name| Request::Lookup(Lookup { parent: node, name })),
            op::FORGET => Ok(Request::Forget(vec![(node, self.fields.u64()?)])),
            op::BATCH_FORGET => return self.forget(),
            op::GETATTR => {
                let (flags, _, handle) = (self.fields.u32()?, self.fields.u32()?, self.fields.u64()?);
                let handle = (flags & abi::GETATTR_FH != 0).then_some(handle);
                Ok(Request::GetAttributes(GetAttributes { node, handle }))
            }
            op::SETATTR => return self.set_attributes(),
            op::READLINK => Ok(Request::ReadLink(node)),
            op::SYMLINK => self.symlink(),
            op::MKNOD => return self.make_node(),
            op::MKDIR => {
                let (permissions, umask) = (self.fields.u32()? & PERMISSIONS, self.fields.u32()? & PERMISSIONS);
                let (parent, caller) = (node, self.caller());
                self.name()
                    .map(|name| Request::MakeDirectory(MakeDirectory { parent, name, caller, permissions, umask }))
            }
            op::UNLINK => self.name().map(|name| Request::Unlink(Remove { parent: node, name })),
            op::RMDIR => self.name().map(|name| Request::RemoveDirectory(Remove { parent: node, name })),
            op::RENAME => {
                let new_parent = self.fields.u64()?;
                self.rename(new_parent, 0)
            }
            op::RENAME2 => {
                let (new_parent, flags) = (self.fields.u64()?, self.fields.u32()?);
                self.rename(new_parent, flags)
            }
            op::LINK => {
                let linked = self.fields.u64()?;
                self.name().map(|name| Request::Link(Link { node: linked, parent: node, name }))
            }
            op::CREATE => {
                let (parent, caller) = (node, self.caller());
                let (flags, permissions, umask, drops_set_id) = self.created()?;
                self.name().map(|name| {
                    Request::Create(Create { parent, name, caller, permissions, umask, flags, drops_set_id })
                })
            }
            op::TMPFILE => {
                // The name that follows means nothing.
                let (parent, caller) = (node, self.caller());
                let (flags, permissions, umask, _) = self.created()?;
                Ok(Request::CreateUnnamed(CreateUnnamed { parent, caller, permissions, umask, flags }))
            }
            op::OPEN => Ok(Request::Open(self.open()?)),
            op::OPENDIR => Ok(Request::OpenDirectory(self.open()?)),
            op::GETXATTR => {
                let (size, caller) = (self.fields.u32()?, self.caller());
                self.xattr_name().map(|name| Request::GetXattr(GetXattr { node, caller, name, size }))
            }
            op::SETXATTR => return self.set_xattr(),
            op::LISTXATTR => {
                let (size, caller) = (self.fields.u32()?, self.caller());
                Ok(Request::ListXattrs(ListXattrs { node, caller, size }))
            }
            op::REMOVEXATTR => {
                let caller = self.caller();
                self.xattr_name().map(|name| Request::RemoveXattr(RemoveXattr { node, caller, name }))
            }
            op::READ => {
                let (handle, offset, size) = self.place()?;
                range(offset, size.into()).map(|()| Request::Read(Read { node, handle, offset, size }))
            }
            op::WRITE => parse_write(self.header, self.fields.0, self.payload.0.len()).map(Request::Write),
            op::READDIR | op::READDIRPLUS => {
                // An offset is the file system's own number.
                let (handle, offset, size) = self.place()?;
                let asked = ReadDirectory { node, handle, offset, size };
                let is_plus = self.header.opcode == op::READDIRPLUS;
                Ok(if is_plus { Request::ReadDirectoryPlus(asked) } else { Request::ReadDirectory(asked) })
            }
            op::FLUSH => Ok(Request::Flush(self.close()?)),
            op::RELEASE => Ok(Request::Release(self.close()?)),
            op::RELEASEDIR => Ok(Request::ReleaseDirectory(self.close()?)),
            op::FSYNC => Ok(Request::Fsync(self.sync()?)),
            op::FSYNCDIR => Ok(Request::FsyncDirectory(self.sync()?)),
            op::STATFS => Ok(Request::Statistics(node)),
            op::FALLOCATE => {
                let (handle, offset, length) = (self.fields.u64()?, self.fields.u64()?, self.fields.u64()?);
                let mode = self.fields.u32()?;
                let is_nothing = if length == 0 { Err(Errno::INVAL) } else { Ok(()) };
                let checked = is_nothing.and_then(|()| range(offset, length));
                checked.map(|()| Request::Allocate(Allocate { node, handle, offset, length, mode }))
            }
            op::LSEEK => {
                let (handle, offset, whence) = (self.fields.u64()?, self.fields.u64()?, self.fields.u32()?);
                let for_data = match whence {
                    SEEK_DATA => true,
                    SEEK_HOLE => false,
                    _ => return Some(Err(Errno::INVAL)),
                };
                range(offset, 0).map(|()| Request::Seek(Seek { node, handle, offset, for_data }))
            }
            op::INTERRUPT => Ok(Request::Interrupt(self.fields.u64()?)),
            op::DESTROY => Ok(Request::Destroy),
            _ => Err(Errno::NOSYS),
        };
        Some(request)
    }

    fn caller(&self) -> Caller {
        Caller { uid: self.header.uid, gid: self.header.gid, pid: self.header.pid }
    }

    fn forget(mut self) -> Option<Result<Request<'a>, Errno>> {
        let count = self.fields.u32()? as usize;
        if count > MOST_FORGOTTEN || self.payload.0.len() < count.checked_mul(16)? {
            return Some(Err(Errno::INVAL));
        }
        let forgotten = (0..count).map(|_| Some((self.payload.u64()?, self.payload.u64()?)));
        Some(Ok(Request::Forget(forgotten.collect::<Option<_>>()?)))
    }

    fn set_attributes(mut self) -> Option<Result<Request<'a>, Errno>> {
        let fields = &mut self.fields;
        let (valid, _) = (fields.u32()?, fields.u32()?);
        let (handle, size, _lock_owner) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let seconds = [fields.u64()?, fields.u64()?, fields.u64()?];
        let nanoseconds = [fields.u32()?, fields.u32()?, fields.u32()?];
        let (mode, _, uid, gid) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
        let has = |flag: u32| valid & flag != 0;
        let at = |which: usize| Timestamp { seconds: seconds[which].cast_signed(), nanoseconds: nanoseconds[which] };
        let time = |which: usize, flag: u32, now: u32| match (has(flag), has(now)) {
            (_, true) => Some(NewTime::Now),
            (true, false) => Some(NewTime::At(at(which))),
            (false, false) => None,
        };
        let size = has(set::SIZE).then_some(size);
        if size.is_some_and(|size| range(size, 0).is_err()) {
            return Some(Err(Errno::FBIG));
        }
        if nanoseconds.iter().any(|nanoseconds| *nanoseconds >= NANOSECONDS) {
            return Some(Err(Errno::INVAL));
        }
        Some(Ok(Request::SetAttributes(SetAttributes {
            node: self.header.node,
            handle: has(set::FH).then_some(handle),
            caller: self.caller(),
            permissions: has(set::MODE).then_some(mode & PERMISSIONS),
            uid: has(set::UID).then_some(uid),
            gid: has(set::GID).then_some(gid),
            size,
            accessed: time(0, set::ATIME, set::ATIME_NOW),
            modified: time(1, set::MTIME, set::MTIME_NOW),
            changed: has(set::CTIME).then(|| at(2)),
            drops_set_id: has(set::KILL_SUIDGID),
        })))
    }

    fn make_node(mut self) -> Option<Result<Request<'a>, Errno>> {
        let (mode, device, caller) = (self.fields.u32()?, self.fields.u32()?, self.caller());
        let umask = self.fields.u32()? & PERMISSIONS;
        let Some(kind) = FileKind::of_mode(mode) else { return Some(Err(Errno::INVAL)) };
        let (parent, permissions) = (self.header.node, mode & PERMISSIONS);
        let name = self.name();
        Some(name.map(|name| Request::MakeNode(MakeNode { parent, name, caller, kind, permissions, device, umask })))
    }

    /// How a file is to be made and opened: flags, permissions, umask, and whether its set-id bits go.
    fn created(&mut self) -> Option<(OpenFlags, u32, u32, bool)> {
        let flags = OpenFlags(self.fields.u32()?);
        let (permissions, umask) = (self.fields.u32()? & PERMISSIONS, self.fields.u32()? & PERMISSIONS);
        Some((flags, permissions, umask, self.fields.u32()? & abi::OPEN_KILL_SUIDGID != 0))
    }

    fn open(&mut self) -> Option<Open> {
        let (flags, how) = (OpenFlags(self.fields.u32()?), self.fields.u32()?);
        Some(Open { node: self.header.node, flags, drops_set_id: how & abi::OPEN_KILL_SUIDGID != 0 })
    }

    fn set_xattr(mut self) -> Option<Result<Request<'a>, Errno>> {
        let (size, flags, more) = (self.fields.u32()? as usize, self.fields.u32()?, self.fields.u32()?);
        let how = match flags {
            0 => SetXattrHow::Any,
            XATTR_CREATE => SetXattrHow::Create,
            XATTR_REPLACE => SetXattrHow::Replace,
            _ => return Some(Err(Errno::INVAL)),
        };
        let (node, caller, drops_set_group_id) =
            (self.header.node, self.caller(), more & abi::SETXATTR_ACL_KILL_SGID != 0);
        let name = match self.xattr_name() {
            Ok(name) => name,
            Err(errno) => return Some(Err(errno)),
        };
        if size > MOST_VALUE_BYTES {
            return Some(Err(Errno::TOOBIG));
        }
        let value = self.payload.bytes(size)?;
        Some(Ok(Request::SetXattr(SetXattr { node, caller, name, value, how, drops_set_group_id })))
    }

    /// The name of an extended attribute. It may have any bytes.
    fn xattr_name(&mut self) -> Result<&'a [u8], Errno> {
        self.string(MOST_NAME_BYTES).map_err(|errno| match errno {
            Errno::NAMETOOLONG | Errno::NOENT => Errno::RANGE, // as the kernel says it
            other => other,
        })
    }

    fn symlink(&mut self) -> Result<Request<'a>, Errno> {
        let (parent, caller) = (self.header.node, self.caller());
        let name = self.name()?;
        let target = self.string(MOST_TARGET_BYTES - 1)?;
        Ok(Request::Symlink(Symlink { parent, name, target, caller }))
    }

    fn rename(&mut self, new_parent: u64, flags: u32) -> Result<Request<'a>, Errno> {
        let leaves_whiteout = flags & RENAME_WHITEOUT != 0;
        let how = match flags & !RENAME_WHITEOUT {
            0 => RenameHow::Replace,
            RENAME_NOREPLACE => RenameHow::NoReplace,
            RENAME_EXCHANGE if !leaves_whiteout => RenameHow::Exchange,
            _ => return Err(Errno::INVAL),
        };
        let (name, new_name) = (self.name()?, self.name()?);
        let (parent, caller) = (self.header.node, self.caller());
        Ok(Request::Rename(Rename { parent, name, new_parent, new_name, caller, how, leaves_whiteout }))
    }

    fn place(&mut self) -> Option<(u64, u64, u32)> {
        Some((self.fields.u64()?, self.fields.u64()?, self.fields.u32()?))
    }

    fn close(&mut self) -> Option<Close> {
        Some(Close { node: self.header.node, handle: self.fields.u64()? })
    }

    fn sync(&mut self) -> Option<Fsync> {
        let (handle, flags) = (self.fields.u64()?, self.fields.u32()?);
        Some(Fsync { node: self.header.node, handle, data_only: flags & abi::FSYNC_FDATASYNC != 0 })
    }

    /// The next name. See the module's text.
    fn name(&mut self) -> Result<&'a [u8], Errno> {
        let name = self.string(MOST_NAME_BYTES)?;
        if name.contains(&b'/') || name == b"." || name == b".." { Err(Errno::INVAL) } else { Ok(name) }
    }

    /// The next string, which ends with a NUL.
    fn string(&mut self, most: usize) -> Result<&'a [u8], Errno> {
        let looked_at = &self.payload.0[..self.payload.0.len().min(most + 1)];
        let Some(length) = looked_at.iter().position(|byte| *byte == 0) else {
            return Err(if looked_at.len() > most { Errno::NAMETOOLONG } else { Errno::INVAL });
        };
        let string = self.payload.bytes(length + 1).ok_or(Errno::INVAL)?;
        if length == 0 { Err(Errno::NOENT) } else { Ok(&string[..length]) }
    }
}

/// Files have less than 2^63 bytes.
fn range(offset: u64, length: u64) -> Result<(), Errno> {
    let end = offset.checked_add(length).filter(|end| i64::try_from(*end).is_ok());
    end.map(|_| ()).ok_or(Errno::FBIG)
}

/// The bits of a mode that are permissions.
const PERMISSIONS: u32 = 0o7777;

const NANOSECONDS: u32 = 1_000_000_000;

const SEEK_DATA: u32 = 3;

const SEEK_HOLE: u32 = 4;

const RENAME_NOREPLACE: u32 = 1 << 0;

const RENAME_EXCHANGE: u32 = 1 << 1;

const RENAME_WHITEOUT: u32 = 1 << 2;

const XATTR_CREATE: u32 = 1 << 0;

const XATTR_REPLACE: u32 = 1 << 1;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::abi::Put;

    /// Reads a request whose fields are words of 4 and 8 bytes.
    fn parsed<'a>(opcode: u32, fields: &'a [u8], payload: &'a [u8]) -> Result<Request<'a>, Errno> {
        assert_eq!(fields.len(), operation_bytes(opcode), "operation {opcode}");
        let header = InHeader { length: 0, opcode, unique: 1, node: NODE, uid: 3, gid: 4, pid: 5, extensions: 0 };
        parse(&header, fields, payload)
    }

    const NODE: u64 = 77;

    const CALLER: Caller = Caller { uid: 3, gid: 4, pid: 5 };

    fn fields(put: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut fields = Vec::new();
        put(&mut fields);
        fields
    }

    fn name() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(
            any::<u8>().prop_filter("in names", |byte| !matches!(byte, 0 | b'/')),
            1..=MOST_NAME_BYTES,
        )
        .prop_filter("dots", |name| name != b"." && name != b"..")
    }

    proptest! {
        #[test]
        fn what_is_asked_of_names_arrives(
            name in name(), other in name(), target in prop::collection::vec(1..=255_u8, 1..MOST_TARGET_BYTES), number: u64, mode: u32, flags in 0..3_u32
        ) {
            let (text, permissions) = ([&name[..], &[0]].concat(), mode & 0o7777);
            let two = [&name[..], &[0], &other, &[0]].concat();
            let with_target = [&name[..], &[0], &target, &[0]].concat();
            let (name, parent) = (&name[..], NODE);
            prop_assert_eq!(parsed(op::LOOKUP, &[], &text), Ok(Request::Lookup(Lookup { parent, name })));
            let umask = 0o27;
            let make = fields(|f| _ = f.put_u32(0o040_000 | permissions).put_u32(0o22));
            let asked = MakeDirectory { parent, name, caller: CALLER, permissions, umask: 0o22 };
            prop_assert_eq!(parsed(op::MKDIR, &make, &text), Ok(Request::MakeDirectory(asked)));
            let make = fields(|f| _ = f.put_u32(0o010_000 | permissions).put_u32(mode).put_u64(0o27));
            let kind = FileKind::Pipe;
            let asked = MakeNode { parent, name, caller: CALLER, kind, permissions, device: mode, umask };
            prop_assert_eq!(parsed(op::MKNOD, &make, &text), Ok(Request::MakeNode(asked)));
            let drops_set_id = flags == 1;
            let create = fields(|f| {
                f.put_u32(mode).put_u32(0o100_000 | permissions).put_u32(0o27).put_u32(flags);
            });
            let flags_of_it = OpenFlags(mode);
            let asked = CreateUnnamed { parent, caller: CALLER, permissions, umask, flags: flags_of_it };
            prop_assert_eq!(parsed(op::TMPFILE, &create, b"/\0"), Ok(Request::CreateUnnamed(asked)));
            let open = fields(|f| _ = f.put_u32(mode).put_u32(flags));
            let asked = Open { node: NODE, flags: flags_of_it, drops_set_id };
            prop_assert_eq!(parsed(op::OPEN, &open, &[]), Ok(Request::Open(asked)));
            let asked = Create { parent, name, caller: CALLER, permissions, umask, flags: flags_of_it, drops_set_id };
            prop_assert_eq!(parsed(op::CREATE, &create, &text), Ok(Request::Create(asked)));
            let asked = Link { node: number, parent, name };
            let link = fields(|f| _ = f.put_u64(number));
            prop_assert_eq!(parsed(op::LINK, &link, &text), Ok(Request::Link(asked)));
            let asked = Symlink { parent, name, target: &target, caller: CALLER };
            prop_assert_eq!(parsed(op::SYMLINK, &[], &with_target), Ok(Request::Symlink(asked)));
            let how = [RenameHow::Replace, RenameHow::NoReplace, RenameHow::Exchange][flags as usize];
            let leaves_whiteout = mode & 1 != 0 && how != RenameHow::Exchange;
            let asked = Rename { parent, name, new_parent: number, new_name: &other, caller: CALLER, how, leaves_whiteout };
            let whiteout = if leaves_whiteout { RENAME_WHITEOUT } else { 0 };
            let rename = fields(|f| _ = f.put_u64(number).put_u32(flags | whiteout).put_u32(0));
            prop_assert_eq!(parsed(op::RENAME2, &rename, &two), Ok(Request::Rename(asked)));
            let both = fields(|f| _ = f.put_u64(number).put_u64(3));
            prop_assert_eq!(parsed(op::RENAME2, &both, &two), Err(Errno::INVAL), "NOREPLACE and EXCHANGE");
            let both = fields(|f| _ = f.put_u64(number).put_u64(6));
            prop_assert_eq!(parsed(op::RENAME2, &both, &two), Err(Errno::INVAL), "EXCHANGE and WHITEOUT");
        }

        #[test]
        fn what_is_asked_of_extended_attributes_arrives(
            name in prop::collection::vec(1..=255_u8, 1..=MOST_NAME_BYTES), value in prop::collection::vec(any::<u8>(), 0..300), size: u32, flags in 0..3_u32, kills: bool
        ) {
            let (text, node, caller) = ([&name[..], &[0]].concat(), NODE, CALLER);
            let (name, asked) = (&name[..], fields(|f| _ = f.put_u32(size).put_u32(0)));
            let get = GetXattr { node, caller, name, size };
            prop_assert_eq!(parsed(op::GETXATTR, &asked, &text), Ok(Request::GetXattr(get)));
            prop_assert_eq!(parsed(op::LISTXATTR, &asked, &[]), Ok(Request::ListXattrs(ListXattrs { node, caller, size })));
            prop_assert_eq!(parsed(op::REMOVEXATTR, &[], &text), Ok(Request::RemoveXattr(RemoveXattr { node, caller, name })));
            let set = |length: usize, flags: u32| fields(|f| {
                f.put_u32(length as u32).put_u32(flags).put_u32(u32::from(kills)).put_u32(0);
            });
            let both = [&text[..], &value].concat();
            let how = [SetXattrHow::Any, SetXattrHow::Create, SetXattrHow::Replace][flags as usize];
            let asked = SetXattr { node, caller, name, value: &value, how, drops_set_group_id: kills };
            let cases = [
                (set(value.len(), flags), Ok(Request::SetXattr(asked))),
                (set(value.len() + 1, flags), Err(Errno::INVAL)),
                (set(value.len(), 3), Err(Errno::INVAL)),
                (set(MOST_VALUE_BYTES + 1, 0), Err(Errno::TOOBIG)),
            ];
            for (fields, expected) in &cases {
                prop_assert_eq!(&parsed(op::SETXATTR, fields, &both), expected);
            }
            for name in [&[0][..], &[b'a'; 300]] {
                prop_assert_eq!(parsed(op::GETXATTR, &[0; 8], name), Err(Errno::RANGE));
            }
        }

        #[test]
        fn what_is_asked_of_content_arrives(handle: u64, offset in 0..1_u64 << 62, size in 0..1_u32 << 20, other: u32) {
            let place = fields(|f| _ = f.put_u64(handle).put_u64(offset).put_u32(size).put_u32(other).put_u64(0).put_u32(!other).put_u32(0));
            let node = NODE;
            prop_assert_eq!(parsed(op::READ, &place, &[]), Ok(Request::Read(Read { node, handle, offset, size })));
            let is_from_cache = other & 1 != 0;
            let drops_set_id = other & 4 != 0;
            let written = WriteFields { node, handle, offset, size, is_from_cache, flags: OpenFlags(!other), drops_set_id };
            let data = vec![0; size as usize];
            prop_assert_eq!(parsed(op::WRITE, &place, &data), Ok(Request::Write(written)));
            if size > 0 {
                prop_assert_eq!(parsed(op::WRITE, &place, &data[1..]), Err(Errno::INVAL));
            }
            let allocate = fields(|f| _ = f.put_u64(handle).put_u64(offset).put_u64(u64::from(size) + 1).put_u32(other).put_u32(0));
            let asked = Allocate { node, handle, offset, length: u64::from(size) + 1, mode: other };
            prop_assert_eq!(parsed(op::FALLOCATE, &allocate, &[]), Ok(Request::Allocate(asked)));
            let beyond = fields(|f| _ = f.put_u64(handle).put_u64(i64::MAX as u64).put_u32(size + 1).put_u32(0).put_u64(0).put_u64(0));
            prop_assert_eq!(parsed(op::READ, &beyond, &[]), Err(Errno::FBIG));
            let sync = fields(|f| _ = f.put_u64(handle).put_u32(other).put_u32(0));
            prop_assert_eq!(parsed(op::FSYNC, &sync, &[]), Ok(Request::Fsync(Fsync { node, handle, data_only: is_from_cache })));
        }

        /// Each attribute arrives if its flag is set, and no other.
        #[test]
        fn attributes_arrive_as_their_flags_say(
            valid in 0..0x1000_u32, handle: u64, size in 0..1_u64 << 63, seconds: [i64; 3], nanoseconds in prop::array::uniform3(0..1_000_000_000_u32), mode: u32, uid: u32, gid: u32
        ) {
            let bytes = fields(|f| {
                f.put_u32(valid).put_u32(0).put_u64(handle).put_u64(size).put_u64(0);
                seconds.iter().for_each(|seconds| _ = f.put_u64(seconds.cast_unsigned()));
                nanoseconds.iter().for_each(|nanoseconds| _ = f.put_u32(*nanoseconds));
                f.put_u32(mode).put_u32(0).put_u32(uid).put_u32(gid).put_u32(0);
            });
            let has = |bit: u32| valid & 1 << bit != 0;
            let at = |which: usize| Timestamp { seconds: seconds[which], nanoseconds: nanoseconds[which] };
            let time = |which: usize, bit: u32, now: u32| match has(now) {
                true => Some(NewTime::Now),
                false => has(bit).then(|| NewTime::At(at(which))),
            };
            let expected = SetAttributes {
                node: NODE, caller: CALLER,
                permissions: has(0).then_some(mode & 0o7777),
                uid: has(1).then_some(uid), gid: has(2).then_some(gid), size: has(3).then_some(size),
                accessed: time(0, 4, 7), modified: time(1, 5, 8), handle: has(6).then_some(handle),
                changed: has(10).then(|| at(2)), drops_set_id: has(11),
            };
            prop_assert_eq!(parsed(op::SETATTR, &bytes, &[]), Ok(Request::SetAttributes(expected)));
        }
    }
}
