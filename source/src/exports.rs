//! The transports that export the tables' memory to replicas, who may read what, and the links to those who read.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Instant;

use remora_fabric::shm::{MAX_CONNECTIONS, ShmExporter, ShmOptions};
use remora_fabric::tcp::{MAX_LANES_PER_SESSION, SendMode, TcpExporter, TcpOptions, Upload, UploadRate};
use remora_fabric::{Error, Exporter, Memory, Pages, RegionId, Regions, TransportKind};
use remora_protocol::{LossCause, Message, RefusalCode};

use super::compression::{Link, Measure, Said, said_by_interface};
use super::machine::Session;
use super::tables::{Exported, JOURNAL_REGION, SNAPSHOT_REGION, Tables};
use super::topology::Assignment;
use super::{Incoming, Source};
use crate::options::{Compress, LaneOptions, Options};
use remora_base::units::Size;
use remora_conversation::transports;
use remora_conversation::transports::{LANES_LABEL, RdmaOffer, UploadLimit};
use remora_conversation::{Connection, Protection, Receiver, Role, Security, Sender, derive};
use remora_process::events;
use remora_process::exit::Failure;

/// One exporter for each transport, used as one.
#[derive(Clone)]
pub(super) struct Exports {
    exporters: Vec<Arc<dyn Exporter>>,
    /// The last of them.
    tcp: Arc<TcpExporter>,
}

impl Exports {
    /// Opens all transports that the arguments allow and this host has. `tcp` comes last.
    pub(super) async fn open(
        options: &Options,
        security: &Security,
        listen: std::net::SocketAddr,
        tables: &Tables,
        tcp: Arc<TcpExporter>,
    ) -> Result<Exports, Failure> {
        let mut exporters: Vec<Arc<dyn Exporter>> = Vec::new();
        if options.shared_memory {
            match ShmExporter::bind(shm_options(options.max_replicas)) {
                Ok(shm) => exporters.push(Arc::new(shm)),
                Err(error) => {
                    tracing::warn!(%error, "cannot offer shared memory; replicas on this host will use TCP")
                }
            }
        }
        let memories = [SNAPSHOT_REGION, JOURNAL_REGION].map(|region| tables.memory(region).remote);
        let (rdma, replicas) = (allowed_rdma(&options.rdma, security, listen.ip())?, options.max_replicas as usize);
        let open = move || transports::rdma(&rdma, listen, replicas, &memories);
        let rdma = tokio::task::spawn_blocking(open).await;
        exporters
            .extend(rdma.map_err(|error| Failure::local(format!("the search for RDMA devices failed: {error}")))??);
        exporters.push(tcp.clone());
        Ok(Exports { exporters, tcp })
    }

    /// Exports `memory` over each transport that accepts it. One transport may fail alone, for example RDMA at the
    /// limit of locked memory. Replicas then get no key of it, and read over another one.
    ///
    /// # Errors
    /// No transport accepts it.
    pub(super) fn export(&self, id: RegionId, memory: &Exported) -> Result<(), remora_fabric::Error> {
        let mut exported = Err(remora_fabric::Error::NotExported(id));
        for exporter in &self.exporters {
            match exporter.export(id, memory_for(&**exporter, memory).clone()) {
                Ok(()) => exported = Ok(()),
                Err(error) => {
                    let transport = exporter.kind();
                    tracing::warn!(%transport, region = %id, %error, "cannot export a region over this transport; replicas use another one");
                }
            }
        }
        exported
    }

    /// Readies new memory with each transport, so that exporting it is quick. To register it with an RDMA device takes
    /// as long as to touch all of it: do not call it in the source's loop.
    pub(super) fn prepare(&self, memory: &Exported) {
        for exporter in &self.exporters {
            if let Err(error) = exporter.prepare(memory_for(&**exporter, memory)) {
                tracing::warn!(transport = %exporter.kind(), %error, "cannot prepare new memory for this transport");
            }
        }
    }

    /// Lets go of memory that will not be exported again, in the background: to release the pages takes time.
    pub(super) fn forget_in_background(&self, memory: Exported) {
        let exports = self.clone();
        tokio::task::spawn_blocking(move || {
            exports.exporters.iter().for_each(|exporter| exporter.forget(memory_for(&**exporter, &memory)));
        });
    }

    /// Revokes read access to this region.
    pub(super) fn revoke(&self, id: RegionId) {
        self.exporters.iter().for_each(|exporter| exporter.revoke(id));
    }

