//! Names of exported memory: which region it is, where to find it, and the secret that grants access. No memory is
//! accessed here.

use std::{fmt, str::FromStr};

/// A secret that both ends of a session derive from their authenticated conversation. It is never sent and never
/// logged.
pub type Secret = [u8; 32];

/// Names a region of a generation. One source never uses a name twice for different memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId {
    /// The generation that the memory belongs to.
    pub generation: u64,
    /// Which memory of that generation: its snapshot, its journal, …
    pub region: u32,
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.generation, self.region)
    }
}

/// The transports. Region keys and messages carry the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TransportKind {
    /// A simulated network in one process, for tests.
    Sim = 1,
    /// Shared memory on one host.
    Shm = 2,
    /// TCP, on all networks.
    Tcp = 3,
    /// RDMA: InfiniBand, RoCE, iWARP.
    Verbs = 4,
}

impl TransportKind {
    /// The transport of a number; `None` if it is unknown.
    pub fn from_code(code: u8) -> Option<TransportKind> {
        match code {
            1 => Some(TransportKind::Sim),
            2 => Some(TransportKind::Shm),
            3 => Some(TransportKind::Tcp),
            4 => Some(TransportKind::Verbs),
            _ => None,
        }
    }

    /// The number on the wire.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The name in options and logs.
    pub fn name(self) -> &'static str {
        match self {
            TransportKind::Sim => "sim",
            TransportKind::Shm => "shm",
            TransportKind::Tcp => "tcp",
            TransportKind::Verbs => "verbs",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a name that is not a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown transport: use shm, verbs or tcp")]
pub struct UnknownTransport;

impl FromStr for TransportKind {
    type Err = UnknownTransport;

    fn from_str(name: &str) -> Result<TransportKind, UnknownTransport> {
        match name {
            "sim" => Ok(TransportKind::Sim),
            "shm" => Ok(TransportKind::Shm),
            "tcp" => Ok(TransportKind::Tcp),
            "verbs" => Ok(TransportKind::Verbs),
            _ => Err(UnknownTransport),
        }
    }
}

/// Where a region is and what it is, as bytes for the messenger to carry after authentication.
///
/// Only the transport that made it can interpret the body. A key gives no access by itself.
///
/// ```text
/// 0        1       2            10       14       22
/// │ version │ kind │ generation │ region │ length │ body: the transport's own, up to 490 bytes │   (little endian)
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RegionKey {
    transport: TransportKind,
    id: RegionId,
    length: u64,
    /// The whole key: the head, and the body after it.
    bytes: Vec<u8>,
}

/// Why bytes are not a valid region key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key is longer than any key.
    #[error("{0} bytes, the limit is {KEY_MAX_BYTES}")]
    TooLong(usize),
    /// The key is shorter than its head.
    #[error("{0} bytes, shorter than its head of {HEAD_BYTES}")]
    TooShort(usize),
    /// The key has another version.
    #[error("version {0}, this build reads version {KEY_VERSION}: upgrade the older end")]
    Version(u8),
    /// The key is of a transport that this build does not know.
    #[error("transport {0} is unknown: upgrade the older end")]
    Transport(u8),
    /// The transport's own part is malformed.
    #[error("{0}")]
    Body(&'static str),
}

/// A key of one transport was given to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongTransport {
    /// The transport that was asked.
    pub wanted: TransportKind,
    /// The transport of the key.
    pub given: TransportKind,
}

impl RegionKey {
    /// A key of `transport` for the region `id` of `length` bytes. `body` is what the transport needs to find the
    /// region.
    ///
    /// # Errors
    /// [`KeyError::TooLong`].
    pub fn new(transport: TransportKind, id: RegionId, length: u64, body: &[u8]) -> Result<RegionKey, KeyError> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
        bytes.push(KEY_VERSION);
        bytes.push(transport.code());
        bytes.extend_from_slice(&id.generation.to_le_bytes());
        bytes.extend_from_slice(&id.region.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(body);
        RegionKey::from_bytes(bytes)
    }

    /// Parses a key that was received. The transport checks the body.
    ///
    /// # Errors
    /// Any [`KeyError`] but [`KeyError::Body`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<RegionKey, KeyError> {
        if bytes.len() > KEY_MAX_BYTES {
            return Err(KeyError::TooLong(bytes.len()));
        }
        let mut head = Head(bytes.get(..HEAD_BYTES).ok_or(KeyError::TooShort(bytes.len()))?);
        let [version] = head.take();
        if version != KEY_VERSION {
            return Err(KeyError::Version(version));
        }
        let [code] = head.take();
        let transport = TransportKind::from_code(code).ok_or(KeyError::Transport(code))?;
        let generation = u64::from_le_bytes(head.take());
        let region = u32::from_le_bytes(head.take());
        let length = u64::from_le_bytes(head.take());
        Ok(RegionKey { transport, id: RegionId { generation, region }, length, bytes })
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The transport that can use it.
    pub fn transport(&self) -> TransportKind {
        self.transport
    }

