//! The one driver of the replication handshake, for all ways to take a snapshot and for the stream, and the connection
//! that it speaks on ([`Socket`]).

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_redis::psync::Payload;
use remora_redis::psync::client::{self, Client, Event, Options};
use remora_redis::{ReplId, resp};
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::UnboundedSender;

use super::{Capture, CaptureError, CaptureEvent, Stop, TICK};
use remora_base::mutation::Mutation;
use remora_server::{Raw, Stream, TlsConnection};

/// A snapshot that the server has announced. The connection's next byte is its first.
pub(super) struct Announced {
    pub(super) socket: Socket,
    pub(super) replid: ReplId,
    pub(super) offset: u64,
    pub(super) payload: Payload,
}

/// How the server answered `PSYNC`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opening {
    /// A snapshot follows, and behind it the stream.
    Full { replid: ReplId, offset: u64, payload: Payload },
    /// A snapshot follows. The stream is requested over another connection, which names this one by the `client`
    /// number.
    Channel { replid: ReplId, offset: u64, payload: Payload, client: u64 },
    /// The server offers snapshot and stream over two connections.
    TwoChannels,
    /// The stream continues. The replid is that of the history from there on.
    Continue { replid: ReplId },
}

/// A connection on which a handshake is under way.
pub(super) struct PsyncLink {
    socket: Socket,
    machine: Client,
    stop: Stop,
    silence: Silence,
    /// Told when the server forks.
    forks: Forks,
}

/// Tells the source's loop that the server forks for a capture.
struct Forks {
    events: UnboundedSender<CaptureEvent>,
    generation: u64,
}

impl Forks {
    fn tell(&self) {
        // A loop that has ended counts nothing.
        let _ = self.events.send(CaptureEvent::Forked { generation: self.generation });
    }
}

impl Capture {
    /// Connects to the server and begins a handshake.
    pub(super) fn handshake(&self, options: Options) -> Result<PsyncLink, CaptureError> {
        Ok(self.handshake_over(self.connect()?, options))
    }

    /// Connects and begins a handshake for a snapshot. If another capture follows the stream, it asks for the snapshot
    /// alone.
    pub(super) fn handshake_for_snapshot(&self, options: Options) -> Result<PsyncLink, CaptureError> {
        let mut link = self.handshake(options)?;
        if self.plan.journal.is_none() {
            link.ask_for_snapshot_alone()?;
        }
        Ok(link)
    }

    /// Begins a handshake on a connection.
    pub(super) fn handshake_over(&self, socket: Socket, options: Options) -> PsyncLink {
        let (machine, stop) = (Client::new(options), self.stop.clone());
        let forks = Forks { events: self.plan.events.clone(), generation: self.plan.generation };
        PsyncLink { socket, machine, stop, silence: self.silence(DURING), forks }
    }

    fn connect(&self) -> Result<Socket, CaptureError> {
        let stream = self.wait_for(async { Ok(self.plan.server.connect().await?.into_stream()) })?;
        Socket::new(stream, self.plan.runtime.clone(), TICK).map_err(broken)
    }
}

impl PsyncLink {
    /// Begins another handshake on the same connection.
    pub(super) fn again(self, options: Options) -> PsyncLink {
        PsyncLink { machine: Client::new(options), ..self }
    }

    /// The connection, whose next byte is the first one behind the handshake.
    pub(super) fn into_socket(self) -> Socket {
        self.socket
    }

    /// The snapshot that was announced on this connection.
    pub(super) fn announced(self, replid: ReplId, offset: u64, payload: Payload) -> Announced {
        Announced { socket: self.socket, replid, offset, payload }
    }

    /// Drives the handshake to its end.
    pub(super) fn opening(&mut self) -> Result<Opening, CaptureError> {
        let mut origin = None;
        loop {
            match self.next_event()? {
                Event::FullResync { replid, offset } => origin = Some((replid, offset, None)),
                Event::Channel { replid, offset, client } => origin = Some((replid, offset, Some(client))),
                Event::Payload(payload) => match origin {
                    None => {}
                    Some((replid, offset, None)) => return Ok(Opening::Full { replid, offset, payload }),
                    Some((replid, offset, Some(client))) => {
                        return Ok(Opening::Channel { replid, offset, payload, client });
                    }
                },
                Event::TwoChannels => return Ok(Opening::TwoChannels),
                Event::Continue { replid } => return Ok(Opening::Continue { replid }),
                Event::Handshaken | Event::KeepAlive => {}
            }
        }
    }

