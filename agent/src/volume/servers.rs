//! What protects the connections between the clients and servers of volumes, and where the servers are.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use remora_messenger::Address;
use remora_messenger::stack::tls::{TlsConfig, TlsOptions};
use remora_volume::{Rdma, Security};
use rustls::{ClientConfig, ServerConfig};

use crate::args::{HostPort, RdmaEnd, VolumeSecurityArgs};
use crate::conversation;
use crate::conversation::certificate_roles::CertificateRoles;
use crate::conversation::tokens::TokenFiles;
use crate::exit::{Code, Failure};

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
    pub(super) fn rdma(&self, end: &RdmaEnd) -> Result<Rdma, Failure> {
        let addresses = end.addresses().map_err(|error| Failure::refused(error.to_string()))?;
        let option = if end.rdma_device.is_empty() { "--rdma-address" } else { "--rdma-device" };
        let ports: Vec<_> = addresses.iter().map(|address| Address::Rdma(SocketAddr::new(*address, 0))).collect();
        self.check_plain(option, &ports)?;
        let RdmaEnd { rdma_traffic_class: traffic_class, rdma_service_level: service_level, .. } = *end;
        Ok(Rdma { addresses, traffic_class, service_level })
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
