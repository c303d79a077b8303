//! The thin driver: it moves bytes between a socket and the machines of [`crate::control::session`], and asks the clock. Whatever is
//! decided is decided there.
//!
//! ```text
//!   Sender ──▶ queue of messages ──▶ writer task: seal, write,      ──▶ socket
//!   (cloneable)   (bounded)          heart-beat when idle
//!   Receiver ◀── open, drop heart-beats, watch the silence          ◀── socket
//!   (in the caller's task: who does not call `receive` leaves bytes in the socket, and the peer waits)
//! ```
//!
//! Heart-beats come from the writer's task, so they prove that the peer's process and the way to it live, not that its work
//! goes on: that is what [`crate::control::Progress`] proves.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::control::Message;
use crate::control::error::{Error, Fault, Result};
use crate::control::session::{
    self, Established, Handshake, HeartbeatClock, Opener, Opening, Role, Sealer, SilenceClock, Versions,
};
use crate::control::token::Token;

/// Time limits and sizes of a connection. The defaults are for agents; tests take shorter ones.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a connection may take to come about, for each of a name's addresses.
    pub connect_timeout: Duration,
    /// How long the greeting may take from its first byte to both proofs.
    pub handshake_timeout: Duration,
    /// How long we say nothing before we say that we live.
    pub heartbeat_every: Duration,
    /// How long the peer may say nothing, or take nothing, before we give it up. Several times its `heartbeat_every`.
    pub silence_limit: Duration,
    /// Messages that may wait to be sent.
    pub send_queue: usize,
    /// Optional abilities that we have. Version 1 defines none.
    pub features: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            connect_timeout: CONNECT_TIMEOUT,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            heartbeat_every: HEARTBEAT_EVERY,
            silence_limit: SILENCE_LIMIT,
            send_queue: SEND_QUEUE,
            features: 0,
        }
    }
}

/// Connects to a source, and proves to each other that both ends hold the token.
///
/// # Errors
/// [`Fault`] of every kind up to [`Fault::ClosedEarly`]; [`Fault::may_pass`] tells which are worth another attempt.
pub async fn connect(addr: impl ToSocketAddrs, token: &Token, options: &Options) -> Result<Connection> {
    let stream = reach(addr, options).await?;
    greet(stream, Role::Client, token, options).await
}

/// Greets whoever has connected to us. Nothing of the stream may have been read yet (but peeked at).
///
/// A peer that has not proved itself holds at most one small frame of our memory, and for no longer than
/// [`Options::handshake_timeout`]. How many of them there may be at once is the caller's to bound; see [`turn_away`].
///
/// # Errors
/// As [`connect`]. What the peer could mend has been told it; everything else it met silence.
pub async fn accept(stream: TcpStream, token: &Token, options: &Options) -> Result<Connection> {
    greet(stream, Role::Server, token, options).await
}

