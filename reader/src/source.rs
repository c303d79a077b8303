//! Source: the replica's end of the conversation with the source agent, and how an offer becomes a feed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::{Memory, Pages, Peer, RegionKey, Secret, TransportKind};
use remora_protocol::{Join, Message, Offer, Phase, RefusalCode, Resume, TableOffer};
use remora_redis::{MAX_OFFSET, ReplId};
use remora_table::{Expectation, Geometry, Kind, MIN_SLOTS, Origin, SealKey, SinkLayout, SnapshotCopy};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::ReadOptions;
use crate::addresses::Addresses;
use crate::addresses::Loss;
use crate::feed::{Feed, Position};
use crate::parts::{CopyPlan, Part, Parts};
use crate::spool;
use remora_base::AbortOnDrop;
use remora_base::pace::Backoff;
use remora_base::units::Size;
use remora_conversation::tokens::Credentials;
use remora_conversation::transports::{Connectors, LANES_LABEL, TransportChoices, not_offered};
use remora_conversation::{Connection, Error, Fault, Protection, Receiver, Security, Sender, derive};
use remora_process::exit::Patience;
use remora_process::exit::{Code, Failure};
use remora_process::{events, host};
use remora_server::HostPort;

/// A session with the source.
pub struct Source {
    connection: Connection,
    security: Security,
}

/// Time limit for a plan, which the source has ready.
const PLAN_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for memory to try transports with: the source touches 64 MiB, and registers them with an RDMA device.
const PROBE_LIMIT: Duration = Duration::from_secs(20);

/// How long to try again if the first connection is closed during its handshake. A server of another protocol may close
/// it too, so the limit is short.
const CLOSED_LIMIT: Duration = Duration::from_secs(30);

impl Source {
    /// Connects to the first of the addresses that answers, from the present one on. Each is tried once.
    pub async fn connect(args: &ReadOptions, credentials: &Credentials) -> Result<Source, Error> {
        let mut round = args.source.round();
        loop {
            let attempt = Source::connect_to(&round.at(), credentials).await;
            if let Some(done) = round.outcome(attempt, |error: &Error| error.fault.may_pass()) {
                return done;
            }
        }
    }

    /// Connects to this address, once.
    pub(crate) async fn connect_to(at: &HostPort, credentials: &Credentials) -> Result<Source, Error> {
        let connection = credentials.connect(&at.host, at.port).await?;
        Ok(Source { connection, security: credentials.security.clone() })
    }

    /// The first connection. Retries while the source refuses it as busy, and for a short time if the source closes it:
    /// a source whose port is flooded may do so. Any other error is returned at once.
    pub async fn connect_first(args: &ReadOptions, credentials: &Credentials) -> Result<Source, Error> {
        let (began, mut backoff) = (Instant::now(), Backoff::from_system());
        loop {
            let limit = |fault: &Fault| match fault {
                Fault::Busy => args.retry_for,
                Fault::ClosedEarly | Fault::ClosedTls => args.retry_for.min(CLOSED_LIMIT),
                _ => Duration::ZERO,
            };
            match Source::connect(args, credentials).await {
                Err(error) if began.elapsed() < limit(&error.fault) => {
                    let pause = backoff.next();
                    tracing::warn!("the source {error}; trying again in {} ms", pause.as_millis());
                    tokio::time::sleep(pause).await;
                }
                done => return done,
            }
        }
    }

    /// The first conversation of a command: waits for a source that is not there yet, or is busy. Where there are
    /// several, it is one whose server does not refuse the capture.
    ///
    /// # Errors
    /// The source refuses, or does not come within the time limit.
    pub async fn first(
        args: &ReadOptions,
        credentials: &Credentials,
        patience: &mut Patience,
        (name, server): (Option<&str>, &str),
    ) -> Result<(Source, Offer), Failure> {
        let began = Instant::now();
        let mut round = args.source.round();
        loop {
            let attempt = Source::first_at(args, &round.at(), credentials, (name, server), began).await;
            match round.outcome(attempt, |failure: &Failure| failure.passes) {
                None => {}
                Some(Ok(first)) => {
                    patience.overcome();
                    return Ok(first);
                }
                Some(Err(failure)) => {
                    tokio::time::sleep(patience.after(Instant::now(), failure)?).await;
                    round = args.source.round();
                }
            }
        }
    }

