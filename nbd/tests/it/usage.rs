//! Requests and their answers, byte for byte; what a client can take, who can connect, and what is left at the end.
//!
//! The server with the clients that people use: libnbd's, with TLS too, QEMU's and fio's.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_lab::process::Process;
use remora_lab::server::{Tls, certificates};
use remora_lab::{Random, require};
use remora_nbd::device::{MOST_REQUESTS, MemoryDevice};
use remora_nbd::protocol::command::{BLOCK_STATUS, CACHE, DISC, FLUSH, READ, TRIM, WRITE_ZEROES};
use remora_nbd::server::StartError;
use remora_nbd::{Address, Device, Geometry, Server, ServerOptions};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::Value;

use crate::{Broken, Client, LONG, LateDevice, Says, Serving, offer, request, until};

const MIB: u32 = 1 << 20;

#[test]
fn what_was_written_is_read_and_holes_are_holes() {
    let serving = Serving::of(Arc::new(MemoryDevice::new(64 << 20)));
    for structured in [true, false] {
        let mut client = Client::new(&serving.socket, structured);
        let hole = |length: u32| if structured { Says::Hole(length) } else { Says::Data(vec![0; length as usize]) };
        let at = if structured { 0 } else { 32 << 20 };
        assert_eq!(client.says(READ, at, 5000), hole(5000));
        let content: Vec<u8> = (0..3 * MIB).map(|at| (at % 251) as u8).collect();
        client.write(1, at + 100, &content);
        assert_eq!(client.reply(0).says, Says::Done);
        assert_eq!(client.says(READ, at + 100, 3 * MIB), Says::Data(content.clone()));
        assert_eq!(client.says(WRITE_ZEROES, at + 200, MIB), Says::Done);
        assert_eq!(client.says(READ, at + 200, 2 * MIB), {
            let mut expected = content[100..100 + 2 * MIB as usize].to_vec();
            expected[..MIB as usize].fill(0);
            Says::Data(expected)
        });
        assert_eq!(client.says(TRIM, at, 8 * MIB), Says::Done);
        assert_eq!(client.says(READ, at, 8 * MIB), hole(8 * MIB));
        assert_eq!(client.says(CACHE, at, MIB), Says::Done);
        assert_eq!(client.says(FLUSH, 0, 0), Says::Done);
        assert!(matches!(client.says(READ, 64 << 20, 1), Says::Error(22) | Says::ErrorWith(22, _)));
    }
    let mut client = Client::new(&serving.socket, true);
    client.write(1, 20 << 20, &[1; 10]);
    client.reply(0);
    let mut status = |length: u32| client.says(BLOCK_STATUS, 19 << 20, length);
    assert_eq!(status(2 * MIB), Says::Extents(vec![(MIB, 3)]), "only one was asked for");
    client.ask(BLOCK_STATUS, 0, 5, 19 << 20, 2 * MIB);
    let extents = vec![(MIB, 3), (256 << 10, 0), (MIB - (256 << 10), 3)];
    assert_eq!(client.reply(0).says, Says::Extents(extents));
}

/// A device that asks others what its holes are, and answers later.
#[test]
fn holes_that_are_described_later_are_described_as_those_at_once() {
    let serving = Serving::of(Arc::new(LateDevice::new(1 << 20)));
    let mut client = Client::new(&serving.socket, true);
    client.write(1, 16 << 10, &[1; 8192]);
    assert_eq!(client.reply(0).says, Says::Done);
    assert_eq!(client.says(BLOCK_STATUS, 4096, 64 << 10), Says::Extents(vec![(12 << 10, 3)]), "only one was asked for");
    client.ask(BLOCK_STATUS, 0, 5, 4096, 64 << 10);
    assert_eq!(client.reply(0).says, Says::Extents(vec![(12 << 10, 3), (8 << 10, 0), (44 << 10, 3)]));
}