    /// Drives a handshake that requests the stream from an offset on, and returns the replid of the history from there
    /// on. `None` if the server takes a snapshot instead.
    ///
    /// Does not wait for that snapshot: the server may need minutes for it, or close the connection because it cannot
    /// write it. The caller closes the connection, which ends the snapshot.
    pub(super) fn continued(&mut self) -> Result<Option<ReplId>, CaptureError> {
        loop {
            match self.next_event()? {
                Event::Continue { replid } => return Ok(Some(replid)),
                Event::FullResync { .. } | Event::Channel { .. } | Event::Payload(_) | Event::TwoChannels => {
                    return Ok(None);
                }
                Event::Handshaken | Event::KeepAlive => {}
            }
        }
    }

    /// The next event. Events that only show that the server is alive are left out.
    pub(super) fn next_event(&mut self) -> Result<Event, CaptureError> {
        self.next_event_while(|| false)
    }

    /// The next event. The server's silence has no limit while `is_alive` returns true.
    pub(super) fn next_event_while(&mut self, mut is_alive: impl FnMut() -> bool) -> Result<Event, CaptureError> {
        self.silence.restart();
        loop {
            if let Some(event) = self.poll_event() {
                return Ok(event);
            }
            let output = self.machine.take_output();
            if !output.is_empty() {
                self.socket.write_all(&output).map_err(broken)?;
            }
            if self.socket.ahead().is_empty() {
                self.read(&mut is_alive)?;
            }
            self.socket.give(&mut self.machine)?;
        }
    }

    /// The next event if it has arrived already. Does not wait.
    pub(super) fn next_event_at_once(&mut self) -> Result<Option<Event>, CaptureError> {
        if self.socket.ahead().is_empty() {
            self.read_at_once()?;
        }
        self.socket.give(&mut self.machine)?;
        Ok(self.poll_event())
    }

    /// The machine's next event that is more than a sign of life.
    fn poll_event(&mut self) -> Option<Event> {
        loop {
            match self.machine.poll_event()? {
                Event::KeepAlive | Event::Handshaken => {}
                event @ (Event::FullResync { .. } | Event::Channel { .. }) => {
                    self.forks.tell();
                    return Some(event);
                }
                event => return Some(event),
            }
        }
    }

    /// Reads what has arrived, or waits for one [`TICK`] at most.
    fn read(&mut self, is_alive: &mut impl FnMut() -> bool) -> Result<(), CaptureError> {
        self.stop.check()?;
        let received = self.socket.read_ahead();
        if matches!(received, Ok(Received::Idle)) && is_alive() {
            return Ok(());
        }
        self.silence.check(received).map(drop)
    }

    /// Fails unless the server still keeps this connection waiting. It sends `+FULLRESYNC` just before it forks, and
    /// closes the connection if the fork fails. A child that asks later, for the same offset, then belongs to another
    /// client.
    pub(super) fn still_waits(&mut self) -> Result<(), CaptureError> {
        self.read_at_once()?;
        // Newlines are keep-alives.
        match self.socket.ahead().iter().all(|byte| *byte == b'\n') {
            true => Ok(()),
            false => Err(broken("the server sent something before its child began")),
        }
    }

    /// Reads what has arrived since `+FULLRESYNC`, without waiting.
    fn read_at_once(&mut self) -> Result<(), CaptureError> {
        match self.socket.read_ahead_at_once().map_err(broken)? {
            Received::Bytes(_) | Received::Idle => Ok(()),
            Received::End => Err(broken("the server gave up the sync before its child began")),
        }
    }

    /// Sends `REPLCONF rdb-only 1`. The server then ends the connection after the snapshot and counts no further
    /// replica of its stream. Servers before 7.0 answer with an error, which changes nothing: the capture closes the
    /// connection itself.
    fn ask_for_snapshot_alone(&mut self) -> Result<(), CaptureError> {
        let mut command = Vec::new();
        resp::command(&mut command, &["REPLCONF", "rdb-only", "1"]);
        self.socket.write_all(&command).map_err(broken)?;
        self.silence.restart();
        let began = Instant::now();
        loop {
            self.stop.check()?;
            let ahead = self.socket.ahead();
            if let Some(end) = ahead.iter().position(|byte| *byte == b'\n') {
                self.socket.take(end + 1);
                return Ok(());
            }
            if ahead.len() > ANSWER_BYTES_MAX {
                return Err(broken("the answer to REPLCONF rdb-only is too long"));
            }
            match self.socket.read_ahead().map_err(broken)? {
                Received::Bytes(_) => {}
                Received::Idle if began.elapsed() < self.silence.limit => {}
                Received::Idle | Received::End => return Err(broken("no answer to REPLCONF rdb-only")),
            }
        }
    }
}

