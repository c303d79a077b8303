//! Caller: a connection to a server, of another one or of a host that only reads. One question at a time.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::{Address, Buffer, Connection, Delivery, Dispatcher, Messenger, Refusal};

use crate::link::{self, Security};
use crate::wire::{Call, Reply};

/// See the module's text.
pub(crate) struct Caller {
    connection: Connection,
    events: Receiver<Event>,
    _messenger: Messenger,
}

enum Event {
    Delivery(Delivery),
    Over,
}

struct Post(Sender<Event>);

impl Dispatcher for Post {
    fn message(&self, _: &Connection, delivery: Delivery) {
        let _ = self.0.send(Event::Delivery(delivery)); // the caller may have ended
    }

    fn reset(&self, _: &Connection, _: usize, _: bool) {
        let _ = self.0.send(Event::Over);
    }

    fn closed(&self, _: &Connection) {
        let _ = self.0.send(Event::Over);
    }

    fn refused(&self, _: &Connection, _: Refusal) {
        let _ = self.0.send(Event::Over);
    }
}

impl Caller {
    /// Begins to connect. The first answer shows whether that was possible.
    pub(crate) fn connect(address: &Address, security: &Security) -> Result<Caller, String> {
        let (post, events) = mpsc::channel();
        let options = link::options(security, 1, 1);
        let messenger = Messenger::new(link::client_policy(), &options, Arc::new(Post(post)));
        let messenger = messenger.map_err(|error| error.to_string())?;
        Ok(Caller { connection: messenger.connect(address), events, _messenger: messenger })
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Why the connection is over; `None` while it is not. Not to be called while a question is open.
    pub(crate) fn why_over(&self) -> Option<String> {
        let is_over = matches!(self.events.try_recv(), Ok(_) | Err(TryRecvError::Disconnected));
        is_over.then(|| self.why())
    }

    fn why(&self) -> String {
        let why = self.connection.link_error().map(|error| error.to_string());
        why.unwrap_or_else(|| "the connection is over".into())
    }

    /// The answer to a question, within `limit`. `goes_on` is asked from time to time whether to wait on.
    pub(crate) fn ask<E: From<String>>(
        &self,
        call: &Call,
        limit: Duration,
        mut goes_on: impl FnMut() -> Result<(), E>,
    ) -> Result<(Reply, Buffer), E> {
        let message = link::call(call, Bytes::new()).map_err(|error| error.to_string())?;
        self.connection.send(message).map_err(|error| error.to_string())?;
        let deadline = Instant::now() + limit;
        loop {
            goes_on()?;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left.min(LOOK_AGAIN)) {
                Ok(Event::Delivery(delivery)) => {
                    let reply = link::decode_reply(&delivery).map_err(|error| error.to_string())?;
                    return Ok((reply, delivery.data));
                }
                Ok(Event::Over) | Err(RecvTimeoutError::Disconnected) => return Err(self.why().into()),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    return Err(format!("no answer within {limit:?}").into());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// How often a caller that waits checks whether it should end.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(50);
