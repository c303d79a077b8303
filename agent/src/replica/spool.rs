//! Spool: the slots that a replica holds, in files. After a crash, the next agent fetches only the missing slots.
//!
//! ```text
//! STATE_DIR/
//!   origin.json      which snapshot the slots belong to
//!   slots            slot n at n * slot_size; a file with holes
//!   held             one record of 32 bytes for each slot held, in the order in which they came
//! ```
//!
//! A slot's record is written after its bytes. A later agent uses the record only if the bytes match its checksum. So a
//! torn write, a full disk or a power cut never produces a wrong slot. The files are not synced to the disk: they have
//! to survive the agent, and the checksums detect what a power cut lost.
//!
//! The slots are the data set, so only their owner has access to the folder and the files
//! ([`private`](super::private)).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use remora_fabric::{View, memory::crc};
use remora_table::Origin;
use serde::{Deserialize, Serialize};

use super::private::Folder;

/// What identifies the slots of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SnapshotId {
    /// The snapshot's generation, history and offset.
    pub(super) origin: Origin,
    /// Bytes per slot.
    pub(super) slot_size: u32,
}

/// The contents of `origin.json`.
#[derive(Serialize, Deserialize)]
struct OriginFile {
    generation: u64,
    replid: String,
    offset: u64,
    slot_size: u32,
}

impl From<&SnapshotId> for OriginFile {
    fn from(snapshot: &SnapshotId) -> OriginFile {
        let Origin { generation, history, offset } = snapshot.origin;
        OriginFile { generation, replid: history.to_string(), offset, slot_size: snapshot.slot_size }
    }
}

impl OriginFile {
    /// The snapshot. `None` if the replid is not one.
    fn snapshot(&self) -> Option<SnapshotId> {
        let origin = Origin { generation: self.generation, history: self.replid.parse().ok()?, offset: self.offset };
        Some(SnapshotId { origin, slot_size: self.slot_size })
    }
}

/// The record of one held slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// Its number in the snapshot.
    pub(super) number: u64,
    /// Bytes in it.
    pub(super) length: u32,
    /// CRC-32C of them.
    pub(super) crc: u32,
}

/// The slots of one snapshot, in the files of a state folder.
pub(super) struct Spool {
    folder: Folder,
    snapshot: SnapshotId,
    slots: File,
    index: File,
    /// The records by slot number. A map grows with the number of records, and not with the numbers in a damaged file.
    held: BTreeMap<u64, Held>,
    /// The first slot that is not held.
    below: u64,
}

/// Bytes of one record: number u64, length u32, crc u32, twelve zeros, CRC-32C of these 28.
const RECORD: usize = 32;

/// More slots than any table has: 2^24 of them are 64 TiB at 4 MiB. A record with a larger number is invalid.
const SLOTS_LIMIT: u64 = 1 << 24;

/// Bytes of `origin.json` that are read at most. It has some hundred.
const ORIGIN_LIMIT: u64 = 4096;

/// Bytes that one read takes while slots are verified.
const READ_PIECE: usize = 256 * 1024;

impl Spool {
    /// Opens the spool in `folder` for `snapshot`. Deletes slots of another snapshot.
    pub(super) fn open(folder: &Path, snapshot: &SnapshotId) -> io::Result<Spool> {
        let folder = Folder::open(folder)?;
        if read_snapshot(&folder).as_ref() != Some(snapshot) {
            remove_files(&folder)?;
            folder.replace("origin.json", &serde_json::to_vec_pretty(&OriginFile::from(snapshot))?)?;
        }
        let (slots, index) = (folder.file("slots")?, folder.file("held")?);
        let mut spool = Spool { folder, snapshot: *snapshot, slots, index, held: BTreeMap::new(), below: 0 };
        spool.believe_what_fits()?;
        Ok(spool)
    }

    /// The slots that a folder holds, if any, of whichever snapshot. Reads and verifies all of them.
    pub(super) fn find(folder: &Path) -> Option<Spool> {
        let snapshot = read_snapshot(&Folder::open(folder).ok()?)?;
        tracing::info!(folder = %folder.display(), "verifying the slots in the state folder");
        Spool::open(folder, &snapshot).ok()
    }

    /// The snapshot whose slots are held.
    pub(super) fn snapshot(&self) -> SnapshotId {
        self.snapshot
    }

