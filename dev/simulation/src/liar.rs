//! Liar: the way to a copy whose lender gives wrong bytes.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use remora_fabric::{Completion, Error, Memory, Peer, ReadRequest, View};

/// One in this many reads of a slot brings a wrong byte. Few, so that a reader sees right slots before.
const ONE_IN: u64 = 3;

/// Reads of at least this length are of slots. Shorter ones are of lines and entries, in which readers believe nothing.
const SLOT_READ: u32 = 1024;

/// See the module's text.
pub(super) struct Liar {
    honest: Box<dyn Peer>,
    sink: Arc<Memory>,
    reads: u64,
    /// Where a wrong byte is put when the read of this tag is complete.
    wrong: BTreeMap<u64, u64>,
}

impl Liar {
    /// Reads into this memory.
    pub(super) fn new(honest: Box<dyn Peer>, sink: Arc<Memory>) -> Liar {
        Liar { honest, sink, reads: 0, wrong: BTreeMap::new() }
    }
}

impl Peer for Liar {
    fn depth(&self) -> usize {
        self.honest.depth()
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        let posted = self.honest.post_read(reads)?;
        for read in reads.iter().take(posted).filter(|read| read.length >= SLOT_READ) {
            self.reads += 1;
            if self.reads.is_multiple_of(ONE_IN) {
                self.wrong.insert(read.tag, read.sink_offset + u64::from(read.length / 2));
            }
        }
        Ok(posted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        let before = completions.len();
        let polled = self.honest.poll(completions)?;
        for completion in completions.iter().skip(before) {
            let Some(at) = self.wrong.remove(&completion.tag).filter(|_| completion.result.is_ok()) else { continue };
            let mut byte = [0];
            self.sink.read(at, &mut byte)?;
            self.sink.write(at, &[!byte[0]])?;
        }
        Ok(polled)
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        self.honest.arm()
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {
        self.honest.close();
    }
}