    /// The first conversation with the source at this address.
    async fn first_at(
        args: &ReadOptions,
        at: &HostPort,
        credentials: &Credentials,
        (name, server): (Option<&str>, &str),
        began: Instant,
    ) -> Result<(Source, Offer), Failure> {
        let connected = Source::connect_to(at, credentials).await.map_err(|error| {
            let is_closed = matches!(error.fault, Fault::ClosedEarly | Fault::ClosedTls);
            let failure = failure(error);
            let passes = failure.passes && !(is_closed && began.elapsed() > CLOSED_LIMIT);
            failure.that_passes(passes)
        });
        let mut source = connected?;
        let plan = source.plan(args, name, server).await?;
        match &plan.terms {
            Some(terms) if terms.is_refused && !args.source.is_one() => {
                let text = format!("the source {at} cannot take a snapshot: {}", plan.obstacle);
                Err(Failure::new(Code::Source, text))
            }
            _ => Ok((source, plan)),
        }
    }

    /// The address of this end.
    pub(crate) fn local_address(&self) -> SocketAddr {
        self.connection.local_addr()
    }

    /// The address by which the source was reached.
    pub fn address(&self) -> SocketAddr {
        self.connection.peer_addr()
    }

    /// Asks for what an offer would contain, without having a snapshot taken.
    pub async fn plan(&mut self, args: &ReadOptions, name: Option<&str>, server: &str) -> Result<Offer, Failure> {
        let join = Join { plan_only: true, ..join(name, server, None) };
        self.connection.send(Message::Join(join)).await.map_err(failure)?;
        let answer = async {
            loop {
                if let Message::Offer(offer) = self.connection.receive().await.map_err(failure)? {
                    return Ok(offer);
                }
            }
        };
        tokio::time::timeout(PLAN_LIMIT, answer).await.unwrap_or_else(|_| {
            let text = format!("the source {} told nothing of its server for {} s", args.source, PLAN_LIMIT.as_secs());
            Err(Failure::passing(Code::Source, text))
        })
    }

    /// Asks for the journal alone, from a byte on. The error says whether the source has it still.
    pub async fn journal(&mut self, join: Join) -> Result<Offer, Error> {
        self.connection.send(Message::Join(join)).await?;
        loop {
            if let Message::Offer(offer) = self.connection.receive().await? {
                return Ok(offer);
            }
        }
    }

    /// Asks for memory without data, over each transport that the source offers. The source keeps it until the session
    /// ends. Returns its keys.
    ///
    /// # Errors
    /// The source refuses, or does not answer in time.
    pub async fn probe_keys(&mut self, args: &ReadOptions) -> Result<Vec<Vec<u8>>, Failure> {
        self.connection.send(Message::ProbeQuery).await.map_err(failure)?;
        let answer = async {
            loop {
                if let Message::ProbeOffer { keys } = self.connection.receive().await.map_err(failure)? {
                    return Ok(keys);
                }
            }
        };
        tokio::time::timeout(PROBE_LIMIT, answer).await.unwrap_or_else(|_| {
            let limit = PROBE_LIMIT.as_secs();
            let text =
                format!("the source {} exported no memory to try the transports with for {limit} s", args.source);
            Err(Failure::passing(Code::Source, text))
        })
    }

    /// The two directions of the session, for its task.
    pub fn split(self) -> (Sender, Receiver) {
        self.connection.split()
    }

    /// The parameters for connecting to offered tables, for a thread that can block.
    pub fn way(&self, args: &ReadOptions) -> Way {
        Way::new(&self.connection, wish(args, &self.security))
    }
}

pub(crate) fn wish(args: &ReadOptions, security: &Security) -> TransportChoices {
    TransportChoices { choice: args.transport, lanes: args.lanes, rdma: args.rdma.clone(), security: security.clone() }
}

/// The request for a snapshot, or for the rest of one.
pub fn join_again(name: Option<&str>, server: &str, progress: &Position, held_slots: u64) -> Join {
    let resume = progress.snapshot.map(|id| Resume {
        generation: id.origin.generation,
        held_slots,
        loaded: progress.loaded,
        replid: id.origin.history,
        next_byte: progress.next_byte,
    });
    join(name, server, resume)
}

/// A request for a snapshot: without `resume` for all of it.
pub fn join(name: Option<&str>, server: &str, resume: Option<Resume>) -> Join {
    Join {
        name: name.unwrap_or_default().to_owned(),
        server: server.to_string(),
        resume,
        plan_only: false,
        zone: String::new(),
        relays: None,
    }
}

/// The failure of a sync whose source cannot be reached or refuses.
pub fn failure(error: Error) -> Failure {
    error.of_source()
}

/// Receive buffers. Each feed gets new ones, since a server may still read what the last feed lent to its socket.
#[derive(Clone, Copy)]
pub struct Sinks {
    budget: u64,
}

/// The snapshot's share of the memory, the rest being the journal's and the backlog's: three quarters.
const SNAPSHOT_SHARE: (u64, u64) = (3, 4);

/// Bytes of the snapshot's slot buffers, at most: enough to keep a long link busy while the server takes its time.
const SNAPSHOT_BUFFERS: u64 = 64 << 20;

