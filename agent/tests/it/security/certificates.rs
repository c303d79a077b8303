//! How agents reach and log in to a server: the client on real servers, with every reason for a refusal, and the ways
//! in which people make certificates for servers, with what comes of each (the table in docs/reference/tls.md).
//!
//! The files in `certificates/` were made by the commands in `certificates/make`; the others are made here.
//!
//! And the link's port gives data only to the agent's server, and what the agent leaves on the server and on disk is
//! useless to others.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use remora_agent::server::{
    Credentials, Facts, Family, Password, Pipeline, Raw, RefusalKind, Role, Server, ServerError, ServerUrl, SetupError,
    Stream, Task, TlsOptions,
};
use remora_agent::x509::Fingerprint;
use remora_lab::server::{Authority, Builder, Tls, wait_until};
use remora_lab::{Agent, Kind, Net, Server as RealServer, assert_same_data, require};
use remora_redis::resp::Frame;
use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, ends, fill_keys, load_slowly, number, quick, says, succeeds, syncs, wait_until_loading,
};

/// A file that was made by openssl.
fn made(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/certificates").join(name)
}

/// Certificate and key that were made by openssl, with an authority that the server itself trusts.
fn pair(certificate: &str, key: &str, ca: &str) -> Tls {
    Tls { ca: made(ca), certificate: made(certificate), key: made(key) }
}

/// Trusts what is in this file.
fn trusting(ca: &Path) -> TlsOptions {
    TlsOptions { ca: Some(ca.to_owned()), ..TlsOptions::default() }
}

/// Trusts one certificate, as the message for it proposes.
fn pinning(message: &str) -> TlsOptions {
    let pin = message.split("--tls-pin ").nth(1).and_then(|rest| rest.split([',', ' ']).next()).unwrap_or_default();
    TlsOptions { pins: vec![pin.parse::<Fingerprint>().unwrap()], ..TlsOptions::default() }
}

/// A real server with a certificate.
struct Scene {
    server: RealServer,
    runtime: tokio::runtime::Runtime,
}

impl Scene {
    fn new(files: &Tls) -> Scene {
        let server = RealServer::builder(require::redis().unwrap()).tls(files.clone()).start().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Scene { server, runtime }
    }

