//! The body of a [`RegionKey`] of this transport: the address to connect to. It is not secret.

use std::net::SocketAddr;

use crate::{Error, KeyError, RegionId, RegionKey, TransportKind, address};

/// The key of `id`, to be read at address `at`. An unspecified host stands for the host by which the reader reached the
/// source.
pub(super) fn encode(id: RegionId, length: u64, at: SocketAddr) -> Result<RegionKey, Error> {
    Ok(RegionKey::new(TransportKind::Tcp, id, length, &address::encode(at))?)
}

/// The address in `key`. `fallback_host` replaces an unspecified host; its port is not used.
pub(super) fn address(key: &RegionKey, fallback_host: Option<SocketAddr>) -> Result<SocketAddr, Error> {
    key.expect(TransportKind::Tcp)?;
    let body = key.body().try_into().map_err(|_| KeyError::Body("its tcp part is not 20 bytes long"))?;
    address::decode(body, fallback_host)
}

/// For the fuzz targets: an address in a key survives encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_key(key: &RegionKey) {
    let Ok(at) = address(key, None) else { return };
    let again = encode(key.id(), key.length(), at).and_then(|key| address(&key, None));
    assert_eq!(again.ok(), Some(at));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::IpAddr;

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
