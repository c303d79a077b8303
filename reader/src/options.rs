//! Options: from where a reader reads, and how it passes slots on. They have units, ranges and defaults, and no words
//! of a command line.
// Stands alone: the one place of their units, ranges and defaults.

use std::net::SocketAddr;
use std::time::Duration;

use remora_base::units::Size;
use remora_conversation::transports::{RdmaRead, TransportChoice, UploadLimit};

use crate::addresses::Addresses;

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