/// Slot buffers of the journal: one is checked while another is read.
const JOURNAL_BUFFERS: u32 = 2;

/// The default of `--memory` of a replica agent.
pub const DEFAULT_MEMORY: Size = Size::mebibytes(256);

impl Sinks {
    /// Within that many bytes.
    pub fn new(memory: u64) -> Sinks {
        Sinks { budget: memory }
    }

    /// Whether that many slots of this table are all kept for other replicas.
    pub fn holds(&self, snapshot: &Geometry, slots: u64, needs_opening: bool) -> bool {
        self.copy(snapshot, true, needs_opening).is_some_and(|own| u64::from(own.slots) >= slots)
    }

    /// Bytes of the stream that may wait for the server.
    pub fn backlog_limit(&self) -> usize {
        usize::try_from(self.budget / 8).unwrap_or(usize::MAX)
    }

    fn buffers(&self, slot_size: u32) -> u32 {
        let share = self.budget * SNAPSHOT_SHARE.0 / SNAPSHOT_SHARE.1;
        let fit = share.saturating_sub(SinkLayout::SMALL_BYTES).min(SNAPSHOT_BUFFERS) / u64::from(slot_size.max(1));
        u32::try_from(fit).unwrap_or(u32::MAX).clamp(1, SinkLayout::MAX_BUFFERS)
    }

    /// The shape of a copy of this table: as many slots as the snapshot's share of the memory holds, or as few as are
    /// needed if no other replica reads them. A copy of a table that is sealed or compressed also needs buffers in
    /// which slots are opened. `None` if not even a small ring fits.
    fn copy(&self, snapshot: &Geometry, serves: bool, needs_opening: bool) -> Option<Geometry> {
        let share = self.budget * SNAPSHOT_SHARE.0 / SNAPSHOT_SHARE.1;
        let for_copy = if needs_opening { share / 5 * 4 } else { share };
        let within = Geometry::within(for_copy, snapshot.slot_size).ok()?;
        let most = if serves { snapshot.slots } else { self.buffers(snapshot.slot_size).max(MIN_SLOTS) };
        let own = Geometry { slots: within.slots.min(most), ..within };
        let opening = if needs_opening { SnapshotCopy::opening_len(&own) } else { 0 };
        (SnapshotCopy::memory_len(&own) + opening <= share).then_some(own)
    }
}

fn create(name: &str, length: u64) -> Result<Arc<Memory>, Failure> {
    Memory::create_single_writer(name, length, Pages::Small).map(Arc::new).map_err(|error| {
        Failure::local(format!(
            "{length} bytes of memory for receive buffers cannot be allocated: {error}; give a smaller --memory{}",
            host::why_none()
        ))
    })
}

/// How a replica takes part in passing slots on.
#[derive(Clone)]
pub struct RelayWish {
    /// Other replicas can read slots here.
    pub serves: bool,
    /// Bytes per second, for all connections; 0: no limit.
    pub download_rate: u64,
    /// The memory of a copy that can be continued.
    pub kept: Option<Arc<Memory>>,
}

/// How to connect to the tables that a session was offered.
#[derive(Clone)]
pub struct Way {
    session: u64,
    secret: Secret,
    source: SocketAddr,
    /// This end's address in the session.
    own: SocketAddr,
    /// What protects the session.
    protection: Protection,
    wish: TransportChoices,
}

/// The transport over which tables are read, and why better transports were not used (empty if none was).
pub struct Chosen {
    /// The transport.
    pub kind: TransportKind,
    /// Why no better transport is used; empty if there is none.
    pub why: String,
    /// What protects the data that is read.
    pub protection: Protection,
    /// The copy that the slots go into.
    pub copy: Option<Copied>,
}

/// The memory of a copy, its shape, and whether the memory is new.
type Copied = (Arc<Memory>, Geometry, bool);

/// How the tables are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    /// The offer that they belong to.
    pub offer: Box<Offer>,
    /// The transport.
    pub transport: TransportKind,
    /// Why no better transport is used; empty if there is none.
    pub why: String,
    /// What protects the data that is read.
    pub protection: Protection,
}

impl Tables {
    /// Logs how the tables are read, where that differs from `before`.
    pub fn log_what_is_new(&self, before: Option<&Tables>) {
        let Tables { offer, transport, why, protection } = self;
        if before.is_some_and(|before| before.transport == *transport && before.why == *why) {
            return;
        }
        if before.is_some_and(|before| before.transport == TransportKind::Verbs) {
            tracing::warn!(
                event = events::RDMA_ENDED,
                now = transport.name(),
                why,
                "RDMA to the source has ended; going on by another transport"
            );
        }
        let (generation, offset) = (offer.generation, offer.offset);
        let transport = transport.name();
        let why = (!why.is_empty()).then_some(why);
        tracing::info!(event = events::SOURCE_READ, transport, why, %protection, generation, offset, "reading the source's tables");
    }
}

