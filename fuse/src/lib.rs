//! File systems of this process in the kernel's tree, by the FUSE protocol.
//!
//! ```text
//!   processes ── system calls ──▶ kernel ── requests ──▶ Request (pure) ──▶ FileSystem ──╮
//!                                        ◀── answers ─── Reply (pure) ◀── at once, or later
//!                                   by the device, or by io_uring
//! ```
//!
//! What is said, and no I/O:
//!
//! - [`abi`]: the numbers of the protocol. [`request`]: what the kernel asks, typed and checked.
//! - [`file_system`]: what is asked of a file system, and which request calls what. **Start here.** [`answer`]: how it
//!   answers, in the caller's thread or later from any other, where the bytes of writes and reads are, and what
//!   answers say. `negotiation`: what both ends can do.
//!
//! What carries it, two sisters:
//!
//! - `device`: threads that read `/dev/fuse`, each with a descriptor of its own; and what the kernel is told without
//!   asking ([`Notifier`]).
//! - `ring`: threads that share queues with the kernel, each on a processor of its own.
//!
//! What holds it together:
//!
//! - [`session`]: a file system that is mounted and served; and processes that are killed while they wait for an
//!   answer. [`mount`]: how a directory becomes one, and an ordinary directory again. [`error`]: what can go wrong.
//!
//! [`memory`] is a file system in this process's memory.
//!
//! It does not know what stands behind a file system. The kernel checks permissions, by ACLs too, and keeps locks by
//! itself.
#![deny(unsafe_code)]

pub mod abi;
pub mod answer;
mod device;
pub mod error;
pub mod file_system;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod memory;
pub mod mount;
mod negotiation;
pub mod request;
mod ring;
pub mod session;

pub use rustix::io::Errno;

pub use abi::ROOT;
pub use answer::{Answer, Later, Payload, Sink};
pub use device::Notifier;
pub use error::{EndError, StartError};
pub use file_system::FileSystem;
pub use mount::MountOptions;
pub use session::{Session, SessionOptions, Transport, Waiter, Waits};