    /// Reads the records and keeps those whose bytes match their checksums.
    fn believe_what_fits(&mut self) -> io::Result<()> {
        let (mut believed, mut bytes) = (BTreeMap::new(), [0; RECORD]);
        let mut index = BufReader::new(&self.index);
        let size = self.slots.metadata()?.len();
        while fill(&mut index, &mut bytes)? {
            let Some(record) = decode(&bytes) else { continue };
            let in_the_file = self.place(record.number) < size;
            if in_the_file && record.length <= self.snapshot.slot_size && self.crc_on_disk(&record)? == Some(record.crc)
            {
                believed.insert(record.number, record);
            }
        }
        self.index.set_len(0)?;
        for record in believed.into_values() {
            self.remember(record)?;
        }
        Ok(())
    }

    fn crc_on_disk(&self, record: &Held) -> io::Result<Option<u32>> {
        let mut piece = vec![0; READ_PIECE];
        let (mut at, mut left, mut crc) = (self.place(record.number), record.length as usize, 0);
        while left > 0 {
            let want = left.min(READ_PIECE);
            let n = self.slots.read_at(&mut piece[..want], at)?;
            if n == 0 {
                return Ok(None);
            }
            crc = crc::crc32c_append(crc, &piece[..n]);
            at += n as u64;
            left -= n;
        }
        Ok(Some(crc))
    }

    /// Writes a slot's bytes, read from `view` at `offset`. The slot counts as held after
    /// [`remember`](Self::remember). Between the two calls the caller checks that the source has not reused the bytes.
    pub(super) fn store(&self, record: Held, view: &View, offset: u64) -> io::Result<()> {
        let (mut done, length) = (0, record.length as usize);
        while done < length {
            let at = self.place(record.number) + done as u64;
            done += view.write_at(&self.slots, at, offset + done as u64, length - done)?;
        }
        Ok(())
    }

    /// Appends the slot's record. From then on this agent and later ones hold the slot.
    pub(super) fn remember(&mut self, record: Held) -> io::Result<()> {
        let end = self.index.metadata()?.len();
        self.index.write_all_at(&encode(&record), end)?;
        self.held.insert(record.number, record);
        while self.held.contains_key(&self.below) {
            self.below += 1;
        }
        Ok(())
    }

    /// The slot's record, if it is held.
    pub(super) fn get(&self, number: u64) -> Option<Held> {
        self.held.get(&number).copied()
    }

    /// The first slot that is not held.
    pub(super) fn held_below(&self) -> u64 {
        self.below
    }

    /// The numbers of the slots that are held.
    pub(super) fn held(&self) -> BTreeSet<u64> {
        self.held.keys().copied().collect()
    }

    /// The position of a slot in [`Spool::file`].
    pub(super) fn place(&self, number: u64) -> u64 {
        number * u64::from(self.snapshot.slot_size)
    }

    /// The file with the slots.
    pub(super) fn file(&self) -> &File {
        &self.slots
    }

    /// Deletes the files: the sync is done.
    pub(super) fn remove(self) -> io::Result<()> {
        remove_files(&self.folder)
    }
}

fn read_snapshot(folder: &Folder) -> Option<SnapshotId> {
    let file: OriginFile = serde_json::from_slice(&folder.read("origin.json", ORIGIN_LIMIT).ok()??).ok()?;
    file.snapshot()
}

fn remove_files(folder: &Folder) -> io::Result<()> {
    ["origin.json", "held", "slots"].iter().try_for_each(|name| folder.remove(name))
}

/// Reads the next record. Returns `false` if the file has no further whole record.
fn fill(index: &mut impl Read, record: &mut [u8; RECORD]) -> io::Result<bool> {
    match index.read_exact(record) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| true),
    }
}

