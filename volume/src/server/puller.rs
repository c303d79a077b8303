//! Puller: takes the blocks of a writer's large writes out of its outbox, or out of the staging of the server before
//! this one in a chain.
//!
//! ```text
//!   writer's calls ──▶ Host ── nothing waits ─────────────────────────▶ Slot
//!                        ╰──── a write is being pulled ──▶ queue ──▶ thread: pulls, then as if it were inline ──▶ Slot
//! ```
//!
//! Calls of the connection that arrive behind a pull wait for it, so that they take place and are answered in their
//! order. Nothing else waits. A pulled write is checked and applied as one whose blocks came with it. The thread ends
//! with the connection or the server.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use remora_fabric::{Memory, Pages, Peer, ReadRequest, RegionId, TransportKind};
use remora_messenger::{Connection, Delivery};

use super::answers::{answer, refuse};
use super::budget::{Budget, Grant};
use super::exports::Exports;
use super::upstream::{Link, Upstream};
use crate::lane::{Laid, Lane};
use crate::link::Security;
use crate::message::Holder;
use crate::outbox::{PROGRESS_AT, REACH_LIMIT, REGION_BYTES, has_place};
use crate::rdma::Rdma;
use crate::reader::fetch;
use crate::shape::{BLOCK_BYTES, Shape};
use crate::store::sums;
use crate::version::Version;
use crate::wire::{Call, Cause, Reply};

/// What the host and the thread share.
pub(super) struct Puller {
    queue: Mutex<Queue>,
    changed: Condvar,
    is_over: AtomicBool,
    /// Whether other servers read the staging.
    is_followed: AtomicBool,
    staging: Arc<Memory>,
    /// Its name for other servers, once they can read it.
    region: OnceLock<RegionId>,
    _grant: Grant,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Call, Delivery)>,
    /// The thread does the call before these.
    is_busy: bool,
}

impl Puller {
    pub(super) fn new(budget: &Arc<Budget>) -> Result<Puller, String> {
        let grant = budget.take(REGION_BYTES).ok_or("the server has no memory left to pull into")?;
        let staging = Memory::create("remora-volume-staging", REGION_BYTES, Pages::Small);
        let staging = Arc::new(staging.map_err(|error| error.to_string())?);
        Ok(Puller {
            queue: Mutex::default(),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
            is_followed: AtomicBool::new(false),
            region: OnceLock::new(),
            staging,
            _grant: grant,
        })
    }

    /// Takes a call that must wait. Returns one that need not.
    pub(super) fn queued(&self, call: Call, delivery: Delivery) -> Option<(Call, Delivery)> {
        let mut queue = self.queue();
        let waits = queue.is_busy || !queue.waiting.is_empty() || matches!(call, Call::Pull { .. });
        if !waits {
            return Some((call, delivery));
        }
        // Bounded by the messenger: what waits here keeps its share of what the connection may have received.
        queue.waiting.push_back((call, delivery));
        self.changed.notify_one();
        None
    }

    /// Another server is about to read the staging.
    pub(super) fn follow(&self) -> Option<RegionId> {
        self.is_followed.store(true, Ordering::Release);
        self.region.get().copied()
    }

    /// The connection is over.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.queue().waiting.clear();
        self.changed.notify_all();
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next call that waits; `None` at the end.
    fn next(&self, goes_on: impl Fn() -> bool) -> Option<(Call, Delivery)> {
        let mut queue = self.queue();
        queue.is_busy = false;
        while goes_on() {
            if let Some(next) = queue.waiting.pop_front() {
                queue.is_busy = true;
                return Some(next);
            }
            queue = self.changed.wait_timeout(queue, LOOK_AGAIN).map_or_else(|e| e.into_inner().0, |(queue, _)| queue);
        }
        None
    }
}

/// Does a call, with its blocks.
pub(super) type Perform = dyn Fn(Call, &[u8]) + Send;

/// The thread.
pub(super) struct Pulling {
    pub(super) puller: Arc<Puller>,
    /// The writer's connection, and the volume that it has open.
    pub(super) connection: Connection,
    pub(super) shape: Shape,
    /// This server's name at the writer's exporters, and the keys of the outbox.
    pub(super) session: u64,
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) security: Security,
    /// The transports by which this server reads memory elsewhere.
    pub(super) transports: &'static [TransportKind],
    pub(super) rdma: Rdma,
    pub(super) exports: Arc<Exports>,
    pub(super) is_stopping: Arc<AtomicBool>,
    pub(super) call: Box<Perform>,
}

/// A write whose blocks are elsewhere.
struct Pull<'a> {
    holder: Holder,
    version: Version,
    sums: &'a [u32],
    at: u64,
    source: &'a str,
}

impl Pulling {
    pub(super) fn run(self) {
        // Here, and not by the call that begins this: the staging is registered for RDMA.
        let region = self.exports.export_and_wait(&self.puller.staging);
        if let Some(region) = region {
            let _ = self.puller.region.set(region); // nothing else sets it
        }
        self.serve();
        if let Some(region) = region {
            self.exports.revoke(region);
        }
    }

