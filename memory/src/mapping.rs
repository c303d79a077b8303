//! One shared mapping, and checked ranges of it. All unsafe of the memory stands here; nothing here knows why it is asked.
//!
//! [`Span`] and [`SpanMut`] carry the proof that the comments lean on: *a span's bytes lie inside a mapping that outlives it, and
//! no reference to them exists anywhere*. The only references ever made to shared bytes are to atomics.
//!
//! The language has no word yet for a copy that races with another process. What is used here, `copy` and system calls on raw
//! pointers, compiles to the processor's plain moves: the copy may be torn, and nothing is concluded from its bytes before they
//! have been copied. (vm-memory and every shared-memory queue stand on the same ground.)

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{Error, bounds, sealed::Sealed};

/// A whole file mapped `MAP_SHARED`, unmapped on drop.
pub(crate) struct Mapping {
    /// First byte of `size` mapped bytes, page-aligned.
    base: NonNull<u8>,
    /// Bytes mapped; never 0, never above `isize::MAX`.
    size: usize,
    /// Whether the pages may be written through this mapping.
    writable: bool,
}

// SAFETY: A mapping belongs to the process and not to a thread; unmapping it from another thread than the one that made it is
// allowed. Nothing in the struct is tied to a thread.
unsafe impl Send for Mapping {}

// SAFETY: Shared access means: raw copies and atomics at checked places (see the head of this file). No reference to plain
// bytes is ever made, so no aliasing rule is broken by two threads, any more than by two processes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps as many bytes of a file as it is known to have.
    ///
    /// # Errors
    /// [`Error::Misuse`] for no bytes, or more than the address space has; [`Error::System`].
    pub(crate) fn new(file: &Sealed<'_>, writable: bool) -> Result<Mapping, Error> {
        let size = usize::try_from(file.length()).ok().filter(|size| (1..=isize::MAX as usize).contains(size));
        let size = size.ok_or(Error::Misuse("a memory has at least one byte and fits the address space"))?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: The address is null, so that the system chooses a free place and no existing mapping is replaced. The length
        // isn't 0. The descriptor is open (it is borrowed). The file has these bytes for good, by its seals: no access faults.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, file.fd(), 0) };
        let base = base.map_err(Error::system("mapping a memory"))?;
        let base = NonNull::new(base.cast()).ok_or(Error::Misuse("the system mapped a memory at address 0"))?;
        Ok(Mapping { base, size, writable })
    }

    /// Bytes mapped.
    pub(crate) fn size(&self) -> u64 {
        self.size as u64
    }

    /// The first byte, for devices that are told of the memory and reach it by themselves.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// A checked range, to be read.
    #[inline]
    pub(crate) fn span(&self, offset: u64, length: u64) -> Result<Span<'_>, Error> {
        bounds::check(offset, length, self.size())?;
        // SAFETY: `offset <= size <= isize::MAX`, as just checked, so that it fits and stays inside the mapping or at its end.
        let start = unsafe { self.base.add(offset as usize) };
        Ok(Span { start, length: length as usize, mapping: PhantomData })
    }

    /// A checked range, to be written.
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
        // SAFETY: Exactly these bytes were mapped by `new`, and nobody else unmaps them. Every span borrows the mapping, so none is
        // left, and no reference into it exists.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.size) };
        debug_assert!(unmapped.is_ok(), "unmapping what we mapped");
    }
}

/// Bytes of a mapping, checked to exist, that may be read.
#[derive(Clone, Copy)]
pub(crate) struct Span<'m> {
    start: NonNull<u8>,
    length: usize,
    mapping: PhantomData<&'m Mapping>,
}