impl Chosen {
    /// How the tables of this offer are read.
    pub fn tables(&self, offer: Box<Offer>) -> Tables {
        Tables { offer, transport: self.kind, why: self.why.clone(), protection: self.protection }
    }
}

impl Way {
    /// The way to the tables that this connection's peer offers.
    pub fn new(connection: &Connection, wish: TransportChoices) -> Way {
        Way {
            session: connection.session(),
            secret: derive(&connection.session_key(), LANES_LABEL),
            source: connection.peer_addr(),
            own: connection.local_addr(),
            protection: connection.protection(),
            wish,
        }
    }

    /// The address by which the source was reached.
    pub fn source(&self) -> SocketAddr {
        self.source
    }

    /// What protects data that is read over this transport.
    pub fn protection(&self, kind: TransportKind, is_sealed: bool) -> Protection {
        self.protection.of_data(kind, is_sealed, self.source.ip())
    }

    /// Connects to a lender's copy of a table, which is sealed if the table is. Blocks, within the transports'
    /// time-outs.
    pub fn reach(
        &self,
        table: &TableOffer,
        is_sealed: bool,
        sink: &Arc<Memory>,
    ) -> Result<(Box<dyn Peer>, TransportKind), Failure> {
        self.connect(&mut self.wish.connectors_to_lender(self.source, self.own, is_sealed), table, sink)
    }

    /// Connects to the offered tables. Blocks, within the transports' time-outs.
    pub fn feed(
        &self,
        offer: &Offer,
        sinks: Sinks,
        without_snapshot: bool,
        relay: Option<&RelayWish>,
    ) -> Result<(Feed, Chosen), Failure> {
        let origin = check(offer, self.source)?;
        let id = spool::SnapshotId { origin, slot_size: offer.snapshot.slot_size };
        let is_sealed = !offer.snapshot.seal.is_empty() && !offer.journal.seal.is_empty();
        let mut connectors = self.wish.connectors(self.source, is_sealed);
        let (journal, mut kind) =
            self.buffered(&mut connectors, Kind::Journal, &offer.journal, origin.history, sinks)?;
        let (mut copy, mut snapshot) = (None, None);
        if !without_snapshot {
            let relay = relay.filter(|_| kind != TransportKind::Shm);
            let part;
            (part, kind, copy) = self.snapshot_part(&mut connectors, &offer.snapshot, origin.history, sinks, relay)?;
            snapshot = Some(part);
        }
        let protection = self.protection(kind, is_sealed);
        let chosen = Chosen { kind, why: connectors.why(), protection, copy };
        Ok((Feed::new(id, Parts { snapshot, journal, backlog: offer.backlog_bytes }), chosen))
    }

    /// Why no transport that was asked for can be used, as far as this end knows.
    pub fn why_none(&self, is_sealed: bool) -> Option<String> {
        let mut connectors = self.wish.connectors(self.source, is_sealed);
        match connectors.best() {
            Some(_) => None,
            None => Some(connectors.why()),
        }
    }

    /// Whether this transport may be used.
    pub fn permits(&self, kind: TransportKind) -> bool {
        self.wish.kinds().contains(&kind)
    }

    /// Connects to memory with these keys, as to the tables of a source that seals them or not. Blocks, within the
    /// transports' time-outs. Returns also why better transports were not used.
    pub fn try_out(
        &self,
        keys: Vec<Vec<u8>>,
        is_sealed: bool,
        sink: &Arc<Memory>,
    ) -> Result<(Box<dyn Peer>, TransportKind, String), Failure> {
        let mut connectors = self.wish.connectors(self.source, is_sealed);
        let (peer, kind) = self.connect_by(&mut connectors, &keys, sink)?;
        Ok((peer, kind, connectors.why()))
    }

    /// Connects to the offered snapshot alone, for a reader that has no server. Blocks, within the transports'
    /// time-outs.
    pub fn snapshot(
        &self,
        offer: &Offer,
        sinks: Sinks,
        relay: Option<&RelayWish>,
    ) -> Result<(spool::SnapshotId, Part, Chosen), Failure> {
        let origin = check(offer, self.source)?;
        let is_sealed = !offer.snapshot.seal.is_empty();
        let mut connectors = self.wish.connectors(self.source, is_sealed);
        let (part, kind, copy) = self.snapshot_part(&mut connectors, &offer.snapshot, origin.history, sinks, relay)?;
        let protection = self.protection(kind, is_sealed);
        let id = spool::SnapshotId { origin, slot_size: offer.snapshot.slot_size };
        Ok((id, part, Chosen { kind, why: connectors.why(), protection, copy }))
    }

