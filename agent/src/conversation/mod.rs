//! Conversations between agents: tokio on one side, a [`Messenger`] on the other. The layer does framing, seals, time
//! limits and back-pressure. This module turns messages into bodies of the layer's messages and back, and callbacks
//! into futures.
//!
//! ```text
//!   Sender ──▶ Connection::send (bounded) ──▶ ┌───────────┐
//!   (cloneable)                               │ Messenger │ one worker for all conversations of an Endpoint
//!   Receiver ◀── mailbox ◀── Post ◀── callbacks └─────────┘
//!   (an owner that does not call `receive` holds the mailbox full: its peer is not read, and waits)
//! ```
//!
//! Sessions are lossy ([`Policy::lossy_client`], [`Policy::stateless_server`]): an agent whose link breaks connects
//! again and reports its state anew, which says more than a replay. The layer's pings come from the worker's thread.
//! They prove that the peer's process and the network work, but not that the peer makes progress:
//! [`remora_protocol::Progress`] proves that.

pub mod error;
pub(crate) mod listener;
mod post;
mod rejections;
pub(crate) mod security;
pub(crate) mod tokens;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use remora_messenger::connection::{Connection as Channel, SendError};
use remora_messenger::frame::Limits;
use remora_messenger::handshake::{self, Versions};
use remora_messenger::message::{self, Delivery};
use remora_messenger::policy::Policy;
use remora_messenger::stack::Address;
use remora_messenger::stack::tls::TlsOptions;
use remora_messenger::{Keyring, Messenger, Options as MessengerOptions};
use remora_protocol::{
    MAX_CLIENT_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, Message, NEWEST_VERSION, OLDEST_VERSION, REFUSED_AS_BUSY, Side,
};
use remora_wire::Malformed;
use rustls::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::timeout;

pub use self::error::{Error, Fault, Result};
use self::post::{Introduced, Post};
use self::security::Purpose;
pub use self::security::Security;
pub use self::tokens::Role;
pub use remora_wire::{Token, derive};

/// Time limits and sizes of a conversation. The defaults are for agents; tests use shorter limits.
#[derive(Debug, Clone)]
pub struct Options {
    /// Time limit for connecting, handshake included, for each address of a name.
    pub connect_timeout: Duration,
    /// Time limit for the handshake of an accepted connection, from its first byte to the open session.
    pub handshake_timeout: Duration,
    /// Silence after which the peer is sent a ping.
    pub ping_after: Duration,
    /// How long the peer may send nothing, or read nothing, before the conversation ends. Several times `ping_after`.
    pub silence_limit: Duration,
    /// Length of the send queue, in messages.
    pub send_queue: usize,
    /// What protects the connections.
    pub security: Security,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            connect_timeout: CONNECT_TIMEOUT,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            ping_after: PING_AFTER,
            silence_limit: SILENCE_LIMIT,
            send_queue: SEND_QUEUE,
            security: Security::None,
        }
    }
}

impl Options {
    /// The defaults, with this protection.
    pub fn secured(security: Security) -> Options {
        Options { security, ..Options::default() }
    }

    fn policy(&self, side: Side) -> Policy {
        let (policy, opening_limit) = match side {
            Side::Client => (Policy::lossy_client(), self.connect_timeout),
            Side::Server => (Policy::stateless_server(), self.handshake_timeout),
        };
        // A server has many conversations, so each of them may hold little of its memory.
        let (longest, mailbox_bytes) = match side {
            Side::Client => (MAX_PAYLOAD_BYTES, CLIENT_MAILBOX_BYTES),
            Side::Server => (MAX_CLIENT_PAYLOAD_BYTES, SERVER_MAILBOX_BYTES),
        };
        Policy {
            send_messages: self.send_queue.max(1),
            receive_each: Some((MAILBOX_MESSAGES, mailbox_bytes)),
            limits: Limits { front: longest, data: 0 },
            opening_limit,
            ping_after: self.ping_after,
            silence_limit: self.silence_limit,
            ..policy
        }
    }
}

/// Connects to a source. Both ends prove to each other that they hold the token.
///
/// # Errors
/// Every [`Fault`] up to [`Fault::ClosedEarly`]. [`Fault::may_pass`] says which are worth another attempt.
pub async fn connect(addr: impl ToSocketAddrs, token: &Token, options: &Options) -> Result<Connection> {
    let looked_up = timeout(options.connect_timeout, tokio::net::lookup_host(addr)).await;
    let addresses = match looked_up {
        Ok(Ok(addresses)) => addresses,
        Ok(Err(error)) => return Err(Fault::Unresolved(Arc::new(error)).of("the source")),
        Err(_) => return Err(too_slow("looking up the address", options.connect_timeout).of("the source")),
    };
    let engine = Engine::start(Side::Client, keyring_of(token)?, options)?;
    let no_address = std::io::Error::other("the name has no address");
    let mut last = Fault::Unresolved(Arc::new(no_address)).of("the source");
    for address in addresses {
        match engine.call(address).await {
            Ok(connection) => return Ok(connection),
            // A host that answers is the source: another address of its name is not tried after it has refused.
            Err(fault @ (Fault::Unreachable(_) | Fault::TimedOut { .. })) => last = fault.of(address),
            Err(fault) => return Err(fault.of(address)),
        }
    }
    Err(last)
}

