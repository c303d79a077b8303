//! The requests of a link that are on the card's queue.

use std::collections::VecDeque;

use super::device::Chunk;

/// Requests on the queue, the oldest first: a card completes them in this order.
#[derive(Default)]
pub(super) struct Requests {
    posted: VecDeque<Posted>,
    last_name: u64,
    /// Requests posted since the last signaled one.
    unsignaled: u32,
}

/// A request on the queue.
pub(super) struct Posted {
    name: u64,
    /// The memory that it uses.
    pub(super) memory: Option<Chunk>,
    pub(super) is_read: bool,
}

impl Requests {
    /// Whether the queue, which takes `depth` requests, takes another one.
    pub(super) fn has_room(&self, depth: u32) -> bool {
        self.posted.len() < depth as usize
    }

    /// A name for the next request.
    pub(super) fn name(&mut self) -> u64 {
        self.last_name += 1;
        self.last_name
    }

    /// Whether the next message is signaled: if memory waits for its completion, and regularly, so that the queue,
    /// which takes `depth` requests, empties.
    pub(super) fn is_signaled(&mut self, has_memory: bool, depth: u32) -> bool {
        let signaled = has_memory || self.unsignaled + 1 >= depth / SIGNALED_PER_QUEUE;
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        signaled
    }

    /// Notes a message that was posted, and the memory that it uses.
    pub(super) fn post_send(&mut self, name: u64, memory: Option<Chunk>) {
        self.posted.push_back(Posted { name, memory, is_read: false });
    }

    /// Notes a READ that was posted into `memory`. It is signaled.
    pub(super) fn post_read(&mut self, name: u64, memory: Chunk) {
        self.posted.push_back(Posted { name, memory: Some(memory), is_read: true });
        self.unsignaled = 0;
    }

    /// Takes the oldest request, if the completion of `name` completes it too.
    pub(super) fn pop_completed(&mut self, name: u64) -> Option<Posted> {
        let is_completed = self.posted.front().is_some_and(|posted| posted.name <= name);
        if is_completed { self.posted.pop_front() } else { None }
    }

    /// The memory of all requests. The queue must be retired with it.
    pub(super) fn take_memory(&mut self) -> impl Iterator<Item = Chunk> {
        self.posted.drain(..).filter_map(|posted| posted.memory)
    }
}

/// Signaled requests per turn of a queue, among messages that need no signal.
const SIGNALED_PER_QUEUE: u32 = 4;
