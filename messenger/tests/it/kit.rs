//! Two messengers, and a dispatcher that records its callbacks.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remora_messenger::{
    Address, Arrival, Buffer, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy, Refusal,
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
