//! Local sockets: packets, descriptors attached to packets, and no call that blocks without a deadline.

use std::{
    ffi::OsStr,
    fs,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketAddrUnix, SocketFlags, SocketType,
        sockopt::{Timeout, set_socket_timeout},
    },
};

use crate::{Error, wait_readable};

/// Where a socket is bound.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Place {
    /// An abstract name with a random part: no file, nothing to clean up, visible in one network namespace.
    #[default]
    Abstract,
    /// A file with a random name in this folder, which containers can share. It is removed on drop. Its mode follows
    /// the umask: a reader needs the right to write to the file and to enter the folder.
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

/// Binds a socket to a random name and listens.
///
/// # Errors
/// [`Error::System`].
pub fn listen(place: &Place) -> Result<(OwnedFd, Address), Error> {
    let address = random_address(place)?;
    let socket = packet_socket(SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &address.to_socket()?).map_err(Error::system("binding a local socket"))?;
    rustix::net::listen(&socket, LISTEN_BACKLOG).map_err(Error::system("listening on a local socket"))?;
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

/// Accepts the next connection; `None` if none is waiting.
///
/// # Errors
/// What `accept(2)` reports.
pub fn accept(listener: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Ok(Some(socket)),
        // The last two: the connecting process has closed the connection in the meantime.
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(errno) => Err(errno),
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
    /// The attached descriptor, closed on exec.
    pub descriptor: Option<OwnedFd>,
}

impl Packet {
    /// The bytes; empty at the end of the connection.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// Receives one packet. It never blocks. All descriptors but the first are closed.
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
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
    })?;
    let descriptor = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(Packet { bytes, length: received.bytes.min(PACKET_MAX_BYTES), descriptor })
}

/// Receives one packet before the deadline.
///
/// # Errors
/// [`Error::TimedOut`]; [`Error::Protocol`] if the connection ends; [`Error::System`].
pub fn receive_by(socket: &OwnedFd, deadline: Instant, after: Duration) -> Result<Packet, Error> {
    loop {
        match receive(socket) {
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
fn random_address(place: &Place) -> Result<Address, Error> {
    let mut number = [0; 16];
    random(&mut number)?;
    let name = format!("remora-{:032x}", u128::from_le_bytes(number));
    match place {
        Place::Abstract => Ok(Address::Abstract(name.into_bytes())),
        Place::Folder(folder) => Ok(Address::File(path_bytes(&folder.join(name + ".sock")))),
    }
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
