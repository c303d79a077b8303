//! The transports that export the tables' memory to replicas.

use std::net::IpAddr;
use std::num::NonZeroU64;
use std::sync::Arc;

use remora_fabric::shm::{MAX_CONNECTIONS, ShmExporter, ShmOptions};
use remora_fabric::tcp::{MAX_LANES_PER_SESSION, SendMode, TcpExporter, TcpOptions, Upload, UploadRate};
use remora_fabric::{Exporter, Memory, RegionId, Regions, TransportKind};

use super::machine::Session;
use super::tables::{Exported, JOURNAL_REGION, SNAPSHOT_REGION, Tables};
use crate::args::{RdmaOffer, SendChoice, SourceArgs, UploadLimit};
use crate::conversation::Security;
use crate::exit::Failure;
use crate::transports;

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
        args: &SourceArgs,
        security: &Security,
        listen: std::net::SocketAddr,
        tables: &Tables,
        tcp: Arc<TcpExporter>,
    ) -> Result<Exports, Failure> {
        let mut exporters: Vec<Arc<dyn Exporter>> = Vec::new();
        if !args.no_shm {
            match ShmExporter::bind(shm_options(args)) {
                Ok(shm) => exporters.push(Arc::new(shm)),
                Err(error) => {
                    tracing::warn!(%error, "cannot offer shared memory; replicas on this host will use TCP")
                }
            }
        }
        let memories = [SNAPSHOT_REGION, JOURNAL_REGION].map(|region| tables.memory(region).remote);
        let (rdma, replicas) = (allowed_rdma(&args.rdma, security, listen.ip())?, args.max_replicas as usize);
        let open = move || transports::exporters::rdma(&rdma, listen, replicas, &memories);
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
fn shm_options(args: &SourceArgs) -> ShmOptions {
    let defaults = ShmOptions::default();
    let connections = args.max_replicas as usize * 2 * REGIONS_PER_REPLICA;
    ShmOptions { connections: connections.clamp(defaults.connections, MAX_CONNECTIONS), ..defaults }
}

/// The regions that a replica reads: the snapshot and the journal.
const REGIONS_PER_REPLICA: usize = 2;

/// The exporter for lanes over TCP. Its keys name `address` for readers to connect to.
pub(super) fn tcp_exporter(args: &SourceArgs, address: std::net::SocketAddr) -> Result<TcpExporter, Failure> {
    let send = match args.tcp_send {
        SendChoice::Copy => SendMode::Copy,
        SendChoice::File => SendMode::File,
    };
    let upload = upload_rate(args.upload_limit);
    let congestion = args.tcp_congestion.clone();
    let defaults = TcpOptions::default();
    // Without this a source would admit replicas that no transport serves, and a window would wait for them.
    let served_lanes = defaults.served_lanes.max(args.max_replicas as usize * MAX_LANES_PER_SESSION);
    let options = TcpOptions { send, congestion, upload, served_lanes, ..defaults };
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
    if wanted.end.is_named() && !wanted.no_rdma {
        let text = "RDMA would not be encrypted: give --security token, or --security none --plaintext-network if this is \
            meant, or omit --rdma-address and --rdma-device";
        return Err(Failure::refused(text));
    }
    Ok(RdmaOffer { no_rdma: true, ..wanted.clone() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;
    use std::sync::Mutex;

    use clap::Parser;
    use remora_fabric::tcp::TcpConnector;
    use remora_fabric::{Error, Pages, RegionKey, Secret};

    use super::*;
    use crate::args::{Cli, Command};

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
        let line = format!("remora source --server redis://127.0.0.1:1 --token-file t --max-replicas {REPLICAS}");
        let Command::Source(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!("{line}") };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let exporter = Arc::new(tcp_exporter(&args, listener.local_addr().unwrap()).unwrap());
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
}
