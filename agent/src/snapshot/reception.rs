//! Reception: a snapshot that is being received, as the commands hold it.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};

use super::receiving::{Arrived, Receiving};
use super::target::Target;
use crate::args::SnapshotFromArgs;
use crate::conversation::certificate_roles::CertificateRoles;
use crate::conversation::tokens::Credentials;
use crate::exit::Failure;

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
    /// whether the primary is asked at the end if it would continue from the snapshot.
    ///
    /// # Errors
    /// The token or the certificates cannot be used.
    pub(super) fn start(
        from: &SnapshotFromArgs,
        name: &str,
        target: Arc<dyn Target>,
        asks: bool,
    ) -> Result<Reception, Failure> {
        let security = from.security.open_for(&from.expected, CertificateRoles::default())?;
        let credentials = Credentials::read(from.token_file.as_ref(), security, from.expected.source_key)?;
        let (begin, begun) = watch::channel(false);
        let (stop, stopped) = watch::channel(false);
        let name = from.name.clone().unwrap_or_else(|| name.to_owned());
        let receiving = Receiving { read: from.read.clone(), credentials, name, target, asks, begun: begin, stopped };
        Ok(Reception { running: tokio::spawn(receiving.run()), stop, begun })
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
