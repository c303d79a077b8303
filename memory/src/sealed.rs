//! Proof that a file can be mapped without danger.

use std::os::fd::BorrowedFd;

use rustix::fs::SealFlags;

use crate::Error;

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
