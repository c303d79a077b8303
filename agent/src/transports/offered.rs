//! The source's RDMA: whether it can be offered, by which addresses, and the tables' memory registered before anybody asks.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use remora_fabric::verbs::{VerbsExporter, VerbsOptions};
use remora_fabric::{Error, Exporter, Memory};

use crate::args::{RdmaEnd, RdmaOffer};
use crate::exit::Failure;

/// An exporter that has registered `memories`, if this machine can have one; otherwise a line in the log says why not.
///
/// It listens at the addresses that were given, else at that of `listen`. Where nobody asked for RDMA by name its absence is no
/// failure: replicas then read by TCP. Blocks, as registering backs all of the memory with pages.
///
/// # Errors
/// RDMA was asked for by `--rdma-address` or `--rdma-device` and can't be had.
pub(crate) fn rdma(
    wanted: &RdmaOffer,
    listen: SocketAddr,
    memories: &[Arc<Memory>],
) -> Result<Option<Arc<dyn Exporter>>, Failure> {
    if wanted.no_rdma {
        return Ok(None);
    }
    let is_asked = wanted.end.is_named();
    if !is_asked && listen.ip().is_loopback() {
        tracing::debug!("RDMA is not offered: --listen is for this host only");
        return Ok(None);
    }
    match open(wanted, listen, memories) {
        Ok(exporter) => {
            let (devices, addresses) = (exporter.devices().join(", "), exporter.addresses());
            tracing::info!(%devices, ?addresses, "RDMA is offered");
            Ok(Some(Arc::new(exporter)))
        }
        Err(error) if is_asked => Err(Failure::refused(error.to_string())),
        Err(error) => {
            tracing::info!("RDMA is not offered, replicas of other hosts will use tcp: {error}");
            Ok(None)
        }
    }
}

fn open(wanted: &RdmaOffer, listen: SocketAddr, memories: &[Arc<Memory>]) -> Result<VerbsExporter, Error> {
    let RdmaEnd { rdma_traffic_class: traffic_class, rdma_service_level: service_level, .. } = wanted.end;
    let options = VerbsOptions { traffic_class, service_level, ..VerbsOptions::default() };
    let named = wanted.end.addresses()?;
    let hosts: Vec<IpAddr> = if named.is_empty() { vec![listen.ip()] } else { named };
    // RDMA's ports are not TCP's: the same number is nearly always free, and easily remembered. (On iWARP they are, and it is taken.)
    let at = |port| hosts.iter().map(|host| SocketAddr::new(*host, port)).collect::<Vec<_>>();
    let exporter = VerbsExporter::listen(options.clone(), &at(listen.port()))
        .or_else(|_| VerbsExporter::listen(options, &at(ANY_PORT)))?;
    memories.iter().try_for_each(|memory| exporter.prepare(memory))?;
    Ok(exporter)
}

/// Any free one.
const ANY_PORT: u16 = 0;