/// Refuses a connection because there is no room for it, reads nothing from it, and closes it. The peer gets
/// [`Fault::Busy`]. Takes at most a second.
pub async fn turn_away(stream: TcpStream) {
    refuse(stream, REFUSED_AS_BUSY, "").await;
}

/// Refuses a connection because it has no TLS, and closes it. The peer, which may be of an earlier version, shows the
/// text.
async fn refuse_plaintext(stream: TcpStream) {
    refuse(
        stream,
        security::REFUSED_AS_PLAINTEXT,
        "this agent accepts TLS only: start the other one with --security token",
    )
    .await;
}

async fn refuse(mut stream: TcpStream, code: u8, text: &str) {
    let said = async {
        stream.write_all(&handshake::refuse(code, text, VERSIONS)).await?;
        stream.shutdown().await?;
        let mut piece = [0; TURNED_AWAY_PIECE_BYTES];
        while stream.read(&mut piece).await? > 0 {} // closing with unread bytes would discard the refusal
        std::io::Result::Ok(())
    };
    let _ = timeout(LINGER, said).await; // best effort: the outcome does not matter
}

/// The connecting end of many conversations, which share one messenger with one thread. [`connect`] starts a messenger
/// for each. The conversations may outlive it.
#[derive(Debug)]
pub struct Caller(Arc<Engine>);

impl Caller {
    /// Starts the messenger.
    ///
    /// # Errors
    /// The system provides no thread or no random bytes.
    pub fn new(token: &Token, options: &Options) -> Result<Caller> {
        Engine::start(Side::Client, keyring_of(token)?, options).map(Caller)
    }

    /// Connects to a source. One call after the other: outcomes are told apart by the source's address.
    ///
    /// # Errors
    /// As [`connect`].
    pub async fn call(&mut self, source: SocketAddr) -> Result<Connection> {
        self.0.call(source).await.map_err(|fault| fault.of(source))
    }
}

/// The accepting end of conversations. The conversations may outlive it.
#[derive(Debug)]
pub struct Endpoint(Arc<Engine>);

impl Endpoint {
    /// Starts the messenger. Peers with this token have [`Role::Replica`].
    ///
    /// # Errors
    /// The system provides no thread or no random bytes.
    pub fn new(token: &Token, options: &Options) -> Result<Endpoint> {
        Endpoint::with_keyring(keyring_of(token)?, options)
    }

    /// Starts the messenger. The mark of each key is that of a [`Role`].
    ///
    /// # Errors
    /// The system provides no thread or no random bytes.
    pub(crate) fn with_keyring(keyring: Arc<Keyring>, options: &Options) -> Result<Endpoint> {
        Engine::start(Side::Server, keyring, options).map(Endpoint)
    }

    /// The configuration of accepted connections, if they must have TLS.
    pub(crate) fn tls(&self) -> Option<&Arc<ServerConfig>> {
        self.0.server.as_ref()
    }

    /// Performs the handshake on an accepted connection. No byte may have been read from the stream, but it may have
    /// been peeked at.
    ///
    /// A peer that has not authenticated holds at most one small frame of memory, for at most
    /// [`Options::handshake_timeout`]. The caller limits how many such peers there are; see [`turn_away`].
    ///
    /// # Errors
    /// As [`connect`]. A peer whose operator can fix the failure is told the reason; any other connection is closed
    /// without an answer.
    pub async fn accept(&self, stream: TcpStream) -> Result<Connection> {
        let peer =
            stream.peer_addr().map_err(|error| Fault::io("asking for the peer's address", error).of("a peer"))?;
        self.0.greet(stream, peer).await.map_err(|fault| fault.of(peer))
    }
}

/// A messenger and the receiver of its callbacks. Kept alive by the conversations that it carries.
#[derive(Debug)]
struct Engine {
    messenger: Option<Messenger>,
    /// For accepted connections with TLS.
    server: Option<Arc<ServerConfig>>,
    post: Arc<Post>,
    side: Side,
    options: Options,
}

