//! The two ends against each other, and against a peer in between that changes, repeats or invents bytes.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use remora_wire::derive;

use super::*;

const LIMIT: Duration = Duration::from_secs(10);

fn token(text: &str) -> Token {
    Token::new(text.as_bytes()).unwrap()
}

fn good() -> Token {
    token("the token of both ends")
}

fn opening(nonce: u8) -> Opening {
    Opening { versions: Versions::only(2), features: 0b0110, nonce: [nonce; 32] }
}

fn client(token: &Token) -> Handshake<&Token> {
    Handshake::caller(vec![token], opening(1), Instant::now(), LIMIT)
}

fn server(token: &Token) -> Handshake<&Token> {
    Handshake::called(vec![token], opening(2), 77, Instant::now(), LIMIT)
}

/// The outcome at both ends, and everything that each of them sent.
struct Met {
    client: Result<Option<Established>, HandshakeError>,
    server: Result<Option<Established>, HandshakeError>,
    from_client: Vec<u8>,
    from_server: Vec<u8>,
}

/// A change of one byte in a direction.
#[derive(Debug, Clone, Copy)]
struct Tamper {
    sender: Role,
    at: usize,
    change: u8,
}

/// Runs both ends until neither has anything to send. One byte may be changed on its way.
fn meet(mut client: Handshake<&Token>, mut server: Handshake<&Token>, tamper: Option<Tamper>) -> Met {
    let (mut from_client, mut from_server) = (Vec::new(), Vec::new());
    let (mut client_ok, mut server_ok) = (Ok(()), Ok(()));
    loop {
        let to_server = carry(&mut client, Role::Caller, &mut from_client, tamper);
        if server_ok.is_ok() {
            server_ok = server.handle_input(&to_server);
        }
        let to_client = carry(&mut server, Role::Called, &mut from_server, tamper);
        if client_ok.is_ok() {
            client_ok = client.handle_input(&to_client);
        }
        if to_server.is_empty() && to_client.is_empty() {
            break;
        }
    }
    Met {
        client: client_ok.map(|()| client.poll_established()),
        server: server_ok.map(|()| server.poll_established()),
        from_client,
        from_server,
    }
}

fn carry(end: &mut Handshake<&Token>, sender: Role, sent: &mut Vec<u8>, tamper: Option<Tamper>) -> Vec<u8> {
    let mut bytes = end.take_output();
    let before = sent.len();
    sent.extend_from_slice(&bytes);
    if let Some(tamper) = tamper.filter(|tamper| tamper.sender == sender) {
        let here = tamper.at.checked_sub(before).and_then(|at| bytes.get_mut(at));
        here.into_iter().for_each(|byte| *byte ^= tamper.change);
    }
    bytes
}

fn established() -> (Established, Established) {
    let token = good();
    let met = meet(client(&token), server(&token), None);
    (met.client.unwrap().unwrap(), met.server.unwrap().unwrap())
}

#[test]
fn both_ends_agree_on_the_same_session() {
    let (client, server) = established();
    assert_eq!((client.role(), server.role()), (Role::Caller, Role::Called));
    assert_eq!((client.session(), server.session()), (77, 77));
    assert_eq!((client.version(), server.version()), (2, 2));
    assert_eq!(client.key(), server.key());
}

#[test]
fn features_are_those_that_both_have() {
    let token = good();
    let mine = Opening { features: 0b0011, ..opening(1) };
    let client = Handshake::caller(vec![&token], mine, Instant::now(), LIMIT);
    let met = meet(client, server(&token), None);
    assert_eq!(met.client.unwrap().unwrap().features(), 0b0010);
    assert_eq!(met.server.unwrap().unwrap().features(), 0b0010);
}

#[test]
fn nothing_of_the_token_or_the_key_crosses_the_wire() {
    let token = good();
    let met = meet(client(&token), server(&token), None);
    let key = met.client.unwrap().unwrap().key();
    for wire in [met.from_client, met.from_server] {
        for secret in [token.bytes(), &key] {
            assert!(!wire.windows(8).any(|seen| secret.windows(8).any(|secret| secret == seen)));
        }
    }
}

