//! Questions about copies which the tests can change: scrubs, what is said of a catch-up, a removal.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_messenger::Address;

use super::slot::Slot;
use super::{Server, ServerOptions};
use crate::client::{ClientOptions, Volume, new_id};
use crate::link::{Caller, Security};
use crate::rules::{ServerId, State};
use crate::shape::{BLOCK_BYTES, Copies, Shape};
use crate::wire::{Call, Cause, Findings, Reply};

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Scene {
    shape: Shape,
    servers: Vec<Server>,
    addresses: Vec<Address>,
}

impl Scene {
    fn new(blocks: u64) -> Scene {
        let shape = Shape::new(new_id().unwrap(), blocks, Copies::new(3, 2).unwrap()).unwrap();
        let options = ServerOptions { shm: false, ..ServerOptions::default() };
        let start = |_| Server::start(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap();
        let servers: Vec<_> = (0..3).map(start).collect();
        let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
        Volume::create(shape, &addresses, &ClientOptions::default()).unwrap();
        Scene { shape, servers, addresses }
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
    let scene = Scene::new(1000);
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
    let scene = Scene::new(1000);
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
    let scene = Scene::new(100);
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