    /// Connects to the offered journal alone. Blocks, within the transports' time-outs.
    pub fn journal(&self, offer: &Offer, sinks: Sinks) -> Result<(ReplId, Part, TransportKind), Failure> {
        let origin = check(offer, self.source)?;
        let is_sealed = !offer.journal.seal.is_empty();
        let mut connectors = self.wish.connectors(self.source, is_sealed);
        let (part, kind) = self.buffered(&mut connectors, Kind::Journal, &offer.journal, origin.history, sinks)?;
        Ok((origin.history, part, kind))
    }

    /// The connection to a snapshot: into a copy, if its slots may be passed on, there is memory for that, and it is
    /// not in this host's own memory.
    fn snapshot_part(
        &self,
        connectors: &mut Connectors,
        table: &TableOffer,
        history: ReplId,
        sinks: Sinks,
        relay: Option<&RelayWish>,
    ) -> Result<(Part, TransportKind, Option<Copied>), Failure> {
        let needs_opening = !table.seal.is_empty() || table.compressed;
        let copy = relay.and_then(|relay| Some((relay, sinks.copy(&shape(table), relay.serves, needs_opening)?)));
        if let Some((relay, own)) = copy {
            let length = SnapshotCopy::memory_len(&own);
            let kept = relay.kept.clone().filter(|kept| kept.length() == length);
            let is_new = kept.is_none();
            let memory = kept.map_or_else(|| create("remora-copy", length), Ok)?;
            let (peer, kind) = self.connect(connectors, table, &memory)?;
            if kind != TransportKind::Shm {
                let plan = CopyPlan { own, download_rate: relay.download_rate, retained: table.retained };
                let expect = self.expect(Kind::Snapshot, kind, table, history)?;
                let part = Part { copy: Some(plan), ..part(peer, memory.clone(), 1, expect, false) };
                return Ok((part, kind, Some((memory, own, is_new))));
            }
        }
        let (part, kind) = self.buffered(connectors, Kind::Snapshot, table, history, sinks)?;
        Ok((part, kind, None))
    }

    /// The connection to a table whose slots are received into buffers, and are not passed on.
    fn buffered(
        &self,
        connectors: &mut Connectors,
        kind: Kind,
        table: &TableOffer,
        history: ReplId,
        sinks: Sinks,
    ) -> Result<(Part, TransportKind), Failure> {
        let (buffers, name) = match kind {
            Kind::Snapshot => (sinks.buffers(table.slot_size), "remora-sink"),
            Kind::Journal => (JOURNAL_BUFFERS, "remora-journal-sink"),
        };
        let sink = create(name, SinkLayout { offset: 0, buffers }.length(&shape(table)))?;
        let (peer, transport) = self.connect(connectors, table, &sink)?;
        let expect = self.expect(kind, transport, table, history)?;
        Ok((part(peer, sink, buffers, expect, table.retained), transport))
    }

    /// What to expect of a table that is read over this transport. Shared memory of this host has the plain table, and
    /// every other transport the sealed one, or the one with compressed slots, if there is one.
    fn expect(
        &self,
        kind: Kind,
        transport: TransportKind,
        table: &TableOffer,
        history: ReplId,
    ) -> Result<Expectation, Failure> {
        let origin = Origin { generation: table.generation, history, offset: table.first_offset };
        let geometry = shape(table);
        let may_be_plain = match transport {
            TransportKind::Shm => true,
            _ if !table.seal.is_empty() => false,
            TransportKind::Verbs => self.wish.security.permits_plain_network(),
            _ => self.wish.security.permits_plain_data(self.source.ip()),
        };
        let compressed = table.compressed && transport != TransportKind::Shm;
        if may_be_plain {
            return Ok(Expectation::plain(origin, geometry).with_compressed_slots(compressed));
        }
        let sealed = SealKey::from_bytes(&table.seal).and_then(|key| Expectation::sealed(kind, origin, geometry, &key));
        sealed.map(|expect| expect.with_compressed_slots(compressed)).map_err(|error| {
            let text = format!(
                "the source {} offers no sealed table that can be read: {error}; start it with --security token",
                self.source
            );
            Failure::new(Code::Source, text)
        })
    }

    /// Tries the connectors, best first, and returns which one connected. One that fails is not tried again for
    /// other tables.
    fn connect(
        &self,
        connectors: &mut Connectors,
        table: &TableOffer,
        sink: &Arc<Memory>,
    ) -> Result<(Box<dyn Peer>, TransportKind), Failure> {
        self.connect_by(connectors, &table.keys, sink)
    }

