//! A shared mapping, and checked ranges of it. All unsafe code of this crate is here.
//!
//! [`Span`] and [`SpanMut`] carry the proof that the SAFETY comments rely on: *the bytes of a span are inside a mapping
//! that outlives it, and no reference to them exists*. The only references made to shared bytes are to atomics.
//!
//! Rust's memory model has no copy that may race with another process. The copies and system calls on raw pointers that
//! are used here compile to ordinary moves of the processor: a copy may be torn, and no decision depends on its bytes
//! before they are copied. vm-memory and other shared-memory queues make the same assumption.

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::fs::SealFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::Error;

/// A mapping of a file with `MAP_SHARED`, removed on drop.
pub(crate) struct Mapping {
    /// Address of the first of `size` mapped bytes, page-aligned.
    base: NonNull<u8>,
    /// Mapped bytes; never 0, never above `isize::MAX`.
    size: usize,
    /// Whether the mapping is writable.
    writable: bool,
}

// SAFETY: A mapping belongs to the process, and any thread may remove it. No field is bound to a thread.
unsafe impl Send for Mapping {}

// SAFETY: Threads that share a mapping make raw copies and atomic accesses at checked offsets (see the module docs). No
// reference to plain bytes is ever made, so that no aliasing rule applies, between threads as between processes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the bytes that `file` is known to have.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a length of 0 or above the address space; [`Error::System`].
    pub(crate) fn new(file: &Sealed<'_>, writable: bool) -> Result<Mapping, Error> {
        let size = usize::try_from(file.length()).ok().filter(|size| (1..=isize::MAX as usize).contains(size));
        let size = size.ok_or(Error::Misuse("the length of a memory must be at least 1 and fit the address space"))?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: The address is null, so the system chooses a free place and replaces no existing mapping. The length
        // is not 0. The descriptor is open, as it is borrowed. The seals keep the file at least this long, so that no
        // access faults.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, file.fd(), 0) };
        let base = base.map_err(Error::system("mapping a memory"))?;
        let base = NonNull::new(base.cast()).ok_or(Error::Misuse("the system mapped a memory at address 0"))?;
        let mapping = Mapping { base, size, writable };
        // A core dump would write the data set to a disk. Without the advice only the dump is larger.
        let _ = mapping.span(0, mapping.size()).map(|whole| whole.advise(Advice::LinuxDontDump));
        Ok(mapping)
    }

    /// Length in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size as u64
    }

    /// Address of the first byte, for devices that access the memory themselves.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// A checked range for reading.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    #[inline]
    pub(crate) fn span(&self, offset: u64, length: u64) -> Result<Span<'_>, Error> {
        check(offset, length, self.size())?;
        // SAFETY: `offset <= size <= isize::MAX`, as just checked: the sum does not overflow and is inside the mapping
        // or at its end.
        let start = unsafe { self.base.add(offset as usize) };
        Ok(Span { start, length: length as usize, mapping: PhantomData })
    }

    /// A checked range for writing.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Misuse`] if the mapping is read-only.
    #[inline]
    pub(crate) fn span_mut(&self, offset: u64, length: u64) -> Result<SpanMut<'_>, Error> {
        if !self.writable {
            return Err(Error::Misuse("this memory is mapped for reading only"));
        }
        self.span(offset, length).map(SpanMut)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped exactly these bytes, and no other code unmaps them. Every span borrows the mapping, so
        // that no span is left and no reference into it exists.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.size) };
        debug_assert!(unmapped.is_ok(), "unmapping what we mapped");
    }
}

/// A checked range of a mapping, for reading.
#[derive(Clone, Copy)]
pub(crate) struct Span<'m> {
    start: NonNull<u8>,
    length: usize,
    mapping: PhantomData<&'m Mapping>,
}

