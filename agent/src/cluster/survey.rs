//! Survey: a cluster at one moment: its nodes, its shards, and why it should be left alone.
//!
//! ```text
//!   any node ── CLUSTER INFO, CLUSTER NODES ──▶ the others ── INFO ──▶ shards, problems
//! ```
//!
//! Here is also the configuration file of a node that is to join.
//!
//! Nothing is remembered between two surveys: the cluster itself says how far any work on it is.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::nodes::{self, ALL_SLOTS, Node, NodeAddress, Slots, is_id};
use super::shards;
use crate::exit::{Code, Failure};
use crate::server::{Client, Facts, Server, ServerError};
use remora_redis::ReplId;
use remora_redis::info::Info;
use remora_redis::resp::Frame;

/// A cluster at one moment.
#[derive(Debug)]
pub(crate) struct Survey {
    pub(crate) shards: Vec<Shard>,
    /// Nodes of no shard: primaries without slots, and what follows such.
    pub(crate) others: Vec<Member>,
    /// Why replicas should not be made in it now. Each is a sentence.
    pub(crate) problems: Vec<String>,
    /// The epoch of its configuration.
    pub(crate) epoch: u64,
}

/// A primary with slots, and what follows it.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) primary: Member,
    pub(crate) replicas: Vec<Member>,
}

/// A node, and what it says of itself.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) node: Node,
    /// Or why it does not answer.
    pub(crate) facts: Result<Facts, String>,
}

/// Nodes that are asked at once.
const AT_ONCE: usize = 16;

/// How long a node may take to answer. One that hangs is lost for the cluster after 15 seconds, by default.
const NODE_LIMIT: Duration = Duration::from_secs(10);

/// The states of a migration of slots that is over (Valkey 9).
const OVER: [&[u8]; 3] = [b"success", b"failed", b"cancelled"];

impl Survey {
    /// Asks a node for the cluster, and then each of its nodes.
    ///
    /// # Errors
    /// The node does not answer, or is not in cluster mode.
    pub(crate) async fn take(server: &Server) -> Result<Survey, Failure> {
        let mut client = server.connect().await?;
        let state = client.command(&["CLUSTER", "INFO"]).await;
        let state = state.map_err(|error| not_a_cluster(server, error))?;
        let Frame::Bulk(state) = state else { return Err(client.unexpected("CLUSTER INFO", &state).into()) };
        let state = Info::parse(&state);
        let nodes = nodes_of(&mut client).await?;
        drop(client);
        let members = ask_all(server, nodes).await;
        let mut problems = problems_of(&state, members.iter().map(|(member, _)| &member.node));
        problems.extend(members.iter().filter_map(|(_, trouble)| trouble.clone()));
        let epoch = state.number("cluster_current_epoch").unwrap_or(0);
        let (shards, others) = shards_of(members.into_iter().map(|(member, _)| member));
        Ok(Survey { shards, others, problems, epoch })
    }

    /// All nodes.
    pub(super) fn members(&self) -> impl Iterator<Item = &Member> {
        self.shards.iter().flat_map(Shard::members).chain(&self.others)
    }
}

impl Shard {
    /// The primary, and what follows it.
    pub(super) fn members(&self) -> impl Iterator<Item = &Member> {
        std::iter::once(&self.primary).chain(&self.replicas)
    }

    /// `0-5460,5470`
    pub(crate) fn slots(&self) -> String {
        let slots: Vec<String> = self.primary.node.slots.iter().map(Slots::to_string).collect();
        slots.join(",")
    }
}

fn not_a_cluster(server: &Server, error: ServerError) -> Failure {
    let failure = Failure::from(error);
    if failure.message.contains("cluster support disabled") {
        return Failure::refused(format!("{} is not in cluster mode (cluster-enabled no)", server.url()));
    }
    failure
}

