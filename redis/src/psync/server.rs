//! The primary's side of the handshake: what a real server meets when it is told `REPLICAOF` to us.
//!
//! ```text
//!    PING, AUTH, REPLCONF               \n by keep_alive()             \n by keep_alive()
//!           ┌───┐                            ┌───┐                          ┌───┐
//!           ▼   │          PSYNC             ▼   │      full_resync()       ▼   │      payload()
//!        ┌────────┐     → Event::Psync     ┌───────┐                    ┌──────────┐               ┌───────────┐
//!  ─────▶│Talking ├───────────────────────▶│ Asked ├───────────────────▶│ Promised ├──────────────▶│ Streaming │◀─┐
//!        └────────┘                        └─┬───┬─┘                    └────┬─────┘               └───────┬───┘  │
//!             ▲    refuse(), postpone()      │   │      resume()             │                       ▲     └──────┘
//!             └──────────────────────────────┘   └───────────────────────────┼───────────────────────┘  REPLCONF ACK
//!             ▲    refuse()                                                  │                          → Event::Ack
//!             └──────────────────────────────────────────────────────────────┘
//! ```
//!
//! From `Streaming` on nothing may be written but payload and stream: each byte of ours would move the replica's offset.
//! The driver writes both; the machine goes on reading, and answers no more.
//!
//! The options of `REPLCONF` follow the servers: an unknown *capability* is passed over, an unknown *option* is an error,
//! which replicas call "non critical" and pass over too. What would change the payload (`rdb-only`, `rdb-filter-only`,
//! `rdb-channel` …) is refused, because to say `+OK` would be to promise it.

use std::collections::VecDeque;
use std::fmt;

use super::Payload;
use crate::resp::{self, CommandDecoder, Limits};
use crate::{ReplId, text};

/// Most bytes of answers that may wait to be written. A handshake needs some two hundred; a peer that asks on without
/// reading is cut off.
pub const OUTPUT_BYTES_MAX: usize = 64 * 1024;

/// Longest text kept of what a replica tells about itself. `ip-address` is the longest: the servers allow 256 bytes.
const FACT_BYTES_MAX: usize = 256;

/// Most capabilities kept; the servers of today claim four.
const CAPABILITIES_MAX: usize = 16;

/// The first byte of a TLS connection: a handshake record.
const TLS_HANDSHAKE: u8 = 0x16;

/// How the machine treats its replica.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// What the replica must prove before the machine answers anything else.
    pub access: Access,
}

/// What a replica must prove.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Access {
    /// Nothing. Any `AUTH` is accepted, so that a replica may keep its `masterauth` setting.
    #[default]
    Open,
    /// The password of one user.
    User {
        /// The user's name; `None` is the default user, whose name an `AUTH` may leave out.
        name: Option<String>,
        /// The user's password.
        password: String,
    },
    /// A secret, under any user name or none. A replica with a `masteruser` setting sends that name with each password.
    Secret(String),
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The replica asks for data: answer with [`Server::full_resync`], [`Server::resume`], [`Server::postpone`] or
    /// [`Server::refuse`].
    Psync {
        /// The history it holds; `None` when it holds none.
        replid: Option<ReplId>,
        /// The next byte it wants; -1 when it holds nothing.
        offset: i64,
    },
    /// The replica holds the stream up to here. Several in a row may be told as one, the last.
    Ack {
        /// Last byte applied.
        offset: u64,
        /// Last byte in its append-only file, where it has one.
        aof: Option<u64>,
    },
}

/// What the replica told about itself before it asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerFacts {
    /// It can read a payload whose end is a mark.
    pub eof: bool,
    /// It understands `+CONTINUE <replid>`.
    pub psync2: bool,
    /// Other capabilities it claims, as it spells them: `dual-channel`, `rdb-channel-repl`, `skip-rdb-checksum` …
    pub capabilities: Vec<String>,
    /// Port it serves clients on.
    pub listening_port: Option<u16>,
    /// Address it wishes to be known by (`replica-announce-ip`).
    pub ip_address: Option<String>,
    /// Its version; Valkey says it, Redis doesn't.
    pub version: Option<String>,
}

/// The replica, or whoever it is, is at fault. The connection is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It broke the wire format.
    #[error(transparent)]
    Resp(#[from] resp::Error),
    /// It has `tls-replication yes`, and this connection is a plain one.
    #[error("the replica speaks TLS (tls-replication yes): give the listener a certificate, or set that to no")]
    Tls,
    /// It sent a command where a replica only acknowledges.
    #[error("the peer sent {command:?} after PSYNC: it is not a replica")]
    OutOfTurn {
        /// The command's name, or its beginning.
        command: String,
    },
    /// It asks and does not read the answers.
    #[error("the peer leaves more than {OUTPUT_BYTES_MAX} bytes of answers unread")]
    Flood,
}

