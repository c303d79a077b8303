//! Errors of tables, grouped by who can act on them.

use remora_fabric::ReadError;

use crate::method::Method;

/// Every error of the writers and readers of a table.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The reader was too slow, or came too late: the ring has passed it. Start again with a new snapshot.
    #[error(
        "the source has overwritten {unit} {wanted} (the oldest it holds is {oldest}): start again with a new snapshot"
    )]
    Overrun {
        /// The slot or offset that was to be read.
        wanted: u64,
        /// The oldest that can still be read, as far as known.
        oldest: u64,
        /// What the two numbers count: "slot" or "stream offset".
        unit: &'static str,
    },
    /// The bytes are not those that the source wrote, although they were not overwritten: memory or a transport is at
    /// fault.
    #[error("slot {slot} is damaged: expected checksum {want:#010x}, got {got:#010x}, also after reading it again")]
    Corrupt {
        /// Number of the slot.
        slot: u64,
        /// CRC-32C in the table.
        want: u32,
        /// CRC-32C of the bytes read.
        got: u32,
    },
    /// What was read of a sealed table was not written by its source, or not for this place: the network, a relay or a
    /// transport is at fault. Nothing of it was used.
    #[error("{what} of the sealed table is not what its source wrote: it was changed on its way")]
    Forged {
        /// What was read: "slot 5", "the entry of slot 5", "the progress line", "the record at stream offset 5".
        what: String,
    },
    /// A compressed slot does not give the bytes that its source compressed, although what is stored is what the source
    /// stored. Nothing of it was used.
    #[error("slot {slot}, compressed by {method}, cannot be decompressed: {why}; start the source with --compress off")]
    Encoding {
        /// Number of the slot.
        slot: u64,
        /// How it is compressed.
        method: Method,
        /// What is wrong with it.
        why: String,
    },
    /// The source has aborted this generation. Ask it for another.
    #[error("the source has aborted generation {generation}: ask it for a new one")]
    Aborted {
        /// The generation.
        generation: u64,
    },
    /// The memory holds another generation, or another stream, than the offer named.
    #[error("the table has another generation: expected {want}, found {got}")]
    WrongGeneration {
        /// Generation, replid and offset that we expect.
        want: String,
        /// What the table contains.
        got: String,
    },
    /// Not a table, or a table of another layout, or a geometry outside the limits.
    #[error("{0}")]
    Layout(String),
    /// API misuse: a bug in this program.
    #[error("API misuse: {0}")]
    Misuse(&'static str),
    /// The transport failed. Get a new peer, call `reconnect`, and continue.
    #[error("reading the table failed: {0}")]
    Peer(ReadError),
    /// The transport refused the request before it was sent.
    #[error(transparent)]
    Fabric(#[from] remora_fabric::Error),
    /// An access to our own memory failed.
    #[error(transparent)]
    Memory(#[from] remora_fabric::memory::Error),
}

impl Error {
    /// Whether a new peer is enough to continue with the same reader.
    pub fn needs_new_peer(&self) -> bool {
        matches!(self, Error::Peer(_) | Error::Fabric(_) | Error::Memory(_))
    }

    pub(crate) fn slot_overrun(wanted: u64, oldest: u64) -> Error {
        Error::Overrun { wanted, oldest, unit: "slot" }
    }
}