impl Engine {
    fn start(side: Side, keyring: Arc<Keyring>, options: &Options) -> Result<Arc<Engine>> {
        let failed = |error: String| Fault::io("setting up TLS", std::io::Error::other(error)).of("this end");
        let (client, server) = match side {
            Side::Client => (options.security.client(Purpose::Control).map_err(failed)?, None),
            Side::Server => (None, options.security.server().map_err(failed)?),
        };
        let tls = TlsOptions { client, ..TlsOptions::default() };
        let messenger_options =
            MessengerOptions { keys: Some(keyring), versions: VERSIONS, tls, ..MessengerOptions::default() };
        let post = Arc::new(Post::new(side, options));
        let messenger = Messenger::new(options.policy(side), &messenger_options, post.clone());
        let messenger = messenger.map_err(|error| Fault::io("starting a messenger", error).of("this end"))?;
        Ok(Arc::new(Engine { messenger: Some(messenger), server, post, side, options: options.clone() }))
    }

    async fn call(self: &Arc<Engine>, peer: SocketAddr) -> Result<Connection, Fault> {
        let limit = self.options.connect_timeout;
        let is_tls = self.options.security.is_tls();
        let address = if is_tls { Address::Tls(peer) } else { Address::Tcp(peer) };
        let met = self.meet(peer, "connecting", limit, |messenger| {
            messenger.connect(&address);
            Ok(())
        });
        // An agent without TLS closes the connection at its first byte.
        met.await.map_err(|fault| if is_tls && matches!(fault, Fault::ClosedEarly) { Fault::ClosedTls } else { fault })
    }

    async fn greet(self: &Arc<Engine>, stream: TcpStream, peer: SocketAddr) -> Result<Connection, Fault> {
        let stream = stream.into_std().map_err(|error| Fault::io("setting up the socket", error))?;
        let limit = self.options.handshake_timeout;
        self.meet(peer, "the handshake", limit, |messenger| match &self.server {
            Some(config) => messenger.adopt_tls(stream, config),
            None => messenger.adopt(stream),
        })
        .await
    }

    /// Begins a handshake with the peer at that address, and waits for its outcome.
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
        // The layer has the same limit, and its error is more precise. This limit is for the case that the layer never
        // began.
        let introduced = match timeout(limit + LINGER, expected).await {
            Ok(Ok(introduced)) => introduced?,
            Ok(Err(_)) => return Err(Fault::ClosedEarly),
            Err(_) => return Err(too_slow(doing, limit)),
        };
        Ok(self.start_conversation(peer, introduced))
    }

    fn start_conversation(self: &Arc<Engine>, peer: SocketAddr, introduced: Introduced) -> Connection {
        let Introduced { channel, negotiated, mailbox, failure } = introduced;
        tracing::debug!(%peer, session = negotiated.number, "handshake complete");
        let facts = Arc::new(Facts {
            side: self.side,
            peer,
            local: negotiated.local.unwrap_or(peer),
            session: (negotiated.number, negotiated.key),
            version: negotiated.version,
            role: Role::of_mark(negotiated.mark),
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
    /// Stops the messenger on a thread that may block: stopping waits for the worker's thread.
    fn drop(&mut self) {
        let messenger = self.messenger.take();
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(messenger))),
            Err(_) => drop(messenger),
        }
    }
}

/// A conversation with an authenticated peer. Dropping it closes it.
#[derive(Debug)]
pub struct Connection {
    sender: Sender,
    receiver: Receiver,
}

impl Connection {
    /// The number of the session. It is the same at both ends, and unique for the source.
    pub fn session(&self) -> u64 {
        self.sender.facts.session.0
    }

    /// The key of the session, the same at both ends. Data lanes get keys derived from it ([`derive()`]), never the key
    /// itself.
    pub fn session_key(&self) -> [u8; 32] {
        self.sender.facts.session.1
    }

    /// The protocol version that both ends speak.
    pub fn version(&self) -> u16 {
        self.sender.facts.version
    }

    /// What the peer may ask for.
    pub fn role(&self) -> Role {
        self.sender.facts.role
    }

    /// The address of the other end.
    pub fn peer_addr(&self) -> SocketAddr {
        self.sender.facts.peer
    }

    /// The address of this end, as the peer sees it.
    pub fn local_addr(&self) -> SocketAddr {
        self.sender.facts.local
    }

    /// Sends a message; see [`Sender::send`].
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub async fn send(&mut self, message: Message) -> Result<()> {
        self.sender.send(message).await
    }

    /// Receives a message; see [`Receiver::receive`].
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub async fn receive(&mut self) -> Result<Message> {
        self.receiver.receive().await
    }

    /// Splits the conversation into its two directions, for separate tasks.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// Closes the conversation after its last message has arrived; see [`Sender::finish`].
    pub async fn finish(self) {
        self.sender.finish(self.receiver).await;
    }
}

