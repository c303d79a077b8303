//! The one driver of the replication handshake, for all ways to take a snapshot and for the stream.

use std::time::Instant;

use remora_redis::psync::Payload;
use remora_redis::psync::client::{Client, Event, Options};
use remora_redis::{ReplId, resp};

use super::Capture;
use super::plan::{Fault, Stop, TICK};
use super::socket::{Received, Silence, Wire};
use crate::server::ServerError;

/// A snapshot that the server has announced.
pub(super) struct Announced {
    pub(super) wire: Wire,
    pub(super) replid: ReplId,
    pub(super) offset: u64,
    pub(super) payload: Payload,
    /// Bytes that were read beyond the handshake.
    pub(super) early: Vec<u8>,
}

/// How the server answered `PSYNC`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opening {
    /// A snapshot follows, and behind it the stream.
    Full { replid: ReplId, offset: u64, payload: Payload },
    /// A snapshot follows. The stream is requested over another connection, which names this one by the `client` number.
    Channel { replid: ReplId, offset: u64, payload: Payload, client: u64 },
    /// The server offers snapshot and stream over two connections.
    TwoChannels,
    /// The stream continues. The replid is that of the history from there on.
    Continue { replid: ReplId },
}

/// A connection on which a handshake is under way.
pub(super) struct PsyncLink {
    wire: Wire,
    machine: Client,
    /// Bytes that were read and are not used yet.
    early: Vec<u8>,
    stop: Stop,
    silence: Silence,
}

impl Capture {
    /// Connects to the server and begins a handshake.
    pub(super) fn handshake(&self, options: Options) -> Result<PsyncLink, Fault> {
        Ok(self.handshake_over(self.connect()?, options))
    }

    /// Connects and begins a handshake for a snapshot. If another capture follows the stream, it asks for the snapshot alone.
    pub(super) fn handshake_for_snapshot(&self, options: Options) -> Result<PsyncLink, Fault> {
        let mut link = self.handshake(options)?;
        if self.plan.journal.is_none() {
            link.ask_for_snapshot_alone()?;
        }
        Ok(link)
    }

    /// Begins a handshake on a connection.
    pub(super) fn handshake_over(&self, wire: Wire, options: Options) -> PsyncLink {
        let (machine, stop) = (Client::new(options), self.stop.clone());
        PsyncLink { wire, machine, early: Vec::new(), stop, silence: self.silence(DURING) }
    }

    fn connect(&self) -> Result<Wire, Fault> {
        let stream = self.plan.runtime.block_on(async {
            let client = self.plan.server.connect().await?;
            Ok::<_, ServerError>(client.into_stream().0)
        })?;
        Wire::new(stream, self.plan.runtime.clone(), TICK).map_err(broken)
    }
}

impl PsyncLink {
    /// Begins another handshake on the same connection.
    pub(super) fn again(self, options: Options) -> PsyncLink {
        PsyncLink { machine: Client::new(options), early: Vec::new(), ..self }
    }

    /// The connection, and the bytes that were read beyond the handshake.
    pub(super) fn into_parts(self) -> (Wire, Vec<u8>) {
        (self.wire, self.early)
    }

    /// The connection, whose next bytes are the stream's.
    pub(super) fn into_stream(mut self) -> Wire {
        self.wire.push_back(self.early);
        self.wire
    }

    /// The snapshot that was announced on this connection.
    pub(super) fn announced(self, replid: ReplId, offset: u64, payload: Payload) -> Announced {
        Announced { wire: self.wire, replid, offset, payload, early: self.early }
    }

