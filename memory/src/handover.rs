//! Hands memory to another process of this host for *writing*: passes descriptors over a local socket, once.
//!
//! This is not a transport: no bytes are read here. The giver listens under a random name. The taker learns the name
//! and a secret by other means (a command to a server), connects and sends the secret. The giver sends the descriptors,
//! and the socket is removed.
//!
//! ```text
//!   giver                                      taker
//!   Handover::bind ──▶ address, secret ─ ─ ─ ─▶ (by a command)
//!   give ◀── connect ─────────────────────────── take
//!        ◀── the secret ────────────────────────
//!        ─── one packet for each descriptor ───▶
//! ```

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_peercred, socket_type};
use rustix::net::{AddressFamily, SocketType};

use crate::local::{self, Admits, Listener, PeerSocket, wait_readable_any};
use crate::{Error, Place};

/// An offer of descriptors to the process that knows its address and its secret.
pub struct Handover {
    listener: Listener,
    secret: [u8; SECRET_BYTES],
}

impl Handover {
    /// Starts listening. The taker is often a server of another user, so that every process that reaches the socket may
    /// connect: the secret proves the right one.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn bind(place: &Place) -> Result<Handover, Error> {
        let listener = Listener::bind(place, Admits::Everyone)?;
        let mut secret = [0; SECRET_BYTES];
        local::random(&mut secret)?;
        Ok(Handover { listener, secret })
    }

    /// The address: `@name`, or the path of a file.
    pub fn address(&self) -> String {
        self.listener.address().name()
    }

    /// The secret that the taker must send, in hexadecimal digits.
    pub fn secret(&self) -> String {
        self.secret.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Waits for the taker and sends the descriptors. Connections without the secret are closed. One that sends nothing
    /// delays no other: all are waited for at once. If there are too many, the oldest of the user with the most gives
    /// way, so that no user can displace the taker of another one.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if the taker does not connect in time; [`Error::System`].
    pub fn give(&self, descriptors: &[BorrowedFd<'_>], within: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + within;
        let mut silent = VecDeque::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !wait_readable_any(self.sockets(&silent), left)? {
                return Err(Error::TimedOut { what: "the process that takes over the memory", after: within });
            }
            if let Some(taker) = self.proved(&mut silent) {
                return hand(&taker, descriptors);
            }
            self.accept_into(&mut silent)?;
        }
    }

    fn sockets<'s>(&'s self, silent: &'s VecDeque<Silent>) -> impl Iterator<Item = BorrowedFd<'s>> {
        std::iter::once(self.listener.as_fd()).chain(silent.iter().map(|peer| peer.socket.as_fd()))
    }

    /// The connection that has sent the secret. Those that have sent anything else are closed.
    fn proved(&self, silent: &mut VecDeque<Silent>) -> Option<PeerSocket> {
        for _ in 0..silent.len() {
            let peer = silent.pop_front()?;
            match local::receive(&peer.socket) {
                Err(Errno::AGAIN) => silent.push_back(peer),
                Ok(packet) if equal(packet.bytes(), &self.secret) => return Some(peer.socket),
                _ => tracing::debug!(user = peer.user, "a process without the secret asked for a handover"),
            }
        }
        None
    }

    /// Accepts waiting connections, a bounded number of them.
    fn accept_into(&self, silent: &mut VecDeque<Silent>) -> Result<(), Error> {
        for _ in 0..SILENT_MAX {
            match self.listener.accept().map_err(Error::system("accepting a local connection"))? {
                Some(socket) => silent.push_back(Silent::new(socket)?),
                None => break,
            }
            if silent.len() > SILENT_MAX {
                remove_oldest_of_the_busiest(silent);
            }
        }
        Ok(())
    }
}

/// A connection that has not sent anything yet.
struct Silent {
    socket: PeerSocket,
    user: u32,
}

impl Silent {
    fn new(socket: PeerSocket) -> Result<Silent, Error> {
        let peer = socket_peercred(&socket).map_err(Error::system("asking for the user of a local connection"))?;
        Ok(Silent { user: peer.uid.as_raw(), socket })
    }
}

