//! The thread that answers the door: accepts, examines, hands the memory over, and notices who has left. It copies nothing.
//!
//! ```text
//!   accepted ─▶ Greeting ──hello──▶ Proving ──proof──▶ Reading ──any word, or the end──▶ gone
//!                  │ late, garbled     │ late, wrong       └─ revoked, withdrawn ─ farewell ─▶ gone
//!                  ▼                   ▼
//!                 gone               told why, gone
//! ```
//!
//! Nothing here blocks on a reader: sockets don't wait, every packet is smaller than an empty connection's buffer, and who is
//! late with the handshake is cut.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};

use super::{
    exporter::Shared,
    wire::{self, Challenge, Hello, VERSION, Welcome},
};
use crate::{
    auth::{self, PROOF_BYTES},
    error::{Denial, Error},
    memory::local,
    region::{RegionId, Secret},
};

/// Starts the thread.
pub(super) fn start(shared: Arc<Shared>, listener: OwnedFd) -> Result<JoinHandle<()>, Error> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("making an epoll descriptor"))?;
    watch(&epoll, &shared.stop, STOP).map_err(Error::system("watching an eventfd"))?;
    watch(&epoll, &listener, LISTENER).map_err(Error::system("watching a local socket"))?;
    thread::Builder::new()
        .name("remora-shm".into())
        .spawn(move || {
            Owner { shared: &shared, epoll, listener }.run();
            shared.house().guests.clear();
        })
        .map_err(Error::system("starting a thread"))
}

/// The thread's own things.
struct Owner<'a> {
    shared: &'a Shared,
    epoll: OwnedFd,
    listener: OwnedFd,
}