pub(super) async fn nodes_of(client: &mut Client) -> Result<Vec<Node>, Failure> {
    let answer = client.command(&["CLUSTER", "NODES"]).await?;
    let Frame::Bulk(text) = &answer else { return Err(client.unexpected("CLUSTER NODES", &answer).into()) };
    let (server, text) = (client.server().url().clone(), String::from_utf8_lossy(text).into_owned());
    let mut nodes = match nodes::have_secrets(&text) {
        true => {
            let own = client.command(&["CLUSTER", "MYID"]).await?;
            let answer = client.command(&["CLUSTER", "SHARDS"]).await?;
            let nodes = shards::nodes(&answer, own.as_str().unwrap_or_default(), &text);
            nodes.ok_or_else(|| client.unexpected("CLUSTER SHARDS", &answer))?
        }
        false => nodes::parse(&text).map_err(|error| Failure::new(Code::Server, format!("{server}: {error}")))?,
    };
    // A node that was never told its address is where it was asked.
    if let (Some(own), Some((host, _))) =
        (nodes.iter_mut().find(|node| node.has("myself") && node.host.is_empty()), server.host_and_port())
    {
        host.clone_into(&mut own.host);
    }
    Ok(nodes)
}

/// Asks each node what it is, and, if it is a primary, whether slots are on their way from or to it.
async fn ask_all(server: &Server, nodes: Vec<Node>) -> Vec<(Member, Option<String>)> {
    let (turns, mut asking) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
    for (number, node) in nodes.into_iter().enumerate() {
        let (server, turns) = (server.at(&node.host, node.port), Arc::clone(&turns));
        asking.spawn(async move {
            let _turn = turns.acquire().await;
            let asked = async {
                match node.is_lost() || node.port == 0 {
                    true => Err("the other nodes hold it for lost".to_owned()),
                    false => ask(&server, node.is_primary()).await.map_err(|error| error.to_string()),
                }
            };
            let asked = tokio::time::timeout(NODE_LIMIT, asked).await;
            let asked = asked.unwrap_or_else(|_| Err(format!("it does not answer within {} s", NODE_LIMIT.as_secs())));
            let (facts, moves) = match asked {
                Ok((facts, moves)) => (Ok(facts), moves),
                Err(why) => (Err(why), None),
            };
            let trouble = moves.map(|slots| format!("slots {slots} move from or to {}", node.address()));
            (number, (Member { node, facts }, trouble))
        });
    }
    let mut asked = Vec::new();
    while let Some(done) = asking.join_next().await {
        // A task that has failed has panicked, and that was reported where it happened.
        asked.extend(done.ok());
    }
    asked.sort_by_key(|(number, _)| *number);
    asked.into_iter().map(|(_, member)| member).collect()
}

async fn ask(server: &Server, is_primary: bool) -> Result<(Facts, Option<String>), ServerError> {
    let mut client = server.connect().await?;
    let facts = Facts::read(&mut client).await?;
    let moves = if is_primary && facts.may_import_slots() { migration(&mut client).await? } else { None };
    Ok((facts, moves))
}

/// The slots that a node of Valkey 9 gives or takes as a whole.
async fn migration(client: &mut Client) -> Result<Option<String>, ServerError> {
    let Frame::Array(jobs) = client.command(&["CLUSTER", "GETSLOTMIGRATIONS"]).await? else { return Ok(None) };
    let fields = |job: &Frame, wanted: &[u8]| {
        let Frame::Array(fields) = job else { return None };
        let found = fields.chunks_exact(2).find(|pair| pair.first().and_then(Frame::as_bytes) == Some(wanted));
        Some(found?.get(1)?.as_bytes()?.to_vec())
    };
    let under_way = jobs.iter().find(|job| fields(job, b"state").is_some_and(|state| !OVER.contains(&&*state)));
    let slots = under_way.and_then(|job| fields(job, b"slot_ranges"));
    Ok(slots.map(|slots| String::from_utf8_lossy(&slots).into_owned()))
}

