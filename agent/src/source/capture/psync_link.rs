//! The one driver of the replication handshake, for all ways to take a snapshot and for the stream.

use std::io;
use std::time::Instant;

use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::client::{Client, Event, Options};

use super::plan::{Fault, Plan, SILENCE_LIMIT, Stops, TICK};
use super::socket::{Received, Wire};
use crate::server::ServerError;

/// A snapshot that the server has announced.
pub(super) struct Announced {
    pub(super) wire: Wire,
    pub(super) replid: ReplId,
    pub(super) offset: u64,
    pub(super) payload: Payload,
    /// What was read beyond the handshake.
    pub(super) early: Vec<u8>,
}

/// How the server answered `PSYNC`. The replid of `Continue` is that of the history from there on.
pub(super) enum Opening {
    Full { replid: ReplId, offset: u64, payload: Payload },
    Channel { replid: ReplId, offset: u64, payload: Payload, client: u64 },
    TwoChannels,
    Continue { replid: ReplId },
}

/// A connection on which a handshake is under way.
pub(super) struct PsyncLink {
    wire: Wire,
    machine: Client,
    /// Read, and not yet used.
    early: Vec<u8>,
}

impl PsyncLink {
    pub(super) fn connect(plan: &Plan, options: Options) -> Result<PsyncLink, Fault> {
        Ok(PsyncLink::over(connect(plan)?, options))
    }

    /// A handshake for a snapshot without a stream where another thread already follows that.
    pub(super) fn for_snapshot(plan: &Plan, options: Options) -> Result<PsyncLink, Fault> {
        let mut link = PsyncLink::connect(plan, options)?;
        if plan.journal.is_none() {
            ask_for_snapshot_alone(&mut link.wire)?;
        }
        Ok(link)
    }

    fn over(wire: Wire, options: Options) -> PsyncLink {
        PsyncLink { wire, machine: Client::new(options), early: Vec::new() }
    }

    /// Another handshake over the same connection.
    pub(super) fn again(self, options: Options) -> PsyncLink {
        PsyncLink::over(self.wire, options)
    }

