//! The agents' conversation on the message layer: tokio on one side, a [`Messenger`] on the other. Framing, seals, time-outs and
//! back-pressure are the layer's; here messages become frames' bodies and back, and callbacks become something to await.
//!
//! ```text
//!   Sender ──▶ Connection::send (bounded) ──▶ ┌───────────┐
//!   (cloneable)                               │ Messenger │ one worker for all conversations of an Endpoint
//!   Receiver ◀── mailbox ◀── Post ◀── callbacks └─────────┘
//!   (who does not call `receive` lets go of nothing: its peer is not read any more, and waits)
//! ```
//!
//! Sessions are lossy ([`Policy::lossy_client`], [`Policy::stateless_server`]): an agent whose link breaks says anew who it is and
//! how far it has come, which is more than a replay could tell. The layer's pings come from the worker's thread, so they prove that
//! the peer's process and the way to it live, not that its work goes on: that is what [`remora_protocol::Progress`] proves.

pub mod error;
pub(crate) mod listener;
mod post;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use remora_messenger::connection::{Connection as Channel, SendError};
use remora_messenger::frame::Limits;
use remora_messenger::handshake::{self, Versions};
use remora_messenger::message::{self, Delivery};
use remora_messenger::messenger::{Messenger, Options as MessengerOptions};
use remora_messenger::policy::Policy;
use remora_messenger::stack::Address;
use remora_protocol::{MAX_PAYLOAD_BYTES, Message, NEWEST_VERSION, OLDEST_VERSION, REFUSED_AS_BUSY, Side};
use remora_wire::Malformed;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::timeout;

pub use self::error::{Error, Fault, Result};
use self::post::{Introduced, Post};
pub use remora_wire::{Token, derive};

/// Time limits and sizes of a conversation. The defaults are for agents; tests take shorter ones.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a connection may take to come about, greeting included, for each of a name's addresses.
    pub connect_timeout: Duration,
    /// How long the greeting of somebody who has connected to us may take, from its first byte to the opened session.
    pub handshake_timeout: Duration,
    /// How long the peer may say nothing before we ask whether it lives.
    pub ping_after: Duration,
    /// How long the peer may say nothing, or take nothing, before we give it up. Several times `ping_after`.
    pub silence_limit: Duration,
    /// Messages that may wait to be sent.
    pub send_queue: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            connect_timeout: CONNECT_TIMEOUT,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            ping_after: PING_AFTER,
            silence_limit: SILENCE_LIMIT,
            send_queue: SEND_QUEUE,
        }
    }
}

impl Options {
    fn policy(&self, side: Side) -> Policy {
        let (policy, opening_limit) = match side {
            Side::Client => (Policy::lossy_client(), self.connect_timeout),
            Side::Server => (Policy::stateless_server(), self.handshake_timeout),
        };
        Policy {
            send_messages: self.send_queue.max(1),
            receive_each: Some((MAILBOX_MESSAGES, MAILBOX_BYTES)),
            limits: Limits { front: MAX_PAYLOAD_BYTES, data: 0 },
            opening_limit,
            ping_after: self.ping_after,
            silence_limit: self.silence_limit,
            ..policy
        }
    }
}

/// Connects to a source, and proves to each other that both ends hold the token.
///
/// # Errors
/// [`Fault`] of every kind up to [`Fault::ClosedEarly`]; [`Fault::may_pass`] tells which are worth another attempt.
pub async fn connect(addr: impl ToSocketAddrs, token: &Token, options: &Options) -> Result<Connection> {
    let looked_up = timeout(options.connect_timeout, tokio::net::lookup_host(addr)).await;
    let addresses = match looked_up {
        Ok(Ok(addresses)) => addresses,
        Ok(Err(error)) => return Err(Fault::Unresolved(Arc::new(error)).of("the source")),
        Err(_) => return Err(too_slow("looking up the address", options.connect_timeout).of("the source")),
    };
    let engine = Engine::start(Side::Client, token, options)?;
    let no_address = std::io::Error::other("the name has no address");
    let mut last = Fault::Unresolved(Arc::new(no_address)).of("the source");
    for address in addresses {
        match engine.call(address).await {
            Ok(connection) => return Ok(connection),
            // Whoever answers is the source that was meant: another address of the name is not tried behind its back.
            Err(fault @ (Fault::Unreachable(_) | Fault::TimedOut { .. })) => last = fault.of(address),
            Err(fault) => return Err(fault.of(address)),
        }
    }
    Err(last)
}

