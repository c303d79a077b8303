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
//!   commands that say so. [`backup`], [`sync`], [`migrate`]: the commands that do something.
//! - [`nodes_conf`]: the configuration of a node that is to join.

mod backup;
mod migrate;
pub(crate) mod nodes_conf;
mod plan;
mod shards;
mod survey;
mod sync;

use remora_server::nodes;

use crate::args::{ClusterAction, ClusterArgs};
use crate::exit::Failure;
use crate::signals::until_signal;

/// Runs `remora cluster`.
///
/// # Errors
/// The cluster or a source cannot be asked, the cluster is not well, or a file cannot be written.
pub async fn run(args: ClusterArgs) -> Result<(), Failure> {
    match args.action {
        ClusterAction::Plan(args) => until_signal(plan::run(args), "").await,
        ClusterAction::Status(args) => until_signal(plan::status(args), "").await,
        // The fetches catch signals themselves.
        ClusterAction::Backup(args) => backup::run(args).await,
        ClusterAction::Sync(args) => sync::run(args).await,
        ClusterAction::Migrate(args) => migrate::run(args).await,
    }
}
