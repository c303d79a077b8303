//! What the fuzz targets run and `cargo test` replays: any bytes must end in a value or an error, never in a panic, an
//! endless loop, or more memory than they themselves take.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::buffer::Buffer;
use crate::control::Message;
use crate::control::frame::{Decoder, MAX_HANDSHAKE_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES};
use crate::control::session::{Handshake, Opening, Role, Versions};
use crate::control::token::Token;
use crate::frame;

/// The targets by the name of their file and of their seeds' folder.
pub const TARGETS: [(&str, Body); 4] = [
    ("messenger_message", message),
    ("messenger_frames", frames),
    ("messenger_handshake", handshake),
    ("messenger_layer_frames", layer_frames),
];

/// Takes any bytes, and panics when something is wrong with us.
pub type Body = fn(&[u8]);

/// First byte: the tag. The rest: the payload. What decodes must encode to the same bytes.
pub fn message(bytes: &[u8]) {
    let Some((&tag, payload)) = bytes.split_first() else {
        return;
    };
    let Ok(message) = Message::decode(tag, payload) else {
        return;
    };
    let mut again = Vec::new();
    assert_eq!(message.encode(&mut again), Ok(tag));
    assert_eq!(again, payload, "two encodings of {}", message.name());
}

/// Frames in any pieces. What decodes must encode to the same bytes.
pub fn frames(bytes: &[u8]) {
    let mut decoder = Decoder::new(MAX_PAYLOAD_BYTES);
    let mut again = Vec::new();
    for piece in bytes.chunks(7) {
        decoder.feed(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frame.encode(&mut again),
                Ok(None) => break,
                Err(_) => return,
            }
        }
        assert!(bytes.starts_with(&again));
        assert!(decoder.buffered() <= bytes.len() - again.len());
    }
}

/// Frames of the message layer in any pieces. What is taken must be written as the same bytes, and no memory is asked for
/// that the limits do not allow.
pub fn layer_frames(bytes: &[u8]) {
    let limits = frame::Limits { front: 1024, data: 4096 };
    let mut reader = frame::Reader::new(limits, None);
    let mut last = None;
    let (mut at, mut begun) = (0, 0);
    for piece in bytes.chunks(7) {
        let mut input = piece;
        loop {
            match reader.next(&mut input) {
                Err(_) | Ok(frame::Step::Hungry) => break,
                Ok(frame::Step::Head(preamble, head)) => {
                    assert!(preamble.body_bytes() <= 2 * 1024 + 4096);
                    let bodies =
                        preamble.bodies.map(|length| Buffer::zeroed(length as usize, preamble.data_alignment()));
                    assert!(reader.land(bodies).is_ok());
                    last = Some((preamble, head));
                }
                Ok(frame::Step::Whole(bodies)) => {
                    let (preamble, head) = last.take().expect("a frame has a head");
                    let end = at + piece.len() - input.len();
                    let mut writer = frame::Writer::new(preamble.summed, None);
                    let bodies = bodies.map(Bytes::from);
                    writer.frame(preamble.tag, head.bytes(), bodies.each_ref(), preamble.data_alignment());
                    let mut slices = [IoSlice::new(&[]); 8];
                    let count = writer.slices(&mut slices);
                    let again: Vec<u8> = slices[..count].iter().flat_map(|slice| slice.to_vec()).collect();
                    assert_eq!(bytes.get(begun..end), Some(&again[..]));
                    begun = end;
                }
            }
        }
        at += piece.len();
    }
}

/// A peer without the token, against either end: it never gets in, and never makes us hold more than one small frame.
pub fn handshake(bytes: &[u8]) {
    for role in [Role::Client, Role::Server] {
        let token = Token::new(b"a token for fuzzing").expect("it is long enough");
        let opening = Opening { versions: Versions::OURS, features: 0, nonce: [7; 32] };
        let (now, limit) = (Instant::now(), Duration::from_secs(1));
        let mut end = match role {
            Role::Client => Handshake::client(&token, opening, now, limit),
            Role::Server => Handshake::server(&token, opening, 1, now, limit),
        };
        for piece in bytes.chunks(7) {
            if end.handle_input(piece).is_err() {
                break;
            }
            assert!(end.held() <= PIECE_AND_FRAME_BYTES);
        }
        assert!(end.poll_established().is_none());
    }
}

/// One piece and the longest frame of a handshake with what is around its payload.
const PIECE_AND_FRAME_BYTES: usize = 7 + MAX_HANDSHAKE_PAYLOAD_BYTES as usize + 32;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::fs;
    use std::path::Path;

    /// A target's seeds by name, in a fixed order.
    fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
        let seed = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
        let mut seeds: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| seed(entry.unwrap())).collect();
        seeds.sort();
        seeds
    }

    #[test]
    fn every_seed_of_every_target_holds() {
        for (target, body) in TARGETS {
            let seeds = seeds(target);
            assert!(!seeds.is_empty(), "{target} has no seeds");
            for (name, bytes) in seeds {
                println!("{target}/{name}"); // shown only when the body panics
                body(&bytes);
            }
        }
    }

    /// Seeds that are refused at their first field would exercise little: each kind of message is there, under its name.
    #[test]
    fn the_seeds_hold_every_kind_of_message() {
        let decoded = |(name, bytes): &(String, Vec<u8>)| {
            let (tag, payload) = bytes.split_first()?;
            let message = Message::decode(*tag, payload).ok()?;
            assert_eq!(message.name().to_lowercase(), name.replace('-', ""));
            Some(message.tag())
        };
        assert_eq!(seeds("messenger_message").iter().filter_map(decoded).count(), 12);
    }
}
