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

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_fabric::{Peer, TransportKind};
use remora_messenger::{Address, Connection};

use crate::client::Reads;
use crate::layout::Layout;
use crate::link::{Caller, Laid, Lane, Rdma, Security};
use crate::reader::{Blocks, BlocksError, Found, InPlace, OneSided, ReaderError, Seen};
use crate::rules::{Standing, State, Version};
use crate::shape::{BLOCK_BYTES, Copies, Shape};
use crate::wire::{Call, Mode, Reply};

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
            if all.is_some_and(|all| all.history() != seen.history()) {
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

/// Open copy: a copy whose region this process can read, in place or over the fabric.
struct OpenCopy {
    way: Way,
    transport: TransportKind,
    /// How long it took to connect.
    took: Duration,
    /// It cannot be read any more.
    is_over: AtomicBool,
}

enum Way {
    /// The peer keeps the server's grant.
    Here(InPlace, #[allow(dead_code)] Mutex<Box<dyn Peer>>),
    Far(Mutex<OneSided>),
}

impl OpenCopy {
    /// Connects by the nearest of these transports that both ends have.
    ///
    /// # Errors
    /// Why none of them can be used.
    fn open(
        connection: &Connection,
        (session, keys): (u64, &[Vec<u8>]),
        layout: Layout,
        (transports, rdma): (&[TransportKind], &Rdma),
    ) -> Result<OpenCopy, String> {
        let lane = Lane {
            transports,
            rdma,
            length: layout.length(),
            depth: DEPTH,
            connect_limit: CONNECT_LIMIT,
            read_limit: READ_LIMIT,
        };
        let sink = OneSided::sink(MOST_BLOCKS_AT_ONCE).map_err(|error| error.to_string())?;
        let Laid { peer, transport, took, .. } = lane.connect(connection, (session, keys), &sink)?;
        let way = match peer.view() {
            Some(view) => Way::Here(InPlace::new(view, layout), Mutex::new(peer)),
            None => Way::Far(Mutex::new(OneSided::new(peer, transport, sink, layout))),
        };
        Ok(OpenCopy { way, transport, took, is_over: AtomicBool::new(false) })
    }

    fn transport(&self) -> TransportKind {
        self.transport
    }

    fn took(&self) -> Duration {
        self.took
    }

    /// Whether it is in memory of this host.
    fn is_here(&self) -> bool {
        matches!(self.way, Way::Here(..))
    }

    /// Whether it cannot be read any more.
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// How the copy stands.
    fn line(&self) -> Result<Standing, ReaderError> {
        self.noting(match &self.way {
            Way::Here(reader, _) => reader.line(),
            Way::Far(reader) => lock(reader).line(READ_LIMIT),
        })
    }

    /// Reads at most [`MOST_BLOCKS_AT_ONCE`] blocks, and then the line.
    fn blocks(&self, first: u64, into: &mut [u8]) -> Result<Found, ReaderError> {
        self.noting(match &self.way {
            Way::Here(reader, _) => reader.blocks(first, into),
            Way::Far(reader) => lock(reader).blocks(first, into, READ_LIMIT),
        })
    }

    fn noting<T>(&self, result: Result<T, ReaderError>) -> Result<T, ReaderError> {
        if result.as_ref().is_err_and(ReaderError::is_final) {
            self.is_over.store(true, Ordering::Release);
        }
        result
    }
}

fn lock(reader: &Mutex<OneSided>) -> MutexGuard<'_, OneSided> {
    reader.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Blocks that are read together: 1 MiB, as much as the kernel asks for at once.
const MOST_BLOCKS_AT_ONCE: u64 = 256;

/// Reads under way at a peer: blocks, entries, and the line.
const DEPTH: usize = 3;

/// Longest time for a connection to a server's exporter.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Longest time for a read: then another copy is read.
const READ_LIMIT: Duration = Duration::from_secs(1);

/// Which copy is read. It does no I/O: sightings of the copies' lines and the time go in.
///
/// A copy is read if it was seen a moment ago, is whole, and has applied whatever was read before. It is left if
/// another one had applied more a while before it was seen itself: then its server gets no writes, or hangs.
#[derive(Debug, Default)]
struct Choice {
    places: [Place; Copies::MOST],
    /// The copy that is read.
    current: Option<usize>,
}

/// What is known of a copy.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// Whether it is in memory of this host.
    is_here: bool,
    last: Option<Sighting>,
    /// Two earlier ones, the later one first. The other one is at least [`LAG`] older, however often a copy is seen.
    kept: [Option<Sighting>; 2],
}

#[derive(Clone, Copy, Debug)]
struct Sighting {
    line: Standing,
    at: Instant,
}

impl Choice {
    /// The line of a copy was read.
    fn sighted(&mut self, server: usize, is_here: bool, line: Standing, now: Instant) {
        if let Some(place) = self.places.get_mut(server) {
            let last = Some(Sighting { line, at: now });
            let kept = match place.kept {
                [Some(newer), _] if newer.at + LAG > now => place.kept,
                [newer, _] => [last, newer],
            };
            *place = Place { is_here, last, kept };
        }
    }

    /// A copy cannot be read any more.
    fn lost(&mut self, server: usize) {
        if let Some(place) = self.places.get_mut(server) {
            *place = Place::default();
        }
    }

    /// How many copies can be read at present.
    fn readable(&self, now: Instant) -> usize {
        self.places.iter().filter(|place| place.is_readable(Version::NONE, now)).count()
    }

    /// The copy to read, of those that have applied everything up to `through`. `None`: no copy can be read at present.
    /// `first` is the one with which it begins: hosts that begin with different ones share the copies out.
    fn choose(&mut self, through: Version, first: usize, now: Instant) -> Option<usize> {
        let (places, number) = (&self.places, self.places.len());
        let is_good = |server: &usize| places[*server].is_readable(through, now) && !self.falls_behind(*server);
        let all = || (0..number).map(|step| (first + step) % number).filter(is_good);
        let kept = self.current.filter(is_good);
        let chosen = kept.or_else(|| all().find(|server| places[*server].is_here)).or_else(|| all().next());
        self.current = chosen;
        chosen
    }

    /// Whether another copy had applied more, a while before this one was seen.
    fn falls_behind(&self, server: usize) -> bool {
        let Some(seen) = self.places[server].last else { return false };
        let sightings = self.places.iter().flat_map(|place| [place.last, place.kept[0], place.kept[1]]).flatten();
        sightings
            .filter(|other| other.line.state == State::Whole && other.at + LAG <= seen.at)
            .any(|other| other.line.applied > seen.line.applied)
    }
}

impl Place {
    fn is_readable(&self, through: Version, now: Instant) -> bool {
        self.last.is_some_and(|Sighting { line, at }| {
            line.state == State::Whole && line.applied >= through && now.saturating_duration_since(at) <= FRESH
        })
    }
}

/// How often each copy is looked at.
const SIGHT_EVERY: Duration = Duration::from_millis(250);

/// How much later than another one a copy may have a write. Less than [`SIGHT_EVERY`], so that of two sightings of a
/// copy one is always old enough.
const LAG: Duration = Duration::from_millis(200);

/// How long a sighting counts: some that were late because the host was busy, and not a server that hangs.
const FRESH: Duration = Duration::from_millis(1500);

/// What the lookouts have found.
struct Shared {
    found: Mutex<LookoutState>,
    /// Something was found: for what waits for a copy.
    changed: Condvar,
    /// The lookouts are to end.
    stops: Condvar,
}

struct LookoutState {
    choice: Choice,
    copies: Vec<Option<Arc<OpenCopy>>>,
    /// Why the copy of a server is not read; empty before it was tried.
    why: Vec<String>,
    is_stopping: bool,
}

impl Shared {
    fn new(servers: usize) -> Shared {
        let found = LookoutState {
            choice: Choice::default(),
            copies: vec![None; servers],
            why: vec![String::new(); servers],
            is_stopping: false,
        };
        Shared { found: Mutex::new(found), changed: Condvar::new(), stops: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, LookoutState> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The copy to read, of those that have applied everything up to `through`. Waits for one until then.
    ///
    /// # Errors
    /// Why no copy can be read.
    fn choose(&self, through: Version, first: usize, until: Instant) -> Result<(usize, Arc<OpenCopy>), String> {
        let mut found = self.lock();
        loop {
            let now = Instant::now();
            let chosen = found.choice.choose(through, first, now);
            if let Some((server, copy)) = chosen.and_then(|server| Some((server, found.copies[server].clone()?))) {
                return Ok((server, copy));
            }
            let left = until.saturating_duration_since(now);
            if left.is_zero() || found.is_stopping {
                return Err(found.why(through));
            }
            found = wait(&self.changed, found, left.min(SIGHT_EVERY));
        }
    }

    /// Waits until each server was tried, but not longer than until then. Returns how many copies can be read.
    fn wait_for_all(&self, until: Instant) -> usize {
        let mut found = self.lock();
        loop {
            let now = Instant::now();
            let is_tried = |(copy, why): (&Option<Arc<OpenCopy>>, &String)| copy.is_some() || !why.is_empty();
            if found.copies.iter().zip(&found.why).all(is_tried) || now >= until {
                return found.choice.readable(now);
            }
            found = wait(&self.changed, found, until - now);
        }
    }

    /// The line of a copy was read after blocks of it. That is a sighting too: without it, a copy that has applied more
    /// since a lookout's last one would seem to lack what was just read of it.
    fn read(&self, server: usize, copy: &Arc<OpenCopy>, line: Standing) {
        let mut found = self.lock();
        // Not if it was given up meanwhile.
        if found.copies[server].as_ref().is_some_and(|current| Arc::ptr_eq(current, copy)) {
            found.choice.sighted(server, copy.is_here(), line, Instant::now());
            drop(found);
            self.changed.notify_all();
        }
    }

    /// A lookout has read the line of a copy.
    fn sighted(&self, server: usize, copy: &Arc<OpenCopy>, line: Standing) {
        let mut found = self.lock();
        found.choice.sighted(server, copy.is_here(), line, Instant::now());
        found.copies[server] = Some(Arc::clone(copy));
        found.why[server] = match line.state {
            State::Whole => String::new(),
            _ => "its copy lacks writes".into(),
        };
        drop(found);
        self.changed.notify_all();
    }

    /// A copy cannot be read, or not any more.
    fn lost(&self, server: usize, why: String) {
        let mut found = self.lock();
        found.choice.lost(server);
        (found.copies[server], found.why[server]) = (None, why);
        drop(found);
        self.changed.notify_all();
    }

    /// The lookouts end.
    fn stop(&self) {
        self.lock().is_stopping = true;
        self.changed.notify_all();
        self.stops.notify_all();
    }

    fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// Sleeps, unless the lookouts are to end. Returns whether they go on.
    fn pause(&self, time: Duration) -> bool {
        let (mut found, until) = (self.lock(), Instant::now() + time);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if found.is_stopping || left.is_zero() {
                return !found.is_stopping;
            }
            found = wait(&self.stops, found, left);
        }
    }
}

fn wait<'a>(of: &Condvar, found: MutexGuard<'a, LookoutState>, limit: Duration) -> MutexGuard<'a, LookoutState> {
    of.wait_timeout(found, limit).map_or_else(|error| error.into_inner().0, |(found, _)| found)
}

