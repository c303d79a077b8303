//! Client: a volume as its one writer has it open. Requests are submitted and completed, in order and pipelined.
//!
//! ```text
//!   callers ── submit ──▶ Driver: one thread at a time runs it                 ── messages ──▶ servers
//!      ▲                     │  Writer (the rules)                              ◀─ answers ──
//!      ╰─── completion ──────╯  Remote (one per server: what is under way, time limits)
//! ```
//!
//! - Here: what can be asked, how it is completed, and requests of any length, as several. **Start here.**
//! - `driver`: carries out what [`crate::writer`] decides; and which thread runs it.
//! - `remote`: one server, as the driver sees it, and how much may be under way there.
//! - `regions`: the ways to read and to write, copies that are read without asking their servers, reads that a caller's
//!   thread answers itself, memory out of which servers pull large writes, and memory for long reads.
//! - `once`: what is asked without opening a volume: to make it, how its copies stand, to scrub or remove them, and
//!   what it holds.
//!
//! A write is completed when as many copies as must hold it have applied it, a read when everything that it returns is
//! acknowledged, a flush when every write that was submitted before is. A read returns every write that was submitted
//! before it. Once the volume has ended (another writer has opened it, or no copy is left), every request fails.

mod driver;
mod once;
mod regions;
mod remote;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Messenger, Permit, Refusal, Throttle};

use crate::layout::{Layout, sums};
use crate::link::{self, LEAST_ROOM, MOST_ROOM, Rdma, Security};
use crate::rules::ServerId;
use crate::shape::{BLOCK_BYTES, Copies, Shape};
use crate::wire::{MOST_BLOCKS, MOST_ENTRIES, MOST_RUNS, Run};
use crate::writer::End;
use driver::{Driver, Turns};
use regions::{Here, News, UnderWay};

pub use crate::link::AT_WORK;
pub use once::{Left, Peek};
pub use regions::{NotAWay, NotAWayToRead, Reads, Writes};
pub use remote::{NotAWindow, WindowSize};

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// What protects the connections to servers.
    pub security: Security,
    /// How long a server may leave a question unanswered. Then it is left out, until it answers again.
    pub copy_limit: Duration,
    /// How blocks are read.
    pub reads: Reads,
    /// How blocks are written.
    pub writes: Writes,
    /// By which devices RDMA is used, if `reads` and `writes` permit it.
    pub rdma: Rdma,
    /// How many writes may be under way at each server.
    pub window: WindowSize,
    /// Whether the volume is opened although another writer is at work, which then ends.
    pub take_over: bool,
}

impl Default for ClientOptions {
    fn default() -> ClientOptions {
        ClientOptions {
            security: Security::default(),
            copy_limit: COPY_LIMIT,
            reads: Reads::default(),
            writes: Writes::default(),
            rdma: Rdma::default(),
            window: WindowSize::default(),
            take_over: true,
        }
    }
}

/// How many reads were answered, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// Out of memory of this host, without a message.
    pub here: u64,
    /// Out of memory of another host, without its server.
    pub far: u64,
    /// By a server.
    pub asked: u64,
}

/// How servers got writes. A write counts once for each server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteCounts {
    /// With their blocks, or as zeros.
    pub inline: u64,
    /// Without them: the server pulls.
    pub pulled: u64,
    /// Bytes of both kinds of messages, and of what was pulled over TCP out of this process's memory.
    pub bytes: u64,
}

