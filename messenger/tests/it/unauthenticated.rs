//! Peers that violate the protocol, and peers without the token.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use remora_messenger::{Address, Key, Keyring, Options, Policy, Token};

use crate::kit::*;

fn socket(address: &Address) -> TcpStream {
    let Address::Tcp(address) = address else { panic!("{address}") };
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
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
    let with = |token: &[u8]| {
        let keys = Keyring::only(Arc::new(Token::new(token).unwrap()));
        Options { keys: Some(Arc::new(keys)), ..Options::default() }
    };
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

#[test]
fn every_token_of_a_keyring_is_accepted_until_it_is_replaced_and_sessions_go_on() {
    let key = |text: &[u8], mark| Key::new(Arc::new(Token::new(text).unwrap()), mark);
    let (old, new) = (key(b"the former token", 1), key(b"the token to come", 2));
    let keyring = Arc::new(Keyring::new(vec![old.clone(), new.clone()]).unwrap());
    let options = Options { keys: Some(keyring.clone()), ..Options::default() };
    let server = end_with(Policy::stateless_server(), &options, Recorder { echoes: true, ..Recorder::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let with = |key: &Key| {
        let keys = Keyring::new(vec![key.clone()]).unwrap();
        let options = Options { keys: Some(Arc::new(keys)), ..Options::default() };
        end_with(Policy::lossy_client(), &options, Recorder::default())
    };
    let (former, present) = (with(&old), with(&new));
    let session = former.messenger.connect(&address);
    session.send(numbered(1)).unwrap();
    until("an answer to the former token", || former.recorder.received() == [1]);
    present.messenger.connect(&address).send(numbered(2)).unwrap();
    until("an answer to the new token", || present.recorder.received() == [2]);

    keyring.replace(vec![new]).unwrap();
    session.send(numbered(3)).unwrap();
    until("an answer in the session that was open before", || former.recorder.received() == [1, 3]);
    let late = with(&old);
    late.messenger.connect(&address).send(numbered(4)).unwrap();
    until("the end", || matches!(late.recorder.callbacks()[..], [Callback::Reset { continues: false, .. }]));
    assert_eq!(server.recorder.received(), [1, 2, 3]);
    assert!(keyring.replace(Vec::new()).is_err());
}
