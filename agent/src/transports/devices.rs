//! `remora devices`: which transports this host has, and what it lacks. It changes nothing.

use std::fs;
use std::net::IpAddr;

use remora_fabric::verbs::{self, DeviceReport, PortReport};
use remora_fabric::{Memory, Pages, TransportKind};
use serde_json::{Value, json};

use crate::args::DevicesArgs;
use crate::exit::Failure;
use crate::progress;
use crate::units::Size;

/// One sentence for each transport, best first: what this host has of it or lacks.
pub fn verdicts() -> [(TransportKind, String); 3] {
    let (rdma, shm, tcp) = (verbs::devices(), shm_verdict(), Tcp::look());
    [(TransportKind::Shm, of_shm(&shm)), (TransportKind::Verbs, of_rdma(&rdma)), (TransportKind::Tcp, tcp.verdict())]
}

/// Prints the report on stdout.
///
/// # Errors
/// Stdout cannot be written. A host without RDMA gives a report too.
pub fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let (rdma, shm, tcp) = (verbs::devices(), shm_verdict(), Tcp::look());
    match args.json {
        true => progress::print_line(&as_json(&rdma, &shm, &tcp).to_string()),
        false => progress::print(&as_text(&rdma, &shm, &tcp)),
    }
}

/// Whether memory can be shared with other processes of this host. It tries to.
fn shm_verdict() -> Result<(), String> {
    let memory = Memory::create("remora-devices", SHM_TRIAL_BYTES, Pages::Small).map_err(|error| error.to_string())?;
    memory.open_view().map(drop).map_err(|error| error.to_string())
}

/// Bytes of the memory for the attempt: one page is enough.
const SHM_TRIAL_BYTES: u64 = 4096;

/// The features of the kernel's TCP.
struct Tcp {
    congestion: String,
    allowed: String,
    available: String,
    multipath: Option<bool>,
}

impl Tcp {
    fn look() -> Tcp {
        let ipv4 = |name: &str| word(&format!("/proc/sys/net/ipv4/{name}"));
        let multipath = fs::read_to_string("/proc/sys/net/mptcp/enabled").ok().map(|text| text.trim() == "1");
        Tcp {
            congestion: ipv4("tcp_congestion_control"),
            allowed: ipv4("tcp_allowed_congestion_control"),
            available: ipv4("tcp_available_congestion_control"),
            multipath,
        }
    }

    fn verdict(&self) -> String {
        format!(
            "ready; congestion control {} (--tcp-congestion may name: {}; loaded: {}); multipath TCP: {}",
            self.congestion,
            self.allowed,
            self.available,
            self.multipath_word()
        )
    }

    fn multipath_word(&self) -> &'static str {
        match self.multipath {
            Some(true) => "on",
            Some(false) => "off",
            None => "not in this kernel",
        }
    }
}

fn word(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
}

fn of_rdma(rdma: &verbs::Report) -> String {
    rdma.trouble.clone().unwrap_or_else(|| "ready".into())
}

fn of_shm(shm: &Result<(), String>) -> String {
    shm.as_ref().err().cloned().unwrap_or_else(|| "ready, for agents on one host".into())
}

fn as_text(rdma: &verbs::Report, shm: &Result<(), String>, tcp: &Tcp) -> String {
    let mut text = String::new();
    for device in &rdma.devices {
        text.push_str(&of_device(device));
    }
    let locked = rdma.locked_memory_limit.map_or("none".into(), |bytes| Size::bytes(bytes).to_string());
    text.push_str(&format!(
        "rdma   {}\n       limit of locked memory: {locked}; fork support: {}\n",
        of_rdma(rdma),
        rdma.fork_support
    ));
    text.push_str(&format!("shm    {}\n", of_shm(shm)));
    text.push_str(&format!("tcp    {}\n", tcp.verdict()));
    text
}

fn of_device(device: &DeviceReport) -> String {
    let node = device.numa_node.map_or("none".into(), |node| node.to_string());
    let mut text = format!(
        "{}  {}, NUMA node {node}\n  \
         {} queue pairs of {} requests, completion queues of {}\n  \
         READs at once: {} started and {} served per queue pair, {} served in all; scattered into {} pieces\n",
        device.name,
        device.transport,
        device.queue_pairs,
        device.queue_depth,
        device.completions,
        device.reads_started,
        device.reads_served,
        device.reads_served_in_all,
        device.read_pieces,
    );
    for port in &device.ports {
        text.push_str(&of_port(port));
    }
    text.push('\n');
    text
}

fn of_port(port: &PortReport) -> String {
    let below = match port.network_device.as_str() {
        "" => String::new(),
        name => format!(" on {name}"),
    };
    let mut text = format!(
        "  port {}: {}, {}{below}, {}, packets of {} bytes\n",
        port.number, port.state, port.link_layer, port.speed, port.mtu
    );
    match port.addresses.as_slice() {
        [] => text.push_str("    no address: RDMA connections need one, so assign one to its network device\n"),
        some => text
            .push_str(&format!("    address {}\n", some.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", "))),
    }
    for (index, gid, kind) in &port.gids {
        text.push_str(&format!("    GID {index:>2}  {gid}  {kind}\n"));
    }
    text
}

fn as_json(rdma: &verbs::Report, shm: &Result<(), String>, tcp: &Tcp) -> Value {
    let devices: Vec<Value> = rdma
        .devices
        .iter()
        .map(|device| {
            json!({
                "name": device.name,
                "transport": device.transport,
                "numa_node": device.numa_node,
                "queue_pairs": device.queue_pairs,
                "queue_depth": device.queue_depth,
                "completions": device.completions,
                "reads_started": device.reads_started,
                "reads_served": device.reads_served,
                "reads_served_in_all": device.reads_served_in_all,
                "read_pieces": device.read_pieces,
                "registration_bytes": device.registration_bytes,
                "ports": device.ports.iter().map(port_as_json).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "rdma": {
            "ready": rdma.trouble.is_none(),
            "trouble": rdma.trouble,
            "locked_memory_limit": rdma.locked_memory_limit,
            "fork_support": rdma.fork_support,
            "devices": devices,
        },
        "shm": { "ready": shm.is_ok(), "trouble": shm.as_ref().err() },
        "tcp": {
            "ready": true,
            "congestion_control": tcp.congestion,
            "allowed": tcp.allowed.split_whitespace().collect::<Vec<_>>(),
            "available": tcp.available.split_whitespace().collect::<Vec<_>>(),
            "multipath": tcp.multipath,
        },
    })
}

fn port_as_json(port: &PortReport) -> Value {
    let gids: Vec<Value> =
        port.gids.iter().map(|(index, gid, kind)| json!({ "index": index, "gid": gid, "kind": kind })).collect();
    json!({
        "number": port.number,
        "state": port.state,
        "link_layer": port.link_layer,
        "network_device": port.network_device,
        "speed": port.speed,
        "mtu": port.mtu,
        "addresses": port.addresses,
        "gids": gids,
    })
}
