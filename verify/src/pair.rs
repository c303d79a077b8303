//! The two servers side by side: which database each has selected, how far the replica is behind, and what both can do.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use remora_redis::resp::Frame;
use tokio::time::sleep;

use remora_server::{Client, Facts, Family, Role, Server, ServerError, ServerUrl, Version};

/// One of the two servers.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) client: Client,
    pub(super) facts: Facts,
    /// `HPEXPIRETIME` (Redis 7.4, Valkey 9.0): when fields of a hash expire. On other servers none does.
    pub(super) expires_fields: bool,
    /// The other server replicates this one.
    pub(super) is_replicated: bool,
    database: Option<u32>,
}

/// Both servers, and what they have in common.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) primary: Side,
    pub(super) replica: Side,
    pub(super) abilities: Abilities,
    /// Whether the replica follows the primary's history, so that their offsets can be compared.
    related: bool,
}

/// What both servers can report. What only one of them reports must not count as a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Abilities {
    /// `PEXPIRETIME` (7.0): when a key expires, to the millisecond. Older servers report the remaining time to live.
    pub(super) absolute_expiry: bool,
    /// Counters of streams (7.0).
    pub(super) stream_counters: bool,
    /// How many entries a group has read (Redis 7.4, Valkey 8.0). Older primaries count them, and their replicas do
    /// not always.
    pub(super) entries_read: bool,
}

/// Whether the replica is known to have everything that the primary had when it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CaughtUp {
    Yes,
    /// It has not, or that is unknown.
    Unknown,
}

impl Pair {
    pub(super) fn new(mut primary: Side, replica: Side) -> Self {
        let (one, other) = (&primary.facts, &replica.facts);
        let related = one.replid.is_some() && one.replid == other.replid && other.role == Some(Role::Replica);
        let abilities = Abilities::of(one, other);
        primary.is_replicated = related;
        Self { primary, replica, abilities, related }
    }

    pub(super) async fn select(&mut self, database: u32) -> Result<(), ServerError> {
        tokio::try_join!(self.primary.select(database), self.replica.select(database)).map(drop)
    }

    /// Whether each server has that database.
    pub(super) async fn have(&mut self, database: u32) -> Result<(bool, bool), ServerError> {
        tokio::try_join!(self.primary.has(database), self.replica.has(database))
    }

    /// Whether a key of this database expires on either side, or did when the comparison began.
    pub(super) fn expires_in(&self, database: u32) -> bool {
        let both = self.primary.facts.databases.iter().chain(&self.replica.facts.databases);
        both.filter(|facts| facts.number == database).any(|facts| facts.expires > 0)
    }

    /// Waits until the replica has executed what the primary has executed by now. If that is unknown, it waits for a
    /// moment.
    pub(super) async fn catch_up(&mut self) -> Result<CaughtUp, ServerError> {
        let wanted = if self.related { self.primary.offset().await? } else { None };
        let Some(wanted) = wanted else {
            sleep(UNRELATED_PAUSE).await;
            return Ok(CaughtUp::Unknown);
        };
        let begun = Instant::now();
        while begun.elapsed() < CATCH_UP_LIMIT {
            if self.replica.offset().await?.is_some_and(|offset| offset >= wanted) {
                return Ok(CaughtUp::Yes);
            }
            sleep(CATCH_UP_POLL).await;
        }
        // The replica makes no progress: further waits would take time and find the same.
        self.related = false;
        Ok(CaughtUp::Unknown)
    }

    /// Whether nothing was written for a moment, as far as the primary's offset shows.
    pub(super) async fn is_quiet(&mut self) -> Result<bool, ServerError> {
        let before = self.primary.offset().await?;
        sleep(QUIET_PAUSE).await;
        Ok(before == self.primary.offset().await?)
    }