    /// Revokes read access in the background: to release the pages takes time.
    pub(super) fn revoke_in_background(&self, id: RegionId) {
        let exports = self.clone();
        tokio::task::spawn_blocking(move || exports.revoke(id));
    }

    /// Grants a session read access to these regions, in place of those that it had.
    pub(super) fn grant(&self, session: Session, secret: [u8; 32], regions: &Regions) {
        self.exporters.iter().for_each(|exporter| exporter.grant(session, secret, regions.clone()));
    }

    /// Withdraws a session's read access and closes its lanes.
    pub(super) fn withdraw(&self, session: Session) {
        self.exporters.iter().for_each(|exporter| exporter.withdraw(session));
    }

    /// Whether readers are offered this transport.
    pub(super) fn offer(&self, kind: TransportKind) -> bool {
        self.exporters.iter().any(|exporter| exporter.kind() == kind)
    }

    /// The keys of a region, one for each transport that exports it.
    pub(super) fn keys(&self, id: RegionId) -> Vec<Vec<u8>> {
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(id).ok());
        keys.map(|key| key.as_bytes().to_vec()).collect()
    }

    /// What the background transfer over TCP does at present; `None` with another `--upload-limit`.
    pub(super) fn upload(&self) -> Option<Upload> {
        self.tcp.upload()
    }

    /// The number of bytes that all replicas together have read.
    pub(super) fn bytes_served(&self) -> u64 {
        self.exporters.iter().map(|exporter| exporter.bytes_served()).sum()
    }
}

/// The memory of a region that this transport exports.
fn memory_for<'m>(exporter: &dyn Exporter, memory: &'m Exported) -> &'m Arc<Memory> {
    if exporter.kind() == TransportKind::Shm { &memory.local } else { &memory.remote }
}

/// Each replica of this host has a connection to each region. It may reconnect before its old ones are found closed.
fn shm_options(max_replicas: u32) -> ShmOptions {
    let defaults = ShmOptions::default();
    let connections = max_replicas as usize * 2 * REGIONS_PER_REPLICA;
    ShmOptions { connections: connections.clamp(defaults.connections, MAX_CONNECTIONS), ..defaults }
}

/// The regions that a replica reads: the snapshot and the journal.
const REGIONS_PER_REPLICA: usize = 2;

/// The exporter for lanes over TCP. Its keys name `address` for readers to connect to.
pub(super) fn tcp_exporter(
    lanes: &LaneOptions,
    max_replicas: u32,
    address: std::net::SocketAddr,
) -> Result<TcpExporter, Failure> {
    let congestion = lanes.congestion.clone();
    let upload = upload_rate(lanes.upload_limit);
    let defaults = TcpOptions::default();
    // Without this a source would admit replicas that no transport serves, and a window would wait for them.
    let served_lanes = defaults.served_lanes.max(max_replicas as usize * MAX_LANES_PER_SESSION);
    let options = TcpOptions { send: SendMode::File, congestion, upload, served_lanes, ..defaults };
    TcpExporter::new(options, Some(address)).map_err(|error| Failure::refused(error.to_string()))
}

fn upload_rate(limit: UploadLimit) -> UploadRate {
    match limit {
        UploadLimit::Auto => UploadRate::Background,
        UploadLimit::Unlimited => UploadRate::Unlimited,
        UploadLimit::Rate(rate) => NonZeroU64::new(rate.get()).map_or(UploadRate::Unlimited, UploadRate::Fixed),
    }
}

/// The RDMA that the source may offer: none, unless its tables are sealed, or plaintext is meant.
fn allowed_rdma(wanted: &RdmaOffer, security: &Security, listen: IpAddr) -> Result<RdmaOffer, Failure> {
    if security.seals_tables(listen) || security.permits_plain_network() {
        return Ok(wanted.clone());
    }
    if wanted.end.is_named() && !wanted.is_off {
        let text = "RDMA would not be encrypted: give --security token, or --security none --plaintext-network if this is \
            meant, or omit --rdma-address and --rdma-device";
        return Err(Failure::refused(text));
    }
    Ok(RdmaOffer { is_off: true, ..wanted.clone() })
}

// Authenticated connections, what each may read, and how replicas learn from which other one they read.

