//! Change: what is asked of names.

/// An inode to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct New {
    /// What it is.
    pub kind: NewKind,
    /// Its permissions.
    pub mode: u16,
    /// Its owner.
    pub uid: u32,
    /// Its group. In a directory with the set-group-id bit it is the directory's.
    pub gid: u32,
}

/// The root of a new file system.
impl Default for New {
    fn default() -> New {
        New { kind: NewKind::Directory, mode: 0o755, uid: 0, gid: 0 }
    }
}

/// What an inode to be made is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewKind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link with this target.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// The name of a socket.
    Socket,
}

/// How an entry is renamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rename {
    /// What has the new name loses it.
    #[default]
    Replace,
    /// It fails if something has the new name.
    NoReplace,
    /// The two change places.
    Exchange,
}

/// What of an inode is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// Its permissions.
    pub mode: Option<u16>,
    /// Its owner.
    pub uid: Option<u32>,
    /// Its group.
    pub gid: Option<u32>,
    /// When it was read.
    pub accessed: Option<SetTime>,
    /// When its contents were changed.
    pub modified: Option<SetTime>,
}

/// A time that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The present one.
    Now,
    /// This one, in nanoseconds since 1970.
    To(i64),
}
