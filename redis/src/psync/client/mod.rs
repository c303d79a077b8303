//! The replica's side of the handshake.
//!
//! ```text
//!                 +OK          +PONG           +OK              +OK | -ERR
//!   ┌──────┐     ┌──────┐     ┌──────────────┐     ┌─────────┐           ┌─────────┐
//!   │ Auth ├────▶│ Ping ├────▶│ Capabilities ├────▶│ Version ├──────────▶│  Psync  │◀─┐ \n  → KeepAlive
//!   └──────┘     └──────┘     └──────────────┘     └─────────┘           └─┬─────┬─┘──┘
//!   only with a                                    only when         +FULLRESYNC │
//!   user or password                               requested               │     │ +CONTINUE → Continue
//!                                                                          ▼     │
//!        any -ERROR: Refused            ┌─ \n → KeepAlive ──▶ ┌───────────────┐  │
//!        not a line of Redis: NotRedis  └──────────────────── │ PayloadHeader │  │
//!                                                             └────────┬──────┘  ▼
//!                                                         $… → Payload └───▶ ( Ended )
//! ```
//!
//! Valkey 8 and later, if `dual-channel-replication-enabled` is on, offer the snapshot over a connection of its own,
//! written by the forked child itself; snapshot and stream then arrive side by side. That takes three handshakes:
//!
//! ```text
//!   first connection    … Capabilities (dual-channel) ── Psync ──▶ +DUALCHANNELSYNC → TwoChannels ▶ ( Ended )
//!   second              Ping … Capabilities (rdb-channel) ── Sync ──▶ $ENDOFF… → Channel ── $EOF:… → Payload ▶ ( Ended )
//!   first, once more    Attach (set-rdb-client-id) ── Psync <replid> <offset + 1> ──▶ +CONTINUE → Continue ▶ ( Ended )
//! ```
//!
//! One command is sent at a time. This costs three round trips once; in return, every answer belongs to exactly one
//! command. Besides, servers refuse a `PSYNC` that arrives while they still owe an answer.
//!
//! The client never sends `listening-port` or `ip-address`: Sentinel reads both from the primary's `INFO`, and would
//! take us for a replica that can be promoted.

use std::collections::VecDeque;
use std::fmt;

pub use super::EofMark;
use super::Payload;
use crate::{Refusal, ReplId, refusal, resp, text};

/// Longest line of the handshake, in bytes. The servers' own replicas read answers into 1,024 bytes; errors of modules
/// and proxies are sometimes longer. A peer that sends a longer line is not answering a handshake.
pub const LINE_BYTES_MAX: usize = 4 * 1024;

/// Which part of a sync a connection is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Channel {
    /// Everything: the snapshot, then the stream.
    #[default]
    Whole,
    /// Everything, or only the stream if the server prefers two connections; then [`Event::TwoChannels`] follows.
    WholeOrStream,
    /// The snapshot.
    Snapshot,
    /// The stream that belongs to a snapshot of another connection. Used on the connection that got
    /// [`Event::TwoChannels`], with [`Options::resume`] at the byte after the snapshot's offset.
    Stream {
        /// The client number from [`Event::Channel`].
        snapshot_client: u64,
    },
}

/// What to request, and with which credentials.
#[derive(Clone, Default)]
pub struct Options {
    /// A history that we already hold, and the offset of the next byte wanted (the last one held, plus 1). Without it,
    /// or if the server no longer has that byte, the answer is a full resync.
    pub resume: Option<(ReplId, u64)>,
    /// ACL user; without one the password is that of the default user.
    pub username: Option<String>,
    /// Password.
    pub password: Option<String>,
    /// `REPLCONF version`: Valkey 9 sends its own RDB format only to a replica that claims at least its version. Redis
    /// answers an error, which is ignored.
    pub rdb_version: Option<String>,
    /// The part of the sync to request.
    pub channel: Channel,
}