/// Why a request failed, or a volume could not be opened.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The volume has ended. What was acknowledged is safe; open the volume again.
    #[error(transparent)]
    Ended(#[from] End),
    /// The volume cannot be opened.
    #[error("{end}{}{why}", if why.is_empty() { "" } else { ": " })]
    NotOpened {
        /// Which copies are missing.
        end: End,
        /// The servers that were lost, each with the reason.
        why: Arc<str>,
    },
    /// Another writer is at work, and was not to be replaced. Nothing was changed.
    #[error(
        "another writer is at work: {server} heard it {} ms ago; nothing was changed; stop it, or wait until it has said nothing for {} s",
        silent.as_millis(), AT_WORK.as_secs()
    )]
    InUse {
        /// The server that says so.
        server: String,
        /// How long it has not heard that writer.
        silent: Duration,
    },
    /// So many servers have no space for a write that none can be acknowledged. What was accepted is kept, in its
    /// order, and is written when there is space again. Reads go on.
    #[error("no space for writes: {why}; what was accepted is kept, and is written when there is space again")]
    NoSpace {
        /// The servers, each with what it says.
        why: Arc<str>,
    },
    /// The volume was closed by this process.
    #[error("the volume is closed")]
    Closed,
    /// The volume ends before these blocks.
    #[error("the volume has {blocks} blocks: blocks {} to {} are beyond its end", run.first, run.blocks().end)]
    OutOfBounds {
        /// The blocks that were asked for.
        run: Run,
        /// The blocks of the volume.
        blocks: u64,
    },
    /// The request is not of whole blocks, of none, or of too many.
    #[error(
        "a request has 1 to {MOST_BLOCKS} whole blocks, or {MOST_ENTRIES} without bytes, and as many runs as a message takes"
    )]
    Misuse,
    /// There are not as many servers as copies.
    #[error("the volume has {copies} copies, and {servers} servers were given")]
    Servers {
        /// Copies of the volume.
        copies: usize,
        /// Servers that were given.
        servers: usize,
    },
    /// A server refused to make a copy, or did not answer.
    #[error("{server}: {why}{}", left.made())]
    NotCreated {
        /// The server.
        server: String,
        /// Its reason.
        why: String,
        /// Servers that have made a copy and could not be told to remove it.
        left: Left,
    },
    /// A server refused to make its copy larger. The volume has the size of before.
    #[error("the volume has not grown: {why}{}", left.grown())]
    NotGrown {
        /// Who refused, and why.
        why: String,
        /// Servers whose copies have grown and could not be told to go back.
        left: Left,
    },
    /// The system provides no thread.
    #[error("starting a client: {0}")]
    System(Arc<io::Error>),
}

impl Error {
    /// Whether the request waits for space: it is kept, and is done in its order.
    pub fn is_for_space(&self) -> bool {
        matches!(self, Error::NoSpace { .. })
    }
}

/// A volume that this process has open for writing.
#[derive(Debug)]
pub struct Volume {
    shape: Shape,
    turns: Arc<Turns>,
    shared: Arc<Shared>,
    /// The thread that looks at the time.
    keeper: Option<JoinHandle<()>>,
}

/// What the driver says of the volume.
struct Shared {
    /// Bounds what is submitted and not completed. It grows and shrinks with the windows.
    submitted: Arc<Throttle>,
    end: OnceLock<End>,
    /// A bit for each server whose copy is whole and gets every write.
    members: AtomicU8,
    /// Blocks that the catch-up of each copy has compared; [`NO_CATCH_UP`]: none is under way.
    compared: [AtomicU64; Copies::MOST],
    counts: Counts,
    regions: Arc<Here>,
    /// Why each server was left out last.
    left_out: [Mutex<String>; Copies::MOST],
    /// So many servers lack space that writes cannot be acknowledged, and which they are.
    is_short: AtomicBool,
    no_space: Mutex<Option<Arc<str>>>,
}

impl Shared {
    fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Acquire)
    }

    fn no_space(&self) -> Option<Arc<str>> {
        if !self.is_short() {
            return None;
        }
        self.no_space.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_no_space(&self, why: Option<String>) {
        let is_short = why.is_some();
        *self.no_space.lock().unwrap_or_else(PoisonError::into_inner) = why.map(Arc::from);
        self.is_short.store(is_short, Ordering::Release);
    }
}

