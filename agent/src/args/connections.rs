//! The options of every agent's connections: which server and how to log in, which Sentinels, what protects the
//! connections to peers, which peers there are, how fast they get slots, by which RDMA devices, and what is shown to
//! those who watch.

use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::builder::TypedValueParser;
use clap::error::{Error, ErrorKind};
use clap::{Arg, Args, Command};
use rustls::pki_types::ServerName;

use super::{HostPort, Words, one_of, parse_ip, parse_listen};
use crate::conversation::security::{CertificateFiles, CertificateRoles, Certificates, MTLS_OPTIONS};
use crate::conversation::tokens::{Credentials, TokenFiles};
use crate::conversation::{Mode, Security, SourceKey};
use crate::exit::{Code, Failure};
use crate::sentinel::{MOST_SENTINELS, Sentinels};
use crate::transports::{RdmaEnd, RdmaOffer, RdmaRead};
use crate::units::{Size, UnitError};
use remora_base::x509::Fingerprint;
use remora_fabric::verbs::CompletionMode;
use remora_replica::LinkTls;
use remora_server::{Login, Password, Server, ServerUrl, SetupError, Task, TlsOptions, UrlError};
use remora_wire::is_printable;

// The options that say what protects the connections between agents.

/// What protects the connections between agents.
#[derive(Clone, Debug, Args)]
pub struct SecurityArgs {
    /// Protection of the agents' connections. `token`: TLS 1.3, authenticated by the token, and tables that are
    /// encrypted once for all replicas on other hosts. `mtls`: the same with certificates of both ends (--cert, --key,
    /// --ca), and with a token only if one is given. `none`: the data can be read and changed on the network. Default:
    /// `token` for every address that is not loopback, `none` for loopback.
    #[arg(long, value_name = "HOW", value_parser = one_of(MODES), help_heading = "Security")]
    pub security: Option<Mode>,

    /// With `--security none`: allow addresses that are not loopback, and RDMA without encryption. A host that can read
    /// the network's packets can then read the data, and one that can change them can change a value without notice.
    #[arg(long, help_heading = "Security")]
    pub plaintext_network: bool,

    /// For `mtls`: the certificate of this agent (PEM), then those between it and its authority. It must be valid for
    /// servers at a source and a replica that serves slots, and for clients at every other command and a replica.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub cert: Option<PathBuf>,

    /// For `mtls`: the private key (PEM) of that certificate, which other users may not read.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub key: Option<PathBuf>,

    /// For `mtls`: the certificates (PEM) of the authorities that sign those of all agents. Give several in one file
    /// while one replaces another. Commands that serve read the three files again on SIGHUP.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub ca: Option<PathBuf>,

    /// For `mtls`: the name that the certificates of the source and of replicas that serve slots must be for, where
    /// no option names that of the one or the other. Default: the host in --source, and the IP address of a replica.
    #[arg(long, value_name = "NAME", help_heading = "Security")]
    pub peer_name: Option<String>,
}

/// Which source a command expects.
#[derive(Clone, Debug, Args)]
pub struct SourceKeyArgs {
    /// The key that the source must hold, as `remora source --identity` logs it: 64 hexadecimal digits. A holder of the
    /// token without that key cannot pose as the source. The conversation has TLS then, on loopback too.
    #[arg(long, value_name = "KEY", help_heading = "Security")]
    pub source_key: Option<SourceKey>,

    /// For `mtls`: the name that the source's certificate must be for. Default: that of --peer-name, or the host in
    /// --source. If no other agent's certificate is for this name, none of them can pose as the source.
    #[arg(long, value_name = "NAME", value_parser = parse_name_of_peer, help_heading = "Security")]
    pub source_name: Option<String>,
}

impl SourceKeyArgs {
    /// Whether each connection proves that it leads to the right source.
    pub(crate) fn is_given(&self) -> bool {
        self.source_key.is_some() || self.source_name.is_some()
    }
}

/// Which replicas a replica reads from.
#[derive(Clone, Debug, Default, Args)]
pub struct LenderNameArgs {
    /// For `mtls`: the name that the certificates of replicas that serve slots to this one must be for. Default: that
    /// of --peer-name, or the IP address of the replica.
    #[arg(long, value_name = "NAME", value_parser = parse_name_of_peer, help_heading = "Security")]
    pub lender_name: Option<String>,
}

