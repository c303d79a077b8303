//! `remora backup` and `remora restore`: snapshots in a folder, with the commands since, and what they are good for.
//!
//! ```text
//!   source ══ slots ══▶ .remora-incoming.rdb ── whole, checked ──▶ 20261125T234500Z-8c1c6b2f-307366.rdb   (+ .json)
//! ```
//!
//! - [`shelf`]: the folder, its names, and what is removed there; [`manifest`]: what a backup is, as JSON.
//! - [`rdb_file`], [`aof_file`]: the checks of a snapshot and of a file of commands, with [`mark`]: how far those are.
//!   [`moment`]: seconds as text and in names.
//! - [`journal`]: a snapshot and the commands since, in a folder of their own.
//! - [`metrics`](mod@metrics): what is shown to those who watch.
//! - [`restore`]: what there is, whether it is whole, and the files for a server.
//! - This file: a snapshot as a backup. The fetch itself is [`crate::snapshot::fetch`].

mod aof_file;
mod journal;
mod manifest;
mod mark;
mod metrics;
pub mod moment;
pub(crate) mod rdb_file;
pub mod restore;
mod shelf;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use self::manifest::{Kind, Manifest};
use self::metrics::Seen;
use self::rdb_file::RdbFile;
use self::shelf::Shelf;
use crate::args::BackupArgs;
use crate::exit::Failure;
use crate::metrics::{Agent, Scrapes, Watch};
use crate::progress;
use crate::snapshot::fetch;
use crate::tasks::blocking;
use crate::units::Size;

/// What `--to` says for standard output.
const STDOUT: &str = "-";

/// Runs `remora backup`.
///
/// # Errors
/// The folder cannot be used, the source cannot be reached or refuses, or the snapshot is damaged.
pub async fn run(args: BackupArgs) -> Result<(), Failure> {
    let (watch, mut scrapes) = Watch::begin(Agent::Backup, &args.metrics, &args.metrics_file).await?;
    let outcome = backup(args, &mut scrapes).await;
    scrapes.leave(|_| {});
    watch.end(outcome).await
}

async fn backup(args: BackupArgs, scrapes: &mut Scrapes) -> Result<(), Failure> {
    if args.to == Path::new(STDOUT) {
        if args.journal || args.keep.is_some() {
            return Err(Failure::refused(
                "--to - writes the snapshot alone: omit --journal and --keep, or give a folder",
            ));
        }
        return scrapes.meanwhile("the snapshot is being fetched", fetch::run(args.fetch(&args.to))).await;
    }
    let folder = args.to.clone();
    let (shelf, found) = blocking(move || {
        let shelf = Shelf::open(&folder)?;
        let found = shelf::list(shelf.folder());
        Ok((Arc::new(shelf), found))
    })
    .await?;
    let seen = Seen::shown_to(scrapes);
    found.iter().for_each(|backup| seen.has(&backup.manifest));
    match args.journal {
        true => journal::run(args, shelf, seen, scrapes).await,
        false => snapshot(&args, &shelf, &seen, scrapes).await,
    }
}

/// Fetches the snapshot into the folder.
async fn snapshot(args: &BackupArgs, shelf: &Arc<Shelf>, seen: &Seen, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let began = Instant::now();
    let incoming = shelf.incoming_file();
    seen.begins(true);
    let fetched = fetch::to_file_telling(&args.fetch(&incoming), |_| {}, scrapes).await?;
    let (shelf, keep, source) = (Arc::clone(shelf), args.keep, args.from.read.source.to_string());
    let placed = blocking(move || {
        let rdb = RdbFile::read(&incoming)?;
        let manifest = Manifest::of(Kind::Snapshot, &rdb, &fetched.server, source);
        if let Some(before) = shelf.find(&manifest) {
            _ = std::fs::remove_file(&incoming); // the next backup replaces it
            return Ok((before.path, manifest, false));
        }
        let path = shelf.place(&manifest)?;
        if let Some(keep) = keep {
            shelf.keep(&manifest, keep);
        }
        Ok((path, manifest, true))
    });
    let (path, manifest, is_new) = scrapes.meanwhile("the snapshot is being checked", placed).await?;
    seen.begins(false);
    seen.has(&manifest);
    say(&path, &manifest, is_new, began);
    Ok(())
}

fn say(path: &Path, manifest: &Manifest, is_new: bool, began: Instant) {
    let keys = manifest
        .keys
        .as_ref()
        .map_or_else(String::new, |keys| format!(", {} keys in {} databases", keys.values().sum::<u64>(), keys.len()));
    let text = format!(
        "{}: {} of {} at {}:{}, taken {}{keys}",
        path.display(),
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
