//! View: names as they are read from a volume. The writer begins with one, and a reader follows the log with one.

use super::inode::{Attr, Body, Inode, Kind};
use super::layout::Head;
use super::log::{LogReader, Next};
use super::record::{MOST_NAME_BYTES, Malformed};
use super::runs::{Run, Runs};
use super::tree::{ROOT, Tree};
use super::{MOST_INODES, NamesError};
use crate::shape::BLOCK_BYTES;

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed<'a> {
    /// Its name.
    pub name: &'a [u8],
    /// What it stands for.
    pub ino: u64,
    /// What that is.
    pub kind: Kind,
    /// Its position, for the next call. It stays the same while other entries come and go.
    pub cookie: u64,
}

/// How much of a volume is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Blocks for files.
    pub blocks: u64,
    /// Those that no file has.
    pub free_blocks: u64,
    /// Inodes there are.
    pub inodes: u64,
    /// About how many more there can be.
    pub free_inodes: u64,
    /// The most bytes of a name.
    pub name_bytes: usize,
}

/// What names in memory are asked.
impl Tree {
    pub(super) fn inode_of(&self, ino: u64) -> Result<&Inode, NamesError> {
        self.get(ino).ok_or(NamesError::Stale(ino))
    }

    pub(super) fn file(&self, ino: u64) -> Result<(u64, &Runs), NamesError> {
        match &self.inode_of(ino)?.body {
            Body::File { size, runs } => Ok((*size, runs)),
            Body::Directory(_) => Err(NamesError::IsADirectory),
            _ => Err(NamesError::NotAFile),
        }
    }

    pub(super) fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, NamesError> {
        let inode = self.inode_of(parent)?;
        let Body::Directory(directory) = &inode.body else { return Err(NamesError::NotADirectory) };
        if name.len() > MOST_NAME_BYTES {
            return Err(NamesError::NameTooLong);
        }
        let ino = match name {
            b"." => parent,
            b".." if directory.parent == 0 => return Err(NamesError::NotFound),
            b".." => directory.parent,
            _ => directory.find(name).ok_or(NamesError::NotFound)?,
        };
        Ok(self.inode_of(ino)?.attr(ino))
    }

    pub(super) fn target(&self, ino: u64) -> Result<&[u8], NamesError> {
        match &self.inode_of(ino)?.body {
            Body::Symlink(target) => Ok(target),
            _ => Err(NamesError::Invalid),
        }
    }

    pub(super) fn list(
        &self,
        ino: u64,
        after: u64,
        mut each: impl FnMut(Listed<'_>) -> bool,
    ) -> Result<(), NamesError> {
        let Body::Directory(directory) = &self.inode_of(ino)?.body else { return Err(NamesError::NotADirectory) };
        let parent = if directory.parent == 0 { ino } else { directory.parent };
        for (cookie, name, ino) in [(1, &b"."[..], ino), (2, b"..", parent)] {
            if after < cookie && !each(Listed { name, ino, kind: Kind::Directory, cookie }) {
                return Ok(());
            }
        }
        for (cookie, entry) in directory.after(after) {
            let kind = self.inode_of(entry.ino)?.kind();
            if !each(Listed { name: &entry.name, ino: entry.ino, kind, cookie }) {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn usage(&self, image_limit: u64) -> Usage {
        let blocks = |clusters: u32| u64::from(clusters) * super::layout::CLUSTER_BLOCKS;
        let inodes = self.inodes.len() as u64;
        let room = image_limit.saturating_sub(self.image_bytes()) / TYPICAL_BYTES;
        Usage {
            blocks: blocks(self.clusters.number()),
            free_blocks: blocks(self.clusters.free()),
            inodes,
            free_inodes: room.min(MOST_INODES.saturating_sub(inodes)),
            name_bytes: MOST_NAME_BYTES,
        }
    }
}

/// Bytes of a file with a short name in an image.
const TYPICAL_BYTES: u64 = 128;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct View {
    pub(super) tree: Tree,
    pub(super) reader: LogReader,
    pub(super) head: Head,
}

impl View {
    /// Before anything of the area was read that the head names.
    pub fn new(head: Head) -> View {
        View { tree: Tree::new(head.geometry), reader: LogReader::new(&head), head }
    }

    /// Which head it is of.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The blocks of the volume that are needed next: the first one, and how many there are up to the area's end.
    pub fn wants(&self) -> (u64, u64) {
        let (first, count) = self.reader.wants();
        (self.head.geometry.area_at(self.head.area) + first, count)
    }

    /// These blocks of the volume are the next ones. Returns whether more are needed. If not, all that was written is
    /// read.
    ///
    /// # Errors
    /// [`Malformed`]: what was read is damaged. Or, unless the reader is the writer, it was read in the middle of a
    /// write: call [`View::look_again`].
    pub fn push(&mut self, blocks: &[u8]) -> Result<bool, Malformed> {
        debug_assert!(blocks.len().is_multiple_of(BLOCK_BYTES), "whole blocks");
        self.reader.push(blocks);
        loop {
            match self.reader.next()? {
                Next::Records(records) => records.iter().try_for_each(|record| self.tree.apply(record))?,
                Next::More => return Ok(true),
                Next::End => return Ok(false),
            }
            if self.tree.is_complete() != self.reader.number().is_some() {
                return Err(Malformed("the end of an image"));
            }
        }
    }

    /// Whether the image was read, and all that the log says is of it.
    pub fn is_complete(&self) -> bool {
        self.tree.is_complete()
    }

    /// How far it was read: the use of the area, and the place in it.
    pub fn position(&self) -> (u64, u64) {
        (self.head.lap, self.reader.at())
    }

    /// Forgets the blocks behind the last frame: they may have been changed, and are wanted again.
    pub fn look_again(&mut self) {
        self.reader.look_again();
    }

    /// Whether everything was read that is in the image which this head names.
    pub fn is_followed_by(&self, head: &Head) -> bool {
        self.reader.number() == Some(head.first) && self.head.geometry == head.geometry
    }

    /// There is a new image, and a log behind it. If everything before was read, it goes on there. Otherwise it begins
    /// again: then `false`.
    pub fn go_on(&mut self, head: Head) -> bool {
        let is_next = self.is_followed_by(&head);
        if is_next {
            self.reader = LogReader::behind_image(&head);
            self.head = head;
        } else {
            *self = View::new(head);
        }
        is_next
    }

    /// What an entry stands for.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, NamesError> {
        self.tree.lookup(parent, name)
    }

    /// What is known of an inode.
    ///
    /// # Errors
    /// [`NamesError::Stale`].
    pub fn attr(&self, ino: u64) -> Result<Attr, NamesError> {
        Ok(self.tree.inode_of(ino)?.attr(ino))
    }

    /// The target of a link.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn target(&self, ino: u64) -> Result<&[u8], NamesError> {
        self.tree.target(ino)
    }

    /// Entries of a directory behind a position, until `each` says `false`.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn list(&self, ino: u64, after: u64, each: impl FnMut(Listed<'_>) -> bool) -> Result<(), NamesError> {
        self.tree.list(ino, after, each)
    }

    /// The size of a file, and the clusters that it has of these ones.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn file(&self, ino: u64, clusters: std::ops::Range<u64>) -> Result<(u64, Vec<Run>), NamesError> {
        let (size, runs) = self.tree.file(ino)?;
        Ok((size, runs.within(clusters).collect()))
    }

    /// How much is used.
    pub fn usage(&self) -> Usage {
        self.tree.usage(self.head.geometry.image_limit())
    }
}

const _: () = assert!(ROOT == 1); // as FUSE has it