    fn connect_by(
        &self,
        connectors: &mut Connectors,
        keys: &[Vec<u8>],
        sink: &Arc<Memory>,
    ) -> Result<(Box<dyn Peer>, TransportKind), Failure> {
        let keys: Vec<RegionKey> = keys.iter().filter_map(|bytes| RegionKey::from_bytes(bytes.clone()).ok()).collect();
        while let Some(connector) = connectors.best() {
            let kind = connector.kind();
            let tried = match keys.iter().find(|key| key.transport() == kind) {
                Some(key) => connector.connect(key, self.session, &self.secret, sink.clone()),
                None => {
                    connectors.pass_over(not_offered(kind));
                    continue;
                }
            };
            match tried {
                Ok(peer) => return Ok((peer, kind)),
                Err(error) => connectors.pass_over(&error.to_string()),
            }
        }
        let text = format!("the tables of {} can't be read: {}", self.source, connectors.why());
        Err(Failure::new(Code::Source, text))
    }
}

fn part(peer: Box<dyn Peer>, sink: Arc<Memory>, buffers: u32, expect: Expectation, in_place: bool) -> Part {
    Part { peer, sink, layout: SinkLayout { offset: 0, buffers }, expect, in_place, copy: None }
}

fn shape(table: &TableOffer) -> Geometry {
    Geometry { slot_size: table.slot_size, slots: table.slots }
}

/// Where the snapshot was taken, if the offer makes sense.
fn check(offer: &Offer, source: SocketAddr) -> Result<Origin, Failure> {
    let unsound = |what: &dyn std::fmt::Display| {
        Failure::new(Code::Source, format!("the source {source} offers no sound table: {what}"))
    };
    for table in [&offer.snapshot, &offer.journal] {
        shape(table).checked().map_err(|error| unsound(&error))?;
    }
    for offset in [offer.offset, offer.snapshot.first_offset, offer.journal.first_offset] {
        if offset > MAX_OFFSET {
            return Err(unsound(&format_args!("its replication offset {offset} is higher than any server's")));
        }
    }
    let history = offer.replid.ok_or_else(|| {
        let text = format!("the source {source} offers generation {} without a replid", offer.generation);
        Failure::new(Code::Source, text)
    })?;
    Ok(Origin { generation: offer.generation, history, offset: offer.offset })
}

// The session with the source: a task that sends what it is given and reports what arrives.
//
// Messages are few and keep their order. Reports of progress are many and each makes the one before it void, so only
// the newest waits to be sent: a source that reads slowly costs no memory here. A report that says what the last one
// said is sent twice a second only: a source may have a thousand replicas that stay. One that only counts slots that
// the source retains is sent four times a second.

/// How long the last messages may take, the closing of the session included.
const LEAVE_LIMIT: Duration = Duration::from_secs(3);

/// How often a report that says nothing new is sent. The source assigns other upstreams to the readers of a replica
/// that reports nothing for two seconds.
const UNCHANGED_EVERY: Duration = Duration::from_millis(500);

/// How often a report is sent that counts more slots of a snapshot that the source retains, and says nothing else that
/// is new. No writer waits for the readers of such a snapshot. Each report wakes the source: of eight replicas at
/// twenty reports a second it took 0.4 processor seconds in fifteen. The source measures rates over a second, and
/// compares replicas at a time of which both have told.
const RETAINED_EVERY: Duration = Duration::from_millis(250);

/// The newest report, and when it was made.
type Newest = Option<(remora_protocol::Progress, Instant)>;

/// The driver's end. Dropping it ends the session without a last message.
pub struct Session {
    messages: UnboundedSender<Outgoing>,
    progress: watch::Sender<Newest>,
    events: UnboundedReceiver<Received>,
    way: Way,
    task: JoinHandle<()>,
    _end: AbortOnDrop,
}

enum Outgoing {
    Message(Message),
    /// The last message. The session closes when it has arrived.
    Last(Message),
}

/// A message or the end of the session.
pub enum Received {
    /// A message.
    Message(Box<Message>),
    /// The session has ended.
    Lost(Loss),
}

impl Session {
    /// Starts the task that has the conversation. `addresses`: those of which the source's is the present one.
    pub fn start(source: Source, way: Way, addresses: &Addresses) -> Session {
        let (sender, receiver) = source.split();
        let (messages, queued) = unbounded_channel();
        let (progress, newest) = watch::channel(None);
        let (tell, events) = unbounded_channel();
        let task = tokio::spawn(run((sender, receiver), addresses.clone(), queued, newest, tell));
        let end = AbortOnDrop::new(&task);
        Session { messages, progress, events, way, task, _end: end }
    }

    /// Queues a message. One that cannot be sent is dropped: the end of the session is reported.
    pub fn send(&self, message: Message) {
        let _ = self.messages.send(Outgoing::Message(message));
    }

