//! What RDMA hardware and permissions this machine has, and which address belongs to which port. No connection is made
//! here.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use crate::Error;
use crate::cm::{Events, Id};
use crate::device::Device;
use crate::library::{check_code, library, no_device};

// What RDMA hardware and permissions this machine has, and what it lacks. No connection is made here.
//
// Devices are listed by opening them. `/sys/class/infiniband` shows a container all cards of its host, including those
// that the container may not use; it is read only for details of devices that could be opened.

/// RDMA on this machine.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The usable devices.
    pub devices: Vec<DeviceReport>,
    /// Bytes that this process may lock; `None` if there is no limit, or the process may exceed it.
    pub locked_memory_limit: Option<u64>,
    /// Whether a process with registered memory may fork: `unneeded` (the kernel handles it), `enabled`, `disabled`,
    /// `unknown`.
    pub fork_support: String,
    /// What is missing, and how to provide it; `None` if RDMA can be used.
    pub trouble: Option<String>,
}

/// One device.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// The name, as `rdma link` shows it.
    pub name: String,
    /// `InfiniBand` (the library reports RoCE as this) or `iWARP`.
    pub transport: String,
    /// NUMA node; `None` if the device belongs to none.
    pub numa_node: Option<u32>,
    /// Maximum number of queue pairs.
    pub queue_pairs: u32,
    /// Maximum number of work requests per queue.
    pub queue_depth: u32,
    /// Maximum number of entries per completion queue.
    pub completions: u32,
    /// READs that the device starts at the same time, per queue pair.
    pub reads_started: u32,
    /// READs that the device serves at the same time, per queue pair.
    pub reads_served: u32,
    /// READs that the device serves at the same time in total.
    pub reads_served_in_all: u32,
    /// Segments that one READ may be scattered into.
    pub read_pieces: u32,
    /// Maximum size of one registration, in bytes.
    pub registration_bytes: u64,
    /// Its ports.
    pub ports: Vec<PortReport>,
}

/// One port.
#[derive(Clone, Debug)]
pub struct PortReport {
    /// Its number, from 1.
    pub number: u32,
    /// `ACTIVE`, `DOWN`, …
    pub state: String,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: String,
    /// The speed in the kernel's words: `100 Gb/sec (4X EDR)`.
    pub speed: String,
    /// Maximum size of a packet, in bytes.
    pub mtu: u32,
    /// The Ethernet network device of the port.
    pub network_device: String,
    /// The IP addresses of this host that belong to the port.
    pub addresses: Vec<IpAddr>,
    /// The GIDs that are set: index, GID, and kind (`RoCE v2`, `IB/RoCE v1`).
    pub gids: Vec<(u32, String, String)>,
}

/// Examines the machine. The report says why if RDMA is not available.
pub fn devices() -> Report {
    let mut report =
        Report { locked_memory_limit: locked_memory_limit(), fork_support: "unknown".into(), ..Report::default() };
    match Device::all() {
        Ok(found) if found.is_empty() => report.trouble = Some(no_device().to_string()),
        Ok(found) => report.devices = found.iter().map(|device| describe(device)).collect(),
        Err(error) => report.trouble = Some(error.to_string()),
    }
    if !report.devices.is_empty()
        && let Ok(library) = library()
    {
        report.fork_support = fork_support(library.verbs.ibv_is_fork_initialized).into();
    }
    for at in rdma_addresses().unwrap_or_default() {
        let device = report.devices.iter_mut().find(|device| device.name == at.device);
        let port = device.and_then(|device| device.ports.iter_mut().find(|port| port.number == u32::from(at.port)));
        if let Some(port) = port {
            port.addresses.push(at.address);
        }
    }
    let ports = report.devices.iter().flat_map(|device| &device.ports);
    if !report.devices.is_empty() && !ports.clone().any(|port| port.state == "ACTIVE") {
        report.trouble =
            Some("no port of an RDMA device is active: plug in a cable, or `ip link set DEVICE up`".into());
    }
    report
}