    fn serve(&self) {
        let laid = self.lane().connect(&self.connection, (self.session, &self.keys), &self.puller.staging);
        let writer = self.connection.peer();
        match &laid {
            Ok(Laid { transport, why, .. }) => {
                tracing::info!(peer = %writer, %transport, why, "a writer's large writes are pulled");
            }
            Err(why) => tracing::info!(peer = %writer, why, "a writer's outbox cannot be reached: it writes inline"),
        }
        let peer = laid.map(|laid| laid.peer);
        let lends = peer.is_ok() && self.puller.region.get().is_some();
        answer(&self.connection, &Reply::Reached { pulls: peer.is_ok(), lends }, Bytes::new());
        let Ok(mut peer) = peer else { return self.refuse_all() };
        let (mut upstream, mut data) = (Upstream::default(), Vec::new());
        while let Some((call, delivery)) = self.puller.next(|| self.goes_on()) {
            let Call::Pull { holder, version, runs, sums, at, source } = call else {
                (self.call)(call, &delivery.data);
                continue;
            };
            let pull = Pull { holder, version, sums: &sums, at, source: &source };
            match self.pull(&mut *peer, &mut upstream, &pull, &mut data) {
                Ok(()) => (self.call)(Call::Write { holder, version, runs, sums }, &data),
                Err((cause, text)) => {
                    refuse(&self.connection, cause, &text);
                    return self.refuse_all();
                }
            }
        }
    }

    fn lane(&self) -> Lane<'_> {
        Lane {
            transports: self.transports,
            rdma: &self.rdma,
            length: REGION_BYTES,
            depth: 4,
            connect_limit: REACH_LIMIT,
            read_limit: PULL_LIMIT,
        }
    }

    /// What arrives after a refusal is not done.
    fn refuse_all(&self) {
        while let Some((call, _)) = self.puller.next(|| self.goes_on()) {
            if matches!(call, Call::Pull { .. }) {
                return refuse(&self.connection, Cause::Misuse, "this server cannot read the writer's outbox");
            }
        }
    }

    fn goes_on(&self) -> bool {
        !self.puller.is_over.load(Ordering::Acquire) && !self.is_stopping.load(Ordering::Acquire)
    }

    /// Brings the blocks of a write into `data`. Those of the outbox are checked by the one who applies them.
    fn pull(
        &self,
        peer: &mut dyn Peer,
        upstream: &mut Upstream,
        pull: &Pull<'_>,
        data: &mut Vec<u8>,
    ) -> Result<(), (Cause, String)> {
        let (at, bytes) = (pull.at, pull.sums.len() * BLOCK_BYTES);
        if !has_place(at, bytes) {
            let text = format!("write {}: the outbox has no {bytes} bytes at {at}", pull.version);
            return Err((Cause::Misuse, text));
        }
        data.resize(bytes, 0);
        if !pull.source.is_empty() {
            match self.pull_along(upstream, pull, data) {
                Ok(()) => return Ok(()),
                Err(why) => tracing::info!(source = pull.source, why, "a write is pulled from its writer instead"),
            }
        }
        let failed = |error: &dyn std::fmt::Display| {
            (Cause::Damaged, format!("write {}: the outbox cannot be read: {error}", pull.version))
        };
        match peer.view() {
            Some(view) => {
                view.read(at, data).map_err(|error| failed(&error))?;
                if self.puller.is_followed.load(Ordering::Acquire) {
                    self.puller.staging.write(at, data).map_err(|error| failed(&error))?;
                }
            }
            None => {
                let request = ReadRequest { tag: 0, offset: at, length: bytes as u32, sink_offset: at };
                fetch(peer, &[request], PULL_LIMIT, || self.goes_on()).map_err(|error| failed(&error))?;
                self.puller.staging.read(at, data).map_err(|error| failed(&error))?;
            }
        }
        self.arrived(pull.version);
        Ok(())
    }

    /// Takes the blocks out of the staging of the server before this one.
    fn pull_along(&self, upstream: &mut Upstream, pull: &Pull<'_>, data: &mut [u8]) -> Result<(), String> {
        let from = upstream.at(pull.source, &|| self.link(pull))?;
        let staging = &self.puller.staging;
        let fetched = from.fetch(staging, pull.version, (pull.at, data.len() as u32), &|| self.goes_on());
        let checked = fetched.and_then(|()| {
            staging.read(pull.at, data).map_err(|error| error.to_string())?;
            let is_right = sums(data).eq(pull.sums.iter().copied());
            if is_right { Ok(()) } else { Err("the blocks there are not those of the write".to_owned()) }
        });
        match checked {
            Ok(()) => self.arrived(pull.version),
            Err(_) => upstream.failed(),
        }
        checked
    }

    fn link(&self, pull: &Pull<'_>) -> Result<Link, String> {
        let goes_on = || self.goes_on();
        Link::open(
            (self.shape, pull.holder),
            pull.source,
            &self.security,
            &self.lane(),
            (&self.puller.staging, &goes_on),
        )
    }

    /// Says to servers that follow that the blocks of a write are in the staging.
    fn arrived(&self, version: Version) {
        let said = self.puller.staging.store_u64(PROGRESS_AT, version.word().to_le(), Ordering::Release);
        debug_assert!(said.is_ok(), "a place in the staging: {said:?}");
    }
}

/// Longest time for a pull: below the time for which a writer waits for a server.
const PULL_LIMIT: Duration = Duration::from_secs(4);

/// How often a thread that waits looks whether it should end.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
