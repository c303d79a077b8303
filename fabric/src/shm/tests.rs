//! Tests of this transport alone: connections that are not readers, slow ones, limits, impostors, and the socket's
//! file.

#![allow(clippy::unwrap_used)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{BootId, Shm, VERSION, *};
use crate::admission::{Format, Hello};
use crate::memory::local::{self, Address, Admits, Listener};
use crate::memory::{Memory, Pages};
use crate::region::{RegionId, RegionKey, Secret};
use crate::transport::{Completion, Connector, Exporter, Peer, ReadRequest};
use crate::{Denial, Regions};

const SIZE: u64 = 16 << 20;
const ID: RegionId = RegionId { generation: 1, region: 0 };
const SECRET: Secret = [3; 32];

fn memory() -> Arc<Memory> {
    Arc::new(Memory::create("shm-test", SIZE, Pages::Small).unwrap())
}

fn exporter(options: ShmOptions) -> (ShmExporter, Arc<Memory>) {
    let exporter = ShmExporter::bind(options).unwrap();
    let memory = memory();
    exporter.export(ID, memory.clone()).unwrap();
    exporter.grant(1, SECRET, Regions::All);
    (exporter, memory)
}

fn connect(key: &RegionKey) -> Result<Box<dyn Peer>, Error> {
    ShmConnector::new().connect(key, 1, &SECRET, memory())
}

/// A connection to the exporter that has not sent anything.
fn connect_raw(exporter: &ShmExporter) -> OwnedFd {
    let address = super::address_in(&exporter.key(ID).unwrap(), &BootId::of_this_host().unwrap()).unwrap();
    local::connect(&address, Instant::now() + Duration::from_secs(5)).unwrap()
}

fn receive(socket: impl AsFd) -> Result<Vec<u8>, Error> {
    let patience = Duration::from_secs(10);
    let packet = local::receive_by(&socket, Instant::now() + patience, patience)?;
    Ok(packet.bytes().to_vec())
}

#[test]
fn a_read_longer_than_one_call_copies_is_done_in_several() {
    let (exporter, memory) = exporter(ShmOptions::default());
    for at in (0..SIZE).step_by(4096) {
        memory.write(at, &at.to_le_bytes()).unwrap();
    }
    let sink = self::memory();
    let mut peer = ShmConnector::new().connect(&exporter.key(ID).unwrap(), 1, &SECRET, sink.clone()).unwrap();
    peer.post_read(&[ReadRequest { tag: 1, offset: 0, length: SIZE as u32, sink_offset: 0 }]).unwrap();
    let mut completions = Vec::new();
    assert_eq!(peer.poll(&mut completions).unwrap(), 0, "not all of it at once");
    while completions.is_empty() {
        peer.poll(&mut completions).unwrap();
    }
    assert_eq!(completions, [Completion { tag: 1, result: Ok(SIZE as u32) }]);
    assert_eq!(sink.crc32c(0..SIZE).unwrap(), memory.crc32c(0..SIZE).unwrap());
}

#[test]
fn a_view_outlives_its_peer_and_can_not_be_written() {
    let (exporter, memory) = exporter(ShmOptions::default());
    let view = connect(&exporter.key(ID).unwrap()).unwrap().view().unwrap();
    drop(exporter);
    memory.write(5, b"still").unwrap();
    let mut bytes = [0; 5];
    view.read(5, &mut bytes).unwrap();
    assert_eq!(&bytes, b"still");
    assert!(rustix::io::write(view.as_fd(), b"x").is_err());
    let closed_on_exec = rustix::io::fcntl_getfd(view.as_fd()).unwrap();
    assert!(closed_on_exec.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn malformed_hellos_are_rejected_and_readers_are_still_served() {
    let (exporter, _memory) = exporter(ShmOptions::default());
    let hello = Shm::hello(&Hello { lane: 0, session: 1, id: ID, nonce: [0; 32] });
    let mut wrong_magic = hello.clone();
    wrong_magic[0] = b'X';
    for packet in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0], &wrong_magic, &hello[..71], &[&hello[..], &[0]].concat()] {
        let connection = connect_raw(&exporter);
        local::send(&connection, packet, None).unwrap();
        assert!(matches!(receive(&connection), Err(Error::Protocol(_) | Error::System { .. })), "{packet:?}");
    }
    let connection = connect_raw(&exporter);
    local::send(&connection, &hello, None).unwrap();
    receive(&connection).unwrap();
    local::send(&connection, b"a proof of the wrong length", None).unwrap();
    assert!(receive(&connection).is_err());
    assert!(connect(&exporter.key(ID).unwrap()).is_ok());
}

