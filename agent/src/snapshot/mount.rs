//! `remora snapshot mount`.

use std::sync::Arc;
use std::time::Duration;

use remora_fuse::{MountOptions, Session, SessionOptions};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};

use super::file_system::{NAME, Served};
use super::receiving::{Arrived, Receiving};
use super::shelf::Shelf;
use super::target::{Keeper, Target};
use crate::args::SnapshotMountArgs;
use crate::conversation::certificate_roles::CertificateRoles;
use crate::conversation::tokens::Credentials;
use crate::exit::Failure;
use crate::signals::Signals;

/// What the mounts are called.
const SUBTYPE: &str = "remora-snapshot";

/// How often it is looked whether the file is still mounted.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Runs `remora snapshot mount` until a signal, or until the file is unmounted.
///
/// # Errors
/// The source cannot be reached or refuses, the bytes cannot be kept, or the directory cannot be mounted at or is in
/// use at the end.
pub(super) async fn run(args: SnapshotMountArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let security = args.security.open_for(&args.expected, CertificateRoles::default())?;
    let credentials = Credentials::read(args.token_file.as_ref(), security, args.expected.source_key)?;
    let shelf = Arc::new(Shelf::new(&args.spool));
    let (begun, mut is_begun) = watch::channel(false);
    let (stop, stopped) = watch::channel(false);
    let source = args.read.source.to_string();
    let receiving = Receiving {
        read: args.read,
        credentials,
        name: args.name.unwrap_or_else(|| NAME.to_owned()),
        target: Arc::clone(&shelf) as Arc<dyn Target>,
        asks: false,
        begun,
        stopped,
    };
    let mut receiving = tokio::spawn(receiving.run());
    let mut received = None;
    // What there is is mounted: until then there is nothing to see, and an error is simply the command's.
    tokio::select! {
        done = &mut receiving, if received.is_none() => received = Some(outcome(done).map(|_| ())?),
        _ = is_begun.wait_for(|begun| *begun) => {}
        signal = signals.next() => {
            tracing::info!("stopped by {signal}: nothing was mounted");
            return end(receiving, &stop).await;
        }
    }
    let options = SessionOptions {
        mount: MountOptions { source, subtype: SUBTYPE.into(), read_only: true, other_users: false },
        ring: !args.no_ring,
        ..SessionOptions::default()
    };
    let (served, directory) = (Arc::new(Served::new(Arc::clone(&shelf))), args.directory.clone());
    let mounting = tokio::task::spawn_blocking(move || Session::start(&directory, served, &options));
    let mounted = mounting.await.map_err(|error| Failure::local(format!("mounting failed: {error}")))?;
    let mounted = mounted.map_err(|error| Failure::local(error.to_string()))?;
    let directory = args.directory.display();
    tracing::info!(%directory, transport = ?mounted.transport(), "{NAME} is there");
    let failed = loop {
        tokio::select! {
            done = &mut receiving, if received.is_none() => match outcome(done) {
                Ok(_) => received = Some(()),
                Err(failure) => break Some(failure),
            },
            signal = signals.next() => {
                tracing::info!("stopped by {signal}: unmounting");
                break None;
            }
            () = tokio::time::sleep(LOOK_AGAIN) => {
                if mounted.wait(Duration::ZERO) {
                    tracing::info!(%directory, "unmounted");
                    break None;
                }
            }
        }
    };
    // Readers that wait are told before the file goes.
    shelf.all().iter().for_each(|kept| kept.lose());
    let left = if received.is_none() && failed.is_none() { end(receiving, &stop).await } else { Ok(()) };
    let unmounting = tokio::task::spawn_blocking(move || mounted.end());
    let unmounted = unmounting.await.map_err(|error| Failure::local(format!("unmounting failed: {error}")))?;
    let unmounted = unmounted.map_err(|error| Failure::local(error.to_string()));
    failed.map_or(left.and(unmounted), Err)
}

/// A snapshot that is being received.
pub(super) type Running = JoinHandle<Result<Option<Arrived>, Failure>>;

type Joined = Result<Result<Option<Arrived>, Failure>, JoinError>;

/// What receiving has ended with.
pub(super) fn outcome(done: Joined) -> Result<Option<Arrived>, Failure> {
    done.unwrap_or_else(|error| Err(Failure::local(format!("receiving failed: {error}; this is a bug of remora"))))
}

/// Stops what still arrives, and waits until the source knows.
pub(super) async fn end(receiving: Running, stop: &watch::Sender<bool>) -> Result<(), Failure> {
    stop.send_replace(true);
    outcome(receiving.await).map(|_| ())
}
