//! What a server reports about itself, read in one command.
//!
//! Every fact is optional: old servers report less, and renamed or managed ones hide things. A caller that needs a
//! missing fact reports that; it never guesses.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::{Client, ServerError};
use remora_base::units::Size;
use remora_redis::ReplId;
use remora_redis::info::Info;

/// The facts of one server at one moment.
// Larger than the bound: a field for each thing that a server reports.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Redis or Valkey.
    pub family: Family,
    /// The server's version. For Valkey its own, and not the Redis version that it claims for old clients.
    pub version: Option<Version>,
    /// A random name of this run of the server. Two addresses with the same name lead to the same server.
    pub run_id: Option<String>,
    /// The server's process id, on its host.
    pub process_id: Option<u32>,
    /// The port on which the server says it listens.
    pub tcp_port: Option<u16>,
    /// The port for TLS; `None` if there is none or it is unknown.
    pub tls_port: Option<u16>,
    /// Primary or replica.
    pub role: Option<Role>,
    /// The server's replication history (replid).
    pub replid: Option<ReplId>,
    /// The history before this one, and the first offset that is not part of both.
    pub former: Option<(ReplId, u64)>,
    /// The offset up to which the server has executed that history.
    pub offset: Option<u64>,
    /// On a replica: its link to the primary.
    pub link: Option<Link>,
    /// Whether the server is loading its data set.
    pub loading: Option<bool>,
    /// Whether the server runs in cluster mode, where `REPLICAOF` is refused.
    pub cluster_enabled: Option<bool>,
    /// The server's memory limit in bytes; 0 means none.
    pub maxmemory: Option<u64>,
    /// Bytes of memory that the server uses.
    pub used_memory: Option<u64>,
    /// Bytes of that memory that are data.
    pub used_memory_dataset: Option<u64>,
    /// The memory allocator: `jemalloc-5.3.0`, `libc`.
    pub allocator: Option<String>,
    /// The databases that hold keys.
    pub databases: Vec<Database>,
    /// The number of function libraries; `None` before Redis 7.
    pub libraries: Option<u64>,
    /// The names of the modules that the server has loaded.
    pub modules: Vec<String>,
    /// The part of the stream that the server keeps for partial resynchronisations.
    pub backlog: Option<Backlog>,
    /// The number of connected replicas.
    pub connected_replicas: Option<u32>,
    /// The server is being shut down, and waits for its replicas for this long at most (Redis since 7.0, and Valkey).
    pub shutdown_in: Option<Duration>,
}

impl Facts {
    /// Reads the facts. Only `INFO` has to be allowed.
    pub async fn read(client: &mut Client) -> Result<Self, ServerError> {
        let mut facts = Self::from_info(&client.info("").await?);
        if facts.tls_port.is_none() {
            facts.tls_port = tls_port(client).await?;
        }
        Ok(facts)
    }

    /// Reads the facts of one moment, by one command. They lack `tls_port`.
    pub async fn read_as_one(client: &mut Client) -> Result<Self, ServerError> {
        Ok(Self::from_info(&client.info("").await?))
    }

    /// Takes the facts from the text of an `INFO`.
    pub fn from_info(info: &Info) -> Self {
        let (family, version) = family_and_version(info);
        Self {
            family,
            version,
            run_id: info.get("run_id").map(str::to_owned),
            process_id: info.number("process_id"),
            tcp_port: info.number("tcp_port").filter(|port| *port != 0),
            tls_port: None,
            role: info.get("role").and_then(Role::of),
            replid: info.get("master_replid").and_then(|text| text.parse().ok()),
            former: former_history(info),
            // A replica reports what it has executed as slave_repl_offset; its master_repl_offset is what it passes on.
            offset: info.number("slave_repl_offset").or_else(|| info.number("master_repl_offset")),
            link: Link::of(info),
            loading: flag(info, "loading"),
            cluster_enabled: flag(info, "cluster_enabled"),
            maxmemory: info.number("maxmemory"),
            used_memory: info.number("used_memory"),
            // The server subtracts its overhead, and more than it uses makes a number close to 2^64.
            used_memory_dataset: info
                .number("used_memory_dataset")
                .filter(|dataset| info.number("used_memory").is_none_or(|used: u64| *dataset <= used)),
            allocator: info.get("mem_allocator").map(str::to_owned),
            databases: databases(info),
            libraries: info.number("number_of_libraries"),
            modules: info.modules().to_vec(),
            backlog: Backlog::of(info),
            connected_replicas: info.number("connected_slaves"),
            shutdown_in: info
                .number::<i64>("shutdown_in_milliseconds")
                .map(|left| Duration::from_millis(left.max(0).unsigned_abs())),
        }
    }

