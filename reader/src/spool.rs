//! Spool: the slots that a replica holds, in files. After a crash, the next agent fetches only the missing slots.
//!
//! ```text
//! STATE_DIR/
//!   origin.json      which snapshot the slots belong to
//!   slots            slot n at n * slot_size; a file with holes
//!   held             one record of 32 bytes for each slot held, in the order in which they came: number, length,
//!                    checksum of what is kept, and for a compressed slot its kept bytes and method
//!   tags             if the slots are ciphertext: the tag of slot n at n * 16
//! ```
//!
//! The slots of a sealed table are kept as ciphertext. Its key is not kept: the next agent gets it from the source.
//! Compressed slots are kept as they are. They must be, if they are sealed: the cipher is used with the slot's number,
//! and other bytes under the same number would tell both.
//!
//! A slot's record is written after its bytes. A later agent uses the record only if the bytes match its checksum. So a
//! torn write, a full disk or a power cut never produces a wrong slot. The files are not synced to the disk: they have
//! to survive the agent, and the checksums detect what a power cut lost.
//!
//! The slots are the data set, so only their owner has access to the folder and the files
//! ([`private`](remora_base::files)).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use remora_fabric::{View, memory::crc};
use remora_table::encoding::decode_kept;
use remora_table::seal::TAG_BYTES;
use remora_table::{Encoded, Method, Origin, Seal, Slot};
use serde::{Deserialize, Serialize};

use remora_base::files::Folder;
use remora_process::checked_json::{self, Checksum};

/// What identifies the slots of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotId {
    /// The snapshot's generation, history and offset.
    pub origin: Origin,
    /// Bytes per slot.
    pub slot_size: u32,
}

/// The contents of `origin.json`.
#[derive(Serialize, Deserialize)]
struct OriginFile {
    generation: u64,
    replid: String,
    offset: u64,
    slot_size: u32,
    /// Whether the slots are ciphertext.
    #[serde(default)]
    sealed: bool,
}

impl OriginFile {
    fn new(snapshot: &SnapshotId, sealed: bool) -> OriginFile {
        let Origin { generation, history, offset } = snapshot.origin;
        OriginFile { generation, replid: history.to_string(), offset, slot_size: snapshot.slot_size, sealed }
    }

    /// The snapshot. `None` if the replid is not one.
    fn snapshot(&self) -> Option<SnapshotId> {
        let origin = Origin { generation: self.generation, history: self.replid.parse().ok()?, offset: self.offset };
        Some(SnapshotId { origin, slot_size: self.slot_size })
    }
}

/// The record of one held slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its number in the snapshot.
    pub number: u64,
    /// Bytes in it.
    pub length: u32,
    /// CRC-32C of what is kept of them, followed by the slot's tag if slots are ciphertext.
    pub crc: u32,
    /// How they are compressed in the file, and how many bytes are kept there. `None`: as they are.
    pub encoded: Option<(Method, u32)>,
}

impl Held {
    /// A slot that is kept as it is.
    pub fn plain(number: u64, length: u32, crc: u32) -> Held {
        Held { number, length, crc, encoded: None }
    }

    /// Bytes that are kept of it.
    fn kept(&self) -> u32 {
        self.encoded.map_or(self.length, |(_, bytes)| bytes)
    }
}

/// The slots of one snapshot, in the files of a state folder.
pub struct Spool {
    folder: Folder,
    snapshot: SnapshotId,
    slots: File,
    index: File,
    /// If the slots are ciphertext.
    tags: Option<File>,
    /// What encrypts them, once the source has said it.
    seal: Option<Arc<Seal>>,
    /// The records by slot number. A map grows with the number of records, and not with the numbers in a damaged file.
    held: BTreeMap<u64, Held>,
    /// The first slot that is not held.
    below: u64,
}

/// Bytes of one record: number u64, length u32, crc u32, kept bytes u32 and method u32 (both 0 if the slot is not
/// compressed), four zeros, CRC-32C of these 28.
const RECORD: usize = 32;

/// More slots than any table has: 2^24 of them are 64 TiB at 4 MiB. A record with a larger number is invalid.
const SLOTS_LIMIT: u64 = 1 << 24;

/// Bytes of `origin.json` that are read at most. It has some hundred.
const ORIGIN_LIMIT: u64 = 4096;

/// Bytes that one read takes while slots are verified.
const READ_PIECE: usize = 256 * 1024;

