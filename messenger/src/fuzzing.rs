//! What the fuzz targets run and `cargo test` replays: any bytes must end in a value or an error, never in a panic, an
//! endless loop, or more memory than they themselves take.

use std::time::{Duration, Instant};

use crate::control::Message;
use crate::frame::{Decoder, MAX_HANDSHAKE_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES};
use crate::session::{Handshake, Opening, Role, Versions};
use crate::token::Token;

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
