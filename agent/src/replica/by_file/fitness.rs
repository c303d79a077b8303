//! Fitness: whether a server that is restarted on a file loads it, and goes on from there as a replica.
//!
//! Both servers decide that in `loadDataFromDisk` and `primaryTryPartialResynchronization`: no AOF, a replica while it
//! loads, and a primary whose backlog reaches back. The last is asked by the fetch. What the restart command itself
//! adds to the command line cannot be seen from here.

use std::path::{Path, PathBuf};

use remora_protocol::Offer;

use crate::args::ReplicaArgs;
use crate::exit::Failure;
use crate::replica::preflight::Primary;
use crate::server::{Client, Configuration, Facts, Role};

/// Refuses a server that would not.
pub(super) async fn refuse_what_would_not_load(
    args: &ReplicaArgs,
    client: &mut Client,
    facts: &Facts,
    primary: &Primary,
    plan: &Offer,
) -> Result<(), Failure> {
    let url = client.server().url().to_string();
    if client.config_get("appendonly").await?.as_deref() == Some("yes") {
        return Err(Failure::refused(aof(&format!("the server {url}"))));
    }
    let followed = match &facts.link {
        Some(link) if facts.role == Some(Role::Replica) => primary.is_at(&link.host, link.port, plan).await,
        _ => false,
    };
    if facts.cluster_enabled == Some(true) {
        return cluster(client, args, followed, primary).await;
    }
    let file = client.info("server").await?.get("config_file").map(PathBuf::from).unwrap_or_default();
    let configuration = match file.as_os_str().is_empty() {
        true => Configuration::default(),
        false => Configuration::read(&file).map_err(|error| {
            Failure::refused(format!(
                "the configuration file {} of the server {url} cannot be read: {error}; what the server follows after a restart \
                 is not known",
                file.display()
            ))
        })?,
    };
    if configuration.is_yes("appendonly") {
        return Err(Failure::refused(aof(&file.display().to_string())));
    }
    check_the_place(client, &configuration, &file).await?;
    check_the_modules(&configuration, &file, primary)?;
    check_the_primary(args, &configuration, &file, followed, primary, plan).await
}

fn aof(who: &str) -> String {
    format!(
        "{who} has appendonly yes: after a restart the server would load its AOF, or nothing, and not an RDB file. Set appendonly \
         no there (and CONFIG SET appendonly yes when the server is in step), or use --delivery link or intercept"
    )
}

/// The primary that the server follows after its restart must be the right one.
async fn check_the_primary(
    args: &ReplicaArgs,
    configuration: &Configuration,
    file: &Path,
    followed: bool,
    primary: &Primary,
    plan: &Offer,
) -> Result<(), Failure> {
    let right = format!("{}:{}", primary.host, primary.port);
    if args.rewrite_config && !followed {
        return Err(Failure::refused(format!(
            "--rewrite-config would not write the primary {right}, which the server does not follow: use --write-replicaof with a \
             file that its configuration includes"
        )));
    }
    if args.rewrite_config {
        return Ok(());
    }
    if let Some(written) = &args.by.write_replicaof {
        let path = std::path::absolute(written).unwrap_or_else(|_| written.clone());
        if !configuration.includes(&path) {
            tracing::warn!(
                "the server's configuration file ({}) does not include {}: the restart command must name it (--include)",
                file.display(),
                path.display()
            );
        }
        return Ok(());
    }
    let advice = "--rewrite-config writes it for a server that follows its primary already; --write-replicaof FILE is for a file \
                  that the configuration includes";
    match configuration.primary() {
        Some((host, port)) if primary.is_at(host, port, plan).await => Ok(()),
        Some((host, port)) => Err(Failure::refused(format!(
            "{} has replicaof {host} {port}, and the source's primary is {right}: correct it, or {advice}",
            file.display()
        ))),
        None if !configuration.unread().is_empty() => {
            tracing::warn!(
                "{} has no replicaof, unless it is in one of {}, which were not read: without it the server would be a primary \
                 after its restart",
                file.display(),
                configuration.unread().join(", ")
            );
            Ok(())
        }
        None => {
            let who = match file.as_os_str().is_empty() {
                true => "the server has no configuration file".to_owned(),
                false => format!("{} has no replicaof", file.display()),
            };
            Err(Failure::refused(format!(
                "{who}: after a restart the server would be a primary with the data of the file, and not a replica of {right}; {advice}"
            )))
        }
    }
}

/// The file must be where the server looks for it after its restart.
async fn check_the_place(client: &mut Client, configuration: &Configuration, file: &Path) -> Result<(), Failure> {
    for name in ["dir", "dbfilename"] {
        let (now, then) = (client.config_get(name).await?, configuration.last(name).and_then(<[String]>::first));
        let (Some(now), Some(then)) = (now, then) else { continue };
        // A relative folder is relative to where the server was started.
        let is_known = name != "dir" || Path::new(then).is_absolute();
        let same = |one: &str, other: &str| match (std::fs::canonicalize(one), std::fs::canonicalize(other)) {
            (Ok(one), Ok(other)) => one == other,
            _ => one == other,
        };
        if is_known && !same(&now, then) {
            return Err(Failure::refused(format!(
                "the server has {name} {now}, and {} has {then}, where it would look for its file after a restart: make them the \
                 same",
                file.display()
            )));
        }
    }
    Ok(())
}

/// A module that was loaded by a command is not there after the restart, and its data would end the server.
fn check_the_modules(configuration: &Configuration, file: &Path, primary: &Primary) -> Result<(), Failure> {
    if !primary.has_modules_with_data() || configuration.last("loadmodule").is_some() {
        return Ok(());
    }
    Err(Failure::refused(format!(
        "the primary has modules that may have data, and {} has no loadmodule: after a restart the server could not load the file; \
         load its modules there",
        file.display()
    )))
}

/// A node of a cluster keeps what it follows in a file of its own.
async fn cluster(client: &mut Client, args: &ReplicaArgs, followed: bool, primary: &Primary) -> Result<(), Failure> {
    let url = client.server().url().to_string();
    if args.by.write_replicaof.is_some() {
        return Err(Failure::refused(format!(
            "the server {url} runs in cluster mode, where a configuration with replicaof does not start: omit --write-replicaof"
        )));
    }
    if !followed {
        return Err(Failure::refused(format!(
            "the node {url} does not follow the source's primary {}:{}, so it would take the slots of the file's keys for its own \
             after a restart: CLUSTER REPLICATE comes first",
            primary.host, primary.port
        )));
    }
    let databases = client.config_get("cluster-databases").await?.and_then(|count| count.parse::<u32>().ok());
    match databases {
        Some(2..) => Err(Failure::refused(format!(
            "the node {url} has several databases (cluster-databases): a node that starts on a file can take the stream for \
             database 0; use --delivery intercept"
        ))),
        _ => Ok(()),
    }
}