impl Owner<'_> {
    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        loop {
            events.clear();
            let patience = self.shared.house().patience(Instant::now());
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), patience.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "shm: no connection can be answered any more"),
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    LISTENER => self.accept(),
                    number => self.shared.house().hear(number),
                }
            }
            self.shared.house().cut_late(Instant::now());
        }
    }

    /// Lets in who waits at the door; those beyond this turn's share are there at the next.
    fn accept(&self) {
        for _ in 0..EVENTS_PER_TURN {
            match local::accept(&self.listener) {
                Ok(Some(guest)) => self.admit(guest),
                Ok(None) => return,
                Err(error) => {
                    // Out of descriptors, most likely. They stay in the backlog; without a pause we would spin on them.
                    tracing::warn!(%error, "shm: cannot accept a connection, trying again");
                    return thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn admit(&self, guest: OwnedFd) {
        let mut house = self.shared.house();
        let number = house.next_number;
        if house.guests.len() >= house.connections {
            return turn_away(&guest, Denial::Busy);
        }
        if let Err(error) = watch(&self.epoll, &guest, number) {
            return tracing::warn!(%error, "shm: cannot watch a connection");
        }
        house.next_number += 1;
        let deadline = Instant::now() + house.handshake_timeout;
        house.guests.insert(number, Guest { socket: guest, stage: Stage::Greeting { deadline } });
    }
}

/// What is lent, to whom it may be, and who is there.
pub(super) struct House {
    regions: HashMap<RegionId, Region>,
    grants: HashMap<u64, Secret>,
    guests: HashMap<u64, Guest>,
    /// Guests are numbered in the order of their coming, never twice: an event for one who has left finds nobody.
    next_number: u64,
    connections: usize,
    handshake_timeout: Duration,
}

struct Region {
    length: u64,
    read_only: Arc<OwnedFd>,
}

struct Guest {
    socket: OwnedFd,
    stage: Stage,
}

enum Stage {
    Greeting { deadline: Instant },
    Proving { deadline: Instant, hello: Hello, transcript: Vec<u8> },
    Reading { session: u64, id: RegionId },
}

impl House {
    pub(super) fn new(connections: usize, handshake_timeout: Duration) -> House {
        House {
            regions: HashMap::new(),
            grants: HashMap::new(),
            guests: HashMap::new(),
            next_number: FIRST_GUEST,
            connections,
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

    pub(super) fn grant(&mut self, session: u64, secret: Secret) {
        self.grants.insert(session, secret);
    }

    pub(super) fn forget_session(&mut self, session: u64) {
        self.grants.remove(&session);
    }

    /// Says farewell to readers, chosen by session and region, and hangs up.
    pub(super) fn cut_readers(&mut self, reason: Denial, chosen: impl Fn(u64, RegionId) -> bool) {
        self.guests.retain(|_, guest| match guest.stage {
            Stage::Reading { session, id } if chosen(session, id) => {
                // If it can't be said, the end of the connection says enough.
                let _ = local::send(&guest.socket, &wire::farewell(reason), None);
                false
            }
            _ => true,
        });
    }

    /// Time until somebody is late; `None` if nobody can be.
    fn patience(&self, now: Instant) -> Option<Timespec> {
        let first = self.guests.values().filter_map(Guest::deadline).min()?;
        // A millisecond more, so that the turn that follows finds him late and not nearly so.
        let left = first.saturating_duration_since(now) + Duration::from_millis(1);
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
    }

    fn cut_late(&mut self, now: Instant) {
        self.guests.retain(|_, guest| guest.deadline().is_none_or(|deadline| deadline > now));
    }

    /// Takes what a guest has to say.
    fn hear(&mut self, number: u64) {
        let Some(mut guest) = self.guests.remove(&number) else { return };
        let packet = match local::receive(&guest.socket) {
            Ok(packet) => packet,
            Err(Errno::AGAIN) => return drop(self.guests.insert(number, guest)),
            Err(_) => return,
        };
        if let Some(stage) = self.next_stage(&guest, packet.bytes()) {
            guest.stage = stage;
            self.guests.insert(number, guest);
        }
    }

    /// Where a packet brings a guest; `None`: out.
    fn next_stage(&self, guest: &Guest, packet: &[u8]) -> Option<Stage> {
        match &guest.stage {
            Stage::Greeting { deadline } => self.greet(guest, packet, *deadline),
            Stage::Proving { hello, transcript, .. } => self.examine(guest, packet, hello, transcript),
            // A reader has nothing to say: this is the end of the connection, or nonsense.
            Stage::Reading { .. } => None,
        }
    }

    fn greet(&self, guest: &Guest, packet: &[u8], deadline: Instant) -> Option<Stage> {
        let hello = Hello::decode(packet).ok()?;
        let challenge = Challenge { refusal: None, version: VERSION, nonce: auth::nonce().ok()? }.encode();
        local::send(&guest.socket, &challenge, None).ok()?;
        if hello.version != VERSION {
            // Our version is in the challenge; the reader will say what is wrong.
            return None;
        }
        Some(Stage::Proving { deadline, hello, transcript: [packet, &challenge].concat() })
    }

    fn examine(&self, guest: &Guest, packet: &[u8], hello: &Hello, transcript: &[u8]) -> Option<Stage> {
        let proof: &[u8; PROOF_BYTES] = packet.try_into().ok()?;
        match self.judge(proof, hello, transcript) {
            Ok((region, secret)) => {
                let proof = auth::prove(secret, wire::SOURCE, transcript);
                let welcome = Welcome { refusal: None, length: region.length, proof }.encode();
                local::send(&guest.socket, &welcome, Some(region.read_only.as_fd())).ok()?;
                Some(Stage::Reading { session: hello.session, id: hello.id })
            }
            Err(denial) => {
                tracing::info!(session = hello.session, region = %hello.id, %denial, "shm: a reader was refused");
                let welcome = Welcome { refusal: Some(denial), length: 0, proof: [0; PROOF_BYTES] };
                let _ = local::send(&guest.socket, &welcome.encode(), None);
                None
            }
        }
    }

    /// The proof first: only who has proved himself is told what there is.
    fn judge(&self, proof: &[u8; PROOF_BYTES], hello: &Hello, transcript: &[u8]) -> Result<(&Region, &Secret), Denial> {
        let secret = self.grants.get(&hello.session);
        let proved = auth::verify_known(secret, wire::READER, transcript, proof);
        let secret = secret.filter(|_| proved).ok_or(Denial::NotGranted)?;
        match self.regions.get(&hello.id) {
            Some(_) if self.readers_of(hello.session) >= READERS_PER_SESSION => Err(Denial::Busy),
            Some(region) => Ok((region, secret)),
            None if self.regions.keys().any(|id| id.region == hello.id.region) => Err(Denial::Stale),
            None => Err(Denial::Unknown),
        }
    }

    fn readers_of(&self, session: u64) -> usize {
        let theirs = |guest: &&Guest| matches!(guest.stage, Stage::Reading { session: of, .. } if of == session);
        self.guests.values().filter(theirs).count()
    }
}

impl Guest {
    /// When the handshake has to be over; `None` if it is.
    fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Greeting { deadline } | Stage::Proving { deadline, .. } => Some(deadline),
            Stage::Reading { .. } => None,
        }
    }
}

/// Answers a hello that will not be read. What has arrived is thrown away first: closing a connection with unread packets makes
/// the system throw away ours.
fn turn_away(guest: &OwnedFd, denial: Denial) {
    let challenge = Challenge { refusal: Some(denial), version: VERSION, nonce: [0; 32] };
    let _ = local::receive(guest);
    let _ = local::send(guest, &challenge.encode(), None);
}

fn watch(epoll: &OwnedFd, fd: &OwnedFd, number: u64) -> Result<(), Errno> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN | epoll::EventFlags::RDHUP)
}

/// Connections per session, so that one can't take all: 2 regions, and room for a reader that comes back before its old connections
/// are found dead.
const READERS_PER_SESSION: usize = 16;
/// Numbers of the two descriptors that are no guests.
const STOP: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_GUEST: u64 = 2;
/// Events taken, and connections accepted, per turn: enough to be rare, few enough that a crowd can't starve those inside.
const EVENTS_PER_TURN: usize = 64;
/// Rest after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
