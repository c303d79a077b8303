//! The replica: makes its server an exact replica of the one that a source serves, and hands it over.
//!
//! ```text
//!   preflight ── join ──▶ offer ──▶ feed ──▶ delivery ──▶ server loads ──▶ catches up ──▶ REPLICAOF primary ──▶ done
//!   (nothing is   ▲         │                                                 │
//!    touched)     └─ retry ◀┘ source or feed lost: goes on at the first slot  └─▶ --stay: goes on relaying
//! ```
//!
//! - [`preflight`] finds foreseeable failures before anything is changed: what the server can hold, which commands it
//!   permits, and whether the primary is in its reach. [`prepared`] is what it leaves, with the transport that was
//!   tried and the way of delivery. [`report`] has what a dry run prints, and says where the time went.
//! - [`primary`] says what is known of the primary before the source speaks, and raises the fail-over time for a sync.
//! - [`control`] is the connection that changes the server, checks whether no other client has taken the server over,
//!   and has the guard, which acts after a killed agent; [`record`] notes each changed setting.
//! - [`delivery`] plays the primary towards the server, on a thread of its own. It uses
//!   [`link`]. [`link::candidates`] keeps other processes from the server's link, and finds out where the
//!   server is.
//! - [`exact`] has the conditions under which a server is called an exact replica.
//! - [`remora_reader`] is the conversation with the source, what is believed of it, and the slots, as for a snapshot
//!   without a server ([`remora_backup`]).
//! - [`attend`] stays beside a server whose own connections to its primary are intercepted, or does so once;
//!   [`by_file`] restarts a server on its RDB file.
//! - [`machine`] decides, without I/O, what follows from each event on the way from joining to the hand-off; [`driver`]
//!   carries it out, and owns the tasks.

pub mod attend;
mod by_file;
pub(crate) mod control;
pub(crate) mod conversion;
mod delivery;
mod driver;
mod exact;
mod link;
pub(crate) mod machine;
mod preflight;
mod prepared;
mod primary;
mod report;

use std::path::PathBuf;

use tokio::sync::oneshot;

use self::attend::once;
use self::control::Control;
#[cfg(any(test, feature = "simulation"))]
pub(crate) use self::delivery::simulated as simulated_delivery;
#[cfg(any(test, feature = "simulation"))]
pub(crate) use self::driver::simulated;
use self::driver::{Driver, Setup};
use self::prepared::{Prepared, Suits};
use crate::args::{Delivery, PeerArgs, ReplicaArgs, open_tokens};
use crate::conversation::tokens::TokenFiles;
use crate::exit::{Code, Failure};
use crate::host_memory;
use crate::metrics::{Agent, Scrapes, Watch};
use crate::patience::{Patience, RETRY_FOR};
use crate::reader::spool::Spool;
use crate::signals::until_signal;
use crate::units::Size;
pub(crate) use remora_process::record;

/// Runs a replica agent to its end.
///
/// # Errors
/// Why the server is not a replica; the message says in which state it was left.
pub async fn run(args: ReplicaArgs) -> Result<(), Failure> {
    host_memory::check("--memory", args.memory)?;
    let (watch, mut scrapes) =
        Watch::begin(Agent::Replica, args.metrics.metrics, args.metrics_file.metrics_file.as_deref()).await?;
    let outcome = sync(args, &mut scrapes).await;
    watch.end(outcome).await
}

async fn sync(args: ReplicaArgs, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let PeerArgs { security, expected, readers, .. } = &args.peers;
    let tokens =
        open_tokens(&args.token_files, security, expected, (readers, &args.lend.lender), args.lend.relay.peer_listen)?;
    let _rereading = tokens.read_again_on_hangup()?;
    match args.by.delivery {
        Delivery::File | Delivery::Intercept if args.convert => Err(Failure::new(
            Code::Usage,
            "--convert goes with --delivery link only: the server gets what the agent writes",
        )),
        Delivery::File => scrapes.meanwhile(BY_FILE, by_file::run(args, tokens)).await,
        _ if args.by.restart_command.is_some() => {
            Err(Failure::new(Code::Usage, "--restart-command goes with --delivery file only"))
        }
        Delivery::Intercept => match until_signal(once::prepare(args, tokens), UNTOUCHED).await? {
            Some(ready) => scrapes.meanwhile(BY_INTERCEPTION, ready.run()).await,
            None => Ok(()),
        },
        Delivery::Auto if !args.convert => by_itself(args, tokens, scrapes).await,
        Delivery::Auto | Delivery::Link => by_link(args, tokens, scrapes).await,
    }
}

/// What those who watch are told while a server is restarted on a file, or its own connection is intercepted.
const BY_FILE: &str = "the server's file is being delivered";
const BY_INTERCEPTION: &str = "the server's own connection is intercepted for a full copy";