#[test]
fn a_wrong_token_is_detected_by_the_called_end_first_which_proves_nothing_itself() {
    let (mine, yours) = (token("the token of one end"), token("the token of the other"));
    let met = meet(client(&mine), server(&yours), None);
    assert!(matches!(met.server, Err(HandshakeError::WrongToken { said_by_peer: false })));
    assert!(matches!(met.client, Err(HandshakeError::WrongToken { said_by_peer: true })));
    let challenge_and_refusal = MAGIC.len() + (PREAMBLE_BYTES + Challenge::MAX_BYTES + 4) + (PREAMBLE_BYTES + 5 + 4);
    assert_eq!(met.from_server.len(), challenge_and_refusal);
}

#[test]
fn a_called_end_without_the_token_is_detected_by_the_caller() {
    let mine = good();
    let mut end = client(&mine);
    end.take_output();
    let mut impostor = MAGIC.to_vec();
    let challenge = Challenge { version: 2, oldest: 2, newest: 2, features: 0, nonce: [9; 32], session: 5 };
    Frame::plain(CHALLENGE, payload(|out| Challenge::put(&challenge, out))).encode(&mut impostor);
    Frame::plain(PROOF, vec![0; 32]).encode(&mut impostor);
    let fault = end.handle_input(&impostor).unwrap_err();
    assert!(matches!(fault, HandshakeError::WrongToken { said_by_peer: false }), "{fault}");
}

#[test]
fn a_proof_sent_back_to_its_maker_is_worthless() {
    let mine = good();
    let mut end = client(&mine);
    end.take_output();
    let mut mirror = MAGIC.to_vec();
    let challenge = Challenge { version: 2, oldest: 2, newest: 2, features: 0, nonce: [1; 32], session: 5 };
    Frame::plain(CHALLENGE, payload(|out| Challenge::put(&challenge, out))).encode(&mut mirror);
    end.handle_input(&mirror).unwrap();
    let proof = end.take_output();
    assert!(matches!(end.handle_input(&proof), Err(HandshakeError::WrongToken { .. })));
    assert!(end.poll_established().is_none());
}

#[test]
fn a_called_end_accepts_each_of_its_tokens_and_knows_which_one_was_proved() {
    let tokens = [good(), token("another token of it")];
    let two = || Handshake::called(tokens.iter().collect(), opening(2), 77, Instant::now(), LIMIT);
    let mut keys = Vec::new();
    for (index, held) in tokens.iter().enumerate() {
        let mut called = two();
        let mut caller = client(held);
        called.handle_input(&caller.take_output()).unwrap();
        caller.handle_input(&called.take_output()).unwrap();
        called.handle_input(&caller.take_output()).unwrap();
        caller.handle_input(&called.take_output()).unwrap();
        assert!(std::ptr::eq(*called.proved(), &raw const tokens[index]));
        let [at_caller, at_called] = [&mut caller, &mut called].map(|end| end.poll_established().unwrap().key());
        assert_eq!(at_caller, at_called);
        keys.push(at_caller);
    }
    assert_ne!(keys[0], keys[1]);
    let unknown = token("a token that the server does not hold");
    assert!(matches!(meet(client(&unknown), two(), None).server, Err(HandshakeError::WrongToken { .. })));
    // A caller with two tokens proves the first one, and takes no proof of the second one.
    let mut caller = Handshake::caller(tokens.iter().collect(), opening(1), Instant::now(), LIMIT);
    let mut other = server(&tokens[1]);
    other.handle_input(&caller.take_output()).unwrap();
    caller.handle_input(&other.take_output()).unwrap();
    assert!(matches!(other.handle_input(&caller.take_output()), Err(HandshakeError::WrongToken { .. })));
}

