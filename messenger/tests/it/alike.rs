//! The cases that must hold over every transport. Each one is given the server's address and options.

use std::time::Duration;

use remora_messenger::{Address, Message, Options, Policy, Throttle};

use crate::kit::*;

/// Requests with `sizes` bytes of data each, all at once, come back unchanged; then `one_by_one` requests, one after
/// the other.
pub fn a_question_is_answered(at: &Address, options: &Options, sizes: &[usize], one_by_one: u64) {
    let server = end_with(Policy::stateless_server(), options, Recorder { echoes: true, ..Recorder::default() });
    let address = server.messenger.listen(at).unwrap();
    let client = end_with(Policy::lossy_client(), options, Recorder { holds: true, ..Recorder::default() });
    let connection = client.messenger.connect(&address);
    for (number, size) in sizes.iter().enumerate() {
        let data: Vec<u8> = (0..*size).map(|at| (at * 7 + number) as u8).collect();
        let sent = connection.send(Message::new(number as u64, 1, b"front".to_vec()).with_data(data));
        assert!(sent.is_ok(), "the connection is over: {:?}", connection.link_error());
    }
    until("all answers", || client.recorder.received().len() == sizes.len());
    for (number, (delivery, size)) in client.recorder.held.lock().unwrap().iter().zip(sizes).enumerate() {
        assert_eq!(delivery.front[..], b"front"[..]);
        assert_eq!(delivery.data.len(), *size);
        assert!(delivery.data.iter().enumerate().all(|(at, byte)| *byte == (at * 7 + number) as u8), "{size} bytes");
    }
    for number in 0..one_by_one {
        connection.send(numbered(number)).unwrap(); // both ends sleep in between
        until("an answer", || client.recorder.received().len() == sizes.len() + 1 + number as usize);
    }
}

/// Every message arrives once and in order, although the link is cut regularly. The server has noticed more than
/// `noticed` of the links.
pub fn everything_arrives_once_although_links_are_cut(
    at: &Address,
    options: &Options,
    messages: u64,
    cut_every: u64,
    noticed: usize,
) {
    let server = end_with(quick(Policy::stateful_server()), options, Recorder::default());
    let address = server.messenger.listen(at).unwrap();
    let mut policy = quick(Policy::lossless_client());
    policy.send_messages = 256;
    let client = end_with(policy, options, Recorder::default());
    let connection = client.messenger.connect(&address);
    for number in 0..messages {
        connection.send_within(numbered(number), LONG).unwrap();
        if number % cut_every == 0 {
            connection.cut();
        }
    }
    until("all messages", || server.recorder.received.lock().unwrap().len() as u64 >= messages);
    assert!(server.recorder.received().into_iter().eq(0..messages));
    assert!(server.recorder.callbacks().len() > noticed, "cut only {} times", server.recorder.callbacks().len());
}

/// A receiver that may hold three messages and releases none is sent no fourth one in `while_held`; all others arrive
/// once it releases them.
pub fn a_receiver_that_holds_messages_is_never_overrun(
    at: &Address,
    options: &Options,
    messages: u64,
    while_held: Duration,
) {
    let policy = Policy::stateful_server().with_receive(Throttle::new(1000, 1 << 20));
    let server = end_with(policy, options, Recorder { holds: true, ..Recorder::default() });
    let address = server.messenger.listen(at).unwrap();
    let client = end_with(Policy::lossless_client(), options, Recorder::default());
    let connection = client.messenger.connect(&address);
    for number in 0..messages {
        connection.send(Message::new(number, 1, vec![]).with_data(vec![3; 300_000])).unwrap();
    }
    until("three messages", || server.recorder.received().len() == 3);
    std::thread::sleep(while_held);
    assert_eq!(server.recorder.received().len(), 3);
    until("the rest", || {
        server.recorder.held.lock().unwrap().clear();
        server.recorder.received().len() as u64 == messages
    });
    assert!(server.recorder.received().into_iter().eq(0..messages));
}