    /// Sends this report as soon as there is room, unless there is a newer one by then, or it says too little that is
    /// new. `is_retained`: the source keeps all slots of the snapshot that the report is about.
    pub fn report(&self, progress: remora_protocol::Progress, is_retained: bool) {
        let now = Instant::now();
        self.progress.send_if_modified(|newest| is_due(newest, progress, is_retained, now));
    }

    /// The parameters for connecting to offered tables.
    pub fn way(&self) -> &Way {
        &self.way
    }

    /// The next message, or the end of the session. Cancel-safe.
    pub async fn received(&mut self) -> Received {
        match self.events.recv().await {
            Some(received) => received,
            None => {
                let failure = Failure::local(
                    "the source's session ended unexpectedly; this is a bug of remora, please report it",
                );
                Received::Lost(Loss::passing(failure))
            }
        }
    }

    /// Sends the newest report and this message, and closes the session when they have arrived.
    pub async fn leave(self, message: Message) {
        let Session { messages, task, _end: end, .. } = self;
        let _ = messages.send(Outgoing::Last(message));
        // The source may be gone, or slow: the sync is over either way.
        let _ = tokio::time::timeout(LEAVE_LIMIT, task).await;
        drop(end);
    }
}

async fn run(
    (sender, mut receiver): (Sender, Receiver),
    addresses: Addresses,
    mut queued: UnboundedReceiver<Outgoing>,
    mut newest: watch::Receiver<Newest>,
    tell: UnboundedSender<Received>,
) {
    loop {
        tokio::select! {
            biased;
            outgoing = queued.recv() => match outgoing {
                // The next read reports that the session has ended.
                Some(Outgoing::Message(message)) => drop(sender.send(message).await),
                Some(Outgoing::Last(message)) => {
                    report(&sender, &mut newest).await;
                    let _ = sender.send(message).await;
                    return sender.finish(receiver).await;
                }
                None => return,
            },
            received = receiver.receive() => {
                let received = match received {
                    Ok(Message::Standbys { addresses: told }) => {
                        addresses.learn(&told);
                        continue;
                    }
                    Ok(message) => {
                        if matches!(message, Message::Offer(_)) {
                            addresses.offered();
                        }
                        Received::Message(Box::new(message))
                    }
                    Err(error) => Received::Lost(addresses.lost(loss(error))),
                };
                let is_over = matches!(received, Received::Lost(_));
                if tell.send(received).is_err() || is_over {
                    return;
                }
            },
            changed = newest.changed() => match changed {
                Ok(()) => report(&sender, &mut newest).await,
                Err(_) => return,
            },
        }
    }
}

/// Sends the newest report.
async fn report(sender: &Sender, newest: &mut watch::Receiver<Newest>) {
    let progress = newest.borrow_and_update().clone();
    if let Some((progress, _)) = progress {
        let _ = sender.send(Message::Progress(progress)).await;
    }
}

/// Whether this report is to be sent. It replaces the newest one then.
fn is_due(newest: &mut Newest, progress: remora_protocol::Progress, is_retained: bool, now: Instant) -> bool {
    let pause = match newest {
        Some((known, _)) if *known == progress => UNCHANGED_EVERY,
        Some((known, _)) if is_retained && only_counts(known, &progress) => RETAINED_EVERY,
        _ => Duration::ZERO,
    };
    let is_due = newest.as_ref().is_none_or(|(_, sent)| now.saturating_duration_since(*sent) >= pause);
    if is_due {
        *newest = Some((progress, now));
    }
    is_due
}

/// Whether a report differs from the one before only in how much of the snapshot the replica has.
fn only_counts(before: &remora_protocol::Progress, report: &remora_protocol::Progress) -> bool {
    let reads_from = |report: &remora_protocol::Progress| report.relaying.map(|relaying| relaying.reads_from);
    let remora_protocol::Progress { slots_below, slots_held, bytes, relaying, .. } = report.clone();
    matches!(report.phase, Phase::Transfer | Phase::Load)
        && reads_from(before) == reads_from(report)
        && *report == remora_protocol::Progress { slots_below, slots_held, bytes, relaying, ..before.clone() }
}

/// The meaning of a conversation's error for the sync.
pub fn loss(error: Error) -> Loss {
    let is = |wanted| matches!(error.fault, Fault::Refused { code, .. } if code == wanted);
    let (stalled, history_gone) = (is(RefusalCode::Stalled), is(RefusalCode::HistoryGone));
    Loss { passes: error.fault.may_pass(), stalled, history_gone, failure: failure(error) }
}