impl LenderNameArgs {
    /// Adds the name to what the other options say.
    ///
    /// # Errors
    /// These are not for certificates.
    pub(crate) fn apply(&self, given: &SecurityArgs, security: Security) -> Result<Security, Failure> {
        match (&self.lender_name, given.security) {
            (None, _) => Ok(security),
            (Some(name), Some(Mode::Mtls)) => Ok(security.with_lender_name(name.clone())),
            _ => usage("--lender-name goes with --security mtls only"),
        }
    }
}

/// Which certificates may become replicas.
#[derive(Clone, Debug, Default, Args)]
pub struct ReplicaNameArgs {
    /// For `mtls`: a name (DNS or IP address) in the certificates of replicas: only these may read the data. May be
    /// repeated. Default: every certificate that an authority in --ca has signed.
    #[arg(long = "replica-name", value_name = "NAME", value_parser = parse_certificate_name, help_heading = "Security")]
    pub replica_names: Vec<ServerName<'static>>,
}

/// Which certificates may ask for the status, or measure, and no more.
#[derive(Clone, Debug, Default, Args)]
pub struct MonitorNameArgs {
    /// For `mtls`: a name (DNS or IP address) in the certificates of monitors: `remora status` with such a certificate
    /// gets the status, and every other request is refused. May be repeated.
    #[arg(long = "monitor-name", value_name = "NAME", value_parser = parse_certificate_name, help_heading = "Security")]
    pub monitor_names: Vec<ServerName<'static>>,

    /// For `mtls`: a name (DNS or IP address) in the certificates of those who measure: `remora probe` and `remora
    /// status` work with such a certificate, and every other request is refused. May be repeated.
    #[arg(long = "probe-name", value_name = "NAME", value_parser = parse_certificate_name, help_heading = "Security")]
    pub probe_names: Vec<ServerName<'static>>,
}

fn parse_certificate_name(text: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(text.to_owned())
        .map_err(|_| "expected a DNS name or an IP address, as in db1.example.org or 10.0.0.5".to_owned())
}

/// The same, as an option for the end that connects.
fn parse_name_of_peer(text: &str) -> Result<String, String> {
    parse_certificate_name(text).map(|_| text.to_owned())
}

impl SecurityArgs {
    /// What the options say, for an end that expects this source, and where certificates have these roles.
    ///
    /// # Errors
    /// As [`SecurityArgs::open`].
    pub(crate) fn open_for(&self, source: &SourceKeyArgs, roles: CertificateRoles) -> Result<Security, Failure> {
        match (source.source_key, self.security) {
            (Some(_), Some(Mode::None)) => usage("--source-key needs TLS: omit --security none"),
            (Some(_), Some(Mode::Mtls)) => {
                usage("--source-key goes with the token; --security mtls checks certificates")
            }
            (None, mode) if source.source_name.is_some() && mode != Some(Mode::Mtls) => {
                usage("--source-name goes with --security mtls only")
            }
            _ => Ok(self.open(roles)?.with_source_name(source.source_name.clone())),
        }
    }

    /// What proves a command to this source that asks, and lends nothing.
    ///
    /// # Errors
    /// As [`SecurityArgs::open_for`], or the token cannot be used.
    pub(crate) fn credentials(
        &self,
        token_file: Option<&PathBuf>,
        source: &SourceKeyArgs,
    ) -> Result<Credentials, Failure> {
        let security = self.open_for(source, CertificateRoles::default())?;
        Credentials::read(token_file, security, source.source_key)
    }

