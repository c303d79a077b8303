//! What a client can take, who can connect, and what is left at the end.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use remora_nbd::device::MOST_REQUESTS;
use remora_nbd::memory::MemoryDevice;
use remora_nbd::protocol::command::{FLUSH, READ};
use remora_nbd::server::StartError;
use remora_nbd::{Address, Geometry, Server, ServerOptions};

use crate::device::{LONG, LateDevice, Serving, offer, until};
use crate::raw::{Client, Says, request};

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
