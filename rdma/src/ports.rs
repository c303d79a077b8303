//! Which address of this host belongs to which port of which RDMA device. Connections are made by address; users know
//! devices by name.
//!
//! The connection manager answers this, as it also selects the device of a connection: an address is bound, and the
//! device that it is bound to is read. So the answer is right for InfiniBand, whose addresses belong to another device
//! (IPoIB), for RoCE and iWARP, and for all ports of a bond.

use std::{
    net::{IpAddr, SocketAddr},
    ptr::{NonNull, null_mut},
};

use crate::Error;
use crate::{
    cm::{Events, Id},
    library::check_code,
};

/// An address of this host that belongs to an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaAddress {
    /// The address.
    pub address: IpAddr,
    /// The name of the device.
    pub device: String,
    /// The device's port, from 1.
    pub port: u8,
}

/// All addresses of this host that belong to RDMA devices, IPv4 first.
///
/// # Errors
/// [`Error::NoRdma`], with what is missing; [`Error::System`].
pub fn rdma_addresses() -> Result<Vec<RdmaAddress>, Error> {
    let events = Events::new()?;
    let mut found = Vec::new();
    for address in host_addresses()?.into_iter().filter(may_have_rdma) {
        let id = Id::new(&events)?;
        // Binding fails for an address that belongs to no RDMA device, as most do.
        if let Ok((device, port)) = id.bind(SocketAddr::new(address, 0)) {
            found.push(RdmaAddress { address, device: device.name().to_owned(), port });
        }
    }
    found.sort_by_key(|found| (found.address.is_ipv6(), found.device.clone(), found.port));
    Ok(found)
}

/// One address for each port of a device, or for one port only.
///
/// # Errors
/// [`Error::NoRdma`] if the device or port does not exist or has no address; the errors of [`rdma_addresses`].
pub fn addresses_of(device: &str, port: Option<u8>) -> Result<Vec<IpAddr>, Error> {
    let known = rdma_addresses()?;
    let chosen = choose(&known, device, port);
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let of_port = port.map_or(String::new(), |port| format!(", port {port},"));
    let names: Vec<String> =
        known.iter().map(|at| format!("{} port {} ({})", at.device, at.port, at.address)).collect();
    let there_is = if names.is_empty() {
        "no device has an address".to_owned()
    } else {
        format!("available: {}", names.join(", "))
    };
    Err(Error::NoRdma {
        what: format!(
            "the RDMA device {device}{of_port} has no IP address on this host, or does not exist; {there_is}"
        ),
        cure: "name another one, or give its network device an address (ip addr add)".into(),
    })
}

fn choose(known: &[RdmaAddress], device: &str, port: Option<u8>) -> Vec<IpAddr> {
    let mut chosen: Vec<&RdmaAddress> = Vec::new();
    for at in known.iter().filter(|at| at.device == device && port.is_none_or(|port| port == at.port)) {
        if !chosen.iter().any(|other| other.port == at.port) {
            chosen.push(at);
        }
    }
    chosen.sort_by_key(|at| at.port);
    chosen.into_iter().map(|at| at.address).collect()
}

/// Whether an address can be used for RDMA between hosts. Loopback addresses have no RDMA, and link-local addresses are
/// unknown to other hosts.
fn may_have_rdma(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    }
}

/// The addresses of all network devices of this host, in its network namespace.
fn host_addresses() -> Result<Vec<IpAddr>, Error> {
    let mut first = null_mut();
    // SAFETY: The pointer is written to a local variable.
    check_code(unsafe { libc::getifaddrs(&mut first) }).map_err(Error::system("listing this host's addresses"))?;
    let (mut addresses, mut next) = (Vec::new(), NonNull::new(first));
    while let Some(entry) = next {
        // SAFETY: An entry of the list, which is freed below.
        let entry = unsafe { entry.as_ref() };
        addresses.extend(address_of(entry.ifa_addr));
        next = NonNull::new(entry.ifa_next);
    }
    // SAFETY: The list came from getifaddrs, and no pointer into it is kept.
    unsafe { libc::freeifaddrs(first) };
    Ok(addresses)
}

/// Converts an address of that list; `None` if it is not an IP address.
fn address_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    let address = NonNull::new(address.cast_mut())?;
    // SAFETY: The list contains socket addresses, and each has a family.
    match i32::from(unsafe { address.as_ref() }.sa_family) {
        libc::AF_INET => {
            // SAFETY: The family says that it is a `sockaddr_in`, aligned by the system.
            let address = unsafe { address.cast::<libc::sockaddr_in>().as_ref() };
            Some(IpAddr::V4(u32::from_be(address.sin_addr.s_addr).into()))
        }
        libc::AF_INET6 => {
            // SAFETY: The family says that it is a `sockaddr_in6`, aligned by the system.
            let address = unsafe { address.cast::<libc::sockaddr_in6>().as_ref() };
            Some(IpAddr::V6(address.sin6_addr.s6_addr.into()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn this_host_has_a_loopback_address_and_rdma_is_not_looked_for_there() {
        let addresses = host_addresses().unwrap();
        assert!(addresses.contains(&"127.0.0.1".parse().unwrap()), "{addresses:?}");
        for none in ["127.0.0.1", "::1", "fe80::1", "169.254.1.1"] {
            assert!(!may_have_rdma(&none.parse().unwrap()), "{none}");
        }
    }

    #[test]
    fn a_device_is_used_by_one_address_of_each_port() {
        let at = |address: &str, device: &str, port| RdmaAddress {
            address: address.parse().unwrap(),
            device: device.into(),
            port,
        };
        let known = [
            at("10.0.0.3", "a", 2),
            at("10.0.0.1", "a", 1),
            at("10.0.0.2", "a", 1),
            at("10.0.0.4", "b", 1),
            at("fd00::1", "a", 1),
        ];
        let texts = |device, port| choose(&known, device, port).iter().map(IpAddr::to_string).collect::<Vec<_>>();
        assert_eq!(texts("a", None), ["10.0.0.1", "10.0.0.3"]);
        assert_eq!(texts("a", Some(2)), ["10.0.0.3"]);
        assert!(texts("b", Some(2)).is_empty() && texts("c", None).is_empty());
    }
}
