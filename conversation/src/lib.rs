//! How agents talk: conversations between them, what protects these, and the transports by which they read.
//!
//! A conversation is tokio on one side, a [`Messenger`] on the other. The layer does framing, seals, time
//! limits and back-pressure. This crate turns messages into bodies of the layer's messages and back, and callbacks
//! into futures.
//!
//! ```text
//!   Sender ──▶ Connection::send (bounded) ──▶ ┌───────────┐
//!   (cloneable)                               │ Messenger │ one worker for all conversations of an Endpoint
//!   Receiver ◀── mailbox ◀── Post ◀── callbacks └─────────┘
//!   (an owner that does not call `receive` holds the mailbox full: its peer is not read, and waits)
//! ```
//!
//! Sessions are lossy ([`remora_messenger::policy::Policy::lossy_client`]): an agent whose link breaks connects
//! again and reports its state anew, which says more than a replay. The layer's pings come from the worker's thread.
//! They prove that the peer's process and the network work, but not that the peer makes progress:
//! [`remora_protocol::Progress`] proves that.
//!
//! - Start with [`connect`] and [`Endpoint`]. [`listener`] tells control connections from data lanes on one port.
//! - [`security`]: what must protect a connection. [`tokens`] and its certificates: the files by which an agent proves
//!   who it is, which are read again on a hangup.
//! - [`error`]: why there is no conversation, for both ends.
//! - [`transports`]: by which of them this host can offer or read memory, and why not by the others.

#![forbid(unsafe_code)]
// The docs of some files name private items: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

pub mod error;
pub mod listener;
mod post;
pub mod security;
pub mod tokens;
pub mod transports;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use remora_messenger::connection::{Connection as Channel, Negotiated, SendError};
use remora_messenger::handshake::Versions;
use remora_messenger::stack::Address;
use remora_messenger::stack::tls::TlsOptions;
use remora_messenger::{Delivery, Keyring, Messenger, Options as MessengerOptions};
use remora_protocol::{Message, NEWEST_VERSION, OLDEST_VERSION, Side};
use remora_wire::Malformed;
pub use remora_wire::{Token, derive};
use rustls::ServerConfig;
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::timeout;

pub use self::error::{Error, Fault, Result, turn_away};
use self::post::{Introduced, Post};
pub use self::security::{Identity, Mode, Protection, Role, Security, SourceKey};
pub use self::tokens::Options;
use self::tokens::keyring_of;

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
    pub fn with_keyring(keyring: Arc<Keyring>, options: &Options) -> Result<Endpoint> {
        Engine::start(Side::Server, keyring, options).map(Endpoint)
    }

    /// The configuration of accepted connections with TLS, if there can be any.
    pub fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.0.server_config()
    }

    /// What must protect the connections.
    pub fn security(&self) -> &Security {
        &self.0.options.security
    }

    /// Performs the handshake on an accepted connection, with or without TLS. No byte may have been read from the
    /// stream, but it may have been peeked at.
    ///
    /// A peer that has not authenticated holds at most one small frame of memory, for at most
    /// [`Options::handshake_timeout`]. The caller limits how many such peers there are; see [`turn_away`].
    ///
    /// # Errors
    /// As [`connect`]. A peer whose operator can fix the failure is told the reason; any other connection is closed
    /// without an answer.
    pub async fn accept(&self, stream: TcpStream, is_tls: bool) -> Result<Connection> {
        let peer =
            stream.peer_addr().map_err(|error| Fault::io("asking for the peer's address", error).of("a peer"))?;
        self.0.greet(stream, peer, is_tls).await.map_err(|fault| fault.of(peer))
    }
}

/// A messenger and the receiver of its callbacks. Kept alive by the conversations that it carries.
#[derive(Debug)]
struct Engine {
    messenger: Option<Messenger>,
    /// For accepted connections with TLS, unless the files of certificates decide.
    server: Option<Arc<ServerConfig>>,
    post: Arc<Post>,
    side: Side,
    options: Options,
}

