//! Choice: the replica of a group beside which a source sits.

use std::time::Duration;

use tokio::task::JoinSet;

use super::{KnownReplica, SentinelError, Sentinels};
use crate::HostPort;
use crate::{Facts, Role, Server, ServerError};

/// How long a server may take to say how it stands. One that needs longer is not one to take a snapshot of.
pub const LOOK_LIMIT: Duration = Duration::from_secs(2);

/// Replicas that are asked at a time: more than a group has in practice.
const MOST_ASKED: usize = 32;

/// A server of the group, and what it says of itself.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Where Sentinel says it is.
    pub address: HostPort,
    /// The same with a login.
    pub server: Server,
    /// What it says of itself.
    pub facts: Facts,
}

/// Asks the replicas that Sentinel reaches, all at once, and returns the one with the least lag.
///
/// # Errors
/// No Sentinel answers, or no replica is up and in step.
pub async fn least_behind(sentinels: &Sentinels, like: &Server) -> Result<Candidate, SentinelError> {
    let known = sentinels.replicas().await?;
    let mut asked = JoinSet::new();
    let mut causes = Vec::new();
    for KnownReplica { address, flags, .. } in known.iter().filter(|replica| replica.address.is_some()).take(MOST_ASKED)
    {
        let Some(address) = address.clone() else { continue };
        // Sentinel's flags are some seconds old: they are for the message, and the server itself is asked.
        let (server, flags) = (like.at(&address.host, address.port), flags.clone());
        asked.spawn(async move {
            let facts = look(&server).await;
            (address, server, flags, facts)
        });
    }
    let mut candidates = Vec::new();
    while let Some(answered) = asked.join_next().await {
        let Ok((address, server, flags, facts)) = answered else { continue };
        match facts.map_err(|error| error.to_string()).and_then(|facts| suits(&facts).map(|offset| (offset, facts))) {
            Ok((offset, facts)) => candidates.push((offset, Candidate { address, server, facts })),
            Err(why) => causes.push(format!("{address} ({flags}): {why}")),
        }
    }
    let best = candidates.into_iter().max_by_key(|(offset, candidate)| (*offset, candidate.address.to_string()));
    best.map(|(_, candidate)| candidate).ok_or_else(|| {
        let why = if causes.is_empty() { "Sentinel knows none that listens".to_owned() } else { causes.join("; ") };
        let text = format!(
            "the group {} has no replica that is up and in step ({why}); repair one, or give --from primary",
            sentinels.name()
        );
        SentinelError { text, passes: true }
    })
}

/// Asks a server how it stands, within [`LOOK_LIMIT`].
pub async fn look(server: &Server) -> Result<Facts, ServerError> {
    let asked = async { Facts::read(&mut server.connect().await?).await };
    match tokio::time::timeout(LOOK_LIMIT, asked).await {
        Ok(answer) => answer,
        Err(_) => {
            Err(ServerError::TimedOut { server: server.url().to_string(), command: "INFO".into(), limit: LOOK_LIMIT })
        }
    }
}

/// The offset of a replica beside which a source can sit. The error says why it cannot.
pub fn suits(facts: &Facts) -> Result<u64, String> {
    let link = match (facts.role, &facts.link) {
        (Some(Role::Replica), Some(link)) => link,
        _ => return Err("it is not a replica".to_owned()),
    };
    match facts.offset {
        _ if facts.loading != Some(false) => Err("it is loading its data set".to_owned()),
        _ if link.syncing == Some(true) => Err("it is taking a full copy".to_owned()),
        _ if link.up != Some(true) => Err(format!("its link to {}:{} is down", link.host, link.port)),
        Some(offset) => Ok(offset),
        None => Err("it does not say its offset".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Link;

    #[test]
    fn a_replica_suits_if_it_is_in_step() {
        let link = Link { host: "p".into(), port: 1, up: Some(true), syncing: Some(false) };
        let good = Facts {
            role: Some(Role::Replica),
            link: Some(link.clone()),
            loading: Some(false),
            offset: Some(7),
            ..Facts::default()
        };
        assert_eq!(suits(&good), Ok(7));
        let with = |change: fn(&mut Facts)| {
            let mut facts = good.clone();
            change(&mut facts);
            suits(&facts).is_err()
        };
        assert!(with(|facts| facts.role = Some(Role::Primary)));
        assert!(with(|facts| facts.link = None));
        assert!(with(|facts| facts.loading = Some(true)));
        assert!(with(|facts| facts.loading = None), "what is not known does not count");
        assert!(with(|facts| facts.offset = None));
        for link in [Link { up: Some(false), ..link.clone() }, Link { syncing: Some(true), ..link }] {
            assert!(suits(&Facts { link: Some(link), ..good.clone() }).is_err());
        }
    }
}
