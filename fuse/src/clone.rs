//! One `ioctl(2)`: another descriptor of a mounted file system, with requests under way of its own.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{Opcode, Setter, opcode};

use crate::error::DEVICE;

/// Opens the device for the connection that `first` has.
pub(crate) fn clone(first: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let device = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let number = first.as_raw_fd().cast_unsigned();
    // SAFETY: The code is that of FUSE_DEV_IOC_CLONE. The kernel reads a u32 behind the pointer and writes nothing;
    // `Setter` gives it a pointer to `number`, which is a u32 and lives through the call.
    let setter = unsafe { Setter::<CLONE, u32>::new(number) };
    // SAFETY: The device is open. For a descriptor that is not of the device, the kernel says ENOTTY and touches
    // nothing.
    unsafe { rustix::ioctl::ioctl(&device, setter) }?;
    Ok(device)
}

/// `FUSE_DEV_IOC_CLONE`, which is `_IOR(229, 0, uint32_t)`.
const CLONE: Opcode = opcode::read::<u32>(229, 0);
