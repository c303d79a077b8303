//! Passage: one connection that the server has made to its primary, and that the rules have sent here.
//!
//! ```text
//!   server ── PING, AUTH, REPLCONF … ──▶ passage ── the same bytes ──▶ its primary
//!          ◀──────────────────────────────────── the answers ─────────┘
//!   server ── PSYNC ──▶ passage ── INFO ──▶ its primary: Arrival, which the attending task decides on
//!   any other command: no replication, so both directions are copied until one of them ends
//! ```
//!
//! The primary checks the server's login, and answers everything but `PSYNC`. The agent keeps no password: it passes
//! bytes on. TLS is opened on both sides ([`Tls`]), if the agent has a certificate for that.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use rustls::{ServerConfig, ServerConnection};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::intercept::{ENTRY_SECONDS, REMOVING};
use remora_delivery::link::Served;
use remora_process::exit::Failure;
use remora_redis::ReplId;
use remora_redis::info::Info;
use remora_redis::resp::{self, CommandDecoder, Decoder, Frame, Limits};
use remora_server::{Credentials, Facts, Server, Stream, Task, TlsOptions};

/// How long the primary may take to accept a connection, or to say how it stands. The server waits for `repl-timeout`.
const PRIMARY_LIMIT: Duration = Duration::from_secs(5);

/// How long a server that speaks TLS may wait until it has been asked for its settings. It waits for `repl-timeout`.
const KNOWN_LIMIT: Duration = Duration::from_secs(20);

/// Bytes of a handshake that are kept: a server says some hundred bytes. A longer one is not a replica's.
const HANDSHAKE_LIMIT: usize = 16 << 10;

/// How long the rest of a command is awaited. A server writes each command of its handshake at once.
const PART_LIMIT: Duration = Duration::from_secs(1);

/// Bytes of one read.
const READ_BYTES: usize = 4096;

/// The first byte of a TLS connection: a handshake record.
const TLS_HANDSHAKE: u8 = 0x16;

/// A connection of the server that has sent `PSYNC`, which waits for an answer.
pub(super) struct Arrival {
    pub(super) server: End,
    pub(super) peer: SocketAddr,
    /// The server's true primary, which has not got the `PSYNC`.
    pub(super) primary: Stream,
    /// Its address.
    pub(super) address: SocketAddr,
    /// How the agent speaks TLS in its place, if the two do.
    between: Option<Between>,
    /// What the primary says of itself.
    pub(super) facts: Result<Facts, NoFacts>,
    /// All that the server has said.
    pub(super) heard: Vec<u8>,
    /// Where in it `PSYNC` begins.
    psync_at: usize,
    /// What it asks for: the replid of its history and the offset of the next byte.
    pub(super) asked: Option<(ReplId, u64)>,
}

impl Arrival {
    /// Asks the primary again how it stands.
    pub(super) async fn ask_again(&mut self) {
        self.facts = ask(&mut self.primary).await;
    }

    /// The port at which the server says that it listens: with several servers of one user, it tells them apart.
    pub(super) fn announced_port(&self) -> Option<u16> {
        announced_port(&self.heard)
    }

    /// How to ask the primary in the server's place over another connection.
    pub(super) fn login(&self) -> Login {
        let (commands, count) = logins(&self.heard);
        Login { address: self.address, between: self.between.clone(), commands, count }
    }

    /// The primary answers the `PSYNC`, and both directions are copied until one of them ends. `served`: the end of a
    /// connection that the gate looks at too.
    pub(super) async fn pass(mut self, served: Option<Served>) {
        let _served = served;
        if let Err(NoFacts::Silence(why)) = &self.facts {
            // Its answer to our question would be taken for that to `PSYNC`. The server comes again.
            tracing::debug!(primary = %self.address, why, "the primary owes an answer: the connection is closed");
            return;
        }
        let psync = &self.heard[self.psync_at..];
        if send(&mut self.primary, psync).await.is_ok() {
            let _ = copy_bidirectional(&mut self.server, &mut self.primary).await;
        }
    }
}

/// Why the primary does not say how it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoFacts {
    /// It has answered something else.
    Answer(String),
    /// It has not answered yet, or no more: it may still answer, or its connection is of no use.
    Silence(String),
}

impl fmt::Display for NoFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (NoFacts::Answer(why) | NoFacts::Silence(why)) = self;
        f.write_str(why)
    }
}

/// The server's way to its primary, with its login. It is kept for as long as a connection is passed on.
pub(crate) struct Login {
    address: SocketAddr,
    between: Option<Between>,
    /// The server's `AUTH`, as it has sent it, and how many answers there are to it.
    commands: Vec<u8>,
    count: usize,
}

impl Login {
    /// Connects to the primary, and logs in.
    pub(crate) async fn connect(&self) -> Result<Stream, String> {
        let mut primary = match &self.between {
            Some(between) => limited(between.connect(self.address)).await?,
            None => Stream::Tcp(connect(self.address).await.ok_or("it cannot be reached")?),
        };
        exchange(&mut primary, &self.commands, self.count).await.map_err(|why| why.to_string())?;
        Ok(primary)
    }

