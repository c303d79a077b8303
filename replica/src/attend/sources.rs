//! Sources: which source serves a full copy of the attended server, and which cannot.
//!
//! ```text
//!   all sources are asked at once ── answers ──▶ fit for it? ── the first that is ──▶ the sync
//!   (those of --source in turn)                      └─ none ──▶ the primary serves the copy at once
//! ```
//!
//! A source is of no use beside a server that waits for the attended one, or for the same primary: beside the attended
//! server itself, beside a replica of it, or beside one that lost its link in the same moment. It says so in its answer
//! if its server's link is down. A replica of the attended server has a link, and stands still.

use std::time::Duration;

use remora_protocol::Offer;
use tokio::task::JoinSet;

use super::passage::Arrival;
use crate::options::SyncOptions;
use remora_conversation::tokens::{Credentials, TokenFiles};
use remora_process::exit::{Code, Failure};
use remora_reader::source::{self, Source};
use remora_server::Facts;
use remora_server::HostPort;

/// How long a source's server that is behind the primary's backlog has to show that it follows: longer than a source's
/// facts of it are fresh.
const MOVES_WITHIN: Duration = Duration::from_millis(250);

/// What a source has answered.
pub(super) struct Answered {
    /// The arguments of a sync from it.
    pub(super) options: SyncOptions,
    pub(super) source: Source,
    pub(super) plan: Offer,
}

/// Asks a source what it would serve.
pub(super) async fn ask_source(
    options: SyncOptions,
    credentials: Credentials,
    server: &str,
) -> Result<Answered, Failure> {
    let mut source = Source::connect_first(&options.read, &credentials).await.map_err(source::failure)?;
    let plan = source.plan(&options.read, options.name.as_deref(), server).await?;
    Ok(Answered { options, source, plan })
}

impl Answered {
    /// Why this source has nothing for any server now.
    pub(super) fn obstacle(&self) -> Result<(), Failure> {
        match self.plan.obstacle.as_str() {
            "" => Ok(()),
            why => {
                let text = format!("the source {} cannot serve: {why}", self.options.read.source);
                let is_refused = self.plan.terms.as_ref().is_some_and(|terms| terms.is_refused);
                Err(Failure::new(Code::Source, text).that_passes(!is_refused))
            }
        }
    }
}

/// Asks all sources at once, and returns the first that can serve the attended server. `attended`: what the server says
/// of itself; `kind`: what the sources are told of it.
///
/// # Errors
/// None of them can, and why.
pub(super) async fn find(
    options: &SyncOptions,
    others: &[HostPort],
    tokens: &TokenFiles,
    arrival: &Arrival,
    (attended, kind): (&Facts, &str),
) -> Result<Answered, Failure> {
    let needs = Needs { primary: arrival.facts.clone().unwrap_or_default(), attended: attended.clone() };
    let mut asked = JoinSet::new();
    let (mut first, credentials) = (options.clone(), tokens.credentials(options.source_key));
    first.read.source = options.read.source.from_the_first();
    asked.spawn(ask_in_turn(first, credentials.clone(), needs.clone(), kind.to_owned()));
    for at in others {
        let mut options = options.clone();
        options.read.source = at.clone().into();
        asked.spawn(ask_one(options, credentials.clone(), needs.clone(), kind.to_owned()));
    }
    let mut causes = Vec::new();
    while let Some(answered) = asked.join_next().await {
        match answered {
            Ok(Ok(answered)) => return Ok(answered),
            Ok(Err(failure)) => causes.push(failure.message),
            Err(error) => causes.push(error.to_string()),
        }
    }
    let text = format!(
        "no source can serve a copy of the server's primary {} now ({}); have a remora source beside it or one of its replicas",
        arrival.address,
        causes.join("; ")
    );
    Err(Failure::new(Code::Source, text))
}

/// Asks the sources of one data set, one after the other, so that all servers beside them choose the same one.
async fn ask_in_turn(
    options: SyncOptions,
    credentials: Credentials,
    needs: Needs,
    kind: String,
) -> Result<Answered, Failure> {
    let read = options.read.clone();
    if read.source.is_one() {
        return ask_one(options, credentials, needs, kind).await;
    }
    let mut round = read.source.round();
    loop {
        let mut options = options.clone();
        // One that is busy is not waited for: there is another one.
        (options.read.source, options.read.retry_for) = (round.at().into(), Duration::ZERO);
        let attempt = ask_one(options, credentials.clone(), needs.clone(), kind.clone()).await;
        if let Some(answered) = round.outcome(attempt, |failure: &Failure| failure.passes) {
            let answered = answered?;
            return Ok(Answered { options: SyncOptions { read, ..answered.options }, ..answered });
        }
    }
}

