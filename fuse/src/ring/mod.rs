//! Ring: requests and answers by io_uring, where the kernel has it (Linux 6.14) and its administrator allows it.
//!
//! ```text
//!   process on processor 1 ──▶ queue 1: slot, slot, slot … ──▶ thread 1, on processor 1 ──▶ file system
//!                          ◀────────── committed ───────────────╯ ◀── mailbox ◀── answers of other threads
//! ```
//!
//! The kernel has a queue for each processor and hands a request over on the processor on which it was made, without
//! waking another one. The answer and the wait for the next request are one call of the system.
//!
//! - `queue`: one of them, and its thread. **Start here.** `mailbox`: answers that are given later.
//! - `slot`: memory that the kernel and this process have in turn. `uring`: the system's part. These two have the
//!   unsafe
//!   code.
//!
//! The device is served as well: the kernel sends by it that inodes are forgotten and requests interrupted.
//!
//! A thread that waits in a call of the file system makes the requests of its processor wait, so a file system
//! that does not answer from memory answers later.

use std::io;
use std::sync::Arc;

use remora_memory::Memory;

mod mailbox;
mod queue;
#[allow(unsafe_code)]
mod slot;
#[allow(unsafe_code)]
mod uring;

use crate::abi::LEAST_READ_BYTES;
use crate::negotiation::page_bytes;
use crate::payload::Buffers;
pub(crate) use mailbox::Mailbox;
pub(crate) use queue::Queue;
use slot::Room;

/// The queues of a connection, before they are registered, and the longest request for which they have room.
pub(crate) struct Rings {
    pub(crate) queues: Vec<Queue>,
    pub(crate) most_bytes: u32,
}

impl Rings {
    /// Makes them, with payloads in this memory if it is given.
    ///
    /// # Errors
    /// What the system says, or that the memory is too small.
    pub(crate) fn new(most_bytes: u32, memory: Option<&Arc<Memory>>) -> io::Result<Rings> {
        let processors = processors()?;
        let budget = memory.map_or(MOST_PAYLOAD_BYTES, |memory| memory.length());
        let Some((depth, most_bytes)) = shape(processors, most_bytes, budget) else {
            return Err(io::Error::other(format!(
                "{budget} bytes are too little memory for the payloads of {processors} processors"
            )));
        };
        let room_bytes = u64::from(most_bytes).max(LEAST_READ_BYTES as u64);
        let buffers = Buffers::new(most_bytes as usize);
        let queue = |number: u16| {
            let first = u64::from(number) * depth;
            let rooms = (first..first + depth).map(|room| match memory {
                Some(memory) => Room::provided(memory, room * room_bytes..(room + 1) * room_bytes),
                None => Room::own(room_bytes as usize),
            });
            Queue::new(number, rooms.collect(), Arc::clone(&buffers))
        };
        Ok(Rings { queues: (0..processors).map(queue).collect::<io::Result<_>>()?, most_bytes })
    }
}

/// Slots of each processor, and the longest request, for payloads of that many bytes in all. `None`: it is too little.
fn shape(processors: u16, most_bytes: u32, budget: u64) -> Option<(u64, u32)> {
    let each = budget / u64::from(processors.max(1));
    let room_bytes = u64::from(most_bytes).max(LEAST_READ_BYTES as u64);
    if each >= room_bytes {
        return Some(((each / room_bytes).min(MOST_DEPTH), most_bytes));
    }
    let shorter = u32::try_from(each).ok()? / page_bytes() * page_bytes();
    (shorter >= LEAST_REQUEST_BYTES).then_some((1, shorter))
}

/// Processors that this system may ever have, for each of which the kernel has a queue.
fn processors() -> io::Result<u16> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = list.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<u16>().ok());
    let count = last.and_then(|last| last.checked_add(1));
    count.ok_or_else(|| io::Error::other(format!("the system's list of processors is not understood: {list}")))
}

/// Memory for payloads, at most, if the caller gives none: 64 MiB.
const MOST_PAYLOAD_BYTES: u64 = 64 << 20;

/// Slots of a processor at most: requests that processes have under way there at a time. More wait in the kernel.
const MOST_DEPTH: u64 = 8;

/// On machines with many processors, requests are shorter, but not shorter than this: 64 KiB.
const LEAST_REQUEST_BYTES: u32 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_fit_their_budget() {
        assert_eq!(shape(2, 1 << 20, 64 << 20), Some((8, 1 << 20)));
        assert_eq!(shape(16, 1 << 20, 64 << 20), Some((4, 1 << 20)));
        assert_eq!(shape(128, 1 << 20, 64 << 20), Some((1, 512 << 10)));
        assert_eq!(shape(1024, 1 << 20, 64 << 20), Some((1, 64 << 10)));
        assert_eq!(shape(1025, 1 << 20, 64 << 20), None);
        assert_eq!(shape(2, 4096, 1 << 20), Some((8, 4096)), "in rooms of 8 KiB");
        assert!(processors().is_ok_and(|count| count > 0));
    }
}