    /// To an address where nothing listens.
    #[cfg(test)]
    pub(crate) fn nowhere() -> Login {
        Login { address: ([127, 0, 0, 1], 1).into(), between: None, commands: Vec::new(), count: 0 }
    }
}

/// The commands by which the server logged in, and their number.
fn logins(heard: &[u8]) -> (Vec<u8>, usize) {
    let mut decoder = CommandDecoder::new(Limits::HANDSHAKE);
    decoder.feed(heard);
    let (mut commands, mut count) = (Vec::new(), 0);
    while let Ok(Some(words)) = decoder.next_command() {
        if words.first().is_some_and(|name| name.eq_ignore_ascii_case(b"AUTH")) {
            resp::command(&mut commands, &words);
            count += 1;
        }
    }
    (commands, count)
}

fn announced_port(heard: &[u8]) -> Option<u16> {
    let mut decoder = CommandDecoder::new(Limits::HANDSHAKE);
    decoder.feed(heard);
    while let Ok(Some(words)) = decoder.next_command() {
        let Some((name, options)) = words.split_first().filter(|_| words.len() > 1) else { continue };
        let mut pairs = options.chunks_exact(2).filter(|_| name.eq_ignore_ascii_case(b"REPLCONF"));
        if let Some(pair) = pairs.find(|pair| pair[0].eq_ignore_ascii_case(b"listening-port")) {
            return std::str::from_utf8(&pair[1]).ok()?.parse().ok();
        }
    }
    None
}

/// Where a redirected connection was going. `None` if it came here on its own account.
fn destination(socket: &TcpStream) -> Option<SocketAddr> {
    let here = socket.local_addr().ok()?;
    let there: SocketAddr = match here.ip() {
        IpAddr::V4(_) => sockopt::ip_original_dst(socket).ok()?.into(),
        IpAddr::V6(_) => sockopt::ipv6_original_dst(socket).ok()?.into(),
    };
    (there != here).then_some(there)
}

/// Passes one connection, until it ends or asks for a sync.
pub(super) async fn pass(server: TcpStream, peer: SocketAddr, arrivals: Sender<Arrival>, tls: watch::Receiver<Tls>) {
    let Some(address) = destination(&server) else {
        tracing::debug!(%peer, "a connection that was not redirected is closed");
        return;
    };
    let _ = server.set_nodelay(true);
    let Some((server, primary, between)) = both_ends(server, address, tls).await else { return };
    let Some(Asking { server, mut primary, heard, at, asked }) = until_psync(server, primary).await else { return };
    let facts = ask(&mut primary).await;
    let arrival = Arrival { server, peer, primary, address, between, facts, heard, psync_at: at, asked };
    let _ = arrivals.send(arrival).await;
}

/// A connection whose server has sent `PSYNC`.
struct Asking {
    server: End,
    primary: Stream,
    /// All that the server has said.
    heard: Vec<u8>,
    /// Where in it `PSYNC` begins.
    at: usize,
    asked: Option<(ReplId, u64)>,
}

