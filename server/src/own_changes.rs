//! Own changes: what a server changes of its data by itself while it is a replica, and what it could not execute.
//!
//! A replica that does only what its primary says holds the same data at the same offset. Three things are against
//! that: it removes keys when its own memory is full (`replica-ignore-maxmemory no`), its clients may write
//! (`replica-read-only no`), and commands of the primary may fail there. The first two are settings. The third is
//! counted: `unexpected_error_replies` counts the errors that a server would have answered to its primary, and not
//! those of ordinary clients.

use std::collections::BTreeMap;

use remora_redis::info::Info;
use serde::{Deserialize, Serialize};

use super::{Client, Facts, Role, ServerError};
use remora_base::units::Size;

/// The settings by which a replica changes its data by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnChanges {
    /// It removes keys, or refuses writes, when it uses so many bytes: the limit and its policy.
    pub limit: Option<(u64, String)>,
    /// Its clients may write to it.
    pub is_writable: bool,
}

impl OwnChanges {
    /// Asks the server; `None` if it does not tell.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn read(client: &mut Client) -> Result<Option<OwnChanges>, ServerError> {
        let mut values = Vec::new();
        for name in ["replica-ignore-maxmemory", "maxmemory", "maxmemory-policy", "replica-read-only"] {
            match client.config_get(name).await {
                Ok(value) => values.push(value),
                Err(error) if error.refusal().is_some() => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let [ignores, limit, policy, read_only] = <[_; 4]>::try_from(values).unwrap_or_default();
        let (Some(ignores), Some(read_only)) = (ignores, read_only) else { return Ok(None) };
        let limit = limit.and_then(|text| text.parse().ok()).filter(|bytes| *bytes > 0 && ignores == "no");
        let limit = limit.map(|bytes| (bytes, policy.unwrap_or_default()));
        Ok(Some(OwnChanges { limit, is_writable: read_only == "no" }))
    }

    /// What the limit does, for messages.
    pub fn of_the_limit(&self) -> Option<String> {
        let (bytes, policy) = self.limit.as_ref()?;
        let what = match policy.as_str() {
            "noeviction" => "refuses its primary's writes",
            _ => "removes keys by itself",
        };
        let size = Size::bytes(*bytes);
        Some(format!("{what} when it uses {size} (replica-ignore-maxmemory no, maxmemory, maxmemory-policy {policy})"))
    }
}

/// Why a snapshot of this server would not be what its primary holds; `None` if nothing speaks against it. Of a primary
/// nothing does.
///
/// # Errors
/// The connection failed.
pub async fn why_not_as_its_primary(client: &mut Client) -> Result<Option<String>, ServerError> {
    let info = client.info("everything").await?;
    let (facts, url) = (Facts::from_info(&info), client.server().url().to_string());
    if facts.role != Some(Role::Replica) {
        return Ok(None);
    }
    let counted = Counted::of(&info);
    if let Some(errors) = counted.unexpected.filter(|errors| *errors > 0) {
        return Ok(Some(format!(
            "the server {url} is a replica that could not execute {errors} of its primary's commands (unexpected_error_replies; its \
             log names them), so it does not hold what its primary holds: let it take a full copy and send it CONFIG RESETSTAT, \
             or run remora source beside the primary"
        )));
    }
    if counted.evicted.is_some_and(|keys| keys > 0) {
        tracing::warn!(
            "the server {url} is a replica, and has removed {} since its start because its memory was full; if it was a \
             replica then, its snapshots lack them",
            remora_base::units::counted(counted.evicted.unwrap_or(0), "key")
        );
    }
    let Some(own) = OwnChanges::read(client).await? else {
        tracing::warn!(
            "the server {url} is a replica and does not tell its settings (CONFIG GET): whether it removes keys by itself, or \
             takes writes of its own, is not known"
        );
        return Ok(None);
    };
    if let Some(what) = own.of_the_limit() {
        return Ok(Some(format!(
            "the server {url} is a replica that {what}, so its snapshots need not hold what its primary holds: set \
             replica-ignore-maxmemory yes there and let it take a full copy, or run remora source beside the primary"
        )));
    }
    if own.is_writable {
        return Ok(Some(format!(
            "the server {url} is a replica to which clients may write (replica-read-only no), so its snapshots need not hold what \
             its primary holds: set replica-read-only yes there, and let it take a full copy if it was written to, or run remora \
             source beside the primary"
        )));
    }
    Ok(None)
}

/// What a server has counted of such changes since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    run_id: Option<String>,
    /// Errors that it would have answered to its primary; `None` if it does not count them.
    pub unexpected: Option<u64>,
    /// Keys that it has removed because its memory was full.
    pub evicted: Option<u64>,
    /// Calls that failed or were rejected, by command, of all clients.
    #[serde(skip)]
    failed: BTreeMap<String, u64>,
}