    /// Why no replica is to be sent to this server now, if it is being shut down.
    pub fn ends(&self) -> Option<String> {
        self.shutdown_in.map(|_| "the server is being shut down".to_owned())
    }

    /// Whether the server answers `PSYNC <history> <next>` with `+CONTINUE`, as far as histories are concerned: the
    /// history is the server's own, or its former one and `next` is not beyond the end of that.
    pub fn continues(&self, history: ReplId, next: u64) -> bool {
        self.replid == Some(history) || self.former.is_some_and(|(former, end)| former == history && next <= end)
    }

    /// Whether the server keeps its backlog and the output buffers of its replicas in one list of blocks, so that a
    /// replica that was not sent a block keeps it: Redis since 7.0, and Valkey.
    pub fn shares_its_buffer(&self) -> bool {
        self.version.is_some_and(|version| self.family == Family::Valkey || version.major >= 7)
    }

    /// The number of keys in all databases.
    pub fn keys(&self) -> u64 {
        self.databases.iter().map(|database| database.keys).fold(0, u64::saturating_add)
    }

    /// The modules of this primary that the replica's server lacks and that may have put data into the snapshot. A
    /// server that loads a value of a module that it lacks ends its process.
    pub fn modules_missing_at(&self, replica: &Facts) -> Vec<&str> {
        let is_missing =
            |name: &&str| !MODULES_WITHOUT_DATA.contains(name) && !replica.modules.iter().any(|m| m == name);
        self.modules.iter().map(String::as_str).filter(is_missing).collect()
    }

    /// The highest number of a database that holds keys.
    pub fn highest_database(&self) -> Option<u32> {
        self.databases.iter().map(|database| database.number).max()
    }

    /// Family and version: `Valkey 9.1.2`.
    pub fn name(&self) -> String {
        match self.version {
            Some(version) => format!("{} {version}", self.family),
            None => self.family.to_string(),
        }
    }

    /// The version, if the server is a Valkey with a snapshot format of its own besides the one that it shares with
    /// Redis: 9 and later.
    pub fn own_format(&self) -> Option<Version> {
        self.version.filter(|version| self.family == Family::Valkey && version.major >= 9)
    }

    /// Whether the server can import slots of a cluster by `CLUSTER MIGRATESLOTS`: Valkey from 9 on, in cluster mode.
    pub fn may_import_slots(&self) -> bool {
        self.cluster_enabled == Some(true) && self.own_format().is_some()
    }

    /// Whether both are of the same family, and of the same first two numbers of its version.
    pub fn is_of_one_release_with(&self, other: &Facts) -> bool {
        let release = |facts: &Facts| (facts.family, facts.version.map(|version| (version.major, version.minor)));
        release(self) == release(other)
    }

    /// Why a replica with these facts cannot load the snapshots of this primary: their RDB format is newer than the
    /// replica reads. `None` if it can load them, or if that is unknown. The numbers are those of `RDB_VERSION` in
    /// rdb.h of either server.
    pub fn unreadable_for(&self, replica: &Facts) -> Option<String> {
        let (written, read) = (self.rdb_written_for(replica)?, replica.rdb_read()?);
        (written > read).then(|| {
            format!(
                "{} writes snapshots of RDB version {written}, and {} reads up to version {read}",
                self.name(),
                replica.name()
            )
        })
    }

    /// The RDB version that this server sends to a replica, or a lower bound of it.
    fn rdb_written_for(&self, replica: &Facts) -> Option<u32> {
        match self.family {
            Family::Valkey if self.own_format().is_some() && replica.own_format().is_some() => None,
            Family::Valkey => Some(RDB_SHARED),
            Family::Redis => rdb_of_redis(self.version?),
        }
    }

    /// The newest RDB version (of Redis) that the server reads; `None` if that is newer than all versions known here.
    fn rdb_read(&self) -> Option<u32> {
        match self.family {
            Family::Valkey => Some(RDB_SHARED),
            Family::Redis => rdb_of_redis(self.version?).filter(|version| *version < RDB_OPEN),
        }
    }