    /// What the options say.
    ///
    /// # Errors
    /// They contradict each other, or a file cannot be used.
    pub(crate) fn open(&self, roles: CertificateRoles) -> Result<Security, Failure> {
        if !roles.is_empty() && self.security != Some(Mode::Mtls) {
            return usage("--replica-name, --probe-name and --monitor-name go with --security mtls only");
        }
        match (self.security, &self.cert, &self.key, &self.ca) {
            (Some(Mode::Mtls), Some(cert), Some(key), Some(ca)) => {
                if self.plaintext_network {
                    return usage(PLAINTEXT_ALONE);
                }
                let (chain, key, authorities) = (cert.clone(), key.clone(), ca.clone());
                let files = CertificateFiles { chain, key, authorities, options: MTLS_OPTIONS };
                Ok(Security::mtls(Certificates::read(files, roles)?, self.peer_name.clone()))
            }
            (Some(Mode::Mtls), ..) => usage("--security mtls needs --cert, --key and --ca"),
            (_, None, None, None) if self.peer_name.is_none() => {
                if self.plaintext_network && self.security != Some(Mode::None) {
                    return usage(PLAINTEXT_ALONE);
                }
                Ok(Security::new(self.security, self.plaintext_network))
            }
            _ => usage("--cert, --key, --ca and --peer-name go with --security mtls only"),
        }
    }
}

/// The values of `--security`.
const MODES: Words<Mode, 3> = [
    (
        "none",
        "Only the proofs and seals of the control connection: the data can be read and changed on the network",
        Mode::None,
    ),
    ("token", "TLS 1.3, authenticated by the token", Mode::Token),
    ("mtls", "TLS 1.3 with certificates of both ends, and by the token where one is given", Mode::Mtls),
];

const PLAINTEXT_ALONE: &str = "--plaintext-network goes with --security none only: give both or neither";

fn usage<T>(text: &str) -> Result<T, Failure> {
    Err(Failure::new(Code::Usage, text))
}

/// The tokens of an agent that reads slots and serves them to others, and what protects its connections.
///
/// # Errors
/// The options contradict each other, a file cannot be used, or slots must not be served at the address that was given.
pub(super) fn open_tokens(
    files: &[PathBuf],
    security: &SecurityArgs,
    source: &SourceKeyArgs,
    (readers, lender): (&ReplicaNameArgs, &LenderNameArgs),
    peer_listen: Option<SocketAddr>,
) -> Result<TokenFiles, Failure> {
    let roles = CertificateRoles { replicas: readers.replica_names.clone(), ..CertificateRoles::default() };
    let opened = lender.apply(security, security.open_for(source, roles)?)?;
    if let Some(listen) = peer_listen {
        let refused = |why| Failure::refused(format!("this replica agent at --peer-listen {listen} {why}"));
        opened.check(listen.ip()).map_err(refused)?;
    }
    TokenFiles::read(files, &[], opened)
}

// The options of an agent that makes replicas: its peers are the source, and other replicas.

/// How the agent proves itself to its peers, which of them it believes, and its name among them.
#[derive(Clone, Debug, Args)]
pub struct PeerArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub readers: ReplicaNameArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub expected: SourceKeyArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub sentinel: SentinelArgs,

    /// Name to appear under in `remora status` and the source's log. Default: the server's address.
    #[arg(long, value_name = "NAME", value_parser = parse_name, help_heading = "Source")]
    pub name: Option<String>,
}

pub(super) fn parse_name(text: &str) -> Result<String, String> {
    match text.chars().find(|character| !is_printable(*character)) {
        Some(character) => Err(format!("a name has printable characters only, and not {character:?}")),
        None => Ok(text.to_owned()),
    }
}

// The RDMA options of source and replica, and of the ends of a volume.

/// Which RDMA devices an end uses, and how its packets are marked.
#[derive(Clone, Debug, Default, Args)]
pub struct RdmaEndArgs {
    /// Use the RDMA device that has this local address; may be repeated, once per port. Default: a source uses the
    /// device with the address of --listen, a reader the one to which the system's routes lead. What belongs to
    /// volumes (a server's copies, a writer's large writes) is offered only by devices that are named, and without
    /// encryption: that needs `--security none` and `--plaintext-network`.
    #[arg(long, value_name = "ADDR", value_parser = parse_ip, help_heading = "RDMA")]
    pub rdma_address: Vec<IpAddr>,

    /// Use the RDMA device with this name, as `remora devices` lists it, by an address of each of its active ports; may
    /// be repeated.
    #[arg(long, value_name = "NAME", conflicts_with = "rdma_address", help_heading = "RDMA")]
    pub rdma_device: Vec<String>,

    /// Use only this port of the device that `--rdma-device` names.
    #[arg(long, value_name = "N", requires = "rdma_device", value_parser = clap::value_parser!(u8).range(1..), help_heading = "RDMA")]
    pub rdma_port: Option<u8>,

