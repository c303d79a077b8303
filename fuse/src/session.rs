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
use crate::answer::Buffers;
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
        command.arg("--file-system").arg(self.shared.mounted.directory());
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
