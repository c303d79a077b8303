//! Interception of servers that speak TLS to their primary.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use remora_lab::tls::{self, Authority, Tls};
use remora_lab::{Server, assert_same_data, require, scratch};
use tempfile::TempDir;

use crate::attend::{Scene, handed_over, in_step};
use crate::kit::{LONG, fill_keys, primary, quick, says, steady_writer, syncs};

/// Certificates in a folder that the servers' user can read.
struct Certificates {
    folder: TempDir,
    server: Tls,
}

fn readable(folder: &Path) {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    for file in fs::read_dir(folder).unwrap() {
        fs::set_permissions(file.unwrap().path(), fs::Permissions::from_mode(0o644)).unwrap();
    }
}

/// A primary with a TLS port, and a source by its plain one.
fn scene() -> Option<(Scene, Certificates)> {
    let kind = require::redis().filter(|kind| kind.speaks_tls())?;
    let folder = scratch::folder("tls").unwrap();
    let mut files = None;
    let scene = Scene::on_host(
        |host| {
            let (server, _) = tls::certificates(folder.path(), &[host.address()]).unwrap();
            readable(folder.path());
            files = Some(server.clone());
            primary(kind).tls(server)
        },
        |primary| fill_keys(primary, 5_000, "value"),
    )?;
    let server = files?;
    Some((scene, Certificates { folder, server }))
}

impl Certificates {
    /// A server that replicates by TLS.
    fn follower(&self, scene: &Scene) -> Server {
        scene.server(quick(scene.primary.kind()).tls(self.server.clone()).config("tls-replication", "yes"))
    }

    /// Makes it a replica by the primary's TLS port.
    fn replicate(&self, scene: &Scene, server: &Server) {
        let (host, port) = (scene.primary.address().ip().to_string(), scene.primary.tls_port().unwrap().to_string());
        server.client().unwrap().ok(&["REPLICAOF", &host, &port]).unwrap();
    }

    fn options(&self) -> [String; 4] {
        let [cert, key] = [&self.server.certificate, &self.server.key].map(|path| path.display().to_string());
        ["--link-cert".to_owned(), cert, "--link-key".to_owned(), key]
    }
}

fn strs(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

#[test]
fn a_full_copy_and_a_partial_one_are_served_over_tls() {
    let Some((scene, certificates)) = scene() else { return };
    let server = certificates.follower(&scene);
    let options = certificates.options();
    let mut agent = scene.attend_with(&server, &[scene.primary.tls_port().unwrap()], &strs(&options));
    let writer = steady_writer(&scene.primary);
    certificates.replicate(&scene, &server);
    handed_over(&agent, &server, 1);
    assert_eq!(syncs(&scene.primary), (1, 1), "the source's full copy, the server's hand-off\n{}", agent.output());
    server.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
    agent.wait_for_line("the primary can continue it", LONG).unwrap();
    handed_over(&agent, &server, 2);
    assert_eq!(syncs(&scene.primary), (1, 3), "through the agent, and without it\n{}", agent.output());
    writer.stop().unwrap();
    assert_same_data(&scene.primary, &server);
    agent.kill().unwrap();

    // Once more, by a run that ends.
    let link = strs(&options);
    let once = [&["--delivery", "intercept", "--replace"][..], &link].concat();
    let mut agent = scene.stage.replica_on(&scene.host, &server.url(), scene.source.address, &once);
    let ended = agent.wait_for_success(LONG);
    assert!(ended.is_ok(), "{ended:?}\n{}\nthe server:\n{}", agent.output(), server.log());
    assert_eq!(syncs(&scene.primary), (1, 4), "{}", agent.output());
    assert_same_data(&scene.primary, &server);
}

#[test]
fn a_server_that_refuses_the_certificate_goes_to_its_primary_unread() {
    let Some((scene, certificates)) = scene() else { return };
    let server = certificates.follower(&scene);
    let other = Authority::new(certificates.folder.path(), "other").unwrap();
    let wrong = other.sign("wrong", &[&scene.host.address().to_string()]).unwrap();
    let [cert, key] = [&wrong.certificate, &wrong.key].map(|path| path.display().to_string());
    let link = ["--link-cert", &cert, "--link-key", &key];
    let agent = scene.attend_with(&server, &[scene.primary.tls_port().unwrap()], &link);
    certificates.replicate(&scene, &server);
    in_step(&server, Duration::from_secs(30), &agent);
    says(&agent.output(), &["the server does not take us for its primary", "--link-cert", "passed on unread"]);
    assert_same_data(&scene.primary, &server);
    assert_eq!(syncs(&scene.primary).0, 1, "the server's own");
}