impl Spool {
    /// Opens the spool in `folder` for `snapshot`. Deletes slots of another snapshot. With `seal`, slots are kept as
    /// ciphertext.
    pub fn open(folder: &Path, snapshot: &SnapshotId, seal: Option<Arc<Seal>>) -> io::Result<Spool> {
        let folder = Folder::open(folder)?;
        if read_snapshot(&folder) != Some((*snapshot, seal.is_some())) {
            remove_files(&folder)?;
            let origin = OriginFile::new(snapshot, seal.is_some());
            folder.replace("origin.json", &checked_json::to_json(&origin)?)?;
        }
        Spool::load(folder, snapshot, seal.is_some(), seal)
    }

    fn load(folder: Folder, snapshot: &SnapshotId, is_sealed: bool, seal: Option<Arc<Seal>>) -> io::Result<Spool> {
        let (slots, index) = (folder.file("slots")?, folder.file("held")?);
        let tags = is_sealed.then(|| folder.file("tags")).transpose()?;
        let held = BTreeMap::new();
        let mut spool = Spool { folder, snapshot: *snapshot, slots, index, tags, seal, held, below: 0 };
        spool.believe_what_fits()?;
        Ok(spool)
    }

    /// The slots, if they are kept as `seal` wants: plain without it, and ciphertext with it.
    pub fn with_seal(self, seal: Option<Arc<Seal>>) -> Option<Spool> {
        (self.tags.is_some() == seal.is_some()).then_some(Spool { seal, ..self })
    }

    /// The slots that a folder holds, if any, of whichever snapshot. Reads and verifies all of them.
    pub fn find(folder: &Path) -> Option<Spool> {
        let opened = Folder::open(folder).ok()?;
        let (snapshot, is_sealed) = read_snapshot(&opened)?;
        tracing::info!(folder = %folder.display(), "verifying the slots in the state folder");
        Spool::load(opened, &snapshot, is_sealed, None).ok()
    }