impl Default for Shared {
    fn default() -> Shared {
        Shared {
            submitted: Throttle::new(MOST_REQUESTS, LEAST_SUBMITTED_BYTES),
            end: OnceLock::new(),
            members: AtomicU8::new(0),
            compared: [const { AtomicU64::new(NO_CATCH_UP) }; Copies::MOST],
            counts: Counts::default(),
            regions: Arc::default(),
            left_out: Default::default(),
            is_short: AtomicBool::new(false),
            no_space: Mutex::default(),
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("end", &self.end).field("counts", &self.counts).finish_non_exhaustive()
    }
}

/// As [`ReadCounts`] and [`WriteCounts`].
#[derive(Debug, Default)]
struct Counts {
    here: AtomicU64,
    far: AtomicU64,
    asked: AtomicU64,
    inline: AtomicU64,
    pulled: AtomicU64,
    /// Bytes of writes in messages, and bytes that were pulled.
    sent: AtomicU64,
    served: AtomicU64,
}

const _: () = assert!(Copies::MOST <= u8::BITS as usize);

/// What happens to the driver.
enum Event {
    Answered(Connection, Delivery),
    Over(Connection),
    /// Its server accepts no session.
    Refused(Connection, Refusal),
    /// Of the region of the server at this connection.
    Region(Connection, News),
    Close,
}

/// Brings an event to the driver: the calling thread carries it out.
type Bring = Arc<dyn Fn(Event) + Send + Sync>;

/// Why a connection is over.
fn why_over(connection: &Connection) -> String {
    connection.link_error().map_or_else(|| "the connection is over".into(), |error| error.to_string())
}

/// The messenger's callbacks, as events.
struct Post<F>(F);

impl<F: Fn(Event) + Send + Sync + 'static> Dispatcher for Post<F> {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        (self.0)(Event::Answered(connection.clone(), delivery));
    }

    fn reset(&self, connection: &Connection, _: usize, _: bool) {
        (self.0)(Event::Over(connection.clone()));
    }

    fn closed(&self, connection: &Connection) {
        (self.0)(Event::Over(connection.clone()));
    }

    fn refused(&self, connection: &Connection, why: Refusal) {
        (self.0)(Event::Refused(connection.clone(), why));
    }
}

