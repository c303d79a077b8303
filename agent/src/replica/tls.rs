//! TLS of the link, for servers that replicate by TLS only: towards such a server we are a TLS server.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::args::LinkTlsArgs;
use crate::exit::Failure;
use crate::x509;

/// The configuration that the `--link-…` options describe, if they are given.
pub(super) fn server_config(args: &LinkTlsArgs) -> Result<Option<Arc<ServerConfig>>, Failure> {
    let (Some(cert), Some(key)) = (&args.link_cert, &args.link_key) else { return Ok(None) };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::local(format!("TLS can't be set up: {error}")))?;
    let builder = match &args.link_client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| unusable(path, &x509::of_pair(&error)))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| unusable(path, &error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let text = read(key)?;
    let private = PrivateKeyDer::from_pem_slice(&text);
    let private = private.map_err(|error| unusable(key, &x509::of_file(&error, &text, "private key")))?;
    let config = builder.with_single_cert(certificates(cert)?, private);
    let config = config.map_err(|error| unusable(cert, &x509::of_pair(&error)))?;
    Ok(Some(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let text = read(path)?;
    let read = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
    let read = read.and_then(|read| if read.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(read) });
    read.map_err(|error| unusable(path, &x509::of_file(&error, &text, "certificate")))
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| unusable(path, &error))
}

fn unusable(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::refused(format!("the file {} is of no use for TLS: {error}", path.display()))
}
