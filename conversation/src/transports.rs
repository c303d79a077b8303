//! The transports that an agent offers or uses, and why not the others. `remora_fabric` has the transports themselves.
//!
//! ```text
//!   source   shm ── verbs ── tcp      what this host and `--listen` allow; every offer has a key for each
//!                                                │
//!   replica  shm ─▶ verbs ─▶ tcp      the first over which the tables can be read, or the requested one
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::verbs::{
    self, CompletionMode, DeviceReport, MAX_CONNECTIONS, PortReport, VerbsConnector, VerbsExporter, VerbsOptions,
};
use remora_fabric::{Connector, Error, Exporter, KeyError, Memory, Pages, TransportKind};
use serde_json::{Value, json};

use crate::Security;
use remora_base::units::{Size, UnitError};
use remora_process::exit::Failure;
use remora_process::progress;

/// The label under which data lanes derive their secret from the session's key: both ends must derive it alike.
pub const LANES_LABEL: &[u8] = b"remora data lanes";

// What the user may choose.

/// The transport to read over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportChoice {
    /// The first that works, the fastest first.
    Auto,
    /// Shared memory of this host.
    Shm,
    /// RDMA.
    Verbs,
    /// TCP.
    Tcp,
}

/// Which RDMA devices an end uses, and how its packets are marked.
#[derive(Clone, Debug, Default)]
pub struct RdmaEnd {
    /// The local addresses of the devices, one for each port. Empty, and no `devices`: those that fit the connection.
    pub addresses: Vec<IpAddr>,
    /// The devices' names, in place of addresses.
    pub devices: Vec<String>,
    /// The one port of `devices` to use; `None`: all that are active.
    pub port: Option<u8>,
    /// The traffic class of RoCE packets.
    pub traffic_class: Option<u8>,
    /// The service level of packets, 0 to 15; `None`: the one that the network assigns.
    pub service_level: Option<u8>,
}

impl RdmaEnd {
    /// Whether the user has named a device.
    pub fn is_named(&self) -> bool {
        !self.addresses.is_empty() || !self.devices.is_empty()
    }

    /// The addresses of the named devices; empty if none was named.
    ///
    /// # Errors
    /// The named device, or its port, has no address of this host.
    pub fn local_addresses(&self) -> Result<Vec<IpAddr>, Error> {
        let mut addresses = self.addresses.clone();
        for device in &self.devices {
            addresses.extend(verbs::addresses_of(device, self.port)?);
        }
        Ok(addresses)
    }
}

/// How an end offers RDMA.
#[derive(Clone, Debug, Default)]
pub struct RdmaOffer {
    /// Whether it is not offered, even if there are devices.
    pub is_off: bool,
    /// The devices.
    pub end: RdmaEnd,
}

/// How a reader reads over RDMA.
#[derive(Clone, Debug)]
pub struct RdmaRead {
    /// The devices.
    pub end: RdmaEnd,
    /// Queue pairs per table, 1 to 8.
    pub queue_pairs: u8,
    /// Pieces posted per queue pair, 1 to 1024.
    pub queue_depth: u32,
    /// READs in flight per queue pair, 1 to 16.
    pub reads: u8,
    /// Longer reads are cut into pieces of this size: whole pages, 4 KiB to 1 GiB.
    pub piece: Size,
    /// How to wait for the device.
    pub completion: CompletionMode,
}

impl Default for RdmaRead {
    fn default() -> RdmaRead {
        RdmaRead {
            end: RdmaEnd::default(),
            queue_pairs: 1,
            queue_depth: 64,
            reads: 16,
            piece: Size::bytes(256 << 10),
            completion: CompletionMode::PollThenArm,
        }
    }
}

/// How fast an agent sends slots to others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UploadLimit {
    /// As fast as leaves the queue of the network link short for others.
    #[default]
    Auto,
    /// As fast as TCP does.
    Unlimited,
    /// Bytes per second.
    Rate(Size),
}

impl UploadLimit {
    /// The rate; `None` if none is given.
    pub fn rate(self) -> Option<Size> {
        match self {
            UploadLimit::Rate(rate) => Some(rate),
            UploadLimit::Auto | UploadLimit::Unlimited => None,
        }
    }
}

impl FromStr for UploadLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<UploadLimit, String> {
        match text {
            "auto" => Ok(UploadLimit::Auto),
            "none" => Ok(UploadLimit::Unlimited),
            rate => parse_rate(rate).map(UploadLimit::Rate).map_err(|error| format!("{error}; or auto, or none")),
        }
    }
}

impl fmt::Display for UploadLimit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UploadLimit::Auto => to.write_str("auto"),
            UploadLimit::Unlimited => to.write_str("none"),
            UploadLimit::Rate(rate) => write!(to, "{}", rate.get()),
        }
    }
}

