//! RDMA: how an end offers its memory by RDMA, and reads that of others. Without the feature `verbs` it can do neither,
//! and says so.
//!
//! A card reads memory without its host's processor. The bytes are neither encrypted nor authenticated on their way; a
//! reader proves its right before it can read, as over TCP.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use remora_fabric::{Connector, Exporter};

/// The RDMA devices of an end, and how its packets are marked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rdma {
    /// Addresses of this host's devices. Memory is offered at them, and read by them. Empty: none is offered, and the
    /// system's routes decide by which device this end reads.
    pub addresses: Vec<IpAddr>,
    /// IP type of service of RoCE packets; `None` leaves the system's.
    pub traffic_class: Option<u8>,
    /// Service level, 0 to 15; `None` leaves the system's.
    pub service_level: Option<u8>,
}

/// What a reader expects of a connection.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "verbs"), allow(dead_code))]
pub(crate) struct Reading {
    /// Where the messenger reached the other end.
    pub(crate) host: Option<SocketAddr>,
    /// Reads under way.
    pub(crate) depth: usize,
    /// Longest time for the connection.
    pub(crate) connect_limit: Duration,
    /// Longest time without a byte while a read is under way.
    pub(crate) read_limit: Duration,
}

#[cfg(feature = "verbs")]
impl Rdma {
    /// Listens at the addresses. `None`: there are none.
    ///
    /// # Errors
    /// One of them is not the address of a device that can be used.
    pub(crate) fn exporter(&self) -> Result<Option<Box<dyn Exporter>>, String> {
        if self.addresses.is_empty() {
            return Ok(None);
        }
        // A device that connects by itself (iWARP) is used as well: the user has named it.
        let options = VerbsOptions { iwarp: true, connections: CONNECTIONS, ..self.options() };
        let addresses: Vec<SocketAddr> = self.addresses.iter().map(|address| SocketAddr::new(*address, 0)).collect();
        let exporter = VerbsExporter::listen(options, &addresses).map_err(|error| error.to_string())?;
        let (devices, addresses) = (exporter.devices().join(", "), exporter.addresses());
        tracing::info!(%devices, ?addresses, "RDMA is offered");
        Ok(Some(Box::new(exporter)))
    }

    /// # Errors
    /// This host has no RDMA, with what is missing.
    pub(crate) fn connector(&self, reading: Reading) -> Result<Box<dyn Connector>, String> {
        let Reading { host, depth, connect_limit, read_limit } = reading;
        let options = VerbsOptions {
            depth,
            connect_timeout: connect_limit,
            handshake_timeout: connect_limit,
            stall_timeout: read_limit,
            ..self.options()
        };
        let connector =
            VerbsConnector::new(options, host, self.addresses.clone()).map_err(|error| error.to_string())?;
        Ok(Box::new(connector))
    }

    fn options(&self) -> VerbsOptions {
        VerbsOptions { traffic_class: self.traffic_class, service_level: self.service_level, ..VerbsOptions::default() }
    }
}

#[cfg(feature = "verbs")]
use remora_fabric::verbs::{VerbsConnector, VerbsExporter, VerbsOptions};

/// Readers of an end. Each has a queue pair and a page here: a writer, and a server that follows it, for each volume.
#[cfg(feature = "verbs")]
const CONNECTIONS: usize = 1024;

#[cfg(not(feature = "verbs"))]
impl Rdma {
    /// # Errors
    /// Addresses were given.
    pub(crate) fn exporter(&self) -> Result<Option<Box<dyn Exporter>>, String> {
        if self.addresses.is_empty() { Ok(None) } else { Err(NOT_BUILT.into()) }
    }

    /// # Errors
    /// Always.
    pub(crate) fn connector(&self, _: Reading) -> Result<Box<dyn Connector>, String> {
        Err(NOT_BUILT.into())
    }
}

#[cfg(not(feature = "verbs"))]
const NOT_BUILT: &str = "this program was built without RDMA (feature verbs of remora-volume)";
