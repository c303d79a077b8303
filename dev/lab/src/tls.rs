//! Certificates for servers and clients, generated on demand.
//!
//! Each folder has one authority, which has signed one certificate for servers on this machine and one for clients.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

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

impl Tls {
    /// Makes a folder as libnbd's `tls-certificates` wants it, with the authority and, if it is wanted, the
    /// certificate. Returns its path.
    pub fn libnbd_folder(&self, folder: &Path, name: &str, with_certificate: bool) -> Result<String> {
        let own = folder.join(name);
        let make = || -> io::Result<()> {
            fs::create_dir(&own)?;
            fs::copy(&self.ca, own.join("ca-cert.pem"))?;
            if with_certificate {
                fs::copy(&self.certificate, own.join("client-cert.pem"))?;
                fs::copy(&self.key, own.join("client-key.pem"))?;
            }
            Ok(())
        };
        make().doing(|| format!("make the folder {}", own.display()))?;
        Ok(own.display().to_string())
    }
}

/// Generates an authority in `folder`, and two certificates signed by it: one for a server on `localhost`, `127.0.0.1`
/// or any of `addresses`, one for a client.
pub fn certificates(folder: &Path, addresses: &[IpAddr]) -> Result<(Tls, Tls)> {
    let authority = Authority::new(folder, "ca")?;
    let mut hosts = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    hosts.extend(addresses.iter().map(IpAddr::to_string));
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    Ok((authority.sign("server", &hosts)?, authority.sign("client", &["client.invalid"])?))
}

/// An authority of its own.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
    /// The authority's certificate: a PEM file.
    pub ca: PathBuf,
}

impl Authority {
    /// Generates one, whose files are in `folder`; `name` is that of its own.
    pub fn new(folder: &Path, name: &str) -> Result<Authority> {
        let make = || -> io::Result<Authority> {
            let mut params = named(&format!("remora lab authority {name}"), &[])?;
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            let issuer = CertifiedIssuer::self_signed(params, key()?).map_err(io::Error::other)?;
            let ca = folder.join(format!("{name}.pem"));
            fs::write(&ca, issuer.pem())?;
            Ok(Authority { issuer, folder: folder.to_owned(), ca })
        };
        make().doing(|| format!("make an authority in {}", folder.display()))
    }

    /// Generates a certificate for these host names and addresses, in files of this name.
    pub fn sign(&self, name: &str, hosts: &[&str]) -> Result<Tls> {
        let params = named(name, hosts).doing(|| format!("make the certificate {name}"))?;
        self.sign_params(name, params)
    }

    /// As [`Authority::sign`], for a certificate that was valid until then.
    pub fn sign_until(&self, name: &str, hosts: &[&str], end: SystemTime) -> Result<Tls> {
        let mut params = named(name, hosts).doing(|| format!("make the certificate {name}"))?;
        params.not_before = (end - A_DAY).into();
        params.not_after = end.into();
        self.sign_params(name, params)
    }

    fn sign_params(&self, name: &str, params: CertificateParams) -> Result<Tls> {
        let make = || -> io::Result<Tls> {
            let key = key()?;
            let certificate = params.signed_by(&key, &self.issuer).map_err(io::Error::other)?;
            let path = self.folder.join(format!("{name}.pem"));
            fs::write(&path, certificate.pem())?;
            let key_path = self.folder.join(format!("{name}.key"));
            scratch::secret_file(&key_path, &key.serialize_pem()).map_err(io::Error::other)?;
            Ok(Tls { ca: self.ca.clone(), certificate: path, key: key_path })
        };
        make().doing(|| format!("make the certificate {name}"))
    }
}

fn key() -> io::Result<KeyPair> {
    KeyPair::generate().map_err(io::Error::other)
}

fn named(name: &str, hosts: &[&str]) -> io::Result<CertificateParams> {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let mut params = CertificateParams::new(hosts).map_err(io::Error::other)?;
    params.distinguished_name.push(DnType::CommonName, name);
    Ok(params)
}

const A_DAY: Duration = Duration::from_secs(86_400);