/// Why the cluster should be left alone, as the node that was asked sees it.
fn problems_of<'a>(state: &Info, nodes: impl Iterator<Item = &'a Node>) -> Vec<String> {
    let mut problems = Vec::new();
    match state.get("cluster_state") {
        Some("ok") => {}
        other => problems.push(format!("the cluster's state is {}", other.unwrap_or("not known"))),
    }
    match state.number::<u32>("cluster_slots_assigned") {
        Some(ALL_SLOTS) => {}
        assigned => {
            let assigned = assigned.unwrap_or(0);
            problems.push(format!("{assigned} of {ALL_SLOTS} slots have a primary"));
        }
    }
    for node in nodes {
        for moving in &node.moving {
            problems.push(format!("slot {} moves, says {}", moving, node.address()));
        }
        // A replica that is away waits to be replaced. A primary that is away is about to be.
        if node.is_primary() && !node.slots.is_empty() && (node.has("fail") || node.has("fail?")) {
            problems.push(format!("{} is away, and a replica takes over", node.address()));
        }
    }
    problems
}

/// The primaries with slots, in the order of these, each with its replicas; and the other nodes.
pub(super) fn shards_of(members: impl Iterator<Item = Member>) -> (Vec<Shard>, Vec<Member>) {
    let (primaries, others): (Vec<Member>, Vec<Member>) =
        members.partition(|member| member.node.is_primary() && !member.node.slots.is_empty());
    let mut shards: Vec<Shard> = primaries.into_iter().map(|primary| Shard { primary, replicas: Vec::new() }).collect();
    let mut alone = Vec::new();
    for other in others {
        let shard = shards.iter_mut().find(|shard| Some(&shard.primary.node.id) == other.node.primary.as_ref());
        match shard {
            Some(shard) => shard.replicas.push(other),
            None => alone.push(other),
        }
    }
    shards.iter_mut().for_each(|shard| shard.replicas.sort_by(|one, other| one.node.id.cmp(&other.node.id)));
    shards.sort_by(|one, other| one.primary.node.slots.first().cmp(&other.primary.node.slots.first()));
    (shards, alone)
}

// The configuration file of a node that is to join a cluster as a replica (`nodes.conf`).
//
// A node that starts with this file is a replica while it loads its data, and so goes on at the primary by a partial
// resynchronisation. No other node knows it before one `CLUSTER MEET`.

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
    use super::{Member, *};

    fn id(digit: char) -> String {
        digit.to_string().repeat(40)
    }

    fn nodes(flags: &str, moving: &str) -> Vec<Node> {
        let (a, b, c) = (id('a'), id('b'), id('c'));
        let text = format!(
            "{b} 10.0.0.2:6379@16379 master - 0 0 2 connected 8000-16383\n\
             {c} 10.0.0.3:6379@16379 slave {a} 0 0 1 connected\n\
             {a} 10.0.0.1:6379@16379 {flags} - 0 0 1 connected 0-7999{moving}\n"
        );
        nodes::parse(&text).unwrap()
    }

    fn info(state: &str, assigned: u32) -> Info {
        Info::parse(format!("cluster_state:{state}\r\ncluster_slots_assigned:{assigned}\r\n").as_bytes())
    }

    #[test]
    fn shards_stand_in_the_order_of_their_slots_with_their_replicas() {
        let members = nodes("myself,master", "").into_iter();
        let (shards, others) = shards_of(members.map(|node| Member { node, facts: Err(String::new()) }));
        assert!(others.is_empty());
        let seen: Vec<_> = shards.iter().map(|shard| (shard.slots(), shard.replicas.len())).collect();
        assert_eq!(seen, [("0-7999".to_owned(), 1), ("8000-16383".to_owned(), 0)]);
    }

    #[test]
    fn a_cluster_that_is_not_well_is_said_to_be_so() {
        let problems =
            |info: &Info, flags: &str, moving: &str| problems_of(info, nodes(flags, moving).iter()).join("; ");
        assert_eq!(problems(&info("ok", ALL_SLOTS), "myself,master", ""), "");
        assert!(problems(&info("fail", ALL_SLOTS), "master", "").contains("state is fail"));
        assert!(problems(&info("ok", 16_000), "master", "").contains("16000 of 16384"));
        assert!(problems(&info("ok", ALL_SLOTS), "master,fail?", "").contains("is away"));
        let moving = format!(" [93->-{}]", id('b'));
        assert!(problems(&info("ok", ALL_SLOTS), "myself,master", &moving).contains("slot 93"));
    }

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
