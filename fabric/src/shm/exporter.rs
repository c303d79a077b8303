//! The source's end: which regions there are and who may read them. The thread that talks to readers is in `serve`.

use std::{
    os::fd::AsFd,
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use rustix::event::{EventfdFlags, eventfd};

use super::{
    Place, ShmOptions,
    key::{self, BootId, Namespace},
    serve,
    server::{Server, Shared},
};
use crate::{
    error::{Denial, Error},
    grants::Regions,
    memory::{
        Memory,
        local::{Address, Admits, Listener},
    },
    region::{RegionId, RegionKey, Secret, TransportKind},
    transport::Exporter,
};

/// Exports memory to other processes of this host. Dropping it closes all connections and ends its thread.
pub struct ShmExporter {
    shared: Arc<Shared>,
    address: Address,
    boot_id: BootId,
    /// Where the address is meant for one network namespace.
    namespace: Option<Namespace>,
    owner: Option<JoinHandle<()>>,
}

impl ShmExporter {
    /// Binds the socket and starts the thread.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options out of range; [`Error::System`] if the socket cannot be created. A folder must
    /// exist, be writable, and have a short path.
    pub fn bind(options: ShmOptions) -> Result<ShmExporter, Error> {
        options.check()?;
        let listener = Listener::bind(&options.place, Admits::Us)?;
        ShmExporter::over(listener, &options)
    }

    /// Serves the connections of this listener.
    pub(super) fn over(listener: Listener, options: &ShmOptions) -> Result<ShmExporter, Error> {
        let address = listener.address().clone();
        // The file is removed if a step fails.
        ShmExporter::start(listener, options).inspect_err(|_| address.remove())
    }

    fn start(listener: Listener, options: &ShmOptions) -> Result<ShmExporter, Error> {
        let boot_id = BootId::of_this_host()?;
        let namespace = if options.place == Place::Private { Some(Namespace::of_this_process()?) } else { None };
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("creating an eventfd"))?;
        let address = listener.address().clone();
        let server = Server::new(options.connections, options.handshake_timeout);
        let shared = Arc::new(Shared { server: Mutex::new(server), stop });
        let owner = Some(serve::start(shared.clone(), listener)?);
        Ok(ShmExporter { shared, address, boot_id, namespace, owner })
    }
}

impl Exporter for ShmExporter {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn export(&self, id: RegionId, memory: Arc<Memory>) -> Result<(), Error> {
        let read_only = memory.reopen_read_only()?;
        self.shared.server().export(id, memory.length(), read_only)
    }

    fn revoke(&self, id: RegionId) {
        let mut server = self.shared.server();
        server.forget_region(id);
        server.cut_readers(Denial::Revoked, |_, region| region == id);
    }

    fn grant(&self, session: u64, secret: Secret, regions: Regions) {
        let mut server = self.shared.server();
        let closes = server.grants.insert(session, secret, regions);
        server.cut_readers(Denial::NotGranted, |reader, id| reader == session && closes(id));
    }

    fn withdraw(&self, session: u64) {
        let mut server = self.shared.server();
        server.grants.remove(session);
        server.cut_readers(Denial::NotGranted, |reader, _| reader == session);
    }

    fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
        let length = self.shared.server().region_length(id).ok_or(Error::NotExported(id))?;
        key::make(id, length, &self.boot_id, self.namespace.as_ref(), &self.address)
    }

    /// Always 0: readers copy the bytes themselves, without a trace here.
    fn bytes_served(&self) -> u64 {
        0
    }
}

impl Drop for ShmExporter {
    fn drop(&mut self) {
        if rustix::io::write(self.shared.stop.as_fd(), &1u64.to_ne_bytes()).is_err() {
            tracing::error!("the thread of a shm exporter cannot be stopped");
        }
        if self.owner.take().is_some_and(|owner| owner.join().is_err()) {
            tracing::error!("the thread of a shm exporter has panicked");
        }
        self.address.remove();
    }
}