    /// Connects, at this host of the loopback.
    fn connect(&self, host: &str, tls: &TlsOptions) -> Result<(), String> {
        let url = format!("rediss://{host}:{}", self.server.tls_port().unwrap());
        let server = Server::new(url.parse().unwrap(), Credentials::default(), tls, Task::Source);
        let server = server.map_err(|error: SetupError| error.to_string())?;
        self.runtime.block_on(server.connect()).map(drop).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn accepts(&self, host: &str, tls: &TlsOptions) {
        self.connect(host, tls).unwrap();
    }

    /// Is refused by a sentence with these parts. Returns it.
    #[track_caller]
    fn refuses(&self, host: &str, tls: &TlsOptions, parts: &[&str]) -> String {
        let text = self.connect(host, tls).expect_err("it was accepted");
        says(&text, parts);
        says(&text, &["rediss://", &self.server.tls_port().unwrap().to_string()]);
        is_for_people(&text);
        text
    }

    /// Is refused by a sentence with these parts, and accepted by the fingerprint in it.
    #[track_caller]
    fn needs_a_pin(&self, host: &str, tls: &TlsOptions, parts: &[&str]) {
        let text = self.refuses(host, tls, &[parts, &["--tls-pin sha256:", "openssl x509"]].concat());
        self.accepts(host, &pinning(&text));
    }
}

/// No text of a library's: no name of a variant, no braces.
#[track_caller]
fn is_for_people(text: &str) {
    for raw in [
        "Other",
        "CaUsedAsEndEntity",
        "UnsupportedCert",
        "UnknownIssuer",
        "InvalidCertificate",
        "NotValid",
        "{",
        "Alert",
    ] {
        assert!(!text.contains(raw), "{raw}: {text}");
    }
}

const HOST: &str = "127.0.0.1";

#[test]
fn a_certificate_of_one_line_works_as_its_own_authority_if_it_has_names_and_by_its_fingerprint_if_not() {
    let Some(_) = require::redis() else { return };
    // CA:TRUE, as `openssl req -x509` makes it, and CA:FALSE.
    for name in ["one-line-names", "leaf-names"] {
        let files = pair(&format!("{name}.pem"), &format!("{name}.key"), &format!("{name}.pem"));
        let scene = Scene::new(&files);
        for host in [HOST, "localhost"] {
            scene.accepts(host, &trusting(&files.certificate));
        }
        let other = TlsOptions { server_name: Some("db1.example".into()), ..trusting(&files.certificate) };
        scene.refuses(HOST, &other, &["is for localhost, 127.0.0.1, and not for db1.example", "--tls-server-name"]);
        scene.needs_a_pin(HOST, &trusting(&made("test-ca.pem")), &["test-ca.pem", "--tls-ca"]);
    }
    let scene = Scene::new(&pair("one-line.pem", "one-line.key", "one-line.pem"));
    let parts = ["names no host", "common name (redis) is not looked at", "subjectAltName=IP:127.0.0.1"];
    scene.needs_a_pin(HOST, &trusting(&made("one-line.pem")), &parts);
    // No name helps there.
    let named = TlsOptions { server_name: Some("redis".into()), ..trusting(&made("one-line.pem")) };
    scene.refuses(HOST, &named, &["names no host", "subjectAltName=DNS:redis"]);
}

#[test]
fn a_certificate_of_the_first_version_is_accepted_by_its_fingerprint() {
    let Some(_) = require::redis() else { return };
    let scene = Scene::new(&pair("old.pem", "old.key", "old-ca.pem"));
    let parts = ["X.509 v1", "no room for host names", "-extfile", "subjectAltName=IP:127.0.0.1"];
    scene.needs_a_pin(HOST, &trusting(&made("old-ca.pem")), &parts);
    // The certificate itself has no names either.
    scene.refuses(HOST, &trusting(&made("old.pem")), &["X.509 v1"]);
}

#[test]
fn the_servers_own_test_certificates_have_no_names() {
    let Some(_) = require::redis() else { return };
    let scene = Scene::new(&pair("test-server.pem", "test-server.key", "test-ca.pem"));
    let parts = ["names no host", "common name (server-only)", "subjectAltName=IP:127.0.0.1"];
    scene.needs_a_pin(HOST, &trusting(&made("test-ca.pem")), &parts);
}

#[test]
fn an_address_that_the_certificate_does_not_name_is_said_and_the_name_can_be_given() {
    let Some(_) = require::redis() else { return };
    let stage = Stage::new();
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    // As mkcert localhost makes it, and as cert-manager does for a Service.
    for names in [&["localhost"][..], &["redis", "redis.data.svc", "redis.data.svc.cluster.local"]] {
        let files = authority.sign("server", names).unwrap();
        let scene = Scene::new(&files);
        let parts = [names[0], "and not for 127.0.0.1", "--tls-server-name"];
        scene.needs_a_pin(HOST, &trusting(&files.ca), &parts);
        scene.accepts(HOST, &TlsOptions { server_name: Some(names[0].into()), ..trusting(&files.ca) });
    }
    // It does for a server that is reached at another address too, and no other name does.
    let files = authority.sign("pods", &["redis.data.svc"]).unwrap();
    let scene = Scene::new(&files);
    let named = |name: &str| TlsOptions { server_name: Some(name.into()), ..trusting(&files.ca) };
    for name in ["redis.data.svc", "other.data.svc"] {
        let own =
            Server::new("rediss://127.0.0.2:1".parse().unwrap(), Credentials::default(), &named(name), Task::Source);
        let primary = own.unwrap().at(HOST, scene.server.tls_port().unwrap());
        let connected = scene.runtime.block_on(primary.connect()).map(drop).map_err(|error| error.to_string());
        match name {
            "redis.data.svc" => connected.unwrap(),
            _ => says(&connected.unwrap_err(), &["redis.data.svc", "and not for 127.0.0.1"]),
        }
    }
    // mkcert localhost 127.0.0.1
    let files = authority.sign("both", &["localhost", HOST]).unwrap();
    Scene::new(&files).accepts(HOST, &trusting(&files.ca));
    Scene::new(&files).accepts("localhost", &trusting(&files.ca));
}

#[test]
fn a_certificate_that_is_not_valid_now_is_refused_with_the_day() {
    let Some(_) = require::redis() else { return };
    let (stage, now, day) = (Stage::new(), SystemTime::now(), Duration::from_secs(86_400));
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let expired = authority.sign_until("expired", &[HOST], SystemTime::UNIX_EPOCH + 19_000 * day).unwrap();
    let scene = Scene::new(&expired);
    scene.refuses(HOST, &trusting(&expired.ca), &["has expired on 2022-01-08", "renew it"]);
    // By itself too.
    scene.refuses(HOST, &trusting(&expired.certificate), &["has expired on 2022-01-08"]);
    let early = authority.sign_until("early", &[HOST], now + 20 * day).unwrap();
    let scene = Scene::new(&early);
    scene.refuses(HOST, &trusting(&early.ca), &["is valid from", "check the clocks"]);
}

/// Signs a certificate with these parameters by this issuer, and writes it with its key in front of `others`.
fn signed(stage: &Stage, name: &str, params: CertificateParams, by: &Issuer<'_, KeyPair>, others: &str) -> Tls {
    let key = KeyPair::generate().unwrap();
    let own = params.signed_by(&key, by).unwrap().pem();
    let write = |kind: &str, text: &str| {
        let path = stage.folder().join(format!("{name}.{kind}"));
        fs::write(&path, text).unwrap();
        path
    };
    Tls { ca: made("test-ca.pem"), certificate: write("pem", &(own + others)), key: write("key", &key.serialize_pem()) }
}

fn named(name: &str, hosts: &[&str]) -> CertificateParams {
    let mut params = CertificateParams::new(hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>()).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

/// The certificate of an authority.
fn authority(name: &str) -> CertificateParams {
    let mut params = named(name, &[]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

/// As step ca and public authorities: the root signs an intermediate, and that the server's.
#[test]
fn an_intermediate_that_the_server_does_not_send_is_missed_and_may_be_given() {
    let Some(_) = require::redis() else { return };
    let stage = Stage::new();
    let root = CertifiedIssuer::self_signed(authority("root"), KeyPair::generate().unwrap()).unwrap();
    let between = CertifiedIssuer::signed_by(authority("between"), KeyPair::generate().unwrap(), &root).unwrap();
    let [root_file, between_file] = ["root", "between"].map(|name| stage.folder().join(format!("{name}.pem")));
    fs::write(&root_file, root.pem()).unwrap();
    fs::write(&between_file, between.pem()).unwrap();
    let whole = signed(&stage, "whole", named("server", &[HOST]), &between, &between.pem());
    Scene::new(&whole).accepts(HOST, &trusting(&root_file));
    let alone = signed(&stage, "alone", named("server", &[HOST]), &between, "");
    let scene = Scene::new(&alone);
    let parts =
        ["signed by \"between\"", "root.pem (--tls-ca)", "sends no certificate beside its own", "tls-cert-file"];
    scene.needs_a_pin(HOST, &trusting(&root_file), &parts);
    scene.accepts(HOST, &trusting(&between_file));
}

#[test]
fn certificates_of_other_uses_and_authorities_that_were_made_anew_are_named() {
    let Some(_) = require::redis() else { return };
    let stage = Stage::new();
    let write = |name: &str, issuer: &CertifiedIssuer<'_, KeyPair>| {
        let path = stage.folder().join(format!("{name}.pem"));
        fs::write(&path, issuer.pem()).unwrap();
        path
    };
    let root = CertifiedIssuer::self_signed(authority("root"), KeyPair::generate().unwrap()).unwrap();
    let anew = CertifiedIssuer::self_signed(authority("root"), KeyPair::generate().unwrap()).unwrap();
    let [root_file, anew_file] = [("root", &root), ("anew", &anew)].map(|(name, issuer)| write(name, issuer));

    let mut for_clients = named("client", &[HOST]);
    for_clients.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let files = signed(&stage, "for-clients", for_clients, &root, "");
    // OpenSSL does not look at the purpose of its own certificate.
    let scene = Scene::new(&files);
    for trusted in [&root_file, &files.certificate] {
        scene.needs_a_pin(HOST, &trusting(trusted), &["may not be a server's", "serverAuth"]);
    }

    let files = signed(&stage, "plain", named("server", &[HOST]), &root, "");
    let scene = Scene::new(&files);
    scene.refuses(HOST, &trusting(&anew_file), &["anew.pem (--tls-ca)", "made anew", "give the new one"]);

    // Signed with the extensions of an authority.
    let mut as_authority = named("server", &[HOST]);
    as_authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let files = signed(&stage, "as-authority", as_authority, &root, "");
    let scene = Scene::new(&files);
    scene.needs_a_pin(HOST, &trusting(&root_file), &["that of an authority (CA:TRUE)", "give its file by --tls-ca"]);
    scene.accepts(HOST, &trusting(&files.certificate));
}

#[test]
fn a_fingerprint_accepts_its_certificate_and_no_other_whatever_else_is_trusted() {
    let Some(_) = require::redis() else { return };
    let files = pair("one-line-names.pem", "one-line-names.key", "one-line-names.pem");
    let scene = Scene::new(&files);
    let wrong = format!("sha256:{}", "a1".repeat(32)).parse().unwrap();
    let pinned = TlsOptions { pins: vec![wrong], ..trusting(&files.ca) };
    let text = scene.refuses(HOST, &pinned, &["has the fingerprint sha256:", "--tls-pin is given for another one"]);
    let own: Fingerprint = text.split("fingerprint ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    scene.accepts(HOST, &TlsOptions { pins: vec![wrong, own], ..TlsOptions::default() });
}

#[test]
fn client_keys_of_every_form_are_read_and_pairs_that_do_not_fit_are_refused_by_name() {
    let Some(_) = require::redis() else { return };
    let server = pair("leaf-names.pem", "leaf-names.key", "old-client.pem");
    let scene = Scene::new(&server);
    let with = |certificate: &str, key: &str| TlsOptions {
        certificate: Some(made(certificate)),
        key: Some(made(key)),
        ..trusting(&server.certificate)
    };
    // PKCS#1 and PKCS#8 of RSA; SEC1 and PKCS#8 of an elliptic curve, which this server does not know.
    for key in ["old.key", "old-pkcs8.key"] {
        scene.accepts(HOST, &with("old-client.pem", key));
    }
    for key in ["leaf-sec1.key", "leaf-names.key"] {
        scene.refuses(HOST, &with("leaf-names.pem", key), &["does not accept the certificate in --tls-cert"]);
    }
    let refused = |certificate: &str, key: &str, parts: &[&str]| {
        let text = scene.connect(HOST, &with(certificate, key)).unwrap_err();
        says(&text, parts);
        is_for_people(&text);
    };
    refused("leaf-names.pem", "old.key", &["leaf-names.pem", "old.key", "is not that of the certificate"]);
    refused("leaf-names.pem", "leaf-encrypted.key", &["leaf-encrypted.key", "passphrase", "openssl pkey"]);
    refused("leaf-names.pem", "leaf-names.pem", &["leaf-names.pem", "holds no private key in PEM"]);
    refused("leaf-names.key", "leaf-names.key", &["leaf-names.key", "holds no certificate in PEM"]);
    refused("old.pem", "old.key", &["old.pem", "X.509 v1"]);

    let stage = Stage::new();
    let der = stage.folder().join("ca.der");
    fs::write(&der, [0x30, 0x82, 1, 0]).unwrap();
    let text = scene.connect(HOST, &trusting(&der)).unwrap_err();
    says(&text, &["ca.der", "DER", "-inform der"]);
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_asks_for_a_certificate_and_a_port_without_tls_are_explained() {
    let Some(kind) = require::redis() else { return };
    let files = pair("leaf-names.pem", "leaf-names.key", "leaf-names.pem");
    let server = RealServer::builder(kind).tls(files.clone()).config("tls-auth-clients", "yes").start().unwrap();
    let scene = Scene { server, runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap() };
    scene.refuses(HOST, &trusting(&files.ca), &["asks for a certificate of this end", "--tls-cert and --tls-key"]);
    let url = format!("rediss://{HOST}:{}", scene.server.port());
    let plain = Server::new(url.parse().unwrap(), Credentials::default(), &trusting(&files.ca), Task::Source).unwrap();
    let text = scene.runtime.block_on(plain.connect()).unwrap_err().to_string();
    says(&text, &["tls-port"]);
    is_for_people(&text);
}

#[test]
fn the_options_reach_the_source_and_the_agents_own_certificates_are_explained_too() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let files = pair("one-line.pem", "one-line.key", "one-line.pem");
    let primary = crate::kit::primary(kind).tls(files.clone()).start().unwrap();
    let url = format!("rediss://127.0.0.1:{}", primary.tls_port().unwrap());
    let ca = files.ca.display().to_string();
    let token = stage.token.display().to_string();
    let source = ["source", "--server", &url, "--listen", "127.0.0.1:0", "--token-file", &token];
    let refused = stage.end(&[&source[..], &["--tls-ca", &ca]].concat(), 4);
    is_for_people(&refused);
    let pin = pinning(&refused).pins[0].to_string();
    let digits = pin.strip_prefix("sha256:").unwrap().to_uppercase();
    let colons: Vec<&str> = (0..32).map(|at| &digits[2 * at..2 * at + 2]).collect();
    for pin in [pin.clone(), format!("sha256:{}", colons.join(":"))] {
        let mut started = stage.source(&url, &["--tls-pin", &pin, "--eager"]);
        started.wait_for_snapshot();
        started.stop();
    }
    says(&stage.end(&[&source[..], &["--tls-pin", "sha256:12"]].concat(), 2), &["--tls-pin", "64 hexadecimal digits"]);
    let both = ["--tls-pin", &pin, "--tls-server-name", "db1"];
    says(&stage.end(&[&source[..], &both].concat(), 2), &["cannot be used with"]);
    let plain = primary.url();
    let unused = ["source", "--server", &plain, "--listen", "127.0.0.1:0", "--token-file", &token, "--tls-pin", &pin];
    says(&stage.end(&unused, 3), &["--tls-pin is given", "does not use TLS"]);

    // Between agents, with a certificate that is its own authority.
    let own = pair("one-line-names.pem", "one-line-names.key", "one-line-names.pem");
    let key = stage.secret("own.key", &fs::read_to_string(&own.key).unwrap());
    let options = crate::security::protection::options(&Tls { key: key.into(), ..own });
    let options = crate::security::protection::words(&options);
    let source = stage.source(&primary.url(), &options);
    let address = source.address.to_string();
    let status = ["status", "--source", &address, "--token-file", &token];
    let mut refused = stage.start(None, &[&status[..], &options].concat());
    let said = ends(&mut refused, 5);
    says(&said, &["that of an authority (CA:TRUE)", "a certificate of its own"]);
    is_for_people(&said);
}

// The server client on real servers: every way to connect and log in, and every reason for a refusal.

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

/// The primary's password.
const PASSWORD: &str = "s3cret-primary";

/// A primary with a password and some keys, a source, and a server that knows the password.
struct Guarded {
    stage: Stage,
    primary: RealServer,
    replica: RealServer,
    source: Source,
}

impl Guarded {
    fn new(kind: Kind, keys: usize) -> Guarded {
        Guarded::with(keys, quick(kind).require_pass(PASSWORD), RealServer::builder(kind).master_auth(None, PASSWORD))
    }

    fn with(keys: usize, primary: Builder, replica: Builder) -> Guarded {
        let stage = Stage::new();
        let (primary, replica) = (primary.start().unwrap(), replica.start().unwrap());
        fill_keys(&primary, keys, "confidential");
        let file = stage.secret("password", PASSWORD);
        let source = stage.source(&primary.url(), &["--password-file", &file]);
        Guarded { stage, primary, replica, source }
    }

    fn agent(&self, more: &[&str]) -> Agent {
        self.stage.replica(&self.replica.url(), self.source.address, more)
    }

    fn login(&self) -> String {
        self.replica.configured("masterauth").unwrap()
    }

    /// Asserts that the sync was one copy and one continuation, and that the server's settings are as before, as a
    /// replica of the primary.
    fn assert_handed_over(&self) {
        assert_eq!(syncs(&self.primary), (1, 1));
        assert_same_data(&self.primary, &self.replica);
        assert_eq!(self.replica.fact("master_port").unwrap(), self.primary.port().to_string());
        assert_eq!(self.login(), PASSWORD);
    }
}

/// Where the agent listens for its server.
pub(crate) fn link_of(agent: &mut Agent) -> SocketAddr {
    let line = agent.wait_for_event("link_listening", LONG).unwrap();
    line.split("link=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap()
}

/// How long an unauthenticated client waits for more after the last answer.
const A_WHILE: Duration = Duration::from_millis(500);

/// Everything that the link answers to a client that sends `words` and then waits.
fn answers_to_a_stranger(link: SocketAddr, words: &str) -> String {
    let mut stream = TcpStream::connect(link).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let _ = stream.write_all(words.as_bytes());
    let (mut answers, mut buffer, mut until) = (Vec::new(), [0; 4096], Instant::now() + LONG);
    while Instant::now() < until {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                answers.extend_from_slice(&buffer[..n]);
                until = Instant::now() + A_WHILE;
            }
            Err(_) => {}
        }
    }
    String::from_utf8_lossy(&answers).into_owned()
}

/// Asks for the data set in every way that an unauthenticated client can.
#[track_caller]
fn assert_closed_to_strangers(link: SocketAddr) {
    for login in ["", "AUTH wrong\r\n", "AUTH default \r\n", "AUTH s3cret-primary\r\n", "AUTH repl s3cret-primary\r\n"]
    {
        let answers =
            answers_to_a_stranger(link, &format!("{login}PING\r\nREPLCONF capa eof capa psync2\r\nPSYNC ? -1\r\n"));
        assert!(answers.contains("-NOAUTH"), "{login:?}: {answers:?}");
        for part in ["FULLRESYNC", "CONTINUE", "$EOF", "REDIS0", "VALKEY", "confidential"] {
            assert!(!answers.contains(part), "{login:?}: {answers:?}");
        }
    }
}

/// Whether `text` is a sync's secret, as `masterauth` shows it.
fn is_a_secret(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[test]
#[ignore = "long: make test-all"]
fn strangers_at_the_link_get_nothing_of_a_load_and_do_not_break_it() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 4000);
        load_slowly(&guarded.replica, 2000);
        let mut agent = guarded.agent(&[]);
        let link = link_of(&mut agent);
        wait_until_loading(&guarded.replica);
        let mut held = Vec::new();
        for _ in 0..10 {
            held.push(TcpStream::connect(link).unwrap());
            std::thread::sleep(Duration::from_millis(100));
        }
        drop(held);
        assert_closed_to_strangers(link);
        assert!(agent.ended().unwrap().is_none(), "the load ended before all unauthenticated requests were sent");
        succeeds(&mut agent, &guarded.replica);
        assert!(!agent.output().contains("while it was loading"), "{}", agent.output());
        guarded.assert_handed_over();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn strangers_at_the_link_of_a_server_that_is_fed_change_nothing() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 500);
        let mut agent = guarded.agent(&["--stay"]);
        let link = link_of(&mut agent);
        agent.wait_for_event("in_step", LONG).unwrap();
        let synchronisations = || {
            let log = guarded.replica.log();
            log.matches("sync started").count() + log.matches("Full resync").count()
        };
        let before = synchronisations();
        assert_closed_to_strangers(link);
        guarded.primary.client().unwrap().ok(&["SET", "meanwhile", "1"]).unwrap();
        wait_until("a write to arrive", LONG, || {
            let value = guarded.replica.client()?.text(&["GET", "meanwhile"]);
            Ok(value.map(drop).map_err(|error| error.to_string()))
        })
        .unwrap();
        assert_eq!(synchronisations(), before, "{}", guarded.replica.log());
        assert_eq!(guarded.replica.fact("master_port").unwrap(), link.port().to_string());
        assert_eq!(guarded.replica.fact("master_link_status").unwrap(), "up");
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        guarded.assert_handed_over();
    }
}

