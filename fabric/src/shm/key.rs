//! The body of a [`RegionKey`] of this transport: which host, and which socket. No I/O except reading the host's boot
//! id and the number of the process's network namespace.
//!
//! ```text
//!   boot id 36 (text) │ place 1 (0 abstract, 1 file) │ name, to the end
//!   boot id 36 (text) │ place 1 (2 file for one network namespace) │ namespace 8 │ name, to the end
//! ```

use std::{fs, os::unix::fs::MetadataExt};

use crate::{
    error::Error,
    memory::local::Address,
    region::{KeyError, RegionId, RegionKey, TransportKind},
};

/// Identifies a running system: the kernel draws it at each boot, and all containers of a host see the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct BootId(String);

impl BootId {
    /// The boot id of this host.
    pub(super) fn of_this_host() -> Result<BootId, Error> {
        let text = fs::read_to_string(BOOT_ID_FILE).map_err(Error::system("reading the host's boot id under /proc"))?;
        BootId::parse(text.trim().as_bytes())
    }

    fn parse(text: &[u8]) -> Result<BootId, Error> {
        let text = std::str::from_utf8(text).map_err(|_| KeyError::Body("its boot id is not UTF-8"))?;
        let fits = text.len() == BOOT_ID_BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        if fits { Ok(BootId(text.to_owned())) } else { Err(KeyError::Body("its boot id has the wrong form").into()) }
    }
}

/// A network namespace of this host. Hosts of a test network have one each, and share the file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Namespace(u64);

impl Namespace {
    /// The network namespace of this process.
    pub(super) fn of_this_process() -> Result<Namespace, Error> {
        let about =
            fs::metadata(NAMESPACE_FILE).map_err(Error::system("asking for the network namespace under /proc"))?;
        Ok(Namespace(about.ino()))
    }
}

/// Encodes a key. With a namespace, only processes of that namespace can use it.
pub(super) fn make(
    id: RegionId,
    length: u64,
    boot_id: &BootId,
    namespace: Option<&Namespace>,
    address: &Address,
) -> Result<RegionKey, Error> {
    let number = namespace.map(|namespace| namespace.0.to_le_bytes());
    let (place, name) = match address {
        Address::Abstract(name) => (PLACE_ABSTRACT, name),
        Address::File(path) if number.is_some() => (PLACE_FILE_OF_NAMESPACE, path),
        Address::File(path) => (PLACE_FILE, path),
    };
    let number = if place == PLACE_FILE_OF_NAMESPACE { number.unwrap_or_default().to_vec() } else { Vec::new() };
    let body = [boot_id.0.as_bytes(), &[place], &number, name].concat();
    Ok(RegionKey::new(TransportKind::Shm, id, length, &body)?)
}

/// Decodes a key. A key of another host is an error, as its address is meaningless here.
pub(super) fn address(key: &RegionKey, ours: &BootId) -> Result<Address, Error> {
    key.expect(TransportKind::Shm)?;
    let (theirs, rest) =
        key.body().split_at_checked(BOOT_ID_BYTES).ok_or(KeyError::Body("it is shorter than a boot id"))?;
    let theirs = BootId::parse(theirs)?;
    if theirs != *ours {
        return Err(Error::NotThisHost { theirs: theirs.0, ours: ours.0.clone() });
    }
    match rest.split_first() {
        Some((&PLACE_ABSTRACT, name)) => Ok(Address::Abstract(name.to_vec())),
        Some((&PLACE_FILE, path)) => Ok(Address::File(path.to_vec())),
        Some((&PLACE_FILE_OF_NAMESPACE, rest)) => {
            let (number, path) =
                rest.split_first_chunk().ok_or(KeyError::Body("its network namespace is cut short"))?;
            let (theirs_in, ours_in) = (Namespace(u64::from_le_bytes(*number)), Namespace::of_this_process()?);
            if theirs_in != ours_in {
                let named = |namespace: Namespace| format!("{}, in the network namespace {}", ours.0, namespace.0);
                return Err(Error::NotThisHost { theirs: named(theirs_in), ours: named(ours_in) });
            }
            Ok(Address::File(path.to_vec()))
        }
        _ => Err(KeyError::Body("the kind of its socket is unknown").into()),
    }
}

