//! Receives the messenger's callbacks, on its thread, and forwards them to the tasks that await them. Never blocks.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use remora_messenger::connection::{Connection as Channel, Negotiated};
use remora_messenger::error::LinkError;
use remora_messenger::frame::Malformed;
use remora_messenger::stack::Address;
use remora_messenger::{Delivery, Dispatcher, Refusal};
use remora_protocol::Side;
use tokio::sync::{mpsc, oneshot, watch};

use super::{Fault, Options, security};
/// The receiver of the messenger's callbacks.
pub(super) struct Post {
    /// Tasks that wait for a handshake with the peer at that address. A listener has one connection from an address at
    /// a time.
    expected: Mutex<HashMap<SocketAddr, oneshot::Sender<Result<Introduced, Fault>>>>,
    /// Mailboxes of open conversations, by the id of the layer's connection.
    mailboxes: Mutex<HashMap<u64, Mailbox>>,
    side: Side,
    silence_limit: Duration,
    opening_limit: Duration,
}

/// A peer whose handshake is complete.
pub(super) struct Introduced {
    pub(super) channel: Channel,
    pub(super) negotiated: Negotiated,
    pub(super) mailbox: mpsc::UnboundedReceiver<Result<Delivery, Fault>>,
    pub(super) failure: watch::Receiver<Option<Fault>>,
}

struct Expectation<'a> {
    post: &'a Post,
    peer: SocketAddr,
}

impl Drop for Expectation<'_> {
    fn drop(&mut self) {
        let mut expected = lock(&self.post.expected);
        if expected.get(&self.peer).is_some_and(oneshot::Sender::is_closed) {
            expected.remove(&self.peer);
        }
    }
}

/// The queue of a conversation's received messages. The layer's throttle bounds it.
struct Mailbox {
    deliveries: mpsc::UnboundedSender<Result<Delivery, Fault>>,
    failure: watch::Sender<Option<Fault>>,
}

impl Post {
    pub(super) fn new(side: Side, options: &Options) -> Post {
        Post {
            expected: Mutex::default(),
            mailboxes: Mutex::default(),
            side,
            silence_limit: options.silence_limit,
            opening_limit: options.connect_timeout.max(options.handshake_timeout),
        }
    }

    /// Registers a task that waits for a handshake with the peer at that address.
    pub(super) fn expect(&self, peer: SocketAddr) -> oneshot::Receiver<Result<Introduced, Fault>> {
        let (tell, told) = oneshot::channel();
        lock(&self.expected).insert(peer, tell);
        told
    }

    /// Withdraws the registration when dropped, after the receiver of [`Post::expect`]. A later registration for the
    /// address stays.
    pub(super) fn expectation(&self, peer: SocketAddr) -> impl Drop + Send {
        Expectation { post: self, peer }
    }

    fn tell(&self, peer: &Address, outcome: Result<Introduced, Fault>) {
        let (Address::Tcp(peer) | Address::Tls(peer)) = peer else { return };
        let untold = match lock(&self.expected).remove(peer) {
            Some(tell) => tell.send(outcome),
            None => Err(outcome),
        };
        if let Err(Ok(met)) = untold {
            met.channel.close(); // the task that waited has given up
        }
    }

    /// Ends a conversation, or an attempt at one.
    fn end(&self, channel: &Channel, fault: Fault) {
        let Some(Mailbox { deliveries, failure }) = lock(&self.mailboxes).remove(&channel.id()) else {
            return self.tell(channel.peer(), Err(fault));
        };
        failure.send_replace(Some(fault.clone()));
        let _ = deliveries.send(Err(fault)); // the receiver may have been dropped
    }

    /// The fault to report for a link's error. `early`: the handshake was not complete.
    pub(super) fn fault(&self, broken: &LinkError, early: bool) -> Fault {
        let closed = if early { Fault::ClosedEarly } else { Fault::Closed };
        match broken {
            LinkError::Ended | LinkError::Cut => closed,
            LinkError::Io(error) if is_gone(error) => closed,
            LinkError::Io(error) => match security::explain(error) {
                Some(text) => Fault::Certificate(text),
                None => Fault::io("reading or writing", copy(error)),
            },
            LinkError::Unreachable(error) => Fault::Unreachable(Arc::new(copy(error))),
            LinkError::TooSlow(_) if early => Fault::TimedOut { doing: "the handshake", limit: self.opening_limit },
            LinkError::TooSlow(_) => Fault::PeerNotReading { limit: self.silence_limit },
            LinkError::Silent => Fault::PeerSilent { limit: self.silence_limit },
            LinkError::Handshake(error) => Fault::greeting(error, self.side.peer()),
            LinkError::Malformed(Malformed::Forged { sequence }) => Fault::Forged { sequence: *sequence },
            LinkError::Malformed(malformed) => Fault::Frame(*malformed),
            LinkError::Violation(violation) => {
                Fault::OutOfTurn { what: format!("a frame that is not allowed ({violation})") }
            }
        }
    }
}

impl Dispatcher for Post {
    fn message(&self, channel: &Channel, delivery: Delivery) {
        if let Some(Mailbox { deliveries, .. }) = lock(&self.mailboxes).get(&channel.id()) {
            let _ = deliveries.send(Ok(delivery)); // the receiver may have been dropped
        }
    }

    fn connected(&self, channel: &Channel) {
        let Some(negotiated) = channel.negotiated() else { return channel.abort() };
        let (deliveries, mailbox) = mpsc::unbounded_channel();
        let (fail, failure) = watch::channel(None);
        lock(&self.mailboxes).insert(channel.id(), Mailbox { deliveries, failure: fail });
        self.tell(channel.peer(), Ok(Introduced { channel: channel.clone(), negotiated, mailbox, failure }));
    }

    fn reset(&self, channel: &Channel, _: usize, _: bool) {
        let early = !lock(&self.mailboxes).contains_key(&channel.id());
        let fault = channel.link_error().map_or(Fault::Closed, |broken| self.fault(&broken, early));
        self.end(channel, fault);
    }

    fn closed(&self, channel: &Channel) {
        self.end(channel, Fault::Closed);
    }

    fn refused(&self, channel: &Channel, why: Refusal) {
        let fault = match why {
            Refusal::Full | Refusal::NotServing => Fault::Busy,
            Refusal::Policy | Refusal::Oneself => Fault::OutOfTurn { what: format!("a refusal: {why}") },
        };
        self.end(channel, fault);
    }

    fn rejected(&self, peer: &Address, why: &LinkError) {
        self.tell(peer, Err(self.fault(why, true)));
    }
}

impl std::fmt::Debug for Post {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "Post({} conversations)", lock(&self.mailboxes).len())
    }
}

/// Whether the peer has closed the connection. A peer that closes with unread bytes in its socket resets it.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Copies an error of the system, which cannot be cloned.
fn copy(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