    /// Compares the function libraries. Libraries that differ are compared again, up to `rounds` times. Only a library
    /// that differed every time counts as different, because it may be deleted and loaded again while both servers are
    /// queried. If it also changed every time, it is undecided.
    pub(super) async fn compare_functions(&mut self, rounds: u32) -> Result<Functions, ServerError> {
        let mut suspects: Option<BTreeSet<String>> = None; // `None`: all, in the first round
        let mut stood_still = BTreeSet::new();
        let mut again = 0;
        loop {
            let before = self.primary.functions().await?;
            if again > 0 {
                self.catch_up().await?;
            }
            let held = self.replica.functions().await?;
            let after = self.primary.functions().await?;
            if before.is_none() && held.is_none() {
                return Ok(Functions::Unknown);
            }
            // A server that does not support functions has none.
            let [before, held, after] = [before, held, after].map(Option::unwrap_or_default);
            let open = suspects.get_or_insert_with(|| before.keys().chain(held.keys()).cloned().collect());
            open.retain(|name| held.get(name) != before.get(name) && held.get(name) != after.get(name));
            stood_still.extend(open.iter().filter(|name| before.get(*name) == after.get(*name)).cloned());
            if open.is_empty() || again == rounds {
                let same = open.is_disjoint(&stood_still);
                let undecided = if same { open.len() } else { 0 };
                return Ok(Functions::Compared { libraries: before.len().max(held.len()), same, undecided });
            }
            again += 1;
        }
    }
}

impl Side {
    /// Connects and reads the facts.
    pub(super) async fn open(server: &Server) -> Result<Self, ServerError> {
        let mut client = server.connect().await?;
        let facts = Facts::read(&mut client).await?;
        if facts.cluster_enabled == Some(true) && facts.role == Some(Role::Replica) {
            // Without READONLY a replica in a cluster redirects every reader to its primary.
            client.command(&["READONLY"]).await?;
        }
        let expires_fields = expires_fields(&facts);
        Ok(Self { client, facts, expires_fields, is_replicated: false, database: None })
    }

    pub(super) fn url(&self) -> &ServerUrl {
        self.client.server().url()
    }

    pub(super) async fn select(&mut self, database: u32) -> Result<(), ServerError> {
        if self.database != Some(database) {
            self.client.select(database).await?;
            self.database = Some(database);
        }
        Ok(())
    }

    /// Whether the server has that database: it has as many as its `databases` says.
    async fn has(&mut self, database: u32) -> Result<bool, ServerError> {
        match self.select(database).await {
            Err(ServerError::Refused { text, .. }) if NO_DATABASE.iter().any(|words| text.contains(words)) => Ok(false),
            selected => selected.map(|()| true),
        }
    }

    /// How many keys that database had when the comparison began.
    pub(super) fn keys_in(&self, database: u32) -> u64 {
        let held = self.facts.databases.iter().find(|held| held.number == database);
        held.map_or(0, |held| held.keys)
    }

    pub(super) async fn offset(&mut self) -> Result<Option<u64>, ServerError> {
        Ok(Facts::from_info(&self.client.info("replication").await?).offset)
    }