/// One authenticated connection.
pub(super) struct Peer {
    pub(super) sender: Sender,
    pub(super) address: std::net::SocketAddr,
    /// Whether it is on this host, as far as its address says.
    pub(super) is_local: bool,
    pub(super) key: [u8; 32],
    /// What it may ask for.
    pub(super) role: Role,
    /// What protects the conversation.
    pub(super) protection: Protection,
    pub(super) done: bool,
    /// Why the peer uses no better transport, as it reported.
    pub(super) transport_why: String,
    /// Why its server does not load in the fast way.
    pub(super) no_fast_keys: String,
    /// Where the peer serves slots to other replicas, as they reach it. Empty: it only reads from others. `None`: it
    /// does neither.
    pub(super) relays_at: Option<String>,
    /// Where it serves readers itself, if it is a standby.
    pub(super) standby_at: Option<String>,
    /// What it was offered, and may read.
    pub(super) readable: Readable,
}

/// The regions that a session may read: those that it was offered last.
#[derive(Default)]
pub(super) struct Readable {
    /// The snapshot and the journal of an offer.
    pub(super) tables: Option<[RegionId; 2]>,
    /// Memory to measure with.
    pub(super) probe: Option<RegionId>,
}

impl Readable {
    pub(super) fn regions(&self) -> Regions {
        Regions::only(self.tables.into_iter().flatten().chain(self.probe))
    }
}

impl Peer {
    /// The peer at the other end of a connection, and what it says.
    pub(super) fn of(connection: Connection) -> (Peer, Receiver) {
        let (address, key) = (connection.peer_addr(), connection.session_key());
        let (role, protection) = (connection.role(), connection.protection());
        let is_local = address.ip().is_loopback() || address.ip() == connection.local_addr().ip();
        let (sender, receiver) = connection.split();
        let peer = Peer {
            sender,
            address,
            is_local,
            key,
            role,
            protection,
            done: false,
            transport_why: String::new(),
            no_fast_keys: String::new(),
            relays_at: None,
            standby_at: None,
            readable: Readable::default(),
        };
        (peer, receiver)
    }

    /// Changes what it may read. Call it before the message that offers the regions.
    pub(super) fn grant(&mut self, session: Session, exports: &Exports, change: impl FnOnce(&mut Readable)) {
        change(&mut self.readable);
        exports.grant(session, derive(&self.key, LANES_LABEL), &self.readable.regions());
    }

    /// What protects the data that it reads over this transport, or its conversation as long as it reads nothing.
    pub(super) fn data_protection(&self, transport: Option<TransportKind>, is_sealed: bool) -> Protection {
        transport.map_or(self.protection, |kind| self.protection.of_data(kind, is_sealed, self.address.ip()))
    }
}

impl Source {
    /// Tells replicas the upstreams that the topology has assigned to them.
    pub(super) fn assign(&mut self, assignments: &[Assignment]) {
        let Some(generation) = self.machine.status().generation() else { return };
        for &Assignment { reader, from } in assignments {
            let upstream = from.and_then(|from| self.upstream(from));
            let name = upstream.as_ref().map_or("the source", |upstream| upstream.name.as_str());
            tracing::info!(
                event = events::UPSTREAM_ASSIGNED,
                reader,
                from = name,
                "replica assigned a different upstream"
            );
            self.send(reader, Message::ReadFrom { generation, upstream });
        }
    }

    pub(super) fn peer_lost(&mut self, reader: Session, generation: u64, peer: Session, cause: LossCause, text: &str) {
        if self.machine.status().offered(reader) != Some(generation) {
            return;
        }
        let was_banned = self.topology.accusations.is_banned(peer);
        let moved = self.topology.lost(reader, peer, cause);
        let name = |session| self.machine.status().replica(session).map_or("gone", |replica| replica.name.as_str());
        match cause {
            LossCause::Lied if self.topology.accusations.is_banned(peer) && !was_banned => {
                tracing::warn!(peer = name(peer), reader = name(reader), %text, "a second replica reports that this one lent slots that differ from the source's; no other replica will read from it");
            }
            LossCause::Lied => {
                tracing::warn!(peer = name(peer), reader = name(reader), %text, "a replica reports that another one lent slots that differ from the source's; it will not read from it again");
            }
            _ => tracing::info!(peer = name(peer), reader = name(reader), %text, "replica lost its upstream"),
        }
        self.assign(&moved);
    }
}

// The probe region: scratch memory that the source exports to peers that measure the transports (`remora probe`), with
// or without a snapshot.
//
// ```text
//   Absent ── a request ──▶ Creating (a thread of its own) ──▶ Exported ── the last session has ended ──▶ Absent
// ```
//
// The region is memory beyond `--memory`: [`REGION_BYTES`], shared by all sessions that measure at a time, and none
// while no session does. Read access to it is granted with its offer, per session, as for tables. A session that
// measures gets no access to these.