impl Counted {
    /// Takes them from the text of an `INFO everything`.
    pub fn of(info: &Info) -> Counted {
        let calls = info.iter().filter_map(|(name, line)| Some((name.strip_prefix("cmdstat_")?, failed_calls(line)?)));
        Counted {
            run_id: info.get("run_id").map(str::to_owned),
            unexpected: info.number("unexpected_error_replies"),
            evicted: info.number("evicted_keys"),
            failed: calls.map(|(name, calls)| (name.to_owned(), calls)).collect(),
        }
    }

    /// Asks the server.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn read(client: &mut Client) -> Result<Counted, ServerError> {
        Ok(Counted::of(&client.info("everything").await?))
    }

    /// Whether both are of one run of the server.
    pub fn is_of_the_run_of(&self, other: &Counted) -> bool {
        self.run_id == other.run_id
    }

    /// What came since `before`. A server counts from zero after a restart and after `CONFIG RESETSTAT`.
    pub fn since(&self, before: &Counted) -> Counted {
        let is_same_run = self.run_id == before.run_id;
        let less = |now: u64, then: u64| if is_same_run && now >= then { now - then } else { now };
        let count = |now: Option<u64>, then: Option<u64>| Some(less(now?, then.unwrap_or(0)));
        let failed = self.failed.iter().map(|(name, now)| {
            let then = before.failed.get(name).copied().unwrap_or(0);
            (name.clone(), less(*now, then))
        });
        Counted {
            run_id: self.run_id.clone(),
            unexpected: count(self.unexpected, before.unexpected),
            evicted: count(self.evicted, before.evicted),
            failed: failed.filter(|(_, calls)| *calls > 0).collect(),
        }
    }

    /// The commands of a stream that failed, as far as the server tells them apart: ordinary clients' count too, but
    /// for those that no stream contains.
    pub fn failed_commands(&self) -> Vec<&str> {
        let is_streamed = |name: &&str| !NEVER_STREAMED.iter().any(|other| name.split('|').next() == Some(other));
        self.failed.keys().map(String::as_str).filter(is_streamed).collect()
    }
}

/// Commands that agents and operators send, and that no stream contains.
const NEVER_STREAMED: [&str; 14] = [
    "acl",
    "auth",
    "client",
    "cluster",
    "command",
    "config",
    "debug",
    "hello",
    "info",
    "psync",
    "replconf",
    "replicaof",
    "slaveof",
    "latency",
];

/// `rejected_calls` and `failed_calls` of a line such as
/// `calls=1,usec=5,usec_per_call=5.00,rejected_calls=0,failed_calls=2`.
fn failed_calls(line: &str) -> Option<u64> {
    let of = |name: &str| {
        let mut pairs = line.split(',').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name)?.1.parse::<u64>().ok()
    };
    Some(of("rejected_calls")?.saturating_add(of("failed_calls")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(text: &str) -> Counted {
        Counted::of(&Info::parse(text.as_bytes()))
    }

    #[test]
    fn counts_are_those_since_the_earlier_look_in_the_same_run() {
        let before = counted(
            "run_id:a\r\nunexpected_error_replies:2\r\nevicted_keys:5\r\n\
             cmdstat_set:calls=9,usec=1,usec_per_call=1.00,rejected_calls=1,failed_calls=0\r\n",
        );
        let text = "unexpected_error_replies:3\r\nevicted_keys:5\r\n\
             cmdstat_set:calls=9,usec=1,usec_per_call=1.00,rejected_calls=1,failed_calls=0\r\n\
             cmdstat_config|set:calls=1,usec=1,usec_per_call=1.00,rejected_calls=0,failed_calls=1\r\n\
             cmdstat_json.set:calls=1,usec=1,usec_per_call=1.00,rejected_calls=0,failed_calls=1\r\n";
        let since = counted(&format!("run_id:a\r\n{text}")).since(&before);
        assert_eq!((since.unexpected, since.evicted), (Some(1), Some(0)));
        assert_eq!(since.failed_commands(), ["json.set"]);
        let restarted = counted(&format!("run_id:b\r\n{text}")).since(&before);
        assert_eq!((restarted.unexpected, restarted.evicted), (Some(3), Some(5)));
        assert_eq!(restarted.failed_commands(), ["json.set", "set"]);
    }

    #[test]
    fn counts_that_were_reset_meanwhile_are_all_new() {
        let before = counted("run_id:a\r\nunexpected_error_replies:7\r\n");
        assert_eq!(counted("run_id:a\r\nunexpected_error_replies:1\r\n").since(&before).unexpected, Some(1));
    }

    #[test]
    fn a_server_that_counts_nothing_says_nothing() {
        let since = counted("run_id:a\r\n").since(&counted("run_id:a\r\n"));
        assert_eq!((since.unexpected, since.evicted, since.failed_commands().len()), (None, None, 0));
    }
}
