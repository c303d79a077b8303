//! Local sockets, and descriptors that come by them or were left open for this process: packets, descriptors attached
//! to packets, the folder where the sockets stand, and no call that blocks without a deadline.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Metadata};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{env, thread};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, CWD, Gid, Mode};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::Error;

/// Where a socket is bound.
///
/// A file has mode 0600, or 0660 in a folder that its group may enter and other users may not. It is removed on drop.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Place {
    /// A file with a random name in a folder of this user: `$XDG_RUNTIME_DIR/remora`, `/run/remora`, or
    /// `remora-<user id>` in the folder for temporary files, whichever can be used first. A folder that does not exist
    /// is created with mode 0700. A folder of another user, or one that every user can write to, is not used.
    #[default]
    Private,
    /// An abstract name with a random part: no file, nothing to clean up, visible in one network namespace. Every
    /// process of that namespace can see the name and connect.
    Abstract,
    /// A file with a random name in this folder, which containers can share.
    Folder(PathBuf),
}

/// The name of a socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// An abstract name, visible in one network namespace.
    Abstract(Vec<u8>),
    /// The path of a file.
    File(Vec<u8>),
}

impl Address {
    /// Parses what [`Address::name`] returns. `None` if `name` is neither `@name` nor an absolute path.
    pub fn parse(name: &str) -> Option<Address> {
        match name.strip_prefix('@') {
            Some(name) if !name.is_empty() => Some(Address::Abstract(name.as_bytes().to_vec())),
            None if name.starts_with('/') => Some(Address::File(name.as_bytes().to_vec())),
            _ => None,
        }
    }

    /// The address as text: `@name`, or the path.
    pub fn name(&self) -> String {
        match self {
            Address::Abstract(name) => format!("@{}", name.escape_ascii()),
            Address::File(path) => String::from_utf8_lossy(path).into_owned(),
        }
    }

    /// Removes the socket's file, if it has one.
    pub fn remove(&self) {
        let Address::File(path) = self else { return };
        let path: &OsStr = OsStrExt::from_bytes(path);
        if let Err(error) = fs::remove_file(path) {
            tracing::warn!(?path, %error, "cannot remove the socket's file");
        }
    }

    /// The address as the system takes it.
    ///
    /// # Errors
    /// [`Error::System`] for a name that is too long.
    pub fn to_socket(&self) -> Result<SocketAddrUnix, Error> {
        let address = match self {
            Address::Abstract(name) => SocketAddrUnix::new_abstract_name(name),
            Address::File(path) => SocketAddrUnix::new(path.as_slice()),
        };
        address.map_err(Error::system("naming a local socket (a path has at most 107 bytes)"))
    }
}

/// For error messages.
impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Abstract(name) => write!(f, "the local socket @{}", name.escape_ascii()),
            Address::File(path) => write!(f, "the local socket {}", path.escape_ascii()),
        }
    }
}

/// A listening socket.
pub struct Listener {
    socket: OwnedFd,
    address: Address,
    admits: Admits,
}

/// Whose connections a listener accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admits {
    /// Those of root, of the listener's user, and of the group that the mode of the socket's file admits.
    Us,
    /// Those of every process that reaches the socket, for a protocol that proves the peer's right by its first packet.
    Everyone,
}

impl Listener {
    /// Binds a socket to a random name and listens.
    ///
    /// Peers cannot attach descriptors to their packets, where the system can refuse them (Linux 6.16).
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn bind(place: &Place, admits: Admits) -> Result<Listener, Error> {
        let (socket, address) = bind(place)?;
        let listener = Listener::new(socket, address, admits, LISTEN_BACKLOG)?;
        // An older kernel does not have the option. The descriptors are then received and closed elsewhere.
        let _ = listener.set_pass_rights(false);
        Ok(listener)
    }

