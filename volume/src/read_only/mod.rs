//! Read-only: a volume as a host reads it that does not write. It reads one copy at a time, out of its region, and goes
//! on with another one when that one's server is gone, hangs, or gets no writes.
//!
//! ```text
//!   caller ── read ──▶ ReadOnly ── blocks, then the line ──▶ the chosen copy's region
//!                         ▲                                   (no processor of its server, if the transport has none)
//!                         ╰── Choice ◀── lines ── Lookout: a thread for each server
//! ```
//!
//! - `choice`: which copy is read. **Start here.**
//! - `lookout`: connections to the servers, and sightings of their copies; `open_copy`: one that can be read.
//!
//! What is promised, whatever copies are read:
//!
//! - Nothing that was read is undone by what is read later, except by a later writer: the history then has
//!   another number ([`Blocks::read`]). A copy that has not applied what was read before is not read.
//! - A write is seen at most about a second after it was acknowledged, while one of the copies that hold it can be
//!   read.
//! - A read ends within [`ReadOnlyOptions::limit`], and some time for the last copy that was tried.
//!
//! Writers learn nothing of readers. A server is asked two things when a reader connects, and nothing for a read.

mod choice;
mod lookout;
mod open_copy;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_messenger::Address;

use self::lookout::{Lookout, Shared};
use self::open_copy::{CONNECT_LIMIT, MOST_BLOCKS_AT_ONCE, OpenCopy};
use crate::client::Reads;
use crate::files::{Blocks, BlocksError, Seen, history};
use crate::link::Security;
use crate::message::{Standing, State};
use crate::rdma::Rdma;
use crate::reader::ReaderError;
use crate::shape::{BLOCK_BYTES, Shape};
use crate::version::Version;

/// Settings of a reader.
#[derive(Clone, Debug)]
pub struct ReadOnlyOptions {
    /// What protects the connections to servers.
    pub security: Security,
    /// By which transports copies may be read. [`Reads::Asked`] permits no transport.
    pub reads: Reads,
    /// By which devices RDMA is used, if `reads` permits it.
    pub rdma: Rdma,
    /// How long a server may leave a question unanswered, and how long a read waits for a copy that can be read.
    pub limit: Duration,
}

impl Default for ReadOnlyOptions {
    fn default() -> ReadOnlyOptions {
        ReadOnlyOptions {
            security: Security::default(),
            reads: Reads::default(),
            rdma: Rdma::default(),
            limit: Duration::from_secs(5),
        }
    }
}

