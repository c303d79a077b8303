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

use super::{MARK_BYTES, Payload};
use crate::info;
use crate::resp;
use crate::{Refusal, ReplId};

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
            let (received, hint) = resp::guess(from_here);
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
                let offset = info::offset(offset).ok_or_else(unexpected)?;
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
            offset: info::offset(offset).ok_or_else(unexpected)?,
            client: info::decimal_u64(client).ok_or_else(unexpected)?,
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
        Error::Unexpected { command: self.step.command(), answer: info::excerpt(line) }
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

// Detects the end of a payload of unknown length.

/// Compares the last 40 bytes received with the mark that `$EOF:` announced.
///
/// The primary sends nothing after the mark until it has received an acknowledgement. So it is enough to look at the
/// end of what has arrived, as the servers do: no chunk contains the mark *and* something after it. The payload can
/// therefore go from the socket to its final place without being searched.
#[derive(Debug, Clone)]
pub struct EofMark {
    mark: [u8; MARK_BYTES],
    /// The last bytes received, right-aligned; zeros where none were received.
    last: [u8; MARK_BYTES],
    /// How many bytes of `last` were received.
    received: usize,
}

impl EofMark {
    /// Starts before the first byte of the payload.
    pub fn new(mark: [u8; MARK_BYTES]) -> EofMark {
        EofMark { mark, last: [0; MARK_BYTES], received: 0 }
    }

