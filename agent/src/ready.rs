//! `remora ready`: whether a server can be given work, for probes and scripts.
//!
//! [`judge`] decides by the facts of the server and of its primary, and does no I/O.

use std::time::{Duration, Instant};

use crate::{
    args::ReadyArgs,
    events,
    exit::{Code, Failure},
    progress,
    server::{Facts, Role, Server, ServerError, Task},
    signals,
    units::Size,
};

/// Looks at the server until it is ready, or the time is over.
///
/// # Errors
/// [`Code::NotReady`] with the reason, or the server cannot be asked.
pub async fn run(args: ReadyArgs) -> Result<(), Failure> {
    let server = args.server.open(Task::Ready)?;
    match args.watch {
        Some(pause) => watch(server, &args, pause).await,
        None => wait(&server, &args).await,
    }
}

async fn wait(server: &Server, args: &ReadyArgs) -> Result<(), Failure> {
    let until = Instant::now() + args.timeout;
    loop {
        let why = match judged(server, args).await? {
            Ok(state) => {
                progress::say(&format!("{} is ready: {state}", server.url()));
                return Ok(());
            }
            Err(why) => why,
        };
        if Instant::now() + LOOK_AGAIN >= until {
            return Err(why);
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Prints each change until it is stopped. At a SIGHUP it reads its files again.
async fn watch(mut server: Server, args: &ReadyArgs, pause: Duration) -> Result<(), Failure> {
    let mut hangups = signals::hangups()?;
    let mut said = None;
    loop {
        // The state of one that is ready contains its lag, which always changes.
        let (is_ready, text) = match judged(&server, args).await? {
            Ok(state) => (true, format!("{} is ready: {state}", server.url())),
            Err(why) => (false, why.message),
        };
        let change = if is_ready { String::new() } else { text.clone() };
        if said.as_ref() != Some(&change) {
            progress::say(&text);
            said = Some(change);
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            Some(()) = hangups.recv() => match args.server.open(Task::Ready) {
                Ok(again) => {
                    tracing::info!(event = events::CERTIFICATES_REREAD, "password and certificate files read again");
                    server = again;
                }
                Err(error) => tracing::error!(event = events::CERTIFICATES_KEPT, %error, "what was read before stays valid"),
            }
        }
    }
}

/// How the server stands, or why it is not ready, or cannot be reached at the moment.
async fn judged(server: &Server, args: &ReadyArgs) -> Result<Result<String, Failure>, Failure> {
    match look(server, args).await {
        Ok(Ok(state)) => Ok(Ok(state)),
        Ok(Err(why)) => Ok(Err(Failure::new(Code::NotReady, format!("{} is not ready: {why}", server.url())))),
        // A server that starts refuses connections at first.
        Err(error) if error.is_passing() => Ok(Err(error.into())),
        Err(error) => Err(error.into()),
    }
}

/// How the server stands, or why it is not ready.
async fn look(server: &Server, args: &ReadyArgs) -> Result<Result<String, String>, ServerError> {
    let facts = Facts::read(&mut server.connect().await?).await?;
    let primary = match &facts.link {
        Some(link) if facts.role == Some(Role::Replica) && !args.link_only => {
            let primary = server.at(&link.host, link.port);
            // Read after the replica's facts: the primary's offset is not older than the replica's.
            let read = async { Facts::read(&mut primary.connect().await?).await };
            match read.await {
                Ok(primary) => Some(primary),
                Err(error) => {
                    return Ok(Err(format!("its primary cannot be asked: {error} (--link-only asks it nothing)")));
                }
            }
        }
        _ => None,
    };
    Ok(judge(&facts, primary.as_ref(), args.max_lag))
}

/// Decides by the facts. A replica's primary is `None` if it was not asked.
fn judge(facts: &Facts, primary: Option<&Facts>, max_lag: Option<Size>) -> Result<String, String> {
    if facts.loading != Some(false) {
        return Err("it is loading its data set".into());
    }
    let link = match (facts.role, &facts.link) {
        (Some(Role::Replica), Some(link)) => link,
        (Some(Role::Primary), _) => return Ok("a primary".into()),
        _ => return Err("its INFO names neither a role nor a primary".into()),
    };
    let at = format!("{}:{}", link.host, link.port);
    if link.syncing == Some(true) {
        return Err(format!("it is taking a full copy from {at}"));
    }
    if link.up != Some(true) {
        return Err(format!("its link to {at} is down"));
    }
    let Some(primary) = primary else { return Ok(format!("a replica of {at} with its link up")) };
    if primary.replid.is_none() || primary.replid != facts.replid {
        return Err(format!("it has another history than {at}"));
    }
    let lag = primary.offset.unwrap_or(u64::MAX).saturating_sub(facts.offset.unwrap_or(0));
    match max_lag {
        Some(most) if lag > most.get() => Err(format!("it is {} behind {at}", Size::bytes(lag))),
        _ => Ok(format!("a replica of {at}, {lag} bytes behind")),
    }
}

/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Link;
    use remora_redis::ReplId;

    fn primary(offset: u64) -> Facts {
        let replid = "a".repeat(40).parse::<ReplId>().ok();
        Facts { role: Some(Role::Primary), loading: Some(false), offset: Some(offset), replid, ..Facts::default() }
    }

    fn replica(offset: u64) -> Facts {
        let link = Link { host: "h".into(), port: 6379, up: Some(true), syncing: Some(false) };
        Facts { role: Some(Role::Replica), link: Some(link), ..primary(offset) }
    }

    fn with_link(change: impl FnOnce(&mut Link)) -> Facts {
        let mut facts = replica(10);
        facts.link.as_mut().map(change);
        facts
    }

    #[test]
    fn only_a_replica_in_step_with_the_history_of_its_primary_is_ready() {
        assert_eq!(judge(&replica(10), Some(&primary(12)), None).as_deref(), Ok("a replica of h:6379, 2 bytes behind"));
        assert!(judge(&replica(10), None, None).is_ok());
        assert!(judge(&with_link(|link| link.up = Some(false)), None, None).is_err());
        assert!(judge(&with_link(|link| link.up = None), None, None).is_err(), "what is not known is not ready");
        assert!(judge(&with_link(|link| link.syncing = Some(true)), None, None).is_err());
        let other = Facts { replid: "b".repeat(40).parse().ok(), ..primary(12) };
        assert!(judge(&replica(10), Some(&other), None).is_err());
        assert!(judge(&Facts { replid: None, ..replica(10) }, Some(&Facts { replid: None, ..other }), None).is_err());
    }

    #[test]
    fn the_lag_counts_if_it_has_a_limit() {
        let judge = |lag: u64| judge(&replica(10), Some(&primary(10 + lag)), Some(Size::bytes(100)));
        assert!(judge(100).is_ok());
        assert!(judge(101).is_err());
    }

    #[test]
    fn a_primary_is_ready_when_it_has_loaded() {
        assert!(judge(&primary(0), None, None).is_ok());
        for loading in [Some(true), None] {
            assert!(judge(&Facts { loading, ..primary(0) }, None, None).is_err());
        }
        assert!(judge(&Facts { loading: Some(false), ..Facts::default() }, None, None).is_err());
    }
}
