//! The reader's connection to one region: distributes reads over its queue pairs, limits their number and their time,
//! and waits. It works on the caller's thread.
//!
//! ```text
//!            post_read                                                   poll
//!   reads ──▶ slot ──▶ pieces ──▶ lanes ═══ READ ═══▶ the card ──▶ lanes ──▶ slot ──▶ completion
//!     │       └─ as many as the depth                                         └─ free again
//!     └─ outside the region, or empty: answered here, since the card would end the connection for it
//! ```
//!
//! The descriptor of [`Peer::arm`] is an epoll instance over completion channels, connections, devices, one timer, and
//! an eventfd for what is known already. Completions that are found while it is armed are kept in `found`.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, epoll, eventfd};

use super::{
    CompletionMode, VerbsOptions,
    lane::{Lane, Piece},
};
use crate::{
    Completion, Denial, Error, Memory, Peer, ReadError, ReadRequest, View, memory,
    outstanding::{self, Slots, StallTimer},
    transport::wait_readable,
};

/// A [`Peer`] over RDMA, made by [`VerbsConnector`](super::VerbsConnector).
pub struct VerbsPeer {
    /// Length of the region in bytes.
    length: u64,
    sink: Arc<Memory>,
    lanes: Vec<Lane>,
    slots: Slots,
    piece_bytes: u32,
    mode: CompletionMode,
    poll_time: Duration,
    readiness: OwnedFd,
    known: OwnedFd,
    is_known: bool,
    found: Vec<Completion>,
    /// Polls since the clock was read, and the time when events were last checked.
    polls: u32,
    looked: Instant,
    armed: bool,
    stall: StallTimer,
    retired: Option<ReadError>,
}