    /// The snapshot whose slots are held.
    pub fn snapshot(&self) -> SnapshotId {
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
            let fits = record.length.max(record.kept()) <= self.snapshot.slot_size;
            if in_the_file && fits && self.crc_on_disk(&record)? == Some(record.crc) {
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
        let (mut at, mut left, mut crc) = (self.place(record.number), record.kept() as usize, 0);
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
        let Some(tags) = &self.tags else { return Ok(Some(crc)) };
        let mut tag = [0; TAG_BYTES];
        match tags.read_exact_at(&mut tag, record.number * TAG_BYTES as u64) {
            Ok(()) => Ok(Some(crc::crc32c_append(crc, &tag))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes what is to be kept of a slot whose content has this CRC-32C, and returns the record of what was written.
    /// The slot counts as held after [`remember`](Self::remember). Between the two calls the caller checks that the
    /// source has not reused the bytes.
    pub fn store(&self, slot: &Slot, crc: u32) -> io::Result<Held> {
        let plain = Held::plain(slot.number, slot.length, crc);
        match slot.encoded() {
            Some(Encoded { method, bytes: Some(bytes) }) => {
                // Fewer than the content has.
                let record = Held { encoded: Some((*method, bytes.len() as u32)), ..plain };
                self.store_bytes(record, bytes.clone())
            }
            // The source has sealed other bytes with this number.
            Some(_) if self.seal.is_some() => {
                let text = format!("slot {} was compressed, and its stored bytes are not there", slot.number);
                Err(io::Error::other(text))
            }
            _ => {
                let (view, range) = slot.bytes();
                self.store_plain(plain, view, range.start)
            }
        }
    }

    /// Writes the content of a slot, read from `view` at `offset`.
    fn store_plain(&self, record: Held, view: &View, offset: u64) -> io::Result<Held> {
        if self.seal.is_some() {
            let mut bytes = vec![0; record.length as usize];
            view.read(offset, &mut bytes).map_err(io::Error::other)?;
            return self.store_bytes(record, bytes);
        }
        let (mut done, length) = (0, record.length as usize);
        while done < length {
            let at = self.place(record.number) + done as u64;
            done += view.write_at(&self.slots, at, offset + done as u64, length - done)?;
        }
        Ok(record)
    }

    /// Writes these bytes of a slot, as ciphertext if slots are kept so.
    fn store_bytes(&self, record: Held, mut bytes: Vec<u8>) -> io::Result<Held> {
        let (Some(tags), Some(seal)) = (&self.tags, &self.seal) else {
            self.slots.write_all_at(&bytes, self.place(record.number))?;
            return Ok(Held { crc: crc::crc32c(&bytes), ..record });
        };
        let tag = seal.seal_kept(record.number, &mut bytes).map_err(io::Error::other)?;
        tags.write_all_at(&tag, record.number * TAG_BYTES as u64)?;
        self.slots.write_all_at(&bytes, self.place(record.number))?;
        Ok(Held { crc: crc::crc32c_append(crc::crc32c(&bytes), &tag), ..record })
    }

    /// The plain bytes of a held slot, if it is kept as ciphertext or compressed. `None`: they are as they are in the
    /// file.
    ///
    /// # Errors
    /// The files cannot be read, or have other bytes than were kept.
    pub fn opened(&self, record: &Held) -> io::Result<Option<Vec<u8>>> {
        if self.tags.is_none() && record.encoded.is_none() {
            return Ok(None);
        }
        let mut bytes = vec![0; record.kept() as usize];
        self.slots.read_exact_at(&mut bytes, self.place(record.number))?;
        if let Some(tags) = &self.tags {
            let seal = self.seal.as_ref().ok_or_else(|| io::Error::other("the source has not said its key"))?;
            let mut tag = [0; TAG_BYTES];
            tags.read_exact_at(&mut tag, record.number * TAG_BYTES as u64)?;
            seal.open_kept(record.number, &tag, &mut bytes).map_err(io::Error::other)?;
        }
        let Some((method, _)) = record.encoded else { return Ok(Some(bytes)) };
        decode_kept(method, record.number, &bytes, record.length).map(Some).map_err(io::Error::other)
    }

    /// Appends the slot's record. From then on this agent and later ones hold the slot.
    pub fn remember(&mut self, record: Held) -> io::Result<()> {
        let end = self.index.metadata()?.len();
        self.index.write_all_at(&encode(&record), end)?;
        self.held.insert(record.number, record);
        while self.held.contains_key(&self.below) {
            self.below += 1;
        }
        Ok(())
    }

    /// The slot's record, if it is held.
    pub fn get(&self, number: u64) -> Option<Held> {
        self.held.get(&number).copied()
    }

    /// The first slot that is not held.
    pub fn held_below(&self) -> u64 {
        self.below
    }

    /// The numbers of the slots that are held.
    pub fn held(&self) -> BTreeSet<u64> {
        self.held.keys().copied().collect()
    }

    /// The position of a slot in [`Spool::file`].
    pub fn place(&self, number: u64) -> u64 {
        number * u64::from(self.snapshot.slot_size)
    }

    /// The file with the slots.
    pub fn file(&self) -> &File {
        &self.slots
    }

    /// Deletes the files: the sync is done.
    pub fn remove(self) -> io::Result<()> {
        remove_files(&self.folder)
    }
}

/// Which snapshot the slots belong to, and whether they are ciphertext.
fn read_snapshot(folder: &Folder) -> Option<(SnapshotId, bool)> {
    let text = folder.read("origin.json", ORIGIN_LIMIT).ok()??;
    if checked_json::check(&text) != Checksum::Right {
        return None; // whatever lies beside it may be of another snapshot
    }
    let file: OriginFile = serde_json::from_slice(&text).ok()?;
    Some((file.snapshot()?, file.sealed))
}

fn remove_files(folder: &Folder) -> io::Result<()> {
    ["origin.json", "held", "slots", "tags"].iter().try_for_each(|name| folder.remove(name))
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
        if let Some((method, kept)) = record.encoded {
            let _ = rest.write_all(&kept.to_le_bytes());
            let _ = rest.write_all(&u32::from(method.code()).to_le_bytes());
        }
    }
    let check = crc::crc32c(&bytes[..RECORD - 4]);
    bytes[RECORD - 4..].copy_from_slice(&check.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Held> {
    let word = |at: usize| -> Option<u32> { Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?)) };
    let number = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let fits = word(RECORD - 4)? == crc::crc32c(&bytes[..RECORD - 4]) && number < SLOTS_LIMIT;
    let encoded = match word(20)? {
        0 => None,
        // A later release may have written it.
        code => Some((Method::from_code(u8::try_from(code).ok()?)?, word(16)?)),
    };
    Some(Held { number, length: word(8)?, crc: word(12)?, encoded }).filter(|_| fits)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_fabric::{Memory, Pages};
    use remora_table::{Algorithm, Identity, Kind, SealKey};

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
        let held = spool.store_plain(Held::plain(number, length, crc), memory, 0).unwrap();
        spool.remember(held).unwrap();
    }

    #[test]
    fn slots_are_held_after_the_agent_is_gone_but_not_for_another_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1), None).unwrap();
        for number in [0, 1, 3] {
            slot(&mut spool, &memory, number, SLOT - number as u32);
        }
        assert_eq!(spool.held_below(), 2);
        drop(spool);

