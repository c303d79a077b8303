//! Read-only access to shared memory of this or another process.

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

use super::{Pages, bounds, crc, mapping::Mapping, sealed::Sealed};
use crate::Error;

/// A whole memory, for reading. The [crate docs](super) say who may write it meanwhile, and what that means for a
/// reader.
pub struct View {
    mapping: Mapping,
    fd: OwnedFd,
    pages: Pages,
}

impl View {
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
        let length = bounds::length(range, self.length())?;
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
        let length = bounds::length(&range, self.length())?;
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
        bounds::check(offset, length as u64, self.length())?;
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
        let range = bounds::clamp(&range, self.length());
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
pub(crate) fn atomic_place<T>(done: Option<T>, offset: u64, align: usize) -> Result<T, Error> {
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
