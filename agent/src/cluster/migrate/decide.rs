//! What is to be done next, from what is seen of the cluster. No I/O and no clock.
//!
//! ```text
//!   there:   trouble? wait ─▶ settings ─▶ copies ─▶ compare each shard ─▶ fail over, one shard at a time ─▶ done
//!   back:    trouble? wait ─▶ settings ─────────────────────────────────▶ fail over, one shard at a time ─▶ done
//!   forget:  trouble? wait ─▶ do all shards have a primary of the side that stays? ─▶ forget ─▶ settings back ─▶ done
//! ```
//!
//! What must hold:
//! - No shard fails over while another one that has done so has a replica that is not in step.
//! - A node takes a shard only if it is in step, and has executed all commands of its primary.
//! - No node is forgotten that serves slots.

use std::collections::BTreeSet;

use serde::{Serialize, Serializer};

use crate::args::HostPort;
use crate::units::counted;

/// The old nodes, or the new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Side {
    Old,
    New,
}

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Goal {
    /// The side that is to serve all shards.
    pub(super) to: Side,
    /// The nodes of the other side leave the cluster; both sides stay without it.
    pub(super) forget: bool,
}

/// A node, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) id: String,
    pub(super) place: HostPort,
    pub(super) side: Side,
    /// The other nodes hold it for lost.
    pub(super) is_lost: bool,
    /// Why it is not in step with its primary, or does not answer.
    pub(super) behind: Option<String>,
    /// Commands of its primary that it could not execute.
    pub(super) errors: u64,
}

impl Node {
    fn is_in_step(&self) -> bool {
        !self.is_lost && self.behind.is_none()
    }
}

/// A shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shard {
    pub(super) slots: String,
    pub(super) primary: Node,
    pub(super) replicas: Vec<Node>,
}

impl Shard {
    /// Why a replica does not follow.
    pub(super) fn late(&self, node: &Node) -> Option<String> {
        let why = node.behind.as_ref().filter(|_| !node.is_lost)?;
        let hint = match (self.primary.side, node.side) {
            (Side::New, Side::Old) => {
                "; it cannot read the new one's snapshots: without its data, keep it stopped, or start `remora attend --convert` beside it"
            }
            _ => "",
        };
        Some(format!("{} does not follow {}: {why}{hint}", node.place, self.primary.place))
    }

    /// The replica of this side that can take it.
    pub(super) fn candidate(&self, side: Side) -> Option<&Node> {
        self.replicas.iter().find(|node| node.side == side && node.is_in_step())
    }
}

/// A setting of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Setting {
    #[serde(serialize_with = "as_text")]
    pub(super) node: HostPort,
    pub(super) name: &'static str,
    pub(super) value: String,
}

fn as_text<S: Serializer>(node: &HostPort, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(node)
}

/// The settings that keep the two families apart on the cluster's bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Settings {
    /// As they must be.
    Right,
    /// These must be made.
    Missing(Vec<Setting>),
    /// Made, and a node has not heard of it.
    NotHeardOf(String),
    /// These were made, and are needed no more.
    Needless(Vec<Setting>),
}

/// The cluster at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// Why it should be left alone now.
    pub(super) trouble: Option<String>,
    pub(super) settings: Settings,
    pub(super) shards: Vec<Shard>,
    /// Nodes of no shard.
    pub(super) others: Vec<Node>,
}

impl Seen {
    /// All nodes.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &Node> {
        let of_shards = self.shards.iter().flat_map(|shard| std::iter::once(&shard.primary).chain(&shard.replicas));
        of_shards.chain(&self.others)
    }

    /// How many shards this side serves.
    pub(super) fn served_by(&self, side: Side) -> usize {
        self.shards.iter().filter(|shard| shard.primary.side == side).count()
    }
}

/// What this run has done, and was told not to do.
#[derive(Clone, Debug, Default)]
pub(super) struct Past {
    pub(super) has_copied: bool,
    /// The slots of the shards whose data were compared.
    pub(super) compared: BTreeSet<String>,
    pub(super) compares_nothing: bool,
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing, and to look again.
    Wait(String),
    Set(Vec<Setting>),
    /// The new nodes become replicas.
    Copy,
    /// The data of a shard are compared: its number, and the replica's place in it.
    Compare {
        shard: usize,
        node: Node,
    },
    FailOver {
        shard: usize,
        node: Node,
    },
    /// These nodes leave the cluster.
    Forget(Vec<Node>),
    Done,
    /// It cannot go on.
    Stop(String),
}

