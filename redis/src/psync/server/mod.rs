//! The primary's side of the handshake: what a server meets when `REPLICAOF` points it at this process.
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
//! From `Streaming` on, only payload and stream may be written: any other byte would move the replica's offset.
//! The driver writes both. The machine continues to read and sends no more answers.
//!
//! The options of `REPLCONF` follow the servers. An unknown *capability* is ignored. An unknown *option* is an error,
//! which replicas call "non critical" and ignore. Options that would change the payload (`rdb-only`, `rdb-filter-only`,
//! `rdb-channel` …) are refused, because `+OK` would promise the change.

use std::collections::VecDeque;
use std::fmt;

use super::Payload;
use crate::resp::{self, CommandDecoder, Limits};
use crate::{ReplId, text};

/// Limit on the bytes of answers that wait to be written. A handshake needs about two hundred bytes. A peer that keeps
/// sending commands without reading the answers is disconnected.
pub const OUTPUT_BYTES_MAX: usize = 64 * 1024;

/// Limit on the length of a text that the replica sends about itself. `ip-address` is the longest: the servers allow
/// 256 bytes.
const FACT_BYTES_MAX: usize = 256;

/// Limit on the number of capabilities that are kept. Current servers send four.
const CAPABILITIES_MAX: usize = 16;

/// The first byte of a TLS connection: a handshake record.
const TLS_HANDSHAKE: u8 = 0x16;

/// How the machine treats its replica.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// What the replica must prove before the machine answers other commands.
    pub access: Access,
}

/// What a replica must prove.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Access {
    /// Nothing. Any `AUTH` is accepted, so a replica can keep its `masterauth` setting.
    #[default]
    Open,
    /// The password of one user.
    User {
        /// The user's name. `None` is the default user, whose name can be omitted in `AUTH`.
        name: Option<Vec<u8>>,
        /// The user's password: any bytes.
        password: Vec<u8>,
    },
    /// A secret, with or without a user name. A replica with a `masteruser` setting sends that name with each password.
    Secret(String),
}

/// Something that the replica did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The replica asks for data. Answer with [`Server::full_resync`], [`Server::resume`], [`Server::postpone`] or
    /// [`Server::refuse`].
    Psync {
        /// The history that the replica holds; `None` if it holds none.
        replid: Option<ReplId>,
        /// The next byte that the replica wants; -1 if it holds no data.
        offset: i64,
    },
    /// The replica has the stream up to this offset. Several acknowledgements in a row may be merged into the last one.
    Ack {
        /// Last byte applied.
        offset: u64,
        /// Last byte in the replica's append-only file, if it has one.
        aof: Option<u64>,
    },
}

/// What the replica said about itself before `PSYNC`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerFacts {
    /// The replica can read a payload that ends with a mark.
    pub eof: bool,
    /// The replica understands `+CONTINUE <replid>`.
    pub psync2: bool,
    /// Other capabilities, as the replica spells them: `dual-channel`, `rdb-channel-repl`, `skip-rdb-checksum` …
    pub capabilities: Vec<String>,
    /// Port on which the replica serves clients.
    pub listening_port: Option<u16>,
    /// Address under which the replica wants to be known (`replica-announce-ip`).
    pub ip_address: Option<String>,
    /// The replica's version. Valkey sends it, Redis does not.
    pub version: Option<String>,
}

/// An error of the peer. The connection cannot be used any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The peer broke the wire format.
    #[error(transparent)]
    Resp(#[from] resp::Error),
    /// The replica has `tls-replication yes`, and this connection is not encrypted.
    #[error("the replica speaks TLS (tls-replication yes): give the listener a certificate, or set that to no")]
    Tls,
    /// The peer sent a command after `PSYNC` that is not an acknowledgement.
    #[error("the peer sent {command:?} after PSYNC: it is not a replica")]
    OutOfTurn {
        /// The command's name, or the beginning of it.
        command: String,
    },
    /// The peer sends commands and does not read the answers.
    #[error("the peer leaves more than {OUTPUT_BYTES_MAX} bytes of answers unread")]
    Flood,
}

/// The state machine of the primary's side: hand it input, write its output, and answer its [`Event::Psync`].
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
    /// Whether a first byte was received.
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
    /// `+FULLRESYNC` was sent; the payload has not begun.
    Promised,
    Streaming,
    Failed(Error),
}

/// The answer to one command: a status, or an error with its code.
type Answer = Result<&'static str, String>;

impl Server {
    /// Creates the machine. It has no output yet: the replica speaks first.
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

    /// The bytes to write to the replica now; empty if there are none. After [`Server::payload`] or [`Server::resume`],
    /// write them before the first byte of payload or stream.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Handles bytes that were read from the peer. After an error, every call returns that error.
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

    /// The next event, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What the replica has said about itself so far.
    pub fn peer(&self) -> &PeerFacts {
        &self.peer
    }

