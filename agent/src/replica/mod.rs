//! The replica: makes its server an exact replica of the one that a source serves, and hands it over.
//!
//! ```text
//!   preflight ── join ──▶ offer ──▶ feed ──▶ delivery ──▶ server loads ──▶ catches up ──▶ REPLICAOF primary ──▶ done
//!   (nothing is   ▲         │                                                 │
//!    touched)     └─ retry ◀┘ source or feed lost: goes on at the first slot  └─▶ --stay: goes on relaying
//! ```
//!
//! - [`preflight`] finds what can be known to go wrong before anything is touched; [`record`] remembers what is changed.
//! - [`delivery`] plays the primary towards the server, on a thread of its own; [`feed`], [`link`], [`spool`] and [`meter`]
//!   are its parts.
//! - [`source`] is the conversation with the source agent.
//! - [`sync`] is the loop that leads from joining to the hand-off; [`report`] says where the time went.

mod delivery;
mod feed;
mod link;
mod meter;
mod preflight;
mod record;
mod report;
mod source;
mod spool;
mod sync;
mod tls;

use remora_messenger::Token;

use self::record::Record;
use crate::cli::ReplicaArgs;
use crate::exit::{Code, Failure};
use crate::progress;
use crate::server::Task;
use crate::units::Size;

/// Runs a replica agent to its end.
///
/// # Errors
/// Whatever keeps the server from becoming a replica; the message says in which state it was left.
pub async fn run(args: ReplicaArgs) -> Result<(), Failure> {
    let token = Token::read_file(&args.token_file).map_err(|error| Failure::refused(error.to_string()))?;
    let server = args.server.open(Task::Replica)?;
    let link_tls = tls::server_config(&args)?;
    let mut client = server.connect().await?;
    let mut record = Record::open(args.state_dir.as_deref(), &server.url().to_string())?;
    if !args.dry_run {
        record.put_back(&mut client).await?;
    }
    let target = preflight::target(&args, &server, &mut client, &record).await?;
    let mut source = source::Source::connect(&args, &token).await.map_err(source::failure)?;
    let plan = source.plan(&args, &target).await?;
    let primary = preflight::primary(&args, &server, &target, &plan, source.address()).await?;
    warn_of_a_small_backlog(&plan);
    if args.dry_run {
        progress::say(&format!(
            "{} ({}) can become a replica of {}:{} ({}); nothing was touched",
            server.url(),
            target.facts.name(),
            primary.host,
            primary.port,
            plan.server
        ));
        return Ok(());
    }
    if target.tls_replication && link_tls.is_none() {
        return Err(Failure::new(Code::Refused, "the link needs TLS and has no certificate"));
    }
    sync::Sync::begin(args, token, server, client, record, target, primary, source, link_tls).await?.run().await
}

/// How long a hand-off may take at least, in seconds of writes that the primary's backlog must hold.
const BACKLOG_SECONDS: u64 = 2;

fn warn_of_a_small_backlog(plan: &remora_messenger::control::Offer) {
    if plan.backlog_bytes > 0 && plan.backlog_bytes < plan.write_rate.saturating_mul(BACKLOG_SECONDS) {
        tracing::warn!(
            "the primary's backlog of {} holds less than {BACKLOG_SECONDS} s of its {} of writes a second: the hand-off may have to \
             wait for a quieter moment; raise repl-backlog-size there",
            Size::bytes(plan.backlog_bytes),
            Size::bytes(plan.write_rate)
        );
    }
}
