//! Late: files that have been removed, and are still there for those who have them open on a host that follows.
//!
//! The clusters of a removed file rest for a while ([`super::clusters`]), but are used at once if no others are
//! free. So a file is kept here until another one gets a cluster of it, and not for longer than the rest. A moment
//! is noted at which it was there with this content: what a reader finds in its blocks is the file's if no write
//! since then is in it.

use std::collections::{BTreeMap, VecDeque};

use super::clusters::{REST_MS, Space};
use super::inode::{Body, Inode};

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub(super) struct Late {
    files: BTreeMap<u64, File>,
    /// Whose clusters these are: the first one, how many, and the inode.
    spaces: BTreeMap<u32, (u32, u64)>,
    /// In the order in which they were removed.
    order: VecDeque<u64>,
    now_ms: u64,
    moment: u64,
}

#[derive(Clone, Debug)]
struct File {
    inode: Box<Inode>,
    since_ms: u64,
    moment: u64,
}

/// Files that are kept at most. The oldest ones make room.
const MOST_FILES: usize = 1 << 16;

impl Late {
    /// So much time has passed. What is removed from now on was there at this moment.
    pub(super) fn tick(&mut self, now_ms: u64, moment: u64) {
        (self.now_ms, self.moment) = (now_ms, moment);
        while let Some(oldest) = self.order.front().copied() {
            let is_kept = self.files.get(&oldest).is_some_and(|file| now_ms.saturating_sub(file.since_ms) < REST_MS);
            if is_kept && self.order.len() <= MOST_FILES {
                return;
            }
            self.order.pop_front();
            self.forget(oldest);
        }
    }

    /// An inode is no more.
    pub(super) fn keep(&mut self, ino: u64, inode: Box<Inode>) {
        let Body::File { runs, .. } = &inode.body else { return };
        for space in runs.as_slice().iter().map(|run| run.space()) {
            self.spaces.insert(space.at, (space.count, ino));
        }
        self.files.insert(ino, File { inode, since_ms: self.now_ms, moment: self.moment });
        self.order.push_back(ino);
    }

    /// Another file has these clusters now.
    pub(super) fn taken(&mut self, space: Space) {
        let end = space.at.saturating_add(space.count);
        // Those of different files have no cluster in common, so the last one before the end is the last that can.
        while let Some((at, (count, ino))) = self.spaces.range(..end).next_back().map(|(at, of)| (*at, *of)) {
            if at + count <= space.at {
                return;
            }
            self.forget(ino);
        }
    }

    fn forget(&mut self, ino: u64) {
        let Some(File { inode, .. }) = self.files.remove(&ino) else { return };
        if let Body::File { runs, .. } = &inode.body {
            runs.as_slice().iter().for_each(|run| _ = self.spaces.remove(&run.space().at));
        }
    }

    /// A file that is kept, and a moment at which it was there.
    pub(super) fn get(&self, ino: u64) -> Option<(&Inode, u64)> {
        self.files.get(&ino).map(|file| (&*file.inode, file.moment))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::clusters::{Run, Runs};
    use super::super::inode::Attributes;
    use super::*;

    fn file(runs: &[(u32, u32)]) -> Box<Inode> {
        let attributes = Attributes { mode: 0o600, uid: 0, gid: 0, accessed: 0, modified: 0, changed: 0 };
        let mut inode = Inode::new(super::super::Kind::File, attributes, 0, Box::default());
        let mut all = Runs::None;
        for (first, (at, count)) in (0..).step_by(100).zip(runs) {
            assert!(all.add(Run { first, at: *at, count: *count }));
        }
        inode.body = Body::File { size: 1, runs: all };
        Box::new(inode)
    }

    #[test]
    fn a_removed_file_is_kept_until_a_cluster_of_it_is_used_or_its_time_is_over() {
        let mut late = Late::default();
        late.tick(1000, 7);
        late.keep(2, file(&[(10, 5), (40, 1)]));
        late.keep(3, file(&[(15, 5)]));
        late.keep(4, file(&[]));
        assert!((2..5).all(|ino| late.get(ino).unwrap().1 == 7));
        for space in [Space { at: 0, count: 10 }, Space { at: 20, count: 20 }, Space { at: 41, count: 9 }] {
            late.taken(space);
        }
        assert!(late.get(2).is_some() && late.get(3).is_some(), "their neighbours were used");
        late.taken(Space { at: 14, count: 1 });
        assert!(late.get(2).is_none() && late.get(3).is_some());
        late.taken(Space { at: 0, count: 100 });
        assert!(late.get(3).is_none() && late.spaces.is_empty());
        late.tick(1000 + REST_MS - 1, 8);
        assert!(late.get(4).is_some());
        late.tick(1000 + REST_MS, 9);
        assert!(late.get(4).is_none() && late.order.is_empty());
        for ino in 10..10 + MOST_FILES as u64 + 5 {
            late.keep(ino, file(&[]));
        }
        late.tick(1001 + REST_MS, 9);
        assert_eq!((late.files.len(), late.get(14).is_none(), late.get(15).is_some()), (MOST_FILES, true, true));
    }
}
