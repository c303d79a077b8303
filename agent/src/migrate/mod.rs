//! `remora migrate`: a server of another family or version becomes an exact replica.
//!
//! ```text
//!   differences ── what differs between the two servers is said; nothing is changed
//!       │
//!   agents ─── remora source (for the old primary) ══▶ remora replica --convert (for the new server)   processes of ours
//!       │         └─ skipped if the new server follows the old one already
//!   verify ─── all data of both are compared
//!       │
//!   ready: remora switch
//! ```
//!
//! The two ends are processes, as when they are started by hand: each has its own log, signals and guard, and a failure
//! of one ends with its own exit code.

mod agents;
mod differences;

use std::time::Duration;

use self::agents::Agents;
use crate::{
    args::{DigestUse, MigrateArgs, VerifyArgs},
    exit::{Code, Failure},
    progress,
    server::{Facts, Role, Task},
    signals::{Signals, until_signal},
};

/// Runs `remora migrate`.
///
/// # Errors
/// The servers are not suitable, or the sync or the comparison failed. The message says in which state the new server
/// is.
pub async fn run(args: MigrateArgs) -> Result<(), Failure> {
    let follows = until_signal(look(&args), ": nothing was changed").await?;
    let (from, to) = (&args.ends.from, &args.ends.to);
    match follows {
        true => tracing::info!("{to} follows {from} already: no sync is needed"),
        false => {
            let mut signals = Signals::catch()?;
            let agents = Agents::start(&args, &mut signals).await?;
            agents.finish(&mut signals).await?;
        }
    }
    if args.dry_run {
        return Ok(());
    }
    if !args.no_verify {
        let compared = crate::verify::run(comparison(&args));
        until_signal(compared, &format!(": {to} follows {from}, and was not compared to its end")).await?;
    }
    progress::print_line(&format!(
        "{to} is an exact replica of {from}, and follows it\nnext: remora switch --from {from} --to {to}"
    ))
}

/// Says what differs between the two servers, and whether the new one follows the old one already.
async fn look(args: &MigrateArgs) -> Result<bool, Failure> {
    let (from, to) = (args.ends.open_from(Task::Source)?, args.ends.open_to(Task::Replica)?);
    let (mut old, mut new) = tokio::try_join!(from.connect(), to.connect())?;
    let (of_old, of_new) = (Facts::read(&mut old).await?, Facts::read(&mut new).await?);
    if of_old.run_id.is_some() && of_old.run_id == of_new.run_id {
        return Err(Failure::refused(format!("{} and {} are the same server", from.url(), to.url())));
    }
    progress::say(&format!("from {} ({}), {} keys", from.url(), of_old.name(), of_old.keys()));
    progress::say(&format!("to   {} ({}), {} keys", to.url(), of_new.name(), of_new.keys()));
    for line in differences::between(&mut old, &mut new, &of_old, &of_new).await? {
        progress::say(&format!("     {line}"));
    }
    Ok(follows(&of_old, &of_new))
}

/// Whether a server is a replica of another one, and in step with it.
fn follows(old: &Facts, new: &Facts) -> bool {
    let is_linked = new.link.as_ref().is_some_and(|link| link.up == Some(true) && link.syncing != Some(true));
    new.role == Some(Role::Replica) && is_linked && old.replid.is_some() && old.replid == new.replid
}

/// The comparison at the end. A digest would keep the old primary from its clients.
fn comparison(args: &MigrateArgs) -> VerifyArgs {
    let ends = args.ends.clone();
    VerifyArgs {
        primary: ends.from,
        primary_user: ends.from_user,
        primary_password_file: ends.from_password_file,
        replica: ends.to,
        replica_user: ends.to_user,
        replica_password_file: ends.to_password_file,
        tls: ends.tls,
        digest: DigestUse::Never,
        recheck: ROUNDS,
        limit: SHOWN,
        retry_for: RETRY,
        json: false,
    }
}

/// How an agent has ended, as this command's end.
fn ended(code: Option<i32>, who: &str) -> Result<(), Failure> {
    match code {
        Some(0) => Ok(()),
        Some(number) => {
            let known = Code::ALL.into_iter().find(|code| i32::from(code.number()) == number);
            Err(Failure::new(known.unwrap_or(Code::Local), format!("{who} has failed; its reason stands above")))
        }
        None => Err(Failure::local(format!("{who} was killed by a signal"))),
    }
}

/// How often a key that differs is compared again: as the default of `remora verify`.
const ROUNDS: u32 = 5;

/// Differences that are listed.
const SHOWN: u32 = 20;

/// How long the comparison waits for a server that does not answer.
const RETRY: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Link;

    #[test]
    fn an_agents_code_is_the_commands() {
        assert_eq!(ended(Some(0), "it"), Ok(()));
        assert_eq!(ended(Some(6), "it").map_err(|failure| failure.code), Err(Code::SyncFailed));
        assert_eq!(ended(Some(101), "it").map_err(|failure| failure.code), Err(Code::Local));
        assert_eq!(ended(None, "it").map_err(|failure| failure.code), Err(Code::Local));
    }

    #[test]
    fn only_a_replica_in_step_follows() {
        let replid = "dc4a64ca756501f822cac70337e6c3488b20932f".parse().ok();
        let link = |up, syncing| Some(Link { host: "a".into(), port: 1, up: Some(up), syncing: Some(syncing) });
        let old = Facts { role: Some(Role::Primary), replid, ..Facts::default() };
        let new = |link| Facts { role: Some(Role::Replica), replid, link, ..Facts::default() };
        assert!(follows(&old, &new(link(true, false))));
        assert!(!follows(&old, &new(link(true, true))) && !follows(&old, &new(link(false, false))));
        assert!(!follows(&old, &old) && !follows(&Facts::default(), &new(link(true, false))));
    }
}
