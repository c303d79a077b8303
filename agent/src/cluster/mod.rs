//! `remora cluster`: the shards of a cluster, the sources beside them, and work on all of them at once.
//!
//! ```text
//!   --server ── CLUSTER NODES, INFO ──▶ survey ─┬─▶ plan, status: tables
//!   --sources ── plan, status ────────▶ sources ├─▶ backup: a file for each shard
//!                                               ├─▶ sync: nodes that become replicas
//!                                               ╰─▶ migrate: nodes that take shards over
//! ```
//!
//! - [`survey`]: the cluster at one moment. **Start here.** [`shards`]: what is asked where `CLUSTER NODES` is broken.
//! - [`plan`]: which source is beside which shard: the one whose server has the primary's replication history; and the
//!   commands that say so. [`sync`], [`migrate`], and here the backup: the commands that do something.

mod migrate;
mod plan;
mod shards;
pub(crate) mod survey;
mod sync;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use plan::{Plan, Seen};
use serde::Serialize;
use survey::{Shard, Survey};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::args::{ClusterAction, ClusterArgs, ClusterBackupArgs};
use crate::exit::{Code, Failure};
use crate::exit::{Patience, RETRY_FOR};
use crate::metrics::Scrapes;
use crate::progress;
use crate::reader::data_set::DataSet;
use crate::server::Task;
use crate::signals::until_signal;
use crate::units::{Size, counted};
use remora_backup::FetchOptions;
use remora_backup::fetch::{self, Summary};
use remora_base::files::{self, PRIVATE};
use remora_process::blocking;
use remora_server::nodes;

/// Runs `remora cluster`.
///
/// # Errors
/// The cluster or a source cannot be asked, the cluster is not well, or a file cannot be written.
pub async fn run(args: ClusterArgs) -> Result<(), Failure> {
    match args.action {
        ClusterAction::Plan(args) => until_signal(plan::run(args), "").await,
        ClusterAction::Status(args) => until_signal(plan::status(args), "").await,
        // The fetches catch signals themselves.
        ClusterAction::Backup(args) => backup(args).await,
        ClusterAction::Sync(args) => sync::run(args).await,
        ClusterAction::Migrate(args) => migrate::run(args).await,
    }
}

// `remora cluster backup`: the snapshot of each shard as a file, and a list of them.
//
// ```text
//   DIR/redis-node-10.0.0.1-6379-<id>.rdb     each shard's, as `redis-cli --cluster backup` names them
//   DIR/nodes.json                            the primaries and their slots, in its form too
//   DIR/manifest.json                         written last: what each file is, and when
// ```
//
// Each shard's file is of a moment of its own: no cluster of these servers has one moment for all. But if slots move
// meanwhile, keys may be in two files or in none. So the slots are compared at the end, and such a backup fails.

const MANIFEST: &str = "manifest.json";

/// What `manifest.json` says.
#[derive(Debug, Serialize)]
struct Manifest {
    /// Of this form.
    version: u32,
    /// Seconds since 1970.
    began: u64,
    ended: u64,
    files: Vec<Entry>,
}

/// A file.
#[derive(Debug, Serialize)]
struct Entry {
    file: String,
    slots: String,
    primary: String,
    primary_id: String,
    server: String,
    replid: String,
    offset: u64,
    bytes: u64,
}

/// A primary, as `redis-cli --cluster backup` writes it.
#[derive(Debug, Serialize)]
struct NodeEntry {
    name: String,
    host: String,
    port: u16,
    replicate: Option<String>,
    slots: Vec<[u16; 2]>,
    slots_count: u32,
    flags: String,
    current_epoch: u64,
}

/// A file that is to be fetched.
struct Job {
    options: FetchOptions,
    file: String,
    shard: usize,
}