/// Tells a connection that there is no room for it ([`Fault::Busy`] at its end), reads nothing, and closes it. Takes no
/// longer than a second.
pub async fn turn_away(mut stream: TcpStream) {
    say_last(&mut stream, &session::busy()).await;
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

    /// The session's key, the same at both ends. Give data lanes what [`crate::control::derive()`] makes of it.
    pub fn session_key(&self) -> [u8; 32] {
        self.sender.facts.session.1
    }

    /// The protocol version that both ends speak.
    pub fn version(&self) -> u16 {
        self.sender.facts.version
    }

    /// The optional abilities that both ends have.
    pub fn features(&self) -> u64 {
        self.sender.facts.features
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

/// The sending half. Clones share the connection; when all are gone, what is queued is sent and our direction closed.
#[derive(Debug, Clone)]
pub struct Sender {
    facts: Arc<Facts>,
    queue: mpsc::Sender<Outgoing>,
    failure: watch::Receiver<Option<Fault>>,
}

impl Sender {
    /// Queues a message, and waits while the queue is full. That the message was queued does not say that it arrived.
    ///
    /// # Errors
    /// [`Fault::TooLarge`], or why the connection is no more.
    pub async fn send(&self, message: Message) -> Result<()> {
        let outgoing = self.encode(&message)?;
        let sent = self.queue.send(outgoing).await;
        sent.map_err(|_| self.gone())
    }

    /// Queues a message if there is room.
    ///
    /// # Errors
    /// [`Fault::QueueFull`]: the peer is slow, try later or leave it; [`Fault::TooLarge`]; or why the connection is no more.
    pub fn try_send(&self, message: Message) -> Result<()> {
        let outgoing = self.encode(&message)?;
        self.queue.try_send(outgoing).map_err(|error| match error {
            mpsc::error::TrySendError::Closed(_) => self.gone(),
            mpsc::error::TrySendError::Full(_) => {
                let queued = self.queue.max_capacity();
                Fault::QueueFull { queued }.of(self.facts.peer)
            }
        })
    }

    /// Sends what is queued, closes our direction and waits a moment for the peer to close its own, so that the last
    /// message arrives: a socket closed with unread bytes in it makes the kernel throw away what it has yet to send. Other
    /// clones of this sender keep the connection open until the moment is over.
    pub async fn finish(self, mut receiver: Receiver) {
        drop(self);
        let drained = async {
            while receiver.fill().await.is_ok() {
                receiver.skip()
            }
        };
        let _ = timeout(LINGER, drained).await; // too late is as good as closed
    }

    fn encode(&self, message: &Message) -> Result<Outgoing> {
        let mut payload = Vec::new();
        match message.encode(&mut payload) {
            Ok(tag) => Ok(Outgoing { tag, payload }),
            Err(too_large) => Err(Fault::from(too_large).of(self.facts.peer)),
        }
    }

    fn gone(&self) -> Error {
        let fault = self.failure.borrow().clone();
        fault.unwrap_or(Fault::Closed).of(self.facts.peer)
    }
}

/// The receiving half.
pub struct Receiver {
    facts: Arc<Facts>,
    stream: Box<dyn AsyncRead + Send + Unpin>,
    opener: Opener,
    silence: SilenceClock,
    buffer: Vec<u8>,
    failure: watch::Receiver<Option<Fault>>,
}

impl Receiver {
    /// The peer's next message; heart-beats are taken on the way. Cancel-safe: it may stand in a `select!`.
    ///
    /// # Errors
    /// [`Fault::Refused`], when that is the message; [`Fault::PeerSilent`], [`Fault::PeerNotReading`], [`Fault::Closed`],
    /// or what the peer did wrong. After an error there is nothing more to receive.
    pub async fn receive(&mut self) -> Result<Message> {
        let outcome = self.next_message().await;
        outcome.map_err(|fault| fault.of(self.facts.peer))
    }

    async fn next_message(&mut self) -> Result<Message, Fault> {
        loop {
            let Some((tag, payload)) = self.opener.next_frame()? else {
                self.fill().await?;
                continue;
            };
            self.silence.heard(now());
            match Message::decode(tag, &payload)? {
                Message::Heartbeat => {}
                Message::Refused { code, text } => return Err(Fault::Refused { code, text }),
                message => return self.admit(message),
            }
        }
    }

    fn admit(&self, message: Message) -> Result<Message, Fault> {
        if message.may_come_from(self.facts.role.peer()) {
            return Ok(message);
        }
        let what = message.name().to_owned();
        Err(Fault::OutOfTurn { what })
    }

    /// Waits for bytes, within the silence that is allowed.
    async fn fill(&mut self) -> Result<(), Fault> {
        let deadline = Instant::from_std(self.silence.deadline());
        let failure = self.failure.wait_for(Option::is_some);
        // Bytes first: who was kept from calling us for long finds them in the socket, and the peer was not silent.
        let read = tokio::select! {
            biased;
            read = self.stream.read(&mut self.buffer) => read,
            () = sleep_until(deadline) => return self.silence.check(now()),
            Ok(fault) = failure => return Err(fault.clone().unwrap_or(Fault::Closed)),
        };
        match read.map_err(|error| lost("receiving", error, Fault::Closed))? {
            0 => Err(Fault::Closed),
            length => {
                self.opener.feed(self.buffer.get(..length).unwrap_or_default());
                Ok(())
            }
        }
    }

    /// Drops the frames that have come.
    fn skip(&mut self) {
        while let Ok(Some(_)) = self.opener.next_frame() {
            self.silence.heard(now());
        }
    }
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_tuple("Receiver").field(&self.facts.peer).finish()
    }
}

/// What both halves know of the connection.
struct Facts {
    role: Role,
    peer: SocketAddr,
    local: SocketAddr,
    /// Its number and its key.
    session: (u64, [u8; 32]),
    version: u16,
    features: u64,
}

impl std::fmt::Debug for Facts {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "session {} with {}", self.session.0, self.peer)
    }
}