    /// Drives the handshake to its end.
    pub(super) fn opening(&mut self) -> Result<Opening, Fault> {
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

    /// The next event. Events that only show that the server is alive are left out.
    pub(super) fn next_event(&mut self) -> Result<Event, Fault> {
        self.next_event_while(|| false)
    }

    /// The next event. The server's silence has no limit while `is_alive` returns true.
    pub(super) fn next_event_while(&mut self, mut is_alive: impl FnMut() -> bool) -> Result<Event, Fault> {
        self.silence.restart();
        loop {
            while let Some(event) = self.machine.poll_event() {
                if !matches!(event, Event::KeepAlive | Event::Handshaken) {
                    return Ok(event);
                }
            }
            let output = self.machine.take_output();
            if !output.is_empty() {
                self.wire.write_all(&output).map_err(broken)?;
            }
            if self.early.is_empty() {
                self.read(&mut is_alive)?;
            }
            let used = self.machine.handle_input(&self.early)?;
            self.early.drain(..used);
        }
    }

    /// Reads what has arrived, or waits for one [`TICK`] at most.
    fn read(&mut self, is_alive: &mut impl FnMut() -> bool) -> Result<(), Fault> {
        self.stop.check()?;
        let mut buffer = [0; 16 * 1024];
        let received = self.wire.read(&mut buffer);
        if matches!(received, Ok(Received::Idle)) && is_alive() {
            return Ok(());
        }
        if let Some(n) = self.silence.check(received)? {
            self.early.extend_from_slice(&buffer[..n]);
        }
        Ok(())
    }

    /// Fails unless the server still keeps this connection waiting. It sends `+FULLRESYNC` just before it forks, and closes the
    /// connection if the fork fails. A child that asks later, for the same offset, then belongs to another client.
    pub(super) fn still_waits(&mut self) -> Result<(), Fault> {
        let mut buffer = [0; 1024];
        match self.wire.read_at_once(&mut buffer).map_err(broken)? {
            Received::Bytes(n) => self.early.extend_from_slice(&buffer[..n]),
            Received::Idle => {}
            Received::End => return Err(broken("the server gave up the sync before its child began")),
        }
        // Newlines are keep-alives.
        match self.early.iter().all(|byte| *byte == b'\n') {
            true => Ok(()),
            false => Err(broken("the server sent something before its child began")),
        }
    }

    /// Sends `REPLCONF rdb-only 1`. The server then ends the connection after the snapshot and counts no further replica of its
    /// stream. Servers before 7.0 answer with an error, which changes nothing: the capture closes the connection itself.
    fn ask_for_snapshot_alone(&mut self) -> Result<(), Fault> {
        let mut command = Vec::new();
        resp::command(&mut command, &["REPLCONF", "rdb-only", "1"]);
        self.wire.write_all(&command).map_err(broken)?;
        let (mut answer, mut buffer) = (Vec::new(), [0; ANSWER_BYTES_MAX]);
        self.silence.restart();
        let began = Instant::now();
        while !answer.ends_with(b"\r\n") {
            self.stop.check()?;
            match self.wire.read(&mut buffer).map_err(broken)? {
                Received::Bytes(n) => answer.extend_from_slice(&buffer[..n]),
                Received::Idle if began.elapsed() < self.silence.limit => {}
                Received::Idle | Received::End => return Err(broken("no answer to REPLCONF rdb-only")),
            }
            if answer.len() > ANSWER_BYTES_MAX {
                return Err(broken("the answer to REPLCONF rdb-only is too long"));
            }
        }
        Ok(())
    }
}

/// The longest answer to `REPLCONF` in bytes: a line of the servers' own has a few dozen.
const ANSWER_BYTES_MAX: usize = 512;

/// The phase of a capture that this module is about, for its errors.
const DURING: &str = "handshake";

/// The link broke during the handshake.
pub(super) fn broken(cause: impl ToString) -> Fault {
    Fault::Link { during: DURING, cause: cause.to_string() }
}

/// Fails unless the server continues the history that was requested. A server that continues under another replid would
/// send bytes of its new history, which must not get into a journal of the old one.
pub(super) fn is_same_history(asked: ReplId, answered: ReplId, at: u64) -> Result<(), Fault> {
    if asked == answered { Ok(()) } else { Err(Fault::HistoryChanged { from: asked, to: answered, at }) }
}

/// The server answered with `what` to a request for a snapshot.
pub(super) fn out_of_place(what: &str) -> Fault {
    broken(format!("the server offered {what} where a snapshot was requested"))
}
