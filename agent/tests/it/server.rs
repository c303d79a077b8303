//! The server client on real servers: every way to connect and log in, and every reason for a refusal.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    path::Path,
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use remora_agent::server::{
    Credentials, Facts, Family, Password, Pipeline, Raw, RefusalKind, Role, Server, ServerError, ServerUrl, Stream,
    Task, TlsOptions,
};
use remora_lab::{Server as RealServer, Tls, require};
use remora_redis::resp::Frame;

use crate::kit::LONG;

fn server(url: &str) -> Server {
    server_as(url, Credentials::default(), &TlsOptions::default())
}

fn server_as(url: &str, credentials: Credentials, tls: &TlsOptions) -> Server {
    Server::new(url.parse().unwrap(), credentials, tls, Task::Source).unwrap()
}

fn user(name: &str, password: &str) -> Credentials {
    let user = (!name.is_empty()).then(|| name.to_owned());
    Credentials { user: user.map(String::into_bytes), password: Some(Password::new(password)) }
}

async fn refused(server: &Server) -> ServerError {
    server.connect().await.expect_err("the server let us in")
}

#[tokio::test]
async fn plain_tcp_and_a_socket_lead_to_the_same_server() {
    for kind in require::kinds() {
        let real = RealServer::builder(kind).unix_socket().start().unwrap();
        for url in [real.url(), real.unix_url().unwrap()] {
            let mut client = server(&url).connect().await.unwrap();
            let facts = Facts::read(&mut client).await.unwrap();
            assert_eq!(facts.process_id, Some(real.pid()), "{url}");
            assert_eq!(facts.role, Some(Role::Primary));
            assert!(
                facts.replid.is_some()
                    && facts.offset.is_some()
                    && facts.backlog.is_some()
                    && facts.maxmemory.is_some()
            );
            assert_eq!(facts.family == Family::Valkey, real.version().unwrap().starts_with('9'));
            assert_eq!(client.peer_addr().is_some(), url.starts_with("redis"));
        }
    }
}

#[tokio::test]
async fn a_pipeline_answers_in_order_with_its_errors_among_the_answers() {
    let Some(kind) = require::redis() else { return };
    let real = RealServer::start(kind).unwrap();
    let mut client = server(&format!("{}/4", real.url())).connect().await.unwrap();
    let mut pipeline = Pipeline::default();
    pipeline.push(&["SET", "a", "1"]);
    pipeline.push(&["LPUSH", "a", "1"]);
    pipeline.push(&["GET", "a"]);
    let answers = client.pipeline(&mut pipeline).await.unwrap();
    assert!(answers[0].is_ok() && answers[1].as_error().is_some());
    assert_eq!(answers[2], Frame::Bulk(b"1".to_vec()));
    assert!(pipeline.is_empty());
    // The database of the address was selected.
    let mut other = real.client().unwrap();
    other.ok(&["SELECT", "4"]).unwrap();
    assert_eq!(other.int(&["EXISTS", "a"]).unwrap(), 1);
}

#[tokio::test]
async fn a_setting_is_read_written_and_missing() {
    let Some(kind) = require::redis() else { return };
    let real = RealServer::start(kind).unwrap();
    let mut client = server(&real.url()).connect().await.unwrap();
    client.config_set("repl-diskless-sync-delay", "3").await.unwrap();
    assert_eq!(client.config_get("repl-diskless-sync-delay").await.unwrap().as_deref(), Some("3"));
    assert_eq!(client.config_get("no-such-setting").await.unwrap(), None);
    let error = client.config_set("no-such-setting", "1").await.unwrap_err();
    assert_eq!(error.refusal(), Some(RefusalKind::UnknownOption));
}

#[tokio::test]
async fn the_stream_handed_over_is_a_blocking_socket_of_the_same_connection() {
    let Some(kind) = require::redis() else { return };
    let real = RealServer::start(kind).unwrap();
    let client = server(&real.url()).connect().await.unwrap();
    let (stream, rest) = client.into_stream();
    assert!(rest.is_empty() && matches!(stream, Stream::Tcp(_)));
    let Raw::Socket(socket) = stream.raw().unwrap() else { panic!("a plain connection has a plain socket") };
    let mut socket = std::net::TcpStream::from(socket);
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket.write_all(b"PING\r\n").unwrap();
    let mut answer = [0; 7];
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+PONG\r\n");
}

