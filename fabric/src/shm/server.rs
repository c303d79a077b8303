//! The regions, grants and reader connections of one exporter: what the exporter and its thread share.

use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};

use super::wire::{self, Shm};
use crate::{
    auth::{self, PROOF_BYTES},
    error::{Denial, Error},
    grants::Grants,
    lane_handshake::{Format, Hello, Refusal, Source},
    memory::local::{self, Packet, PeerSocket},
    region::RegionId,
};

/// What the exporter and its thread share.
pub(super) struct Shared {
    /// Behind a lock, and not owned by the thread, so that `revoke` has closed the connections when it returns. The
    /// lock is never held while a call blocks.
    pub(super) server: Mutex<Server>,
    /// Written once, to end the thread.
    pub(super) stop: OwnedFd,
}

impl Shared {
    /// Locks the server. A panic leaves it valid, because each method changes one thing.
    pub(super) fn server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Regions, grants, and reader connections.
pub(super) struct Server {
    regions: HashMap<RegionId, Region>,
    pub(super) grants: Grants,
    pub(super) readers: HashMap<u64, ReaderConnection>,
    /// Readers are numbered in the order of their connections. No number is used twice, so that an event for a closed
    /// connection finds none.
    next_number: u64,
    max_connections: usize,
    handshake_timeout: Duration,
}

struct Region {
    length: u64,
    read_only: Arc<OwnedFd>,
}

pub(super) struct ReaderConnection {
    socket: Arc<WatchedSocket>,
    stage: Stage,
}

/// A reader's socket in the thread's epoll instance. Dropping it never blocks.
pub(super) struct WatchedSocket {
    socket: PeerSocket,
    epoll: Arc<OwnedFd>,
}

impl WatchedSocket {
    /// Wraps a socket that the epoll instance watches.
    pub(super) fn new(socket: PeerSocket, epoll: Arc<OwnedFd>) -> WatchedSocket {
        WatchedSocket { socket, epoll }
    }
}

impl AsFd for WatchedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for WatchedSocket {
    fn drop(&mut self) {
        // The descriptor is closed later, and would report the end of the connection until then.
        if let Err(error) = epoll::delete(&*self.epoll, &self.socket) {
            tracing::debug!(%error, "shm: a connection was not watched");
        }
    }
}

enum Stage {
    AwaitingHello { deadline: Instant },
    AwaitingProof { deadline: Instant, handshake: Source<Shm> },
    Reading { session: u64, id: RegionId },
}

impl Server {
    pub(super) fn new(max_connections: usize, handshake_timeout: Duration) -> Server {
        Server {
            regions: HashMap::new(),
            grants: Grants::default(),
            readers: HashMap::new(),
            next_number: FIRST_READER,
            max_connections,
            handshake_timeout,
        }
    }

    pub(super) fn export(&mut self, id: RegionId, length: u64, read_only: OwnedFd) -> Result<(), Error> {
        if self.regions.contains_key(&id) {
            return Err(Error::AlreadyExported(id));
        }
        self.regions.insert(id, Region { length, read_only: Arc::new(read_only) });
        Ok(())
    }

    pub(super) fn forget_region(&mut self, id: RegionId) {
        self.regions.remove(&id);
    }

    pub(super) fn region_length(&self, id: RegionId) -> Option<u64> {
        self.regions.get(&id).map(|region| region.length)
    }

    /// Sends a farewell to the readers that `chosen` selects by session and region, and closes their connections.
    pub(super) fn cut_readers(&mut self, reason: Denial, chosen: impl Fn(u64, RegionId) -> bool) {
        self.readers.retain(|_, reader| match reader.stage {
            Stage::Reading { session, id } if chosen(session, id) => {
                // If it cannot be sent, the end of the connection tells the reader enough.
                let _ = local::send(&*reader.socket, &wire::farewell(reason), None);
                false
            }
            _ => true,
        });
    }

    /// Time until the next handshake is late; `None` if no handshake is in progress.
    pub(super) fn next_timeout(&self, now: Instant) -> Option<Timespec> {
        let first = self.readers.values().filter_map(ReaderConnection::deadline).min()?;
        // A millisecond more, so that the handshake is late at the next turn, and not only almost.
        let left = first.saturating_duration_since(now) + Duration::from_millis(1);
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
    }

    pub(super) fn cut_late(&mut self, now: Instant) {
        self.readers.retain(|_, reader| reader.deadline().is_none_or(|deadline| deadline > now));
    }

    /// The number of the next reader, and whether all places for readers are taken.
    pub(super) fn next_reader(&mut self) -> (u64, bool) {
        let number = self.next_number;
        self.next_number += 1;
        (number, self.all_places_taken())
    }

    /// Admits a connection that has sent nothing yet. If there are too many of these, the oldest gives way.
    pub(super) fn admit(&mut self, number: u64, socket: WatchedSocket, now: Instant) {
        let unproved = self.readers.iter().filter(|(_, reader)| reader.deadline().is_some()).map(|(number, _)| *number);
        let (count, oldest) = unproved.fold((0, u64::MAX), |(count, oldest), number| (count + 1, number.min(oldest)));
        if count >= UNPROVED_MAX {
            self.readers.remove(&oldest);
        }
        let stage = Stage::AwaitingHello { deadline: now + self.handshake_timeout };
        self.readers.insert(number, ReaderConnection { socket: Arc::new(socket), stage });
    }

