//! `--security mtls`: agents with certificates, alone and together with a token; what happens when a certificate is not
//! good enough; and new files while a source runs.

use std::fs;
use std::time::{Duration, SystemTime};

use remora_lab::tls::{Authority, Tls};
use remora_lab::{Agent, Server, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, Stage, assert_untouched, ends, fill_keys, number, primary, says};

/// The host by which the agents of these tests reach each other.
const HOST: &str = "127.0.0.1";

/// The options of an agent with these files.
pub(crate) fn options(files: &Tls) -> Vec<String> {
    let path = |path: &std::path::Path| path.display().to_string();
    ["--security", "mtls", "--cert", &path(&files.certificate), "--key", &path(&files.key), "--ca", &path(&files.ca)]
        .map(str::to_owned)
        .to_vec()
}

pub(crate) fn words(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

/// Starts a command that connects to the source with these files and without a token.
fn start(stage: &Stage, command: &[&str], source: &Source, files: &Tls) -> Agent {
    let (address, options) = (source.address.to_string(), options(files));
    stage.start(None, &[command, &["--source", &address], &words(&options)].concat())
}

/// Starts a source on loopback with these files and without a token. The kit's sources have one.
fn source_without_token(stage: &Stage, server: &Server, files: &Tls) -> (Agent, String) {
    let (url, options) = (server.url(), options(files));
    let args = ["source", "--server", &url, "--listen", "127.0.0.1:0", "--no-shm", "--slot-size", "64KiB"];
    let mut agent = stage.start(None, &[&args[..], &words(&options)].concat());
    let ready = agent.wait_for_event("source_ready", LONG).unwrap();
    let address = ready.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    (agent, address)
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_with_certificates_need_no_token_and_feed_each_other() {
    let Some(kind) = require::redis() else { return };
    let (primary, stage) = (primary(kind).start().unwrap(), Stage::new());
    let servers = [(); 2].map(|()| Server::start(kind).unwrap());
    fill_keys(&primary, 20_000, &"a value ".repeat(100));
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let [of_source, of_replica] = ["source", "replica"].map(|name| authority.sign(name, &[HOST]).unwrap());
    let (mut source, address) = source_without_token(&stage, &primary, &of_source);
    says(&source.output(), &["security=\"TLS 1.3, certificates\""]);
    let given = options(&of_replica);
    let replica = |server: &Server, more: &[&str]| {
        let url = server.url();
        let args = ["replica", "--server", &url, "--source", &address, "--transport", "tcp"];
        stage.start(None, &[&args[..], &words(&given), more].concat())
    };
    let mut lender = replica(&servers[0], &["--stay"]);
    lender.wait_for_event("in_step", LONG).unwrap();
    says(&lender.output(), &["protection=sealed, TLS 1.3, certificates"]);
    let mut reader = replica(&servers[1], &[]);
    let read = reader.wait_for_event("upstream_read", LONG).unwrap();
    says(&read, &["transport=\"tcp\"", "protection=sealed, TLS 1.3, certificates"]);
    reader.wait_for_success(LONG).unwrap();

    let common = ["--source", &address];
    let status = [&["status"], &common[..], &words(&given)].concat();
    says(&stage.end(&status, 0), &["sealed, TLS 1.3, certificates"]);
    let probe = ["probe", "--transport", "tcp", "--sizes", "64KiB", "--depths", "4", "--time", "10ms"];
    says(&stage.end(&[&probe[..], &common, &words(&given)].concat(), 0), &["tcp"]);

    // The token that stands in for the missing one is not a secret: it is worth nothing without a certificate.
    let known = stage.secret("known", "remora: certificates prove who the ends are");
    for (security, line) in
        [("token", "presents no certificate"), ("none", "it does not speak TLS: start it with --security mtls")]
    {
        // A source of its own: rejections are logged at a bounded rate.
        let (mut source, address) = source_without_token(&stage, &primary, &of_source);
        let status = ["status", "--token-file", &known, "--source", &address, "--security", security];
        says(&stage.end(&status, 5), &["--security"]);
        source.wait_for_line(line, LONG).unwrap();
    }
    source.signal(Signal::TERM).unwrap();
    source.wait_for_success(LONG).unwrap();
    lender.signal(Signal::TERM).unwrap();
    lender.wait_for_success(LONG).unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
fn with_certificates_and_a_token_both_must_be_right() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let files = authority.sign("agent", &[HOST]).unwrap();
    let given = options(&files);
    let source = stage.source(&primary.url(), &words(&given));
    says(&ends(&mut start(&stage, &["status"], &source, &files), 5), &["does not hold the same token"]);
    let (url, other) = (server.url(), stage.secret("other", "not the token of the source"));
    let wrong = ["replica", "--server", &url, "--token-file", &other, "--retry-for", "0"];
    says(&ends(&mut start(&stage, &wrong, &source, &files), 5), &["does not hold the same token"]);
    source.replicate(&server, &words(&given));
    assert_same_data(&primary, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn a_certificate_that_is_not_accepted_is_explained_at_both_ends_and_nothing_is_touched() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    let [authority, foreign] = ["ca", "foreign"].map(|name| Authority::new(stage.folder(), name).unwrap());
    let good = authority.sign("good", &[HOST]).unwrap();
    let token = stage.token.display().to_string();
    let url = server.url();
    let replica = ["replica", "--server", &url, "--token-file", &token, "--retry-for", "0"];

    // A source for another name. The replica may be told the name.
    let elsewhere = authority.sign("elsewhere", &["db1.example"]).unwrap();
    let source = stage.source(&primary.url(), &words(&options(&elsewhere)));
    let said = ends(&mut start(&stage, &replica, &source, &good), 5);
    says(&said, &["certificate for another name", "db1.example", "--peer-name"]);
    let named = ["status", "--token-file", &token, "--peer-name", "db1.example"];
    ends(&mut start(&stage, &named, &source, &good), 0);
    source.stop();

    // An authority that one of the two ends does not know. Each has a source of its own, since rejections are logged at a
    // bounded rate.
    let mut source = stage.source(&primary.url(), &words(&options(&good)));
    let stranger = foreign.sign("stranger", &[HOST]).unwrap();
    let said = ends(&mut start(&stage, &replica, &source, &stranger), 5);
    says(&said, &["presents a certificate that no authority in --ca has signed"]);
    source.agent.wait_for_line("refuses the certificate of this end", LONG).unwrap();
    source.stop();
    let mut source = stage.source(&primary.url(), &words(&options(&good)));
    let trusting = Tls { ca: good.ca.clone(), ..stranger };
    let said = ends(&mut start(&stage, &replica, &source, &trusting), 5);
    assert!(said.contains("refuses the certificate of this end") || said.contains("see its log"), "{said}");
    source.agent.wait_for_line("presents a certificate that no authority in --ca has signed", LONG).unwrap();

    source.stop();

    // No certificates at all.
    let mut source = stage.source(&primary.url(), &words(&options(&good)));
    let plain = ["status", "--token-file", &token, "--source", &source.address.to_string(), "--security", "token"];
    let said = stage.end(&plain, 5);
    assert!(said.contains("requires a certificate") || said.contains("see its log"), "{said}");
    source.agent.wait_for_line("presents no certificate", LONG).unwrap();
    source.stop();

    // Certificates where the other end has none.
    let source = stage.source(&primary.url(), &["--security", "token"]);
    let said = ends(&mut start(&stage, &replica, &source, &good), 5);
    says(&said, &["presents a certificate that no authority in --ca has signed", "--security mtls"]);
    source.stop();

    // It expires while the source runs.
    let end = SystemTime::now() + Duration::from_secs(6);
    let brief = authority.sign_until("brief", &[HOST], end).unwrap();
    let mut source = stage.source(&primary.url(), &words(&options(&brief)));
    let said = ends(&mut start(&stage, &["status", "--token-file", &token], &source, &brief), 0);
    says(&said, &["snapshot"]);
    // Started before its own certificate ends, so that it is the source that notices.
    let watching = ["status", "--token-file", &token, "--watch", "1s"];
    let mut watching = start(&stage, &watching, &source, &good);
    std::thread::sleep(end.duration_since(SystemTime::now()).unwrap_or_default() + Duration::from_secs(2));
    let said = ends(&mut start(&stage, &replica, &source, &good), 5);
    says(&said, &["presents a certificate that is not valid now", "expired"]);
    assert!(watching.ended().unwrap().is_none(), "an open conversation goes on: {}", watching.output());
    watching.signal(Signal::TERM).unwrap();
    source.agent.signal(Signal::TERM).unwrap();
    source.agent.wait(LONG).unwrap();

    assert_untouched(&server);
    assert_eq!(number(&primary, "sync_full"), 0);
}

#[test]
fn the_names_in_certificates_say_who_may_read_the_data_who_may_measure_and_who_gets_the_status_only() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let [of_source, of_replica, of_prober, of_monitor, of_other] =
        [HOST, "replica.invalid", "prober.invalid", "monitor.invalid", "other.invalid"]
            .map(|name| authority.sign(name, &[name]).unwrap());
    let names = [
        ["--replica-name", "replica.invalid", "--replica-name", "10.1.2.3"],
        ["--monitor-name", "monitor.invalid", "--probe-name", "prober.invalid"],
    ]
    .concat();
    let given = options(&of_source);
    let mut source = stage.source(&primary.url(), &[&words(&given)[..], &names].concat());
    let token = stage.token.display().to_string();
    let (url, with_token) = (server.url(), ["--token-file", &token]);
    let replica = [&["replica", "--server", &url, "--retry-for", "0"][..], &with_token].concat();
    let probe = [&["probe", "--transport", "tcp"][..], &with_token].concat();
    let status = [&["status"][..], &with_token].concat();

    says(&ends(&mut start(&stage, &status, &source, &of_monitor), 0), &["snapshot   none"]);
    for command in [&replica, &probe] {
        let said = ends(&mut start(&stage, command, &source, &of_monitor), 5);
        says(&said, &["the token or the certificate permits the status only"]);
    }
    for command in [&status, &probe] {
        ends(&mut start(&stage, command, &source, &of_prober), 0);
    }
    let said = ends(&mut start(&stage, &replica, &source, &of_prober), 5);
    says(&said, &["the token or the certificate permits the status and measurements only"]);
    let said = ends(&mut start(&stage, &status, &source, &of_other), 5);
    assert!(said.contains("refuses the certificate of this end") || said.contains("see its log"), "{said}");
    source.agent.wait_for_line("it is for no name in --replica-name, --probe-name or --monitor-name", LONG).unwrap();
    assert_untouched(&server);
    assert_eq!(number(&primary, "sync_full"), 0);

    let mut agent = start(&stage, &replica, &source, &of_replica);
    agent.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
}

/// All agents share a name, as `--peer-name` is for. The attacker has the certificate of a replica that lends slots, which
/// is valid for servers.
#[test]
#[ignore = "long: make test-all"]
fn with_names_of_their_own_a_replicas_certificate_is_neither_the_sources_nor_another_lenders() {
    const SHARED: &str = "agents.invalid";
    let Some(kind) = require::redis() else { return };
    let [primary, forged] = [(); 2].map(|()| primary(kind).start().unwrap());
    let (servers, stage) = ([(); 3].map(|()| Server::start(kind).unwrap()), Stage::new());
    fill_keys(&primary, 20_000, &"a value ".repeat(100));
    fill_keys(&forged, 10, "forged");
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let [of_source, of_lender, of_replica] = ["source", "lender", "replica"]
        .map(|name| authority.sign(name, &[SHARED, &format!("{name}.invalid")]).unwrap());
    let shared = ["--peer-name", SHARED];
    let source_name = ["--source-name", "source.invalid"];

    let (mut impostor, address) = source_without_token(&stage, &forged, &of_replica);
    let given = options(&of_lender);
    let status =
        |more: &[&str], code| stage.end(&[&["status", "--source", &address], &words(&given)[..], more].concat(), code);
    status(&shared, 0); // who shares a name may stand in for another
    for more in [&source_name[..], &[&shared[..], &source_name].concat()] {
        says(&status(more, 5), &["certificate for another name", "source.invalid", "--source-name"]);
    }
    let (url, lent) = (servers[0].url(), ["replica", "--retry-for", "0", "--source", &address, "--server"]);
    let deceived = [&lent[..], &[&url], &words(&given), &shared, &source_name].concat();
    says(&stage.end(&deceived, 5), &["certificate for another name"]);
    assert_untouched(&servers[0]);
    impostor.signal(Signal::TERM).unwrap();
    impostor.wait_for_success(LONG).unwrap();

    let (mut source, address) = source_without_token(&stage, &primary, &of_source);
    let replica = |server: &Server, files: &Tls, more: &[&str]| {
        let (url, given) = (server.url(), options(files));
        let args = ["replica", "--server", &url, "--source", &address, "--transport", "tcp"];
        stage.start(None, &[&args[..], &words(&given), &shared, &source_name, more].concat())
    };
    let mut lender = replica(&servers[0], &of_lender, &["--stay"]);
    lender.wait_for_event("in_step", LONG).unwrap();
    // The lender's certificate is not for the name that this reader expects, so it reads from the source.
    let mut reader = replica(&servers[1], &of_replica, &["--lender-name", "other.invalid", "--no-serve-peers"]);
    reader.wait_for_success(LONG).unwrap();
    assert!(!reader.output().contains("reading slots from another replica"), "{}", reader.output());
    says(&source.output(), &["certificate for another name", "--lender-name"]);
    let mut reader = replica(&servers[2], &of_replica, &["--lender-name", "lender.invalid"]);
    reader.wait_for_event("upstream_read", LONG).unwrap();
    reader.wait_for_success(LONG).unwrap();
    for agent in [&mut lender, &mut source] {
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
    }
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
fn roles_of_certificates_need_certificates() {
    let stage = Stage::new();
    let token = stage.token.display().to_string();
    let common = ["--token-file", &token, "--server", "redis://127.0.0.1:1"];
    let source = ["source", "--listen", "127.0.0.1:0", "--monitor-name", "monitor.invalid"];
    says(&stage.end(&[&source[..], &common].concat(), 2), &["--monitor-name", "--security mtls"]);
    let replica = ["replica", "--source", "127.0.0.1:9", "--replica-name", "replica.invalid"];
    says(&stage.end(&[&replica[..], &common].concat(), 2), &["--replica-name", "--security mtls"]);
    for option in ["--source-name", "--lender-name"] {
        let replica = ["replica", "--source", "127.0.0.1:9", option, "name.invalid"];
        says(&stage.end(&[&replica[..], &common].concat(), 2), &[option, "--security mtls"]);
    }
    let no_name = ["source", "--listen", "127.0.0.1:0", "--replica-name", "no name"];
    says(&stage.end(&[&no_name[..], &common].concat(), 2), &["expected a DNS name or an IP address"]);
}

#[test]
fn files_that_cannot_be_used_are_named_before_anything_begins() {
    let Some(kind) = require::redis() else { return };
    let (primary, stage) = (Server::start(kind).unwrap(), Stage::new());
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let good = authority.sign("good", &[HOST]).unwrap();
    let other = authority.sign("other", &[HOST]).unwrap();
    let old = authority.sign_until("old", &[HOST], SystemTime::now() - Duration::from_secs(3600)).unwrap();
    let missing = Tls { ca: stage.folder().join("nowhere.pem"), ..good.clone() };
    let mixed = Tls { key: other.key.clone(), ..good.clone() };
    let swapped = Tls { certificate: good.key.clone(), ..good.clone() };
    let open_key = Tls { key: stage.folder().join("open.key"), ..good.clone() };
    fs::copy(&good.key, &open_key.key).unwrap();
    fs::set_permissions(&open_key.key, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let cases: [(&Tls, &[&str]); 5] = [
        (&missing, &["nowhere.pem (--ca)", "No such file"]),
        (&mixed, &["other.key (--key) is not that of the certificate", "good.pem (--cert)"]),
        (&swapped, &["good.key (--cert)", "no certificate"]),
        (&old, &["old.pem (--cert)", "expired"]),
        (&open_key, &["open.key (--key)", "mode 0644", "chmod"]),
    ];
    let (url, token) = (primary.url(), stage.token.display().to_string());
    for (files, texts) in cases {
        let given = options(files);
        for command in [
            &["source", "--server", &url, "--listen", "127.0.0.1:0"][..],
            &["replica", "--server", &url, "--source", "127.0.0.1:1"],
            &["status", "--source", "127.0.0.1:1"],
        ] {
            says(&stage.end(&[command, &["--token-file", &token], &words(&given)].concat(), 3), texts);
        }
    }
    let status = ["status", "--source", "127.0.0.1:1", "--token-file", &token];
    says(&stage.end(&[&status[..], &["--security", "mtls"]].concat(), 2), &["--cert, --key and --ca"]);
    let certificate = good.certificate.display().to_string();
    says(&stage.end(&[&status[..], &["--cert", &certificate]].concat(), 2), &["--security mtls"]);
    assert_eq!(number(&primary, "sync_full"), 0);
}

#[test]
fn authorities_are_replaced_without_a_gap_by_sighup() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let [old, new] = ["old-ca", "new-ca"].map(|name| Authority::new(stage.folder(), name).unwrap());
    let (bundle, both) = (stage.folder().join("bundle.pem"), stage.folder().join("both.pem"));
    fs::copy(&old.ca, &bundle).unwrap();
    fs::write(&both, fs::read_to_string(&old.ca).unwrap() + &fs::read_to_string(&new.ca).unwrap()).unwrap();
    let of_source = Tls { ca: bundle.clone(), ..old.sign("source", &[HOST]).unwrap() };
    let [of_old, of_new] = [(&old, "old"), (&new, "new")]
        .map(|(authority, name)| Tls { ca: both.clone(), ..authority.sign(name, &[HOST]).unwrap() });
    let mut source = stage.source(&primary.url(), &words(&options(&of_source)));
    let token = stage.token.display().to_string();
    let status = |source: &Source, files: &Tls, code| {
        ends(&mut start(&stage, &["status", "--token-file", &token], source, files), code)
    };
    status(&source, &of_old, 0);
    status(&source, &of_new, 5);
    // It stays through all of it.
    let mut staying = source.replica(&server, &[&words(&options(&of_old))[..], &["--stay"]].concat());
    staying.wait_for_event("in_step", LONG).unwrap();

    let hang_up = |source: &mut Source, event: &str| {
        source.agent.signal(Signal::HUP).unwrap();
        source.agent.wait_for_event(event, LONG).unwrap();
    };
    // A file that cannot be used changes nothing.
    fs::write(&bundle, "not a certificate").unwrap();
    hang_up(&mut source, "certificates_kept");
    status(&source, &of_old, 0);

    // Both authorities, then a certificate of the new one, then the new authority alone.
    fs::copy(&both, &bundle).unwrap();
    hang_up(&mut source, "certificates_reread");
    status(&source, &of_new, 0);
    let next = new.sign("next", &[HOST]).unwrap();
    fs::copy(&next.certificate, &of_source.certificate).unwrap();
    fs::copy(&next.key, &of_source.key).unwrap();
    fs::copy(&new.ca, &bundle).unwrap();
    source.agent.signal(Signal::HUP).unwrap();
    let only_new = Tls { ca: new.ca.clone(), ..of_new.clone() };
    remora_lab::server::wait_until("the new authority to be the only one", LONG, || {
        let refused = start(&stage, &["status", "--token-file", &token], &source, &of_old).wait(LONG)?;
        Ok(if refused.success() { Err("the old one is trusted".into()) } else { Ok(()) })
    })
    .unwrap();
    status(&source, &only_new, 0);

    staying.signal(Signal::HUP).unwrap();
    staying.wait_for_event("certificates_reread", LONG).unwrap();
    staying.signal(Signal::TERM).unwrap();
    staying.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
}
