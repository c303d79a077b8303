//! The configuration file of a node that is to join a cluster as a replica (`nodes.conf`).
//!
//! A node that starts with this file is a replica while it loads its data, and so goes on at the primary by a partial
//! resynchronisation. No other node knows it before one `CLUSTER MEET`.

use std::fs::File;
use std::path::Path;

use remora_redis::ReplId;
use remora_redis::resp::Frame;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::nodes::{NodeAddress, Slots, is_id};
use super::survey::{Shard, Survey};
use crate::exit::{Code, Failure};
use crate::server::{Facts, Server};

/// What a file of a node that follows a primary says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodesConf {
    pub(crate) text: String,
    /// The primary's id.
    pub(crate) primary: String,
}

/// Refuses a file that a running node uses: it has locked it, would write over what it is given, and its data too.
///
/// # Errors
/// A node uses it.
pub(crate) fn refuse_one_in_use(file: &Path) -> Result<(), Failure> {
    let Ok(opened) = File::open(file) else { return Ok(()) };
    match flock(&opened, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => Err(Failure::new(
            Code::Refused,
            format!("{} is in use: the node that has it runs; stop that node first", file.display()),
        )),
        // It is unlocked when it is closed.
        _ => Ok(()),
    }
}

/// The file for a node at this address that follows the primary of this history.
///
/// # Errors
/// No primary of the cluster has the history, or the cluster cannot be asked.
pub(crate) async fn make(server: &Server, history: ReplId, at: &NodeAddress) -> Result<NodesConf, Failure> {
    let survey = Survey::take(server).await?;
    let is_its = |facts: &Facts| facts.replid == Some(history);
    let shard = survey.shards.iter().find(|shard| shard.primary.facts.as_ref().is_ok_and(is_its));
    let Some(shard) = shard else {
        let text = format!(
            "no primary in the cluster of {} has the snapshot's history {history}: name a node of the source's cluster, \
             and fetch again if it has failed over",
            server.url()
        );
        return Err(Failure::new(Code::Refused, text));
    };
    let primary = server.at(&shard.primary.node.host, shard.primary.node.port);
    let mut client = primary.connect().await?;
    // Redis before 7.2 has no such name for a shard.
    let shard_id = match client.command(&["CLUSTER", "MYSHARDID"]).await {
        // It becomes a part of a line of the file.
        Ok(Frame::Bulk(id)) if std::str::from_utf8(&id).is_ok_and(is_id) => {
            Some(String::from_utf8_lossy(&id).into_owned())
        }
        Ok(other) => return Err(client.unexpected("CLUSTER MYSHARDID", &other).into()),
        Err(error) if error.refusal().is_some() => None,
        Err(error) => return Err(error.into()),
    };
    let mut random = [0; 20];
    getrandom::fill(&mut random).map_err(|error| Failure::local(format!("no random bytes: {error}")))?;
    let id: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(NodesConf {
        text: text(shard, shard_id.as_deref(), (&id, at), survey.epoch),
        primary: shard.primary.node.id.clone(),
    })
}

fn text(shard: &Shard, shard_id: Option<&str>, (id, at): (&str, &NodeAddress), epoch: u64) -> String {
    let primary = &shard.primary.node;
    let names = shard_id.map_or_else(String::new, |shard_id| format!(",,shard-id={shard_id}"));
    let slots: Vec<String> = primary.slots.iter().map(Slots::to_string).collect();
    format!(
        "{primary_id} {host}:{port}@{bus}{names} master - 0 0 {primary_epoch} connected {slots}\n\
         {id} {own_host}:{own_port}@{own_bus}{names} myself,slave {primary_id} 0 0 0 connected\n\
         vars currentEpoch {epoch} lastVoteEpoch 0\n",
        primary_id = primary.id,
        host = primary.host,
        port = primary.port,
        bus = primary.bus_port,
        primary_epoch = primary.epoch,
        slots = slots.join(" "),
        own_host = at.host,
        own_port = at.port,
        own_bus = at.bus_port,
    )
}

/// Whether this file belongs to a node that follows this primary.
pub(crate) fn follows(text: &str, primary: &str) -> bool {
    text.lines().any(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_own = words.get(2).is_some_and(|flags| flags.split(',').any(|flag| flag == "myself"));
        is_own && words.get(3) == Some(&primary)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::nodes::parse;
    use super::super::survey::Member;
    use super::*;

    fn shard() -> Shard {
        let line = format!("{} 10.0.0.5:6379@16379 myself,master - 0 0 3 connected 0-5460 5470", "a".repeat(40));
        let node = parse(&line).unwrap().remove(0);
        Shard { primary: Member { node, facts: Err(String::new()) }, replicas: Vec::new() }
    }

    #[test]
    fn an_address_has_a_port_for_the_bus() {
        let at = |text: &str| text.parse::<NodeAddress>();
        assert_eq!(at("10.0.0.9:6379").unwrap().bus_port, 16379);
        assert_eq!(at("[::1]:6379@7").unwrap(), NodeAddress { host: "::1".into(), port: 6379, bus_port: 7 });
        for wrong in ["10.0.0.9", "host:6379", "10.0.0.9:6379@", "10.0.0.9:6379@0", "10.0.0.9:60000"] {
            assert!(at(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_file_of_a_running_node_is_refused_and_that_of_one_that_has_ended_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nodes.conf");
        refuse_one_in_use(&path).unwrap();
        let node = File::create(&path).unwrap();
        flock(&node, FlockOperation::NonBlockingLockExclusive).unwrap();
        for _ in 0..2 {
            let refused = refuse_one_in_use(&path).unwrap_err();
            assert!(refused.message.contains("is in use") && refused.code == Code::Refused, "{refused}");
        }
        drop(node);
        refuse_one_in_use(&path).unwrap();
        let again = File::open(&path).unwrap();
        flock(&again, FlockOperation::NonBlockingLockExclusive).unwrap();
    }

    #[test]
    fn the_file_is_that_of_a_replica() {
        let (own, at) = ("b".repeat(40), "10.0.0.9:6380".parse().unwrap());
        for shard_id in [None, Some("c".repeat(40))] {
            let text = text(&shard(), shard_id.as_deref(), (&own, &at), 7);
            let (lines, vars) = text.trim_end().rsplit_once('\n').unwrap();
            let nodes = parse(lines).unwrap();
            assert_eq!(nodes[0].slots, shard().primary.node.slots);
            assert_eq!((nodes[1].primary.as_ref(), nodes[1].bus_port), (Some(&nodes[0].id), 16380));
            assert_eq!(vars, "vars currentEpoch 7 lastVoteEpoch 0");
            assert!(follows(&text, &"a".repeat(40)) && !follows(&text, &own));
            assert_eq!(text.matches("shard-id=").count(), if shard_id.is_some() { 2 } else { 0 });
        }
    }
}
