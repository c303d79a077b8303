//! What a command knows of a volume: where its servers are, what protects the connections to them, the file that says
//! what clients must know, and how a volume is opened; and the command that serves.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::{ClientConfig, ServerConfig};
use serde::{Deserialize, Serialize};

use crate::args::{HostPort, RdmaEndArgs, ServeArgs, VolumeSecurityArgs, WaysArgs, WriterArgs};
use crate::checked_json::{self, Checksum};
use crate::conversation::security::CertificateRoles;
use crate::conversation::tokens::TokenFiles;
use crate::exit::{Code, Failure};
use crate::metrics::{Agent, Families, Scrape, Watch, register as all};
use crate::service::Service;
use crate::signals::Signals;
use crate::{conversation, events, host};
use remora_files::{FilesError, Purpose};
use remora_messenger::Address;
use remora_messenger::stack::tls::{TlsConfig, TlsOptions};
use remora_process::{AbortOnDrop, blocking};
use remora_volume::client::{ClientOptions, Error, ReadCounts, Reads, Volume, WriteCounts};
use remora_volume::read_only::{ReadOnly, ReadOnlyCounts, ReadOnlyOptions};
use remora_volume::rules::{ServerId, State};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
use remora_volume::writer::End;
use remora_volume::{Rdma, Security};

/// The ALPN protocol of volumes. The ports of sources and lenders have another one.
const PROTOCOL: &[u8] = b"remora/volume";

/// What the options of a command say about protection.
pub(super) struct Protection {
    pub(super) tokens: TokenFiles,
    security: conversation::Security,
}

impl Protection {
    /// Reads the files.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(super) fn read(args: &VolumeSecurityArgs) -> Result<Protection, Failure> {
        let security = args.security.open(CertificateRoles::default())?;
        let files: Vec<_> = args.token_file.iter().cloned().collect();
        Ok(Protection { tokens: TokenFiles::read(&files, &[], security.clone())?, security })
    }

    /// The same for connections. New ones use the certificates that were read last.
    ///
    /// # Errors
    /// No certificate can be made.
    pub(super) fn of_connections(&self) -> Result<Security, Failure> {
        let (client, server) = match self.security.certificates() {
            Some(own) => {
                let (of_calls, of_port) = (own.clone(), own.clone());
                (
                    Some(TlsConfig::new(move || of_client(of_calls.client()))),
                    Some(TlsConfig::new(move || of_server(of_port.server()))),
                )
            }
            None => (
                self.security.client(None).map_err(Failure::local)?.map(|config| of_client(config).into()),
                self.security.server().map_err(Failure::local)?.map(|config| of_server(config).into()),
            ),
        };
        let tls = TlsOptions { client, server, server_name: self.security.given_name() };
        // Every connection has TLS or is on this host, unless this is what the options permit.
        let unsealed = !self.security.permits_plain_network();
        Ok(Security { keys: Some(self.tokens.keyring()), unsealed, tls })
    }

    /// Where an end listens, or connects to: with TLS, or without.
    ///
    /// # Errors
    /// The connections would not be protected.
    pub(super) fn address(&self, what: &str, address: SocketAddr) -> Result<Address, Failure> {
        self.security.check(address.ip()).map_err(|why| Failure::refused(format!("{what} {address} {why}")))?;
        Ok(if self.security.needs_tls(address.ip()) { Address::Tls(address) } else { Address::Tcp(address) })
    }

    /// Checks that nothing which is not encrypted crosses the network without need. `what` names the option.
    ///
    /// # Errors
    /// One of the addresses is not loopback, and `--plaintext-network` was not given.
    pub(super) fn check_plain(&self, what: &str, addresses: &[Address]) -> Result<(), Failure> {
        let of_network = addresses.iter().find(|address| match address {
            Address::Tcp(at) | Address::Tls(at) | Address::Rdma(at) => !at.ip().to_canonical().is_loopback(),
            Address::Shm(_) => false,
        });
        match of_network {
            Some(address) if !self.security.permits_plain_network() => Err(Failure::refused(format!(
                "{what} would carry blocks without encryption between this host and {address}; omit it, or give \
                 --security none and --plaintext-network"
            ))),
            _ => Ok(()),
        }
    }

    /// The RDMA devices that the options name. Checks that what they carry may cross the network without encryption.
    ///
    /// # Errors
    /// This host has no such device, or `--plaintext-network` was not given.
    pub(super) fn rdma(&self, end: &RdmaEndArgs) -> Result<Rdma, Failure> {
        let named = end.options();
        let addresses = named.local_addresses().map_err(|error| Failure::refused(error.to_string()))?;
        let option = if end.rdma_device.is_empty() { "--rdma-address" } else { "--rdma-device" };
        let ports: Vec<_> = addresses.iter().map(|address| Address::Rdma(SocketAddr::new(*address, 0))).collect();
        self.check_plain(option, &ports)?;
        Ok(Rdma { addresses, traffic_class: named.traffic_class, service_level: named.service_level })
    }

    /// What protects connections to a port there, for logs.
    pub(super) fn text(&self, listen: SocketAddr) -> &'static str {
        self.security.text(listen.ip())
    }

    /// Where the servers are.
    ///
    /// # Errors
    /// A name has no address, or a connection would not be protected.
    pub(super) fn servers(&self, servers: &[HostPort]) -> Result<Vec<Address>, Failure> {
        servers.iter().map(|server| self.address("the volume's server", resolve(server)?)).collect()
    }
}