/// What is to be done next.
pub(super) fn next(goal: Goal, seen: &Seen, past: &Past) -> Step {
    if let Some(trouble) = &seen.trouble {
        return Step::Wait(trouble.clone());
    }
    match &seen.settings {
        Settings::Missing(settings) => return Step::Set(settings.clone()),
        Settings::NotHeardOf(why) => return Step::Wait(why.clone()),
        Settings::Right | Settings::Needless(_) => {}
    }
    if goal.forget { forget(goal, seen) } else { take_over(goal, seen, past) }
}

fn take_over(goal: Goal, seen: &Seen, past: &Past) -> Step {
    let (done, left): (Vec<_>, Vec<_>) =
        seen.shards.iter().enumerate().partition(|(_, shard)| shard.primary.side == goal.to);
    for (_, shard) in &done {
        if let Some(late) = shard.replicas.iter().find_map(|node| shard.late(node)) {
            return Step::Wait(late);
        }
    }
    let mut ready = Vec::new();
    for (number, shard) in left {
        match shard.candidate(goal.to) {
            Some(node) if node.errors > 0 => {
                return Step::Stop(format!(
                    "{} could not execute {} of its primary {} (unexpected_error_replies of INFO stats; its log names \
                     them), so it does not have the same data",
                    node.place,
                    counted(node.errors, "command"),
                    shard.primary.place
                ));
            }
            Some(node) => ready.push((number, shard, node)),
            None if goal.to == Side::New && !past.has_copied => return Step::Copy,
            None => {
                let mut of_side = shard.replicas.iter().filter(|node| node.side == goal.to);
                return match of_side.find_map(|node| shard.late(node)) {
                    Some(late) => Step::Wait(late),
                    None if goal.to == Side::New => {
                        Step::Wait(format!("no new node is known to follow {}", shard.primary.place))
                    }
                    None => Step::Stop(format!(
                        "no old node follows {} (slots {}): this shard has no way back",
                        shard.primary.place, shard.slots
                    )),
                };
            }
        }
    }
    let compares = goal.to == Side::New && !past.compares_nothing;
    let unseen = ready.iter().find(|(_, shard, _)| compares && !past.compared.contains(&shard.slots));
    match (unseen, ready.first()) {
        (Some((shard, _, node)), _) => Step::Compare { shard: *shard, node: (*node).clone() },
        (None, Some((shard, _, node))) => Step::FailOver { shard: *shard, node: (*node).clone() },
        (None, None) => Step::Done,
    }
}

