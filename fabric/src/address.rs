//! An address as region keys carry it. Which keys, and what for, is the transports' business.
//!
//! ```text
//! 0         1        2      4          20
//! │ version │ family │ port │ address  │     port little endian; address in network order, IPv4 in its first 4 bytes
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::{Error, KeyError};

/// Bytes of one address: version, family, port, host.
pub(crate) const ADDRESS_BYTES: usize = 1 + 1 + 2 + 16;

/// An address as bytes. An unspecified host means: where you reached the source.
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

/// The address again. `fallback_host` takes the place of an unspecified host; its port is not used.
///
/// # Errors
/// [`Error::Key`] for bytes that no source of ours has made, or that name no host where there is no other.
pub(crate) fn decode(bytes: &[u8; ADDRESS_BYTES], fallback_host: Option<SocketAddr>) -> Result<SocketAddr, Error> {
    let [version, family, port_low, port_high, host @ ..] = *bytes;
    if version != VERSION {
        return Err(KeyError::Body("its address is of an unknown version: upgrade the older end").into());
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
        // Set on the whole address, not on the IP alone: a link-local IPv6 address is nothing without its scope.
        Some(mut address) => {
            address.set_port(port);
            Ok(address)
        }
        None => Err(KeyError::Body("it names no host, and by which host the source was reached was not told").into()),
    }
}

/// First byte of an address.
const VERSION: u8 = 1;
/// Families as people call them; not the system's numbers, which differ between systems.
const FAMILY_V4: u8 = 4;
const FAMILY_V6: u8 = 6;