/// The lowest rate: below it a slot of the default size takes longer than its reader waits for a byte of it.
const LEAST_RATE: Size = Size::bytes(64 << 10);

/// The rate in bytes per second that this text gives.
///
/// # Errors
/// The text is not a size, or the rate is below [`LEAST_RATE`].
pub fn parse_rate(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    if size < LEAST_RATE { Err(format!("the rate must be at least {LEAST_RATE} per second")) } else { Ok(size) }
}

// The replica's choice: which connectors to try, in which order, and why the others were rejected.

/// The transports that the replica may use, and their settings.
#[derive(Clone, Debug)]
pub struct TransportChoices {
    /// Which transports.
    pub choice: TransportChoice,
    /// Connections of one TCP reader, 1 to 4.
    pub lanes: u8,
    /// How to read over RDMA.
    pub rdma: RdmaRead,
    /// What protects the control connections, and whether tables must be sealed.
    pub security: Security,
}

impl TransportChoices {
    /// The kinds that this end may use, best first, for the source.
    pub fn kinds(&self) -> Vec<TransportKind> {
        match self.choice {
            TransportChoice::Auto => vec![TransportKind::Shm, TransportKind::Verbs, TransportKind::Tcp],
            TransportChoice::Shm => vec![TransportKind::Shm],
            TransportChoice::Verbs => vec![TransportKind::Verbs],
            TransportChoice::Tcp => vec![TransportKind::Tcp],
        }
    }

    /// The connectors to a source at the address `source`, best first. `is_sealed`: what they read is ciphertext.
    pub fn connectors(&self, source: SocketAddr, is_sealed: bool) -> Connectors {
        Connectors { candidates: self.each(source, is_sealed).into(), passed_over: Vec::new() }
    }

    /// The connectors to another replica that passes its slots on at the address `lender`. `own`: this host's address
    /// in the conversation with it. The source has assigned `lender`, and the keys of that replica may lead nowhere
    /// else: TCP connects to that address and port only, and this end opens a socket of this host only if both replicas
    /// run on it. Keys of RDMA name addresses of devices, of which the conversation says nothing.
    pub fn connectors_to_lender(&self, lender: SocketAddr, own: SocketAddr, is_sealed: bool) -> Connectors {
        let is_here = lender.ip() == own.ip() || (lender.ip().is_loopback() && own.ip().is_loopback());
        let connector = |kind| match kind {
            TransportKind::Shm if !is_here => Err(Error::Key(KeyError::Body(NOT_OF_THIS_HOST))),
            TransportKind::Tcp => {
                let connector: Box<dyn Connector> = Box::new(self.tcp(lender, Some(lender), is_sealed)?);
                Ok(connector)
            }
            kind => self.connector(kind, lender, is_sealed),
        };
        let candidates = self.kinds().into_iter().map(|kind| (kind, connector(kind))).collect();
        Connectors { candidates, passed_over: Vec::new() }
    }

    /// The connector of each transport to a source at the address `source`, or why there is none.
    pub fn each(&self, source: SocketAddr, is_sealed: bool) -> Vec<Candidate> {
        self.kinds().into_iter().map(|kind| (kind, self.connector(kind, source, is_sealed))).collect()
    }

    fn connector(&self, kind: TransportKind, source: SocketAddr, is_sealed: bool) -> Result<Box<dyn Connector>, Error> {
        Ok(match kind {
            TransportKind::Shm => Box::new(ShmConnector::new()),
            TransportKind::Verbs => Box::new(self.verbs(source, is_sealed)?),
            _ => Box::new(self.tcp(source, None, is_sealed)?),
        })
    }

    /// A connector to the end that was reached at `source`. `only`: the one address to which its keys may lead.
    fn tcp(&self, source: SocketAddr, only: Option<SocketAddr>, is_sealed: bool) -> Result<TcpConnector, Error> {
        let connector = TcpConnector::new(TcpOptions { lanes: self.lanes, ..TcpOptions::default() }, Some(source))?;
        // The region's key names the address, which need not be that of the conversation.
        let security = self.security.clone();
        Ok(connector.with_check(move |address| {
            let same = |only: SocketAddr| {
                (only.ip().to_canonical(), only.port()) == (address.ip().to_canonical(), address.port())
            };
            match is_sealed || security.permits_plain_data(address.ip()) {
                _ if !only.is_none_or(same) => Err(Error::Key(KeyError::Body(ELSEWHERE))),
                true => Ok(()),
                false => Err(Error::Misuse(NOT_SEALED)),
            }
        }))
    }