    /// Whether the server can hold the fields that expire of a hash of this primary: Redis since 7.4 and Valkey since
    /// 9.0 write them differently. True if it is not known.
    pub fn holds_field_ttls_of(&self, primary: &Facts) -> bool {
        self.version.is_none() || (self.holds_field_ttls() && self.family == primary.family)
    }

    /// Whether the server can hold fields that expire, in the form of its own. True if it is not known.
    pub fn holds_field_ttls(&self) -> bool {
        let Some(version) = self.version else { return true };
        match self.family {
            Family::Redis => (version.major, version.minor) >= (7, 4),
            Family::Valkey => self.own_format().is_some(),
        }
    }

    /// Whether the server is at least that version of Redis, or a Valkey (whose first release has the features of Redis
    /// 7.2). False if it does not report a version.
    pub fn has_redis(&self, wanted: Version) -> bool {
        let equivalent = match self.family {
            Family::Redis => self.version,
            Family::Valkey => Some(Version { major: 7, minor: 2, patch: 4 }),
        };
        equivalent.is_some_and(|version| version >= wanted)
    }
}

/// Stands behind the name of a server whose agent converts the snapshot: it takes each format.
pub const CONVERTED: &str = ", converted";

/// Modules that keep no data in a snapshot: our own, and Valkey's engine for Lua scripts.
const MODULES_WITHOUT_DATA: [&str; 2] = ["remora", "lua"];

/// The last RDB version that Redis (7.2) and every Valkey have in common. Valkey refuses the later ones of Redis.
const RDB_SHARED: u32 = 11;

/// The RDB version of Redis 7.4. It is not known here which later Redis versions have a newer one.
const RDB_OPEN: u32 = 12;

/// The RDB version of a Redis version.
fn rdb_of_redis(version: Version) -> Option<u32> {
    match (version.major, version.minor) {
        (0..5, _) => None,
        (5 | 6, _) => Some(9),
        (7, 0 | 1) => Some(10),
        (7, 2 | 3) => Some(RDB_SHARED),
        _ => Some(RDB_OPEN),
    }
}

/// The family of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Family {
    /// Redis, or a server that does not name another family.
    #[default]
    Redis,
    /// Valkey.
    Valkey,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redis => "Redis",
            Self::Valkey => "Valkey",
        })
    }
}

/// A version such as `9.1.2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
    /// The patch number; 0 if there is none.
    pub patch: u32,
}

impl FromStr for Version {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut numbers = text.split('.').map(|part| {
            let digits = part.bytes().take_while(u8::is_ascii_digit).count();
            part.get(..digits).unwrap_or_default().parse::<u32>()
        });
        let major = numbers.next().unwrap_or(Ok(0))?;
        let minor = numbers.next().unwrap_or(Ok(0))?;
        let patch = numbers.next().unwrap_or(Ok(0))?;
        Ok(Self { major, minor, patch })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The role of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// It accepts writes.
    Primary,
    /// It follows another server.
    Replica,
}

impl Role {
    fn of(text: &str) -> Option<Self> {
        match text {
            "master" => Some(Self::Primary),
            "slave" | "replica" => Some(Self::Replica),
            _ => None,
        }
    }
}

/// A replica's link to its primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The primary's host as the replica uses it.
    pub host: String,
    /// The primary's port.
    pub port: u16,
    /// Whether the link is up.
    pub up: Option<bool>,
    /// Whether a full synchronisation is under way.
    pub syncing: Option<bool>,
}

impl Link {
    fn of(info: &Info) -> Option<Self> {
        Some(Self {
            host: info.get("master_host")?.to_owned(),
            port: info.number("master_port")?,
            up: info.get("master_link_status").map(|status| status == "up"),
            syncing: flag(info, "master_sync_in_progress"),
        })
    }
}

/// One database that holds keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Database {
    /// Its number.
    pub number: u32,
    /// The number of keys.
    pub keys: u64,
    /// How many of them expire.
    pub expires: u64,
    /// The number of hashes with fields that expire, if the server counts them.
    pub field_expires: u64,
}

/// A server's replication backlog. A replica can continue at any byte from `first` to the one after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backlog {
    /// Whether there is a backlog. Without one every synchronisation is a full one.
    pub active: bool,
    /// The most bytes that it can hold.
    pub size: u64,
    /// The stream offset of its first byte.
    pub first: u64,
    /// The number of bytes that it holds.
    pub held: u64,
}

