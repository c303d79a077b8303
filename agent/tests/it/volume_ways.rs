//! `remora volume`: the ways of blocks between servers, writer and NBD clients, as options.

use std::fs;
use std::path::Path;
use std::process::Command;

use remora_lab::tls::{Authority, Tls, certificates};
use remora_lab::{Agent, Host, Net, Random, require};
use rustix::process::Signal;

use crate::kit::{LONG, ends, says, without_checksum};
use crate::volume::{Scene, qemu_io};

/// The number that a log line gives for this field.
#[track_caller]
fn field(line: &str, name: &str) -> u64 {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no number {name} in: {line}"))
}

#[test]
fn blocks_go_the_ways_that_the_options_say() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    for number in 0..3 {
        scene.servers[number].kill().unwrap();
        let listen = scene.addresses[number].clone();
        let serve = ["serve", "--listen", &listen, "--memory", "128MiB", "--lanes", "0", "--no-shm"];
        (scene.servers[number], _) = scene.serve_with(&serve);
    }
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let played = |more: &[&str], takes_over: bool| {
        let more = [more, if takes_over { &["--take-over"] } else { &[] }].concat();
        let mut nbd = scene.nbd_with(&file, &socket, &more);
        qemu_io(&socket, &["write -P 7 0 4M", "flush", "read -P 7 0 1M"]).unwrap();
        nbd.signal(Signal::TERM).unwrap();
        let output = ends(&mut nbd, 0);
        output.lines().find(|line| line.contains("how blocks were read and written")).unwrap().to_owned()
    };
    let plain = played(&[], false);
    assert!(field(&plain, "asked") > 0 && field(&plain, "inline") > 0, "{plain}");
    assert_eq!((field(&plain, "far"), field(&plain, "pulled")), (0, 0), "{plain}");
    // The region of a copy and the outbox are asked for when the volume is open: some time later.
    for attempt in 0..20 {
        let line = played(&["--reads", "far", "--writes", "chain", "--window", "fixed:8"], true);
        if field(&line, "far") > 0 && field(&line, "pulled") > 0 {
            break;
        }
        assert!(attempt < 19, "neither read nor pulled without asking: {line}");
    }
    says(&scene.end(&["nbd", &file, "--socket", &socket, "--window", "fixed:0"], 2), &["fixed:0", "adaptive"]);
    says(&scene.end(&["nbd", &file, "--socket", &socket, "--reads", "near"], 2), &["near", "anywhere"]);
}

#[test]
fn ways_that_are_not_encrypted_are_refused_between_hosts() {
    let scene = Scene::new(None, &[]);
    let serve = ["serve", "--listen", "0.0.0.0:0", "--lanes", "0"];
    says(&scene.end(&serve, 3), &["--lanes", "without encryption", "--plaintext-network"]);
    // RDMA leaves the host, although the server listens at loopback.
    let serve = ["serve", "--listen", "127.0.0.1:0", "--rdma-address", "192.0.2.1"];
    says(&scene.end(&serve, 3), &["--rdma-address", "without encryption", "--plaintext-network"]);
    let file = scene.create("data.volume");
    let elsewhere = fs::read_to_string(&file).unwrap().replacen(&scene.addresses[0], "192.0.2.1:7480", 1);
    let elsewhere = without_checksum(&elsewhere);
    fs::write(&file, elsewhere).unwrap();
    let socket = scene.socket("device");
    for (option, ways) in [("--reads", ["anywhere", "far"]), ("--writes", ["pulled", "chain"])] {
        for way in ways {
            let refused = scene.end(&["nbd", &file, "--socket", &socket, option, way], 3);
            says(&refused, &[option, "192.0.2.1:7480", "--plaintext-network"]);
        }
    }
}

#[test]
fn a_device_without_a_socket_of_its_own_has_one_in_the_folder_of_its_user() {
    let Some(()) = require::nbd_clients() else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let mut nbd = scene.start_with(&["nbd", &file], |command| {
        command.env("XDG_RUNTIME_DIR", scene.stage.folder());
    });
    let line = nbd.wait_for_event("volume_open", LONG).unwrap();
    let socket = scene.stage.path("remora/data.nbd");
    says(&line, &[&socket]);
    qemu_io(&socket, &["write -P 7 0 1M", "flush", "read -P 7 0 1M"]).unwrap();
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
    assert!(!Path::new(&socket).exists());
}

/// The port of `remora volume nbd`, when the volume is open.
fn listening(nbd: &mut Agent) -> String {
    let line = nbd.wait_for_event("volume_open", LONG).unwrap();
    line.split("listening=\"tcp:").nth(1).and_then(|rest| rest.split('"').next()).unwrap().to_owned()
}