/// Hundreds of requests in one piece, cut anywhere, are answered, and those that are wrong harm no other.
#[test]
fn requests_may_arrive_in_any_pieces() {
    let serving = Serving::of(Arc::new(MemoryDevice::new(1 << 20)));
    let mut all = Vec::new();
    for number in 0..300u64 {
        all.extend_from_slice(&request(1, 0, number * 3, number * 1000, 1000));
        all.extend_from_slice(&[number as u8; 1000]);
        all.extend_from_slice(&request(1, 0, number * 3 + 1, 1 << 20, 100)); // beyond the end
        all.extend_from_slice(&[0xff; 100]);
        all.extend_from_slice(&request(READ, 0, number * 3 + 2, number * 1000 + 300, 7));
    }
    for piece in [7919, 28, 1 << 20] {
        let mut client = Client::new(&serving.socket, true);
        let mut sending = client.stream.try_clone().unwrap();
        let bytes = all.clone();
        let sender = std::thread::spawn(move || bytes.chunks(piece).for_each(|part| sending.write_all(part).unwrap()));
        for number in 0..300u64 {
            let replies: Vec<_> = (0..3).map(|_| client.reply(0)).collect();
            assert_eq!(replies.iter().map(|reply| reply.cookie % 3).collect::<Vec<_>>(), [0, 1, 2]);
            assert_eq!(replies[0].says, Says::Done);
            assert!(matches!(replies[1].says, Says::ErrorWith(28, _)), "{:?}", replies[1]);
            assert_eq!(replies[2].says, Says::Data(vec![number as u8; 7]));
        }
        sender.join().unwrap();
    }
}

#[test]
fn answers_come_in_the_order_in_which_the_device_gives_them() {
    let device = Arc::new(LateDevice::new(4 << 20));
    let serving = Serving::of(Arc::clone(&device) as _);
    let mut client = Client::new(&serving.socket, true);
    device.hold(true);
    for number in 0..100u64 {
        client.write(number, number * 4096, &[number as u8; 4096]);
    }
    until("all are under way", || device.under_way() == 100);
    client.ask(FLUSH, 0, 1000, 0, 0);
    assert_eq!(client.reply(0).cookie, 1000, "what is answered at once waits for nothing");
    device.hold(false);
    let cookies: Vec<u64> = (0..100).map(|_| client.reply(0).cookie).collect();
    assert_ne!(cookies, (0..100).collect::<Vec<_>>(), "the device works in any order");
    assert_eq!(cookies.into_iter().collect::<BTreeSet<_>>(), (0..100).collect());
    for number in 0..100u64 {
        assert_eq!(client.says(READ, number * 4096, 4096), Says::Data(vec![number as u8; 4096]));
    }
    let long: Vec<u8> = (0..3 << 20).map(|at| (at % 241) as u8).collect();
    client.write(1, 4096, &long);
    assert_eq!(client.reply(0).says, Says::Done);
    assert_eq!(client.says(READ, 4096, 3 << 20), Says::Data(long));
}

/// What a client asked for before it said good-bye is done before the connection ends.
#[test]
fn a_good_bye_waits_for_what_is_under_way() {
    let device = Arc::new(LateDevice::new(1 << 20));
    let serving = Serving::of(Arc::clone(&device) as _);
    let mut client = Client::new(&serving.socket, true);
    device.hold(true);
    client.write(1, 0, &[7; 4096]);
    client.ask(DISC, 0, 2, 0, 0);
    until("the write is under way", || device.under_way() == 1);
    device.hold(false);
    assert_eq!(client.reply(0).says, Says::Done);
    assert!(client.is_over());
}

/// Whatever a device does, its clients are answered.
#[test]
fn a_device_that_does_not_answer_has_failed() {
    let serving = Serving::of(Arc::new(Broken));
    let mut client = Client::new(&serving.socket, true);
    let eio = |says: Says| matches!(says, Says::ErrorWith(5, _));
    for at in [0, 512, 1024, 1536] {
        assert!(eio(client.says(READ, at, 512)), "{at}");
    }
    assert_eq!(client.says(READ, 2048, 512), Says::ErrorWith(12, "no memory for this read".into()));
    for command in [FLUSH, TRIM, WRITE_ZEROES, BLOCK_STATUS] {
        let length = if command == FLUSH { 0 } else { 512 };
        assert!(eio(client.says(command, 0, length)), "{command}");
    }
    assert!(eio(client.says(BLOCK_STATUS, 512, 512)), "later, and nothing");
    client.write(1, 0, &[0; 512]);
    assert_eq!(client.reply(0).says, Says::ErrorWith(108, "the volume has ended".into()));
}

// What a client can take, who can connect, and what is left at the end.

fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(1 << 20))
}