/// What a signal before the first change leaves.
const UNTOUCHED: &str = ": nothing was touched";

/// Delivers by interception where the link would be refused or undone, and otherwise by the link.
async fn by_itself(args: ReplicaArgs, tokens: TokenFiles, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let mut patience = Patience::new(args.read.retry_for, RETRY_FOR);
    let asked = patience.keep_trying(async || prepared::why_not_by_the_link(&args).await);
    let Some(why) = until_signal(asked, UNTOUCHED).await? else {
        tracing::info!(
            "delivery by the link: the server is not in cluster mode, and no Sentinel that is named here knows it"
        );
        return by_link(args, tokens, scrapes).await;
    };
    match until_signal(once::prepare(args.clone(), tokens.clone()), UNTOUCHED).await {
        Ok(Some(ready)) => {
            tracing::info!("delivery by interception: {why}");
            scrapes.meanwhile(BY_INTERCEPTION, ready.run()).await
        }
        Ok(None) => Ok(()),
        // What did not pass by itself would not pass for the link either.
        Err(failure) if failure.code == Code::Interrupted || failure.passes => Err(failure),
        Err(failure) => {
            tracing::warn!("delivery by the link, although {why}: its connection cannot be intercepted: {failure}");
            by_link(args, tokens, scrapes).await
        }
    }
}

async fn by_link(args: ReplicaArgs, tokens: TokenFiles, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let prepared = until_signal(prepare(args, tokens), UNTOUCHED);
    match scrapes.meanwhile("the sync is being prepared", prepared).await? {
        Some(mut driver) => {
            driver::display::watch(&mut driver, std::mem::take(scrapes));
            driver.run().await
        }
        None => Ok(()),
    }
}

/// Does everything that comes before the first change; `None` after a dry run.
async fn prepare(args: ReplicaArgs, tokens: TokenFiles) -> Result<Option<Driver>, Failure> {
    let credentials = tokens.credentials(args.peers.expected.source_key);
    let link_tls = link::server_config(&args.link_tls)?;
    let prepared = Prepared::of(&args, &credentials, Suits::Link).await?;
    let Prepared { server, mut client, mut record, target, source, plan, mut primary, data_set, reading, unchecked } =
        prepared;
    preflight::refuse_what_sentinel_undoes(&args, &server, &target, &mut primary).await?;
    preflight::refuse_what_is_not_permitted(&args, &mut client, &target).await?;
    warn_of_a_small_backlog(&plan);
    if !plan.warning.is_empty() {
        tracing::warn!("{}", plan.warning);
    }
    if !plan.obstacle.is_empty() {
        tracing::warn!(source = %args.read.source, "no snapshot can be taken yet: {}", plan.obstacle);
    }
    if args.dry_run {
        let verdict = format!(
            "{} ({}) can become a replica of {}:{} ({}); nothing was touched",
            server.url(),
            target.facts.name(),
            primary.host,
            primary.port,
            plan.server
        );
        return report::tell(&args, verdict, &plan, primary.facts.as_ref(), (reading, unchecked)).map(|()| None);
    }
    // A delivery by file that did not end is not taken up any more.
    if record.placed().is_some() {
        record.note_placed(None)?;
    }
    let spool = match args.state_dir.clone() {
        Some(folder) => find_spool(folder).await,
        None => None,
    };
    let control = Control::new(server, client);
    let setup = Setup { args, tokens, control, record, target, primary, source, data_set, link_tls, spool };
    Driver::begin(setup).await.map(Some)
}

/// The slots that an earlier agent has left in the folder. They are all read and verified, which can take minutes. A
/// detached thread does it, so that a signal ends the agent meanwhile.
async fn find_spool(folder: PathBuf) -> Option<Spool> {
    let (tell, found) = oneshot::channel();
    let look = move || {
        let _ = tell.send(Spool::find(&folder));
    };
    match std::thread::Builder::new().name("spool".into()).spawn(look) {
        Ok(_) => found.await.ok().flatten(),
        // Without them, the delivery opens the folder itself.
        Err(_) => None,
    }
}

/// How long a hand-off may take at least, in seconds of writes that the primary's backlog must hold.
const BACKLOG_SECONDS: u64 = 2;

fn warn_of_a_small_backlog(plan: &remora_protocol::Offer) {
    if plan.backlog_bytes > 0 && plan.backlog_bytes < plan.write_rate.saturating_mul(BACKLOG_SECONDS) {
        tracing::warn!(
            "the primary's backlog of {} holds less than {BACKLOG_SECONDS} s of its {} of writes a second: the hand-off may have to \
             wait for a quieter moment; raise repl-backlog-size there",
            Size::bytes(plan.backlog_bytes),
            Size::bytes(plan.write_rate)
        );
    }
}
