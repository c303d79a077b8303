//! Versions, and the bounds of every list, name and text.

/// The oldest version of this protocol that is spoken.
pub const OLDEST_VERSION: u16 = 3;

/// The newest version of this protocol that is spoken. The crate's documentation says what each one brought.
pub const NEWEST_VERSION: u16 = 3;

/// The code by which a server that has no room for another conversation refuses a connection in the greeting.
pub const REFUSED_AS_BUSY: u8 = 3;

/// The longest body of a message, in bytes. The longest message is a status that lists [`MAX_REPLICAS`] replicas; `message.rs`
/// asserts at compile time that it fits.
pub const MAX_PAYLOAD_BYTES: u32 = 512 * 1024;

/// Longest name of a replica, of a server or of a version, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// Longest name of a zone, in bytes: a rack, a room, a region. Short, as a status report has one per replica.
pub const MAX_ZONE_BYTES: usize = 32;

/// Longest address, in bytes: a host name has 253 at most, a port 5, a socket's path 107, and a role some words around it.
pub const MAX_ADDRESS_BYTES: usize = 280;

/// Longest explanation, in bytes. What is beyond is cut off.
pub const MAX_TEXT_BYTES: usize = 1024;

/// Longest reason for a transport, in bytes. What is beyond is cut off. Short, as a status report has one per replica.
pub const MAX_WHY_BYTES: usize = 400;

/// Most keys of one table: one per transport.
pub const MAX_KEYS: usize = 8;

/// Longest key of a region, in bytes: an address, a socket's name or a memory key, and some numbers.
pub const MAX_KEY_BYTES: usize = 1024;

/// Most replicas in one status report. A source that serves more lists the first of them.
pub const MAX_REPLICAS: usize = 512;
