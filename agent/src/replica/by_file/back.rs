//! Back: a server that was restarted, until it is in step with its primary.
//!
//! ```text
//!   away ──▶ another run ──▶ loading ──▶ link down ──▶ link up: in step
//!                               │            ├──▶ takes a full copy ─┐
//!                               │            └──▶ no primary ────────┴─▶ failed
//!                               └── each step has a time of its own; loading has it as long as it goes on
//! ```

use std::time::Duration;

use tokio::time::Instant;

use crate::server::{Facts, Server, ServerError};

/// How long the server may take for the next step: to end its former run, to answer again, to load the next bytes, to
/// get in step.
const STEP_LIMIT: Duration = Duration::from_secs(60);

/// How long a server may follow no primary: a node of a cluster is told by its own clock, ten times a second.
const ALONE_LIMIT: Duration = Duration::from_secs(5);

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long one look may take. A server that loads answers now and then.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// When a restarted server had come how far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Back {
    /// It was seen in its new run, after the restart began.
    pub(super) answered: Instant,
    /// It was in step.
    pub(super) in_step: Instant,
}

/// What one look has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Away(String),
    SameRun,
    /// This number of bytes is loaded.
    Loading(u64),
    /// The link to its primary is not up.
    Down,
    InStep,
    FullCopy,
    NoPrimary,
}

/// Waits until the server is in step in another run than `before`. The error says how it stands instead.
pub(super) async fn in_step(server: &Server, before: Option<&str>) -> Result<(Back, Facts), String> {
    let (mut furthest, mut until, mut answered) = (Stage::SameRun.rank(), Instant::now() + STEP_LIMIT, None);
    let mut alone_since = None;
    loop {
        let (stage, facts) = match look(server).await {
            Ok((facts, loaded)) => (Stage::of(&facts, loaded, before), facts),
            Err(error) if error.is_passing() => (Stage::Away(error.to_string()), Facts::default()),
            Err(error) => return Err(error.to_string()),
        };
        let now = Instant::now();
        if !matches!(stage, Stage::Away(_) | Stage::SameRun) {
            answered.get_or_insert(now);
        }
        match (&stage, answered) {
            (Stage::InStep, Some(answered)) => return Ok((Back { answered, in_step: now }, facts)),
            (Stage::FullCopy, _) => return Err(stage.failure()),
            (Stage::NoPrimary, _) => {
                if now >= *alone_since.get_or_insert(now) + ALONE_LIMIT {
                    return Err(stage.failure());
                }
            }
            _ => alone_since = None,
        }
        // Only what was never reached before counts: a server that ends again and again is not on its way.
        if stage.rank() > furthest {
            (furthest, until) = (stage.rank(), now + STEP_LIMIT);
        } else if now >= until {
            return Err(stage.failure());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Waits until a server has loaded its data set. Returns whether it answers.
pub(super) async fn loaded(server: &Server) -> Result<bool, String> {
    let (mut last, mut until) = (0, Instant::now() + STEP_LIMIT);
    loop {
        match look(server).await {
            Ok((facts, _)) if facts.loading != Some(true) => return Ok(true),
            Ok((_, loaded)) if loaded > last => (last, until) = (loaded, Instant::now() + STEP_LIMIT),
            Ok(_) => {}
            Err(error) if error.is_passing() => return Ok(false),
            Err(error) => return Err(error.to_string()),
        }
        if Instant::now() >= until {
            return Err(Stage::Loading(last).failure());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What a server says of itself, and the bytes that it has loaded.
async fn look(server: &Server) -> Result<(Facts, u64), ServerError> {
    let mut client = server.connect().await?;
    client.set_timeout(ANSWER_LIMIT);
    let info = client.info("").await?;
    Ok((Facts::from_info(&info), info.number("loading_loaded_bytes").unwrap_or(0)))
}

impl Stage {
    fn of(facts: &Facts, loaded: u64, before: Option<&str>) -> Stage {
        match &facts.link {
            _ if before.is_some() && facts.run_id.as_deref() == before => Stage::SameRun,
            _ if facts.loading == Some(true) => Stage::Loading(loaded),
            None => Stage::NoPrimary,
            Some(link) if link.syncing == Some(true) => Stage::FullCopy,
            Some(link) if link.up == Some(true) => Stage::InStep,
            Some(_) => Stage::Down,
        }
    }

    /// How far the server is.
    fn rank(&self) -> (u8, u64) {
        match self {
            Stage::SameRun => (0, 0),
            Stage::Away(_) => (1, 0),
            Stage::Loading(bytes) => (2, *bytes),
            Stage::NoPrimary => (3, 0),
            Stage::Down => (4, 0),
            Stage::FullCopy | Stage::InStep => (5, 0),
        }
    }

    /// Why nothing more is waited for.
    fn failure(&self) -> String {
        let seconds = STEP_LIMIT.as_secs();
        match self {
            Stage::FullCopy => {
                "the server does not go on where the snapshot ends: it is taking a full copy of its primary by \
                                itself; its log says why"
                    .to_owned()
            }
            Stage::NoPrimary => {
                "the server follows no primary after its restart, and serves the snapshot as a primary would: \
                                 make it follow one, and give its configuration a replicaof"
                    .to_owned()
            }
            Stage::Away(why) => format!("the server has not come back for {seconds} s: {why}"),
            Stage::SameRun => format!("the server has not been restarted within {seconds} s: it is the same run"),
            Stage::Loading(bytes) => format!("the server has loaded nothing more for {seconds} s, after {bytes} bytes"),
            Stage::Down | Stage::InStep => {
                format!("the server does not get in step with its primary within {seconds} s; the logs of both say why")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use remora_redis::info::Info;

    use super::*;

    #[test]
    fn what_a_server_says_of_itself_is_a_step_on_its_way() {
        let stage = |text: &str| Stage::of(&Facts::from_info(&Info::parse(text.as_bytes())), 7, Some("old"));
        let link = "run_id:new\nmaster_host:a\nmaster_port:1\n";
        for (text, wanted) in [
            ("run_id:old\nrole:master\n".to_owned(), Stage::SameRun),
            (format!("{link}loading:1\n"), Stage::Loading(7)),
            ("run_id:new\nrole:master\n".to_owned(), Stage::NoPrimary),
            (format!("{link}master_link_status:down\nmaster_sync_in_progress:0\n"), Stage::Down),
            (format!("{link}master_link_status:down\nmaster_sync_in_progress:1\n"), Stage::FullCopy),
            (format!("{link}master_link_status:up\nmaster_sync_in_progress:0\n"), Stage::InStep),
        ] {
            assert_eq!(stage(&text), wanted, "{text}");
        }
        let way = [Stage::SameRun, Stage::Away("x".into()), Stage::Loading(1), Stage::Loading(2), Stage::Down];
        assert!(way.windows(2).all(|two| two[0].rank() < two[1].rank()), "{way:?}");
    }
}