#[test]
fn strangers_at_the_link_are_named_in_the_log_and_counted_in_the_summary() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 100);
        let summary = guarded.stage.path("summary.json");
        let mut agent = guarded.agent(&["--stay", "--json", &summary]);
        let link = link_of(&mut agent);
        agent.wait_for_event("in_step", LONG).unwrap();
        let is_first = !agent.output().contains("before it had logged in");
        let stranger = TcpStream::connect(link).unwrap();
        let name = stranger.local_addr().unwrap();
        drop(stranger);
        if is_first {
            let line = agent.wait_for_line("before it had logged in", LONG).unwrap();
            says(&line, &["INFO", &format!("peer={name}")]);
        }
        for _ in 0..2 {
            drop(TcpStream::connect(link).unwrap());
        }
        // The server's next connection comes behind theirs.
        guarded.replica.client().unwrap().call(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
        guarded.primary.client().unwrap().ok(&["SET", "meanwhile", "1"]).unwrap();
        wait_until("a write to arrive", LONG, || {
            let value = guarded.replica.client()?.text(&["GET", "meanwhile"]);
            Ok(value.map(drop).map_err(|error| error.to_string()))
        })
        .unwrap();
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        says(&agent.output(), &["connections to the link's port were closed before they had logged in"]);
        let summary: serde_json::Value = serde_json::from_slice(&std::fs::read(&summary).unwrap()).unwrap();
        assert!(summary["strangers"].as_u64().is_some_and(|count| count >= 3), "{summary}");
        guarded.assert_handed_over();
    }
}

