//! A million messages over links that are cut at random.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

use remora_messenger::{Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy};

use crate::kit::*;

/// A million in all: four sessions, two directions.
const MESSAGES_PER_DIRECTION: u64 = 125_000;

#[test]
#[ignore = "long: make test-all"]
fn a_million_messages_under_random_cuts_are_neither_lost_nor_doubled_nor_out_of_order() {
    let options = Options { workers: 2, ..Options::default() };
    let mut policy = quick(Policy::lossless_peer());
    policy.send_messages = 256; // so that senders wait for the link, and cuts happen meanwhile
    let pairs: Vec<_> = (0..4)
        .map(|_| {
            let server = end_with(policy.clone(), &options, Recorder::default());
            let address = server.messenger.listen(&anywhere()).unwrap();
            let client = end_with(policy.clone(), &options, Recorder::default());
            let connection = client.messenger.connect(&address);
            until("a session", || !server.recorder.connections.lock().unwrap().is_empty());
            let back = server.recorder.connections.lock().unwrap()[0].clone();
            (server, client, connection, back)
        })
        .collect();
    std::thread::scope(|scope| {
        for (seed, (_, _, connection, back)) in pairs.iter().enumerate() {
            for (end, connection) in [connection, back].into_iter().enumerate() {
                let mut random = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(1 + seed as u64 * 2 + end as u64);
                scope.spawn(move || {
                    for number in 0..MESSAGES_PER_DIRECTION {
                        connection.send_within(numbered(number), LONG).unwrap();
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        if random >> 33 < (1 << 31) / CUT_ONE_IN {
                            connection.cut();
                        }
                    }
                });
            }
        }
    });
    for (server, client, ..) in &pairs {
        for recorder in [&server.recorder, &client.recorder] {
            until("all messages", || recorder.received.lock().unwrap().len() as u64 >= MESSAGES_PER_DIRECTION);
            assert!(recorder.received().into_iter().eq(0..MESSAGES_PER_DIRECTION));
            assert!(recorder.callbacks().iter().all(|callback| *callback == Callback::Connected));
        }
        let links = server.recorder.callbacks().len();
        assert!(links > 20, "only {links} links: too few were cut");
    }
}

const CUT_ONE_IN: u64 = 2000;

/// Sends each message back.
struct Echo;

impl Dispatcher for Echo {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        connection.send(Message::new(delivery.transaction, delivery.kind, delivery.front.to_vec())).unwrap();
    }
}

/// Gives each answer to the thread that has asked.
struct Askers(Vec<Sender<u64>>);

impl Dispatcher for Askers {
    fn message(&self, _: &Connection, delivery: Delivery) {
        self.0[usize::from(delivery.kind)].send(delivery.transaction).unwrap();
    }
}

const ASKERS: usize = 6;
const QUESTIONS: u64 = 5000;

/// Each thread asks when the last answer has come, so the worker sleeps again and again, and a thread that asks often
/// finds it so. Two connections share the worker, and three threads each connection.
#[test]
#[ignore = "long: make test-all"]
fn threads_that_ask_and_wait_get_every_answer() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { workers: 1, ..Options::default() };
    for address in [anywhere(), format!("shm:{}", folder.path().join("socket").display()).parse().unwrap()] {
        let server = Messenger::new(Policy::stateless_server(), &options, Arc::new(Echo)).unwrap();
        let address = server.listen(&address).unwrap();
        let (askers, answers): (Vec<_>, Vec<_>) = (0..ASKERS).map(|_| mpsc::channel()).unzip();
        let client = Messenger::new(Policy::lossy_client(), &options, Arc::new(Askers(askers))).unwrap();
        let connections = [(); 2].map(|()| client.connect(&address));
        std::thread::scope(|scope| {
            for (asker, answers) in answers.into_iter().enumerate() {
                let connection = connections[asker % 2].clone();
                scope.spawn(move || {
                    for question in 0..QUESTIONS {
                        connection.send(Message::new(question, asker as u16, vec![7; 100])).unwrap();
                        assert_eq!(answers.recv_timeout(LONG), Ok(question));
                    }
                });
            }
        });
    }
}
