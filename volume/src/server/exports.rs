//! Exports: the regions of copies, as the writers of the volumes, and hosts that only read, read them without asking.
//!
//! A writer that asks gets a grant for its connection, with the keys of its copy's region. The secret of the grant is
//! derived from the key of the connection's session, and so known to the two ends only. The grant is withdrawn when the
//! connection is over, or when the server promises to obey another writer: a reader over a network is cut off then,
//! and one on this host reads so in the region's line. The grant of a client that only reads ends with its connection.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, RegionId, Regions, TransportKind};
use remora_messenger::{Address, Connection};

use super::ServerOptions;
use super::registering::Registering;
use crate::link;

/// See the module's text.
pub(super) struct Exports {
    exporters: Vec<Arc<dyn Exporter>>,
    /// Of the one that exports by RDMA, if there is one.
    registering: Option<Registering>,
    /// Regions that were exported. No name is used twice.
    regions: AtomicU64,
}

impl Exports {
    /// Opens the transports. One that this host does not have is left out: clients ask instead.
    ///
    /// # Errors
    /// [`ServerOptions::rdma`] names addresses at which RDMA cannot be offered.
    pub(super) fn open(address: &Address, options: &ServerOptions) -> io::Result<Exports> {
        let mut exporters: Vec<Arc<dyn Exporter>> = Vec::new();
        if options.shm {
            match ShmExporter::bind(ShmOptions::default()) {
                Ok(shm) => exporters.push(Arc::new(shm)),
                Err(error) => tracing::warn!(%error, "no shared memory for the volumes of this host"),
            }
        }
        if let (Some(port), Some(address)) = (options.lanes, link::socket_address(address)) {
            match tcp(SocketAddr::new(address.ip(), port)) {
                Ok(tcp) => exporters.push(Arc::new(tcp)),
                Err(error) => tracing::warn!(%error, port, "no port for one-sided reads: clients ask instead"),
            }
        }
        let rdma = options.rdma.exporter().map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error))?;
        let rdma: Option<Arc<dyn Exporter>> = rdma.map(Arc::from);
        let registering = rdma.clone().map(Registering::start).transpose()?;
        exporters.extend(rdma);
        Ok(Exports { exporters, registering, regions: AtomicU64::new(0) })
    }

    /// Waits until everything that was exported can be read by RDMA, for [`REGISTERED_WITHIN`] at most. For the start
    /// of a server: nothing else waits.
    pub(super) fn wait(&self) {
        if self.registering.as_ref().is_some_and(|registering| !registering.wait(REGISTERED_WITHIN)) {
            tracing::warn!("memory is not yet registered for RDMA after {REGISTERED_WITHIN:?}: until then clients ask");
        }
    }

    /// Makes a region readable for those that have a grant; by RDMA a little later. `None`: no transport can. For
    /// calls, which must not wait.
    pub(super) fn export(&self, memory: &Arc<Memory>) -> Option<RegionId> {
        let id = RegionId { generation: self.regions.fetch_add(1, Ordering::Relaxed), region: 0 };
        let mut is_exported = self.registering.is_some();
        if let Some(registering) = &self.registering {
            registering.export(id, memory);
        }
        for exporter in self.at_once() {
            is_exported |= export(&**exporter, id, memory);
        }
        is_exported.then_some(id)
    }

    /// As [`Exports::export`], but when it returns, the region can be read by RDMA as well. For threads that may wait.
    pub(super) fn export_and_wait(&self, memory: &Arc<Memory>) -> Option<RegionId> {
        let id = RegionId { generation: self.regions.fetch_add(1, Ordering::Relaxed), region: 0 };
        let exported = self.exporters.iter().filter(|exporter| export(&***exporter, id, memory)).count();
        (exported > 0).then_some(id)
    }

    /// Ends what [`Exports::export`] began.
    pub(super) fn revoke(&self, region: RegionId) {
        if let Some(registering) = &self.registering {
            registering.revoke(region);
        }
        self.at_once().for_each(|exporter| exporter.revoke(region));
    }

    /// The exporters that need no registration.
    fn at_once(&self) -> impl Iterator<Item = &Arc<dyn Exporter>> {
        self.exporters.iter().filter(|exporter| exporter.kind() != TransportKind::Verbs)
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

/// Returns whether it can be read.
fn export(exporter: &dyn Exporter, id: RegionId, memory: &Arc<Memory>) -> bool {
    let exported = exporter.export(id, Arc::clone(memory));
    if let Err(error) = &exported {
        tracing::warn!(transport = %exporter.kind(), %error, "memory cannot be read over this transport");
    }
    exported.is_ok()
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

/// A terabyte, at some tenths of a second for each GiB.
const REGISTERED_WITHIN: Duration = Duration::from_secs(300);
