//! What differs between two servers besides their data: a migration copies none of it.

use std::collections::{BTreeMap, BTreeSet};

use remora_redis::resp::Frame;
use remora_wire::printable;

use crate::server::{Client, Facts, ServerError};

/// Settings that every server has for itself, by the beginning of their names: addresses, files, secrets, its place in
/// a group, and the host's.
const OWN: [&str; 30] = [
    "aclfile",
    "appenddirname",
    "appendfilename",
    "bind",
    "cluster-",
    "daemonize",
    "dbfilename",
    "dir",
    "enable-",
    "ignore-warnings",
    "io-threads",
    "locale-collate",
    "logfile",
    "masterauth",
    "masteruser",
    "oom-score-adj",
    "pidfile",
    "port",
    "primaryauth",
    "primaryuser",
    "proc-title-template",
    "rdma-",
    "replica-announce",
    "replicaof",
    "requirepass",
    "server-cpulist",
    "slave-announce",
    "slaveof",
    "tls-",
    "unixsocket",
];

/// Settings that one line names at most; all are counted.
const NAMED: usize = 12;

/// The differences, a line for each kind.
///
/// # Errors
/// A connection failed. What a server does not tell is passed over.
pub(super) async fn between(
    old: &mut Client,
    new: &mut Client,
    of_old: &Facts,
    of_new: &Facts,
) -> Result<Vec<String>, ServerError> {
    let mut lines = Vec::new();
    let missing = of_old.modules_missing_at(of_new);
    if !missing.is_empty() {
        lines.push(format!("modules that the new server lacks: {}", printable(&missing.join(", "))));
    }
    if let (Some(here), Some(there)) = (users(old).await?, users(new).await?) {
        let missing: Vec<_> = here.difference(&there).cloned().collect();
        if !missing.is_empty() {
            lines.push(format!("users that the new server lacks (ACL LIST, not copied): {}", shown(&missing)));
        }
    }
    if let (Some(here), Some(there)) = (settings(old).await?, settings(new).await?) {
        let other = differing(&here, &there);
        if !other.is_empty() {
            lines.push(format!("{} settings differ (CONFIG GET *, not copied): {}", other.len(), shown(&other)));
        }
    }
    Ok(lines)
}

async fn users(server: &mut Client) -> Result<Option<BTreeSet<String>>, ServerError> {
    let answer = optional(server.command(&["ACL", "USERS"]).await)?;
    Ok(answer.and_then(|answer| {
        Some(answer.as_array()?.iter().filter_map(|name| Some(printable(name.as_str()?).into_owned())).collect())
    }))
}

async fn settings(server: &mut Client) -> Result<Option<BTreeMap<String, String>>, ServerError> {
    let Some(answer) = optional(server.command(&["CONFIG", "GET", "*"]).await)? else { return Ok(None) };
    let words = answer.as_array().unwrap_or_default();
    let pair = |pair: &[Frame]| Some((pair.first()?.as_str()?.to_owned(), pair.get(1)?.as_str()?.to_owned()));
    Ok(Some(words.chunks_exact(2).filter_map(pair).collect()))
}

/// `None` if the server refuses to tell.
fn optional(answer: Result<Frame, ServerError>) -> Result<Option<Frame>, ServerError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.refusal().is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Settings that both have and that differ: name, old value, new value.
fn differing(here: &BTreeMap<String, String>, there: &BTreeMap<String, String>) -> Vec<String> {
    let is_own = |name: &str| OWN.iter().any(|own| name.starts_with(own));
    let both = here.iter().filter_map(|(name, value)| Some((name, value, there.get(name)?)));
    let other = both.filter(|(name, value, new)| value != new && !is_own(name));
    other.map(|(name, value, new)| format!("{name} {value:?} and {new:?}")).collect()
}

fn shown(names: &[String]) -> String {
    match names.len().checked_sub(NAMED) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names.get(..NAMED).unwrap_or_default().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_setting_differs_if_both_have_it_and_it_is_no_servers_own() {
        let here =
            map(&[("maxmemory", "0"), ("port", "1"), ("requirepass", "secret"), ("only-here", "1"), ("hz", "10")]);
        let there = map(&[("maxmemory", "100"), ("port", "2"), ("requirepass", "other"), ("hz", "10")]);
        assert_eq!(differing(&here, &there), [r#"maxmemory "0" and "100""#]);
    }

    #[test]
    fn a_long_list_is_counted() {
        let names: Vec<String> = (0..15).map(|number| number.to_string()).collect();
        assert!(shown(&names).ends_with("11 and 3 more"), "{}", shown(&names));
        assert_eq!(shown(&names[..2]), "0, 1");
    }
}