impl Backlog {
    fn of(info: &Info) -> Option<Self> {
        Some(Self {
            active: flag(info, "repl_backlog_active")?,
            size: info.number("repl_backlog_size")?,
            first: info.number("repl_backlog_first_byte_offset")?,
            held: info.number("repl_backlog_histlen")?,
        })
    }

    /// Whether a replica whose next byte is `next` can continue.
    pub fn covers(&self, next: u64) -> bool {
        self.active && next >= self.first && next <= self.first.saturating_add(self.held)
    }
}

/// `master_replid2` and `second_repl_offset`. The latter is -1 if there is no former history.
fn former_history(info: &Info) -> Option<(ReplId, u64)> {
    Some((info.get("master_replid2")?.parse().ok()?, info.number("second_repl_offset")?))
}

fn family_and_version(info: &Info) -> (Family, Option<Version>) {
    // Valkey reports redis_version 7.2.4 for old clients, and its own version beside it.
    let own = info.get("valkey_version");
    if own.is_some() || info.get("server_name") == Some("valkey") {
        return (Family::Valkey, own.and_then(|text| text.parse().ok()));
    }
    (Family::Redis, info.get("redis_version").and_then(|text| text.parse().ok()))
}

fn flag(info: &Info, field: &str) -> Option<bool> {
    info.number::<i64>(field).map(|number| number != 0)
}

/// Reads lines such as `db0:keys=12,expires=3,avg_ttl=0`, in the order of their numbers.
fn databases(info: &Info) -> Vec<Database> {
    let mut found: Vec<_> = info.iter().filter_map(|(name, line)| database(name, line)).collect();
    found.sort_by_key(|database| database.number);
    found
}

fn database(name: &str, line: &str) -> Option<Database> {
    let number = name.strip_prefix("db")?.parse().ok()?;
    let field = |name: &str| {
        let mut pairs = line.split(',').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).and_then(|(_, value)| value.parse().ok())
    };
    // Redis and Valkey count hashes with expiring fields under different names.
    let field_expires = field("subexpiry").or_else(|| field("keys_with_volatile_items")).unwrap_or(0);
    Some(Database { number, keys: field("keys")?, expires: field("expires").unwrap_or(0), field_expires })
}

/// Reads `tls-port`, which `INFO` does not report. Unknown if `CONFIG GET` is not allowed or the server has no TLS.
async fn tls_port(client: &mut Client) -> Result<Option<u16>, ServerError> {
    Ok(client.config_number("tls-port").await?.filter(|port| *port != 0))
}

/// An estimate of the time from the question to the primary's `+CONTINUE`: a few round trips, and a busy server.
const HAND_OFF_TIME: Duration = Duration::from_millis(250);

impl Facts {
    /// Whether the server would continue a replica that has executed `history` up to `offset`, with room in its backlog
    /// for the bytes that clients write during the hand-off, `rate` of them per second. The error says why not.
    pub fn covers(&self, history: ReplId, offset: u64, rate: u64) -> Result<(), String> {
        let next = offset.saturating_add(1);
        if !self.continues(history, next) {
            return Err(self.other_history(history, offset));
        }
        let Some(backlog) = self.backlog else {
            return Err("the primary's INFO replication does not describe its backlog".into());
        };
        let end = backlog.end().saturating_sub(1);
        // The bytes that the primary can still write before it may drop the byte that the replica needs next. What it
        // holds beyond the size of its backlog it drops within milliseconds.
        let room = backlog.room(next);
        let needed = (rate as f64 * HAND_OFF_TIME.as_secs_f64()) as u64;
        if backlog.covers(next) && next >= backlog.kept() && room >= needed {
            return Ok(());
        }
        let advised = needed.max(end.saturating_sub(offset)).saturating_mul(2);
        let advised = advised.checked_next_power_of_two().unwrap_or(u64::MAX);
        Err(format!(
            "the primary's backlog of {} keeps offsets {} to {}, the replica is at {offset}, and clients write {}/s: set \
             repl-backlog-size to {} or more on the primary",
            Size::bytes(backlog.size),
            backlog.kept(),
            end,
            Size::bytes(rate),
            Size::bytes(advised)
        ))
    }

