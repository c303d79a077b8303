//! The plan: which new node takes which shard, what will be done, and what speaks against it.

use serde::Serialize;

use super::decide::{Goal, Seen, Setting, Settings, Side};
use super::look::clashes;
use crate::cluster::plan::{Sources, aligned};
use crate::cluster::survey::Survey;
use crate::cluster::sync::program::{Newcomer, Program, What};
use crate::cluster::sync::source_for;
use crate::exit::Failure;
use crate::server::Server;
use crate::units::Size;
use remora_replica::{LeftOut, conversion};

/// The plan.
#[derive(Debug, Serialize)]
pub(super) struct Map {
    shards: Vec<PlannedShard>,
    /// Settings that are made at once; others follow when the nodes have heard of them.
    settings: Vec<Setting>,
    /// Nodes that leave the cluster.
    leave: Vec<String>,
    notes: Vec<String>,
}

/// A shard.
#[derive(Debug, Serialize)]
pub(super) struct PlannedShard {
    slots: String,
    /// The node that serves it.
    serves: String,
    side: Side,
    /// The node that takes it.
    takes: Option<String>,
    /// What that one does before.
    first: String,
    data_bytes: Option<u64>,
}

/// The shards as they are.
pub(super) fn shards(seen: &Seen) -> Vec<PlannedShard> {
    let shards = seen.shards.iter().map(|shard| PlannedShard {
        slots: shard.slots.clone(),
        serves: shard.primary.place.to_string(),
        side: shard.primary.side,
        takes: None,
        first: String::new(),
        data_bytes: None,
    });
    shards.collect()
}

impl Map {
    /// To the new nodes.
    pub(super) fn there(
        seen: &Seen,
        survey: &Survey,
        newcomers: &[Newcomer],
        program: &Program,
        sources: &Sources,
    ) -> Map {
        let mut planned = shards(seen);
        for (id, number) in &program.following {
            let (Some(row), Some(shard)) = (planned.get_mut(*number), survey.shards.get(*number)) else { continue };
            let Some(newcomer) = newcomers.iter().find(|newcomer| newcomer.own.id == *id) else { continue };
            row.data_bytes = shard.primary.facts.as_ref().ok().and_then(|facts| facts.used_memory_dataset);
            row.takes = Some(format!("{} ({})", newcomer.place, newcomer.facts.name()));
            let job = program.jobs.iter().find(|job| job.id == *id);
            row.first = match job {
                Some(job) if job.what == What::Watch => "its copy is under way".into(),
                Some(job) => match source_for(job, survey, sources) {
                    Ok(source) => format!("a copy from {}", source.address),
                    Err(failure) => failure.message,
                },
                None if row.side == Side::New => "serves it".into(),
                None => "follows it".into(),
            };
        }
        let mut notes = absent(seen);
        let members = survey.members().filter_map(|member| member.facts.as_ref().ok());
        if clashes(members.chain(newcomers.iter().map(|newcomer| &newcomer.facts))) {
            notes.push(
                "names go around what Redis 8 and Valkey misunderstand of each other; do not restart a Valkey node before --forget \
                 (docs/how-to/migrate-cluster.md)"
                    .into(),
            );
        }
        Map { shards: planned, settings: missing(seen), leave: Vec::new(), notes }
    }

    /// Back, or what leaves.
    pub(super) fn of(goal: Goal, seen: &Seen) -> Map {
        let mut planned = shards(seen);
        for (row, shard) in planned.iter_mut().zip(&seen.shards).filter(|(row, _)| row.side != goal.to) {
            row.takes = shard.candidate(goal.to).map(|node| node.place.to_string());
            row.first = "follows it".into();
        }
        let leaves = seen.nodes().filter(|node| goal.forget && node.side != goal.to);
        let leave = leaves.map(|node| node.place.to_string()).collect();
        Map { shards: planned, settings: missing(seen), leave, notes: absent(seen) }
    }

    pub(super) fn table(&self) -> String {
        let mut rows = vec![["SLOTS", "SERVED BY", "DATA", "TO", "FIRST"].map(str::to_owned)];
        for row in &self.shards {
            let data = row.data_bytes.map_or_else(|| "-".to_owned(), |bytes| Size::bytes(bytes).to_string());
            let takes = row.takes.clone().unwrap_or_else(|| "-".to_owned());
            rows.push([row.slots.clone(), row.serves.clone(), data, takes, row.first.clone()]);
        }
        let mut text = aligned(&rows);
        for Setting { node, name, value } in &self.settings {
            text.push_str(&format!("setting: {node}: {name} {value:?}\n"));
        }
        if !self.leave.is_empty() {
            text.push_str(&format!("leave the cluster, and lose their data: {}\n", self.leave.join(", ")));
        }
        for note in &self.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        text
    }
}

/// The nodes that are lost, or do not follow.
fn absent(seen: &Seen) -> Vec<String> {
    let lost = seen.nodes().filter(|node| node.is_lost).map(|node| format!("{} is lost", node.place));
    let late = seen.shards.iter().flat_map(|shard| shard.replicas.iter().filter_map(|node| shard.late(node)));
    lost.chain(late).collect()
}

fn missing(seen: &Seen) -> Vec<Setting> {
    match &seen.settings {
        Settings::Missing(settings) | Settings::Needless(settings) => settings.clone(),
        Settings::Right | Settings::NotHeardOf(_) => Vec::new(),
    }
}

/// Refuses new nodes that cannot hold what their primaries hold, or do not know the commands that those have run.
///
/// # Errors
/// Why.
pub(super) async fn refuse(
    server: &Server,
    survey: &Survey,
    newcomers: &[Newcomer],
    program: &Program,
    left_out: &[LeftOut],
) -> Result<(), Failure> {
    for job in program.jobs.iter().filter(|job| job.what == What::Join) {
        let Some(shard) = survey.shards.get(job.shard) else { continue };
        let Some(newcomer) = newcomers.iter().find(|newcomer| newcomer.own.id == job.id) else { continue };
        let (old, new) = (&shard.primary.node, &newcomer.place);
        let mut old = server.at(&old.host, old.port).connect().await?;
        let mut new = server.at(&new.host, new.port).connect().await?;
        conversion::refuse(&mut old, &mut new, left_out).await?;
    }
    Ok(())
}