impl Volume {
    /// Opens a volume for writing. From then on no earlier writer writes. Waits until the volume can be used, or it is
    /// known why not: each server has [`ClientOptions::copy_limit`] for each answer.
    ///
    /// # Errors
    /// [`Error::NotOpened`] says which copies are missing.
    pub fn open(shape: Shape, servers: &[Address], options: &ClientOptions) -> Result<Volume, Error> {
        count(shape, servers)?;
        let turns = Turns::new();
        let brought = Arc::clone(&turns);
        let bring: Bring = Arc::new(move |event| brought.happened(event));
        let to_driver = Arc::clone(&bring);
        let messenger = messenger(options, Post(move |event| to_driver(event)))?;
        let (opened, is_open) = mpsc::sync_channel(1);
        let shared = Arc::<Shared>::default();
        let driver = Driver::new(shape, servers, options, messenger, &bring, opened, &shared);
        let kept = Arc::clone(&turns);
        let thread = std::thread::Builder::new().name("volume".into()).spawn(move || kept.keep(driver));
        let keeper = Some(thread.map_err(system)?);
        let volume = Volume { shape, turns, shared, keeper };
        match is_open.recv() {
            Ok(Ok(())) => Ok(volume),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::Closed),
        }
    }

    /// The volume.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Why the volume has ended; `None` while it is open.
    pub fn end(&self) -> Option<End> {
        self.shared.end.get().copied()
    }

    /// The servers whose copies are whole and get every write, by their place in the list that the volume was opened
    /// with. The others are being taken back, or cannot be reached.
    pub fn members(&self) -> Vec<ServerId> {
        let members = self.shared.members.load(Ordering::Relaxed);
        (0..self.shape.copies().number()).filter(|number| members & 1 << number != 0).map(ServerId).collect()
    }

    /// Why a server was left out last, in the words of the server if it has refused. `None`: it never was.
    pub fn left_out(&self, server: ServerId) -> Option<String> {
        let why = self.shared.left_out.get(server.0)?.lock().unwrap_or_else(PoisonError::into_inner);
        (!why.is_empty()).then(|| why.clone())
    }

    /// How many blocks the catch-up of a copy has compared, as far as its server has said. `None`: none is under way.
    pub fn compared(&self, server: ServerId) -> Option<u64> {
        let compared = self.shared.compared.get(server.0)?.load(Ordering::Relaxed);
        (compared != NO_CATCH_UP).then_some(compared)
    }

    /// Bytes that may be submitted and not completed at present.
    pub fn submitted_limit(&self) -> usize {
        self.shared.submitted.max_bytes()
    }

    /// How its reads were answered so far.
    pub fn read_counts(&self) -> ReadCounts {
        let Counts { here, far, asked, .. } = &self.shared.counts;
        let [here, far, asked] = [here, far, asked].map(|count| count.load(Ordering::Relaxed));
        ReadCounts { here, far, asked }
    }

    /// How its writes got to the servers so far.
    pub fn write_counts(&self) -> WriteCounts {
        let Counts { inline, pulled, sent, served, .. } = &self.shared.counts;
        let [inline, pulled, sent, served] = [inline, pulled, sent, served].map(|count| count.load(Ordering::Relaxed));
        WriteCounts { inline, pulled, bytes: sent + served }
    }

    /// Whether writes are accepted. A server without space for a write still answers, and its copy can be read.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub fn has_space(&self) -> Result<(), Error> {
        self.shared.no_space().map_or(Ok(()), |why| Err(Error::NoSpace { why }))
    }

    /// Submits a request, and waits only while too many are under way. `done` is called once, with the blocks that were
    /// read, or nothing, or the error. While servers have no space for writes, `done` gets [`Error::NoSpace`] for a
    /// write or a flush that must wait, and the write is kept: see [`Volume::has_space`]. The thread that calls `done`
    /// has other requests to complete: `done` must not block, and must not drop the volume. It may submit requests.
    /// No thread calls it while it is in this function itself: a caller may hold a lock that `done` takes, if it has
    /// fewer than [`LEAST_SUBMITTED_BYTES`] under way.
    ///
    /// # Errors
    /// The request is not one for this volume, or the volume has ended; `done` is not called.
    pub fn submit(
        &self,
        request: Request,
        done: impl FnOnce(Result<Bytes, Error>) + Send + 'static,
    ) -> Result<(), Error> {
        let bytes = request.check(self.shape)?;
        let permit = loop {
            let thread = std::thread::current();
            if let Some(permit) = self.shared.submitted.take_or_wait(bytes, move || thread.unpark()) {
                break permit;
            }
            if let Some(end) = self.end() {
                return Err(Error::Ended(end));
            }
            std::thread::park_timeout(LOOK_AGAIN);
        };
        let changes = request.changes();
        let under_way = (!changes.is_empty()).then(|| UnderWay::new(&self.shared.regions, changes.to_vec()));
        let completion = Completion::new(Box::new(done), Arc::clone(&self.shared), permit, under_way);
        let Some(refused) = self.turns.submit(Op::new(request, completion)) else { return Ok(()) };
        refused.completion.forget();
        Err(self.end().map_or(Error::Closed, Error::Ended))
    }

    /// Reads blocks in this thread, without waiting, if they are in memory of this host and no write of them is under
    /// way. `None`: submit the read.
    ///
    /// # Errors
    /// As for [`Volume::submit`].
    pub fn try_read(&self, run: Run) -> Result<Option<Bytes>, Error> {
        Request::Read(run).check(self.shape)?;
        let data = self.shared.regions.read(run);
        self.shared.counts.here.fetch_add(data.is_some().into(), Ordering::Relaxed);
        Ok(data)
    }

    /// Submits a request, and waits for its completion.
    ///
    /// # Errors
    /// [`Error`].
    pub fn request(&self, request: Request) -> Result<Bytes, Error> {
        if let Request::Read(run) = request
            && let Some(data) = self.try_read(run)?
        {
            return Ok(data);
        }
        let (done, is_done) = mpsc::sync_channel(1);
        self.submit(request, move |result| {
            let _ = done.send(result); // the other end waits below
        })?;
        is_done.recv().unwrap_or(Err(Error::Closed))
    }

    /// Writes whole blocks.
    ///
    /// # Errors
    /// [`Error`].
    pub fn write(&self, first: u64, data: impl Into<Bytes>) -> Result<(), Error> {
        self.request(Request::write(first, data)).map(drop)
    }

    /// Writes zeros, without sending any.
    ///
    /// # Errors
    /// [`Error`].
    pub fn zero(&self, first: u64, count: u32) -> Result<(), Error> {
        self.request(Request::Zero(Run { first, count })).map(drop)
    }

    /// Says of each block whether it is known to be zeros: never written, or written by [`Request::Zero`].
    ///
    /// # Errors
    /// [`Error`].
    pub fn map(&self, first: u64, count: u32) -> Result<Vec<bool>, Error> {
        let bits = self.request(Request::Map(Run { first, count }))?;
        Ok((0..count as usize).map(|block| is_set(&bits, block)).collect())
    }

    /// Reads blocks.
    ///
    /// # Errors
    /// [`Error`].
    pub fn read(&self, first: u64, count: u32) -> Result<Bytes, Error> {
        self.request(Request::Read(Run { first, count }))
    }

    /// Waits until every write that was submitted is acknowledged.
    ///
    /// # Errors
    /// [`Error`].
    pub fn flush(&self) -> Result<(), Error> {
        self.request(Request::Flush).map(drop)
    }
}