    fn verbs(&self, source: SocketAddr, is_sealed: bool) -> Result<VerbsConnector, Error> {
        let rdma = &self.rdma;
        let options = VerbsOptions {
            queue_pairs: rdma.queue_pairs,
            queue_depth: rdma.queue_depth,
            reads_in_flight: rdma.reads,
            piece_bytes: u32::try_from(rdma.piece.get()).unwrap_or(u32::MAX),
            completion: rdma.completion,
            traffic_class: rdma.end.traffic_class,
            service_level: rdma.end.service_level,
            connect_timeout: CONNECT_LIMIT,
            ..VerbsOptions::default()
        };
        // A host without a device is the better reason.
        let connector = VerbsConnector::new(options, Some(source), rdma.end.local_addresses()?)?;
        match is_sealed || self.security.permits_plain_network() {
            true => Ok(connector),
            false => Err(Error::Misuse(NOT_SEALED)),
        }
    }
}

/// A transport, and its connector or why there is none.
pub type Candidate = (TransportKind, Result<Box<dyn Connector>, Error>);

/// The connectors that are still to be tried, best first, and why others were rejected.
pub struct Connectors {
    candidates: VecDeque<Candidate>,
    passed_over: Vec<String>,
}

impl Connectors {
    /// The best remaining connector. It rejects those that are not available on this host.
    pub fn best(&mut self) -> Option<&dyn Connector> {
        while let Some((_, Err(error))) = self.candidates.front() {
            let why = error.to_string();
            self.pass_over(&why);
        }
        self.candidates.front().and_then(|(_, connector)| connector.as_deref().ok())
    }

    /// Rejects the best remaining connector, for this reason.
    pub fn pass_over(&mut self, why: &str) {
        if let Some((kind, _)) = self.candidates.pop_front() {
            self.passed_over.push(format!("{kind}: {why}"));
        }
    }

    /// Why the rejected ones were rejected, as one text.
    pub fn why(&self) -> String {
        self.passed_over.join("; ")
    }
}

/// How long RDMA may take to connect before the next transport is tried. A lost request is repeated once, after about 4
/// s.
const CONNECT_LIMIT: Duration = Duration::from_secs(6);

/// Why a transport is not used for which the other end has no key.
pub fn not_offered(kind: TransportKind) -> &'static str {
    match kind {
        TransportKind::Verbs => {
            "the source does not offer it: its host has no RDMA device, or it was started with --no-rdma or with --security none"
        }
        TransportKind::Shm => "the source does not offer it: it was started with --no-shm",
        _ => "the source does not offer it",
    }
}

/// Why a lender's key is not used.
const ELSEWHERE: &str = "it leads to another address than that of the replica that the source has assigned";
const NOT_OF_THIS_HOST: &str = "a replica on another host has no sockets of this one";

/// Why a transport is not used.
const NOT_SEALED: &str = "the data would not be encrypted: start the source with --security token, or both ends with \
    --security none --plaintext-network";

// The source's RDMA: whether it can be offered, at which addresses, and the registration of the tables' memory in
// advance.

/// Opens an RDMA exporter for this many readers and registers `memories` with it. If this host has no usable RDMA, a
/// log line says why.
///
/// It listens at the given addresses, or else at that of `listen`. If no option names RDMA, its absence is not an
/// error: replicas then read over TCP. It blocks, because registration backs all of the memory with pages.
///
/// # Errors
/// `--rdma-address` or `--rdma-device` was given, and RDMA is not available.
pub fn rdma(
    wanted: &RdmaOffer,
    listen: SocketAddr,
    replicas: usize,
    memories: &[Arc<Memory>],
) -> Result<Option<Arc<dyn Exporter>>, Failure> {
    if wanted.is_off {
        return Ok(None);
    }
    let is_asked = wanted.end.is_named();
    if !is_asked && listen.ip().is_loopback() {
        tracing::debug!("RDMA is not offered: --listen accepts connections of this host only");
        return Ok(None);
    }
    match open(wanted, listen, replicas, memories) {
        Ok(exporter) => {
            let (devices, addresses) = (exporter.devices().join(", "), exporter.addresses());
            tracing::info!(%devices, ?addresses, "RDMA is offered");
            Ok(Some(Arc::new(exporter)))
        }
        Err(error) if is_asked => Err(Failure::refused(error.to_string())),
        Err(error) => {
            tracing::info!("RDMA is not offered; replicas on other hosts will use TCP: {error}");
            Ok(None)
        }
    }
}

