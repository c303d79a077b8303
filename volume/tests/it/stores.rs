//! Servers with stores: killed and started again, alone and all at once; on a device that is full, or damaged.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use remora_lab::require;
use remora_messenger::Address;
use remora_volume::client::{Volume, new_id};
use remora_volume::rules::{Standing, State};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};

use crate::cluster::{Remotes, options, server_options, until};
use crate::pattern::{Checker, all_are_whole, content, number_of, write_for};

fn standings(servers: &Remotes) -> Vec<Standing> {
    let standings = Volume::standings(servers.shape, &servers.addresses(), &options()).unwrap();
    standings.into_iter().map(Result::unwrap).collect()
}

#[test]
fn servers_that_are_killed_together_have_every_acknowledged_write_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(4000, Some(folder.path()));
    let mut checker = Checker::new(21);
    for round in 0..3 {
        let volume = servers.open(&options());
        checker.settle(&volume);
        // More than a segment: checkpoints are made, and interrupted.
        write_for(&volume, &mut checker, Duration::from_millis(700));
        (0..50).for_each(|_| assert!(checker.write(&volume)));
        (0..3).for_each(|number| servers.kill(number));
        drop(volume);
        (0..3).for_each(|number| servers.restart(number));
        let found = standings(&servers);
        assert!(found.iter().all(|standing| standing.state == State::Whole && !standing.is_cut), "{round}: {found:?}");
        let volume = servers.open(&options());
        let written = checker.check(&volume);
        println!("round {round}: {written} blocks are there, applied {}", found[0].applied);
        assert!(written > 0);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_killed_server_comes_back_with_its_copy_and_is_taken_back_under_load() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(2000, Some(folder.path()));
    let mut checker = Checker::new(22);
    let volume = servers.open(&options());
    for number in [0, 1, 2] {
        write_for(&volume, &mut checker, Duration::from_millis(200));
        servers.kill(number);
        write_for(&volume, &mut checker, Duration::from_millis(200));
        servers.restart(number);
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
    }
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
}

/// With one copy left nothing is acknowledged. The two that were killed have their copies again, and are taken back.
#[test]
#[ignore = "long: make test-all"]
fn writes_wait_while_two_servers_are_gone_and_go_on_when_they_are_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(2000, Some(folder.path()));
    let mut checker = Checker::new(23);
    let volume = servers.open(&options());
    let ledger = Arc::clone(&checker.ledger);
    let acknowledgements = || ledger.lock().unwrap().acknowledgements;
    for killed in [[0, 1], [1, 2], [2, 0]] {
        std::thread::scope(|scope| {
            let (volume, writer, began) = (&volume, &mut checker, acknowledgements());
            scope.spawn(move || {
                write_for(volume, writer, Duration::from_millis(600));
                (0..500).for_each(|_| assert!(writer.write(volume)));
                write_for(volume, writer, Duration::from_millis(300));
            });
            until("something is written", || acknowledgements() > began + 20);
            killed.iter().for_each(|&number| servers.kill(number));
            until("two servers are left out", || volume.members().len() == 1);
            let before = acknowledgements();
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(acknowledgements(), before);
            killed.iter().for_each(|&number| servers.restart(number));
            until("writes go on", || acknowledgements() > before);
        });
        assert!(acknowledgements() > 500);
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
    }
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
    drop(volume);
    let volume = servers.open(&options());
    checker.check(&volume);
}

/// A volume with one copy, whose server has its store in this folder.
struct Alone {
    shape: Shape,
    address: Address,
    server: Option<Server>,
    options: ServerOptions,
}

impl Alone {
    fn new(blocks: u64, store: &Path) -> Alone {
        let shape = Shape::new(new_id().unwrap(), blocks, Copies::new(1, 1).unwrap()).unwrap();
        let options = ServerOptions { store: Some(store.into()), ..server_options() };
        let anywhere = format!("tcp:{}:0", crate::cluster::own_loopback()).parse().unwrap();
        let server = Server::start(&anywhere, &options).unwrap();
        let address = server.address().clone();
        Alone { shape, address, server: Some(server), options }
    }

    fn create(&self) -> Result<(), String> {
        let servers = std::slice::from_ref(&self.address);
        Volume::create(self.shape, servers, &options()).map_err(|error| error.to_string())
    }

    fn open(&self) -> Result<Volume, String> {
        let servers = std::slice::from_ref(&self.address);
        Volume::open(self.shape, servers, &options()).map_err(|error| error.to_string())
    }

    fn standing(&self) -> Option<Standing> {
        self.server.as_ref().and_then(|server| server.standing(self.shape.volume()))
    }

