//! The primary: what is known of it before the source speaks, and the fail-over time that is raised for a sync.

use std::net::SocketAddr;
use std::time::Duration;

use super::record::{Raised, Record};
use crate::options::Options;
use remora_process::exit::Failure;
use remora_reader::primaries::KnownPrimaries;
use remora_server::sentinel::Sentinels;

/// What the options say of the primary. `followed`: what the server followed before the sync. `source`: the address by
/// which the source was reached.
pub(super) fn known(options: &Options, followed: Option<(String, u16)>, source: SocketAddr) -> KnownPrimaries {
    KnownPrimaries {
        expected: options.expected_primaries.clone(),
        is_vouched_for: options.is_source_proven || options.sentinels.is_some(),
        source: (options.read.source.present().host.clone(), source.ip()),
        followed,
    }
}

// Raised: the fail-over time of a group, raised at its Sentinels for the time of a sync (`--extend-failover-timeout`).
//
// A Sentinel takes a replica that it knows back after `failover-timeout`. Each does so by itself, so the time is
// raised at all of them or at none. What it was is in the record file before it is changed. It is put back where it
// still is what the agent set, at the end of the sync, or by the next agent for the server.

/// Raises the time at every Sentinel.
///
/// # Errors
/// A Sentinel does not answer, refuses, or knows further ones that are not in the list. It is as before then.
pub(super) async fn raise(record: &mut Record, sentinels: &Sentinels, to: Duration) -> Result<(), Failure> {
    let mut before = Vec::new();
    for server in sentinels.each() {
        let group = sentinels.group_at(server).await?;
        let (listed, known) = (sentinels.each().len() as u64, group.others.saturating_add(1));
        if known > listed {
            return Err(Failure::refused(format!(
                "the Sentinel {} knows {known} Sentinels of {}, and --sentinel names {listed}: --extend-failover-timeout needs all of \
                 them, since each takes the server back by itself",
                server.url(),
                sentinels.name()
            )));
        }
        before.push((server.url().to_string(), millis(group.failover_timeout)));
    }
    let set = millis(to);
    record.note_raised(Some(Raised { name: sentinels.name().to_owned(), set, before }))?;
    for server in sentinels.each() {
        if let Err(error) = sentinels.set_failover_timeout(server, set).await {
            let put_back = put_back(record, Some(sentinels)).await;
            let failure = Failure::from(error);
            return Err(if put_back.is_empty() { failure } else { failure.and(put_back.trim_start_matches("; ")) });
        }
    }
    tracing::warn!(name = sentinels.name(), to = ?to, "failover-timeout is raised at the Sentinels until the sync ends");
    Ok(())
}

/// Puts the time back, if it was raised. The text goes on behind a sentence; it is empty if nothing is left to do.
pub(super) async fn put_back(record: &mut Record, sentinels: Option<&Sentinels>) -> String {
    let Some(raised) = record.raised().cloned() else { return String::new() };
    let mut left = Vec::new();
    for (url, before) in &raised.before {
        let server = sentinels.and_then(|sentinels| {
            let server = sentinels.each().iter().find(|server| server.url().to_string() == *url)?;
            (sentinels.name() == raised.name).then_some((sentinels, server))
        });
        let done = match server {
            None => Err("it is not among --sentinel".to_owned()),
            Some((sentinels, server)) => put_back_at(sentinels, server, raised.set, *before).await,
        };
        if let Err(why) = done {
            left.push(format!("SENTINEL SET {} failover-timeout {before} at {url} ({why})", raised.name));
        }
    }
    if !left.is_empty() {
        return format!("; failover-timeout is still raised: send {}", left.join(", "));
    }
    match record.note_raised(None) {
        Ok(()) => String::new(),
        Err(failure) => format!("; {failure}"),
    }
}

async fn put_back_at(
    sentinels: &Sentinels,
    server: &remora_server::Server,
    set: u64,
    before: u64,
) -> Result<(), String> {
    let present = sentinels.group_at(server).await.map_err(|error| error.to_string())?;
    // Another value is an operator's.
    if millis(present.failover_timeout) == set {
        sentinels.set_failover_timeout(server, before).await.map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