/// The same configuration for connections to the servers of a volume.
fn of_client(mut config: Arc<ClientConfig>) -> Arc<ClientConfig> {
    Arc::make_mut(&mut config).alpn_protocols = vec![PROTOCOL.to_vec()];
    config
}

/// The same configuration for the port of a server.
fn of_server(mut config: Arc<ServerConfig>) -> Arc<ServerConfig> {
    Arc::make_mut(&mut config).alpn_protocols = vec![PROTOCOL.to_vec()];
    config
}

fn resolve(server: &HostPort) -> Result<SocketAddr, Failure> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::new(Code::Volume, format!("the volume's server {server} has no address: {why}"))
    };
    let mut found = (server.host.as_str(), server.port).to_socket_addrs().map_err(|error| failed(&error))?;
    found.next().ok_or_else(|| failed(&"the name is unknown"))
}

// `remora volume serve`.

/// Runs `remora volume serve` until a signal.
///
/// # Errors
/// A file cannot be used, or the address cannot be listened at.
pub(super) async fn run(args: ServeArgs) -> Result<(), Failure> {
    host::check_memory("--memory", args.memory)?;
    let mut signals = Signals::catch()?;
    let (_watch, mut scrapes) = Watch::begin(Agent::Serve, args.metrics.metrics, None).await?;
    let protection = Protection::read(&args.protection)?;
    let _rereading = protection.tokens.read_again_on_hangup()?;
    let (listen, security) = (protection.address("--listen", args.listen)?, protection.of_connections()?);
    let (memory, staging) = (args.memory.get(), args.staging.get());
    if args.lanes.is_some() {
        protection.check_plain("--lanes", std::slice::from_ref(&listen))?;
    }
    let options = ServerOptions {
        memory,
        staging,
        security,
        shm: !args.no_shm,
        lanes: args.lanes,
        rdma: protection.rdma(&args.rdma)?,
        store: args.store.clone(),
        ..ServerOptions::default()
    };
    let started = blocking(move || Ok(Server::start(&listen, &options)));
    let started = scrapes.meanwhile("the copies of the store are being read", started).await?;
    let server = started.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable => {
            Failure::local(format!("cannot listen on {}: {error}; set another address with --listen", args.listen))
        }
        ErrorKind::Unsupported => Failure::refused(error.to_string()),
        _ => Failure::local(format!("cannot start the server at {}: {error}", args.listen)),
    })?;
    let address = match server.address() {
        Address::Tcp(address) | Address::Tls(address) => *address,
        _ => args.listen,
    };
    let protection = protection.text(args.listen);
    let store = args.store.as_ref().map_or("none".to_owned(), |store| store.display().to_string());
    tracing::info!(event = events::VOLUME_SERVER_READY, listening = %address, memory = %args.memory, protection, store, "volume server ready");
    let service = Service::ready(&format!("serving volumes at {address}"));
    let signal = loop {
        tokio::select! {
            signal = signals.next() => break signal,
            scrape = scrapes.next() => answer_server(&server, scrape),
        }
    };
    drop(service);
    match args.store {
        Some(_) => tracing::info!("stopped by {signal}: the copies are in {store}"),
        None => tracing::info!("stopped by {signal}: the copies in this server's memory are gone"),
    }
    blocking(move || {
        server.stop();
        Ok(())
    })
    .await
}

