//! Server: a small model of a Redis or Valkey server, as a primary and as a replica.
//!
//! It is a pure state machine: commands, messages and timers go in, [`Effect`]s come out. What it models follows
//! `replication.c`: replid and second replid, offset, backlog, cached primary, the answers to `PSYNC`, forks, the two
//! ways to load, restarts and promotions. `dev/testing.md` says what it leaves out, and a test compares it with real
//! servers.
//!
//! The two facts on which faults of agents depend:
//! - A replica that leaves its primary caches its position. It drops it when it applies another payload, and
//!   `FLUSHALL`, `FLUSHDB` and a module that removes keys do not touch it.
//! - A primary that becomes a replica caches its own position.

mod replication;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::time::Duration;

use remora_fabric::sim::Random;
use remora_redis::ReplId;
use remora_redis::resp::Frame;

#[cfg(test)]
pub(super) use self::replication::Answer;
pub(super) use self::replication::WINDOW;
use self::replication::{Fork, Link, Reader};
use super::oracle::{Content, FLUSH, Oracle};
use super::wire::{Address, Conn, Effect, Message, ServerId, Timer};

/// How often a server looks after its links and its idle clients.
pub(super) const CRON: Duration = Duration::from_secs(1);

/// What does not change in a server's life.
#[derive(Clone, Debug)]
pub(super) struct Traits {
    pub(super) id: ServerId,
    pub(super) address: Address,
    /// Valkey knows `flush-before-load`, and Redis 7.0 does not.
    pub(super) valkey: bool,
    /// It has our module.
    pub(super) module: bool,
    pub(super) backlog_bytes: usize,
    /// The backlog and the output buffers of its replicas are one, as since Redis 7.0: what one of them was not sent
    /// stays, also beyond the backlog's size. Otherwise each has its own, as in Redis 6.2.
    pub(super) shares_its_buffer: bool,
    /// `client-output-buffer-limit replica`.
    pub(super) output_limit: usize,
    /// `timeout`; zero: idle clients stay.
    pub(super) idle_limit: Duration,
    /// `replicaof` in its file.
    pub(super) follows: Option<Address>,
    /// How long one slot of a snapshot takes it to write, and to load.
    pub(super) pace: Duration,
    /// How many slots a snapshot of it has.
    pub(super) slots: u64,
    /// `repl-diskless-sync no`: it sends a snapshot once it has written all of it, and the stream right behind it.
    pub(super) saves_to_file: bool,
    /// It does not know one command in eight of the stream.
    pub(super) lacks_a_command: bool,
}

/// The bits of a command's number that say its kind. A server may lack one of the eight kinds.
const KINDS: u64 = 7;

/// The part of the stream that is kept for partial resynchronisations.
#[derive(Clone, Debug)]
pub(super) struct Backlog {
    pub(super) first: u64,
    pub(super) bytes: VecDeque<u8>,
}

impl Backlog {
    fn at(offset: u64) -> Backlog {
        Backlog { first: offset + 1, bytes: VecDeque::new() }
    }

    /// Drops what is beyond this many bytes.
    fn trim(&mut self, limit: usize) {
        let excess = self.bytes.len().saturating_sub(limit);
        self.bytes.drain(..excess);
        self.first += excess as u64;
    }

    /// The offset behind the last byte.
    fn end(&self) -> u64 {
        self.first + self.bytes.len() as u64
    }

    /// Whether a replica whose next byte is `next` can go on.
    fn covers(&self, next: u64) -> bool {
        next >= self.first && next <= self.first + self.bytes.len() as u64
    }

    fn from(&self, next: u64) -> Vec<u8> {
        self.bytes.iter().skip((next - self.first) as usize).copied().collect()
    }
}

/// An RDB file on the server's disk.
#[derive(Clone, Copy, Debug)]
struct Saved {
    content: Content,
    /// `repl-id` and `repl-offset`.
    history: Option<(ReplId, u64)>,
}

/// What a server needs of the world around it for one step.
pub(super) struct Step<'a> {
    pub(super) oracle: &'a mut Oracle,
    pub(super) effects: Vec<Effect>,
}

impl Step<'_> {
    pub(super) fn send(&mut self, conn: Conn, message: Message) {
        self.effects.push(Effect::Send(conn, message));
    }
}