impl Span<'_> {
    /// Copies bytes out, up to the shorter of the two lengths.
    pub(crate) fn copy_out(self, into: &mut [u8]) {
        let length = self.length.min(into.len());
        // SAFETY: Source: `length` bytes of a span are inside a live mapping. Destination: `into` is exclusively
        // borrowed and that long. They do not overlap, as no slice points into a mapping of shared memory. Bytes need
        // no alignment. Another party may write the source during the copy: see the module docs.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr(), into.as_mut_ptr(), length) };
    }

    /// Copies the bytes to another span, up to the shorter of the two lengths. The spans may overlap.
    pub(crate) fn copy_to(self, sink: SpanMut<'_>) {
        let length = self.length.min(sink.0.length);
        // SAFETY: Both spans are inside live mappings and have `length` bytes; the sink's mapping is writable. `copy`
        // allows overlap. Bytes need no alignment. Other parties may access both spans during the copy: see the module
        // docs.
        unsafe { std::ptr::copy(self.start.as_ptr(), sink.0.start.as_ptr(), length) };
    }

    /// Address of the first byte.
    pub(crate) fn address(self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Length in bytes.
    pub(crate) fn length(self) -> usize {
        self.length
    }

    /// Splits the span behind `length` bytes, or at its end if it is shorter.
    pub(crate) fn split(self, length: usize) -> (Self, Self) {
        let length = length.min(self.length);
        // SAFETY: Not beyond the end of the span, which is inside a mapping of at most `isize::MAX` bytes.
        let rest = unsafe { self.start.add(length) };
        (Span { length, ..self }, Span { start: rest, length: self.length - length, ..self })
    }

    /// Loads eight bytes atomically. `None` unless the span starts at a multiple of 8 and has 8 bytes.
    pub(crate) fn load_u64(self, order: Ordering) -> Option<u64> {
        Some(self.atomic_u64()?.load(order))
    }

    /// Loads four bytes atomically. `None` unless the span starts at a multiple of 4 and has 4 bytes.
    pub(crate) fn load_u32(self, order: Ordering) -> Option<u32> {
        Some(self.atomic_u32()?.load(order))
    }

    /// One `send(2)` from the span, without SIGPIPE.
    pub(crate) fn send(self, to: BorrowedFd<'_>) -> io::Result<usize> {
        retry(|| {
            // SAFETY: The bytes of the span are mapped during the call; the kernel only reads them. The descriptor is
            // open.
            unsafe { libc::send(to.as_raw_fd(), self.start.as_ptr().cast(), self.length, libc::MSG_NOSIGNAL) }
        })
    }

    /// One `pwrite(2)` from the span.
    pub(crate) fn write_at(self, file: BorrowedFd<'_>, file_offset: u64) -> io::Result<usize> {
        let file_offset = file_position(file_offset)?;
        retry(|| {
            // SAFETY: The bytes of the span are mapped during the call; the kernel only reads them. The descriptor is
            // open.
            unsafe { libc::pwrite(file.as_raw_fd(), self.start.as_ptr().cast(), self.length, file_offset) }
        })
    }

    /// `madvise(2)` on the pages of the span.
    pub(crate) fn advise(self, advice: Advice) -> io::Result<()> {
        let page = rustix::param::page_size();
        let ahead = self.start.as_ptr() as usize % page;
        let first = self.start.as_ptr().wrapping_sub(ahead);
        // SAFETY: The range is from the start of the span's first page to the end of the span, inside the mapping,
        // which starts at a page. The callers pass POPULATE_READ, POPULATE_WRITE, HUGEPAGE, DONTDUMP or DONTNEED; none
        // of them changes the content of a shared mapping of a file.
        unsafe { rustix::mm::madvise(first.cast(), self.length + ahead, advice) }?;
        Ok(())
    }

    fn atomic_u64(&self) -> Option<&AtomicU64> {
        let place = self.start.cast::<u64>();
        if self.length < size_of::<u64>() || !place.is_aligned() {
            return None;
        }
        // SAFETY: Aligned and long enough, as just checked, and valid as long as the span. All concurrent accesses to
        // such a word are atomic; a racing plain copy may be torn, which its caller expects (see the module docs). A
        // read-only mapping is only loaded from, and a load of this size does not write.
        Some(unsafe { AtomicU64::from_ptr(place.as_ptr()) })
    }

    fn atomic_u32(&self) -> Option<&AtomicU32> {
        let place = self.start.cast::<u32>();
        if self.length < size_of::<u32>() || !place.is_aligned() {
            return None;
        }
        // SAFETY: As for `atomic_u64`, with 4 bytes.
        Some(unsafe { AtomicU32::from_ptr(place.as_ptr()) })
    }
}

/// A checked range of a mapping, for reading and writing.
#[derive(Clone, Copy)]
pub(crate) struct SpanMut<'m>(Span<'m>);

