//! The snapshots as a file system: one directory, with `dump.rdb` in it, that can only be read.
//!
//! While a snapshot arrives, a read of what is not there yet waits, and the file is read around the page cache: the
//! cache would take the length of the moment for its end. `stat(2)` shows what has arrived, in whole pages, so that a
//! page that is mapped into memory has all of its bytes.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use remora_fuse::reply::{
    Attributes, Data, DirectoryEntry, Entry, FileKind, KnownAttributes, Listing, Opened, Statistics, Timestamp,
};
use remora_fuse::request::{GetAttributes, Lookup, Open, Read, ReadDirectory};
use remora_fuse::{Answer, Errno, FileSystem, Later, ROOT};

use super::kept::{Found, Kept};
use super::shelf::Shelf;
use super::target::{Keeper, Reached, Stage};

/// The name of the file.
pub(super) const NAME: &str = "dump.rdb";

/// The snapshots as the kernel asks for them.
pub(super) struct Served {
    shelf: Arc<Shelf>,
    begun: SystemTime,
    owner: (u32, u32),
}

impl Served {
    /// The snapshots of this shelf, which belong to the user of this process.
    pub(super) fn new(shelf: Arc<Shelf>) -> Served {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Served { shelf, begun: SystemTime::now(), owner }
    }

    fn attributes(&self, node: u64) -> Result<KnownAttributes, Errno> {
        if node == ROOT {
            return Ok(KnownAttributes { attributes: self.directory(), valid: FOR_EVER });
        }
        let kept = self.shelf.at(node).ok_or(Errno::STALE)?;
        let Reached { bytes, stage, .. } = kept.reached();
        let (size, valid) = match stage {
            Stage::Whole => (bytes, FOR_EVER),
            Stage::Arriving | Stage::Lost => (bytes - bytes % PAGE, Duration::ZERO),
        };
        let attributes = Attributes { node, kind: FileKind::File, permissions: 0o400, ..self.directory() };
        let time = Timestamp::from(kept.begun);
        let times = Attributes { accessed: time, modified: time, changed: time, ..attributes };
        let attributes = Attributes { links: 1, size, blocks: size.div_ceil(SECTOR), ..times };
        Ok(KnownAttributes { attributes, valid })
    }

    fn directory(&self) -> Attributes {
        let time = Timestamp::from(self.begun);
        Attributes {
            node: ROOT,
            kind: FileKind::Directory,
            permissions: 0o500,
            links: 2,
            uid: self.owner.0,
            gid: self.owner.1,
            size: 0,
            blocks: 0,
            block_bytes: READ_BYTES,
            accessed: time,
            modified: time,
            changed: time,
        }
    }
}

impl FileSystem for Served {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        let present = self.shelf.shown().filter(|_| asked.parent == ROOT && asked.name == NAME.as_bytes());
        let Some((node, _)) = present else { return answer.fail(Errno::NOENT) };
        match self.attributes(node) {
            Ok(known) => {
                self.shelf.look_up(node);
                answer.give(Entry {
                    attributes: Some(known.attributes),
                    generation: 0,
                    name_valid: known.valid,
                    attributes_valid: known.valid,
                });
            }
            Err(errno) => answer.fail(errno),
        }
    }

    fn forget(&self, node: u64, lookups: u64) {
        self.shelf.forget(node, lookups);
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        answer.result(self.attributes(asked.node));
    }

    fn open(&self, asked: Open, answer: Answer<'_, Opened>) {
        let Some(kept) = self.shelf.at(asked.node) else { return answer.fail(Errno::STALE) };
        let direct = kept.reached().stage != Stage::Whole;
        answer.give(Opened { direct, without_flush: true, ..Opened::default() });
    }

    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        let Some(kept) = self.shelf.at(asked.node) else { return answer.fail(Errno::STALE) };
        match kept.find(asked.offset) {
            Some(found) => answer.result(bytes(&kept, asked, found)),
            None => wait(&kept, asked, answer.unique(), answer.later()),
        }
    }

    fn read_directory(&self, asked: ReadDirectory, answer: Answer<'_, Listing>) {
        let mut listing = answer.listing();
        let file = self.shelf.shown().map(|(node, _)| (node, FileKind::File, NAME));
        let entries = [Some((ROOT, FileKind::Directory, ".")), Some((ROOT, FileKind::Directory, "..")), file];
        for (offset, (node, kind, name)) in (1..).zip(entries.into_iter().flatten()) {
            let entry = DirectoryEntry { node, kind, name: name.as_bytes(), offset };
            if offset > asked.offset && !listing.push(&entry) {
                break;
            }
        }
        answer.give(listing);
    }

    fn statistics(&self, _node: u64, answer: Answer<'_, Statistics>) {
        let bytes: u64 = self.shelf.all().iter().map(|kept| kept.reached().bytes).sum();
        let files = self.shelf.shown().map_or(1, |_| 2);
        let block_bytes = PAGE as u32;
        answer.give(Statistics {
            block_bytes,
            blocks: bytes.div_ceil(PAGE),
            files,
            name_bytes: 255,
            ..Statistics::default()
        });
    }

    fn interrupt(&self, unique: u64) {
        self.shelf.all().iter().for_each(|kept| kept.interrupt(unique));
    }

    fn destroy(&self) {
        self.shelf.all().iter().for_each(|kept| kept.lose());
    }
}

/// Answers as soon as there is something to read.
fn wait(kept: &Arc<Kept>, asked: Read, unique: u64, later: Later<Data>) {
    let kept_too = Arc::clone(kept);
    kept.when_there(unique, asked.offset, Box::new(move |found| later.result(bytes(&kept_too, asked, found))));
}

fn bytes(kept: &Kept, asked: Read, found: Found) -> Result<Data, Errno> {
    match found {
        Found::Bytes(there) => {
            let length = there.min(asked.size.into()) as usize;
            let read = kept.read(asked.offset, length);
            read.map(Data::from).map_err(|error: io::Error| {
                tracing::error!("the bytes of {NAME} that have arrived cannot be read: {error}");
                Errno::IO
            })
        }
        Found::End => Ok(Data::default()),
        Found::Lost => Err(Errno::IO),
        Found::Interrupted => Err(Errno::INTR),
    }
}

/// What suits a reader: the longest request.
const READ_BYTES: u32 = remora_fuse::session::MOST_REQUEST_BYTES;

/// Bytes of a page of memory, which the size of a file that arrives is a multiple of. Larger pages exist on other
/// machines; a mapped page may have zeros at its end there while the file arrives.
const PAGE: u64 = 4096;

/// The unit of `st_blocks`.
const SECTOR: u64 = 512;

/// How long the kernel may use what does not change.
const FOR_EVER: Duration = Duration::from_secs(3600);
