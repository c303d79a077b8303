//! Whether a copy came from the source. A primary counts the full copies that it has begun (`sync_full`); those that
//! its source has taken as snapshots are not the nodes'.

use std::time::Duration;

use crate::cluster::sources::{self, Seen};
use crate::conversation::tokens::Credentials;
use crate::exit::Failure;
use crate::server::{Facts, Server, ServerError};

/// How often, and after which pause, a count that is too high is looked at again: a snapshot that the source has just
/// begun is counted by the primary first.
const LOOKS: u32 = 10;
const PAUSE: Duration = Duration::from_secs(1);

/// How things stand at a primary and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Host and port of the primary.
    pub(super) primary: (String, u16),
    /// The run of the primary that has counted.
    run_id: Option<String>,
    full_copies: u64,
    /// Snapshots that the source has taken of this primary, also those that failed.
    snapshots: u64,
    /// Replicas that read from the source, or have done so.
    pub(super) sessions: u64,
}

/// Counts.
///
/// # Errors
/// The primary or the source does not answer.
pub(super) async fn count(primary: &Server, source: &Seen, credentials: &Credentials) -> Result<Counts, Failure> {
    let status = sources::status(&source.address, credentials).await?;
    let read = async {
        let info = primary.connect().await?.info("").await?;
        let facts = Facts::from_info(&info);
        Ok::<_, ServerError>((facts.run_id, info.number("sync_full").unwrap_or(0)))
    };
    let (run_id, full_copies) = read.await?;
    let (host, port) = primary.url().host_and_port().unwrap_or_default();
    let is_beside = status.role == "primary";
    let taken = status.totals.snapshots_taken.saturating_add(status.totals.snapshots_failed);
    Ok(Counts {
        primary: (host.to_owned(), port),
        run_id,
        full_copies,
        snapshots: if is_beside { taken } else { 0 },
        sessions: sessions_of(&status),
    })
}

/// Replicas that read from the source, or have done so. `None`: it does not answer.
pub(super) async fn sessions(source: &Seen, credentials: &Credentials) -> Option<u64> {
    sources::status(&source.address, credentials).await.ok().map(|status| sessions_of(&status))
}

fn sessions_of(status: &remora_protocol::StatusReport) -> u64 {
    let now = u64::try_from(status.replicas.len()).unwrap_or(u64::MAX);
    status.totals.replicas_done.saturating_add(now)
}

/// Full copies that the primary has served since then, besides the source's. A primary that was restarted or replaced
/// counts anew, and says nothing.
///
/// # Errors
/// The source does not answer.
pub(super) async fn full_copies_since(
    before: &Counts,
    primary: &Server,
    source: &Seen,
    credentials: &Credentials,
) -> Result<u64, Failure> {
    let mut seen = 0;
    for look in 0..LOOKS {
        if look > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        // A primary that is gone has been replaced.
        let Ok(now) = count(primary, source, credentials).await else { return Ok(0) };
        seen = before.until(&now);
        if seen == 0 {
            break;
        }
    }
    Ok(seen)
}

impl Counts {
    fn until(&self, now: &Counts) -> u64 {
        if self.run_id != now.run_id {
            return 0;
        }
        let full = now.full_copies.saturating_sub(self.full_copies);
        full.saturating_sub(now.snapshots.saturating_sub(self.snapshots))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_copy_that_is_not_the_sources_is_the_primarys() {
        let at = |run: &str, full_copies, snapshots| Counts {
            primary: ("10.0.0.1".into(), 6379),
            run_id: Some(run.into()),
            full_copies,
            snapshots,
            sessions: 0,
        };
        assert_eq!(at("a", 5, 2).until(&at("a", 6, 3)), 0);
        assert_eq!(at("a", 5, 2).until(&at("a", 7, 3)), 1);
        assert_eq!(at("a", 5, 0).until(&at("a", 6, 0)), 1, "a source beside a replica takes none of the primary");
        assert_eq!(at("a", 5, 2).until(&at("b", 9, 2)), 0, "another run");
    }
}
