//! Frames survive any splitting of their bytes, and bytes that are not frames are refused.
#![allow(clippy::unwrap_used)]

use std::io::IoSlice;

use bytes::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;

use super::{Seals, *};
use crate::handshake::Role;

const LIMITS: Limits = Limits { front: 1 << 20, data: 1 << 20 };

type Parts = (u8, Vec<u8>, [Vec<u8>; 3]);

fn parts() -> impl Strategy<Value = Parts> {
    let body = || prop_oneof![4 => vec(any::<u8>(), 0..40), 1 => vec(any::<u8>(), 0..3000)];
    let data = prop_oneof![4 => vec(any::<u8>(), 0..40), 1 => (16_000usize..40_000).prop_map(|n| vec![7; n])];
    (any::<u8>(), vec(any::<u8>(), 0..HEAD_BYTES), body(), body(), data)
        .prop_map(|(tag, head, front, middle, data)| (tag, head, [front, middle, data]))
}

fn seals() -> Seals {
    Seals::new(&[9; 32], Role::Caller)
}

fn encoded(frames: &[Parts], summed: bool, sealed: bool) -> Vec<u8> {
    let mut writer = Writer::new(summed, sealed.then(seals));
    for (tag, head, bodies) in frames {
        let bodies = bodies.each_ref().map(|body| Bytes::copy_from_slice(body));
        writer.frame(*tag, head, bodies, 1);
    }
    let mut out = Vec::new();
    while !writer.is_empty() {
        let mut slices = [IoSlice::new(&[]); 3];
        let count = writer.slices(&mut slices);
        let all: Vec<u8> = slices[..count].iter().flat_map(|slice| slice.to_vec()).collect();
        let some = all.len().div_ceil(2); // a socket that takes half
        out.extend_from_slice(&all[..some]);
        writer.sent(some);
    }
    out
}

/// Reads everything in pieces of `piece` bytes; large rests go straight into their memory if `direct`.
fn decoded(bytes: &[u8], piece: usize, direct: bool, sealed: bool) -> Result<Vec<Parts>, Malformed> {
    let mut reader = Reader::new(LIMITS, sealed.then(seals));
    let (mut frames, mut heads) = (Vec::new(), Vec::new());
    let mut rest = bytes;
    while !rest.is_empty() {
        if direct && let Some(landing) = reader.landing() {
            let count = landing.len().min(piece).min(rest.len());
            landing[..count].copy_from_slice(&rest[..count]);
            reader.landed(count);
            rest = &rest[count..];
        }
        let (mut input, later) = rest.split_at(piece.min(rest.len()));
        rest = later;
        loop {
            match reader.next(&mut input)? {
                Step::Incomplete => break,
                Step::Head(preamble) => {
                    heads.push((preamble.tag, reader.head().to_vec()));
                    reader.land(preamble.bodies.map(|length| Buffer::zeroed(length as usize, 1))).unwrap();
                }
                Step::Whole => {
                    let bodies = reader.bodies();
                    let (tag, head) = heads.pop().unwrap();
                    frames.push((tag, head, bodies.map(|body| body.to_vec())));
                }
            }
        }
        assert!(input.is_empty());
    }
    assert!(reader.is_between_frames());
    Ok(frames)
}

proptest! {
    #[test]
    fn frames_survive_any_cutting_and_either_way_of_landing(
        sent in vec(parts(), 0..5), piece in 1usize..20_000, direct: bool, summed: bool, sealed: bool,
    ) {
        let bytes = encoded(&sent, summed, sealed);
        prop_assert_eq!(decoded(&bytes, piece, direct, sealed), Ok(sent));
    }

    #[test]
    fn a_changed_byte_is_never_taken_for_the_frame(
        frame in parts(), at in any::<prop::sample::Index>(), change in 1u8.., sealed: bool,
    ) {
        let mut bytes = encoded(std::slice::from_ref(&frame), true, sealed);
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        prop_assert!(decoded(&bytes, 1 << 20, false, sealed).is_err());
    }

    #[test]
    fn any_bytes_are_frames_or_an_error(bytes in vec(any::<u8>(), 0..600)) {
        crate::fuzzing::layer_frames(&bytes);
    }
}

#[test]
fn a_repeated_a_left_out_and_a_stripped_frame_are_forged() {
    let frames = [(1, vec![1], [vec![], vec![], vec![]]), (2, vec![2], [vec![], vec![], vec![]])];
    let both = encoded(&frames, true, true);
    let (first, second) = both.split_at(both.len() / 2);
    assert_eq!(decoded(&[first, first].concat(), 100, false, true), Err(Malformed::Forged { sequence: 1 }));
    assert_eq!(decoded(second, 100, false, true), Err(Malformed::Forged { sequence: 0 }));
    let bare = encoded(&frames, true, false);
    assert_eq!(decoded(&bare, 100, false, true), Err(Malformed::Forged { sequence: 0 }));
}

#[test]
fn a_length_over_the_limit_is_refused_on_the_preamble_alone() {
    let bytes = encoded(&[(1, vec![], [vec![], vec![], vec![0; 2000]])], true, false);
    let mut reader = Reader::new(Limits { front: 10, data: 1999 }, None);
    let found = reader.next(&mut &bytes[..PREAMBLE_BYTES]).unwrap_err();
    assert_eq!(found, Malformed::TooLong { length: 2000, limit: 1999 });
    assert_eq!(reader.next(&mut &b""[..]).unwrap_err(), found, "there is no going on");
}

#[test]
fn nothing_of_a_body_is_taken_before_memory_is_given_for_it() {
    let bytes = encoded(&[(1, vec![5], [vec![1, 2, 3], vec![], vec![]])], true, false);
    let mut reader = Reader::new(LIMITS, None);
    let mut input = &bytes[..];
    assert!(matches!(reader.next(&mut input).unwrap(), Step::Head(_)));
    let left = input.len();
    assert!(matches!(reader.next(&mut input).unwrap(), Step::Incomplete));
    assert_eq!(input.len(), left);
    assert!(reader.land([Buffer::EMPTY, Buffer::EMPTY, Buffer::EMPTY]).is_err(), "wrong lengths");
    assert!(reader.land([Buffer::zeroed(3, 1), Buffer::EMPTY, Buffer::EMPTY]).is_ok());
    assert!(matches!(reader.next(&mut input).unwrap(), Step::Whole));
}

#[test]
fn small_frames_lie_one_behind_the_other_for_one_send() {
    let mut writer = Writer::new(true, None);
    let small = Bytes::from_static(&[1; 64]);
    for _ in 0..10 {
        writer.frame(16, &[0; 28], [small.clone(), Bytes::new(), Bytes::new()], 1);
    }
    let mut slices = [IoSlice::new(&[]); 16];
    assert_eq!(writer.slices(&mut slices), 1);
    assert_eq!(slices[0].len(), writer.len());
}
