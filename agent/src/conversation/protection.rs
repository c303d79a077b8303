//! What protects the bytes of a connection, for logs and `remora status`.

use std::fmt;
use std::net::IpAddr;

use remora_fabric::TransportKind;

/// What protects the bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    /// TLS 1.3; both ends have proved that they hold the token.
    Token,
    /// TLS 1.3; both ends have presented certificates.
    Certificates,
    /// The data are ciphertext. Their key came by TLS 1.3; both ends have proved that they hold the token.
    SealedByToken,
    /// The data are ciphertext. Their key came by TLS 1.3; both ends have presented certificates.
    SealedByCertificates,
    /// The bytes do not leave the host: both ends have loopback addresses. They can be those of a tunnel.
    Loopback,
    /// Nothing: the bytes can be read and changed on their way.
    Plaintext,
    /// The bytes do not leave the host: both ends share its memory.
    SharedMemory,
}

impl Protection {
    /// The protection of data that are read over this transport, in a session whose control connection has this one.
    /// `is_sealed`: other hosts read ciphertext. `peer`: the other end of the session. Data lanes have no TLS.
    pub(crate) fn of_data(self, transport: TransportKind, is_sealed: bool, peer: IpAddr) -> Protection {
        match (transport, self) {
            (TransportKind::Shm, _) => Protection::SharedMemory,
            (_, Protection::Token) if is_sealed => Protection::SealedByToken,
            (_, Protection::Certificates) if is_sealed => Protection::SealedByCertificates,
            (TransportKind::Tcp, _) if is_loopback(peer) => Protection::Loopback,
            _ => Protection::Plaintext,
        }
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Protection::Token => "TLS 1.3, token",
            Protection::Certificates => "TLS 1.3, certificates",
            Protection::SealedByToken => "sealed, TLS 1.3, token",
            Protection::SealedByCertificates => "sealed, TLS 1.3, certificates",
            Protection::Loopback => "plaintext on loopback",
            Protection::Plaintext => "plaintext",
            Protection::SharedMemory => "local: shared memory",
        })
    }
}

/// Whether only this host can reach the address.
pub(super) fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}