#[test]
fn a_connection_without_a_hello_is_closed_at_the_time_out() {
    let options = ShmOptions { handshake_timeout: Duration::from_millis(50), ..ShmOptions::default() };
    let (exporter, _memory) = exporter(options);
    let silent = connect_raw(&exporter);
    let begun = Instant::now();
    assert!(matches!(receive(&silent), Err(Error::Protocol(_))));
    assert!(begun.elapsed() >= Duration::from_millis(40), "{:?}", begun.elapsed());
}

#[test]
fn one_reader_above_the_limit_is_refused_as_busy() {
    let (exporter, _memory) = exporter(ShmOptions { connections: 2, ..ShmOptions::default() });
    let key = exporter.key(ID).unwrap();
    let (first, _second) = (connect(&key).unwrap(), connect(&key).unwrap());
    let refused = connect(&key).err().unwrap();
    assert!(matches!(refused, Error::Refused(Denial::Busy)), "{refused}");
    drop(first);
    let begun = Instant::now();
    while connect(&key).is_err() {
        assert!(begun.elapsed() < LONG, "the place of one who left is free again");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn one_session_can_not_take_all_connections() {
    let (exporter, _memory) = exporter(ShmOptions::default());
    let key = exporter.key(ID).unwrap();
    let peers: Vec<_> = (0..16).map(|_| connect(&key).unwrap()).collect();
    assert!(matches!(connect(&key).err().unwrap(), Error::Refused(Denial::Busy)));
    exporter.grant(2, SECRET, Regions::All);
    assert!(ShmConnector::new().connect(&key, 2, &SECRET, memory()).is_ok(), "there is room for others");
    drop(peers);
}

/// A listener that is not an exporter, and its address.
fn listen() -> (Listener, Address) {
    let listener = Listener::bind(&Place::Abstract, Admits::Us).unwrap();
    let address = listener.address().clone();
    (listener, address)
}

/// Answers one reader as an exporter without the secret would, and passes `memory`.
fn impostor(listener: Listener, memory: Arc<Memory>, proof: [u8; 32]) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let reader = loop {
            match listener.accept().unwrap() {
                Some(reader) => break reader,
                None => thread::sleep(Duration::from_millis(1)),
            }
        };
        receive(&reader).unwrap();
        local::send(&reader, &Shm::challenge(&[0; 32]), None).unwrap();
        receive(&reader).unwrap();
        local::send(&reader, &Shm::welcome(&SIZE, &proof), Some(memory.as_fd())).unwrap();
    })
}

#[test]
fn memory_of_an_impostor_is_not_taken() {
    let (listener, address) = listen();
    let key = super::region_key(ID, SIZE, &BootId::of_this_host().unwrap(), None, &address).unwrap();
    let impostor = impostor(listener, memory(), [0; 32]);
    let refused = connect(&key).err().unwrap();
    assert!(matches!(refused, Error::Impostor), "{refused}");
    impostor.join().unwrap();
}

#[test]
fn another_version_is_named() {
    let (listener, address) = listen();
    let key = super::region_key(ID, SIZE, &BootId::of_this_host().unwrap(), None, &address).unwrap();
    let newer = thread::spawn(move || {
        let reader = loop {
            match listener.accept().unwrap() {
                Some(reader) => break reader,
                None => thread::sleep(Duration::from_millis(1)),
            }
        };
        receive(&reader).unwrap();
        let mut challenge = Shm::challenge(&[0; 32]);
        challenge[2..4].copy_from_slice(&(VERSION + 1).to_le_bytes());
        local::send(&reader, &challenge, None).unwrap();
    });
    let refused = connect(&key).err().unwrap();
    assert!(matches!(refused, Error::Version { theirs: 2, ours: 1, .. }), "{refused}");
    newer.join().unwrap();
}

