//! Exports: the regions of copies, as the writers of the volumes read them without asking.
//!
//! A writer that asks gets a grant for its connection, with the keys of its copy's region. The secret of the grant is
//! derived from the key of the connection's session, and so known to the two ends only. The grant is withdrawn when the
//! connection is over, or when the server promises to obey another writer: a reader over a network is cut off then,
//! and one on this host reads so in the region's line.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, RegionId, Regions};
use remora_messenger::{Address, Connection};

use super::ServerOptions;
use crate::link;

/// See the module's text.
pub(super) struct Exports {
    exporters: Vec<Box<dyn Exporter>>,
    /// Regions that were exported. No name is used twice.
    regions: AtomicU64,
}

impl Exports {
    /// Opens the transports. One that this host does not have is left out: clients ask instead.
    pub(super) fn open(address: &Address, options: &ServerOptions) -> Exports {
        let mut exporters: Vec<Box<dyn Exporter>> = Vec::new();
        if options.shm {
            match ShmExporter::bind(ShmOptions::default()) {
                Ok(shm) => exporters.push(Box::new(shm)),
                Err(error) => tracing::warn!(%error, "no shared memory for the volumes of this host"),
            }
        }
        if let (Some(port), Some(address)) = (options.lanes, link::socket_address(address)) {
            match tcp(SocketAddr::new(address.ip(), port)) {
                Ok(tcp) => exporters.push(Box::new(tcp)),
                Err(error) => tracing::warn!(%error, port, "no port for one-sided reads: clients ask instead"),
            }
        }
        Exports { exporters, regions: AtomicU64::new(0) }
    }

    /// Makes a region readable for those that have a grant. `None`: no transport can.
    pub(super) fn export(&self, memory: &Arc<Memory>) -> Option<RegionId> {
        let id = RegionId { generation: self.regions.fetch_add(1, Ordering::Relaxed), region: 0 };
        let mut is_exported = false;
        for exporter in &self.exporters {
            match exporter.export(id, Arc::clone(memory)) {
                Ok(()) => is_exported = true,
                Err(error) => {
                    tracing::warn!(transport = %exporter.kind(), %error, "a copy cannot be read over this transport");
                }
            }
        }
        is_exported.then_some(id)
    }

    /// Ends what [`Exports::export`] began.
    pub(super) fn revoke(&self, region: RegionId) {
        self.exporters.iter().for_each(|exporter| exporter.revoke(region));
    }

    /// Lets the client of a connection read. Returns the keys of the region, one for each transport.
    pub(super) fn grant(&self, connection: &Connection, region: RegionId) -> Vec<Vec<u8>> {
        let Some(secret) = link::region_secret(connection) else { return Vec::new() };
        for exporter in &self.exporters {
            exporter.grant(connection.id(), secret, Regions::only([region]));
        }
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(region).ok());
        keys.map(|key| key.as_bytes().to_vec()).collect()
    }

    /// The client of a connection must not read any more. It may never have had a grant.
    pub(super) fn withdraw(&self, connection: &Connection) {
        self.exporters.iter().for_each(|exporter| exporter.withdraw(connection.id()));
    }
}

fn tcp(at: SocketAddr) -> Result<TcpExporter, String> {
    let exporter = TcpExporter::new(TcpOptions::default(), None).map_err(|error| error.to_string())?;
    exporter.listen(at).map_err(|error| error.to_string())?;
    Ok(exporter)
}

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.exporters.iter().map(|exporter| exporter.kind())).finish()
    }
}