/// The state of the region, and the sessions that use it.
#[derive(Default)]
pub(super) struct ProbeRegion {
    state: State,
    sessions: HashSet<Session>,
    /// The generation of the last region. Each region has its own, so that one that is being revoked is never taken for
    /// the next.
    generation: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Absent,
    Creating,
    Exported(RegionId),
}

/// What the source has to do after a request.
pub(super) enum Request {
    /// Create the region with this id.
    Create(RegionId),
    /// Wait: the region is being created.
    Wait,
    /// Offer the region.
    Offer(RegionId),
}

impl ProbeRegion {
    /// A session requests the region.
    pub(super) fn requested(&mut self, session: Session) -> Request {
        self.sessions.insert(session);
        match self.state {
            State::Creating => Request::Wait,
            State::Exported(id) => Request::Offer(id),
            State::Absent => {
                self.state = State::Creating;
                self.generation += 1;
                Request::Create(RegionId { generation: self.generation, region: PROBE_REGION })
            }
        }
    }

    /// The region was created, or could not be (`id` is `None`). Returns the sessions that wait for it. `None` if all
    /// of them have ended: the caller revokes the region at once.
    pub(super) fn created(&mut self, id: Option<RegionId>) -> Option<Vec<Session>> {
        self.state = id.map_or(State::Absent, State::Exported);
        if self.sessions.is_empty() {
            self.state = State::Absent;
            return None;
        }
        let waiting = self.sessions.iter().copied().collect();
        if id.is_none() {
            self.sessions.clear();
        }
        Some(waiting)
    }

    /// A session has ended. Returns the region to revoke if it was the last that used it.
    pub(super) fn left(&mut self, session: Session) -> Option<RegionId> {
        let was_here = self.sessions.remove(&session);
        match self.state {
            State::Exported(id) if was_here && self.sessions.is_empty() => {
                self.state = State::Absent;
                Some(id)
            }
            _ => None,
        }
    }
}

impl Source {
    /// A session requests memory to measure with.
    pub(super) fn probe_requested(&mut self, session: Session) {
        match self.probe_region.requested(session) {
            Request::Create(id) => {
                let (exports, incoming) = (self.exports.clone(), self.incoming.clone());
                tokio::task::spawn_blocking(move || {
                    let exported = create(id, &exports);
                    // Fails only while the source stops.
                    let _ = incoming.blocking_send(Incoming::ProbeRegionReady { id, exported });
                });
            }
            Request::Wait => {}
            Request::Offer(id) => self.offer_probe_region(session, id),
        }
    }

    /// The region is exported, or could not be.
    pub(super) fn probe_region_ready(&mut self, id: RegionId, exported: Result<(), Error>) {
        let waiting = self.probe_region.created(exported.is_ok().then_some(id));
        match (waiting, exported) {
            (None, _) => self.exports.revoke_in_background(id),
            (Some(waiting), Ok(())) => waiting.into_iter().for_each(|session| self.offer_probe_region(session, id)),
            (Some(waiting), Err(error)) => {
                let text = format!("the source cannot provide memory to measure with: {error}");
                let refusal = Message::Refused { code: RefusalCode::Busy, text };
                waiting.into_iter().for_each(|session| self.send(session, refusal.clone()));
            }
        }
    }

    fn offer_probe_region(&mut self, session: Session, id: RegionId) {
        let Some(peer) = self.sessions.get_mut(&session) else { return };
        peer.grant(session, &self.exports, |readable| readable.probe = Some(id));
        self.send(session, Message::ProbeOffer { keys: self.exports.keys(id) });
    }

    /// A session has ended that may have measured.
    pub(super) fn probe_left(&mut self, session: Session) {
        if let Some(id) = self.probe_region.left(session) {
            self.exports.revoke_in_background(id);
        }
    }
}

/// Creates the region and exports it over every transport that accepts it. Blocks: it touches the pages, and an RDMA
/// device registers them.
///
/// # Errors
/// There is not enough memory, or no transport accepts the region.
fn create(id: RegionId, exports: &Exports) -> Result<(), Error> {
    let memory = Arc::new(Memory::create("remora-probe", REGION_BYTES, Pages::Small)?);
    memory.prefault(0..REGION_BYTES)?;
    // Pages with different content, in case a layer below merges or compresses equal ones.
    for (page, offset) in (0..REGION_BYTES).step_by(PAGE_BYTES).enumerate() {
        memory.fill(offset..offset + PAGE_BYTES as u64, (page % 251) as u8)?;
    }
    exports.export(id, &Exported::plain(&memory))
}