/// Whether the answer to [`Request::Map`] says that a block is zeros.
pub(crate) fn is_set(bits: &[u8], block: usize) -> bool {
    bits.get(block / 8).is_some_and(|byte| byte & 1 << (block % 8) != 0)
}

impl Drop for Volume {
    /// Ends the driver and its threads. What was not acknowledged may or may not be written.
    fn drop(&mut self) {
        self.turns.close();
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join(); // a panic was reported where it happened
        }
    }
}

/// A new identity for a volume.
///
/// # Errors
/// The system has no random bytes.
pub fn new_id() -> Result<crate::shape::VolumeId, Error> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| system(io::Error::from(error)))?;
    Ok(crate::shape::VolumeId(id))
}

fn messenger(options: &ClientOptions, dispatcher: impl Dispatcher + 'static) -> Result<Messenger, Error> {
    let settings = link::options(&options.security, 1, MOST_SESSIONS);
    Messenger::new(link::client_policy(), &settings, Arc::new(dispatcher)).map_err(system)
}

fn count(shape: Shape, servers: &[Address]) -> Result<(), Error> {
    let (copies, servers) = (shape.copies().number(), servers.len());
    if copies == servers { Ok(()) } else { Err(Error::Servers { copies, servers }) }
}

fn system(error: io::Error) -> Error {
    Error::System(Arc::new(error))
}

/// Shorter than a Redis server's patience with its disk, and longer than a host is busy with something else. GlusterFS
/// waits 42 seconds.
const COPY_LIMIT: Duration = Duration::from_secs(5);

/// Requests under way, in all states: twice what one server lets a writer have.
const MOST_REQUESTS: usize = 2 * MOST_ROOM.writes as usize;

/// Bytes of requests that can be submitted without waiting, while windows are small: reads count as well, and no window
/// grows by them.
pub const LEAST_SUBMITTED_BYTES: usize = 8 * LEAST_ROOM.bytes as usize;

