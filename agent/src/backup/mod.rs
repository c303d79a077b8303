//! `remora backup` and `remora restore`: snapshots in a folder, with the commands since, and what they are good for.
//!
//! ```text
//!   source ══ slots ══▶ .remora-incoming.rdb ── whole, checked ──▶ 20261125T234500Z-8c1c6b2f-307366.rdb   (+ .json)
//! ```
//!
//! - [`target`]: where backups go. [`shelf`]: a folder, its names, and what is removed there. [`archive`]: objects of a
//!   [`store`], such as a bucket, which [`sealing`] can encrypt. [`manifest`]: what a backup is, as JSON.
//!   [`list`]: the parts of an append-only file.
//! - [`rdb_file`], [`aof_file`]: the checks of a snapshot and of a file of commands, with [`mark`] and
//!   [`head`](mod@head): how far those are.
//!   [`moment`]: seconds as text and in names.
//! - [`journal`]: a snapshot and the commands since, in a folder of their own.
//! - [`metrics`](mod@metrics): what is shown to those who watch.
//! - [`restore`]: what there is, whether it is whole, and the files for a server.
//! - This file: a snapshot as a backup. The fetch itself is [`crate::snapshot::fetch`].

mod aof_file;
mod archive;
mod head;
mod journal;
mod list;
mod manifest;
mod mark;
mod metrics;
pub(crate) mod rdb_file;
pub mod restore;
mod sealing;
mod shelf;
mod store;
mod target;

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

pub(crate) use self::manifest::checked_snapshot;
use self::manifest::{Kind, Manifest};
use self::metrics::Seen;
use self::rdb_file::RdbFile;
use self::target::Target;
use remora_base::moment;

use crate::args::BackupArgs;
use crate::exit::{Code, Failure};
use crate::metrics::{Agent, Scrapes, Watch};
use crate::progress;
use crate::replica::data_set::DataSet;
use crate::signals::Signals;
use crate::snapshot::fetch;
use crate::tasks::blocking;
use crate::units::Size;

/// Runs `remora backup`.
///
/// # Errors
/// The folder or the store cannot be used, the source cannot be reached or refuses, or the snapshot is damaged.
pub async fn run(args: BackupArgs) -> Result<(), Failure> {
    let (watch, mut scrapes) = Watch::begin(Agent::Backup, &args.metrics, &args.metrics_file).await?;
    let outcome = backup(args, &mut scrapes).await;
    scrapes.leave(|_| {});
    watch.end(outcome).await
}

async fn backup(args: BackupArgs, scrapes: &mut Scrapes) -> Result<(), Failure> {
    if args.to.is_stdout() {
        if args.journal || args.keep.is_some() {
            return Err(Failure::refused(
                "--to - writes the snapshot alone: omit --journal and --keep, or give a folder",
            ));
        }
        let fetched = fetch::run(args.fetch(Path::new("-")));
        return scrapes.meanwhile("the snapshot is being fetched", fetched).await;
    }
    let opened = args.clone();
    let opening = blocking(move || {
        let target = Target::open(&opened)?;
        let found = target.manifests()?;
        Ok((Arc::new(target), found))
    });
    let (target, found) = scrapes.meanwhile("what is there is being looked at", opening).await?;
    let seen = Seen::shown_to(scrapes);
    found.iter().for_each(|manifest| seen.has(manifest));
    match args.journal {
        true => journal::run(args, target, seen, scrapes).await,
        false => snapshot(&args, &target, &seen, scrapes).await,
    }
}

/// Makes a backup of the snapshot.
async fn snapshot(args: &BackupArgs, target: &Arc<Target>, seen: &Seen, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let began = Instant::now();
    let incoming = target.incoming_file();
    seen.begins(true);
    let data_set = DataSet::of_a_source(&args.from.expected);
    let fetched = fetch::to_file_telling(&args.fetch(&incoming), data_set, |_| {}, scrapes).await?;
    let (at, keep, source) = (Arc::clone(target), args.keep, args.from.read.source.to_string());
    let work = blocking(move || {
        let rdb = RdbFile::read(&incoming)?;
        let manifest = Manifest::of(Kind::Snapshot, &rdb, &fetched.server, source);
        if let Some(before) = at.find(&manifest)? {
            _ = std::fs::remove_file(&incoming); // the next backup replaces it
            return Ok((before, manifest, false));
        }
        let address = at.place(&rdb, &manifest)?;
        if let Some(keep) = keep {
            at.keep(&manifest, keep);
        }
        Ok((address, manifest, true))
    });
    let placed = scrapes.meanwhile("the snapshot is being checked and placed", stoppable(work, target));
    let (address, manifest, is_new) = placed.await?;
    seen.begins(false);
    seen.has(&manifest);
    say(&address, &manifest, is_new, began);
    Ok(())
}

/// Runs work that sends to the target, until a signal stops it: what was under way is broken off.
async fn stoppable<T>(work: impl Future<Output = Result<T, Failure>>, target: &Target) -> Result<T, Failure> {
    let mut signals = Signals::catch()?;
    let mut work = pin!(work);
    let signal = tokio::select! {
        done = &mut work => return done,
        signal = signals.next() => signal,
    };
    target.stop();
    // It may be past the last thing that can be stopped.
    work.await.map_err(|failure| match failure.code {
        Code::Interrupted => {
            Failure::new(Code::Interrupted, format!("stopped by {signal}: there is no new backup in {target}"))
        }
        _ => failure,
    })
}

fn say(address: &str, manifest: &Manifest, is_new: bool, began: Instant) {
    let keys = manifest
        .keys
        .as_ref()
        .map_or_else(String::new, |keys| format!(", {} keys in {} databases", keys.values().sum::<u64>(), keys.len()));
    let text = format!(
        "{address}: {} of {} at {}:{}, taken {}{keys}",
        Size::bytes(manifest.bytes),
        manifest.server,
        manifest.replid,
        manifest.offset,
        manifest.taken
    );
    let end = match is_new {
        true => format!(", in {:.2} s", began.elapsed().as_secs_f64()),
        false => "; it was there already: the source has the same snapshot still (its --max-age)".to_owned(),
    };
    progress::say(&format!("{text}{end}"));
}
