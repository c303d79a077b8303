//! The life of sessions: opened, cut, forgotten, refused, opened from both ends, closed.

use std::time::Duration;

use remora_messenger::{Message, Options, Policy, Refusal, SendError};

use crate::alike;
use crate::kit::*;

#[test]
fn a_question_is_answered_whatever_its_size() {
    let sizes = [0, 1, 1023, 1024, 1025, 4096, 16_384, 262_144, 5_000_000, 16 << 20];
    alike::a_question_is_answered(&anywhere(), &Options::default(), &sizes, 0);
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
