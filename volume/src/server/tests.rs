//! Servers whose devices fail, or whose memory and files change by themselves.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_messenger::Address;

use super::{Budget, Server, ServerOptions, Used};
use crate::client::{ClientOptions, Volume, new_id};
use crate::disk::files::failing;
use crate::rules::State;
use crate::shape::{BLOCK_BYTES, Copies, Shape};

/// Which folder fails is said for the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn start(address: &str, store: &Path) -> Server {
    let options = ServerOptions { store: Some(store.into()), shm: false, ..ServerOptions::default() };
    Server::start(&address.parse().unwrap(), &options).unwrap()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Scene {
    folder: tempfile::TempDir,
    shape: Shape,
    servers: Vec<Option<Server>>,
    addresses: Vec<Address>,
}

impl Scene {
    fn new() -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape::new(new_id().unwrap(), 500, Copies::new(3, 2).unwrap()).unwrap();
        let store = |number: usize| folder.path().join(number.to_string());
        let servers: Vec<_> = (0..3).map(|number| start("tcp:127.0.0.1:0", &store(number))).collect();
        let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
        Volume::create(shape, &addresses, &ClientOptions::default()).unwrap();
        Scene { folder, shape, servers: servers.into_iter().map(Some).collect(), addresses }
    }

    fn open(&self) -> Volume {
        Volume::open(self.shape, &self.addresses, &ClientOptions::default()).unwrap()
    }

    fn state(&self, number: usize) -> State {
        let standing = self.servers[number].as_ref().and_then(|server| server.standing(self.shape.volume()));
        standing.unwrap_or_default().state
    }
}

fn write(volume: &Volume, number: u8) {
    volume.write(0, vec![number; 200 * BLOCK_BYTES]).unwrap();
    volume.flush().unwrap();
}

#[test]
fn a_copy_whose_sync_fails_is_lost_and_not_believed_by_the_next_process_and_taken_back() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut scene = Scene::new();
    let volume = scene.open();
    write(&volume, 1);
    failing::set(Some(&scene.folder.path().join("0")));
    write(&volume, 2); // the others are enough
    until("the copy is lost", || scene.state(0) == State::Empty);
    // As long as the device fails, no store can be made.
    write(&volume, 3);
    assert_eq!(scene.state(0), State::Empty);
    scene.servers[0].take().unwrap().stop();
    failing::set(None);
    // In the files is what the page cache has, and looks whole.
    scene.servers[0] = Some(start(&scene.addresses[0].to_string(), &scene.folder.path().join("0")));
    assert_ne!(scene.state(0), State::Whole);
    until("the copy is taken back", || {
        volume.write(300, vec![9; BLOCK_BYTES]).unwrap();
        scene.state(0) == State::Whole
    });
    // It alone is left, with one more.
    scene.servers[1].take().unwrap().stop();
    write(&volume, 4);
    assert_eq!(volume.read(7, 1).unwrap()[..], [4; BLOCK_BYTES]);
}

#[test]
fn a_scrub_repairs_a_store_out_of_memory_and_a_copy_whose_memory_is_damaged_is_taken_back() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut scene = Scene::new();
    let volume = scene.open();
    write(&volume, 1);
    let host = std::sync::Arc::clone(&scene.servers[0].as_ref().unwrap().host);
    let slot = host.slots().pop().unwrap();
    let scrubbed = || slot.lock().kept().map_or(0, |kept| kept.journal().scrubbed());
    until("the first scrub is complete", || scrubbed() > 0);
    // The memory of a block changes by itself, and the next scrub is due.
    let damage = |block: u64| {
        let mut state = slot.lock();
        let (kept, memory) = state.kept_and_memory().unwrap();
        memory.place(block, &[7; BLOCK_BYTES]);
        kept.journal().next_superblock(|superblock| superblock.scrubbed = 0);
    };
    damage(42);
    until("the scrub has found it", || slot.lock().standing().state != State::Whole || scrubbed() > 0);
    until("the copy is taken back", || {
        volume.write(300, vec![9; BLOCK_BYTES]).unwrap();
        scene.state(0) == State::Whole && scrubbed() > 0
    });
    let mut bytes = vec![0; BLOCK_BYTES];
    let read = slot.lock().kept_and_memory().unwrap().1.get(42, &mut bytes).is_ok();
    assert!(read && bytes == [1; BLOCK_BYTES]);

    // After a restart the blocks are in the extents. One changes there.
    drop((volume, slot, host));
    for restart in 0..2 {
        scene.servers[0].take().unwrap().stop();
        let store = scene.folder.path().join("0");
        if restart == 1 {
            let path = store.join(scene.shape.volume().to_string()).join("extents");
            let mut extents = std::fs::read(&path).unwrap();
            let at = extents.windows(512).rposition(|window| window == [1; 512]).unwrap();
            extents[at] ^= 1;
            std::fs::write(&path, extents).unwrap();
        }
        scene.servers[0] = Some(start(&scene.addresses[0].to_string(), &store));
        if restart == 0 {
            let folder = store.join(scene.shape.volume().to_string());
            until("a checkpoint", || std::fs::read_dir(&folder).unwrap().count() == 3);
            repairs(&scene, &folder.join("extents"));
        }
    }
    assert_eq!(scene.state(0), State::Behind);
    let volume = scene.open();
    assert_eq!(scene.state(0), State::Whole, "it was taken back before the generation began");
    assert_eq!(volume.read(42, 1).unwrap()[..], [1; BLOCK_BYTES]);
}

/// A block changes in the extents of a server that runs: the next scrub writes it again, out of memory.
fn repairs(scene: &Scene, extents: &Path) {
    let host = std::sync::Arc::clone(&scene.servers[0].as_ref().unwrap().host);
    let slot = host.slots().pop().unwrap();
    let before = std::fs::read(extents).unwrap();
    let at = before.windows(512).rposition(|window| window == [1; 512]).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(extents).unwrap();
    file.write_all_at(&[8], at as u64).unwrap();
    slot.lock().kept().unwrap().journal().next_superblock(|superblock| superblock.scrubbed = 0);
    until("the block is repaired", || std::fs::read(extents).unwrap() == before);
    assert_eq!(scene.state(0), State::Whole);
}

#[test]
fn what_is_taken_is_missing_until_it_is_dropped() {
    let budget = Budget::new(10);
    let grant = budget.take(8);
    assert!(grant.is_some() && budget.take(3).is_none());
    assert_eq!(budget.used(), Used { bytes: 8, most: 10 });
    drop(grant);
    assert!(budget.take(10).is_some());
}