    fn stop(&mut self) {
        self.server.take().unwrap().stop();
    }

    fn start(&mut self) {
        self.server = Some(Server::start(&self.address, &self.options).unwrap());
    }
}

#[test]
fn a_server_that_was_stopped_has_its_copy_its_promise_and_its_mark() {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = Alone::new(100, folder.path());
    alone.create().unwrap();
    let volume = alone.open().unwrap();
    volume.write(7, content(7, 1)).unwrap();
    volume.flush().unwrap();
    let before = alone.standing().unwrap();
    assert_eq!(before.claim, before.applied);
    drop(volume);
    alone.stop();
    alone.start();
    assert_eq!(alone.standing(), Some(before));
    let volume = alone.open().unwrap();
    assert_eq!(number_of(7, &volume.read(7, 1).unwrap()), 1);
    assert!(alone.standing().unwrap().promised.unwrap().generation > before.promised.unwrap().generation);
    // No two servers share the folder.
    let refused = Server::start(&"tcp:127.0.0.1:0".parse().unwrap(), &alone.options).unwrap_err();
    assert!(refused.to_string().contains("another server has its stores there"), "{refused}");
}

/// A record of the journal that changes by itself can hold a promise: the copy is lost. With one copy, nothing can repair it.
#[test]
#[ignore = "long: make test-all"]
fn a_record_that_rots_in_the_store_makes_the_copy_lost() {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = Alone::new(100, folder.path());
    alone.create().unwrap();
    let volume = alone.open().unwrap();
    volume.write(7, content(7, 1)).unwrap();
    volume.flush().unwrap();
    drop(volume);
    alone.stop();
    // The block is in the journal still.
    let store = folder.path().join(alone.shape.volume().to_string());
    let mut rotten = 0;
    for entry in std::fs::read_dir(store).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        if let Some(at) = bytes.windows(64).position(|window| window == &content(7, 1)[512..576]) {
            bytes[at] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            rotten += 1;
        }
    }
    assert_eq!(rotten, 1);
    alone.start();
    assert_eq!(alone.standing().map(|standing| standing.state).unwrap_or_default(), State::Empty);
    let refused = alone.open().map(drop).unwrap_err();
    assert!(refused.contains("0 servers that hold the volume answered"), "{refused}");
}

/// A small file system of its own, until dropped.
pub struct Small(tempfile::TempDir);

impl Small {
    pub fn new(bytes: u64) -> Option<Small> {
        require::root()?;
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes},mode=0700"), "none"]).arg(folder.path());
        assert!(mount.status().unwrap().success());
        Some(Small(folder))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_device_refuses_writes_by_name_and_nothing_that_was_acknowledged_is_lost() {
    // The extents and one segment fit, and not another one.
    let Some(small) = Small::new(14 << 20) else { return };
    let too_large = Alone::new(4096, small.0.path());
    let refused = too_large.create().unwrap_err();
    assert!(refused.contains("extents") && refused.contains("space"), "{refused}");
    assert_eq!(too_large.standing().map(|standing| standing.state).unwrap_or_default(), State::Empty);
    drop(too_large);

    let mut alone = Alone::new(1024, small.0.path());
    alone.create().unwrap();
    let volume = alone.open().unwrap();
    let mut acknowledged = 0;
    for number in 1..=64 {
        // 1 MiB each, so that the segment is full after some.
        let blocks: Vec<u8> = (0..256).flat_map(|block| content(block, number)).collect();
        if volume.write(0, blocks).is_err() {
            break;
        }
        acknowledged = number;
    }
    println!("{acknowledged} writes of 1 MiB were acknowledged");
    assert!((1..64).contains(&acknowledged));
    drop(volume);
    alone.stop();
    // With more space the server goes on.
    let mut remount = Command::new("mount");
    remount.args(["-o", "remount,size=64m"]).arg(small.0.path());
    assert!(remount.status().unwrap().success());
    alone.start();
    assert_eq!(alone.standing().unwrap().state, State::Whole);
    let volume = alone.open().unwrap();
    let read = volume.read(0, 256).unwrap();
    for (block, bytes) in (0..).zip(read.chunks_exact(BLOCK_BYTES)) {
        assert_eq!(number_of(block, bytes), acknowledged);
    }
    for number in acknowledged + 1..acknowledged + 30 {
        volume.write(0, (0..256).flat_map(|block| content(block, number)).collect::<Vec<u8>>()).unwrap();
    }
    // Checkpoints have removed the segments before.
    let store = small.0.path().join(alone.shape.volume().to_string());
    until("old segments are removed", || std::fs::read_dir(&store).unwrap().count() <= 5);
}