/// Tells a connection that there is no room for it ([`Fault::Busy`] at its end), reads nothing, and closes it. Takes no
/// longer than a second.
pub async fn turn_away(mut stream: TcpStream) {
    let said = async {
        stream.write_all(&handshake::refuse(REFUSED_AS_BUSY, "", VERSIONS)).await?;
        stream.shutdown().await?;
        let mut piece = [0; TURNED_AWAY_PIECE_BYTES];
        while stream.read(&mut piece).await? > 0 {} // closed with unread bytes in it, it would lose what it was told
        std::io::Result::Ok(())
    };
    let _ = timeout(LINGER, said).await; // it was a courtesy: what became of it changes nothing
}

/// A source's end of all its conversations. Those that it has made may outlive it.
#[derive(Debug)]
pub struct Endpoint(Arc<Engine>);

impl Endpoint {
    /// Starts it.
    ///
    /// # Errors
    /// The system gives no thread or no random bytes.
    pub fn new(token: &Token, options: &Options) -> Result<Endpoint> {
        Engine::start(Side::Server, token, options).map(Endpoint)
    }

    /// Greets whoever has connected to us. Nothing of the stream may have been read yet (but peeked at).
    ///
    /// A peer that has not proved itself holds at most one small frame of our memory, and for no longer than
    /// [`Options::handshake_timeout`]. How many of them there may be at once is the caller's to bound; see [`turn_away`].
    ///
    /// # Errors
    /// As [`connect`]. What the peer could mend has been told it; everything else it met silence.
    pub async fn accept(&self, stream: TcpStream) -> Result<Connection> {
        let peer =
            stream.peer_addr().map_err(|error| Fault::io("asking for the peer's address", error).of("a peer"))?;
        self.0.greet(stream, peer).await.map_err(|fault| fault.of(peer))
    }
}

/// A messenger and who takes its callbacks; ended by the last conversation that it carries.
#[derive(Debug)]
struct Engine {
    messenger: Option<Messenger>,
    post: Arc<Post>,
    side: Side,
    options: Options,
}

impl Engine {
    fn start(side: Side, token: &Token, options: &Options) -> Result<Arc<Engine>> {
        let token = Token::new(token.bytes()).map_err(|error| Fault::NoRandomness(error.to_string()).of("this end"))?;
        let messenger_options =
            MessengerOptions { token: Some(Arc::new(token)), versions: VERSIONS, ..MessengerOptions::default() };
        let post = Arc::new(Post::new(side, options));
        let messenger = Messenger::new(options.policy(side), &messenger_options, post.clone());
        let messenger = messenger.map_err(|error| Fault::io("starting a messenger", error).of("this end"))?;
        Ok(Arc::new(Engine { messenger: Some(messenger), post, side, options: options.clone() }))
    }

    async fn call(self: &Arc<Engine>, peer: SocketAddr) -> Result<Connection, Fault> {
        let limit = self.options.connect_timeout;
        self.meet(peer, "connecting", limit, |messenger| {
            messenger.connect(&Address::Tcp(peer));
            Ok(())
        })
        .await
    }

    async fn greet(self: &Arc<Engine>, stream: TcpStream, peer: SocketAddr) -> Result<Connection, Fault> {
        let stream = stream.into_std().map_err(|error| Fault::io("setting up the socket", error))?;
        let limit = self.options.handshake_timeout;
        self.meet(peer, "the greeting", limit, |messenger| messenger.adopt(stream)).await
    }

    /// Begins something by which the peer at that address becomes known, and waits for that.
    async fn meet(
        self: &Arc<Engine>,
        peer: SocketAddr,
        doing: &'static str,
        limit: Duration,
        begin: impl FnOnce(&Messenger) -> std::io::Result<()>,
    ) -> Result<Connection, Fault> {
        let _expectation = self.post.expectation(peer);
        let expected = self.post.expect(peer);
        let messenger = self.messenger.as_ref().ok_or(Fault::Closed)?;
        begin(messenger).map_err(|error| Fault::io("setting up the socket", error))?;
        // The layer has the same limit, and knows better why; this one is for the case that it never came to it.
        let introduced = match timeout(limit + LINGER, expected).await {
            Ok(Ok(introduced)) => introduced?,
            Ok(Err(_)) => return Err(Fault::ClosedEarly),
            Err(_) => return Err(too_slow(doing, limit)),
        };
        Ok(self.start_conversation(peer, introduced))
    }

