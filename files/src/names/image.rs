//! Image: everything that the names are, written into the other area a part at a time while they change.
//!
//! It goes through the inodes in the order of their numbers. A change of what it has passed is written into it as well,
//! in its turn; a change of what it has not passed will be found there. So at its end it is what the names are.

use super::clusters::Run;
use super::inode::Body;
use super::layout::{Area, Geometry, Head};
use super::log::{BlocksToWrite, Log, NO_TIME, Record};
use super::tree::{Tree, made};

/// Bytes of records after which a frame of the image ends.
const FRAME_BYTES: usize = 4 << 10;

/// Whole blocks of the image are written when they have so many bytes.
pub(super) const CHUNK_BYTES: usize = 64 << 10;

/// An image that is being written.
#[derive(Clone, Debug)]
pub(super) struct Image {
    area: Area,
    /// Where the areas are when it is used.
    geometry: Geometry,
    log: Log,
    /// Records of the next frame, and their bytes.
    records: Vec<Record>,
    bytes: usize,
    /// Inodes before this one have been passed.
    at: u64,
    /// If this inode was begun: its entries, or clusters, before this one have been passed.
    part: Option<u64>,
}

impl Image {
    pub(super) fn new(geometry: Geometry, area: Area, lap: u64) -> Image {
        Image { area, geometry, log: Log::new(geometry, area, lap), records: Vec::new(), bytes: 0, at: 0, part: None }
    }

    /// Whether nothing of it was written.
    pub(super) fn is_new(&self) -> bool {
        self.at == 0 && self.part.is_none() && self.log.at() == 0
    }

    /// Where the areas are when it is used.
    #[cfg(test)]
    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether an inode's attributes have been passed.
    fn has(&self, ino: u64) -> bool {
        ino < self.at || (ino == self.at && self.part.is_some())
    }

    /// Up to which entry or cluster an inode has been passed.
    fn passed(&self, ino: u64) -> u64 {
        match self.part {
            _ if ino < self.at => u64::MAX,
            Some(part) if ino == self.at => part,
            _ => 0,
        }
    }

    /// What to write of this change, before it is carried out; and the inodes whose attributes must be written after.
    pub(super) fn change(&mut self, tree: &Tree, record: &Record) -> Vec<u64> {
        match record {
            Record::Named { parent, ino, name, .. } | Record::Unnamed { parent, ino, name, .. } => {
                let key = match tree.get(*parent).map(|inode| &inode.body) {
                    Some(Body::Directory(directory)) => directory.key(name).unwrap_or(u64::MAX),
                    _ => u64::MAX,
                };
                if key < self.passed(*parent) {
                    self.put(record.clone());
                    return Vec::new();
                }
                [*parent, *ino].into_iter().filter(|ino| self.has(*ino)).collect()
            }
            Record::Mapped { ino, run } => {
                let end = run.clusters().end.min(self.passed(*ino));
                if end > run.first.into() {
                    let run = Run { count: (end - u64::from(run.first)) as u32, ..*run };
                    self.put(Record::Mapped { ino: *ino, run });
                }
                Vec::new()
            }
            Record::Unmapped { ino, first, count } => {
                let end = (u64::from(*first) + u64::from(*count)).min(self.passed(*ino));
                if end > u64::from(*first) {
                    let count = (end - u64::from(*first)) as u32;
                    self.put(Record::Unmapped { ino: *ino, first: *first, count });
                }
                Vec::new()
            }
            Record::Gone { ino } | Record::Set { ino, .. } | Record::Sized { ino, .. } if self.has(*ino) => {
                self.put(record.clone());
                Vec::new()
            }
            Record::Xattr { ino, .. } | Record::NoXattr { ino, .. } if self.has(*ino) => {
                #[cfg(test)]
                if crate::mutant::Mutant::XattrsNotPassedOn.is_active() {
                    return Vec::new();
                }
                self.put(record.clone());
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// These inodes have other attributes now.
    pub(super) fn set(&mut self, tree: &Tree, inodes: Vec<u64>) {
        for ino in inodes {
            if let Some(inode) = tree.get(ino) {
                self.put(Record::Set { ino, attributes: inode.attributes });
            }
        }
    }

    fn put(&mut self, record: Record) {
        self.bytes += record.bytes();
        self.records.push(record);
        if self.bytes >= FRAME_BYTES {
            self.end_frame();
        }
    }

    fn end_frame(&mut self) {
        if !self.records.is_empty() {
            self.log.append(&self.records);
            self.records.clear();
            self.bytes = 0;
        }
    }

    /// Writes about this number of bytes of what follows. Returns whether nothing follows.
    pub(super) fn step(&mut self, tree: &Tree, bytes: u64) -> bool {
        let end = self.written() + bytes;
        while self.written() < end {
            let Some((ino, inode)) = tree.inodes.range(self.at..).next() else { return true };
            let ino = *ino;
            let part = match self.part {
                Some(part) if ino == self.at => part,
                _ => {
                    (self.at, self.part) = (ino, Some(0));
                    self.begin(ino, tree);
                    0
                }
            };
            let next = match &inode.body {
                Body::Directory(directory) => {
                    let next = directory.after(part.saturating_sub(1)).next();
                    next.map(|(key, entry)| {
                        let (ino, name) = (entry.ino, entry.name.clone());
                        (Record::Named { parent: self.at, ino, time: NO_TIME, name }, key + 1)
                    })
                }
                Body::File { runs, .. } => {
                    let next = runs.within(part..u64::MAX).next();
                    next.map(|run| (Record::Mapped { ino, run }, run.clusters().end))
                }
                _ => None,
            };
            match next {
                Some((record, part)) => {
                    self.put(record);
                    self.part = Some(part);
                }
                None => (self.at, self.part) = (ino + 1, None),
            }
        }
        false
    }

    /// Writes what an inode is, without what is in it.
    fn begin(&mut self, ino: u64, tree: &Tree) {
        let Some(inode) = tree.get(ino) else { return };
        self.put(made(ino, inode));
        inode
            .xattrs()
            .for_each(|(name, value)| self.put(Record::Xattr { ino, name: name.into(), value: value.into() }));
        if let Body::File { size: size @ 1.., .. } = inode.body {
            self.put(Record::Sized { ino, size, time: NO_TIME });
        }
    }

    fn written(&self) -> u64 {
        self.log.at() + self.bytes as u64
    }

    /// Whether an area has no room for much more of it. Then it is begun again.
    pub(super) fn is_too_long(&self) -> bool {
        self.log.room() < 2 * super::log::MOST_FRAME_BYTES as u64
    }

    /// Blocks that can be written now; `None` until they are some.
    pub(super) fn take(&mut self) -> Option<BlocksToWrite> {
        (self.log.whole_bytes() >= CHUNK_BYTES).then(|| self.log.take(true))
    }

    /// The image is complete: its last blocks, the log behind it whose next frame has this number, and the head with
    /// which it is used.
    pub(super) fn finish(mut self, tree: &Tree, head: &Head, number: u64) -> (BlocksToWrite, Log, Head) {
        self.end_frame();
        self.log.append(&[Record::Complete { next: tree.next }]);
        let blocks = self.log.take(false);
        let image_bytes = self.log.at();
        self.log.continue_at(number);
        let last_lap = head.last_lap;
        let (geometry, area) = (self.geometry, self.area);
        let head = Head { geometry, area, lap: last_lap, last_lap, image_bytes, first: number };
        (blocks, self.log, head)
    }
}