/// How many of a process's sockets listen for TCP connections.
fn listening_sockets(pid: u32) -> usize {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.ok()?.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let of_host = ["tcp", "tcp6"].map(|name| std::fs::read_to_string(format!("/proc/net/{name}")).unwrap_or_default());
    let listening = of_host.iter().flat_map(|table| table.lines()).filter(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let inode = fields.get(9).map(|inode| format!("socket:[{inode}]"));
        fields.get(3) == Some(&"0A") && inode.is_some_and(|inode| sockets.contains(&inode))
    });
    listening.count()
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_waits_for_a_snapshot_does_not_listen_for_its_server_yet() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let guarded = Guarded::with(
            100,
            quick(kind).require_pass(PASSWORD).config("repl-diskless-sync-delay", 2),
            RealServer::builder(kind).master_auth(None, PASSWORD),
        );
        let mut agent = guarded.agent(&["--no-serve-peers"]);
        guarded.source.wait_for_status("the replica to wait", |status| {
            status["replicas"].as_array().is_some_and(|replicas| replicas.len() == 1)
        });
        assert_eq!(listening_sockets(agent.pid()), 0, "{}", agent.output());
        let link = link_of(&mut agent);
        assert!(TcpStream::connect(link).is_ok());
        assert_eq!(listening_sockets(agent.pid()), 1, "{}", agent.output());
        succeeds(&mut agent, &guarded.replica);
        guarded.assert_handed_over();
    }
}

