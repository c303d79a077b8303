//! A disk in memory, whose history is kept: what is left of it after a failure is any beginning of that.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use remora_volume::client::{Error, Request};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::Run;

use crate::{Disk, DiskDone};

pub(super) struct Memory {
    inner: Mutex<Inner>,
    /// Requests wait for [`Memory::finish`].
    is_later: bool,
}

struct Inner {
    blocks: Vec<u8>,
    /// Of each block, which of the changes it is of.
    changes: Vec<u64>,
    /// Every change and flush.
    history: Vec<Request>,
    waiting: VecDeque<(Request, DiskDone)>,
    reads: usize,
    is_broken: bool,
}

impl Inner {
    fn apply(&mut self, request: &Request) -> Bytes {
        let place = |run: &Run| {
            let at = run.first as usize * BLOCK_BYTES;
            at..at + run.count as usize * BLOCK_BYTES
        };
        match request {
            Request::Write { runs, data } => {
                assert!(runs.len() <= remora_volume::wire::MOST_RUNS, "{} runs", runs.len());
                assert!((1..=remora_volume::wire::MOST_BLOCKS * BLOCK_BYTES).contains(&data.len()));
                let mut data = data.clone();
                for run in runs {
                    self.note(run);
                    let part = data.split_to(run.count as usize * BLOCK_BYTES);
                    self.blocks[place(run)].copy_from_slice(&part);
                }
                assert!(data.is_empty(), "bytes without a block");
            }
            Request::Zero(run) => {
                assert!((1..=remora_volume::wire::MOST_ENTRIES).contains(&(run.count as usize)));
                self.note(run);
                self.blocks[place(run)].fill(0);
            }
            Request::Read(run) => {
                self.reads += 1;
                return Bytes::copy_from_slice(&self.blocks[place(run)]);
            }
            Request::Flush => {}
            Request::Map(_) => unreachable!("not asked for"),
        }
        self.history.push(request.clone());
        Bytes::new()
    }
}

impl Inner {
    fn note(&mut self, run: &Run) {
        let number = self.history.len() as u64 + 1;
        run.blocks().for_each(|block| self.changes[block as usize] = number);
    }
}

impl Memory {
    pub(super) fn new(blocks: u64) -> Arc<Memory> {
        Memory::after(blocks, &[], false)
    }

    /// Requests are not done until [`Memory::finish`].
    pub(super) fn later(blocks: u64, history: &[Request]) -> Arc<Memory> {
        Memory::after(blocks, history, true)
    }

    /// What is left after these changes.
    pub(super) fn after(blocks: u64, history: &[Request], is_later: bool) -> Arc<Memory> {
        let (blocks, changes) = (vec![0; blocks as usize * BLOCK_BYTES], vec![0; blocks as usize]);
        let mut inner =
            Inner { blocks, changes, history: Vec::new(), waiting: VecDeque::new(), reads: 0, is_broken: false };
        history.iter().for_each(|request| _ = inner.apply(request));
        Arc::new(Memory { inner: Mutex::new(inner), is_later })
    }

    pub(super) fn history(&self) -> Vec<Request> {
        self.inner.lock().unwrap().history.clone()
    }

    pub(super) fn reads(&self) -> usize {
        self.inner.lock().unwrap().reads
    }

    /// Puts garbage into blocks, as another program would have left it.
    pub(super) fn dirty(&self, block: u64) {
        self.inner.lock().unwrap().blocks[block as usize * BLOCK_BYTES..][..BLOCK_BYTES].fill(0xdd);
    }

    /// Reads a block as another host does, without a request. Returns which of the changes it is of.
    pub(super) fn peek(&self, block: u64, into: &mut [u8]) -> u64 {
        let (at, inner) = (block as usize * BLOCK_BYTES, self.inner.lock().unwrap());
        into.copy_from_slice(&inner.blocks[at..at + into.len()]);
        inner.changes[block as usize]
    }

    /// How many changes there were.
    pub(super) fn changes(&self) -> u64 {
        self.inner.lock().unwrap().history.len() as u64
    }

    pub(super) fn break_down(&self) {
        self.inner.lock().unwrap().is_broken = true;
    }

    pub(super) fn waiting(&self) -> usize {
        self.inner.lock().unwrap().waiting.len()
    }

    /// The first of the requests that wait fails, and all after it.
    pub(super) fn fail(&self) {
        self.break_down();
        let waiting = std::mem::take(&mut self.inner.lock().unwrap().waiting);
        waiting.into_iter().for_each(|(_, done)| done(Err(Error::Closed)));
    }

    /// Does the first of the requests that wait. Returns whether there was one.
    pub(super) fn finish(&self) -> bool {
        let mut inner = self.inner.lock().unwrap();
        let Some((request, done)) = inner.waiting.pop_front() else { return false };
        let data = inner.apply(&request);
        drop(inner);
        done(Ok(data));
        true
    }
}

impl Disk for Memory {
    fn blocks(&self) -> u64 {
        (self.inner.lock().unwrap().blocks.len() / BLOCK_BYTES) as u64
    }

    fn submit(&self, request: Request, done: DiskDone) {
        let mut inner = self.inner.lock().unwrap();
        if inner.is_broken {
            drop(inner);
            return done(Err(Error::Closed));
        }
        if self.is_later {
            return inner.waiting.push_back((request, done));
        }
        let data = inner.apply(&request);
        drop(inner);
        done(Ok(data));
    }

    fn try_read(&self, run: Run) -> Option<Bytes> {
        (!self.is_later).then(|| self.inner.lock().unwrap().apply(&Request::Read(run)))
    }
}
