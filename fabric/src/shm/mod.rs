//! The transport within one host: the source passes the memory itself to the reader, and a read is a copy by the
//! reader. No bytes of a region are sent over a socket.
//!
//! ```text
//!   ShmExporter                                            ShmConnector
//!     │  one thread for all connections                      │  no thread
//!     ▼                                                      ▼
//!   serve   ◀═══ hello, challenge, proof ═══════════════▶  connector
//!     │      ═══ welcome + memfd (SCM_RIGHTS) ══════════▶    │ maps it, read-only
//!     │                                                      ▼
//!     │      (no traffic while the grant holds)            peer    post: queue.  poll: copy region → sink
//!     └───── farewell, or the end of the connection ════▶          view: or read in place, no copy at all
//! ```
//!
//! - Here: the five messages of the handshake, and the body of a [`RegionKey`] of this transport;
//!   pure. **Start here.**
//! - `source`: regions, grants and connections, and the thread that admits readers.
//! - `reader`: makes connections, and copies.
//!
//! **Who can connect:** see [`Place`]. A connection without a proof uses none of the places of readers, and nothing
//! that a peer sends can block a thread: descriptors that it attaches are refused by the system, or closed on a thread
//! of their own, as are its connections.
//!
//! After the welcome the connection carries nothing until it ends. The source ends it when the region is revoked, the
//! grant is withdrawn or the source exits; the reader notices at its next [`Peer::poll`](crate::Peer::poll).
//!
//! **What revoking cannot do here:** a mapping cannot be removed from another process. A reader that does not poll its
//! [`Peer`](crate::Peer) still sees the memory, and zeros after [`Memory::release`](crate::Memory::release). It can see
//! nothing else, as each generation has its own memory.

mod reader;
mod source;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use crate::admission::{Format, Hello, NONCE_BYTES, PROOF_BYTES, Refusal};
use crate::error::{Denial, Error};
use crate::memory::local::{Address, PACKET_MAX_BYTES};
use crate::region::{KeyError, RegionId, RegionKey, TransportKind};

pub use crate::memory::Place;
pub use reader::{ShmConnector, ShmPeer};
pub use source::ShmExporter;

/// Options of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmOptions {
    /// Where the socket is bound.
    pub place: Place,
    /// Maximum number of connections that have proved their session, 1 to [`MAX_CONNECTIONS`]; further ones are refused
    /// as `Busy`.
    pub connections: usize,
    /// Time limit of a reader's whole handshake; the connection is then closed.
    pub handshake_timeout: Duration,
}

impl Default for ShmOptions {
    fn default() -> Self {
        ShmOptions { place: Place::default(), connections: 256, handshake_timeout: Duration::from_secs(5) }
    }
}

impl ShmOptions {
    /// Fails if a number is out of range.
    fn check(&self) -> Result<(), Error> {
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            return Err(Error::Misuse("shm connections: choose 1 to 4096"));
        }
        if !(SHORTEST_TIMEOUT..=LONGEST_TIMEOUT).contains(&self.handshake_timeout) {
            return Err(Error::Misuse("shm time-out of the handshake: choose 10 ms to one hour"));
        }
        Ok(())
    }
}

/// Maximum of [`ShmOptions::connections`]: each connection takes a descriptor, of which a process often has 1024 or
/// 4096.
pub const MAX_CONNECTIONS: usize = 4096;

/// The handshake of this transport. A grant is the region's length.
pub(crate) struct Shm;

impl Format for Shm {
    const READER: &'static [u8] = b"remora shm 1 reader";
    const SOURCE: &'static [u8] = b"remora shm 1 source";
    const HELLO_BYTES: usize = 40 + NONCE_BYTES;
    const CHALLENGE_BYTES: usize = 8 + NONCE_BYTES;
    type Grant = u64;

    fn hello(hello: &Hello) -> Vec<u8> {
        let mut bytes = [0; Shm::HELLO_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&hello.session.to_le_bytes());
        bytes[24..32].copy_from_slice(&hello.id.generation.to_le_bytes());
        bytes[32..36].copy_from_slice(&hello.id.region.to_le_bytes());
        bytes[40..72].copy_from_slice(&hello.nonce);
        bytes.to_vec()
    }

