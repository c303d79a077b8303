//! What a trial came to.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::Method;

/// One sync of N replicas by one method. Seconds everywhere.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// How the replicas were made.
    pub method: Method,
    /// How many.
    pub replicas: usize,
    /// Wall time from the first REPLICAOF, or the start of the first `remora replica`, until the last replica was in step.
    pub seconds: f64,
    /// ... until the first one was.
    pub first_seconds: f64,
    /// Between which moments that was.
    #[serde(skip)]
    pub window: Option<(Instant, Instant)>,
    /// Processor time of the primary, its fork children and the writer's commands included.
    pub primary_cpu: f64,
    /// Processor time of each replica's server.
    pub replica_cpu: Vec<f64>,
    /// Processor time of the source agent from its start (so with the touching of its memory), and of all replica agents; of the
    /// copier's threads, where that is the method.
    pub agents_cpu: f64,
    /// Where the time of the last replica went.
    pub phases: Phases,
    /// Bytes that left the primary.
    pub primary_bytes: u64,
    /// Bytes that left the primary's host by its cable, all programs together, with TCP's headers; `None` on loopback.
    pub host_bytes: Option<u64>,
    /// The most memory that the primary had of its own, in bytes, and what its fork child had to copy.
    pub peak_memory: u64,
    /// The most memory that the source agent had, its tables included; 0 where there is none.
    pub source_memory: u64,
    /// Whether digest, replid, offset, functions and expiries of all replicas are the primary's (of the copier: the digest alone);
    /// `None` where it was not looked at.
    pub equal: Option<bool>,
    /// What differs, where something does.
    pub differences: Vec<String>,
}

/// The phases follow one another: their sum is the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Phases {
    /// Until the snapshot's first bytes were there: the start of the agent, delays, the fork.
    pub snapshot: f64,
    /// Until the last had arrived. Whoever loads meanwhile has the most of its loading in here.
    pub transfer: f64,
    /// Until the server had loaded them.
    pub load: f64,
    /// Until it was in step with the primary, the hand-off included.
    pub catch_up: f64,
}

impl Phases {
    /// Out of what `remora replica --json` says. What it doesn't know of, since it wasn't there, was before its first phase.
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

    /// All of them.
    pub fn sum(&self) -> f64 {
        self.snapshot + self.transfer + self.load + self.catch_up
    }
}

/// Of the summary that `remora replica --json` writes, what is needed here.
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
    fn what_an_agent_does_not_know_of_was_before_its_first_phase() {
        let summary =
            Summary { transfer_seconds: 2.0, load_seconds: 0.5, catch_up_seconds: 0.25, hand_off_seconds: 0.25 };
        let phases = Phases::of_agent(&summary, 4.0);
        assert_eq!(phases, Phases { snapshot: 1.0, transfer: 2.0, load: 0.5, catch_up: 0.5 });
        assert_eq!(phases.sum(), 4.0);
    }
}