// Metrics: what servers of volumes and their clients show to those who watch them.

/// What clients of a volume show.
#[derive(Clone)]
pub(super) struct Shown {
    pub(super) file: String,
    pub(super) shape: Shape,
    /// The servers, in the order of the volume's file.
    pub(super) servers: Vec<String>,
}

/// Answers for a server.
pub(super) fn answer_server(server: &Server, mut scrape: Scrape) {
    let families = &mut scrape.families;
    let copies = server.statuses();
    families.number(&all::SERVER_COPIES, copies.len() as u64);
    let name = |volume: remora_volume::shape::VolumeId| volume.to_string();
    let states = [("whole", State::Whole), ("behind", State::Behind), ("empty", State::Empty)];
    families.gauges(
        &all::COPY_STATE,
        copies.iter().flat_map(|(volume, status)| {
            states.map(|(word, state)| ([name(*volume), word.to_owned()], flag(status.standing.state == state)))
        }),
    );
    families.gauges(&all::COPY_CUT, copies.iter().map(|(of, status)| ([name(*of)], flag(status.standing.is_cut))));
    families.gauges(&all::COPY_STORED, copies.iter().map(|(of, status)| ([name(*of)], flag(status.has_store))));
    families.gauges(
        &all::COPY_WRITER_SILENT,
        copies.iter().filter_map(|(of, status)| Some(([name(*of)], f64::from(status.writer_silent?) / 1000.0))),
    );
    families.gauges(
        &all::COPY_CATCH_UP,
        copies.iter().filter_map(|(of, status)| Some(([name(*of)], status.compared? as f64))),
    );
    families.gauges(
        &all::COPY_SCRUB,
        copies.iter().filter_map(|(of, status)| Some(([name(*of)], status.scrubbed? as f64))),
    );
    let (memory, staging) = server.used();
    families.number(&all::SERVER_MEMORY_USED, memory.bytes);
    families.number(&all::SERVER_MEMORY_LIMIT, memory.most);
    families.number(&all::SERVER_STAGING_USED, staging.bytes);
    families.number(&all::SERVER_STAGING_LIMIT, staging.most);
    scrape.answer(None);
}

impl Shown {
    /// Answers for a volume that is open for writing.
    pub(super) fn answer(&self, volume: &Volume, mut scrape: Scrape) {
        let families = &mut scrape.families;
        let end = volume.end();
        self.show(families, end.is_none());
        let members = volume.members();
        families.number(&all::VOLUME_MEMBERS, members.len() as u64);
        let servers = || self.servers.iter().enumerate().map(|(number, name)| (ServerId(number), [&**name]));
        families.gauges(&all::VOLUME_MEMBER, servers().map(|(id, name)| (name, flag(members.contains(&id)))));
        families.gauges(
            &all::VOLUME_COMPARED,
            servers().filter_map(|(id, name)| Some((name, volume.compared(id)? as f64))),
        );
        let (ReadCounts { here, far, asked }, WriteCounts { inline, pulled, bytes }) =
            (volume.read_counts(), volume.write_counts());
        families.counters(&all::VOLUME_READS, [(["here"], here), (["far"], far), (["asked"], asked)]);
        families.counters(&all::VOLUME_WRITES, [(["inline"], inline), (["pulled"], pulled)]);
        families.counter(&all::VOLUME_WRITTEN, bytes);
        scrape.answer(end.map(|_| format!("the volume {} has ended", self.file)));
    }

    /// Answers for a volume that is open for reading alone.
    pub(super) fn answer_reader(&self, counts: ReadOnlyCounts, mut scrape: Scrape) {
        let families = &mut scrape.families;
        self.show(families, true);
        families.counters(&all::VOLUME_READS, [(["memory"], counts.reads)]);
        families.counter(&all::VOLUME_QUESTIONS, counts.questions);
        scrape.answer(None);
    }

