//! The shared cases over TLS: every size, cuts, a receiver that holds messages; and peers that are rejected, that violate
//! the protocol, or that have no token.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remora_lab::server::{Tls, certificates};
use remora_messenger::stack::tls::{TlsConfig, TlsOptions};
use remora_messenger::{Address, Key, Keyring, Options, Policy, SendError, Token};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, ServerConfig, ServerConnection,
    SignatureScheme,
};

use crate::kit::{self, *};

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
        client: Some(Arc::new(client_config.unwrap()).into()),
        server_name: Some("localhost".to_owned()),
        server: Some(Arc::new(server_config).into()),
    };
    (folder, Options { tls, ..Options::default() })
}

fn anywhere_by_tls() -> Address {
    "tls:127.0.0.1:0".parse().unwrap()
}

#[test]
fn a_question_is_answered_whatever_its_size() {
    let (_folder, options) = secure();
    let sizes = [0, 1, 1025, 16_384, 70_000, 1_048_576, 16 << 20];
    kit::a_question_is_answered(&anywhere_by_tls(), &options, &sizes, 0);
}

#[test]
fn a_lossless_client_sends_everything_once_although_its_links_are_cut() {
    let (_folder, options) = secure();
    kit::everything_arrives_once_although_links_are_cut(&anywhere_by_tls(), &options, 20_000, 1000, 5);
}

#[test]
fn a_receiver_that_holds_messages_is_never_overrun_and_loses_none() {
    let (_folder, options) = secure();
    kit::a_receiver_that_holds_messages_is_never_overrun(&anywhere_by_tls(), &options, 60, Duration::from_millis(20));
}

#[test]
fn nothing_crosses_unencrypted_and_a_peer_without_a_certificate_is_rejected() {
    let (_folder, options) = secure();
    let server = end_with(Policy::stateless_server(), &options, Recorder::default());
    let address = server.messenger.listen(&anywhere_by_tls()).unwrap();
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

/// Accepts every certificate.
#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// Options of an end that has the token, and takes every certificate: the token alone authenticates.
fn throw_away(folder: &tempfile::TempDir) -> Options {
    let (server, _) = certificates(folder.path(), &[]).unwrap();
    let provider = Arc::new(default_provider());
    let versions = [&rustls::version::TLS13];
    let (certificates, key) = chain(&server);
    let server = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&versions).unwrap();
    let server = server.with_no_client_auth().with_single_cert(certificates, key).unwrap();
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&versions).unwrap();
    let client = client.dangerous().with_custom_certificate_verifier(Arc::new(Anyone)).with_no_client_auth();
    let tls =
        TlsOptions { client: Some(Arc::new(client).into()), server_name: None, server: Some(Arc::new(server).into()) };
    let token = Arc::new(Token::new(b"the token of both ends, long").unwrap());
    Options { tls, keys: Some(Arc::new(Keyring::only(token))), ..Options::default() }
}

/// Passes the decrypted bytes between two TLS sessions, and returns what it read.
fn eavesdrop(listener: &TcpListener, server: SocketAddr, tls: &TlsOptions) -> Vec<u8> {
    let near = listener.accept().unwrap().0;
    let far = TcpStream::connect(server).unwrap();
    for socket in [&near, &far] {
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    }
    let mut near =
        rustls::StreamOwned::new(ServerConnection::new(tls.server.as_ref().unwrap().current()).unwrap(), near);
    let name = ServerName::try_from("localhost").unwrap();
    let mut far =
        rustls::StreamOwned::new(ClientConnection::new(tls.client.as_ref().unwrap().current(), name).unwrap(), far);
    let mut seen = Vec::new();
    let deadline = Instant::now() + LONG;
    while Instant::now() < deadline {
        if !pass(&mut near, &mut far, &mut seen) || !pass(&mut far, &mut near, &mut seen) {
            break;
        }
    }
    seen
}

/// Passes on what there is. Returns `false` at the end.
fn pass(from: &mut impl Read, to: &mut impl Write, seen: &mut Vec<u8>) -> bool {
    let mut piece = [0; 4096];
    match from.read(&mut piece) {
        Ok(0) => false,
        Ok(count) => {
            seen.extend_from_slice(&piece[..count]);
            to.write_all(&piece[..count]).and_then(|()| to.flush()).is_ok()
        }
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted),
    }
}

