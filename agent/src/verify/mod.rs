//! `remora verify`: tells whether two servers hold the same data, and what differs.
//!
//! ```text
//!            digests, if both are idle and allow it ──equal──▶ left to read: expiry times, streams, modules' types
//!                 │ no                                                     │
//!   scan ──▶ every key of the primary: DUMP and expiry on both ──same──▶ done with it
//!                 │ other bytes                                            ▲
//!                 ├──▶ by content (look) ──same────────────────────────────┤
//!                 ▼ other content                                          │
//!             suspects ──▶ recheck: primary, wait for the replica, replica, primary again ──▶ differs, or undecided
//!                 ▲
//!   scan ──▶ every key of the replica that the primary lacks
//! ```
//!
//! Clients may write to both servers meanwhile. So a difference that is seen once proves nothing, and equality at any
//! moment proves enough. A key counts as different only if the replica, having caught up with a value that the primary
//! still has, holds another one.
//!
//! Memory: one group of values at a time (`scan` says how large), and the names of some thousand suspects. It writes
//! nothing to either server.

mod look;
mod pair;
mod recheck;
mod report;
mod scan;

use std::time::{Duration, Instant};

use self::{
    pair::{Pair, Side},
    report::{Method, Report},
    scan::Scan,
};
use crate::{
    args::{DigestUse, VerifyArgs},
    exit::{Code, Failure},
    patience::{Patience, RETRY_FOR},
    progress::{self, Meter, Unit},
    server::{Facts, ServerError},
};

/// Runs `remora verify`.
pub async fn run(args: VerifyArgs) -> Result<(), Failure> {
    let begun = Instant::now();
    let mut patience = Patience::new(args.retry_for, RETRY_FOR);
    let mut report = loop {
        match compared(&args).await {
            Ok(report) => break report,
            // Nothing was changed: the comparison begins anew.
            Err(failure) => tokio::time::sleep(patience.after(Instant::now(), failure)?).await,
        }
    };
    report.seconds = begun.elapsed().as_secs_f64();
    let told = match args.json {
        true => progress::print_line(&report.json()),
        false => progress::print(&report.to_string()),
    };
    conclude(&report).and(told)
}

/// Connects to both servers and compares them once.
async fn compared(args: &VerifyArgs) -> Result<Report, Failure> {
    let (primary, replica) = (args.open_primary()?, args.open_replica()?);
    let (primary, replica) = tokio::try_join!(Side::open(&primary), Side::open(&replica))?;
    let mut pair = Pair::new(primary, replica);
    refuse_itself(&pair)?;
    refuse_to_compare_too_early(&pair)?;
    let mut report = Report::begin(&pair, args.limit);
    compare(&mut pair, args, &mut report).await?;
    Ok(report)
}

async fn compare(pair: &mut Pair, args: &VerifyArgs, report: &mut Report) -> Result<(), ServerError> {
    report.functions = pair.compare_functions(args.recheck).await?;
    report.method = match args.digest {
        DigestUse::Auto if digests_agree(pair).await? => Method::Digest,
        _ => Method::Values,
    };
    let databases = databases_of(&pair.primary.facts, &pair.replica.facts);
    let meter = Meter::start("verify", Unit::Count("keys"), Some(keys_to_scan(pair, &databases, report.method)));
    let mut scan = Scan::new(pair, report, &meter, args.recheck);
    for database in databases {
        scan.database(database).await?;
    }
    scan.finish().await?;
    meter.finish();
    Ok(())
}

/// Asks both servers for a digest of all data. False also if one of them does not allow it or is being written to.
async fn digests_agree(pair: &mut Pair) -> Result<bool, ServerError> {
    // A digest tells whether a key expires, but not when, nor which fields of a hash do. The scan compares the former,
    // and with the latter every hash would have to be read: that is a comparison by values.
    let has_expiring_fields = |facts: &Facts| facts.databases.iter().any(|database| database.field_expires > 0);
    if has_expiring_fields(&pair.primary.facts) || has_expiring_fields(&pair.replica.facts) || !pair.is_quiet().await? {
        return Ok(false);
    }
    pair.catch_up().await?;
    let (one, other) = tokio::try_join!(pair.primary.digest(DIGEST_LIMIT), pair.replica.digest(DIGEST_LIMIT))?;
    Ok(one.is_some() && one == other)
}

/// The databases to scan: all that hold a key on either side.
fn databases_of(primary: &Facts, replica: &Facts) -> Vec<u32> {
    let mut numbers: Vec<_> = primary.databases.iter().chain(&replica.databases).map(|held| held.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// The number of keys that the scan will pass: those of both sides, or after equal digests those of the primary.
fn keys_to_scan(pair: &Pair, databases: &[u32], method: Method) -> u64 {
    let keys = |facts: &Facts| {
        let scanned = facts.databases.iter().filter(|database| databases.contains(&database.number));
        scanned.map(|database| database.keys).fold(0, u64::saturating_add)
    };
    match method {
        Method::Digest => keys(&pair.primary.facts),
        Method::Values => keys(&pair.primary.facts).saturating_add(keys(&pair.replica.facts)),
    }
}

fn refuse_itself(pair: &Pair) -> Result<(), Failure> {
    match (&pair.primary.facts.run_id, &pair.replica.facts.run_id) {
        (Some(one), Some(other)) if one == other => Err(Failure::refused(format!(
            "{} and {} are the same server (run_id {one}): there is nothing to compare",
            pair.primary.url(),
            pair.replica.url()
        ))),
        _ => Ok(()),
    }
}

/// A server that loads shows a part of its data.
fn refuse_to_compare_too_early(pair: &Pair) -> Result<(), Failure> {
    match [&pair.primary, &pair.replica].into_iter().find(|side| side.facts.loading == Some(true)) {
        Some(side) => {
            let text = format!("the server {} is loading its data set (-LOADING)", side.url());
            Err(Failure::passing(Code::Server, text))
        }
        None => Ok(()),
    }
}

fn conclude(report: &Report) -> Result<(), Failure> {
    if report.differs() {
        return Err(Failure::new(Code::Differs, format!("the servers differ: {}", report.summary())));
    }
    if report.is_undecided() {
        let text = format!(
            "{} changed faster than they could be compared, all others are the same; try again when they are written to less, \
             or with a larger --recheck",
            report.undecided()
        );
        return Err(Failure::new(Code::Undecided, text));
    }
    Ok(())
}

/// The time limit of a digest. A server computes it at some hundred megabytes, or half a million elements, per second:
/// this is enough for the largest servers in use.
const DIGEST_LIMIT: Duration = Duration::from_secs(1800);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Database;

    fn facts(databases: &[u32]) -> Facts {
        let databases = databases.iter();
        let databases = databases.map(|number| Database { number: *number, keys: 1, expires: 0, field_expires: 0 });
        Facts { databases: databases.collect(), ..Facts::default() }
    }

    #[test]
    fn databases_of_either_side_are_gone_through_once() {
        assert_eq!(databases_of(&facts(&[0, 3]), &facts(&[0, 7])), [0, 3, 7]);
    }
}