#[test]
fn a_source_that_accepts_and_says_nothing_is_given_up() {
    let (_listener, address) = listen();
    let key = super::region_key(ID, SIZE, &BootId::of_this_host().unwrap(), None, &address).unwrap();
    let connector = ShmConnector::with_timeout(Duration::from_millis(50));
    let given_up = connector.connect(&key, 1, &SECRET, memory()).err().unwrap();
    assert!(matches!(given_up, Error::TimedOut { .. }), "{given_up}");
}

#[test]
fn the_socket_of_a_folder_goes_with_its_exporter() {
    let folder = std::env::temp_dir();
    let (exporter, _memory) = exporter(ShmOptions { place: Place::Folder(folder.clone()), ..ShmOptions::default() });
    let key = exporter.key(ID).unwrap();
    let Address::File(path) = super::address_in(&key, &BootId::of_this_host().unwrap()).unwrap() else {
        panic!("no file")
    };
    let path = folder.join(std::str::from_utf8(&path).unwrap());
    assert!(path.exists());
    drop(exporter);
    assert!(!path.exists());
}

#[test]
fn a_folder_that_does_not_exist_is_an_error_that_says_what_was_wanted() {
    let place = Place::Folder("/nowhere/at/all".into());
    let error = ShmExporter::bind(ShmOptions { place, ..ShmOptions::default() }).err().unwrap();
    assert!(error.to_string().starts_with("binding a local socket"), "{error}");
}

#[test]
#[ignore = "long: make test-all"]
fn a_last_packet_comes_before_the_end_however_close_the_two_are() {
    let (giving, taken) = std::sync::mpsc::sync_channel(0);
    let giver = std::thread::spawn(move || {
        for socket in taken {
            local::send(&socket, b"last", None).unwrap();
        }
    });
    let begun = Instant::now();
    for round in 0..ROUNDS_OF_ENDS {
        let (one, other) = local_pair();
        giving.send(other).unwrap();
        let packet = loop {
            match local::receive(&one) {
                Err(rustix::io::Errno::AGAIN) => assert!(begun.elapsed() < Duration::from_secs(60)),
                received => break received.unwrap(),
            }
        };
        assert_eq!(packet.bytes(), b"last", "round {round}");
        while local::receive(&one).is_err() {}
    }
    drop(giving);
    giver.join().unwrap();
}

/// Enough rounds that mistaking the end for the whole, which happens once in a few thousand, would be noticed.
const ROUNDS_OF_ENDS: u32 = 20_000;

fn local_pair() -> (OwnedFd, OwnedFd) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

#[test]
fn options_out_of_range_are_refused() {
    for options in [
        ShmOptions { connections: 0, ..ShmOptions::default() },
        ShmOptions { connections: MAX_CONNECTIONS + 1, ..ShmOptions::default() },
        ShmOptions { handshake_timeout: Duration::ZERO, ..ShmOptions::default() },
    ] {
        assert!(matches!(ShmExporter::bind(options), Err(Error::Misuse(_))));
    }
}

/// A TCP connection whose last `close` takes [`LINGER`]: it waits for bytes that its peer does not take.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut full = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let silent = listener.accept().unwrap().0;
    full.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut full, &[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&full, Some(LINGER)).unwrap();
    full.set_nonblocking(false).unwrap();
    (full.into(), silent)
}

/// Long enough that an exporter that waits for it is noticed.
const LINGER: Duration = Duration::from_secs(60);

/// Longer than anything here takes on a busy machine, and much shorter than what must not be waited for.
const LONG: Duration = Duration::from_secs(20);

/// An exporter whose peers can attach descriptors, as before Linux 6.16.
fn exporter_without_the_option() -> (ShmExporter, Arc<Memory>) {
    let options = ShmOptions::default();
    let listener = Listener::bind(&options.place, Admits::Us).unwrap();
    let _ = listener.set_pass_rights(true);
    let exporter = ShmExporter::over(listener, &options).unwrap();
    let memory = memory();
    exporter.export(ID, memory.clone()).unwrap();
    exporter.grant(1, SECRET, Regions::All);
    (exporter, memory)
}

