//! `remora volume` with `--security mtls`: new certificates while servers and a writer run.

use std::fs;

use remora_lab::server::wait_until;
use remora_lab::tls::{Authority, Tls};
use remora_lab::{Agent, require};
use rustix::process::Signal;

use crate::kit::{LONG, ends, says};
use crate::mtls::{options, words};
use crate::volume::{Scene, qemu_io};

/// The state of the volume, asked by a command with these files.
fn status(scene: &Scene, file: &str, files: &Tls, code: i32) -> String {
    let (token, options) = (scene.stage.token.display().to_string(), options(files));
    let status = ["volume", "status", file, "--json", "--token-file", &token];
    scene.stage.end(&[&status[..], &words(&options)].concat(), code)
}

fn whole_copies(status: &str) -> usize {
    status.matches("\"state\":\"whole\"").count()
}

#[track_caller]
fn unreached(scene: &Scene, file: &str, files: &Tls) {
    let status = status(scene, file, files, 10);
    assert_eq!(whole_copies(&status), 0, "{status}");
}

fn hang_up(agent: &mut Agent, event: &str) -> String {
    agent.signal(Signal::HUP).unwrap();
    agent.wait_for_event(event, LONG).unwrap()
}

#[test]
fn servers_and_a_writer_use_new_certificates_from_sighup_on() {
    let Some(()) = require::nbd_clients() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old-ca", "new-ca"].map(|name| Authority::new(folder.path(), name).unwrap());
    let of_old = old.sign("old", &["127.0.0.1"]).unwrap();
    let of_new = new.sign("new", &["127.0.0.1"]).unwrap();
    // The servers and the writer read these.
    let files = Tls { ca: folder.path().join("bundle.pem"), ..old.sign("agent", &["127.0.0.1"]).unwrap() };
    fs::copy(&old.ca, &files.ca).unwrap();
    let mut scene = Scene::new(None, &words(&options(&files)));
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    assert_eq!(whole_copies(&status(&scene, &file, &of_old, 0)), 3);
    unreached(&scene, &file, &of_new);

    let replace = || {
        for (from, to) in [(&of_new.certificate, &files.certificate), (&of_new.key, &files.key), (&new.ca, &files.ca)] {
            fs::copy(from, to).unwrap();
        }
    };
    replace();
    unreached(&scene, &file, &of_new);
    for server in &mut scene.servers {
        hang_up(server, "certificates_reread");
    }
    assert_eq!(whole_copies(&status(&scene, &file, &of_new, 0)), 3);
    unreached(&scene, &file, &of_old);
    // The writer's connections are older, and go on.
    qemu_io(&socket, &["write -P 8 0 1M", "flush"]).unwrap();

    // A file that cannot be used changes nothing.
    fs::write(&files.ca, "not a certificate").unwrap();
    for agent in scene.servers.iter_mut().chain([&mut nbd]) {
        let line = hang_up(agent, "certificates_kept");
        says(&line, &["ERROR", files.ca.to_str().unwrap(), "--ca", "no certificate"]);
    }
    replace();
    assert_eq!(whole_copies(&status(&scene, &file, &of_new, 0)), 3);
    unreached(&scene, &file, &of_old);

    // A server that comes back takes no connection of the writer before that has read its files again. The copy is lent
    // by a server that has.
    scene.servers[0].kill().unwrap();
    qemu_io(&socket, &["write -P 9 1M 1M", "flush"]).unwrap();
    let address = scene.addresses[0].clone();
    (scene.servers[0], _) = scene.serve(&address);
    scene.servers[0].wait_for_line("a connection was rejected", LONG).unwrap();
    assert_eq!(whole_copies(&status(&scene, &file, &of_new, 0)), 2);
    hang_up(&mut nbd, "certificates_reread");
    wait_until("three whole copies", LONG, || {
        let status = status(&scene, &file, &of_new, 0);
        Ok(if whole_copies(&status) == 3 { Ok(()) } else { Err(status) })
    })
    .unwrap();
    qemu_io(&socket, &["read -P 8 0 1M", "read -P 9 1M 1M"]).unwrap();
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}
