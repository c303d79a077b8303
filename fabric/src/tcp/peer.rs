//! The reader's connection to one region: distributes reads over its lanes, and limits their number and their time. It
//! works on the caller's thread; `lane` moves the bytes.
//!
//! ```text
//!            post_read                                                   poll
//!   reads ──▶ slot ──▶ one part, or one per lane ──▶ lanes ══▶ parts ──▶ slot ──▶ completion
//!             └─ as many as the depth                                      └─ free again
//! ```
//!
//! The descriptor of [`Peer::arm`] is an epoll instance over the lanes' sockets and one timer, so that a caller that
//! only sleeps on it also notices a source that has stopped answering. A retired peer keeps its sockets, shut down:
//! they stay readable, and with them the descriptor, until the peer is dropped.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::event::epoll;

use super::{TcpOptions, lane::Lane, socket, wire::Request};
use crate::{
    Error, Memory, Peer, ReadError, ReadRequest, RegionId, View,
    outstanding::{self, Slots, StallTimer},
    transport::Completion,
};

/// A [`Peer`] over TCP, made by [`TcpConnector`](super::TcpConnector).
pub struct TcpPeer {
    id: RegionId,
    sink: Arc<Memory>,
    lanes: Vec<Lane>,
    slots: Slots,
    next_tag: u64,
    readiness: OwnedFd,
    stall: StallTimer,
    retired: Option<ReadError>,
}

impl TcpPeer {
    /// A peer over lanes whose handshake is complete.
    pub(super) fn new(
        id: RegionId,
        sink: Arc<Memory>,
        lanes: Vec<Lane>,
        options: &TcpOptions,
    ) -> Result<TcpPeer, Error> {
        let readiness =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("creating an epoll instance"))?;
        let stall = StallTimer::new(options.stall_timeout)?;
        let watch = |fd: BorrowedFd<'_>| {
            epoll::add(&readiness, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .map_err(Error::system("watching a data lane"))
        };
        watch(stall.as_fd())?;
        lanes.iter().try_for_each(|lane| watch(lane.stream().as_fd()))?;
        Ok(TcpPeer { id, sink, lanes, slots: Slots::new(options.depth), next_tag: 0, readiness, stall, retired: None })
    }

    /// The congestion control at this end of the lanes, by its kernel name. That of the source, which sends the bytes,
    /// may differ: [`TcpExporter::effective_congestion`](super::TcpExporter::effective_congestion).
    pub fn effective_congestion(&self) -> Option<String> {
        self.lanes.first().and_then(|lane| socket::congestion(lane.stream()).ok())
    }

    /// Splits a read into parts and queues them on lanes.
    fn ask(&mut self, slot: usize, read: &ReadRequest) -> u32 {
        let mut parts = 0;
        for (offset, length) in cut(read, self.lanes.len()) {
            let request = Request { tag: self.next_tag, id: self.id, offset: read.offset.wrapping_add(offset), length };
            self.next_tag += 1;
            let Some(lane) = self.lanes.iter_mut().min_by_key(|lane| lane.outstanding()) else { break };
            lane.ask(request, slot, read.sink_offset + offset);
            parts += 1;
        }
        parts
    }

    /// Sends queued requests. A lane whose socket is full, because the source does not read, is also watched for room.
    fn flush(&mut self) {
        for lane in &mut self.lanes {
            lane.flush();
            let Some(is_clogged) = lane.became_clogged() else { continue };
            let room = if is_clogged { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            // Fails only for a descriptor that is not watched; the stall timer would still expire.
            let flags = epoll::EventFlags::IN | room;
            let changed = epoll::modify(&self.readiness, lane.stream(), epoll::EventData::new_u64(0), flags);
            debug_assert!(changed.is_ok(), "each lane is watched from the beginning");
        }
    }

    /// Receives on each lane in turn, until one fails.
    fn receive(&mut self, completions: &mut Vec<Completion>) -> Result<(), ReadError> {
        let TcpPeer { sink, lanes, slots, stall, .. } = self;
        let budget = POLL_BYTES / lanes.len().max(1);
        for lane in lanes {
            let came = lane.receive(sink, budget, |slot, result| completions.extend(slots.part_done(slot, result)))?;
            if came {
                stall.progress();
            }
        }
        stall.check(!slots.is_empty())
    }

    /// Retires the peer with `error` and closes the lanes.
    fn retire(&mut self, error: ReadError) {
        if self.retired.is_none() {
            self.retired = Some(error);
            self.lanes.iter().for_each(Lane::cut);
        }
    }
}