/// Passes a connection until its server sends `PSYNC`. `None`: it has ended.
async fn until_psync(mut server: End, mut primary: Stream) -> Option<Asking> {
    let mut handshake = Handshake::new();
    let (mut said, mut answered) = ([0; READ_BYTES], [0; READ_BYTES]);
    let mut part_until = None;
    loop {
        let rest_is_late = async move {
            match part_until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let outcome = tokio::select! {
            read = server.read(&mut said) => match read {
                Ok(0) | Err(_) => return None,
                Ok(n) => handshake.hear(&said[..n]),
            },
            read = primary.read(&mut answered) => match read {
                Ok(0) | Err(_) => return None,
                Ok(n) => {
                    handshake.answers_seen = true;
                    send(&mut server, &answered[..n]).await.ok()?;
                    continue;
                }
            },
            () = rest_is_late => Heard::Other { from: handshake.forwarded },
        };
        match outcome {
            Heard::Part => {
                part_until.get_or_insert_with(|| Instant::now() + PART_LIMIT);
            }
            Heard::Forward { from } => {
                part_until = None;
                send(&mut primary, &handshake.heard[from..]).await.ok()?;
            }
            Heard::Other { from } => {
                send(&mut primary, &handshake.heard[from..]).await.ok()?;
                let _ = copy_bidirectional(&mut server, &mut primary).await;
                return None;
            }
            Heard::Psync { at, asked } => {
                return Some(Asking { server, primary, heard: handshake.heard, at, asked });
            }
        }
    }
}

/// Both ends of the connection, in plain, and what opened them. `None`: there is nothing to be heard, or it was passed
/// on unread until its end.
async fn both_ends(
    server: TcpStream,
    address: SocketAddr,
    tls: watch::Receiver<Tls>,
) -> Option<(End, Stream, Option<Between>)> {
    let mut first = [0];
    if !server.peek(&mut first).await.is_ok_and(|bytes| bytes > 0) {
        return None;
    }
    if first[0] != TLS_HANDSHAKE {
        return Some((End::Plain(server), Stream::Tcp(connect(address).await?), None));
    }
    match open(&tls).await {
        Ok(between) => {
            let why = match limited(between.connect(address)).await {
                Ok(primary) => {
                    return match limited(async { between.accept(server).await.map_err(|error| error.to_string()) })
                        .await
                    {
                        Ok(server) => Some((server, primary, Some(between.clone()))),
                        Err(why) => {
                            tracing::warn!(
                                "the server does not take us for its primary: {why}; for a minute its connections are passed on \
                                 unread: its tls-ca-cert-file must contain the authority of --link-cert"
                            );
                            None
                        }
                    };
                }
                Err(why) => why,
            };
            tracing::warn!(%address, "the primary cannot be spoken to in the server's place: {why}; passed on unread");
        }
        Err(why) => tracing::warn!("the server speaks TLS to its primary, and {why}: passed on unread"),
    }
    let (mut server, mut primary) = (server, connect(address).await?);
    let _ = copy_bidirectional(&mut server, &mut primary).await;
    None
}

/// What opens the server's connections, as soon as it is known. The error says why nothing does.
async fn open(tls: &watch::Receiver<Tls>) -> Result<Between, String> {
    let mut tls = tls.clone();
    let known = tokio::time::timeout(KNOWN_LIMIT, tls.wait_for(|tls| !matches!(tls, Tls::NotKnown))).await;
    match known.map(|known| known.map(|tls| tls.clone())) {
        Ok(Ok(Tls::Open(between))) if between.is_refused() => Err("it has just refused our certificate".to_owned()),
        Ok(Ok(Tls::Open(between))) => Ok(between),
        Ok(Ok(Tls::Closed)) => Err("it did not when the agent asked, or there is no --link-cert".to_owned()),
        _ => Err("it has not answered yet".to_owned()),
    }
}

async fn connect(address: SocketAddr) -> Option<TcpStream> {
    let connected = limited(async { TcpStream::connect(address).await.map_err(|error| error.to_string()) }).await;
    match connected {
        Ok(primary) => {
            let _ = primary.set_nodelay(true);
            Some(primary)
        }
        Err(error) => {
            tracing::debug!(%address, %error, "the server's primary cannot be reached");
            None
        }
    }
}

async fn limited<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    tokio::time::timeout(PRIMARY_LIMIT, work).await.unwrap_or_else(|_| Err(no_answer()))
}

fn no_answer() -> String {
    format!("no answer for {} s", PRIMARY_LIMIT.as_secs())
}

/// Writes all, also what TLS would keep.
async fn send(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

/// Asks the primary how it stands, with the server's own login.
pub(crate) async fn ask(primary: &mut Stream) -> Result<Facts, NoFacts> {
    let mut question = Vec::new();
    resp::command(&mut question, &["INFO"]);
    match exchange(primary, &question, 1).await {
        Ok(Some(Frame::Bulk(text))) => Ok(Facts::from_info(&Info::parse(&text))),
        Ok(_) => Err(NoFacts::Answer("its answer to INFO is not a text".to_owned())),
        Err(NoFacts::Answer(why)) if why.starts_with("NOPERM") => {
            Err(NoFacts::Answer(format!("{why} (the user of masteruser needs +info there)")))
        }
        Err(why) => Err(why),
    }
}

/// Sends commands, and returns the last of their answers. An error that the primary answers is an error here.
async fn exchange(primary: &mut Stream, commands: &[u8], count: usize) -> Result<Option<Frame>, NoFacts> {
    let silence = |error: &dyn fmt::Display| NoFacts::Silence(error.to_string());
    let answers = async {
        send(primary, commands).await.map_err(|error| silence(&error))?;
        let (mut decoder, mut buffer) = (Decoder::new(Limits::default()), [0; READ_BYTES]);
        let (mut last, mut left) = (None, count);
        while left > 0 {
            match decoder.next_frame().map_err(|error| silence(&error))? {
                Some(Frame::Error(text)) if left > 1 => return Err(silence(&String::from_utf8_lossy(&text))),
                Some(Frame::Error(text)) => return Err(NoFacts::Answer(String::from_utf8_lossy(&text).into_owned())),
                Some(frame) => (last, left) = (Some(frame), left - 1),
                None => match primary.read(&mut buffer).await.map_err(|error| silence(&error))? {
                    0 => return Err(silence(&"it has closed the connection")),
                    n => decoder.feed(&buffer[..n]),
                },
            }
        }
        Ok(last)
    };
    tokio::time::timeout(PRIMARY_LIMIT, answers).await.unwrap_or_else(|_| Err(NoFacts::Silence(no_answer())))
}

/// What the server has said until now, and what of it the primary has got.
struct Handshake {
    decoder: CommandDecoder,
    heard: Vec<u8>,
    /// Where in it the first byte is that the primary has not got.
    forwarded: usize,
    /// Whether the primary has answered since the last bytes were forwarded.
    answers_seen: bool,
}

/// What follows from the server's bytes.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    /// A command is not whole yet.
    Part,
    /// The bytes from here on go to the primary.
    Forward { from: usize },
    /// This is not a replica's handshake: the bytes from here on, and all that follow, go to the primary.
    Other { from: usize },
    /// `PSYNC` begins here.
    Psync { at: usize, asked: Option<(ReplId, u64)> },
}

