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
use crate::ReplId;
use crate::info;
use crate::resp::{self, CommandDecoder, Limits};

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
            _ => Err(format!("ERR unknown command '{}'", info::excerpt(name))),
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
            return Err(Error::OutOfTurn { command: info::excerpt(name) });
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
                let port = info::decimal_u64(value).and_then(|port| u16::try_from(port).ok());
                self.peer.listening_port = Some(port.ok_or("ERR value is not an integer or out of range")?);
            }
            b"ip-address" => self.peer.ip_address = Some(fact(value)?),
            b"version" => self.peer.version = Some(fact(value)?),
            b"capa" => self.handle_capability(value),
            // A request to a replica, and this process is not one.
            b"getack" => {}
            b"rdb-only" | b"rdb-channel" if value == b"0" => {}
            b"rdb-only" | b"rdb-channel" | b"rdb-filter-only" | b"set-rdb-client-id" | b"main-ch-client-id" => {
                return Err(format!("ERR REPLCONF {} is not supported here", info::excerpt(option)));
            }
            b"set-cluster-node-id" => return Err("ERR This instance has cluster support disabled".into()),
            _ => return Err(format!("ERR Unrecognized REPLCONF option: {}", info::excerpt(option))),
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
        let offset = info::decimal_i64(offset).ok_or("ERR value is not an integer or out of range")?;
        // As in a server, an invalid replid is treated like an unknown one: full resync.
        let replid = ReplId::parse(replid).ok();
        self.events.push_back(Event::Psync { replid, offset });
        self.step = Step::Asked;
        Ok(())
    }

    fn say(&mut self, line: &str) {
        self.output.extend(info::one_line(line.as_bytes()));
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
        info::decimal_u64(value)
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
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const REPLID: &str = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";

    fn replid() -> ReplId {
        REPLID.parse().unwrap()
    }

    /// Feeds one inline command and returns the answer.
    fn answer(server: &mut Server, command: &str) -> String {
        server.handle_input(format!("{command}\r\n").as_bytes()).unwrap();
        String::from_utf8(server.take_output()).unwrap()
    }

    fn open() -> Server {
        Server::new(Options::default())
    }

    /// A server whose peer sent these commands and then asked for everything.
    fn asked(before: &str) -> Server {
        let mut server = open();
        server.handle_input(format!("{before}\r\nPSYNC ? -1\r\n").as_bytes()).unwrap();
        assert_eq!(server.poll_event(), Some(Event::Psync { replid: None, offset: -1 }));
        server.take_output();
        server
    }

    fn streaming() -> Server {
        let mut server = asked("REPLCONF capa eof capa psync2");
        server.resume(&replid());
        server.take_output();
        server
    }

    #[test]
    fn what_replicas_of_each_version_say_is_understood() {
        // What Redis 6.2 and 7, Redis 8 and Valkey 9 send.
        for (words, capabilities, version) in [
            ("capa eof capa psync2", &[][..], None),
            ("capa eof capa psync2 capa rdb-channel-repl", &["rdb-channel-repl"], None),
            (
                "capa eof capa psync2 capa dual-channel capa skip-rdb-checksum version 9.1.2",
                &["dual-channel", "skip-rdb-checksum"],
                Some("9.1.2"),
            ),
        ] {
            let mut server = open();
            assert_eq!(answer(&mut server, "PING"), "+PONG\r\n");
            assert_eq!(answer(&mut server, "REPLCONF listening-port 6380"), "+OK\r\n");
            assert_eq!(answer(&mut server, "REPLCONF ip-address replica.example"), "+OK\r\n");
            assert_eq!(answer(&mut server, &format!("REPLCONF {words}")), "+OK\r\n");
            let peer = server.peer();
            assert!(peer.eof && peer.psync2);
            assert_eq!(peer.capabilities, capabilities);
            assert_eq!(peer.listening_port, Some(6380));
            assert_eq!(peer.ip_address.as_deref(), Some("replica.example"));
            assert_eq!(peer.version.as_deref(), version);
        }
    }

    #[test]
    fn options_that_would_change_the_payload_are_refused() {
        for option in
            ["rdb-only 1", "rdb-filter-only functions", "rdb-channel 1", "set-rdb-client-id 7", "main-ch-client-id 7"]
        {
            let said = answer(&mut open(), &format!("REPLCONF {option}"));
            assert!(said.starts_with("-ERR REPLCONF") && said.contains("not supported here"), "{said}");
        }
        assert_eq!(answer(&mut open(), "REPLCONF rdb-only 0"), "+OK\r\n");
        assert_eq!(answer(&mut open(), "REPLCONF colour blue"), "-ERR Unrecognized REPLCONF option: colour\r\n");
        assert_eq!(
            answer(&mut open(), "REPLCONF set-cluster-node-id x"),
            "-ERR This instance has cluster support disabled\r\n"
        );
        assert_eq!(answer(&mut open(), "REPLCONF capa"), "-ERR syntax error\r\n");
        assert_eq!(
            answer(&mut open(), "REPLCONF listening-port 65536"),
            "-ERR value is not an integer or out of range\r\n"
        );
    }

    #[test]
    fn other_commands_are_unknown_and_the_connection_goes_on() {
        let mut server = open();
        assert_eq!(answer(&mut server, "HELLO 3"), "-ERR unknown command 'HELLO'\r\n");
        assert_eq!(answer(&mut server, "SYNC"), "-ERR SYNC is not supported here; use PSYNC\r\n");
        assert_eq!(answer(&mut server, "PSYNC ?"), "-ERR unknown command 'PSYNC'\r\n");
        assert_eq!(answer(&mut server, "PSYNC ? x"), "-ERR value is not an integer or out of range\r\n");
        assert!(answer(&mut server, "PSYNC ? -1 FAILOVER").starts_with("-ERR PSYNC FAILOVER"));
        assert_eq!(answer(&mut server, "ping"), "+PONG\r\n");
    }

    #[test]
    fn a_peer_that_must_authenticate_gets_no_other_answer_before() {
        let with = |user: Option<&str>| {
            let access = Access::User { name: user.map(Into::into), password: "secret".into() };
            Server::new(Options { access })
        };
        let denied = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";
        let mut server = with(Some("repl"));
        for command in ["PING", "REPLCONF capa eof", "PSYNC ? -1", "HELLO"] {
            assert_eq!(answer(&mut server, command), "-NOAUTH Authentication required.\r\n");
        }
        for wrong in ["AUTH secret", "AUTH repl secrex", "AUTH repl secret2", "AUTH other secret"] {
            assert_eq!(answer(&mut server, wrong), denied, "{wrong}");
        }
        assert_eq!(server.poll_event(), None);
        assert_eq!((server.is_authenticated(), server.refused_logins()), (false, 4));
        assert_eq!(answer(&mut server, "AUTH repl secret"), "+OK\r\n");
        assert!(server.is_authenticated());
        assert_eq!(answer(&mut server, "PING"), "+PONG\r\n");
        assert_eq!(answer(&mut with(None), "AUTH secret"), "+OK\r\n");
        assert_eq!(answer(&mut with(None), "AUTH default secret"), "+OK\r\n");
        assert_eq!(answer(&mut with(None), "AUTH"), "-ERR wrong number of arguments for 'auth' command\r\n");
    }

    #[test]
    fn a_secret_is_accepted_under_any_user_name_and_nothing_else_is() {
        let guarded = || Server::new(Options { access: Access::Secret("5ec4e7".into()) });
        for right in ["AUTH 5ec4e7", "AUTH default 5ec4e7", "AUTH masteruser 5ec4e7"] {
            let mut server = guarded();
            assert_eq!(answer(&mut server, right), "+OK\r\n", "{right}");
            assert_eq!(answer(&mut server, "PING"), "+PONG\r\n");
        }
        let mut server = guarded();
        for wrong in ["AUTH 5ec4e", "AUTH 5ec4e77", "AUTH 5ec4e7 default", "AUTH \"\"", "AUTH default \"\""] {
            let said = answer(&mut server, wrong);
            assert!(said.starts_with("-WRONGPASS") || said.starts_with("-ERR"), "{wrong}: {said}");
        }
        server.handle_input(b"*2\r\n$4\r\nAUTH\r\n$0\r\n\r\n").unwrap();
        assert!(server.take_output().starts_with(b"-WRONGPASS"));
        assert_eq!(answer(&mut server, "PSYNC ? -1"), "-NOAUTH Authentication required.\r\n");
        assert_eq!(answer(&mut server, "REPLCONF capa eof"), "-NOAUTH Authentication required.\r\n");
        assert_eq!(server.poll_event(), None);
        assert!(!server.peer().eof, "facts of an unauthenticated peer are not kept");
    }

    #[test]
    fn without_a_requirement_any_password_is_accepted() {
        assert_eq!(answer(&mut open(), "AUTH whatever"), "+OK\r\n");
        assert_eq!(answer(&mut open(), "AUTH who whatever"), "+OK\r\n");
    }

    #[test]
    fn a_full_resync_is_announced_sent_and_followed_by_the_stream() {
        let mut server = asked("REPLCONF capa eof capa psync2");
        server.keep_alive();
        server.keep_alive();
        server.full_resync(&replid(), 100);
        assert_eq!(server.take_output(), format!("\n+FULLRESYNC {REPLID} 100\r\n").as_bytes());
        server.keep_alive();
        assert_eq!(server.take_output(), b"\n");
        server.payload(&Payload::Mark([b'm'; 40]));
        server.keep_alive();
        assert_eq!(server.take_output(), format!("$EOF:{}\r\n", "m".repeat(40)).as_bytes());
        server.handle_input(b"\n\n*3\r\n$8\r\nREPLCONF\r\n$3\r\nACK\r\n$3\r\n100\r\n").unwrap();
        assert_eq!(server.poll_event(), Some(Event::Ack { offset: 100, aof: None }));
        assert_eq!(server.take_output(), b"");
    }

    #[test]
    fn a_partial_resync_names_the_history_to_replicas_that_understand_it() {
        for (before, said) in
            [("REPLCONF capa psync2", format!("+CONTINUE {REPLID}\r\n")), ("PING", "+CONTINUE\r\n".to_owned())]
        {
            let mut server = asked(before);
            server.resume(&replid());
            assert_eq!(server.take_output(), said.as_bytes());
        }
    }

    #[test]
    fn the_requested_history_and_offset_are_reported() {
        let mut server = open();
        server.handle_input(format!("PSYNC {REPLID} 101\r\n").as_bytes()).unwrap();
        assert_eq!(server.poll_event(), Some(Event::Psync { replid: Some(replid()), offset: 101 }));
    }

    #[test]
    fn a_refused_replica_can_ask_again() {
        let mut server = asked("PING");
        server.refuse("no\r\nsnapshot");
        assert_eq!(server.take_output(), b"-ERR no  snapshot\r\n");
        assert_eq!(answer(&mut server, "SYNC"), "-ERR SYNC is not supported here; use PSYNC\r\n");
        server.handle_input(b"PSYNC ? -1\r\n").unwrap();
        server.full_resync(&replid(), 1);
        server.refuse("the source is gone");
        assert!(server.take_output().ends_with(b"-ERR the source is gone\r\n"));
    }

    #[test]
    fn acknowledgements_are_merged_into_the_last_one() {
        let mut server = streaming();
        server.handle_input(b"REPLCONF ACK 5\r\nREPLCONF ack 7 FACK 6\r\n").unwrap();
        assert_eq!(server.poll_event(), Some(Event::Ack { offset: 7, aof: Some(6) }));
        assert_eq!(server.poll_event(), None);
        server.handle_input(b"REPLCONF ACK x\r\nREPLCONF unheard of\r\n").unwrap();
        assert_eq!(server.poll_event(), None);
        assert_eq!(server.take_output(), b"");
    }

    #[test]
    fn a_client_that_sends_commands_after_psync_is_not_a_replica() {
        for mut server in [asked("PING"), streaming()] {
            let error = Error::OutOfTurn { command: "GET".into() };
            assert_eq!(server.handle_input(b"GET k\r\n"), Err(error.clone()));
            assert_eq!(server.handle_input(b"\n"), Err(error));
            // The driver may answer before it sees the error; the answer is ignored.
            server.full_resync(&replid(), 0);
            assert_eq!(server.take_output(), b"");
        }
    }

    #[test]
    fn a_tls_replica_at_a_plain_listener_is_recognised() {
        assert_eq!(open().handle_input(b"\x16\x03\x01\x02\x00"), Err(Error::Tls));
    }

    #[test]
    fn a_peer_that_never_reads_is_disconnected() {
        let mut server = open();
        let outcome = server.handle_input(&b"PING\n".repeat(20_000));
        assert_eq!(outcome, Err(Error::Flood));
        assert!(server.output.len() <= OUTPUT_BYTES_MAX + 100);
    }

    #[test]
    #[should_panic(expected = "answers nothing")]
    fn an_answer_without_a_question_is_a_bug() {
        open().resume(&replid());
    }

    #[test]
    fn the_password_is_not_in_the_debug_text() {
        let accesses = [Access::User { name: None, password: "hunter2".into() }, Access::Secret("hunter2".into())];
        for access in accesses {
            assert!(!format!("{:?}", Server::new(Options { access })).contains("hunter2"));
        }
    }
}
