//! Looks at the cluster: its nodes and what they say of each other, and the settings that keep two families apart.

use std::collections::{BTreeMap, BTreeSet};

use super::decide::{Node as Seat, Seen, Setting, Settings, Shard, Side};
use crate::args::HostPort;
use crate::cluster::nodes::Node;
use crate::cluster::survey::{Member, Survey, nodes_of};
use crate::cluster::sync::program::Newcomer;
use crate::exit::Failure;
use crate::server::{Client, Facts, Family, Server, Version};

/// Redis from here on tells the other nodes its internal secret, as an extension of type 4 of the bus.
const SECRET_SINCE: Version = Version { major: 8, minor: 0, patch: 0 };

/// Valkey from here on takes an extension of type 4 for the address that clients should be given.
const ADDRESS_SINCE: Version = Version { major: 8, minor: 1, patch: 0 };

/// What a node tells the others as its name. An address is a name, too.
const NAME: &str = "cluster-announce-hostname";

/// What a node tells clients of the others: `ip` or `hostname`.
const TELLS: &str = "cluster-preferred-endpoint-type";

/// The cluster, and the new nodes.
pub(super) struct Look {
    pub(super) survey: Survey,
    pub(super) seen: Seen,
}

/// What a node says that a survey does not ask for.
struct Answer {
    errors: u64,
    /// The other nodes, as it sees them.
    view: Vec<Node>,
    /// `None`: it has no such settings.
    settings: Option<(String, String)>,
}

/// Asks all nodes. `joins`: the new nodes that are not in the cluster are to join it.
///
/// # Errors
/// The cluster cannot be asked.
pub(super) async fn look(server: &Server, newcomers: &[Newcomer], joins: bool) -> Result<Look, Failure> {
    let survey = Survey::take(server).await?;
    let new: BTreeSet<&str> = newcomers.iter().map(|newcomer| newcomer.own.id.as_str()).collect();
    let side = |id: &str| if new.contains(id) { Side::New } else { Side::Old };
    let (mut answers, mut silent) = (BTreeMap::new(), None);
    for Member { node, facts } in survey.shards.iter().map(|shard| &shard.primary) {
        silent =
            silent.or_else(|| facts.as_ref().err().map(|why| format!("{} does not answer: {why}", node.address())));
    }
    for member in survey.members().filter(|member| member.facts.is_ok() && !member.node.is_lost()) {
        let at = server.at(&member.node.host, member.node.port);
        match ask(&at).await {
            Ok(answer) => _ = answers.insert(member.node.id.as_str(), answer),
            Err(failure) => silent = silent.or_else(|| Some(failure.to_string())),
        }
    }
    let trouble = survey.problems.first().cloned().or(silent).or_else(|| disagreement(&survey, &answers));
    let settings = settings(server, &survey, if joins { newcomers } else { &[] }, &answers).await?;
    let seat = |member: &Member, primary: Option<&Member>| Seat {
        id: member.node.id.clone(),
        place: place(&member.node),
        side: side(&member.node.id),
        is_lost: member.node.is_lost(),
        behind: behind(member, primary),
        errors: answers.get(member.node.id.as_str()).map_or(0, |answer| answer.errors),
    };
    let shards = survey.shards.iter().map(|shard| Shard {
        slots: shard.slots(),
        primary: seat(&shard.primary, None),
        replicas: shard.replicas.iter().map(|replica| seat(replica, Some(&shard.primary))).collect(),
    });
    let seen = Seen {
        trouble,
        settings,
        shards: shards.collect(),
        others: survey.others.iter().map(|member| seat(member, None)).collect(),
    };
    Ok(Look { survey, seen })
}

/// Where a node is.
pub(super) fn place(node: &Node) -> HostPort {
    HostPort { host: node.host.clone(), port: node.port }
}

