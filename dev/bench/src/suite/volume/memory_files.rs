//! `remora-bench memory-files`: the floor of all file systems by our FUSE, whose files are in this process's memory.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::{Session, SessionOptions};

use crate::sync::Result;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The directory at which the files appear.
    pub directory: PathBuf,
    /// How the kernel asks.
    #[arg(default_value = "ring")]
    pub transport: Transport,
}

/// How the kernel asks for files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// By io_uring.
    Ring,
    /// By /dev/fuse.
    Device,
}

impl Transport {
    /// Its word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Transport::Ring => "ring",
            Transport::Device => "device",
        }
    }
}

/// Serves the files until they are unmounted, with the same settings as `remora volume mount`.
///
/// # Errors
/// It cannot be mounted.
pub fn run(options: &Options) -> Result<bool> {
    let session = SessionOptions {
        ring: options.transport == Transport::Ring,
        write_back: false,
        lists_attributes: true,
        ..SessionOptions::default()
    };
    let session = Session::start(&options.directory, Arc::new(MemoryFileSystem::new(VALID)), &session)?;
    while !session.wait(LOOK_AGAIN) {}
    session.end()?;
    Ok(true)
}

/// For how long the kernel uses what it was told. No other process changes these files.
const VALID: Duration = Duration::from_secs(60);

const LOOK_AGAIN: Duration = Duration::from_secs(1);