/// Runs a client of libnbd on a host. Returns what it says, and whether it succeeds.
fn client(host: &Host, program: &str, args: &[&str]) -> (bool, String) {
    let mut command = Command::new("timeout");
    command.arg("60").arg(program).args(args);
    host.enter(&mut command).unwrap();
    let ran = command.output().unwrap();
    (ran.status.success(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
}

#[test]
fn certificates_for_nbd_clients_are_replaced_by_sighup_and_a_broken_file_changes_nothing() {
    let Some(()) = require::nbd_clients() else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let folder = scene.stage.folder();
    let [old, new] = ["old-ca", "new-ca"].map(|name| Authority::new(folder, name).unwrap());
    let (bundle, both) = (folder.join("bundle.pem"), folder.join("both.pem"));
    fs::copy(&old.ca, &bundle).unwrap();
    fs::write(&both, fs::read_to_string(&old.ca).unwrap() + &fs::read_to_string(&new.ca).unwrap()).unwrap();
    let server = old.sign("server", &["127.0.0.1"]).unwrap();
    // A client of each authority, and one that trusts only a server of the new one.
    let client = |authority: &Authority, trusts: &Path, name: &str| {
        let tls = Tls { ca: trusts.to_owned(), ..authority.sign(name, &["client.invalid"]).unwrap() };
        tls.libnbd_folder(folder, &format!("{name}-client"), true).unwrap()
    };
    let (of_old, of_new, of_new_only) =
        (client(&old, &both, "old"), client(&new, &both, "new"), client(&new, &new.ca, "new-only"));

    let [cert, key, ca] = [&server.certificate, &server.key, &bundle].map(|path| path.to_str().unwrap());
    let tls = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca];
    let mut nbd = scene.start(&[&["nbd", &file, "--listen", "127.0.0.1:0"], &tls[..]].concat());
    let address = listening(&mut nbd);
    let is_served = |folder: &str| {
        let mut command = Command::new("timeout");
        command.args(["60", "nbdinfo", "--size", &format!("nbds://{address}/?tls-certificates={folder}")]);
        command.output().unwrap().status.success()
    };
    assert_eq!([&of_old, &of_new, &of_new_only].map(|folder| is_served(folder)), [true, false, false]);
    let hang_up = |nbd: &mut Agent, event: &str| {
        nbd.signal(Signal::HUP).unwrap();
        nbd.wait_for_event(event, LONG).unwrap()
    };
    fs::write(&bundle, "not a certificate").unwrap();
    says(&hang_up(&mut nbd, "certificates_kept"), &["ERROR", ca, "--tls-ca", "no certificate"]);
    assert_eq!([&of_old, &of_new, &of_new_only].map(|folder| is_served(folder)), [true, false, false]);

    let next = new.sign("next", &["127.0.0.1"]).unwrap();
    for (from, to) in [(&next.certificate, &server.certificate), (&next.key, &server.key), (&new.ca, &bundle)] {
        fs::copy(from, to).unwrap();
    }
    hang_up(&mut nbd, "certificates_reread");
    assert_eq!([&of_old, &of_new, &of_new_only].map(|folder| is_served(folder)), [false, true, true]);
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

#[test]
fn nbd_clients_on_other_hosts_need_tls_and_a_certificate() {
    let Some(()) = require::namespaces() else { return };
    let Some(()) = require::nbd_clients() else { return };
    let net = Net::new().unwrap();
    let (host, other) = (net.host("volume").unwrap(), net.host("client").unwrap());
    let scene = Scene::new(Some(&host), &[]);
    let file = scene.create("data.volume");
    let folder = scene.stage.folder();
    let (server_tls, client_tls) = certificates(folder, &[host.address()]).unwrap();
    let [with, without] = [("with", true), ("without", false)]
        .map(|(name, has_one)| client_tls.libnbd_folder(folder, name, has_one).unwrap());
    let [cert, key, ca] = [&server_tls.certificate, &server_tls.key, &server_tls.ca].map(|path| path.to_str().unwrap());
    let listen = format!("{}:0", host.address());
    says(&scene.end(&["nbd", &file, "--listen", &listen], 3), &["not loopback", "--tls-cert"]);
    let tls = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca];
    let misused = scene.end(&[&["nbd", &file, "--socket", &scene.socket("device")], &tls[..]].concat(), 2);
    says(&misused, &["--socket", "--tls-cert"]);
    says(&scene.end(&[&["nbd", &file], &tls[..]].concat(), 2), &["--listen"]);
    says(&scene.end(&["nbd", &file, "--listen", &listen, "--tls-cert", cert], 2), &["--tls-key", "--tls-ca"]);
    let swapped = ["--tls-cert", cert, "--tls-key", client_tls.key.to_str().unwrap(), "--tls-ca", ca];
    let refused = scene.end(&[&["nbd", &file, "--listen", &listen], &swapped[..]].concat(), 3);
    says(&refused, &["--tls-key", "is not that of the certificate"]);

    let mut nbd = scene.start(&[&["nbd", &file, "--listen", &listen], &tls[..]].concat());
    let address = listening(&mut nbd);
    let content = Random::new(remora_lab::random::seed("volume tls")).bytes(16 << 20);
    let (there, back) = (scene.stage.path("there"), scene.stage.path("back"));
    fs::write(&there, &content).unwrap();
    let uri = |folder: &str| format!("nbds://{address}/?tls-certificates={folder}");
    let (is_well, said) = client(&other, "nbdinfo", &[&uri(&with)]);
    assert!(is_well && said.contains("protocol: newstyle-fixed with TLS"), "{said}");
    for args in [[&there, &uri(&with)], [&uri(&with), &back]] {
        let (is_well, said) = client(&other, "nbdcopy", &args.map(String::as_str));
        assert!(is_well, "{said}");
    }
    assert!(fs::read(&back).unwrap() == content);
    let (is_well, said) = client(&other, "nbdinfo", &[&uri(&without)]);
    assert!(!is_well, "a client without a certificate was served: {said}");
    let (is_well, said) = client(&other, "nbdinfo", &[&format!("nbd://{address}/")]);
    assert!(!is_well && said.contains("TLS"), "{said}");
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}
