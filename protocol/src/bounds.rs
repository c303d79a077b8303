//! What both ends agree on before a message is read: the versions of the protocol, the bounds of every list, name and
//! text, and the encoding of a replication id.

use remora_redis::ReplId;
use remora_wire::codec::{Codec, Malformed, Name, Reader, TooLarge};

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

/// Greatest number of standbys that a source names to its readers: more would be asked in vain when a source is lost.
pub const MAX_STANDBYS: usize = 8;

/// Greatest number of keys of a table: one per transport.
pub const MAX_KEYS: usize = 8;

/// Longest key of a region, in bytes: an address, a socket's name or a memory key, and some numbers.
pub const MAX_KEY_BYTES: usize = 1024;

/// Longest key of a sealed table, in bytes: an algorithm's number of one byte and a secret of 32, and room for others.
pub const MAX_SEAL_BYTES: usize = 64;

/// Greatest number of replicas that a source serves, and so of replicas in a status report.
pub const MAX_REPLICAS: usize = 1024;

// What the agents and the server's module agree on. `docs/explanation/module.md` describes the commands.

/// The version of the commands between the agents and the server's module (`REMORA.STATUS` reports it as `protocol`).
/// Both sides work together only if they have the same one.
///
/// Versions, newest first:
///
/// - 6: `REMORA.LOAD` answers `verify`: whether the module wants to look at what it has loaded before the snapshot
///   ends.
/// - 5: runs have small collections among their strings; `fast_keys` and `fast_capture` are `yes`, or `no` and why.
/// - 4: `REMORA.LOAD` answers whether the module takes runs of short strings (`fast_keys`), and `REMORA.STATUS` whether
///   its fork child writes them (`fast_capture`).
/// - 3: `REMORA.LOAD` answers names and values (`idle_times`) where it answered `OK` or `OK NOIDLE`.
/// - 2: the fork child writes long strings only, and asks for permission before it begins.
/// - 1: the fork child writes the whole snapshot.
pub const MODULE_PROTOCOL: u32 = 6;

// The encodings of a replication id: 40 digits in lower case, and nothing else.

/// The 40 digits.
pub(crate) struct Digits;

impl Codec for Digits {
    type Value = ReplId;
    const MAX_BYTES: usize = DIGITS;

    fn put(value: &ReplId, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        <[u8; DIGITS]>::put(value.as_bytes(), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<ReplId, Malformed> {
        exact(<[u8; DIGITS]>::take(from)?)
    }
}

/// The 40 digits, or 40 zeros where the replication id is unknown. Servers generate their ids at random, and use the
/// zeros for "none" themselves.
pub(crate) struct DigitsIfKnown;

impl Codec for DigitsIfKnown {
    type Value = Option<ReplId>;
    const MAX_BYTES: usize = DIGITS;

    fn put(value: &Option<ReplId>, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        <[u8; DIGITS]>::put(value.as_ref().map_or(&UNKNOWN, ReplId::as_bytes), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<Option<ReplId>, Malformed> {
        let digits = <[u8; DIGITS]>::take(from)?;
        if digits == UNKNOWN { Ok(None) } else { exact(digits).map(Some) }
    }
}

/// The 40 digits as a name, with its count.
pub(crate) struct Text;

impl Codec for Text {
    type Value = ReplId;
    const MAX_BYTES: usize = Name::<DIGITS>::MAX_BYTES;

    fn put(value: &ReplId, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        Name::<DIGITS>::put(&value.to_string(), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<ReplId, Malformed> {
        let text = Name::<DIGITS>::take(from)?;
        text.as_bytes().try_into().map_err(|_| INVALID).and_then(exact)
    }
}

fn exact(digits: [u8; DIGITS]) -> Result<ReplId, Malformed> {
    ReplId::try_from(digits).map_err(|_| INVALID)
}

const INVALID: Malformed = Malformed::Invalid { what: "replid" };

/// Digits of a replication id.
const DIGITS: usize = 40;

const UNKNOWN: [u8; DIGITS] = [b'0'; DIGITS];