    /// Queries `DEBUG DIGEST`; `None` if the server does not allow it.
    pub(super) async fn digest(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, ServerError> {
        match self.client.command_within(limit, &["DEBUG", "DIGEST"]).await {
            Ok(frame) => Ok(frame.into_bytes().ok()),
            Err(error) if error.refusal().is_some() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All function libraries; `None` if the server does not support functions, or does not allow the query and says
    /// that it has none.
    async fn functions(&mut self) -> Result<Option<Libraries>, ServerError> {
        let answer = match self.client.command(&["FUNCTION", "LIST", "WITHCODE"]).await {
            Ok(answer) => answer,
            // There are some, and nothing would be known of them.
            Err(error) if error.refusal().is_some() && self.facts.libraries.is_some_and(|count| count > 0) => {
                return Err(error);
            }
            Err(error) if error.refusal().is_some() => return Ok(None),
            Err(error) => return Err(error),
        };
        let libraries = answer.into_array().map_err(|other| self.client.unexpected("FUNCTION LIST", &other))?;
        Ok(Some(libraries.iter().map(library).collect()))
    }
}

/// The result of the comparison of functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Functions {
    /// Neither server has any, or neither reports them.
    Unknown,
    Compared {
        libraries: usize,
        same: bool,
        /// Libraries that changed every time they were compared.
        undecided: usize,
    },
}

/// Function libraries as text, by name.
type Libraries = BTreeMap<String, String>;

/// A library's name, and its content as text: name, engine and code. The list of its functions follows from the code
/// and has no fixed order.
fn library(frame: &Frame) -> (String, String) {
    let fields = frame.as_array().unwrap_or_default();
    let pairs = fields.chunks_exact(2).filter_map(|pair| Some((pair.first()?.as_str()?, pair.get(1)?.as_bytes()?)));
    let mut pairs: Vec<_> = pairs.map(|(field, value)| (field, value.escape_ascii().to_string())).collect();
    pairs.sort_unstable();
    let name = pairs.iter().find(|(field, _)| *field == "library_name").map(|(_, name)| name.clone());
    let lines: Vec<_> = pairs.iter().map(|(field, value)| format!("{field}={value}")).collect();
    let text = lines.join("\n");
    (name.unwrap_or_else(|| text.clone()), text) // without a name, its text tells it from others
}

impl Abilities {
    fn of(one: &Facts, other: &Facts) -> Self {
        let both = |able: &dyn Fn(&Facts) -> bool| able(one) && able(other);
        let is_7 = |facts: &Facts| facts.has_redis(Version { major: 7, minor: 0, patch: 0 });
        Self {
            absolute_expiry: both(&is_7),
            stream_counters: both(&is_7),
            entries_read: both(&replicates_entries_read),
        }
    }
}

fn expires_fields(facts: &Facts) -> bool {
    is_since(facts, (7, 4), (9, 0))
}

/// Measured: Redis 7.2.6 and Valkey 7.2.7 do not, Redis 7.4.1 and Valkey 8.0.1 do.
fn replicates_entries_read(facts: &Facts) -> bool {
    is_since(facts, (7, 4), (8, 0))
}

fn is_since(facts: &Facts, redis: (u32, u32), valkey: (u32, u32)) -> bool {
    let (major, minor) = match facts.family {
        Family::Redis => redis,
        Family::Valkey => valkey,
    };
    facts.version.is_some_and(|version| version >= Version { major, minor, patch: 0 })
}

/// What servers say of a database that they do not have.
const NO_DATABASE: [&str; 2] = ["DB index is out of range", "invalid DB index"];

/// `verify` does not wait longer for a replica to catch up. The differences of a slower one are found by comparing
/// again.
const CATCH_UP_LIMIT: Duration = Duration::from_secs(30);
/// How often the offsets are queried while waiting. They are exact, and the query costs a server next to nothing.
const CATCH_UP_POLL: Duration = Duration::from_millis(2);
/// The pause between comparisons of servers whose offsets are unrelated: longer than replication usually lags.
const UNRELATED_PAUSE: Duration = Duration::from_millis(100);
/// How long a server must not be written to: long enough to notice a write among a hundred per second, short enough to
/// be no delay.
const QUIET_PAUSE: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(family: Family, major: u32, minor: u32) -> Facts {
        Facts { family, version: Some(Version { major, minor, patch: 0 }), ..Facts::default() }
    }

    #[test]
    fn only_what_both_can_tell_is_compared() {
        let (redis_7, valkey_9) = (facts(Family::Redis, 7, 0), facts(Family::Valkey, 9, 1));
        let mixed = Abilities { absolute_expiry: true, stream_counters: true, entries_read: false };
        assert_eq!(Abilities::of(&redis_7, &valkey_9), mixed);
        assert!(Abilities::of(&facts(Family::Redis, 7, 4), &valkey_9).entries_read);
        assert!(!Abilities::of(&facts(Family::Redis, 7, 2), &valkey_9).entries_read);
        assert!(expires_fields(&facts(Family::Redis, 7, 4)) && expires_fields(&valkey_9) && !expires_fields(&redis_7));
        assert!(!Abilities::of(&facts(Family::Redis, 6, 2), &valkey_9).absolute_expiry);
    }

    #[test]
    fn a_library_is_the_same_in_whatever_order_it_is_told() {
        let word = |text: &str| Frame::Bulk(text.into());
        let one = Frame::Array(vec![word("library_name"), word("l"), word("library_code"), word("#!lua")]);
        let other = Frame::Array(vec![word("library_code"), word("#!lua"), word("library_name"), word("l")]);
        assert_eq!(library(&one), library(&other));
        let changed = Frame::Array(vec![word("library_name"), word("l"), word("library_code"), word("#!lua2")]);
        assert_ne!(library(&one), library(&changed));
    }
}