/// Removes the oldest connection of the user that has the most.
fn remove_oldest_of_the_busiest(silent: &mut VecDeque<Silent>) {
    let mut connections: HashMap<u32, usize> = HashMap::new();
    for peer in silent.iter() {
        *connections.entry(peer.user).or_default() += 1;
    }
    let busiest = connections.into_iter().max_by_key(|&(_, count)| count).map(|(user, _)| user);
    if let Some(oldest) = silent.iter().position(|peer| Some(peer.user) == busiest) {
        silent.remove(oldest);
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        self.listener.address().remove();
    }
}

fn hand(taker: &PeerSocket, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let count = descriptors.len() as u8;
    for descriptor in descriptors {
        // Each packet carries the number of descriptors, so that the taker notices a missing one.
        local::send(taker, &[count], Some(*descriptor)).map_err(Error::system("handing over a descriptor"))?;
    }
    Ok(())
}

/// Receives the descriptors that are offered at `address`.
///
/// # Errors
/// [`Error::Misuse`] if the address or the secret is malformed, [`Error::Unreachable`] if no process listens at the
/// address, [`Error::TimedOut`], and [`Error::Protocol`] if the giver closes the connection, which it does for a wrong
/// secret.
pub fn take(address: &str, secret: &str, within: Duration) -> Result<Vec<OwnedFd>, Error> {
    take_checked(address, secret, within, check)
}

/// Receives the one socket that is offered at `address`, a local one for a stream of bytes.
///
/// # Errors
/// As [`take`].
pub fn take_socket(address: &str, secret: &str, within: Duration) -> Result<OwnedFd, Error> {
    let taken = take_checked(address, secret, within, check_socket)?;
    taken.into_iter().next().ok_or(Error::Protocol("a handover packet has no descriptor"))
}

fn take_checked(
    address: &str,
    secret: &str,
    within: Duration,
    check: fn(&OwnedFd) -> Result<(), Error>,
) -> Result<Vec<OwnedFd>, Error> {
    let address = local::Address::parse(address).ok_or(Error::Misuse("an address is @name or an absolute path"))?;
    let secret = parse_secret(secret).ok_or(Error::Misuse("the secret is not 32 hexadecimal digits"))?;
    let deadline = Instant::now() + within;
    let socket = PeerSocket::from(local::connect(&address, deadline)?);
    local::send(&socket, &secret, None).map_err(Error::system("sending the secret of a handover"))?;
    let mut taken = Vec::new();
    loop {
        let mut packet = local::receive_by(&socket, deadline, within)?;
        let count = packet.bytes().first().copied().filter(|count| *count <= DESCRIPTORS_MAX).unwrap_or(0);
        let Some(descriptor) = packet.take_descriptor() else {
            return Err(Error::Protocol("a handover packet has no descriptor"));
        };
        if let Err(error) = check(&descriptor) {
            // Closing anything but a memfd or a local socket could block the caller.
            local::close_elsewhere(descriptor);
            return Err(error);
        }
        taken.push(descriptor);
        if taken.len() >= usize::from(count) {
            return Ok(taken);
        }
    }
}

/// Checks that a descriptor is a memfd without huge pages. If the system has no huge page left for a hole, the access
/// to it kills the process by SIGBUS.
fn check(descriptor: &OwnedFd) -> Result<(), Error> {
    rustix::fs::fcntl_get_seals(descriptor).map_err(|_| Error::Unsealed("it is not a memfd"))?;
    let about = rustix::fs::fstatfs(descriptor).map_err(Error::system("asking for the file system of a memory"))?;
    if about.f_type as u64 == HUGETLBFS_MAGIC {
        return Err(Error::Unsealed("it has huge pages (hugetlbfs): give one of base pages"));
    }
    Ok(())
}

/// Checks that a descriptor is a local socket for a stream of bytes: no write to it that does not wait blocks, nor does
/// closing it.
fn check_socket(descriptor: &OwnedFd) -> Result<(), Error> {
    let is_local = matches!(socket_domain(descriptor), Ok(AddressFamily::UNIX));
    let is_stream = matches!(socket_type(descriptor), Ok(SocketType::STREAM));
    if is_local && is_stream { Ok(()) } else { Err(Error::Protocol("what was handed over is not a local socket")) }
}

