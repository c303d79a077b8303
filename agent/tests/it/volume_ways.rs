//! `remora volume`: the ways of blocks between servers, writer and NBD clients, as options.

use std::fs;
use std::path::Path;
use std::process::Command;

use remora_lab::tls::{Tls, certificates};
use remora_lab::{Host, Net, Random, require};
use rustix::process::Signal;

use crate::kit::{LONG, ends, says};
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
    let file = scene.create("data.volume");
    let elsewhere = fs::read_to_string(&file).unwrap().replacen(&scene.addresses[0], "192.0.2.1:7480", 1);
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
    let line = nbd.wait_for_line("volume open", LONG).unwrap();
    let socket = scene.stage.path("remora/data.nbd");
    says(&line, &[&socket]);
    qemu_io(&socket, &["write -P 7 0 1M", "flush", "read -P 7 0 1M"]).unwrap();
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
    assert!(!Path::new(&socket).exists());
}

/// Runs a client of libnbd on a host. Returns what it says, and whether it succeeds.
fn client(host: &Host, program: &str, args: &[&str]) -> (bool, String) {
    let mut command = Command::new("timeout");
    command.arg("60").arg(program).args(args);
    host.enter(&mut command).unwrap();
    let ran = command.output().unwrap();
    (ran.status.success(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
}

/// A folder as libnbd wants it.
fn credentials(folder: &Path, name: &str, tls: &Tls, with_certificate: bool) -> String {
    let own = folder.join(name);
    fs::create_dir(&own).unwrap();
    fs::copy(&tls.ca, own.join("ca-cert.pem")).unwrap();
    if with_certificate {
        fs::copy(&tls.certificate, own.join("client-cert.pem")).unwrap();
        fs::copy(&tls.key, own.join("client-key.pem")).unwrap();
    }
    own.display().to_string()
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
    let (with, without) =
        (credentials(folder, "with", &client_tls, true), credentials(folder, "without", &client_tls, false));
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
    let line = nbd.wait_for_line("volume open", LONG).unwrap();
    let address = line.split("listening=\"tcp:").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
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