#[test]
fn an_attacker_who_terminates_tls_in_the_middle_fails_both_proofs() {
    let folder = tempfile::tempdir().unwrap();
    let options = throw_away(&folder);
    let server = end_with(Policy::stateless_server(), &options, Recorder::default());
    let Address::Tls(at) = server.messenger.listen(&anywhere_by_tls()).unwrap() else { panic!("not a TLS address") };
    // Directly: a conversation.
    let client = end_with(Policy::lossy_client(), &options, Recorder::default());
    let connection = client.messenger.connect(&Address::Tls(at));
    connection.send(numbered(1)).unwrap();
    until("the message", || server.recorder.received() == [1]);
    // Through the attacker, who has certificates that both ends take: none.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let middle = listener.local_addr().unwrap();
    let tls = throw_away(&tempfile::tempdir().unwrap()).tls;
    let attacker = std::thread::spawn(move || eavesdrop(&listener, at, &tls));
    let connection = client.messenger.connect(&Address::Tls(middle));
    until("the end", || matches!(connection.send(numbered(2)), Err(SendError::Over(_))));
    let error = connection.link_error().unwrap().to_string();
    assert!(error.contains("token"), "{error}");
    let seen = attacker.join().unwrap();
    assert!(seen.windows(8).any(|bytes| bytes == b"REMORA\r\n"), "the attacker passed the handshake on");
    assert_eq!(server.recorder.received(), [1]);
}

