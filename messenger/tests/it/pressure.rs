//! Bounds on what is under way, in both directions, and memory of the receiver's choice.

use std::time::Duration;

use remora_messenger::{Buffer, Message, Policy, SendError, Throttle};

use crate::kit::*;

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
