//! The callbacks of a messenger. They run on the thread of the worker that the connection lives on.
//!
//! A dispatcher must not block: every connection of that worker would wait with it. It may send on any connection;
//! sending never blocks. It must not panic: a panic ends the worker's thread and everything on it.

use crate::buffer::Buffer;
use crate::connection::Connection;
use crate::error::LinkError;
use crate::message::{Arrival, Delivery};
use crate::signal::Refusal;
use crate::stack::Address;

/// Receives what happens on a messenger's connections. Only [`Dispatcher::message`] has no default.
pub trait Dispatcher: Send + Sync + 'static {
    /// A message has arrived: in order, and with lossless policies exactly once.
    fn message(&self, connection: &Connection, delivery: Delivery);

    /// Chooses the memory for a message's data, before any of it is read: a buffer of exactly its length, or `None` for
    /// one of the messenger's own.
    fn memory(&self, connection: &Connection, arrival: &Arrival) -> Option<Buffer> {
        let _ = (connection, arrival);
        None
    }

    /// Messages flow: for the first time, or again after a broken link.
    fn connected(&self, connection: &Connection) {
        let _ = connection;
    }

    /// The peer has forgotten the session, or the link of a lossy session broke. `unacknowledged` messages of this end
    /// were not acknowledged (lossy: not written). They are dropped, and the peer may or may not have received them. If
    /// the session `goes_on`, it is empty and numbers start again; otherwise the connection is over.
    fn reset(&self, connection: &Connection, unacknowledged: usize, goes_on: bool) {
        let _ = (connection, unacknowledged, goes_on);
    }

    /// Either end has closed the connection.
    fn closed(&self, connection: &Connection) {
        let _ = connection;
    }

    /// The peer refuses the session. The connection is over.
    fn refused(&self, connection: &Connection, why: Refusal) {
        let _ = (connection, why);
    }

    /// A peer connected and did not get as far as a session; usually it was not authenticated.
    fn rejected(&self, peer: &Address, why: &LinkError) {
        let _ = (peer, why);
    }
}