/// The longest answer to `REPLCONF` in bytes: a line of the servers' own has a few dozen.
const ANSWER_BYTES_MAX: usize = 512;

/// The phase of a capture that this module is about, for its errors.
const DURING: &str = "handshake";

/// The link broke during the handshake.
pub(super) fn broken(cause: impl ToString) -> CaptureError {
    CaptureError::Link { during: DURING, cause: cause.to_string() }
}

/// Fails unless the server continues the history that was requested. A server that continues under another replid would
/// send bytes of its new history, which must not get into a journal of the old one.
pub fn is_same_history(asked: ReplId, answered: ReplId, at: u64) -> Result<(), CaptureError> {
    if Mutation::OtherHistoryIgnored.is_active() {
        return Ok(());
    }
    if asked == answered { Ok(()) } else { Err(CaptureError::HistoryChanged { from: asked, to: answered, at }) }
}

/// The server answered with `what` to a request for a snapshot.
pub(super) fn out_of_place(what: &str) -> CaptureError {
    broken(format!("the server offered {what} where a snapshot was requested"))
}

// A connection to the primary as a capture thread uses it: blocking, with a bound on every wait.
//
// Header, payload, mark and stream follow each other on one connection, and the kernel delivers them in any pieces. A
// reader that looks for the end of its part reads ahead, and what it does not use belongs to the next reader. So the
// connection itself owns what was read ahead ([`Socket::ahead`]): a reader takes its part from there, and no reader
// can keep or drop the rest.
//
// From a plain socket (TCP or Unix) the kernel copies the bytes straight into the table's memory. Under TLS the bytes
// must be decrypted first, which takes one copy more.

/// The result of one read.
#[derive(Debug)]
pub enum Received {
    /// This many bytes were read.
    Bytes(usize),
    /// Nothing arrived within the connection's tick.
    Idle,
    /// The server closed the connection.
    End,
}

/// How long the server has been silent, and how long it may be.
pub(super) struct Silence {
    pub(super) since: Instant,
    pub(super) limit: Duration,
    /// The phase of the capture, for the error's text.
    pub(super) during: &'static str,
}

impl Silence {
    /// Measures from now on.
    pub(super) fn restart(&mut self) {
        self.since = Instant::now();
    }

    /// The number of bytes that a read returned, which ends the silence. `None` while the server may still be silent.
    ///
    /// # Errors
    /// The server has been silent for too long or has closed the connection, or the read failed.
    pub(super) fn check(&mut self, received: io::Result<Received>) -> Result<Option<usize>, CaptureError> {
        self.check_unless(received, || false)
    }

    /// As [`Silence::check`]. A silence that is too long begins again if it `is_excused`.
    ///
    /// # Errors
    /// As [`Silence::check`].
    pub(super) fn check_unless(
        &mut self,
        received: io::Result<Received>,
        is_excused: impl FnOnce() -> bool,
    ) -> Result<Option<usize>, CaptureError> {
        let cause = match received {
            Ok(Received::Bytes(n)) => {
                self.restart();
                return Ok(Some(n));
            }
            Ok(Received::Idle) if self.since.elapsed() < self.limit => return Ok(None),
            Ok(Received::Idle) if is_excused() => {
                self.restart();
                return Ok(None);
            }
            Ok(Received::Idle) => format!("no byte arrived within {} s", self.limit.as_secs()),
            Ok(Received::End) => "the server closed the connection; its log says why".to_owned(),
            Err(error) => error.to_string(),
        };
        Err(CaptureError::Link { during: self.during, cause })
    }
}

/// A connection to the primary. Every wait has a bound.
pub struct Socket {
    link: Link,
    tick: Duration,
    /// Bytes that were read and that nobody has taken yet. Every read returns them first.
    ahead: Vec<u8>,
}

enum Link {
    Plain(OwnedFd),
    Tls(Box<TlsConnection>, tokio::runtime::Handle),
    Pieces(Pieces),
}

