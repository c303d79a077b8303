//! The life of sessions: opened, cut, forgotten, refused, opened from both ends, closed. Bounds on what is under way, in
//! both directions; a million messages over links that are cut at random; and the shared cases over shared memory.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use remora_messenger::{
    Address, Buffer, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy, Polling, Refusal,
    SendError, Throttle,
};

use crate::kit::{self, *};

#[test]
fn a_question_is_answered_whatever_its_size() {
    let sizes = [0, 1, 1023, 1024, 1025, 4096, 16_384, 262_144, 5_000_000, 16 << 20];
    kit::a_question_is_answered(&anywhere(), &Options::default(), &sizes, 0);
}

#[test]
fn a_body_that_is_too_long_is_returned() {
    let client = end(Policy::lossy_client(), Recorder::default());
    let connection = client.messenger.connect(&"tcp:127.0.0.1:1".parse().unwrap());
    let long = Message::new(1, 1, vec![]).with_data(vec![0; (16 << 20) + 1]);
    assert!(matches!(connection.send(long), Err(SendError::TooLong(message)) if message.transaction == 1));
}

#[test]
fn a_lossless_client_sends_everything_once_although_its_links_are_cut() {
    let server = end(quick(Policy::stateful_server()), Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(quick(Policy::lossless_client()), Recorder::default());
    let connection = client.messenger.connect(&address);
    let connected = || {
        let callbacks = server.recorder.callbacks();
        callbacks.iter().filter(|callback| **callback == Callback::Connected).count()
    };
    let mut cuts = 0;
    for number in 0..5000 {
        connection.send_within(numbered(number), LONG).unwrap();
        if number % 250 == 249 {
            // Each cut is of a link of its own, with messages on their way over it.
            until("the link to be open again", || connected() > cuts);
            connection.cut();
            cuts += 1;
        }
    }
    until("all messages", || server.recorder.received().len() >= 5000);
    assert_eq!(server.recorder.received(), (0..5000).collect::<Vec<_>>());
    assert!(connected() >= cuts, "connected {} times, cut {cuts} times", connected());
    assert!(
        client.recorder.callbacks().iter().all(|callback| *callback == Callback::Connected),
        "{:?}",
        client.recorder.callbacks()
    );
}

#[test]
fn messages_sent_before_the_peer_listens_arrive_when_it_does() {
    let late = end(quick(Policy::lossless_peer()), Recorder::default());
    let address = late.messenger.listen(&anywhere()).unwrap();
    drop(late);
    let early = end(quick(Policy::lossless_peer()), Recorder::default());
    let connection = early.messenger.connect(&address);
    connection.send(numbered(1)).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    let late = end(quick(Policy::lossless_peer()), Recorder::default());
    late.messenger.listen(&address).unwrap();
    until("the message", || late.recorder.received() == [1]);
}

#[test]
fn a_lossy_client_is_notified_when_its_server_ends() {
    let server = end(Policy::stateless_server(), Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossy_client(), Recorder::default());
    let connection = client.messenger.connect(&address);
    connection.send(numbered(1)).unwrap();
    until("the message", || server.recorder.received() == [1]);
    server.messenger.stop();
    until("the end", || client.recorder.callbacks().len() == 2);
    // Stopping sends CLOSE if it still can. A client that does not receive it sees the link break.
    assert!(matches!(client.recorder.callbacks()[1], Callback::Closed | Callback::Reset { continues: false, .. }));
    until("no more messages", || matches!(connection.send(numbered(2)), Err(SendError::Over(_))));
}

#[test]
fn a_restarted_peer_is_detected_and_the_session_continues_empty() {
    let first = end(quick(Policy::lossless_peer()), Recorder::default());
    let address = first.messenger.listen(&anywhere()).unwrap();
    let other = end(quick(Policy::lossless_peer()), Recorder::default());
    let connection = other.messenger.connect(&address);
    connection.send(numbered(1)).unwrap();
    until("the message", || first.recorder.received() == [1]);
    first.messenger.stop();
    until("the link to break", || !connection.is_ready());
    connection.send(numbered(2)).unwrap();
    let second = end(quick(Policy::lossless_peer()), Recorder::default());
    second.messenger.listen(&address).unwrap();
    until("the news", || {
        other.recorder.callbacks().iter().any(|callback| matches!(callback, Callback::Reset { continues: true, .. }))
    });
    connection.send(numbered(3)).unwrap();
    until("the message after", || second.recorder.received() == [3]);
}

#[test]
fn two_peers_that_connect_to_each_other_at_once_have_one_session() {
    for _ in 0..20 {
        let ends = [(); 2].map(|()| end(quick(Policy::lossless_peer()), Recorder::default()));
        let addresses = ends.each_ref().map(|end| end.messenger.listen(&anywhere()).unwrap());
        let connections = [0, 1].map(|at: usize| {
            let connection = ends[at].messenger.connect(&addresses[1 - at]);
            connection.send(numbered(at as u64)).unwrap();
            connection
        });
        until("both messages", || ends[0].recorder.received() == [1] && ends[1].recorder.received() == [0]);
        for (end, connection) in ends.iter().zip(&connections) {
            assert_eq!(
                *end.recorder.connections.lock().unwrap(),
                std::slice::from_ref(connection),
                "the answer came on another session"
            );
            assert!(!end.recorder.callbacks().iter().any(|callback| matches!(callback, Callback::Reset { .. })));
        }
    }
}

#[test]
fn connecting_twice_to_a_peer_gives_the_same_session() {
    let peer = end(Policy::lossless_peer(), Recorder::default());
    let address = peer.messenger.listen(&anywhere()).unwrap();
    let other = end(Policy::lossless_peer(), Recorder::default());
    assert_eq!(other.messenger.connect(&address), other.messenger.connect(&address));
    let client = end(Policy::lossless_client(), Recorder::default());
    assert_ne!(client.messenger.connect(&address), client.messenger.connect(&address));
}

#[test]
fn refusals_are_reported_with_their_reason() {
    let server = end(Policy::stateless_server(), Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossless_client(), Recorder::default());
    client.messenger.connect(&address);
    until("a refusal", || client.recorder.callbacks() == [Callback::Refused(Refusal::Policy)]);

    let peer = end(Policy::lossless_peer(), Recorder::default());
    let address = peer.messenger.listen(&anywhere()).unwrap();
    peer.messenger.connect(&address);
    until("a refusal", || peer.recorder.callbacks() == [Callback::Refused(Refusal::Oneself)]);

    let full =
        end_with(Policy::stateless_server(), &Options { max_sessions: 1, ..Options::default() }, Recorder::default());
    let address = full.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossy_client(), Recorder::default());
    client.messenger.connect(&address);
    until("the first", || client.recorder.callbacks() == [Callback::Connected]);
    client.messenger.connect(&address);
    until("a refusal", || client.recorder.callbacks()[1..] == [Callback::Refused(Refusal::Full)]);
}