/// The region's number, beside the two of the tables.
const PROBE_REGION: u32 = 2;

/// Bytes of the region: sixteen of the largest reads that are measured. That is more than a processor's caches hold, so
/// that reads are not served from there.
const REGION_BYTES: u64 = 64 << 20;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

// What the source's loop observes of the links to the replicas, for the decision how slots are compressed.

/// What was observed.
#[derive(Debug, Default)]
pub(super) struct Links {
    measure: Measure,
    /// The last rate that was measured.
    measured: Option<u64>,
    /// What the interface on the way to each replica says.
    said: BTreeMap<Session, Option<Said>>,
}

impl Links {
    /// A snapshot begins, after that many bytes were served in all.
    pub(super) fn begin(&mut self, served: u64) {
        self.measure.begin(served);
    }
}

/// Looks at the replicas that read from the source, and shows the threads that compress what the link is like.
pub(super) fn look(source: &mut Source) {
    if source.tables.compress() != Compress::Auto {
        return;
    }
    let direct = source.machine.status().replicas.iter().filter_map(|(session, replica)| {
        let peer = source.sessions.get(session).filter(|peer| !peer.is_local)?;
        let is_by_tcp = replica.transport().is_none_or(|kind| kind == TransportKind::Tcp);
        let reads_here = !replica.is_loaded() && source.topology.reads_from(*session).is_none();
        (is_by_tcp && reads_here).then_some((*session, peer.address.ip()))
    });
    let direct: BTreeMap<Session, IpAddr> = direct.collect();
    let links = &mut source.links;
    links.said.retain(|session, _| direct.contains_key(session));
    for (session, address) in &direct {
        links.said.entry(*session).or_insert_with(|| said_by_interface(*address));
    }
    let stored = source.gauge.stored_bytes();
    if let Some(rate) = links.measure.look(Instant::now(), source.exports.bytes_served(), stored, direct.len()) {
        links.measured = Some(rate);
    }
    let limit =
        source.options.lanes.upload_limit.rate().map(|limit| Said { rate: limit.get(), by: "--upload-limit".into() });
    let said = limit.into_iter().chain(links.said.values().flatten().cloned()).min_by_key(|said| said.rate);
    let joined = source.machine.status().replicas.len();
    source.gauge.show_link(Link { joined, readers: direct.len(), said, measured: links.measured });
}

