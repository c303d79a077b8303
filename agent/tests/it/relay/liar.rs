//! A replica that joins with the right token, claims to hold the whole snapshot, and lends a table that is valid in
//! itself, but all of its bytes are invented. If the source's table is sealed, it seals them with the same key, which it
//! has from its offer.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use remora_agent::conversation::{self, Connection, Endpoint, Options, Security, Token, derive};
use remora_fabric::tcp::{LANE_MAGIC, TcpConnector, TcpExporter, TcpOptions};
use remora_fabric::{Connector, Error, Exporter, Memory, Pages, RegionId, RegionKey, Regions, TransportKind};
use remora_lab::scratch;
use remora_protocol::{Join, Message, Offer, Phase, Progress, Relaying, Relays, TableOffer};
use remora_table::{Geometry, Identity, Kind, Origin, SealKey, SnapshotSealer, SnapshotWriter};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

/// A running liar. It ends when dropped.
pub(crate) struct Liar {
    readers: Arc<AtomicUsize>,
    _runtime: Runtime,
}

/// What the liar lends, and the number of its readers.
struct Lie {
    id: RegionId,
    offer: TableOffer,
    exporter: Arc<TcpExporter>,
    token: Arc<Token>,
    readers: Arc<AtomicUsize>,
    security: Security,
}

impl Liar {
    /// Joins the source, and returns when it has received the offer and lends its own table.
    pub(crate) fn start(source: SocketAddr, token: &Path, security: Security) -> Liar {
        Liar::start_with(source, token, security, None)
    }

    /// The same, where the offer's key leads readers to that address.
    pub(crate) fn start_with(source: SocketAddr, token: &Path, security: Security, trap: Option<SocketAddr>) -> Liar {
        let runtime = Runtime::new().unwrap();
        let (source, token) = (source.to_string(), Arc::new(Token::read_file(token).unwrap()));
        let readers = Arc::new(AtomicUsize::new(0));
        let counted = readers.clone();
        runtime.block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (connection, offer) = join(&source, &token, address, security.clone()).await;
            let mut lie = make(&offer, address, token, counted, security);
            if let Some(trap) = trap {
                lie.lead_to(trap);
            }
            tokio::spawn(listen(listener, Arc::new(lie)));
            boast(connection, offer.generation).await;
        });
        Liar { readers, _runtime: runtime }
    }

    /// How many connections have asked to read from it.
    pub(crate) fn readers(&self) -> usize {
        self.readers.load(Relaxed)
    }
}

impl Lie {
    /// Offers a key that names this address.
    fn lead_to(&mut self, address: SocketAddr) {
        let elsewhere = TcpExporter::new(TcpOptions::default(), Some(address)).unwrap();
        let memory = Geometry { slot_size: self.offer.slot_size, slots: self.offer.slots }.memory_len();
        elsewhere.export(self.id, Arc::new(Memory::create("trap", memory, Pages::Small).unwrap())).unwrap();
        self.offer.keys = vec![elsewhere.key(self.id).unwrap().as_bytes().to_vec()];
    }
}

async fn join(source: &str, token: &Token, address: SocketAddr, security: Security) -> (Connection, Offer) {
    let options = Options::secured(security);
    let mut connection = remora_agent::conversation::connect(source, token, &options).await.unwrap();
    let join = Join {
        name: "liar".into(),
        server: "Valkey 9.1".into(),
        resume: None,
        plan_only: false,
        relays: Some(Relays { serves_at: address.to_string(), zone: String::new() }),
    };
    connection.send(Message::Join(join)).await.unwrap();
    loop {
        if let Message::Offer(offer) = connection.receive().await.unwrap() {
            return (connection, offer);
        }
    }
}

/// A complete table with the source's identity and other bytes.
fn make(offer: &Offer, address: SocketAddr, token: Arc<Token>, readers: Arc<AtomicUsize>, security: Security) -> Lie {
    let TableOffer { generation, first_offset, slot_size, slots, seal, .. } = offer.snapshot.clone();
    let geometry = Geometry { slot_size, slots };
    let memory = || Arc::new(Memory::create("liar", geometry.memory_len(), Pages::Small).unwrap());
    let origin = Origin { generation, history: offer.replid.unwrap(), offset: first_offset };
    let identity = Identity { kind: Kind::Snapshot, origin };
    let plain = memory();
    let mut writer = SnapshotWriter::create(plain.clone(), geometry, identity.clone(), 0).unwrap();
    writer.append(&vec![0x5a; 16 << 20]).unwrap();
    let mut lent = plain.clone();
    assert_eq!(seal.is_empty(), !security.seals_tables(Ipv4Addr::LOCALHOST.into()));
    let key = (!seal.is_empty()).then(|| SealKey::from_bytes(&seal).unwrap());
    if key.is_some() || offer.snapshot.compressed {
        lent = memory();
        let sealer = match (&key, offer.snapshot.compressed) {
            (Some(key), false) => SnapshotSealer::create(plain, lent.clone(), geometry, identity, key),
            _ => SnapshotSealer::create_compressed(plain, lent.clone(), geometry, identity, key.as_ref()),
        };
        let mut sealer = sealer.unwrap();
        while sealer.pump().unwrap() {}
    }
    let exporter = Arc::new(TcpExporter::new(TcpOptions::default(), Some(address)).unwrap());
    let id = RegionId { generation, region: 99 };
    exporter.export(id, lent).unwrap();
    let keys = vec![exporter.key(id).unwrap().as_bytes().to_vec()];
    let (seal, compressed) = (Vec::new(), false);
    let offer = TableOffer { generation, first_offset, slot_size, slots, retained: true, keys, seal, compressed };
    Lie { id, offer, exporter, token, readers, security }
}