impl VerbsPeer {
    /// A peer over lanes whose handshake is complete.
    pub(super) fn new(
        length: u64,
        sink: Arc<Memory>,
        lanes: Vec<Lane>,
        options: &VerbsOptions,
    ) -> Result<VerbsPeer, Error> {
        let readiness =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("creating an epoll instance"))?;
        let known =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("creating an eventfd"))?;
        let stall = StallTimer::new(options.stall_timeout)?;
        let watch = |fd: BorrowedFd<'_>| {
            match epoll::add(&readiness, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN) {
                // Two lanes use one device.
                Err(rustix::io::Errno::EXIST) => Ok(()),
                other => other.map_err(Error::system("watching an RDMA connection")),
            }
        };
        watch(known.as_fd())?;
        watch(stall.as_fd())?;
        for lane in &lanes {
            lane.descriptors().into_iter().try_for_each(watch)?;
            watch(lane.device().as_fd())?;
        }
        Ok(VerbsPeer {
            length,
            sink,
            lanes,
            slots: Slots::new(options.depth),
            piece_bytes: options.piece_bytes,
            mode: options.completion,
            poll_time: options.poll_time,
            readiness,
            known,
            is_known: false,
            found: Vec::new(),
            polls: 0,
            looked: Instant::now(),
            armed: false,
            stall,
            retired: None,
        })
    }

    /// The names of the devices that it reads by, one per queue pair.
    pub fn devices(&self) -> Vec<String> {
        self.lanes.iter().map(|lane| lane.device().name().to_owned()).collect()
    }

    /// Changes the length that reads are checked against, for tests of the source's card.
    #[cfg(test)]
    pub(super) fn set_length(&mut self, length: u64) {
        self.length = length;
    }

    /// Makes the remote keys invalid, for tests.
    #[cfg(test)]
    pub(super) fn spoil_keys(&mut self) {
        self.lanes.iter_mut().for_each(Lane::spoil_key);
    }

    /// Posts a WRITE of the sink's bytes to the same place in the region, for tests.
    #[cfg(test)]
    pub(super) fn post_write(&mut self, offset: u64, length: u32) {
        self.lanes[0].post_write(offset, length);
    }

    /// Requests that its queue pairs have posted.
    #[cfg(test)]
    pub(super) fn requests_posted(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.requests_posted).sum()
    }

    /// The card's attributes of its first queue pair.
    #[cfg(test)]
    pub(super) fn attributes(&self, mask: u32) -> remora_rdma::bindings::ibv_qp_attr {
        self.lanes[0].pair().attributes(mask)
    }

    /// What the READs of its first queue pair name.
    #[cfg(test)]
    pub(super) fn remote(&self) -> super::lane::Remote {
        self.lanes[0].remote()
    }

    /// Splits a read into pieces, and gives each to the lane with the fewest outstanding bytes.
    fn ask(&mut self, slot: usize, read: &ReadRequest) -> u32 {
        let mut pieces = 0;
        for (begin, length) in cut(read.length, self.piece_bytes) {
            let piece = Piece { slot, offset: read.offset + begin, length, sink_offset: read.sink_offset + begin };
            let Some(lane) = self.lanes.iter_mut().min_by_key(|lane| lane.outstanding()) else { break };
            lane.ask(piece);
            pieces += 1;
        }
        pieces
    }

    fn flush(&mut self) -> Result<(), ReadError> {
        self.lanes.iter_mut().try_for_each(Lane::flush)
    }

    /// Takes completions of each lane into `found`, and posts the pieces for which there is room now.
    fn receive(&mut self) -> Result<usize, ReadError> {
        let VerbsPeer { lanes, slots, found, stall, .. } = self;
        let mut came = 0;
        for lane in lanes.iter_mut() {
            let count = lane.receive(POLL_BUDGET, |slot| found.extend(slots.part_done(slot, Ok(()))))?;
            if count > 0 {
                stall.progress();
                lane.flush()?;
            }
            came += count;
        }
        Ok(came)
    }

    /// Takes completions, and now and then checks everything else. System calls in each poll, and even reading the
    /// clock, would cost more than the poll itself.
    fn work(&mut self) -> Result<(), ReadError> {
        let came = self.receive()?;
        self.polls += 1;
        if self.armed || self.polls >= POLLS_PER_CLOCK { self.look(came) } else { Ok(()) }
    }

    /// Handles events, if the caller has slept for them or enough time has passed, and detects stalls.
    fn look(&mut self, came: usize) -> Result<(), ReadError> {
        self.polls = 0;
        let now = Instant::now();
        let pace = if came == 0 { LOOK_PACE } else { LOOK_AT_LEAST };
        if std::mem::take(&mut self.armed) || now.duration_since(self.looked) >= pace {
            self.looked = now;
            self.lanes.iter().try_for_each(Lane::look)?;
        }
        self.stall.check_at(now, !self.slots.is_empty())
    }

    /// Works, and retires the peer on failure.
    fn work_or_retire(&mut self) {
        if self.retired.is_none()
            && let Err(error) = self.work()
        {
            self.retire(error);
        }
    }

    /// Polls for a while, if the mode says so and reads are outstanding; then arms the completion queues.
    fn prepare_to_sleep(&mut self) -> Result<(), ReadError> {
        self.stall.settle();
        if self.mode == CompletionMode::PollThenArm && !self.slots.is_empty() {
            let until = Instant::now() + self.poll_time;
            let mut polls = 0_u32;
            while self.found.is_empty() && (!polls.is_multiple_of(POLLS_PER_CLOCK) || Instant::now() < until) {
                self.receive()?;
                polls += 1;
                std::hint::spin_loop();
            }
        }
        if self.found.is_empty() {
            self.lanes.iter().try_for_each(Lane::arm)?;
            self.armed = true;
            // Completions that arrived before the queue was armed are not announced.
            self.receive()?;
        }
        Ok(())
    }

    /// Whether the caller already has something to take. If not, it may sleep: everything that arrives is announced.
    fn knows_something(&mut self) -> bool {
        if self.retired.is_none()
            && self.found.is_empty()
            && let Err(error) = self.prepare_to_sleep()
        {
            self.retire(error);
        }
        self.retired.is_some() || !self.found.is_empty()
    }

    /// Polls until there is a completion or the time is over, for the mode that never sleeps.
    fn spin(&mut self, timeout: Duration) {
        let (mut begun, mut polls) = (None, 0_u32);
        loop {
            self.work_or_retire();
            polls += 1;
            let over =
                polls.is_multiple_of(POLLS_PER_CLOCK) && begun.get_or_insert_with(Instant::now).elapsed() >= timeout;
            if over || timeout.is_zero() || !self.found.is_empty() || self.retired.is_some() {
                return;
            }
            // For machines with fewer processors than pollers; rarely, because a yield costs more than a poll.
            if polls.is_multiple_of(POLLS_PER_YIELD) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }

    /// Makes the eventfd readable if something is known already.
    fn show(&mut self, is_known: bool) {
        if self.is_known == is_known {
            return;
        }
        self.is_known = is_known;
        // Neither can fail: the counter is 0 or 1.
        if is_known {
            let _ = rustix::io::write(&self.known, &1u64.to_ne_bytes());
        } else {
            let _ = rustix::io::read(&self.known, &mut [0; 8]);
        }
    }

    /// Retires the peer with `error` and destroys the queue pairs.
    fn retire(&mut self, error: ReadError) {
        if self.retired.is_none() {
            self.retired = Some(error);
            self.lanes.iter_mut().for_each(Lane::end);
            self.found.extend(self.slots.fail_all(error));
        }
    }

    /// Answers reads that no card can do: a range outside the region, or an empty one.
    fn judge(&self, read: &ReadRequest) -> Option<Completion> {
        let result = match memory::check(read.offset, read.length.into(), self.length) {
            Err(_) => Err(ReadError::Denied(Denial::OutOfBounds)),
            Ok(()) if read.length == 0 => Ok(0),
            Ok(()) => return None,
        };
        Some(Completion { tag: read.tag, result })
    }
}

