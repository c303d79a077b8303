#![allow(clippy::unwrap_used)]

use super::*;
use crate::export::Geometry;
use crate::protocol::transmission_flags;

/// A client's side of the bytes.
struct Client {
    handshake: Handshake,
}

/// An answer: its kind, and its data.
type Answer = (u32, Vec<u8>);

impl Client {
    fn new(tls: Tls) -> Client {
        let first = Geometry { has_status: true, ..Geometry::of_blocks(1 << 30, 4096) };
        let export = |name: &str, geometry| Export { name: name.into(), description: "a disk".into(), geometry };
        let exports = [export("one", first), export("two", Geometry::of_blocks(8192, 1))];
        let mut client = Client { handshake: Handshake::new(exports.into(), tls) };
        assert_eq!(client.feed(&3u32.to_be_bytes()), Ok((4, Step::Next, vec![])));
        client
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Step, Vec<u8>), Error> {
        let mut out = Vec::new();
        self.handshake.receive(bytes, &mut out).map(|(consumed, step)| (consumed, step, out))
    }

    fn raw(&mut self, option: u32, data: &[u8]) -> Result<(Step, Vec<u8>), Error> {
        let bytes = bytes(option, data);
        self.feed(&bytes).map(|(consumed, step, out)| {
            assert_eq!(consumed, bytes.len());
            (step, out)
        })
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> (Step, Vec<Answer>) {
        let (step, out) = self.raw(option, data).unwrap();
        let (mut answers, mut rest) = (Vec::new(), &out[..]);
        while let Some((head, data)) = rest.split_first_chunk::<20>() {
            let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
            assert_eq!(word(8), option);
            let (data, behind) = data.split_at(word(16) as usize);
            answers.push((word(12), data.to_vec()));
            rest = behind;
        }
        (step, answers)
    }

    /// The only answer.
    fn answer(&mut self, option: u32, data: &[u8]) -> u32 {
        let (step, answers) = self.ask(option, data);
        assert_eq!((step, answers.len()), (Step::Next, 1));
        answers[0].0
    }
}

fn bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()].concat();
    [&head, data].concat()
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

/// The data of GO.
fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|what| data.extend_from_slice(&what.to_be_bytes()));
    data
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&string(query)));
    data
}

const NOTHING_MORE: Session = Session { export: 0, structured: false, allocation: false };

#[test]
fn an_export_is_chosen_by_its_name_or_without_one() {
    for (name, export) in [("one", 0), ("", 0), ("two", 1)] {
        let (step, answers) = Client::new(Tls::Off).ask(asked::GO, &go(name, &[]));
        assert_eq!(step, Step::Serve(Session { export, ..NOTHING_MORE }));
        let kinds: Vec<u32> = answers.iter().map(|answer| answer.0).collect();
        assert_eq!(kinds, [say::INFO, say::INFO, say::ACK]);
        let size = [1u64 << 30, 8192][export];
        assert_eq!(answers[0].1[..10], [&[0, 0], &size.to_be_bytes()[..]].concat());
        let minimum = [4096u32, 1][export];
        assert_eq!(answers[1].1[..6], [&[0, 3], &minimum.to_be_bytes()[..]].concat());
    }
    let mut client = Client::new(Tls::Off);
    assert_eq!(client.answer(asked::GO, &go("three", &[])), say::ERR_UNKNOWN);
    assert_eq!(client.answer(asked::INFO, &go("three", &[])), say::ERR_UNKNOWN);
    let (step, answers) = client.ask(asked::INFO, &go("one", &[info::NAME, info::DESCRIPTION, 77]));
    assert_eq!((step, answers.len()), (Step::Next, 5), "after a refusal and a description it goes on");
    assert_eq!((&answers[2].1[2..], &answers[3].1[2..]), (&b"one"[..], &b"a disk"[..]));
}

#[test]
fn the_old_way_to_choose_has_zeros_behind_it_unless_both_leave_them_out() {
    let mut client = Client::new(Tls::Off);
    let (step, out) = client.raw(asked::EXPORT_NAME, b"two").unwrap();
    assert_eq!((step, out.len()), (Step::Serve(Session { export: 1, ..NOTHING_MORE }), 10));
    let mut handshake = Handshake::new(client.handshake.exports, Tls::Off);
    let mut out = Vec::new();
    assert_eq!(handshake.receive(&1u32.to_be_bytes(), &mut out), Ok((4, Step::Next)));
    assert!(matches!(handshake.receive(&bytes(asked::EXPORT_NAME, b""), &mut out), Ok((16, Step::Serve(_)))));
    assert_eq!(out.len(), 134);
    let ended = Client::new(Tls::Off).raw(asked::EXPORT_NAME, b"th\nree");
    assert_eq!(ended, Err(Error::NoSuchExport { name: "th?ree".into() }));
}

#[test]
fn what_is_not_known_or_malformed_is_refused_and_the_client_goes_on() {
    let mut client = Client::new(Tls::Off);
    for option in [0, 4, 11, 99, u32::MAX] {
        assert_eq!(client.answer(option, b"data"), say::ERR_UNSUP);
    }
    assert_eq!(client.answer(asked::LIST, b"data"), say::ERR_INVALID);
    assert_eq!(client.answer(asked::STRUCTURED_REPLY, b"data"), say::ERR_INVALID);
    assert_eq!(client.answer(asked::STARTTLS, b""), say::ERR_POLICY);
    let whole = go("one", &[3]);
    for cut in 0..whole.len() {
        assert_eq!(client.answer(asked::GO, &whole[..cut]), say::ERR_INVALID, "{cut}");
    }
    assert_eq!(client.answer(asked::GO, &[&whole[..], b"x"].concat()), say::ERR_INVALID);
    let (step, answers) = client.ask(asked::LIST, b"");
    let data = [string("one"), b"a disk".to_vec()].concat();
    assert_eq!((step, answers.len(), &answers[0]), (Step::Next, 3, &(say::SERVER, data)));
    assert_eq!(client.ask(asked::ABORT, b""), (Step::End, vec![(say::ACK, vec![])]));
}

