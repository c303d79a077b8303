//! Registering: memory is made readable by RDMA in a thread of its own. All of its pages must be there for the card,
//! and stay in place. That takes some tenths of a second for each GiB, so no call waits for it.
//!
//! ```text
//!   export(id), revoke(id) ──▶ queue ──▶ thread: one after the other, in their order ──▶ Exporter
//! ```
//!
//! A region has a key once it is registered. Readers that come earlier read it by another transport, or ask. The owner
//! ends the thread by dropping this: what waits is left out, and what has begun is waited for.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use remora_fabric::{Exporter, Memory, RegionId};

/// See the module's text.
pub(super) struct Registering {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    exporter: Arc<dyn Exporter>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Task>,
    /// The thread does the task before these.
    is_busy: bool,
    is_over: bool,
}

enum Task {
    Export(RegionId, Arc<Memory>),
    Revoke(RegionId),
}

impl Registering {
    pub(super) fn start(exporter: Arc<dyn Exporter>) -> io::Result<Registering> {
        let shared = Arc::new(Shared { exporter, queue: Mutex::default(), changed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("volume-registrar".into()).spawn(move || of_thread.run())?;
        Ok(Registering { shared, thread: Some(thread) })
    }

    /// Makes memory readable, soon.
    pub(super) fn export(&self, id: RegionId, memory: &Arc<Memory>) {
        self.shared.add(Task::Export(id, Arc::clone(memory)));
    }

    /// Ends what [`Registering::export`] began, or will. Nothing is left of it once the thread has come to this.
    pub(super) fn revoke(&self, id: RegionId) {
        self.shared.add(Task::Revoke(id));
    }

    /// Waits until everything so far is done, but not longer than `limit`. Returns whether it is.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let is_at_work = |queue: &mut Queue| queue.is_busy || !queue.waiting.is_empty();
        let waited = self.shared.changed.wait_timeout_while(self.shared.queue(), limit, is_at_work);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !is_at_work(&mut queue)
    }
}

impl Drop for Registering {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.waiting.clear();
        queue.is_over = true;
        self.shared.changed.notify_all();
        drop(queue);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was reported where it happened
        }
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, task: Task) {
        self.queue().waiting.push_back(task);
        self.changed.notify_all();
    }

    /// The thread.
    fn run(&self) {
        while let Some(task) = self.next() {
            match task {
                Task::Export(id, memory) => {
                    let bytes = memory.length();
                    match self.exporter.export(id, memory) {
                        Ok(()) => tracing::info!(region = %id, bytes, "memory is registered for RDMA"),
                        Err(error) => {
                            tracing::warn!(region = %id, bytes, %error, "memory cannot be read by RDMA");
                        }
                    }
                }
                Task::Revoke(id) => self.exporter.revoke(id),
            }
        }
    }

    fn next(&self) -> Option<Task> {
        let mut queue = self.queue();
        queue.is_busy = false;
        self.changed.notify_all();
        while !queue.is_over {
            if let Some(task) = queue.waiting.pop_front() {
                queue.is_busy = true;
                return Some(task);
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc::{self, Receiver, Sender};

    use remora_fabric::{Error, Pages, RegionKey, Regions, Secret, TransportKind};

    use super::*;

    /// An exporter whose registrations last until they are let go on.
    struct Slow {
        goes_on: Mutex<Receiver<()>>,
        done: Sender<(&'static str, u64)>,
    }

    impl Exporter for Slow {
        fn kind(&self) -> TransportKind {
            TransportKind::Verbs
        }

        fn export(&self, id: RegionId, _: Arc<Memory>) -> Result<(), Error> {
            self.goes_on.lock().unwrap().recv().unwrap();
            self.done.send(("export", id.generation)).unwrap();
            Ok(())
        }

        fn revoke(&self, id: RegionId) {
            self.done.send(("revoke", id.generation)).unwrap();
        }

        fn grant(&self, _: u64, _: Secret, _: Regions) {}

        fn withdraw(&self, _: u64) {}

        fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
            Err(Error::NotExported(id))
        }

        fn bytes_served(&self) -> u64 {
            0
        }
    }

    #[test]
    fn no_caller_waits_for_a_registration_and_what_is_revoked_meanwhile_is_revoked_after_it() {
        let ((go_on, goes_on), (done, what)) = (mpsc::channel(), mpsc::channel());
        let slow = Arc::new(Slow { goes_on: Mutex::new(goes_on), done });
        let registering = Registering::start(slow).unwrap();
        let memory = Arc::new(Memory::create("test", 4096, Pages::Small).unwrap());
        let id = |generation| RegionId { generation, region: 0 };
        registering.export(id(1), &memory);
        registering.revoke(id(1));
        registering.export(id(2), &memory);
        assert!(what.try_recv().is_err(), "nothing is registered yet, and no call has waited");
        assert!(!registering.wait(Duration::from_millis(1)), "it has a bound");
        (0..2).for_each(|_| go_on.send(()).unwrap());
        assert!(registering.wait(Duration::from_secs(30)));
        let all: Vec<_> = what.try_iter().collect();
        assert_eq!(all, [("export", 1), ("revoke", 1), ("export", 2)]);
        go_on.send(()).unwrap();
        registering.export(id(3), &memory);
        drop(registering); // it ends its thread, or this test does not
    }
}
