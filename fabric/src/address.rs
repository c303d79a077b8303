//! An address in a region key.
//!
//! ```text
//! 0         1        2      4          20
//! │ version │ family │ port │ address  │     port little endian; address in network order, IPv4 in its first 4 bytes
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::{Error, KeyError};

/// Bytes of one address: version, family, port, host.
pub(crate) const ADDRESS_BYTES: usize = 1 + 1 + 2 + 16;

/// Encodes an address. An unspecified host stands for the host by which the reader reached the source.
pub(crate) fn encode(address: SocketAddr) -> [u8; ADDRESS_BYTES] {
    let (family, host) = match address.ip() {
        IpAddr::V4(host) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&host.octets());
            (FAMILY_V4, bytes)
        }
        IpAddr::V6(host) => (FAMILY_V6, host.octets()),
    };
    let mut bytes = [0; ADDRESS_BYTES];
    bytes[..2].copy_from_slice(&[VERSION, family]);
    bytes[2..4].copy_from_slice(&address.port().to_le_bytes());
    bytes[4..].copy_from_slice(&host);
    bytes
}

/// Decodes an address. `fallback_host` replaces an unspecified host; its port is not used.
///
/// # Errors
/// [`Error::Key`] for malformed bytes, or an unspecified host without a fallback.
pub(crate) fn decode(bytes: &[u8; ADDRESS_BYTES], fallback_host: Option<SocketAddr>) -> Result<SocketAddr, Error> {
    let [version, family, port_low, port_high, host @ ..] = *bytes;
    if version != VERSION {
        return Err(KeyError::Body("its address has an unknown version: upgrade the older end").into());
    }
    let port = u16::from_le_bytes([port_low, port_high]);
    let host = match (family, host) {
        (FAMILY_V4, [a, b, c, d, ..]) => IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
        (FAMILY_V6, host) => IpAddr::V6(Ipv6Addr::from(host)),
        _ => return Err(KeyError::Body("its address is neither IPv4 nor IPv6").into()),
    };
    if port == 0 {
        return Err(KeyError::Body("its port is 0").into());
    }
    if !host.is_unspecified() {
        return Ok(SocketAddr::new(host, port));
    }
    match fallback_host {
        // Changes the port of the whole address: a link-local IPv6 address needs its scope.
        Some(mut address) => {
            address.set_port(port);
            Ok(address)
        }
        None => Err(KeyError::Body("it names no host, and the host by which the source was reached is unknown").into()),
    }
}

/// First byte of an encoded address.
const VERSION: u8 = 1;
/// Families; not the system's numbers, which differ between systems.
const FAMILY_V4: u8 = 4;
const FAMILY_V6: u8 = 6;
