//! Session: a file system that is mounted and served.
//!
//! ```text
//!   start ── mount ── INIT ── threads ─▶ served ── unmounted by others ─▶ over
//!                                           │                              │
//!                                           ├── end, drop ─ unmount, abort ┼─▶ threads joined, destroy
//!                                           ╰── leave ───── abort ─────────╯   (the mount stays, and is dead)
//! ```
//!
//! When a session ends, for whatever reason, every request under way fails and no process waits for this one any
//! more.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_memory::Memory;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::abi::{IN_HEADER_BYTES, InHeader, LEAST_READ_BYTES, op};
use crate::answer::{Buffers, Later, Reply};
use crate::device::{self, Channel, Notifier, Received, clone};
use crate::error::{DEVICE, EndError, StartError};
use crate::file_system::FileSystem;
use crate::mount::{MountOptions, Mounted};
use crate::negotiation::{Agreed, Offer, Wish, page_bytes};
use crate::ring::{Mailbox, Queue, Rings};

/// How a file system is served.
#[derive(Clone)]
pub struct SessionOptions {
    /// How it is mounted.
    pub mount: MountOptions,
    /// Threads that read requests from the device, 1 to [`MOST_THREADS`]: calls of the file system that may be under
    /// way at a time, if it waits in them.
    pub threads: usize,
    /// Requests come by io_uring, if the kernel has it and allows it. Otherwise a warning is logged, and they come
    /// by the device.
    pub ring: bool,
    /// The longest read and write in bytes: pages up to [`MOST_REQUEST_BYTES`].
    pub most_bytes: u32,
    /// The kernel keeps writes in its page cache and writes them back later, many small ones together.
    pub write_back: bool,
    /// The file system has [`FileSystem::read_directory_plus`].
    pub lists_attributes: bool,
    /// The file system keeps extended attributes and ACLs, applies the umask, and clears set-id bits and capabilities
    /// when it is told to. Kernels before Linux 5.13 lack a part of it: there it is not asked for extended attributes.
    pub xattrs: bool,
    /// Memory in which the payloads of the ring lie, so that others can read and write them there. `None`: memory of
    /// the session's own.
    pub memory: Option<Arc<Memory>>,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).clamp(2, 8);
        SessionOptions {
            mount: MountOptions::default(),
            threads,
            ring: true,
            most_bytes: MOST_REQUEST_BYTES,
            write_back: false,
            lists_attributes: false,
            xattrs: false,
            memory: None,
        }
    }
}

/// Threads of a session's device. Each has a buffer of [`MOST_REQUEST_BYTES`].
pub const MOST_THREADS: usize = 64;

/// The longest read and write: what Linux allows by its setting `fs.fuse.max_pages_limit`.
pub const MOST_REQUEST_BYTES: u32 = 1 << 20;

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// By `/dev/fuse`.
    Device,
    /// By io_uring.
    Ring,
}

/// A file system that is mounted. When it is dropped, it is unmounted, even if processes use it.
pub struct Session {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    agreed: Agreed,
    transport: Transport,
    /// Until they have their threads.
    queues: Vec<Queue>,
    is_ended: bool,
}

/// What the session and its threads share.
struct Shared {
    file_system: Arc<dyn FileSystem>,
    mounted: Mounted,
    /// The connection's first descriptor.
    first: Arc<Channel>,
    /// Threads that have not ended.
    running: Mutex<usize>,
    changed: Condvar,
    /// The kernel sends nothing any more.
    is_over: AtomicBool,
    /// Those of the rings, which are told so.
    mailboxes: OnceLock<Vec<Arc<Mailbox>>>,
}

