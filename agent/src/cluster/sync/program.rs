//! Program: which node becomes a replica of which shard, and whose turn it is. Pure.

use std::collections::VecDeque;
use std::fmt;

use crate::args::{HostPort, Renew};
use crate::cluster::nodes::Node;
use crate::cluster::survey::{Member, Shard, Survey};
use crate::exit::Failure;
use crate::server::Facts;
use crate::units::counted;

/// A node that is to be added, as it stands.
#[derive(Clone, Debug)]
pub(in crate::cluster) struct Newcomer {
    /// Where it was asked.
    pub(in crate::cluster) place: HostPort,
    /// Its own line, and those of the nodes that it knows.
    pub(in crate::cluster) own: Node,
    pub(in crate::cluster) known: Vec<Node>,
    pub(in crate::cluster) facts: Facts,
}

/// What a node is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cluster) enum What {
    /// It becomes a replica.
    Join,
    /// It throws its data away, and becomes a replica of its shard again.
    Renew,
    /// It is a replica already, and not in step yet.
    Watch,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            What::Join => "becomes a replica",
            What::Renew => "takes its data anew",
            What::Watch => "goes on",
        })
    }
}

/// One node's work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cluster) struct Job {
    pub(in crate::cluster) node: HostPort,
    pub(in crate::cluster) id: String,
    pub(in crate::cluster) what: What,
    /// The number of its shard in the survey.
    pub(in crate::cluster) shard: usize,
    /// The run of the server that throws its data away: a source beside it cannot give them back.
    pub(in crate::cluster) loses: Option<String>,
}

/// All of it, in its order.
#[derive(Debug)]
pub(in crate::cluster) struct Program {
    pub(in crate::cluster) jobs: Vec<Job>,
    /// What needs nothing, and why.
    pub(in crate::cluster) notes: Vec<String>,
    /// The named nodes that follow the primary of a shard, or are to do so: their ids, and the numbers of the shards.
    pub(in crate::cluster) following: Vec<(String, usize)>,
    placing: Placing,
}

/// Which shard a node goes to that has none yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placing {
    /// The one with the fewest replicas.
    Fewest,
    /// One that no other named node has.
    OneEach,
}

impl Program {
    /// # Errors
    /// A node cannot become a replica, or there is no such replica.
    pub(in crate::cluster) fn of(
        survey: &Survey,
        newcomers: Vec<Newcomer>,
        renew: &[Renew],
    ) -> Result<Program, Failure> {
        Program::placing(Placing::Fewest, survey, newcomers, renew)
    }

    /// The program of nodes that are to take the shards over, one each. One that serves a shard already has it.
    ///
    /// # Errors
    /// A node cannot become a replica, or there are more nodes than shards.
    pub(in crate::cluster) fn one_each(survey: &Survey, newcomers: Vec<Newcomer>) -> Result<Program, Failure> {
        Program::placing(Placing::OneEach, survey, newcomers, &[])
    }

    fn placing(
        placing: Placing,
        survey: &Survey,
        newcomers: Vec<Newcomer>,
        renew: &[Renew],
    ) -> Result<Program, Failure> {
        let mut program = Program { jobs: Vec::new(), notes: Vec::new(), following: Vec::new(), placing };
        // Those that have a shard count where the others are placed.
        let (following, joining): (Vec<_>, Vec<_>) = newcomers
            .into_iter()
            .partition(|newcomer| newcomer.own.primary.is_some() || !newcomer.own.slots.is_empty());
        for newcomer in following.into_iter().chain(joining) {
            program.add(survey, newcomer)?;
        }
        for wanted in renew {
            program.renew(survey, wanted)?;
        }
        // Shards take turns, so that those of one do not wait for each other while others have none.
        let mut earlier = vec![0_usize; survey.shards.len()];
        let mut ranked: Vec<(usize, Job)> = Vec::new();
        for job in std::mem::take(&mut program.jobs) {
            let Some(count) = earlier.get_mut(job.shard) else { continue };
            ranked.push((*count, job));
            *count += 1;
        }
        let in_step = |job: &Job| survey.shards.get(job.shard).map_or(0, |shard| standing(shard).count());
        ranked.sort_by_key(|(turn, job)| (*turn, in_step(job), job.shard));
        let jobs = ranked.into_iter().map(|(_, job)| job).collect();
        Ok(Program { jobs, ..program })
    }

