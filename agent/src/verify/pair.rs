//! The two servers side by side: which database each has selected, how far the one is behind the other, what both can do.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use remora_redis::resp::Frame;
use tokio::time::sleep;

use crate::server::{Client, Facts, Family, Role, Server, ServerError, ServerUrl, Version};

/// One of the two servers.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) client: Client,
    pub(super) facts: Facts,
    database: Option<u32>,
}

/// Both, and what they have in common.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) primary: Side,
    pub(super) replica: Side,
    pub(super) abilities: Abilities,
    /// Whether the replica follows the history of the primary, so that their offsets can be compared.
    related: bool,
}

/// What both servers can tell, so that neither is found to differ by what only the other says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Abilities {
    /// `PEXPIRETIME` (7.0): when a key expires, to the millisecond. Before it: how long it has left.
    pub(super) absolute_expiry: bool,
    /// `HPEXPIRETIME` (Redis 7.4, Valkey 9.0): when fields of a hash expire.
    pub(super) field_expiry: bool,
    /// Counters of streams (7.0).
    pub(super) stream_counters: bool,
}

/// Whether the replica is known to have everything the primary had when it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CaughtUp {
    Yes,
    /// It isn't, or there is no telling.
    Unknown,
}

impl Pair {
    pub(super) fn new(primary: Side, replica: Side) -> Self {
        let (one, other) = (&primary.facts, &replica.facts);
        let related = one.replid.is_some() && one.replid == other.replid && other.role == Some(Role::Replica);
        let abilities = Abilities::of(one, other);
        Self { primary, replica, abilities, related }
    }

    pub(super) async fn select(&mut self, database: u32) -> Result<(), ServerError> {
        tokio::try_join!(self.primary.select(database), self.replica.select(database)).map(drop)
    }

    /// Waits until the replica has executed what the primary has executed by now; if that can't be told, waits a moment.
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
        // It stands still: waiting again and again would only take longer to find the same.
        self.related = false;
        Ok(CaughtUp::Unknown)
    }

    /// Whether nothing was written for a moment, as far as the primary's offset tells.
    pub(super) async fn is_quiet(&mut self) -> Result<bool, ServerError> {
        let before = self.primary.offset().await?;
        sleep(QUIET_PAUSE).await;
        Ok(before == self.primary.offset().await?)
    }

    /// Compares the function libraries: what differs is looked at again, up to `rounds` times. Only what differed in every look is
    /// called different, as a library may go and come back the same while both servers are asked; if it also changed whenever it was
    /// looked at, it is undecided.
    pub(super) async fn compare_functions(&mut self, rounds: u32) -> Result<Functions, ServerError> {
        let mut suspects: Option<BTreeSet<String>> = None; // at first, all
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
            // A server without functions has none.
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
            // Without it a replica in a cluster sends every reader to its primary.
            client.command(&["READONLY"]).await?;
        }
        Ok(Self { client, facts, database: None })
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

    pub(super) async fn offset(&mut self) -> Result<Option<u64>, ServerError> {
        Ok(Facts::from_info(&self.client.info("replication").await?).offset)
    }

    /// `DEBUG DIGEST`; `None` if the server doesn't allow it.
    pub(super) async fn digest(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, ServerError> {
        match self.client.command_within(limit, &["DEBUG", "DIGEST"]).await {
            Ok(frame) => Ok(frame.into_bytes().ok()),
            Err(error) if error.refusal().is_some() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All function libraries; `None` if the server knows none or doesn't tell.
    async fn functions(&mut self) -> Result<Option<Libraries>, ServerError> {
        let answer = match self.client.command(&["FUNCTION", "LIST", "WITHCODE"]).await {
            Ok(answer) => answer,
            Err(error) if error.refusal().is_some() => return Ok(None),
            Err(error) => return Err(error),
        };
        let libraries = answer.into_array().map_err(|other| self.client.unexpected("FUNCTION LIST", &other))?;
        Ok(Some(libraries.iter().map(library).collect()))
    }
}

/// What came of comparing functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Functions {
    /// Neither server has any, or says so.
    Unknown,
    Compared {
        libraries: usize,
        same: bool,
        /// Libraries that changed whenever they were looked at.
        undecided: usize,
    },
}

/// Function libraries as text, by name.
type Libraries = BTreeMap<String, String>;

/// A library's name, and all of it as text: name, engine and code. The list of its functions follows from the code and comes in any
/// order.
fn library(frame: &Frame) -> (String, String) {
    let fields = frame.as_array().unwrap_or_default();
    let pairs = fields.chunks_exact(2).filter_map(|pair| Some((pair.first()?.as_str()?, pair.get(1)?.as_bytes()?)));
    let mut pairs: Vec<_> = pairs.map(|(field, value)| (field, value.escape_ascii().to_string())).collect();
    pairs.sort_unstable();
    let name = pairs.iter().find(|(field, _)| *field == "library_name").map(|(_, name)| name.clone());
    let lines: Vec<_> = pairs.iter().map(|(field, value)| format!("{field}={value}")).collect();
    let text = lines.join("\n");
    (name.unwrap_or_else(|| text.clone()), text) // without a name it is still told from others
}

impl Abilities {
    fn of(one: &Facts, other: &Facts) -> Self {
        let both = |able: &dyn Fn(&Facts) -> bool| able(one) && able(other);
        let is_7 = |facts: &Facts| facts.has_redis(Version { major: 7, minor: 0, patch: 0 });
        Self { absolute_expiry: both(&is_7), field_expiry: both(&expires_fields), stream_counters: both(&is_7) }
    }
}

fn expires_fields(facts: &Facts) -> bool {
    let since = match facts.family {
        Family::Redis => Version { major: 7, minor: 4, patch: 0 },
        Family::Valkey => Version { major: 9, minor: 0, patch: 0 },
    };
    facts.version.is_some_and(|version| version >= since)
}

/// A replica that is behind by more than this will not be waited for; its differences are then found by looking again.
const CATCH_UP_LIMIT: Duration = Duration::from_secs(30);
/// Acknowledged offsets are exact and local; asking this often costs a server nothing that it would notice.
const CATCH_UP_POLL: Duration = Duration::from_millis(2);
/// Between looks at servers whose offsets have nothing to do with each other: longer than replication usually lags.
const UNRELATED_PAUSE: Duration = Duration::from_millis(100);
/// Long enough to see a write among a hundred a second, short enough to be no delay.
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
        let mixed = Abilities { absolute_expiry: true, field_expiry: false, stream_counters: true };
        assert_eq!(Abilities::of(&redis_7, &valkey_9), mixed);
        assert!(Abilities::of(&valkey_9, &valkey_9).field_expiry);
        assert!(Abilities::of(&facts(Family::Redis, 7, 4), &valkey_9).field_expiry);
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