    fn start_conversation(self: &Arc<Engine>, peer: SocketAddr, introduced: Introduced) -> Connection {
        let Introduced { channel, negotiated, mailbox, failure } = introduced;
        tracing::debug!(%peer, session = negotiated.number, "both ends have proved themselves");
        let facts = Arc::new(Facts {
            side: self.side,
            peer,
            local: negotiated.local.unwrap_or(peer),
            session: (negotiated.number, negotiated.key),
            version: negotiated.version,
            engine: self.clone(),
        });
        let channel = Arc::new(ClosesOnDrop(channel));
        Connection {
            sender: Sender { facts: facts.clone(), channel, queue: self.options.send_queue.max(1), failure },
            receiver: Receiver { facts, mailbox, over: None },
        }
    }
}

impl Drop for Engine {
    /// Ending a messenger waits for its thread, and that for last words: not on a thread that serves tasks.
    fn drop(&mut self) {
        let messenger = self.messenger.take();
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(messenger))),
            Err(_) => drop(messenger),
        }
    }
}

/// A conversation with a peer that has proved itself. Dropping it closes it.
#[derive(Debug)]
pub struct Connection {
    sender: Sender,
    receiver: Receiver,
}

impl Connection {
    /// The session's number, the same at both ends and unique for the source.
    pub fn session(&self) -> u64 {
        self.sender.facts.session.0
    }

    /// The session's key, the same at both ends. Give data lanes what [`derive()`] makes of it.
    pub fn session_key(&self) -> [u8; 32] {
        self.sender.facts.session.1
    }

    /// The protocol version that both ends speak.
    pub fn version(&self) -> u16 {
        self.sender.facts.version
    }

    /// The address of the other end.
    pub fn peer_addr(&self) -> SocketAddr {
        self.sender.facts.peer
    }

    /// The address of this end: for a replica, the one by which its source sees it.
    pub fn local_addr(&self) -> SocketAddr {
        self.sender.facts.local
    }

    /// As [`Sender::send`].
    ///
    /// # Errors
    /// As there.
    pub async fn send(&mut self, message: Message) -> Result<()> {
        self.sender.send(message).await
    }

    /// As [`Receiver::receive`].
    ///
    /// # Errors
    /// As there.
    pub async fn receive(&mut self) -> Result<Message> {
        self.receiver.receive().await
    }

    /// Both directions, for tasks of their own.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// As [`Sender::finish`]: for a last word that must arrive.
    pub async fn finish(self) {
        self.sender.finish(self.receiver).await;
    }
}

/// The sending half. Clones share the connection; when all are gone, what is queued is sent and the conversation closed.
#[derive(Debug, Clone)]
pub struct Sender {
    facts: Arc<Facts>,
    channel: Arc<ClosesOnDrop>,
    queue: usize,
    failure: watch::Receiver<Option<Fault>>,
}

impl Sender {
    /// Queues a message, and waits while the queue is full. That the message was queued does not say that it arrived.
    ///
    /// # Errors
    /// [`Fault::TooLarge`], or why the connection is no more.
    pub async fn send(&self, message: Message) -> Result<()> {
        let mut outgoing = self.encode(&message)?;
        loop {
            let room = Arc::new(Notify::new());
            let waker = room.clone();
            outgoing = match self.channel.0.send_or_wake(outgoing, move || waker.notify_one()) {
                Ok(()) => return Ok(()),
                Err(SendError::Full(message)) => message,
                Err(_) => return Err(self.gone()),
            };
            let mut failure = self.failure.clone();
            tokio::select! {
                () = room.notified() => {}
                _ = failure.wait_for(Option::is_some) => return Err(self.gone()),
            }
        }
    }

    /// Queues a message if there is room.
    ///
    /// # Errors
    /// [`Fault::QueueFull`]: the peer is slow, try later or leave it; [`Fault::TooLarge`]; or why the connection is no more.
    pub fn try_send(&self, message: Message) -> Result<()> {
        match self.channel.0.send(self.encode(&message)?) {
            Ok(()) => Ok(()),
            Err(SendError::Full(_)) => Err(Fault::QueueFull { queued: self.queue }.of(self.facts.peer)),
            Err(_) => Err(self.gone()),
        }
    }

    /// Sends what is queued, closes the conversation and waits a moment for the peer to have heard it, so that the last message
    /// arrives.
    pub async fn finish(self, receiver: Receiver) {
        let mut failure = self.failure.clone();
        self.channel.0.close();
        let over = failure.wait_for(Option::is_some);
        let _ = timeout(LINGER, over).await; // too late is as good as closed
        drop(receiver);
    }

