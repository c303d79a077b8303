//! Memory of our own: made, written and given back here. Reading it is [`View`]'s part.

use std::{
    io,
    ops::{Deref, Range},
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, Mode, SealFlags},
    mm::Advice,
};

use super::{Pages, View, bounds, mapping::Mapping, sealed::Sealed, view::atomic_place};
use crate::Error;

/// One memfd that we own and write, and that others may read while we do. See the [module](super) for who they are.
///
/// All methods take `&self`: it is as shared inside this process as it is between processes. Two threads that write the same
/// bytes leave a mixture; give each range one writer.
pub struct Memory {
    view: View,
    /// Below this, all pages have been backed and none given back. A hint: it saves walking them once more.
    backed: AtomicU64,
}

impl Memory {
    /// Makes a memory of `length` bytes, all zero and not yet backed by pages. `name` shows in `/proc/*/maps`.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses; [`Error::Misuse`] for no bytes at all or more than can be addressed.
    pub fn create(name: &str, length: u64, pages: Pages) -> Result<Memory, Error> {
        if pages == Pages::Huge {
            match Memory::create_of(name, length, Pages::Huge) {
                Ok(memory) => return Ok(memory),
                Err(error) => {
                    tracing::info!(name, length, %error, "no huge pages for this memory: taking ordinary ones")
                }
            }
        }
        Memory::create_of(name, length, Pages::Small)
    }

