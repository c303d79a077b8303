//! Answers: how a client is answered, and what happens to one that cannot be.

use bytes::Bytes;
use remora_messenger::Connection;

use crate::link;
use crate::wire::{Cause, Reply};

/// Answers. A client that does not read its answers is disconnected.
pub(super) fn answer(connection: &Connection, reply: &Reply, data: Bytes) {
    let sent = match link::reply(reply, data) {
        Ok(message) => connection.send(message).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = sent {
        tracing::info!(peer = %connection.peer(), %error, "a client could not be answered: its connection is ended");
        connection.abort();
    }
}

/// Refuses, and ends the connection: what its client sends further builds on what was refused.
pub(super) fn refuse(connection: &Connection, cause: Cause, text: &str) {
    tracing::debug!(peer = %connection.peer(), ?cause, text, "refused");
    answer(connection, &Reply::Refused { cause, text: text.into() }, Bytes::new());
    connection.close();
}

/// What a connection for reading is told that asks for anything else.
pub(super) const ONLY_READS: &str = "this connection is for reading the copy's region";

/// What a connection for loans is told that asks for anything else.
pub(super) const ONLY_LOANS: &str = "this connection is for loans";
