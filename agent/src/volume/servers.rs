//! What protects the connections between the clients and servers of volumes, and where the servers are.

use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use remora_messenger::Address;
use remora_messenger::stack::tls::{TlsConfig, TlsOptions};
use remora_volume::client::{ReadCounts, Volume, WriteCounts};
use remora_volume::read_only::ReadOnlyCounts;
use remora_volume::rules::{ServerId, State};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::Shape;
use remora_volume::{Rdma, Security};
use rustls::{ClientConfig, ServerConfig};

use crate::args::{HostPort, RdmaEndArgs, ServeArgs, VolumeSecurityArgs};
use crate::conversation::certificates::CertificateRoles;
use crate::conversation::tokens::TokenFiles;
use crate::exit::{Code, Failure};
use crate::metrics::{Agent, Families, Scrape, Watch, register as all};
use crate::service::Service;
use crate::signals::Signals;
use crate::tasks::blocking;
use crate::{conversation, events, host_memory};

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
    host_memory::check("--memory", args.memory)?;
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

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
}