/// The machine. Feed it, drain it, ask it, and answer its one question.
///
/// ```
/// use remora_redis::psync::server::{Event, Options, Server};
/// let mut server = Server::new(Options::default());
/// server.handle_input(b"PING\r\nPSYNC ? -1\r\n")?;
/// assert_eq!(server.poll_event(), Some(Event::Psync { replid: None, offset: -1 }));
/// server.postpone("no snapshot yet");
/// assert_eq!(server.take_output(), b"+PONG\r\n-NOMASTERLINK no snapshot yet\r\n");
/// # Ok::<(), remora_redis::psync::server::Error>(())
/// ```
#[derive(Debug)]
pub struct Server {
    options: Options,
    step: Step,
    authenticated: bool,
    refused_logins: u32,
    decoder: CommandDecoder,
    /// Whether a first byte has come.
    begun: bool,
    output: Vec<u8>,
    events: VecDeque<Event>,
    peer: PeerFacts,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Talking,
    /// `PSYNC` waits for its answer.
    Asked,
    /// `+FULLRESYNC` is said, the payload has not begun.
    Promised,
    Streaming,
    Failed(Error),
}

/// What goes back for one command: a status, or an error with its code.
type Answer = Result<&'static str, String>;

impl Server {
    /// Begins, silently: the replica speaks first.
    pub fn new(options: Options) -> Server {
        Server {
            authenticated: options.access == Access::Open,
            refused_logins: 0,
            options,
            step: Step::Talking,
            decoder: CommandDecoder::new(Limits::HANDSHAKE),
            begun: false,
            output: Vec::new(),
            events: VecDeque::new(),
            peer: PeerFacts::default(),
        }
    }

    /// The bytes to write to the replica now; empty if none. After [`Server::payload`] or [`Server::resume`] they go out
    /// before the first byte of payload or stream.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Takes what was read. After an error there is only that error.
    pub fn handle_input(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if let Step::Failed(error) = &self.step {
            return Err(error.clone());
        }
        let outcome = self.read(bytes);
        if let Err(error) = &outcome {
            self.step = Step::Failed(error.clone());
        }
        outcome
    }

    /// What happened since the last time, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What the replica told about itself so far.
    pub fn peer(&self) -> &PeerFacts {
        &self.peer
    }

    /// Whether the replica has proved what [`Options::access`] asks for.
    pub fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// How many times the replica sent `AUTH` with a wrong user or password.
    pub fn refused_logins(&self) -> u32 {
        self.refused_logins
    }

    /// Answers `PSYNC` with a promise: a snapshot of this history, which contains the stream up to and with `offset`.
    ///
    /// # Panics
    /// If no `PSYNC` waits for an answer.
    pub fn full_resync(&mut self, replid: &ReplId, offset: u64) {
        if self.answering("full_resync", &[Step::Asked]) {
            self.say(&format!("+FULLRESYNC {replid} {offset}"));
            self.step = Step::Promised;
        }
    }

    /// Keeps the promise: the next byte that the driver writes is the payload's first.
    ///
    /// # Panics
    /// If there is no promise to keep, or the payload ends with a mark and the replica can't read that
    /// ([`PeerFacts::eof`]).
    pub fn payload(&mut self, payload: &Payload) {
        if self.answering("payload", &[Step::Promised]) {
            let readable = self.peer.eof || matches!(payload, Payload::Length(_));
            assert!(readable, "the replica did not say capa eof: it needs a payload of known length");
            payload.encode(&mut self.output);
            self.step = Step::Streaming;
        }
    }

    /// Answers `PSYNC` with the stream: the next byte that the driver writes is the one asked for.
    ///
    /// # Panics
    /// If no `PSYNC` waits for an answer.
    pub fn resume(&mut self, replid: &ReplId) {
        if self.answering("resume", &[Step::Asked]) {
            match self.peer.psync2 {
                true => self.say(&format!("+CONTINUE {replid}")),
                false => self.say("+CONTINUE"),
            }
            self.step = Step::Streaming;
        }
    }

    /// Shows the replica that we live, while it waits for an answer or a payload. Does nothing at any other time, so that a
    /// timer may call it blindly; nor while other bytes wait to be written, which show as much.
    pub fn keep_alive(&mut self) {
        let waiting = matches!(self.step, Step::Asked | Step::Promised);
        if waiting && self.output.is_empty() {
            self.output.push(b'\n');
        }
    }

