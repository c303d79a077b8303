//! Shared memory as other crates see it: [`Memory`], which this process writes, and [`View`], by which this process or
//! another one reads. Both give offsets, copies and atomic words, and never a reference.

use std::io;
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::Advice;

use super::mapping::{self, Mapping, Sealed};
use super::{Pages, crc};
use crate::Error;

/// A memfd that this process writes while others read it. The [crate docs](super) say who they are.
///
/// All methods take `&self`, because the memory is shared within this process as it is between processes. Two threads
/// that write the same bytes leave a mixture: give each range one writer.
pub struct Memory {
    view: View,
    /// All pages below this offset are backed. A hint that saves backing them again.
    backed: AtomicU64,
}

impl Memory {
    /// Creates a memory of `length` zero bytes that no pages back yet. `name` appears in `/proc/*/maps`. Processes that
    /// get its descriptor for writing can write it ([`Memory::adopt`]).
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Misuse`] for a length of 0 or above the address space.
    pub fn create(name: &str, length: u64, pages: Pages) -> Result<Memory, Error> {
        Memory::create_or_small(name, length, pages, Writers::Handover)
    }

    /// Creates a memory as [`Memory::create`], which only the mapping of this value can write: the seal
    /// `F_SEAL_FUTURE_WRITE` forbids all others, of this and other processes, whatever their user. It needs Linux 5.1;
    /// older systems ignore the wish.
    ///
    /// [`Memory::release`] fails for it, unless it has huge pages.
    ///
    /// # Errors
    /// As for [`Memory::create`].
    pub fn create_single_writer(name: &str, length: u64, pages: Pages) -> Result<Memory, Error> {
        Memory::create_or_small(name, length, pages, Writers::Only)
    }

    fn create_or_small(name: &str, length: u64, pages: Pages, writers: Writers) -> Result<Memory, Error> {
        if pages == Pages::Huge {
            match Memory::create_of(name, length, Pages::Huge, writers) {
                Ok(memory) => return Ok(memory),
                Err(error) => {
                    tracing::info!(name, length, %error, "no huge pages for this memory: using base pages")
                }
            }
        }
        Memory::create_of(name, length, Pages::Small, writers)
    }

    fn create_of(name: &str, length: u64, pages: Pages, writers: Writers) -> Result<Memory, Error> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file_length = length;
        if pages == Pages::Huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            file_length = length.checked_next_multiple_of(HUGE_PAGE_BYTES).unwrap_or(length);
        }
        // Linux before 6.3 does not have the flag. It keeps the memory from being executed.
        let fd = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| rustix::fs::memfd_create(name, flags))
            .map_err(Error::system("creating a memory"))?;
        rustix::fs::ftruncate(&fd, file_length).map_err(Error::system("setting the length of a memory"))?;
        // A process with a read-only descriptor must not reopen it for writing through /proc. A process with any
        // descriptor may reopen it for reading, also as another user: a writer's claim needs that (`View::claim`).
        let mode = Mode::RUSR | Mode::RGRP | Mode::ROTH;
        rustix::fs::fchmod(&fd, mode).map_err(Error::system("making a memory read-only for others"))?;
        let seal = |seals| rustix::fs::fcntl_add_seals(&fd, seals);
        seal(SealFlags::SHRINK | SealFlags::GROW).map_err(Error::system("sealing a memory"))?;
        let mapping = Mapping::new(&Sealed::check(fd.as_fd(), length)?, true)?;
        if writers == Writers::Only
            && let Err(errno) = seal(SealFlags::FUTURE_WRITE)
        {
            tracing::debug!(%errno, "the system has no seal against further writers");
        }
        seal(SealFlags::SEAL).map_err(Error::system("sealing a memory"))?;
        if pages == Pages::Small {
            // A hint: most systems give shared memory no huge pages this way (`shmem_enabled` is `never`).
            let _ = mapping.span_mut(0, length)?.advise(Advice::LinuxHugepage);
        }
        Ok(Memory { view: View::of(mapping, fd, pages), backed: AtomicU64::new(0) })
    }

    /// Maps memory that another process created and handed over for writing.
    ///
    /// Its creator has sealed its size. The processes agree separately on who writes which range.
    ///
    /// # Errors
    /// [`Error::Unsealed`] if it could be or become shorter than `length`, as for [`View::open`]; [`Error::System`],
    /// for example if the descriptor is read-only.
    pub fn adopt(fd: OwnedFd, length: u64) -> Result<Memory, Error> {
        let mapping = Mapping::new(&Sealed::check(fd.as_fd(), length)?, true)?;
        Ok(Memory { view: View::of(mapping, fd, Pages::Small), backed: AtomicU64::new(0) })
    }

    /// Backs the range with pages now, so that the first write to each page does not wait for one. The content does not
    /// change.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::System`] if the system is out of memory.
    pub fn prefault(&self, range: Range<u64>) -> Result<(), Error> {
        let length = mapping::length(&range, self.length())?;
        let span = self.view.mapping().span_mut(range.start, length)?;
        let backed = self.backed.load(Ordering::Relaxed);
        if range.end <= backed {
            return Ok(());
        }
        match span.advise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 do not have this advice.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => span.touch(),
            other => other.map_err(Error::system("backing a memory with pages"))?,
        }
        if range.start <= backed {
            self.backed.fetch_max(range.end, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Zeroes the range and returns its whole pages to the system, for every mapping of it.
    ///
    /// Do not use it for memory that is registered with an RDMA device, which would keep the old pages.
    ///
    /// The system refuses it for [`Memory::create_single_writer`] (`EPERM`).
    ///
    /// Huge pages are zeroed but kept: if the system had none left to fill the hole, a reader's access would kill the
    /// reader.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::System`].
    pub fn release(&self, range: Range<u64>) -> Result<(), Error> {
        let length = mapping::length(&range, self.length())?;
        let span = self.view.mapping().span_mut(range.start, length)?;
        if length == 0 {
            return Ok(());
        }
        self.backed.fetch_min(range.start, Ordering::Relaxed);
        if self.view.pages() == Pages::Huge {
            span.fill(0);
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self.as_fd(), flags, range.start, length)
            .map_err(Error::system("returning pages of a memory"))
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; nothing is written.
    #[inline]
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.view.mapping().span_mut(offset, bytes.len() as u64)?.copy_in(bytes);
        Ok(())
    }

    /// Sets every byte of the range to `byte`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; nothing is written.
    pub fn fill(&self, range: Range<u64>, byte: u8) -> Result<(), Error> {
        let length = mapping::length(&range, self.length())?;
        self.view.mapping().span_mut(range.start, length)?.fill(byte);
        Ok(())
    }

    /// Stores eight bytes atomically, in native byte order, at a multiple of 8.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Unaligned`]; [`Error::Misuse`] for an ordering that a store cannot have.
    #[inline]
    pub fn store_u64(&self, offset: u64, value: u64, order: Ordering) -> Result<(), Error> {
        store_order(order)?;
        let span = self.view.mapping().span_mut(offset, size_of::<u64>() as u64)?;
        atomic_place(span.store_u64(value, order), offset, align_of::<u64>())
    }

    /// Stores four bytes atomically, in native byte order, at a multiple of 4.
    ///
    /// # Errors
    /// As for [`Memory::store_u64`].
    pub fn store_u32(&self, offset: u64, value: u32, order: Ordering) -> Result<(), Error> {
        store_order(order)?;
        let span = self.view.mapping().span_mut(offset, size_of::<u32>() as u64)?;
        atomic_place(span.store_u32(value, order), offset, align_of::<u32>())
    }

    /// Reads up to `length` bytes from a socket, pipe or file directly to `offset`: one `read(2)`. 0 means the end of
    /// the stream.
    ///
    /// # Errors
    /// `InvalidInput` if the range is out of bounds, or empty (the result would look like the end); otherwise what the
    /// system reports, including `WouldBlock`. Signals do not interrupt it.
    pub fn receive(&self, from: impl AsFd, offset: u64, length: usize) -> io::Result<usize> {
        let span = self.view.mapping().span_mut(offset, length as u64)?;
        if length == 0 {
            return Err(Error::Misuse("cannot receive into an empty range").into());
        }
        span.receive(from.as_fd())
    }

    /// Reads up to `length` bytes at an offset of a file directly to `offset`: one `pread(2)`. 0 means the end of the
    /// file.
    ///
    /// # Errors
    /// As for [`Memory::receive`].
    pub fn read_at(&self, file: impl AsFd, file_offset: u64, offset: u64, length: usize) -> io::Result<usize> {
        let span = self.view.mapping().span_mut(offset, length as u64)?;
        if length == 0 {
            return Err(Error::Misuse("cannot read into an empty range").into());
        }
        span.read_at(file.as_fd(), file_offset)
    }

    /// Maps the same memory a second time, read-only, as a reader on this host does.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn open_view(&self) -> Result<View, Error> {
        View::open(self.reopen_read_only()?, self.length())
    }

    /// Address of the first byte, for a device that registers the memory. It does not change during the life of the
    /// memory.
    pub fn base_address(&self) -> std::ptr::NonNull<u8> {
        self.view.mapping().base()
    }

    /// The mapping, as the target of a copy.
    pub(crate) fn mapping(&self) -> &Mapping {
        self.view.mapping()
    }
}