    fn parse_hello(packet: &[u8]) -> Result<Hello, Error> {
        let bytes: &[u8; Shm::HELLO_BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a hello of the wrong length"))?;
        if bytes[0..8] != MAGIC {
            return Err(Error::Protocol("a hello that is not of a Remora reader"));
        }
        check_version(u16::from_le_bytes(part(bytes, 8)))?;
        Ok(Hello {
            lane: 0,
            session: u64::from_le_bytes(part(bytes, 16)),
            id: RegionId {
                generation: u64::from_le_bytes(part(bytes, 24)),
                region: u32::from_le_bytes(part(bytes, 32)),
            },
            nonce: part(bytes, 40),
        })
    }

    fn challenge(nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
        challenge(0, nonce)
    }

    /// Checks the version first: nothing after the first four bytes means anything in another version.
    fn parse_challenge(packet: &[u8]) -> Result<(), Error> {
        let bytes: &[u8; Shm::CHALLENGE_BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a challenge of the wrong length"))?;
        check_version(u16::from_le_bytes(part(bytes, 2)))?;
        check_status(bytes[0])
    }

    fn refusal(why: Refusal) -> Option<Vec<u8>> {
        match why {
            Refusal::Denied(denial) => Some(challenge(denial.code(), &[0; NONCE_BYTES])),
            Refusal::Version => Some(challenge(0, &[0; NONCE_BYTES])),
            Refusal::Malformed => None,
        }
    }

    fn welcome(length: &u64, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
        welcome(0, *length, proof)
    }

    fn denial(denial: Denial) -> Vec<u8> {
        welcome(denial.code(), 0, &[0; PROOF_BYTES])
    }

    fn parse_welcome(packet: &[u8]) -> Result<(u64, [u8; PROOF_BYTES]), Error> {
        let bytes: &[u8; WELCOME_BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a welcome of the wrong length"))?;
        check_status(bytes[0])?;
        Ok((u64::from_le_bytes(part(bytes, 8)), part(bytes, 16)))
    }
}

/// For the fuzz target: a farewell that is valid survives encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_farewell(packet: &[u8]) {
    if let Some(denial) = farewell_reason(packet) {
        assert_eq!(farewell(denial), packet);
    }
}

/// For the fuzz targets: the address in a key survives encoding, if the key is of this host.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_key(key: &RegionKey) {
    let Some(Ok(here)) = key.body().get(..BOOT_ID_BYTES).map(BootId::parse) else { return };
    let Ok(at) = address_in(key, &here) else { return };
    let _ = at.to_socket();
    let for_namespace = key.body().get(BOOT_ID_BYTES) == Some(&PLACE_FILE_OF_NAMESPACE);
    let namespace = if for_namespace { Namespace::of_this_process().ok() } else { None };
    assert_eq!(region_key(key.id(), key.length(), &here, namespace.as_ref(), &at).ok().as_ref(), Some(key));
}

/// A shorter time-out would expire without need on a busy machine.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Longest time-out.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(60 * 60);

// The messages of this transport: bytes in, bytes out, no I/O. One message is one packet (SOCK_SEQPACKET), so there is
// no framing. Numbers are little endian.
//
// ```text
//  hello      reader → source   magic 8 │ version 2 │ zero 6 │ session 8 │ generation 8 │ region 4 │ zero 4 │ nonce 32
//  challenge  source → reader   status 1 │ zero 1 │ version 2 │ zero 4 │ nonce 32
//  proof      reader → source   HMAC 32                      over hello ‖ challenge, label READER
//  welcome    source → reader   status 1 │ zero 7 │ length 8 │ HMAC 32       label SOURCE; the memfd is attached if the status is 0
//  farewell   source → reader   status 1                     at any time after the welcome; the end of the connection follows
// ```
//
// Status 0 is success; any other is the code of a [`Denial`]. There is one version, 1. A source that receives another
// version answers with its own in a challenge and hangs up, so that the reader can name both.

/// First bytes of every hello.
const MAGIC: [u8; 8] = *b"RMRA-shm";

/// The only version.
const VERSION: u16 = 1;

fn challenge(status: u8, nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
    let mut bytes = [0; Shm::CHALLENGE_BYTES];
    bytes[0] = status;
    bytes[2..4].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..40].copy_from_slice(nonce);
    bytes.to_vec()
}

fn welcome(status: u8, length: u64, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
    let mut bytes = [0; WELCOME_BYTES];
    bytes[0] = status;
    bytes[8..16].copy_from_slice(&length.to_le_bytes());
    bytes[16..48].copy_from_slice(proof);
    bytes.to_vec()
}

fn check_version(theirs: u16) -> Result<(), Error> {
    if theirs == VERSION { Ok(()) } else { Err(Error::Version { kind: TransportKind::Shm, theirs, ours: VERSION }) }
}

fn check_status(status: u8) -> Result<(), Error> {
    match status {
        0 => Ok(()),
        code => Err(Denial::from_code(code).map_or(Error::Protocol("a refusal for an unknown reason"), Error::Refused)),
    }
}

/// The source's last message on a connection.
fn farewell(denial: Denial) -> [u8; FAREWELL_BYTES] {
    [denial.code()]
}

