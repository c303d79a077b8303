//! Memory that other processes may read, and windows on it. What the bytes mean is not known here.
//!
//! Who the others are: threads of ours, readers in other processes that have mapped the same memfd, and the kernel on behalf of
//! a socket, all at the same moment as the writer. Therefore shared bytes are **never a reference**: [`Memory`] and [`View`] are
//! offsets, copies, and loads and stores with an ordering. A copy taken while somebody writes holds an arbitrary mixture of old
//! and new bytes; it is a `[u8]`, for which every mixture is a valid value, and whether it makes sense is found out by those
//! above (sequence numbers and checksums).
//!
//! What is true of every [`Memory`] and [`View`]:
//!
//! - It is one memfd, mapped `MAP_SHARED` as a whole, for as long as the value lives.
//! - It is sealed against shrinking. A mapped file that gets shorter kills its reader by SIGBUS; this one cannot.
//! - It is sealed against further seals and against growing, so that its size is a fact for everyone who was handed it.
//! - Each access is checked against its length, without overflow, before anything is touched.
//!
//! ```text
//!   Memory  (we write)  ──Deref──▶  View  (anyone reads)
//!      └────────────┬────────────────┘
//!                Mapping            pointer and length; hands out…
//!                   └─▶ Span        …a checked range of it. All unsafe stands in mapping.rs
//! ```
//!
//! A first touch of each 4 KiB page of each mapping costs microseconds, even where the page exists already: hence
//! [`Memory::prefault`] and [`View::populate`], before the time that counts.
//!
//! The seal `F_SEAL_FUTURE_WRITE` would forbid any other process to map the memory writable. It isn't used: it also forbids
//! `FALLOC_FL_PUNCH_HOLE` to ourselves (EPERM, tried on 6.18), and with it [`Memory::release`]. Instead the file's mode is made
//! `0400`, and readers are handed a descriptor opened for reading only ([`View::reopen_read_only`]).

#![deny(unsafe_code)]

mod bounds;
pub mod crc;
mod error;
pub mod handover;
pub mod local;
#[allow(unsafe_code)] // the only module that dereferences mapped addresses
mod mapping;
mod owned;
mod sealed;
mod view;
mod wait;

pub use bounds::check;
pub use error::Error;
pub use handover::Handover;
pub use local::Place;
pub use owned::Memory;
pub use view::{Claim, View};
pub use wait::wait_readable;

/// Which pages a [`Memory`] is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pages {
    /// The system's ordinary pages.
    #[default]
    Small,
    /// Huge pages of 2 MiB; where the system has none to spare, ordinary ones, and a message in the log.
    /// They spare a network card table entries. For copies by the processor they were measured to bring nothing.
    Huge,
}

#[cfg(test)]
mod tests;
