//! The server with TLS, and libnbd's clients.

use std::fs;
use std::sync::Arc;

use remora_lab::server::{Tls, certificates};
use remora_lab::{Random, require};
use remora_nbd::memory::MemoryDevice;
use remora_nbd::{Address, Server, ServerOptions};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::device::{LateDevice, offer};
use crate::foreign::{run, try_run};

/// With `asks`, clients must have a certificate of the same authority.
fn config(tls: &Tls, asks: bool) -> Arc<ServerConfig> {
    let certificate = CertificateDer::from_pem_file(&tls.certificate).unwrap();
    let key = PrivateKeyDer::from_pem_file(&tls.key).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&tls.ca).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let config = if asks {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build().unwrap();
        config.with_client_cert_verifier(verifier)
    } else {
        config.with_no_client_auth()
    };
    Arc::new(config.with_single_cert(vec![certificate], key).unwrap())
}

#[test]
#[ignore = "long: make test-all"]
fn clients_with_the_authority_copy_over_tls_and_others_get_nothing() {
    let Some(()) = require::nbd_clients() else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (server_tls, client_tls) = certificates(folder, &[]).unwrap();
    let content = Random::new(remora_lab::random::seed("tls")).bytes(12 << 20);
    fs::write(folder.join("there"), &content).unwrap();
    let with = client_tls.libnbd_folder(folder, "with", true).unwrap();
    let without = client_tls.libnbd_folder(folder, "without", false).unwrap();
    for asks in [false, true] {
        let mut options = ServerOptions::new(Address::Tcp("127.0.0.1:0".parse().unwrap()));
        options.tls = Some(config(&server_tls, asks).into());
        let devices = [
            offer("memory", Arc::new(MemoryDevice::new(12 << 20))),
            offer("late", Arc::new(LateDevice::new(12 << 20))),
        ];
        let server = Server::start(devices.to_vec(), &options).unwrap();
        let Address::Tcp(address) = server.address() else { panic!("not a port") };
        for export in ["memory", "late"] {
            let uri = |folder: &str| format!("nbds://{address}/{export}?tls-certificates={folder}");
            run(folder, "nbdcopy", &["--connections=2", "there", &uri(&with)]);
            run(folder, "nbdcopy", &["--connections=2", "--request-size=1048576", &uri(&with), "back"]);
            assert!(fs::read(folder.join("back")).unwrap() == content);
            let (is_well, said) = try_run(folder, "nbdinfo", &[&uri(&without)]);
            assert_eq!(is_well, !asks, "{said}");
        }
        let (is_well, said) = try_run(folder, "nbdinfo", &[&format!("nbd://{address}/memory")]);
        assert!(!is_well && said.contains("TLS"), "{said}");
    }
}