/// The longest time that a write of a few bytes may take. It waits only while the server reads nothing and its socket
/// buffer is full.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

impl Socket {
    /// Takes a connected stream and the bytes that its client has read from it and not used. Each read waits for at
    /// most `tick`.
    pub fn new(
        (stream, ahead): (Stream, Vec<u8>),
        runtime: tokio::runtime::Handle,
        tick: Duration,
    ) -> io::Result<Socket> {
        let link = match stream.raw()? {
            Raw::Socket(socket) => {
                use rustix::net::sockopt::{Timeout, set_socket_timeout};
                rustix::io::ioctl_fionbio(&socket, false)?;
                set_socket_timeout(&socket, Timeout::Recv, Some(tick))?;
                set_socket_timeout(&socket, Timeout::Send, Some(WRITE_LIMIT))?;
                Link::Plain(socket)
            }
            Raw::Tls(stream) => Link::Tls(stream, runtime),
        };
        Ok(Socket { link, tick, ahead })
    }

    /// A connection whose other end says which bytes each read returns. What is written to it is not looked at.
    pub fn of_pieces(pieces: Pieces) -> Socket {
        Socket { link: Link::Pieces(pieces), tick: Duration::ZERO, ahead: Vec::new() }
    }

    /// The bytes that were read and not taken yet.
    pub fn ahead(&self) -> &[u8] {
        &self.ahead
    }

    /// Takes the first `count` of the bytes that were read ahead.
    pub fn take(&mut self, count: usize) {
        self.ahead.drain(..count.min(self.ahead.len()));
    }

    /// Hands a handshake what was read ahead. What the handshake does not use stays.
    pub fn give(&mut self, machine: &mut Client) -> Result<(), client::Error> {
        let used = machine.handle_input(&self.ahead)?;
        self.take(used);
        Ok(())
    }

    /// Reads once from the connection, behind what was read ahead, and waits for at most one tick.
    pub fn read_ahead(&mut self) -> io::Result<Received> {
        self.read_further(self.tick, RecvFlags::empty())
    }

    /// Reads ahead what has already arrived, without waiting.
    pub fn read_ahead_at_once(&mut self) -> io::Result<Received> {
        self.read_further(Duration::ZERO, RecvFlags::DONTWAIT)
    }

    fn read_further(&mut self, limit: Duration, flags: RecvFlags) -> io::Result<Received> {
        let room = AHEAD_BYTES_MAX.saturating_sub(self.ahead.len());
        if room == 0 {
            let text = format!("the server sent {AHEAD_BYTES_MAX} bytes where a line was due");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut buffer = [0; AHEAD_BYTES_MAX];
        let received = self.read_from_link(limit, flags, &mut buffer[..room])?;
        if let Received::Bytes(n) = received {
            self.ahead.extend_from_slice(&buffer[..n]);
        }
        Ok(received)
    }

    /// Reads once into `memory` at `offset`: straight from a plain socket, by a copy under TLS.
    pub fn receive_into(&mut self, memory: &Memory, offset: u64, length: usize) -> io::Result<Received> {
        match &mut self.link {
            Link::Plain(socket) if self.ahead.is_empty() => received(memory.receive(&*socket, offset, length)),
            _ => {
                let mut buffer = vec![0; length.min(TLS_READ)];
                let received = self.read(&mut buffer)?;
                if let Received::Bytes(n) = received {
                    memory.write(offset, &buffer[..n]).map_err(io::Error::other)?;
                }
                Ok(received)
            }
        }
    }

    /// Reads once into a buffer: what was read ahead, or else from the connection.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Received> {
        if !self.ahead.is_empty() {
            let n = self.ahead.len().min(buffer.len());
            buffer[..n].copy_from_slice(&self.ahead[..n]);
            self.take(n);
            return Ok(Received::Bytes(n));
        }
        self.read_from_link(self.tick, RecvFlags::empty(), buffer)
    }

    /// Reads once and waits for at most `limit`. A plain socket ignores `limit`: its time-out is the tick, unless
    /// `flags` say that it must not wait.
    fn read_from_link(&mut self, limit: Duration, flags: RecvFlags, buffer: &mut [u8]) -> io::Result<Received> {
        match &mut self.link {
            Link::Plain(socket) => received(recv(&*socket, buffer, flags).map(|(n, _)| n).map_err(Into::into)),
            Link::Tls(stream, runtime) => runtime.block_on(async {
                match tokio::time::timeout(limit, stream.read(buffer)).await {
                    Ok(result) => received(result),
                    Err(_) => Ok(Received::Idle),
                }
            }),
            Link::Pieces(pieces) => Ok(pieces.read(buffer)),
        }
    }

