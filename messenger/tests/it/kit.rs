//! Two messengers, a dispatcher that records its callbacks, and the cases that must hold over every transport: each of
//! these is given the server's address and options.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remora_messenger::{
    Address, Arrival, Buffer, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy, Refusal, Throttle,
};

/// A callback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Callback {
    Connected,
    Reset { unacknowledged: usize, continues: bool },
    Closed,
    Refused(Refusal),
}

/// Records every callback, and echoes messages if asked to.
#[derive(Default)]
pub struct Recorder {
    pub echoes: bool,
    pub received: Mutex<Vec<u64>>,
    pub callbacks: Mutex<Vec<Callback>>,
    pub held: Mutex<Vec<Delivery>>,
    pub holds: bool,
    /// Connections that peers have made.
    pub connections: Mutex<Vec<Connection>>,
    pub memory: Mutex<Option<Buffer>>,
    pub placed: Mutex<Vec<(usize, usize)>>,
}

impl Recorder {
    pub fn received(&self) -> Vec<u64> {
        self.received.lock().unwrap().clone()
    }

    pub fn callbacks(&self) -> Vec<Callback> {
        self.callbacks.lock().unwrap().clone()
    }
}

impl Dispatcher for Recorder {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        self.received.lock().unwrap().push(delivery.transaction);
        self.placed.lock().unwrap().push((delivery.data.as_ptr() as usize, delivery.data.len()));
        if self.echoes {
            let mut reply = Message::new(delivery.transaction, delivery.kind, delivery.front);
            reply.data = delivery.data.into();
            let _ = connection.send(reply);
        } else if self.holds {
            self.held.lock().unwrap().push(delivery);
        }
    }

    fn memory(&self, _: &Connection, _: &Arrival) -> Option<Buffer> {
        self.memory.lock().unwrap().take()
    }

    fn connected(&self, connection: &Connection) {
        self.callbacks.lock().unwrap().push(Callback::Connected);
        let mut connections = self.connections.lock().unwrap();
        if !connections.contains(connection) {
            connections.push(connection.clone());
        }
    }

    fn reset(&self, _: &Connection, unacknowledged: usize, continues: bool) {
        self.callbacks.lock().unwrap().push(Callback::Reset { unacknowledged, continues });
    }

    fn closed(&self, _: &Connection) {
        self.callbacks.lock().unwrap().push(Callback::Closed);
    }

    fn refused(&self, _: &Connection, why: Refusal) {
        self.callbacks.lock().unwrap().push(Callback::Refused(why));
    }
}

/// A messenger and its dispatcher.
pub struct End {
    pub messenger: Messenger,
    pub recorder: Arc<Recorder>,
}

pub fn end(policy: Policy, recorder: Recorder) -> End {
    end_with(policy, &Options::default(), recorder)
}

pub fn end_with(policy: Policy, options: &Options, recorder: Recorder) -> End {
    let recorder = Arc::new(recorder);
    let messenger = Messenger::new(policy, options, recorder.clone()).unwrap();
    End { messenger, recorder }
}

pub fn anywhere() -> Address {
    "tcp:127.0.0.1:0".parse().unwrap()
}

/// How long a test waits for what an idle machine does at once. Nothing is measured by it.
pub const LONG: Duration = Duration::from_secs(120);

/// Waits for a condition.
pub fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A policy with short pauses, for tests.
pub fn quick(mut policy: Policy) -> Policy {
    policy.first_pause = Duration::from_millis(2);
    policy.longest_pause = Duration::from_millis(20);
    policy
}

pub fn numbered(number: u64) -> Message {
    Message::new(number, 1, number.to_le_bytes().to_vec())
}

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