impl Handshake {
    fn new() -> Handshake {
        let decoder = CommandDecoder::new(Limits::HANDSHAKE);
        Handshake { decoder, heard: Vec::new(), forwarded: 0, answers_seen: true }
    }

    fn hear(&mut self, bytes: &[u8]) -> Heard {
        self.heard.extend_from_slice(bytes);
        self.decoder.feed(bytes);
        let from = self.forwarded;
        let mut commands = 0;
        loop {
            let words = match self.decoder.next_command() {
                Ok(Some(words)) => words,
                Ok(None) if self.heard.len() > HANDSHAKE_LIMIT => return Heard::Other { from },
                Ok(None) if !self.decoder.is_between_commands() => return Heard::Part,
                Ok(None) => break,
                Err(_) => return Heard::Other { from },
            };
            let name = words.first().map(|name| name.to_ascii_uppercase()).unwrap_or_default();
            match name.as_slice() {
                b"PING" | b"AUTH" | b"REPLCONF" => commands += 1,
                // A server sends it alone, after all answers. Bytes that come otherwise are the primary's to judge.
                b"PSYNC"
                    if commands == 0 && self.answers_seen && words.len() == 3 && self.decoder.is_between_commands() =>
                {
                    let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
                    let asked = text(&words[1]).parse().ok().zip(text(&words[2]).parse().ok());
                    return Heard::Psync { at: from, asked };
                }
                _ => return Heard::Other { from },
            }
        }
        self.forwarded = self.heard.len();
        self.answers_seen = false;
        Heard::Forward { from }
    }
}

// Passing: a connection that the primary serves through the agent, and when the server can go on without the agent.
//
// ```text
//   link up? ── INFO at the primary, with the server's login ──▶ would it continue the server from what it has executed?
//      no: again in LOOK_EVERY                                      yes: handed back        no: the connection stays
// ```
//
// The link is up as soon as the server has loaded. What clients have written since the fork still waits in the
// primary's output buffer for this connection, and goes with it. So the connection is closed only when the primary's
// backlog has the server's next byte, with room for what is written meanwhile: otherwise its end would cost a second
// fork. Until then it stays in place and costs the copying of its bytes.

/// How long the primary is asked at each look. A server catches up within seconds where it can.
const PATIENCE: Duration = Duration::from_secs(30);

/// Pause between two questions afterwards: the server may stay behind for as long as clients write.
const SLOW_LOOK: Duration = Duration::from_secs(5);

/// A connection that is passed on.
pub(super) struct Passing {
    login: Login,
    /// The primary, once it was asked.
    primary: Option<Stream>,
    up_since: Option<Instant>,
    /// Where the primary was when it was asked last.
    before: Option<(Instant, u64)>,
    due: Instant,
    is_told: bool,
}

impl Passing {
    pub(super) fn new(login: Login) -> Passing {
        Passing { login, primary: None, up_since: None, before: None, due: Instant::now(), is_told: false }
    }

    /// The server's link is up, and it has executed this history up to this offset. Whether its primary would continue
    /// it there over another connection.
    pub(super) async fn may_end(&mut self, history: Option<ReplId>, offset: u64) -> bool {
        let now = Instant::now();
        let is_late = now.duration_since(*self.up_since.get_or_insert(now)) > PATIENCE;
        if now < self.due {
            return false;
        }
        let asked = self.ask().await;
        let now = Instant::now();
        let covered = match (asked, history) {
            (Ok(primary), Some(history)) => self.covers(now, &primary, history, offset),
            (Ok(_), None) => Err(Some("the server does not name its history".to_owned())),
            (Err(why), _) => {
                self.primary = None;
                Err(Some(format!("the primary does not say what its backlog holds: {why}")))
            }
        };
        match covered {
            Ok(()) => true,
            Err(why) => {
                if let Some(why) = why.filter(|_| is_late && !std::mem::replace(&mut self.is_told, true)) {
                    tracing::warn!(
                        "the server's connection to its primary stays with the agent, as the primary would not continue the server over \
                         another one: {why}. If the agent ends now, the server takes another full copy"
                    );
                }
                if is_late {
                    self.due = now + SLOW_LOOK;
                }
                false
            }
        }
    }

