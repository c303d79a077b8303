//! Abi: the numbers of the FUSE protocol, 7.31 to 7.45, as `linux/fuse.h` gives them, and its fields as bytes.
//!
//! Both ends are on one machine, so numbers are in its byte order. Structs are padded to eight bytes. Each is read
//! and written field by field, in the order of the header.

/// The protocol's major version.
pub const MAJOR: u32 = 7;

/// The newest minor version whose meaning is known here. The kernel uses the lower one of both ends.
pub const MINOR: u32 = 45;

/// The oldest that is served: Linux 5.4.
pub const LEAST_MINOR: u32 = 31;

/// The inode number of the root.
pub const ROOT: u64 = 1;

/// `fuse_in_header`.
pub const IN_HEADER_BYTES: usize = 40;

/// `fuse_out_header`.
pub const OUT_HEADER_BYTES: usize = 16;

/// `fuse_entry_out`.
pub const ENTRY_BYTES: usize = 128;

/// `fuse_dirent` without its name.
pub const DIRENT_BYTES: usize = 24;

/// `fuse_init_in`, as kernels have sent it since 7.36. Older ones send the first [`OLD_INIT_BYTES`].
pub const INIT_BYTES: usize = 64;

/// `fuse_init_in` before 7.36.
pub const OLD_INIT_BYTES: usize = 16;

/// The least buffer with which the kernel allows a read of its device.
pub const LEAST_READ_BYTES: usize = 8192;

/// What is asked: `enum fuse_opcode`.
#[allow(missing_docs)] // the names say it
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const TMPFILE: u32 = 51;
}

/// What both ends can do: flags of INIT. Those above 31 are in a second word.
#[allow(missing_docs)]
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const BIG_WRITES: u64 = 1 << 5;
    /// The file system applies the umask: a directory with a default ACL has none.
    pub const DONT_MASK: u64 = 1 << 6;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// The kernel checks permissions by ACLs, which it gets and sets as extended attributes.
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    /// The file system clears the set-id bits and the capabilities of files that are changed. The kernel then asks for
    /// the capabilities once, and not before each write.
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    /// SETXATTR has a word more.
    pub const SETXATTR_EXT: u64 = 1 << 29;
    /// There is a second word of flags.
    pub const INIT_EXT: u64 = 1 << 30;
    /// Files opened with `FOPEN_DIRECT_IO` may be mapped shared.
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Flags of SETATTR: which fields count.
#[allow(missing_docs)]
pub mod set {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Flags of an opened file: `FOPEN_…`.
#[allow(missing_docs)]
pub mod opened {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
    pub const NOFLUSH: u32 = 1 << 5;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// A flag of GETATTR: its file handle counts.
pub const GETATTR_FH: u32 = 1 << 0;

/// A flag of WRITE: the kernel writes its page cache back, and the handle is one of those that are open for writing.
pub const WRITE_CACHE: u32 = 1 << 0;

/// A flag of WRITE: the caller has no right to leave the file's set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// A flag of OPEN and CREATE: the same, of a truncation.
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;

/// A flag of SETXATTR: the same, of an ACL and the set-group-id bit.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;

/// A flag of FSYNC: the data alone.
pub const FSYNC_FDATASYNC: u32 = 1 << 0;

/// What the kernel is told without being asked: `enum fuse_notify_code`.
#[allow(missing_docs)]
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
}

/// The head of each request: `fuse_in_header`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InHeader {
    /// Bytes of the whole request, with this header.
    pub length: u32,
    /// One of [`op`].
    pub opcode: u32,
    /// Its number, which the answer repeats.
    pub unique: u64,
    /// The inode that it is about.
    pub node: u64,
    /// Who asks.
    pub uid: u32,
    /// Who asks.
    pub gid: u32,
    /// Who asks; 0 if the kernel does itself.
    pub pid: u32,
    /// Extensions behind the request, in units of eight bytes. None are negotiated here.
    pub extensions: u16,
}

impl InHeader {
    /// Reads it.
    pub fn decode(bytes: &[u8]) -> Option<InHeader> {
        let mut fields = Fields(bytes);
        Some(InHeader {
            length: fields.u32()?,
            opcode: fields.u32()?,
            unique: fields.u64()?,
            node: fields.u64()?,
            uid: fields.u32()?,
            gid: fields.u32()?,
            pid: fields.u32()?,
            extensions: fields.u16().filter(|_| fields.0.len() >= 2)?,
        })
    }

    /// As the kernel writes it.
    pub fn encode(&self) -> [u8; IN_HEADER_BYTES] {
        let mut out = Vec::with_capacity(IN_HEADER_BYTES);
        out.put_u32(self.length).put_u32(self.opcode).put_u64(self.unique).put_u64(self.node);
        out.put_u32(self.uid).put_u32(self.gid).put_u32(self.pid).put_u16(self.extensions).put_u16(0);
        let mut bytes = [0; IN_HEADER_BYTES];
        bytes.copy_from_slice(&out);
        bytes
    }
}

/// The head of each answer: `fuse_out_header`. `error` is 0 or a negative errno, or with a `unique` of 0 a
/// notification.
pub fn out_header(length: usize, error: i32, unique: u64) -> [u8; OUT_HEADER_BYTES] {
    let mut bytes = [0; OUT_HEADER_BYTES];
    bytes[..4].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    bytes[4..8].copy_from_slice(&error.to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

/// Reads fields, one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// The next bytes.
    pub(crate) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }
}

/// Writes fields, one after the other.
pub(crate) trait Put {
    fn put(&mut self, bytes: &[u8]) -> &mut Self;

    fn put_u16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn put_u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn put_u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) -> &mut Vec<u8> {
        self.extend_from_slice(bytes);
        self
    }
}
