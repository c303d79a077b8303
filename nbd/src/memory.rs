//! Memory: a device in this process's memory. What was never written, or trimmed, has none.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::device::{Answer, Device, Payload};
use crate::export::Geometry;
use crate::protocol::Extent;
use crate::protocol::extent_flags::{HOLE, ZERO};
use crate::request::Zero;

/// A device in memory. It answers at once.
pub struct MemoryDevice {
    size: u64,
    /// Each has its lock: requests of different connections rarely wait for each other.
    pages: Box<[RwLock<Page>]>,
}

/// [`PAGE_BYTES`] bytes, or zeros without memory.
type Page = Option<Box<[u8]>>;

impl MemoryDevice {
    /// A device of `size` bytes, all zeros.
    pub fn new(size: u64) -> MemoryDevice {
        let pages = size.div_ceil(PAGE_BYTES as u64);
        MemoryDevice { size, pages: (0..pages).map(|_| RwLock::default()).collect() }
    }

    fn read_page(&self, number: usize) -> RwLockReadGuard<'_, Page> {
        self.pages[number].read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_page(&self, number: usize) -> RwLockWriteGuard<'_, Page> {
        self.pages[number].write().unwrap_or_else(PoisonError::into_inner)
    }

    fn clear(&self, at: u64, length: u32, keep: bool) {
        for Part { page, start, length } in parts(at, length) {
            let mut content = self.write_page(page);
            match &mut *content {
                Some(_) if length == PAGE_BYTES && !keep => *content = None,
                Some(bytes) => bytes[start..start + length].fill(0),
                None if keep => _ = content.get_or_insert_with(empty_page),
                None => {}
            }
        }
    }
}

impl Device for MemoryDevice {
    fn geometry(&self) -> Geometry {
        Geometry { fast_zero: true, has_status: true, ..Geometry::of_blocks(self.size, 1) }
    }

    fn read(&self, at: u64, length: u32, answer: Answer<'_>) {
        // One page needs no list of locks, and most requests are in one.
        let mut parts = parts(at, length).map(|part| (self.read_page(part.page), part));
        let Some(first) = parts.next() else { return answer.done() };
        let rest: Vec<_> = parts.collect();
        if first.0.is_none() && rest.iter().all(|(page, _)| page.is_none()) {
            return answer.hole();
        }
        answer.data(|sink| {
            for (page, Part { start, length, .. }) in std::iter::once(first).chain(rest) {
                match &*page {
                    Some(bytes) => sink.put(&bytes[start..start + length]),
                    None => sink.put_zeros(length),
                }
            }
        });
    }

    fn write(&self, at: u64, data: Payload<'_>, _: bool, answer: Answer<'_>) {
        let mut data = data.as_ref();
        for Part { page, start, length } in parts(at, data.len() as u32) {
            let (part, rest) = data.split_at(length);
            self.write_page(page).get_or_insert_with(empty_page)[start..start + length].copy_from_slice(part);
            data = rest;
        }
        answer.done();
    }

    fn zero(&self, at: u64, length: u32, how: Zero, answer: Answer<'_>) {
        self.clear(at, length, how.keep);
        answer.done();
    }

    fn trim(&self, at: u64, length: u32, _: bool, answer: Answer<'_>) {
        self.clear(at, length, false);
        answer.done();
    }

    fn flush(&self, answer: Answer<'_>) {
        answer.done();
    }

    fn status(&self, at: u64, length: u32, answer: Answer<'_>) {
        answer.extents(parts(at, length).map(|Part { page, length, .. }| {
            let flags = if self.read_page(page).is_some() { 0 } else { HOLE | ZERO };
            Extent { length: length as u32, flags }
        }));
    }
}

/// A part of a request: in one page.
struct Part {
    page: usize,
    start: usize,
    length: usize,
}

fn parts(at: u64, length: u32) -> impl Iterator<Item = Part> {
    let end = at + u64::from(length);
    let first = at / PAGE_BYTES as u64;
    (first..end.div_ceil(PAGE_BYTES as u64)).map(move |page| {
        let begin = page * PAGE_BYTES as u64;
        let (start, stop) = (at.max(begin), end.min(begin + PAGE_BYTES as u64));
        Part { page: page as usize, start: (start - begin) as usize, length: (stop - start) as usize }
    })
}

fn empty_page() -> Box<[u8]> {
    vec![0; PAGE_BYTES].into()
}

/// Large enough that a device of a terabyte has four million of them, small enough that holes are found.
const PAGE_BYTES: usize = 256 << 10;