fn parse_secret(text: &str) -> Option<[u8; SECRET_BYTES]> {
    if text.len() != 2 * SECRET_BYTES || !text.is_ascii() {
        return None;
    }
    let mut secret = [0; SECRET_BYTES];
    for (byte, digits) in secret.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(secret)
}

/// Compares in constant time.
fn equal(shown: &[u8], secret: &[u8; SECRET_BYTES]) -> bool {
    shown.len() == secret.len() && shown.iter().zip(secret).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// Bytes of a secret: too many to guess in the seconds that an offer lasts.
const SECRET_BYTES: usize = 16;

/// `f_type` of hugetlbfs, from the kernel's `magic.h`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Connections that have not sent anything yet. The taker sends its secret at once.
const SILENT_MAX: usize = 64;

/// The maximum number of descriptors in one handover. A table needs two or three.
const DESCRIPTORS_MAX: u8 = 8;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;
    use crate::{Memory, Pages};

    const SOON: Duration = Duration::from_secs(10);

    fn memories() -> [Memory; 2] {
        ["first", "second"].map(|name| Memory::create(name, 4096, Pages::Small).unwrap())
    }

    fn hand_over_at(place: &Place) {
        let memories = memories();
        let handover = Handover::bind(place).unwrap();
        let (address, secret) = (handover.address(), handover.secret());
        let taker = std::thread::spawn(move || take(&address, &secret, SOON));
        handover.give(&[memories[0].as_fd(), memories[1].as_fd()], SOON).unwrap();
        let taken = taker.join().unwrap().unwrap();
        assert_eq!(taken.len(), 2);
        for (number, descriptor) in (0_u64..).zip(taken) {
            Memory::adopt(descriptor, 4096).unwrap().store_u64(8, number, std::sync::atomic::Ordering::SeqCst).unwrap();
        }
        assert_eq!(memories[1].load_u64(8, std::sync::atomic::Ordering::SeqCst).unwrap(), 1);
    }

    #[test]
    fn memory_handed_over_is_the_same_memory() {
        hand_over_at(&Place::Abstract);
    }

    #[test]
    fn a_socket_in_a_folder_does_as_well_and_leaves_no_file() {
        let folder = std::env::temp_dir().join(format!("remora-handover-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        hand_over_at(&Place::Folder(folder.clone()));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn without_the_secret_nothing_is_handed_over_and_the_right_one_still_gets_it() {
        let memories = memories();
        let handover = Handover::bind(&Place::Abstract).unwrap();
        let (address, secret) = (handover.address(), handover.secret());
        let takers = std::thread::spawn(move || {
            let wrong = take(&address, &"00".repeat(SECRET_BYTES), SOON);
            (wrong, take(&address, &secret, SOON))
        });
        handover.give(&[memories[0].as_fd()], SOON).unwrap();
        let (wrong, right) = takers.join().unwrap();
        assert!(matches!(wrong, Err(Error::Protocol(_) | Error::System { .. })), "{wrong:?}");
        assert_eq!(right.unwrap().len(), 1);
    }

    /// A server must not hold what could make it wait: closing a TCP socket can, and so can writing to a pipe.
    #[test]
    fn a_taker_of_a_socket_takes_a_local_stream_and_nothing_else() {
        let (local, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let [memory, _] = memories();
        let (reader, _writer) = std::io::pipe().unwrap();
        let offered = [
            (local.as_fd(), true),
            (datagrams.as_fd(), false),
            (tcp.as_fd(), false),
            (memory.as_fd(), false),
            (reader.as_fd(), false),
        ];
        for (descriptor, is_taken) in offered {
            let handover = Handover::bind(&Place::Abstract).unwrap();
            let (address, secret) = (handover.address(), handover.secret());
            let taker = std::thread::spawn(move || take_socket(&address, &secret, SOON));
            let _ = handover.give(&[descriptor], SOON);
            let taken = taker.join().unwrap();
            assert_eq!(taken.is_ok(), is_taken, "{descriptor:?}: {taken:?}");
        }
    }

    #[test]
    fn neither_end_waits_longer_than_its_limit() {
        let handover = Handover::bind(&Place::Abstract).unwrap();
        let none = handover.give(&[], Duration::from_millis(20));
        assert!(matches!(none, Err(Error::TimedOut { .. })));
        let silent = take(&handover.address(), &handover.secret(), Duration::from_millis(20));
        assert!(matches!(silent, Err(Error::TimedOut { .. })));
    }

    #[test]
    fn silent_connections_do_not_delay_the_taker() {
        for place in [Place::Abstract, Place::Private] {
            let memories = memories();
            let handover = Handover::bind(&place).unwrap();
            let (address, secret) = (handover.address(), handover.secret());
            let strangers = std::thread::spawn(move || {
                let at = local::Address::parse(&address).unwrap();
                let connect = |_| local::connect(&at, Instant::now() + SOON).unwrap();
                let silent: Vec<OwnedFd> = (0..2 * SILENT_MAX).map(connect).collect();
                let taken = take(&address, &secret, SOON);
                (silent, taken)
            });
            let begun = Instant::now();
            handover.give(&[memories[0].as_fd()], SOON).unwrap();
            assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
            assert_eq!(strangers.join().unwrap().1.unwrap().len(), 1);
        }
    }

    #[test]
    fn the_user_with_the_most_connections_gives_way_and_the_taker_of_another_stays() {
        let silent = |user| {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let (socket, _) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
            Silent { socket: PeerSocket::from(socket), user }
        };
        // The taker came first, before the flood: it is the oldest of all.
        let mut waiting = VecDeque::from([silent(1)]);
        waiting.extend((0..SILENT_MAX).map(|_| silent(2)));
        remove_oldest_of_the_busiest(&mut waiting);
        let users: Vec<u32> = waiting.iter().map(|peer| peer.user).collect();
        assert_eq!(users[0], 1);
        assert_eq!(users.len(), SILENT_MAX);
        assert!(users[1..].iter().all(|user| *user == 2));
    }

    #[test]
    fn silent_connections_beyond_the_limit_are_closed() {
        let handover = Handover::bind(&Place::Abstract).unwrap();
        let at = local::Address::parse(&handover.address()).unwrap();
        let (mut silent, mut strangers) = (VecDeque::new(), Vec::new());
        for _ in 0..SILENT_MAX + 8 {
            strangers.push(local::connect(&at, Instant::now() + SOON).unwrap());
            handover.accept_into(&mut silent).unwrap();
        }
        assert_eq!(silent.len(), SILENT_MAX);
    }

    #[test]
    fn a_descriptor_that_is_no_memory_is_refused() {
        let handover = Handover::bind(&Place::Private).unwrap();
        let (address, secret) = (handover.address(), handover.secret());
        let taker = std::thread::spawn(move || take(&address, &secret, SOON));
        handover.give(&[std::fs::File::open("/proc/self/exe").unwrap().as_fd()], SOON).unwrap();
        let refused = taker.join().unwrap().unwrap_err();
        assert!(matches!(refused, Error::Unsealed(_)) && refused.to_string().contains("memfd"), "{refused}");
    }

    #[test]
    fn memory_with_huge_pages_is_refused() {
        use rustix::fs::{MemfdFlags, SealFlags};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let Ok(huge) = rustix::fs::memfd_create("huge", flags) else {
            println!("the system has no huge pages");
            return;
        };
        rustix::fs::ftruncate(&huge, 2 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        let handover = Handover::bind(&Place::Private).unwrap();
        let (address, secret) = (handover.address(), handover.secret());
        let taker = std::thread::spawn(move || take(&address, &secret, SOON));
        handover.give(&[huge.as_fd()], SOON).unwrap();
        let refused = taker.join().unwrap().unwrap_err();
        assert!(matches!(refused, Error::Unsealed(_)) && refused.to_string().contains("hugetlbfs"), "{refused}");
    }

    #[test]
    fn a_malformed_address_or_secret_is_refused_before_connecting() {
        for address in ["", "relative/path", "@"] {
            assert!(matches!(take(address, &"00".repeat(SECRET_BYTES), SOON), Err(Error::Misuse(_))), "{address}");
        }
        for secret in ["", "00", "zz", &"é".repeat(SECRET_BYTES), &"0".repeat(2 * SECRET_BYTES - 1)] {
            assert!(matches!(take("@unused", secret, SOON), Err(Error::Misuse(_))), "{secret}");
        }
    }
}