/// Why a volume cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadOnlyError {
    /// There are not as many servers as copies.
    #[error("the volume has {copies} copies, and {servers} servers were given")]
    Servers {
        /// Copies of the volume.
        copies: usize,
        /// Servers that were given.
        servers: usize,
    },
    /// Copies are read out of memory, and no transport was permitted for that.
    #[error("a host that only reads never asks servers for blocks: use --reads here or --reads anywhere")]
    NoWay,
    /// No copy can be read.
    #[error("no copy can be read: {0}")]
    NoCopy(String),
    /// The system provides no thread.
    #[error("starting a reader: {0}")]
    System(#[from] io::Error),
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadOnlyCounts {
    /// Questions that servers were asked.
    pub questions: u64,
    /// Reads of lines.
    pub looks: u64,
    /// Reads of blocks.
    pub reads: u64,
}

/// As [`ReadOnlyCounts`].
#[derive(Debug, Default)]
struct Counts {
    questions: AtomicU64,
    looks: AtomicU64,
    reads: AtomicU64,
}

impl Counts {
    fn asked(&self) {
        self.questions.fetch_add(1, Ordering::Relaxed);
    }

    fn looked(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }
}

/// Says what was done so far, from any thread.
#[derive(Clone, Debug)]
pub struct ReadOnlyCounter(Arc<Counts>);

impl ReadOnlyCounter {
    /// What was done so far.
    pub fn counts(&self) -> ReadOnlyCounts {
        let Counts { questions, looks, reads } = &*self.0;
        let [questions, looks, reads] = [questions, looks, reads].map(|count| count.load(Ordering::Relaxed));
        ReadOnlyCounts { questions, looks, reads }
    }
}

/// See the module's text. When it is dropped, its threads end, after what they wait for.
pub struct ReadOnly {
    shared: Arc<Shared>,
    counts: Arc<Counts>,
    lookouts: Vec<JoinHandle<()>>,
    limit: Duration,
    progress: Mutex<Progress>,
    /// The copy with which this reader begins.
    first: usize,
}

/// How far was read.
#[derive(Clone, Default)]
struct Progress {
    /// Everything up to this write may have been read.
    through: Version,
    /// The copy that had applied it.
    of: Option<Arc<OpenCopy>>,
}

impl ReadOnly {
    /// Opens a volume for reading. Waits until each server was tried, or has not answered in time.
    ///
    /// # Errors
    /// [`ReadOnlyError`].
    pub fn open(shape: Shape, servers: &[Address], options: &ReadOnlyOptions) -> Result<ReadOnly, ReadOnlyError> {
        let copies = shape.copies();
        if copies.number() != servers.len() {
            return Err(ReadOnlyError::Servers { copies: copies.number(), servers: servers.len() });
        }
        if options.reads.transports().is_empty() {
            return Err(ReadOnlyError::NoWay);
        }
        let shared = Arc::new(Shared::new(servers.len()));
        let first = getrandom::u32().unwrap_or_default() as usize % servers.len();
        let mut reader = ReadOnly {
            shared: Arc::clone(&shared),
            counts: Arc::default(),
            lookouts: Vec::new(),
            limit: options.limit,
            progress: Mutex::default(),
            first,
        };
        for (server, address) in servers.iter().enumerate() {
            let (address, options) = (address.clone(), options.clone());
            let (shared, counts) = (Arc::clone(&shared), Arc::clone(&reader.counts));
            let lookout = Lookout { server, address, shape, options, shared, counts };
            let thread = std::thread::Builder::new().name("volume-lookout".into()).spawn(|| lookout.run())?;
            reader.lookouts.push(thread);
        }
        // Two answers, and a connection to the memory.
        let until = Instant::now() + options.limit * 2 + CONNECT_LIMIT;
        let readable = shared.wait_for_all(until);
        let needed = copies.number() - copies.hold() + 1;
        if readable < needed {
            tracing::warn!(
                readable,
                needed,
                "so few copies can be read that all of them may lack what was acknowledged"
            );
        }
        shared.choose(Version::NONE, first, until).map_err(ReadOnlyError::NoCopy)?;
        Ok(reader)
    }

    /// Says what was done so far.
    pub fn counter(&self) -> ReadOnlyCounter {
        ReadOnlyCounter(Arc::clone(&self.counts))
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads out of this copy what is not older than what was read `before`. `None`: it is not one to be read now.
    fn read_of(
        &self,
        (server, copy): (usize, &Arc<OpenCopy>),
        before: &Progress,
        (first, into): (u64, &mut [u8]),
    ) -> Result<Option<Seen>, BlocksError> {
        let is_same = before.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, copy));
        let may_read = |line: Standing| {
            self.shared.read(server, copy, line);
            line.state == State::Whole && line.applied >= before.through
        };
        // What is read of another copy must not be older.
        if !is_same && !copy.line().is_ok_and(may_read) {
            return Ok(None);
        }
        let mut all: Option<Seen> = None;
        for (first, part) in (first..).step_by(MOST_BLOCKS_AT_ONCE as usize).zip(into.chunks_mut(MOST_BYTES_AT_ONCE)) {
            self.counts.read();
            let found = match copy.blocks(first, part) {
                Ok(found) => found,
                Err(error @ (ReaderError::Torn { .. } | ReaderError::TornLine)) => {
                    return Err(BlocksError::Again(error.to_string()));
                }
                Err(error @ ReaderError::OutOfBounds { .. }) => return Err(BlocksError::Failed(error.to_string())),
                Err(error) => {
                    self.shared.lost(server, error.to_string());
                    return Ok(None);
                }
            };
            if !may_read(found.line) {
                return Ok(None);
            }
            let seen = Seen { newest: found.newest(), applied: found.line.applied };
            if all.is_some_and(|all| history(all.applied) != history(seen.applied)) {
                return Err(BlocksError::Again("another writer has opened the volume".into()));
            }
            let newest = all.map_or(seen.newest, |all| all.newest.max(seen.newest));
            all = Some(Seen { newest, ..seen });
        }
        let Some(seen) = all else {
            return Ok(Some(Seen { newest: Version::NONE, applied: before.through }));
        };
        let mut progress = self.progress();
        // Unless another thread has read more of another copy meanwhile: this one may lack that.
        if seen.applied >= progress.through {
            *progress = Progress { through: seen.applied, of: Some(Arc::clone(copy)) };
        }
        Ok(Some(seen))
    }
}

impl Blocks for ReadOnly {
    fn read(&self, first: u64, into: &mut [u8]) -> Result<Seen, BlocksError> {
        let until = Instant::now() + self.limit;
        loop {
            let before = self.progress().clone();
            let (server, copy) = self.shared.choose(before.through, self.first, until).map_err(BlocksError::Failed)?;
            if let Some(seen) = self.read_of((server, &copy), &before, (first, into))? {
                return Ok(seen);
            }
            if Instant::now() >= until {
                return Err(BlocksError::Failed("every copy that was tried could not be read".into()));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        self.shared.stop();
        for lookout in self.lookouts.drain(..) {
            let _ = lookout.join(); // a panic was reported where it happened
        }
    }
}

const MOST_BYTES_AT_ONCE: usize = MOST_BLOCKS_AT_ONCE as usize * BLOCK_BYTES;

/// Between two copies that are tried.
const PAUSE: Duration = Duration::from_millis(2);
