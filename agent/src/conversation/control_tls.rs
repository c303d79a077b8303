//! What all TLS connections between agents have in common. They carry conversations: data lanes have no TLS.

use rustls::client::Resumption;
use rustls::{ClientConfig, ServerConfig};

/// The ALPN protocol of conversations.
const PROTOCOL: &[u8] = b"remora/control";

/// The first byte of each TLS record that belongs to a handshake. Neither a conversation nor a lane begins with it.
pub(super) const FIRST_BYTE: u8 = 0x16;

/// Sets up an end that connects. No session is resumed: each one is proved anew.
pub(super) fn of_client(config: &mut ClientConfig) {
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.resumption = Resumption::disabled();
}

/// Sets up a port.
pub(super) fn of_port(config: &mut ServerConfig) {
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.send_tls13_tickets = 0;
}