    /// Whether the replica has proved what [`Options::access`] requires.
    pub fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Number of `AUTH` commands with a wrong user or password.
    pub fn refused_logins(&self) -> u32 {
        self.refused_logins
    }

    /// Answers `PSYNC` by announcing a snapshot of this history, which contains the stream up to and including
    /// `offset`.
    ///
    /// # Panics
    /// If no `PSYNC` waits for an answer.
    pub fn full_resync(&mut self, replid: &ReplId, offset: u64) {
        if self.answering("full_resync", &[Step::Asked]) {
            self.say(&format!("+FULLRESYNC {replid} {offset}"));
            self.step = Step::Promised;
        }
    }

    /// Begins the announced snapshot: the next byte that the driver writes is the payload's first.
    ///
    /// # Panics
    /// If no snapshot was announced, or if the payload ends with a mark and the replica cannot read that
    /// ([`PeerFacts::eof`]).
    pub fn payload(&mut self, payload: &Payload) {
        if self.answering("payload", &[Step::Promised]) {
            let readable = self.peer.eof || matches!(payload, Payload::Length(_));
            assert!(readable, "the replica did not say capa eof: it needs a payload of known length");
            payload.encode(&mut self.output);
            self.step = Step::Streaming;
        }
    }

    /// Answers `PSYNC` with the stream: the next byte that the driver writes is the byte that the replica asked for.
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

    /// Sends a line feed to a replica that waits for an answer or a payload, so that it does not time out. Does nothing
    /// in any other state, or while other output waits to be written. A timer can call it at any time.
    pub fn keep_alive(&mut self) {
        let waiting = matches!(self.step, Step::Asked | Step::Promised);
        if waiting && self.output.is_empty() {
            self.output.push(b'\n');
        }
    }

    /// Answers `PSYNC`, or ends an announced snapshot, with an error. The replica closes this connection and starts
    /// over.
    ///
    /// # Panics
    /// If no request waits for an answer.
    pub fn refuse(&mut self, text: &str) {
        if self.answering("refuse", &[Step::Asked, Step::Promised]) {
            self.say(&format!("-ERR {text}"));
            self.step = Step::Talking;
        }
    }

    /// Answers `PSYNC` with "not now". The replica tries again in a second. It does not fall back to `SYNC`, as it does
    /// after [`Server::refuse`].
    ///
    /// # Panics
    /// If no `PSYNC` waits for an answer.
    pub fn postpone(&mut self, text: &str) {
        if self.answering("postpone", &[Step::Asked]) {
            // The code of a replica whose own link is down. All versions treat it as temporary.
            self.say(&format!("-NOMASTERLINK {text}"));
            self.step = Step::Talking;
        }
    }

    /// Whether an answer is allowed now. False after an error of the peer, which the driver may not have seen yet.
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
            _ if is("SYNC") => Err("ERR SYNC is not supported here; use PSYNC".into()),
            _ => Err(format!("ERR unknown command '{}'", text::excerpt(name))),
        };
        match answer {
            Ok(status) => self.say(&format!("+{status}")),
            Err(error) => self.say(&format!("-{error}")),
        }
        Ok(())
    }

    /// Handles a command after `PSYNC`, when replicas only acknowledge. Other options of `REPLCONF` are ignored: an
    /// answer would be written into the middle of the stream.
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

    /// Queues an acknowledgement. It includes all earlier ones, so the queue never holds two in a row.
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
                let name = name.as_deref().unwrap_or(b"default");
                // Both are always compared, so the time does not reveal which of them was wrong.
                same(user, name) & same(password, wanted)
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
            // A request to a replica, and this process is not one.
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
            return Err("ERR PSYNC FAILOVER: this process is not a server and cannot take over".into());
        }
        let offset = text::decimal_i64(offset).ok_or("ERR value is not an integer or out of range")?;
        // As in a server, an invalid replid is treated like an unknown one: full resync.
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

/// Hides passwords and secrets.
impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Access::Open => f.write_str("Open"),
            Access::User { name, .. } => {
                let name = name.as_deref().map(|name| name.escape_ascii().to_string());
                f.debug_struct("User").field("name", &name).finish_non_exhaustive()
            }
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

/// A short text that the replica sends about itself.
fn fact(value: &[u8]) -> Result<String, String> {
    if value.len() > FACT_BYTES_MAX {
        return Err(format!("ERR REPLCONF value is too long: {} bytes", value.len()));
    }
    Ok(String::from_utf8_lossy(value).into_owned())
}

/// Compares in a time that depends on the lengths only, not on the position of the first difference.
fn same(given: &[u8], wanted: &[u8]) -> bool {
    let differences = given.iter().zip(wanted).fold(0, |all, (a, b)| all | (a ^ b));
    given.len() == wanted.len() && std::hint::black_box(differences) == 0
}

#[cfg(test)]
mod tests;