    /// Listens at a bound socket of packets, and gives its file a mode. Peers can attach descriptors to their packets.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(socket: OwnedFd, address: Address, admits: Admits, backlog: i32) -> Result<Listener, Error> {
        let mut admits = admits;
        // Before it listens: no process can connect until then.
        if let Address::File(path) = &address
            && restrict(Path::new(OsStr::from_bytes(path)))?
        {
            // The system has checked the connecting process against the mode, with all of its groups.
            admits = Admits::Everyone;
        }
        rustix::net::listen(&socket, backlog).map_err(Error::system("listening on a local socket"))?;
        Ok(Listener { socket, address, admits })
    }

    /// Says whether peers may attach descriptors to their packets.
    ///
    /// # Errors
    /// Linux before 6.16 does not have the option.
    pub fn set_pass_rights(&self, allowed: bool) -> std::io::Result<()> {
        set_pass_rights(&self.socket, allowed)
    }

    /// The address.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Accepts the next connection of an admitted process; `None` if no connection is waiting, or if many others
    /// were closed. Nothing is received from a process that is not admitted.
    ///
    /// # Errors
    /// What `accept(2)` reports.
    pub fn accept(&self) -> Result<Option<PeerSocket>, Errno> {
        for _ in 0..REFUSED_PER_CALL {
            let peer = match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => PeerSocket::from(socket),
                // The last two: the connecting process has closed the connection in the meantime.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
                Err(errno) => return Err(errno),
            };
            let user = socket_peercred(&peer)?.uid;
            if self.admits == Admits::Everyone || user.is_root() || user == rustix::process::geteuid() {
                return Ok(Some(peer));
            }
            tracing::debug!(user = user.as_raw(), "a connection of another user to a local socket is closed");
        }
        Ok(None)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Binds a socket to a random name, in the first folder that permits it.
fn bind(place: &Place) -> Result<(OwnedFd, Address), Error> {
    let name = random_name()?;
    let socket = packet_socket(SocketFlags::NONBLOCK)?;
    let bind_to = |address: Address| {
        rustix::net::bind(&socket, &address.to_socket()?).map_err(Error::system("binding a local socket"))?;
        Ok(address)
    };
    let in_folder = |folder: &Path| bind_to(Address::File(path_bytes(&folder.join(format!("{name}.sock")))));
    let address = match place {
        Place::Private => in_private_folder(in_folder)?,
        Place::Folder(folder) => in_folder(folder)?,
        Place::Abstract => bind_to(Address::Abstract(name.clone().into_bytes()))?,
    };
    Ok((socket, address))
}

/// Connects before the deadline.
///
/// # Errors
/// [`Error::Unreachable`] if no process listens there; [`Error::TimedOut`], [`Error::System`].
pub fn connect(address: &Address, deadline: Instant) -> Result<OwnedFd, Error> {
    let socket = packet_socket(SocketFlags::empty())?;
    // Connecting blocks only while the listener's backlog is full. The send time-out bounds that.
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(left)).map_err(Error::system("setting a socket's time-out"))?;
    match rustix::net::connect(&socket, &address.to_socket()?) {
        Ok(()) => Ok(socket),
        Err(Errno::AGAIN) => Err(Error::TimedOut { what: "the other end of a local socket", after: left }),
        Err(errno) => Err(Error::Unreachable { what: address.to_string(), source: errno.into() }),
    }
}

/// Sends one packet, with a descriptor if there is one. It never blocks: an empty connection has room for all packets
/// of a handshake.
///
/// # Errors
/// What `sendmsg(2)` reports.
pub fn send(socket: impl AsFd, packet: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(&socket, &[IoSlice::new(packet)], &mut ancillary, flags))?;
    Ok(())
}

/// A received packet.
pub struct Packet {
    bytes: [u8; PACKET_MAX_BYTES],
    length: usize,
    descriptor: Option<OwnedFd>,
}

impl Drop for Packet {
    fn drop(&mut self) {
        self.descriptor.take().into_iter().for_each(close_elsewhere);
    }
}

impl Packet {
    /// The bytes; empty at the end of the connection.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    /// Takes the attached descriptor, closed on exec. One that is not taken is closed on another thread.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }
}

/// Receives one packet. It never blocks. All descriptors but the first are closed, on another
/// thread: closing one can block.
///
/// # Errors
/// `Errno::AGAIN` if there is no packet; otherwise what `recvmsg(2)` reports.
pub fn receive(socket: impl AsFd) -> Result<Packet, Errno> {
    let packet = receive_once(&socket)?;
    // Linux looks for a packet first and for the end of the connection second. A last packet and the end that arrive in
    // between look like the end alone. The end persists, so a second call finds the packet.
    if packet.bytes().is_empty() { receive_once(&socket) } else { Ok(packet) }
}

fn receive_once(socket: impl AsFd) -> Result<Packet, Errno> {
    let mut bytes = [0; PACKET_MAX_BYTES];
    // Room for all that a packet can have: the system would close the others within this call.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_PACKET_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
    })?;
    let mut packet = Packet { bytes, length: received.bytes.min(PACKET_MAX_BYTES), descriptor: None };
    for message in ancillary.drain() {
        let RecvAncillaryMessage::ScmRights(descriptors) = message else { continue };
        for descriptor in descriptors {
            match packet.descriptor {
                None => packet.descriptor = Some(descriptor),
                Some(_) => close_elsewhere(descriptor),
            }
        }
    }
    Ok(packet)
}

