//! The source's end: which regions there are and who may read them. The thread that talks to readers is in `serve`. No
//! thread sends bytes: the card does.

use std::{
    net::SocketAddr,
    os::fd::AsFd,
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use rustix::event::{EventfdFlags, eventfd};

use remora_rdma::{
    cm::{Events, Id},
    device::Device,
};

use super::{
    VerbsOptions, key, serve,
    server::{DeviceContext, Exported, Listener, Server, Shared},
};
use crate::{Error, Exporter, Memory, RegionId, RegionKey, Regions, Secret, TransportKind};

/// Exports memory by RDMA. Dropping it closes all connections and ends its thread.
pub struct VerbsExporter {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    devices: Vec<String>,
    owner: Option<JoinHandle<()>>,
}

impl VerbsExporter {
    /// Listens at each of `addresses`, by the device that the address belongs to; an unspecified address stands for all
    /// devices. Port 0 selects a free port. Several addresses are several ports that a reader may use in parallel.
    ///
    /// # Errors
    /// [`Error::NoRdma`], with what is missing; [`Error::Unreachable`] for an address that belongs to no RDMA device;
    /// [`Error::Misuse`] for options out of range.
    pub fn listen(options: VerbsOptions, addresses: &[SocketAddr]) -> Result<VerbsExporter, Error> {
        options.check()?;
        if addresses.is_empty() || addresses.len() > key::MAX_ADDRESSES {
            return Err(Error::Misuse("RDMA addresses: give 1 to 8"));
        }
        let devices = Device::all()?;
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("creating an eventfd"))?;
        let events = Events::new()?;
        let (mut listeners, mut bound) = (Vec::new(), Vec::new());
        for address in addresses {
            let id = Id::new(&events)?;
            let port = id.listen(*address).map_err(|source| unreachable(*address, source))?;
            bound.push(SocketAddr::new(address.ip(), port));
            listeners.push(id);
        }
        let contexts = contexts(&listeners, devices)?;
        for context in &contexts {
            let device = context.device();
            permit(device.name(), device.is_iwarp(), options.iwarp)?;
        }
        let listeners = bound.iter().zip(listeners).map(|(address, id)| Listener::new(*address, id)).collect();
        let names = contexts.iter().map(|context| context.device().name().to_owned()).collect();
        let server = Server::new(options, events, listeners, contexts);
        let shared = Arc::new(Shared { server: Mutex::new(server), stop });
        let mut exporter = VerbsExporter { shared, addresses: bound, devices: names, owner: None };
        exporter.owner = Some(serve::start(exporter.shared.clone())?);
        Ok(exporter)
    }

    /// The addresses that it listens at.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The names of the devices that it serves by.
    pub fn devices(&self) -> &[String] {
        &self.devices
    }

    /// The devices, for tests of failures.
    #[cfg(test)]
    pub(super) fn raw_devices(&self) -> Vec<Arc<Device>> {
        self.shared.server().domains().iter().map(|domain| domain.device().clone()).collect()
    }

    /// Number of connections, including those in the handshake.
    pub fn connections(&self) -> usize {
        self.shared.server().readers()
    }

    /// Registers with every device, without holding the lock, as it may take long.
    fn register(&self, memory: &Arc<Memory>) -> Result<Exported, Error> {
        let domains = self.shared.server().domains();
        Exported::to(&domains, memory)
    }
}

impl Exporter for VerbsExporter {
    fn kind(&self) -> TransportKind {
        TransportKind::Verbs
    }

    fn export(&self, id: RegionId, memory: Arc<Memory>) -> Result<(), Error> {
        let cached = self.shared.server().regions.cached(&memory);
        let exported = match cached {
            Some(exported) => exported,
            None => self.register(&memory)?,
        };
        self.shared.server().regions.export(id, exported)
    }

    /// Registers `memory` now and keeps it registered until it is [forgotten](Exporter::forget), so that exporting it
    /// is fast. Backs all of it with pages, which stay in place.
    ///
    /// # Errors
    /// [`Error::NoRdma`] if the locked-memory limit is too low; [`Error::System`].
    fn prepare(&self, memory: &Arc<Memory>) -> Result<(), Error> {
        if self.shared.server().regions.cached(memory).is_some() {
            return Ok(());
        }
        let exported = self.register(memory)?;
        self.shared.server().regions.cache(exported);
        Ok(())
    }

    fn forget(&self, memory: &Arc<Memory>) {
        let forgotten = self.shared.server().regions.forget(memory);
        // Without holding the lock: removing a registration unpins all its pages.
        drop(forgotten);
    }

    /// When this returns, the connections are closed and with them the right to read. The registration is removed,
    /// unless it was [prepared](Exporter::prepare) for the next region of the same memory.
    fn revoke(&self, id: RegionId) {
        let region = self.shared.server().revoke(id);
        // Without holding the lock: removing a registration unpins all its pages.
        drop(region);
    }

    fn grant(&self, session: u64, secret: Secret, regions: Regions) {
        self.shared.server().grant(session, secret, regions);
    }

    fn withdraw(&self, session: u64) {
        self.shared.server().withdraw(session);
    }

    fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
        let length = self.shared.server().region_length(id).ok_or(Error::NotExported(id))?;
        key::encode(id, length, &self.addresses)
    }

    /// Always 0: the readers' cards read the memory, without a trace here.
    fn bytes_served(&self) -> u64 {
        0
    }
}

impl Drop for VerbsExporter {
    fn drop(&mut self) {
        if rustix::io::write(self.shared.stop.as_fd(), &1u64.to_ne_bytes()).is_err() {
            tracing::error!("the thread of a verbs exporter cannot be stopped");
        }
        if self.owner.take().is_some_and(|owner| owner.join().is_err()) {
            tracing::error!("the thread of a verbs exporter has panicked");
        }
        self.shared.server().close();
    }
}

/// The devices that the listeners use: those of their addresses, or all.
fn contexts(listeners: &[Id], all: Vec<Arc<Device>>) -> Result<Vec<DeviceContext>, Error> {
    let mut devices: Vec<Arc<Device>> = Vec::new();
    let wanted = if listeners.iter().all(Id::has_device) {
        listeners.iter().map(Id::device).collect::<Result<_, _>>()?
    } else {
        all
    };
    for device in wanted {
        if !devices.iter().any(|known| Arc::ptr_eq(known, &device)) {
            devices.push(device);
        }
    }
    if devices.is_empty() {
        return Err(Error::NoRdma {
            what: "this machine has no RDMA device".into(),
            cure: "run `remora devices`".into(),
        });
    }
    devices.iter().map(DeviceContext::new).collect()
}

/// Fails for an iWARP device that the caller has not asked for.
fn permit(device: &str, is_iwarp: bool, asked: bool) -> Result<(), Error> {
    if !is_iwarp || asked {
        return Ok(());
    }
    Err(Error::NoRdma {
        what: format!("{device} is an iWARP device, on which a connection can read before it proves its session"),
        cure: format!("to use it on a network without strangers, name it: --rdma-device {device}"),
    })
}

fn unreachable(address: SocketAddr, source: std::io::Error) -> Error {
    Error::Unreachable { what: format!("an RDMA device with the address {address}"), source }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_iwarp_device_is_used_only_if_it_is_asked_for() {
        permit("mlx5_0", false, false).unwrap();
        permit("siw0", true, true).unwrap();
        let refused = permit("siw0", true, VerbsOptions::default().iwarp).unwrap_err().to_string();
        assert!(refused.contains("siw0 is an iWARP device") && refused.contains("--rdma-device siw0"), "{refused}");
    }
}