    /// Traffic class of RoCE packets (the IP type-of-service byte), by which switches recognise lossless traffic.
    #[arg(long, value_name = "N", help_heading = "RDMA")]
    pub rdma_traffic_class: Option<u8>,

    /// Service level of packets, 0 to 15: on InfiniBand it chooses the virtual lane, on RoCE the Ethernet priority.
    /// Default: the one that the subnet manager, or the traffic class, assigns.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=15), help_heading = "RDMA")]
    pub rdma_service_level: Option<u8>,
}

impl RdmaEndArgs {
    /// The options without their clap attributes.
    pub(crate) fn options(&self) -> RdmaEnd {
        RdmaEnd {
            addresses: self.rdma_address.clone(),
            devices: self.rdma_device.clone(),
            port: self.rdma_port,
            traffic_class: self.rdma_traffic_class,
            service_level: self.rdma_service_level,
        }
    }
}

/// How a source offers RDMA.
#[derive(Clone, Debug, Default, Args)]
pub struct RdmaOfferArgs {
    /// Do not offer RDMA even if there are devices. (If an option names a device and RDMA is not available, that is an
    /// error.)
    #[arg(long, conflicts_with_all = ["rdma_address", "rdma_device"], help_heading = "RDMA")]
    pub no_rdma: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub end: RdmaEndArgs,
}

impl RdmaOfferArgs {
    /// The options without their clap attributes.
    pub(crate) fn options(&self) -> RdmaOffer {
        RdmaOffer { is_off: self.no_rdma, end: self.end.options() }
    }
}

/// How a reader (a replica or a probe) reads over RDMA.
#[derive(Clone, Debug, Args)]
pub struct RdmaReadArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub end: RdmaEndArgs,

    /// Queue pairs per table, 1 to 8: more for a network that spreads its load by flow, or to use several ports.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8), help_heading = "RDMA")]
    pub rdma_queue_pairs: u8,

    /// Pieces posted per queue pair, 1 to 1024. The number of buffers follows from --memory.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "RDMA")]
    pub rdma_queue_depth: u32,

    /// READs in flight per queue pair, 1 to 16; the limits of both devices can lower it.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..=16), help_heading = "RDMA")]
    pub rdma_reads: u8,

    /// Reads that are longer are cut into pieces of this size, so that connections take turns: 4KiB to 1GiB.
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = parse_piece, help_heading = "RDMA")]
    pub rdma_piece: Size,

    /// How to wait for the device: `polling` keeps a processor busy, `event` sleeps at once, `poll-then-arm` polls for
    /// 20 µs first.
    #[arg(long, value_name = "HOW", default_value = "poll-then-arm", value_parser = one_of(COMPLETIONS), help_heading = "RDMA")]
    pub rdma_completion: CompletionMode,
}

impl RdmaReadArgs {
    /// The options without their clap attributes.
    pub(crate) fn options(&self) -> RdmaRead {
        RdmaRead {
            end: self.end.options(),
            queue_pairs: self.rdma_queue_pairs,
            queue_depth: self.rdma_queue_depth,
            reads: self.rdma_reads,
            piece: self.rdma_piece,
            completion: self.rdma_completion,
        }
    }
}

/// How to wait for completions.
const COMPLETIONS: Words<CompletionMode, 3> = [
    ("polling", "Poll without pause", CompletionMode::Polling),
    ("event", "Sleep until the device interrupts", CompletionMode::Event),
    ("poll-then-arm", "Poll for a while, then sleep", CompletionMode::PollThenArm),
];

fn parse_piece(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    let fits = (LEAST_PIECE..=LARGEST_PIECE).contains(&size.get()) && size.get().is_multiple_of(LEAST_PIECE);
    if fits { Ok(size) } else { Err("the size must be whole pages, 4KiB to 1GiB".into()) }
}

/// The smallest piece, one page: below it the requests cost more than the bytes.
const LEAST_PIECE: u64 = 4 << 10;

/// The largest piece: every device accepts it in one request.
const LARGEST_PIECE: u64 = 1 << 30;

// The options for a server that speaks TLS to its primary: towards it the agent is a TLS server.

