//! The transports that export the tables' memory to replicas.

use std::num::NonZeroU64;
use std::sync::Arc;

use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{SendMode, TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, RegionId};

use super::machine::Session;
use super::tables::Tables;
use crate::args::{SendChoice, SourceArgs};
use crate::exit::Failure;
use crate::transports;

/// One exporter for each transport, used as one.
#[derive(Clone)]
pub(super) struct Exports {
    exporters: Vec<Arc<dyn Exporter>>,
}

impl Exports {
    /// Opens all transports that the arguments allow and this host has. `tcp` comes last.
    pub(super) async fn open(
        args: &SourceArgs,
        listen: std::net::SocketAddr,
        tables: &Tables,
        tcp: Arc<TcpExporter>,
    ) -> Result<Exports, Failure> {
        let mut exporters: Vec<Arc<dyn Exporter>> = Vec::new();
        if !args.no_shm {
            match ShmExporter::bind(ShmOptions::default()) {
                Ok(shm) => exporters.push(Arc::new(shm)),
                Err(error) => {
                    tracing::warn!(%error, "cannot offer shared memory; replicas on this host will use TCP")
                }
            }
        }
        let (rdma, memories) = (args.rdma.clone(), vec![tables.snapshot.0.clone(), tables.journal.0.clone()]);
        let rdma = tokio::task::spawn_blocking(move || transports::exporters::rdma(&rdma, listen, &memories)).await;
        exporters
            .extend(rdma.map_err(|error| Failure::local(format!("the search for RDMA devices failed: {error}")))??);
        exporters.push(tcp);
        Ok(Exports { exporters })
    }

    /// Exports `memory` over every transport.
    pub(super) fn export(&self, id: RegionId, memory: &Arc<Memory>) -> Result<(), Failure> {
        for exporter in &self.exporters {
            exporter
                .export(id, memory.clone())
                .map_err(|error| Failure::local(format!("cannot export a table over {}: {error}", exporter.kind())))?;
        }
        Ok(())
    }

    /// Exports `memory` over each transport that accepts it.
    ///
    /// # Errors
    /// No transport accepts it.
    pub(super) fn export_by_any(&self, id: RegionId, memory: &Arc<Memory>) -> Result<(), remora_fabric::Error> {
        let mut exported = Err(remora_fabric::Error::NotExported(id));
        for exporter in &self.exporters {
            match exporter.export(id, memory.clone()) {
                Ok(()) => exported = Ok(()),
                Err(error) => tracing::warn!(transport = %exporter.kind(), %error, "cannot export the probe region"),
            }
        }
        exported
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

    /// Grants a session read access to all exported regions.
    pub(super) fn grant(&self, session: Session, secret: [u8; 32]) {
        self.exporters.iter().for_each(|exporter| exporter.grant(session, secret));
    }

    /// Withdraws a session's read access and closes its lanes.
    pub(super) fn withdraw(&self, session: Session) {
        self.exporters.iter().for_each(|exporter| exporter.withdraw(session));
    }

    /// The keys of a region, one for each transport that exports it.
    pub(super) fn keys(&self, id: RegionId) -> Vec<Vec<u8>> {
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(id).ok());
        keys.map(|key| key.as_bytes().to_vec()).collect()
    }

    /// The number of bytes that all replicas together have read.
    pub(super) fn bytes_served(&self) -> u64 {
        self.exporters.iter().map(|exporter| exporter.bytes_served()).sum()
    }
}

/// The exporter for lanes over TCP. Its keys name `address` for readers to connect to.
pub(super) fn tcp_exporter(args: &SourceArgs, address: std::net::SocketAddr) -> Result<TcpExporter, Failure> {
    let send = match args.tcp_send {
        SendChoice::Copy => SendMode::Copy,
        SendChoice::File => SendMode::File,
    };
    let upload_rate = args.upload_limit.and_then(|limit| NonZeroU64::new(limit.get()));
    let congestion = args.tcp_congestion.clone();
    let options = TcpOptions { send, congestion, upload_rate, ..TcpOptions::default() };
    TcpExporter::new(options, Some(address)).map_err(|error| Failure::refused(error.to_string()))
}