/// See the module's text.
// Larger than the bound: one server's state, of which each field exists in the servers' sources too.
pub(super) struct Server {
    pub(super) traits: Traits,
    ids: Random,
    /// Counts the starts of the process.
    run: u64,
    pub(super) alive: bool,
    pub(super) replid: ReplId,
    /// The second replid, and the first offset that is not in both histories.
    pub(super) former: Option<(ReplId, u64)>,
    pub(super) offset: u64,
    backlog: Option<Backlog>,
    /// The position that it left its last primary with.
    cached: Option<(ReplId, u64)>,
    pub(super) content: Content,
    /// The beginning of a command of the stream.
    rest: Vec<u8>,
    pub(super) follows: Option<Address>,
    link: Link,
    attempt: u64,
    readers: BTreeMap<Conn, Reader>,
    fork: Option<Fork>,
    forks: u64,
    fork_is_due: bool,
    settings: BTreeMap<String, String>,
    saved: Option<Saved>,
    /// How many full copies it has given, and has applied.
    pub(super) full_copies: (u64, u64),
    /// Errors that it would have answered to its primary, in this run.
    errors: u64,
    /// From where it got commands that it could not execute since it last loaded, and in which run.
    pub(super) refused_from: BTreeMap<Address, u64>,
}

impl Server {
    /// A server that was just started, with nothing in it.
    pub(super) fn start(traits: Traits, seed: u64, step: &mut Step<'_>) -> Server {
        let mut ids = Random::new(seed);
        let replid = fresh_id(&mut ids);
        let mut server = Server {
            traits,
            ids,
            run: 0,
            alive: false,
            replid,
            former: None,
            offset: 0,
            backlog: None,
            cached: None,
            content: Content::EMPTY,
            rest: Vec::new(),
            follows: None,
            link: Link::Down,
            attempt: 0,
            readers: BTreeMap::new(),
            fork: None,
            forks: 0,
            fork_is_due: false,
            settings: BTreeMap::new(),
            saved: None,
            full_copies: (0, 0),
            errors: 0,
            refused_from: BTreeMap::new(),
        };
        server.restart(step);
        server
    }

    // ---- the process ----

    /// `SHUTDOWN SAVE`, or a kill without a word. Every connection of the process ends.
    pub(super) fn stop(&mut self, saves: bool) {
        if saves && !self.is_loading() {
            self.save();
        }
        self.alive = false;
    }

    /// `BGSAVE`.
    pub(super) fn save(&mut self) {
        let is_primary = self.follows.is_none();
        let history = match (is_primary, &self.link) {
            (true, _) => self.backlog.as_ref().map(|_| (self.replid, self.offset)),
            (false, Link::Up { .. }) => Some((self.replid, self.offset)),
            (false, _) => self.cached,
        };
        self.saved = Some(Saved { content: self.content, history });
    }

    /// Starts the process again.
    pub(super) fn restart(&mut self, step: &mut Step<'_>) {
        self.run += 1;
        self.alive = true;
        // What it could not execute is still missing, but nothing counts it any more.
        self.errors = 0;
        self.replid = fresh_id(&mut self.ids);
        (self.former, self.offset, self.backlog, self.cached) = (None, 0, None, None);
        (self.readers, self.fork, self.fork_is_due) = (BTreeMap::new(), None, false);
        self.rest.clear();
        let settings = [
            ("repl-diskless-load", "disabled"),
            ("masterauth", ""),
            ("masteruser", ""),
            ("replica-read-only", "yes"),
            ("databases", "16"),
        ];
        self.settings = settings.map(|(name, value)| (name.to_string(), value.to_string())).into();
        self.follows.clone_from(&self.traits.follows);
        self.link = Link::Down;
        self.content = self.saved.map_or(Content::EMPTY, |saved| saved.content);
        if let Some((replid, offset)) = self.saved.and_then(|saved| saved.history) {
            self.offset = offset;
            self.backlog = Some(Backlog::at(offset));
            if self.follows.is_none() {
                self.former = Some((replid, offset + 1));
                step.oracle.begin(self.replid, Some((replid, offset)), offset, self.content);
            } else {
                self.replid = replid;
                self.cached = Some((replid, offset));
            }
        } else {
            step.oracle.begin(self.replid, None, 0, self.content);
        }
        step.effects.push(Effect::After(CRON, Timer::Cron { run: self.run }));
        if self.follows.is_some() {
            self.dial(step);
        }
    }

    /// The random name of this run of the process.
    pub(super) fn run_id(&self) -> String {
        format!("run{}of{}", self.run, self.traits.id.0)
    }

    // ---- writes ----

