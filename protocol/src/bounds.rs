//! Versions, and the bounds of every list, name and text.

/// Oldest version of this protocol that this build speaks.
pub const OLDEST_VERSION: u16 = 7;

/// Newest version of this protocol that this build speaks. The crate's documentation says what each version changed.
pub const NEWEST_VERSION: u16 = 7;

/// Code of a refusal in the handshake: the server has no room for another conversation.
pub const REFUSED_AS_BUSY: u8 = 3;

/// The longest body of a message, in bytes. The longest message is a status that lists [`MAX_REPLICAS`] replicas;
/// `message.rs` asserts at compile time that it fits.
pub const MAX_PAYLOAD_BYTES: u32 = 2 * 1024 * 1024;

/// The longest body of a message that a client sends, in bytes. A source may have [`MAX_REPLICAS`] conversations, so it
/// accepts no more than the longest message of a client; `message.rs` asserts at compile time that each of them fits.
pub const MAX_CLIENT_PAYLOAD_BYTES: u32 = 4 * 1024;

/// Longest name of a replica, of a server or of a version, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// Longest name of a zone, in bytes: a rack, a room, a region. Short, as a status report has one per replica.
pub const MAX_ZONE_BYTES: usize = 32;

/// Longest address, in bytes. A host name has at most 253, a port 5, a socket's path 107; a role adds some words.
pub const MAX_ADDRESS_BYTES: usize = 280;

/// Longest explanation, in bytes. A longer one is truncated.
pub const MAX_TEXT_BYTES: usize = 1024;

/// Longest explanation of a transport, or of why there are no fast keys, in bytes. A longer one is truncated. Short, as
/// a status report has both per replica.
pub const MAX_WHY_BYTES: usize = 400;

/// Longest description of what protects a replica's data, in bytes: some words, as a status report has one per replica.
pub const MAX_PROTECTION_BYTES: usize = 32;

/// Greatest number of keys of a table: one per transport.
pub const MAX_KEYS: usize = 8;

/// Longest key of a region, in bytes: an address, a socket's name or a memory key, and some numbers.
pub const MAX_KEY_BYTES: usize = 1024;

/// Longest key of a sealed table, in bytes: an algorithm's number of one byte and a secret of 32, and room for others.
pub const MAX_SEAL_BYTES: usize = 64;

/// Greatest number of replicas that a source serves, and so of replicas in a status report.
pub const MAX_REPLICAS: usize = 1024;