    fn show(&self, families: &mut Families, is_open: bool) {
        let copies = self.shape.copies();
        families.info(&all::VOLUME, [self.shape.volume().to_string(), self.file.clone()]);
        families.whether(&all::VOLUME_OPEN, is_open);
        families.number(&all::VOLUME_BLOCKS, self.shape.blocks());
        families.number(&all::VOLUME_COPIES, copies.number() as u64);
        families.number(&all::VOLUME_ACKNOWLEDGE, copies.hold() as u64);
    }
}

fn flag(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}

// File: what a client must know of a volume. It holds no secret.

/// The layout of the file.
const LAYOUT: u32 = 1;

/// Far more than five servers' names need.
const MOST_BYTES: u64 = 16 << 10;

/// A volume, as its file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VolumeFile {
    pub(super) shape: Shape,
    pub(super) servers: Vec<HostPort>,
}

/// A file that is written and has not taken its place. Otherwise it is removed.
pub(super) struct Prepared {
    beside: PathBuf,
    path: PathBuf,
}

impl Prepared {
    /// It takes its place. A reader finds the earlier one or this one.
    ///
    /// # Errors
    /// The earlier one is left.
    pub(super) fn replace(self) -> Result<(), Failure> {
        let failed = |error| Failure::local(format!("cannot write {}: {error}", self.path.display()));
        std::fs::rename(&self.beside, &self.path).map_err(failed)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.beside); // it is usually not there any more
    }
}

/// The words of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    remora_volume: u32,
    id: String,
    bytes: u64,
    acknowledge: usize,
    servers: Vec<String>,
    /// The checksum of the file, which [`checked_json`] writes.
    #[serde(default, skip_serializing)]
    checksum: Option<String>,
}

impl VolumeFile {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or it describes no volume.
    pub(super) fn read(path: &Path) -> Result<VolumeFile, Failure> {
        let name = path.display();
        let mut text = String::new();
        let read = OpenOptions::new().read(true).open(path).and_then(|file| {
            file.take(MOST_BYTES).read_to_string(&mut text) // a longer one is cut, and then is not JSON
        });
        read.map_err(|error| Failure::refused(format!("cannot read the volume's file {name}: {error}")))?;
        VolumeFile::parse(&text).map_err(|why| {
            Failure::refused(format!("{name} does not describe a volume: {why}; use a file of remora volume create"))
        })
    }

    fn parse(text: &str) -> Result<VolumeFile, String> {
        let words: Words = serde_json::from_str(text).map_err(|error| error.to_string())?;
        // A changed digit of an address would make another server a copy of the volume.
        if words.checksum.is_some() && checked_json::check(text.as_bytes()) != Checksum::Right {
            return Err(
                "its checksum is wrong, so it was damaged or edited (after an edit, take its \"checksum\" out)".into(),
            );
        }
        if words.remora_volume != LAYOUT {
            return Err(format!("its layout is {}, and this version knows {LAYOUT}", words.remora_volume));
        }
        let id = parse_id(&words.id).ok_or("its id must have 32 hexadecimal digits")?;
        let shape = shape(id, words.bytes, words.servers.len(), words.acknowledge)?;
        let servers = words
            .servers
            .iter()
            .map(|server| server.parse::<HostPort>().map_err(|error| format!("the server {server:?}: {error}")));
        Ok(VolumeFile { shape, servers: servers.collect::<Result<_, _>>()? })
    }

    /// Writes the file that is to take the place of the earlier one, beside it: whatever keeps it from being written is
    /// known before anything else changes.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn prepare(&self, path: &Path) -> Result<Prepared, Failure> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let beside = PathBuf::from(beside);
        // One is left if an earlier command was interrupted.
        match std::fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Failure::local(format!("cannot remove {}: {error}", beside.display())));
            }
            _ => {}
        }
        self.write(&beside)?;
        Ok(Prepared { beside, path: path.to_owned() })
    }

    /// Writes a new file. What is there already is left alone.
    ///
    /// # Errors
    /// The file exists, or cannot be written.
    pub(super) fn write(&self, path: &Path) -> Result<(), Failure> {
        let name = path.display();
        let words = Words {
            remora_volume: LAYOUT,
            id: self.shape.volume().to_string(),
            bytes: self.shape.blocks() * BLOCK_BYTES as u64,
            acknowledge: self.shape.copies().hold(),
            servers: self.servers.iter().map(HostPort::to_string).collect(),
            checksum: None,
        };
        let text = checked_json::to_json(&words).map_err(|error| Failure::local(error.to_string()))?;
        let created = OpenOptions::new().write(true).create_new(true).open(path);
        let mut file = created.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                Failure::refused(format!("{name} exists and may describe a volume: choose another file"))
            }
            _ => Failure::local(format!("cannot create {name}: {error}")),
        })?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(|error| {
            // Half a description must not be used.
            let _ = std::fs::remove_file(path);
            Failure::local(format!("cannot write {name}: {error}"))
        })
    }
}