    /// Takes the end of a chunk of `len` bytes: `tail` is its last `min(40, len)` bytes (more are allowed).
    ///
    /// True if the last 40 bytes received are the mark: the payload ended before them.
    pub fn observe(&mut self, tail: &[u8], len: usize) -> bool {
        debug_assert!(tail.len() >= len.min(MARK_BYTES), "the tail is shorter than the chunk's end");
        let skip = tail.len().saturating_sub(len.min(MARK_BYTES));
        let fresh = tail.get(skip..).unwrap_or_default();
        self.last.rotate_left(fresh.len());
        let kept = MARK_BYTES - fresh.len();
        if let Some(place) = self.last.get_mut(kept..) {
            place.copy_from_slice(fresh);
        }
        self.received = (self.received + fresh.len()).min(MARK_BYTES);
        self.received == MARK_BYTES && self.last == self.mark
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    const REPLID: &str = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
    const OTHER: &str = "0123456789abcdef0123456789abcdef01234567";
    const MARK: &str = "ffffffffffffffffffffffffffffffffffffffff";

    fn replid(text: &str) -> ReplId {
        text.parse().unwrap()
    }

    fn asked(client: &mut Client) -> String {
        let mut decoder = resp::CommandDecoder::new(resp::Limits::HANDSHAKE);
        decoder.feed(&client.take_output());
        let mut commands = Vec::new();
        while let Some(words) = decoder.next_command().unwrap() {
            let words: Vec<String> = words.into_iter().map(|word| String::from_utf8(word).unwrap()).collect();
            commands.push(words.join(" "));
        }
        commands.join(" | ")
    }

    fn events(client: &mut Client) -> Vec<Event> {
        std::iter::from_fn(|| client.poll_event()).collect()
    }

    /// A client that expects the answer to PSYNC.
    fn at_psync(options: Options) -> Client {
        let mut client = Client::new(options);
        client.handle_input(b"+PONG\r\n").unwrap();
        client.handle_input(b"+OK\r\n").unwrap();
        client.take_output();
        assert_eq!(events(&mut client), [Event::Handshaken]);
        client
    }

    fn resuming() -> Options {
        Options { resume: Some((replid(REPLID), 101)), ..Options::default() }
    }

    #[test]
    fn the_commands_come_one_at_a_time_and_never_name_a_port() {
        let mut client = Client::new(Options {
            username: Some("remora".into()),
            password: Some("secret word".into()),
            rdb_version: Some("9.1.0".into()),
            ..resuming()
        });
        assert_eq!(asked(&mut client), "AUTH remora secret word");
        client.handle_input(b"+OK\r\n").unwrap();
        assert_eq!(asked(&mut client), "PING");
        client.handle_input(b"+PONG\r\n").unwrap();
        assert_eq!(asked(&mut client), "REPLCONF capa eof capa psync2");
        client.handle_input(b"+OK\r\n").unwrap();
        assert_eq!(asked(&mut client), "REPLCONF version 9.1.0");
        assert_eq!(events(&mut client), []);
        client.handle_input(b"+OK\r\n").unwrap();
        assert_eq!(events(&mut client), [Event::Handshaken]);
        assert_eq!(asked(&mut client), format!("PSYNC {REPLID} 101"));
    }

    #[test]
    fn a_password_alone_is_that_of_the_default_user() {
        let mut client = Client::new(Options { password: Some("p".into()), ..Options::default() });
        assert_eq!(asked(&mut client), "AUTH p");
        let mut client = Client::new(Options { username: Some("u".into()), ..Options::default() });
        assert_eq!(asked(&mut client), "AUTH u ");
    }

    #[test]
    fn a_server_that_does_not_know_versions_is_asked_all_the_same() {
        let mut client = Client::new(Options { rdb_version: Some("9.1.0".into()), ..Options::default() });
        client.handle_input(b"+PONG\r\n+OK\r\n").unwrap();
        client.take_output();
        client.handle_input(b"-ERR Unrecognized REPLCONF option: version\r\n").unwrap();
        assert_eq!(events(&mut client), [Event::Handshaken]);
        assert_eq!(asked(&mut client), "PSYNC ? -1");
    }

    #[test]
    fn a_full_resync_ends_at_the_first_byte_of_the_payload() {
        let wire = format!("\n\n+FULLRESYNC {REPLID} 100\r\n\n\n$EOF:{MARK}\r\n");
        let sent = format!("{wire}\n\nREDIS0011");
        let mut client = at_psync(Options::default());
        assert_eq!(client.handle_input(sent.as_bytes()), Ok(wire.len()));
        assert_eq!(
            events(&mut client),
            [
                Event::KeepAlive,
                Event::FullResync { replid: replid(REPLID), offset: 100 },
                Event::KeepAlive,
                Event::Payload(Payload::Mark(MARK.as_bytes().try_into().unwrap())),
            ]
        );
        assert_eq!(client.handle_input(b"REDIS"), Ok(0));
        assert!(client.is_ended());
    }

    #[test]
    fn a_payload_of_known_length_is_understood() {
        let mut client = at_psync(Options::default());
        let wire = format!("+FULLRESYNC {REPLID} 0\r\n$18446744073709551615\r\n");
        assert_eq!(client.handle_input(wire.as_bytes()), Ok(wire.len()));
        assert_eq!(events(&mut client).last(), Some(&Event::Payload(Payload::Length(u64::MAX))));
    }

    #[test]
    fn an_offset_that_has_no_next_one_is_refused() {
        for (offset, is_valid) in [(crate::MAX_OFFSET, true), (crate::MAX_OFFSET + 1, false), (u64::MAX, false)] {
            let mut client = at_psync(Options::default());
            let handled = client.handle_input(format!("+FULLRESYNC {REPLID} {offset}\r\n").as_bytes());
            assert_eq!(handled.is_ok(), is_valid, "{handled:?}");

            let mut channel = Client::new(Options { channel: Channel::Snapshot, ..Options::default() });
            channel.handle_input(b"+PONG\r\n+OK\r\n").unwrap();
            let handled = channel.handle_input(format!("$ENDOFF:{offset} {REPLID} 0 77\r\n").as_bytes());
            assert_eq!(handled.is_ok(), is_valid, "{handled:?}");
        }
    }

    #[test]
    fn a_partial_resync_ends_at_the_first_byte_of_the_stream() {
        for (answer, named) in [("+CONTINUE\r\n".to_owned(), REPLID), (format!("+CONTINUE {OTHER}\r\n"), OTHER)] {
            let mut client = at_psync(resuming());
            let sent = format!("{answer}*1\r\n$4\r\nPING\r\n");
            assert_eq!(client.handle_input(sent.as_bytes()), Ok(answer.len()));
            assert_eq!(events(&mut client), [Event::Continue { replid: replid(named) }]);
        }
    }

    #[test]
    fn a_refusal_at_any_step_names_the_command_and_stays() {
        let mut client = Client::new(Options::default());
        let refused = client.handle_input(b"-NOAUTH Authentication required.\r\n");
        assert_eq!(refused, Err(Refusal::new("PING", b"NOAUTH Authentication required.").into()));
        assert_eq!(client.handle_input(b"+PONG\r\n"), refused);

        let mut client = at_psync(Options::default());
        let refused = client.handle_input(b"-NOMASTERLINK Can't SYNC while not connected with my master\r\n");
        let text = b"NOMASTERLINK Can't SYNC while not connected with my master";
        assert_eq!(refused, Err(Refusal::new("PSYNC", text).into()));

        // The fork failed after the server had promised a snapshot.
        let mut client = at_psync(Options::default());
        client.handle_input(format!("+FULLRESYNC {REPLID} 1\r\n").as_bytes()).unwrap();
        let refused = client.handle_input(b"-ERR BGSAVE failed, replication can't continue\r\n");
        let text = b"ERR BGSAVE failed, replication can't continue";
        assert_eq!(refused, Err(Refusal::new("PSYNC", text).into()));
    }

    #[test]
    fn a_peer_that_is_not_a_redis_server_is_detected_at_once() {
        let answered = |bytes: &[u8]| Client::new(Options::default()).handle_input(bytes).unwrap_err().to_string();
        assert!(answered(b"HTTP/1.1 400 Bad Request\r\n").contains("it is a web server"));
        assert!(answered(b"\x15\x03\x03\x00\x02").contains("it speaks TLS"));
        assert!(answered(b"SSH-2.0-OpenSSH_9.2").contains("secure shell"));
        assert!(answered(b"220 smtp.example").contains("not a Redis or Valkey server"));
        assert!(answered(&[b'+'; 5000]).contains("more than 4096 bytes"));
    }

    #[test]
    fn an_answer_that_does_not_fit_is_quoted() {
        for (options, answer) in [
            (Options::default(), "+CONTINUE"),
            (resuming(), "+CONTINUE nonsense"),
            (Options::default(), "+FULLRESYNC"),
            (Options::default(), "+FULLRESYNC nonsense 1"),
            (Options::default(), "+DUALCHANNELSYNC"),
            (Options::default(), "+RDBCHANNELSYNC 7"),
            (Options::default(), "$100"),
        ] {
            let mut client = at_psync(options);
            let error = client.handle_input(format!("{answer}\r\n").as_bytes()).unwrap_err();
            assert_eq!(error, Error::Unexpected { command: "PSYNC", answer: answer.into() });
        }
        for header in ["$", "$-1", "$EOF:short", "$1x"] {
            let mut client = at_psync(Options::default());
            let wire = format!("+FULLRESYNC {REPLID} 1\r\n{header}\r\n");
            assert!(matches!(client.handle_input(wire.as_bytes()), Err(Error::Unexpected { .. })), "{header}");
        }
    }

    #[test]
    fn a_sync_over_two_connections_takes_three_handshakes() {
        let mut first = Client::new(Options { channel: Channel::WholeOrStream, ..Options::default() });
        first.handle_input(b"+PONG\r\n").unwrap();
        assert_eq!(asked(&mut first), "PING | REPLCONF capa eof capa psync2 capa dual-channel");
        first.handle_input(b"+OK\r\n+DUALCHANNELSYNC\r\n").unwrap();
        assert_eq!(events(&mut first), [Event::Handshaken, Event::TwoChannels]);
        assert!(first.is_ended());

        let version = Some("9.1.0".into());
        let mut second =
            Client::new(Options { channel: Channel::Snapshot, rdb_version: version, ..Options::default() });
        second.handle_input(b"+PONG\r\n+OK\r\n+OK\r\n").unwrap();
        let commands = "PING | REPLCONF capa eof rdb-only 1 rdb-channel 1 | REPLCONF version 9.1.0 | SYNC";
        assert_eq!(asked(&mut second), commands);
        let wire = format!("\n$ENDOFF:100 {REPLID} -1 77\r\n\n$EOF:{MARK}\r\n");
        assert_eq!(second.handle_input(format!("{wire}REDIS").as_bytes()), Ok(wire.len()));
        assert_eq!(
            events(&mut second)[1..],
            [
                Event::KeepAlive,
                Event::Channel { replid: replid(REPLID), offset: 100, client: 77 },
                Event::KeepAlive,
                Event::Payload(Payload::Mark(MARK.as_bytes().try_into().unwrap())),
            ]
        );

        let mut again = Client::new(Options { channel: Channel::Stream { snapshot_client: 77 }, ..resuming() });
        again.handle_input(b"+OK\r\n").unwrap();
        assert_eq!(asked(&mut again), format!("REPLCONF set-rdb-client-id 77 | PSYNC {REPLID} 101"));
        assert_eq!(again.handle_input(b"+CONTINUE\r\n*1").unwrap(), 11);
        assert_eq!(events(&mut again), [Event::Handshaken, Event::Continue { replid: replid(REPLID) }]);
    }

    #[test]
    fn a_second_channel_that_answers_nonsense_is_quoted() {
        for answer in ["$ENDOFF:", "$ENDOFF:1 x 0 7", "$ENDOFF:x 8 0 7", "$EOF:", "+OK"] {
            let mut client = Client::new(Options { channel: Channel::Snapshot, ..Options::default() });
            client.handle_input(b"+PONG\r\n+OK\r\n").unwrap();
            let error = client.handle_input(format!("{answer}\r\n").as_bytes()).unwrap_err();
            assert_eq!(error, Error::Unexpected { command: "SYNC", answer: answer.into() });
        }
    }

    #[test]
    fn the_password_is_not_in_the_debug_text() {
        let client = Client::new(Options { password: Some("hunter2".into()), ..Options::default() });
        assert!(!format!("{:?}", client.options).contains("hunter2"));
    }

    #[test]
    fn an_acknowledgement_is_a_command() {
        let mut out = Vec::new();
        ack(&mut out, 42);
        assert_eq!(out, b"*3\r\n$8\r\nREPLCONF\r\n$3\r\nACK\r\n$2\r\n42\r\n");
    }

    const PAYLOAD_MARK: [u8; MARK_BYTES] = *b"0123456789abcdef0123456789abcdef01234567";

    fn tail(chunk: &[u8]) -> &[u8] {
        &chunk[chunk.len().saturating_sub(MARK_BYTES)..]
    }

    #[test]
    fn a_payload_shorter_than_the_mark_is_not_taken_for_one() {
        // A mark of zeros would equal the initial state.
        let mut watch = EofMark::new([0; MARK_BYTES]);
        assert!(!watch.observe(&[0; 39], 39));
        assert!(watch.observe(&[0], 1));
    }

    #[test]
    fn a_mark_in_the_middle_of_the_payload_is_content() {
        let mut watch = EofMark::new(PAYLOAD_MARK);
        let chunk = [&PAYLOAD_MARK[..], b"more"].concat();
        assert!(!watch.observe(tail(&chunk), chunk.len()));
        assert!(watch.observe(&PAYLOAD_MARK, MARK_BYTES));
    }

    proptest! {
        #[test]
        fn the_end_is_found_wherever_the_payload_is_cut(body in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..100) {
            let sent = [&body[..], &PAYLOAD_MARK].concat();
            let mut watch = EofMark::new(PAYLOAD_MARK);
            let pieces = sent.len().div_ceil(piece);
            for (number, chunk) in sent.chunks(piece).enumerate() {
                prop_assert_eq!(watch.observe(tail(chunk), chunk.len()), number + 1 == pieces);
            }
        }
    }
}
