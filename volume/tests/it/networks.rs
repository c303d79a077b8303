//! Servers and writers on hosts of their own, in network namespaces, while cables are cut: packets vanish, and neither
//! end is notified.

use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_lab::server::{Tls, certificates};
use remora_lab::{Host, Net, Shape, require};
use remora_messenger::stack::tls::TlsOptions;
use remora_volume::Security;
use remora_volume::client::{ClientOptions, Error, Reads, Volume, Writes, new_id};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{self, Copies};
use remora_volume::writer::End;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::cluster::{Checker, Remotes, all_are_whole, keys, options, until, write_for};
use crate::nbd::{self, Served};

/// Three hosts with a server each, and two for writers.
struct Scene {
    hosts: Vec<Host>,
    remotes: Remotes,
    writer: Host,
    other: Host,
    _net: Net,
}

impl Scene {
    fn new(blocks: u64) -> Option<Scene> {
        require::namespaces()?;
        let net = Net::new().unwrap();
        let hosts = ["one", "two", "three"].map(|name| net.host(name).unwrap()).to_vec();
        let remotes = Remotes::on(&hosts, None, blocks);
        let [writer, other] = ["writer", "other"].map(|name| net.host(name).unwrap());
        Some(Scene { hosts, remotes, writer, other, _net: net })
    }

    /// Opens the volume on a host. Its threads and connections stay there.
    fn open(&self, host: &Host, options: &ClientOptions) -> Volume {
        host.within(|| self.remotes.open(options)).unwrap()
    }
}

/// How long a busy machine may take beyond a time limit.
const BUSY: Duration = Duration::from_secs(2);

