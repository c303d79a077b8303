//! A connection request that a listener received. It is accepted in `connection`.

use std::sync::Arc;

use super::{DeviceContext, Devices};
use crate::cm::{Event, Events, Id};

/// A connection request. Dropping it refuses the request.
pub struct Request {
    pub(super) id: Id,
    pub(super) events: Arc<Events>,
    pub(super) event: Event,
    pub(super) station: Arc<DeviceContext>,
    pub(super) stations: Arc<Devices>,
}

impl Request {
    /// What the caller sent with the request, padded with zeros by the connection manager.
    pub fn hello(&self) -> &[u8] {
        &self.event.message
    }

    /// The device that the request arrived on. Post receives there before accepting.
    pub fn station(&self) -> &Arc<DeviceContext> {
        &self.station
    }

    /// Refuses the request, with a reason for the caller.
    pub fn refuse(self, why: &[u8]) {
        let _ = self.id.reject(why); // it is refused by being dropped as well
    }
}
