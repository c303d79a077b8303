//! Errors: what keeps a directory from becoming a file system, or from being an ordinary one again.

use std::io;
use std::path::PathBuf;

use crate::abi::{LEAST_MINOR, MAJOR};

/// Why a file system is not mounted.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It cannot be a mount point.
    #[error("cannot mount at {directory}: {source}; give an existing directory", directory = .directory.display())]
    Directory {
        /// What was given.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },

    /// A file system is mounted there whose server has ended.
    #[error(
        "{directory} has a file system whose server has ended: run `umount {directory}`, then try again",
        directory = .directory.display()
    )]
    Dead {
        /// What was given.
        directory: PathBuf,
    },

    /// A file system of the same kind is mounted there, and served.
    #[error(
        "{directory} has a file system of this kind that is served by another process: unmount it first \
         (`umount {directory}`), or give another directory",
        directory = .directory.display()
    )]
    Taken {
        /// What was given.
        directory: PathBuf,
    },

    /// The kernel's device cannot be opened.
    #[error("cannot open {DEVICE}: {0}; load the kernel's module `fuse`, or let the container have the device")]
    Device(io::Error),

    /// The system lets only root mount.
    #[error(
        "not permitted to mount at {directory}: run as root (in a container: with the capability CAP_SYS_ADMIN)",
        directory = .directory.display()
    )]
    NotPermitted {
        /// What was given.
        directory: PathBuf,
    },

    /// The system does not mount.
    #[error("cannot mount at {directory}: {source}", directory = .directory.display())]
    Mount {
        /// What was given.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },

    /// The kernel has another protocol.
    #[error("the kernel speaks FUSE {major}.{minor}; {MAJOR}.{LEAST_MINOR} (Linux 5.4) is needed at least")]
    Version {
        /// Its major version.
        major: u32,
        /// Its minor version.
        minor: u32,
    },

    /// The kernel does not begin as the protocol says.
    #[error("the kernel did not negotiate the file system at {directory}: {why}", directory = .directory.display())]
    Negotiation {
        /// What was given.
        directory: PathBuf,
        /// What happened.
        why: String,
    },

    /// An option that cannot be.
    #[error("{0}")]
    Misuse(&'static str),

    /// No threads.
    #[error("cannot start the threads of the file system at {directory}: {source}", directory = .directory.display())]
    Threads {
        /// What was given.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Why a file system did not end well.
#[derive(Debug, thiserror::Error)]
pub enum EndError {
    /// The mount is still there.
    #[error(
        "{directory} is still mounted: {source}; run `umount --lazy {directory}`",
        directory = .directory.display()
    )]
    Mounted {
        /// Where.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },

    /// Processes had files open. They cannot use them any more.
    #[error(
        "{directory} was in use when it was unmounted: processes that have files of it open cannot use them any more",
        directory = .directory.display()
    )]
    Busy {
        /// Where.
        directory: PathBuf,
    },

    /// Processes had files open. They cannot use them any more, and the mount is left, so that they do not write below
    /// it when they are started again.
    #[error(
        "{directory} was in use: it stays mounted, and every use of it fails, until it is mounted again or unmounted \
         (`umount {directory}`)",
        directory = .directory.display()
    )]
    Left {
        /// Where.
        directory: PathBuf,
    },

    /// As [`EndError::Busy`], and the page cache could not be written back first.
    #[error(
        "{directory} was in use when it ended, and what processes had written to its files was not all \
         written back: {why}",
        directory = .directory.display()
    )]
    Unwritten {
        /// Where.
        directory: PathBuf,
        /// Why.
        why: String,
    },

    /// Threads of the file system do not return from its methods.
    #[error(
        "{directory} is not served any more, but {threads} calls of its file system have not returned",
        directory = .directory.display()
    )]
    Hangs {
        /// Where it was.
        directory: PathBuf,
        /// How many.
        threads: usize,
    },
}

/// The kernel's device.
pub(crate) const DEVICE: &str = "/dev/fuse";
