//! The reader's data path: the result of a read is drawn when it is posted, and delivered as virtual time passes.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::event::{EventfdFlags, eventfd};

use super::{faults::Faults, random::Random};
use crate::{
    error::{Denial, Error, ReadError},
    memory::{self, Memory, View},
    transport::{Completion, Peer, ReadRequest},
};

/// A simulated connection to one region.
pub struct SimPeer {
    lane: Arc<Mutex<Lane>>,
    sink: Arc<Memory>,
    /// The lane's signal, also held here so that it can be borrowed without the lock.
    signal: Arc<OwnedFd>,
}

/// What peer and exporter share: the exporter must be able to end it.
pub(super) struct Lane {
    region: Arc<Memory>,
    sink: Arc<Memory>,
    served: Arc<AtomicU64>,
    faults: Faults,
    random: Random,
    /// Virtual time: polls so far.
    step: u64,
    outstanding: Vec<Outstanding>,
    retired: Option<ReadError>,
    /// An eventfd that holds 1 while there is something to poll for.
    signal: Arc<OwnedFd>,
    signalled: bool,
}

/// What a new peer gets from its source.
pub(super) struct Admission {
    pub(super) memory: Arc<Memory>,
    pub(super) served: Arc<AtomicU64>,
}

/// An outstanding read, with its result.
struct Outstanding {
    read: ReadRequest,
    /// The step at which it completes.
    due: u64,
    /// The answer is lost: the read fails at its step.
    lost: bool,
    early: Option<Early>,
}

/// The part of a torn read that was taken when it was posted: bytes of the region from `at`, counted from the start of
/// the read.
struct Early {
    at: u64,
    bytes: Vec<u8>,
}

impl SimPeer {
    pub(super) fn new(lane: Lane, sink: Arc<Memory>) -> Result<(SimPeer, Arc<Mutex<Lane>>), Error> {
        let signal = lane.signal.clone();
        let lane = Arc::new(Mutex::new(lane));
        Ok((SimPeer { lane: lane.clone(), sink, signal }, lane))
    }

    fn lane(&self) -> MutexGuard<'_, Lane> {
        self.lane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peer for SimPeer {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        let mut lane = self.lane();
        if let Some(end) = lane.retired {
            return Err(Error::Retired(end));
        }
        for read in reads {
            memory::check(read.sink_offset, u64::from(read.length), self.sink.length())?;
        }
        let accepted = reads.len().min(DEPTH - lane.outstanding.len());
        for read in reads.iter().take(accepted) {
            lane.schedule(*read);
        }
        lane.update_signal();
        Ok(accepted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        let before = completions.len();
        let mut lane = self.lane();
        lane.advance(completions);
        lane.update_signal();
        match (completions.len() - before, lane.retired) {
            (0, Some(end)) => Err(Error::Retired(end)),
            (count, _) => Ok(count),
        }
    }

    /// Readable as long as anything is outstanding: only polling makes virtual time pass.
    fn arm(&mut self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }

    /// None: a simulated network is a network.
    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {
        self.lane().retire(ReadError::Cancelled);
    }
}

impl Lane {
    pub(super) fn new(admission: Admission, sink: Arc<Memory>, faults: Faults, random: Random) -> Result<Lane, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let signal = Arc::new(eventfd(0, flags).map_err(Error::system("creating an eventfd"))?);
        let Admission { memory: region, served } = admission;
        let outstanding = Vec::with_capacity(DEPTH);
        Ok(Lane { region, sink, served, faults, random, step: 0, outstanding, retired: None, signal, signalled: false })
    }

    /// Ends the connection, unless it has already ended.
    pub(super) fn retire(&mut self, why: ReadError) {
        self.retired.get_or_insert(why);
        self.update_signal();
    }

    /// Draws the result of a read.
    fn schedule(&mut self, read: ReadRequest) {
        let lost = self.random.happens(self.faults.lost_answer);
        let delay = self.random.within(&self.faults.delay_steps);
        let wait = if lost { Faults::TIMEOUT_STEPS } else { u64::from(delay) };
        let torn = self.random.happens(self.faults.torn_read);
        let early = if torn { self.take_early(&read) } else { None };
        self.outstanding.push(Outstanding { read, due: self.step + wait, lost, early });
    }