#[test]
fn a_lingering_descriptor_delays_no_reader_and_no_owner() {
    let (exporter, memory) = exporter_without_the_option();
    let mut strangers = Vec::new();
    // In a packet that is received, and in one that is still queued when the connection is closed.
    for packets in [1, 2] {
        let (full, silent) = lingering();
        let connection = connect_raw(&exporter);
        local::send(&connection, b"not a hello", Some(full.as_fd())).unwrap();
        for _ in 1..packets {
            // Fails if the exporter has closed the connection already.
            let _ = local::send(&connection, b"not a hello", Some(full.as_fd()));
        }
        // The exporter's copy is now the last one, unless it was faster.
        drop(full);
        strangers.push((connection, silent));
    }
    // The exporter receives and closes in this time.
    thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    let another = RegionId { generation: 2, region: 1 };
    exporter.export(another, memory).unwrap();
    exporter.grant(2, SECRET, Regions::All);
    exporter.withdraw(2);
    exporter.revoke(another);
    connect(&exporter.key(ID).unwrap()).unwrap();
    drop(exporter);
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
}

#[test]
fn a_descriptor_of_a_reader_is_refused_where_the_system_can() {
    let (exporter, memory) = exporter(ShmOptions::default());
    match local::send(connect_raw(&exporter), b"x", Some(memory.as_fd())) {
        Err(refused) => assert_eq!(refused, rustix::io::Errno::PERM),
        Ok(()) => println!("Linux before 6.16 cannot refuse descriptors"),
    }
}

#[test]
fn silent_connections_leave_room_for_readers() {
    let (exporter, _memory) = exporter(ShmOptions { handshake_timeout: Duration::from_secs(60), ..Default::default() });
    let silent: Vec<_> = (0..300).map(|_| connect_raw(&exporter)).collect();
    ShmConnector::with_timeout(LONG).connect(&exporter.key(ID).unwrap(), 1, &SECRET, memory()).unwrap();
    drop(silent);
}

/// What a process of another user receives after a valid hello to this socket. Only root can start one.
fn as_another_user(address: &Address) -> Option<String> {
    use std::os::unix::process::CommandExt;
    if !rustix::process::geteuid().is_root() {
        println!("not root: cannot act as another user");
        return None;
    }
    let hello = Shm::hello(&Hello { lane: 0, session: 1, id: ID, nonce: [0; 32] });
    let script = format!(
        "import socket\n\
         s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
         s.settimeout(10)\n\
         try:\n\
         \ts.connect({:?}.replace('@', '\\0', 1))\n\
         \ts.send(bytes({hello:?}))\n\
         \tprint(len(s.recv(128)))\n\
         except OSError as error:\n\
         \tprint(type(error).__name__)\n",
        address.name()
    );
    let mut stranger = std::process::Command::new("python3");
    stranger.args(["-c", &script]).uid(65534).gid(65534).current_dir("/");
    Some(String::from_utf8(stranger.output().unwrap().stdout).unwrap().trim().to_owned())
}

#[test]
fn a_process_of_another_user_is_not_even_answered() {
    for place in [Place::Private, Place::Abstract] {
        let (exporter, _memory) = exporter(ShmOptions { place: place.clone(), ..ShmOptions::default() });
        let here = BootId::of_this_host().unwrap();
        let Some(answer) = as_another_user(&super::address_in(&exporter.key(ID).unwrap(), &here).unwrap()) else {
            return;
        };
        let expected: &[&str] = match place {
            Place::Abstract => &["0", "BrokenPipeError", "ConnectionResetError"],
            _ => &["PermissionError"],
        };
        assert!(expected.contains(&answer.as_str()), "{place:?}: {answer}");
    }
}

#[test]
fn the_default_folder_and_socket_are_closed_to_other_users() {
    use std::os::unix::{ffi::OsStrExt, fs::PermissionsExt};
    let (exporter, _memory) = exporter(ShmOptions::default());
    let here = BootId::of_this_host().unwrap();
    let Address::File(path) = super::address_in(&exporter.key(ID).unwrap(), &here).unwrap() else { panic!("no file") };
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(&path)).to_owned();
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path) & 0o007, 0);
    assert_eq!(mode(path.parent().unwrap()) & 0o002, 0);
    drop(exporter);
    assert!(!path.exists());
}
