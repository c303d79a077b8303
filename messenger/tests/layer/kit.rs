//! Two messengers, and a dispatcher that records its callbacks.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remora_messenger::{
    Address, Arrival, Buffer, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy, Refusal,
};

/// A callback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    Connected,
    Reset { unacknowledged: usize, goes_on: bool },
    Closed,
    Refused(Refusal),
}

/// Records every callback, and echoes messages if asked to.
#[derive(Default)]
pub struct Scribe {
    pub echoes: bool,
    pub taken: Mutex<Vec<u64>>,
    pub told: Mutex<Vec<Told>>,
    pub held: Mutex<Vec<Delivery>>,
    pub holds: bool,
    /// Connections that peers have made.
    pub met: Mutex<Vec<Connection>>,
    pub memory: Mutex<Option<Buffer>>,
    pub landed: Mutex<Vec<(usize, usize)>>,
}

impl Scribe {
    pub fn taken(&self) -> Vec<u64> {
        self.taken.lock().unwrap().clone()
    }

    pub fn told(&self) -> Vec<Told> {
        self.told.lock().unwrap().clone()
    }
}

impl Dispatcher for Scribe {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        self.taken.lock().unwrap().push(delivery.transaction);
        self.landed.lock().unwrap().push((delivery.data.as_ptr() as usize, delivery.data.len()));
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
        self.told.lock().unwrap().push(Told::Connected);
        let mut met = self.met.lock().unwrap();
        if !met.contains(connection) {
            met.push(connection.clone());
        }
    }

    fn reset(&self, _: &Connection, unacknowledged: usize, goes_on: bool) {
        self.told.lock().unwrap().push(Told::Reset { unacknowledged, goes_on });
    }

    fn closed(&self, _: &Connection) {
        self.told.lock().unwrap().push(Told::Closed);
    }

    fn refused(&self, _: &Connection, why: Refusal) {
        self.told.lock().unwrap().push(Told::Refused(why));
    }
}

/// A messenger and its dispatcher.
pub struct End {
    pub messenger: Messenger,
    pub scribe: Arc<Scribe>,
}

pub fn end(policy: Policy, scribe: Scribe) -> End {
    end_with(policy, &Options::default(), scribe)
}

pub fn end_with(policy: Policy, options: &Options, scribe: Scribe) -> End {
    let scribe = Arc::new(scribe);
    let messenger = Messenger::new(policy, options, scribe.clone()).unwrap();
    End { messenger, scribe }
}

pub fn anywhere() -> Address {
    "tcp:127.0.0.1:0".parse().unwrap()
}

/// Waits for a condition.
pub fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
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
