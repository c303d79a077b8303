//! Descriptors: whether this process may open as many as the replicas of `--max-replicas` need.
//!
//! A source that runs out of them in the middle of its work rejects replicas, and cannot even connect to its own
//! server. So it refuses to start instead. The process has raised its soft limit to the hard one by then.

use rustix::process::{Resource, getrlimit};

use crate::exit::Failure;

/// Descriptors of one replica: its control connection, a data lane for each of its two tables, and one for a lane that
/// replaces another before the source has found that one closed. With `--lanes` a replica may use more.
const PER_REPLICA: u64 = 4;

/// All others: 64 handshakes with two descriptors each, 16 connections that are turned away, listeners, the server's
/// connections, tables, and those of the runtime.
const OTHERS: u64 = 256;

/// Checks the limit of open descriptors.
///
/// # Errors
/// It is too low for this many replicas.
pub(super) fn check(max_replicas: u32) -> Result<(), Failure> {
    match getrlimit(Resource::Nofile).current {
        Some(limit) => check_limit(limit, max_replicas),
        None => Ok(()),
    }
}

fn check_limit(limit: u64, max_replicas: u32) -> Result<(), Failure> {
    let needed = u64::from(max_replicas) * PER_REPLICA + OTHERS;
    if needed <= limit {
        return Ok(());
    }
    let fits = limit.saturating_sub(OTHERS) / PER_REPLICA;
    Err(Failure::local(format!(
        "--max-replicas {max_replicas} needs {needed} open descriptors, and this process may open {limit} (RLIMIT_NOFILE); raise \
         the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or set --max-replicas to at most {}",
        fits.max(1)
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_limit_that_is_too_low_is_named_with_the_replicas_that_it_allows() {
        assert!(check_limit(1024, 64).is_ok(), "the defaults of most systems");
        assert!(check_limit(4352, 1024).is_ok());
        let refused = check_limit(4096, 1024).unwrap_err();
        assert_eq!(refused.code, crate::exit::Code::Local);
        for part in ["--max-replicas 1024", "4352", "may open 4096", "at most 960"] {
            assert!(refused.message.contains(part), "{}", refused.message);
        }
    }
}