    /// Takes the beginning or the end of a read now; the rest is taken when it completes.
    fn take_early(&mut self, read: &ReadRequest) -> Option<Early> {
        let cut = self.random.below(u64::from(read.length) + 1);
        let (at, length) = match self.random.below(2) {
            0 => (0, cut),
            _ => (cut, u64::from(read.length) - cut),
        };
        let mut bytes = vec![0; usize::try_from(length).ok()?];
        self.region.read(read.offset.checked_add(at)?, &mut bytes).ok()?;
        Some(Early { at, bytes })
    }

    /// One step of virtual time.
    fn advance(&mut self, completions: &mut Vec<Completion>) {
        self.step += 1;
        self.inject_faults();
        if self.retired.is_none() {
            let step = self.step;
            let mut due: Vec<Outstanding> = self.outstanding.extract_if(.., |read| read.due <= step).collect();
            if self.faults.shuffle {
                self.random.shuffle(&mut due);
            }
            for read in due {
                completions.push(self.complete(read));
            }
        }
        if let Some(end) = self.retired {
            for read in std::mem::take(&mut self.outstanding) {
                completions.push(self.fail(read, end));
            }
        }
    }

    /// Draws faults of the connection.
    fn inject_faults(&mut self) {
        if self.outstanding.is_empty() {
            return;
        }
        if self.random.happens(self.faults.lost_peer) {
            self.retired.get_or_insert(ReadError::PeerGone);
        }
        if self.random.happens(self.faults.revoked_region) {
            self.retired.get_or_insert(ReadError::Denied(Denial::Revoked));
        }
    }

    fn complete(&mut self, outstanding: Outstanding) -> Completion {
        // An earlier read of this step has ended the connection.
        if let Some(end) = self.retired {
            return self.fail(outstanding, end);
        }
        if outstanding.lost {
            self.retired = Some(ReadError::TimedOut);
            return self.fail(outstanding, ReadError::TimedOut);
        }
        let read = outstanding.read;
        let arrived = self.deliver(&outstanding);
        Completion { tag: read.tag, result: arrived.map(|()| read.length).map_err(|_| OUT_OF_BOUNDS) }
    }

    /// Copies the bytes to the sink: the present ones, except those taken early.
    fn deliver(&self, Outstanding { read, early, .. }: &Outstanding) -> Result<(), Error> {
        let length = u64::from(read.length);
        memory::check(read.offset, length, self.region.length())?;
        self.region.copy_to(read.offset..read.offset + length, &self.sink, read.sink_offset)?;
        if let Some(Early { at, bytes }) = early {
            self.sink.write(read.sink_offset + at, bytes)?;
        }
        self.served.fetch_add(length, Ordering::Relaxed);
        Ok(())
    }

    /// A failed read may have written anything to its place: half of the time garbage is written to part of it.
    fn fail(&mut self, outstanding: Outstanding, why: ReadError) -> Completion {
        let read = outstanding.read;
        let rubbish = self.random.below(u64::from(read.length) + 1);
        if self.random.below(2) == 0 {
            let byte = self.random.next() as u8;
            // The place was checked when the read was posted.
            let filled = self.sink.fill(read.sink_offset..read.sink_offset + rubbish, byte);
            debug_assert!(filled.is_ok());
        }
        Completion { tag: read.tag, result: Err(why) }
    }

    /// Makes the signal readable while there is something to poll for.
    fn update_signal(&mut self) {
        let has_work = !self.outstanding.is_empty() || self.retired.is_some();
        if has_work == self.signalled {
            return;
        }
        let done = if has_work {
            rustix::io::write(&self.signal, &1u64.to_ne_bytes())
        } else {
            rustix::io::read(&self.signal, &mut [0u8; 8])
        };
        // An eventfd that holds 0 can always be written, and one that holds 1 can always be read.
        debug_assert_eq!(done, Ok(8));
        self.signalled = has_work;
    }
}

const OUT_OF_BOUNDS: ReadError = ReadError::Denied(Denial::OutOfBounds);

/// Maximum number of outstanding reads, as for a usual queue pair.
const DEPTH: usize = 16;