fn forget(goal: Goal, seen: &Seen) -> Step {
    if let Some(shard) = seen.shards.iter().find(|shard| shard.primary.side != goal.to) {
        let whose = if goal.to == Side::New { "an old" } else { "a new" };
        return Step::Stop(format!(
            "{} is {whose} node and serves the slots {}: the same command without --forget comes first",
            shard.primary.place, shard.slots
        ));
    }
    let leaving: Vec<Node> = seen.nodes().filter(|node| node.side != goal.to).cloned().collect();
    match (leaving.is_empty(), &seen.settings) {
        (false, _) => Step::Forget(leaving),
        (true, Settings::Needless(settings)) => Step::Set(settings.clone()),
        (true, _) => Step::Done,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const THERE: Goal = Goal { to: Side::New, forget: false };
    const BACK: Goal = Goal { to: Side::Old, forget: false };
    const FORGET: Goal = Goal { to: Side::New, forget: true };

    fn node(port: u16, side: Side) -> Node {
        let place = HostPort { host: "10.0.0.1".into(), port };
        Node { id: port.to_string(), place, side, is_lost: false, behind: None, errors: 0 }
    }

    /// The shard of this number: its primary is of this side, and its replica of the other one.
    fn shard(number: u16, serves: Side) -> Shard {
        let (old, new) = (node(number, Side::Old), node(100 + number, Side::New));
        let (primary, replica) = if serves == Side::Old { (old, new) } else { (new, old) };
        Shard { slots: format!("{number}-{number}"), primary, replicas: vec![replica] }
    }

    fn seen(sides: &[Side]) -> Seen {
        let shards = sides.iter().zip(1..).map(|(side, number)| shard(number, *side)).collect();
        Seen { trouble: None, settings: Settings::Right, shards, others: Vec::new() }
    }

    fn all_compared() -> Past {
        Past { compared: (1..4).map(|number| format!("{number}-{number}")).collect(), ..Past::default() }
    }

    #[track_caller]
    fn waits(step: &Step, words: &str) {
        assert!(matches!(step, Step::Wait(why) if why.contains(words)), "{step:?}");
    }

    #[track_caller]
    fn stops(step: &Step, words: &str) {
        assert!(matches!(step, Step::Stop(why) if why.contains(words)), "{step:?}");
    }

    fn setting(value: &str) -> Vec<Setting> {
        vec![Setting { node: node(1, Side::Old).place, name: "cluster-announce-hostname", value: value.into() }]
    }

    /// Does what is said until it is done, as an executor whose every step works.
    fn play(goal: Goal, mut seen: Seen) -> Vec<String> {
        let (mut past, mut said) = (Past::default(), Vec::new());
        loop {
            match next(goal, &seen, &past) {
                Step::Copy => {
                    past.has_copied = true;
                    for (number, shard) in (1..).zip(&mut seen.shards) {
                        if !shard.replicas.iter().any(|node| node.side == Side::New) {
                            shard.replicas.push(node(100 + number, Side::New));
                        }
                    }
                    said.push("copy".into());
                }
                Step::Compare { shard, .. } => {
                    past.compared.insert(seen.shards[shard].slots.clone());
                    said.push(format!("compare {shard}"));
                }
                Step::FailOver { shard, node } => {
                    let Shard { primary, replicas, .. } = &mut seen.shards[shard];
                    replicas.retain(|replica| *replica != node);
                    replicas.push(std::mem::replace(primary, node));
                    said.push(format!("fail over {shard}"));
                }
                Step::Forget(nodes) => {
                    let stays = |replica: &Node| !nodes.contains(replica);
                    seen.shards.iter_mut().for_each(|shard| shard.replicas.retain(stays));
                    seen.others.retain(stays);
                    seen.settings = Settings::Needless(setting(""));
                    said.push(format!("forget {}", nodes.len()));
                }
                Step::Set(settings) => {
                    seen.settings = Settings::Right;
                    said.push(format!("set {}", settings.len()));
                }
                Step::Done => return said,
                other => panic!("{other:?} after {said:?}"),
            }
        }
    }

    #[test]
    fn a_cluster_goes_there_and_back_and_the_old_nodes_are_forgotten() {
        let mut fresh = seen(&[Side::Old, Side::Old]);
        fresh.shards.iter_mut().for_each(|shard| shard.replicas.clear());
        fresh.settings = Settings::Missing(setting("10.0.0.1"));
        let there = ["set 1", "copy", "compare 0", "compare 1", "fail over 0", "fail over 1"];
        assert_eq!(play(THERE, fresh), there);
        assert_eq!(play(BACK, seen(&[Side::New, Side::New])), ["fail over 0", "fail over 1"]);
        assert_eq!(play(FORGET, seen(&[Side::New, Side::New])), ["forget 2", "set 1"]);
        assert_eq!(play(Goal { to: Side::Old, forget: true }, seen(&[Side::Old])), ["forget 1", "set 1"]);
    }

    #[test]
    fn it_goes_on_wherever_it_was_stopped() {
        assert_eq!(play(THERE, seen(&[Side::New, Side::Old])), ["compare 1", "fail over 1"]);
        assert_eq!(play(BACK, seen(&[Side::Old, Side::New])), ["fail over 1"]);
        let mut half = seen(&[Side::Old, Side::Old]);
        half.shards[1].replicas.clear();
        assert_eq!(play(THERE, half)[0], "copy");
        for (goal, sides) in [(THERE, [Side::New; 2]), (BACK, [Side::Old; 2])] {
            assert_eq!(next(goal, &seen(&sides), &Past::default()), Step::Done);
        }
    }

    #[test]
    fn nothing_is_done_to_a_cluster_in_trouble() {
        for goal in [THERE, BACK, FORGET] {
            let seen = Seen { trouble: Some("a slot moves".into()), ..seen(&[Side::Old, Side::New]) };
            waits(&next(goal, &seen, &all_compared()), "a slot moves");
            let seen = Seen { trouble: None, settings: Settings::NotHeardOf("names".into()), ..seen };
            waits(&next(goal, &seen, &all_compared()), "names");
        }
    }

    #[test]
    fn no_shard_fails_over_before_the_last_one_is_followed() {
        let mut seen = seen(&[Side::New, Side::Old]);
        seen.shards[0].replicas[0].behind = Some("its link is down".into());
        waits(&next(THERE, &seen, &all_compared()), "its link is down");
        // A lost node is not a way back, and nothing waits for it.
        seen.shards[0].replicas[0].is_lost = true;
        assert!(matches!(next(THERE, &seen, &all_compared()), Step::FailOver { shard: 1, .. }));
    }

    #[test]
    fn a_node_that_is_behind_or_has_failed_to_execute_a_command_takes_no_shard() {
        let past = Past { has_copied: true, ..all_compared() };
        let mut late = seen(&[Side::Old]);
        late.shards[0].replicas[0].behind = Some("loads its data".into());
        waits(&next(THERE, &late, &past), "loads its data");
        assert_eq!(next(THERE, &late, &all_compared()), Step::Copy);
        late.shards[0].replicas.clear();
        waits(&next(THERE, &late, &past), "no new node");
        for (goal, side) in [(THERE, Side::Old), (BACK, Side::New)] {
            let mut wrong = seen(&[side]);
            wrong.shards[0].replicas[0].errors = 2;
            stops(&next(goal, &wrong, &past), "2 commands");
        }
    }

    #[test]
    fn a_shard_without_an_old_node_has_no_way_back() {
        let mut seen = seen(&[Side::New]);
        seen.shards[0].replicas[0].is_lost = true;
        stops(&next(BACK, &seen, &Past::default()), "no way back");
    }

    #[test]
    fn a_node_that_serves_slots_is_not_forgotten() {
        stops(&next(FORGET, &seen(&[Side::New, Side::Old]), &Past::default()), "without --forget");
        let back = Goal { to: Side::Old, forget: true };
        stops(&next(back, &seen(&[Side::New, Side::Old]), &Past::default()), "a new node");
    }

    #[test]
    fn a_comparison_can_be_left_out_and_the_way_back_has_none() {
        let past = Past { compares_nothing: true, ..Past::default() };
        assert!(matches!(next(THERE, &seen(&[Side::Old]), &past), Step::FailOver { .. }));
        assert!(matches!(next(BACK, &seen(&[Side::New]), &Past::default()), Step::FailOver { .. }));
    }

    /// Whatever is seen: no fail-over but of a replica in step, and nothing is forgotten that serves slots.
    #[test]
    fn no_state_leads_to_a_step_that_could_lose_data() {
        let mut random = remora_base::pace::Random::seeded(39);
        let mut draw = |below: u64| random.draw() % below;
        for _ in 0..20_000 {
            let side = |number| if number == 0 { Side::Old } else { Side::New };
            let mut any = |port: u16| Node {
                is_lost: draw(4) == 0,
                behind: (draw(3) == 0).then(|| "behind".to_owned()),
                errors: u64::from(draw(4) == 0),
                ..node(port, side(draw(2)))
            };
            let shards: Vec<Shard> = (1..4)
                .map(|number| Shard {
                    slots: format!("{number}-{number}"),
                    primary: any(number),
                    replicas: vec![any(100 + number), any(200 + number)],
                })
                .collect();
            let seen = Seen { trouble: None, settings: Settings::Right, shards, others: Vec::new() };
            for goal in [THERE, BACK, FORGET] {
                match next(goal, &seen, &all_compared()) {
                    Step::FailOver { shard, node } => {
                        assert!(node.is_in_step() && node.errors == 0 && node.side == goal.to && !goal.forget);
                        let shard = &seen.shards[shard];
                        assert!(shard.replicas.contains(&node) && shard.primary.side != goal.to);
                    }
                    Step::Forget(nodes) => {
                        assert!(goal.forget && nodes.iter().all(|node| node.side != goal.to));
                        assert!(seen.shards.iter().all(|shard| !nodes.contains(&shard.primary)));
                    }
                    _ => {}
                }
            }
        }
    }
}