impl LookoutState {
    fn why(&self, through: Version) -> String {
        let whys = self.why.iter().enumerate().map(|(server, why)| match why.as_str() {
            "" if self.copies[server].is_some() => {
                format!("server {}: it was not seen for a while, or lacks {through}, which was read before", server + 1)
            }
            "" => format!("server {}: no answer yet", server + 1),
            why => format!("server {}: {why}", server + 1),
        });
        whys.collect::<Vec<_>>().join("; ")
    }
}

/// A thread for each server. It connects, is granted the copy's region, and reads the copy's line from time to
/// time. What it finds decides which copy is read.
///
/// ```text
///   connect ── Open{Read} ── Look ── region ──▶ line, each quarter of a second ──▶ Shared
///      ▲                                          │
///      ╰────────── pause ◀── the connection is over, or the region cannot be read
/// ```
///
/// After the two questions the server is asked nothing. Its connection keeps the grant, and tells of the server's end.
struct Lookout {
    server: usize,
    address: Address,
    shape: Shape,
    options: ReadOnlyOptions,
    shared: Arc<Shared>,
    counts: Arc<Counts>,
}

impl Lookout {
    /// The thread.
    fn run(self) {
        let (mut pause, mut said) = (FIRST_PAUSE, String::new());
        while !self.shared.is_stopping() {
            let why = match self.open() {
                Ok((caller, copy)) => {
                    let transport = copy.transport();
                    let connected_in = copy.took();
                    tracing::info!(server = %self.address, %transport, ?connected_in, "a copy can be read");
                    (pause, said) = (FIRST_PAUSE, String::new());
                    self.watch(&caller, &copy)
                }
                Err(why) => why,
            };
            if why != said && !self.shared.is_stopping() {
                tracing::info!(server = %self.address, why, "a copy cannot be read");
                said.clone_from(&why);
            }
            self.shared.lost(self.server, why);
            if !self.shared.pause(pause) {
                return;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Connects, and is granted the region.
    fn open(&self) -> Result<(Caller, Arc<OpenCopy>), String> {
        let ReadOnlyOptions { security, reads, rdma, limit } = &self.options;
        let caller = Caller::connect(&self.address, security)?;
        let goes_on = || if self.shared.is_stopping() { Err("this process ends".to_owned()) } else { Ok(()) };
        let ask = |call: &Call| {
            self.counts.asked();
            match caller.ask(call, *limit, goes_on)?.0 {
                Reply::Refused { text, .. } => Err(text),
                reply => Ok(reply),
            }
        };
        let Reply::Standing { standing, .. } = ask(&Call::Open { shape: self.shape, mode: Mode::Read, writer: 0 })?
        else {
            return Err(WRONG_ANSWER.into());
        };
        if standing.state == State::Empty {
            return Err("it has no copy of the volume".into());
        }
        let Reply::Attached { session, keys } = ask(&Call::Look)? else { return Err(WRONG_ANSWER.into()) };
        let ways = (reads.transports(), rdma);
        let copy = OpenCopy::open(caller.connection(), (session, &keys), Layout::of(self.shape), ways)?;
        Ok((caller, Arc::new(copy)))
    }

    /// Looks at the copy until it cannot be read any more. Returns why.
    fn watch(&self, caller: &Caller, copy: &Arc<OpenCopy>) -> String {
        loop {
            if let Some(why) = caller.why_over() {
                return why;
            }
            self.counts.looked();
            match copy.line() {
                Ok(line) if line.state == State::Empty => return "its copy is no more".into(),
                Ok(line) => self.shared.sighted(self.server, copy, line),
                Err(ReaderError::TornLine) => {}
                Err(error) => return error.to_string(),
            }
            if !self.shared.pause(SIGHT_EVERY) || copy.is_over() {
                return "its region cannot be read any more".into();
            }
        }
    }
}

const WRONG_ANSWER: &str = "it has answered another question: use the same release on all hosts";

/// A process that was restarted is back after a few of these.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// A server that comes back is read again within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::rules::Generation;

    fn line(state: State, applied: u64) -> Standing {
        let start = Generation::NONE.next().unwrap().start();
        Standing { state, applied: Version::from_word(start.word() + applied).unwrap(), ..Standing::default() }
    }

    /// Copies that are seen every quarter of a second, a little after each other.
    struct Seen {
        choice: Choice,
        now: Instant,
    }

    impl Seen {
        fn new() -> Seen {
            Seen { choice: Choice::default(), now: Instant::now() }
        }

        fn look(&mut self, applied: &[Option<u64>]) {
            self.now += SIGHT_EVERY - Duration::from_millis(10) * applied.len() as u32;
            for (server, applied) in applied.iter().enumerate() {
                self.now += Duration::from_millis(10);
                if let Some(applied) = applied {
                    self.choice.sighted(server, false, line(State::Whole, *applied), self.now);
                }
            }
        }

        fn choose(&mut self, through: u64, first: usize) -> Option<usize> {
            self.choice.choose(line(State::Whole, through).applied, first, self.now)
        }
    }

    #[test]
    fn a_copy_is_read_as_long_as_it_gets_the_writes_and_left_soon_after() {
        let mut seen = Seen::new();
        assert_eq!(seen.choose(0, 1), None);
        seen.look(&[Some(5), Some(5), Some(5)]);
        assert_eq!(seen.choose(5, 1), Some(1));
        for applied in 6..20 {
            // The others are a little further each time.
            seen.look(&[Some(applied + 1), Some(applied), Some(applied + 1)]);
            assert_eq!(seen.choose(applied, 2), Some(1), "it is kept");
        }
        seen.look(&[Some(21), Some(19), Some(21)]);
        seen.look(&[Some(22), Some(19), Some(22)]);
        assert_eq!(seen.choose(19, 1), Some(2), "its server gets no writes any more");
        seen.look(&[Some(23), Some(23), Some(23)]);
        assert_eq!(seen.choose(22, 1), Some(2), "no need to go back");
        assert_eq!(seen.choose(24, 1), None, "none has what was read");
    }

    #[test]
    fn a_copy_that_hangs_is_behind_or_lost_is_not_read() {
        let mut seen = Seen::new();
        seen.look(&[Some(5), Some(5), None]);
        assert_eq!((seen.choose(5, 0), seen.choice.readable(seen.now)), (Some(0), 2));
        seen.choice.sighted(0, false, line(State::Behind, 5), seen.now);
        assert_eq!(seen.choose(5, 0), Some(1));
        seen.choice.lost(1);
        assert_eq!(seen.choose(5, 0), None);
        seen.look(&[Some(6), Some(6), None]);
        assert_eq!(seen.choose(6, 0), Some(0));
        // Nothing was seen of it for a while; the writer has written nothing either.
        for _ in 0..7 {
            seen.look(&[None, Some(6), None]);
        }
        assert_eq!((seen.choose(6, 0), seen.choice.readable(seen.now)), (Some(1), 1));
    }

    /// Each read of blocks is a sighting too: thousands a second.
    #[test]
    fn a_copy_that_is_seen_all_the_time_is_known_to_be_ahead_of_others() {
        let mut seen = Seen::new();
        seen.look(&[Some(0), Some(0), Some(0)]);
        assert_eq!(seen.choose(0, 0), Some(0));
        for applied in 1..1000 {
            seen.now += Duration::from_millis(1);
            seen.choice.sighted(0, false, line(State::Whole, applied), seen.now);
            assert_eq!(seen.choose(applied, 0), Some(0), "it is what was just read");
        }
        // A copy that had the first hundred writes after the last of these was applied lags, and one that had nearly
        // all of them does not.
        seen.choice.lost(2);
        seen.choice.sighted(1, false, line(State::Whole, 100), seen.now);
        assert!(seen.choice.falls_behind(1));
        seen.choice.sighted(1, false, line(State::Whole, 950), seen.now);
        assert!(!seen.choice.falls_behind(1) && !seen.choice.falls_behind(0));
    }

    #[test]
    fn memory_of_this_host_is_read_first() {
        let mut seen = Seen::new();
        seen.look(&[Some(5), Some(5), Some(5)]);
        seen.choice.sighted(2, true, line(State::Whole, 5), seen.now);
        assert_eq!(seen.choose(5, 0), Some(2));
        // Unless it lags: as memory of a process that was stopped does.
        seen.look(&[Some(7), Some(7), None]);
        seen.now += SIGHT_EVERY;
        seen.choice.sighted(2, true, line(State::Whole, 5), seen.now);
        assert_eq!(seen.choose(5, 0), Some(0));
    }
}