#[test]
fn only_the_owner_opens_the_socket_and_nothing_is_left_of_it() {
    let serving = Serving::of(memory());
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&serving.socket), 0o600);
    assert_eq!(mode(serving.socket.parent().unwrap()), 0o700);
    let again = Server::start(vec![offer("x", memory())], &ServerOptions::new(Address::Unix(serving.socket.clone())));
    let error = again.err().unwrap().to_string();
    assert!(error.contains("in use") && error.contains("sockets/nbd"), "{error}");
    Client::new(&serving.socket, true);
    let Serving { server, socket, folder } = serving;
    drop(server);
    assert!(!socket.exists());
    // A file that a killed server has left is replaced.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let server = Server::start(vec![offer("x", memory())], &ServerOptions::new(Address::Unix(socket.clone()))).unwrap();
    Client::new(&socket, true);
    drop((server, folder));
}

#[test]
fn a_file_that_is_not_the_servers_socket_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let start = |path: &std::path::Path| {
        Server::start(vec![offer("x", memory())], &ServerOptions::new(Address::Unix(path.to_owned())))
    };
    std::fs::write(at("data"), "precious").unwrap();
    std::os::unix::fs::symlink(at("data"), at("link")).unwrap();
    std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    for name in ["data", "link", "dangling", "folder"] {
        let error = start(&at(name)).err().unwrap().to_string();
        assert!(error.contains("not a socket") && error.contains(name), "{error}");
        assert!(at(name).symlink_metadata().is_ok(), "{name}");
    }
    assert_eq!(std::fs::read(at("data")).unwrap(), b"precious");
    // Somebody has removed the first server's file for the second one, which takes over.
    let first = start(&at("socket")).unwrap();
    std::fs::remove_file(at("socket")).unwrap();
    let second = start(&at("socket")).unwrap();
    drop(first);
    Client::new(&at("socket"), true);
    drop(second);
    assert!(!at("socket").exists());
}