/// Receives one packet before the deadline.
///
/// # Errors
/// [`Error::TimedOut`]; [`Error::Protocol`] if the connection ends; [`Error::System`].
pub fn receive_by(socket: impl AsFd, deadline: Instant, after: Duration) -> Result<Packet, Error> {
    loop {
        match receive(&socket) {
            Err(Errno::AGAIN) => {}
            Ok(packet) if packet.bytes().is_empty() => {
                return Err(Error::Protocol("the other end closed the connection during the handshake"));
            }
            result => return result.map_err(Error::system("receiving from a local socket")),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !wait_readable(socket.as_fd(), left)? {
            return Err(Error::TimedOut { what: "the other end of a local socket", after });
        }
    }
}

/// Fills `bytes` with random bytes from the system.
///
/// # Errors
/// [`Error::System`] if the system provides none.
pub fn random(bytes: &mut [u8]) -> Result<(), Error> {
    getrandom::fill(bytes)
        .map_err(|error| Error::system("asking for random bytes")(std::io::Error::other(error.to_string())))
}

/// A random name: two sources never collide, and no process can bind it in advance.
fn random_name() -> Result<String, Error> {
    let mut number = [0; 16];
    random(&mut number)?;
    Ok(format!("remora-{:032x}", u128::from_le_bytes(number)))
}

fn path_bytes(path: &Path) -> Vec<u8> {
    std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()).to_vec()
}

fn packet_socket(flags: SocketFlags) -> Result<OwnedFd, Error> {
    let flags = flags | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(Error::system("making a local socket"))
}

/// Maximum size of a packet, in bytes. The system truncates a longer packet, whose length is then wrong.
pub const PACKET_MAX_BYTES: usize = 128;

/// Connections that can wait to be accepted. Further ones wait in `connect`, up to their time-out.
const LISTEN_BACKLOG: i32 = 64;

/// The system's own limit (`SCM_MAX_FD`).
const DESCRIPTORS_PER_PACKET_MAX: usize = 253;

/// Connections of other users that one call closes.
const REFUSED_PER_CALL: usize = 64;

// The folder for sockets that only this user's processes may reach, and the modes of sockets.

/// Calls `bind` with the first folder in which a socket may be bound: one that exists, or could be created, and that no
/// stranger can change. If `bind` fails there, the next folder is tried. No folder is created after the one that is
/// used.
///
/// # Errors
/// [`Error::System`] if no folder can be used. The error names each folder and says why it was rejected.
fn in_private_folder<T>(bind: impl FnMut(&Path) -> Result<T, Error>) -> Result<T, Error> {
    in_first_of(candidates(), bind)
}

fn in_first_of<T>(folders: Vec<PathBuf>, mut bind: impl FnMut(&Path) -> Result<T, Error>) -> Result<T, Error> {
    let mut rejected = Vec::new();
    for folder in folders {
        let why = match prepare(&folder).map(|()| bind(&folder)) {
            Ok(Ok(bound)) => return Ok(bound),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        rejected.push(format!("{}: {why}", folder.display()));
    }
    let text = format!("{} (set XDG_RUNTIME_DIR to a folder of this user)", rejected.join("; "));
    Err(Error::system("looking for a folder for a local socket")(io::Error::other(text)))
}

fn candidates() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let user = rustix::process::geteuid().as_raw();
    let temporary = std::env::temp_dir().join(format!("remora-{user}"));
    runtime.map(|folder| folder.join("remora")).into_iter().chain(["/run/remora".into(), temporary]).collect()
}

/// Creates the folder, or checks an existing one.
fn prepare(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(FOLDER_MODE).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Does not follow a symbolic link.
    let about = folder.symlink_metadata()?;
    if !about.is_dir() {
        return Err(io::Error::other("it is not a folder"));
    }
    let us = rustix::process::geteuid().as_raw();
    if about.uid() != us && about.uid() != ROOT {
        return Err(io::Error::other(format!("it belongs to the user {}", about.uid())));
    }
    if about.mode() & 0o002 != 0 {
        return Err(io::Error::other("every user can write to it"));
    }
    Ok(())
}

