//! Service: tells systemd that the agent is ready, what it does, that it lives, and that it stops (`Type=notify`), and
//! has it keep memory for the next process of the service.
//!
//! Outside of such a service nothing happens. Messages are sent by a task of their own: a manager that hangs holds up
//! no agent.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use sd_notify::NotifyState;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::AbortOnDrop;

/// The variable that names the manager's socket.
const SOCKET: &str = "NOTIFY_SOCKET";

/// How often the status is sent at most.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// An agent that the service manager counts as ready. Dropping it says that the agent stops.
pub struct Service {
    said: Arc<Mutex<Said>>,
    /// Sends; `None` outside of a service.
    task: Option<AbortOnDrop>,
}

/// What is to be told.
struct Said {
    status: String,
    /// When the agent's loop was last at work; `None`: a runtime that runs tasks is proof enough.
    alive: Option<Instant>,
}

impl Service {
    /// Says that the agent is ready, and from now on that it lives, as long as its runtime does.
    pub fn ready(status: &str) -> Service {
        Service::begin(status, None)
    }

    /// As [`Service::ready`], for an agent whose loop calls [`Service::turn`]: it lives as long as it does that.
    pub fn ready_in_a_loop(status: &str) -> Service {
        Service::begin(status, Some(Instant::now()))
    }

    fn begin(status: &str, alive: Option<Instant>) -> Service {
        let said = Arc::new(Mutex::new(Said { status: status.to_owned(), alive }));
        if std::env::var_os(SOCKET).is_none() {
            return Service { said, task: None };
        }
        tell(&[NotifyState::Ready, NotifyState::Status(status)]);
        let task = tokio::spawn(keep_telling(said.clone(), status.to_owned()));
        Service { said, task: Some(AbortOnDrop::new(&task)) }
    }

    /// Notes that the agent's loop is at work, and what it does.
    pub fn turn(&self, status: impl FnOnce() -> String) {
        if self.task.is_some() {
            *lock(&self.said) = Said { status: status(), alive: Some(Instant::now()) };
        }
    }
}

/// The descriptor store of the service manager: memory in it outlives this process, for the next one of the service.
pub struct Store {
    changes: UnboundedSender<Change>,
    _task: AbortOnDrop,
}

/// What is to be removed, and what is to be kept instead, in this order.
struct Change {
    names: &'static [&'static str],
    memories: Vec<(&'static str, Arc<Memory>)>,
}

/// Whether a service manager runs this process, which may keep memory for the next one.
pub fn keeps() -> bool {
    std::env::var_os(SOCKET).is_some()
}

impl Store {
    /// The store; `None` outside of a service. A manager that keeps nothing (`FileDescriptorStoreMax=0`) does not
    /// say so.
    pub fn open() -> Option<Store> {
        if !keeps() {
            return None;
        }
        let (changes, mut todo) = unbounded_channel::<Change>();
        let task = tokio::spawn(async move {
            while let Some(change) = todo.recv().await {
                let _ = tokio::task::spawn_blocking(move || change.tell()).await; // it has logged why it failed
            }
        });
        Some(Store { changes, _task: AbortOnDrop::new(&task) })
    }

    /// Removes everything of these names, and keeps these memories. Changes are made one after the other.
    pub fn replace(&self, names: &'static [&'static str], memories: Vec<(&'static str, Arc<Memory>)>) {
        let _ = self.changes.send(Change { names, memories });
    }
}

impl Change {
    fn tell(self) {
        for name in self.names {
            tell(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]);
        }
        for (name, memory) in self.memories {
            let states = [NotifyState::FdStore, NotifyState::FdName(name)];
            if let Err(error) = sd_notify::notify_with_fds(&states, &[memory.as_fd()]) {
                tracing::warn!(name, %error, "the service manager cannot be asked to keep memory; a restart of this service needs another snapshot");
            }
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.task.take().is_some() {
            tell(&[NotifyState::Stopping]);
        }
    }
}

/// Sends the status when it changes, and that the agent lives as often as the manager wants to know it.
async fn keep_telling(said: Arc<Mutex<Said>>, mut told: String) {
    let watchdog = sd_notify::watchdog_enabled();
    // The manager ends a service from which it hears nothing for the whole time.
    let every = watchdog.map_or(STATUS_EVERY, |limit| STATUS_EVERY.min(limit / 2));
    let mut due = tokio::time::interval(every);
    due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        let (status, alive) = {
            let said = lock(&said);
            (said.status.clone(), said.alive)
        };
        let lives = watchdog.is_some_and(|limit| alive.is_none_or(|alive| alive.elapsed() < limit));
        let news = (status != told).then(|| status.clone());
        if !lives && news.is_none() {
            continue;
        }
        told = status;
        let sending = tokio::task::spawn_blocking(move || {
            let status = news.as_deref().map(NotifyState::Status);
            let states: Vec<NotifyState<'_>> =
                status.into_iter().chain(lives.then_some(NotifyState::Watchdog)).collect();
            tell(&states);
        });
        let _ = sending.await; // it has logged why it failed
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager cannot be told how the agent is");
    }
}

fn lock(said: &Mutex<Said>) -> std::sync::MutexGuard<'_, Said> {
    said.lock().unwrap_or_else(PoisonError::into_inner)
}