/// The shape of a volume of this size, with that many copies, of which `acknowledge` must hold a write.
///
/// # Errors
/// The text says which number is wrong.
pub(super) fn shape(id: VolumeId, bytes: u64, copies: usize, acknowledge: usize) -> Result<Shape, String> {
    if !bytes.is_multiple_of(BLOCK_BYTES as u64) {
        return Err(format!(
            "--size {bytes} is not a multiple of {BLOCK_BYTES} bytes: give whole KiB by fours, such as 4KiB or 1GiB"
        ));
    }
    let most = Copies::MOST;
    let copies = Copies::new(copies, acknowledge).ok_or_else(|| {
        format!("{acknowledge} of {copies} copies: give 1 to {most} servers, and acknowledge at 1 to all of them")
    })?;
    Shape::new(id, bytes / BLOCK_BYTES as u64, copies)
        .ok_or_else(|| format!("--size {bytes}: a volume has at least {BLOCK_BYTES} bytes and at most 16 TiB"))
}

fn parse_id(text: &str) -> Option<VolumeId> {
    let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u128::from_str_radix(text, 16).ok().filter(|_| digits)?;
    Some(VolumeId(number.to_be_bytes()))
}

// Opening: a volume is opened for writing, as `nbd`, `mount` and `format` do, or for reading alone.

/// A volume that is about to be opened.
pub(super) struct Opening {
    name: String,
    file: VolumeFile,
    protection: Protection,
    options: ClientOptions,
    rereading: AbortOnDrop,
}