    /// Why the server does not continue `history` after `offset`.
    fn other_history(&self, history: ReplId, offset: u64) -> String {
        let Some(now) = self.replid else {
            return "the primary's INFO replication does not name its replication history".into();
        };
        match self.former {
            Some((former, end)) if former == history => format!(
                "the primary's history is {now} since offset {end}, and the replica is at offset {offset} of the former one, \
                 {history}"
            ),
            _ => format!("the primary's history is {now}, and the replica has another one, {history}"),
        }
    }
}

// [`OutputLimit`]: how much a server holds back for one replica before it closes that replica's connection.

/// `client-output-buffer-limit` for replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLimit {
    /// The server closes a connection whose buffer holds more bytes; 0 for no limit.
    hard: u64,
    /// The server closes a connection whose buffer has held more bytes for `soft_time`; 0 for no limit.
    soft: u64,
    soft_time: Duration,
    /// Whether the server has told it. Otherwise it is the servers' default.
    is_known: bool,
}

impl OutputLimit {
    /// The default of Redis and Valkey: `slave 256mb 64mb 60`.
    pub const DEFAULT: OutputLimit =
        OutputLimit { hard: 256 << 20, soft: 64 << 20, soft_time: Duration::from_secs(60), is_known: false };

    /// Asks the server. `facts` must be fresh.
    pub async fn read(client: &mut Client, facts: &Facts) -> OutputLimit {
        let text = client.config_get("client-output-buffer-limit").await.ok().flatten();
        text.and_then(|text| OutputLimit::parse(&text)).unwrap_or(OutputLimit::DEFAULT).with_backlog(facts)
    }

    /// Bytes that the server holds back for a replica at most; `None` for no limit.
    pub fn hard(&self) -> Option<u64> {
        (self.hard > 0).then_some(self.hard)
    }

    /// The lowest limit that a buffer can reach within this time; `None` for no limit.
    pub fn least_within(&self, time: Duration) -> Option<u64> {
        let soft = (self.soft > 0 && self.soft_time < time).then_some(self.soft);
        self.hard().into_iter().chain(soft).min()
    }

    /// Whether there is no limit of either kind.
    pub fn is_none(&self) -> bool {
        self.hard == 0 && self.soft == 0
    }

    /// Reads the setting, as `CONFIG GET` returns it: `normal 0 0 0 slave 268435456 67108864 60 pubsub …`.
    pub fn parse(text: &str) -> Option<OutputLimit> {
        let mut words = text.split_ascii_whitespace().skip_while(|word| *word != "slave" && *word != "replica").skip(1);
        let mut number = || words.next()?.parse::<u64>().ok();
        let (hard, soft, seconds) = (number()?, number()?, number()?);
        Some(OutputLimit { hard, soft, soft_time: Duration::from_secs(seconds), is_known: true })
    }

    /// The servers do not apply a hard limit below the size of the backlog, whose memory the buffer shares.
    fn with_backlog(self, facts: &Facts) -> OutputLimit {
        let backlog = facts.backlog.map_or(0, |backlog| backlog.size);
        OutputLimit { hard: if self.hard == 0 { 0 } else { self.hard.max(backlog) }, ..self }
    }

    /// Whether a buffer that has grown to `held` bytes within `took` reaches the limit.
    pub fn is_reached(&self, held: u64, took: Duration) -> bool {
        (self.hard > 0 && held >= self.hard) || (self.soft > 0 && held >= self.soft && took >= self.soft_time)
    }

    /// How long the buffer takes to reach the limit at this rate in bytes per second. `None`: it never does.
    pub fn time_at(&self, rate: u64) -> Option<Duration> {
        let fill = |bytes: u64| (bytes > 0 && rate > 0).then(|| Duration::from_secs_f64(bytes as f64 / rate as f64));
        let soft = fill(self.soft).map(|filled| filled + self.soft_time);
        fill(self.hard).into_iter().chain(soft).min()
    }
}

