//! A host that only reads, while the files change.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use remora_memory::crc::crc32c;
use remora_volume::layout::{Entry, Store};
use remora_volume::reader::{Blocks, BlocksError, InPlace, Seen};
use remora_volume::rules::{Generation, Standing, State, Version};
use remora_volume::shape::{Copies, Shape, VolumeId};

use super::*;
use crate::names::{NamesError, Rename};
use crate::{DiskDone, Follower, Mutant};

/// Reads block by block, so that a long read is of several moments.
#[derive(Clone)]
struct Looks {
    disk: Arc<Mutex<Arc<Memory>>>,
    history: Arc<AtomicU64>,
    /// How many reads there were.
    reads: Arc<AtomicU64>,
}

impl Looks {
    fn at(disk: &Arc<Memory>) -> Looks {
        let (disk, history) = (Arc::new(Mutex::new(Arc::clone(disk))), Arc::new(AtomicU64::new(1)));
        Looks { disk, history, reads: Arc::default() }
    }

    fn reads(&self) -> u64 {
        self.reads.load(Ordering::SeqCst)
    }

    /// The number of a change of the present history.
    fn version(&self, change: u64) -> Version {
        let history = self.history.load(Ordering::SeqCst) as u32;
        Version::from_word(Generation::from_number(history).unwrap().start().word() + change).unwrap()
    }
}

impl Blocks for Looks {
    fn read(&self, first: u64, into: &mut [u8]) -> std::result::Result<Seen, BlocksError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let disk = Arc::clone(&self.disk.lock().unwrap());
        let blocks = (first..).zip(into.chunks_exact_mut(BLOCK_BYTES));
        let newest = blocks.map(|(block, into)| disk.peek(block, into)).max().unwrap();
        Ok(Seen { newest: self.version(newest), applied: self.version(disk.changes()) })
    }
}

fn follow(disk: &Arc<Memory>) -> Follower {
    Follower::open(Box::new(Looks::at(disk))).unwrap()
}

fn contents(follower: &Follower) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut found = Vec::new();
    follower
        .readdir(ROOT, 2, |entry| {
            found.push((entry.name.to_vec(), entry.ino));
            true
        })
        .unwrap();
    let read = |ino| follower.read(ino, 0, follower.getattr(ino).unwrap().size as u32).unwrap();
    found.into_iter().map(|(name, ino)| (name, read(ino))).collect()
}

#[test]
fn what_the_writer_has_said_is_seen_with_the_next_look() {
    let disk = formatted(1024);
    let files = open(&disk);
    let follower = follow(&disk);
    assert!(!follower.poll().unwrap());
    let ino = files.make(ROOT, "f");
    files.put(ino, 100, b"hello");
    assert!(follower.poll().unwrap() && !follower.poll().unwrap());
    let size = follower.getattr(ino).unwrap().size;
    assert_eq!((size, follower.read(ino, 98, 100).unwrap()), (105, b"\0\0hello".to_vec()));
    assert_eq!(follower.statfs(), files.statfs());
    // So many changes that images are written; some looks come in time, and some after an area was used again.
    for round in 0..120_u64 {
        for number in 0..40 * (round % 7) {
            let name = format!("file-{}", number % 9);
            match files.lookup(ROOT, name.as_bytes()) {
                Ok(_) => wait(|done| files.unlink(ROOT, name.as_bytes(), done)).unwrap(),
                Err(_) => {
                    let ino = files.make(ROOT, &name);
                    files.put(ino, number * 5000, &[round as u8; 10]);
                }
            }
        }
        follower.poll().unwrap();
        assert_eq!(contents(&follower), contents(&follow(&disk)), "round {round}");
        assert_eq!(follower.statfs(), files.statfs());
    }
}