/// The meaning of a failed attempt to connect to the source again. Another attempt may always succeed: the peer has not
/// proved that it holds the token, so any host on the way could have sent its refusal.
pub fn unreachable(error: Error) -> Loss {
    Loss { passes: true, ..loss(error) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_protocol::{Announce, Relaying};

    use super::*;

    fn offer() -> Offer {
        let table = TableOffer {
            generation: 1,
            first_offset: 100,
            slot_size: 1 << 20,
            slots: 16,
            retained: true,
            keys: Vec::new(),
            seal: Vec::new(),
            compressed: false,
        };
        Offer {
            generation: 1,
            replid: Some("a".repeat(40).parse().unwrap()),
            former: None,
            offset: 100,
            snapshot: table.clone(),
            journal: table,
            primary: Announce { host: String::new(), port: 6379, tls: false, source_sees_as: String::new() },
            server: String::new(),
            run_id: String::new(),
            process: 1,
            backlog_bytes: 0,
            write_rate: 0,
            upstream: None,
            warning: String::new(),
            obstacle: String::new(),
            terms: None,
        }
    }

    fn from() -> SocketAddr {
        "10.0.0.5:7379".parse().unwrap()
    }

    #[test]
    fn an_offer_with_an_offset_that_has_no_next_one_is_refused() {
        assert_eq!(check(&offer(), from()).unwrap().offset, 100);
        let changes: [fn(&mut Offer); 3] = [
            |offer| offer.offset = u64::MAX,
            |offer| offer.snapshot.first_offset = u64::MAX,
            |offer| offer.journal.first_offset = MAX_OFFSET + 1,
        ];
        for change in changes {
            let mut wrong = offer();
            change(&mut wrong);
            let refused = check(&wrong, from()).unwrap_err().to_string();
            assert!(refused.contains("10.0.0.5:7379") && refused.contains("replication offset"), "{refused}");
        }
    }

    #[test]
    fn an_offer_without_a_replid_or_with_an_impossible_shape_is_refused() {
        assert!(check(&Offer { replid: None, ..offer() }, from()).is_err());
        let mut wrong = offer();
        wrong.journal.slot_size = 3;
        assert!(check(&wrong, from()).is_err());
    }

    const REPORT: remora_protocol::Progress = remora_protocol::Progress {
        generation: 1,
        phase: Phase::Transfer,
        transport: None,
        transport_why: String::new(),
        no_fast_keys: String::new(),
        slots_below: 0,
        slots_held: 0,
        bytes: 0,
        applied_offset: 0,
        relaying: None,
    };

    /// How many of the reports that the driver makes in three seconds, one each 50 ms, are sent.
    fn sent(newest: &mut Newest, is_retained: bool, report: impl Fn(u64) -> remora_protocol::Progress) -> usize {
        let begin = newest.as_ref().map_or_else(Instant::now, |(_, sent)| *sent + Duration::from_millis(50));
        let is_sent = |turn: &u64| is_due(newest, report(*turn), is_retained, begin + Duration::from_millis(50 * turn));
        (0..60).filter(is_sent).count()
    }

    #[test]
    fn a_report_that_says_nothing_new_is_sent_twice_a_second() {
        let (mut newest, at) =
            (None, |applied_offset| remora_protocol::Progress { phase: Phase::Stay, applied_offset, ..REPORT });
        assert_eq!(sent(&mut newest, false, |_| at(7)), 6);
        assert_eq!(sent(&mut newest, false, |turn| at(8 + turn)), 60, "each says something new");
        assert_eq!(sent(&mut newest, true, |turn| at(99 + turn)), 60, "the offset is not a count of slots");
    }

    #[test]
    fn a_report_that_counts_slots_which_the_source_retains_is_sent_four_times_a_second() {
        let relaying = |held| Some(Relaying { held, ..Relaying::default() });
        let at =
            |count| remora_protocol::Progress { slots_held: count, bytes: count, relaying: relaying(count), ..REPORT };
        assert_eq!(sent(&mut None, true, at), 12);
        assert_eq!(sent(&mut None, false, at), 60, "the writer of a window waits for its readers");
        let loads = |count| remora_protocol::Progress { phase: Phase::Load, slots_below: count, ..REPORT };
        assert_eq!(sent(&mut None, true, loads), 12);
    }

    #[test]
    fn a_report_of_another_phase_or_upstream_is_sent_at_once() {
        let upstream = |reads_from| Some(Relaying { reads_from, ..Relaying::default() });
        let before = remora_protocol::Progress { relaying: upstream(Some(1)), ..REPORT };
        let news = [
            remora_protocol::Progress { phase: Phase::Load, ..before.clone() },
            remora_protocol::Progress { relaying: upstream(None), ..before.clone() },
            remora_protocol::Progress { relaying: None, ..before.clone() },
            remora_protocol::Progress { generation: 2, ..before.clone() },
            remora_protocol::Progress { transport: Some(1), ..before.clone() },
        ];
        for report in news {
            let now = Instant::now();
            let mut newest = Some((before.clone(), now));
            assert!(is_due(&mut newest, report.clone(), true, now), "{report:?}");
        }
    }
}