/// The reason in a farewell; `None` if it is not valid.
fn farewell_reason(packet: &[u8]) -> Option<Denial> {
    match packet {
        [code] => Denial::from_code(*code),
        _ => None,
    }
}

/// Bytes of a farewell.
const FAREWELL_BYTES: usize = 1;

/// Bytes of a welcome.
const WELCOME_BYTES: usize = 16 + PROOF_BYTES;

/// `N` bytes at an offset that the layouts above have inside `M`.
fn part<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

// A message that is too long must not fit a packet when it is cut off.
const _: () = assert!(PACKET_MAX_BYTES > Shm::HELLO_BYTES && PACKET_MAX_BYTES > WELCOME_BYTES);

// The body of a [`RegionKey`] of this transport: which host, and which socket. No I/O except reading the host's boot
// id and the number of the process's network namespace.
//
// ```text
//   boot id 36 (text) │ place 1 (0 abstract, 1 file) │ name, to the end
//   boot id 36 (text) │ place 1 (2 file for one network namespace) │ namespace 8 │ name, to the end
// ```

/// Identifies a running system: the kernel draws it at each boot, and all containers of a host see the same.
#[derive(Clone, PartialEq, Eq, Debug)]
struct BootId(String);

impl BootId {
    /// The boot id of this host.
    fn of_this_host() -> Result<BootId, Error> {
        let text = fs::read_to_string(BOOT_ID_FILE).map_err(Error::system("reading the host's boot id under /proc"))?;
        BootId::parse(text.trim().as_bytes())
    }

    fn parse(text: &[u8]) -> Result<BootId, Error> {
        let text = std::str::from_utf8(text).map_err(|_| KeyError::Body("its boot id is not UTF-8"))?;
        let fits = text.len() == BOOT_ID_BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        if fits { Ok(BootId(text.to_owned())) } else { Err(KeyError::Body("its boot id has the wrong form").into()) }
    }
}

/// A network namespace of this host. Hosts of a test network have one each, and share the file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Namespace(u64);

impl Namespace {
    /// The network namespace of this process.
    fn of_this_process() -> Result<Namespace, Error> {
        let about =
            fs::metadata(NAMESPACE_FILE).map_err(Error::system("asking for the network namespace under /proc"))?;
        Ok(Namespace(about.ino()))
    }
}

/// Encodes a key. With a namespace, only processes of that namespace can use it.
fn region_key(
    id: RegionId,
    length: u64,
    boot_id: &BootId,
    namespace: Option<&Namespace>,
    address: &Address,
) -> Result<RegionKey, Error> {
    let number = namespace.map(|namespace| namespace.0.to_le_bytes());
    let (place, name) = match address {
        Address::Abstract(name) => (PLACE_ABSTRACT, name),
        Address::File(path) if number.is_some() => (PLACE_FILE_OF_NAMESPACE, path),
        Address::File(path) => (PLACE_FILE, path),
    };
    let number = if place == PLACE_FILE_OF_NAMESPACE { number.unwrap_or_default().to_vec() } else { Vec::new() };
    let body = [boot_id.0.as_bytes(), &[place], &number, name].concat();
    Ok(RegionKey::new(TransportKind::Shm, id, length, &body)?)
}

/// Decodes a key. A key of another host is an error, as its address is meaningless here.
fn address_in(key: &RegionKey, ours: &BootId) -> Result<Address, Error> {
    key.expect(TransportKind::Shm)?;
    let (theirs, rest) =
        key.body().split_at_checked(BOOT_ID_BYTES).ok_or(KeyError::Body("it is shorter than a boot id"))?;
    let theirs = BootId::parse(theirs)?;
    if theirs != *ours {
        return Err(Error::NotThisHost { theirs: theirs.0, ours: ours.0.clone() });
    }
    match rest.split_first() {
        Some((&PLACE_ABSTRACT, name)) => Ok(Address::Abstract(name.to_vec())),
        Some((&PLACE_FILE, path)) => Ok(Address::File(path.to_vec())),
        Some((&PLACE_FILE_OF_NAMESPACE, rest)) => {
            let (number, path) =
                rest.split_first_chunk().ok_or(KeyError::Body("its network namespace is cut short"))?;
            let (theirs_in, ours_in) = (Namespace(u64::from_le_bytes(*number)), Namespace::of_this_process()?);
            if theirs_in != ours_in {
                let named = |namespace: Namespace| format!("{}, in the network namespace {}", ours.0, namespace.0);
                return Err(Error::NotThisHost { theirs: named(theirs_in), ours: named(ours_in) });
            }
            Ok(Address::File(path.to_vec()))
        }
        _ => Err(KeyError::Body("the kind of its socket is unknown").into()),
    }
}