    /// The region that it leads to.
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Length of the region in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The transport's own part.
    pub fn body(&self) -> &[u8] {
        self.bytes.get(HEAD_BYTES..).unwrap_or_default()
    }

    /// Fails unless this is a key of the transport `wanted`.
    ///
    /// # Errors
    /// [`WrongTransport`].
    pub fn expect(&self, wanted: TransportKind) -> Result<(), WrongTransport> {
        if self.transport == wanted { Ok(()) } else { Err(WrongTransport { wanted, given: self.transport }) }
    }
}

/// A head being read, front to back.
struct Head<'a>(&'a [u8]);

impl Head<'_> {
    /// The next field. The fields of a head fill its `HEAD_BYTES` exactly.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((field, rest)) = self.0.split_first_chunk() else { return [0; N] };
        self.0 = rest;
        *field
    }
}

/// Shows the region but not the body, which says where the region is.
impl fmt::Display for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} key of region {} ({} bytes)", self.transport(), self.id(), self.length())
    }
}

impl fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionKey({self})")
    }
}

/// First byte of every key.
const KEY_VERSION: u8 = 1;
/// Version, kind, generation, region, length.
const HEAD_BYTES: usize = 1 + 1 + 8 + 4 + 8;
/// Maximum size of a key, in bytes: far above a socket path (108 bytes) or a verbs address, far below a frame of the
/// messenger.
const KEY_MAX_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_key_comes_back_out_of_its_bytes(generation: u64, region: u32, length: u64, body in prop::collection::vec(any::<u8>(), 0..490)) {
            let id = RegionId { generation, region };
            let key = RegionKey::new(TransportKind::Shm, id, length, &body).unwrap();
            let again = RegionKey::from_bytes(key.as_bytes().to_vec()).unwrap();
            prop_assert_eq!(again.transport(), TransportKind::Shm);
            prop_assert_eq!(again.id(), id);
            prop_assert_eq!(again.length(), length);
            prop_assert_eq!(again.body(), &body[..]);
        }

        #[test]
        fn any_bytes_are_a_key_or_an_error_but_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(key) = RegionKey::from_bytes(bytes) {
                let _ = (key.transport(), key.id(), key.length(), key.body().len(), key.to_string());
            }
        }
    }

    #[test]
    fn a_key_is_never_longer_than_its_bound() {
        let id = RegionId { generation: 1, region: 2 };
        assert!(RegionKey::new(TransportKind::Tcp, id, 1, &[0; 490]).is_ok());
        assert!(matches!(RegionKey::new(TransportKind::Tcp, id, 1, &[0; 491]), Err(KeyError::TooLong(_))));
    }

    #[test]
    fn a_printed_key_hides_its_body() {
        let id = RegionId { generation: 7, region: 1 };
        let key = RegionKey::new(TransportKind::Shm, id, 4096, b"where-it-is").unwrap();
        assert_eq!(key.to_string(), "shm key of region 7/1 (4096 bytes)");
        assert!(!format!("{key:?}").contains("where"));
    }

    #[test]
    fn transports_are_known_by_name_and_by_number() {
        for kind in [TransportKind::Sim, TransportKind::Shm, TransportKind::Tcp, TransportKind::Verbs] {
            assert_eq!(TransportKind::from_code(kind.code()), Some(kind));
            assert_eq!(kind.name().parse::<TransportKind>().unwrap(), kind);
        }
        assert_eq!(TransportKind::from_code(0), None);
        assert_eq!("ib".parse::<TransportKind>(), Err(UnknownTransport));
    }

    #[test]
    fn a_key_of_an_unknown_transport_or_version_is_an_error_that_names_it() {
        let id = RegionId { generation: 1, region: 2 };
        let good = RegionKey::new(TransportKind::Tcp, id, 1, b"").unwrap().as_bytes().to_vec();
        for code in [0, 5, u8::MAX] {
            let mut bytes = good.clone();
            bytes[1] = code;
            assert_eq!(RegionKey::from_bytes(bytes), Err(KeyError::Transport(code)));
        }
        let mut bytes = good.clone();
        bytes[0] = 2;
        assert_eq!(RegionKey::from_bytes(bytes), Err(KeyError::Version(2)));
        assert_eq!(RegionKey::from_bytes(good[..21].to_vec()), Err(KeyError::TooShort(21)));
    }
}