async fn ask_one(
    options: SyncOptions,
    credentials: Credentials,
    needs: Needs,
    kind: String,
) -> Result<Answered, Failure> {
    let mut answered = ask_source(options, credentials, &kind).await?;
    let at = answered.options.read.source.clone();
    let of = |unfit: String| Failure::new(Code::Source, format!("the source {at}: {unfit}"));
    let before = answered.plan.offset;
    match needs.fit(&answered.plan) {
        Fit::Yes => return Ok(answered),
        Fit::No(why) => return Err(of(why)),
        Fit::IfItMoves => tokio::time::sleep(MOVES_WITHIN).await,
    }
    let Answered { options, source, plan } = &mut answered;
    *plan = source.plan(&options.read, options.name.as_deref(), &kind).await?;
    match needs.fit(plan) {
        Fit::Yes => Ok(answered),
        Fit::IfItMoves if plan.offset > before => Ok(answered),
        Fit::IfItMoves => Err(of(format!(
            "its server stands still at offset {}, which the primary's backlog does not reach any more: it waits for its own primary, or \
             for this server",
            plan.offset
        ))),
        Fit::No(why) => Err(of(why)),
    }
}

/// What a source must have.
#[derive(Clone)]
pub(crate) struct Needs {
    /// What the primary of the attended server says of itself.
    pub(crate) primary: Facts,
    pub(crate) attended: Facts,
}

/// Whether a source can serve the attended server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    Yes,
    /// If its server is seen to follow: it is behind what the primary's backlog holds.
    IfItMoves,
    No(String),
}

impl Needs {
    pub(crate) fn fit(&self, plan: &Offer) -> Fit {
        if !plan.obstacle.is_empty() {
            return Fit::No(plan.obstacle.clone());
        }
        if plan.replid.is_none() || plan.replid != self.primary.replid {
            return Fit::No("it has another history".to_owned());
        }
        if !plan.run_id.is_empty() && self.attended.run_id.as_deref() == Some(plan.run_id.as_str()) {
            return Fit::No("it is beside the very server that asks".to_owned());
        }
        if remora_base::mutation::Mutation::FirstSourceKept.is_active() {
            return Fit::Yes;
        }
        match self.primary.backlog {
            Some(backlog) if backlog.active && plan.offset.saturating_add(1) < backlog.first => Fit::IfItMoves,
            _ => Fit::Yes,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_protocol::Announce;

    use super::*;
    use remora_server::Backlog;
    use remora_source::parts::plan_of;

    fn server(run_id: &str, offset: u64) -> Facts {
        Facts {
            replid: Some("a".repeat(40).parse().unwrap()),
            run_id: Some(run_id.to_owned()),
            offset: Some(offset),
            ..Facts::default()
        }
    }

    fn needs() -> Needs {
        let backlog = Backlog { active: true, size: 1000, first: 501, held: 1000 };
        Needs {
            primary: Facts { backlog: Some(backlog), ..server("primary", 1500) },
            attended: server("attended", 100),
        }
    }

    fn plan(of: &Facts) -> Offer {
        let primary = Announce { host: String::new(), port: 1, tls: false, source_sees_as: String::new() };
        plan_of(of, primary, 0, 1)
    }

    #[test]
    fn a_source_that_cannot_serve_the_server_is_passed_over() {
        let fit = |of: Facts| needs().fit(&plan(&of));
        assert_eq!(fit(server("primary", 1500)), Fit::Yes);
        assert_eq!(fit(server("replica", 1490)), Fit::Yes);
        assert_eq!(fit(server("newer than the question", 9000)), Fit::Yes);
        assert_eq!(fit(server("the last that the backlog holds", 500)), Fit::Yes);
        assert_eq!(fit(server("a replica of the attended one", 100)), Fit::IfItMoves);
        assert_eq!(fit(server("the first that it does not hold", 499)), Fit::IfItMoves);
        assert!(matches!(fit(server("attended", 1500)), Fit::No(why) if why.contains("the very server")));
        let other = Facts { replid: Some("b".repeat(40).parse().unwrap()), ..server("other", 1500) };
        assert!(matches!(fit(other), Fit::No(why) if why.contains("history")));
        assert!(matches!(fit(Facts::default()), Fit::No(_)), "a server without a history");
        let cut_off = Offer { obstacle: "its server has no link".into(), ..plan(&server("replica", 1500)) };
        assert!(matches!(needs().fit(&cut_off), Fit::No(why) if why.contains("no link")));
    }

    #[test]
    fn without_a_backlog_the_primary_leaves_it_open() {
        let backlog = Backlog { active: false, size: 1000, first: 501, held: 0 };
        let needs = Needs { primary: Facts { backlog: Some(backlog), ..server("primary", 1500) }, ..needs() };
        assert_eq!(needs.fit(&plan(&server("replica", 100))), Fit::Yes);
    }
}