impl Opening {
    /// Reads the files that the options name.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(super) fn read(args: &WriterArgs) -> Result<Opening, Failure> {
        let protection = Protection::read(&args.protection)?;
        let rereading = protection.tokens.read_again_on_hangup()?;
        let file = VolumeFile::read(&args.file)?;
        let WaysArgs { window, reads, writes } = args.ways;
        let options = ClientOptions {
            security: protection.of_connections()?,
            copy_limit: args.copy_timeout,
            take_over: args.take_over,
            window,
            reads,
            writes,
            rdma: protection.rdma(&args.rdma)?,
        };
        Ok(Opening { name: args.file.display().to_string(), file, protection, options, rereading })
    }

    /// The volume's name, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// What those who watch are shown of it.
    pub(super) fn shown(&self) -> Shown {
        let servers = self.file.servers.iter().map(ToString::to_string).collect();
        Shown { file: self.name.clone(), shape: self.file.shape, servers }
    }

    /// Opens the volume for this purpose, and has `use_it` done with it by a thread that may wait. What is returned
    /// beside its result keeps the files of tokens and certificates up to date.
    ///
    /// If another writer may be replaced for it, what the volume holds is looked at before: that writer goes on if it
    /// is not what is wanted. Whatever of this host can keep `use_it` from succeeding is to be tried before this is
    /// called.
    ///
    /// # Errors
    /// A server's name is not known, the volume cannot be opened, or a signal came before.
    pub(super) async fn open<T: Send + 'static>(
        self,
        signals: &mut Signals,
        purpose: Purpose,
        use_it: impl FnOnce(Volume) -> Result<T, Failure> + Send + 'static,
    ) -> Result<(T, AbortOnDrop), Failure> {
        let name = self.name.clone();
        let opened = self.open_by(signals, move |shape, servers, options| {
            if options.take_over {
                look(&name, purpose, shape, servers, options)?;
            }
            use_it(Volume::open(shape, servers, options).map_err(|error| failure(&name, &error))?)
        });
        opened.await
    }

    /// The same for reading alone.
    ///
    /// # Errors
    /// As for [`Opening::open`].
    pub(super) async fn open_read_only<T: Send + 'static>(
        self,
        signals: &mut Signals,
        use_it: impl FnOnce(ReadOnly) -> Result<T, Failure> + Send + 'static,
    ) -> Result<(T, AbortOnDrop), Failure> {
        let name = self.name.clone();
        let opened = self.open_by(signals, move |shape, servers, options| {
            let ClientOptions { security, reads, rdma, copy_limit: limit, .. } = options.clone();
            let opened = ReadOnly::open(shape, servers, &ReadOnlyOptions { security, reads, rdma, limit });
            let cure = if reads == Reads::Here { ELSEWHERE } else { "" };
            use_it(opened.map_err(|error| Failure::new(Code::Volume, format!("the volume {name}: {error}{cure}")))?)
        });
        opened.await
    }

    /// Does that by a thread that may wait, until a signal comes.
    async fn open_by<T: Send + 'static>(
        self,
        signals: &mut Signals,
        open: impl FnOnce(Shape, &[remora_messenger::Address], &ClientOptions) -> Result<T, Failure> + Send + 'static,
    ) -> Result<(T, AbortOnDrop), Failure> {
        let Opening { name, file, protection, options, rereading } = self;
        let opened = blocking(move || {
            let servers = protection.servers(&file.servers)?;
            let ways = [("--reads", options.reads.is_plain()), ("--writes", options.writes.is_plain())];
            for (option, _) in ways.iter().filter(|(_, is_plain)| *is_plain) {
                protection.check_plain(option, &servers)?;
            }
            open(file.shape, &servers, &options)
        });
        tokio::select! {
            opened = opened => Ok((opened?, rereading)),
            // The thread ends with the process. It has changed nothing but who may write.
            signal = signals.next() => {
                Err(Failure::new(Code::Interrupted, format!("stopped by {signal} before {name} was open")))
            }
        }
    }
}

/// Whether the volume holds what it is opened for, before the writer that has it open is replaced.
///
/// # Errors
/// It does not. Nothing was changed.
fn look(
    name: &str,
    purpose: Purpose,
    shape: Shape,
    servers: &[remora_messenger::Address],
    options: &ClientOptions,
) -> Result<(), Failure> {
    let peek = Volume::peek(shape, servers, options).map_err(|error| failure(name, &error))?;
    let Some(peek) = peek else { return Ok(()) };
    match purpose.check(peek.blocks(), |run| peek.read(run)) {
        Ok(()) => Ok(()),
        // The opening itself says why.
        Err(FilesError::Blocks(why)) => {
            tracing::info!(volume = name, why, "what the volume holds could not be looked at before");
            Ok(())
        }
        Err(error) => Err(files_failure(name, &error).and("the writer that has it open goes on")),
    }
}

/// Why a client is not ready meanwhile.
pub(super) const IS_OPENED: &str = "the volume is being opened";

/// What to do if no server of this host can be read.
const ELSEWHERE: &str = "; servers on other hosts are read with --reads anywhere, and need --lanes or RDMA";

// Failure: how a volume ended, or why it is not open, and what to do.

/// What may have happened to servers, and where it is seen.
const TOO_FEW: &str = "; `remora volume status` shows each server: one that does not answer may come back, and one that is \
    `empty` was started again without its copy";

/// The end of a command for a volume with this name.
pub(super) fn failure(name: &str, error: &Error) -> Failure {
    let (code, cure) = match error {
        Error::Ended(End::Fenced { .. }) => (Code::Replaced, ""),
        Error::InUse { .. } => (Code::InUse, "; --take-over replaces it at once"),
        Error::NotOpened { end: End::Fenced { .. }, .. } => (Code::Replaced, ""),
        Error::NotOpened { end: End::TooFew { .. }, .. } => (Code::Volume, TOO_FEW),
        _ => (Code::Volume, ""),
    };
    Failure::new(code, format!("the volume {name}: {error}{cure}"))
}

