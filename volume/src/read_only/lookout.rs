//! Lookout: a thread for each server. It connects, is granted the copy's region, and reads the copy's line from time to
//! time. What it finds decides which copy is read.
//!
//! ```text
//!   connect ── Open{Read} ── Look ── region ──▶ line, each quarter of a second ──▶ Shared
//!      ▲                                          │
//!      ╰────────── pause ◀── the connection is over, or the region cannot be read
//! ```
//!
//! After the two questions the server is asked nothing. Its connection keeps the grant, and tells of the server's end.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_messenger::Address;

use super::choice::{Choice, SIGHT_EVERY};
use super::open_copy::OpenCopy;
use super::{Counts, ReadOnlyOptions};
use crate::caller::Caller;
use crate::layout::Layout;
use crate::message::{Standing, State};
use crate::reader::ReaderError;
use crate::shape::Shape;
use crate::version::Version;
use crate::wire::{Call, Mode, Reply};

/// What the lookouts have found.
pub(super) struct Shared {
    found: Mutex<Found>,
    /// Something was found: for what waits for a copy.
    changed: Condvar,
    /// The lookouts are to end.
    stops: Condvar,
}

struct Found {
    choice: Choice,
    copies: Vec<Option<Arc<OpenCopy>>>,
    /// Why the copy of a server is not read; empty before it was tried.
    why: Vec<String>,
    is_stopping: bool,
}

impl Shared {
    pub(super) fn new(servers: usize) -> Shared {
        let found = Found {
            choice: Choice::default(),
            copies: vec![None; servers],
            why: vec![String::new(); servers],
            is_stopping: false,
        };
        Shared { found: Mutex::new(found), changed: Condvar::new(), stops: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The copy to read, of those that have applied everything up to `through`. Waits for one until then.
    ///
    /// # Errors
    /// Why no copy can be read.
    pub(super) fn choose(
        &self,
        through: Version,
        first: usize,
        until: Instant,
    ) -> Result<(usize, Arc<OpenCopy>), String> {
        let mut found = self.lock();
        loop {
            let now = Instant::now();
            let chosen = found.choice.choose(through, first, now);
            if let Some((server, copy)) = chosen.and_then(|server| Some((server, found.copies[server].clone()?))) {
                return Ok((server, copy));
            }
            let left = until.saturating_duration_since(now);
            if left.is_zero() || found.is_stopping {
                return Err(found.why(through));
            }
            found = wait(&self.changed, found, left.min(SIGHT_EVERY));
        }
    }

    /// Waits until each server was tried, but not longer than until then. Returns how many copies can be read.
    pub(super) fn wait_for_all(&self, until: Instant) -> usize {
        let mut found = self.lock();
        loop {
            let now = Instant::now();
            let is_tried = |(copy, why): (&Option<Arc<OpenCopy>>, &String)| copy.is_some() || !why.is_empty();
            if found.copies.iter().zip(&found.why).all(is_tried) || now >= until {
                return found.choice.readable(now);
            }
            found = wait(&self.changed, found, until - now);
        }
    }

    /// The line of a copy was read after blocks of it. That is a sighting too: without it, a copy that has applied more
    /// since a lookout's last one would seem to lack what was just read of it.
    pub(super) fn read(&self, server: usize, copy: &Arc<OpenCopy>, line: Standing) {
        let mut found = self.lock();
        // Not if it was given up meanwhile.
        if found.copies[server].as_ref().is_some_and(|current| Arc::ptr_eq(current, copy)) {
            found.choice.sighted(server, copy.is_here(), line, Instant::now());
            drop(found);
            self.changed.notify_all();
        }
    }

    /// A lookout has read the line of a copy.
    pub(super) fn sighted(&self, server: usize, copy: &Arc<OpenCopy>, line: Standing) {
        let mut found = self.lock();
        found.choice.sighted(server, copy.is_here(), line, Instant::now());
        found.copies[server] = Some(Arc::clone(copy));
        found.why[server] = match line.state {
            State::Whole => String::new(),
            _ => "its copy lacks writes".into(),
        };
        drop(found);
        self.changed.notify_all();
    }

    /// A copy cannot be read, or not any more.
    pub(super) fn lost(&self, server: usize, why: String) {
        let mut found = self.lock();
        found.choice.lost(server);
        (found.copies[server], found.why[server]) = (None, why);
        drop(found);
        self.changed.notify_all();
    }

    /// The lookouts end.
    pub(super) fn stop(&self) {
        self.lock().is_stopping = true;
        self.changed.notify_all();
        self.stops.notify_all();
    }

    fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// Sleeps, unless the lookouts are to end. Returns whether they go on.
    fn pause(&self, time: Duration) -> bool {
        let (mut found, until) = (self.lock(), Instant::now() + time);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if found.is_stopping || left.is_zero() {
                return !found.is_stopping;
            }
            found = wait(&self.stops, found, left);
        }
    }
}

fn wait<'a>(of: &Condvar, found: MutexGuard<'a, Found>, limit: Duration) -> MutexGuard<'a, Found> {
    of.wait_timeout(found, limit).map_or_else(|error| error.into_inner().0, |(found, _)| found)
}