impl Engine {
    fn start(side: Side, keyring: Arc<Keyring>, options: &Options) -> Result<Arc<Engine>> {
        let failed = |error: String| Fault::io("setting up TLS", std::io::Error::other(error)).of("this end");
        let (client, server) = match side {
            Side::Client => (options.security.client(options.source_key).map_err(failed)?, None),
            Side::Server => (None, options.security.server().map_err(failed)?),
        };
        let client = client.map(Into::into);
        let tls = TlsOptions { client, server_name: options.peer_name.clone(), ..TlsOptions::default() };
        let messenger_options =
            MessengerOptions { keys: Some(keyring), versions: VERSIONS, tls, ..MessengerOptions::default() };
        let post = Arc::new(Post::new(side, options));
        let messenger = Messenger::new(options.policy(side), &messenger_options, post.clone());
        let messenger = messenger.map_err(|error| Fault::io("starting a messenger", error).of("this end"))?;
        Ok(Arc::new(Engine { messenger: Some(messenger), server, post, side, options: options.clone() }))
    }

    async fn call(self: &Arc<Engine>, peer: SocketAddr) -> Result<Connection, Fault> {
        let limit = self.options.connect_timeout;
        let security = &self.options.security;
        security.check(peer.ip()).map_err(Fault::PlaintextNetwork)?;
        let is_tls = security.needs_tls(peer.ip()) || self.options.source_key.is_some();
        match self.dial(peer, is_tls, limit).await {
            // On loopback this end would do without TLS, and the other end does not. The token is proved either way.
            Err(fault) if !is_tls && fault.asks_for_tls() && security.may_choose() => {
                self.dial(peer, true, limit).await
            }
            outcome => outcome,
        }
    }

    async fn dial(self: &Arc<Engine>, peer: SocketAddr, is_tls: bool, limit: Duration) -> Result<Connection, Fault> {
        let address = if is_tls { Address::Tls(peer) } else { Address::Tcp(peer) };
        let met = self.meet(peer, is_tls, "connecting", limit, |messenger| {
            messenger.connect(&address);
            Ok(())
        });
        // An agent without TLS closes the connection at its first byte.
        met.await.map_err(|fault| if is_tls && matches!(fault, Fault::ClosedEarly) { Fault::ClosedTls } else { fault })
    }

    async fn greet(self: &Arc<Engine>, stream: TcpStream, peer: SocketAddr, is_tls: bool) -> Result<Connection, Fault> {
        let stream = stream.into_std().map_err(|error| Fault::io("setting up the socket", error))?;
        let limit = self.options.handshake_timeout;
        let config = self.server_config().filter(|_| is_tls);
        self.meet(peer, is_tls, "the handshake", limit, |messenger| match &config {
            Some(config) => messenger.adopt_tls(stream, config),
            _ => messenger.adopt(stream),
        })
        .await
    }

    fn server_config(&self) -> Option<Arc<ServerConfig>> {
        let current = || self.options.security.certificates().map(|own| own.server());
        self.server.as_ref().map(|made| current().unwrap_or_else(|| made.clone()))
    }

    /// Begins a handshake with the peer at that address, and waits for its outcome.
    async fn meet(
        self: &Arc<Engine>,
        peer: SocketAddr,
        is_tls: bool,
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
        Ok(self.start_conversation(peer, is_tls, introduced))
    }

    /// What the peer of a conversation may ask for.
    fn role_of(&self, negotiated: &Negotiated) -> Role {
        let of_token = Role::of_mark(negotiated.mark);
        match self.options.security.certificates().filter(|_| self.side == Side::Server) {
            Some(certificates) => of_token.and(certificates.role_of(negotiated.certificate.as_deref())),
            None => of_token,
        }
    }

    fn start_conversation(self: &Arc<Engine>, peer: SocketAddr, is_tls: bool, introduced: Introduced) -> Connection {
        let Introduced { channel, negotiated, mailbox, failure } = introduced;
        tracing::debug!(%peer, session = negotiated.number, "handshake complete");
        let facts = Arc::new(Facts {
            side: self.side,
            peer,
            local: negotiated.local.unwrap_or(peer),
            session: (negotiated.number, negotiated.key),
            version: negotiated.version,
            role: self.role_of(&negotiated),
            protection: self.options.security.protection(peer.ip(), is_tls),
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

    /// What protects the bytes of this connection.
    pub fn protection(&self) -> Protection {
        self.sender.facts.protection
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

    fn encode(&self, message: &Message) -> Result<remora_messenger::Message> {
        let mut payload = Vec::new();
        match message.encode(&mut payload) {
            Ok(tag) => Ok(remora_messenger::Message::new(0, u16::from(tag), payload)),
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
    protection: Protection,
    /// Kept alive while the conversation is open.
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

/// The versions of the protocol that this end speaks.
const VERSIONS: Versions = Versions { oldest: OLDEST_VERSION, newest: NEWEST_VERSION };

/// How long the last message may take to be read.
const LINGER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
