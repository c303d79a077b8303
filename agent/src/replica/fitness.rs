//! Fitness: whether a server would become an exact replica, and stay one, as far as its settings tell before the sync.

use super::exact::lacking_commands;
use super::preflight::Primary;
use crate::exit::Failure;
use crate::server::own_changes::OwnChanges;
use crate::server::{Client, Facts, ServerError, ServerUrl};
use crate::units::Size;

/// Seconds of `repl-timeout` from which on pauses do no harm: twice the longest pause before an agent connects to its
/// source again.
const PATIENCE_SECONDS: u64 = 10;

/// Refuses a server that would remove keys of the primary's by itself, and warns of what may make it another one later.
pub(super) async fn refuse_what_would_not_stay_exact(
    client: &mut Client,
    facts: &Facts,
    primary: &Primary,
) -> Result<(), Failure> {
    let url = client.server().url().clone();
    warn_of_impatience(client, &url).await?;
    warn_of_lacking_commands(client, facts, primary, &url).await;
    let Some(own) = OwnChanges::read(client).await? else {
        tracing::debug!("the server {url} does not tell its settings (CONFIG GET)");
        return Ok(());
    };
    refuse_too_little_memory(&own, facts, primary.data(), &url)?;
    if own.is_writable {
        tracing::warn!(
            "the server {url} has replica-read-only no: what clients write to it while it is a replica makes it another one than \
             its primary; set it to yes there"
        );
    }
    Ok(())
}

/// Warns of a server that gives up a snapshot whose bytes pause for a short time.
async fn warn_of_impatience(client: &mut Client, url: &ServerUrl) -> Result<(), ServerError> {
    let seconds = client.config_get("repl-timeout").await?.and_then(|seconds| seconds.parse::<u64>().ok());
    if let Some(seconds) = seconds.filter(|seconds| *seconds < PATIENCE_SECONDS) {
        tracing::warn!(
            "the server {url} gives up a primary that sends nothing for {seconds} s (repl-timeout), and a snapshot over a slow link \
             may pause for longer: it would start to load again and again. Its default is 60"
        );
    }
    Ok(())
}

/// `data`: bytes of the primary's data.
fn refuse_too_little_memory(
    own: &OwnChanges,
    facts: &Facts,
    data: Option<u64>,
    url: &ServerUrl,
) -> Result<(), Failure> {
    let (Some((limit, _)), Some(what)) = (&own.limit, own.of_the_limit()) else { return Ok(()) };
    // What the server uses beside its data, which the sync replaces.
    let beside = facts.used_memory.unwrap_or(0).saturating_sub(facts.used_memory_dataset.unwrap_or(0));
    match data {
        Some(data) if data.saturating_add(beside) > *limit => Err(Failure::refused(format!(
            "the server {url} {what}, and the primary's data take {}: it would not stay an exact replica; set \
             replica-ignore-maxmemory yes there, or a larger maxmemory",
            Size::bytes(data)
        ))),
        _ => {
            tracing::warn!(
                "the server {url} {what}: from then on it is not an exact replica any more; set replica-ignore-maxmemory yes there"
            );
            Ok(())
        }
    }
}

/// A stream with one of these commands makes the sync fail. A newer primary has commands that clients may never send.
async fn warn_of_lacking_commands(client: &mut Client, facts: &Facts, primary: &Primary, url: &ServerUrl) {
    // Users with names have the rules that the help page lists, and this is not among them.
    let primary = primary.as_server();
    if primary.credentials().user.is_some() || client.server().credentials().user.is_some() {
        return;
    }
    let Ok(mut asked) = primary.connect().await else { return };
    let lacking: Vec<_> =
        lacking_commands(&mut asked, client).await.iter().map(|name| name.to_ascii_uppercase()).collect();
    if lacking.is_empty() {
        return;
    }
    let (names, own) = (lacking.join(", "), facts.name());
    tracing::warn!(
        "the server {url} ({own}) lacks commands that the primary has: {names}; a sync whose stream has one of them fails \
         (rename-command, modules, versions)"
    );
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_server_whose_limit_is_below_the_data_is_refused_whatever_its_policy() {
        let url: ServerUrl = "redis://h:1".parse().unwrap();
        let facts = Facts { used_memory: Some(3 << 20), used_memory_dataset: Some(1 << 20), ..Facts::default() };
        let refused = |limit: Option<u64>, policy: &str, data| {
            let own = OwnChanges { limit: limit.map(|bytes| (bytes, policy.to_owned())), is_writable: false };
            refuse_too_little_memory(&own, &facts, data, &url).err().map(|failure| failure.message)
        };
        let lru = refused(Some(10 << 20), "allkeys-lru", Some(9 << 20)).unwrap();
        assert!(lru.contains("removes keys by itself") && lru.contains("replica-ignore-maxmemory yes"), "{lru}");
        assert!(refused(Some(10 << 20), "noeviction", Some(9 << 20)).unwrap().contains("refuses its primary's writes"));
        assert_eq!(refused(Some(10 << 20), "allkeys-lru", Some(7 << 20)), None);
        assert_eq!(refused(Some(10 << 20), "allkeys-lru", None), None);
        assert_eq!(refused(None, "allkeys-lru", Some(9 << 30)), None);
    }
}
