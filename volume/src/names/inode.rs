//! Inode: a file, a directory or a link as it is in memory.

use super::directory::Directory;
use super::runs::Runs;

/// The most bytes of a link's target: a path, as Linux takes it, without its zero.
pub const MOST_TARGET_BYTES: usize = 4095;

/// The most names of an inode: as on ext4, and no program counts further.
pub const MOST_LINKS: u32 = 65_000;

/// What an inode is. Devices are not offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe, which the kernel of each host has for itself.
    Fifo,
    /// The name of a Unix socket.
    Socket,
}

impl Kind {
    /// The bits of `st_mode`, which the log has too, without their twelve zeros.
    pub(super) fn code(self) -> u8 {
        match self {
            Kind::Fifo => 0o1,
            Kind::Directory => 0o4,
            Kind::File => 0o10,
            Kind::Symlink => 0o12,
            Kind::Socket => 0o14,
        }
    }

    pub(super) fn of_code(code: u8) -> Option<Kind> {
        let kinds = [Kind::File, Kind::Directory, Kind::Symlink, Kind::Fifo, Kind::Socket];
        kinds.into_iter().find(|kind| kind.code() == code)
    }

    /// Its bits of `st_mode`.
    pub fn mode(self) -> u32 {
        u32::from(self.code()) << 12
    }
}

/// What `chmod`, `chown` and `utimensat` set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions, with the bits for set-user-id, set-group-id and sticky.
    pub mode: u16,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// When it was last read, in nanoseconds since 1970. Reading does not change it.
    pub accessed: i64,
    /// When its contents were last changed.
    pub modified: i64,
    /// When anything of it was last changed.
    pub changed: i64,
}

impl Attributes {
    /// The bits of a mode.
    pub const MODE: u16 = 0o7777;
}

/// What is known of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Its number.
    pub ino: u64,
    /// What it is.
    pub kind: Kind,
    /// How many names it has; of a directory, two and one for each directory in it.
    pub links: u32,
    /// Bytes of a file, or of a link's target.
    pub size: u64,
    /// Blocks of 512 bytes that it takes.
    pub blocks: u64,
    /// The rest.
    pub attributes: Attributes,
}

/// An inode in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    pub(super) attributes: Attributes,
    /// Names that stand for it.
    pub(super) names: u32,
    /// How often it is held. While it is, it stays without a name.
    pub(super) holds: u32,
    pub(super) body: Body,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    File { size: u64, runs: Runs },
    Directory(Directory),
    Symlink(Box<[u8]>),
    Other(Kind),
}

impl Inode {
    pub(super) fn new(kind: Kind, attributes: Attributes, target: Box<[u8]>) -> Inode {
        let body = match kind {
            Kind::File => Body::File { size: 0, runs: Runs::None },
            Kind::Directory => Body::Directory(Directory::default()),
            Kind::Symlink => Body::Symlink(target),
            Kind::Fifo | Kind::Socket => Body::Other(kind),
        };
        Inode { attributes, names: 0, holds: 0, body }
    }

    pub(super) fn kind(&self) -> Kind {
        match &self.body {
            Body::File { .. } => Kind::File,
            Body::Directory(_) => Kind::Directory,
            Body::Symlink(_) => Kind::Symlink,
            Body::Other(kind) => *kind,
        }
    }

    pub(super) fn attr(&self, ino: u64) -> Attr {
        let (links, size, clusters) = match &self.body {
            Body::File { size, runs } => (self.names, *size, runs.count()),
            Body::Directory(directory) if self.names > 0 => (2 + directory.directories(), 0, 0),
            Body::Directory(_) => (0, 0, 0),
            Body::Symlink(target) => (self.names, target.len() as u64, 0),
            Body::Other(_) => (self.names, 0, 0),
        };
        let blocks = clusters * (super::layout::CLUSTER_BYTES / 512);
        Attr { ino, kind: self.kind(), links, size, blocks, attributes: self.attributes }
    }
}