const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";
/// Length of a UUID as text.
const BOOT_ID_BYTES: usize = 36;
const PLACE_ABSTRACT: u8 = 0;
const PLACE_FILE: u8 = 1;
const PLACE_FILE_OF_NAMESPACE: u8 = 2;
const NAMESPACE_FILE: &str = "/proc/self/ns/net";

/// For the fuzz targets: the address in a key survives encoding, if the key is of this host.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_key(key: &RegionKey) {
    let Some(Ok(here)) = key.body().get(..BOOT_ID_BYTES).map(BootId::parse) else { return };
    let Ok(at) = address(key, &here) else { return };
    let _ = at.to_socket();
    let for_namespace = key.body().get(BOOT_ID_BYTES) == Some(&PLACE_FILE_OF_NAMESPACE);
    let namespace = if for_namespace { Namespace::of_this_process().ok() } else { None };
    assert_eq!(make(key.id(), key.length(), &here, namespace.as_ref(), &at).ok().as_ref(), Some(key));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const ID: RegionId = RegionId { generation: 5, region: 1 };

    #[test]
    fn an_address_comes_back_out_of_its_key() {
        let here = BootId::of_this_host().unwrap();
        for place in [Address::Abstract(b"remora-1".to_vec()), Address::File(b"/run/remora.sock".to_vec())] {
            for namespace in [None, Some(Namespace::of_this_process().unwrap())] {
                let key = make(ID, 4096, &here, namespace.as_ref(), &place).unwrap();
                assert_eq!(address(&key, &here).unwrap(), place);
            }
        }
    }

    #[test]
    fn a_private_file_of_another_network_namespace_is_not_this_host() {
        let here = BootId::of_this_host().unwrap();
        let file = Address::File(b"/run/remora/a.sock".to_vec());
        let key = make(ID, 4096, &here, Some(&Namespace(1)), &file).unwrap();
        let error = address(&key, &here).unwrap_err();
        assert!(matches!(error, Error::NotThisHost { .. }), "{error}");
        assert!(error.to_string().contains("in the network namespace 1,"), "{error}");
    }

    #[test]
    fn a_key_of_another_host_is_refused_before_anything_is_tried() {
        let there = BootId::parse(b"00000000-1111-2222-3333-444444444444").unwrap();
        let key = make(ID, 4096, &there, None, &Address::Abstract(b"remora-1".to_vec())).unwrap();
        let error = address(&key, &BootId::of_this_host().unwrap()).unwrap_err();
        assert!(matches!(error, Error::NotThisHost { .. }));
        assert!(error.to_string().contains("not on the same host"), "{error}");
    }

    #[test]
    fn a_key_of_another_transport_is_refused() {
        let key = RegionKey::new(TransportKind::Tcp, ID, 1, b"").unwrap();
        let error = address(&key, &BootId::of_this_host().unwrap()).unwrap_err();
        assert!(matches!(error, Error::WrongTransport { wanted: TransportKind::Shm, given: TransportKind::Tcp }));
    }

    proptest! {
        #[test]
        fn any_body_is_an_address_or_an_error_but_never_a_panic(body in prop::collection::vec(any::<u8>(), 0..120)) {
            let here = BootId::of_this_host().unwrap();
            let _ = address(&RegionKey::new(TransportKind::Shm, ID, 1, &body).unwrap(), &here);
            let mut body = [here.0.as_bytes(), &body].concat();
            body.truncate(490);
            if let Ok(address) = address(&RegionKey::new(TransportKind::Shm, ID, 1, &body).unwrap(), &here) {
                let _ = address.to_socket();
            }
        }
    }
}