/// The end of a command whose volume has ended. If no copy is left, it says why each server was left out.
pub(super) fn ended(shown: &Shown, volume: &Volume, end: End) -> Failure {
    let failure = failure(&shown.file, &Error::Ended(end));
    if end != End::NoCopyLeft {
        return failure;
    }
    let why = |(place, server): (usize, &String)| Some(format!("{server}: {}", volume.left_out(ServerId(place))?));
    let all: Vec<_> = shown.servers.iter().enumerate().filter_map(why).collect();
    if all.is_empty() { failure } else { failure.and(&all.join("; ")) }
}

/// Why there are no files in the volume with this name, or it holds something else, and what to do.
pub(super) fn files_failure(name: &str, error: &FilesError) -> Failure {
    match error {
        FilesError::Disk(error) => failure(name, error),
        _ => Failure::new(Code::Volume, format!("the volume {name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;
    use proptest::prelude::*;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        protection: VolumeSecurityArgs,
    }

    #[test]
    fn frames_have_macs_where_neither_tls_nor_this_host_protects_them() {
        let folder = tempfile::tempdir().unwrap();
        let token = remora_lab::scratch::token_file(folder.path()).unwrap();
        let is_unsealed = |more: &[&str]| {
            let typed = [&["remora", "--token-file", token.to_str().unwrap()], more].concat();
            let protection = Protection::read(&Cli::try_parse_from(typed).unwrap().protection).unwrap();
            protection.of_connections().unwrap().unsealed
        };
        for protected in [&[][..], &["--security", "token"], &["--security", "none"]] {
            assert!(is_unsealed(protected), "{protected:?}");
        }
        assert!(!is_unsealed(&["--security", "none", "--plaintext-network"]));
    }

    fn described() -> VolumeFile {
        let shape = shape(VolumeId([7; 16]), 1 << 20, 3, 2).unwrap();
        let servers = ["10.0.0.1:7480", "db-2:7480", "[fd00::3]:7480"];
        VolumeFile { shape, servers: servers.iter().map(|server| server.parse().unwrap()).collect() }
    }

    #[test]
    fn a_file_is_read_as_it_was_written_and_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.volume");
        described().write(&path).unwrap();
        assert_eq!(VolumeFile::read(&path).unwrap(), described());
        let refused = described().write(&path).unwrap_err();
        assert!(refused.message.contains("exists"), "{refused}");
        let larger = VolumeFile { shape: shape(VolumeId([7; 16]), 2 << 20, 3, 2).unwrap(), ..described() };
        std::fs::write(folder.path().join("data.volume.new"), "left by a command that was interrupted").unwrap();
        drop(larger.prepare(&path).unwrap());
        assert_eq!(VolumeFile::read(&path).unwrap(), described(), "not in its place");
        larger.prepare(&path).unwrap().replace().unwrap();
        assert_eq!(VolumeFile::read(&path).unwrap(), larger);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_changed_bit_makes_no_other_volume() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.volume");
        described().write(&path).unwrap();
        let text = std::fs::read(&path).unwrap();
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut changed = text.clone();
                changed[at] ^= 1 << bit;
                std::fs::write(&path, &changed).unwrap();
                let refused = VolumeFile::read(&path).unwrap_err();
                assert!(refused.message.contains("data.volume"), "byte {at}, bit {bit}: {refused}");
            }
        }
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        VolumeFile::read(&path).unwrap_err();
    }

    #[test]
    fn what_does_not_describe_a_volume_is_refused_by_its_name() {
        let good = r#"{"remora_volume":1,"id":"07070707070707070707070707070707","bytes":4096,"acknowledge":1,
            "servers":["a:1"]}"#;
        VolumeFile::parse(good).unwrap();
        for (from, to, why) in [
            (":1,\"id\"", ":2,\"id\"", "layout"),
            ("0707070707070707", "07", "id"),
            ("0707070707", "+707070707", "id"),
            ("4096", "4097", "multiple"),
            ("4096", "0", "at least"),
            ("\"acknowledge\":1", "\"acknowledge\":2", "copies"),
            ("\"a:1\"", "\"a\"", "server"),
            ("\"a:1\"", "", "copies"),
            ("\"bytes\"", "\"size\"", "size"),
        ] {
            let text = good.replacen(from, to, 1);
            let error = VolumeFile::parse(&text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".*") {
            let _ = VolumeFile::parse(&text);
        }
    }
}