/// A message on its way to be sealed.
struct Outgoing {
    tag: u8,
    payload: Vec<u8>,
}

/// The task that owns the socket's sending side.
struct Writer<W> {
    stream: W,
    sealer: Sealer,
    queue: mpsc::Receiver<Outgoing>,
    clock: HeartbeatClock,
    limit: Duration,
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    async fn run(mut self, failure: watch::Sender<Option<Fault>>) {
        if let Err(fault) = self.drive().await {
            failure.send_replace(Some(fault));
        }
    }

    /// Until all senders are gone and all they queued is sent.
    async fn drive(&mut self) -> Result<(), Fault> {
        loop {
            let due = Instant::from_std(self.clock.next());
            let outgoing = tokio::select! {
                biased;
                outgoing = self.queue.recv() => outgoing,
                () = sleep_until(due) => Some(heartbeat()),
            };
            let Some(outgoing) = outgoing else {
                return self.stream.shutdown().await.map_err(|error| lost("closing", error, Fault::Closed));
            };
            self.write(outgoing).await?;
            self.clock.sent(now());
        }
    }

    async fn write(&mut self, outgoing: Outgoing) -> Result<(), Fault> {
        let mut bytes = Vec::new();
        self.sealer.seal(outgoing.tag, outgoing.payload, &mut bytes);
        match timeout(self.limit, self.stream.write_all(&bytes)).await {
            Ok(written) => written.map_err(|error| lost("sending", error, Fault::Closed)),
            Err(_) => Err(Fault::PeerNotReading { limit: self.limit }),
        }
    }
}

fn heartbeat() -> Outgoing {
    Outgoing { tag: Message::Heartbeat.tag(), payload: Vec::new() }
}

/// Tries every address of a name in turn; the last one's failure is the one told.
async fn reach(addr: impl ToSocketAddrs, options: &Options) -> Result<TcpStream> {
    let looked_up = timeout(options.connect_timeout, tokio::net::lookup_host(addr)).await;
    let addresses = match looked_up {
        Ok(Ok(addresses)) => addresses,
        Ok(Err(error)) => return Err(Fault::Unresolved(Arc::new(error)).of("the source")),
        Err(_) => return Err(too_slow("looking up the address", options).of("the source")),
    };
    let nothing = std::io::Error::other("the name has no address");
    let mut last = Fault::Unresolved(Arc::new(nothing)).of("the source");
    for address in addresses {
        match timeout(options.connect_timeout, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = Fault::Unreachable(Arc::new(error)).of(address),
            Err(_) => last = too_slow("connecting", options).of(address),
        }
    }
    Err(last)
}

fn too_slow(doing: &'static str, options: &Options) -> Fault {
    let limit = options.connect_timeout;
    Fault::TimedOut { doing, limit }
}

async fn greet(stream: TcpStream, role: Role, token: &Token, options: &Options) -> Result<Connection> {
    let peer = stream.peer_addr().map_err(|error| Fault::io("asking for the peer's address", error).of("a peer"))?;
    let addresses = stream.set_nodelay(true).and_then(|()| stream.local_addr());
    let local = addresses.map_err(|error| Fault::io("setting up the socket", error).of(peer))?;
    let connection = greet_over(stream, (local, peer), role, token, options).await;
    connection.map_err(|fault| fault.of(peer))
}

/// The same over anything that moves bytes: tests use a pipe in memory, and time that stands still.
async fn greet_over<S>(
    mut stream: S,
    (local, peer): (SocketAddr, SocketAddr),
    role: Role,
    token: &Token,
    options: &Options,
) -> Result<Connection, Fault>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let opening = Opening { versions: Versions::OURS, features: options.features, nonce: random()? };
    let limit = options.handshake_timeout;
    let mut handshake = match role {
        Role::Client => Handshake::client(token, opening, now(), limit),
        Role::Server => Handshake::server(token, opening, session_number()?, now(), limit),
    };
    let established = shake_hands(&mut stream, &mut handshake).await;
    if established.is_err() {
        say_last(&mut stream, &handshake.take_output()).await;
    }
    Ok(start(stream, established?, (local, peer), options))
}