/// With which certificate the agent plays a primary.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Link to the server")]
pub struct LinkTlsArgs {
    /// Certificate chain (PEM) of the agent for a server with `tls-replication yes`.
    #[arg(long, value_name = "FILE", requires = "link_key")]
    pub link_cert: Option<PathBuf>,

    /// The private key (PEM) of that certificate.
    #[arg(long, value_name = "FILE", requires = "link_cert")]
    pub link_key: Option<PathBuf>,

    /// Certificates (PEM) of the authorities that must have signed the server's own certificate. Without this option
    /// the agent asks the server for none.
    #[arg(long, value_name = "FILE", requires = "link_cert")]
    pub link_client_ca: Option<PathBuf>,
}

impl LinkTlsArgs {
    /// The options without their clap attributes.
    pub(crate) fn options(&self) -> LinkTls {
        LinkTls { cert: self.link_cert.clone(), key: self.link_key.clone(), client_ca: self.link_client_ca.clone() }
    }
}

// What an agent shows to those who watch it.

/// What an agent shows to those who watch it.
#[derive(Clone, Debug, Default, Args)]
pub struct MetricsArgs {
    /// Serve metrics for Prometheus at this address. `/metrics` has them, `/healthz` and `/readyz` the answers for
    /// probes, and `/` a status page. They name servers and replicas with their addresses, and hold no data; the port
    /// asks for no password.
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_listen, help_heading = "Metrics")]
    pub metrics: Option<SocketAddr>,
}

/// The metrics of an agent that ends.
#[derive(Clone, Debug, Default, Args)]
pub struct MetricsFileArgs {
    /// Write metrics into this file, for the textfile collector of node_exporter: every 15 s, and at the end with the
    /// exit code. Its name must end with `.prom`. It replaces an earlier one as a whole, and every user can read it.
    #[arg(long, value_name = "FILE.prom", value_parser = parse_file, help_heading = "Metrics")]
    pub metrics_file: Option<PathBuf>,
}

/// What node_exporter does not read would be missed too late.
fn parse_file(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    match path.extension().is_some_and(|end| end == "prom") {
        true => Ok(path.to_owned()),
        false => Err("the name must end with .prom, or node_exporter does not read the file".to_owned()),
    }
}

// The options that name the Sentinels of a group of servers.

/// The Sentinels that know where a primary is.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Sentinel")]
pub struct SentinelArgs {
    /// Sentinels that know where the primary is, separated by commas. They are asked one after another, each for 2 s at
    /// most, until one answers. rediss://HOST:PORT uses TLS.
    #[arg(long = "sentinel", value_name = "HOST:PORT,…", value_delimiter = ',', value_parser = SentinelParser, requires = "sentinel_name")]
    pub sentinels: Vec<ServerUrl>,

    /// The name of the primary at the Sentinels (`sentinel monitor NAME …`).
    #[arg(long, value_name = "NAME", requires = "sentinels")]
    pub sentinel_name: Option<String>,

    /// ACL user to log in as at the Sentinels. Without it, the password belongs to the user `default`.
    #[arg(long, value_name = "NAME", requires = "sentinel_password_file")]
    pub sentinel_user: Option<String>,

    /// File whose first line is the password for the Sentinels; others than owner and group must not be able to read
    /// it. The servers' password is never sent to a Sentinel.
    #[arg(long, value_name = "FILE", requires = "sentinels")]
    pub sentinel_password_file: Option<PathBuf>,

    /// Certificates (PEM) of the authorities to trust for rediss:// Sentinels, instead of the system's.
    #[arg(long, value_name = "FILE", requires = "sentinels")]
    pub sentinel_tls_ca: Option<PathBuf>,

    /// Client certificate chain (PEM), for Sentinels with `tls-auth-clients yes`.
    #[arg(long, value_name = "FILE", requires = "sentinel_tls_key")]
    pub sentinel_tls_cert: Option<PathBuf>,

    /// Private key (PEM) of that certificate.
    #[arg(long, value_name = "FILE", requires = "sentinel_tls_cert")]
    pub sentinel_tls_key: Option<PathBuf>,

    /// The name to expect in the Sentinels' certificates, if not the hosts of their addresses.
    #[arg(long, value_name = "NAME", requires = "sentinels")]
    pub sentinel_tls_server_name: Option<String>,