impl SpanMut<'_> {
    /// Copies bytes in, up to the shorter of the two lengths.
    pub(crate) fn copy_in(self, bytes: &[u8]) {
        let length = self.0.length.min(bytes.len());
        // SAFETY: Source: a slice, that long. Destination: `length` bytes of a span in a live, writable mapping. They
        // do not overlap, as no slice points into a mapping of shared memory. Bytes need no alignment. Other parties
        // may access the destination during the copy: see the module docs.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.start.as_ptr(), length) };
    }

    /// Sets every byte to `byte`.
    pub(crate) fn fill(self, byte: u8) {
        // SAFETY: The span is inside a live, writable mapping. Bytes need no alignment. Other parties may access it
        // meanwhile: see the module docs.
        unsafe { std::ptr::write_bytes(self.0.start.as_ptr(), byte, self.0.length) };
    }

    /// Stores eight bytes atomically. `None` unless the span starts at a multiple of 8 and has 8 bytes.
    pub(crate) fn store_u64(self, value: u64, order: Ordering) -> Option<()> {
        self.0.atomic_u64()?.store(value, order);
        Some(())
    }

    /// Stores four bytes atomically. `None` unless the span starts at a multiple of 4 and has 4 bytes.
    pub(crate) fn store_u32(self, value: u32, order: Ordering) -> Option<()> {
        self.0.atomic_u32()?.store(value, order);
        Some(())
    }

    /// One `read(2)` into the span.
    pub(crate) fn receive(self, from: BorrowedFd<'_>) -> io::Result<usize> {
        retry(|| {
            // SAFETY: The bytes of the span are mapped writable during the call, and no reference to them exists that
            // the kernel's write could invalidate. The descriptor is open.
            unsafe { libc::read(from.as_raw_fd(), self.0.start.as_ptr().cast(), self.0.length) }
        })
    }

    /// One `pread(2)` into the span.
    pub(crate) fn read_at(self, file: BorrowedFd<'_>, file_offset: u64) -> io::Result<usize> {
        let file_offset = file_position(file_offset)?;
        retry(|| {
            // SAFETY: As for `receive`.
            unsafe { libc::pread(file.as_raw_fd(), self.0.start.as_ptr().cast(), self.0.length, file_offset) }
        })
    }

    /// Touches every page as a writer does, without changing a byte.
    pub(crate) fn touch(self) {
        for offset in (0..self.0.length).step_by(rustix::param::page_size()) {
            // SAFETY: `offset < length`: inside the span.
            let byte = unsafe { self.0.start.add(offset) };
            // SAFETY: One byte of a live, writable mapping; a byte is always aligned. For races see `atomic_u64`.
            let byte = unsafe { AtomicU8::from_ptr(byte.as_ptr()) };
            // Exchanges the value for itself. A `fetch_or` of 0 would be optimised to a load, which does not back the
            // page for writing. A failed exchange means that another party has written the page.
            let value = byte.load(Ordering::Relaxed);
            let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// `madvise(2)` on the pages of the span.
    pub(crate) fn advise(self, advice: Advice) -> io::Result<()> {
        self.0.advise(advice)
    }
}

/// Repeats a system call while a signal interrupts it.
fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(count) = usize::try_from(call()) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Converts a file offset to the system's type.
fn file_position(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a file offset above 2^63"))
}

// Checks that a range is inside a memory, without overflow. No other module decides this.

/// Fails unless `length` bytes at `offset` are inside `size` bytes. An empty range at the very end is inside.
///
/// # Errors
/// [`Error::OutOfBounds`] with these three numbers.
#[inline]
pub fn check(offset: u64, length: u64, size: u64) -> Result<(), Error> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfBounds { offset, length, size }),
    }
}

/// Length of a range; an error for a range whose end is before its start.
pub(crate) fn length(range: &Range<u64>, size: u64) -> Result<u64, Error> {
    match range.end.checked_sub(range.start) {
        Some(length) => Ok(length),
        None => Err(Error::OutOfBounds { offset: range.start, length: 0, size }),
    }
}

/// The part of a range that is inside `size` bytes. For hints, which accept any range.
pub(crate) fn clamp(range: &Range<u64>, size: u64) -> Range<u64> {
    let end = range.end.min(size);
    range.start.min(end)..end
}

// Proof that a file can be mapped without danger.

/// A memfd that has at least `length` bytes and cannot shrink. An access beyond the end of a mapped file kills the
/// process by SIGBUS.
pub(crate) struct Sealed<'f> {
    fd: BorrowedFd<'f>,
    length: u64,
}

impl<'f> Sealed<'f> {
    /// Checks the seals and the length of `fd`.
    ///
    /// # Errors
    /// [`Error::Unsealed`] if the file could shrink, or is shorter than `length`; [`Error::System`].
    pub(crate) fn check(fd: BorrowedFd<'f>, length: u64) -> Result<Sealed<'f>, Error> {
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| Error::Unsealed("it is not a memfd"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::Unsealed("it could shrink: the seal F_SEAL_SHRINK is missing"));
        }
        // Read after the seals: from then on the length can only grow.
        let stat = rustix::fs::fstat(fd).map_err(Error::system("asking for a memory's length"))?;
        if u64::try_from(stat.st_size).is_ok_and(|size| size >= length) {
            return Ok(Sealed { fd, length });
        }
        Err(Error::Unsealed("it is shorter than was announced"))
    }

    /// The file.
    pub(crate) fn fd(&self) -> BorrowedFd<'f> {
        self.fd
    }

    /// Bytes that the file has for as long as it exists.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_is_inside_exactly_if_arithmetic_without_limits_says_so(
            offset in prop_oneof![0u64..100, u64::MAX - 100..=u64::MAX],
            length in prop_oneof![0u64..100, u64::MAX - 100..=u64::MAX],
            size in prop_oneof![0u64..100, u64::MAX - 100..=u64::MAX],
        ) {
            let inside = u128::from(offset) + u128::from(length) <= u128::from(size);
            prop_assert_eq!(check(offset, length, size).is_ok(), inside);
        }

        #[test]
        fn a_clamped_range_is_always_inside(start: u64, end: u64, size: u64) {
            let range = clamp(&(start..end), size);
            prop_assert!(range.start <= range.end && range.end <= size);
        }
    }
}