impl Span<'_> {
    /// Copies the bytes out; as many as both have.
    pub(crate) fn copy_out(self, into: &mut [u8]) {
        let length = self.length.min(into.len());
        // SAFETY: Source: `length` bytes of a span lie in a live mapping. Destination: `into` is ours alone and that long. They
        // can't overlap, as a slice of ours never lies in a mapping of shared memory. Bytes need no alignment. Others may write
        // the source meanwhile: see the head of this file.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr(), into.as_mut_ptr(), length) };
    }

    /// Copies the bytes to another span; as many as both have. They may overlap.
    pub(crate) fn copy_to(self, sink: SpanMut<'_>) {
        let length = self.length.min(sink.0.length);
        // SAFETY: Both spans lie in live mappings and have that many bytes; the sink's mapping is writable. `copy` allows overlap.
        // Bytes need no alignment. Others may access both meanwhile: see the head of this file.
        unsafe { std::ptr::copy(self.start.as_ptr(), sink.0.start.as_ptr(), length) };
    }

    /// Its first byte.
    pub(crate) fn address(self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Bytes in it.
    pub(crate) fn length(self) -> usize {
        self.length
    }

    /// The first `length` bytes, and the others; all of them where there are fewer.
    pub(crate) fn split(self, length: usize) -> (Self, Self) {
        let length = length.min(self.length);
        // SAFETY: Not beyond the end of the span, which lies inside a mapping of no more than `isize::MAX` bytes.
        let rest = unsafe { self.start.add(length) };
        (Span { length, ..self }, Span { start: rest, length: self.length - length, ..self })
    }

    /// Loads eight bytes at once. The span begins at a multiple of 8 and has 8 bytes, else `None`.
    pub(crate) fn load_u64(self, order: Ordering) -> Option<u64> {
        Some(self.atomic_u64()?.load(order))
    }

    /// Loads four bytes at once. The span begins at a multiple of 4 and has 4 bytes, else `None`.
    pub(crate) fn load_u32(self, order: Ordering) -> Option<u32> {
        Some(self.atomic_u32()?.load(order))
    }

    /// `send(2)` out of the span, once; no SIGPIPE.
    pub(crate) fn send(self, to: BorrowedFd<'_>) -> io::Result<usize> {
        retry(|| {
            // SAFETY: The span's bytes are mapped for the length of the call; the kernel only reads them. The descriptor is open.
            unsafe { libc::send(to.as_raw_fd(), self.start.as_ptr().cast(), self.length, libc::MSG_NOSIGNAL) }
        })
    }

    /// `pwrite(2)` out of the span, once.
    pub(crate) fn write_at(self, file: BorrowedFd<'_>, file_offset: u64) -> io::Result<usize> {
        let file_offset = file_position(file_offset)?;
        retry(|| {
            // SAFETY: The span's bytes are mapped for the length of the call; the kernel only reads them. The descriptor is open.
            unsafe { libc::pwrite(file.as_raw_fd(), self.start.as_ptr().cast(), self.length, file_offset) }
        })
    }

    /// `madvise(2)` on the pages that the span touches.
    pub(crate) fn advise(self, advice: Advice) -> io::Result<()> {
        let page = rustix::param::page_size();
        let ahead = self.start.as_ptr() as usize % page;
        let first = self.start.as_ptr().wrapping_sub(ahead);
        // SAFETY: From the start of the span's first page to the span's end: inside the mapping, which begins at a page. The advice
        // is one of POPULATE_READ, POPULATE_WRITE and DONTNEED (see the callers); none of them changes the content of a shared
        // mapping of a file.
        unsafe { rustix::mm::madvise(first.cast(), self.length + ahead, advice) }?;
        Ok(())
    }

    fn atomic_u64(&self) -> Option<&AtomicU64> {
        let place = self.start.cast::<u64>();
        if self.length < size_of::<u64>() || !place.is_aligned() {
            return None;
        }
        // SAFETY: Aligned and long enough, as just checked; alive as long as the span. All concurrent accesses that mean anything are
        // atomic too; a racing plain copy may be torn, which its taker reckons with (see the head of this file). In a read-only
        // mapping only loads are made, which at this size never write.
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

/// Bytes of a mapping, checked to exist, that may be read and written.
#[derive(Clone, Copy)]
pub(crate) struct SpanMut<'m>(Span<'m>);

impl SpanMut<'_> {
    /// Copies bytes in; as many as both have.
    pub(crate) fn copy_in(self, bytes: &[u8]) {
        let length = self.0.length.min(bytes.len());
        // SAFETY: Source: a slice of ours, that long. Destination: `length` bytes of a span in a live, writable mapping. They can't
        // overlap, as a slice of ours never lies in a mapping of shared memory. Bytes need no alignment. Others may access the
        // destination meanwhile: see the head of this file.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.start.as_ptr(), length) };
    }

    /// Sets every byte.
    pub(crate) fn fill(self, byte: u8) {
        // SAFETY: The span lies in a live, writable mapping. Bytes need no alignment. Others may access it meanwhile: see the head of
        // this file.
        unsafe { std::ptr::write_bytes(self.0.start.as_ptr(), byte, self.0.length) };
    }

    /// Stores eight bytes at once. The span begins at a multiple of 8 and has 8 bytes, else `None`.
    pub(crate) fn store_u64(self, value: u64, order: Ordering) -> Option<()> {
        self.0.atomic_u64()?.store(value, order);
        Some(())
    }

    /// Stores four bytes at once. The span begins at a multiple of 4 and has 4 bytes, else `None`.
    pub(crate) fn store_u32(self, value: u32, order: Ordering) -> Option<()> {
        self.0.atomic_u32()?.store(value, order);
        Some(())
    }

    /// `read(2)` into the span, once.
    pub(crate) fn receive(self, from: BorrowedFd<'_>) -> io::Result<usize> {
        retry(|| {
            // SAFETY: The span's bytes are mapped writable for the length of the call, and no reference to them exists that the
            // kernel's writing could break. The descriptor is open.
            unsafe { libc::read(from.as_raw_fd(), self.0.start.as_ptr().cast(), self.0.length) }
        })
    }

    /// `pread(2)` into the span, once.
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
            // SAFETY: One byte of a live, writable mapping; a byte is always aligned. Races as in `atomic_u64`.
            let byte = unsafe { AtomicU8::from_ptr(byte.as_ptr()) };
            // An exchange of the value for itself: a `fetch_or` of nothing is optimised into a mere load, which touches no page
            // for writing. Whether it succeeds is of no interest: who came between has written.
            let value = byte.load(Ordering::Relaxed);
            let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// `madvise(2)`, as for [`Span::advise`].
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

/// A position in a file as the system wants it.
fn file_position(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a file position above 2^63"))
}