    /// Answers `PSYNC` (or breaks the promise) with an error. The replica gives up this connection and begins anew.
    ///
    /// # Panics
    /// If nothing waits for an answer.
    pub fn refuse(&mut self, text: &str) {
        if self.answering("refuse", &[Step::Asked, Step::Promised]) {
            self.say(&format!("-ERR {text}"));
            self.step = Step::Talking;
        }
    }

    /// Answers `PSYNC` with "not now": the replica tries again in a second, and does not fall back to `SYNC`, as it does
    /// after [`Server::refuse`].
    ///
    /// # Panics
    /// If no `PSYNC` waits for an answer.
    pub fn postpone(&mut self, text: &str) {
        if self.answering("postpone", &[Step::Asked]) {
            // The code that a replica without a link gives, hence the one that all versions take for temporary.
            self.say(&format!("-NOMASTERLINK {text}"));
            self.step = Step::Talking;
        }
    }

    /// Whether an answer may be given now. False after the peer's failure, which the driver may not have seen yet.
    fn answering(&self, call: &str, allowed: &[Step]) -> bool {
        if let Step::Failed(_) = self.step {
            return false;
        }
        assert!(allowed.contains(&self.step), "{call}() answers nothing at step {:?}", self.step);
        true
    }

    fn read(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if !self.begun && bytes.first() == Some(&TLS_HANDSHAKE) {
            return Err(Error::Tls);
        }
        self.begun |= !bytes.is_empty();
        self.decoder.feed(bytes);
        while let Some(words) = self.decoder.next_command()? {
            self.handle_command(&words)?;
            if self.output.len() > OUTPUT_BYTES_MAX {
                return Err(Error::Flood);
            }
        }
        Ok(())
    }

    fn handle_command(&mut self, words: &[Vec<u8>]) -> Result<(), Error> {
        let Some((name, args)) = words.split_first() else { return Ok(()) };
        if self.step != Step::Talking {
            return self.handle_late(name, args);
        }
        let is = |wanted: &str| name.eq_ignore_ascii_case(wanted.as_bytes());
        let answer = match args {
            _ if is("AUTH") => self.handle_auth(args),
            _ if !self.authenticated => Err("NOAUTH Authentication required.".into()),
            _ if is("PING") => Ok("PONG"),
            [option, ..] if is("REPLCONF") && option.eq_ignore_ascii_case(b"ack") => return Ok(()),
            _ if is("REPLCONF") => self.handle_replconf(args),
            [replid, offset, rest @ ..] if is("PSYNC") && rest.len() <= 1 => {
                match self.handle_psync(replid, offset, rest) {
                    Ok(()) => return Ok(()),
                    Err(error) => Err(error),
                }
            }
            _ if is("SYNC") => Err("ERR only PSYNC is spoken here".into()),
            _ => Err(format!("ERR unknown command '{}'", text::excerpt(name))),
        };
        match answer {
            Ok(status) => self.say(&format!("+{status}")),
            Err(error) => self.say(&format!("-{error}")),
        }
        Ok(())
    }

    /// After `PSYNC` replicas only acknowledge. Other options of `REPLCONF` are passed over: an answer would land in the
    /// middle of the stream.
    fn handle_late(&mut self, name: &[u8], args: &[Vec<u8>]) -> Result<(), Error> {
        if !name.eq_ignore_ascii_case(b"REPLCONF") {
            return Err(Error::OutOfTurn { command: text::excerpt(name) });
        }
        let ack = parse_ack(args).filter(|_| self.step == Step::Streaming);
        if let Some(event) = ack {
            self.replace_or_push(event);
        }
        Ok(())
    }

    /// An acknowledgement contains all earlier ones, so the queue never holds two in a row.
    fn replace_or_push(&mut self, event: Event) {
        match self.events.back_mut() {
            Some(last @ Event::Ack { .. }) => *last = event,
            _ => self.events.push_back(event),
        }
    }

    fn handle_auth(&mut self, args: &[Vec<u8>]) -> Answer {
        let (user, password) = match args {
            [password] => (&b"default"[..], password),
            [user, password] => (user.as_slice(), password),
            _ => return Err("ERR wrong number of arguments for 'auth' command".into()),
        };
        let right = match &self.options.access {
            Access::Open => return Ok("OK"),
            Access::User { name, password: wanted } => {
                let name = name.as_deref().unwrap_or("default").as_bytes();
                // Both are always compared, so the time does not tell which of them was wrong.
                same(user, name) & same(password, wanted.as_bytes())
            }
            Access::Secret(wanted) => same(password, wanted.as_bytes()),
        };
        if !right {
            self.refused_logins = self.refused_logins.saturating_add(1);
            return Err("WRONGPASS invalid username-password pair or user is disabled.".into());
        }
        self.authenticated = true;
        Ok("OK")
    }

