//! Image: all blocks of a disk as one file, for another file system in it.
//!
//! A write of a part of a block reads the block first. Writes are put in their order under a lock, which such a write
//! holds meanwhile: so parts of one block undo nothing of each other.

use std::ops::Range;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use remora_volume::client::{Error, Request};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::{MOST_BLOCKS, MOST_ENTRIES, Run};

use crate::FilesError;
use crate::core::has_no_files;
use crate::disk::{BLOCK, Disk, DiskDone, Gate, MOST_BYTES, Outgoing, Visits, blocks_of};

/// The image of a disk that this process has open for writing. It is dropped by a thread that is not the disk's.
pub struct Image {
    disk: Arc<dyn Disk>,
    outgoing: Arc<Outgoing>,
    gate: Arc<Gate>,
    visits: Arc<Visits>,
    order: Mutex<()>,
}

impl Image {
    /// Opens it.
    ///
    /// # Errors
    /// [`FilesError::HasFiles`]: writes would destroy the files in it.
    pub fn open(disk: Arc<dyn Disk>) -> Result<Image, FilesError> {
        let visits = Arc::<Visits>::default();
        let outgoing = Outgoing::new(&disk, &visits);
        let image = Image { disk, outgoing, gate: Gate::new(MOST_BYTES), visits, order: Mutex::default() };
        has_no_files(&image.block(0)?)?;
        Ok(image)
    }

    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.disk.blocks() * BLOCK
    }

    /// Reads bytes, into pieces that follow each other; less at its end.
    pub fn read(&self, offset: u64, length: u32, done: impl FnOnce(Result<Vec<Bytes>, FilesError>) + Send + 'static) {
        let range = offset.min(self.size())..offset.saturating_add(length.into()).min(self.size());
        let run = match run_of(&range, MOST_BLOCKS) {
            Ok(run) if !range.is_empty() => run,
            Ok(_) => return done(Ok(Vec::new())),
            Err(error) => return done(Err(error)),
        };
        let skipped = (range.start % BLOCK) as usize;
        let asked = skipped..skipped + (range.end - range.start) as usize;
        // What is on its way to the disk is not there yet.
        if self.outgoing.is_empty()
            && let Some(data) = self.disk.try_read(run)
        {
            return done(Ok(vec![data.slice(asked)]));
        }
        self.submit([Request::Read(run)], move |result| {
            done(result.map(|data| vec![data.slice(asked)]).map_err(FilesError::Disk));
        });
    }

    /// Writes all of these bytes.
    pub fn write(&self, offset: u64, data: Bytes, done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        let range = offset..offset.saturating_add(data.len() as u64);
        let run = match run_of(&range, MOST_BLOCKS) {
            _ if data.is_empty() => return done(Ok(())),
            Ok(_) if range.end > self.size() => return done(Err(FilesError::Names(crate::names::NamesError::NoSpace))),
            Ok(run) => run,
            Err(error) => return done(Err(error)),
        };
        if let Err(error) = self.disk.has_space() {
            return done(Err(FilesError::Disk(error)));
        }
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let whole = match self.around(&range, data) {
            Ok(whole) => whole,
            Err(error) => {
                drop(order);
                return done(Err(error));
            }
        };
        self.submit([Request::write(run.first, whole)], |result| done(result.map(drop).map_err(FilesError::Disk)));
        drop(order);
    }

    /// Makes bytes zeros. Of whole blocks, none is sent.
    pub fn zero(&self, offset: u64, length: u64, done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        let range = offset..offset.saturating_add(length).min(self.size());
        let whole = range.start.div_ceil(BLOCK)..range.end / BLOCK;
        if whole.is_empty() {
            let length = range.end.saturating_sub(range.start) as usize; // less than two blocks
            return self.write(offset, Bytes::from(vec![0; length]), done);
        }
        if let Err(error) = self.disk.has_space() {
            return done(Err(FilesError::Disk(error)));
        }
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let mut requests = Vec::new();
        for part in [range.start..whole.start * BLOCK, whole.end * BLOCK..range.end] {
            if part.is_empty() {
                continue;
            }
            let zeros = Bytes::from(vec![0; (part.end - part.start) as usize]);
            match self.around(&part, zeros) {
                Ok(block) => requests.push(Request::write(part.start / BLOCK, block)),
                Err(error) => {
                    drop(order);
                    return done(Err(error));
                }
            }
        }
        requests.extend(whole.clone().step_by(MOST_ENTRIES).map(|first| {
            let count = (whole.end - first).min(MOST_ENTRIES as u64) as u32;
            Request::Zero(Run { first, count })
        }));
        self.submit(requests, |result| done(result.map(drop).map_err(FilesError::Disk)));
        drop(order);
    }

    /// Waits until all that was acknowledged is as safe as the volume makes it.
    pub fn flush(&self, done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        self.submit([Request::Flush], |result| done(result.map(drop).map_err(FilesError::Disk)));
    }

    /// Submits requests in this order. `done` is called with the result of the last one: those before it are done then,
    /// as each copy does them in their order, or the volume has ended.
    fn submit(
        &self,
        requests: impl IntoIterator<Item = Request>,
        done: impl FnOnce(Result<Bytes, Error>) + Send + 'static,
    ) {
        let mut requests: Vec<_> = requests.into_iter().collect();
        let Some(last) = requests.pop() else { return done(Ok(Bytes::new())) };
        let room = REQUEST_BYTES + bytes_of(&last);
        self.gate.enter(room);
        let (gate, visits) = (Arc::clone(&self.gate), Arc::clone(&self.visits));
        let answered: DiskDone = Box::new(move |result| {
            gate.leave(room);
            done(if visits.is_over() { Err(Error::Closed) } else { result });
        });
        if self.visits.is_over() {
            return answered(Err(Error::Closed));
        }
        for request in requests {
            self.outgoing.put(request, Box::new(|_| {})); // the last one fails as well
        }
        self.outgoing.put(last, answered);
        self.outgoing.submit();
    }

    /// The blocks in which these bytes are, with the bytes.
    fn around(&self, range: &Range<u64>, data: Bytes) -> Result<Bytes, FilesError> {
        let blocks = blocks_of(range);
        if range.start.is_multiple_of(BLOCK) && range.end.is_multiple_of(BLOCK) {
            return Ok(data);
        }
        let mut whole = BytesMut::zeroed((blocks.end - blocks.start) as usize * BLOCK_BYTES);
        let (first, last) = (blocks.start, blocks.end - 1);
        if !range.start.is_multiple_of(BLOCK) || first == last {
            whole[..BLOCK_BYTES].copy_from_slice(&self.block(first)?);
        }
        if first != last && !range.end.is_multiple_of(BLOCK) {
            let at = whole.len() - BLOCK_BYTES;
            whole[at..].copy_from_slice(&self.block(last)?);
        }
        let at = (range.start % BLOCK) as usize;
        whole[at..at + data.len()].copy_from_slice(&data);
        Ok(whole.freeze())
    }

    /// A block, after everything that was put before. Waits for it.
    fn block(&self, first: u64) -> Result<Bytes, FilesError> {
        let (told, is_told) = mpsc::sync_channel(1);
        self.outgoing.put(Request::Read(Run { first, count: 1 }), Box::new(move |result| _ = told.send(result)));
        self.outgoing.submit();
        loop {
            match is_told.recv_timeout(LOOK_AGAIN) {
                Ok(result) => return result.map_err(FilesError::Disk),
                Err(RecvTimeoutError::Timeout) if !self.visits.is_over() => {}
                Err(_) => return Err(FilesError::Disk(Error::Closed)),
            }
        }
    }

    /// From now on no call waits for the disk, and every call fails.
    pub fn close(&self) {
        self.visits.end(|| self.gate.close());
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.close();
    }
}

/// The blocks in which these bytes are.
fn run_of(range: &Range<u64>, most: usize) -> Result<Run, FilesError> {
    let blocks = blocks_of(range);
    match u32::try_from(blocks.end - blocks.start) {
        Ok(count) if count as usize <= most => Ok(Run { first: blocks.start, count }),
        _ => Err(FilesError::Length),
    }
}

fn bytes_of(request: &Request) -> usize {
    match request {
        Request::Write { data, .. } => data.len(),
        Request::Read(run) => run.count as usize * BLOCK_BYTES,
        _ => 0,
    }
}

/// Room that a request takes at the gate beside its bytes.
const REQUEST_BYTES: usize = 4 << 10;

/// How often a call that waits for a block checks whether the image is closed.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