    /// The fingerprint of a Sentinel's certificate, instead of a name and an authority. May be repeated: one for each
    /// certificate.
    #[arg(
        long = "sentinel-tls-pin",
        value_name = "sha256:HEX",
        requires = "sentinels",
        conflicts_with = "sentinel_tls_server_name"
    )]
    pub sentinel_tls_pins: Vec<Fingerprint>,
}

impl SentinelArgs {
    /// Whether Sentinels are named.
    pub fn is_given(&self) -> bool {
        !self.sentinels.is_empty()
    }

    /// Reads the named files and prepares connections; `None` if no Sentinel is named. It sends nothing.
    ///
    /// # Errors
    /// A file cannot be used, or the options contradict each other.
    pub(crate) fn open(&self) -> Result<Option<Sentinels>, Failure> {
        let Some(name) = self.sentinel_name.clone().filter(|_| self.is_given()) else { return Ok(None) };
        if self.sentinels.len() > MOST_SENTINELS {
            return Err(Failure::refused(format!(
                "--sentinel names {} Sentinels: give {MOST_SENTINELS} at most",
                self.sentinels.len()
            )));
        }
        let password = self.sentinel_password_file.as_deref().map(Password::read_file).transpose()?;
        let credentials =
            remora_server::Credentials { user: self.sentinel_user.clone().map(String::into_bytes), password };
        let tls = TlsOptions {
            ca: self.sentinel_tls_ca.clone(),
            certificate: self.sentinel_tls_cert.clone(),
            key: self.sentinel_tls_key.clone(),
            server_name: self.sentinel_tls_server_name.clone(),
            pins: self.sentinel_tls_pins.clone(),
            prefix: "sentinel-",
        };
        let server = |url: &ServerUrl| Server::new(url.clone(), credentials.clone(), &tls, Task::Sentinel);
        let servers = self.sentinels.iter().map(server).collect::<Result<_, SetupError>>()?;
        Ok(Some(Sentinels::new(servers, name)))
    }
}

/// Parses `HOST:PORT` or `rediss://HOST:PORT`. clap's own message would repeat the argument, which may contain a
/// password.
#[derive(Clone, Copy, Debug)]
struct SentinelParser;

impl TypedValueParser for SentinelParser {
    type Value = ServerUrl;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<ServerUrl, Error> {
        parse_sentinel(&value.to_string_lossy()).map_err(|cause| {
            let argument = argument.map(|argument| format!(" for '{argument}'")).unwrap_or_default();
            Error::raw(ErrorKind::ValueValidation, format!("invalid address{argument}: {cause}\n")).with_cmd(command)
        })
    }
}

fn parse_sentinel(text: &str) -> Result<ServerUrl, String> {
    if !text.contains("://") {
        let HostPort { host, port } = text.parse()?;
        return Ok(ServerUrl::tcp(host, port));
    }
    let url: ServerUrl = text.parse().map_err(|error: remora_server::UrlError| error.to_string())?;
    match url.host_and_port() {
        Some(_) if url.database() == 0 => Ok(url),
        _ => Err("a Sentinel is at HOST:PORT, or at rediss://HOST:PORT with TLS".to_owned()),
    }
}

// The options that name a server and its login.

/// `--server` and its login.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH. Without a port: 6379.
    #[arg(long, value_name = "URL", value_parser = UrlParser)]
    pub server: ServerUrl,

    /// ACL user to log in as. Without it, a password belongs to the user `default`.
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,

    /// File whose first line is the password. Others than owner and group must not be able to read it. Without it, the
    /// environment variable REMORA_PASSWORD counts. Passwords are never taken from the command line.
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: TlsArgs,
}

/// How to connect to a `rediss://` server.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "TLS to the server")]
pub struct TlsArgs {
    /// Certificates (PEM) of the authorities to trust, instead of the system's.
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,

    /// Client certificate chain (PEM), for servers with `tls-auth-clients yes`.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Private key (PEM) of the client certificate.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// The name to expect in the server's certificate, if not the host of its address. Servers at other addresses, such
    /// as the primary, may have a certificate for this name or for their host. For connections to servers; those
    /// between agents have --source-name and --peer-name.
    #[arg(long, value_name = "NAME")]
    pub tls_server_name: Option<String>,