    fn add(&mut self, survey: &Survey, newcomer: Newcomer) -> Result<(), Failure> {
        let Newcomer { place, own, known, facts } = newcomer;
        let refused = |why: String| Err(Failure::refused(format!("{place} cannot become a replica: {why}")));
        if facts.cluster_enabled != Some(true) {
            return refused("it is not in cluster mode (cluster-enabled no)".into());
        }
        if self.following.iter().any(|(id, _)| *id == own.id) {
            return refused("it is named twice".into());
        }
        // It is what it says itself: others may not have heard of it yet.
        if let Some(primary) = &own.primary {
            let Some(shard) = survey.shards.iter().position(|shard| shard.primary.node.id == *primary) else {
                return refused(format!("it follows {primary}, which is no primary of this cluster"));
            };
            self.following.push((own.id.clone(), shard));
            let link = facts.link.as_ref();
            let is_up = link.is_some_and(|link| link.up == Some(true) && link.syncing != Some(true));
            let primary = survey.shards.get(shard).map(|shard| shard.primary.node.address()).unwrap_or_default();
            match is_up {
                true => self.notes.push(format!("{place} follows {primary} already")),
                false => self.jobs.push(Job { node: place, id: own.id, what: What::Watch, shard, loses: None }),
            }
            return Ok(());
        }
        let serves = survey.shards.iter().position(|shard| shard.primary.node.id == own.id);
        if let (Placing::OneEach, Some(shard)) = (self.placing, serves) {
            self.notes.push(format!("{place} serves {} already", slots_of(&own)));
            self.following.push((own.id, shard));
            return Ok(());
        }
        if !own.slots.is_empty() {
            return refused("it is a primary with slots".into());
        }
        if facts.keys() > 0 {
            return refused(format!(
                "it holds {}: FLUSHALL and CLUSTER RESET make it empty",
                counted(facts.keys(), "key")
            ));
        }
        let is_ours = |node: &Node| survey.members().any(|member| member.node.id == node.id);
        if known.iter().any(|node| node.id != own.id && !node.has("handshake") && !is_ours(node)) {
            return refused("it knows nodes of another cluster: CLUSTER RESET makes it forget them".into());
        }
        let shard = self.place_for(survey, &own).ok_or_else(|| match self.placing {
            Placing::Fewest => Failure::refused("the cluster has no shard"),
            Placing::OneEach => Failure::refused(format!(
                "{place} is one too many, as each of the {} shards has a new node: remora cluster sync --add makes further replicas \
                 afterwards",
                survey.shards.len()
            )),
        })?;
        self.following.push((own.id.clone(), shard));
        self.jobs.push(Job { node: place, id: own.id, what: What::Join, shard, loses: None });
        Ok(())
    }

    /// The shard with the fewest replicas; of several, one without a node on the same host.
    fn place_for(&self, survey: &Survey, own: &Node) -> Option<usize> {
        // The cluster may not have heard of a new replica yet.
        let is_counted = |id: &String, shard: usize| {
            survey.shards.get(shard).is_some_and(|shard| standing(shard).any(|member| member.node.id == *id))
        };
        let taken = |wanted: usize| self.following.iter().any(|(_, shard)| *shard == wanted);
        let planned = |wanted: usize| {
            self.following.iter().filter(|(id, shard)| *shard == wanted && !is_counted(id, wanted)).count()
        };
        let is_free = |number: usize| self.placing == Placing::Fewest || !taken(number);
        let shards = survey.shards.iter().enumerate().filter(|(number, _)| is_free(*number));
        let rank = |(number, shard): (usize, &Shard)| {
            let shares_host = shard.members().any(|member| member.node.host == own.host);
            (standing(shard).count() + planned(number), shares_host, number)
        };
        shards.map(rank).min().map(|(_, _, number)| number)
    }

