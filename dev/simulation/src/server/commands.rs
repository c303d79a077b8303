//! Commands: what a server answers to its clients.

use std::fmt::Write;
use std::time::Duration;

use remora_redis::resp::Frame;

use super::{Server, Step};
use crate::oracle::Content;
use crate::wire::{Address, Effect};

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
