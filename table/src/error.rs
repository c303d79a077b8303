//! What can go wrong with a table, sorted by who can do something about it.

use remora_fabric::ReadError;

/// Everything that writers and readers of a table report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The reader was too slow, or came too late: the ring has passed it. Start again from a new snapshot.
    #[error(
        "the source has overwritten {unit} {wanted} (the oldest it holds is {oldest}): start again from a new snapshot"
    )]
    Overrun {
        /// What was to be read.
        wanted: u64,
        /// The oldest that may still be read, as far as known.
        oldest: u64,
        /// What the two numbers count: "slot" or "stream offset".
        unit: &'static str,
    },
    /// The bytes are not those that the source wrote, although nobody overwrote them: memory or a transport is at fault.
    #[error("slot {slot} is damaged: its checksum should be {want:#010x} and is {got:#010x}, also when read again")]
    Corrupt {
        /// Number of the slot.
        slot: u64,
        /// CRC-32C that the table states.
        want: u32,
        /// CRC-32C of what was read.
        got: u32,
    },
    /// The source gave this generation up. Ask it for another.
    #[error("the source has given up generation {generation}: ask it for a new one")]
    Aborted {
        /// The generation.
        generation: u64,
    },
    /// The memory holds another generation, or another stream, than the one we were sent to.
    #[error("the table is of another generation: wanted {want}, found {got}")]
    WrongGeneration {
        /// Generation, replid and offset that we expect.
        want: String,
        /// What the table says.
        got: String,
    },
    /// Not a table, or not one of this layout, or a geometry outside the limits.
    #[error("{0}")]
    Layout(String),
    /// We were called wrongly: a mistake in this program.
    #[error("wrong use of a table: {0}")]
    Misuse(&'static str),
    /// The transport failed us. Get a new peer, call `reconnect`, and go on.
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
    /// A new peer is enough to go on with the same reader.
    pub fn needs_new_peer(&self) -> bool {
        matches!(self, Error::Peer(_) | Error::Fabric(_) | Error::Memory(_))
    }

    /// This generation is lost to this reader: only a new snapshot helps.
    pub fn needs_new_generation(&self) -> bool {
        matches!(self, Error::Overrun { .. } | Error::Aborted { .. } | Error::WrongGeneration { .. })
    }

    pub(crate) fn slot_overrun(wanted: u64, oldest: u64) -> Error {
        Error::Overrun { wanted, oldest, unit: "slot" }
    }
}
