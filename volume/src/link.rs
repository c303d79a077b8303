//! Link: how the volume uses the messenger, at both ends.
//!
//! Sessions are lossy: a link that breaks ends the session, and both ends are told at once. The copy is then taken
//! back. A session that resumed would hide a server that was restarted without its memory until it is asked, and a
//! killed process for as long as reconnects are tried.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use remora_messenger::frame::Limits;
use remora_messenger::handshake::Versions;
use remora_messenger::stack::tls::TlsOptions;
use remora_messenger::{Address, Connection, Delivery, Keyring, Message, Options, Policy};
use remora_wire::{TooLarge, derive};

use crate::wire::{Call, DecodeError, MAX_DATA_BYTES, MAX_FRONT_BYTES, Reply, Room, VERSION};

/// The most that a server lets a writer have under way: what 10 Gbit/s carry in 25 ms, and 160,000 writes a second.
pub(crate) const MOST_ROOM: Room = Room { bytes: 32 << 20, writes: 4096 };

/// The least, with which a writer begins: one of the longest writes, and what fills a loopback with small ones.
pub(crate) const LEAST_ROOM: Room = Room { bytes: MAX_DATA_BYTES as u64, writes: 32 };

/// Calls of a connection that may wait beside its writes: questions and reads, which are short.
const OTHER_CALLS: usize = 4096;

/// Bytes of answers that may wait for a client that reads slowly. Beyond that its connection is ended.
const ANSWER_BYTES: usize = 64 << 20;

/// A client's end: a writer, or a server that borrows.
pub(crate) fn client_policy() -> Policy {
    Policy { limits: limits(), ..Policy::lossy_client() }
}

/// A server's end. Each connection has its own bound, so no writer waits for another one.
pub(crate) fn server_policy() -> Policy {
    let messages = MOST_ROOM.writes as usize + OTHER_CALLS;
    let bytes = MOST_ROOM.bytes as usize + MAX_DATA_BYTES;
    Policy {
        receive_each: Some((messages, bytes)),
        limits: limits(),
        send_bytes: ANSWER_BYTES,
        ..Policy::stateless_server()
    }
}

fn limits() -> Limits {
    Limits { front: MAX_FRONT_BYTES as u32, data: MAX_DATA_BYTES as u32 }
}

/// What protects connections.
#[derive(Clone, Debug, Default)]
pub struct Security {
    /// The secrets that clients and servers share: every frame has a MAC, unless `unsealed` is set at both ends.
    /// `None`: every client is obeyed, and every server believed.
    pub keys: Option<Arc<Keyring>>,
    /// Frames need no MAC, because no other process can change them: connections have TLS, or both ends are on this
    /// host. A MAC costs more than everything else that is done with a large write.
    pub unsealed: bool,
    /// Certificates, for `tls:` addresses. Without TLS the blocks can be read on the network.
    pub tls: TlsOptions,
}

pub(crate) fn options(security: &Security, workers: usize, max_sessions: usize) -> Options {
    let Security { keys, unsealed, tls } = security.clone();
    Options {
        keys,
        sealed: !unsealed,
        tls,
        workers,
        max_sessions,
        versions: Versions::only(VERSION),
        ..Options::default()
    }
}

/// A call as a message.
pub(crate) fn call(call: &Call, data: Bytes) -> Result<Message, TooLarge> {
    let mut front = Vec::new();
    let kind = call.encode(&mut front)?;
    Ok(Message::new(0, kind, front).with_data(data))
}

/// A reply as a message.
pub(crate) fn reply(reply: &Reply, data: Bytes) -> Result<Message, TooLarge> {
    let mut front = Vec::new();
    let kind = reply.encode(&mut front)?;
    Ok(Message::new(0, kind, front).with_data(data))
}

/// What a server has sent.
pub(crate) fn decode_reply(delivery: &Delivery) -> Result<Reply, DecodeError> {
    Reply::decode(delivery.kind, &delivery.front, delivery.data.len())
}

/// What a client has sent.
pub(crate) fn decode_call(delivery: &Delivery) -> Result<Call, DecodeError> {
    Call::decode(delivery.kind, &delivery.front, delivery.data.len())
}

/// The host and port of an address, if it is one of a network.
pub(crate) fn socket_address(address: &Address) -> Option<SocketAddr> {
    match address {
        Address::Tcp(address) | Address::Tls(address) | Address::Rdma(address) => Some(*address),
        Address::Shm(_) => None,
    }
}

/// A writer that was heard within this time is at work. It says something each second, and a busy host lets it wait for
/// a few.
pub const AT_WORK: Duration = Duration::from_secs(10);

/// What proves to a server's exporters that a reader is the client of this connection; `None` before its handshake.
pub(crate) fn region_secret(connection: &Connection) -> Option<[u8; 32]> {
    connection.negotiated().map(|negotiated| derive(&negotiated.key, REGION_LABEL))
}

/// What the secret of a grant is derived for.
const REGION_LABEL: &[u8] = b"remora volume regions";
