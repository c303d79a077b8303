//! The shared cases over TLS: every size, cuts, a receiver that holds messages; and peers that are rejected.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use remora_lab::tls::{Tls, certificates};
use remora_messenger::stack::tls::TlsOptions;
use remora_messenger::{Address, Options, Policy, SendError};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::alike;
use crate::kit::*;

fn chain(tls: &Tls) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let certificate = CertificateDer::from_pem_file(&tls.certificate).unwrap();
    (vec![certificate], PrivateKeyDer::from_pem_file(&tls.key).unwrap())
}

fn authority(tls: &Tls) -> Arc<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&tls.ca).unwrap()).unwrap();
    Arc::new(roots)
}

/// Options for both ends, with certificates of one authority.
fn secure() -> (tempfile::TempDir, Options) {
    let folder = tempfile::tempdir().unwrap();
    let (server, client) = certificates(folder.path(), &[]).unwrap();
    let provider = Arc::new(default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(authority(&server), provider.clone()).build().unwrap();
    let (certificates, key) = chain(&server);
    let server_config = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
    let server_config =
        server_config.unwrap().with_client_cert_verifier(verifier).with_single_cert(certificates, key).unwrap();
    let (certificates, key) = chain(&client);
    let client_config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let client_config =
        client_config.unwrap().with_root_certificates(authority(&client)).with_client_auth_cert(certificates, key);
    let tls = TlsOptions {
        client: Some(Arc::new(client_config.unwrap())),
        server_name: Some("localhost".to_owned()),
        server: Some(Arc::new(server_config)),
    };
    (folder, Options { tls, ..Options::default() })
}

fn anywhere() -> Address {
    "tls:127.0.0.1:0".parse().unwrap()
}

#[test]
fn a_question_is_answered_whatever_its_size() {
    let (_folder, options) = secure();
    let sizes = [0, 1, 1025, 16_384, 70_000, 1_048_576, 16 << 20];
    alike::a_question_is_answered(&anywhere(), &options, &sizes, 0);
}

#[test]
fn a_lossless_client_sends_everything_once_although_its_links_are_cut() {
    let (_folder, options) = secure();
    alike::everything_arrives_once_although_links_are_cut(
        &anywhere(),
        &options,
        20_000,
        1000,
        5,
        Duration::from_secs(20),
    );
}

#[test]
fn a_receiver_that_holds_messages_is_never_overrun_and_loses_none() {
    let (_folder, options) = secure();
    alike::a_receiver_that_holds_messages_is_never_overrun(&anywhere(), &options, 60, Duration::from_millis(20));
}

#[test]
fn nothing_crosses_unencrypted_and_a_peer_without_a_certificate_is_rejected() {
    let (_folder, options) = secure();
    let server = end_with(Policy::stateless_server(), &options, Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let port = address.to_string().rsplit(':').next().unwrap().parse::<u16>().unwrap();
    // Unencrypted bytes: an alert, no handshake.
    let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stranger.write_all(b"REMORA\r\nand bytes that are not a TLS record").unwrap();
    let mut answer = Vec::new();
    let _ = stranger.read_to_end(&mut answer);
    assert!(!answer.windows(6).any(|seen| seen == b"REMORA"), "{answer:?}");
    // A certificate of another authority: refused.
    let (_other_folder, other) = secure();
    let client = end_with(Policy::lossy_client(), &other, Recorder::default());
    let connection = client.messenger.connect(&address);
    until("the end", || matches!(connection.send(numbered(1)), Err(SendError::Over(_))));
    assert!(connection.link_error().unwrap().to_string().contains("certificate"), "{:?}", connection.link_error());
    assert!(server.recorder.received().is_empty());
}

#[test]
fn without_a_configuration_a_tls_address_is_refused_with_what_is_missing() {
    let end = end(Policy::lossy_client(), Recorder::default());
    let error = end.messenger.listen(&anywhere()).unwrap_err();
    assert!(error.to_string().contains("Options::tls.server"), "{error}");
}