/// A step of the handshake that was completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The server accepted credentials and capabilities; `PSYNC` is next in the output.
    Handshaken,
    /// The server is preparing the answer or the payload. Several keep-alives in a row may become one event.
    KeepAlive,
    /// A snapshot follows.
    FullResync {
        /// The history it belongs to.
        replid: ReplId,
        /// Offset of the last byte of the stream that the snapshot contains.
        offset: u64,
    },
    /// The server offers snapshot and stream side by side: request the snapshot over a second connection, then the
    /// stream over this one. The handshake has ended.
    TwoChannels,
    /// A snapshot follows over this connection. The stream, from `offset + 1` on, follows over the other one.
    Channel {
        /// The history it belongs to.
        replid: ReplId,
        /// Offset of the last byte of the stream that the snapshot contains.
        offset: u64,
        /// Names this connection when the other one requests the stream.
        client: u64,
    },
    /// The next byte is the first of the snapshot. The handshake has ended.
    Payload(Payload),
    /// The next byte is the first byte of the stream that was requested. The handshake has ended.
    Continue {
        /// The history from here on: the one requested, or the new id that the server gave it.
        replid: ReplId,
    },
}

/// Why the handshake failed. The connection can't be used any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The address is wrong: the process listening there does not answer like a server.
    #[error("this is not a Redis or Valkey server: it answered {received:?}{hint}")]
    NotRedis {
        /// The beginning of what it sent.
        received: String,
        /// What it might be, in parentheses, or empty.
        hint: &'static str,
    },
    /// As [`Error::NotRedis`], for a line without an end.
    #[error("this is not a Redis or Valkey server: it answered a line of more than {LINE_BYTES_MAX} bytes")]
    TooLong,
    /// It is a server, but its answer does not fit this command: a proxy, or a version unknown to us.
    #[error("unexpected answer of the server to {command}: {answer:?}")]
    Unexpected {
        /// The command that was sent.
        command: &'static str,
        /// The beginning of the answer.
        answer: String,
    },
    /// The server understood the command and refused it.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// The replica's side of the handshake.
///
/// ```
/// use remora_redis::psync::client::{Client, Event, Options};
/// let mut client = Client::new(Options::default());
/// assert_eq!(client.take_output(), b"*1\r\n$4\r\nPING\r\n");
/// client.handle_input(b"+PONG\r\n")?;
/// client.handle_input(b"+OK\r\n")?;
/// assert_eq!(client.poll_event(), Some(Event::Handshaken));
/// # Ok::<(), remora_redis::psync::client::Error>(())
/// ```
#[derive(Debug)]
pub struct Client {
    options: Options,
    step: Step,
    /// The line being received, without its line feed.
    line: Vec<u8>,
    output: Vec<u8>,
    events: VecDeque<Event>,
}

/// The answer that is expected next.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Auth,
    Ping,
    Capabilities,
    Version,
    Attach,
    Psync,
    Sync,
    PayloadHeader,
    Ended,
    Failed(Error),
}

impl Client {
    /// Starts the handshake; the first command is in the output.
    pub fn new(options: Options) -> Client {
        let first = match options.channel {
            Channel::Stream { .. } => Step::Attach,
            _ if options.has_credentials() => Step::Auth,
            _ => Step::Ping,
        };
        let mut client =
            Client { options, step: Step::Ended, line: Vec::new(), output: Vec::new(), events: VecDeque::new() };
        client.ask(first);
        client
    }

    /// The bytes to write to the server now; empty if none.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Takes bytes that were read, and returns how many of them belonged to the handshake. Fewer than given: the
    /// handshake has ended, and the rest is payload or stream. After an error, every call returns the same error.
    pub fn handle_input(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        let mut rest = bytes;
        while let Some((byte, after)) = rest.split_first() {
            match &self.step {
                Step::Ended => break,
                Step::Failed(error) => return Err(error.clone()),
                _ => self.handle_byte(*byte, rest).map_err(|error| self.fail(error))?,
            }
            rest = after;
        }
        Ok(bytes.len() - rest.len())
    }

    /// What has happened since the last call, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether the handshake has succeeded: what follows is payload or stream.
    pub fn is_ended(&self) -> bool {
        self.step == Step::Ended
    }