/// Claims more slots than any other replica, and keeps running.
async fn boast(mut connection: Connection, generation: u64) {
    let progress = Progress {
        generation,
        phase: Phase::Stay,
        transport: Some(3),
        transport_why: String::new(),
        no_fast_keys: String::new(),
        slots_below: u64::MAX,
        slots_held: 128,
        bytes: 16 << 20,
        applied_offset: 0,
        relaying: Some(Relaying { reads_from: None, oldest: 0, held: 128, is_full: false }),
    };
    connection.send(Message::Progress(progress.clone())).await.unwrap();
    // Repeated, because a silent replica is not assigned to readers.
    tokio::spawn(async move {
        let mut again = tokio::time::interval(Duration::from_millis(500));
        loop {
            tokio::select! {
                heard = connection.receive() => if heard.is_err() { return },
                _ = again.tick() => if connection.send(Message::Progress(progress.clone())).await.is_err() { return },
            }
        }
    });
}

async fn listen(listener: TcpListener, lie: Arc<Lie>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(greet(stream, lie.clone()));
    }
}

async fn greet(stream: TcpStream, lie: Arc<Lie>) {
    let mut word = [0; LANE_MAGIC.len()];
    while stream.peek(&mut word).await.unwrap() < word.len() {}
    if word == LANE_MAGIC {
        let stream = stream.into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        return lie.exporter.adopt(stream).unwrap();
    }
    let conversations = Endpoint::new(&lie.token, &Options::secured(lie.security.clone())).unwrap();
    let is_tls = lie.security.seals_tables(Ipv4Addr::LOCALHOST.into());
    let mut connection = conversations.accept(stream, is_tls).await.unwrap();
    while let Ok(message) = connection.receive().await {
        if let Message::ReadPeer { generation, .. } = message {
            assert_eq!(generation, lie.id.generation);
            lie.readers.fetch_add(1, Relaxed);
            let secret = derive(&connection.session_key(), b"remora data lanes");
            lie.exporter.grant(connection.session(), secret, Regions::only([lie.id]));
            let offer = Message::PeerOffer { generation, table: lie.offer.clone(), rate: 0 };
            connection.send(offer).await.unwrap();
        }
    }
}

// A process without the token at the port that a relay listens on.

/// Asserts that neither a control connection with another token nor a data lane without a grant is accepted.
pub(crate) fn has_no_success(door: SocketAddr, generation: u64) {
    let folder = scratch::folder("stranger").unwrap();
    let token = Token::read_file(scratch::token_file(folder.path()).unwrap()).unwrap();
    let connected = Runtime::new()
        .unwrap()
        .block_on(async { conversation::connect(&door.to_string(), &token, &Options::default()).await.map(drop) });
    let refused = connected.unwrap_err().to_string();
    assert!(refused.contains("token"), "{refused}");

    // The key of a region is not secret. Any region number: the relay's own, and those that it does not have.
    let connector = TcpConnector::new(TcpOptions::default(), None).unwrap();
    for region in 0..4 {
        let mut address = vec![1, 4];
        address.extend(door.port().to_le_bytes());
        let SocketAddr::V4(host) = door else { panic!("{door} is not an IPv4 address") };
        address.extend(host.ip().octets());
        address.resize(20, 0);
        let id = RegionId { generation, region };
        let key = RegionKey::new(TransportKind::Tcp, id, 4096, &address).unwrap();
        let sink = Arc::new(Memory::create("stranger", 4096, Pages::Small).unwrap());
        for session in 0..3 {
            let refused = connector.connect(&key, session, &[0x5e; 32], sink.clone()).err().unwrap();
            assert!(matches!(refused, Error::Refused(_)), "{refused}");
        }
    }
}