    /// A client writes, if it may.
    pub(super) fn write(&mut self, command: &[u8], step: &mut Step<'_>) {
        if !self.alive || self.follows.is_some() || self.is_loading() {
            return;
        }
        self.content = self.content.after(command);
        if self.backlog.is_none() {
            // Nothing counts the bytes: a first replica gets a new history.
            return step.oracle.begin(self.replid, None, self.offset, self.content);
        }
        self.offset += command.len() as u64;
        step.oracle.wrote(self.replid, self.offset, self.content);
        self.pass_on(command, step);
    }

    fn flush(&mut self, step: &mut Step<'_>) {
        self.write(&[8, FLUSH, 0, 0, 0, 0, 0, 0], step);
    }

    /// Puts bytes of the stream into the backlog, and gives them to the replicas.
    fn pass_on(&mut self, bytes: &[u8], step: &mut Step<'_>) {
        if let Some(backlog) = &mut self.backlog {
            backlog.bytes.extend(bytes);
        }
        self.feed_readers(bytes, step);
        self.trim();
    }

    // ---- roles ----

    /// `REPLICAOF`; `None`: `NO ONE`.
    pub(super) fn replicaof(&mut self, to: Option<Address>, step: &mut Step<'_>) {
        if self.follows == to {
            return;
        }
        let was_primary = self.follows.is_none();
        self.leave_the_link(step);
        match to {
            None => {
                self.cached = None;
                self.follows = None;
                self.shift_id(step);
            }
            Some(address) => {
                self.follows = Some(address);
                if was_primary {
                    self.cached = Some((self.replid, self.offset));
                    self.backlog.get_or_insert_with(|| Backlog::at(self.offset));
                }
                self.dial(step);
            }
        }
    }

    /// A new history begins where the present one is.
    fn shift_id(&mut self, step: &mut Step<'_>) {
        self.refused_from.clear();
        let before = (self.replid, self.offset);
        self.former = Some((self.replid, self.offset + 1));
        self.replid = fresh_id(&mut self.ids);
        step.oracle.begin(self.replid, Some(before), self.offset, self.content);
        self.drop_readers(step);
    }

    // ---- what others see ----

    /// Whether it loads a snapshot and refuses most commands.
    pub(super) fn is_loading(&self) -> bool {
        self.link.is_loading()
    }

    /// From where it got commands in this run that it could not execute, and lacks since.
    pub(super) fn refused_in_this_run(&self) -> impl Iterator<Item = &Address> {
        self.refused_from.iter().filter(|(_, run)| **run == self.run).map(|(from, _)| from)
    }

    /// Whether it says that its link to its primary is up.
    pub(super) fn is_up(&self) -> bool {
        self.alive && self.follows.is_some() && matches!(self.link, Link::Up { .. })
    }

    /// Whether a snapshot is on its way to it.
    pub(super) fn is_copying(&self) -> bool {
        self.link.is_copying()
    }

    fn keys(&self) -> u64 {
        if self.content == Content::EMPTY { 0 } else { 5 }
    }

    // ---- events ----

    /// A message on a connection of this server.
    pub(super) fn receive(&mut self, conn: Conn, message: Message, step: &mut Step<'_>) {
        if !self.alive {
            return;
        }
        match message {
            Message::Psync { history, ask, .. } => self.asked(conn, history, ask, step),
            Message::Ack { .. } => self.acknowledged(conn, step),
            Message::Room => self.has_room(conn, step),
            other => self.primary_said(conn, other, step),
        }
    }

    /// A connection has ended.
    pub(super) fn closed(&mut self, conn: Conn, step: &mut Step<'_>) {
        if !self.alive {
            return;
        }
        if self.readers.remove(&conn).is_some() {
            self.trim();
            self.next_slot(step);
        } else if self.link.conn() == Some(conn) {
            self.leave_the_link(step);
        }
    }

    /// A time has come.
    pub(super) fn timer(&mut self, timer: Timer, step: &mut Step<'_>) {
        if !self.alive {
            return;
        }
        match timer {
            Timer::Cron { run } if run == self.run => {
                self.look_after_the_link(step);
                self.drop_silent(step);
                step.effects.push(Effect::After(CRON, timer));
            }
            Timer::Fork { run } if run == self.run => self.begin_fork(step),
            Timer::Slot { fork } if self.fork.as_ref().is_some_and(|present| present.number == fork) => {
                self.slot_is_due(step);
            }
            Timer::Loaded { conn } => self.loaded(conn, step),
            Timer::Piece { conn } => self.send_piece(conn, step),
            Timer::Cron { .. } | Timer::Fork { .. } | Timer::Slot { .. } => {}
        }
    }
}