    /// The error says why not; without a text it is not known yet, since nothing is known of the rate of the writes.
    fn covers(&mut self, now: Instant, primary: &Facts, history: ReplId, offset: u64) -> Result<(), Option<String>> {
        let at = primary.offset.unwrap_or(0);
        let (since, before) = self.before.replace((now, at)).ok_or(None)?;
        let rate = at.saturating_sub(before) as f64 / now.duration_since(since).as_secs_f64().max(0.001);
        primary.covers(history, offset, rate as u64).map_err(Some)
    }

    async fn ask(&mut self) -> Result<Facts, String> {
        let primary = match &mut self.primary {
            Some(primary) => primary,
            None => self.primary.insert(self.login.connect().await?),
        };
        ask(primary).await.map_err(|why| why.to_string())
    }
}

// TLS: an intercepted connection that is encrypted. Towards the server the agent is its primary, with a certificate
// that the server accepts; towards the primary it is the server, with the server's own certificate.
//
// A connection that cannot be opened so is passed on unread: the server is never cut off from its primary for long.

/// How long connections are passed on unread after the server has refused our certificate. Each try costs it one
/// connection.
const REFUSED_FOR: Duration = Duration::from_secs(60);

/// What is known of the TLS between the server and its primary.
#[derive(Clone)]
pub(super) enum Tls {
    /// The server has not been asked yet.
    NotKnown,
    /// Its connections cannot be opened.
    Closed,
    Open(Between),
}

/// What the agent needs to stand between.
#[derive(Clone)]
pub(super) struct Between {
    acceptor: TlsAcceptor,
    /// With which the server speaks to its primary.
    primary: TlsOptions,
    /// When the server has refused our certificate.
    refused: Arc<Mutex<Option<std::time::Instant>>>,
}

impl Between {
    pub(super) fn new(link: Arc<ServerConfig>, primary: TlsOptions) -> Between {
        Between { acceptor: link.into(), primary, refused: Arc::default() }
    }

    /// Whether the server has just refused our certificate.
    pub(super) fn is_refused(&self) -> bool {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.is_some_and(|at| at.elapsed() < REFUSED_FOR)
    }

    /// Connects to the primary as the server would.
    pub(super) async fn connect(&self, address: SocketAddr) -> Result<Stream, String> {
        let url = format!("rediss://{address}").parse().map_err(|error| format!("{address}: {error}"))?;
        let primary = Server::new(url, Credentials::default(), &self.primary, Task::Attend);
        let primary = primary.map_err(|error| error.to_string())?;
        primary.open_stream().await.map_err(|error| error.to_string())
    }

    /// Is the primary towards the server. The server has said its first bytes.
    pub(super) async fn accept(&self, server: TcpStream) -> io::Result<End> {
        let accepted = self.acceptor.accept(server).await;
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        *refused = accepted.is_err().then(std::time::Instant::now);
        Ok(End::Tls(Box::new(accepted?)))
    }
}

/// The agent's end of a connection of the server.
pub(super) enum End {
    Plain(TcpStream),
    /// It is boxed because its state takes a kilobyte.
    Tls(Box<TlsStream<TcpStream>>),
}

impl End {
    pub(super) fn socket(&self) -> &TcpStream {
        match self {
            End::Plain(socket) => socket,
            End::Tls(stream) => stream.get_ref().0,
        }
    }

    /// The socket without tokio, and the TLS on it.
    pub(super) fn into_parts(self) -> io::Result<(std::net::TcpStream, Option<Box<ServerConnection>>)> {
        match self {
            End::Plain(socket) => Ok((socket.into_std()?, None)),
            End::Tls(stream) => {
                let (socket, tls) = stream.into_inner();
                Ok((socket.into_std()?, Some(Box::new(tls))))
            }
        }
    }
}