    fn renew(&mut self, survey: &Survey, wanted: &Renew) -> Result<(), Failure> {
        let mut found = false;
        for (number, shard) in survey.shards.iter().enumerate() {
            for Member { node, facts } in shard.replicas.iter().filter(|member| wanted.names(&member.node)) {
                found = true;
                let facts = match facts {
                    Ok(facts) => facts,
                    Err(why) => {
                        let text = format!("the replica {} does not answer: {why}", node.address());
                        return Err(Failure::refused(text));
                    }
                };
                if self.jobs.iter().any(|job| job.id == node.id) {
                    continue;
                }
                let place = HostPort { host: node.host.clone(), port: node.port };
                let loses = facts.run_id.clone();
                self.jobs.push(Job { node: place, id: node.id.clone(), what: What::Renew, shard: number, loses });
            }
        }
        match found || *wanted == Renew::All {
            true => Ok(()),
            false => Err(Failure::refused(format!(
                "the cluster has no replica {wanted}; if it was one and lost its shard in an interrupted run, give its \
                 address to --add"
            ))),
        }
    }
}

/// `0-5460,5470`
fn slots_of(node: &Node) -> String {
    node.slots.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// The replicas of a shard that are not lost.
fn standing(shard: &Shard) -> impl Iterator<Item = &Member> {
    shard.replicas.iter().filter(|member| !member.node.is_lost() && !member.node.has("fail?"))
}

/// Whose turn it is.
#[derive(Debug)]
pub(in crate::cluster) struct Turns {
    waiting: VecDeque<Job>,
    /// The shards of those at work.
    running: Vec<usize>,
    at_once: usize,
    per_shard: usize,
    /// Whether a node has been seen to read from its source. Until then one goes alone.
    is_proven: bool,
}

impl Turns {
    pub(in crate::cluster) fn new(jobs: Vec<Job>, at_once: usize, per_shard: usize) -> Turns {
        Turns { waiting: jobs.into(), running: Vec::new(), at_once, per_shard, is_proven: false }
    }

    /// The next node that may begin.
    pub(in crate::cluster) fn next(&mut self) -> Option<Job> {
        let at_once = if self.is_proven { self.at_once } else { 1 };
        if self.running.len() >= at_once {
            return None;
        }
        let of_shard = |wanted: usize| self.running.iter().filter(|shard| **shard == wanted).count();
        let place = self.waiting.iter().position(|job| of_shard(job.shard) < self.per_shard)?;
        let job = self.waiting.remove(place)?;
        self.running.push(job.shard);
        Some(job)
    }

    pub(in crate::cluster) fn ended(&mut self, shard: usize) {
        if let Some(place) = self.running.iter().position(|running| *running == shard) {
            self.running.swap_remove(place);
        }
    }

    pub(in crate::cluster) fn prove(&mut self) {
        self.is_proven = true;
    }

    pub(in crate::cluster) fn has_proof(&self) -> bool {
        self.is_proven
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::cluster::nodes;
    use crate::cluster::survey::shards_of;

    fn id(digit: char) -> String {
        digit.to_string().repeat(40)
    }

    /// Two shards: the first with a replica, the second with one that is lost.
    fn survey() -> Survey {
        let (a, b) = (id('a'), id('b'));
        let text = format!(
            "{a} 10.0.0.1:6379@16379 myself,master - 0 0 1 connected 0-7999\n\
             {b} 10.0.0.2:6379@16379 master - 0 0 2 connected 8000-16383\n\
             {} 10.0.0.3:6379@16379 slave {a} 0 0 1 connected\n\
             {} 10.0.0.4:6379@16379 slave,fail {b} 0 0 2 disconnected\n",
            id('c'),
            id('d')
        );
        let members = nodes::parse(&text).unwrap().into_iter();
        let (shards, others) = shards_of(members.map(|node| Member { node, facts: Ok(Facts::default()) }));
        Survey { shards, others, problems: Vec::new(), epoch: 2 }
    }

    fn newcomer(digit: char, port: u16) -> Newcomer {
        let text = format!("{} 10.0.0.9:{port}@1{port} myself,master - 0 0 0 connected\n", id(digit));
        let known = nodes::parse(&text).unwrap();
        let facts = Facts { cluster_enabled: Some(true), ..Facts::default() };
        Newcomer { place: HostPort { host: "10.0.0.9".into(), port }, own: known[0].clone(), known, facts }
    }

    fn shards(program: &Program) -> Vec<usize> {
        program.jobs.iter().map(|job| job.shard).collect()
    }

    #[test]
    fn new_nodes_go_where_replicas_are_missing_and_shards_without_one_come_first() {
        let nodes = vec![newcomer('1', 6001), newcomer('2', 6002), newcomer('3', 6003)];
        let program = Program::of(&survey(), nodes, &[]).unwrap();
        // The second shard has none, so it gets the first; then both have one.
        assert_eq!(shards(&program), [1, 0, 1]);
        assert!(program.jobs.iter().all(|job| job.what == What::Join));
    }

    #[test]
    fn a_node_that_cannot_become_a_replica_is_refused_with_the_reason() {
        let refused = |change: &dyn Fn(&mut Newcomer)| {
            let mut node = newcomer('1', 6001);
            change(&mut node);
            Program::of(&survey(), vec![node], &[]).unwrap_err().message
        };
        let text = refused(&|node| node.facts.cluster_enabled = Some(false));
        assert!(text.contains("not in cluster mode"), "{text}");
        let text = refused(&|node| node.own.slots = vec!["5".parse().unwrap()]);
        assert!(text.contains("a primary with slots"), "{text}");
        let text = refused(&|node| {
            node.facts.databases = vec![crate::server::Database { number: 0, keys: 7, expires: 0, field_expires: 0 }];
        });
        assert!(text.contains("it holds 7 keys"), "{text}");
        let text = refused(&|node| node.known.push(newcomer('7', 6007).own));
        assert!(text.contains("nodes of another cluster"), "{text}");
        let text = refused(&|node| node.own.primary = Some(id('7')));
        assert!(text.contains("no primary of this cluster"), "{text}");
        let twice = Program::of(&survey(), vec![newcomer('1', 6001), newcomer('1', 6001)], &[]);
        assert!(twice.unwrap_err().message.contains("named twice"));
    }

    #[test]
    fn what_an_earlier_run_has_done_is_not_done_again() {
        let mut done = newcomer('1', 6001);
        done.own.primary = Some(id('a'));
        let mut halfway = done.clone();
        let link = crate::server::Link { host: "10.0.0.1".into(), port: 6379, up: Some(true), syncing: Some(false) };
        done.facts.link = Some(link.clone());
        halfway.facts.link = Some(crate::server::Link { up: Some(false), syncing: Some(true), ..link });
        let program = Program::of(&survey(), vec![done], &[]).unwrap();
        assert!(program.jobs.is_empty() && program.notes[0].contains("already"), "{program:?}");
        let program = Program::of(&survey(), vec![halfway], &[]).unwrap();
        assert_eq!((program.jobs[0].what, program.jobs[0].shard), (What::Watch, 0));
        // One more: the first shard has two with the one halfway, and the second none.
        let mut halfway = newcomer('1', 6001);
        halfway.own.primary = Some(id('b'));
        let nodes = vec![newcomer('2', 6002), newcomer('3', 6003), halfway];
        assert_eq!(shards(&Program::of(&survey(), nodes, &[]).unwrap()), [1, 0, 1]);
    }

    #[test]
    fn replicas_are_renewed_by_name_and_an_unknown_name_is_refused() {
        let renew = |wanted: &str| Program::of(&survey(), Vec::new(), &[wanted.parse().unwrap()]);
        assert_eq!(shards(&renew("10.0.0.3:6379").unwrap()), [0]);
        assert_eq!(shards(&renew(&id('c')).unwrap()), [0]);
        assert_eq!(renew("all").unwrap().jobs.len(), 2);
        assert!(renew("10.0.0.1:6379").unwrap_err().message.contains("no replica 10.0.0.1:6379"));
    }

    #[test]
    fn one_goes_first_and_then_some_at_once_but_not_two_of_a_shard() {
        let job = |shard: usize| Job {
            shard,
            ..Program::of(&survey(), vec![newcomer('1', 6001)], &[]).unwrap().jobs[0].clone()
        };
        let mut turns = Turns::new([0, 0, 1, 2].map(job).to_vec(), 2, 1);
        assert_eq!(turns.next().map(|job| job.shard), Some(0));
        assert_eq!(turns.next(), None, "one alone, until there is proof");
        turns.prove();
        assert_eq!(turns.next().map(|job| job.shard), Some(1), "not the second one of the first shard");
        assert_eq!(turns.next(), None, "two at once");
        turns.ended(0);
        assert_eq!(turns.next().map(|job| job.shard), Some(0));
        turns.ended(1);
        assert_eq!(turns.next().map(|job| job.shard), Some(2));
        turns.ended(0);
        assert_eq!(turns.next(), None, "none is left");
    }
}