fn fresh_id(ids: &mut Random) -> ReplId {
    let mut text = String::new();
    while text.len() < 40 {
        text.push_str(&format!("{:016x}", ids.next()));
    }
    text.truncate(40);
    match text.parse() {
        Ok(id) => id,
        Err(error) => unreachable!("{error}"),
    }
}

/// How long the module takes to remove the keys.
const EMPTYING: Duration = Duration::from_millis(400);

/// One client's state.
#[derive(Debug, Default)]
pub(crate) struct Session {
    /// The commands of a transaction, and whether one of them was refused.
    queued: Option<(Vec<Vec<String>>, bool)>,
}

/// What a command changed, for the checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    Nothing,
    /// The client asked which primary the server follows.
    Looked,
    /// `REPLICAOF`; `before`: whether a full copy from its primary was under way.
    Follows {
        before: Option<Address>,
        was_copying: bool,
    },
    /// The keys were removed.
    Emptied,
    Setting,
}

impl Server {
    /// Executes one command of a client.
    pub(crate) fn command(
        &mut self,
        session: &mut Session,
        args: &[Vec<u8>],
        step: &mut Step<'_>,
    ) -> (Frame, Vec<Changed>) {
        let words: Vec<String> = args.iter().map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        let name = words.first().map(|word| word.to_ascii_uppercase()).unwrap_or_default();
        let is_refused = self.refuses(&name);
        match (name.as_str(), &mut session.queued) {
            ("MULTI", _) => {
                session.queued = Some((Vec::new(), false));
                (ok(), Vec::new())
            }
            ("DISCARD", _) => {
                session.queued = None;
                (ok(), Vec::new())
            }
            ("EXEC", Some((_, true))) => {
                session.queued = None;
                (error("EXECABORT Transaction discarded because of previous errors."), Vec::new())
            }
            ("EXEC", Some((commands, false))) => {
                let commands = std::mem::take(commands);
                session.queued = None;
                let mut changes = Vec::new();
                let answers = commands.iter().map(|words| {
                    let (frame, changed) = self.execute(words, step);
                    changes.push(changed);
                    frame
                });
                (Frame::Array(answers.collect()), changes)
            }
            (_, Some((_, failed))) if is_refused.is_some() => {
                *failed = true;
                (error(is_refused.unwrap_or_default()), Vec::new())
            }
            (_, Some((commands, _))) => {
                commands.push(words);
                (Frame::Simple(b"QUEUED".to_vec()), Vec::new())
            }
            _ => match is_refused {
                Some(text) => (error(text), Vec::new()),
                None => {
                    let (frame, changed) = self.execute(&words, step);
                    (frame, vec![changed])
                }
            },
        }
    }

