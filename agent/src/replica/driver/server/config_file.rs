//! Configuration file: written again if another client wrote it while the settings of the sync were in force.
//!
//! `CONFIG REWRITE`, which Sentinel sends too, writes the link and the link's password into the server's configuration
//! file. They would come back with the server's next start, long after the agent has put the settings back. The servers
//! count the calls of `CONFIG REWRITE` since their start (`INFO commandstats`, from Redis 7 on).

use super::Keeper;
use crate::exit::Failure;
use crate::replica::needs::REWRITE;
use crate::replica::record::Rewrites;
use crate::server::ServerError;

/// How `INFO commandstats` names the calls of `CONFIG REWRITE`.
const REWRITE_CALLS: &str = "cmdstat_config|rewrite";

impl Keeper {
    /// Notes how often the file has been written, before the first change. What an agent before us noted for a server
    /// that still follows its link stays: the file may have been written since.
    pub(super) async fn note_rewrites(&mut self, after_restart: bool) -> Result<(), Failure> {
        if self.target.unfinished && !after_restart && self.record.rewrites().is_some() {
            return Ok(());
        }
        let run_id = self.target.facts.run_id.clone();
        let calls = self.rewrite_calls().await?;
        self.record.note_rewrites(calls.map(|calls| Rewrites { run_id, calls }));
        Ok(())
    }

    /// Writes the file again if another client wrote it since. To be called when the server is as it is to stay. The
    /// text goes on behind the state of the server; it is empty unless something is to be done by hand.
    pub(super) async fn write_the_file_again(&mut self) -> String {
        let Some(noted) = self.record.rewrites().cloned() else { return String::new() };
        let (Ok(facts), Ok(calls)) = (self.control.facts().await, self.rewrite_calls().await) else {
            return String::new();
        };
        // A server that restarted into the link has read it from the file.
        if facts.run_id == noted.run_id && calls.is_none_or(|calls| calls == noted.calls) {
            return String::new();
        }
        match self.control.command(&REWRITE).await {
            Ok(_) => {
                tracing::info!(
                    "another client wrote the server's configuration file during the sync; it is written again, without the \
                     settings of the sync"
                );
                String::new()
            }
            Err(error) => format!(
                "; another client wrote the server's configuration file during the sync, with the link and its password, and \
                 it can't be written again ({error}): send CONFIG REWRITE, or start the server with another file"
            ),
        }
    }

    /// Writes the file with the primary that the server follows now (`--rewrite-config`): a restarted server without
    /// `replicaof` in its file would be a primary.
    pub(super) async fn write_the_file(&mut self) -> Result<(), Failure> {
        match self.control.command(&REWRITE).await {
            Ok(_) => {
                tracing::info!("the server has written its configuration file, with the primary that it follows");
                Ok(())
            }
            Err(error) => {
                let advice = "its configuration file was not written (--rewrite-config needs +config|rewrite, and a file and \
                              a folder that the server may write): it would not follow the primary after a restart";
                Err(Failure::from(error).and(advice))
            }
        }
    }

    /// How often the file was written since the server's start; `None` if the server does not count that.
    async fn rewrite_calls(&mut self) -> Result<Option<u64>, ServerError> {
        let stats = self.control.client().await?.info("commandstats").await?;
        if stats.iter().all(|(name, _)| !name.starts_with("cmdstat_")) {
            return Ok(None);
        }
        // Servers list only what was called. Before Redis 7 there is one line for all of CONFIG.
        let calls = stats.get(REWRITE_CALLS).and_then(|line| line.strip_prefix("calls="));
        let is_split = stats.iter().any(|(name, _)| name.starts_with("cmdstat_config|"));
        let calls = calls.and_then(|calls| calls.split(',').next()?.parse().ok());
        Ok(calls.or(is_split.then_some(0)))
    }
}