#[test]
fn closing_sends_everything_first_and_both_ends_are_notified() {
    let server = end(Policy::stateful_server(), Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossless_client(), Recorder::default());
    let connection = client.messenger.connect(&address);
    (0..1000).for_each(|number| connection.send(numbered(number)).unwrap());
    connection.close();
    until("the end", || server.recorder.callbacks().last() == Some(&Callback::Closed));
    until("the end here", || client.recorder.callbacks().last() == Some(&Callback::Closed));
    assert_eq!(server.recorder.received().len(), 1000);
    assert!(matches!(connection.send(numbered(0)), Err(SendError::Over(_))));
}

#[test]
fn sessions_find_their_way_between_workers() {
    let options = Options { workers: 3, ..Options::default() };
    let server = end_with(quick(Policy::stateful_server()), &options, Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end_with(quick(Policy::lossless_client()), &options, Recorder::default());
    let connections: Vec<_> = (0..7).map(|_| client.messenger.connect(&address)).collect();
    for round in 0..200 {
        for connection in &connections {
            connection.send(numbered(round)).unwrap();
        }
        connections[round as usize % 7].cut(); // the next link is accepted by the next worker in turn
        std::thread::sleep(Duration::from_micros(300));
    }
    until("all messages", || server.recorder.received().len() == 1400);
    assert!(!server.recorder.callbacks().iter().any(|callback| matches!(callback, Callback::Reset { .. })));
}

// Bounds on what is under way, and memory of the receiver's choice.

#[test]
fn a_receiver_that_holds_messages_stops_reading_and_the_sender_gets_an_error() {
    let throttle = Throttle::new(10, 1 << 30);
    let server =
        end(Policy::stateful_server().with_receive(throttle.clone()), Recorder { holds: true, ..Recorder::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let mut policy = Policy::lossless_client();
    policy.send_messages = 100;
    let client = end(policy, Recorder::default());
    let connection = client.messenger.connect(&address);
    let refused = (0..).find(|number| match connection.send(numbered(*number)) {
        Ok(()) => {
            std::thread::sleep(Duration::from_micros(100));
            false
        }
        Err(SendError::Full(message)) => message.transaction == *number,
        Err(other) => panic!("{other}"),
    });
    let sent = refused.unwrap();
    assert!(
        (100..=400).contains(&sent),
        "{sent} messages were accepted; the receiver holds 10, and the send queue 100"
    );
    assert_eq!(server.recorder.received().len(), 10);
    assert_eq!(throttle.under_way().0, 10);

    // Releasing messages lets the rest in.
    let mut seen = 10;
    while seen < sent as usize {
        server.recorder.held.lock().unwrap().clear();
        let before = seen;
        until("more", || server.recorder.received().len() > before);
        seen = server.recorder.received().len();
        assert!(throttle.under_way().0 <= 10);
    }
    assert_eq!(server.recorder.received(), (0..sent).collect::<Vec<_>>());
}

#[test]
fn a_bound_on_bytes_holds_over_all_sessions_together() {
    let throttle = Throttle::new(1000, 1 << 20);
    let server =
        end(Policy::stateless_server().with_receive(throttle.clone()), Recorder { holds: true, ..Recorder::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossy_client(), Recorder::default());
    let connections: Vec<_> = (0..4).map(|_| client.messenger.connect(&address)).collect();
    for number in 0..16 {
        connections[number % 4].send(Message::new(number as u64, 1, vec![]).with_data(vec![0; 300_000])).unwrap();
    }
    until("three messages", || server.recorder.received().len() == 3);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(server.recorder.received().len(), 3, "a fourth would pass 1 MiB");
    until("the rest", || {
        server.recorder.held.lock().unwrap().clear();
        assert!(throttle.under_way().1 <= 1 << 20);
        server.recorder.received().len() == 16
    });
}

#[test]
fn a_receiver_that_holds_messages_for_long_does_not_time_out_at_either_end() {
    let brisk = |mut policy: Policy| {
        (policy.ping_after, policy.silence_limit) = (Duration::from_millis(100), Duration::from_secs(1));
        policy
    };
    let throttle = Throttle::new(1, 1 << 30);
    let server =
        end(brisk(Policy::stateless_server()).with_receive(throttle), Recorder { holds: true, ..Recorder::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(brisk(Policy::lossy_client()), Recorder::default());
    let connection = client.messenger.connect(&address);
    (0..3).for_each(|number| connection.send(numbered(number)).unwrap());
    std::thread::sleep(Duration::from_millis(2500));
    until("the rest", || {
        server.recorder.held.lock().unwrap().clear();
        server.recorder.received() == [0, 1, 2]
    });
    assert_eq!(
        (client.recorder.callbacks(), server.recorder.callbacks()),
        (vec![Callback::Connected], vec![Callback::Connected])
    );
}

#[test]
fn waiting_for_room_ends_when_there_is_some_and_when_the_time_is_over() {
    let mut policy = Policy::lossless_client();
    policy.send_messages = 1;
    let client = end(policy, Recorder::default());
    let server = end(Policy::stateful_server(), Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let connection = client.messenger.connect(&address);
    (0..50).for_each(|number| connection.send_within(numbered(number), LONG).unwrap());
    until("all", || server.recorder.received().len() == 50);
    let absent = client.messenger.connect(&"tcp:127.0.0.1:1".parse().unwrap());
    absent.send(numbered(0)).unwrap();
    let outcome = absent.send_within(numbered(1), Duration::from_millis(20));
    assert!(matches!(outcome, Err(SendError::Full(_))));
}

#[test]
fn data_lands_in_the_memory_that_the_receiver_gave_and_at_the_alignment_that_the_sender_wants() {
    let server = end(Policy::stateless_server(), Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossy_client(), Recorder::default());
    let connection = client.messenger.connect(&address);
    let chosen = Buffer::zeroed(1 << 20, 4096);
    let place = chosen.as_ptr() as usize;
    *server.recorder.memory.lock().unwrap() = Some(chosen);
    connection.send(Message::new(1, 1, vec![]).with_data(vec![5; 1 << 20])).unwrap();
    let mut aligned = Message::new(2, 1, vec![]).with_data(vec![6; 70_000]);
    aligned.alignment = 4096;
    connection.send(aligned).unwrap();
    until("both", || server.recorder.received() == [1, 2]);
    let placed = server.recorder.placed.lock().unwrap();
    assert_eq!(placed[0], (place, 1 << 20));
    assert_eq!(placed[1].0 % 4096, 0);
}

#[test]
fn received_memory_is_used_again() {
    let server = end(Policy::stateless_server(), Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossy_client(), Recorder::default());
    let connection = client.messenger.connect(&address);
    for number in 0..20 {
        connection.send(Message::new(number, 1, vec![]).with_data(vec![5; 1 << 20])).unwrap();
    }
    until("all", || server.recorder.received().len() == 20);
    until("given back", || server.messenger.pool().idle_bytes() > 0);
    assert!(server.messenger.pool().idle_bytes() <= 2 << 20, "{} bytes", server.messenger.pool().idle_bytes());
}

// A million messages over links that are cut at random.

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

// The shared cases over shared memory.

fn somewhere(folder: &tempfile::TempDir) -> Address {
    Address::Shm(folder.path().join("bell"))
}

#[test]
fn a_question_is_answered_whatever_its_size_and_however_both_wait() {
    for polling in [Polling::Event, Polling::Adaptive(Duration::from_micros(50))] {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { polling, ..Options::default() };
        let sizes = [0, 1, 1025, 16_384, 1_048_576, 5_000_000];
        kit::a_question_is_answered(&somewhere(&folder), &options, &sizes, 200);
    }
}

#[test]
fn over_shared_memory_a_lossless_client_sends_everything_once_although_its_links_are_cut() {
    let folder = tempfile::tempdir().unwrap();
    kit::everything_arrives_once_although_links_are_cut(&somewhere(&folder), &Options::default(), 100_000, 1000, 10);
}

#[test]
fn a_receiver_that_holds_messages_is_never_overrun() {
    let folder = tempfile::tempdir().unwrap();
    let (at, while_held) = (somewhere(&folder), Duration::from_millis(20));
    kit::a_receiver_that_holds_messages_is_never_overrun(&at, &Options::default(), 40, while_held);
}