impl Peer for VerbsPeer {
    fn depth(&self) -> usize {
        self.slots.depth()
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        outstanding::admit(reads, &self.sink, self.retired, &self.slots, &mut self.stall)?;
        let mut accepted = 0;
        for read in reads {
            if self.found.len() >= self.slots.depth() {
                break;
            }
            if let Some(completion) = self.judge(read) {
                self.found.push(completion);
            } else {
                let Some(slot) = self.slots.take(read) else { break };
                let pieces = self.ask(slot, read);
                self.slots.set_parts(slot, pieces);
            }
            accepted += 1;
        }
        if let Err(error) = self.flush() {
            self.retire(error);
        }
        Ok(accepted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        // Completions that a wait has found are returned first: it has just checked everything.
        if self.found.is_empty() {
            self.work_or_retire();
        }
        let count = self.found.len();
        completions.append(&mut self.found);
        match self.retired {
            Some(error) if count == 0 => return Err(Error::Retired(error)),
            // It stays readable, because the end is still to be reported.
            Some(_) => self.show(true),
            None => self.show(false),
        }
        Ok(count)
    }

    /// Needs no system call if the completion has arrived, or arrives while polling.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        if self.mode == CompletionMode::Polling {
            self.spin(timeout);
        } else if !self.knows_something() {
            wait_readable(self.readiness.as_fd(), timeout)?;
        }
        Ok(())
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        // A caller that also sleeps on other descriptors cannot be kept from sleeping: in the mode that never sleeps,
        // it is woken immediately.
        let known = self.mode == CompletionMode::Polling || self.knows_something();
        self.show(known);
        self.readiness.as_fd()
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {
        self.retire(ReadError::Cancelled);
    }
}

impl Drop for VerbsPeer {
    fn drop(&mut self) {
        self.close();
    }
}

/// The pieces of a read of `length` bytes, as offset in the read and length.
fn cut(length: u32, piece_bytes: u32) -> impl Iterator<Item = (u64, u32)> {
    let begins = (0..length).step_by(piece_bytes.max(1) as usize);
    begins.map(move |begin| (begin.into(), (length - begin).min(piece_bytes)))
}

/// Completions that one poll takes from one lane: 16 MiB of whole pieces.
const POLL_BUDGET: usize = 64;

/// Polls of an idle queue between two reads of the clock: a microsecond or two, which is what reading the clock costs
/// if it is a device.
const POLLS_PER_CLOCK: u32 = 64;

/// Polls between two yields: some 100 µs, so that on a busy machine a system call is not part of every read.
const POLLS_PER_YIELD: u32 = 4096;

/// Intervals at which a poll without completions, and one with completions, checks connections and devices. It takes
/// three system calls, which must not be part of every read; a sleeping caller is woken for these events.
const LOOK_PACE: Duration = Duration::from_millis(1);
const LOOK_AT_LEAST: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_follow_one_another_and_make_the_whole(length in 1u32..100_000_000, piece in 1u32..2000) {
            let piece = piece * 4096;
            let mut next = 0;
            for (begin, length) in cut(length, piece) {
                prop_assert_eq!(begin, next);
                prop_assert!(length <= piece && length > 0);
                next += u64::from(length);
            }
            prop_assert_eq!(next, u64::from(length));
        }
    }
}