fn encode(record: &Held) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    {
        let mut rest = &mut bytes[..];
        // Writing to a slice with room can't fail.
        let _ = rest.write_all(&record.number.to_le_bytes());
        let _ = rest.write_all(&record.length.to_le_bytes());
        let _ = rest.write_all(&record.crc.to_le_bytes());
    }
    let check = crc::crc32c(&bytes[..RECORD - 4]);
    bytes[RECORD - 4..].copy_from_slice(&check.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Held> {
    let word = |at: usize| -> Option<u32> { Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?)) };
    let number = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let fits = word(RECORD - 4)? == crc::crc32c(&bytes[..RECORD - 4]) && number < SLOTS_LIMIT;
    Some(Held { number, length: word(8)?, crc: word(12)? }).filter(|_| fits)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_fabric::{Memory, Pages};

    use super::*;

    /// Which snapshot a folder holds slots of, and how many from the first one without a gap.
    fn look(folder: &Path) -> Option<(SnapshotId, u64)> {
        Spool::find(folder).map(|spool| (spool.snapshot(), spool.held_below()))
    }

    const SLOT: u32 = 8192;

    fn snapshot(generation: u64) -> SnapshotId {
        let origin = Origin { generation, history: "a".repeat(40).parse().unwrap(), offset: 5 };
        SnapshotId { origin, slot_size: SLOT }
    }

    fn slot(spool: &mut Spool, memory: &Memory, number: u64, length: u32) {
        let byte = number as u8 + 1;
        memory.write(0, &vec![byte; length as usize]).unwrap();
        let crc = memory.crc32c(0..u64::from(length)).unwrap();
        let held = Held { number, length, crc };
        spool.store(held, memory, 0).unwrap();
        spool.remember(held).unwrap();
    }

    #[test]
    fn slots_are_held_after_the_agent_is_gone_but_not_for_another_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1)).unwrap();
        for number in [0, 1, 3] {
            slot(&mut spool, &memory, number, SLOT - number as u32);
        }
        assert_eq!(spool.held_below(), 2);
        drop(spool);

        let spool = Spool::open(folder.path(), &snapshot(1)).unwrap();
        assert_eq!(spool.held_below(), 2);
        assert_eq!(spool.get(3).unwrap().length, SLOT - 3);
        assert_eq!(spool.get(2), None);
        assert_eq!(look(folder.path()).unwrap(), (snapshot(1), 2));

        let other = Spool::open(folder.path(), &snapshot(2)).unwrap();
        assert_eq!(other.held_below(), 0);
    }

    #[test]
    fn a_folder_that_names_no_valid_replid_holds_nothing() {
        let folder = tempfile::tempdir().unwrap();
        Spool::open(folder.path(), &snapshot(1)).unwrap();
        assert_eq!(look(folder.path()).map(|(snapshot, _)| snapshot), Some(snapshot(1)));
        let path = folder.path().join("origin.json");
        let right = std::fs::read_to_string(&path).unwrap();
        for replid in ["a".repeat(39), "g".repeat(40), String::new()] {
            std::fs::write(&path, right.replace(&"a".repeat(40), &replid)).unwrap();
            assert_eq!(look(folder.path()).map(|(snapshot, _)| snapshot), None, "{replid}");
        }
    }

    #[test]
    fn a_slot_whose_bytes_changed_on_disk_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1)).unwrap();
        slot(&mut spool, &memory, 0, SLOT);
        slot(&mut spool, &memory, 1, SLOT);
        spool.slots.write_all_at(b"x", 77).unwrap();
        drop(spool);
        let spool = Spool::open(folder.path(), &snapshot(1)).unwrap();
        assert_eq!((spool.get(0), spool.held_below()), (None, 0));
        assert!(spool.get(1).is_some());
    }

    #[test]
    fn half_a_record_and_garbage_in_the_index_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1)).unwrap();
        slot(&mut spool, &memory, 0, 100);
        let end = spool.index.metadata().unwrap().len();
        spool.index.write_all_at(&[0xEE; RECORD + 7], end).unwrap();
        drop(spool);
        let spool = Spool::open(folder.path(), &snapshot(1)).unwrap();
        assert_eq!(spool.held_below(), 1);
    }

    #[test]
    fn a_record_with_a_large_number_takes_no_more_room_than_another() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1)).unwrap();
        slot(&mut spool, &memory, 0, 100);
        // An empty slot has no bytes in the file, and its checksum is known.
        let forged = encode(&Held { number: SLOTS_LIMIT - 1, length: 0, crc: 0 });
        spool.index.write_all_at(&forged, RECORD as u64).unwrap();
        drop(spool);
        let spool = Spool::open(folder.path(), &snapshot(1)).unwrap();
        assert_eq!((spool.held_below(), spool.held.len()), (1, 1));
    }

    #[test]
    fn what_lies_in_the_place_of_a_file_is_removed_and_not_written_through() {
        let home = tempfile::tempdir().unwrap();
        let (state, target) = (home.path().join("state"), home.path().join("target"));
        std::fs::create_dir(&state).unwrap();
        std::fs::write(&target, b"precious").unwrap();
        for name in ["slots", "held", "origin.json"] {
            std::os::unix::fs::symlink(&target, state.join(name)).unwrap();
        }
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(&state, &snapshot(1)).unwrap();
        slot(&mut spool, &memory, 0, 100);
        assert_eq!(std::fs::read(&target).unwrap(), b"precious");
        for name in ["slots", "held", "origin.json"] {
            let about = std::fs::symlink_metadata(state.join(name)).unwrap();
            assert!(about.is_file());
            assert_eq!(std::os::unix::fs::PermissionsExt::mode(&about.permissions()) & 0o777, 0o600, "{name}");
        }
    }
}