impl AsyncRead for End {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            End::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            End::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            End::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            End::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            End::Plain(stream) => Pin::new(stream).poll_flush(cx),
            End::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            End::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            End::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

// Gate: whether the server's new connections to its primary come to this agent, and the connection that has come.
//
// The rules of `remora intercept add` ([`crate::intercept`]) redirect a connection only while a timed entry stands for
// its port. The agent makes and renews the entries by datagrams without content, from its own port to the port on
// loopback that is meant: the rules take each datagram for an order and drop it. So the agent needs no rights, and an
// agent that is killed or stopped loses the entries within [`ENTRY_SECONDS`]. A datagram with one byte removes an
// entry at once. The rules act while the call that sends the datagram runs, so their effect precedes its return.

/// Interval at which the entries are renewed: a third of their life, so that one late renewal harms nothing.
pub(super) const RENEW_EVERY: Duration = Duration::from_secs(ENTRY_SECONDS / 3);

/// How long the server may take to close a connection that the agent has closed. A server that executes a slow command
/// notices it afterwards.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Pause between two looks whether it has.
const CLOSE_LOOK: Duration = Duration::from_millis(2);

/// Whether the server's connections come here, and the one that has come. Clones are the same gate.
#[derive(Clone)]
pub(crate) struct Gate(Arc<Inner>);

struct Inner {
    socket: UdpSocket,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_open: bool,
    ports: BTreeSet<u16>,
    /// The server's connection. The delivery, or the passage that copies its bytes, owns it and ends it.
    link: Option<Arc<std::net::TcpStream>>,
}

impl State {
    /// Notes the server's connection.
    fn serve(&mut self, link: impl AsFd) -> io::Result<Served> {
        let link = Arc::new(std::net::TcpStream::from(link.as_fd().try_clone_to_owned()?));
        self.link = Some(Arc::clone(&link));
        Ok(Served::new(link))
    }
}

impl Gate {
    /// For connections to these ports, with the rules that listen to this port. Closed at first.
    pub(super) fn new(listen: u16, ports: BTreeSet<u16>) -> Result<Gate, Failure> {
        let no_port = |error| {
            Failure::local(format!(
                "the UDP port 127.0.0.1:{listen} cannot be used: {error}; give another port by --listen-port, here and to remora intercept add"
            ))
        };
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, listen)).map_err(no_port)?;
        socket.set_nonblocking(true).map_err(no_port)?;
        Ok(Gate(Arc::new(Inner { socket, state: Mutex::new(State { ports, ..State::default() }) })))
    }

    /// New connections come here from now on. `false` if there are no rules that heed this agent.
    pub(super) fn open(&self) -> bool {
        self.state().is_open = true;
        self.renew()
    }

    /// Renews the entries of an open gate. `false` if there are no rules that heed this agent.
    pub(super) fn renew(&self) -> bool {
        let state = self.state();
        // Under the lock: an entry must not be renewed after it was removed.
        !state.is_open || self.order(&state.ports, &[])
    }

    /// Connections to these ports are meant from now on. Entries of other ports run out by themselves.
    pub(super) fn set_ports(&self, ports: BTreeSet<u16>) {
        self.state().ports = ports;
    }

    pub(super) fn is_open(&self) -> bool {
        self.state().is_open
    }

    /// New connections go to the primary from now on. Those that have come stay.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_open = false;
        self.order(&state.ports, REMOVING);
    }

    /// Sends an order for each port. A datagram that was dropped is reported as not permitted: the rules took it.
    fn order(&self, ports: &BTreeSet<u16>, content: &[u8]) -> bool {
        let taken = |port: &u16| {
            let sent = self.0.socket.send_to(content, (Ipv4Addr::LOCALHOST, *port));
            sent.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        };
        ports.iter().filter(|port| taken(port)).count() == ports.len()
    }

    /// Notes the server's connection, by a descriptor of its own. The connection ends with what is returned: keep it
    /// beside the descriptor that serves the server.
    pub(super) fn came(&self, link: impl AsFd) -> io::Result<Served> {
        self.state().serve(link)
    }

    /// As [`Gate::came`], if the gate is open. `None` if it has been closed: the connections that had come by then were
    /// ended, and this one must end too.
    pub(super) fn came_in_time(&self, link: impl AsFd) -> io::Result<Option<Served>> {
        // Under one lock: `hand_back` closes the gate before it takes the connection.
        let mut state = self.state();
        state.is_open.then(|| state.serve(link)).transpose()
    }

    /// Closes the gate, and then the server's connection: the server connects again by itself, to its primary. Returns
    /// when the server has closed its end too, so that what it says about its link afterwards is about another one.
    pub(crate) async fn hand_back(&self) {
        self.close();
        let Some(link) = self.state().link.take() else { return };
        // What was written before still arrives, and then the end of the stream.
        let _ = link.shutdown(Shutdown::Write);
        let until = Instant::now() + CLOSE_LIMIT;
        while !is_closed(&link) && Instant::now() < until {
            tokio::time::sleep(CLOSE_LOOK).await;
        }
        let _ = link.shutdown(Shutdown::Both);
    }

    /// The state is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether both directions of a connection have ended.
