//! The body of a [`RegionKey`] of this transport: the addresses to connect to, one per port of the source. The card's
//! key is not included: only readers that have proved their session get it.

use std::net::SocketAddr;

use crate::{
    Error, KeyError, RegionId, RegionKey, TransportKind,
    address::{self, ADDRESS_BYTES},
};

/// The key of `id`, to be read at any of `addresses`. An unspecified host stands for the host by which the reader
/// reached the source.
pub(super) fn encode(id: RegionId, length: u64, addresses: &[SocketAddr]) -> Result<RegionKey, Error> {
    let body: Vec<u8> = addresses.iter().take(MAX_ADDRESSES).flat_map(|at| address::encode(*at)).collect();
    Ok(RegionKey::new(TransportKind::Verbs, id, length, &body)?)
}

/// The addresses in `key`; at least one.
pub(super) fn addresses(key: &RegionKey, fallback_host: Option<SocketAddr>) -> Result<Vec<SocketAddr>, Error> {
    key.expect(TransportKind::Verbs)?;
    let (entries, rest) = key.body().as_chunks::<ADDRESS_BYTES>();
    if entries.is_empty() || !rest.is_empty() || entries.len() > MAX_ADDRESSES {
        return Err(KeyError::Body("its verbs part does not contain 1 to 8 addresses").into());
    }
    entries.iter().map(|entry| address::decode(entry, fallback_host)).collect()
}

/// Maximum number of ports of one source. A key of that many addresses is far below its size limit.
pub(super) const MAX_ADDRESSES: usize = 8;

/// For the fuzz targets: the addresses in a key survive encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_key(key: &RegionKey) {
    let Ok(at) = addresses(key, None) else { return };
    let again = encode(key.id(), key.length(), &at).and_then(|key| addresses(&key, None));
    assert_eq!(again.ok(), Some(at));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const ID: RegionId = RegionId { generation: 1, region: 2 };

    #[test]
    fn addresses_come_back_out_of_their_key() {
        let given: Vec<SocketAddr> = vec!["10.0.0.1:7".parse().unwrap(), "[fd00::1]:8".parse().unwrap()];
        assert_eq!(addresses(&encode(ID, 1, &given).unwrap(), None).unwrap(), given);
        assert!(matches!(addresses(&encode(ID, 1, &[]).unwrap(), None), Err(Error::Key(_))));
    }

    proptest! {
        #[test]
        fn any_body_is_addresses_or_an_error(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let key = RegionKey::new(TransportKind::Verbs, ID, 1, &body).unwrap();
            let _ = addresses(&key, None);
        }
    }
}