async fn ask(server: &Server) -> Result<Answer, Failure> {
    let mut client = server.connect().await?;
    let errors = client.info("stats").await?.number("unexpected_error_replies").unwrap_or(0);
    let (view, settings) = (nodes_of(&mut client).await?, configured(&mut client).await?);
    Ok(Answer { errors, view, settings })
}

async fn configured(client: &mut Client) -> Result<Option<(String, String)>, Failure> {
    let name = client.config_get(NAME).await?;
    Ok(name.zip(client.config_get(TELLS).await?))
}

/// Why a node cannot take its primary's place, or does not serve.
fn behind(member: &Member, primary: Option<&Member>) -> Option<String> {
    let facts = match &member.facts {
        Ok(facts) => facts,
        Err(why) => return Some(why.clone()),
    };
    let primary = primary?;
    let history = primary.facts.as_ref().ok().and_then(|facts| facts.replid);
    match &facts.link {
        _ if facts.loading == Some(true) => Some("it loads its data".into()),
        Some(link) if link.syncing == Some(true) => Some("it takes a full copy".into()),
        Some(link) if link.up != Some(true) => Some("its link is down".into()),
        None => Some("it is no replica yet".into()),
        Some(_) if facts.replid != history => Some("it follows another history".into()),
        Some(_) => None,
    }
}

/// What a node sees otherwise than the survey. Votes count by what each node sees.
fn disagreement(survey: &Survey, answers: &BTreeMap<&str, Answer>) -> Option<String> {
    let known: BTreeSet<&str> = survey.members().map(|member| member.node.id.as_str()).collect();
    for member in survey.members() {
        let Some(answer) = answers.get(member.node.id.as_str()) else { continue };
        let who = member.node.address();
        for Member { node, .. } in survey.members().filter(|other| !other.node.is_lost()) {
            let same = |seen: &&Node| {
                seen.is_primary() == node.is_primary() && seen.primary == node.primary && seen.slots == node.slots
            };
            let seen = answer.view.iter().find(|seen| seen.id == node.id && !seen.is_lost());
            if seen.filter(same).is_none() {
                return Some(format!("{who} has not heard yet what {} is", node.address()));
            }
        }
        if let Some(seen) = answer.view.iter().find(|seen| !seen.is_lost() && !known.contains(seen.id.as_str())) {
            return Some(format!("{who} knows {}, and others do not", seen.address()));
        }
    }
    None
}

/// Whether nodes of both families would take each other's extensions of the bus for something else.
pub(super) fn clashes<'a>(facts: impl Iterator<Item = &'a Facts>) -> bool {
    let (mut tells_secret, mut takes_address) = (false, false);
    for facts in facts {
        match facts.family {
            Family::Redis => tells_secret |= facts.version.is_some_and(|version| version >= SECRET_SINCE),
            Family::Valkey => takes_address |= facts.version.is_some_and(|version| version >= ADDRESS_SINCE),
        }
    }
    tells_secret && takes_address
}