impl fmt::Display for OutputLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.hard, self.soft) {
            (0, 0) => f.write_str("no limit")?,
            (hard, 0) => write!(f, "{}", Size::bytes(hard))?,
            (0, soft) => write!(f, "{} for {} s", Size::bytes(soft), self.soft_time.as_secs())?,
            (hard, soft) => {
                write!(f, "{}, or {} for {} s", Size::bytes(hard), Size::bytes(soft), self.soft_time.as_secs())?;
            }
        }
        if self.is_known { Ok(()) } else { f.write_str(" by default (CONFIG GET is not permitted)") }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Backlog;

    const VALKEY_REPLICA: &str = "# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\nprocess_id:42\r\n\
        tcp_port:7001\r\n# Memory\r\nused_memory:1000\r\nused_memory_dataset:600\r\nmaxmemory:0\r\n# Persistence\r\nloading:0\r\n\
        # Replication\r\nrole:slave\r\nmaster_host:10.0.0.1\r\nmaster_port:7000\r\nmaster_link_status:down\r\n\
        master_sync_in_progress:1\r\nslave_repl_offset:77\r\nmaster_replid:0123456789abcdef0123456789abcdef01234567\r\n\
        master_repl_offset:70\r\nrepl_backlog_active:1\r\nrepl_backlog_size:100\r\nrepl_backlog_first_byte_offset:11\r\n\
        repl_backlog_histlen:60\r\nconnected_slaves:0\r\n# Cluster\r\ncluster_enabled:0\r\n# Keyspace\r\n\
        db0:keys=12,expires=3,avg_ttl=0\r\ndb11:keys=5,expires=0,avg_ttl=0,subexpiry=2\r\n";

    fn server(text: &str) -> Facts {
        Facts::from_info(&Info::parse(text.replace(' ', "\n").as_bytes()))
    }

    #[test]
    fn modules_that_a_replica_lacks_are_known_but_for_those_without_data() {
        let line = |name: &str| format!("module:name={name},ver=1,api=1,filters=0,usedby=[],using=[],options=[]");
        let with = |names: &[&str]| server(&names.iter().map(|name| line(name)).collect::<Vec<_>>().join(" "));
        let primary = with(&["search", "remora", "lua", "ReJSON"]);
        assert_eq!(primary.modules, ["search", "remora", "lua", "ReJSON"]);
        assert_eq!(primary.modules_missing_at(&with(&[])), ["search", "ReJSON"]);
        assert_eq!(primary.modules_missing_at(&with(&["ReJSON", "bf"])), ["search"]);
        assert!(primary.modules_missing_at(&primary).is_empty() && with(&[]).modules_missing_at(&primary).is_empty());
        assert_eq!(primary.highest_database(), None);
        assert_eq!(Facts::from_info(&Info::parse(VALKEY_REPLICA.as_bytes())).highest_database(), Some(11));
    }

    #[test]
    fn a_data_set_of_more_memory_than_is_used_is_not_believed() {
        let dataset = |used: u64, dataset: u64| {
            server(&format!("used_memory:{used} used_memory_dataset:{dataset}")).used_memory_dataset
        };
        assert_eq!((dataset(1000, 600), dataset(1000, 1000)), (Some(600), Some(1000)));
        // As INFO of an empty server in cluster mode has it.
        assert_eq!(dataset(1_900_000, u64::MAX - 70_000), None);
    }

    #[test]
    fn a_snapshot_that_a_server_surely_cannot_read_is_known_before() {
        let redis = |version: &str| server(&format!("redis_version:{version}"));
        let valkey =
            |version: &str| server(&format!("redis_version:7.2.4 server_name:valkey valkey_version:{version}"));
        let (old, middle, new, newest) = (redis("6.2.14"), redis("7.0.15"), redis("7.4.1"), redis("8.4.0"));
        for (primary, replica) in
            [(&middle, &old), (&valkey("8.1.1"), &middle), (&new, &valkey("9.1.2")), (&newest, &valkey("7.2.5"))]
        {
            let why = primary.unreadable_for(replica).unwrap();
            assert!(why.contains(&primary.name()) && why.contains(&replica.name()), "{why}");
        }
        for (primary, replica) in [
            (&old, &newest),
            (&new, &newest),
            (&newest, &new),
            (&middle, &valkey("9.1.2")),
            (&valkey("9.1.2"), &valkey("8.1.1")),
            (&valkey("9.0.0"), &valkey("9.1.2")),
            (&valkey("9.1.2"), &redis("7.2.4")),
            (&server("role:master"), &old),
        ] {
            assert_eq!(primary.unreadable_for(replica), None, "{} to {}", primary.name(), replica.name());
        }
    }

    #[test]
    fn a_replica_of_valkey_is_told_apart_from_the_redis_it_claims_to_be() {
        let facts = Facts::from_info(&Info::parse(VALKEY_REPLICA.as_bytes()));
        assert_eq!(facts.name(), "Valkey 9.1.2");
        assert_eq!(facts.role, Some(Role::Replica));
        assert_eq!(facts.offset, Some(77));
        let link = Link { host: "10.0.0.1".into(), port: 7000, up: Some(false), syncing: Some(true) };
        assert_eq!(facts.link, Some(link));
        assert_eq!(facts.keys(), 17);
        assert_eq!(facts.databases.get(1), Some(&Database { number: 11, keys: 5, expires: 0, field_expires: 2 }));
        assert_eq!((facts.loading, facts.cluster_enabled), (Some(false), Some(false)));
        assert!(facts.has_redis(Version { major: 7, minor: 0, patch: 0 }));
    }

    #[test]
    fn a_backlog_covers_its_bytes_and_the_next_one() {
        let backlog = Backlog { active: true, size: 100, first: 11, held: 60 };
        let covered = [10, 11, 70, 71, 72].map(|next| backlog.covers(next));
        assert_eq!(covered, [false, true, true, true, false]);
        assert!(!Backlog { active: false, ..backlog }.covers(20));
    }

    #[test]
    fn a_server_continues_its_own_history_and_the_former_one_up_to_its_end() {
        let replid = |digit: &str| digit.repeat(40);
        let info = |second: &str| {
            let (now, former) = (replid("a"), replid("b"));
            server(&format!("master_replid:{now} master_replid2:{former} second_repl_offset:{second}"))
        };
        let asks = |facts: &Facts, digit: &str, next| facts.continues(replid(digit).parse().unwrap(), next);
        let facts = info("101");
        assert!(asks(&facts, "a", 5000));
        assert_eq!([100, 101, 102].map(|next| asks(&facts, "b", next)), [true, true, false]);
        assert!(!asks(&facts, "c", 100));
        assert!(!asks(&info("-1"), "b", 1));
        assert!(!asks(&Facts::default(), "a", 1));
    }

    #[test]
    fn a_server_that_says_nothing_leaves_everything_open() {
        let facts = Facts::from_info(&Info::parse(b""));
        assert!(facts.version.is_none() && facts.role.is_none() && facts.offset.is_none() && facts.backlog.is_none());
        assert!(!facts.has_redis(Version { major: 1, minor: 0, patch: 0 }));
    }

    #[test]
    fn versions_with_suffixes_are_understood() {
        assert_eq!("9.1.0-rc2".parse::<Version>().unwrap(), Version { major: 9, minor: 1, patch: 0 });
        assert_eq!("255.255".parse::<Version>().unwrap().to_string(), "255.255.0");
        assert!("unstable".parse::<Version>().is_err());
    }

    const SETTING: &str = "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60";

    #[test]
    fn the_limit_for_replicas_is_read_from_the_setting() {
        let limit = OutputLimit::parse(SETTING).unwrap();
        assert_eq!(OutputLimit { is_known: false, ..limit }, OutputLimit::DEFAULT);
        assert_eq!(OutputLimit::parse(&SETTING.replace("slave", "replica")), Some(limit));
        assert_eq!(limit.to_string(), "256 MiB, or 64 MiB for 60 s");
        for wrong in ["", "normal 0 0 0", "slave 1 2", "slave 1 2 x"] {
            assert_eq!(OutputLimit::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_limit_is_reached_at_once_or_after_a_time_and_never_below_the_backlog() {
        let limit = OutputLimit { hard: 100, soft: 50, soft_time: Duration::from_secs(10), is_known: true };
        let soon = Duration::from_secs(1);
        assert!(limit.is_reached(100, soon) && !limit.is_reached(99, soon));
        assert!(limit.is_reached(50, Duration::from_secs(10)) && !limit.is_reached(49, Duration::from_secs(99)));
        assert_eq!(limit.time_at(10), Some(Duration::from_secs(10)));
        assert_eq!(limit.time_at(0), None);
        assert_eq!(limit.least_within(Duration::from_secs(25)), Some(50));
        assert_eq!(limit.least_within(Duration::from_secs(10)), Some(100), "the soft one takes longer");
        let none = OutputLimit { hard: 0, soft: 0, ..limit };
        assert!(!none.is_reached(u64::MAX, Duration::MAX) && none.time_at(1).is_none());
        let backlog = Backlog { active: true, size: 500, first: 1, held: 1 };
        let facts = Facts { backlog: Some(backlog), ..Facts::default() };
        assert_eq!(limit.with_backlog(&facts).hard, 500);
        assert_eq!(none.with_backlog(&facts).hard, 0);
    }
}