    /// The fingerprint of the server's certificate, as `openssl x509 -noout -fingerprint -sha256` prints it, instead of
    /// a name and an authority: for certificates that no name fits. May be repeated, also for the primary's
    /// certificate. For connections to servers; those between agents have --source-key.
    #[arg(long = "tls-pin", value_name = "sha256:HEX", conflicts_with = "tls_server_name")]
    pub tls_pins: Vec<Fingerprint>,
}

/// Parses an address from the command line. clap's own message would repeat the argument, which may contain a password.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UrlParser;

impl TypedValueParser for UrlParser {
    type Value = ServerUrl;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<ServerUrl, Error> {
        value.to_string_lossy().parse().map_err(|error: UrlError| {
            let argument = argument.map(|argument| format!(" for '{argument}'")).unwrap_or_default();
            Error::raw(ErrorKind::ValueValidation, format!("invalid address{argument}: {error}\n")).with_cmd(command)
        })
    }
}

impl ServerArgs {
    /// Reads the named files and prepares connections to the server. It sends nothing.
    pub fn open(&self, task: Task) -> Result<Server, SetupError> {
        self.login().open(task)
    }

    /// The options without their clap attributes.
    pub(crate) fn login(&self) -> Login {
        Login {
            url: self.server.clone(),
            user: self.user.clone(),
            password_file: self.password_file.clone(),
            tls: self.tls.options(),
        }
    }
}

impl TlsArgs {
    /// Prepares connections to one of several servers to which these options apply. One without TLS has no use for
    /// them, which is not an error.
    pub(crate) fn open(
        &self,
        url: &ServerUrl,
        user: Option<&str>,
        password_file: Option<&Path>,
        task: Task,
    ) -> Result<Server, SetupError> {
        self.login(url, user, password_file).open(task)
    }

    /// The same, before anything is read.
    pub(crate) fn login(&self, url: &ServerUrl, user: Option<&str>, password_file: Option<&Path>) -> Login {
        Login {
            url: url.clone(),
            user: user.map(str::to_owned),
            password_file: password_file.map(Path::to_owned),
            tls: if url.is_tls() { self.options() } else { TlsOptions::default() },
        }
    }

    /// The options as words of a command line, for a process that connects to the same server.
    pub(crate) fn words(&self) -> Vec<OsString> {
        let files = [("--tls-ca", &self.tls_ca), ("--tls-cert", &self.tls_cert), ("--tls-key", &self.tls_key)];
        let files = files.into_iter().filter_map(|(name, file)| Some((name, file.as_ref()?.clone().into_os_string())));
        let names = self.tls_server_name.iter().map(|name| ("--tls-server-name", name.into()));
        let pins = self.tls_pins.iter().map(|pin| ("--tls-pin", pin.to_string().into()));
        files.chain(names).chain(pins).flat_map(|(option, value)| [option.into(), value]).collect()
    }

    /// The TLS options without their clap attributes.
    pub fn options(&self) -> TlsOptions {
        TlsOptions {
            ca: self.tls_ca.clone(),
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            server_name: self.tls_server_name.clone(),
            pins: self.tls_pins.clone(),
            prefix: "",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn pieces_are_whole_pages_within_reason() {
        assert!(parse_piece("256KiB").is_ok());
        for wrong in ["0", "5000", "2GiB"] {
            assert!(parse_piece(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_that_node_exporter_ignores_is_refused() {
        assert_eq!(parse_file("/a/b.prom").as_deref(), Ok(Path::new("/a/b.prom")));
        for wrong in ["/a/b", "b.txt", ".prom", ""] {
            assert!(parse_file(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_sentinel_is_a_host_with_a_port_or_an_address_with_tls() {
        let table = [
            ("10.0.0.1:26379", "redis://10.0.0.1:26379"),
            ("[fd00::1]:26379", "redis://[fd00::1]:26379"),
            ("rediss://s1:26380", "rediss://s1:26380"),
        ];
        for (typed, shown) in table {
            assert_eq!(parse_sentinel(typed).unwrap().to_string(), shown);
        }
        for wrong in ["s1", "s1:0", "unix:///s", "redis://s1:1/2", "redis://user:secret@s1:1", "user:secret@s1:1"] {
            let why = parse_sentinel(wrong).unwrap_err();
            assert!(!why.contains("secret"), "{why}");
        }
    }
}