impl View {
    /// Copies a range to another memory, or to another offset of the same.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] for either; nothing is written.
    pub fn copy_to(&self, range: Range<u64>, sink: &Memory, sink_offset: u64) -> Result<(), Error> {
        let length = mapping::length(&range, self.length())?;
        let from = self.mapping().span(range.start, length)?;
        from.copy_to(sink.mapping().span_mut(sink_offset, length)?);
        Ok(())
    }

    /// Maps memory that another process handed over, for reading.
    ///
    /// # Errors
    /// [`Error::Unsealed`] if it could be or become shorter than `length`: an access beyond the end of a mapped file
    /// kills the process. [`Error::System`].
    pub fn open(fd: OwnedFd, length: u64) -> Result<View, Error> {
        let mapping = Mapping::new(&Sealed::check(fd.as_fd(), length)?, false)?;
        Ok(View { mapping, fd, pages: Pages::Small })
    }

    /// Wraps an existing mapping.
    pub(crate) fn of(mapping: Mapping, fd: OwnedFd, pages: Pages) -> View {
        View { mapping, fd, pages }
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.mapping.size()
    }

    /// The memfd. That of a [`Memory`](crate::Memory) is open for writing: pass [`View::reopen_read_only`] to other
    /// processes.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Opens another descriptor of the same memory, which can be neither written nor mapped writable.
    ///
    /// # Errors
    /// [`Error::System`], for example if `/proc` is not mounted.
    pub fn reopen_read_only(&self) -> Result<OwnedFd, Error> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::system("opening a memory read-only through /proc/self/fd (is /proc mounted?)"))
    }

    /// Claims the memory for one writer, among processes that agree to ask first. `None` if another process holds the
    /// claim.
    ///
    /// The claim ends when it is dropped, or when its process ends.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn claim(&self) -> Result<Option<Claim>, Error> {
        // A new open file description: the lock belongs to it, and passed or inherited descriptors share theirs.
        let fd = self.reopen_read_only()?;
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Claim { _fd: fd })),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(errno) => Err(Error::system("claiming a memory")(errno)),
        }
    }

    /// Bytes of memory that back it at present.
    ///
    /// # Errors
    /// What `fstat(2)` reports.
    pub fn resident(&self) -> io::Result<u64> {
        let blocks = rustix::fs::fstat(&self.fd)?.st_blocks;
        Ok(u64::try_from(blocks).unwrap_or(0) * STAT_BLOCK_BYTES)
    }

    /// Copies bytes at `offset` to `into`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.mapping.span(offset, into.len() as u64)?.copy_out(into);
        Ok(())
    }

    /// Address of a range in this process, for a foreign function that copies from it. It is valid as long as this
    /// view. The bytes may change at any time: do not make a reference to them.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn address(&self, range: &Range<u64>) -> Result<*const u8, Error> {
        let length = mapping::length(range, self.length())?;
        Ok(self.mapping.span(range.start, length)?.address())
    }

    /// Loads eight bytes atomically, in native byte order, at a multiple of 8.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Unaligned`]; [`Error::Misuse`] for an ordering that a load cannot have.
    #[inline]
    pub fn load_u64(&self, offset: u64, order: Ordering) -> Result<u64, Error> {
        load_order(order)?;
        let span = self.mapping.span(offset, size_of::<u64>() as u64)?;
        atomic_place(span.load_u64(order), offset, align_of::<u64>())
    }

    /// Loads four bytes atomically, in native byte order, at a multiple of 4.
    ///
    /// # Errors
    /// As for [`View::load_u64`].
    #[inline]
    pub fn load_u32(&self, offset: u64, order: Ordering) -> Result<u32, Error> {
        load_order(order)?;
        let span = self.mapping.span(offset, size_of::<u32>() as u64)?;
        atomic_place(span.load_u32(order), offset, align_of::<u32>())
    }

    /// CRC-32C of a range.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn crc32c(&self, range: Range<u64>) -> Result<u32, Error> {
        self.crc32c_append(0, range)
    }

    /// CRC-32C of the bytes whose checksum is `crc`, followed by a range.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn crc32c_append(&self, crc: u32, range: Range<u64>) -> Result<u32, Error> {
        let length = mapping::length(&range, self.length())?;
        Ok(crc::crc32c_span(crc, self.mapping.span(range.start, length)?))
    }

    /// Sends up to `length` bytes at `offset` to a socket: one `send(2)`, without SIGPIPE.
    ///
    /// # Errors
    /// `InvalidInput` if the range is out of bounds; otherwise what the system reports, including `WouldBlock`. Signals
    /// do not interrupt it.
    pub fn send(&self, to: impl AsFd, offset: u64, length: usize) -> io::Result<usize> {
        self.mapping.span(offset, length as u64)?.send(to.as_fd())
    }

    /// Sends up to `length` bytes at `offset` by reference: one `sendfile(2)`.
    ///
    /// The pages are read when the receiver or the network card gets to them, and again at each retransmission, so that
    /// the bytes that arrive may be newer than the call. No flag suppresses SIGPIPE; Rust programs and servers ignore
    /// that signal.
    ///
    /// # Errors
    /// As for [`View::send`].
    pub fn send_file(&self, to: impl AsFd, offset: u64, length: usize) -> io::Result<usize> {
        mapping::check(offset, length as u64, self.length())?;
        let mut offset = offset;
        loop {
            match rustix::fs::sendfile(&to, &self.fd, Some(&mut offset), length) {
                Err(rustix::io::Errno::INTR) => continue,
                result => return Ok(result?),
            }
        }
    }

    /// Writes up to `length` bytes at `offset` to an offset of a file: one `pwrite(2)`.
    ///
    /// # Errors
    /// As for [`View::send`].
    pub fn write_at(&self, file: impl AsFd, file_offset: u64, offset: u64, length: usize) -> io::Result<usize> {
        self.mapping.span(offset, length as u64)?.write_at(file.as_fd(), file_offset)
    }

    /// Hint: maps the pages of the range now, before a long read through a fresh mapping. The part out of bounds is
    /// ignored.
    pub fn populate(&self, range: Range<u64>) {
        self.hint(range, Advice::LinuxPopulateRead);
    }

    /// Hint: unmaps the pages of the range, so that they no longer count for this process. The content does not change.
    pub fn forget(&self, range: Range<u64>) {
        self.hint(range, Advice::LinuxDontNeed);
    }

    /// A failed hint does no harm: the pages are mapped, or dropped, later.
    fn hint(&self, range: Range<u64>, advice: Advice) {
        let range = mapping::clamp(&range, self.length());
        if range.is_empty() {
            return;
        }
        let hinted = self.mapping.span(range.start, range.end - range.start).map(|span| span.advise(advice));
        if let Ok(Err(error)) = hinted {
            tracing::debug!(%error, ?advice, "the system rejects this hint");
        }
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(crate) fn pages(&self) -> Pages {
        self.pages
    }
}

