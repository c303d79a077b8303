//! Where wires are asked for.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::{Connection, DeviceContext, Devices};
use crate::Error;
use crate::{
    bindings as ffi,
    cm::{Event, Events, Id},
};

/// A listener. Its descriptor is readable when somebody may have called.
pub struct Listener {
    id: Id,
    events: Arc<Events>,
    stations: Arc<Devices>,
    address: SocketAddr,
}

impl Listener {
    /// Listens at an address of an RDMA device (or, unspecified, of all). Port 0 is a free one.
    ///
    /// # Errors
    /// [`Error::NoRdma`]; [`Error::System`], with an address that is taken or no device's.
    pub fn listen(stations: &Arc<Devices>, address: SocketAddr) -> Result<Listener, Error> {
        let events = Events::new()?;
        let id = Id::new(&events)?;
        let port = id.listen(address).map_err(Error::system("listening for RDMA connections"))?;
        let address = SocketAddr::new(address.ip(), port);
        Ok(Listener { id, events, stations: stations.clone(), address })
    }

    /// Where, with the port that was free.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next who calls, if anybody has.
    ///
    /// # Errors
    /// What becomes of one call; the door stays open.
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

/// Somebody who calls. Dropping it refuses.
pub struct Request {
    pub(super) id: Id,
    pub(super) events: Arc<Events>,
    pub(super) event: Event,
    pub(super) station: Arc<DeviceContext>,
    pub(super) stations: Arc<Devices>,
}

impl Request {
    /// What the caller said with its call; filled up with zeros by the connection manager.
    pub fn hello(&self) -> &[u8] {
        &self.event.message
    }

    /// The device that it came by. Receives must be posted there before the call is accepted.
    pub fn station(&self) -> &Arc<DeviceContext> {
        &self.station
    }

    /// Takes the call. `answer`: at most 196 bytes for the caller.
    ///
    /// # Errors
    /// [`Error::System`]: the connection can't be made.
    pub fn accept(self, answer: &[u8]) -> Result<Connection, Error> {
        Connection::accept(self, answer)
    }

    /// Refuses it, with a word.
    pub fn refuse(self, why: &[u8]) {
        let _ = self.id.reject(why); // it is refused by being dropped as well
    }
}
