//! A read-only window on shared memory, of our own or of another process. Nothing is written through it.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::atomic::Ordering,
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    mm::Advice,
};

use super::{Memory, Pages, bounds, crc, mapping::Mapping, sealed::Sealed};
use crate::Error;

/// A window on a whole memory. See the [module](super) for who writes it meanwhile, and what that means for what one reads.
pub struct View {
    mapping: Mapping,
    fd: OwnedFd,
    pages: Pages,
}

impl View {
    /// Maps memory that another process handed over, for reading.
    ///
    /// # Errors
    /// [`Error::Unsealed`] if it is shorter than `length` or might become so: an access beyond the end of a mapped file kills the
    /// process. [`Error::System`] if the system refuses.
    pub fn open(fd: OwnedFd, length: u64) -> Result<View, Error> {
        let mapping = Mapping::new(&Sealed::check(fd.as_fd(), length)?, false)?;
        Ok(View { mapping, fd, pages: Pages::Small })
    }

    /// A window through a mapping that exists already.
    pub(crate) fn of(mapping: Mapping, fd: OwnedFd, pages: Pages) -> View {
        View { mapping, fd, pages }
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.mapping.size()
    }

    /// The memfd. For a [`Memory`] it is open for writing: to hand it over, use [`View::reopen_read_only`].
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Another descriptor of the same memory, by which it can be neither written nor mapped writable.
    ///
    /// # Errors
    /// [`Error::System`], for example where `/proc` is not mounted.
    pub fn reopen_read_only(&self) -> Result<OwnedFd, Error> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::system("opening a memory read-only by way of /proc/self/fd (is /proc mounted?)"))
    }

    /// Claims the memory for one writer among processes that agree to ask first. `None`: another one holds it.
    ///
    /// It ends with the claim, or with its holder's life, however that ends.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn claim(&self) -> Result<Option<Claim>, Error> {
        // A descriptor of its own: the lock belongs to the opening, and handed-over or inherited descriptors share one.
        let fd = self.reopen_read_only()?;
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Claim { _fd: fd })),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(errno) => Err(Error::system("claiming a memory")(errno)),
        }
    }

    /// Bytes of memory that the system spends on it at present, whoever touched them.
    ///
    /// # Errors
    /// What `fstat(2)` says.
    pub fn resident(&self) -> io::Result<u64> {
        let blocks = rustix::fs::fstat(&self.fd)?.st_blocks;
        Ok(u64::try_from(blocks).unwrap_or(0) * STAT_BLOCK_BYTES)
    }

    /// Copies bytes from `offset` on into `into`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.mapping.span(offset, into.len() as u64)?.copy_out(into);
        Ok(())
    }

    /// Where a range lies in this process, for a function in another language that copies it. Valid as long as this view is; the bytes
    /// may change at any time, so that nobody may make a reference of it.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn address(&self, range: &Range<u64>) -> Result<*const u8, Error> {
        let length = bounds::length(range, self.length())?;
        Ok(self.mapping.span(range.start, length)?.address())
    }

    /// Loads eight bytes at once, in this machine's byte order, from a multiple of 8.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Unaligned`]; [`Error::Misuse`] for an order that a load can't have.
    #[inline]
    pub fn load_u64(&self, offset: u64, order: Ordering) -> Result<u64, Error> {
        load_order(order)?;
        let span = self.mapping.span(offset, size_of::<u64>() as u64)?;
        atomic_place(span.load_u64(order), offset, align_of::<u64>())
    }

    /// Loads four bytes at once, in this machine's byte order, from a multiple of 4.
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

    /// CRC-32C of what `crc` stands for followed by a range.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn crc32c_append(&self, crc: u32, range: Range<u64>) -> Result<u32, Error> {
        let length = bounds::length(&range, self.length())?;
        Ok(crc::crc32c_span(crc, self.mapping.span(range.start, length)?))
    }

    /// Sends up to `length` bytes from `offset` on: one `send(2)`, without SIGPIPE. `to` is a socket.
    ///
    /// # Errors
    /// `InvalidInput` if the range does not lie inside; otherwise what the system says, `WouldBlock` included. A signal does not end
    /// it.
    pub fn send(&self, to: impl AsFd, offset: u64, length: usize) -> io::Result<usize> {
        self.mapping.span(offset, length as u64)?.send(to.as_fd())
    }

    /// Sends up to `length` bytes from `offset` on by reference: one `sendfile(2)`.
    ///
    /// The pages are read when the receiver, or the network card, gets to them, and again at each retransmission: what arrives
    /// may be newer than the call. There is no flag against SIGPIPE; Rust programs ignore it from their start, and so do servers.
    ///
    /// # Errors
    /// As for [`View::send`].
    pub fn send_file(&self, to: impl AsFd, offset: u64, length: usize) -> io::Result<usize> {
        bounds::check(offset, length as u64, self.length())?;
        let mut offset = offset;
        loop {
            match rustix::fs::sendfile(&to, &self.fd, Some(&mut offset), length) {
                Err(rustix::io::Errno::INTR) => continue,
                result => return Ok(result?),
            }
        }
    }

    /// Writes up to `length` bytes from `offset` on to a place in a file: one `pwrite(2)`.
    ///
    /// # Errors
    /// As for [`View::send`].
    pub fn write_at(&self, file: impl AsFd, file_offset: u64, offset: u64, length: usize) -> io::Result<usize> {
        self.mapping.span(offset, length as u64)?.write_at(file.as_fd(), file_offset)
    }

    /// Copies a range into another memory, or to another place of the same.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], of either; nothing is written then.
    pub fn copy_to(&self, range: Range<u64>, sink: &Memory, sink_offset: u64) -> Result<(), Error> {
        let length = bounds::length(&range, self.length())?;
        let from = self.mapping.span(range.start, length)?;
        from.copy_to(sink.mapping().span_mut(sink_offset, length)?);
        Ok(())
    }

    /// Hint: maps the range's pages now, before a long read of a fresh mapping. What lies outside is ignored.
    pub fn populate(&self, range: Range<u64>) {
        self.hint(range, Advice::LinuxPopulateRead);
    }

    /// Hint: drops this mapping's hold on the range's pages, so that they no longer count as ours. Content stays.
    pub fn forget(&self, range: Range<u64>) {
        self.hint(range, Advice::LinuxDontNeed);
    }

    /// A hint may fail without harm: the pages are then mapped, or dropped, when they must be.
    fn hint(&self, range: Range<u64>, advice: Advice) {
        let range = bounds::clamp(&range, self.length());
        if range.is_empty() {
            return;
        }
        let hinted = self.mapping.span(range.start, range.end - range.start).map(|span| span.advise(advice));
        if let Ok(Err(error)) = hinted {
            tracing::debug!(%error, ?advice, "the system does not take this hint");
        }
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(crate) fn pages(&self) -> Pages {
        self.pages
    }
}

/// The right to write a memory, for as long as it lives. See [`View::claim`].
#[derive(Debug)]
pub struct Claim {
    _fd: OwnedFd,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("length", &self.length()).finish_non_exhaustive()
    }
}

/// The mapping begins at a page, so an offset is aligned exactly if its address is.
#[inline]
pub(crate) fn atomic_place<T>(done: Option<T>, offset: u64, align: usize) -> Result<T, Error> {
    done.ok_or(Error::Unaligned { offset, align: align as u64 })
}

/// The orders that a load may have; any other makes the standard library panic.
#[inline]
fn load_order(order: Ordering) -> Result<(), Error> {
    match order {
        Ordering::Relaxed | Ordering::Acquire | Ordering::SeqCst => Ok(()),
        _ => Err(Error::Misuse("a load is relaxed, acquiring or sequentially consistent")),
    }
}

/// Unit of `st_blocks`, whatever the file system's block size.
const STAT_BLOCK_BYTES: u64 = 512;