#[test]
fn the_status_of_blocks_is_negotiated_for_one_export() {
    let mut client = Client::new(Tls::Off);
    let (list, set) = (asked::LIST_META_CONTEXT, asked::SET_META_CONTEXT);
    let base = contexts("one", &["base:allocation"]);
    assert_eq!(client.answer(set, &base), say::ERR_INVALID, "before structured replies");
    assert_eq!(client.answer(asked::STRUCTURED_REPLY, b""), say::ACK);
    for (name, queries, is_there) in [
        ("one", &[][..], true),
        ("one", &["base:"], true),
        ("one", &["qemu:dirty", "base:allocation"], true),
        ("one", &["qemu:"], false),
        ("two", &["base:allocation"], false),
    ] {
        let (_, answers) = client.ask(list, &contexts(name, queries));
        assert_eq!(answers.len(), 1 + usize::from(is_there), "{name} {queries:?}");
    }
    assert_eq!(client.answer(set, &contexts("one", &["base:"])), say::ACK, "a part of a name chooses nothing");
    assert_eq!(client.answer(set, &contexts("three", &["base:allocation"])), say::ERR_UNKNOWN);
    for cut in 0..base.len() {
        assert_eq!(client.answer(set, &base[..cut]), say::ERR_INVALID, "{cut}");
    }
    let (_, answers) = client.ask(set, &base);
    assert_eq!(answers[0], (say::META_CONTEXT, b"\0\0\0\x01base:allocation".to_vec()));
    let (step, answers) = client.ask(asked::GO, &go("", &[]));
    assert_eq!(step, Step::Serve(Session { export: 0, structured: true, allocation: true }));
    assert_ne!(u16::from_be_bytes([answers[0].1[10], answers[0].1[11]]) & transmission_flags::SEND_DF, 0);

    // A choice for another export, and a later one that chooses nothing.
    for undoes in [contexts("one", &[]), contexts("two", &["base:allocation"]), b"x".to_vec()] {
        let mut client = Client::new(Tls::Off);
        client.ask(asked::STRUCTURED_REPLY, b"");
        client.ask(set, &base);
        client.ask(set, &undoes);
        let (step, _) = client.ask(asked::GO, &go("one", &[]));
        assert_eq!(step, Step::Serve(Session { export: 0, structured: true, allocation: false }));
    }
}

#[test]
fn nothing_is_said_before_tls_and_nothing_negotiated_before_counts_inside() {
    let mut client = Client::new(Tls::Required);
    for option in [asked::GO, asked::LIST, asked::STRUCTURED_REPLY, asked::SET_META_CONTEXT, 77] {
        assert_eq!(client.answer(option, b""), say::ERR_TLS_REQD);
    }
    assert_eq!(client.raw(asked::EXPORT_NAME, b"one"), Err(Error::NoTls));
    assert_eq!(client.answer(asked::STARTTLS, b"data"), say::ERR_INVALID);
    let injected = [bytes(asked::STARTTLS, b""), bytes(asked::STRUCTURED_REPLY, b"")].concat();
    assert_eq!(client.feed(&injected), Err(Error::BeforeTls { bytes: 16 }));
    client.handshake.structured = true; // cannot be; if it were
    assert_eq!(client.ask(asked::STARTTLS, b""), (Step::StartTls, vec![(say::ACK, vec![])]));
    client.handshake.tls_started();
    assert_eq!(client.answer(asked::STARTTLS, b""), say::ERR_INVALID);
    assert_eq!(client.ask(asked::GO, &go("one", &[])).0, Step::Serve(NOTHING_MORE));
}

#[test]
fn a_peer_that_does_not_speak_the_protocol_is_left_and_one_that_is_slow_is_not() {
    for flags in [0u32, 2, 4 | 1, u32::MAX] {
        let mut handshake = Handshake::new(Client::new(Tls::Off).handshake.exports, Tls::Off);
        assert!(matches!(handshake.receive(&flags.to_be_bytes(), &mut Vec::new()), Err(Error::NotNbd { .. })));
    }
    let mut client = Client::new(Tls::Off);
    assert!(matches!(client.feed(b"GET / HTTP/1.1\r\n\r\n"), Err(Error::NotNbd { .. })));
    let head = bytes(asked::GO, &[0; 200]);
    for cut in 0..head.len() {
        assert_eq!(client.feed(&head[..cut]), Ok((0, Step::More, vec![])), "{cut}");
    }
    let mut long = bytes(asked::LIST, b"");
    long[12..].copy_from_slice(&(MAX_OPTION_BYTES as u32 + 1).to_be_bytes());
    assert_eq!(client.feed(&long), Err(Error::TooLong { option: asked::LIST, bytes: MAX_OPTION_BYTES as u32 + 1 }));
    for _ in 0..MAX_OPTIONS {
        client.raw(asked::LIST, b"").unwrap();
    }
    assert_eq!(client.raw(asked::LIST, b""), Err(Error::TooMany));
}