fn fork_support(ask: Option<unsafe extern "C" fn() -> crate::bindings::ibv_fork_status>) -> &'static str {
    let Some(ask) = ask else { return "unknown" };
    // SAFETY: The call has no preconditions and only reports.
    match unsafe { ask() } {
        crate::bindings::IBV_FORK_UNNEEDED => "unneeded",
        crate::bindings::IBV_FORK_ENABLED => "enabled",
        _ => "disabled",
    }
}

fn describe(device: &Device) -> DeviceReport {
    let attributes = device.attributes();
    let number = |value: i32| u32::try_from(value).unwrap_or(0);
    let folder = Path::new("/sys/class/infiniband").join(device.name());
    DeviceReport {
        name: device.name().to_owned(),
        transport: if device.is_iwarp() { "iWARP" } else { "InfiniBand" }.into(),
        numa_node: word(&folder.join("device/numa_node")).parse().ok(),
        queue_pairs: number(attributes.max_qp),
        queue_depth: number(attributes.max_qp_wr),
        completions: number(attributes.max_cqe),
        reads_started: number(attributes.max_qp_init_rd_atom),
        reads_served: number(attributes.max_qp_rd_atom),
        reads_served_in_all: number(attributes.max_res_rd_atom),
        read_pieces: number(attributes.max_sge_rd),
        registration_bytes: attributes.max_mr_size,
        ports: (1..=u32::from(attributes.phys_port_cnt)).map(|number| port(&folder, number)).collect(),
    }
}

fn port(device: &Path, number: u32) -> PortReport {
    let folder = device.join("ports").join(number.to_string());
    // "4: ACTIVE"
    let state = word(&folder.join("state"));
    let state = state.split_once(": ").map_or(state.clone(), |(_, name)| name.to_owned());
    let network_device = word(&folder.join("gid_attrs/ndevs/0"));
    let mtu = Path::new("/sys/class/net").join(&network_device).join("mtu");
    PortReport {
        number,
        state,
        link_layer: word(&folder.join("link_layer")),
        speed: word(&folder.join("rate")),
        mtu: rdma_mtu(word(&mtu).parse().ok()),
        addresses: Vec::new(),
        gids: gids(&folder),
        network_device,
    }
}

/// The largest RDMA MTU that fits the network's MTU, with 58 bytes for RoCE's headers and checksums. InfiniBand's usual
/// MTU if there is no network device.
fn rdma_mtu(network: Option<u32>) -> u32 {
    let Some(network) = network else { return 4096 };
    [4096, 2048, 1024, 512].into_iter().find(|mtu| mtu + 58 <= network).unwrap_or(256)
}

fn gids(port: &Path) -> Vec<(u32, String, String)> {
    let mut gids = Vec::new();
    for entry in fs::read_dir(port.join("gids")).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let gid = word(&entry.path());
        if gid.is_empty() || gid.bytes().all(|byte| byte == b'0' || byte == b':') {
            continue;
        }
        let kind = word(&port.join("gid_attrs/types").join(&name));
        gids.push((name.parse().unwrap_or(0), gid, kind));
    }
    gids.sort();
    gids
}

/// The content of a kernel file; empty if it cannot be read.
fn word(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The locked-memory limit, which registrations count against; `None` if the process may exceed it.
fn locked_memory_limit() -> Option<u64> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current?;
    // Bit 14 of the capabilities is CAP_IPC_LOCK.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    (effective & (1 << 14) == 0).then_some(limit)
}

// Which address of this host belongs to which port of which RDMA device. Connections are made by address; users know
// devices by name.
//
// The connection manager answers this, as it also selects the device of a connection: an address is bound, and the
// device that it is bound to is read. So the answer is right for InfiniBand, whose addresses belong to another device
// (IPoIB), for RoCE and iWARP, and for all ports of a bond.

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