/// Runs `remora cluster backup`.
///
/// # Errors
/// The cluster is not well, a shard has no source, slots have moved meanwhile, or a file cannot be fetched.
async fn backup(args: ClusterBackupArgs) -> Result<(), Failure> {
    let (began, started) = (seconds_since_1970(), Instant::now());
    let credentials = plan::credentials(&args.sources)?;
    let server = args.sources.server.open(Task::Cluster)?;
    let folder = args.to.clone();
    blocking(move || prepare(&folder)).await?;
    let mut patience = Patience::new(args.retry_for, RETRY_FOR);
    let before = patience.keep_trying(async || Survey::take(&server).await).await?;
    let sources = plan::ask(&args.sources, &credentials, &before).await;
    Plan::of(&before, &sources).verdict()?;
    let mut jobs = Vec::new();
    for (number, shard) in before.shards.iter().enumerate() {
        // The verdict has said that each has one.
        let Some(seen) = sources.beside(shard) else { continue };
        jobs.push(job(&args, number, shard, seen)?);
    }
    let mut fetched = fetch_all(jobs, args.at_once.into()).await?;
    fetched.sort_by_key(|(job, _)| job.shard);

    let after = Survey::take(&server).await?;
    let slots = |survey: &Survey| survey.shards.iter().map(Shard::slots).collect::<Vec<_>>();
    if slots(&before) != slots(&after) {
        let text = format!(
            "slots have moved during the backup: keys may be in two files of {} or in none; it has no manifest; start \
             it again",
            args.to.display()
        );
        return Err(Failure::new(Code::Refused, text));
    }
    let bytes: u64 = fetched.iter().map(|(_, summary)| summary.bytes).sum();
    let nodes: Vec<NodeEntry> = before.shards.iter().map(|shard| node_entry(shard, before.epoch)).collect();
    let entries = fetched.iter().map(|(job, summary)| entry(&before.shards[job.shard], job, summary));
    let manifest = Manifest { version: 1, began, ended: seconds_since_1970(), files: entries.collect() };
    let (nodes, manifest) = (json(&nodes)?, json(&manifest)?);
    let folder = args.to.clone();
    blocking(move || {
        files::write(&folder.join("nodes.json"), &nodes, &PRIVATE)?;
        Ok(files::write(&folder.join(MANIFEST), &manifest, &PRIVATE)?)
    })
    .await?;
    progress::say(&format!(
        "{}: {}, {} in {:.2} s",
        args.to.display(),
        counted(fetched.len(), "shard"),
        Size::bytes(bytes),
        started.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Makes the folder, if it is missing.
fn prepare(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::local(format!("{} cannot be made: {error}", folder.display())))?;
    match folder.join(MANIFEST).symlink_metadata() {
        Ok(_) => {
            let text = format!("{} has a whole backup already: give another folder", folder.display());
            Err(Failure::refused(text))
        }
        Err(_) => Ok(()),
    }
}

fn job(args: &ClusterBackupArgs, number: usize, shard: &Shard, seen: &Seen) -> Result<Job, Failure> {
    let node = &shard.primary.node;
    // A colon is not a character of file names everywhere.
    let host = node.host.replace(':', "_");
    let file = format!("redis-node-{host}-{}-{}.rdb", node.port, node.id);
    let to: PathBuf = args.to.join(&file);
    let data_set = DataSet::of_a_plan(&seen.plan, args.sources.expected.is_given());
    Ok(Job { options: args.fetch(seen.address.clone(), to, data_set)?, file, shard: number })
}

/// Fetches all files, some at once. The first failure ends the others; what has arrived stays, and the same command
/// goes on there.
async fn fetch_all(jobs: Vec<Job>, at_once: usize) -> Result<Vec<(Job, Summary)>, Failure> {
    let (turns, mut fetching) = (Arc::new(Semaphore::new(at_once)), JoinSet::new());
    for job in jobs {
        let turns = Arc::clone(&turns);
        fetching.spawn(async move {
            let _turn = turns.acquire().await;
            let summary = fetch::to_file(&job.options, |_| {}, &mut Scrapes::default()).await?;
            Ok::<_, Failure>((job, summary))
        });
    }
    let mut fetched = Vec::new();
    while let Some(done) = fetching.join_next().await {
        let done = done.map_err(|error| {
            Failure::local(format!("a fetch failed: {error}; this is a bug of remora, please report it"))
        })?;
        fetched.push(done?);
    }
    Ok(fetched)
}

fn entry(shard: &Shard, job: &Job, summary: &Summary) -> Entry {
    Entry {
        file: job.file.clone(),
        slots: shard.slots(),
        primary: shard.primary.node.address(),
        primary_id: shard.primary.node.id.clone(),
        server: summary.server.clone(),
        replid: summary.replid.clone(),
        offset: summary.offset,
        bytes: summary.bytes,
    }
}

fn node_entry(shard: &Shard, epoch: u64) -> NodeEntry {
    let node = &shard.primary.node;
    NodeEntry {
        name: node.id.clone(),
        host: node.host.clone(),
        port: node.port,
        replicate: None,
        slots: node.slots.iter().map(|slots| [slots.first, slots.last]).collect(),
        slots_count: node.slot_count(),
        flags: node.flags.join(","),
        current_epoch: epoch,
    }
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    let mut json = serde_json::to_vec_pretty(value).map_err(|error| Failure::local(error.to_string()))?;
    json.push(b'\n');
    Ok(json)
}

fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