#[test]
fn ends_of_one_channel_agree_and_ends_of_two_do_not() {
    let token = good();
    let bound = |mut end: Handshake<&'static Token>, channel: Option<u8>| {
        channel.inspect(|byte| end.bind(&[*byte; BINDING_BYTES]));
        end
    };
    let token: &'static Token = Box::leak(Box::new(token));
    let met = |at_client, at_server| meet(bound(client(token), at_client), bound(server(token), at_server), None);
    let same = met(Some(1), Some(1));
    let [key, other] = [same.client, same.server].map(|end| end.unwrap().unwrap().key());
    assert_eq!(key, other);
    assert_ne!(met(Some(2), Some(2)).client.unwrap().unwrap().key(), key);
    for (at_client, at_server) in [(Some(1), Some(2)), (Some(1), None), (None, Some(1))] {
        let Met { client, server, .. } = met(at_client, at_server);
        assert!(matches!(server, Err(HandshakeError::WrongToken { said_by_peer: false })));
        assert!(matches!(client, Err(HandshakeError::WrongToken { said_by_peer: true })));
    }
    // An impostor that answers with the proof of its own channel is no server either.
    let (mut caller, mut called) = (bound(client(token), Some(1)), bound(server(token), Some(2)));
    let mut second = bound(client(token), Some(2));
    called.handle_input(&second.take_output()).unwrap();
    caller.take_output();
    let challenge = called.take_output();
    second.handle_input(&challenge).unwrap();
    called.handle_input(&second.take_output()).unwrap();
    caller.handle_input(&challenge).unwrap();
    let error = caller.handle_input(&called.take_output()).unwrap_err();
    assert!(matches!(error, HandshakeError::WrongToken { said_by_peer: false }), "{error}");
}

#[test]
fn a_recorded_client_does_not_get_in_again() {
    let token = good();
    let recorded = meet(client(&token), server(&token), None).from_client;
    let later = Opening { nonce: [3; 32], ..opening(2) };
    let mut server = Handshake::called(vec![&token], later, 78, Instant::now(), LIMIT);
    let fault = server.handle_input(&recorded).unwrap_err();
    assert!(matches!(fault, HandshakeError::WrongToken { .. }), "{fault}");
}

#[test]
fn every_changed_byte_of_the_handshake_is_refused() {
    let token = good();
    let met = meet(client(&token), server(&token), None);
    for (sender, length) in [(Role::Caller, met.from_client.len()), (Role::Called, met.from_server.len())] {
        for at in 0..length {
            for change in [0x01, 0x80, 0xff] {
                let tamper = Tamper { sender, at, change };
                let met = meet(client(&token), server(&token), Some(tamper));
                refused(&met, tamper);
            }
        }
    }
}

/// The end that received the changed byte never completes. The other end completes only if the change came after
/// everything that it had to receive.
fn refused(met: &Met, tamper: Tamper) {
    let (lied_to, other) = match tamper.sender {
        Role::Caller => (&met.server, &met.client),
        Role::Called => (&met.client, &met.server),
    };
    let last_proof_at = MAGIC.len() + PREAMBLE_BYTES + Challenge::MAX_BYTES + 4;
    let too_late = tamper.sender == Role::Called && tamper.at >= last_proof_at;
    assert!(matches!(lied_to, Err(_) | Ok(None)), "{tamper:?}: {lied_to:?}");
    assert_eq!(matches!(other, Ok(Some(_))), too_late, "{tamper:?}: {other:?}");
}

#[test]
fn a_change_that_mends_the_checksums_is_refused_too() {
    let token = good();
    for field_byte in 0..Hello::MAX_BYTES {
        let mut end = client(&token);
        let mut bytes = end.take_output();
        let payload_at = MAGIC.len() + PREAMBLE_BYTES;
        bytes[payload_at + field_byte] ^= 1;
        let checksum = remora_memory::crc::crc32c(&bytes[payload_at..payload_at + Hello::MAX_BYTES]).to_le_bytes();
        bytes[payload_at + Hello::MAX_BYTES..].copy_from_slice(&checksum);
        let mut other = server(&token);
        let outcome = other.handle_input(&bytes).and_then(|()| {
            end.handle_input(&other.take_output())?;
            other.handle_input(&end.take_output())
        });
        assert!(outcome.is_err(), "byte {field_byte} of the hello");
        assert!(other.poll_established().is_none());
    }
}