#[tokio::test]
async fn a_server_with_passwords_accepts_known_users_and_errors_name_the_missing_rules() {
    let Some(kind) = require::redis() else { return };
    let real = RealServer::builder(kind).require_pass("sesame").user("few", "pw", "+ping +info").start().unwrap();
    let none = TlsOptions::default();
    server_as(&real.url(), user("", "sesame"), &none).connect().await.unwrap();

    let error = refused(&server(&real.url())).await;
    assert_eq!(error.refusal(), Some(RefusalKind::NoAuth));
    assert!(error.to_string().contains("--password-file"), "{error}");

    let error = refused(&server_as(&real.url(), user("few", "wrong"), &none)).await;
    assert_eq!(error.refusal(), Some(RefusalKind::WrongPass));
    assert!(!error.to_string().contains("wrong:") && !error.is_passing(), "{error}");

    let mut client = server_as(&real.url(), user("few", "pw"), &none).connect().await.unwrap();
    // The facts need INFO only.
    assert!(Facts::read(&mut client).await.unwrap().replid.is_some());
    let error = client.command(&["PSYNC", "?", "-1"]).await.unwrap_err();
    assert_eq!(error.refusal(), Some(RefusalKind::NoPerm));
    assert!(error.to_string().contains("+replconf +psync"), "{error}");
}

#[tokio::test]
async fn a_closed_port_and_a_listener_that_is_not_a_server_give_different_errors() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let web_server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        // Until the other side has read it and closed the connection.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let url = format!("redis://127.0.0.1:{port}");
    let error = refused(&server(&url)).await;
    assert!(matches!(error, ServerError::NotRedis { .. }), "{error}");
    web_server.join().unwrap();

    let error = refused(&server(&url)).await;
    assert!(matches!(error, ServerError::Unreachable { .. }) && error.is_passing(), "{error}");
    assert!(error.to_string().contains(&url) && error.to_string().contains("check that it is running"), "{error}");

    let error = refused(&server("unix:///nowhere/redis.sock")).await;
    assert!(error.to_string().contains("/nowhere/redis.sock"), "{error}");
}

#[tokio::test]
async fn a_server_that_stops_answering_times_out() {
    let Some(kind) = require::redis() else { return };
    let mut real = RealServer::start(kind).unwrap();
    let mut client = server(&real.url()).connect().await.unwrap();
    client.set_timeout(Duration::from_millis(200));
    real.pause().unwrap();
    let error = client.command(&["PING"]).await.unwrap_err();
    assert!(matches!(&error, ServerError::TimedOut { command, .. } if command == "PING"), "{error}");
    real.kill().unwrap();
    let error = client.command(&["PING"]).await.unwrap_err();
    assert!(matches!(error, ServerError::Lost { .. } | ServerError::TimedOut { .. }), "{error}");
}

#[tokio::test]
async fn a_command_with_a_limit_of_its_own_outlasts_that_of_the_connection() {
    let Some(kind) = require::redis() else { return };
    let real = RealServer::start(kind).unwrap();
    let mut client = server(&real.url()).connect().await.unwrap();
    client.set_timeout(Duration::from_millis(200));
    client.command_within(LONG, &["DEBUG", "SLEEP", "1"]).await.unwrap();
    client.set_timeout(LONG);
    client.command(&["PING"]).await.unwrap();
    assert!(client.is_usable());
}

/// A late answer must not be taken for the answer to the next command.
#[tokio::test]
async fn a_connection_that_owes_an_answer_is_not_usable_any_more() {
    let Some(kind) = require::redis() else { return };
    let real = RealServer::start(kind).unwrap();
    let mut client = server(&real.url()).connect().await.unwrap();
    client.command_within(Duration::from_millis(200), &["DEBUG", "SLEEP", "1"]).await.unwrap_err();
    assert!(!client.is_usable());
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!client.is_usable(), "also when the late answer is there");
    // The same if the caller does not wait for the end.
    let mut client = server(&real.url()).connect().await.unwrap();
    let asked = tokio::time::timeout(Duration::from_millis(200), client.command(&["DEBUG", "SLEEP", "1"])).await;
    assert!(asked.is_err() && !client.is_usable());
}

