//! A relay that is killed in the middle: which replica it is, and when, so that the sync no longer waits for it.
//!
//! The source decides which replica reads from which, so this module asks the source. It kills the agent that others
//! read from (`kill -9`) as soon as it holds half of the snapshot. Its server is left alone, and the sync ends when all
//! other replicas have caught up.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::Result;
use super::agents::Source;

/// The replica that was killed, if any, counted from 0.
#[derive(Debug)]
pub(super) struct Lost {
    number: AtomicUsize,
    is_over: AtomicBool,
}

impl Lost {
    /// No replica.
    pub(super) fn none() -> Lost {
        Lost { number: AtomicUsize::new(NO_REPLICA), is_over: AtomicBool::new(false) }
    }

    /// Whether this replica was killed.
    pub(super) fn is(&self, number: usize) -> bool {
        self.number.load(Ordering::Acquire) == number
    }

    pub(super) fn is_anybody(&self) -> bool {
        !self.is(NO_REPLICA)
    }

    /// Ends the wait for a relay: the sync is over.
    pub(super) fn call_off(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Waits for a relay in the middle of its work, marks it as lost, and kills it. Replicas are named `replica-1` ….
    pub(super) fn lose_a_relay(&self, source: &Source, kill: impl FnOnce(usize) -> Result<()>) -> Result<()> {
        while !self.is_over.load(Ordering::Acquire) {
            if let Some(number) = source.status().ok().and_then(|status| relay_in_the_middle(&status)) {
                // Marked as lost first, so that its end is not a failure.
                self.number.store(number, Ordering::Release);
                return kill(number);
            }
            thread::sleep(ASK_EVERY);
        }
        Ok(())
    }
}

/// The number of a replica that holds half of the snapshot while another, still incomplete one reads from it.
fn relay_in_the_middle(status: &Value) -> Option<usize> {
    let replicas = status["replicas"].as_array()?;
    let permille = |replica: &Value| replica["percent_permille"].as_u64().unwrap_or(0);
    let is_read = |replica: &&Value| {
        let reads_here =
            |other: &Value| other["reads_from"].as_u64().is_some() && other["reads_from"] == replica["session"];
        replicas.iter().any(|other| reads_here(other) && permille(other) < MOST_PERMILLE)
    };
    let in_the_middle = |replica: &&Value| (HALF_PERMILLE..MOST_PERMILLE).contains(&permille(replica));
    let found = replicas.iter().filter(in_the_middle).find(is_read)?;
    found["name"].as_str()?.strip_prefix("replica-")?.parse::<usize>().ok()?.checked_sub(1)
}

const NO_REPLICA: usize = usize::MAX;

/// Thousandths of the snapshot: the range that counts as the middle.
const HALF_PERMILLE: u64 = 450;
const MOST_PERMILLE: u64 = 900;

/// Interval between status queries: each starts a process, which costs a few milliseconds of the primary's host.
const ASK_EVERY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_relay_in_the_middle_is_killed() {
        let replica = |number: u64, from: Option<u64>, permille: u64| json!({"name": format!("replica-{number}"), "session": 10 + number, "reads_from": from, "percent_permille": permille});
        let status = |all: &[Value]| json!({ "replicas": all });
        let chain = |head, tail| status(&[replica(1, Some(12), tail), replica(2, None, head)]);
        assert_eq!(relay_in_the_middle(&chain(500, 480)), Some(1));
        assert_eq!(relay_in_the_middle(&chain(300, 280)), None, "too early");
        assert_eq!(relay_in_the_middle(&chain(1000, 950)), None, "too late");
        assert_eq!(
            relay_in_the_middle(&status(&[replica(1, None, 500), replica(2, None, 500)])),
            None,
            "no replica reads from it"
        );
        assert_eq!(relay_in_the_middle(&json!({})), None);
    }
}