async fn shake_hands<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    handshake: &mut Handshake<&Token>,
) -> Result<Established, Fault> {
    let deadline = Instant::from_std(handshake.deadline());
    loop {
        match timeout_at(deadline, step(stream, handshake)).await {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(established))) => return Ok(established),
            Ok(Err(fault)) => return Err(fault),
            Err(_) => handshake.handle_timeout(now())?,
        }
    }
}

async fn step<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    handshake: &mut Handshake<&Token>,
) -> Result<Option<Established>, Fault> {
    let output = handshake.take_output();
    let written = stream.write_all(&output).await;
    written.map_err(|error| lost("sending", error, Fault::ClosedEarly))?;
    if let Some(established) = handshake.poll_established() {
        return Ok(Some(established));
    }
    let mut piece = [0; GREETING_PIECE_BYTES];
    let read = stream.read(&mut piece).await;
    match read.map_err(|error| lost("receiving", error, Fault::ClosedEarly))? {
        0 => Err(Fault::ClosedEarly),
        length => handshake.handle_input(piece.get(..length).unwrap_or_default()).map(|()| None),
    }
}

/// Sends a word to a peer that we are about to leave, and reads its last bytes away so that the word is not lost with them.
async fn say_last<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, word: &[u8]) {
    if word.is_empty() {
        return;
    }
    let said = async {
        stream.write_all(word).await?;
        stream.shutdown().await?;
        let mut piece = [0; GREETING_PIECE_BYTES];
        while stream.read(&mut piece).await? > 0 {}
        std::io::Result::Ok(())
    };
    let _ = timeout(LINGER, said).await; // it was a courtesy: what became of it changes nothing
}

/// Begins the conversation: from here on all frames are sealed.
fn start<S>(
    stream: S,
    established: Established,
    (local, peer): (SocketAddr, SocketAddr),
    options: &Options,
) -> Connection
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let facts = Arc::new(Facts {
        role: established.role(),
        peer,
        local,
        session: (established.session(), established.key()),
        version: established.version(),
        features: established.features(),
    });
    let (read, write) = tokio::io::split(stream);
    let (queue, outgoing) = mpsc::channel(options.send_queue.max(1));
    let (failed, failure) = watch::channel(None);
    let writer = Writer {
        stream: write,
        sealer: established.sealer,
        queue: outgoing,
        clock: HeartbeatClock::new(options.heartbeat_every, now()),
        limit: options.silence_limit,
    };
    tokio::spawn(writer.run(failed));
    tracing::debug!(%peer, session = facts.session.0, "both ends have proved themselves");
    Connection {
        sender: Sender { facts: Arc::clone(&facts), queue, failure: failure.clone() },
        receiver: Receiver {
            facts,
            stream: Box::new(read),
            opener: established.opener,
            silence: SilenceClock::new(options.silence_limit, now()),
            buffer: vec![0; PIECE_BYTES],
            failure,
        },
    }
}

/// A peer that goes with bytes of ours unread resets the connection: for people, that is closing it.
fn lost(doing: &'static str, error: std::io::Error, closed: Fault) -> Fault {
    match error.kind() {
        std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe => closed,
        _ => Fault::io(doing, error),
    }
}

fn random<const N: usize>() -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Fault::NoRandomness(error.to_string()))?;
    Ok(bytes)
}

/// Random rather than counted: two sources, or one that was restarted, do not give the same number twice.
fn session_number() -> Result<u64, Fault> {
    random().map(u64::from_le_bytes)
}

/// The time, as the machines want it; tokio's, which tests may stop.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// A SYN is sent again after 1, 3 and 7 seconds; a host that has not answered by then is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Two round trips and four hashes: milliseconds. The rest is for an agent that is starved of processor time.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Some forty bytes a second on an idle connection.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);

/// Ten lost heart-beats. Longer than a lost packet takes TCP to mend several times over; short enough that a source soon
/// frees what it keeps for a dead replica.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Messages that wait to be sent: at a few a second, many seconds' worth. Most are under a hundred bytes; the longest
/// ([`crate::control::frame::MAX_PAYLOAD_BYTES`]) is sent only when asked for.
const SEND_QUEUE: usize = 64;

/// How long a last word may take to be read.
const LINGER: Duration = Duration::from_secs(1);

/// One read of the greeting, in bytes: a whole frame of it and more.
const GREETING_PIECE_BYTES: usize = 512;

/// One read of the conversation, in bytes: most hold a single message.
const PIECE_BYTES: usize = 8 * 1024;

#[cfg(test)]
mod tests;