#[test]
fn a_handshake_cut_short_anywhere_never_stands() {
    let token = good();
    let met = meet(client(&token), server(&token), None);
    for length in 0..met.from_client.len() {
        let mut end = server(&token);
        end.handle_input(&met.from_client[..length]).unwrap();
        assert!(end.poll_established().is_none(), "{length} bytes");
    }
    for length in 0..met.from_server.len() {
        let mut end = client(&token);
        end.handle_input(&met.from_server[..length]).unwrap();
        assert!(end.poll_established().is_none(), "{length} bytes");
    }
}

#[test]
fn a_handshake_in_single_bytes_stands() {
    let token = good();
    let met = meet(client(&token), server(&token), None);
    let mut end = server(&token);
    met.from_client.iter().for_each(|byte| end.handle_input(&[*byte]).unwrap());
    assert_eq!(end.poll_established().unwrap().key(), met.server.unwrap().unwrap().key());
}

#[test]
fn bytes_right_after_the_last_proof_are_not_lost() {
    let token = good();
    let (mut near, mut far) = (client(&token), server(&token));
    far.handle_input(&near.take_output()).unwrap();
    near.handle_input(&far.take_output()).unwrap();
    far.handle_input(&near.take_output()).unwrap();
    let mut bytes = far.take_output();
    bytes.extend(b"at once");
    near.handle_input(&bytes).unwrap();
    assert_eq!(near.poll_established().unwrap().take_rest(), b"at once");
}

#[test]
fn the_newest_common_version_is_chosen_and_no_common_one_is_an_error_at_both_ends() {
    let versions = |oldest, newest| Versions { oldest, newest };
    assert_eq!(versions(1, 3).common(versions(2, 5)), Some(3));
    assert_eq!(versions(1, 1).common(versions(2, 5)), None);
    let token = good();
    let newer = Opening { versions: versions(3, 4), ..opening(1) };
    let met = meet(Handshake::caller(vec![&token], newer, Instant::now(), LIMIT), server(&token), None);
    let (client, server) = (met.client.unwrap_err(), met.server.unwrap_err());
    assert!(client.to_string().contains("speaks version 2, this end 3 to 4"), "{client}");
    assert!(server.to_string().contains("speaks version 3 to 4, this end 2"), "{server}");
}

#[test]
fn a_called_end_that_chooses_an_older_version_than_it_must_is_rejected() {
    let mine = good();
    let newer = Opening { versions: Versions { oldest: 1, newest: 2 }, ..opening(1) };
    let mut end = Handshake::caller(vec![&mine], newer, Instant::now(), LIMIT);
    let mut bytes = MAGIC.to_vec();
    let challenge = Challenge { version: 1, oldest: 1, newest: 2, features: 0, nonce: [9; 32], session: 5 };
    Frame::plain(CHALLENGE, payload(|out| Challenge::put(&challenge, out))).encode(&mut bytes);
    let fault = end.handle_input(&bytes).unwrap_err();
    assert!(matches!(fault, HandshakeError::Frame(FrameError::Field { .. })), "{fault}");
}

#[test]
fn a_hello_of_a_later_version_may_have_more_fields() {
    let token = good();
    let mut end = server(&token);
    let hello = Hello { oldest: 1, newest: 9, features: 0, nonce: [9; 32] };
    let mut fields = payload(|out| Hello::put(&hello, out));
    fields.extend_from_slice(b"something new");
    let mut bytes = MAGIC.to_vec();
    Frame::plain(HELLO, fields).encode(&mut bytes);
    end.handle_input(&bytes).unwrap();
    assert!(end.take_output().starts_with(&MAGIC));
}

