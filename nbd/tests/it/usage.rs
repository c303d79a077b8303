//! Requests and their answers, byte for byte; what a client can take, who can connect, and what is left at the end.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use remora_nbd::device::{MOST_REQUESTS, MemoryDevice};
use remora_nbd::protocol::command::{BLOCK_STATUS, CACHE, DISC, FLUSH, READ, TRIM, WRITE_ZEROES};
use remora_nbd::server::StartError;
use remora_nbd::{Address, Geometry, Server, ServerOptions};

use crate::offer;
use crate::request;
use crate::until;
use crate::{Broken, Client, LONG, LateDevice, Says, Serving};

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