/// All ways to read and to write over a network.
fn far() -> ClientOptions {
    ClientOptions { reads: Reads::Anywhere, writes: Writes::Pulled, ..options() }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_cut_off_is_left_out_in_time_and_taken_back_when_its_cable_is_mended() {
    let Some(scene) = Scene::new(1000) else { return };
    for (seed, options) in [(41, options()), (42, far())] {
        let mut checker = Checker::of(seed, 32);
        let volume = scene.open(&scene.writer, &options);
        write_for(&volume, &mut checker, Duration::from_millis(200));
        assert_eq!(volume.members().len(), 3);
        scene.hosts[0].cut().unwrap();
        let longest = write_for(&volume, &mut checker, options.copy_limit + Duration::from_secs(1));
        println!("longest write while a server was cut off: {longest:?}");
        assert!(longest < options.copy_limit + BUSY, "{longest:?}");
        until("the server is left out", || volume.members().len() == 2);
        checker.check(&volume);
        scene.hosts[0].heal().unwrap();
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
        assert!(checker.ledger.lock().unwrap().failures.is_empty());
        drop(volume);
        // What the copies hold is what a writer elsewhere finds.
        let volume = scene.open(&scene.other, &options);
        assert!(checker.check(&volume) > 100);
        checker.settle(&volume);
        let blank = vec![0; 4096];
        for first in 0..1000 {
            volume.write(first, blank.clone()).unwrap(); // the next round begins with zeros
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn writes_wait_while_two_servers_are_cut_off_and_go_on_when_their_cables_are_mended() {
    let Some(scene) = Scene::new(500) else { return };
    let mut checker = Checker::new(43);
    let options = options();
    let volume = scene.open(&scene.writer, &options);
    write_for(&volume, &mut checker, Duration::from_millis(200));
    scene.hosts[..2].iter().for_each(|host| host.cut().unwrap());
    let acknowledgements = || checker.ledger.lock().unwrap().acknowledgements;
    // What is on its way may still be answered. Then both are left out, and nothing is.
    until("two servers are left out", || volume.members().len() == 1);
    let before = acknowledgements();
    checker.check(&volume); // reads go on
    assert!(checker.write(&volume));
    let acknowledgements = || checker.ledger.lock().unwrap().acknowledgements;
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(acknowledgements(), before);
    scene.hosts[..2].iter().for_each(|host| host.heal().unwrap());
    until("the write is acknowledged", || acknowledgements() > before);
    until("both are taken back", || volume.members().len() == 3);
    write_for(&volume, &mut checker, Duration::from_millis(100));
    checker.check(&volume);
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
}

/// The device is on the writer's host, and its clients are elsewhere: at its socket.
#[test]
#[ignore = "long: make test-all"]
fn fio_finds_what_it_wrote_while_a_server_is_cut_off() {
    let (Some(scene), Some(())) = (Scene::new(nbd::BLOCKS), require::nbd_clients()) else { return };
    let volume = scene.open(&scene.writer, &options());
    let Scene { hosts, remotes, writer, .. } = scene;
    let served = writer.within(|| Served::of(remotes, volume)).unwrap();
    let fio = served.fio();
    std::thread::sleep(Duration::from_millis(500));
    hosts[1].cut().unwrap();
    until("its copy is left out", || served.server.volume().members().len() == 2);
    hosts[1].heal().unwrap();
    let said = fio.succeeds();
    assert!(said.contains("err= 0"), "{said}");
    served.is_whole();
}

/// It is replaced while it is cut off, with writes under way. If it has waited so long that it has left every server
/// out, it ends by itself; else at the first word of a server. It acknowledges nothing in between.
#[test]
#[ignore = "long: make test-all"]
fn a_writer_that_is_cut_off_and_replaced_acknowledges_nothing_more() {
    let Some(scene) = Scene::new(500) else { return };
    let mut checker = Checker::new(44);
    for is_patient in [false, true] {
        let limit = Duration::from_secs(if is_patient { 30 } else { 2 });
        let first = scene.open(&scene.writer, &ClientOptions { copy_limit: limit, ..options() });
        checker.settle(&first);
        write_for(&first, &mut checker, Duration::from_millis(200));
        (0..100).for_each(|_| assert!(checker.write(&first)));
        scene.writer.cut().unwrap();
        (0..100).for_each(|_| assert!(checker.write(&first)));
        let second = scene.open(&scene.other, &options());
        let written = checker.check(&second);
        // Answers that had arrived before the cut are read within moments, on a busy machine within seconds; by one
        // that has ended, not at all.
        let acknowledgements = || checker.ledger.lock().unwrap().acknowledgements;
        if !is_patient {
            until("the first writer has ended", || first.end().is_some());
        }
        let (mut before, mut quiet) = (acknowledgements(), 0);
        while is_patient && quiet < 5 {
            std::thread::sleep(Duration::from_secs(1));
            let now = acknowledgements();
            quiet = if now == before { quiet + 1 } else { 0 };
            before = now;
        }
        checker.settle(&second);
        assert!(written > 100, "{written}");
        scene.writer.heal().unwrap();
        until("the first writer has ended", || first.end().is_some());
        match first.end() {
            Some(End::NoCopyLeft) if !is_patient => {}
            Some(End::Fenced { .. }) if is_patient => {}
            other => panic!("{other:?}"),
        }
        assert!(matches!(first.read(0, 1), Err(Error::Ended(_))));
        drop(first);
        assert_eq!(checker.ledger.lock().unwrap().acknowledgements, before);
        checker.check(&second);
        write_for(&second, &mut checker, Duration::from_millis(100));
        checker.check(&second);
    }
}

/// A server comes back without its memory. Of the two that could lend, it does not reach the one that the writer would
/// choose.
#[test]
#[ignore = "long: make test-all"]
fn a_copy_whose_lender_cannot_be_reached_is_taken_from_another_one() {
    let Some(mut scene) = Scene::new(500) else { return };
    let mut checker = Checker::new(45);
    let volume = scene.open(&scene.writer, &options());
    for unreachable in [2, 1] {
        write_for(&volume, &mut checker, Duration::from_millis(100));
        scene.remotes.kill(0);
        until("its copy is left out", || volume.members().len() == 2);
        scene.hosts[0].cut_from(&scene.hosts[unreachable]).unwrap();
        scene.remotes.restart(0);
        // Without load, and with it: then another copy is ahead each time.
        if unreachable == 2 {
            until("its copy is taken back", || volume.members().len() == 3);
        } else {
            all_are_whole(&volume, &mut checker);
        }
        scene.hosts[0].heal_from(&scene.hosts[unreachable]).unwrap();
        checker.check(&volume);
    }
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
}

/// The lender has a slow cable, so that it is killed after a part of the copy was lent.
#[test]
#[ignore = "long: make test-all"]
fn a_copy_whose_lender_dies_meanwhile_is_taken_from_the_third_one() {
    let Some(()) = require::shaping() else { return };
    const BLOCKS: u64 = 16 << 10; // 64 MiB: more than 3 s over this cable
    let Some(mut scene) = Scene::new(BLOCKS) else { return };
    let volume = scene.open(&scene.writer, &options());
    let content =
        |number: u64| (0..256).flat_map(|at| crate::cluster::content(number * 256 + at, 1)).collect::<Vec<u8>>();
    for number in 0..BLOCKS / 256 {
        volume.write(number * 256, content(number)).unwrap();
    }
    scene.remotes.kill(0);
    until("its copy is left out", || volume.members().len() == 2);
    // Of two that have applied the same, the writer chooses the last one. The other one lends as slowly until then.
    let lenders = [1, 2].map(|number| &scene.hosts[number]);
    lenders.iter().for_each(|host| host.shape(Shape::rate(20 << 20)).unwrap());
    let before = lenders.map(|host| host.traffic().unwrap());
    let lent = |at: usize| lenders[at].traffic().unwrap().since(before[at]).sent;
    scene.remotes.restart(0);
    let mut at = 0;
    until("something was lent", || {
        at = usize::from(lent(1) > lent(0));
        lent(at) > 8 << 20
    });
    assert_eq!(volume.members().len(), 2, "it lends still");
    scene.remotes.kill(at + 1);
    let lent_first = lent(at);
    let began = Instant::now();
    lenders[1 - at].shape(Shape::default()).unwrap();
    until("the copy is whole", || volume.members().iter().any(|server| server.0 == 0));
    println!(
        "{lent_first} bytes were lent by the first one, then {} by the other in {:?}",
        lent(1 - at),
        began.elapsed()
    );
    assert!(lent_first < BLOCKS * 4096 && lent(1 - at) > 16 << 20);
    for number in 0..BLOCKS / 256 {
        assert!(volume.read(number * 256, 256).unwrap() == content(number), "{number}");
    }
    volume.write(5, crate::cluster::content(5, 2)).unwrap(); // two copies hold it again
}

// Volumes over TLS: between clients and servers, and between servers.

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
    let shape = shape::Shape::new(new_id().unwrap(), 500, Copies::new(3, 2).unwrap()).unwrap();
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