/// What a caller wants of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Write these blocks: all of them or, if the process dies, perhaps none.
    Write {
        /// Where they belong.
        runs: Vec<Run>,
        /// The blocks, run by run.
        data: Bytes,
    },
    /// Write zeros: all of them or, if the process dies, perhaps none. No bytes are sent, so it may be of as many
    /// blocks as [`MOST_ENTRIES`].
    Zero(Run),
    /// Read these blocks.
    Read(Run),
    /// Say which of these blocks are known to be zeros, of as many as [`MOST_ENTRIES`]. It is completed with a bit for
    /// each block, the lowest one first.
    Map(Run),
    /// Complete when every write that was submitted before is acknowledged.
    Flush,
}

impl Request {
    /// A write of neighbouring blocks.
    pub fn write(first: u64, data: impl Into<Bytes>) -> Request {
        let data = data.into();
        let count = u32::try_from(data.len() / BLOCK_BYTES).unwrap_or(u32::MAX);
        Request::Write { runs: vec![Run { first, count }], data }
    }

    /// The blocks that it changes.
    fn changes(&self) -> &[Run] {
        match self {
            Request::Write { runs, .. } => runs,
            Request::Zero(run) => std::slice::from_ref(run),
            Request::Read(_) | Request::Map(_) | Request::Flush => &[],
        }
    }

    /// Checks the request, and returns how many bytes it moves.
    fn check(&self, shape: Shape) -> Result<usize, Error> {
        let check = |run: &Run| {
            let is_inside = Layout::of(shape).has(run.first, run.count.into());
            if is_inside { Ok(()) } else { Err(Error::OutOfBounds { run: *run, blocks: shape.blocks() }) }
        };
        let blocks = match self {
            Request::Write { runs, data } => {
                runs.iter().try_for_each(check)?;
                let blocks = runs.iter().map(|run| run.count as usize).sum();
                let is_whole = data.len() == blocks * BLOCK_BYTES && runs.iter().all(|run| run.count > 0);
                if is_whole && runs.len() <= MOST_RUNS { blocks } else { return Err(Error::Misuse) }
            }
            Request::Read(run) => {
                check(run)?;
                run.count as usize
            }
            Request::Zero(run) | Request::Map(run) => {
                check(run)?;
                let is_one = (1..=MOST_ENTRIES).contains(&(run.count as usize));
                return if is_one { Ok(0) } else { Err(Error::Misuse) };
            }
            Request::Flush => return Ok(0),
        };
        if (1..=MOST_BLOCKS).contains(&blocks) { Ok(blocks * BLOCK_BYTES) } else { Err(Error::Misuse) }
    }
}

/// One per server, and those that have just ended.
const MOST_SESSIONS: usize = 64;

/// Beyond the blocks of any volume.
const NO_CATCH_UP: u64 = u64::MAX;

/// How often a caller that waits checks whether the volume has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Called once, with the result.
type Done = Box<dyn FnOnce(Result<Bytes, Error>) + Send>;

/// The end of a request. One that is dropped says that the volume has ended, so that no caller waits for ever.
struct Completion {
    done: Option<Done>,
    shared: Arc<Shared>,
    /// Its share of what may be under way.
    _permit: Permit,
    /// Of a write: its blocks are not read in place. Ends before the caller learns of the end.
    under_way: Option<UnderWay>,
}

impl Completion {
    fn new(done: Done, shared: Arc<Shared>, permit: Permit, under_way: Option<UnderWay>) -> Completion {
        Completion { done: Some(done), shared, _permit: permit, under_way }
    }

    /// The request is done; `None`: it has failed, since the volume has ended.
    fn end(mut self, data: Option<Bytes>) {
        self.under_way = None;
        if let Some(data) = data
            && let Some(done) = self.done.take()
        {
            done(Ok(data));
        }
    }

    /// Its caller is told now, by `done`. The request goes on, with its share of what may be under way.
    fn split(&mut self) -> Option<Done> {
        self.done.take()
    }

    /// The request was not submitted: its caller is told by another way.
    fn forget(mut self) {
        self.done = None;
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.under_way = None;
        if let Some(done) = self.done.take() {
            done(Err(self.shared.end.get().map_or(Error::Closed, |&end| Error::Ended(end))));
        }
    }
}