    /// The connection, and what was read beyond the handshake.
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
    pub(super) fn opening(&mut self, stop: Stops<'_>) -> Result<Opening, Fault> {
        let mut identity = None;
        loop {
            match self.next_event(stop, is_patient)? {
                Event::FullResync { replid, offset } => identity = Some((replid, offset, None)),
                Event::Channel { replid, offset, client } => identity = Some((replid, offset, Some(client))),
                Event::Payload(payload) => match identity {
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

    /// The next event, except those that only show that the server is alive. `patient` says, given when something was last received, whether
    /// to wait on.
    pub(super) fn next_event(
        &mut self,
        stop: Stops<'_>,
        mut patient: impl FnMut(Instant) -> bool,
    ) -> Result<Event, Fault> {
        let mut heard = Instant::now();
        loop {
            while let Some(event) = self.machine.poll_event() {
                if !matches!(event, Event::KeepAlive | Event::Handshaken) {
                    return Ok(event);
                }
            }
            let output = self.machine.take_output();
            if !output.is_empty() {
                self.wire.write_all(&output).map_err(|cause| broken(cause.to_string()))?;
            }
            let mut bytes = std::mem::take(&mut self.early);
            if bytes.is_empty() {
                self.read(stop, &mut bytes, &mut heard, &mut patient)?;
            }
            let used = self.machine.handle_input(&bytes)?;
            self.early = bytes.split_off(used);
        }
    }

    /// Adds what comes; at most one wait of a tick.
    fn read(
        &mut self,
        stop: Stops<'_>,
        bytes: &mut Vec<u8>,
        heard: &mut Instant,
        mut patient: impl FnMut(Instant) -> bool,
    ) -> Result<(), Fault> {
        if stop.set() {
            return Err(Fault::Stopped);
        }
        let mut buffer = [0; 16 * 1024];
        let received = self.wire.read(&mut buffer);
        if matches!(received, Ok(Received::Idle)) && patient(*heard) {
            return Ok(());
        }
        if let Some(n) = came(received, *heard, DURING)? {
            bytes.extend_from_slice(&buffer[..n]);
            *heard = Instant::now();
        }
        Ok(())
    }

    /// Fails unless the server still has us wait. It says `+FULLRESYNC` just before it forks, and if that fails it closes our connection; a
    /// child that asks later, of the same offset, then belongs to another client.
    pub(super) fn still_waits(&mut self) -> Result<(), Fault> {
        let mut buffer = [0; 1024];
        match self.wire.read_at_once(&mut buffer).map_err(|cause| broken(cause.to_string()))? {
            Received::Bytes(n) => self.early.extend_from_slice(&buffer[..n]),
            Received::Idle => {}
            Received::End => return Err(broken("the server gave the sync up before its child began".into())),
        }
        // Newlines say that it lives.
        match self.early.iter().all(|byte| *byte == b'\n') {
            true => Ok(()),
            false => Err(broken("the server said something before its child began".into())),
        }
    }
}

/// Whether the server, last heard at that time, may still be silent.
pub(super) fn is_patient(heard: Instant) -> bool {
    heard.elapsed() < SILENCE_LIMIT
}

pub(super) fn broken(cause: String) -> Fault {
    Fault::Link { during: DURING, cause }
}

/// What this module's connections are about, for their errors.
const DURING: &str = "handshake";

/// Fails unless the server continues the history that was requested. A server that continues under another replid would
/// send bytes of its new history, which must not get into a journal of the old one.
pub(super) fn is_same_history(asked: ReplId, answered: ReplId, at: u64) -> Result<(), Fault> {
    if asked == answered { Ok(()) } else { Err(Fault::HistoryChanged { from: asked, to: answered, at }) }
}

pub(super) fn out_of_place(what: &str) -> Fault {
    let cause = format!("the server offered {what} where a snapshot was asked for");
    Fault::Link { during: "handshake", cause }
}

fn connect(plan: &Plan) -> Result<Wire, Fault> {
    let stream = plan.runtime.block_on(async {
        let client = plan.server.connect().await?;
        Ok::<_, ServerError>(client.into_stream().0)
    })?;
    Wire::new(stream, plan.runtime.clone(), TICK)
        .map_err(|cause| Fault::Link { during: "handshake", cause: cause.to_string() })
}

/// `REPLCONF rdb-only 1`: the server then ends the connection after the snapshot and counts no further replica of its
/// stream. Servers before 7.0 don't know it and answer an error, which changes nothing: we close the connection ourselves.
fn ask_for_snapshot_alone(wire: &mut Wire) -> Result<(), Fault> {
    let mut command = Vec::new();
    remora_redis::resp::command(&mut command, &["REPLCONF", "rdb-only", "1"]);
    let link = |cause: io::Error| Fault::Link { during: "handshake", cause: cause.to_string() };
    wire.write_all(&command).map_err(link)?;
    let mut answer = Vec::new();
    let began = Instant::now();
    let mut buffer = [0; 512];
    while !answer.ends_with(b"\r\n") {
        match wire.read(&mut buffer).map_err(link)? {
            Received::Bytes(n) => answer.extend_from_slice(&buffer[..n]),
            Received::Idle if began.elapsed() < SILENCE_LIMIT && answer.len() < buffer.len() => {}
            Received::Idle | Received::End => {
                let cause = "no answer to REPLCONF rdb-only".into();
                return Err(Fault::Link { during: "handshake", cause });
            }
        }
    }
    Ok(())
}

/// How many bytes have come; `None` while the server, last heard at `heard`, may still be silent.
pub(super) fn came(
    received: io::Result<Received>,
    heard: Instant,
    during: &'static str,
) -> Result<Option<usize>, Fault> {
    let cause = match received {
        Ok(Received::Bytes(n)) => return Ok(Some(n)),
        Ok(Received::Idle) if heard.elapsed() < SILENCE_LIMIT => return Ok(None),
        Ok(Received::Idle) => format!("nothing came for {} s", SILENCE_LIMIT.as_secs()),
        Ok(Received::End) => "the server closed it; its log says why".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Fault::Link { during, cause })
}
