//! The replica: makes its server an exact replica of the one that a source serves, and hands it over.
//!
//! ```text
//!   preflight ── join ──▶ offer ──▶ feed ──▶ delivery ──▶ server loads ──▶ catches up ──▶ REPLICAOF primary ──▶ done
//!   (nothing is   ▲         │                                                 │
//!    touched)     └─ retry ◀┘ source or feed lost: goes on at the first slot  └─▶ --stay: goes on relaying
//! ```
//!
//! - [`preflight`] finds foreseeable failures before anything is changed: what the server can hold, which commands it
//!   permits, whether the primary is in its reach, and what is known of that. [`prepared`] is what it leaves, with
//!   the transport that was tried, the way of delivery, and how long a sync will take. [`report`] has what a dry run
//!   prints, and says where the time went.
//! - [`control`] is the connection that changes the server, checks whether no other client has taken the server over,
//!   and has the guard, which acts after a killed agent; [`record`] notes each changed setting.
//! - [`remora_delivery`] plays the primary towards the server, on a thread of its own.
//! - [`exact`] has the conditions under which a server is called an exact replica.
//! - [`remora_reader`] is the conversation with the source, what is believed of it, and the slots, as for a snapshot
//!   without a server ([`remora_backup`]).
//! - [`attend`] stays beside a server whose own connections to its primary are intercepted, or does so once;
//!   [`by_file`] restarts a server on its RDB file.
//! - [`intercept`] has the rules by which a server's connections come to an agent.
//! - [`machine`] decides, without I/O, what follows from each event on the way from joining to the hand-off; [`driver`]
//!   carries it out, and owns the tasks.
//!
//! [`run`] is all that a program needs. The crate knows no command line.
#![forbid(unsafe_code)]
// The docs name private items: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

pub mod attend;
mod by_file;
pub mod control;
mod driver;
mod exact;
pub mod intercept;
pub mod machine;
mod options;
mod preflight;
pub mod prepared;
mod report;

use std::path::PathBuf;

use tokio::sync::oneshot;

use self::attend::once;
use self::control::Control;
use self::driver::{Driver, Setup};
pub use self::options::{AttendOptions, Delivery, DeliveryOptions, LEAST_MEMORY, LISTEN_PORT, OnFailure, Options};
use self::prepared::{Prepared, Suits};
use remora_base::units::Size;
use remora_conversation::tokens::TokenFiles;
pub use remora_delivery::link::LinkTls;
pub use remora_delivery::payload::{self, LeftOut};
use remora_metrics::Scrapes;
use remora_process::exit::{Code, Failure};
use remora_process::exit::{Patience, RETRY_FOR};
pub(crate) use remora_process::record;
use remora_process::signals::until_signal;
use remora_reader::spool::Spool;

/// Runs a replica agent to its end. `scrapes` is what those who watch it are shown.
///
/// # Errors
/// Why the server is not a replica; the message says in which state it was left.
pub async fn run(options: Options, tokens: TokenFiles, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let _rereading = tokens.read_again_on_hangup()?;
    match options.delivery.way {
        Delivery::File | Delivery::Intercept if options.convert => Err(Failure::new(
            Code::Usage,
            "--convert goes with --delivery link only: the server gets what the agent writes",
        )),
        Delivery::File => scrapes.meanwhile(BY_FILE, by_file::run(options, tokens)).await,
        _ if options.delivery.restart_command.is_some() => {
            Err(Failure::new(Code::Usage, "--restart-command goes with --delivery file only"))
        }
        Delivery::Intercept => match until_signal(once::prepare(options, tokens), UNTOUCHED).await? {
            Some(ready) => scrapes.meanwhile(BY_INTERCEPTION, ready.run()).await,
            None => Ok(()),
        },
        Delivery::Auto if !options.convert => by_itself(options, tokens, scrapes).await,
        Delivery::Auto | Delivery::Link => by_link(options, tokens, scrapes).await,
    }
}

/// What the simulation of whole syncs plays: the server's task, and what the machine is told of a delivery.
pub mod parts {
    pub use crate::driver::simulated as driver;
}

/// What those who watch are told while a server is restarted on a file, or its own connection is intercepted.
const BY_FILE: &str = "the server's file is being delivered";
const BY_INTERCEPTION: &str = "the server's own connection is intercepted for a full copy";

/// What a signal before the first change leaves.
const UNTOUCHED: &str = ": nothing was touched";

/// Delivers by interception where the link would be refused or undone, and otherwise by the link.
async fn by_itself(options: Options, tokens: TokenFiles, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let mut patience = Patience::new(options.read.retry_for, RETRY_FOR);
    let asked = patience.keep_trying(async || prepared::why_not_by_the_link(&options).await);
    let Some(why) = until_signal(asked, UNTOUCHED).await? else {
        tracing::info!(
            "delivery by the link: the server is not in cluster mode, and no Sentinel that is named here knows it"
        );
        return by_link(options, tokens, scrapes).await;
    };
    match until_signal(once::prepare(options.clone(), tokens.clone()), UNTOUCHED).await {
        Ok(Some(ready)) => {
            tracing::info!("delivery by interception: {why}");
            scrapes.meanwhile(BY_INTERCEPTION, ready.run()).await
        }
        Ok(None) => Ok(()),
        // What did not pass by itself would not pass for the link either.
        Err(failure) if failure.code == Code::Interrupted || failure.passes => Err(failure),
        Err(failure) => {
            tracing::warn!("delivery by the link, although {why}: its connection cannot be intercepted: {failure}");
            by_link(options, tokens, scrapes).await
        }
    }
}

async fn by_link(options: Options, tokens: TokenFiles, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let prepared = until_signal(prepare(options, tokens), UNTOUCHED);
    match scrapes.meanwhile("the sync is being prepared", prepared).await? {
        Some(mut driver) => {
            driver::watch(&mut driver, std::mem::take(scrapes));
            driver.run().await
        }
        None => Ok(()),
    }
}

/// Does everything that comes before the first change; `None` after a dry run.
async fn prepare(options: Options, tokens: TokenFiles) -> Result<Option<Driver>, Failure> {
    let credentials = tokens.credentials(options.source_key);
    let link_tls = remora_delivery::link::server_config(&options.link_tls)?;
    let prepared = Prepared::of(&options, &credentials, Suits::Link).await?;
    let Prepared { server, mut client, mut record, target, source, plan, mut primary, data_set, reading, unchecked } =
        prepared;
    preflight::refuse_what_sentinel_undoes(&options, &server, &target, &mut primary).await?;
    preflight::refuse_what_is_not_permitted(&options, &mut client, &target).await?;
    warn_of_a_small_backlog(&plan);
    if !plan.warning.is_empty() {
        tracing::warn!("{}", plan.warning);
    }
    if !plan.obstacle.is_empty() {
        tracing::warn!(source = %options.read.source, "no snapshot can be taken yet: {}", plan.obstacle);
    }
    if options.dry_run {
        let verdict = format!(
            "{} ({}) can become a replica of {}:{} ({}); nothing was touched",
            server.url(),
            target.facts.name(),
            primary.host,
            primary.port,
            plan.server
        );
        return report::tell(&options, verdict, &plan, primary.facts.as_ref(), (reading, unchecked)).map(|()| None);
    }
    // A delivery by file that did not end is not taken up any more.
    if record.placed().is_some() {
        record.note_placed(None)?;
    }
    let spool = match options.state_dir.clone() {
        Some(folder) => find_spool(folder).await,
        None => None,
    };
    let control = Control::new(server, client);
    let setup = Setup { options, tokens, control, record, target, primary, source, data_set, link_tls, spool };
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