#[test]
fn what_cannot_be_exported_is_refused_by_name() {
    struct Odd(Geometry);
    impl remora_nbd::Device for Odd {
        fn geometry(&self) -> Geometry {
            self.0
        }
        fn read(&self, _: u64, _: u32, _: remora_nbd::device::Answer<'_>) {}
        fn write(&self, _: u64, _: remora_nbd::device::Payload<'_>, _: bool, _: remora_nbd::device::Answer<'_>) {}
        fn zero(&self, _: u64, _: u32, _: remora_nbd::request::Zero, _: remora_nbd::device::Answer<'_>) {}
        fn trim(&self, _: u64, _: u32, _: bool, _: remora_nbd::device::Answer<'_>) {}
        fn flush(&self, _: remora_nbd::device::Answer<'_>) {}
    }
    let fine = Geometry::of_blocks(1 << 20, 4096);
    let start = |offers| Server::start(offers, &ServerOptions::new(Address::Tcp("127.0.0.1:0".parse().unwrap())));
    for wrong in [
        Geometry { size: 100, ..fine },
        Geometry { minimum: 3, ..fine },
        Geometry { minimum: 1 << 20, preferred: 1 << 20, ..fine },
        Geometry { preferred: 512, ..fine },
        Geometry { size: 1 << 63, ..fine },
    ] {
        let refused = start(vec![offer("odd", Arc::new(Odd(wrong)))]).err();
        assert!(matches!(&refused, Some(StartError::Export { name, .. }) if name == "odd"), "{wrong:?}: {refused:?}");
    }
    assert!(matches!(start(vec![]).err(), Some(StartError::Export { .. })));
    let refused = start(vec![offer("one", memory()), offer("one", memory())]).err();
    assert_eq!(refused.unwrap().to_string(), r#"the export "one": two exports have this name"#);
}

#[test]
fn one_connection_too_many_is_closed_and_another_one_is_taken_when_one_ends() {
    let serving = Serving::with(vec![offer("disk", memory())], |options| options.most_connections = 2);
    let (first, second) = (Client::new(&serving.socket, true), Client::new(&serving.socket, true));
    let mut third = unconnected(&serving);
    assert!(third.is_over());
    assert_eq!(serving.server.connections(), 2);
    drop(first);
    until("its thread has ended", || serving.server.connections() == 1);
    assert_eq!(Client::new(&serving.socket, true).says(FLUSH, 0, 0), Says::Done);
    drop(second);
}

fn unconnected(serving: &Serving) -> Client {
    Client::over(UnixStream::connect(&serving.socket).unwrap())
}

/// The client reads no answers. The device never has more to do than the bound, and other clients are served.
#[test]
fn a_client_has_a_bounded_number_of_requests_under_way() {
    let device = Arc::new(LateDevice::new(1 << 20));
    let serving = Serving::of(Arc::clone(&device) as _);
    let greedy = Client::new(&serving.socket, true);
    device.hold(true);
    let mut sending = greedy.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        let all: Vec<u8> = (0..3000).flat_map(|cookie| request(READ, 0, cookie, 0, 4096)).collect();
        let _ = sending.write_all(&all); // until the server has ended the connection
    });
    until("the bound is reached", || device.under_way() == MOST_REQUESTS);
    device.hold(false);
    until("answers that are not read hold up the others", || device.under_way() == 0);
    // The device counts the requests of all clients, so this one is asked before there is another client.
    assert_eq!(device.most(), MOST_REQUESTS);
    let mut other = Client::new(&serving.socket, true);
    assert_eq!(other.says(READ, 0, 4096), Says::Data(vec![0; 4096]));
    drop(other);
    drop(serving);
    sender.join().unwrap();
    drop(greedy);
}

#[test]
fn a_server_ends_at_once_whatever_its_clients_do() {
    let device = Arc::new(LateDevice::new(1 << 20));
    let serving = Serving::of(Arc::clone(&device) as _);
    let mut clients: Vec<Client> = (0..5).map(|_| Client::new(&serving.socket, true)).collect();
    clients.push(Client::connect(&serving.socket)); // in the middle of its negotiation
    device.hold(true);
    for (number, client) in clients.iter_mut().take(3).enumerate() {
        client.ask(READ, 0, number as u64, 0, 4096);
    }
    until("they are under way", || device.under_way() == 3);
    let began = Instant::now();
    drop(serving);
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    assert!(clients.iter_mut().all(Client::is_over));
    device.hold(false); // its answers go nowhere
    until("they are done", || device.under_way() == 0);
}

/// Anything at all ends the connection that sent it, and nothing else.
#[test]
fn garbage_harms_no_other_client() {
    let serving = Serving::of(memory());
    let mut good = Client::new(&serving.socket, true);
    let mut random = remora_lab::Random::new(remora_lab::random::seed("garbage"));
    for number in 0..100 {
        let mut bad = if number % 2 == 0 { unconnected(&serving) } else { Client::new(&serving.socket, true) };
        let length = random.between(1, 300) as usize;
        let _ = bad.stream.write_all(&random.bytes(length)); // the server may have closed it
        let _ = bad.stream.shutdown(std::net::Shutdown::Write);
        while !bad.is_over() {}
    }
    assert_eq!(good.says(READ, 0, 512), Says::Hole(512));
}

const MIB_BYTES: usize = 1 << 20;

/// Runs a program in `folder`, and returns what it printed. It must succeed, and within half a minute.
pub fn run(folder: &Path, program: &str, arguments: &[&str]) -> String {
    match try_run(folder, program, arguments) {
        (true, said) => said,
        (false, said) => panic!("{program} {arguments:?} failed: {said}"),
    }
}

/// Whether it succeeded, and what it printed.
pub fn try_run(folder: &Path, program: &str, arguments: &[&str]) -> (bool, String) {
    let said = folder.join("said");
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    let file = fs::File::create(&said).unwrap();
    command.stdout(file.try_clone().unwrap()).stderr(file);
    let (mut process, _) = Process::start(program, command).unwrap();
    let status = process.wait(Duration::from_secs(30)).unwrap();
    let status = status.unwrap_or_else(|| panic!("{program} {arguments:?} runs for more than 30 s"));
    (status.success(), String::from_utf8_lossy(&fs::read(&said).unwrap()).into_owned())
}

fn devices(size: usize) -> [Arc<dyn Device>; 2] {
    [Arc::new(MemoryDevice::new(size as u64)), Arc::new(LateDevice::new(size))]
}

#[test]
fn nbdinfo_says_what_is_exported() {
    let Some(()) = require::nbd_clients() else { return };
    let [memory, late] = devices(8 * MIB_BYTES);
    let serving = Serving::with(vec![offer("memory", memory), offer("late", late)], |_| {});
    let folder = serving.folder.path();
    let info: Value = serde_json::from_str(&run(folder, "nbdinfo", &["--json", "--list", &serving.uri()])).unwrap();
    let exports = info["exports"].as_array().unwrap();
    assert_eq!((&info["protocol"], exports.len()), (&"newstyle-fixed".into(), 2));
    for (export, (name, minimum, knows_holes)) in exports.iter().zip([("memory", 1, true), ("late", 4096, true)]) {
        assert_eq!(export["export-name"], name);
        assert_eq!(export["description"], format!("the {name} of a test"));
        assert_eq!(export["export-size"], 8 * MIB_BYTES);
        assert_eq!(
            export["block_minimum"].as_u64().or(export["block_size_minimum"].as_u64()),
            Some(minimum),
            "{export}"
        );
        for can in ["can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero", "can_df", "can_cache"] {
            assert_eq!(export[can], true, "{can}");
        }
        assert_eq!(export["is_read_only"], false);
        assert_eq!(export["contexts"].as_array().is_some_and(|list| list.len() == 1), knows_holes, "{export}");
    }
}

#[test]
fn nbdcopy_copies_there_and_back() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(24 * MIB_BYTES) {
        let serving = Serving::of(device);
        let (folder, uri) = (serving.folder.path(), serving.uri());
        let mut random = Random::new(remora_lab::random::seed("nbdcopy"));
        // A part of it is zeros, which are written as such.
        let mut content = random.bytes(24 * MIB_BYTES);
        content[3 * MIB_BYTES..10 * MIB_BYTES].fill(0);
        fs::write(folder.join("there"), &content).unwrap();
        let many = ["--connections=4", "--requests=64"];
        run(folder, "nbdcopy", &[&many[..], &["--flush", "there", &uri]].concat());
        run(folder, "nbdcopy", &[&many[..], &["--request-size=1048576", &uri, "back"]].concat());
        assert!(fs::read(folder.join("back")).unwrap() == content);
        run(folder, "nbdcopy", &["--synchronous", &uri, "again"]);
        assert!(fs::read(folder.join("again")).unwrap() == content);
    }
}

#[test]
fn nbdinfo_and_qemu_find_the_holes() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(8 * MIB_BYTES) {
        let serving = Serving::of(device);
        let (folder, uri) = (serving.folder.path(), serving.uri());
        run(folder, "qemu-io", &["-f", "raw", "-c", "write -P 9 2M 1M", &uri]);
        let map: Value = serde_json::from_str(&run(folder, "nbdinfo", &["--map", "--json", &uri])).unwrap();
        let extents: Vec<_> =
            map.as_array().unwrap().iter().map(|e| (e["offset"].clone(), e["type"].clone())).collect();
        let expected =
            [(0, 3), (2 * MIB_BYTES, 0), (3 * MIB_BYTES, 3)].map(|(at, kind)| (Value::from(at), Value::from(kind)));
        assert_eq!(extents, expected);
        let map = run(folder, "qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
        let map: Value = serde_json::from_str(&map).unwrap();
        let extents: Vec<_> = map
            .as_array()
            .unwrap()
            .iter()
            .map(|e| (e["start"].clone(), e["zero"].clone(), e["data"].clone()))
            .collect();
        let expected = [(0, true), (2 * MIB_BYTES, false), (3 * MIB_BYTES, true)];
        assert_eq!(extents, expected.map(|(at, zero)| (Value::from(at), Value::from(zero), Value::from(!zero))));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn qemu_makes_images_on_it_and_finds_them_whole() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(32 * MIB_BYTES) {
        let serving = Serving::of(device);
        let (folder, uri) = (serving.folder.path(), serving.uri());
        let content = Random::new(remora_lab::random::seed("qemu")).bytes(16 * MIB_BYTES);
        fs::write(folder.join("image"), [&content[..], &vec![0; 16 * MIB_BYTES]].concat()).unwrap();
        run(folder, "qemu-img", &["convert", "-n", "-W", "-f", "raw", "-O", "raw", "image", &uri]);
        run(folder, "qemu-img", &["compare", "-f", "raw", "-F", "raw", "image", &uri]);
        run(folder, "qemu-img", &["create", "-f", "qcow2", &uri, "16M"]);
        fs::write(folder.join("half"), &content).unwrap();
        run(folder, "qemu-img", &["convert", "-n", "-m", "8", "-W", "-f", "raw", "-O", "qcow2", "half", &uri]);
        run(folder, "qemu-img", &["check", "-f", "qcow2", &uri]);
        run(folder, "qemu-img", &["compare", "-f", "raw", "-F", "qcow2", "half", &uri]);
    }
}

/// Requests that are smaller than the device's blocks are QEMU's to split; zeros, holes and flags are ours.
#[test]
fn qemu_io_reads_what_it_wrote() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(16 * MIB_BYTES) {
        let serving = Serving::of(device);
        let commands = [
            "write -P 1 0 1M",
            "write -P 2 -f 4096 512",
            "aio_write -P 3 2M 3M",
            "aio_write -P 4 6M 64k",
            "aio_flush",
            "write -z 2M 1M",
            "write -z -u 4M 512k",
            "discard 6M 64k",
            "flush",
            "read -P 1 0 4096",
            "read -P 2 4096 512",
            "read -P 1 4608 100k",
            "read -P 0 2M 1M",
            "read -P 3 3M 1M",
            "read -P 0 4M 512k",
            "read -P 3 4608k 512k",
            "read -P 0 6M 64k",
        ];
        let uri = serving.uri();
        let mut arguments = vec!["-f", "raw", "-t", "writeback", "-d", "unmap"];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        arguments.push(&uri);
        let said = run(serving.folder.path(), "qemu-io", &arguments);
        assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    }
}

/// Several connections write their parts of one device, with checksums, and read them back.
#[test]
#[ignore = "long: make test-all"]
fn fio_verifies_what_many_connections_write() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(32 * MIB_BYTES) {
        let serving = Serving::of(device);
        let uri = format!("--uri={}", serving.uri());
        let common =
            ["--ioengine=nbd", &uri, "--thread", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"];
        let shape = ["--rw=randwrite", "--bsrange=4k-256k", "--blockalign=4k", "--iodepth=32", "--size=8m"];
        let jobs = ["--name=verify", "--numjobs=4", "--offset_increment=8m", "--group_reporting"];
        let said = run(serving.folder.path(), "fio", &[&common[..], &shape, &jobs].concat());
        assert!(said.contains("err= 0"), "{said}");
        let shape = ["--rw=randrw", "--bs=4k", "--iodepth=16", "--size=8m", "--fsync=8"];
        let said = run(serving.folder.path(), "fio", &[&common[..], &shape, &["--name=both"]].concat());
        assert!(said.contains("err= 0"), "{said}");
    }
}

// The server with TLS, and libnbd's clients.

/// With `asks`, clients must have a certificate of the same authority.
fn config(tls: &Tls, asks: bool) -> Arc<ServerConfig> {
    let certificate = CertificateDer::from_pem_file(&tls.certificate).unwrap();
    let key = PrivateKeyDer::from_pem_file(&tls.key).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&tls.ca).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let config = if asks {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build().unwrap();
        config.with_client_cert_verifier(verifier)
    } else {
        config.with_no_client_auth()
    };
    Arc::new(config.with_single_cert(vec![certificate], key).unwrap())
}

#[test]
#[ignore = "long: make test-all"]
fn clients_with_the_authority_copy_over_tls_and_others_get_nothing() {
    let Some(()) = require::nbd_clients() else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (server_tls, client_tls) = certificates(folder, &[]).unwrap();
    let content = Random::new(remora_lab::random::seed("tls")).bytes(12 << 20);
    fs::write(folder.join("there"), &content).unwrap();
    let with = client_tls.libnbd_folder(folder, "with", true).unwrap();
    let without = client_tls.libnbd_folder(folder, "without", false).unwrap();
    for asks in [false, true] {
        let mut options = ServerOptions::new(Address::Tcp("127.0.0.1:0".parse().unwrap()));
        options.tls = Some(config(&server_tls, asks).into());
        let devices = [
            offer("memory", Arc::new(MemoryDevice::new(12 << 20))),
            offer("late", Arc::new(LateDevice::new(12 << 20))),
        ];
        let server = Server::start(devices.to_vec(), &options).unwrap();
        let Address::Tcp(address) = server.address() else { panic!("not a port") };
        for export in ["memory", "late"] {
            let uri = |folder: &str| format!("nbds://{address}/{export}?tls-certificates={folder}");
            run(folder, "nbdcopy", &["--connections=2", "there", &uri(&with)]);
            run(folder, "nbdcopy", &["--connections=2", "--request-size=1048576", &uri(&with), "back"]);
            assert!(fs::read(folder.join("back")).unwrap() == content);
            let (is_well, said) = try_run(folder, "nbdinfo", &[&uri(&without)]);
            assert_eq!(is_well, !asks, "{said}");
        }
        let (is_well, said) = try_run(folder, "nbdinfo", &[&format!("nbd://{address}/memory")]);
        assert!(!is_well && said.contains("TLS"), "{said}");
    }
}
