//! Open copy: a copy whose region this process can read, in place or over the fabric.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use remora_fabric::{Peer, TransportKind};

use crate::lane::{Laid, Lane};
use crate::layout::Layout;
use crate::message::Standing;
use crate::rdma::Rdma;
use crate::reader::{Found, InPlace, OneSided, ReaderError};
use remora_messenger::Connection;

/// See the module's text.
pub(super) struct OpenCopy {
    way: Way,
    transport: TransportKind,
    /// How long it took to connect.
    took: Duration,
    /// It cannot be read any more.
    is_over: AtomicBool,
}

enum Way {
    /// The peer keeps the server's grant.
    Here(InPlace, #[allow(dead_code)] Mutex<Box<dyn Peer>>),
    Far(Mutex<OneSided>),
}

impl OpenCopy {
    /// Connects by the nearest of these transports that both ends have.
    ///
    /// # Errors
    /// Why none of them can be used.
    pub(super) fn open(
        connection: &Connection,
        (session, keys): (u64, &[Vec<u8>]),
        layout: Layout,
        (transports, rdma): (&[TransportKind], &Rdma),
    ) -> Result<OpenCopy, String> {
        let lane = Lane {
            transports,
            rdma,
            length: layout.length(),
            depth: DEPTH,
            connect_limit: CONNECT_LIMIT,
            read_limit: READ_LIMIT,
        };
        let sink = OneSided::sink(MOST_BLOCKS_AT_ONCE).map_err(|error| error.to_string())?;
        let Laid { peer, transport, took, .. } = lane.connect(connection, (session, keys), &sink)?;
        let way = match peer.view() {
            Some(view) => Way::Here(InPlace::new(view, layout), Mutex::new(peer)),
            None => Way::Far(Mutex::new(OneSided::new(peer, transport, sink, layout))),
        };
        Ok(OpenCopy { way, transport, took, is_over: AtomicBool::new(false) })
    }

    pub(super) fn transport(&self) -> TransportKind {
        self.transport
    }

    pub(super) fn took(&self) -> Duration {
        self.took
    }

    /// Whether it is in memory of this host.
    pub(super) fn is_here(&self) -> bool {
        matches!(self.way, Way::Here(..))
    }

    /// Whether it cannot be read any more.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// How the copy stands.
    pub(super) fn line(&self) -> Result<Standing, ReaderError> {
        self.noting(match &self.way {
            Way::Here(reader, _) => reader.line(),
            Way::Far(reader) => lock(reader).line(READ_LIMIT),
        })
    }

    /// Reads at most [`MOST_BLOCKS_AT_ONCE`] blocks, and then the line.
    pub(super) fn blocks(&self, first: u64, into: &mut [u8]) -> Result<Found, ReaderError> {
        self.noting(match &self.way {
            Way::Here(reader, _) => reader.blocks(first, into),
            Way::Far(reader) => lock(reader).blocks(first, into, READ_LIMIT),
        })
    }

    fn noting<T>(&self, result: Result<T, ReaderError>) -> Result<T, ReaderError> {
        if result.as_ref().is_err_and(ReaderError::is_final) {
            self.is_over.store(true, Ordering::Release);
        }
        result
    }
}

fn lock(reader: &Mutex<OneSided>) -> MutexGuard<'_, OneSided> {
    reader.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Blocks that are read together: 1 MiB, as much as the kernel asks for at once.
pub(super) const MOST_BLOCKS_AT_ONCE: u64 = 256;

/// Reads under way at a peer: blocks, entries, and the line.
const DEPTH: usize = 3;

/// Longest time for a connection to a server's exporter.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Longest time for a read: then another copy is read.
const READ_LIMIT: Duration = Duration::from_secs(1);