const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// Length of a UUID as text.
const BOOT_ID_BYTES: usize = 36;

const PLACE_ABSTRACT: u8 = 0;

const PLACE_FILE: u8 = 1;

const PLACE_FILE_OF_NAMESPACE: u8 = 2;

const NAMESPACE_FILE: &str = "/proc/self/ns/net";

#[cfg(test)]
mod wire_tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Vec<u8> {
        Shm::hello(&Hello { lane: 0, session: 1, id: RegionId { generation: 1, region: 1 }, nonce: [0; 32] })
    }

    proptest! {
        #[test]
        fn messages_come_back_out_of_their_bytes(session: u64, generation: u64, region: u32, length: u64, nonce: [u8; 32], code in 1u8..7) {
            let hello = Hello { lane: 0, session, id: RegionId { generation, region }, nonce };
            prop_assert_eq!(Shm::parse_hello(&Shm::hello(&hello)).unwrap(), hello);
            prop_assert!(Shm::parse_challenge(&Shm::challenge(&nonce)).is_ok());
            prop_assert_eq!(Shm::parse_welcome(&Shm::welcome(&length, &nonce)).unwrap(), (length, nonce));
            let denial = Denial::from_code(code).unwrap();
            let refused = Shm::parse_challenge(&Shm::refusal(Refusal::Denied(denial)).unwrap());
            prop_assert!(matches!(refused, Err(Error::Refused(why)) if why == denial));
            let denied = Shm::parse_welcome(&Shm::denial(denial));
            prop_assert!(matches!(denied, Err(Error::Refused(why)) if why == denial));
        }

        #[test]
        fn any_packet_is_a_message_or_an_error_but_never_a_panic(packet in prop::collection::vec(any::<u8>(), 0..PACKET_MAX_BYTES)) {
            let _ = Shm::parse_hello(&packet);
            let _ = Shm::parse_challenge(&packet);
            let _ = Shm::parse_welcome(&packet);
            check_farewell(&packet);
        }
    }

    #[test]
    fn the_messages_are_these_bytes() {
        let id = RegionId { generation: 0x0102, region: 3 };
        let mut want = b"RMRA-shm\x01\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0\x03\0\0\0\0\0\0\0".to_vec();
        want.extend([7; 32]);
        assert_eq!(Shm::hello(&Hello { lane: 0, session: 5, id, nonce: [7; 32] }), want);
        assert_eq!(Shm::challenge(&[9; 32]), [&b"\0\0\x01\0\0\0\0\0"[..], &[9; 32]].concat());
        let busy = Shm::refusal(Refusal::Denied(Denial::Busy)).unwrap();
        assert_eq!(busy, [&b"\x06\0\x01\0\0\0\0\0"[..], &[0; 32]].concat());
        assert_eq!(Shm::welcome(&0x1_0000, &[8; 32]), [&b"\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0"[..], &[8; 32]].concat());
    }

    #[test]
    fn another_version_is_an_error_that_names_both() {
        let mut challenge = Shm::challenge(&[0; 32]);
        challenge[2] = 9;
        let error = Shm::parse_challenge(&challenge).unwrap_err();
        assert!(matches!(error, Error::Version { theirs: 9, ours: VERSION, .. }), "{error}");
        let mut hello = hello();
        hello[8] = 9;
        let error = Shm::parse_hello(&hello).unwrap_err();
        assert!(matches!(error, Error::Version { theirs: 9, ours: VERSION, .. }), "{error}");
        assert!(
            Shm::refusal(Refusal::Version).is_some_and(|answer| Shm::parse_challenge(&answer).is_ok()),
            "names ours"
        );
    }

    #[test]
    fn a_hello_without_the_magic_is_rejected() {
        let mut hello = hello();
        hello[0] ^= 1;
        assert!(matches!(Shm::parse_hello(&hello), Err(Error::Protocol(_))));
    }

    const ID: RegionId = RegionId { generation: 5, region: 1 };

    #[test]
    fn an_address_comes_back_out_of_its_key() {
        let here = BootId::of_this_host().unwrap();
        for place in [Address::Abstract(b"remora-1".to_vec()), Address::File(b"/run/remora.sock".to_vec())] {
            for namespace in [None, Some(Namespace::of_this_process().unwrap())] {
                let key = region_key(ID, 4096, &here, namespace.as_ref(), &place).unwrap();
                assert_eq!(address_in(&key, &here).unwrap(), place);
            }
        }
    }

    #[test]
    fn a_private_file_of_another_network_namespace_is_not_this_host() {
        let here = BootId::of_this_host().unwrap();
        let file = Address::File(b"/run/remora/a.sock".to_vec());
        let key = region_key(ID, 4096, &here, Some(&Namespace(1)), &file).unwrap();
        let error = address_in(&key, &here).unwrap_err();
        assert!(matches!(error, Error::NotThisHost { .. }), "{error}");
        assert!(error.to_string().contains("in the network namespace 1,"), "{error}");
    }

    #[test]
    fn a_key_of_another_host_is_refused_before_anything_is_tried() {
        let there = BootId::parse(b"00000000-1111-2222-3333-444444444444").unwrap();
        let key = region_key(ID, 4096, &there, None, &Address::Abstract(b"remora-1".to_vec())).unwrap();
        let error = address_in(&key, &BootId::of_this_host().unwrap()).unwrap_err();
        assert!(matches!(error, Error::NotThisHost { .. }));
        assert!(error.to_string().contains("not on the same host"), "{error}");
    }

    #[test]
    fn a_key_of_another_transport_is_refused() {
        let key = RegionKey::new(TransportKind::Tcp, ID, 1, b"").unwrap();
        let error = address_in(&key, &BootId::of_this_host().unwrap()).unwrap_err();
        assert!(matches!(error, Error::WrongTransport { wanted: TransportKind::Shm, given: TransportKind::Tcp }));
    }

    proptest! {
        #[test]
        fn any_body_is_an_address_or_an_error_but_never_a_panic(body in prop::collection::vec(any::<u8>(), 0..120)) {
            let here = BootId::of_this_host().unwrap();
            let _ = address_in(&RegionKey::new(TransportKind::Shm, ID, 1, &body).unwrap(), &here);
            let mut body = [here.0.as_bytes(), &body].concat();
            body.truncate(490);
            if let Ok(address) = address_in(&RegionKey::new(TransportKind::Shm, ID, 1, &body).unwrap(), &here) {
                let _ = address.to_socket();
            }
        }
    }
}

