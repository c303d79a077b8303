//! Shared memory: memfds that this process or another writes, and read-only views of them. What the bytes mean is
//! decided in other crates.
//!
//! Several parties access the same bytes at the same time: threads of this process, other processes that have mapped
//! the memfd, and the kernel on behalf of a socket. Therefore shared bytes are **never behind a reference**: [`Memory`]
//! and [`View`] offer offsets, copies, and atomic loads and stores with an ordering. A copy that races with a writer
//! holds a mixture of old and new bytes. It is a `[u8]`, for which every mixture is a valid value; the layers above
//! detect the mixture by sequence numbers and checksums.
//!
//! What is true of every [`Memory`] and [`View`]:
//!
//! - It is one memfd, mapped `MAP_SHARED` as a whole, for as long as the value exists.
//! - It is sealed against shrinking. Reading beyond the end of a mapped file kills the process by SIGBUS.
//! - It is sealed against growing and against further seals, so that every process sees the same size.
//! - Each access is checked against the length, without overflow, before any byte is accessed.
//!
//! ```text
//!   Memory  (we write)  ──Deref──▶  View  (read-only)
//!      └────────────┬────────────────┘
//!                Mapping            pointer and length; returns…
//!                   └─▶ Span        …a checked range of it. All unsafe code is in mapping.rs
//! ```
//!
//! - [`Memory`] and [`View`]. **Start here.**
//! - [`crc`]: CRC-32C, of slices and of shared bytes.
//! - [`handover`]: passing memory to another process of this host for writing; [`local`]: the sockets for that.
//!   [`inherited`]: memory that the service manager kept for this process.
//!
//! The first access to each 4 KiB page of each mapping costs microseconds, even if the page already exists.
//! [`Memory::prefault`] and [`View::populate`] pay this in advance.
//!
//! Readers get a descriptor that is open for reading only ([`View::reopen_read_only`]), and the file has mode `0444`
//! and no name: only a process that was given a descriptor can reopen it, and another user's process for reading only.
//! A process of the same user can change the mode and write, unless the memory has the seal `F_SEAL_FUTURE_WRITE`
//! ([`Memory::create_single_writer`]). That seal also forbids `FALLOC_FL_PUNCH_HOLE` to the owner (EPERM, tried on
//! Linux 6.18), which [`Memory::release`] needs, and a server's module cannot write such a memory. Mappings are not
//! part of core dumps.

#![deny(unsafe_code)]

mod closer;
pub mod crc;
mod error;
pub mod handover;
pub mod inherited;
pub mod local;
#[allow(unsafe_code)] // the only module that dereferences mapped addresses
mod mapping;
mod shared;

pub use error::Error;
pub use handover::Handover;
pub use local::{Place, wait_readable};
pub use mapping::check;
pub use shared::{Claim, Memory, View};

/// The page size of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pages {
    /// The system's base pages.
    #[default]
    Small,
    /// Huge pages of 2 MiB. If the system has too few, base pages are used and a message is logged. Huge pages need
    /// fewer table entries in a network card. Copies by the processor did not become faster in measurements.
    Huge,
}

#[cfg(test)]
mod tests;