#[test]
fn garbage_after_the_magic_gets_no_answer() {
    let token = good();
    let frame_of = |tag, length| {
        let mut bytes = MAGIC.to_vec();
        Frame::plain(tag, vec![0; length]).encode(&mut bytes);
        bytes
    };
    for bytes in [
        [&MAGIC[..], b"garbage"].concat(),
        frame_of(HELLO, 5),
        frame_of(HELLO, MAX_HANDSHAKE_PAYLOAD_BYTES as usize + 1),
        frame_of(PROOF, 32),
        frame_of(REFUSE, 5),
        frame_of(0x20, 0),
    ] {
        let mut end = server(&token);
        end.handle_input(&bytes).unwrap_err();
        assert_eq!(end.take_output(), b"", "{}", bytes.escape_ascii());
    }
}

#[test]
fn a_refusal_of_the_owner_arrives_with_its_code_and_its_text() {
    let token = good();
    for (text, shown) in [("", ""), ("full until noon", "full until noon"), ("\x1b[2J", "?[2J")] {
        let mut end = client(&token);
        let error = end.handle_input(&refuse(FIRST_OWNER_REFUSAL, text, Versions::only(2))).unwrap_err();
        assert_eq!(error, HandshakeError::Refused { code: FIRST_OWNER_REFUSAL, text: shown.to_owned() });
    }
    let longest = refuse(9, &"é".repeat(500), Versions::only(2));
    assert!(client(&token).handle_input(&longest).is_err_and(|error| matches!(error, HandshakeError::Refused { .. })));
}

#[test]
fn a_handshake_has_a_deadline_that_input_does_not_move() {
    let token = good();
    let begun = Instant::now();
    let mut end = Handshake::called(vec![&token], opening(2), 77, begun, LIMIT);
    assert_eq!(end.deadline(), begun + LIMIT);
    end.handle_input(&MAGIC).unwrap();
    assert_eq!(end.deadline(), begun + LIMIT);
    end.handle_timeout(begun + LIMIT - Duration::from_millis(1)).unwrap();
    let fault = end.handle_timeout(begun + LIMIT).unwrap_err();
    assert!(matches!(fault, HandshakeError::TimedOut { limit: LIMIT, .. }), "{fault}");
}

/// A fixed vector of the handshake, so that no change can go unnoticed by older peers. The numbers come from an
/// independent implementation (Python's hmac and hashlib, from the description alone).
#[test]
fn the_session_key_of_fixed_nonces_is_the_one_written_down() {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let (client, _) = established();
    assert_eq!(hex(&client.key()), VECTOR_SESSION_KEY);
    assert_eq!(hex(&derive(&client.key(), b"label")), VECTOR_DERIVED_KEY);
}

proptest! {
    #[test]
    fn any_bytes_leave_both_ends_unmoved(bytes in proptest::collection::vec(any::<u8>(), 0..800), magic: bool) {
        let start: &[u8] = if magic { &MAGIC } else { b"" };
        crate::fuzzing::handshake(&[start, &bytes].concat());
    }
}

const VECTOR_SESSION_KEY: &str = "f9459bf221f14640fe8186e306789fcee00ef217b03bcbbd59f766d1e1e001cf";
const VECTOR_DERIVED_KEY: &str = "df4b940b01e4b86dece43206a86beb739fc1d3e93213d7d2d5eae85a887ccf3a";

#[test]
fn known_protocols_are_named() {
    for (bytes, what) in [
        (&b"HTTP/1.1 400 Bad Request\r\n"[..], "HTTP"),
        (b"GET / HTTP/1.1\r\n", "HTTP"),
        (b"-ERR unknown command 'REMORA'\r\n", "Redis or Valkey server"),
        (b"-NOAUTH Authentication required.\r\n", "password"),
        (b"*1\r\n$4\r\nPING\r\n", "client or replica of Redis"),
        (b"\x16\x03\x01\x02\x00", "TLS"),
        (b"SSH-2.0-OpenSSH_9.2", "SSH"),
    ] {
        assert!(looks_like(bytes).contains(what), "{}", looks_like(bytes));
    }
}