/// How slots are compressed for replicas on other hosts, in words.
pub(super) fn compression(source: &Source) -> String {
    let stored = source.gauge.compression();
    match (source.tables.compress(), source.options.tables.compress) {
        (Compress::Off, Compress::Auto) => {
            let memory = Size::bytes(source.tables.ring());
            format!(
                "off: the tables are not encrypted, and compressed slots would need {memory} more; --compress lz4 or \
                     zstd compresses them"
            )
        }
        (Compress::Off, _) => "off: --compress off".into(),
        _ => stored,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;
    use std::sync::Mutex;

    use remora_fabric::tcp::TcpConnector;
    use remora_fabric::{Error, Pages, RegionKey, Secret};

    use super::*;

    /// A transport that refuses every region, as RDMA does at the limit of locked memory.
    #[derive(Default)]
    struct Refusing {
        calls: Mutex<Vec<&'static str>>,
    }

    impl Refusing {
        fn called(&self, name: &'static str) {
            self.calls.lock().unwrap().push(name);
        }
    }

    impl Exporter for Refusing {
        fn kind(&self) -> TransportKind {
            TransportKind::Verbs
        }

        fn export(&self, _: RegionId, _: Arc<Memory>) -> Result<(), Error> {
            self.called("export");
            Err(Error::Misuse("refused"))
        }

        fn prepare(&self, _: &Arc<Memory>) -> Result<(), Error> {
            self.called("prepare");
            Err(Error::Misuse("refused"))
        }

        fn forget(&self, _: &Arc<Memory>) {
            self.called("forget");
        }

        fn revoke(&self, _: RegionId) {}

        fn grant(&self, _: u64, _: Secret, _: Regions) {}

        fn withdraw(&self, _: u64) {}

        fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
            Err(Error::NotExported(id))
        }

        fn bytes_served(&self) -> u64 {
            0
        }
    }

    const ID: RegionId = RegionId { generation: 1, region: 0 };

    /// Replicas that the source admits in the test below. With the most lanes that a replica can have, they need more
    /// lanes than an exporter serves by default.
    const REPLICAS: usize = 40;

    /// The most lanes that a replica can have for each region (`--lanes`).
    const LANES: u8 = 4;

    const SECRET: Secret = [7; 32];

    #[test]
    fn as_many_replicas_as_are_admitted_can_read_with_the_most_lanes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let exporter = tcp_exporter(&LaneOptions::default(), REPLICAS as u32, listener.local_addr().unwrap());
        let exporter = Arc::new(exporter.unwrap());
        let lanes = REPLICAS * REGIONS_PER_REPLICA * usize::from(LANES);
        assert!(lanes > TcpOptions::default().served_lanes, "{lanes} lanes are served anyway");
        for region in 0..REGIONS_PER_REPLICA as u32 {
            let memory = Memory::create("test", 4096, Pages::Small).unwrap();
            exporter.export(RegionId { region, ..ID }, Arc::new(memory)).unwrap();
        }
        let connector = TcpConnector::new(TcpOptions { lanes: LANES, ..TcpOptions::default() }, None).unwrap();
        let sink = Arc::new(Memory::create("sink", 4096, Pages::Small).unwrap());
        let adopting = exporter.clone();
        // It ends with its last connection, or with the tests if one is refused.
        std::thread::spawn(move || {
            listener.incoming().take(lanes).for_each(|stream| adopting.adopt(stream.unwrap()).unwrap());
        });
        let mut peers = Vec::new();
        for session in 1..=REPLICAS as u64 {
            exporter.grant(session, SECRET, Regions::All);
            for region in 0..REGIONS_PER_REPLICA as u32 {
                let key = exporter.key(RegionId { region, ..ID }).unwrap();
                peers.push(connector.open(&key, session, &SECRET, sink.clone()).unwrap());
            }
        }
        assert_eq!(exporter.lanes(), lanes);
    }

    #[tokio::test]
    async fn a_transport_that_fails_alone_leaves_the_others() {
        let memory = Arc::new(Memory::create("test", 4096, Pages::Small).unwrap());
        let address = "127.0.0.1:1".parse().unwrap();
        let refusing = Arc::new(Refusing::default());
        let tcp = Arc::new(TcpExporter::new(TcpOptions::default(), Some(address)).unwrap());
        let exports = Exports { exporters: vec![refusing.clone(), tcp.clone()], tcp };
        let memory = Exported::plain(&memory);
        exports.prepare(&memory);
        exports.export(ID, &memory).unwrap();
        assert_eq!(exports.keys(ID).len(), 1, "the key of TCP");
        exports.forget_in_background(memory.clone());
        while refusing.calls.lock().unwrap().len() < 3 {
            tokio::task::yield_now().await;
        }
        assert_eq!(*refusing.calls.lock().unwrap(), ["prepare", "export", "forget"]);

        let none = Exports { exporters: vec![refusing], tcp: exports.tcp.clone() };
        assert!(none.export(ID, &memory).is_err(), "no replica could read it");
    }

    #[test]
    fn it_is_created_once_for_all_and_revoked_with_the_last() {
        let mut region = ProbeRegion::default();
        let Request::Create(id) = region.requested(1) else { panic!("the region existed") };
        assert!(matches!(region.requested(2), Request::Wait));
        let mut waiting = region.created(Some(id)).unwrap();
        waiting.sort_unstable();
        assert_eq!(waiting, [1, 2]);
        assert!(matches!(region.requested(3), Request::Offer(again) if again == id));
        assert_eq!((region.left(1), region.left(3), region.left(9), region.left(2)), (None, None, None, Some(id)));
        let Request::Create(next) = region.requested(4) else { panic!("the region was not revoked") };
        assert!(next.generation > id.generation);
    }

    #[test]
    fn a_region_that_no_session_waits_for_is_revoked_at_once() {
        let mut region = ProbeRegion::default();
        let Request::Create(id) = region.requested(1) else { panic!("the region existed") };
        assert_eq!(region.left(1), None, "the region does not exist yet");
        assert_eq!(region.created(Some(id)), None);
        assert!(matches!(region.requested(1), Request::Create(_)));
        assert_eq!(region.created(None), Some(vec![1]), "it could not be created: those who wait are refused");
        assert!(matches!(region.requested(2), Request::Create(_)));
    }
}