fn is_closed(link: &std::net::TcpStream) -> bool {
    let mut fds = [PollFd::new(link, PollFlags::empty())];
    match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(_) => fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;

    use super::*;
    use remora_server::Backlog;

    fn wire(words: &[&str]) -> Vec<u8> {
        let mut out = Vec::new();
        resp::command(&mut out, words);
        out
    }

    #[test]
    fn a_handshake_goes_to_the_primary_and_psync_does_not() {
        let mut handshake = Handshake::new();
        let ping = wire(&["PING"]);
        assert_eq!(handshake.hear(&ping), Heard::Forward { from: 0 });
        handshake.answers_seen = true;
        let login = [wire(&["AUTH", "user", "secret"]), wire(&["REPLCONF", "capa", "psync2"])].concat();
        assert_eq!(handshake.hear(&login[..20]), Heard::Part, "not whole");
        assert_eq!(handshake.hear(&login[20..]), Heard::Forward { from: ping.len() });
        handshake.answers_seen = true;
        let history = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        let at = ping.len() + login.len();
        let asked = Some((history.parse().unwrap(), 42));
        assert_eq!(handshake.hear(&wire(&["PSYNC", history, "42"])), Heard::Psync { at, asked });
    }

    #[test]
    fn a_server_without_data_asks_for_nothing_in_particular() {
        assert_eq!(Handshake::new().hear(&wire(&["PSYNC", "?", "-1"])), Heard::Psync { at: 0, asked: None });
    }

    #[test]
    fn a_server_is_known_by_the_port_that_it_announces() {
        let port = wire(&["replconf", "ip-address", "10.0.0.9", "Listening-Port", "6380"]);
        let heard = [wire(&["PING"]), wire(&["REPLCONF", "capa", "eof"]), port, wire(&["PSYNC", "?", "-1"])].concat();
        assert_eq!(announced_port(&heard), Some(6380));
        assert_eq!(announced_port(&wire(&["PSYNC", "listening-port", "1"])), None);
        assert_eq!(announced_port(&wire(&["REPLCONF", "listening-port", "many"])), None);
    }

    #[test]
    fn of_a_handshake_only_the_login_is_repeated() {
        let auth = wire(&["auth", "copier", "pa55"]);
        let heard = [wire(&["PING"]), auth.clone(), wire(&["REPLCONF", "capa", "eof"]), wire(&["PSYNC", "?", "-1"])];
        assert_eq!(
            logins(&heard.concat()),
            (
                {
                    let mut out = Vec::new();
                    resp::command(&mut out, &["auth", "copier", "pa55"]);
                    out
                },
                1
            )
        );
        assert_eq!(logins(&wire(&["PING"])), (Vec::new(), 0));
    }

    #[tokio::test]
    async fn the_beginning_of_a_command_is_the_primarys_if_nothing_more_comes() {
        async fn pair() -> (TcpStream, TcpStream) {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let (near, far) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
            (near.unwrap(), far.unwrap().0)
        }
        let ((mut client, server), (near, mut primary)) = (pair().await, pair().await);
        let passing = tokio::spawn(until_psync(End::Plain(server), Stream::Tcp(near)));
        let beginning = b"*1\r\n$4\r\nPI";
        client.write_all(beginning).await.unwrap();
        let mut heard = [0; 10];
        primary.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, beginning);
        client.write_all(b"NG\r\n").await.unwrap();
        primary.read_exact(&mut heard[..4]).await.unwrap();
        primary.write_all(b"+PONG\r\n").await.unwrap();
        client.read_exact(&mut heard[..7]).await.unwrap();
        assert_eq!(&heard[..7], b"+PONG\r\n");
        drop((client, primary));
        assert!(passing.await.unwrap().is_none());
    }

    #[test]
    fn what_is_not_a_replicas_handshake_is_the_primarys() {
        let history = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        let others = [
            wire(&["SET", "key", "value"]),
            wire(&["PSYNC", history, "42", "FAILOVER"]),
            [wire(&["PING"]), wire(&["PSYNC", "?", "-1"])].concat(),
            b"\x16\x03\x01".repeat(3000),
            b"GET key\r\n".to_vec(),
        ];
        for other in others {
            assert_eq!(Handshake::new().hear(&other), Heard::Other { from: 0 }, "{other:?}");
        }
    }

    #[test]
    fn a_psync_that_does_not_wait_for_answers_is_the_primarys() {
        let mut handshake = Handshake::new();
        let ping = wire(&["PING"]);
        handshake.hear(&ping);
        assert_eq!(handshake.hear(&wire(&["PSYNC", "?", "-1"])), Heard::Other { from: ping.len() });
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (one, other) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        (one.unwrap(), other.unwrap().0)
    }

    /// Passes on a server's `PSYNC` after the primary was asked with this outcome. Returns what the primary gets of it.
    async fn passed_on(facts: Result<Facts, NoFacts>) -> Vec<u8> {
        let ((server, ours), (primary, mut got_by)) = (pair().await, pair().await);
        let address = got_by.local_addr().unwrap();
        let arrival = Arrival {
            server: End::Plain(ours),
            peer: address,
            primary: Stream::Tcp(primary),
            address,
            between: None,
            facts,
            heard: wire(&["PSYNC", "?", "-1"]),
            psync_at: 0,
            asked: None,
        };
        drop(server);
        got_by.shutdown().await.unwrap();
        arrival.pass(None).await;
        let mut got = Vec::new();
        got_by.read_to_end(&mut got).await.unwrap();
        got
    }

    /// The answer to our question, once it comes, would be taken for that to `PSYNC`.
    #[tokio::test]
    async fn a_primary_that_owes_an_answer_gets_no_psync() {
        let psync = wire(&["PSYNC", "?", "-1"]);
        assert_eq!(passed_on(Ok(Facts::default())).await, psync);
        assert_eq!(passed_on(Err(NoFacts::Answer("NOPERM".into()))).await, psync, "it has answered");
        assert_eq!(passed_on(Err(NoFacts::Silence("no answer".into()))).await, b"");
    }

    #[tokio::test]
    async fn an_answer_that_refuses_is_told_from_none() {
        let asked = |answer: &'static [u8]| async move {
            let (primary, mut far) = pair().await;
            far.write_all(answer).await.unwrap();
            drop(far);
            ask(&mut Stream::Tcp(primary)).await.unwrap_err()
        };
        let NoFacts::Answer(why) = asked(b"-NOPERM no\r\n").await else { panic!("it has answered") };
        assert!(why.contains("+info"), "{why}");
        assert!(matches!(asked(b"+OK\r\n").await, NoFacts::Answer(_)));
        assert!(matches!(asked(b"$100\r\n# Server").await, NoFacts::Silence(_)), "a part of an answer");
        assert!(matches!(asked(b"").await, NoFacts::Silence(_)));
    }

    /// A primary with a backlog of 1000 bytes up to this offset.
    fn primary(at: u64) -> Facts {
        let backlog = Backlog { active: true, size: 1000, first: at - 999, held: 1000 };
        Facts {
            replid: Some("a".repeat(40).parse().unwrap()),
            offset: Some(at),
            backlog: Some(backlog),
            ..Facts::default()
        }
    }

    #[tokio::test]
    async fn a_server_is_let_go_when_the_primary_has_its_next_byte_and_room_for_the_writes() {
        let history = "a".repeat(40).parse().unwrap();
        let mut passing = Passing::new(Login::nowhere());
        let mut now = Instant::now();
        let mut covers = |at, offset| {
            now += Duration::from_secs(1);
            passing.covers(now, &primary(at), history, offset)
        };
        assert_eq!(covers(100_000, 100_000), Err(None), "the rate is not known yet");
        assert!(covers(110_000, 50_000).is_err_and(|why| why.unwrap().contains("repl-backlog-size")), "it is behind");
        assert!(covers(120_000, 120_000).is_err(), "caught up, and 10 kB/s: 250 ms are more than the backlog has");
        assert_eq!(covers(120_100, 120_100), Ok(()));
        assert_eq!(covers(120_100, 119_200), Ok(()), "the oldest bytes, and no writes");
        assert!(covers(120_100, 119_000).is_err());
    }

    #[tokio::test]
    async fn the_server_has_closed_its_end_when_its_connection_was_handed_back() {
        let probe = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = probe.local_addr().unwrap().port();
        drop(probe);
        let gate = Gate::new(port, BTreeSet::from([9])).unwrap();
        assert!(Gate::new(port, BTreeSet::new()).is_err(), "the port is taken");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (link, _) = listener.accept().unwrap();
        let _served = gate.came(&link).unwrap();
        let began = Instant::now();
        let closing = std::thread::spawn(move || {
            let ended = io::Read::read(&mut &server, &mut [0; 8]).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            ended
        });
        gate.hand_back().await;
        assert!(began.elapsed() >= Duration::from_millis(100) && began.elapsed() < CLOSE_LIMIT);
        assert_eq!(closing.join().unwrap(), 0, "the end of the stream");
        assert!(!gate.is_open());
    }

    /// A connection whose serving end is closed ends at once, though the gate has a descriptor of it: with what was
    /// written before, and also if it is never handed back.
    #[test]
    fn a_connection_ends_with_its_service() {
        let gate = Gate::new(0, BTreeSet::new()).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        for writes in [true, false] {
            let mut server = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            server.set_read_timeout(Some(CLOSE_LIMIT)).unwrap();
            let (mut link, _) = listener.accept().unwrap();
            let served = gate.came(&link).unwrap();
            if writes {
                io::Write::write_all(&mut link, b"+FULLRESYNC").unwrap();
            }
            drop((link, served));
            let mut read = Vec::new();
            io::Read::read_to_end(&mut server, &mut read).unwrap();
            assert_eq!(read, if writes { &b"+FULLRESYNC"[..] } else { b"" });
        }
    }

    /// The driver closes the gate while the attending task decides on a connection.
    #[tokio::test]
    async fn a_connection_that_comes_after_the_gate_was_closed_is_not_served() {
        let gate = Gate::new(0, BTreeSet::new()).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (link, _) = listener.accept().unwrap();
        gate.open();
        assert!(gate.came_in_time(&link).unwrap().is_some());
        drop(server);
        gate.hand_back().await;
        let server = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (link, _) = listener.accept().unwrap();
        assert!(gate.came_in_time(&link).unwrap().is_none());
        assert!(gate.state().link.is_none(), "a later hand-over ends nothing");
        drop(server);
    }

    #[test]
    fn without_rules_the_gate_says_so() {
        let gate = Gate::new(0, BTreeSet::from([9])).unwrap();
        assert!(gate.renew(), "a closed gate renews nothing");
        assert!(!gate.open(), "this test runs where no rules are");
    }
}
