//! `remora restore`: checks a backup, says what it holds, and lays out what a server starts on.
//!
//! ```text
//!   PATH ──▶ found: an RDB file, or a folder with a list ──▶ checked: all of it is read ──▶ report
//!             ▲                                                │ --until: where it is cut
//!   objects ──╯ archived: fetched into a folder                ╰──▶ laid: copies beside, synced, renamed
//! ```
//!
//! - [`found`]: what there is at a path. [`archived`]: the files of a backup in a bucket, or another archive.
//! - [`commands`]: append-only files, read to their end or to a moment.
//! - [`laid`]: the files for a server.

mod archived;
mod commands;
mod found;
mod laid;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use tempfile::TempDir;

use self::archived::Archived;
use self::commands::Commands;
use self::found::Found;
use super::manifest::checked_snapshot;
use super::moment::Moment;
use super::rdb_file::RdbFile;
use crate::args::{Location, RestoreArgs};
use crate::exit::Failure;
use crate::progress;
use crate::signals::until_signal;
use crate::tasks::blocking;
use crate::units::Size;

/// What a backup holds.
#[derive(Debug, Serialize)]
struct Report {
    path: PathBuf,
    server: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rdb_version: Option<u32>,
    replid: String,
    /// The last byte of the stream that it holds, as far as that is known.
    offset: u64,
    bytes: u64,
    has_checksum: bool,
    /// Keys of each database in the snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<BTreeMap<u64, u64>>,
    /// Keys of the snapshot whose time to live has ended by now.
    expired_keys: u64,
    /// The first moment that can be restored.
    first: String,
    /// The last one.
    last: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    commands: Option<Commands>,
    #[serde(skip_serializing_if = "Option::is_none")]
    laid_at: Option<PathBuf>,
    /// The settings with which a server loads what was laid out.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    settings: BTreeMap<&'static str, String>,
}

/// Runs `remora restore`.
///
/// # Errors
/// There is no backup at the place, it is damaged, does not reach the moment, or cannot be laid out.
pub async fn run(args: RestoreArgs) -> Result<(), Failure> {
    let json = args.json;
    let report = until_signal(restored(args), ": nothing was laid out").await?;
    if json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::local(error.to_string()))?;
        progress::print_line(&text)?;
    } else {
        show(&report);
    }
    Ok(())
}

async fn restored(args: RestoreArgs) -> Result<Report, Failure> {
    let args = Arc::new(args);
    let asked = Arc::clone(&args);
    let archived = blocking(move || {
        asked.to.as_deref().map_or(Ok(()), laid::refuse_a_folder_in_use)?;
        Archived::find(&asked)
    });
    let archived = archived.await?;
    // The folder goes with this function, and so with a signal.
    let beside = archived.as_ref().map(|_| folder_for(&args)).transpose()?;
    let (asked, into) = (Arc::clone(&args), beside.as_ref().map(|folder| folder.path().to_owned()));
    blocking(move || match (archived, into) {
        (Some(archived), Some(into)) => {
            if let (Some(to), false) = (&asked.to, asked.replace) {
                laid::refuse_what_is_there(to, archived.manifest.kind)?;
            }
            let found = archived.fetch(asked.until, &into)?;
            let mut report = checked(&asked, &found, true)?;
            report.path = archived.address();
            Ok(report)
        }
        _ => {
            let Location::Path(path) = &asked.from else {
                return Err(Failure::refused(format!("there is no backup in {}", asked.from)));
            };
            let found = Found::at(path, asked.until, asked.until_pass)?;
            if let (Some(to), false) = (&asked.to, asked.replace) {
                laid::refuse_what_is_there(to, found.kind())?;
            }
            checked(&asked, &found, false)
        }
    })
    .await
}

/// The folder into which a backup is fetched: where it is laid out, so that its files only need another name.
fn folder_for(args: &RestoreArgs) -> Result<TempDir, Failure> {
    let above = args.to.as_ref().unwrap_or(&args.spool);
    let unusable = |error| Failure::local(format!("{} cannot be used: {error}", above.display()));
    std::fs::create_dir_all(above).map_err(unusable)?;
    tempfile::Builder::new().prefix(laid::BESIDE).tempdir_in(above).map_err(unusable)
}