    /// The socket of a reader, to receive from it without the lock.
    pub(super) fn socket(&self, number: u64) -> Option<Arc<WatchedSocket>> {
        self.readers.get(&number).map(|reader| reader.socket.clone())
    }

    /// Handles a packet of a reader, or the end of its connection.
    pub(super) fn on_packet(&mut self, number: u64, packet: Result<Packet, Errno>) {
        if matches!(packet, Err(Errno::AGAIN)) {
            return;
        }
        // Its region or session may have been revoked in the meantime.
        let Some(mut reader) = self.readers.remove(&number) else { return };
        let Ok(packet) = packet else { return };
        if let Some(stage) = self.next_stage(&reader, packet.bytes()) {
            reader.stage = stage;
            self.readers.insert(number, reader);
        }
    }

    /// The stage after a packet; `None` closes the connection.
    fn next_stage(&self, reader: &ReaderConnection, packet: &[u8]) -> Option<Stage> {
        match &reader.stage {
            Stage::AwaitingHello { deadline } => self.greet(reader, packet, *deadline),
            Stage::AwaitingProof { handshake, .. } => self.examine(reader, packet, handshake),
            // A reader sends nothing: this is the end of the connection, or a violation of the protocol.
            Stage::Reading { .. } => None,
        }
    }

    fn greet(&self, reader: &ReaderConnection, packet: &[u8], deadline: Instant) -> Option<Stage> {
        match Source::challenge(packet, &auth::nonce().ok()?) {
            Ok((handshake, challenge)) => {
                local::send(&*reader.socket, &challenge, None).ok()?;
                Some(Stage::AwaitingProof { deadline, handshake })
            }
            Err(rejected) => {
                tracing::debug!(error = %rejected.error, "shm: a connection was rejected");
                local::send(&*reader.socket, &rejected.answer?, None).ok()?;
                None
            }
        }
    }

    fn examine(&self, reader: &ReaderConnection, packet: &[u8], handshake: &Source<Shm>) -> Option<Stage> {
        let proof: &[u8; PROOF_BYTES] = packet.try_into().ok()?;
        let &Hello { session, id, .. } = handshake.hello();
        match self.judge(proof, handshake) {
            Ok((region, welcome)) => {
                local::send(&*reader.socket, &welcome, Some(region.read_only.as_fd())).ok()?;
                Some(Stage::Reading { session, id })
            }
            Err(denial) => {
                tracing::info!(session, region = %id, %denial, "shm: a reader was refused");
                let _ = local::send(&*reader.socket, &Shm::denial(denial), None);
                None
            }
        }
    }

    /// Checks the proof first: a reader is told what there is only after it has proved its session.
    fn judge(&self, proof: &[u8; PROOF_BYTES], handshake: &Source<Shm>) -> Result<(&Region, Vec<u8>), Denial> {
        let hello = handshake.hello();
        let proved = handshake.examine(proof, self.grants.secret(hello.session))?;
        self.grants.permit(hello.session, hello.id)?;
        match self.regions.get(&hello.id) {
            Some(_) if self.all_places_taken() => Err(Denial::Busy),
            Some(_) if self.readers_of(hello.session) >= READERS_PER_SESSION => Err(Denial::Busy),
            Some(region) => Ok((region, proved.welcome(&region.length))),
            None if self.regions.keys().any(|id| id.region == hello.id.region) => Err(Denial::Stale),
            None => Err(Denial::Unknown),
        }
    }

    fn all_places_taken(&self) -> bool {
        self.readers.values().filter(|reader| reader.deadline().is_none()).count() >= self.max_connections
    }

    fn readers_of(&self, session: u64) -> usize {
        let theirs =
            |reader: &&ReaderConnection| matches!(reader.stage, Stage::Reading { session: of, .. } if of == session);
        self.readers.values().filter(theirs).count()
    }
}

impl ReaderConnection {
    /// When the handshake must be finished; `None` if it is.
    fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::AwaitingHello { deadline } | Stage::AwaitingProof { deadline, .. } => Some(deadline),
            Stage::Reading { .. } => None,
        }
    }
}

/// Refuses a connection before its hello. A received hello is discarded first: closing a connection with unread packets
/// would make the system discard the refusal.
pub(super) fn refuse(reader: &PeerSocket, denial: Denial) {
    let Some(refusal) = Shm::refusal(Refusal::Denied(denial)) else { return };
    let _ = local::receive(reader);
    let _ = local::send(reader, &refusal, None);
}

/// Number of the first reader connection.
pub(super) const FIRST_READER: u64 = 2;
/// Connections per session, so that one session cannot take all: 2 regions, and room for a reader that reconnects
/// before its old connections are found closed.
const READERS_PER_SESSION: usize = 16;
/// Connections that have not proved their session yet. A handshake takes microseconds.
const UNPROVED_MAX: usize = 64;
