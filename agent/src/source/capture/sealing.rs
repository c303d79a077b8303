//! The thread that seals a snapshot while this process or a child of the server writes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use remora_table::{Identity, SnapshotSealer, State};

use super::plan::{CaptureError, Plan};
use crate::source::gauge::Gauge;

/// Pause before the plain table is looked at again. A fast server fills a slot of 4 MiB in two milliseconds.
const PAUSE: Duration = Duration::from_micros(500);

/// A snapshot that is being sealed. If it is dropped before its end, its table is aborted.
pub(super) struct Sealing {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), remora_table::Error>>>,
}

impl Sealing {
    /// Creates the sealed table of the snapshot, if the plan has one, and begins to fill it. The plain table must
    /// exist, and replicas must not be able to read the sealed one yet.
    pub(super) fn begin(plan: &Plan, identity: Identity) -> Result<Option<Sealing>, CaptureError> {
        let Some((sealed, _)) = &plan.sealed else { return Ok(None) };
        let (plain, geometry) = plan.snapshot.clone();
        let sealer = SnapshotSealer::create(plain, sealed.memory.clone(), geometry, identity, &sealed.key)?;
        plan.gauge.sealing_begins();
        let (over, gauge) = (Arc::new(AtomicBool::new(false)), plan.gauge.clone());
        let stop = over.clone();
        let thread = std::thread::Builder::new().name("seal".into()).spawn(move || seal(sealer, &gauge, &stop));
        let thread = thread.map_err(|cause| CaptureError::Link {
            during: "snapshot",
            cause: format!("no thread to seal it: {cause}"),
        })?;
        Ok(Some(Sealing { over, thread: Some(thread) }))
    }

    /// The snapshot is complete: waits until all of it is sealed. At most the last slots are not yet.
    pub(super) fn finish(mut self) -> Result<(), CaptureError> {
        match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => Ok(()),
            Some(Ok(Err(error))) => Err(error.into()),
            Some(Err(_)) => Err(CaptureError::Panicked("the thread that seals it panicked".into())),
        }
    }
}

impl Drop for Sealing {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its result no longer matters: the snapshot failed.
            let _ = thread.join();
        }
    }
}

/// Seals slot after slot until the snapshot is complete or aborted, or `stop` is set.
fn seal(mut sealer: SnapshotSealer, gauge: &Gauge, stop: &AtomicBool) -> Result<(), remora_table::Error> {
    while sealer.state() == State::Open {
        match sealer.pump() {
            Ok(true) => gauge.sealed(sealer.sealed_slots()),
            Ok(false) if stop.load(Ordering::Relaxed) => sealer.abort(),
            Ok(false) => std::thread::sleep(PAUSE),
            Err(error) => {
                sealer.abort();
                tracing::error!(%error, "the snapshot cannot be sealed");
                // The writer must not wait for slots that are never sealed. It learns of this when it is done.
                gauge.sealed(u64::MAX);
                return Err(error);
            }
        }
    }
    Ok(())
}
