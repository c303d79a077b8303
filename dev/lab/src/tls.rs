//! Certificates for servers and clients, generated on demand.
//!
//! Each folder has one authority, which has signed one certificate for servers on this machine and one for clients.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

use crate::error::{Doing, Result};
use crate::scratch;

/// A certificate, its key and its authority: PEM files.
#[derive(Clone, Debug)]
pub struct Tls {
    /// The certificate of the authority that signed this one, and the only authority that is trusted.
    pub ca: PathBuf,
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Generates an authority in `folder`, and two certificates signed by it: one for a server on `localhost`, `127.0.0.1`
/// or any of `addresses`, one for a client.
pub fn certificates(folder: &Path, addresses: &[IpAddr]) -> Result<(Tls, Tls)> {
    make(folder, addresses).doing(|| format!("make certificates in {}", folder.display()))
}

fn make(folder: &Path, addresses: &[IpAddr]) -> io::Result<(Tls, Tls)> {
    let mut params = named("remora lab authority", Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority = CertifiedIssuer::self_signed(params, key()?).map_err(io::Error::other)?;
    let ca = folder.join("ca.pem");
    fs::write(&ca, authority.pem())?;

    let mut hosts = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    hosts.extend(addresses.iter().map(IpAddr::to_string));
    let sign = |name: &str, hosts| -> io::Result<Tls> {
        let key = key()?;
        let certificate = named(name, hosts)?.signed_by(&key, &authority).map_err(io::Error::other)?;
        let path = folder.join(format!("{name}.pem"));
        fs::write(&path, certificate.pem())?;
        let key_path = folder.join(format!("{name}.key"));
        scratch::secret_file(&key_path, &key.serialize_pem()).map_err(io::Error::other)?;
        Ok(Tls { ca: ca.clone(), certificate: path, key: key_path })
    };
    Ok((sign("server", hosts)?, sign("client", vec!["client.invalid".to_owned()])?))
}

fn key() -> io::Result<KeyPair> {
    KeyPair::generate().map_err(io::Error::other)
}

fn named(name: &str, hosts: Vec<String>) -> io::Result<CertificateParams> {
    let mut params = CertificateParams::new(hosts).map_err(io::Error::other)?;
    params.distinguished_name.push(DnType::CommonName, name);
    Ok(params)
}