#[test]
fn an_accepted_socket_is_adopted_with_tls() {
    let folder = tempfile::tempdir().unwrap();
    let options = throw_away(&folder);
    let server = end_with(Policy::stateless_server(), &options, Recorder::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = end_with(Policy::lossy_client(), &options, Recorder::default());
    let connection = client.messenger.connect(&Address::Tls(listener.local_addr().unwrap()));
    let config = options.tls.server.as_ref().unwrap().current();
    server.messenger.adopt_tls(listener.accept().unwrap().0, &config).unwrap();
    connection.send(numbered(7)).unwrap();
    until("the message", || server.recorder.received() == [7]);
}

#[test]
fn configurations_that_the_owner_replaces_are_those_of_new_connections_and_open_ones_go_on() {
    let ((_old_folder, old), (_new_folder, new)) = (secure(), secure());
    let current = Arc::new(Mutex::new(old.tls.clone()));
    let (of_calls, of_port) = (current.clone(), current.clone());
    let tls = TlsOptions {
        client: Some(TlsConfig::new(move || of_calls.lock().unwrap().client.as_ref().unwrap().current())),
        server: Some(TlsConfig::new(move || of_port.lock().unwrap().server.as_ref().unwrap().current())),
        ..old.tls.clone()
    };
    let replaced = Options { tls, ..Options::default() };
    let (server, client) = (
        end_with(Policy::stateless_server(), &replaced, Recorder::default()),
        end_with(Policy::lossy_client(), &replaced, Recorder::default()),
    );
    let address = server.messenger.listen(&anywhere_by_tls()).unwrap();
    let open = client.messenger.connect(&address);
    open.send(numbered(1)).unwrap();
    until("the first message", || server.recorder.received() == [1]);

    *current.lock().unwrap() = new.tls;
    // One that was never told of the new authority is refused, and refuses.
    let stranger = end_with(Policy::lossy_client(), &old, Recorder::default());
    let refused = stranger.messenger.connect(&address);
    until("the end", || matches!(refused.send(numbered(2)), Err(SendError::Over(_))));
    assert!(refused.link_error().unwrap().to_string().contains("certificate"), "{:?}", refused.link_error());
    let again = end_with(Policy::lossy_client(), &replaced, Recorder::default());
    again.messenger.connect(&address).send(numbered(3)).unwrap();
    open.send(numbered(4)).unwrap();
    until("both messages", || [3, 4].iter().all(|number| server.recorder.received().contains(number)));
    assert!(!server.recorder.received().contains(&2));
}

#[test]
fn without_a_configuration_a_tls_address_is_refused_with_what_is_missing() {
    let end = end(Policy::lossy_client(), Recorder::default());
    let error = end.messenger.listen(&anywhere_by_tls()).unwrap_err();
    assert!(error.to_string().contains("Options::tls.server"), "{error}");
}

// Peers that violate the protocol, and peers without the token.

fn socket(address: &Address) -> TcpStream {
    let Address::Tcp(address) = address else { panic!("{address}") };
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

#[test]
fn invalid_bytes_end_their_connection_and_others_are_served_meanwhile() {
    let server = end(Policy::stateless_server(), Recorder { echoes: true, ..Recorder::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    for nonsense in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\0\0\0\0", b"REMORA\r\nxxxxxxxxxxxxxxxxxxxxxxxx"] {
        let mut stream = socket(&address);
        stream.write_all(nonsense).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer); // a reset is an end too
        assert!(answer.len() < 200);
    }
    let client = end(Policy::lossy_client(), Recorder::default());
    client.messenger.connect(&address).send(numbered(7)).unwrap();
    until("an answer", || client.recorder.received() == [7]);
}

#[test]
fn a_silent_connection_is_closed_after_the_limit() {
    let mut policy = Policy::stateless_server();
    policy.opening_limit = Duration::from_millis(50);
    let server = end(policy, Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let mut silent = socket(&address);
    assert_eq!(silent.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn unauthenticated_connections_beyond_the_limit_are_dropped() {
    let options = Options { max_unauthenticated: 3, ..Options::default() };
    let server = end_with(Policy::stateless_server(), &options, Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let _silent: Vec<_> = (0..3).map(|_| socket(&address)).collect();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(socket(&address).read(&mut [0; 8]).unwrap_or(0), 0);
}

#[test]
fn only_a_peer_with_the_token_is_accepted_and_its_frames_are_sealed() {
    let with = |token: &[u8]| {
        let keys = Keyring::only(Arc::new(Token::new(token).unwrap()));
        Options { keys: Some(Arc::new(keys)), ..Options::default() }
    };
    let server = end_with(
        Policy::stateless_server(),
        &with(b"0123456789abcdef"),
        Recorder { echoes: true, ..Recorder::default() },
    );
    let address = server.messenger.listen(&anywhere()).unwrap();
    let friend = end_with(Policy::lossy_client(), &with(b"0123456789abcdef"), Recorder::default());
    friend.messenger.connect(&address).send(numbered(1)).unwrap();
    until("an answer", || friend.recorder.received() == [1]);
    for options in [with(b"another token 16"), Options::default()] {
        let stranger = end_with(Policy::lossy_client(), &options, Recorder::default());
        stranger.messenger.connect(&address).send(numbered(2)).unwrap();
        until("the end", || matches!(stranger.recorder.callbacks()[..], [Callback::Reset { continues: false, .. }]));
    }
    assert_eq!(server.recorder.received(), [1]);
}

#[test]
fn messages_arrive_without_checksums_if_both_ends_want_that() {
    let bare = Options { summed: false, ..Options::default() };
    for (ours, theirs) in [(&bare, &bare), (&bare, &Options::default())] {
        let server = end_with(Policy::stateless_server(), ours, Recorder { echoes: true, ..Recorder::default() });
        let address = server.messenger.listen(&anywhere()).unwrap();
        let client = end_with(Policy::lossy_client(), theirs, Recorder::default());
        client.messenger.connect(&address).send(numbered(1)).unwrap();
        until("an answer", || client.recorder.received() == [1]);
    }
}

#[test]
fn every_token_of_a_keyring_is_accepted_until_it_is_replaced_and_sessions_go_on() {
    let key = |text: &[u8], mark| Key::new(Arc::new(Token::new(text).unwrap()), mark);
    let (old, new) = (key(b"the former token", 1), key(b"the token to come", 2));
    let keyring = Arc::new(Keyring::new(vec![old.clone(), new.clone()]).unwrap());
    let options = Options { keys: Some(keyring.clone()), ..Options::default() };
    let server = end_with(Policy::stateless_server(), &options, Recorder { echoes: true, ..Recorder::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let with = |key: &Key| {
        let keys = Keyring::new(vec![key.clone()]).unwrap();
        let options = Options { keys: Some(Arc::new(keys)), ..Options::default() };
        end_with(Policy::lossy_client(), &options, Recorder::default())
    };
    let (former, present) = (with(&old), with(&new));
    let session = former.messenger.connect(&address);
    session.send(numbered(1)).unwrap();
    until("an answer to the former token", || former.recorder.received() == [1]);
    present.messenger.connect(&address).send(numbered(2)).unwrap();
    until("an answer to the new token", || present.recorder.received() == [2]);

    keyring.replace(vec![new]).unwrap();
    session.send(numbered(3)).unwrap();
    until("an answer in the session that was open before", || former.recorder.received() == [1, 3]);
    let late = with(&old);
    late.messenger.connect(&address).send(numbered(4)).unwrap();
    until("the end", || matches!(late.recorder.callbacks()[..], [Callback::Reset { continues: false, .. }]));
    assert_eq!(server.recorder.received(), [1, 2, 3]);
    assert!(keyring.replace(Vec::new()).is_err());
}