async fn settings(
    server: &Server,
    survey: &Survey,
    newcomers: &[Newcomer],
    answers: &BTreeMap<&str, Answer>,
) -> Result<Settings, Failure> {
    let is_member = |id: &str| survey.members().any(|member| member.node.id == id);
    let members = survey.members().filter_map(|member| Some((&member.node, member.facts.as_ref().ok()?)));
    let outside = newcomers.iter().filter(|newcomer| !is_member(&newcomer.own.id));
    let mut all = Vec::new();
    for (node, facts) in members {
        let configured = answers.get(node.id.as_str()).and_then(|answer| answer.settings.clone());
        all.extend(configured.map(|configured| (place(node), facts.family, configured)));
    }
    let are_apart = !clashes(
        survey.members().filter_map(|member| member.facts.as_ref().ok()).chain(newcomers.iter().map(|n| &n.facts)),
    );
    if are_apart {
        let own = all.iter().filter(|(node, _, (name, _))| *name == node.host);
        return Ok(match own.flat_map(|(node, family, configured)| taken_back(node, *family, configured)).collect() {
            needless if Vec::is_empty(&needless) => Settings::Right,
            needless => Settings::Needless(needless),
        });
    }
    for newcomer in outside {
        let at = HostPort { host: newcomer.own.host.clone(), port: newcomer.place.port };
        let mut client = server.at(&newcomer.place.host, newcomer.place.port).connect().await?;
        all.extend(configured(&mut client).await?.map(|configured| (at, newcomer.facts.family, configured)));
    }
    if let Some((node, ..)) = all.iter().find(|(node, ..)| node.host.contains(':')) {
        return Err(Failure::refused(format!(
            "{node} has an address of IPv6: nodes of Redis from 8.0 on and of Valkey from 8.1 on understand each other only by names \
             ({NAME}), and an address of IPv6 is not a name: give each node a name, and set {TELLS} to hostname"
        )));
    }
    let setting = |node: &HostPort, name, value: &str| Setting { node: node.clone(), name, value: value.to_owned() };
    let unnamed = all.iter().filter(|(_, _, (name, _))| name.is_empty());
    let missing: Vec<Setting> = unnamed.map(|(node, ..)| setting(node, NAME, &node.host)).collect();
    if !missing.is_empty() {
        return Ok(Settings::Missing(missing));
    }
    for member in
        survey.members().filter(|member| member.facts.as_ref().is_ok_and(|facts| facts.family == Family::Valkey))
    {
        let Some(answer) = answers.get(member.node.id.as_str()) else { continue };
        let has_name = |id: &str| answer.view.iter().any(|seen| seen.id == id && seen.name.is_some());
        let is_named = |other: &&Member| other.node.is_lost() || has_name(&other.node.id);
        if let Some(other) = survey.members().find(|other| !is_named(other)) {
            let (who, of) = (member.node.address(), other.node.address());
            return Ok(Settings::NotHeardOf(format!("{who} has not heard yet of the name of {of}")));
        }
    }
    let by_address = all.iter().filter(|(_, family, (_, tells))| *family == Family::Valkey && tells != "hostname");
    let missing: Vec<Setting> = by_address.map(|(node, ..)| setting(node, TELLS, "hostname")).collect();
    Ok(if missing.is_empty() { Settings::Right } else { Settings::Missing(missing) })
}

/// What takes the settings of a node back that has its address for its name.
fn taken_back(node: &HostPort, family: Family, (_, tells): &(String, String)) -> Vec<Setting> {
    let setting = |name, value: &str| Setting { node: node.clone(), name, value: value.to_owned() };
    let told = (family == Family::Valkey && tells == "hostname").then(|| setting(TELLS, "ip"));
    told.into_iter().chain([setting(NAME, "")]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(family: Family, major: u32, minor: u32) -> Facts {
        Facts { family, version: Some(Version { major, minor, patch: 0 }), ..Facts::default() }
    }

    #[test]
    fn only_redis_from_8_0_and_valkey_from_8_1_on_misunderstand_each_other() {
        let clash = |one: (u32, u32), other: (u32, u32)| {
            clashes([facts(Family::Redis, one.0, one.1), facts(Family::Valkey, other.0, other.1)].iter())
        };
        assert!(clash((8, 0), (8, 1)) && clash((8, 2), (9, 1)));
        assert!(!clash((7, 4), (9, 1)) && !clash((8, 2), (8, 0)));
        assert!(!clashes([facts(Family::Redis, 8, 2)].iter()));
    }

    #[test]
    fn what_was_set_is_taken_back() {
        let node = HostPort { host: "10.0.0.1".into(), port: 1 };
        let back = |family, tells: &str| {
            let taken = taken_back(&node, family, &("10.0.0.1".into(), tells.into()));
            taken.into_iter().map(|setting| (setting.name, setting.value)).collect::<Vec<_>>()
        };
        assert_eq!(back(Family::Redis, "ip"), [(NAME, String::new())]);
        assert_eq!(back(Family::Valkey, "hostname"), [(TELLS, "ip".to_owned()), (NAME, String::new())]);
    }
}