impl Deref for Memory {
    type Target = View;

    fn deref(&self) -> &View {
        &self.view
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("length", &self.length()).field("pages", &self.view.pages()).finish()
    }
}

/// Who can write a memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writers {
    /// Its own mapping only.
    Only,
    /// Every process that its descriptor is handed to.
    Handover,
}

/// Checks the ordering of a store. The standard library panics on any other.
#[inline]
fn store_order(order: Ordering) -> Result<(), Error> {
    match order {
        Ordering::Relaxed | Ordering::Release | Ordering::SeqCst => Ok(()),
        _ => Err(Error::Misuse("the ordering of a store is Relaxed, Release or SeqCst")),
    }
}

/// Size of huge pages: the one that x86-64 and most arm64 systems have. Where it is not available, base pages are used.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

// Read-only access to shared memory of this or another process.

/// A whole memory, for reading. The [crate docs](super) say who may write it meanwhile, and what that means for a
/// reader.
pub struct View {
    mapping: Mapping,
    fd: OwnedFd,
    pages: Pages,
}

/// The right to write a memory, until it is dropped. See [`View::claim`].
#[derive(Debug)]
pub struct Claim {
    _fd: OwnedFd,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("length", &self.length()).finish_non_exhaustive()
    }
}

/// Converts a missing result to [`Error::Unaligned`]. The mapping starts at a page, so an offset is aligned exactly if
/// its address is.
#[inline]
fn atomic_place<T>(done: Option<T>, offset: u64, align: usize) -> Result<T, Error> {
    done.ok_or(Error::Unaligned { offset, align: align as u64 })
}

/// Checks the ordering of a load. The standard library panics on any other.
#[inline]
fn load_order(order: Ordering) -> Result<(), Error> {
    match order {
        Ordering::Relaxed | Ordering::Acquire | Ordering::SeqCst => Ok(()),
        _ => Err(Error::Misuse("the ordering of a load is Relaxed, Acquire or SeqCst")),
    }
}

/// Unit of `st_blocks`, for every file system.
const STAT_BLOCK_BYTES: u64 = 512;