    /// What this command is refused with before it is looked at.
    fn refuses(&self, name: &str) -> Option<&'static str> {
        let module = name.starts_with("REMORA.");
        if module && !self.traits.module {
            return Some("ERR unknown command");
        }
        let always = ["AUTH", "INFO", "CONFIG", "MULTI", "EXEC", "DISCARD"].contains(&name);
        if self.is_loading() && !always {
            return Some("LOADING Redis is loading the dataset in memory");
        }
        (name == "FLUSHALL" && self.follows.is_some())
            .then_some("READONLY You can't write against a read only replica.")
    }

    fn execute(&mut self, words: &[String], step: &mut Step<'_>) -> (Frame, Changed) {
        let upper: Vec<String> = words.iter().map(|word| word.to_ascii_uppercase()).collect();
        let upper: Vec<&str> = upper.iter().map(String::as_str).collect();
        match (upper.as_slice(), words) {
            (["PING", ..], _) => (Frame::Simple(b"PONG".to_vec()), Changed::Nothing),
            (["AUTH" | "SELECT", ..], _) => (ok(), Changed::Nothing),
            (["INFO", ..], _) => (bulk(&self.info()), Changed::Looked),
            (["CONFIG", "GET", ..], [_, _, name]) => {
                let value = self.settings.get(name);
                let pair = value.map(|value| vec![bulk(name), bulk(value)]);
                (Frame::Array(pair.unwrap_or_default()), Changed::Nothing)
            }
            (["CONFIG", "SET", ..], [_, _, name, value]) => (self.set(name, value), Changed::Setting),
            (["REPLICAOF", "NO", "ONE"], _) => {
                let changed = self.follow_change();
                self.replicaof(None, step);
                (ok(), changed)
            }
            (["REPLICAOF", ..], [_, host, port]) => {
                let changed = self.follow_change();
                let port = port.parse().unwrap_or_default();
                self.replicaof(Some(Address { host: host.clone(), port }), step);
                (ok(), changed)
            }
            (["FLUSHALL", ..], _) => {
                self.flush(step);
                (ok(), Changed::Emptied)
            }
            (["REMORA.STATUS"], _) => {
                let protocol = remora_protocol::MODULE_PROTOCOL.to_string();
                let fields = ["protocol", &protocol, "load", "yes"];
                (Frame::Array(fields.iter().map(|text| bulk(text)).collect()), Changed::Nothing)
            }
            (["REMORA.LOAD", .., "FLUSH"], _) => {
                // The module removes the keys of each database. The server's position stays as it is.
                self.content = Content::EMPTY;
                step.effects.push(Effect::Block(EMPTYING));
                (Frame::Array(vec![bulk("idle_times"), bulk("yes"), bulk("fast_keys"), bulk("no")]), Changed::Emptied)
            }
            _ => (error("ERR unknown command"), Changed::Nothing),
        }
    }

    fn follow_change(&self) -> Changed {
        Changed::Follows { before: self.follows.clone(), was_copying: self.is_copying() }
    }

    fn set(&mut self, name: &str, value: &str) -> Frame {
        let known = match name {
            "repl-diskless-load" => {
                ["disabled", "on-empty-db", "swapdb"].contains(&value)
                    || (value == "flush-before-load" && self.traits.valkey)
            }
            _ => true,
        };
        match self.settings.get_mut(name) {
            Some(setting) if known => {
                *setting = value.to_string();
                ok()
            }
            Some(_) => error("ERR CONFIG SET failed - argument must be one of the following"),
            None => error("ERR Unknown option or number of arguments for CONFIG SET"),
        }
    }

    /// What `INFO` says.
    pub(crate) fn info(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = write!(text, "{name}:{value}\r\n");
        };
        let flag = |flag: bool| u8::from(flag).to_string();
        if self.traits.valkey {
            line("server_name", "valkey".into());
            line("valkey_version", "9.1.2".into());
        }
        let version = match (self.traits.valkey, self.traits.shares_its_buffer) {
            (true, _) => "7.2.4",
            (false, true) => "7.0.15",
            (false, false) => "6.2.14",
        };
        line("redis_version", version.into());
        line("run_id", self.run_id());
        line("tcp_port", self.traits.address.port.to_string());
        line("blocked_clients", "0".into());
        line("loading", flag(self.is_loading()));
        line("used_memory_dataset", "1000".into());
        match &self.follows {
            None => line("role", "master".into()),
            Some(primary) => {
                line("role", "slave".into());
                line("master_host", primary.host.clone());
                line("master_port", primary.port.to_string());
                line("master_link_status", if self.is_up() { "up" } else { "down" }.into());
                line("master_sync_in_progress", flag(self.is_copying()));
                line("slave_repl_offset", self.position().unwrap_or(1).to_string());
            }
        }
        line("connected_slaves", self.reader_count().to_string());
        line("master_replid", self.replid.to_string());
        let (former, end) = match self.former {
            Some((former, end)) => (former.to_string(), end.to_string()),
            None => ("0".repeat(40), "-1".into()),
        };
        line("master_replid2", former);
        line("master_repl_offset", self.offset.to_string());
        line("second_repl_offset", end);
        let (first, held) = self.backlog.as_ref().map_or((0, 0), |backlog| (backlog.first, backlog.bytes.len()));
        line("repl_backlog_active", flag(self.backlog.is_some()));
        line("repl_backlog_size", self.traits.backlog_bytes.to_string());
        line("repl_backlog_first_byte_offset", first.to_string());
        line("repl_backlog_histlen", held.to_string());
        line("unexpected_error_replies", self.errors.to_string());
        line("cluster_enabled", "0".into());
        if self.keys() > 0 {
            line("db0", format!("keys={},expires=0,avg_ttl=0", self.keys()));
        }
        text
    }

    /// Offset of the last byte that it has executed as a replica.
    fn position(&self) -> Option<u64> {
        if self.is_up() { Some(self.offset) } else { self.cached.map(|(_, offset)| offset) }
    }
}

fn ok() -> Frame {
    Frame::Simple(b"OK".to_vec())
}

fn bulk(text: &str) -> Frame {
    Frame::Bulk(text.as_bytes().to_vec())
}

fn error(text: &str) -> Frame {
    Frame::Error(text.as_bytes().to_vec())
}
