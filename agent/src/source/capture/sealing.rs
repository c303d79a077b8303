//! The thread that compresses and seals a snapshot while this process or a child of the server writes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_table::{Identity, Method, SnapshotSealer, State};

use super::plan::{CaptureError, Plan};
use crate::args::CompressChoice;
use crate::source::compression::processors::Processors;
use crate::source::compression::{Policy, World};
use crate::source::gauge::Gauge;

/// Pause before the plain table is looked at again. A fast server fills a slot of 4 MiB in two milliseconds.
const PAUSE: Duration = Duration::from_micros(500);

/// A snapshot that is being sealed. If it is dropped before its end, its table is aborted.
pub(super) struct Sealing {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), remora_table::Error>>>,
}

impl Sealing {
    /// Creates the table of the snapshot for other hosts, if the plan has one, and begins to fill it. The plain table
    /// must exist, and replicas must not be able to read the other one yet.
    pub(super) fn begin(plan: &Plan, identity: Identity) -> Result<Option<Sealing>, CaptureError> {
        let Some(remote) = &plan.remote else {
            plan.gauge.not_compressed();
            return Ok(None);
        };
        let ((plain, geometry), memory, choice) = (plan.snapshot.clone(), remote.memory.clone(), remote.compress);
        let sealer = match &remote.key {
            Some(key) if choice == CompressChoice::Off => {
                SnapshotSealer::create(plain, memory, geometry, identity, key)?
            }
            key => SnapshotSealer::create_compressed(plain, memory, geometry, identity, key.as_ref())?,
        };
        plan.gauge.sealing_begins();
        let (over, gauge) = (Arc::new(AtomicBool::new(false)), plan.gauge.clone());
        let stop = over.clone();
        let thread = std::thread::Builder::new().name("seal".into()).spawn(move || seal(sealer, choice, &gauge, &stop));
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

/// Decides how slots are compressed, and shows it.
struct Compressing<'g> {
    policy: Policy,
    processors: Processors,
    gauge: &'g Gauge,
    /// The method that was logged last.
    logged: Option<Method>,
}

impl Compressing<'_> {
    /// How the next slot is compressed.
    fn next(&mut self, now: Instant) -> Option<Method> {
        let world = World { link: self.gauge.link(), spare: self.processors.spare(now) };
        self.policy.next(&world)
    }

    /// A slot was stored.
    fn stored(&mut self, sealer: &mut SnapshotSealer, took: Duration) {
        let Some(slot) = sealer.take_stored() else { return };
        self.policy.stored(slot, took);
        // Slots of a trial say nothing of what comes of it.
        let method = self.policy.method();
        self.gauge.stored(self.policy.stored_bytes(), method.is_some(), self.policy.text());
        if self.logged != method && slot.wanted == method {
            tracing::info!(compression = %self.policy.text(), "slots for other hosts are compressed in another way from now on");
            self.logged = method;
        }
    }
}

/// Seals slot after slot until the snapshot is complete or aborted, or `stop` is set.
fn seal(
    mut sealer: SnapshotSealer,
    choice: CompressChoice,
    gauge: &Gauge,
    stop: &AtomicBool,
) -> Result<(), remora_table::Error> {
    let (policy, processors) = (Policy::new(choice), Processors::default());
    let mut compressing = Compressing { policy, processors, gauge, logged: None };
    while sealer.state() == State::Open {
        let began = Instant::now();
        sealer.compress_with(compressing.next(began));
        match sealer.pump() {
            Ok(true) => {
                compressing.stored(&mut sealer, began.elapsed());
                gauge.sealed(sealer.sealed_slots());
            }
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
