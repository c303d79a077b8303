//! The same over shared memory: every size, cuts, a receiver that holds on, spinning and sleeping.

use std::time::Duration;

use remora_messenger::{Address, Message, Options, Policy, Polling, Throttle};

use crate::kit::*;

fn somewhere(folder: &tempfile::TempDir) -> Address {
    Address::Shm(folder.path().join("bell"))
}

#[test]
fn a_question_is_answered_whatever_its_size_and_however_both_wait() {
    for polling in [Polling::Event, Polling::Adaptive(Duration::from_micros(50))] {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { polling, ..Options::default() };
        let server = end_with(Policy::stateless_server(), &options, Scribe { echoes: true, ..Scribe::default() });
        let address = server.messenger.listen(&somewhere(&folder)).unwrap();
        let client = end_with(Policy::lossy_client(), &options, Scribe { holds: true, ..Scribe::default() });
        let connection = client.messenger.connect(&address);
        let sizes = [0, 1, 1025, 16_384, 1_048_576, 5_000_000];
        for (number, size) in sizes.into_iter().enumerate() {
            let data: Vec<u8> = (0..size).map(|at| (at * 7 + number) as u8).collect();
            connection.send(Message::new(number as u64, 1, vec![]).with_data(data)).unwrap();
        }
        until("all answers", || client.scribe.taken().len() == sizes.len());
        for (number, delivery) in client.scribe.held.lock().unwrap().iter().enumerate() {
            assert_eq!(delivery.data.len(), sizes[number]);
            assert!(delivery.data.iter().enumerate().all(|(at, byte)| *byte == (at * 7 + number) as u8));
        }
        for number in 0..200 {
            connection.send(numbered(number)).unwrap(); // one after the other: both sleep in between
            until("an answer", || client.scribe.taken().len() == sizes.len() + 1 + number as usize);
        }
    }
}

#[test]
fn a_lossless_client_says_everything_once_though_its_links_are_cut() {
    let folder = tempfile::tempdir().unwrap();
    let server = end(quick(Policy::stateful_server()), Scribe::default());
    let address = server.messenger.listen(&somewhere(&folder)).unwrap();
    let mut policy = quick(Policy::lossless_client());
    policy.send_messages = 256;
    let client = end(policy, Scribe::default());
    let connection = client.messenger.connect(&address);
    for number in 0..100_000 {
        connection.send_within(numbered(number), Duration::from_secs(10)).unwrap();
        if number % 1000 == 0 {
            connection.cut();
        }
    }
    until("all messages", || server.scribe.taken.lock().unwrap().len() >= 100_000);
    assert!(server.scribe.taken().into_iter().eq(0..100_000));
    assert!(server.scribe.told().len() > 10, "cut only {} times", server.scribe.told().len());
}

#[test]
fn a_receiver_that_holds_on_is_never_overrun() {
    let folder = tempfile::tempdir().unwrap();
    let throttle = Throttle::new(1000, 1 << 20);
    let server =
        end(Policy::stateful_server().with_receive(throttle.clone()), Scribe { holds: true, ..Scribe::default() });
    let address = server.messenger.listen(&somewhere(&folder)).unwrap();
    let client = end(Policy::lossless_client(), Scribe::default());
    let connection = client.messenger.connect(&address);
    for number in 0..40 {
        connection.send(Message::new(number, 1, vec![]).with_data(vec![3; 300_000])).unwrap();
    }
    until("three messages", || server.scribe.taken().len() == 3);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(server.scribe.taken().len(), 3);
    until("the rest", || {
        server.scribe.held.lock().unwrap().clear();
        server.scribe.taken().len() == 40
    });
    assert!(server.scribe.taken().into_iter().eq(0..40));
}