/// A request on its way to the driver.
struct Op {
    request: Request,
    /// The checksum of each block that is written. They are computed by the caller's thread.
    sums: Vec<u32>,
    completion: Completion,
}

impl Op {
    fn new(request: Request, completion: Completion) -> Op {
        let sums = match &request {
            Request::Write { data, .. } => sums(data).collect(),
            _ => Vec::new(),
        };
        Op { request, sums, completion }
    }
}

// Any number of neighbouring blocks, as several requests that are completed together. A long write is
// not one write: if the process dies, a part of it may be there.

/// What several requests have in common: what they have read, and what to do after the last one.
struct Joined {
    state: Mutex<State>,
}

struct State {
    parts: Vec<Bytes>,
    left: usize,
    error: Option<Error>,
    done: Option<LongDone>,
}

type LongDone = Box<dyn FnOnce(Result<Vec<Bytes>, Error>) + Send>;

impl Joined {
    fn new(parts: usize, done: LongDone) -> Arc<Joined> {
        let state = State { parts: vec![Bytes::new(); parts], left: parts, error: None, done: Some(done) };
        Arc::new(Joined { state: Mutex::new(state) })
    }

    /// One of them is done. The last one completes the whole: with the first error, if there was one.
    fn completed(&self, number: usize, result: Result<Bytes, Error>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.left -= 1;
        match (result, state.parts.get_mut(number)) {
            (Ok(data), Some(part)) => *part = data,
            (Err(error), _) => _ = state.error.get_or_insert(error),
            _ => {}
        }
        if state.left > 0 {
            return;
        }
        let result = state.error.take().map_or_else(|| Ok(std::mem::take(&mut state.parts)), Err);
        let done = state.done.take();
        drop(state); // the caller's own code runs without the lock
        if let Some(done) = done {
            done(result);
        }
    }
}

impl Volume {
    /// Writes neighbouring blocks, however many. As [`Volume::submit`].
    ///
    /// # Errors
    /// As for [`Volume::submit`].
    pub fn submit_write(
        &self,
        first: u64,
        data: impl Into<Bytes>,
        done: impl FnOnce(Result<(), Error>) + Send + 'static,
    ) -> Result<(), Error> {
        let data = data.into();
        let bytes = MOST_BLOCKS * BLOCK_BYTES;
        let parts = (0..data.len()).step_by(bytes).map(|at| data.slice(at..data.len().min(at + bytes)));
        let requests = (first..).step_by(MOST_BLOCKS).zip(parts).map(|(first, part)| Request::write(first, part));
        self.submit_all(requests.collect(), Box::new(|result| done(result.map(drop))))
    }

    /// Reads neighbouring blocks, however many, into as many pieces as it takes requests. As [`Volume::submit`].
    ///
    /// # Errors
    /// As for [`Volume::submit`].
    pub fn submit_read(
        &self,
        first: u64,
        count: u64,
        done: impl FnOnce(Result<Vec<Bytes>, Error>) + Send + 'static,
    ) -> Result<(), Error> {
        let end = first.saturating_add(count);
        let run = |first| Run { first, count: (end - first).min(MOST_BLOCKS as u64) as u32 };
        let requests = (first..end).step_by(MOST_BLOCKS).map(|first| Request::Read(run(first)));
        self.submit_all(requests.collect(), Box::new(done))
    }

    fn submit_all(&self, requests: Vec<Request>, done: LongDone) -> Result<(), Error> {
        if requests.is_empty() {
            return Err(Error::Misuse);
        }
        requests.iter().try_for_each(|request| request.check(self.shape).map(drop))?;
        let joined = Joined::new(requests.len(), done);
        for (number, request) in requests.into_iter().enumerate() {
            let whole = Arc::clone(&joined);
            // Checked above, so this fails only if the volume has ended: then nothing else completes this part.
            let submitted = self.submit(request, move |result| whole.completed(number, result));
            if let Err(error) = submitted {
                joined.completed(number, Err(error));
            }
        }
        Ok(())
    }
}
