//! What the source's loop receives from other tasks.

use remora_fabric::RegionId;
use remora_protocol::Message;

use super::machine::Session;
use super::output_buffer::OutputBuffer;
use super::questions::Answered;
use crate::conversation::{Connection, Fault};
use crate::metrics::Scrape;
use crate::server::Facts;

/// An event for the source's loop, from another task.
pub(crate) enum Incoming {
    /// A peer authenticated.
    Arrived(Connection),
    /// A message from that peer.
    Said { session: Session, message: Box<Message> },
    /// The connection of that peer has ended.
    Left { session: Session, fault: Fault },
    /// Fresh facts of the server.
    Learned(Box<(Facts, OutputBuffer)>),
    /// Another server of the group is captured from now on, with these facts.
    Moved(Box<Facts>),
    /// The primary has answered a question that the source asked for replicas.
    Answered(Answered),
    /// Metrics are wanted.
    Scraped(Box<Scrape>),
    /// The probe region was exported, or why it was not.
    ProbeRegionReady { id: RegionId, exported: Result<(), remora_fabric::Error> },
}

impl From<Connection> for Incoming {
    fn from(connection: Connection) -> Incoming {
        Incoming::Arrived(connection)
    }
}

/// Messages that may wait for the loop: a few for each of many replicas. Connections wait while the queue is full.
pub(super) const INCOMING_LIMIT: usize = 1024;