/// Tests of this transport alone: connections that are not readers, slow ones, limits, impostors, and the socket's
/// file.
#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::Arc;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::{BootId, Shm, VERSION, *};
    use crate::admission::{Format, Hello};
    use crate::memory::local::{self, Address, Admits, Listener};
    use crate::memory::{Memory, Pages};
    use crate::region::{RegionId, RegionKey, Secret};
    use crate::transport::{Completion, Connector, Exporter, Peer, ReadRequest};
    use crate::{Denial, Regions};

    const SIZE: u64 = 16 << 20;
    const ID: RegionId = RegionId { generation: 1, region: 0 };
    const SECRET: Secret = [3; 32];

    fn memory() -> Arc<Memory> {
        Arc::new(Memory::create("shm-test", SIZE, Pages::Small).unwrap())
    }

    fn exporter(options: ShmOptions) -> (ShmExporter, Arc<Memory>) {
        let exporter = ShmExporter::bind(options).unwrap();
        let memory = memory();
        exporter.export(ID, memory.clone()).unwrap();
        exporter.grant(1, SECRET, Regions::All);
        (exporter, memory)
    }

    fn connect(key: &RegionKey) -> Result<Box<dyn Peer>, Error> {
        ShmConnector::new().connect(key, 1, &SECRET, memory())
    }

    /// A connection to the exporter that has not sent anything.
    fn connect_raw(exporter: &ShmExporter) -> OwnedFd {
        let address = super::address_in(&exporter.key(ID).unwrap(), &BootId::of_this_host().unwrap()).unwrap();
        local::connect(&address, Instant::now() + Duration::from_secs(5)).unwrap()
    }

    fn receive(socket: impl AsFd) -> Result<Vec<u8>, Error> {
        let patience = Duration::from_secs(10);
        let packet = local::receive_by(&socket, Instant::now() + patience, patience)?;
        Ok(packet.bytes().to_vec())
    }

    #[test]
    fn a_read_longer_than_one_call_copies_is_done_in_several() {
        let (exporter, memory) = exporter(ShmOptions::default());
        for at in (0..SIZE).step_by(4096) {
            memory.write(at, &at.to_le_bytes()).unwrap();
        }
        let sink = self::memory();
        let mut peer = ShmConnector::new().connect(&exporter.key(ID).unwrap(), 1, &SECRET, sink.clone()).unwrap();
        peer.post_read(&[ReadRequest { tag: 1, offset: 0, length: SIZE as u32, sink_offset: 0 }]).unwrap();
        let mut completions = Vec::new();
        assert_eq!(peer.poll(&mut completions).unwrap(), 0, "not all of it at once");
        while completions.is_empty() {
            peer.poll(&mut completions).unwrap();
        }
        assert_eq!(completions, [Completion { tag: 1, result: Ok(SIZE as u32) }]);
        assert_eq!(sink.crc32c(0..SIZE).unwrap(), memory.crc32c(0..SIZE).unwrap());
    }

    #[test]
    fn a_view_outlives_its_peer_and_can_not_be_written() {
        let (exporter, memory) = exporter(ShmOptions::default());
        let view = connect(&exporter.key(ID).unwrap()).unwrap().view().unwrap();
        drop(exporter);
        memory.write(5, b"still").unwrap();
        let mut bytes = [0; 5];
        view.read(5, &mut bytes).unwrap();
        assert_eq!(&bytes, b"still");
        assert!(rustix::io::write(view.as_fd(), b"x").is_err());
        let closed_on_exec = rustix::io::fcntl_getfd(view.as_fd()).unwrap();
        assert!(closed_on_exec.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn malformed_hellos_are_rejected_and_readers_are_still_served() {
        let (exporter, _memory) = exporter(ShmOptions::default());
        let hello = Shm::hello(&Hello { lane: 0, session: 1, id: ID, nonce: [0; 32] });
        let mut wrong_magic = hello.clone();
        wrong_magic[0] = b'X';
        for packet in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0], &wrong_magic, &hello[..71], &[&hello[..], &[0]].concat()] {
            let connection = connect_raw(&exporter);
            local::send(&connection, packet, None).unwrap();
            assert!(matches!(receive(&connection), Err(Error::Protocol(_) | Error::System { .. })), "{packet:?}");
        }
        let connection = connect_raw(&exporter);
        local::send(&connection, &hello, None).unwrap();
        receive(&connection).unwrap();
        local::send(&connection, b"a proof of the wrong length", None).unwrap();
        assert!(receive(&connection).is_err());
        assert!(connect(&exporter.key(ID).unwrap()).is_ok());
    }

    #[test]
    fn a_connection_without_a_hello_is_closed_at_the_time_out() {
        let options = ShmOptions { handshake_timeout: Duration::from_millis(50), ..ShmOptions::default() };
        let (exporter, _memory) = exporter(options);
        let silent = connect_raw(&exporter);
        let begun = Instant::now();
        assert!(matches!(receive(&silent), Err(Error::Protocol(_))));
        assert!(begun.elapsed() >= Duration::from_millis(40), "{:?}", begun.elapsed());
    }

    #[test]
    fn one_reader_above_the_limit_is_refused_as_busy() {
        let (exporter, _memory) = exporter(ShmOptions { connections: 2, ..ShmOptions::default() });
        let key = exporter.key(ID).unwrap();
        let (first, _second) = (connect(&key).unwrap(), connect(&key).unwrap());
        let refused = connect(&key).err().unwrap();
        assert!(matches!(refused, Error::Refused(Denial::Busy)), "{refused}");
        drop(first);
        let begun = Instant::now();
        while connect(&key).is_err() {
            assert!(begun.elapsed() < LONG, "the place of one who left is free again");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn one_session_can_not_take_all_connections() {
        let (exporter, _memory) = exporter(ShmOptions::default());
        let key = exporter.key(ID).unwrap();
        let peers: Vec<_> = (0..16).map(|_| connect(&key).unwrap()).collect();
        assert!(matches!(connect(&key).err().unwrap(), Error::Refused(Denial::Busy)));
        exporter.grant(2, SECRET, Regions::All);
        assert!(ShmConnector::new().connect(&key, 2, &SECRET, memory()).is_ok(), "there is room for others");
        drop(peers);
    }

    /// A listener that is not an exporter, and its address.
    fn listen() -> (Listener, Address) {
        let listener = Listener::bind(&Place::Abstract, Admits::Us).unwrap();
        let address = listener.address().clone();
        (listener, address)
    }

    /// Answers one reader as an exporter without the secret would, and passes `memory`.
    fn impostor(listener: Listener, memory: Arc<Memory>, proof: [u8; 32]) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            let reader = loop {
                match listener.accept().unwrap() {
                    Some(reader) => break reader,
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            receive(&reader).unwrap();
            local::send(&reader, &Shm::challenge(&[0; 32]), None).unwrap();
            receive(&reader).unwrap();
            local::send(&reader, &Shm::welcome(&SIZE, &proof), Some(memory.as_fd())).unwrap();
        })
    }

    #[test]
    fn memory_of_an_impostor_is_not_taken() {
        let (listener, address) = listen();
        let key = super::region_key(ID, SIZE, &BootId::of_this_host().unwrap(), None, &address).unwrap();
        let impostor = impostor(listener, memory(), [0; 32]);
        let refused = connect(&key).err().unwrap();
        assert!(matches!(refused, Error::Impostor), "{refused}");
        impostor.join().unwrap();
    }

    #[test]
    fn another_version_is_named() {
        let (listener, address) = listen();
        let key = super::region_key(ID, SIZE, &BootId::of_this_host().unwrap(), None, &address).unwrap();
        let newer = thread::spawn(move || {
            let reader = loop {
                match listener.accept().unwrap() {
                    Some(reader) => break reader,
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            receive(&reader).unwrap();
            let mut challenge = Shm::challenge(&[0; 32]);
            challenge[2..4].copy_from_slice(&(VERSION + 1).to_le_bytes());
            local::send(&reader, &challenge, None).unwrap();
        });
        let refused = connect(&key).err().unwrap();
        assert!(matches!(refused, Error::Version { theirs: 2, ours: 1, .. }), "{refused}");
        newer.join().unwrap();
    }

    #[test]
    fn a_source_that_accepts_and_says_nothing_is_given_up() {
        let (_listener, address) = listen();
        let key = super::region_key(ID, SIZE, &BootId::of_this_host().unwrap(), None, &address).unwrap();
        let connector = ShmConnector::with_timeout(Duration::from_millis(50));
        let given_up = connector.connect(&key, 1, &SECRET, memory()).err().unwrap();
        assert!(matches!(given_up, Error::TimedOut { .. }), "{given_up}");
    }

    #[test]
    fn the_socket_of_a_folder_goes_with_its_exporter() {
        let folder = std::env::temp_dir();
        let (exporter, _memory) =
            exporter(ShmOptions { place: Place::Folder(folder.clone()), ..ShmOptions::default() });
        let key = exporter.key(ID).unwrap();
        let Address::File(path) = super::address_in(&key, &BootId::of_this_host().unwrap()).unwrap() else {
            panic!("no file")
        };
        let path = folder.join(std::str::from_utf8(&path).unwrap());
        assert!(path.exists());
        drop(exporter);
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error_that_says_what_was_wanted() {
        let place = Place::Folder("/nowhere/at/all".into());
        let error = ShmExporter::bind(ShmOptions { place, ..ShmOptions::default() }).err().unwrap();
        assert!(error.to_string().starts_with("binding a local socket"), "{error}");
    }

    #[test]
    #[ignore = "long: make test-all"]
    fn a_last_packet_comes_before_the_end_however_close_the_two_are() {
        let (giving, taken) = std::sync::mpsc::sync_channel(0);
        let giver = std::thread::spawn(move || {
            for socket in taken {
                local::send(&socket, b"last", None).unwrap();
            }
        });
        let begun = Instant::now();
        for round in 0..ROUNDS_OF_ENDS {
            let (one, other) = local_pair();
            giving.send(other).unwrap();
            let packet = loop {
                match local::receive(&one) {
                    Err(rustix::io::Errno::AGAIN) => assert!(begun.elapsed() < Duration::from_secs(60)),
                    received => break received.unwrap(),
                }
            };
            assert_eq!(packet.bytes(), b"last", "round {round}");
            while local::receive(&one).is_err() {}
        }
        drop(giving);
        giver.join().unwrap();
    }

    /// Enough rounds that mistaking the end for the whole, which happens once in a few thousand, would be noticed.
    const ROUNDS_OF_ENDS: u32 = 20_000;

    fn local_pair() -> (OwnedFd, OwnedFd) {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn options_out_of_range_are_refused() {
        for options in [
            ShmOptions { connections: 0, ..ShmOptions::default() },
            ShmOptions { connections: MAX_CONNECTIONS + 1, ..ShmOptions::default() },
            ShmOptions { handshake_timeout: Duration::ZERO, ..ShmOptions::default() },
        ] {
            assert!(matches!(ShmExporter::bind(options), Err(Error::Misuse(_))));
        }
    }

    /// A TCP connection whose last `close` takes [`LINGER`]: it waits for bytes that its peer does not take.
    fn lingering() -> (OwnedFd, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut full = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let silent = listener.accept().unwrap().0;
        full.set_nonblocking(true).unwrap();
        while std::io::Write::write(&mut full, &[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&full, Some(LINGER)).unwrap();
        full.set_nonblocking(false).unwrap();
        (full.into(), silent)
    }

    /// Long enough that an exporter that waits for it is noticed.
    const LINGER: Duration = Duration::from_secs(60);

    /// Longer than anything here takes on a busy machine, and much shorter than what must not be waited for.
    const LONG: Duration = Duration::from_secs(20);

    /// An exporter whose peers can attach descriptors, as before Linux 6.16.
    fn exporter_without_the_option() -> (ShmExporter, Arc<Memory>) {
        let options = ShmOptions::default();
        let listener = Listener::bind(&options.place, Admits::Us).unwrap();
        let _ = listener.set_pass_rights(true);
        let exporter = ShmExporter::over(listener, &options).unwrap();
        let memory = memory();
        exporter.export(ID, memory.clone()).unwrap();
        exporter.grant(1, SECRET, Regions::All);
        (exporter, memory)
    }

    #[test]
    fn a_lingering_descriptor_delays_no_reader_and_no_owner() {
        let (exporter, memory) = exporter_without_the_option();
        let mut strangers = Vec::new();
        // In a packet that is received, and in one that is still queued when the connection is closed.
        for packets in [1, 2] {
            let (full, silent) = lingering();
            let connection = connect_raw(&exporter);
            local::send(&connection, b"not a hello", Some(full.as_fd())).unwrap();
            for _ in 1..packets {
                // Fails if the exporter has closed the connection already.
                let _ = local::send(&connection, b"not a hello", Some(full.as_fd()));
            }
            // The exporter's copy is now the last one, unless it was faster.
            drop(full);
            strangers.push((connection, silent));
        }
        // The exporter receives and closes in this time.
        thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        let another = RegionId { generation: 2, region: 1 };
        exporter.export(another, memory).unwrap();
        exporter.grant(2, SECRET, Regions::All);
        exporter.withdraw(2);
        exporter.revoke(another);
        connect(&exporter.key(ID).unwrap()).unwrap();
        drop(exporter);
        assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_descriptor_of_a_reader_is_refused_where_the_system_can() {
        let (exporter, memory) = exporter(ShmOptions::default());
        match local::send(connect_raw(&exporter), b"x", Some(memory.as_fd())) {
            Err(refused) => assert_eq!(refused, rustix::io::Errno::PERM),
            Ok(()) => println!("Linux before 6.16 cannot refuse descriptors"),
        }
    }

    #[test]
    fn silent_connections_leave_room_for_readers() {
        let (exporter, _memory) =
            exporter(ShmOptions { handshake_timeout: Duration::from_secs(60), ..Default::default() });
        let silent: Vec<_> = (0..300).map(|_| connect_raw(&exporter)).collect();
        ShmConnector::with_timeout(LONG).connect(&exporter.key(ID).unwrap(), 1, &SECRET, memory()).unwrap();
        drop(silent);
    }

    /// What a process of another user receives after a valid hello to this socket. Only root can start one.
    fn as_another_user(address: &Address) -> Option<String> {
        use std::os::unix::process::CommandExt;
        if !rustix::process::geteuid().is_root() {
            println!("not root: cannot act as another user");
            return None;
        }
        let hello = Shm::hello(&Hello { lane: 0, session: 1, id: ID, nonce: [0; 32] });
        let script = format!(
            "import socket\n\
         s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
         s.settimeout(10)\n\
         try:\n\
         \ts.connect({:?}.replace('@', '\\0', 1))\n\
         \ts.send(bytes({hello:?}))\n\
         \tprint(len(s.recv(128)))\n\
         except OSError as error:\n\
         \tprint(type(error).__name__)\n",
            address.name()
        );
        let mut stranger = std::process::Command::new("python3");
        stranger.args(["-c", &script]).uid(65534).gid(65534).current_dir("/");
        Some(String::from_utf8(stranger.output().unwrap().stdout).unwrap().trim().to_owned())
    }

    #[test]
    fn a_process_of_another_user_is_not_even_answered() {
        for place in [Place::Private, Place::Abstract] {
            let (exporter, _memory) = exporter(ShmOptions { place: place.clone(), ..ShmOptions::default() });
            let here = BootId::of_this_host().unwrap();
            let Some(answer) = as_another_user(&super::address_in(&exporter.key(ID).unwrap(), &here).unwrap()) else {
                return;
            };
            let expected: &[&str] = match place {
                Place::Abstract => &["0", "BrokenPipeError", "ConnectionResetError"],
                _ => &["PermissionError"],
            };
            assert!(expected.contains(&answer.as_str()), "{place:?}: {answer}");
        }
    }

    #[test]
    fn the_default_folder_and_socket_are_closed_to_other_users() {
        use std::os::unix::{ffi::OsStrExt, fs::PermissionsExt};
        let (exporter, _memory) = exporter(ShmOptions::default());
        let here = BootId::of_this_host().unwrap();
        let Address::File(path) = super::address_in(&exporter.key(ID).unwrap(), &here).unwrap() else {
            panic!("no file")
        };
        let path = std::path::Path::new(std::ffi::OsStr::from_bytes(&path)).to_owned();
        let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path) & 0o007, 0);
        assert_eq!(mode(path.parent().unwrap()) & 0o002, 0);
        drop(exporter);
        assert!(!path.exists());
    }
}