/// Gives the socket at `path` its mode: 0600, or 0660 in a folder that its group may enter and others may not. Returns
/// whether the group may connect.
///
/// # Errors
/// [`Error::System`].
fn restrict(path: &Path) -> Result<bool, Error> {
    let group = path.parent().and_then(|folder| folder.metadata().ok()).and_then(|about| group(&about));
    let to_group = group.is_some_and(|group| {
        let group = Some(Gid::from_raw(group));
        rustix::fs::chownat(CWD, path, None, group, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    });
    let mode = if to_group { Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP } else { Mode::RUSR | Mode::WUSR };
    rustix::fs::chmodat(CWD, path, mode, AtFlags::empty())
        .map_err(Error::system("setting the mode of a local socket"))?;
    Ok(to_group)
}

/// The group that may enter a folder which is closed to other users.
fn group(folder: &Metadata) -> Option<u32> {
    let mode = folder.permissions().mode();
    (mode & 0o010 != 0 && mode & 0o007 == 0).then(|| folder.gid())
}

/// Mode of a folder that this process creates.
const FOLDER_MODE: u32 = 0o700;

/// The user id of root.
const ROOT: u32 = 0;

// Waiting for descriptors, with a bound.

/// Sleeps until `fd` is readable (`true`) or `timeout` has passed (`false`). A signal does not end the wait.
///
/// # Errors
/// [`Error::System`] if `poll(2)` fails.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> Result<bool, Error> {
    wait_readable_any(std::iter::once(fd), timeout)
}

/// Sleeps until one of the descriptors is readable, as [`wait_readable`].
pub(crate) fn wait_readable_any<'f>(
    fds: impl Iterator<Item = BorrowedFd<'f>>,
    timeout: Duration,
) -> Result<bool, Error> {
    let mut polled: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    // A longer time-out would not fit a timespec or an Instant.
    let deadline = Instant::now() + timeout.min(LONGEST_WAIT);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timespec = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut polled, Some(&timespec)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(Error::system("waiting for a descriptor")(errno)),
        }
    }
}

/// Longest single wait: one day, so that no arithmetic on time can overflow. The caller wakes and waits again.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

// One socket option that no crate wraps. The only unsafe code for local sockets.

/// Says whether peers of this local socket may attach descriptors to their packets. The system refuses such a packet
/// with `EPERM` otherwise, before it reaches the socket. The connections of a listening socket inherit the setting.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.16.
#[allow(unsafe_code)] // no crate wraps this option
fn set_pass_rights(socket: impl AsFd, allowed: bool) -> io::Result<()> {
    let value = libc::c_int::from(allowed);
    let length = size_of_val(&value) as libc::socklen_t;
    let socket = socket.as_fd();
    // SAFETY: The socket is open, as it is borrowed. The value is a local variable of exactly that length, which
    // outlives the call, and the system only reads it.
    let set = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const value).cast(), length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The number of the option on x86-64, arm64 and all other systems that use the generic numbers. `libc` does not have
/// it yet.
const SO_PASSRIGHTS: libc::c_int = 83;

// Closes descriptors on a thread of its own.
//
// `close(2)` can block: the last descriptor of a TCP connection with `SO_LINGER` waits for unsent data, and a file of
// a FUSE file system waits for its server. A process can attach such a descriptor to a packet and close its own copy.
// The receiver's `close` is then the last one. Closing a socket with unread packets closes their descriptors too.

/// Descriptors to be closed, and whether a thread closes them now.
static CLOSER: Mutex<Closer> = Mutex::new(Closer { waiting: VecDeque::new(), is_running: false });

struct Closer {
    waiting: VecDeque<OwnedFd>,
    is_running: bool,
}

/// Closes a descriptor later, on another thread, which ends when no descriptor waits. The call never blocks.
///
/// The queue has no limit of its own: each entry is an open descriptor, and the process has a limit of these.
pub fn close_elsewhere(descriptor: OwnedFd) {
    let mut closer = closer();
    closer.waiting.push_back(descriptor);
    if closer.is_running {
        return;
    }
    match thread::Builder::new().name("remora-close".into()).spawn(close_all) {
        Ok(_) => closer.is_running = true,
        Err(error) => {
            tracing::warn!(%error, "cannot start the thread that closes descriptors of other processes");
            let waiting = std::mem::take(&mut closer.waiting);
            // Closing may block, so the lock is free meanwhile.
            drop(closer);
            drop(waiting);
        }
    }
}

fn close_all() {
    while let Some(descriptor) = next() {
        drop(descriptor);
    }
}

