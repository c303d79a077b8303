//! Servers whose devices fail, or whose memory and files change by themselves; and questions about copies which the
//! tests can change: scrubs, what is said of a catch-up, a removal.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_messenger::Address;

use super::slot::Slot;
use super::{Budget, Server, ServerOptions, Used};
use crate::client::{ClientOptions, Volume, new_id};
use crate::disk::failing;
use crate::link::{Caller, Security};
use crate::rules::{ServerId, State};
use crate::shape::{BLOCK_BYTES, Copies, Shape};
use crate::wire::{Call, Cause, Findings, Reply};

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

struct InMemory {
    shape: Shape,
    servers: Vec<Server>,
    addresses: Vec<Address>,
}

impl InMemory {
    fn new(blocks: u64) -> InMemory {
        let shape = Shape::new(new_id().unwrap(), blocks, Copies::new(3, 2).unwrap()).unwrap();
        let options = ServerOptions { shm: false, ..ServerOptions::default() };
        let start = |_| Server::start(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap();
        let servers: Vec<_> = (0..3).map(start).collect();
        let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
        Volume::create(shape, &addresses, &ClientOptions::default()).unwrap();
        InMemory { shape, servers, addresses }
    }

    fn slot(&self, number: usize) -> Arc<Slot> {
        self.servers[number].host.slots().pop().unwrap()
    }

    fn state(&self, number: usize) -> State {
        self.slot(number).lock().standing().state
    }

    fn scrub(&self) -> Vec<Findings> {
        let mut told = vec![0; 3];
        let found = Volume::scrub(self.shape, &self.addresses, &ClientOptions::default(), |server, findings| {
            assert!(findings.read >= told[server], "it goes forward");
            told[server] = findings.read;
        });
        assert_eq!(told, [self.shape.blocks(); 3]);
        found.unwrap().into_iter().map(Result::unwrap).collect()
    }
}

#[test]
fn a_scrub_finds_damage_in_a_copy_in_memory_which_the_open_volume_takes_back() {
    let scene = InMemory::new(1000);
    let volume = Volume::open(scene.shape, &scene.addresses, &ClientOptions::default()).unwrap();
    volume.write(0, vec![1; 700 * BLOCK_BYTES]).unwrap();
    // All copies, not only as many as a write waits for.
    until("all have the write", || (0..3).all(|number| scene.slot(number).lock().standing().applied.counter() > 0));
    let well = Findings { read: 1000, repaired: 0, damaged: 0, is_complete: true };
    assert_eq!(scene.scrub(), [well; 3]);
    let damage = |number: usize, blocks: &[u64]| {
        let slot = scene.slot(number);
        let state = slot.lock();
        blocks.iter().for_each(|block| state.memory().unwrap().place(*block, &[7; BLOCK_BYTES]));
    };
    damage(1, &[3, 699]);
    let found = scene.scrub();
    assert_eq!(found, [well, Findings { damaged: 2, ..well }, well]);
    until("the copy is taken back", || scene.state(1) == State::Whole);
    assert_eq!(scene.scrub(), [well; 3]);

    // Without a writer it stays behind, and says so.
    drop(volume);
    damage(2, &[500]);
    assert_eq!(scene.scrub(), [well, well, Findings { damaged: 1, ..well }]);
    assert_eq!(scene.state(2), State::Behind);
    let _volume = Volume::open(scene.shape, &scene.addresses, &ClientOptions::default()).unwrap();
    until("the next writer takes it back", || scene.state(2) == State::Whole);
    assert_eq!(scene.scrub(), [well; 3]);
}

#[test]
fn a_catch_up_is_seen_in_the_status_and_by_the_writer_until_the_copy_is_whole() {
    let scene = InMemory::new(1000);
    let volume = Volume::open(scene.shape, &scene.addresses, &ClientOptions::default()).unwrap();
    volume.write(0, vec![1; 700 * BLOCK_BYTES]).unwrap();
    until("all are members", || volume.members().len() == 3);
    let status = || {
        let statuses = Volume::statuses(scene.shape, &scene.addresses[..], &ClientOptions::default()).unwrap();
        statuses.into_iter().next().unwrap().unwrap()
    };
    assert_eq!((status().compared, volume.compared(ServerId(0))), (None, None));
    // No lender answers while its copy's lock is held.
    let lenders = [scene.slot(1), scene.slot(2)];
    let held = lenders.each_ref().map(|lender| lender.lock());
    scene.slot(0).lock().found_damaged(&[3]);
    let compared = || scene.slot(0).lock().status().compared;
    until("a catch-up has begun", || compared() == Some(0) && volume.compared(ServerId(0)) == Some(0));
    drop(held);
    until("the copy is taken back", || scene.state(0) == State::Whole && volume.members().len() == 3);
    assert_eq!((status().compared, volume.compared(ServerId(0))), (None, None));
}

#[test]
fn a_server_refuses_to_remove_the_copy_of_a_writer_at_work_whatever_its_client_has_asked_before() {
    let scene = InMemory::new(100);
    let volume = Volume::open(scene.shape, &scene.addresses, &ClientOptions::default()).unwrap();
    volume.write(0, vec![1; BLOCK_BYTES]).unwrap();
    let ask = |takes_over| {
        let caller = Caller::connect(&scene.addresses[0], &Security::default()).unwrap();
        let call = Call::Remove { shape: scene.shape, takes_over };
        caller.ask::<String>(&call, Duration::from_secs(20), || Ok(())).unwrap().0
    };
    let refused = ask(false);
    assert!(matches!(refused, Reply::Refused { cause: Cause::InUse, .. }), "{refused:?}");
    assert_eq!(scene.state(0), State::Whole);
    assert_eq!(ask(true), Reply::Removed { was_there: true });
}
