//! Peers that violate the protocol, and peers without the token.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use remora_messenger::{Address, Options, Policy, Token};

use crate::kit::*;

fn socket(address: &Address) -> TcpStream {
    let Address::Tcp(address) = address else { panic!("{address}") };
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

#[test]
fn invalid_bytes_end_their_connection_and_others_are_served_meanwhile() {
    let server = end(Policy::stateless_server(), Recorder { echoes: true, ..Recorder::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    for nonsense in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\0\0\0\0", b"REMORA\r\nxxxxxxxxxxxxxxxxxxxxxxxx"] {
        let mut stream = socket(&address);
        stream.write_all(nonsense).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer); // a reset is an end too
        assert!(answer.len() < 200);
    }
    let client = end(Policy::lossy_client(), Recorder::default());
    client.messenger.connect(&address).send(numbered(7)).unwrap();
    until("an answer", || client.recorder.received() == [7]);
}

#[test]
fn a_silent_connection_is_closed_after_the_limit() {
    let mut policy = Policy::stateless_server();
    policy.opening_limit = Duration::from_millis(50);
    let server = end(policy, Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let mut silent = socket(&address);
    assert_eq!(silent.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn unauthenticated_connections_beyond_the_limit_are_dropped() {
    let options = Options { max_unauthenticated: 3, ..Options::default() };
    let server = end_with(Policy::stateless_server(), &options, Recorder::default());
    let address = server.messenger.listen(&anywhere()).unwrap();
    let _silent: Vec<_> = (0..3).map(|_| socket(&address)).collect();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(socket(&address).read(&mut [0; 8]).unwrap_or(0), 0);
}

#[test]
fn only_a_peer_with_the_token_is_accepted_and_its_frames_are_sealed() {
    let with = |token: &[u8]| Options { token: Some(Arc::new(Token::new(token).unwrap())), ..Options::default() };
    let server = end_with(
        Policy::stateless_server(),
        &with(b"0123456789abcdef"),
        Recorder { echoes: true, ..Recorder::default() },
    );
    let address = server.messenger.listen(&anywhere()).unwrap();
    let friend = end_with(Policy::lossy_client(), &with(b"0123456789abcdef"), Recorder::default());
    friend.messenger.connect(&address).send(numbered(1)).unwrap();
    until("an answer", || friend.recorder.received() == [1]);
    for options in [with(b"another token 16"), Options::default()] {
        let stranger = end_with(Policy::lossy_client(), &options, Recorder::default());
        stranger.messenger.connect(&address).send(numbered(2)).unwrap();
        until("the end", || matches!(stranger.recorder.callbacks()[..], [Callback::Reset { continues: false, .. }]));
    }
    assert_eq!(server.recorder.received(), [1]);
}

#[test]
fn messages_arrive_without_checksums_if_both_ends_want_that() {
    let bare = Options { summed: false, ..Options::default() };
    for (ours, theirs) in [(&bare, &bare), (&bare, &Options::default())] {
        let server = end_with(Policy::stateless_server(), ours, Recorder { echoes: true, ..Recorder::default() });
        let address = server.messenger.listen(&anywhere()).unwrap();
        let client = end_with(Policy::lossy_client(), theirs, Recorder::default());
        client.messenger.connect(&address).send(numbered(1)).unwrap();
        until("an answer", || client.recorder.received() == [1]);
    }
}