impl Peer for TcpPeer {
    fn depth(&self) -> usize {
        self.slots.depth()
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        outstanding::admit(reads, &self.sink, self.retired, &self.slots, &mut self.stall)?;
        let mut accepted = 0;
        for read in reads {
            let Some(slot) = self.slots.take(read) else { break };
            let parts = self.ask(slot, read);
            self.slots.set_parts(slot, parts);
            accepted += 1;
        }
        self.flush();
        Ok(accepted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        let before = completions.len();
        if self.retired.is_none() {
            self.flush();
            match self.receive(completions) {
                // Received bytes have made room for held requests.
                Ok(()) => self.flush(),
                Err(error) => self.retire(error),
            }
        }
        if let Some(error) = self.retired {
            completions.extend(self.slots.fail_all(error));
            if completions.len() == before {
                return Err(Error::Retired(error));
            }
        }
        Ok(completions.len() - before)
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        self.stall.settle();
        self.readiness.as_fd()
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {
        self.retire(ReadError::Cancelled);
    }
}

impl Drop for TcpPeer {
    fn drop(&mut self) {
        self.close();
    }
}

/// The parts of a read over `lanes` lanes, as offset in the read and length. A range that overflows is not split: the
/// source denies it.
fn cut(read: &ReadRequest, lanes: usize) -> impl Iterator<Item = (u64, u32)> + use<> {
    let whole = read.length;
    let overflows = read.offset.checked_add(whole.into()).is_none();
    let parts = if overflows { 1 } else { (whole / CUT_BYTES).clamp(1, lanes.max(1) as u32) };
    let length = whole.div_ceil(parts).next_multiple_of(if parts > 1 { PAGE_BYTES } else { 1 }).max(1);
    let begins = (0..parts).map(move |part| part * length).take_while(move |begin| *begin == 0 || *begin < whole);
    begins.map(move |begin| (begin.into(), (whole - begin).min(length)))
}

/// Maximum bytes received per poll: about a millisecond's worth.
const POLL_BYTES: usize = 8 << 20;

/// Minimum size of a part. Below it, the system calls and the wake-up of a second lane cost more than the copy that it
/// takes over.
const CUT_BYTES: u32 = 256 << 10;

/// Parts start at whole pages of the read.
const PAGE_BYTES: u32 = 4096;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_follow_one_another_and_make_the_whole(offset: u64, length: u32, lanes in 1usize..=4) {
            let read = ReadRequest { tag: 0, offset, length, sink_offset: 0 };
            let parts: Vec<_> = cut(&read, lanes).collect();
            prop_assert!((1..=lanes).contains(&parts.len()));
            let mut next = 0;
            for (begin, part) in parts {
                prop_assert_eq!(begin, next);
                next += u64::from(part);
            }
            prop_assert_eq!(next, u64::from(length));
        }
    }

    #[test]
    fn a_range_that_overflows_is_left_whole() {
        let read = ReadRequest { tag: 0, offset: u64::MAX - 10, length: 1 << 20, sink_offset: 0 };
        assert_eq!(cut(&read, 4).collect::<Vec<_>>(), [(0, 1 << 20)]);
    }

    #[test]
    fn a_large_read_is_cut_over_all_lanes_and_a_small_one_is_not() {
        let read = |length| ReadRequest { tag: 0, offset: 0, length, sink_offset: 0 };
        assert_eq!(cut(&read(1 << 20), 4).count(), 4);
        assert_eq!(cut(&read(CUT_BYTES), 4).count(), 1);
        assert_eq!(cut(&read(0), 4).collect::<Vec<_>>(), [(0, 0)]);
    }
}
