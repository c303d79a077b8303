//! One step at a time: a setting, a fail-over, and how nodes leave.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::decide::{Node, Seen, Setting, Shard};
use crate::args::HostPort;
use crate::exit::{Code, Failure};
use crate::server::{Facts, Role, Server, ServerError};

/// How often the nodes are asked during a fail-over. `INFO replication` costs some tens of microseconds.
const POLL: Duration = Duration::from_millis(5);

/// How long the servers try a fail-over that a client has asked for: `CLUSTER_MF_TIMEOUT` in their cluster.h.
const SERVERS_LIMIT: Duration = Duration::from_secs(5);

/// Where that can be set (Valkey 9), in milliseconds.
const LIMIT_SETTING: &str = "cluster-manual-failover-timeout";

/// How much later than that a promotion is still waited for.
const MARGIN: Duration = Duration::from_secs(5);

/// How long the old primary may take to follow the new one.
const FOLLOW_LIMIT: Duration = Duration::from_secs(30);

/// A shard that has failed over.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FailedOver {
    pub(super) slots: String,
    pub(super) from: String,
    pub(super) to: String,
    /// From the command to the promotion.
    pub(super) seconds: f64,
}

/// Makes a setting.
///
/// # Errors
/// The node refuses it.
pub(super) async fn set(server: &Server, setting: &Setting) -> Result<(), Failure> {
    let mut client = server.at(&setting.node.host, setting.node.port).connect().await?;
    Ok(client.config_set(setting.name, &setting.value).await?)
}

/// Has a replica take its primary's place, and waits until that one follows it.
///
/// # Errors
/// It did not take it, or the old primary has taken a full copy. The message says who serves the shard.
pub(super) async fn fail_over(server: &Server, shard: &Shard, node: &Node) -> Result<FailedOver, Failure> {
    let (old, new) = (&shard.primary.place, &node.place);
    let mut at_new = server.at(&new.host, new.port).connect().await?;
    let limit = at_new.config_get(LIMIT_SETTING).await.ok().flatten();
    let limit = limit.and_then(|text| text.parse().ok()).map_or(SERVERS_LIMIT, Duration::from_millis);
    let copies = full_copies(server, new).await?;
    let began = Instant::now();
    at_new.command(&["CLUSTER", "FAILOVER"]).await.map_err(|error| {
        Failure::from(error).and(&format!("{new} refuses the fail-over, and {old} serves {} as before", shard.slots))
    })?;
    loop {
        match at_new.info("replication").await {
            Ok(info) if Facts::from_info(&info).role == Some(Role::Primary) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "asking again");
                if let Ok(client) = server.at(&new.host, new.port).connect().await {
                    at_new = client;
                }
            }
        }
        if began.elapsed() >= limit + MARGIN {
            let text = format!(
                "{new} has not taken {} over within {} s, and {old} serves them as before: the log of {new} says why (nodes \
                 do not vote for a new primary in the place of one that was replaced less than two cluster-node-timeouts ago)",
                shard.slots,
                (limit + MARGIN).as_secs()
            );
            return Err(Failure::new(Code::NotSwitched, text));
        }
        tokio::time::sleep(POLL).await;
    }
    let seconds = began.elapsed().as_secs_f64();
    let until = Instant::now() + FOLLOW_LIMIT;
    while !follows(server, old, new).await {
        if Instant::now() >= until {
            let text = format!(
                "{new} serves {}, and {old} does not follow it within {} s: its log says why",
                shard.slots,
                FOLLOW_LIMIT.as_secs()
            );
            return Err(Failure::new(Code::SyncFailed, text));
        }
        tokio::time::sleep(10 * POLL).await;
    }
    let copied = full_copies(server, new).await?.saturating_sub(copies);
    if copied > 0 {
        let text = format!(
            "{new} serves {}, and has sent {copied} full copies since: {old} or another replica could not go on where it was",
            shard.slots
        );
        return Err(Failure::new(Code::SyncFailed, text));
    }
    Ok(FailedOver { slots: shard.slots.clone(), from: old.to_string(), to: new.to_string(), seconds })
}

async fn full_copies(server: &Server, at: &HostPort) -> Result<u64, ServerError> {
    let info = server.at(&at.host, at.port).connect().await?.info("stats").await?;
    Ok(info.number("sync_full").unwrap_or(0))
}

/// Whether a node is a replica in step with another one.
async fn follows(server: &Server, old: &HostPort, new: &HostPort) -> bool {
    let facts = async |at: &HostPort| {
        let info = server.at(&at.host, at.port).connect().await?.info("replication").await?;
        Ok::<_, ServerError>(Facts::from_info(&info))
    };
    let (Ok(of_old), Ok(of_new)) = (facts(old).await, facts(new).await) else { return false };
    let is_up = of_old.link.as_ref().is_some_and(|link| link.up == Some(true) && link.syncing != Some(true));
    of_old.role == Some(Role::Replica) && is_up && of_old.replid == of_new.replid
}

/// Has all other nodes forget these, and empties them.
///
/// # Errors
/// A node that stays refuses, or does not answer.
pub(super) async fn forget(server: &Server, seen: &Seen, leaving: &[Node]) -> Result<(), Failure> {
    let leaves = |node: &&Node| leaving.iter().any(|leaving| leaving.id == node.id);
    for stays in seen.nodes().filter(|node| !leaves(node) && !node.is_lost) {
        let mut client = server.at(&stays.place.host, stays.place.port).connect().await?;
        for node in leaving {
            match client.command(&["CLUSTER", "FORGET", &node.id]).await {
                Ok(_) => {}
                // An earlier run has done it, or another node has told it.
                Err(ServerError::Refused { text, .. }) if text.contains("nknown node") => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    for node in leaving {
        // They refuse it as long as they are primaries with keys.
        let reset = async {
            let mut client = server.at(&node.place.host, node.place.port).connect().await?;
            client.command(&["CLUSTER", "RESET", "SOFT"]).await
        };
        if let Err(error) = reset.await {
            tracing::warn!("{} is forgotten, and was not emptied: {error}", node.place);
        }
    }
    Ok(())
}