/// Checks what was found, and lays it out. `moves`: its files are of no further use.
fn checked(args: &RestoreArgs, found: &Found, moves: bool) -> Result<Report, Failure> {
    let mut report = match found {
        Found::Snapshot(path) => {
            let rdb = checked_snapshot(path)?;
            if let Some(until) = args.until.filter(|until| *until < rdb.taken) {
                return Err(too_early(path, rdb.taken, until));
            }
            Report::of(path.clone(), Some(&rdb), None)
        }
        Found::Folder(folder) => {
            let (base, commands) = commands::check(folder, args.until, args.until_pass)?;
            let taken = base.as_ref().map_or(Moment::default(), |base| base.taken);
            if let Some(until) = args.until.filter(|until| *until < taken && !commands.is_after_a_step) {
                return Err(too_early(&folder.path, taken, until));
            }
            Report::of(folder.path.clone(), base.as_ref(), Some(commands))
        }
    };
    if let Some(to) = &args.to {
        // The check may have taken an hour.
        laid::refuse_a_folder_in_use(to)?;
        let how = laid::How { replaces: args.replace, moves };
        let laid = match found {
            Found::Snapshot(path) => laid::snapshot(path, to, how)?,
            Found::Folder(folder) => laid::folder(folder, report.commands.as_ref(), to, how)?,
        };
        report.laid_at = Some(laid);
        report.settings = laid::settings(found);
    }
    Ok(report)
}

fn too_early(path: &Path, taken: Moment, until: Moment) -> Failure {
    Failure::refused(format!(
        "{} begins at {taken}, which is after --until {until}: give an earlier backup, or the folder that has it",
        path.display()
    ))
}

impl Report {
    fn of(path: PathBuf, rdb: Option<&RdbFile>, commands: Option<Commands>) -> Report {
        let taken = rdb.map_or(Moment::default(), |rdb| rdb.taken);
        let (first, last) = match &commands {
            Some(commands) => (
                if taken > Moment::default() { taken } else { commands.first.unwrap_or_default() },
                commands.last.unwrap_or(taken),
            ),
            None => (taken, taken),
        };
        let said = |moment: Moment| if moment == Moment::default() { String::new() } else { moment.to_string() };
        let offset = commands.as_ref().and_then(|commands| commands.offset);
        Report {
            path,
            server: rdb.map(|rdb| rdb.server.clone()).unwrap_or_default(),
            rdb_version: rdb.map(|rdb| rdb.version),
            replid: rdb.map(|rdb| rdb.replid.clone()).unwrap_or_default(),
            offset: offset.or(rdb.map(|rdb| rdb.offset)).unwrap_or_default(),
            bytes: rdb.map_or(0, |rdb| rdb.bytes) + commands.as_ref().map_or(0, |commands| commands.bytes),
            has_checksum: rdb.is_some_and(|rdb| rdb.has_checksum),
            keys: rdb.and_then(|rdb| rdb.keys.clone()),
            expired_keys: rdb.map_or(0, |rdb| rdb.expired),
            first: said(first),
            last: said(last),
            commands,
            laid_at: None,
            settings: BTreeMap::new(),
        }
    }
}

fn show(report: &Report) {
    let mut lines = vec![format!("backup     {}: {}", report.path.display(), Size::bytes(report.bytes))];
    if let Some(version) = report.rdb_version {
        let checksum = if report.has_checksum { "" } else { "; it has no checksum" };
        lines.push(format!("snapshot   of {}, RDB version {version}{checksum}", report.server));
        if !report.replid.is_empty() {
            lines.push(format!("history    {}:{}", report.replid, report.offset));
        }
        match &report.keys {
            Some(keys) => {
                let keys: Vec<String> = keys.iter().map(|(database, keys)| format!("{database}: {keys}")).collect();
                lines.push(format!("keys       {}", if keys.is_empty() { "none".into() } else { keys.join(", ") }));
            }
            None => lines.push("keys       not counted: it holds types that this program does not know".into()),
        }
    }
    if let Some(commands) = &report.commands {
        lines.push(format!(
            "commands   {} in {} files, {} transactions",
            commands.commands, commands.files, commands.transactions
        ));
        if commands.cluster_changes > 0 {
            lines.push(format!(
                "WARNING    {} of them change the map of a cluster (CLUSTER SETSLOT): a node that starts on these files may follow \
                 another shard, and a server without cluster mode logs an error for each; make a new backup, which leaves them out",
                commands.cluster_changes
            ));
        }
        if !commands.left_out.is_empty() {
            lines.push(format!("left out   {}", commands.left_out));
        }
    }
    let moments =
        if report.first == report.last { report.first.clone() } else { format!("{} to {}", report.first, report.last) };
    if !moments.is_empty() {
        lines.push(format!("moments    {moments}"));
    }
    if report.expired_keys > 0 {
        lines.push(format!(
            "expired    {} keys of the snapshot: their time to live has ended since, so a server deletes them when it loads them",
            report.expired_keys
        ));
    }
    if let Some(laid) = &report.laid_at {
        let settings: Vec<String> = report.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        lines.push(format!("laid out   {}; start the server with {}", laid.display(), settings.join(", ")));
    }
    progress::say(&lines.join("\n"));
}