    /// Answers are lines of a few dozen bytes, so reading one byte at a time costs little, and it guarantees that
    /// nothing is consumed beyond the end of a line.
    fn handle_byte(&mut self, byte: u8, from_here: &[u8]) -> Result<(), Error> {
        if byte == b'\n' {
            let line = std::mem::take(&mut self.line);
            return self.handle_line(line.strip_suffix(b"\r").unwrap_or(&line));
        }
        if self.line.is_empty() && !b"+-$\r".contains(&byte) {
            let (received, hint) = refusal::guess(from_here);
            return Err(Error::NotRedis { received, hint });
        }
        if self.line.len() >= LINE_BYTES_MAX {
            return Err(Error::TooLong);
        }
        self.line.push(byte);
        Ok(())
    }

    fn handle_line(&mut self, line: &[u8]) -> Result<(), Error> {
        match line.split_first() {
            None => self.handle_keep_alive(),
            Some((b'-', text)) => self.handle_refusal(text)?,
            Some((b'$', text)) if self.step == Step::PayloadHeader => self.handle_payload_header(text, line)?,
            Some((b'$', text)) if self.step == Step::Sync => self.handle_channel(text, line)?,
            Some(_) => self.handle_answer(line)?,
        }
        Ok(())
    }

    fn handle_keep_alive(&mut self) {
        let waiting = matches!(self.step, Step::Psync | Step::Sync | Step::PayloadHeader);
        // Reported once: a server that only ever sends these must not fill our memory.
        if waiting && self.events.back() != Some(&Event::KeepAlive) {
            self.events.push_back(Event::KeepAlive);
        }
    }

    fn handle_refusal(&mut self, text: &[u8]) -> Result<(), Error> {
        let refusal = Refusal::new(self.step.command(), text);
        // Only Valkey from 8 on knows this option; for all others it makes no difference.
        if self.step == Step::Version && refusal.code() == "ERR" {
            self.handshaken();
            return Ok(());
        }
        Err(refusal.into())
    }

    fn handle_answer(&mut self, line: &[u8]) -> Result<(), Error> {
        match (&self.step, line) {
            (Step::Auth, b"+OK") => self.ask(Step::Ping),
            (Step::Ping, b"+PONG") => self.ask(Step::Capabilities),
            (Step::Capabilities, b"+OK") if self.options.rdb_version.is_some() => self.ask(Step::Version),
            (Step::Capabilities | Step::Version, b"+OK") => self.handshaken(),
            (Step::Attach, b"+OK") => self.handshaken(),
            (Step::Psync, _) => self.handle_psync_answer(line)?,
            _ => return Err(self.unexpected(line)),
        }
        Ok(())
    }

    fn handle_psync_answer(&mut self, line: &[u8]) -> Result<(), Error> {
        let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let unexpected = || self.unexpected(line);
        match words.as_slice() {
            [b"+FULLRESYNC", replid, offset] => {
                let replid = ReplId::parse(replid).map_err(|_| unexpected())?;
                let offset = text::offset(offset).ok_or_else(unexpected)?;
                self.events.push_back(Event::FullResync { replid, offset });
                self.step = Step::PayloadHeader;
            }
            [b"+CONTINUE", named @ ..] if named.len() <= 1 => {
                let (asked, _) = self.options.resume.ok_or_else(unexpected)?;
                let named = named.first().map(|replid| ReplId::parse(replid));
                let replid = named.unwrap_or(Ok(asked)).map_err(|_| unexpected())?;
                self.events.push_back(Event::Continue { replid });
                self.step = Step::Ended;
            }
            [b"+DUALCHANNELSYNC"] if self.options.channel == Channel::WholeOrStream => {
                self.events.push_back(Event::TwoChannels);
                self.step = Step::Ended;
            }
            _ => return Err(unexpected()),
        }
        Ok(())
    }

    /// `$ENDOFF:<offset> <replid> <database> <client id>`. The snapshot also contains the database in which the stream
    /// continues (`repl-stream-db`), and the servers read it there.
    fn handle_channel(&mut self, text: &[u8], line: &[u8]) -> Result<(), Error> {
        let unexpected = || self.unexpected(line);
        let text = text.strip_prefix(b"ENDOFF:").ok_or_else(unexpected)?;
        let words: Vec<&[u8]> = text.split(|byte| *byte == b' ').collect();
        let [offset, replid, _database, client] = words.as_slice() else { return Err(unexpected()) };
        let event = Event::Channel {
            replid: ReplId::parse(replid).map_err(|_| unexpected())?,
            offset: text::offset(offset).ok_or_else(unexpected)?,
            client: text::decimal_u64(client).ok_or_else(unexpected)?,
        };
        self.events.push_back(event);
        self.step = Step::PayloadHeader;
        Ok(())
    }

