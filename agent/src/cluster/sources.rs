//! Sources: which source agent is beside which shard.
//!
//! A source is asked what it would offer. The replication history in its answer is that of its server, which is a
//! primary or one of its replicas. So addresses need not be compared, which differ by the network of who looks.

use std::time::Duration;

use remora_protocol::{Join, Message, Offer, StatusReport};
use tokio::task::JoinSet;

use super::survey::{Shard, Survey};
use crate::args::{ClusterSourcesArgs, HostPort};
use crate::conversation::Error;
use crate::conversation::tokens::Credentials;
use crate::exit::{Code, Failure};
use crate::replica::source::join;

/// A source that has answered.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) address: HostPort,
    pub(super) plan: Offer,
    pub(super) status: StatusReport,
}

/// What was found at the addresses.
#[derive(Debug, Default)]
pub(super) struct Sources {
    seen: Vec<Seen>,
    /// Addresses at which no source answers, and why.
    pub(super) silent: Vec<(HostPort, Failure)>,
}

/// How long a source may take to answer. It asks its server, which it waits for for three seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Reads what proves this command to the sources.
pub(super) fn credentials(args: &ClusterSourcesArgs) -> Result<Credentials, Failure> {
    args.security.credentials(args.token_file.as_ref(), &args.expected)
}

/// Asks all sources, side by side.
pub(super) async fn ask(args: &ClusterSourcesArgs, credentials: &Credentials, survey: &Survey) -> Sources {
    let mut addresses = args.sources.clone();
    if let Some(port) = args.source_port {
        let members = survey.shards.iter().flat_map(Shard::members);
        addresses.extend(members.map(|member| HostPort { host: member.node.host.clone(), port }));
    }
    addresses.sort_by_key(ToString::to_string);
    addresses.dedup();
    let mut asking = JoinSet::new();
    for address in addresses {
        let credentials = credentials.clone();
        asking.spawn(async move {
            let asked = tokio::time::timeout(ANSWER_LIMIT, ask_one(&address, &credentials)).await;
            let asked = asked.unwrap_or_else(|_| Err(no_answer(&address)));
            (address, asked)
        });
    }
    let mut sources = Sources::default();
    while let Some(done) = asking.join_next().await {
        match done {
            Ok((address, Ok((plan, status)))) => sources.seen.push(Seen { address, plan, status }),
            Ok((address, Err(failure))) => sources.silent.push((address, failure)),
            Err(_) => {} // a panic was reported where it happened
        }
    }
    sources.seen.sort_by_key(|seen| seen.address.to_string());
    sources.silent.sort_by_key(|(address, _)| address.to_string());
    sources
}

async fn ask_one(address: &HostPort, credentials: &Credentials) -> Result<(Offer, StatusReport), Failure> {
    let mut connection = credentials.connect(&address.host, address.port).await.map_err(Error::of_source)?;
    let plan_only = Join { plan_only: true, ..join(Some("cluster"), "", None) };
    for question in [Message::StatusQuery, Message::Join(plan_only)] {
        connection.send(question).await.map_err(Error::of_source)?;
    }
    let (mut plan, mut status) = (None, None);
    loop {
        match connection.receive().await.map_err(Error::of_source)? {
            Message::Offer(offer) => plan = Some(offer),
            Message::Status(report) => status = Some(report),
            _ => {}
        }
        match (plan.take(), status.take()) {
            (Some(plan), Some(status)) => return Ok((plan, status)),
            (had_plan, had_status) => (plan, status) = (had_plan, had_status),
        }
    }
}

/// Asks a source how it stands.
///
/// # Errors
/// It cannot be reached, or does not answer.
pub(super) async fn status(address: &HostPort, credentials: &Credentials) -> Result<StatusReport, Failure> {
    let mut connection = credentials.connect(&address.host, address.port).await.map_err(Error::of_source)?;
    crate::status::ask(&mut connection, address).await
}

fn no_answer(address: &HostPort) -> Failure {
    let text = format!("the source {address} did not answer within {} s", ANSWER_LIMIT.as_secs());
    Failure::new(Code::Source, text)
}

impl Sources {
    /// The source beside a shard. Of several, one beside a replica: it costs the primary nothing.
    pub(super) fn beside(&self, shard: &Shard) -> Option<&Seen> {
        self.beside_others_than(shard, None)
    }

    /// The source beside a shard that is not beside the server with this run id.
    pub(super) fn beside_others_than(&self, shard: &Shard, run_id: Option<&str>) -> Option<&Seen> {
        let history = shard.primary.facts.as_ref().ok()?.replid?;
        let is_meant =
            |seen: &&Seen| seen.plan.replid == Some(history) && run_id.is_none_or(|run_id| seen.plan.run_id != run_id);
        self.seen.iter().filter(is_meant).min_by_key(|seen| seen.status.role == "primary")
    }

    /// Sources whose server is in no shard that has answered.
    pub(super) fn elsewhere<'a>(&'a self, shards: &'a [Shard]) -> impl Iterator<Item = &'a Seen> {
        let is_in = |seen: &Seen, shard: &Shard| {
            let history = shard.primary.facts.as_ref().ok().and_then(|facts| facts.replid);
            history.is_some() && history == seen.plan.replid
        };
        self.seen.iter().filter(move |seen| !shards.iter().any(|shard| is_in(seen, shard)))
    }
}
