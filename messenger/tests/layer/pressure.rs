//! Bounds on what is under way, in both directions, and memory of the receiver's choice.

use std::time::Duration;

use remora_messenger::{Buffer, Message, Policy, SendError, Throttle};

use crate::kit::*;

#[test]
fn a_receiver_that_holds_messages_stops_reading_and_the_sender_gets_an_error() {
    let throttle = Throttle::new(10, 1 << 30);
    let server =
        end(Policy::stateful_server().with_receive(throttle.clone()), Scribe { holds: true, ..Scribe::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let mut policy = Policy::lossless_client();
    policy.send_messages = 100;
    let client = end(policy, Scribe::default());
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
    assert!((100..=400).contains(&sent), "{sent} were taken, where 10 are held and 100 may wait");
    assert_eq!(server.scribe.taken().len(), 10);
    assert_eq!(throttle.under_way().0, 10);

    // Releasing messages lets the rest in.
    let mut seen = 10;
    while seen < sent as usize {
        server.scribe.held.lock().unwrap().clear();
        let before = seen;
        until("more", || server.scribe.taken().len() > before);
        seen = server.scribe.taken().len();
        assert!(throttle.under_way().0 <= 10);
    }
    assert_eq!(server.scribe.taken(), (0..sent).collect::<Vec<_>>());
}

#[test]
fn a_bound_on_bytes_holds_over_all_sessions_together() {
    let throttle = Throttle::new(1000, 1 << 20);
    let server =
        end(Policy::stateless_server().with_receive(throttle.clone()), Scribe { holds: true, ..Scribe::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossy_client(), Scribe::default());
    let connections: Vec<_> = (0..4).map(|_| client.messenger.connect(&address)).collect();
    for number in 0..16 {
        connections[number % 4].send(Message::new(number as u64, 1, vec![]).with_data(vec![0; 300_000])).unwrap();
    }
    until("three messages", || server.scribe.taken().len() == 3);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(server.scribe.taken().len(), 3, "a fourth would pass 1 MiB");
    until("the rest", || {
        server.scribe.held.lock().unwrap().clear();
        assert!(throttle.under_way().1 <= 1 << 20);
        server.scribe.taken().len() == 16
    });
}

#[test]
fn a_receiver_that_holds_on_for_long_is_not_taken_for_dead_nor_takes_its_peer_for_it() {
    let brisk = |mut policy: Policy| {
        (policy.ping_after, policy.silence_limit) = (Duration::from_millis(30), Duration::from_millis(150));
        policy
    };
    let throttle = Throttle::new(1, 1 << 30);
    let server =
        end(brisk(Policy::stateless_server()).with_receive(throttle), Scribe { holds: true, ..Scribe::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(brisk(Policy::lossy_client()), Scribe::default());
    let connection = client.messenger.connect(&address);
    (0..3).for_each(|number| connection.send(numbered(number)).unwrap());
    std::thread::sleep(Duration::from_millis(600));
    until("the rest", || {
        server.scribe.held.lock().unwrap().clear();
        server.scribe.taken() == [0, 1, 2]
    });
    assert_eq!((client.scribe.told(), server.scribe.told()), (vec![Told::Connected], vec![Told::Connected]));
}

#[test]
fn waiting_for_room_ends_when_there_is_some_and_when_the_time_is_over() {
    let mut policy = Policy::lossless_client();
    policy.send_messages = 1;
    let client = end(policy, Scribe::default());
    let server = end(Policy::stateful_server(), Scribe::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let connection = client.messenger.connect(&address);
    (0..50).for_each(|number| connection.send_within(numbered(number), Duration::from_secs(10)).unwrap());
    until("all", || server.scribe.taken().len() == 50);
    let absent = client.messenger.connect(&"tcp:127.0.0.1:1".parse().unwrap());
    absent.send(numbered(0)).unwrap();
    let outcome = absent.send_within(numbered(1), Duration::from_millis(20));
    assert!(matches!(outcome, Err(SendError::Full(_))));
}

#[test]
fn data_lands_in_the_memory_that_the_receiver_gave_and_at_the_alignment_that_the_sender_wants() {
    let server = end(Policy::stateless_server(), Scribe::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossy_client(), Scribe::default());
    let connection = client.messenger.connect(&address);
    let chosen = Buffer::zeroed(1 << 20, 4096);
    let place = chosen.as_ptr() as usize;
    *server.scribe.memory.lock().unwrap() = Some(chosen);
    connection.send(Message::new(1, 1, vec![]).with_data(vec![5; 1 << 20])).unwrap();
    let mut aligned = Message::new(2, 1, vec![]).with_data(vec![6; 70_000]);
    aligned.alignment = 4096;
    connection.send(aligned).unwrap();
    until("both", || server.scribe.taken() == [1, 2]);
    let landed = server.scribe.landed.lock().unwrap();
    assert_eq!(landed[0], (place, 1 << 20));
    assert_eq!(landed[1].0 % 4096, 0);
}

#[test]
fn received_memory_is_used_again() {
    let server = end(Policy::stateless_server(), Scribe::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let client = end(Policy::lossy_client(), Scribe::default());
    let connection = client.messenger.connect(&address);
    for number in 0..20 {
        connection.send(Message::new(number, 1, vec![]).with_data(vec![5; 1 << 20])).unwrap();
    }
    until("all", || server.scribe.taken().len() == 20);
    until("given back", || server.messenger.pool().idle_bytes() > 0);
    assert!(server.messenger.pool().idle_bytes() <= 2 << 20, "{} bytes", server.messenger.pool().idle_bytes());
}
