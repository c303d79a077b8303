//! The result of a trial.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::Method;

/// One sync of N replicas by one method. All times are in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The method.
    pub method: Method,
    /// Number of replicas.
    pub replicas: usize,
    /// Wall time from the first REPLICAOF, or the start of the first `remora replica`, until the last replica had
    /// caught up.
    pub seconds: f64,
    /// Wall time until the first replica had caught up.
    pub first_seconds: f64,
    /// The moments between which the sync ran.
    #[serde(skip)]
    pub window: Option<(Instant, Instant)>,
    /// Processor time of the primary, including its fork children and the writer's commands.
    pub primary_cpu: f64,
    /// Processor time of each replica's server.
    pub replica_cpu: Vec<f64>,
    /// Processor time of the source agent from its start (including the touching of its memory) and of all replica
    /// agents; for a copier, that of its threads, and for a tool that of its processes.
    pub agents_cpu: f64,
    /// Processor time of the source agent, which [`Outcome::agents_cpu`] includes; 0 without a source.
    pub source_cpu: f64,
    /// The part of it that the source had used when it was ready: nearly all of it the first touch of its memory.
    pub source_ready_cpu: f64,
    /// The phases of the last replica.
    pub phases: Phases,
    /// Bytes that left the primary.
    pub primary_bytes: u64,
    /// Bytes that left the primary's host by its cable, all programs together, with TCP's headers; `None` on loopback.
    pub host_bytes: Option<u64>,
    /// Full copies that the primary's replicas, and the tools that act as one, asked for and got (`sync_full`).
    pub full_copies: u64,
    /// Peak of the primary's private memory, in bytes, and what its fork child had to copy.
    pub peak_memory: u64,
    /// What the primary and its fork child had to copy, in bytes, as the server reports it. 0 if none was forked.
    pub child_memory: u64,
    /// How long the primary had a fork child.
    pub child_seconds: f64,
    /// Memory that each replica's server uses afterwards (`used_memory`), in bytes.
    pub replica_memory: Vec<u64>,
    /// Commands per second that the writer achieved; 0 without a writer.
    pub writes_per_second: f64,
    /// Peak memory of the source agent, including its tables; 0 without a source.
    pub source_memory: u64,
    /// Peak memory of each replica agent, including the slots that it keeps for others, in bytes.
    pub agent_memory: Vec<u64>,
    /// Whether digest, replid, offset, functions and expiries of all replicas equal the primary's (for a copier: the
    /// digest only); `None` if that was not checked.
    pub equal: Option<bool>,
    /// The difference, if there is one.
    pub differences: Vec<String>,
}

impl Outcome {
    /// What a reader of the figures must know besides them: servers that did not continue from the file on which they
    /// started. The time of a second copy is part of theirs.
    pub fn remark(&self) -> Option<String> {
        let again = self.full_copies.saturating_sub(self.replicas as u64);
        (self.method == Method::RdbFile && again > 0).then(|| {
            format!("SECOND FULL COPY for {again} of {} servers that had started on their file", self.replicas)
        })
    }
}

/// Consecutive phases: their sum is the whole time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Phases {
    /// Until the snapshot's first bytes arrived: the start of the agent, delays, the fork.
    pub snapshot: f64,
    /// Until the last bytes had arrived. A server that loads meanwhile spends most of its loading here.
    pub transfer: f64,
    /// Until the server had loaded them.
    pub load: f64,
    /// Until it had caught up with the primary, including the hand-off.
    pub catch_up: f64,
}

impl Phases {
    /// From the summary of `remora replica --json`. The time before the agent started is added to its first phase.
    pub(crate) fn of_agent(summary: &Summary, whole: f64) -> Phases {
        let catch_up = summary.catch_up_seconds + summary.hand_off_seconds;
        let known = summary.transfer_seconds + summary.load_seconds + catch_up;
        Phases {
            snapshot: (whole - known).max(0.0),
            transfer: summary.transfer_seconds,
            load: summary.load_seconds,
            catch_up,
        }
    }

    /// The sum of all phases.
    pub fn sum(&self) -> f64 {
        self.snapshot + self.transfer + self.load + self.catch_up
    }
}

/// The needed parts of the summary that `remora replica --json` writes.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Summary {
    transfer_seconds: f64,
    load_seconds: f64,
    catch_up_seconds: f64,
    hand_off_seconds: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_unknown_to_the_agent_is_added_to_its_first_phase() {
        let summary =
            Summary { transfer_seconds: 2.0, load_seconds: 0.5, catch_up_seconds: 0.25, hand_off_seconds: 0.25 };
        let phases = Phases::of_agent(&summary, 4.0);
        assert_eq!(phases, Phases { snapshot: 1.0, transfer: 2.0, load: 0.5, catch_up: 0.5 });
        assert_eq!(phases.sum(), 4.0);
    }
}
