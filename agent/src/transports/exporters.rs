//! The source's RDMA: whether it can be offered, at which addresses, and the registration of the tables' memory in
//! advance.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use remora_fabric::verbs::{MAX_CONNECTIONS, VerbsExporter, VerbsOptions};
use remora_fabric::{Error, Exporter, Memory};

use crate::args::{RdmaEnd, RdmaOffer};
use crate::exit::Failure;

/// Opens an RDMA exporter for this many readers and registers `memories` with it. If this host has no usable RDMA, a
/// log line says why.
///
/// It listens at the given addresses, or else at that of `listen`. If no option names RDMA, its absence is not an
/// error: replicas then read over TCP. It blocks, because registration backs all of the memory with pages.
///
/// # Errors
/// `--rdma-address` or `--rdma-device` was given, and RDMA is not available.
pub(crate) fn rdma(
    wanted: &RdmaOffer,
    listen: SocketAddr,
    replicas: usize,
    memories: &[Arc<Memory>],
) -> Result<Option<Arc<dyn Exporter>>, Failure> {
    if wanted.no_rdma {
        return Ok(None);
    }
    let is_asked = wanted.end.is_named();
    if !is_asked && listen.ip().is_loopback() {
        tracing::debug!("RDMA is not offered: --listen accepts connections of this host only");
        return Ok(None);
    }
    match open(wanted, listen, replicas, memories) {
        Ok(exporter) => {
            let (devices, addresses) = (exporter.devices().join(", "), exporter.addresses());
            tracing::info!(%devices, ?addresses, "RDMA is offered");
            Ok(Some(Arc::new(exporter)))
        }
        Err(error) if is_asked => Err(Failure::refused(error.to_string())),
        Err(error) => {
            tracing::info!("RDMA is not offered; replicas on other hosts will use TCP: {error}");
            Ok(None)
        }
    }
}

fn open(
    wanted: &RdmaOffer,
    listen: SocketAddr,
    replicas: usize,
    memories: &[Arc<Memory>],
) -> Result<VerbsExporter, Error> {
    let RdmaEnd { rdma_traffic_class: traffic_class, rdma_service_level: service_level, .. } = wanted.end;
    let named = wanted.end.addresses()?;
    let hosts: Vec<IpAddr> = if named.is_empty() { vec![listen.ip()] } else { named };
    // A reader has one connection per region and address. It may reconnect before its old ones are found closed.
    let connections = replicas * REGIONS * hosts.len() * 2;
    let defaults = VerbsOptions::default();
    let connections = connections.clamp(defaults.connections, MAX_CONNECTIONS);
    let iwarp = wanted.end.is_named();
    let options = VerbsOptions { traffic_class, service_level, connections, iwarp, ..defaults };
    // RDMA has ports of its own, so TCP's number is nearly always free there and easy to remember. (iWARP uses TCP's
    // ports, so it is not free there.)
    let at = |port| hosts.iter().map(|host| SocketAddr::new(*host, port)).collect::<Vec<_>>();
    let exporter = VerbsExporter::listen(options.clone(), &at(listen.port()))
        .or_else(|_| VerbsExporter::listen(options, &at(ANY_PORT)))?;
    memories.iter().try_for_each(|memory| exporter.prepare(memory))?;
    Ok(exporter)
}

/// The regions that each reader reads: the snapshot and the journal.
const REGIONS: usize = 2;

/// Any free port.
const ANY_PORT: u16 = 0;