    fn handle_payload_header(&mut self, text: &[u8], line: &[u8]) -> Result<(), Error> {
        let payload = Payload::parse(text).ok_or_else(|| self.unexpected(line))?;
        self.events.push_back(Event::Payload(payload));
        self.step = Step::Ended;
        Ok(())
    }

    fn handshaken(&mut self) {
        self.events.push_back(Event::Handshaken);
        self.ask(if self.options.channel == Channel::Snapshot { Step::Sync } else { Step::Psync });
    }

    /// Queues the command of a step and expects its answer.
    fn ask(&mut self, step: Step) {
        let options = &self.options;
        let out = &mut self.output;
        let password = options.password.as_deref().unwrap_or_default();
        match &step {
            Step::Auth => match &options.username {
                Some(username) => resp::command(out, &["AUTH", username, password]),
                None => resp::command(out, &["AUTH", password]),
            },
            Step::Ping => resp::command(out, &["PING"]),
            Step::Capabilities => match options.channel {
                Channel::Snapshot => {
                    resp::command(out, &["REPLCONF", "capa", "eof", "rdb-only", "1", "rdb-channel", "1"]);
                }
                Channel::WholeOrStream => {
                    resp::command(out, &["REPLCONF", "capa", "eof", "capa", "psync2", "capa", "dual-channel"]);
                }
                Channel::Whole | Channel::Stream { .. } => {
                    resp::command(out, &["REPLCONF", "capa", "eof", "capa", "psync2"]);
                }
            },
            Step::Attach => {
                if let Channel::Stream { snapshot_client } = options.channel {
                    resp::command(out, &["REPLCONF", "set-rdb-client-id", &snapshot_client.to_string()]);
                }
            }
            Step::Sync => resp::command(out, &["SYNC"]),
            Step::Version => {
                let version = options.rdb_version.as_deref().unwrap_or_default();
                resp::command(out, &["REPLCONF", "version", version]);
            }
            Step::Psync => match options.resume {
                Some((replid, next)) => {
                    resp::command(out, &["PSYNC", &replid.to_string(), &next.to_string()]);
                }
                None => resp::command(out, &["PSYNC", "?", "-1"]),
            },
            Step::PayloadHeader | Step::Ended | Step::Failed(_) => {}
        }
        self.step = step;
    }

    fn unexpected(&self, line: &[u8]) -> Error {
        Error::Unexpected { command: self.step.command(), answer: text::excerpt(line) }
    }

    fn fail(&mut self, error: Error) -> Error {
        self.step = Step::Failed(error.clone());
        error
    }
}

impl Options {
    fn has_credentials(&self) -> bool {
        self.username.is_some() || self.password.is_some()
    }
}

/// Does not print the password.
impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("resume", &self.resume)
            .field("username", &self.username)
            .field("password", &self.password.as_ref().map(|_| "(hidden)"))
            .field("rdb_version", &self.rdb_version)
            .field("channel", &self.channel)
            .finish()
    }
}

impl Step {
    /// The command that the server is answering.
    fn command(&self) -> &'static str {
        match self {
            Step::Auth => "AUTH",
            Step::Ping => "PING",
            Step::Capabilities | Step::Version | Step::Attach => "REPLCONF",
            Step::Sync => "SYNC",
            Step::Psync | Step::PayloadHeader | Step::Ended | Step::Failed(_) => "PSYNC",
        }
    }
}

/// Appends `REPLCONF ACK <offset>`; `offset` is that of the last byte of the stream that we hold.
///
/// Send it every second, as replicas do. After a full sync the primary sends no stream before the first
/// acknowledgement, and ignores one that arrives before it has reaped its child.
pub fn ack(out: &mut Vec<u8>, offset: u64) {
    resp::command(out, &["REPLCONF", "ACK", &offset.to_string()]);
}

#[cfg(test)]
mod tests;
