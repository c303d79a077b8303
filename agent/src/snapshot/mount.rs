//! `remora snapshot mount`.

use std::sync::Arc;
use std::time::Duration;

use remora_fuse::{MountOptions, Session, SessionOptions, StartError};

use super::file_system::{NAME, Served};
use super::reception::{Reception, end, outcome};
use super::shelf::Shelf;
use super::target::{Keeper, Target};
use crate::args::SnapshotMountArgs;
use crate::events;
use crate::exit::Failure;
use crate::replica::data_set::DataSet;
use crate::signals::Signals;
use crate::tasks::blocking;

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
    let shelf = Arc::new(Shelf::new(&args.spool));
    let source = args.from.read.source.to_string();
    let Reception { mut running, stop, mut begun } = Reception::start(
        &args.from,
        NAME,
        Arc::clone(&shelf) as Arc<dyn Target>,
        false,
        None,
        DataSet::of_a_source(&args.from.expected),
    )?;
    let mut received = None;
    // What there is is mounted: until then there is nothing to see, and an error is simply the command's.
    tokio::select! {
        done = &mut running, if received.is_none() => received = Some(outcome(done).map(|_| ())?),
        _ = begun.wait_for(|begun| *begun) => {}
        signal = signals.next() => {
            tracing::info!("stopped by {signal}: nothing was mounted");
            return end(running, &stop).await;
        }
    }
    let options = SessionOptions {
        mount: MountOptions { source, subtype: SUBTYPE.into(), read_only: true, other_users: false },
        ring: !args.no_ring,
        ..SessionOptions::default()
    };
    let (served, directory) = (Arc::new(Served::new(Arc::clone(&shelf))), args.directory.clone());
    let failure = |error: StartError| Failure::local(error.to_string());
    let mounted = blocking(move || Session::start(&directory, served, &options).map_err(failure)).await?;
    let directory = args.directory.display();
    tracing::info!(event = events::SNAPSHOT_MOUNTED, %directory, transport = ?mounted.transport(), "{NAME} is there");
    let failed = loop {
        tokio::select! {
            done = &mut running, if received.is_none() => match outcome(done) {
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
    let left = if received.is_none() && failed.is_none() { end(running, &stop).await } else { Ok(()) };
    let unmounted = blocking(move || mounted.end().map_err(|error| Failure::local(error.to_string()))).await;
    failed.map_or(left.and(unmounted), Err)
}
