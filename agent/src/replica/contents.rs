//! Contents: whether a server can load, and then hold, what a primary holds.

use super::target::Target;
use crate::exit::Failure;
use crate::server::{Facts, ServerUrl};

/// Refuses a server that cannot read the snapshot: it would find out only after it has discarded its own data.
pub(super) fn check_format(facts: &Facts, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    match facts.unreadable_for(&target.facts) {
        None => Ok(()),
        Some(_) if target.conversion.is_some() => Ok(()),
        Some(why) if target.reads_newer => {
            tracing::warn!(
                "the server {url} may not load this primary's snapshots: {why}; it is told to try (rdb-version-check relaxed), and \
                 loses its own data if it cannot"
            );
            Ok(())
        }
        Some(why) => Err(Failure::refused(format!(
            "the server {url} can't be a replica of this primary: {why}; run a server there that is as new as the primary, of the same \
             kind, or give --convert (docs/how-to/migrate.md)"
        ))),
    }
}

/// Refuses a server that cannot hold what the primary holds.
pub(super) fn check_contents(facts: &Facts, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    check_databases(facts, target, url)?;
    if let Some(conversion) = &target.conversion {
        // The converter finds keys of modules, wherever there are some: servers have modules that no key is of.
        let holds_them = target.facts.holds_field_ttls() || conversion.drops_field_expiry();
        return check_field_ttls(facts, &target.facts, url, holds_them);
    }
    check_modules(facts, target, url)?;
    check_field_ttls(facts, &target.facts, url, target.facts.holds_field_ttls_of(facts))
}

/// Refuses a server that cannot hold hashes whose fields expire, if the primary has any: the primary's snapshot for it
/// would fail, or its own load.
fn check_field_ttls(facts: &Facts, target: &Facts, url: &ServerUrl, holds_them: bool) -> Result<(), Failure> {
    let hashes = facts.databases.iter().map(|database| database.field_expires).fold(0, u64::saturating_add);
    if hashes == 0 || holds_them {
        return Ok(());
    }
    let plural = if hashes == 1 { "hash" } else { "hashes" };
    Err(Failure::refused(format!(
        "the server {url} ({}) cannot hold fields that expire, and the primary ({}) has {hashes} {plural} with such fields (INFO \
         keyspace): run a server there that is as new as the primary, of the same kind",
        target.name(),
        facts.name()
    )))
}

/// Refuses a server that has fewer databases than the primary uses. A server that loads a key of a database that it
/// lacks ends its process, after its own data were removed.
fn check_databases(facts: &Facts, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    match (facts.highest_database(), target.databases) {
        (Some(highest), Some(count)) if highest >= count => Err(Failure::refused(format!(
            "the server {url} has {count} databases, and the primary holds keys in database {highest}: start the server with databases \
             {} or more",
            highest + 1
        ))),
        _ => Ok(()),
    }
}

/// Refuses a server that lacks a module of the primary, for the same reason.
fn check_modules(facts: &Facts, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    match facts.modules_missing_at(&target.facts).as_slice() {
        [] => Ok(()),
        missing => Err(Failure::refused(format!(
            "the server {url} lacks modules that the primary has loaded: {}; a snapshot with their data would end the server: load them \
             there",
            missing.join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::info::Info;

    use super::*;

    fn server(text: &str) -> Facts {
        Facts::from_info(&Info::parse(text.replace(' ', "\n").as_bytes()))
    }

    #[test]
    fn fields_that_expire_are_for_servers_that_can_hold_them() {
        let url: ServerUrl = "redis://h:1".parse().unwrap();
        let redis = |version: &str| server(&format!("redis_version:{version}"));
        let valkey = |version: &str| server(&format!("server_name:valkey valkey_version:{version}"));
        let primary =
            server("server_name:valkey valkey_version:9.1.2 db3:keys=5,expires=0,avg_ttl=0,keys_with_volatile_items=2");
        let newer = server("redis_version:7.4.0 db0:keys=5,expires=0,avg_ttl=0,subexpiry=1");
        let why = |primary: &Facts, target: &Facts| {
            let holds_them = target.holds_field_ttls_of(primary);
            check_field_ttls(primary, target, &url, holds_them).err().map(|failure| failure.message)
        };
        for (primary, target) in [
            (&primary, valkey("8.1.8")),
            (&primary, redis("8.2.0")),
            (&newer, redis("7.2.4")),
            (&newer, valkey("9.1.2")),
        ] {
            let why = why(primary, &target).unwrap();
            assert!(why.contains(&target.name()) && why.contains(&primary.name()), "{why}");
        }
        assert!(why(&primary, &valkey("8.0.1")).unwrap().contains("2 hashes"));
        for (primary, target) in [(&primary, valkey("9.0.0")), (&newer, redis("8.0.0")), (&newer, Facts::default())] {
            assert_eq!(why(primary, &target), None);
        }
        assert_eq!(why(&valkey("9.1.2"), &valkey("8.1.8")), None, "there are none");
    }
}