#[tokio::test]
async fn tls_options_without_tls_are_a_mistake() {
    let tls = TlsOptions { ca: Some("ca.pem".into()), ..TlsOptions::default() };
    let url: ServerUrl = "redis://127.0.0.1".parse().unwrap();
    let error = Server::new(url, Credentials::default(), &tls, Task::Load).unwrap_err();
    assert!(error.to_string().contains("rediss://"), "{error}");
}

#[tokio::test]
async fn tls_with_the_right_authority_works_and_with_another_does_not() {
    let Some(kind) = require::redis() else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = certificates(folder.path(), "one");
    let real = RealServer::builder(kind).tls(files.clone()).start().unwrap();
    let url = real.tls_url().unwrap();
    let believing = |ca: &Path| TlsOptions { ca: Some(ca.to_owned()), ..TlsOptions::default() };

    let mut client = server_as(&url, Credentials::default(), &believing(&files.ca)).connect().await.unwrap();
    let facts = Facts::read(&mut client).await.unwrap();
    assert_eq!(facts.tls_port, real.tls_port());
    // A value of many TLS records arrives complete.
    client.command(&["SET", "a", &"x".repeat(1 << 20)]).await.unwrap();
    assert_eq!(client.command(&["GET", "a"]).await.unwrap().as_bytes().unwrap().len(), 1 << 20);
    assert!(matches!(client.into_stream().0.raw().unwrap(), Raw::Tls(_)));

    let stranger = certificates(folder.path(), "two");
    let error = refused(&server_as(&url, Credentials::default(), &believing(&stranger.ca))).await;
    assert!(matches!(error, ServerError::Tls { .. }), "{error}");

    let misnamed = TlsOptions { server_name: Some("elsewhere.example".into()), ..believing(&files.ca) };
    let error = refused(&server_as(&url, Credentials::default(), &misnamed)).await;
    assert!(error.to_string().contains("--tls-server-name"), "{error}");
}

#[tokio::test]
async fn a_server_that_asks_for_a_certificate_gets_ours() {
    let Some(kind) = require::redis() else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = certificates(folder.path(), "one");
    let real = RealServer::builder(kind).tls(files.clone()).config("tls-auth-clients", "yes").start().unwrap();
    let url = real.tls_url().unwrap();
    let anonymous = TlsOptions { ca: Some(files.ca.clone()), ..TlsOptions::default() };
    let named = TlsOptions { certificate: Some(files.certificate), key: Some(files.key), ..anonymous.clone() };
    server_as(&url, Credentials::default(), &named).connect().await.unwrap();
    let error = refused(&server_as(&url, Credentials::default(), &anonymous)).await;
    assert!(matches!(error, ServerError::Tls { .. }), "{error}");
}

#[tokio::test]
async fn a_closed_socket_is_a_lost_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let hangs_up = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let error = refused(&server(&url)).await;
    hangs_up.join().unwrap();
    assert!(matches!(&error, ServerError::Lost { command, .. } if command == "PING"), "{error}");
}

/// An authority, and a certificate signed by it for 127.0.0.1, which serves as a server's and as a client's.
fn certificates(folder: &Path, name: &str) -> Tls {
    let authority_key = KeyPair::generate().unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    // With another name than the authority's, or OpenSSL takes the certificate for self-signed.
    authority.distinguished_name.push(DnType::CommonName, format!("authority {name}"));
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_certificate = authority.self_signed(&authority_key).unwrap();
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap().signed_by(&key, &issuer).unwrap();
    let write = |part: &str, text: String| {
        let path = folder.join(format!("{name}-{part}.pem"));
        fs::write(&path, text).unwrap();
        path
    };
    Tls {
        ca: write("ca", authority_certificate.pem()),
        certificate: write("certificate", certificate.pem()),
        key: write("key", key.serialize_pem()),
    }
}
