//! Arrival: reads the slots of a source's snapshot into a [`Keeper`], on a thread of its own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use remora_fabric::Peer;
use remora_table::SnapshotReader;
use tokio::sync::oneshot;

use super::target::Keeper;
use crate::replica::parts::{Mapped, Part};

/// How long the thread sleeps at most when nothing has arrived: it adds to the time until a new slot is seen, and to
/// the time that stopping takes.
const PACE: Duration = Duration::from_millis(1);

/// Why slots stopped arriving before the last one.
#[derive(Debug, thiserror::Error)]
pub(super) enum ArrivalError {
    /// The source's table cannot be read any more.
    #[error(transparent)]
    Table(#[from] remora_table::Error),
    /// The bytes cannot be kept.
    #[error("{0}")]
    Disk(io::Error),
}

/// Slots that arrive. Dropping it stops the thread, within a slot's time.
pub(super) struct Arrival {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    ended: oneshot::Receiver<Result<(), ArrivalError>>,
}

impl Arrival {
    /// Begins to read, behind what has arrived already.
    pub(super) fn begin(part: Part, kept: Arc<dyn Keeper>) -> io::Result<Arrival> {
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, ended) = oneshot::channel();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("snapshot".into()).spawn(move || {
            let result = arrive(part, &*kept, &stopped);
            _ = tell.send(result); // the owner may have gone
        })?;
        Ok(Arrival { stop, thread: Some(thread), ended })
    }

    /// Waits until the last slot has arrived, or none arrives any more. Cancel-safe.
    pub(super) async fn ended(&mut self) -> Result<(), ArrivalError> {
        match (&mut self.ended).await {
            Ok(result) => result,
            Err(_) => {
                Err(ArrivalError::Disk(io::Error::other("the thread ended unexpectedly; this is a bug of remora")))
            }
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join(); // what it had to say was said by its result
        }
    }
}

fn arrive(part: Part, kept: &dyn Keeper, stop: &AtomicBool) -> Result<(), ArrivalError> {
    let first = kept.reached().slots;
    let mut peer = part.peer;
    let view = peer.view();
    let mut mapped = Mapped::new(if part.in_place { None } else { view.clone() });
    let view = view.filter(|_| part.in_place);
    let mut reader = SnapshotReader::new(view, part.sink, part.layout, part.expect, move |number| number < first)?;
    while !stop.load(Ordering::Relaxed) {
        if turn(&mut reader, &mut *peer, kept, &mut mapped)? {
            continue;
        }
        if reader.is_complete() {
            return kept.complete().map_err(ArrivalError::Disk);
        }
        peer.wait(PACE).map_err(remora_table::Error::from)?;
    }
    Ok(())
}

/// Takes what has arrived. Returns whether there was anything.
fn turn(
    reader: &mut SnapshotReader,
    peer: &mut dyn Peer,
    kept: &dyn Keeper,
    mapped: &mut Mapped,
) -> Result<bool, ArrivalError> {
    reader.pump(peer)?;
    let mut moved = false;
    while let Some(slot) = reader.next_slot() {
        let held = kept.keep(&slot).map_err(ArrivalError::Disk)?;
        // Only now is it known that its memory was not used for another slot meanwhile.
        reader.release(slot)?;
        mapped.copied(held.length.into());
        kept.add(held).map_err(ArrivalError::Disk)?;
        moved = true;
    }
    Ok(moved)
}
