//! Loss: why a source cannot be used at present, and how long a reader waits for it.
// Stands alone: every reader has such a loss.

use std::time::Duration;

use remora_process::exit::{Code, Failure};
use remora_protocol::WaitCause;

/// Why the source cannot be used at present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Another attempt may succeed without an operator.
    pub passes: bool,
    /// The source ended the session because the server took nothing.
    pub stalled: bool,
    /// The source does not hold what the server needs next: a server that has loaded can only go to the primary, or
    /// load another snapshot.
    pub history_gone: bool,
    /// What is said of it.
    pub failure: Failure,
}

impl Loss {
    /// A failure after which another attempt may succeed.
    pub fn passing(failure: Failure) -> Loss {
        Loss { passes: true, stalled: false, history_gone: false, failure }
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.failure.fmt(f)
    }
}

/// How long the source may have nothing to offer if `--retry-for` is shorter. A primary may be busy with another
/// snapshot of its own first. One whose snapshots fail is waited for during `--retry-for` only.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// How long a turn may be away (`--at-once` of a source): 64 replicas with a snapshot of 100 GB, one after the other,
/// at 1 Gb/s take some 14 hours. A source that ends, or whose connection does, ends this wait at once.
const TURN_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// How long a source may have nothing to offer, for this cause.
pub fn wait_limit(cause: WaitCause, retry_for: Duration) -> Duration {
    match cause {
        WaitCause::LastAttemptFailed | WaitCause::CutOff => retry_for,
        WaitCause::Turn => retry_for.max(TURN_LIMIT),
        _ => retry_for.max(WAIT_LIMIT),
    }
}

/// A source that has had nothing to offer for too long.
pub fn no_snapshot(source: &dyn std::fmt::Display, waited: Duration, text: &str) -> Failure {
    let seconds = waited.as_secs();
    let text = format!("the source {source} has had no snapshot to offer for {seconds} s: {text}");
    Failure::passing(Code::Source, text)
}
