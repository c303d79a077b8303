//! `remora fetch`, `snapshot mount`, `backup` and `restore`: the jobs of [`remora_backup`] as commands.
//!
//! What belongs to a command alone is here: options that contradict each other, the files by which a server that starts
//! on a snapshot is a node of a cluster, what is shown to those who watch, and reports as JSON.

use std::io;
use std::path::Path;
use std::time::Instant;

use remora_backup::fetch::{self, Summary, Whole};
use remora_base::files::{self, Placing};
use remora_metrics::{Agent, Scrapes, Watch};

use crate::args::{BackupArgs, FetchArgs, RestoreArgs, SnapshotAction, SnapshotArgs};
use crate::cluster::survey;
use crate::exit::{Code, Failure};
use crate::exit::{Patience, RETRY_FOR};
use crate::progress;
use crate::server::{Configuration, local, read_configuration};
use remora_process::blocking;

/// What `--to` says for standard output.
const STDOUT: &str = "-";

/// Runs `remora fetch`.
///
/// # Errors
/// The file is refused, the source cannot be reached, there is no room, or the primary would not continue from the
/// file.
pub async fn fetch(args: FetchArgs) -> Result<(), Failure> {
    let (watch, mut scrapes) = Watch::begin(Agent::Fetch, None, args.metrics_file.metrics_file.as_deref()).await?;
    let outcome = fetched(args, &mut scrapes).await;
    watch.end(outcome).await
}

async fn fetched(args: FetchArgs, scrapes: &mut Scrapes) -> Result<(), Failure> {
    if let Some(config) = &args.server_config {
        check_config(config, args.write_nodes_conf.is_some())?;
    }
    if args.sentinel.is_given() && (args.write_replicaof.is_none() || args.to == Path::new(STDOUT)) {
        return Err(Failure::new(Code::Usage, "--sentinel goes with --write-replicaof, and with a file in --to"));
    }
    if args.to == Path::new(STDOUT) {
        if args.write_replicaof.is_some() || args.write_nodes_conf.is_some() {
            let text =
                "--write-replicaof and --write-nodes-conf are for a server that starts on the file: give --to a file";
            return Err(Failure::new(Code::Usage, text));
        }
        let options = args.options()?;
        let fetched = scrapes.meanwhile("the snapshot is being fetched", fetch::to_stdout(&options, &args.spool));
        return tell(&fetched.await?, &args);
    }
    let (to, nodes) = (args.to.clone(), args.write_nodes_conf.clone());
    let looked = blocking(move || {
        nodes.as_deref().map_or(Ok(()), survey::refuse_one_in_use)?;
        Ok(to.parent().and_then(local::process_in))
    });
    if let Some(process) = looked.await? {
        tracing::warn!(
            file = %args.to.display(),
            "{process} runs in the folder of the file, and writes its own data over a file of the name that its setting dbfilename has \
             when it saves or ends: stop it before (SHUTDOWN NOSAVE) if it is to start on this file"
        );
    }
    let options = args.options()?;
    let whole = match fetch::receive(&options, |_| {}, scrapes).await {
        Err(failure) if failure.code == Code::Stale => {
            return Err(failure.and("or use it as a backup with --allow-stale"));
        }
        received => received?,
    };
    // Before the snapshot: a server that finds it, and is not a replica, would take the data for its own.
    make_a_node(&args, &whole, options.placing).await?;
    let summary = whole.place(&options).await?;
    scrapes.leave(|families| summary.measure(families));
    tell(&summary, &args)
}

fn tell(summary: &Summary, args: &FetchArgs) -> Result<(), Failure> {
    summary.show();
    let Some(file) = &args.json else { return Ok(()) };
    let json = serde_json::to_vec_pretty(summary).map_err(|error| Failure::local(error.to_string()))?;
    let unwritable = |error| Failure::local(format!("{} cannot be written: {error}", file.display()));
    std::fs::write(file, json).map_err(unwritable)
}

/// Writes the configuration by which a server that starts on the snapshot is a node of its cluster, if that is wanted.
async fn make_a_node(args: &FetchArgs, whole: &Whole, how: Placing) -> Result<(), Failure> {
    let (Some(file), Some(cluster), Some(at)) = (&args.write_nodes_conf, &args.cluster.cluster, &args.node_address)
    else {
        return Ok(());
    };
    let server = args.cluster.open(cluster)?;
    // The snapshot is there: what passes must not throw it away.
    let mut patience = Patience::new(args.from.read.retry_for, RETRY_FOR);
    let conf = loop {
        match survey::make(&server, whole.origin().history, at).await {
            Ok(conf) => break conf,
            Err(failure) => tokio::time::sleep(patience.after(Instant::now(), failure)?).await,
        }
    };
    let to = file.clone();
    blocking(move || {
        survey::refuse_one_in_use(&to)?;
        write_nodes_conf(&to, &conf, how)
    })
    .await
}

