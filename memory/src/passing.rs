//! One socket option that no crate wraps. The only unsafe code for local sockets.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// Says whether peers of this local socket may attach descriptors to their packets. The system refuses such a packet
/// with `EPERM` otherwise, before it reaches the socket. The connections of a listening socket inherit the setting.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.16.
#[allow(unsafe_code)] // no crate wraps this option
pub(crate) fn set_pass_rights(socket: impl AsFd, allowed: bool) -> io::Result<()> {
    let value = libc::c_int::from(allowed);
    let length = size_of_val(&value) as libc::socklen_t;
    let socket = socket.as_fd();
    // SAFETY: The socket is open, as it is borrowed. The value is a local variable of exactly that length, which
    // outlives the call, and the system only reads it.
    let set = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const value).cast(), length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The number of the option on x86-64, arm64 and all other systems that use the generic numbers. `libc` does not have
/// it yet.
const SO_PASSRIGHTS: libc::c_int = 83;