    /// Ends our direction of the connection. The server then closes it, after what it has sent.
    pub fn end_writing(&mut self) -> io::Result<()> {
        match &mut self.link {
            Link::Plain(socket) => Ok(rustix::net::shutdown(&*socket, rustix::net::Shutdown::Write)?),
            Link::Tls(stream, runtime) => runtime.block_on(async {
                tokio::time::timeout(WRITE_LIMIT, stream.shutdown())
                    .await
                    .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            }),
            Link::Pieces(_) => Ok(()),
        }
    }

    /// Writes all bytes. A write that makes no progress fails after `WRITE_LIMIT`.
    pub fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.link {
            Link::Plain(socket) => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    use rustix::net::{SendFlags, send};
                    match send(&*socket, rest, SendFlags::NOSIGNAL) {
                        Ok(n) => rest = &rest[n..],
                        Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok(())
            }
            Link::Tls(stream, runtime) => runtime.block_on(async {
                let write = async {
                    stream.write_all(bytes).await?;
                    stream.flush().await
                };
                tokio::time::timeout(WRITE_LIMIT, write).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            }),
            Link::Pieces(_) => Ok(()),
        }
    }
}

/// The most bytes that wait to be taken. Who reads ahead looks for the end of a line of a few dozen bytes, and takes
/// the lines and keep-alives before it reads further.
const AHEAD_BYTES_MAX: usize = 16 * 1024;

/// The most bytes that one read under TLS takes: a few records of 16 KiB.
const TLS_READ: usize = 256 * 1024;

fn received(result: io::Result<usize>) -> io::Result<Received> {
    match result {
        Ok(0) => Ok(Received::End),
        Ok(n) => Ok(Received::Bytes(n)),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(Received::Idle),
            _ => Err(error),
        },
    }
}

// A connection whose bytes come in the pieces that a test or the simulation chooses. A kernel delivers what was
// written in any pieces: parts of one write, or several writes at once.

/// The end of a connection whose pieces the other end chooses. A clone is the same connection.
#[derive(Clone, Default)]
pub struct Pieces(Arc<Mutex<Written>>);

#[derive(Default)]
struct Written {
    pieces: VecDeque<Vec<u8>>,
    is_ended: bool,
}

impl Pieces {
    fn written(&self) -> MutexGuard<'_, Written> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers one more piece. No read returns bytes of two pieces.
    pub fn add(&self, piece: &[u8]) {
        if !piece.is_empty() {
            self.written().pieces.push_back(piece.to_vec());
        }
    }

    /// Closes the connection behind the last piece.
    pub fn end(&self) {
        self.written().is_ended = true;
    }

