//! What a [`RegionKey`] of this transport says beyond region and length: where to connect. Nothing in it is secret.
//!
//! ```text
//! 0         1        2      4          20
//! │ version │ family │ port │ address  │     port little endian; address in network order, IPv4 in its first 4 bytes
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::{Error, RegionId, RegionKey, TransportKind};

/// The key of `id`, to be read at `address`. An unspecified host means: where you reached the source.
pub(super) fn encode(id: RegionId, length: u64, address: SocketAddr) -> Result<RegionKey, Error> {
    let (family, host) = match address.ip() {
        IpAddr::V4(host) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&host.octets());
            (FAMILY_V4, bytes)
        }
        IpAddr::V6(host) => (FAMILY_V6, host.octets()),
    };
    let mut body = Vec::with_capacity(BODY_BYTES);
    body.extend([BODY_VERSION, family]);
    body.extend(address.port().to_le_bytes());
    body.extend(host);
    RegionKey::new(TransportKind::Tcp, id, length, &body)
}

/// Where `key` leads to. `fallback_host` takes the place of an unspecified host; its port is not used.
pub(super) fn address(key: &RegionKey, fallback_host: Option<SocketAddr>) -> Result<SocketAddr, Error> {
    key.expect(TransportKind::Tcp)?;
    let body: &[u8; BODY_BYTES] = key.body().try_into().map_err(|_| Error::Key("its tcp part is not of 20 bytes"))?;
    let [version, family, port_low, port_high, host @ ..] = *body;
    if version != BODY_VERSION {
        return Err(Error::Key("its tcp part is of an unknown version: upgrade the older end"));
    }
    let port = u16::from_le_bytes([port_low, port_high]);
    let host = match (family, host) {
        (FAMILY_V4, [a, b, c, d, ..]) => IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
        (FAMILY_V6, host) => IpAddr::V6(Ipv6Addr::from(host)),
        _ => return Err(Error::Key("its address is neither IPv4 nor IPv6")),
    };
    if port == 0 {
        return Err(Error::Key("its port is 0"));
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
        None => Err(Error::Key("it names no host, and by which host the source was reached was not told")),
    }
}

/// First byte of the body.
const BODY_VERSION: u8 = 1;
/// Version, family, port, address.
const BODY_BYTES: usize = 1 + 1 + 2 + 16;
/// Families as people call them; not the system's numbers, which differ between systems.
const FAMILY_V4: u8 = 4;
const FAMILY_V6: u8 = 6;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const ID: RegionId = RegionId { generation: 1, region: 2 };

    proptest! {
        #[test]
        fn an_address_comes_back_out_of_its_key(host: IpAddr, port in 1u16..) {
            prop_assume!(!host.is_unspecified());
            let given = SocketAddr::new(host, port);
            prop_assert_eq!(address(&encode(ID, 1, given).unwrap(), None).unwrap(), given);
        }

        #[test]
        fn any_body_is_an_address_or_an_error(body in prop::collection::vec(any::<u8>(), 0..40)) {
            let key = RegionKey::new(TransportKind::Tcp, ID, 1, &body).unwrap();
            let _ = address(&key, None);
        }
    }

    #[test]
    fn no_host_means_where_the_source_was_reached() {
        let key = encode(ID, 1, "0.0.0.0:7000".parse().unwrap()).unwrap();
        let reached = "[fe80::1%3]:9".parse().unwrap();
        assert_eq!(address(&key, Some(reached)).unwrap(), "[fe80::1%3]:7000".parse().unwrap());
        assert!(matches!(address(&key, None), Err(Error::Key(_))));
    }

    #[test]
    fn a_key_of_another_transport_is_refused() {
        let key = RegionKey::new(TransportKind::Shm, ID, 1, &[0; 20]).unwrap();
        assert!(matches!(address(&key, None), Err(Error::WrongTransport { .. })));
    }
}