        let spool = Spool::open(folder.path(), &snapshot(1), None).unwrap();
        assert_eq!(spool.held_below(), 2);
        assert_eq!(spool.get(3).unwrap().length, SLOT - 3);
        assert_eq!(spool.get(2), None);
        assert_eq!(look(folder.path()).unwrap(), (snapshot(1), 2));

        let other = Spool::open(folder.path(), &snapshot(2), None).unwrap();
        assert_eq!(other.held_below(), 0);
    }

    #[test]
    fn a_folder_that_names_no_valid_replid_holds_nothing() {
        let folder = tempfile::tempdir().unwrap();
        Spool::open(folder.path(), &snapshot(1), None).unwrap();
        assert_eq!(look(folder.path()).map(|(snapshot, _)| snapshot), Some(snapshot(1)));
        let path = folder.path().join("origin.json");
        let right = std::fs::read_to_string(&path).unwrap();
        let rest = right.split_once(",\n  \"checksum\"").unwrap().0;
        for replid in ["a".repeat(39), "g".repeat(40), String::new()] {
            let text = format!("{}}}", rest.replace(&"a".repeat(40), &replid));
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            std::fs::write(&path, checked_json::to_json(&value).unwrap()).unwrap();
            assert_eq!(look(folder.path()).map(|(snapshot, _)| snapshot), None, "{replid}");
        }
    }

    #[test]
    fn a_slot_whose_bytes_changed_on_disk_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1), None).unwrap();
        slot(&mut spool, &memory, 0, SLOT);
        slot(&mut spool, &memory, 1, SLOT);
        spool.slots.write_all_at(b"x", 77).unwrap();
        drop(spool);
        let spool = Spool::open(folder.path(), &snapshot(1), None).unwrap();
        assert_eq!((spool.get(0), spool.held_below()), (None, 0));
        assert!(spool.get(1).is_some());
    }

    fn seal(secret: u8) -> Arc<Seal> {
        let identity = Identity { kind: Kind::Snapshot, origin: snapshot(1).origin };
        let key = SealKey::new(Algorithm::best(), [secret; SealKey::SECRET_BYTES]);
        Arc::new(Seal::new(&key, &identity).unwrap())
    }

    #[test]
    fn slots_of_a_sealed_table_are_ciphertext_on_disk_and_are_opened_with_the_sources_key_only() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1), Some(seal(7))).unwrap();
        slot(&mut spool, &memory, 0, SLOT);
        slot(&mut spool, &memory, 1, 100);
        drop(spool);
        let on_disk = std::fs::read(folder.path().join("slots")).unwrap();
        assert!(!on_disk.windows(8).any(|bytes| bytes == [1; 8] || bytes == [2; 8]));

        // The next agent verifies the slots, and opens them when it has the key.
        let found = || Spool::find(folder.path()).unwrap();
        assert_eq!(found().held_below(), 2);
        let record = found().get(1).unwrap();
        assert!(found().opened(&record).is_err() && found().with_seal(None).is_none());
        let spool = found().with_seal(Some(seal(7))).unwrap();
        assert_eq!(spool.opened(&record).unwrap().unwrap(), [2; 100]);
        let other = found().with_seal(Some(seal(8))).unwrap();
        assert!(other.opened(&record).unwrap_err().to_string().contains("slot 1"));
        // Ciphertext is not taken for plain slots.
        assert_eq!(Spool::open(folder.path(), &snapshot(1), None).unwrap().held_below(), 0);
        assert!(!folder.path().join("tags").exists());
    }

    #[test]
    fn a_changed_byte_in_any_file_costs_a_slot_and_never_changes_one() {
        for seal in [None, Some(seal(7))] {
            let home = tempfile::tempdir().unwrap();
            let (good, tried) = (home.path().join("good"), home.path().join("tried"));
            std::fs::create_dir(&good).unwrap();
            std::fs::create_dir(&tried).unwrap();
            let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
            let mut spool = Spool::open(&good, &snapshot(1), seal.clone()).unwrap();
            slot(&mut spool, &memory, 0, 100);
            slot(&mut spool, &memory, 1, 50);
            drop(spool);
            let files: Vec<_> = std::fs::read_dir(&good).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(files.len(), 3 + usize::from(seal.is_some()), "{files:?}");
            for changed in &files {
                let bytes = std::fs::read(good.join(changed)).unwrap();
                for at in (0..bytes.len()).filter(|at| bytes[*at] != 0 || at % 64 == 0) {
                    for file in &files {
                        std::fs::copy(good.join(file), tried.join(file)).unwrap();
                    }
                    let mut wrong = bytes.clone();
                    wrong[at] ^= 1 << (at % 8);
                    std::fs::write(tried.join(changed), wrong).unwrap();
                    let spool = Spool::open(&tried, &snapshot(1), seal.clone()).unwrap();
                    let is_within = changed != "slots" || at < 100 || (SLOT as usize..SLOT as usize + 50).contains(&at);
                    assert_eq!(spool.held().len() == 2, !is_within, "{changed:?}, byte {at}");
                    for number in spool.held() {
                        let record = spool.get(number).unwrap();
                        let plain = spool.opened(&record).unwrap().unwrap_or_else(|| {
                            let mut plain = vec![0; record.length as usize];
                            spool.file().read_exact_at(&mut plain, spool.place(number)).unwrap();
                            plain
                        });
                        assert_eq!(plain, vec![number as u8 + 1; [100, 50][number as usize]], "{changed:?}, byte {at}");
                    }
                }
            }
        }
    }

    #[test]
    fn compressed_slots_are_kept_as_they_are_and_opened_with_their_length() {
        // An LZ4 block by hand: its header, "a" as a literal, a match of 94 bytes, and five literals at the end.
        let plain = [b'a'; 100];
        let block = [&[0x1F, b'a', 1, 0, 75][..], &[0x50], &[b'a'; 5]].concat();
        let stored = [&100u32.to_le_bytes()[..], &crc::crc32c(&plain).to_le_bytes(), &block].concat();
        for seal in [None, Some(seal(7))] {
            let folder = tempfile::tempdir().unwrap();
            let mut spool = Spool::open(folder.path(), &snapshot(1), seal.clone()).unwrap();
            let encoded = Some((Method::Lz4, stored.len() as u32));
            let record = Held { encoded, ..Held::plain(0, 100, crc::crc32c(&plain)) };
            let held = spool.store_bytes(record, stored.clone()).unwrap();
            spool.remember(held).unwrap();
            drop(spool);
            let on_disk = std::fs::read(folder.path().join("slots")).unwrap();
            assert_eq!((on_disk.len(), on_disk == stored), (stored.len(), seal.is_none()));
            let spool = Spool::find(folder.path()).unwrap().with_seal(seal).unwrap();
            let record = spool.get(0).unwrap();
            assert_eq!((record.length, record.encoded), (100, encoded));
            assert_eq!(spool.opened(&record).unwrap().unwrap(), plain);
            let longer = Held { length: 101, ..record };
            let refused = spool.opened(&longer).unwrap_err().to_string();
            assert!(refused.contains("slot 0"), "{refused}");
        }
    }

    #[test]
    fn half_a_record_and_garbage_in_the_index_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1), None).unwrap();
        slot(&mut spool, &memory, 0, 100);
        let end = spool.index.metadata().unwrap().len();
        spool.index.write_all_at(&[0xEE; RECORD + 7], end).unwrap();
        drop(spool);
        let spool = Spool::open(folder.path(), &snapshot(1), None).unwrap();
        assert_eq!(spool.held_below(), 1);
    }

    #[test]
    fn a_record_with_a_large_number_takes_no_more_room_than_another() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::create("spool-test", u64::from(SLOT), Pages::Small).unwrap();
        let mut spool = Spool::open(folder.path(), &snapshot(1), None).unwrap();
        slot(&mut spool, &memory, 0, 100);
        // An empty slot has no bytes in the file, and its checksum is known.
        let forged = encode(&Held::plain(SLOTS_LIMIT - 1, 0, 0));
        spool.index.write_all_at(&forged, RECORD as u64).unwrap();
        drop(spool);
        let spool = Spool::open(folder.path(), &snapshot(1), None).unwrap();
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
        let mut spool = Spool::open(&state, &snapshot(1), None).unwrap();
        slot(&mut spool, &memory, 0, 100);
        assert_eq!(std::fs::read(&target).unwrap(), b"precious");
        for name in ["slots", "held", "origin.json"] {
            let about = std::fs::symlink_metadata(state.join(name)).unwrap();
            assert!(about.is_file());
            assert_eq!(std::os::unix::fs::PermissionsExt::mode(&about.permissions()) & 0o777, 0o600, "{name}");
        }
    }
}
