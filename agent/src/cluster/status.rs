//! `remora cluster status`: what the sources of all shards hold, and which replicas read from them.

use super::plan::Plan;
use super::sources;
use super::survey::Survey;
use crate::args::ClusterStatusArgs;
use crate::exit::Failure;
use crate::progress;
use crate::server::Task;
use crate::status;

/// Runs `remora cluster status`.
///
/// # Errors
/// The cluster cannot be asked.
pub(super) async fn run(args: ClusterStatusArgs) -> Result<(), Failure> {
    let (credentials, server) = (sources::credentials(&args.sources)?, args.sources.server.open(Task::Cluster)?);
    loop {
        let survey = Survey::take(&server).await?;
        let sources = sources::ask(&args.sources, &credentials, &survey).await;
        let plan = Plan::of(&survey, &sources);
        let mut text = String::new();
        for problem in &plan.problems {
            text.push_str(&format!("not well   {problem}\n"));
        }
        for (shard, row) in survey.shards.iter().zip(&plan.shards) {
            text.push_str(&format!("shard      {} at {}\n", row.slots, row.primary));
            match sources.beside(shard) {
                Some(seen) => text.push_str(&status::table(&seen.status)),
                None => text.push_str(&format!("source     {}\n", row.not_ready_because)),
            }
            for replica in &row.replicas {
                text.push_str(&format!("replica    {}  {}\n", replica.address, replica.state));
            }
            text.push('\n');
        }
        for note in &plan.notes {
            text.push_str(&format!("note       {note}\n"));
        }
        progress::print(&text)?;
        let Some(pause) = args.watch else { return Ok(()) };
        tokio::time::sleep(pause).await;
    }
}
