//! Accepts two-sided connections.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::{Devices, Request};
use crate::Error;
use crate::{
    bindings as ffi,
    cm::{Events, Id},
};

/// A listener. Its descriptor is readable when a connection request may be waiting.
pub struct Listener {
    id: Id,
    events: Arc<Events>,
    stations: Arc<Devices>,
    address: SocketAddr,
}

impl Listener {
    /// Listens at an address of an RDMA device, or of all devices if the address is unspecified. Port 0 selects a free
    /// one.
    ///
    /// # Errors
    /// [`Error::NoRdma`]; [`Error::System`] if the address is in use, or belongs to no device.
    pub fn listen(stations: &Arc<Devices>, address: SocketAddr) -> Result<Listener, Error> {
        let events = Events::new()?;
        let id = Id::new(&events)?;
        let port = id.listen(address).map_err(Error::system("listening for RDMA connections"))?;
        let address = SocketAddr::new(address.ip(), port);
        Ok(Listener { id, events, stations: stations.clone(), address })
    }

    /// The address, with the port that was selected.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection request; `None` if there is none.
    ///
    /// # Errors
    /// The failure of one request, after which the listener can be used; [`Error::Unreachable`] if its device was
    /// removed.
    pub fn next_call(&mut self) -> Result<Option<Request>, Error> {
        while let Some(event) = self.events.next() {
            if event.kind == ffi::RDMA_CM_EVENT_DEVICE_REMOVAL && event.of == self.id.name() {
                return Err(Error::Unreachable {
                    what: format!("the RDMA device of {}", self.address),
                    source: std::io::ErrorKind::NotConnected.into(),
                });
            }
            if let Some((mut id, event)) = event.into_request() {
                let station = self.stations.on(&id.device()?)?;
                let events = Events::new()?;
                id.migrate(&events)?;
                return Ok(Some(Request { id, events, event, station, stations: self.stations.clone() }));
            }
        }
        Ok(None)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}