/// The sending half. Clones share the connection. When the last clone is dropped, queued messages are sent and the
/// conversation is closed.
#[derive(Debug, Clone)]
pub struct Sender {
    facts: Arc<Facts>,
    channel: Arc<ClosesOnDrop>,
    queue: usize,
    failure: watch::Receiver<Option<Fault>>,
}

impl Sender {
    /// Queues a message; waits while the queue is full. A queued message may still be lost if the connection breaks.
    ///
    /// # Errors
    /// [`Fault::TooLarge`], or why the connection has ended.
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
    /// [`Fault::QueueFull`]: the peer is slow. [`Fault::TooLarge`]. Or why the connection has ended.
    pub fn try_send(&self, message: Message) -> Result<()> {
        match self.channel.0.send(self.encode(&message)?) {
            Ok(()) => Ok(()),
            Err(SendError::Full(_)) => Err(Fault::QueueFull { queued: self.queue }.of(self.facts.peer)),
            Err(_) => Err(self.gone()),
        }
    }

    /// Closes the conversation for all clones, once what is queued is sent.
    pub fn close(&self) {
        self.channel.0.close();
    }

    /// Sends what is queued, closes the conversation, and waits up to a second for the peer to read the last message.
    pub async fn finish(self, receiver: Receiver) {
        let mut failure = self.failure.clone();
        self.channel.0.close();
        let over = failure.wait_for(Option::is_some);
        let _ = timeout(LINGER, over).await; // best effort: the conversation is closed either way
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
        // The layer refuses messages a moment before it reports why; the error of the link is known by then.
        let broken = || self.channel.0.link_error().map(|broken| self.facts.engine.post.fault(&broken, false));
        reported.or_else(broken).unwrap_or(Fault::Closed).of(self.facts.peer)
    }
}

/// The layer's connection, closed when the last sender is dropped.
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
    /// Receives the peer's next message. Cancel-safe: it may be used in `select!`.
    ///
    /// # Errors
    /// [`Fault::Refused`] if the peer refuses; [`Fault::PeerSilent`], [`Fault::PeerNotReading`] or [`Fault::Closed`];
    /// or what the peer did wrong. After an error every call returns the same error.
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

/// What both halves know about the connection.
struct Facts {
    side: Side,
    peer: SocketAddr,
    local: SocketAddr,
    /// The session's number and key.
    session: (u64, [u8; 32]),
    version: u16,
    role: Role,
    /// Kept alive while the conversation is open.
    engine: Arc<Engine>,
}

impl std::fmt::Debug for Facts {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "session {} with {}", self.session.0, self.peer)
    }
}

fn keyring_of(token: &Token) -> Result<Arc<Keyring>> {
    let token = Token::new(token.bytes()).map_err(|error| Fault::NoRandomness(error.to_string()).of("this end"))?;
    Ok(Arc::new(Keyring::only(Arc::new(token))))
}

fn too_slow(doing: &'static str, limit: Duration) -> Fault {
    Fault::TimedOut { doing, limit }
}

/// The versions of the protocol that this end speaks.
const VERSIONS: Versions = Versions { oldest: OLDEST_VERSION, newest: NEWEST_VERSION };

/// A SYN is repeated after 1, 3 and 7 seconds. A host that has not answered by then is down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Two round trips and four hashes take milliseconds. The rest is for an agent that gets no processor time.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A ping costs about a hundred bytes a second on an idle connection.
const PING_AFTER: Duration = Duration::from_secs(1);

/// Nine unanswered pings. Several times longer than TCP takes to repair a lost packet, and short enough that a source
/// soon frees what it keeps for a dead replica.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Length of the send queue, in messages: many seconds' worth. Most have less than a hundred bytes; the longest
/// ([`MAX_PAYLOAD_BYTES`]) is sent only on request.
const SEND_QUEUE: usize = 64;

/// Messages that may be received and not yet taken by the owner; beyond this the peer is not read. As many as the
/// peer's send queue holds.
const MAILBOX_MESSAGES: usize = 64;

/// Bytes of the messages that a client has received and its owner has not yet taken: two of the longest.
const CLIENT_MAILBOX_BYTES: usize = 2 * MAX_PAYLOAD_BYTES as usize;

/// The same at a server, which may have a thousand conversations: [`MAILBOX_MESSAGES`] of a usual length, or 16 of the
/// longest.
const SERVER_MAILBOX_BYTES: usize = 16 * MAX_CLIENT_PAYLOAD_BYTES as usize;

/// How long the last message may take to be read.
const LINGER: Duration = Duration::from_secs(1);

/// Size of a read from a peer that was refused.
const TURNED_AWAY_PIECE_BYTES: usize = 512;

#[cfg(test)]
mod tests;