    fn create_of(name: &str, length: u64, pages: Pages) -> Result<Memory, Error> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file_length = length;
        if pages == Pages::Huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            file_length = length.checked_next_multiple_of(HUGE_PAGE_BYTES).unwrap_or(length);
        }
        let fd = rustix::fs::memfd_create(name, flags).map_err(Error::system("creating a memory"))?;
        rustix::fs::ftruncate(&fd, file_length).map_err(Error::system("giving a memory its length"))?;
        // A reader that was handed a read-only descriptor must not open it again for writing by way of /proc.
        rustix::fs::fchmod(&fd, Mode::RUSR).map_err(Error::system("making a memory read-only for others"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(Error::system("sealing a memory"))?;
        let mapping = Mapping::new(&Sealed::check(fd.as_fd(), length)?, true)?;
        if pages == Pages::Small {
            // Only a wish: most systems give shared memory none of these (`shmem_enabled` is `never`).
            let _ = mapping.span_mut(0, length)?.advise(Advice::LinuxHugepage);
        }
        Ok(Memory { view: View::of(mapping, fd, pages), backed: AtomicU64::new(0) })
    }

    /// Maps memory that another process made and handed over so that we write it.
    ///
    /// Its size is what its maker sealed; who writes which range is agreed on beside it.
    ///
    /// # Errors
    /// [`Error::Unsealed`] if it is shorter than `length` or might become so, as for [`View::open`]; [`Error::System`] if the system
    /// refuses, above all where the descriptor is for reading only.
    pub fn adopt(fd: OwnedFd, length: u64) -> Result<Memory, Error> {
        let mapping = Mapping::new(&Sealed::check(fd.as_fd(), length)?, true)?;
        Ok(Memory { view: View::of(mapping, fd, Pages::Small), backed: AtomicU64::new(0) })
    }

    /// Backs the range with pages now, so that the first write to each needn't wait for one. Content stays.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::System`] if there is not memory enough.
    pub fn prefault(&self, range: Range<u64>) -> Result<(), Error> {
        let length = bounds::length(&range, self.length())?;
        let span = self.view.mapping().span_mut(range.start, length)?;
        let backed = self.backed.load(Ordering::Relaxed);
        if range.end <= backed {
            return Ok(());
        }
        match span.advise(Advice::LinuxPopulateWrite) {
            // A kernel before 5.14 does not know this advice.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => span.touch(),
            other => other.map_err(Error::system("backing a memory with pages"))?,
        }
        if range.start <= backed {
            self.backed.fetch_max(range.end, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Zeroes the range and gives its whole pages back to the system, for every mapping of it.
    ///
    /// Not for memory that is registered with an RDMA device: the device would keep to the old pages.
    ///
    /// Huge pages are zeroed but kept: a reader's access to a hole would kill it, should the system have none left to fill it.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::System`].
    pub fn release(&self, range: Range<u64>) -> Result<(), Error> {
        let length = bounds::length(&range, self.length())?;
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
        rustix::fs::fallocate(self.as_fd(), flags, range.start, length).map_err(Error::system("giving memory back"))
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; nothing is written then.
    #[inline]
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.view.mapping().span_mut(offset, bytes.len() as u64)?.copy_in(bytes);
        Ok(())
    }

    /// Sets every byte of the range to `byte`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; nothing is written then.
    pub fn fill(&self, range: Range<u64>, byte: u8) -> Result<(), Error> {
        let length = bounds::length(&range, self.length())?;
        self.view.mapping().span_mut(range.start, length)?.fill(byte);
        Ok(())
    }

    /// Stores eight bytes at once, in this machine's byte order, at a multiple of 8.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Unaligned`]; [`Error::Misuse`] for an order that a store can't have.
    #[inline]
    pub fn store_u64(&self, offset: u64, value: u64, order: Ordering) -> Result<(), Error> {
        store_order(order)?;
        let span = self.view.mapping().span_mut(offset, size_of::<u64>() as u64)?;
        atomic_place(span.store_u64(value, order), offset, align_of::<u64>())
    }

    /// Stores four bytes at once, in this machine's byte order, at a multiple of 4.
    ///
    /// # Errors
    /// As for [`Memory::store_u64`].
    pub fn store_u32(&self, offset: u64, value: u32, order: Ordering) -> Result<(), Error> {
        store_order(order)?;
        let span = self.view.mapping().span_mut(offset, size_of::<u32>() as u64)?;
        atomic_place(span.store_u32(value, order), offset, align_of::<u32>())
    }

    /// Takes up to `length` bytes from a socket, pipe or file straight to `offset`: one `read(2)`. 0 is the end of the stream.
    ///
    /// # Errors
    /// `InvalidInput` if the range does not lie inside, or is empty (its answer would look like the end); otherwise what the
    /// system says, `WouldBlock` included. A signal does not end it.
    pub fn receive(&self, from: impl AsFd, offset: u64, length: usize) -> io::Result<usize> {
        let span = self.view.mapping().span_mut(offset, length as u64)?;
        if length == 0 {
            return Err(Error::Misuse("room for no bytes to receive").into());
        }
        span.receive(from.as_fd())
    }

    /// Takes up to `length` bytes from a place in a file to `offset`: one `pread(2)`. 0 is the end of the file.
    ///
    /// # Errors
    /// As for [`Memory::receive`].
    pub fn read_at(&self, file: impl AsFd, file_offset: u64, offset: u64, length: usize) -> io::Result<usize> {
        let span = self.view.mapping().span_mut(offset, length as u64)?;
        if length == 0 {
            return Err(Error::Misuse("room for no bytes to read").into());
        }
        span.read_at(file.as_fd(), file_offset)
    }

    /// The same memory in a mapping of its own, for reading only: what a reader on this host would hold.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn open_view(&self) -> Result<View, Error> {
        View::open(self.reopen_read_only()?, self.length())
    }

    /// Where the first byte lies in our address space, for a device that is to be told of it. Stays there while the memory lives.
    pub fn base_address(&self) -> std::ptr::NonNull<u8> {
        self.view.mapping().base()
    }

    /// For those who copy into this memory from another one.
    pub(crate) fn mapping(&self) -> &Mapping {
        self.view.mapping()
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

/// The orders that a store may have; any other makes the standard library panic.
#[inline]
fn store_order(order: Ordering) -> Result<(), Error> {
    match order {
        Ordering::Relaxed | Ordering::Release | Ordering::SeqCst => Ok(()),
        _ => Err(Error::Misuse("a store is relaxed, releasing or sequentially consistent")),
    }
}

/// Size of the huge pages we ask for: the one that x86-64 and most arm64 systems have. Without it, ordinary pages serve.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