/// A user other than the one that runs the tests' servers and agents.
const ANOTHER_USER: u32 = 65534;

#[test]
fn a_process_of_another_user_is_disconnected_before_it_sends_anything() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 100);
        let mut agent = guarded.agent(&["--stay"]);
        let link = link_of(&mut agent);
        agent.wait_for_event("in_step", LONG).unwrap();
        let script = format!("exec 3<>/dev/tcp/{}/{} && cat <&3", link.ip(), link.port());
        let mut stranger = Command::new("bash");
        stranger.args(["-c", &script]).uid(ANOTHER_USER).gid(ANOTHER_USER);
        let answers = stranger.output().unwrap();
        assert!(answers.stdout.is_empty());
        let line = agent.wait_for_line("another user's than the server's", LONG).unwrap();
        says(&line, &["peer=127.0.0.1:", &format!("uid {ANOTHER_USER}")]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_servers_login_is_a_secret_during_the_sync_and_its_own_at_the_primary() {
    for kind in require::kinds() {
        for user in [None, Some("repl")] {
            let primary = quick(kind).require_pass(PASSWORD).user("repl", PASSWORD, "-@all +psync +replconf +ping");
            let guarded = Guarded::with(1000, primary, RealServer::builder(kind).master_auth(user, PASSWORD));
            load_slowly(&guarded.replica, 500);
            let mut agent = guarded.agent(&[]);
            wait_until_loading(&guarded.replica);
            assert!(is_a_secret(&guarded.login()), "{}", guarded.login());
            succeeds(&mut agent, &guarded.replica);
            guarded.assert_handed_over();
            assert!(!agent.output().contains(PASSWORD), "{}", agent.output());
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_without_a_login_still_has_no_login_afterwards() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) = (quick(kind).start().unwrap(), RealServer::start(kind).unwrap());
        fill_keys(&primary, 1000, "x");
        load_slowly(&replica, 500);
        let source = stage.source(&primary.url(), &[]);
        let login = || replica.configured("masterauth").unwrap();
        let mut stopped = stage.replica(&replica.url(), source.address, &[]);
        wait_until_loading(&replica);
        assert!(is_a_secret(&login()));
        stopped.signal(Signal::INT).unwrap();
        says(&ends(&mut stopped, 7), &["detached and emptied"]);
        assert_eq!(login(), "");
        succeeds(&mut stage.replica(&replica.url(), source.address, &[]), &replica);
        assert_eq!(login(), "");
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_process_on_the_port_of_a_killed_agent_reads_only_an_expired_secret() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 500);
        let mut agent = guarded.agent(&["--stay"]);
        let link = link_of(&mut agent);
        agent.wait_for_event("in_step", LONG).unwrap();
        // A connection that was closed in the usual way would keep the port for another minute. One with unread bytes,
        // the server's next ACK, is reset.
        agent.signal(Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(2500));
        agent.kill().unwrap();
        let secret = guarded.login();
        assert!(is_a_secret(&secret), "{secret}");

        let thief = TcpListener::bind(link).unwrap();
        let (mut stream, _) = thief.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let (mut received, mut buffer) = (String::new(), [0; 4096]);
        while !received.contains(&secret) {
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0, "the server left after {received:?}");
            received += &String::from_utf8_lossy(&buffer[..n]);
            stream.write_all(b"+PONG\r\n").unwrap();
        }
        assert!(!received.contains(PASSWORD), "{received}");
        drop((stream, thief));

        // A server that follows a closed link is used again as it is.
        succeeds(&mut guarded.agent(&[]), &guarded.replica);
        assert_eq!(guarded.login(), PASSWORD);
        assert_same_data(&guarded.primary, &guarded.replica);
        assert_eq!(number(&guarded.primary, "sync_full"), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_login_that_an_operator_sets_meanwhile_is_restored() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 500);
        let mut agent = guarded.agent(&["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        guarded.primary.configure("requirepass", "rotated").unwrap();
        guarded.replica.configure("masterauth", "rotated").unwrap();
        // The server logs in again with it, and gets the secret once more.
        guarded.replica.client().unwrap().call(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
        wait_until("the server to be back at the link", LONG, || {
            let status = guarded.replica.fact("master_link_status")?;
            Ok(if status == "up" { Ok(()) } else { Err(status) })
        })
        .unwrap();
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_eq!(guarded.login(), "rotated");
        assert_same_data(&guarded.primary, &guarded.replica);
        assert_eq!(number(&guarded.primary, "sync_full"), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_without_permission_for_config_set_needs_a_login_of_its_own() {
    for kind in require::kinds() {
        let rules = "-@all +ping +info +replicaof +config|get +flushall";
        let replica = || RealServer::builder(kind).user("tied", "pw", rules);
        let primary = || quick(kind).require_pass(PASSWORD);
        let guarded = Guarded::with(500, primary(), replica().master_auth(None, PASSWORD));
        let file = guarded.stage.secret("tied", "pw");
        let tied = ["--user", "tied", "--password-file", &file];
        load_slowly(&guarded.replica, 1000);
        let mut agent = guarded.agent(&tied);
        let link = link_of(&mut agent);
        wait_until_loading(&guarded.replica);
        assert_eq!(guarded.login(), PASSWORD);
        let answers = answers_to_a_stranger(link, "AUTH wrong\r\nPSYNC ? -1\r\n");
        assert!(answers.contains("-WRONGPASS") && answers.contains("-NOAUTH"), "{answers}");
        succeeds(&mut agent, &guarded.replica);
        guarded.assert_handed_over();

        let (open, bare) = (quick(kind).start().unwrap(), replica().start().unwrap());
        let source = guarded.stage.source(&open.url(), &[]);
        let said = ends(&mut guarded.stage.replica(&bare.url(), source.address, &tied), 3);
        says(&said, &[&bare.url(), "no masterauth", "+config|set"]);
        assert_eq!(bare.fact("role").unwrap(), "master");
        assert!(!bare.log().contains("REPLICAOF"), "{}", bare.log());
    }
}

#[test]
fn a_server_on_this_host_is_served_on_loopback_whatever_its_address() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let (stage, net) = (Stage::new(), Net::new().unwrap());
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let primary = quick(kind).on(&here).start().unwrap();
    let replica = RealServer::builder(kind).on(&there).start().unwrap();
    fill_keys(&primary, 100, "x");
    let source = stage.source_on(&here, &primary.url(), &[]);
    assert!(!replica.address().ip().is_loopback());
    let mut beside = stage.replica_on(&there, &replica.url(), source.address, &["--stay"]);
    assert!(link_of(&mut beside).ip().is_loopback());
    beside.wait_for_event("in_step", LONG).unwrap();
    assert_eq!(replica.fact("master_host").unwrap(), "127.0.0.1");
    beside.signal(Signal::TERM).unwrap();
    beside.wait_for_success(LONG).unwrap();

    // From another host it is reached by its address.
    let mut afar = stage.replica_on(&here, &replica.url(), source.address, &["--replace"]);
    assert_eq!(link_of(&mut afar).ip(), primary.address().ip());
    succeeds(&mut afar, &replica);
    assert_same_data(&primary, &replica);
}

/// Writes a record for that server in the format of older agents.
fn old_record(folder: &Path, server: &RealServer, settings: &str) {
    let name: String = server.url().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    std::fs::write(
        folder.join(format!("server-{name}.json")),
        format!(r#"{{"settings": [{settings}], "link": null}}"#),
    )
    .unwrap();
}

#[test]
fn a_record_restores_only_settings_that_agents_change_and_that_are_unchanged_since() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) = (quick(kind).start().unwrap(), RealServer::start(kind).unwrap());
        fill_keys(&primary, 100, "x");
        replica.configure("repl-diskless-load", "swapdb").unwrap();
        let before = replica.configured("maxmemory-policy").unwrap();
        let folder = stage.path("state");
        std::fs::create_dir(&folder).unwrap();
        let settings = r#"["maxmemory-policy", "allkeys-random"], ["repl-diskless-load", "disabled"],
            {"name": "masterauth", "before": "other", "set": ["not what it is"]}"#;
        old_record(Path::new(&folder), &replica, settings);
        let source = stage.source(&primary.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &["--state-dir", &folder]);
        succeeds(&mut agent, &replica);
        says(&agent.output(), &["maxmemory-policy", "not put back"]);
        assert_eq!(replica.configured("maxmemory-policy").unwrap(), before);
        assert_eq!(replica.configured("repl-diskless-load").unwrap(), "swapdb");
        assert_eq!(replica.configured("masterauth").unwrap(), "");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a finished sync leaves no file");
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn files_of_a_killed_agent_are_readable_by_their_owner_only() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 3000);
        load_slowly(&guarded.replica, 1000);
        let folder = guarded.stage.path("new/state");
        let mut agent = guarded.agent(&["--state-dir", &folder, "--transport", "tcp"]);
        wait_until_loading(&guarded.replica);
        agent.kill().unwrap();
        assert_eq!(mode(Path::new(&folder)), 0o700);
        let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(files.len() >= 4, "slots, index, origin and record: {files:?}");
        for file in files {
            assert_eq!(mode(&file), 0o600, "{}", file.display());
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_symlink_in_the_place_of_a_file_is_not_followed_and_a_shared_folder_is_refused() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) = (quick(kind).start().unwrap(), RealServer::start(kind).unwrap());
        fill_keys(&primary, 100, "x");
        let source = stage.source(&primary.url(), &[]);
        let (folder, target) = (stage.path("state"), stage.path("precious"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&target, "precious").unwrap();
        for name in ["slots", "held", "origin.json"] {
            symlink(&target, Path::new(&folder).join(name)).unwrap();
        }
        let run = |folder: &str| {
            stage.replica(&replica.url(), source.address, &["--state-dir", folder, "--transport", "tcp"])
        };
        for wide in [0o775, 0o777] {
            std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(wide)).unwrap();
            says(&ends(&mut run(&folder), 3), &[&folder, &format!("{wide:04o}"), "chmod go-w"]);
        }
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let link = stage.path("link");
        symlink(&folder, &link).unwrap();
        says(&ends(&mut run(&link), 3), &[&link, "symbolic link"]);
        assert_eq!(replica.fact("role").unwrap(), "master");

        succeeds(&mut run(&folder), &replica);
        assert_same_data(&primary, &replica);
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
    }
}
