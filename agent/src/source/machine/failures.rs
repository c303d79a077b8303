//! Failed snapshots: how many failed in a row, and how long the source pauses before the next one.
//!
//! Every attempt makes the primary fork, and its cause may be one that does not pass, such as an output buffer that is
//! too small for the primary's write rate. So the pause grows with the failures in a row. Attempts that end before the
//! primary has forked cost it a connection only, and do not count.

use std::time::{Duration, Instant};

/// The failed snapshots of a source.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    total: u64,
    /// Snapshots in a row that failed after the primary had forked for them.
    forks_in_a_row: u32,
    last: Option<String>,
}

impl Failures {
    /// Failed snapshots since the source started.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Why the last snapshot failed; empty if the last one is complete.
    pub(crate) fn last(&self) -> &str {
        self.last.as_deref().unwrap_or_default()
    }

    /// Counts a failed snapshot. `has_forked`: the primary had forked for it.
    pub(super) fn count(&mut self, has_forked: bool, text: &str) {
        self.total += 1;
        self.forks_in_a_row = self.forks_in_a_row.saturating_add(u32::from(has_forked));
        self.last = Some(text.to_owned());
    }

    /// A snapshot is complete.
    pub(super) fn succeeded(&mut self) {
        self.forks_in_a_row = 0;
        self.last = None;
    }

    /// A replica has gone, and `left` others remain. If it was the last one, the next was started by an operator who
    /// may have removed the cause, so it does not wait for the end of a long pause.
    pub(super) fn replica_left(&mut self, left: usize, now: Instant, retry: &mut Option<(Instant, String)>) {
        if left > 0 {
            return;
        }
        self.forks_in_a_row = 0;
        if let Some((at, _)) = retry {
            *at = (*at).min(now + FORGIVEN_PAUSE);
        }
    }

    /// The shortest pause before the next snapshot.
    pub(super) fn pause(&self) -> Duration {
        match self.forks_in_a_row.checked_sub(2) {
            // After one failure the caller's own pause is enough.
            None => Duration::ZERO,
            Some(further) => FORK_PAUSE.saturating_mul(1 << further.min(16)).min(FORK_PAUSE_MAX),
        }
    }

    /// What to tell replicas that wait. `text`: why the last snapshot failed; `pause`: how long the source waits now.
    pub(super) fn describe(&self, text: &str, pause: Duration) -> String {
        if self.forks_in_a_row < 2 {
            return format!("the last attempt to take a snapshot failed ({text}); the source tries again soon");
        }
        format!(
            "{} snapshots in a row failed after the primary had forked for them, the last one because {text}; the source takes the \
             next one in {} s",
            self.forks_in_a_row,
            pause.as_secs()
        )
    }
}

/// The pause after two failures in a row. It doubles with each further one.
const FORK_PAUSE: Duration = Duration::from_secs(2);

/// The longest pause: twice the default of `--retry-for`, so that replicas report the cause to their operators while
/// the primary is left alone.
const FORK_PAUSE_MAX: Duration = Duration::from_secs(600);

/// The longest rest of a pause once no replica is left.
const FORGIVEN_PAUSE: Duration = Duration::from_secs(5);
