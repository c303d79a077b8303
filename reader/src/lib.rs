//! The reader: how an offer of a source becomes slots that are verified, and how slots are passed on to other readers.
//!
//! ```text
//!   source ══ conversation ══▶ Source ── join ──▶ Session ── offer ──▶ Way ══ transports ══▶ Feed ──▶ slots, stream
//!                                │                   │                                        ▲
//!      is it the right one? ── DataSet               └── read from another replica ──▶ Relay ═╝   (which lends slots)
//! ```
//!
//! A replica gives what it reads to its server. `remora fetch` and `remora backup` write it to a file. All of them go
//! this way:
//!
//! - [`addresses`] are the sources that a reader goes to, one after the other, and why one cannot be used.
//! - [`source`] is the conversation with the source agent, and the task that has it. Its [`Way`](source::Way) connects
//!   to what the source offers. **Start here.**
//! - [`data_set`] is what the first conversation has agreed on. Each later one is compared with it, so that no other
//!   data set is ever read. It also says which primary a source may name.
//! - [`feed`] is a snapshot and a journal, each behind a connection ([`parts`], with what counts what arrives), and
//!   where the next feed must begin.
//! - [`relay`] is a reader's part in passing slots on: [`relay::reader`] reads slots of other replicas, and
//!   lends them.
//! - [`spool`] keeps slots in files that outlive the process.
//!
//! The crate decides what is believed: of a source its history, and of a slot its checksum or its seal. What follows
//! from a loss is for its users. It knows no command line.
//!
//! [`ReadOptions`] say from where a reader reads, and [`RelayOptions`] how it passes slots on. They have units, ranges
//! and defaults.

#![forbid(unsafe_code)]

pub mod addresses;
pub mod data_set;
pub mod feed;
pub mod parts;
pub mod relay;
pub mod source;
pub mod spool;

use std::net::SocketAddr;
use std::time::Duration;

use remora_base::units::Size;
use remora_conversation::transports::{RdmaRead, TransportChoice, UploadLimit};

use addresses::Addresses;

/// Where the source is, and how its memory is read.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// Where the source listens, and those that are read when it is lost.
    pub source: Addresses,
    /// Which transports may be used.
    pub transport: TransportChoice,
    /// TCP connections for reading: 1 to 4.
    pub lanes: u8,
    /// How RDMA is used.
    pub rdma: RdmaRead,
    /// How long a source or a server that cannot be reached is tried again. Zero: it is tried once.
    pub retry_for: Duration,
}

/// How a replica lends slots to other replicas, and reads slots of theirs.
#[derive(Clone, Debug, Default)]
pub struct RelayOptions {
    /// Lend slots also where the source is on this host.
    pub serve_peers: bool,
    /// Lend none. Slots of other replicas can still be read.
    pub no_serve_peers: bool,
    /// Where slots are lent. `None`: the local address of the connection to the source, and any free port.
    pub peer_listen: Option<SocketAddr>,
    /// How fast all other replicas together may read here.
    pub upload_limit: UploadLimit,
    /// Bytes per second that each of them may read here. `None`: no limit.
    pub upload_limit_per_peer: Option<Size>,
    /// Bytes per second of the snapshot that are read, from the source and other replicas together. `None`: no limit.
    pub download_limit: Option<Size>,
    /// The zone of this replica: at most [`MAX_ZONE_BYTES`](remora_protocol::MAX_ZONE_BYTES) bytes. Replicas are
    /// assigned to others of their own zone first, and take turns with those of their own zone.
    pub zone: String,
}
