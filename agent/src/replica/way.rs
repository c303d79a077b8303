//! Way: by which way `--delivery auto` delivers, and why.

use crate::args::ReplicaArgs;
use crate::exit::Failure;
use crate::sentinel::guard;
use crate::server::{Facts, Task};

/// Why a delivery by the link would be refused or undone; `None` if nothing speaks against it.
///
/// # Errors
/// The server or the Sentinels do not answer.
pub(super) async fn why_not_by_the_link(args: &ReplicaArgs) -> Result<Option<String>, Failure> {
    let server = args.server.open(Task::Replica)?;
    let facts = Facts::read(&mut server.connect().await?).await?;
    if facts.cluster_enabled == Some(true) {
        return Ok(Some("the server runs in cluster mode, where servers refuse REPLICAOF".to_owned()));
    }
    let Some(sentinels) = args.peers.sentinel.open()? else { return Ok(None) };
    let known = guard::known(&sentinels, &facts, server.url()).await?;
    Ok(known.map(|_| {
        format!("Sentinel knows the server as a replica of {}, and makes it follow its primary again", sentinels.name())
    }))
}
