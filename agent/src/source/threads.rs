//! The running capture threads. At most one takes a snapshot and one follows the stream, beside threads that were told
//! to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::capture::{Capture, Journal, Plan};
use crate::exit::Failure;

/// How long the source waits for its threads when it ends.
const END_LIMIT: Duration = Duration::from_secs(3);

/// The running capture threads, by generation.
#[derive(Default)]
pub(super) struct Threads {
    threads: Vec<CaptureThread>,
}

struct CaptureThread {
    generation: u64,
    follows_stream: bool,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Threads {
    /// Starts a capture. It begins once the threads that were told to stop have ended. Such a thread may still write
    /// for one tick, and a table must never have two writers.
    pub(super) fn start(&mut self, plan: Plan) -> Result<(), Failure> {
        self.spawn(plan, |capture| capture.run())
    }

    /// Starts the thread that goes on with the stream of a former process, behind what the journal has of it.
    pub(super) fn go_on(&mut self, plan: Plan, journal: Journal) -> Result<(), Failure> {
        self.spawn(plan, |capture| capture.go_on(journal))
    }

    fn spawn(&mut self, plan: Plan, body: impl FnOnce(Capture) + Send + 'static) -> Result<(), Failure> {
        let has_ended = |thread: &CaptureThread| thread.stop.load(Ordering::Relaxed) || thread.thread.is_finished();
        let (ended, running): (Vec<_>, Vec<_>) = self.threads.drain(..).partition(has_ended);
        self.threads = running;
        let (generation, follows_stream, stop) = (plan.generation, plan.journal.is_some(), plan.stop.clone());
        let thread = std::thread::Builder::new()
            .name("capture".into())
            .spawn(move || {
                for thread in ended {
                    let _ = thread.thread.join();
                }
                body(Capture::new(plan));
            })
            .map_err(|error| Failure::local(format!("cannot start a thread for the capture: {error}")))?;
        self.threads.push(CaptureThread { generation, follows_stream, stop, thread });
        Ok(())
    }

    /// Whether the capture of that generation follows the stream.
    pub(super) fn follows_stream(&self, generation: u64) -> bool {
        self.threads.iter().any(|thread| thread.generation == generation && thread.follows_stream)
    }

    /// Whether a thread may have a link to the server.
    pub(super) fn hold_links(&self) -> bool {
        self.threads.iter().any(|thread| !thread.stop.load(Ordering::Relaxed) && !thread.thread.is_finished())
    }

    /// Tells the capture of that generation to stop.
    pub(super) fn stop(&self, generation: u64) {
        self.stop_if(|thread| thread.generation == generation);
    }

    /// Tells the thread that follows the stream to stop.
    pub(super) fn stop_the_stream(&self) {
        self.stop_if(|thread| thread.follows_stream);
    }

    /// Stops all threads and waits for them, for at most [`END_LIMIT`].
    pub(super) async fn end(self) {
        self.stop_if(|_| true);
        let joined = tokio::task::spawn_blocking(move || {
            for thread in self.threads {
                let _ = thread.thread.join();
            }
        });
        if tokio::time::timeout(END_LIMIT, joined).await.is_err() {
            tracing::warn!("a capture thread did not end in time");
        }
    }

    fn stop_if(&self, which: impl Fn(&CaptureThread) -> bool) {
        for thread in self.threads.iter().filter(|thread| which(thread)) {
            thread.stop.store(true, Ordering::Relaxed);
        }
    }
}
