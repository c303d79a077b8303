//! Prepared: what is known before the first change: the server, its source and its primary, found to suit each other.

use std::time::Duration;

use remora_protocol::Offer;
use tokio::time::Instant;

use super::conversion::Conversion;
use super::data_set::DataSet;
use super::finding::Finding;
use super::fitness;
use super::known_primary::KnownPrimaries;
use super::preflight::{self, Known, Primary};
use super::raised;
use super::reach;
use super::reading::{self, Reading};
use super::record::Record;
use super::source::Source;
use super::target::Target;
use crate::args::ReplicaArgs;
use crate::conversation::tokens::Credentials;
use crate::exit::{Code, Failure};
use crate::patience::{Patience, RETRY_FOR};
use crate::server::{Client, Facts, Server, Task};

/// Pause between two looks meanwhile.
const FAIL_OVER_POLL: Duration = Duration::from_millis(500);

/// Which servers can get a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Suits {
    /// Those that can follow a link.
    Link,
    /// Any.
    Any,
}

/// A server, its source and its primary, before the first change.
pub(super) struct Prepared {
    pub(super) server: Server,
    pub(super) client: Client,
    pub(super) record: Record,
    pub(super) target: Target,
    pub(super) source: Source,
    pub(super) plan: Offer,
    pub(super) primary: Primary,
    /// What the source and the primary were found to be about.
    pub(super) data_set: DataSet,
    /// How the source is read, if that was tried.
    pub(super) reading: Option<Reading>,
    /// What could not be checked.
    pub(super) unchecked: Vec<String>,
}

impl Prepared {
    /// Finds them, and puts back what an agent before us has left changed.
    ///
    /// # Errors
    /// One of them does not answer, or they do not suit each other.
    pub(super) async fn of(args: &ReplicaArgs, credentials: &Credentials, suits: Suits) -> Result<Prepared, Failure> {
        let server = args.server.open(Task::Replica)?;
        let mut patience = Patience::new(args.read.retry_for, RETRY_FOR);
        let mut client = patience.keep_trying(async || answering(&server).await).await?;
        let (state_dir, url) = (args.state_dir.as_deref(), server.url().to_string());
        let mut record = match args.dry_run {
            true => Record::open(state_dir, &url)?,
            false => Record::claim_after_a_guard(state_dir, &url).await?,
        };
        if !args.dry_run {
            record.put_back_but_the_login(&mut client).await?;
        }
        if args.rewrite_config {
            preflight::refuse_without_a_file(&mut client).await?;
        }
        let look = async || {
            if !client.is_usable() {
                client = server.connect().await?;
            }
            match suits {
                Suits::Link => {
                    preflight::target(&server, &mut client, &record, args.link_tls.link_cert.is_some()).await
                }
                Suits::Any => preflight::any_target(&server, &mut client, &record).await,
            }
        };
        let mut target = patience.keep_trying(look).await?;
        if args.convert {
            target.conversion = Some(Conversion::of(&mut client, &target.facts, &args.leave_out).await?);
        }
        if !args.dry_run && !target.unfinished {
            // A server that follows a dead link keeps the login for it until it gets another: its real password is not
            // for what may listen there now.
            record.put_back(&mut client).await?;
        }
        let asks_for = (args.peers.name.as_deref(), &*target.name());
        let (mut source, mut plan) = Source::first(&args.read, credentials, &mut patience, asks_for).await?;
        let finding = match args.peers.sentinel.open()? {
            Some(sentinels) => Some(patience.keep_trying(async || Finding::begin(sentinels.clone()).await).await?),
            None => None,
        };
        if !args.dry_run {
            // An agent before us may have been killed.
            let left = raised::put_back(&mut record, finding.as_ref().map(Finding::sentinels)).await;
            if !left.is_empty() {
                tracing::warn!("an earlier agent has ended without its clean-up{left}");
            }
        }
        refuse_what_the_source_refuses(args, &plan)?;
        let known = KnownPrimaries::of(args, target.followed(&record), source.address());
        let known = Known { primaries: known, finding, source: source.address() };
        let began = Instant::now();
        let primary = loop {
            let unfit = match preflight::primary(args, &server, &target, &plan, &known).await {
                Ok(primary) => break primary,
                Err(unfit) => unfit,
            };
            let pause = if began.elapsed() < unfit.passes_within.min(args.read.retry_for) {
                tracing::warn!("{}; looking again, as a fail-over may be just over", unfit.failure);
                FAIL_OVER_POLL
            } else {
                patience.after(std::time::Instant::now(), unfit.failure)?
            };
            tokio::time::sleep(pause).await;
            // What the source says of its server may be another thing now.
            plan = match source.plan(&args.read, asks_for.0, asks_for.1).await {
                Ok(plan) => plan,
                Err(_) => {
                    let again = Source::first(&args.read, credentials, &mut patience, asks_for).await?;
                    source = again.0;
                    again.1
                }
            };
        };
        if !client.is_usable() {
            client = server.connect().await?;
        }
        preflight::refuse_to_overwrite(args, &server, &target)?;
        fitness::refuse_what_would_not_stay_exact(&mut client, &target.facts, &primary).await?;
        let reach = async || {
            if !client.is_usable() {
                client = server.connect().await?;
            }
            reach::check(&mut client, &target, &primary).await
        };
        let unchecked = patience.keep_trying(reach).await?;
        let reading = reading::of_a_run(args, credentials, &plan, &source.way(&args.read), &mut patience).await?;
        let data_set = primary.data_set(&plan);
        Ok(Prepared { server, client, record, target, source, plan, primary, data_set, reading, unchecked })
    }
}

/// Refuses a source whose server sends it no snapshot until an administrator changes something there.
///
/// # Errors
/// As the sync would end.
pub(super) fn refuse_what_the_source_refuses(args: &ReplicaArgs, plan: &Offer) -> Result<(), Failure> {
    match plan.terms {
        Some(terms) if terms.is_refused => {
            let source = &args.read.source;
            Err(Failure::new(Code::Source, format!("the source {source} cannot take a snapshot: {}", plan.obstacle)))
        }
        _ => Ok(()),
    }
}

/// A connection to a server that answers, and is not kept busy by a script.
async fn answering(server: &Server) -> Result<Client, Failure> {
    let mut client = server.connect().await?;
    Facts::read(&mut client).await?;
    Ok(client)
}
