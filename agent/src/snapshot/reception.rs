//! Reception: a snapshot that is being received, as the commands hold it.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};

use super::receiving::{Arrived, Passing, Receiving};
use super::target::Target;
use crate::args::{PassOnArgs, RelayArgs, ReplicaNameArgs, SnapshotFromArgs};
use crate::exit::Failure;
use crate::host_memory;
use crate::replica::data_set::DataSet;
use crate::replica::open_tokens;

/// The task that receives a snapshot.
pub(super) type Running = JoinHandle<Result<Option<Arrived>, Failure>>;

/// A snapshot that is being received, and what stops it.
pub(super) struct Reception {
    pub(super) running: Running,
    /// Set to stop it.
    pub(super) stop: watch::Sender<bool>,
    /// True once a snapshot has begun to arrive.
    pub(super) begun: watch::Receiver<bool>,
}

impl Reception {
    /// Begins to receive. `name`: under which the source shows it, unless the user has given another one; `asks`:
    /// whether the primary is asked at the end if it would continue from the snapshot; `pass_on`: how slots pass
    /// between this command and replicas, if they do;
    /// `data_set`: what the snapshot must be of.
    ///
    /// # Errors
    /// The token or the certificates cannot be used.
    pub(super) fn start(
        from: &SnapshotFromArgs,
        name: &str,
        target: Arc<dyn Target>,
        asks: bool,
        pass_on: Option<&PassOnArgs>,
        data_set: DataSet,
    ) -> Result<Reception, Failure> {
        let files: Vec<PathBuf> = from.token_file.iter().cloned().collect();
        pass_on.map_or(Ok(()), |pass_on| host_memory::check("--memory", pass_on.memory))?;
        let (readers, relay) = match pass_on {
            Some(pass_on) => (pass_on.readers.clone(), pass_on.relay.clone()),
            None => (ReplicaNameArgs::default(), RelayArgs::default()),
        };
        let tokens = open_tokens(&files, &from.security, &from.expected, &readers, &relay)?;
        let credentials = tokens.credentials(from.expected.source_key);
        let rereading = tokens.read_again_on_hangup()?;
        let passing = pass_on.map(|pass_on| Passing { tokens, options: relay, memory: pass_on.memory.get() });
        let (begin, begun) = watch::channel(false);
        let (stop, stopped) = watch::channel(false);
        let name = from.name.clone().unwrap_or_else(|| name.to_owned());
        let read = from.read.clone();
        let receiving = Receiving { read, credentials, data_set, name, target, asks, passing, begun: begin, stopped };
        let running = tokio::spawn(async move {
            let _rereading = rereading;
            receiving.run().await
        });
        Ok(Reception { running, stop, begun })
    }
}

/// What receiving has ended with.
pub(super) fn outcome(done: Result<Result<Option<Arrived>, Failure>, JoinError>) -> Result<Option<Arrived>, Failure> {
    done.unwrap_or_else(|error| Err(Failure::local(format!("receiving failed: {error}; this is a bug of remora"))))
}

/// Stops what still arrives, and waits until the source knows.
pub(super) async fn end(receiving: Running, stop: &watch::Sender<bool>) -> Result<(), Failure> {
    stop.send_replace(true);
    outcome(receiving.await).map(|_| ())
}