impl Found {
    fn why(&self, through: Version) -> String {
        let whys = self.why.iter().enumerate().map(|(server, why)| match why.as_str() {
            "" if self.copies[server].is_some() => {
                format!("server {}: it was not seen for a while, or lacks {through}, which was read before", server + 1)
            }
            "" => format!("server {}: no answer yet", server + 1),
            why => format!("server {}: {why}", server + 1),
        });
        whys.collect::<Vec<_>>().join("; ")
    }
}

/// See the module's text.
pub(super) struct Lookout {
    pub(super) server: usize,
    pub(super) address: Address,
    pub(super) shape: Shape,
    pub(super) options: ReadOnlyOptions,
    pub(super) shared: Arc<Shared>,
    pub(super) counts: Arc<Counts>,
}

impl Lookout {
    /// The thread.
    pub(super) fn run(self) {
        let (mut pause, mut said) = (FIRST_PAUSE, String::new());
        while !self.shared.is_stopping() {
            let why = match self.open() {
                Ok((caller, copy)) => {
                    let transport = copy.transport();
                    let connected_in = copy.took();
                    tracing::info!(server = %self.address, %transport, ?connected_in, "a copy can be read");
                    (pause, said) = (FIRST_PAUSE, String::new());
                    self.watch(&caller, &copy)
                }
                Err(why) => why,
            };
            if why != said && !self.shared.is_stopping() {
                tracing::info!(server = %self.address, why, "a copy cannot be read");
                said.clone_from(&why);
            }
            self.shared.lost(self.server, why);
            if !self.shared.pause(pause) {
                return;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Connects, and is granted the region.
    fn open(&self) -> Result<(Caller, Arc<OpenCopy>), String> {
        let ReadOnlyOptions { security, reads, rdma, limit } = &self.options;
        let caller = Caller::connect(&self.address, security)?;
        let goes_on = || if self.shared.is_stopping() { Err("this process ends".to_owned()) } else { Ok(()) };
        let ask = |call: &Call| {
            self.counts.asked();
            match caller.ask(call, *limit, goes_on)?.0 {
                Reply::Refused { text, .. } => Err(text),
                reply => Ok(reply),
            }
        };
        let Reply::Standing { standing, .. } = ask(&Call::Open { shape: self.shape, mode: Mode::Read, writer: 0 })?
        else {
            return Err(WRONG_ANSWER.into());
        };
        if standing.state == State::Empty {
            return Err("it has no copy of the volume".into());
        }
        let Reply::Attached { session, keys } = ask(&Call::Look)? else { return Err(WRONG_ANSWER.into()) };
        let ways = (reads.transports(), rdma);
        let copy = OpenCopy::open(caller.connection(), (session, &keys), Layout::of(self.shape), ways)?;
        Ok((caller, Arc::new(copy)))
    }

    /// Looks at the copy until it cannot be read any more. Returns why.
    fn watch(&self, caller: &Caller, copy: &Arc<OpenCopy>) -> String {
        loop {
            if let Some(why) = caller.why_over() {
                return why;
            }
            self.counts.looked();
            match copy.line() {
                Ok(line) if line.state == State::Empty => return "its copy is no more".into(),
                Ok(line) => self.shared.sighted(self.server, copy, line),
                Err(ReaderError::TornLine) => {}
                Err(error) => return error.to_string(),
            }
            if !self.shared.pause(SIGHT_EVERY) || copy.is_over() {
                return "its region cannot be read any more".into();
            }
        }
    }
}

const WRONG_ANSWER: &str = "it has answered another question: use the same release on all hosts";

/// A process that was restarted is back after a few of these.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// A server that comes back is read again within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