    fn handle_replconf(&mut self, args: &[Vec<u8>]) -> Answer {
        let (pairs, []) = args.as_chunks::<2>() else { return Err("ERR syntax error".into()) };
        for [option, value] in pairs {
            self.handle_option(&option.to_ascii_lowercase(), value)?;
        }
        Ok("OK")
    }

    fn handle_option(&mut self, option: &[u8], value: &[u8]) -> Result<(), String> {
        match option {
            b"listening-port" => {
                let port = text::decimal_u64(value).and_then(|port| u16::try_from(port).ok());
                self.peer.listening_port = Some(port.ok_or("ERR value is not an integer or out of range")?);
            }
            b"ip-address" => self.peer.ip_address = Some(fact(value)?),
            b"version" => self.peer.version = Some(fact(value)?),
            b"capa" => self.handle_capability(value),
            // A question to a replica, which we are not.
            b"getack" => {}
            b"rdb-only" | b"rdb-channel" if value == b"0" => {}
            b"rdb-only" | b"rdb-channel" | b"rdb-filter-only" | b"set-rdb-client-id" | b"main-ch-client-id" => {
                return Err(format!("ERR REPLCONF {} is not supported here", text::excerpt(option)));
            }
            b"set-cluster-node-id" => return Err("ERR This instance has cluster support disabled".into()),
            _ => return Err(format!("ERR Unrecognized REPLCONF option: {}", text::excerpt(option))),
        }
        Ok(())
    }

    fn handle_capability(&mut self, name: &[u8]) {
        match name.to_ascii_lowercase().as_slice() {
            b"eof" => self.peer.eof = true,
            b"psync2" => self.peer.psync2 = true,
            _ => {
                let room = self.peer.capabilities.len() < CAPABILITIES_MAX;
                if let (true, Ok(name)) = (room, fact(name)) {
                    self.peer.capabilities.push(name);
                }
            }
        }
    }

    fn handle_psync(&mut self, replid: &[u8], offset: &[u8], rest: &[Vec<u8>]) -> Result<(), String> {
        if !rest.is_empty() {
            return Err("ERR PSYNC FAILOVER: there is no server here that could take over".into());
        }
        let offset = text::decimal_i64(offset).ok_or("ERR value is not an integer or out of range")?;
        // As to a server, a name that is no name is one that we don't know: a full resync.
        let replid = ReplId::parse(replid).ok();
        self.events.push_back(Event::Psync { replid, offset });
        self.step = Step::Asked;
        Ok(())
    }

    fn say(&mut self, line: &str) {
        self.output.extend(text::one_line(line.as_bytes()));
        self.output.extend_from_slice(b"\r\n");
    }
}

/// Without passwords and secrets.
impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Access::Open => f.write_str("Open"),
            Access::User { name, .. } => f.debug_struct("User").field("name", name).finish_non_exhaustive(),
            Access::Secret(_) => f.write_str("Secret(…)"),
        }
    }
}

/// `ack <offset>`, or `ack <offset> fack <aof offset>`.
fn parse_ack(args: &[Vec<u8>]) -> Option<Event> {
    let (pairs, _) = args.as_chunks::<2>();
    let number = |wanted: &[u8]| {
        let [_, value] = pairs.iter().find(|[option, _]| option.eq_ignore_ascii_case(wanted))?;
        text::decimal_u64(value)
    };
    Some(Event::Ack { offset: number(b"ack")?, aof: number(b"fack") })
}

/// Something short that a replica says about itself.
fn fact(value: &[u8]) -> Result<String, String> {
    if value.len() > FACT_BYTES_MAX {
        return Err(format!("ERR REPLCONF value is too long: {} bytes", value.len()));
    }
    Ok(String::from_utf8_lossy(value).into_owned())
}

/// Compares in a time that depends on the lengths only, not on where the first difference is.
fn same(given: &[u8], wanted: &[u8]) -> bool {
    let differences = given.iter().zip(wanted).fold(0, |all, (a, b)| all | (a ^ b));
    given.len() == wanted.len() && std::hint::black_box(differences) == 0
}

#[cfg(test)]
mod tests;