fn write_nodes_conf(to: &Path, conf: &survey::NodesConf, how: Placing) -> Result<(), Failure> {
    match read_configuration(to) {
        // The node has been in the cluster before, and keeps its name there.
        Ok(text) if survey::follows(&text, &conf.primary) => Ok(()),
        Ok(_) if !how.replaces => Err(Failure::refused(format!(
            "{} is of a node that does not follow {}: remove it, or replace it by --replace",
            to.display(),
            conf.primary
        ))),
        Err(error) if error.kind() != io::ErrorKind::NotFound && !how.replaces => Err(unreadable(to, &error)),
        _ => Ok(files::write(to, conf.text.as_bytes(), &Placing { replaces: true, ..how })?),
    }
}

fn unreadable(file: &Path, error: &io::Error) -> Failure {
    Failure::refused(format!("{} cannot be read: {error}", file.display()))
}

/// Refuses a server that would not load the file.
fn check_config(file: &Path, has_nodes_conf: bool) -> Result<(), Failure> {
    let configuration = Configuration::read(file).map_err(|error| unreadable(file, &error))?;
    let file = file.display();
    if configuration.is_yes("appendonly") {
        return Err(Failure::refused(format!(
            "{file} has appendonly yes: the server would load its AOF, or nothing, and not an RDB file. Start it with \
             appendonly no, and set it to yes by CONFIG SET when it follows its primary"
        )));
    }
    let is_cluster = configuration.is_yes("cluster-enabled");
    if is_cluster && !has_nodes_conf {
        tracing::warn!(
            "{file} has cluster-enabled yes: without a nodes.conf that names its primary, the node would take the slots \
             of its keys for its own; --write-nodes-conf writes one"
        );
    }
    if configuration.primary().is_none() && !is_cluster {
        tracing::warn!(
            "{file} has no replicaof: a server that is no replica while it loads the file takes a full sync when it \
             becomes one; include the file of --write-replicaof there"
        );
    }
    Ok(())
}

/// Runs `remora snapshot`.
///
/// # Errors
/// The source cannot be reached or refuses, or the snapshot cannot be kept or mounted.
pub async fn snapshot(args: SnapshotArgs) -> Result<(), Failure> {
    match args.action {
        SnapshotAction::Mount(args) => remora_backup::mount::run(args.options()?).await,
    }
}

/// Runs `remora backup`.
///
/// # Errors
/// The folder or the store cannot be used, the source cannot be reached or refuses, or the snapshot is damaged.
pub async fn backup(args: BackupArgs) -> Result<(), Failure> {
    let (watch, mut scrapes) =
        Watch::begin(Agent::Backup, args.metrics.metrics, args.metrics_file.metrics_file.as_deref()).await?;
    let outcome = match args.options() {
        Ok(options) => remora_backup::run(options, &mut scrapes).await,
        Err(failure) => Err(failure),
    };
    scrapes.leave(|_| {});
    watch.end(outcome).await
}

/// Runs `remora restore`.
///
/// # Errors
/// There is no backup at the place, it is damaged, does not reach the moment, or cannot be laid out.
pub async fn restore(args: RestoreArgs) -> Result<(), Failure> {
    let json = args.json;
    let report = remora_backup::restore::run(args.options()).await?;
    if !json {
        report.show();
        return Ok(());
    }
    let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::local(error.to_string()))?;
    progress::print_line(&text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_server_with_an_aof_is_refused_and_other_settings_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("redis.conf");
        for (text, is_refused) in [
            ("appendonly yes\n", true),
            ("appendonly no\nAppendOnly \"yes\"\n", true),
            ("appendonly yes\nappendonly no\n", false),
            ("# appendonly yes\nreplicaof a 1\n", false),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(check_config(&file, false).is_err(), is_refused, "{text}");
        }
        assert!(check_config(&folder.path().join("missing"), false).is_err());
        assert!(check_config(Path::new("/dev/zero"), false).is_err(), "without an end");
    }
}