impl Session {
    /// Mounts a file system at a directory, and serves it.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(
        directory: &Path,
        file_system: Arc<dyn FileSystem>,
        options: &SessionOptions,
    ) -> Result<Session, StartError> {
        check(options)?;
        let device = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let device = device.map_err(|errno| StartError::Device(errno.into()))?;
        let mounted = Mounted::new(directory, device.as_fd(), &options.mount)?;
        let first = Arc::new(Channel::new(device));
        let shared = Shared {
            file_system,
            mounted,
            first,
            running: Mutex::new(0),
            changed: Condvar::new(),
            is_over: false.into(),
            mailboxes: OnceLock::new(),
        };
        let mut session = Session {
            shared: Arc::new(shared),
            threads: Vec::new(),
            agreed: Agreed { minor: 0, flags: 0, readahead_bytes: 0, most_bytes: 0 },
            transport: Transport::Device,
            queues: Vec::new(),
            is_ended: false,
        };
        // From here on, an error unmounts.
        (session.agreed, session.queues) = session.negotiate(options)?;
        session.start_rings()?;
        session.start_threads(match session.transport {
            Transport::Device => options.threads,
            Transport::Ring => 1,
        })?;
        Ok(session)
    }

    /// Where it is mounted.
    pub fn directory(&self) -> &Path {
        self.shared.mounted.directory()
    }

    /// How requests come.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// The longest read and write that the kernel has agreed to, in bytes.
    pub fn most_bytes(&self) -> u32 {
        self.agreed.most_bytes
    }

    /// Tells the kernel what has changed without it.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(Arc::clone(&self.shared.first))
    }

    /// Waits until the file system is not mounted any more, because it was unmounted by others or its connection was
    /// aborted, but not longer than `limit`. Returns whether it is so.
    pub fn wait(&self, limit: Duration) -> bool {
        self.shared.wait_while(limit, |running| running > 0 && !self.shared.is_over.load(Ordering::Acquire));
        self.shared.is_over.load(Ordering::Acquire)
    }

    /// Unmounts it. What the kernel's page cache still has is written back first.
    ///
    /// # Errors
    /// [`EndError`]: it was in use, or is still mounted. It is not served any more in each case.
    pub fn end(mut self) -> Result<(), EndError> {
        self.finish(InUse::Detach)
    }

    /// As [`Session::end`], but if it is in use the mount stays, as after [`Session::leave`]: its users may be started
    /// again.
    ///
    /// # Errors
    /// [`EndError::Left`]: it was in use.
    pub fn end_or_leave(mut self) -> Result<(), EndError> {
        self.finish(InUse::Leave)
    }

    /// Ends it, and leaves the mount: every use of it fails with `ENOTCONN`, until it is unmounted or the next session
    /// with the same subtype takes its place. So no process writes into the directory below it.
    ///
    /// # Errors
    /// [`EndError::Hangs`].
    pub fn leave(mut self) -> Result<(), EndError> {
        self.is_ended = true;
        self.shared.abort();
        let joined = self.join();
        self.shared.file_system.destroy();
        joined
    }

    /// Whether it is still in the tree, and on top of others that are mounted at the same place.
    pub fn is_mounted(&self) -> bool {
        self.shared.mounted.is_there()
    }

    fn negotiate(&self, options: &SessionOptions) -> Result<(Agreed, Vec<Queue>), StartError> {
        let failed =
            |why: String| StartError::Negotiation { directory: self.shared.mounted.directory().to_owned(), why };
        let mut request = vec![0; buffer_bytes(options.most_bytes)];
        let until = Instant::now() + NEGOTIATION_LIMIT;
        let length = loop {
            if !self.has_request(until).map_err(|errno| failed(errno.to_string()))? {
                return Err(failed(format!("it has asked nothing for {NEGOTIATION_LIMIT:?}")));
            }
            match self.shared.first.receive(&mut request) {
                Received::Request(length) => break length,
                Received::Nothing => {}
                Received::Over => return Err(failed("it was unmounted at once".into())),
            }
        };
        let header = InHeader::decode(&request[..length]).filter(|header| header.opcode == op::INIT);
        let offer = header.and_then(|_| Offer::decode(&request[IN_HEADER_BYTES..length]));
        let (Some(header), Some(offer)) = (header, offer) else {
            return Err(failed("its first request is not INIT".into()));
        };
        // What is agreed cannot be taken back, so the rings are there before.
        let rings = if options.ring { self.rings(&offer, options) } else { None };
        let (most_bytes, queues) = rings.map_or((options.most_bytes, Vec::new()), |r| (r.most_bytes, r.queues));
        let wish = Wish {
            most_bytes,
            write_back: options.write_back && !options.mount.read_only,
            lists_attributes: options.lists_attributes,
            ring: !queues.is_empty(),
            xattrs: options.xattrs,
        };
        let agreed = offer.agree(&wish)?;
        let answer = agreed.encode();
        self.shared.first.write(header.unique, 0, &[&answer]).map_err(|errno| failed(errno.to_string()))?;
        Ok((agreed, queues))
    }

    /// Rings, if they are possible.
    fn rings(&self, offer: &Offer, options: &SessionOptions) -> Option<Rings> {
        let rings = match offer.has_ring() {
            true => Rings::new(options.most_bytes, options.memory.as_ref()).map_err(|error| error.to_string()),
            false => Err(format!("the kernel does not offer it (Linux 6.14, and {RING_SETTING} must be Y)")),
        };
        rings.map_err(|why| self.falls_back(&why)).ok()
    }

    fn falls_back(&self, why: &str) {
        let directory = self.directory().display();
        tracing::warn!(%directory, "requests come by {DEVICE}, which is slower, and not by io_uring: {why}");
    }

    /// Gives each ring its thread, and waits until the kernel uses them.
    fn start_rings(&mut self) -> Result<(), StartError> {
        let queues = std::mem::take(&mut self.queues);
        if queues.is_empty() {
            return Ok(());
        }
        let _ = self.shared.mailboxes.set(queues.iter().map(|queue| Arc::clone(queue.mailbox())).collect());
        let (number, (sender, receiver)) = (queues.len(), channel());
        let has_xattrs = self.agreed.has_xattrs();
        for mut queue in queues {
            let (sender, first) = (sender.clone(), Arc::clone(&self.shared.first));
            let started = self.spawn("fuse-ring", move |shared| {
                let registered = queue.register(first.device().as_fd());
                let is_registered = registered.is_ok();
                let _ = sender.send(registered);
                if is_registered {
                    queue.serve(first.device().as_fd(), &*shared.file_system, has_xattrs);
                }
                // A ring may end before the connection does.
                false
            });
            let directory = || self.shared.mounted.directory().to_owned();
            started.map_err(|source| StartError::Threads { directory: directory(), source })?;
        }
        let until = Instant::now() + NEGOTIATION_LIMIT;
        for _ in 0..number {
            match receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    // The kernel then uses the device for all requests.
                    self.falls_back(&format!("the kernel refuses the rings: {error}"));
                    self.shared.close_rings();
                    return Ok(());
                }
                Err(error) => {
                    let (directory, why) = (self.directory().to_owned(), format!("its rings do not start: {error}"));
                    return Err(StartError::Negotiation { directory, why });
                }
            }
        }
        self.transport = Transport::Ring;
        Ok(())
    }

    /// Waits for a request.
    fn has_request(&self, until: Instant) -> Result<bool, Errno> {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut polled = [PollFd::new(self.shared.first.device(), PollFlags::IN)];
        match rustix::event::poll(&mut polled, Some(&left)) {
            Ok(0) => Ok(false),
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(errno),
        }
    }

    fn start_threads(&mut self, number: usize) -> Result<(), StartError> {
        let buffers = Buffers::new(buffer_bytes(self.agreed.most_bytes));
        let has_xattrs = self.agreed.has_xattrs();
        for thread in 0..number {
            let started = self.channel(thread).and_then(|channel| {
                let buffers = Arc::clone(&buffers);
                self.spawn("fuse-device", move |shared| {
                    device::serve(&channel, &*shared.file_system, &buffers, has_xattrs);
                    true
                })
            });
            let directory = || self.shared.mounted.directory().to_owned();
            started.map_err(|source| StartError::Threads { directory: directory(), source })?;
        }
        Ok(())
    }

    /// A thread's descriptor. Each has its own, so that they do not share a lock in the kernel.
    fn channel(&self, thread: usize) -> std::io::Result<Arc<Channel>> {
        let first = &self.shared.first;
        if thread == 0 {
            return Ok(Arc::clone(first));
        }
        Ok(Arc::new(Channel::new(clone(first.device().as_fd())?)))
    }

    /// Starts a thread. It says whether the connection is over when it ends.
    fn spawn(&mut self, name: &str, serve: impl FnOnce(&Shared) -> bool + Send + 'static) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        *self.shared.running() += 1;
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            let mut ends = Ends { shared: &shared, is_over: true };
            ends.is_over = serve(&shared);
        });
        match thread {
            Ok(thread) => self.threads.push(thread),
            Err(error) => {
                *self.shared.running() -= 1;
                return Err(error);
            }
        }
        Ok(())
    }

    fn finish(&mut self, in_use: InUse) -> Result<(), EndError> {
        if std::mem::replace(&mut self.is_ended, true) {
            return Ok(());
        }
        let unmounted = self.unmount(in_use);
        let joined = self.join();
        self.shared.file_system.destroy();
        unmounted.and(joined)
    }

    /// Takes the mount away. Requests under way are answered before if no process uses it, and fail otherwise.
    fn unmount(&self, in_use: InUse) -> Result<(), EndError> {
        let directory = || self.shared.mounted.directory().to_owned();
        let mut left = None;
        let result = match self.unmount_unused() {
            Ok(()) => Ok(()),
            Err(error) if is_busy(&error) => {
                let written = self.write_back(&mut left);
                // No process is to find files here that are not served.
                let detached = if in_use == InUse::Detach { self.shared.mounted.detach() } else { Ok(()) };
                match (detached, written) {
                    (Err(source), _) => Err(EndError::Mounted { directory: directory(), source }),
                    (Ok(()), Err(why)) => Err(EndError::Unwritten { directory: directory(), why }),
                    (Ok(()), Ok(())) if in_use == InUse::Leave => Err(EndError::Left { directory: directory() }),
                    (Ok(()), Ok(())) => Err(EndError::Busy { directory: directory() }),
                }
            }
            Err(source) => Err(EndError::Mounted { directory: directory(), source }),
        };
        // Mount namespaces of other processes may still have it, or open files.
        let limit = if result.is_ok() { LAST_USE_LIMIT } else { Duration::ZERO };
        if !self.shared.wait_while(limit, |running| running > 0) {
            self.shared.abort();
        }
        if let Some(mut process) = left {
            let until = Instant::now() + JOIN_LIMIT;
            while matches!(process.try_wait(), Ok(None)) && Instant::now() < until {
                std::thread::sleep(LOOK_AGAIN);
            }
        }
        result
    }

    /// Unmounts. Tries again for a while if it is in use: a process that starts another one shares all its open files
    /// with it for a moment.
    fn unmount_unused(&self) -> std::io::Result<()> {
        let until = Instant::now() + USE_LIMIT;
        loop {
            match self.shared.mounted.unmount() {
                Err(error) if is_busy(&error) && Instant::now() < until => std::thread::sleep(LOOK_AGAIN),
                result => return result,
            }
        }
    }

    /// Has the kernel write its page cache back, for a limited time: the file system may not answer. Another process
    /// waits for it. If this one did and were killed, the system could not end it, as its own descriptors would keep
    /// the connection alive that it waits for. A process that still waits is left: it ends with the connection.
    fn write_back(&self, left: &mut Option<Child>) -> Result<(), String> {
        if self.shared.is_over.load(Ordering::Acquire) {
            return Err("the connection was aborted before".into());
        }
        let mut command = Command::new("sync");
        let Some(place) = self.shared.mounted.place() else {
            return Err("it is not in the tree any more, or another mount hides it".into());
        };
        command.arg("--file-system").arg(place);
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut process = process.map_err(|error| format!("the program `sync` does not start: {error}"))?;
        let until = Instant::now() + WRITE_BACK_LIMIT;
        loop {
            match process.try_wait() {
                Ok(Some(status)) if status.success() => break,
                Ok(Some(status)) => return Err(format!("the program `sync` has ended: {status}")),
                Ok(None) if Instant::now() < until => std::thread::sleep(LOOK_AGAIN),
                Ok(None) => {
                    let _ = process.kill();
                    *left = Some(process);
                    return Err(format!("the file system has not done it within {WRITE_BACK_LIMIT:?}"));
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        // `sync` has begun all writes, but the kernel does not wait for those of FUSE.
        while self.shared.mounted.has_under_way() {
            if Instant::now() >= until {
                return Err(format!("requests were still under way after {WRITE_BACK_LIMIT:?}"));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    fn join(&mut self) -> Result<(), EndError> {
        if !self.shared.wait_while(JOIN_LIMIT, |running| running > 0) {
            let threads = *self.shared.running();
            // They have what they need of the session, and end when the call returns.
            self.threads.clear();
            return Err(EndError::Hangs { directory: self.shared.mounted.directory().to_owned(), threads });
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of a file system has panicked");
            }
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Err(error) = self.finish(InUse::Detach) {
            tracing::warn!("{error}");
        }
    }
}

impl Shared {
    fn abort(&self) {
        if let Err(error) = self.mounted.abort() {
            let directory = self.mounted.directory().display();
            tracing::error!(%directory, "the kernel's connection cannot be aborted, and requests may hang: {error}");
        }
    }

    fn close_rings(&self) {
        self.mailboxes.get().into_iter().flatten().for_each(|mailbox| mailbox.close());
    }

    /// Waits while it is so of the number of threads, but not longer than `limit`. Returns whether it is not so.
    fn wait_while(&self, limit: Duration, mut is_so: impl FnMut(usize) -> bool) -> bool {
        let waited = self.changed.wait_timeout_while(self.running(), limit, |running| is_so(*running));
        let (running, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !is_so(*running)
    }

    fn running(&self) -> MutexGuard<'_, usize> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What becomes of a mount that is in use when its session ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InUse {
    /// It is taken out of the tree.
    Detach,
    /// It stays, and is dead.
    Leave,
}

/// Counts a thread until it ends.
struct Ends<'a> {
    shared: &'a Shared,
    /// The connection is over then.
    is_over: bool,
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        let shared = self.shared;
        if std::thread::panicking() {
            // What the call has left behind is not known, so nothing more is asked of this file system.
            tracing::error!(directory = %shared.mounted.directory().display(), "a call of a file system has panicked");
            shared.abort();
        }
        if self.is_over {
            shared.is_over.store(true, Ordering::Release);
            shared.close_rings();
        }
        *shared.running() -= 1;
        shared.changed.notify_all();
    }
}

fn is_busy(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

fn check(options: &SessionOptions) -> Result<(), StartError> {
    if !(1..=MOST_THREADS).contains(&options.threads) {
        return Err(StartError::Misuse("a session has 1 to 64 threads"));
    }
    let is_bytes = options.most_bytes > 0 && options.most_bytes.is_multiple_of(page_bytes());
    if !is_bytes || options.most_bytes > MOST_REQUEST_BYTES {
        return Err(StartError::Misuse("the longest request is of whole pages, one at least, and at most 1 MiB"));
    }
    Ok(())
}

/// A request with its heads; the kernel accepts no less.
fn buffer_bytes(most_bytes: u32) -> usize {
    (most_bytes as usize + HEADS_BYTES).max(LEAST_READ_BYTES)
}

/// What stands before the bytes of a write, with room for more. A request with the longest extended attribute has to
/// fit as well.
const HEADS_BYTES: usize = 4096;

/// How long the kernel may take for its first request. It sends it when it mounts.
const NEGOTIATION_LIMIT: Duration = Duration::from_secs(10);

/// By which the kernel's administrator allows io_uring for FUSE.
const RING_SETTING: &str = "/sys/module/fuse/parameters/enable_uring";

/// How long the connection may outlast its mount when no process of this namespace uses it.
const LAST_USE_LIMIT: Duration = Duration::from_secs(1);

/// How long a use of a mount may last that is not taken for one.
const USE_LIMIT: Duration = Duration::from_millis(300);

/// How long the page cache may take to be written back, when a file system in use is unmounted.
const WRITE_BACK_LIMIT: Duration = Duration::from_secs(5);

/// How often it is looked whether that is done.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// How long a call of the file system may take to return when its session ends.
const JOIN_LIMIT: Duration = Duration::from_secs(5);

// Waits: processes that wait for answers, and may be killed meanwhile.
//
// A process that is killed stays until its request is answered: the kernel cannot take a request back that a file
// system has. It says that a signal has come (`INTERRUPT`), but not which one, and of each request only once. A signal
// that the program handles must not fail its `fsync`: no disk does that, and programs that send themselves signals all
// the time (Go's runtime) do not expect it. So it is as with NFS: a thread looks at the processes whose answers take
// long, and gives up those that are being killed, with `EINTR`. Nothing else is told so.
//
// ```text
//   Later ── wait ─▶ Waiter ── result ─────────────▶ the process
//                       ╰── the process is killed ──▶ EINTR, and what the caller wants to be done then
// ```
//
// What was asked for is carried out all the same, sooner or later.

/// The processes that wait. When it is dropped, its thread ends; answers that are owed can still be given.
pub struct Waits {
    shared: Arc<SharedWaits>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct SharedWaits {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order in which they came.
    waiting: BTreeMap<u64, Waiting>,
    next: u64,
    /// A signal has come for one of them.
    is_interrupted: bool,
    /// The thread sleeps until one comes.
    is_asleep: bool,
    is_over: bool,
}

/// A process that waits.
struct Waiting {
    process: u32,
    since: Instant,
    /// Answers with `EINTR`, unless it was answered.
    give_up: Box<dyn FnOnce() + Send>,
}

impl Waits {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system provides none.
    pub fn new() -> io::Result<Waits> {
        let shared = Arc::<SharedWaits>::default();
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("fuse-waits".into()).spawn(move || watched.watch())?;
        Ok(Waits { shared, thread: Some(thread) })
    }

    /// An answer that may take long. If its process is killed before, it gets `EINTR`, and `given_up` is called by the
    /// thread, which must not wait in it.
    pub fn wait<R: Reply + 'static>(&self, later: Later<R>, given_up: impl FnOnce() + Send + 'static) -> Waiter<R> {
        let process = later.process();
        let later = Arc::new(Mutex::new(Some(later)));
        let owed = Arc::clone(&later);
        let give_up = move || {
            if let Some(later) = taken(&owed) {
                later.fail(Errno::INTR);
                given_up();
            }
        };
        let mut state = self.shared.state();
        let number = state.next;
        state.next += 1;
        state.waiting.insert(number, Waiting { process, since: Instant::now(), give_up: Box::new(give_up) });
        if std::mem::take(&mut state.is_asleep) {
            self.shared.changed.notify_all();
        }
        drop(state);
        Waiter { later, number, shared: Arc::clone(&self.shared) }
    }

    /// A signal has come for a process that waits: it is looked at now.
    pub fn interrupt(&self) {
        let mut state = self.shared.state();
        state.is_interrupted = true;
        state.is_asleep = false;
        self.shared.changed.notify_all();
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.shared.state().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was reported where it happened
        }
    }
}

impl SharedWaits {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    fn watch(&self) {
        let mut state = self.state();
        while !state.is_over {
            if state.waiting.is_empty() {
                state.is_asleep = true;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if !std::mem::take(&mut state.is_interrupted) {
                let goes_on = |state: &mut State| !state.is_over && !state.is_interrupted;
                let waited = self.changed.wait_timeout_while(state, LOOK_EVERY, goes_on);
                state = waited.map_or_else(|error| error.into_inner().0, |(state, _)| state);
            }
            state.is_interrupted = false;
            let old = state.waiting.iter().take_while(|(_, waiting)| waiting.since.elapsed() >= SHORT);
            let old: Vec<_> = old.map(|(number, waiting)| (*number, waiting.process)).collect();
            drop(state);
            let killed: Vec<_> = old.into_iter().filter(|(_, process)| is_killed(*process)).collect();
            state = self.state();
            let given_up: Vec<_> = killed.iter().filter_map(|(number, _)| state.waiting.remove(number)).collect();
            drop(state);
            given_up.into_iter().for_each(|waiting| (waiting.give_up)());
            state = self.state();
        }
    }
}

/// The answer that a process waits for. If it is dropped, the process gets `EIO`.
pub struct Waiter<R> {
    later: Arc<Mutex<Option<Later<R>>>>,
    number: u64,
    shared: Arc<SharedWaits>,
}

impl<R: Reply> Waiter<R> {
    /// Gives the answer. Returns whether the process still waited for it: the kernel knows nothing of one that it did
    /// not get.
    #[must_use = "a process that was killed does not have what it asked for"]
    pub fn result(self, result: Result<R, Errno>) -> bool {
        taken(&self.later).map(|later| later.result(result)).is_some()
    }
}

impl<R> Drop for Waiter<R> {
    fn drop(&mut self) {
        let waiting = self.shared.state().waiting.remove(&self.number);
        drop(waiting); // without the lock
    }
}

fn taken<R>(later: &Mutex<Option<Later<R>>>) -> Option<Later<R>> {
    later.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Whether a thread of this number is being killed: a signal that ends it waits for it, or has ended it and it closes
/// its files. One that is not seen is not.
fn is_killed(process: u32) -> bool {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
    process != 0 && (has_kill_pending(&read("status")) || has_been_killed(&read("stat")))
}

/// The kernel sends `SIGKILL` to each thread of a process that any signal ends, unless it writes a core file first.
fn has_kill_pending(status: &str) -> bool {
    let pending = status.lines().filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    let bits = pending.filter_map(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    bits.fold(0, |all, bits| all | bits) & KILL_BIT != 0
}

fn has_been_killed(stat: &str) -> bool {
    // The name may have any characters.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let field = |number: usize| fields.split_whitespace().nth(number - FIRST_FIELD)?.parse::<u64>().ok();
    let is_exiting = field(FLAGS_FIELD).is_some_and(|flags| flags & PF_EXITING != 0);
    is_exiting && field(EXIT_CODE_FIELD).is_some_and(|code| code & SIGNAL_OF_CODE != 0)
}

/// An answer that comes sooner is not watched: this is longer than a volume takes, and short for a user who has killed
/// a process.
const SHORT: Duration = Duration::from_millis(50);

/// How often processes are looked at that wait for longer.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// `SIGKILL` in a mask of signals.
const KILL_BIT: u64 = 1 << 8;

// Of proc(5): the first field of `/proc/PID/stat` behind the name, and those that are needed.
const FIRST_FIELD: usize = 3;
const FLAGS_FIELD: usize = 9;
const EXIT_CODE_FIELD: usize = 52;

/// A flag of a task: it ends.
const PF_EXITING: u64 = 0x4;

/// The bits of an exit code that say by which signal.
const SIGNAL_OF_CODE: u64 = 0x7f;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn only_what_ends_a_process_counts() {
        let status = |own: &str, shared: &str| format!("Name:\tx\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t0100\n");
        assert!(has_kill_pending(&status("0000000000000100", "0000000000000000")));
        assert!(has_kill_pending(&status("0000000000000000", "0000000000004102")));
        assert!(!has_kill_pending(&status("0000000000000002", "0000000000400000")), "SIGINT, SIGURG");
        let stat = |flags: u64, code: u64| {
            let zeros = "0 ".repeat(EXIT_CODE_FIELD - FLAGS_FIELD - 1);
            format!("77 (a) (b)) D 1 1 1 0 -1 {flags} {zeros}{code}\n")
        };
        assert!(has_been_killed(&stat(0x40_0004, 9)));
        assert!(!has_been_killed(&stat(0x40_0004, 0)), "it has ended by itself: its close waits");
        assert!(!has_been_killed(&stat(0x40_0000, 9)) && !has_been_killed("") && !has_been_killed("1 (x) D"));
        assert!(!is_killed(std::process::id()) && !is_killed(0));
    }
}