    fn encode(&self, message: &Message) -> Result<message::Message> {
        let mut payload = Vec::new();
        match message.encode(&mut payload) {
            Ok(tag) => Ok(message::Message::new(0, u16::from(tag), payload)),
            Err(too_large) => Err(Fault::from(too_large).of(self.facts.peer)),
        }
    }

    fn gone(&self) -> Error {
        let reported = self.failure.borrow().clone();
        // The layer takes no more messages a moment before it tells why; what broke the link it knows by then.
        let broken = || self.channel.0.link_error().map(|broken| self.facts.engine.post.fault(&broken, false));
        reported.or_else(broken).unwrap_or(Fault::Closed).of(self.facts.peer)
    }
}

/// The layer's connection, closed by the last who can send on it.
#[derive(Debug)]
struct ClosesOnDrop(Channel);

impl Drop for ClosesOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The receiving half.
pub struct Receiver {
    facts: Arc<Facts>,
    mailbox: mpsc::UnboundedReceiver<Result<Delivery, Fault>>,
    over: Option<Fault>,
}

impl Receiver {
    /// The peer's next message. Cancel-safe: it may stand in a `select!`.
    ///
    /// # Errors
    /// [`Fault::Refused`], when that is the message; [`Fault::PeerSilent`], [`Fault::PeerNotReading`], [`Fault::Closed`],
    /// or what the peer did wrong. After an error there is nothing more to receive.
    pub async fn receive(&mut self) -> Result<Message> {
        let outcome = match self.over.clone() {
            Some(fault) => Err(fault),
            None => self.next_message().await,
        };
        outcome.map_err(|fault| {
            self.over = Some(fault.clone());
            fault.of(self.facts.peer)
        })
    }

    async fn next_message(&mut self) -> Result<Message, Fault> {
        let delivery = self.mailbox.recv().await.unwrap_or(Err(Fault::Closed))?;
        let tag = u8::try_from(delivery.kind);
        let tag = tag.map_err(|_| Fault::OutOfTurn { what: format!("a message of the kind {}", delivery.kind) })?;
        let extra = delivery.middle.len() + delivery.data.len();
        if extra > 0 {
            return Err(Malformed::Trailing { extra }.into());
        }
        match Message::decode(tag, &delivery.front)? {
            Message::Refused { code, text } => Err(Fault::Refused { code, text }),
            message => self.admit(message),
        }
    }

    fn admit(&self, message: Message) -> Result<Message, Fault> {
        if message.may_come_from(self.facts.side.peer()) {
            return Ok(message);
        }
        let what = message.name().to_owned();
        Err(Fault::OutOfTurn { what })
    }
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_tuple("Receiver").field(&self.facts.peer).finish()
    }
}

/// What both halves know of the connection.
struct Facts {
    side: Side,
    peer: SocketAddr,
    local: SocketAddr,
    /// Its number and its key.
    session: (u64, [u8; 32]),
    version: u16,
    /// Kept going for as long as somebody talks.
    engine: Arc<Engine>,
}

impl std::fmt::Debug for Facts {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "session {} with {}", self.session.0, self.peer)
    }
}

fn too_slow(doing: &'static str, limit: Duration) -> Fault {
    Fault::TimedOut { doing, limit }
}

/// What this end speaks.
const VERSIONS: Versions = Versions { oldest: OLDEST_VERSION, newest: NEWEST_VERSION };

/// A SYN is sent again after 1, 3 and 7 seconds; a host that has not answered by then is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Two round trips and four hashes: milliseconds. The rest is for an agent that is starved of processor time.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Some hundred bytes a second on an idle connection.
const PING_AFTER: Duration = Duration::from_secs(1);

/// Nine pings unanswered. Longer than a lost packet takes TCP to mend several times over; short enough that a source soon
/// frees what it keeps for a dead replica.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Messages that wait to be sent: at a few a second, many seconds' worth. Most are under a hundred bytes; the longest
/// ([`MAX_PAYLOAD_BYTES`]) is sent only when asked for.
const SEND_QUEUE: usize = 64;

/// Messages, and bytes of them, that may have come and not been received: then the peer is not read any more. As many as wait to be
/// sent at its end, and two of the longest.
const MAILBOX_MESSAGES: usize = 64;
const MAILBOX_BYTES: usize = 1 << 20;

/// How long a last word may take to be read.
const LINGER: Duration = Duration::from_secs(1);

/// One read of what somebody says who is turned away.
const TURNED_AWAY_PIECE_BYTES: usize = 512;

#[cfg(test)]
mod tests;
