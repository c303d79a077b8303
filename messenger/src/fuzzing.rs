//! The bodies of the fuzz targets, which `cargo test` runs on every seed. Any bytes must end in a value or an error,
//! never in a panic, an endless loop, or more memory than the bytes themselves.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_wire::Token;

use crate::buffer::Buffer;
use crate::frame;
use crate::frame::{Entity, Label, MESSAGE, Signal};
use crate::handshake::{Decoder, Handshake, MAX_HANDSHAKE_PAYLOAD_BYTES, Opening, Role, Versions};
use crate::policy::Policy;
use crate::session::{LinkId, LocalEnd, Session};

/// The targets, by the name of their file and of their seeds' folder.
pub const TARGETS: [(&str, Body); 5] = [
    ("messenger_frames", frames),
    ("messenger_handshake", handshake),
    ("messenger_layer_frames", layer_frames),
    ("messenger_layer_session", layer_session),
    ("messenger_rdma_messages", rdma_messages),
];

/// Takes any bytes, and panics if this crate mishandles them.
pub type Body = fn(&[u8]);

/// Frames of the handshake, in pieces. What decodes must encode to the same bytes.
pub fn frames(bytes: &[u8]) {
    let mut decoder = Decoder::new(LONGEST_PAYLOAD_BYTES);
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

/// Frames of the message layer, in pieces. What decodes must encode to the same bytes, and no memory is requested
/// beyond the limits.
pub fn layer_frames(bytes: &[u8]) {
    let limits = frame::Limits { front: 1024, data: 4096 };
    let mut reader = frame::Reader::new(limits, None);
    let mut last = None;
    let (mut at, mut begun) = (0, 0);
    for piece in bytes.chunks(7) {
        let mut input = piece;
        loop {
            match reader.next(&mut input) {
                Err(_) | Ok(frame::Step::Incomplete) => break,
                Ok(frame::Step::Head(preamble)) => {
                    assert!(preamble.body_bytes() <= 2 * 1024 + 4096);
                    let bodies =
                        preamble.bodies.map(|length| Buffer::zeroed(length as usize, preamble.data_alignment()));
                    assert!(reader.land(bodies).is_ok());
                    last = Some((preamble, reader.head().to_vec()));
                }
                Ok(frame::Step::Whole) => {
                    let (preamble, head) = last.take().expect("a frame has a head");
                    let end = at + piece.len() - input.len();
                    let mut writer = frame::Writer::new(preamble.summed, None);
                    let bodies = reader.bodies().map(Bytes::from);
                    writer.frame(preamble.tag, &head, bodies, preamble.data_alignment());
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

/// A hostile peer against a session in any state. Each step is one byte that chooses (link, tag or time), one for the
/// head's length, and the head. Nothing panics, and the session holds only what its own owner queued.
pub fn layer_session(bytes: &[u8]) {
    let policies = [Policy::lossless_peer(), Policy::stateful_server(), Policy::lossy_client()];
    let Some((&choice, mut rest)) = bytes.split_first() else { return };
    let policy = policies[usize::from(choice) % policies.len()].clone();
    let mut now = Instant::now();
    let local_end = LocalEnd { entity: Entity(7), address: None, can_call: !policy.server };
    let mut session = match local_end.can_call {
        true => Session::calling(policy, local_end, 7, now),
        false => Session::called(policy, local_end, 7, now),
    };
    let mut queued = 0;
    while let Some((&[what, length], after)) = rest.split_first_chunk::<2>() {
        let (head, after) = after.split_at(usize::from(length).min(after.len()));
        rest = after;
        let link = LinkId(u64::from(what >> 6));
        match what & 0x3f {
            0x20 => session.link_up(link, now),
            0x21 => session.link_down(link, now),
            0x22 => now += Duration::from_millis(u64::from(length) * 100),
            0x23 => queued += usize::from(session.send(what, now).is_ok()),
            0x24 => session.call_failed(now),
            tag => note_received(&mut session, link, tag, head, now),
        }
        session.handle_timeout(now);
        while session.poll_transmit().is_some() {}
        while session.poll_action().is_some() {}
        assert!(session.unacknowledged() <= queued);
        assert!(session.deadline().is_none_or(|deadline| deadline > now));
    }
}

fn note_received(session: &mut Session<u8>, link: LinkId, tag: u8, head: &[u8], now: Instant) {
    if tag == MESSAGE {
        if let Ok(label) = Label::decode(head) {
            let _ = session.handle_message(link, &label, now); // a violation is a valid outcome
        }
        return;
    }
    match Signal::decode(tag, head) {
        Ok(Signal::Open(open)) => session.handle_open(link, open, now),
        Ok(signal) => drop(session.handle_signal(link, signal, now)),
        Err(_) => {}
    }
}

/// A hostile peer on an RDMA link: a Hello, then messages, between which this end acts as a link does. Nothing panics,
/// this end holds only what it gave credit for, and every violation is named.
pub fn rdma_messages(bytes: &[u8]) {
    crate::stack::rdma::fuzzing::messages(bytes);
}

/// A peer without the token, against either end: it is never authenticated, and makes the end hold at most one small
/// frame.
pub fn handshake(bytes: &[u8]) {
    for role in [Role::Caller, Role::Called] {
        let token = Token::new(b"a token for fuzzing").expect("it is long enough");
        let opening = Opening { versions: Versions::only(2), features: 0, nonce: [7; 32] };
        let (now, limit) = (Instant::now(), Duration::from_secs(1));
        let mut end = match role {
            Role::Caller => Handshake::caller(vec![&token], opening, now, limit),
            Role::Called => Handshake::called(vec![&token], opening, 1, now, limit),
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

/// Far more than a handshake's frame may have, so that long frames are decoded too.
const LONGEST_PAYLOAD_BYTES: u32 = 512 * 1024;

/// One piece, and the longest frame of the handshake with its preamble and checksum.
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

    proptest::proptest! {
        #[test]
        fn any_bytes_leave_a_session_whole(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
            layer_session(&bytes);
        }

        /// Steps that are valid more often than random bytes would be.
        #[test]
        fn any_plausible_steps_leave_a_session_whole(
            choice: u8,
            steps in proptest::collection::vec((0u8..4, 0u8..0x28, 0u8..4, 0u64..4, 0u64..4), 0..60),
        ) {
            let mut bytes = vec![choice];
            for (link, tag, epoch, number, other) in steps {
                let mut head: Vec<u8> = match tag {
                    1 | 2 => [&[9; 8][..], &[5; 8], &[epoch & 1, 0, 0, 0], &[7, 0, 0, 0, 0, 0, 0, 0],
                        &[epoch >> 1, 0, 0, 0], &number.to_le_bytes(), &other.to_le_bytes(), &[0; 19]].concat(),
                    3 | 17 => number.to_le_bytes().to_vec(),
                    16 => [&number.to_le_bytes()[..], &other.to_le_bytes(), &[0; 12]].concat(),
                    _ => Vec::new(),
                };
                if tag == 0x22 { head = vec![0; 255]; }
                bytes.extend([link << 6 | tag, head.len() as u8]);
                bytes.extend(head);
            }
            layer_session(&bytes);
        }
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
}