/// The next descriptor to close. `None` ends the thread.
fn next() -> Option<OwnedFd> {
    let mut closer = closer();
    let next = closer.waiting.pop_front();
    closer.is_running = next.is_some();
    next
}

fn closer() -> MutexGuard<'static, Closer> {
    CLOSER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection to a process that may be hostile. Dropping it ends the connection at once, and closes the descriptor on
/// another thread.
#[derive(Debug)]
pub struct PeerSocket(Option<OwnedFd>);

impl From<OwnedFd> for PeerSocket {
    fn from(socket: OwnedFd) -> PeerSocket {
        PeerSocket(Some(socket))
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        #[expect(clippy::expect_used, reason = "only drop takes it out")]
        self.0.as_ref().expect("the socket is there until the drop").as_fd()
    }
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        let Some(socket) = self.0.take() else { return };
        // The peer notices the end now. Unlike `close`, this leaves unread packets alone. It fails if the connection
        // has ended already.
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        close_elsewhere(socket);
    }
}

// Descriptors that the service manager left open for this process. The only unsafe code for them.

/// A descriptor, and the name that the manager has for it.
pub struct Inherited {
    /// Its name; empty if the manager gave none.
    pub name: String,
    /// The descriptor. Programs that this process starts do not inherit it.
    pub descriptor: OwnedFd,
}

/// How many descriptors the service manager left open for this process.
pub fn passed() -> u32 {
    let number = |name: &str| env::var(name).ok()?.parse::<u32>().ok();
    // A process that this one's parent started for itself has the variables too, and not the descriptors.
    match number("LISTEN_PID") == Some(std::process::id()) {
        true => number("LISTEN_FDS").unwrap_or(0),
        false => 0,
    }
}

/// Takes the descriptors that the service manager left open for this process (`LISTEN_FDS`, as in sd_listen_fds(3)). It
/// gives them once: a second call returns none.
pub fn take() -> Vec<Inherited> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let count = passed().min(MAX) as RawFd;
    if count == 0 || TAKEN.swap(true, Ordering::AcqRel) {
        return Vec::new();
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names: VecDeque<&str> = names.split(':').collect();
    let name_of = |number| {
        let name = names.pop_front().unwrap_or_default().to_owned();
        Some(Inherited { name, descriptor: open(number)? })
    };
    (FIRST..FIRST + count).filter_map(name_of).collect()
}

/// The first descriptor behind standard input, output and error.
const FIRST: RawFd = 3;

/// More descriptors than any of our services asks for.
const MAX: u32 = 64;

/// The descriptor of this number; `None` if it is not open.
#[allow(unsafe_code)] // no crate gives these as descriptors with an owner
fn open(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: The call changes a flag of a descriptor and touches no memory. It fails if the number is not open.
    let set = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: The number is open, as the call above has shown. It has no other owner: the manager opened it before this
    // process began, as LISTEN_PID says, so no code here has opened it, and `TAKEN` lets only one caller get this far.
    (set == 0).then(|| unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn never(folder: &Path) -> Result<(), Error> {
        Err(Error::system("binding")(io::Error::other(format!("no room in {}", folder.display()))))
    }

    #[test]
    fn only_the_folder_that_is_used_is_created() {
        let home = tempfile::tempdir().unwrap();
        let folders: Vec<PathBuf> = ["a", "b", "c"].map(|name| home.path().join(name)).into();
        std::fs::write(&folders[0], "a file where the best folder would be").unwrap();
        let used = in_first_of(folders.clone(), |folder| Ok(folder.to_owned())).unwrap();
        assert_eq!(used, folders[1]);
        assert_eq!(used.metadata().unwrap().mode() & 0o777, FOLDER_MODE);
        assert!(!folders[2].exists(), "a folder was created that is not used");
    }

    #[test]
    fn a_folder_in_which_no_socket_can_be_bound_is_passed_over_and_named_if_it_was_the_last() {
        let home = tempfile::tempdir().unwrap();
        let folders: Vec<PathBuf> = ["a", "b"].map(|name| home.path().join(name)).into();
        let pick = |folder: &Path| if folder.ends_with("a") { never(folder) } else { Ok(()) };
        in_first_of(folders.clone(), pick).unwrap();
        let refused = in_first_of(folders.clone(), never).unwrap_err();
        let text = format!("{refused} {:?}", std::error::Error::source(&refused));
        assert!(folders.iter().all(|folder| text.contains(&format!("no room in {}", folder.display()))), "{text}");
    }
}
