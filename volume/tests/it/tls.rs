//! Volumes over TLS: between clients and servers, and between servers.

use std::sync::Arc;

use remora_lab::tls::{Tls, certificates};
use remora_messenger::stack::tls::TlsOptions;
use remora_volume::Security;
use remora_volume::client::{ClientOptions, Volume, new_id};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{Copies, Shape};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::cluster::{keys, options, until};
use crate::pattern::Checker;

fn security(tls: &Tls) -> Security {
    let certificate = CertificateDer::from_pem_file(&tls.certificate).unwrap();
    let key = PrivateKeyDer::from_pem_file(&tls.key).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&tls.ca).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let server = server.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap();
    let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let client = client.with_root_certificates(roots).with_no_client_auth();
    let tls =
        TlsOptions { client: Some(Arc::new(client).into()), server_name: None, server: Some(Arc::new(server).into()) };
    Security { keys: keys(), unsealed: true, tls }
}

#[test]
fn a_volume_is_written_and_a_copy_taken_back_over_tls() {
    let folder = tempfile::tempdir().unwrap();
    let security = security(&certificates(folder.path(), &[]).unwrap().0);
    let settings = ServerOptions { security: security.clone(), ..ServerOptions::default() };
    let start = |address: &str| Server::start(&address.parse().unwrap(), &settings).unwrap();
    let mut servers: Vec<Server> = (0..3).map(|_| start("tls:127.0.0.1:0")).collect();
    let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
    let shape = Shape::new(new_id().unwrap(), 500, Copies::new(3, 2).unwrap()).unwrap();
    let options = ClientOptions { security, ..options() };
    Volume::create(shape, &addresses, &options).unwrap();
    let volume = Volume::open(shape, &addresses, &options).unwrap();
    let mut checker = Checker::new(5);
    (0..200).for_each(|_| assert!(checker.write(&volume)));
    servers.remove(2).stop();
    (0..200).for_each(|_| assert!(checker.write(&volume)));
    servers.push(start(&addresses[2].to_string()));
    until("the copy is taken back", || volume.members().len() == 3);
    assert!(checker.check(&volume) > 400);
}