/// A file's bytes are its own, while clusters go from one file to the other all the time. Three threads read side by
/// side, and only one of them looks at the log by itself.
#[test]
fn what_is_read_is_of_the_file() {
    let disk = formatted(1024);
    let files = open(&disk);
    let inodes: Vec<u64> = (0..4).map(|number| files.make(ROOT, &format!("f{number}"))).collect();
    let is_over = AtomicBool::new(false);
    let follower = follow(&disk);
    let read = |first: usize| {
        let (mut round, mut bytes) = (first, 0);
        while !is_over.load(Ordering::SeqCst) {
            let file = round % 4;
            round += 1;
            if first == 0 {
                follower.poll().unwrap();
            }
            // A reader may find that the file is changed each time.
            if let Ok(data) = follower.read(inodes[file], 10_000, 400_000) {
                assert!(data.iter().all(|byte| usize::from(*byte) == file + 1), "round {round}");
                bytes += data.len();
            }
        }
        assert!(bytes > 1_000_000, "{bytes} bytes in {round} reads");
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..400_u64 {
                let file = (round % 4) as usize;
                files.cut(inodes[file], 0);
                files.put(inodes[file], 0, &vec![file as u8 + 1; 300_000 + (round % 13) as usize * 30_000]);
            }
            is_over.store(true, Ordering::SeqCst);
        });
        (0..3).for_each(|first| _ = scope.spawn(move || read(first)));
    });
}

/// A file is replaced, and its clusters go to another one at once, as the volume is full. Whatever of these changes a
/// copy has, and whenever it is looked at, a reader of the removed file gets its bytes, or is told that it is gone.
fn removed() -> std::result::Result<usize, String> {
    let disk = formatted(1024);
    let files = open(&disk);
    let (old, kept) = (files.make(ROOT, "f"), files.make(ROOT, "kept"));
    files.put(old, 0, &[1; 600_000]);
    let free = files.statfs().free_blocks * BLOCK_BYTES as u64;
    files.put(kept, 0, &vec![9; free as usize - 64 * 1024]);
    let begin = disk.history().len();
    let new = files.make(ROOT, "tmp");
    files.put(new, 0, b"short");
    wait(|done| files.rename((ROOT, b"tmp"), (ROOT, b"f"), Rename::Replace, done)).unwrap();
    let other = files.make(ROOT, "other");
    for number in 0..4_u64 {
        files.put(other, number * 150_000, &[2; 100_000]);
    }
    let history = disk.history();
    let mut found = 0;
    for every in 1..8 {
        let looks = Looks::at(&Memory::after(1024, &history[..begin], false));
        let follower = Follower::open(Box::new(looks.clone())).unwrap();
        follower.poll().unwrap();
        for end in begin..=history.len() {
            *looks.disk.lock().unwrap() = Memory::after(1024, &history[..end], false);
            if end % every == 0 {
                follower.poll().unwrap();
            }
            match follower.read(old, 0, 600_000) {
                Ok(data) if data == [1; 600_000] => found += 1,
                Err(FilesError::Names(NamesError::Stale(_))) => {}
                other => return Err(format!("after {end} changes: {:?}", other.map(|data| data.len()))),
            }
        }
        follower.poll().unwrap();
        let name = follower.lookup(ROOT, b"f").unwrap().ino;
        assert_eq!(follower.read(name, 0, 10).unwrap(), b"short");
    }
    Ok(found)
}

#[test]
fn a_file_that_is_replaced_is_read_until_its_clusters_are_used() {
    let found = removed().unwrap();
    assert!(found > 20, "{found} reads");
    Mutant::set(Some(Mutant::RemovedIsThere));
    let wrong = removed();
    Mutant::set(None);
    println!("{}", wrong.unwrap_err());
    // It is there, with its attributes, although nothing has its name.
    let disk = formatted(1024);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    files.put(ino, 0, b"bytes");
    let follower = follow(&disk);
    follower.poll().unwrap();
    wait(|done| files.unlink(ROOT, b"f", done)).unwrap();
    follower.poll().unwrap();
    let attr = follower.getattr(ino).unwrap();
    assert_eq!((attr.size, attr.links, follower.read(ino, 0, 9).unwrap()), (5, 0, b"bytes".to_vec()));
    assert!(follower.lookup(ROOT, b"f").is_err());
}