fn open(
    wanted: &RdmaOffer,
    listen: SocketAddr,
    replicas: usize,
    memories: &[Arc<Memory>],
) -> Result<VerbsExporter, Error> {
    let RdmaEnd { traffic_class, service_level, .. } = wanted.end;
    let named = wanted.end.local_addresses()?;
    let hosts: Vec<IpAddr> = if named.is_empty() { vec![listen.ip()] } else { named };
    // A reader has one connection per region and address. It may reconnect before its old ones are found closed.
    let connections = replicas * REGIONS * hosts.len() * 2;
    let defaults = VerbsOptions::default();
    let connections = connections.clamp(defaults.connections, MAX_CONNECTIONS);
    let iwarp = wanted.end.is_named();
    let options = VerbsOptions { traffic_class, service_level, connections, iwarp, ..defaults };
    // RDMA has ports of its own, so TCP's number is nearly always free there and easy to remember. (iWARP uses TCP's
    // ports, so it is not free there.)
    let at = |port| hosts.iter().map(|host| SocketAddr::new(*host, port)).collect::<Vec<_>>();
    let exporter = VerbsExporter::listen(options.clone(), &at(listen.port()))
        .or_else(|_| VerbsExporter::listen(options, &at(ANY_PORT)))?;
    memories.iter().try_for_each(|memory| exporter.prepare(memory))?;
    Ok(exporter)
}

/// The regions that each reader reads: the snapshot and the journal.
const REGIONS: usize = 2;

/// Any free port.
const ANY_PORT: u16 = 0;

// `remora devices`: which transports this host has, and what it lacks. It changes nothing.

/// One sentence for each transport, best first: what this host has of it or lacks.
pub fn verdicts() -> [(TransportKind, String); 3] {
    let (rdma, shm, tcp) = (verbs::devices(), shm_verdict(), Tcp::look());
    [(TransportKind::Shm, of_shm(&shm)), (TransportKind::Verbs, of_rdma(&rdma)), (TransportKind::Tcp, tcp.verdict())]
}

/// Prints the report on stdout: as text, or as one JSON object.
///
/// # Errors
/// Stdout cannot be written. A host without RDMA gives a report too.
pub fn print_report(as_one_object: bool) -> Result<(), Failure> {
    let (rdma, shm, tcp) = (verbs::devices(), shm_verdict(), Tcp::look());
    match as_one_object {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use remora_fabric::shm::{ShmExporter, ShmOptions};
    use remora_fabric::{Exporter, Memory, Pages, RegionId, Regions};

    use super::*;

    #[test]
    fn a_socket_of_this_host_is_taken_from_a_lender_on_this_host_only() {
        let (choice, rdma) = (TransportChoice::Shm, RdmaRead::default());
        let choices = TransportChoices { choice, lanes: 1, rdma, security: Security::default() };
        let memory = || Arc::new(Memory::create("lent", 4096, Pages::Small).unwrap());
        let exporter = ShmExporter::bind(ShmOptions::default()).unwrap();
        let id = RegionId { generation: 1, region: 16 };
        exporter.export(id, memory()).unwrap();
        exporter.grant(1, [7; 32], Regions::All);
        let key = exporter.key(id).unwrap();
        let address = |text: &str| text.parse().unwrap();
        let reach = |lender: &str, own: &str| {
            let mut connectors = choices.connectors_to_lender(address(lender), address(own), true);
            let is_read = connectors.best().is_some_and(|best| best.connect(&key, 1, &[7; 32], memory()).is_ok());
            (is_read, connectors.why())
        };
        for (lender, own) in [("192.0.2.1:7", "192.0.2.1:9"), ("127.0.0.2:7", "127.0.0.1:9")] {
            assert_eq!(reach(lender, own), (true, String::new()));
        }
        let (is_read, why) = reach("192.0.2.2:7", "192.0.2.1:9");
        assert!(!is_read && why.contains("a replica on another host"), "{why}");
    }

    #[test]
    fn a_rate_that_would_stall_every_reader_is_refused() {
        assert!(parse_rate("1MiB").is_ok());
        assert!(parse_rate("0").is_err() && parse_rate("1KiB").is_err());
    }

    #[test]
    fn it_is_a_word_or_a_rate() {
        assert_eq!("auto".parse(), Ok(UploadLimit::Auto));
        assert_eq!("none".parse(), Ok(UploadLimit::Unlimited));
        assert_eq!("105MiB".parse(), Ok(UploadLimit::Rate(Size::mebibytes(105))));
        for wrong in ["", "0", "1KiB", "Auto", "fast"] {
            assert!(wrong.parse::<UploadLimit>().is_err_and(|error| error.ends_with("or auto, or none")), "{wrong}");
        }
        for same in ["auto", "none", "110100480"] {
            assert_eq!(same.parse::<UploadLimit>().map(|limit| limit.to_string()), Ok(same.to_owned()));
        }
    }
}