    /// Reads once: the next piece, or as much of it as there is room for.
    fn read(&self, buffer: &mut [u8]) -> Received {
        let mut written = self.written();
        let Some(mut piece) = written.pieces.pop_front() else {
            return if written.is_ended { Received::End } else { Received::Idle };
        };
        let n = piece.len().min(buffer.len());
        let rest = piece.split_off(n);
        buffer[..n].copy_from_slice(&piece);
        if !rest.is_empty() {
            written.pieces.push_front(rest);
        }
        Received::Bytes(n)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::thread::sleep;
    use std::time::Duration;

    use remora_redis::psync::client::Channel;

    use super::super::tests::{FULL, HISTORY, MARK, Primary, Rig, history, link_cause};
    use super::*;

    /// What the server answers to a handshake with these options, and the bytes behind the handshake.
    fn answer(options: Options, exchange: &[(&str, &str)], behind: &str) -> (Result<Opening, CaptureError>, Vec<u8>) {
        let rig = Rig::new();
        let script = |mut primary: Primary| {
            primary.converse(exchange);
            primary.send(behind.as_bytes());
            primary.wait_for_end();
        };
        rig.play(script, |capture, socket| {
            let mut link = capture.handshake_over(socket, options);
            let opening = link.opening();
            let (mut rest, mut socket) = (Vec::new(), link.into_socket());
            let mut buffer = [0; 4096];
            while let Ok(Received::Bytes(n)) = socket.read(&mut buffer) {
                rest.extend_from_slice(&buffer[..n]);
            }
            (opening, rest)
        })
    }

    /// The error that ends a handshake whose `PSYNC` is answered so.
    fn refused(text: &str) -> CaptureError {
        let answer = answer(Options::default(), &[FULL[0], FULL[1], ("PSYNC ? -1", text)], "");
        answer.0.unwrap_err()
    }

    #[test]
    fn a_handshake_ends_at_the_payload_and_takes_none_of_it() {
        let payload = remora_redis::psync::Payload::Mark(MARK.as_bytes().try_into().unwrap());
        let (opening, rest) = answer(Options::default(), &FULL, &format!("$EOF:{MARK}\r\nREDIS0011"));
        assert_eq!(opening.unwrap(), Opening::Full { replid: history(), offset: 77, payload });
        assert_eq!(rest, b"REDIS0011");

        let (opening, rest) = answer(Options::default(), &FULL, "$9\r\nREDIS0011");
        let payload = remora_redis::psync::Payload::Length(9);
        assert_eq!(opening.unwrap(), Opening::Full { replid: history(), offset: 77, payload });
        assert_eq!(rest, b"REDIS0011");
    }

    #[test]
    fn a_version_is_claimed_and_its_refusal_ignored() {
        let options = Options { rdb_version: Some("9.0.0".into()), ..Options::default() };
        let version = ("REPLCONF version 9.0.0", "-ERR Unrecognized REPLCONF option: version\r\n");
        let (opening, _) = answer(options, &[FULL[0], FULL[1], version, FULL[2]], "$0\r\n");
        assert!(matches!(opening.unwrap(), Opening::Full { offset: 77, .. }));
    }

    #[test]
    fn a_partial_resync_is_accepted_in_the_same_history_or_another() {
        let options = || Options { resume: Some((history(), 100)), ..Options::default() };
        let psync = format!("PSYNC {HISTORY} 100");
        let (opening, rest) = answer(options(), &[FULL[0], FULL[1], (&psync, "+CONTINUE\r\n")], "*1\r\n");
        assert_eq!(opening.unwrap(), Opening::Continue { replid: history() });
        assert_eq!(rest, b"*1\r\n");
        assert!(is_same_history(history(), history(), 99).is_ok());

        let other = "f".repeat(40);
        let changed = format!("+CONTINUE {other}\r\n");
        let (opening, _) = answer(options(), &[FULL[0], FULL[1], (&psync, &changed)], "");
        let Opening::Continue { replid } = opening.unwrap() else { panic!("another answer") };
        assert_eq!(replid.to_string(), other);
        let error = is_same_history(history(), replid, 99).unwrap_err();
        assert!(
            matches!(error, CaptureError::HistoryChanged { from, to, at: 99 } if from == history() && to == replid)
        );
    }

    #[test]
    fn a_snapshot_over_a_second_channel_names_its_client() {
        let options = |channel| Options { channel, ..Options::default() };
        let offered = [
            FULL[0],
            ("REPLCONF capa eof capa psync2 capa dual-channel", "+OK\r\n"),
            ("PSYNC ? -1", "+DUALCHANNELSYNC\r\n"),
        ];
        assert_eq!(answer(options(Channel::WholeOrStream), &offered, "").0.unwrap(), Opening::TwoChannels);
        let end_offset = format!("$ENDOFF:77 {HISTORY} 0 12\r\n");
        let second = [FULL[0], ("REPLCONF capa eof rdb-only 1 rdb-channel 1", "+OK\r\n"), ("SYNC", &end_offset)];
        let (opening, _) = answer(options(Channel::Snapshot), &second, "$0\r\n");
        assert!(matches!(opening.unwrap(), Opening::Channel { offset: 77, client: 12, .. }));
        let stream = options(Channel::Stream { snapshot_client: 12 });
        let stream = Options { resume: Some((history(), 78)), ..stream };
        let psync = format!("PSYNC {HISTORY} 78");
        let attach = [("REPLCONF set-rdb-client-id 12", "+OK\r\n"), (psync.as_str(), "+CONTINUE\r\n")];
        assert_eq!(answer(stream, &attach, "").0.unwrap(), Opening::Continue { replid: history() });
    }

    #[test]
    fn refusals_say_whether_another_attempt_may_succeed_and_what_to_grant() {
        let error = refused("-NOPERM User source has no permissions to run the 'psync' command\r\n");
        assert!(matches!(error, CaptureError::Psync(_)) && !error.is_transient());
        assert!(
            error.to_string().contains("needs these ACL rules: ") && error.to_string().contains("+psync"),
            "{error}"
        );
        for text in
            ["-LOADING Redis is loading the dataset in memory\r\n", "-NOMASTERLINK Can't SYNC while not connected\r\n"]
        {
            let error = refused(text);
            assert!(matches!(error, CaptureError::Psync(_)) && error.is_transient(), "{error}");
        }
        assert!(matches!(refused("+WHAT\r\n"), CaptureError::Psync(_)));
    }

    #[test]
    fn a_primary_that_closes_in_the_middle_ends_the_handshake() {
        let (opening, _) = answer(Options::default(), &FULL[..2], "");
        let error = opening.unwrap_err();
        assert!(link_cause(&error).contains("closed the connection") && error.is_transient(), "{error}");
    }

    #[test]
    fn newlines_keep_a_handshake_alive_and_silence_ends_it() {
        let mut rig = Rig::new();
        rig.capture.silence_limit = Duration::from_millis(800);
        let script = |mut primary: Primary| {
            primary.converse(&FULL[..2]);
            assert_eq!(primary.command(), "PSYNC ? -1");
            for _ in 0..8 {
                sleep(Duration::from_millis(200));
                primary.send(b"\n");
            }
            primary.send(FULL[2].1.as_bytes());
            primary.drain();
        };
        let began = Instant::now();
        let error = rig.play(script, |capture, socket| {
            let mut link = capture.handshake_over(socket, Options::default());
            assert!(matches!(link.next_event(), Ok(Event::FullResync { offset: 77, .. })));
            link.next_event().unwrap_err()
        });
        assert!(began.elapsed() >= Duration::from_millis(2_400), "{:?}", began.elapsed());
        assert!(link_cause(&error).contains("no byte arrived within") && error.is_transient(), "{error}");
    }

    #[test]
    fn a_live_child_excuses_the_servers_silence() {
        let mut rig = Rig::new();
        rig.capture.silence_limit = Duration::from_millis(1);
        let script = |mut primary: Primary| {
            primary.converse(&FULL);
            sleep(Duration::from_millis(500));
            primary.send(b"$0\r\n");
            primary.drain();
        };
        rig.play(script, |capture, socket| {
            let mut link = capture.handshake_over(socket, Options::default());
            assert!(matches!(link.next_event_while(|| true), Ok(Event::FullResync { .. })));
            assert!(matches!(link.next_event_while(|| true), Ok(Event::Payload(_))));
        });
    }

    #[test]
    fn a_handshake_ends_soon_after_it_is_stopped() {
        let rig = Rig::new();
        rig.stop();
        let error = rig.play(
            |mut primary| primary.drain(),
            |capture, socket| capture.handshake_over(socket, Options::default()).opening().unwrap_err(),
        );
        assert!(matches!(error, CaptureError::Stopped));
    }

    #[test]
    fn only_newlines_may_arrive_before_the_child_begins() {
        let rig = Rig::new();
        for (sent, expected) in [("\n\n", None), ("\n$", Some("sent something")), ("", Some("gave up the sync"))] {
            let (socket, mut primary) = rig.connect();
            let mut link = rig.capture.handshake_over(socket, Options::default());
            primary.send(sent.as_bytes());
            if sent.is_empty() {
                drop(primary);
            }
            match (link.still_waits(), expected) {
                (Ok(()), None) => {}
                (Err(error), Some(cause)) => assert!(link_cause(&error).contains(cause), "{error}"),
                (outcome, expected) => panic!("{outcome:?} where {expected:?} was expected"),
            }
        }
    }

    #[test]
    fn the_snapshot_alone_is_requested_whatever_an_old_server_answers() {
        let rig = Rig::new();
        for (answer, is_accepted) in [("+OK\r\n", true), ("-ERR Unrecognized REPLCONF option\r\n", true), ("", false)] {
            let script = |mut primary: Primary| {
                primary.converse(&[("REPLCONF rdb-only 1", answer)]);
                primary.wait_for_end();
            };
            let asked = rig.play(script, |capture, socket| {
                capture.handshake_over(socket, Options::default()).ask_for_snapshot_alone()
            });
            assert_eq!(asked.is_ok(), is_accepted, "{asked:?}");
        }
    }
}