/// What is older than the last look costs one read, also while other files change.
#[test]
fn a_read_of_blocks_that_are_not_newer_than_the_names_looks_at_nothing_else() {
    let disk = formatted(1024);
    let files = open(&disk);
    let [old, log] = ["old", "log"].map(|name| files.make(ROOT, name));
    files.put(old, 0, &[1; 100_000]);
    let looks = Looks::at(&disk);
    let follower = Follower::open(Box::new(looks.clone())).unwrap();
    follower.poll().unwrap(); // the first look does not know what was applied before it
    let cost = |ino, length| {
        let before = looks.reads();
        (follower.read(ino, 0, length).unwrap(), looks.reads() - before)
    };
    for number in 1..50_u64 {
        files.put(log, number * 5000, &[2; 10]);
        assert_eq!(cost(old, 100_000), (vec![1; 100_000], 1));
    }
    // One that was written since then is followed by a look. It is known that the file had these clusters before.
    files.put(old, 99_990, &[3; 10]);
    let (data, reads) = cost(old, 100_000);
    assert_eq!((&data[99_988..], reads > 1), (&[1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3][..], true));
    // And the same bytes are not newer than that look.
    assert_eq!(cost(old, 100_000), (data, 1));
    // Clusters that go to another file before the next look.
    files.cut(old, 0);
    while follower.getattr(log).unwrap().size < 500_000 {
        let size = files.getattr(log).unwrap().size;
        files.put(log, size, &[4; 65536]);
        match follower.read(old, 0, 100_000) {
            Ok(found) => assert!(found.iter().all(|byte| matches!(byte, 1 | 3)), "bytes of another file"),
            Err(error) => panic!("{error}"),
        }
        if size > 400_000 {
            follower.poll().unwrap();
        }
    }
    assert_eq!(follower.read(old, 0, 100_000).unwrap(), b"");
}

/// The next writer has undone what was seen.
#[test]
fn another_history_is_read_from_its_beginning() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    let history = disk.history();
    files.put(ino, 0, b"undone");
    wait(|done| files.rename((ROOT, b"f"), (ROOT, b"g"), Rename::Replace, done)).unwrap();
    let looks = Looks::at(&disk);
    let follower = Follower::open(Box::new(looks.clone())).unwrap();
    assert_eq!(follower.read(ino, 0, 10).unwrap(), b"undone");
    let other = Memory::after(BLOCKS, &history, false);
    let files = open(&other);
    files.put(ino, 0, b"new");
    *looks.disk.lock().unwrap() = other;
    looks.history.store(2, Ordering::SeqCst);
    assert!(follower.poll().unwrap());
    assert_eq!((follower.lookup(ROOT, b"f").unwrap().ino, follower.read(ino, 0, 10).unwrap()), (ino, b"new".to_vec()));
}

/// Fails, when it is told to, behind the first block.
struct Fails {
    looks: Looks,
    is_failing: Arc<AtomicBool>,
}

impl Blocks for Fails {
    fn read(&self, first: u64, into: &mut [u8]) -> std::result::Result<Seen, BlocksError> {
        match self.is_failing.load(Ordering::SeqCst) && first > 0 {
            true => Err(BlocksError::Failed("as it was told".into())),
            false => self.looks.read(first, into),
        }
    }
}

#[test]
fn names_that_cannot_be_read_again_are_as_they_were() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    let (looks, is_failing) = (Looks::at(&disk), Arc::<AtomicBool>::default());
    let history = Arc::clone(&looks.history);
    let follower = Follower::open(Box::new(Fails { looks, is_failing: Arc::clone(&is_failing) })).unwrap();
    // Another history is read from its beginning, which fails.
    history.store(2, Ordering::SeqCst);
    is_failing.store(true, Ordering::SeqCst);
    files.make(ROOT, "g");
    for _ in 0..2 {
        assert!(matches!(follower.poll(), Err(FilesError::Blocks(_))));
        assert_eq!((follower.lookup(ROOT, b"f").unwrap().ino, follower.getattr(ino).unwrap().ino), (ino, ino));
        assert!(follower.lookup(ROOT, b"g").is_err());
    }
    is_failing.store(false, Ordering::SeqCst);
    assert!(follower.poll().unwrap());
    assert!(follower.lookup(ROOT, b"f").is_ok() && follower.lookup(ROOT, b"g").is_ok());
}

