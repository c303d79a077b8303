//! Backup: a snapshot in a folder or a store, and with the journal the commands since.
//!
//! ```text
//!   source ══ slots ══▶ .remora-incoming.rdb ── whole, checked ──▶ 20261125T234500Z-8c1c6b2f-307366.rdb   (+ .json)
//! ```
//!
//! The fetch itself is [`fetch`], and the commands since are recorded by `journal`. [`RdbFile`] has the checks of a
//! snapshot.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use remora_base::units::{Size, counted};
use remora_metrics::Scrapes;
use remora_process::exit::{Code, Failure};
use remora_process::progress;
use remora_process::rdb_file::RdbFile;
use remora_process::signals::Signals;
use remora_process::tasks::blocking;

use crate::destination::{Destination, Seen};
use crate::manifest::{Kind, Manifest};
use crate::options::{BackupOptions, FetchOptions};
use crate::{fetch, journal};

/// Makes a backup. With a journal it stays, until a signal stops it. Those who watch are shown how far it is.
///
/// # Errors
/// The folder or the store cannot be used, the source cannot be reached or refuses, or the snapshot is damaged.
pub async fn run(options: BackupOptions, scrapes: &mut Scrapes) -> Result<(), Failure> {
    if options.to.is_stdout() {
        if options.journal.is_some() || options.keep.is_some() {
            return Err(Failure::refused(
                "--to - writes the snapshot alone: omit --journal and --keep, or give a folder",
            ));
        }
        let file = FetchOptions::of_a_backup(options.from, PathBuf::from("-"));
        let fetched = fetch::to_stdout(&file, &options.spool);
        scrapes.meanwhile("the snapshot is being fetched", fetched).await?.show();
        return Ok(());
    }
    let options = Arc::new(options);
    let opened = Arc::clone(&options);
    let opening = blocking(move || {
        let target = Destination::open(&opened)?;
        let found = target.manifests()?;
        Ok((Arc::new(target), found))
    });
    let (target, found) = scrapes.meanwhile("what is there is being looked at", opening).await?;
    let seen = Seen::shown_to(scrapes);
    found.iter().for_each(|manifest| seen.has(manifest));
    match options.journal {
        Some(limits) => journal::run(options, limits, target, seen, scrapes).await,
        None => snapshot(&options, &target, &seen, scrapes).await,
    }
}

/// Makes a backup of the snapshot.
async fn snapshot(
    options: &BackupOptions,
    target: &Arc<Destination>,
    seen: &Seen,
    scrapes: &mut Scrapes,
) -> Result<(), Failure> {
    let began = Instant::now();
    let incoming = target.incoming_file();
    seen.begins(true);
    let file = FetchOptions::of_a_backup(options.from.clone(), incoming.clone());
    let fetched = fetch::to_file(&file, |_| {}, scrapes).await?;
    let (at, keep, source) = (Arc::clone(target), options.keep, options.from.read.source.to_string());
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
async fn stoppable<T>(work: impl Future<Output = Result<T, Failure>>, target: &Destination) -> Result<T, Failure> {
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
        .map(|keys| (counted(keys.values().sum::<u64>(), "key"), counted(keys.len(), "database")))
        .map_or_else(String::new, |(keys, databases)| format!(", {keys} in {databases}"));
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