#[test]
fn unknown_bytes_are_shown_but_cannot_play_tricks_on_a_terminal() {
    assert_eq!(looks_like(b"\x1b[2Jhi"), "began with \"\\x1b[2Jhi\"");
    assert!(looks_like(&[0xff; 1000]).len() < 100);
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut out = Vec::new();
    frame.encode(&mut out);
    out
}

fn frames() -> impl Strategy<Value = Frame> {
    let payload = proptest::collection::vec(any::<u8>(), 0..300);
    (any::<u8>(), payload).prop_map(|(tag, payload)| Frame { tag, payload })
}

proptest! {
    #[test]
    fn frames_survive_any_cutting_of_their_bytes(
        sent in proptest::collection::vec(frames(), 0..8),
        piece in 1usize..50,
    ) {
        let bytes: Vec<u8> = sent.iter().flat_map(encoded).collect();
        let mut decoder = Decoder::new(300);
        let mut received = Vec::new();
        for piece in bytes.chunks(piece) {
            decoder.feed(piece);
            while let Some(frame) = decoder.next_frame().unwrap() {
                received.push(frame);
            }
        }
        prop_assert_eq!(received, sent);
        prop_assert_eq!(decoder.buffered(), 0);
    }

    #[test]
    fn a_changed_byte_is_never_taken_for_the_frame(frame in frames(), at in any::<prop::sample::Index>(), change in 1u8..) {
        let mut bytes = encoded(&frame);
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        let mut decoder = Decoder::new(300);
        decoder.feed(&bytes);
        prop_assert!(decoder.next_frame().is_err(), "a damaged frame is taken, or waited for");
    }

    #[test]
    fn any_bytes_are_frames_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        crate::fuzzing::frames(&bytes);
    }
}

#[test]
fn a_frame_cut_short_anywhere_is_waited_for() {
    let frame = Frame { tag: 7, payload: b"content".to_vec() };
    let bytes = encoded(&frame);
    for length in 0..bytes.len() {
        let mut decoder = Decoder::new(300);
        decoder.feed(&bytes[..length]);
        assert_eq!(decoder.next_frame().unwrap(), None, "{length} bytes");
        decoder.feed(&bytes[length..]);
        assert_eq!(decoder.next_frame().unwrap().as_ref(), Some(&frame));
    }
}

#[test]
fn an_oversize_frame_is_refused_by_its_preamble_alone() {
    let bytes = encoded(&Frame::plain(1, vec![0; 11]));
    let mut decoder = Decoder::new(10);
    decoder.feed(&bytes[..PREAMBLE_BYTES]);
    let found = decoder.next_frame().unwrap_err();
    assert_eq!(found, FrameError::TooLong { length: 11, limit: 10 });
}

#[test]
fn unknown_flags_are_refused() {
    let mut bytes = encoded(&Frame::plain(1, Vec::new()));
    bytes[3] = 1;
    let checksum = remora_memory::crc::crc32c(&bytes[..8]).to_le_bytes();
    bytes[8..12].copy_from_slice(&checksum);
    let mut decoder = Decoder::new(10);
    decoder.feed(&bytes);
    assert_eq!(decoder.next_frame().unwrap_err(), FrameError::Flags { flags: 1 });
}

#[test]
fn the_first_wrong_byte_is_enough() {
    let mut decoder = Decoder::new(10);
    decoder.feed(b"H");
    assert_eq!(decoder.next_frame().unwrap_err(), FrameError::Magic);
}

#[test]
fn memory_follows_what_arrived_not_what_was_announced() {
    const LONG_BYTES: u32 = 512 * 1024;
    let bytes = encoded(&Frame::plain(1, vec![0; LONG_BYTES as usize]));
    let mut decoder = Decoder::new(LONG_BYTES);
    decoder.feed(&bytes[..100]);
    assert_eq!(decoder.next_frame().unwrap(), None);
    assert!(decoder.buffer.capacity() < 1000);
}
