//! The names of lent memory: which region, where it is to be found, and the secret that opens it. No memory is touched here.

use std::{fmt, str::FromStr};

use crate::error::Error;

/// A secret that both ends of one session derive from the authenticated conversation. Never on a wire, never in a log.
pub type Secret = [u8; 32];

/// Which region of which generation: a name that is never used twice for different memory by one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId {
    /// The generation that the memory belongs to.
    pub generation: u64,
    /// Which memory of that generation (its snapshot, its journal, ...).
    pub region: u32,
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.generation, self.region)
    }
}

/// The transports there are. The numbers travel in keys and in the messenger's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TransportKind {
    /// A simulated network inside one process.
    Sim = 1,
    /// Shared memory of one host.
    Shm = 2,
    /// TCP, everywhere.
    Tcp = 3,
    /// InfiniBand, RoCE, iWARP.
    Verbs = 4,
}

impl TransportKind {
    /// The kind behind a number from outside; `None` for one that we don't know.
    pub fn from_code(code: u8) -> Option<TransportKind> {
        match code {
            1 => Some(TransportKind::Sim),
            2 => Some(TransportKind::Shm),
            3 => Some(TransportKind::Tcp),
            4 => Some(TransportKind::Verbs),
            _ => None,
        }
    }

    /// The number that travels.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The name as a user writes it.
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

impl FromStr for TransportKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<TransportKind, Error> {
        match name {
            "sim" => Ok(TransportKind::Sim),
            "shm" => Ok(TransportKind::Shm),
            "tcp" => Ok(TransportKind::Tcp),
            "verbs" => Ok(TransportKind::Verbs),
            _ => Err(Error::Misuse("unknown transport: use shm, verbs or tcp")),
        }
    }
}

/// Where a region is and what it is, as bytes for the messenger to carry after authentication.
///
/// Opaque to everyone but the transport that made it. It says where to knock; alone it opens nothing.
///
/// ```text
/// 0        1       2            10       14       22
/// │ version │ kind │ generation │ region │ length │ body: the transport's own, up to 490 bytes │   (little endian)
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RegionKey(Vec<u8>);

impl RegionKey {
    /// A key of `kind` for the region `id` of `length` bytes; `body` is what the transport itself needs to find it.
    pub fn new(kind: TransportKind, id: RegionId, length: u64, body: &[u8]) -> Result<RegionKey, Error> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
        bytes.push(KEY_VERSION);
        bytes.push(kind.code());
        bytes.extend_from_slice(&id.generation.to_le_bytes());
        bytes.extend_from_slice(&id.region.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(body);
        RegionKey::from_bytes(bytes)
    }

    /// A key as it came over the wire. Its head is checked here, its body by the transport.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<RegionKey, Error> {
        if bytes.len() > KEY_MAX_BYTES {
            return Err(Error::Key("longer than 512 bytes"));
        }
        if bytes.len() < HEAD_BYTES {
            return Err(Error::Key("shorter than its head"));
        }
        if bytes.first() != Some(&KEY_VERSION) {
            return Err(Error::Key("of an unknown version: upgrade the older end"));
        }
        let key = RegionKey(bytes);
        match TransportKind::from_code(key.field::<1>(1)[0]) {
            Some(_) => Ok(key),
            None => Err(Error::Key("of an unknown transport")),
        }
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Which transport can use it.
    pub fn transport(&self) -> TransportKind {
        // The kind was checked on the way in.
        TransportKind::from_code(self.field::<1>(1)[0]).unwrap_or(TransportKind::Sim)
    }

    /// The region that it leads to.
    pub fn id(&self) -> RegionId {
        RegionId { generation: u64::from_le_bytes(self.field(2)), region: u32::from_le_bytes(self.field(10)) }
    }

    /// Length of the region in bytes.
    pub fn length(&self) -> u64 {
        u64::from_le_bytes(self.field(14))
    }

    /// The transport's own part.
    pub fn body(&self) -> &[u8] {
        self.0.get(HEAD_BYTES..).unwrap_or_default()
    }

    /// Fails unless this is a key of the transport `wanted`.
    pub fn expect(&self, wanted: TransportKind) -> Result<(), Error> {
        match self.transport() {
            given if given == wanted => Ok(()),
            given => Err(Error::WrongTransport { wanted, given }),
        }
    }

    /// `N` bytes of the head, which is always there: every constructor has checked the length.
    fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut field = [0; N];
        if let Some(bytes) = self.0.get(at..at + N) {
            field.copy_from_slice(bytes);
        }
        field
    }
}

/// Names the region and keeps the body, which says where it is, to itself.
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
/// Bound of a whole key: far above a socket path (108 bytes) or a verbs address, far below a frame of the messenger.
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
        assert!(matches!(RegionKey::new(TransportKind::Tcp, id, 1, &[0; 491]), Err(Error::Key(_))));
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
    }
}
