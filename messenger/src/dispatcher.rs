//! The owner's side: what a messenger tells, on the thread of the worker that the connection lives on.
//!
//! So a dispatcher does not wait: while it does, every connection of that worker waits with it. It may send, on any
//! connection; sending never waits. Nor does it panic: that ends the worker's thread, and with it all that lives there.

use crate::buffer::Buffer;
use crate::connection::Connection;
use crate::error::LinkError;
use crate::message::{Arrival, Delivery};
use crate::signal::Refusal;
use crate::stack::Address;

/// Takes what comes. Only [`Dispatcher::message`] has no default.
pub trait Dispatcher: Send + Sync + 'static {
    /// A message: in order, and on lossless policies each exactly once.
    fn message(&self, connection: &Connection, delivery: Delivery);

    /// Where the data of a message shall land, asked before a byte of it is read: a buffer exactly as long as it, or `None`
    /// for one of the messenger's own.
    fn memory(&self, connection: &Connection, arrival: &Arrival) -> Option<Buffer> {
        let _ = (connection, arrival);
        None
    }

    /// Messages flow: the first time, and again after each broken link.
    fn connected(&self, connection: &Connection) {
        let _ = connection;
    }

    /// The peer has forgotten the session, or a lossy one's link broke. `unheard` messages of ours were not acknowledged (lossy:
    /// not written); they are gone from the queue, and may or may not have been taken. If the session `goes_on`, it is empty
    /// and numbers begin anew; otherwise the connection is over.
    fn reset(&self, connection: &Connection, unacknowledged: usize, goes_on: bool) {
        let _ = (connection, unacknowledged, goes_on);
    }

    /// The connection was closed, by either end.
    fn closed(&self, connection: &Connection) {
        let _ = connection;
    }

    /// The peer will not talk to us. The connection is over.
    fn refused(&self, connection: &Connection, why: Refusal) {
        let _ = (connection, why);
    }

    /// Somebody has called and did not get as far as a session: a stranger, as a rule.
    fn rejected(&self, peer: &Address, why: &LinkError) {
        let _ = (peer, why);
    }
}