/// A disk that is a copy's region too, as a server writes it.
struct Region {
    memory: Arc<Memory>,
    store: Store,
    standing: Mutex<Standing>,
}

impl Region {
    fn new(memory: Arc<Memory>, generation: Generation) -> Region {
        let copies = Copies::new(1, 1).unwrap();
        let store = Store::create(Shape::new(VolumeId([7; 16]), memory.blocks(), copies).unwrap()).unwrap();
        let standing = Standing { state: State::Whole, applied: generation.start(), ..Standing::default() };
        let region = Region { memory: Memory::new(memory.blocks()), store, standing: Mutex::new(standing) };
        memory.history().into_iter().for_each(|request| region.submit(request, Box::new(|_| {})));
        region
    }

    fn set(&self, change: impl FnOnce(&mut Standing)) {
        let mut standing = self.standing.lock().unwrap();
        change(&mut standing);
        self.store.set_line(*standing);
    }
}

impl Disk for Region {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }

    fn submit(&self, request: Request, done: DiskDone) {
        self.set(|standing| {
            let version = standing.applied.next().unwrap();
            match &request {
                Request::Write { runs, data } => {
                    let blocks = runs.iter().flat_map(|run| run.blocks()).zip(data.chunks(BLOCK_BYTES));
                    blocks.for_each(|(block, data)| self.store.put(block, Entry::of(version, crc32c(data)), data));
                }
                Request::Zero(run) => run.blocks().for_each(|block| self.store.put(block, Entry::zeros(version), &[])),
                _ => return,
            }
            standing.applied = version;
        });
        self.memory.submit(request, done);
    }
}

#[test]
fn a_copy_is_followed_in_its_memory() {
    let first = Generation::NONE.next().unwrap();
    let region = Arc::new(Region::new(formatted(1024), first));
    let files = Files::open(Arc::clone(&region) as Arc<dyn Disk>).unwrap();
    let reader = InPlace::new(Arc::new(region.store.memory().open_view().unwrap()), region.store.layout());
    let follower = Follower::open(Box::new(reader)).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let ino = files.make(ROOT, "log");
            for number in 0..3000_u64 {
                files.put(ino, number * 100, &[(number % 250 + 1) as u8; 100]);
            }
            is_over.store(true, Ordering::SeqCst);
        });
        let (mut size, mut looks) = (0, 0);
        while !is_over.load(Ordering::SeqCst) {
            follower.poll().unwrap();
            let Ok(attr) = follower.lookup(ROOT, b"log") else { continue };
            // Never shorter, and never a size without its data.
            assert!(attr.size >= size);
            let data = follower.read(attr.ino, size, (attr.size - size) as u32).unwrap();
            assert_eq!(data.len() as u64, attr.size - size);
            for (number, part) in (size / 100..).zip(data.chunks(100)) {
                assert!(part.iter().all(|byte| u64::from(*byte) == number % 250 + 1), "part {number}");
            }
            (size, looks) = (attr.size, looks + 1);
        }
        assert!(looks > 10, "{looks} looks");
    });
    // Behind: not read. Another writer: read anew.
    region.set(|standing| standing.state = State::Behind);
    assert!(matches!(follower.poll(), Err(FilesError::Blocks(_))));
    region.set(|standing| {
        (standing.state, standing.applied) = (State::Whole, first.next().unwrap().start());
    });
    assert!(follower.poll().unwrap());
    assert_eq!(follower.lookup(ROOT, b"log").unwrap().size, 300_000);
}

#[test]
fn a_volume_without_files_is_said_to_be_one() {
    let error = Follower::open(Box::new(Looks::at(&Memory::new(1024)))).err().unwrap();
    assert!(matches!(error, FilesError::Head(HeadError::Empty)), "{error}");
}
