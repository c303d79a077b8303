//! Every message survives encoding and decoding, and bytes that are not a message are refused.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::rules::{Generation, Holder, Standing, State, Version};
use crate::shape::{Copies, Shape, VolumeId};

fn versions() -> impl Strategy<Value = Version> {
    any::<u64>().prop_map(|word| Version::from_word(word >> 1).unwrap())
}

fn generations() -> impl Strategy<Value = Generation> {
    (0..=Generation::LAST.number()).prop_map(|number| Generation::from_number(number).unwrap())
}

fn holders() -> impl Strategy<Value = Holder> {
    (generations(), any::<u64>()).prop_map(|(generation, writer)| Holder { generation, writer })
}

fn standings() -> impl Strategy<Value = Standing> {
    let state = prop::sample::select(vec![State::Empty, State::Behind, State::Whole]);
    (state, proptest::option::of(holders()), versions(), versions(), any::<bool>())
        .prop_map(|(state, promised, claim, applied, is_cut)| Standing { state, promised, claim, applied, is_cut })
}

fn shapes() -> impl Strategy<Value = Shape> {
    (any::<[u8; 16]>(), 1..=1_u64 << 32, 1..=5_usize, 1..=5_usize)
        .prop_filter_map("more hold", |(id, blocks, n, m)| Shape::new(VolumeId(id), blocks, Copies::new(n, m)?))
}

fn runs(most: u32) -> impl Strategy<Value = Run> {
    (any::<u64>(), 1..=most).prop_map(|(first, count)| Run { first, count })
}

fn rooms() -> impl Strategy<Value = Room> {
    (any::<u64>(), any::<u32>()).prop_map(|(bytes, writes)| Room { bytes, writes })
}

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let entry = (versions(), any::<u32>(), any::<bool>()).prop_map(|(version, crc, is_zero)| match version {
        version if is_zero && version != Version::NONE => Entry::zeros(version),
        version => Entry::of(version, crc),
    });
    vec(entry, 1..40)
}

fn keys() -> impl Strategy<Value = Vec<Vec<u8>>> {
    vec(vec(any::<u8>(), 0..MAX_KEY_BYTES), 0..=MOST_KEYS)
}

fn writes() -> impl Strategy<Value = Call> {
    (holders(), versions(), vec(runs(60), 1..=MOST_RUNS)).prop_map(|(holder, version, runs)| {
        let sums = (0..runs.iter().map(|run| run.count).sum()).collect();
        Call::Write { holder, version, runs, sums }
    })
}

fn calls() -> impl Strategy<Value = Call> {
    let mode = prop::sample::select(vec![Mode::Write, Mode::Borrow, Mode::Read]);
    let lend = (holders(), versions(), runs(MOST_BLOCKS as u32), any::<bool>());
    prop_oneof![
        (shapes(), mode, any::<u64>()).prop_map(|(shape, mode, writer)| Call::Open { shape, mode, writer }),
        shapes().prop_map(|shape| Call::Create { shape }),
        holders().prop_map(Call::Promise),
        (holders(), versions(), "[^\\p{C}\\p{Zl}\\p{Zp}]{0,30}").prop_map(|(holder, since, lender)| Call::CatchUp {
            holder,
            since,
            lender
        }),
        (holders(), any::<bool>()).prop_map(|(holder, may_lack_tail)| Call::Mark { holder, may_lack_tail }),
        writes(),
        (holders(), any::<u64>()).prop_map(|(holder, question)| Call::Confirm { holder, question }),
        (holders(), any::<u64>(), runs(MOST_BLOCKS as u32)).prop_map(|(holder, number, run)| Call::Read {
            holder,
            number,
            run
        }),
        (holders(), versions(), runs(MOST_ENTRIES as u32)).prop_map(|(holder, version, run)| Call::Zero {
            holder,
            version,
            run
        }),
        (holders(), any::<u64>(), runs(MOST_ENTRIES as u32)).prop_map(|(holder, number, run)| Call::Map {
            holder,
            number,
            run
        }),
        holders().prop_map(Call::Attach),
        holders().prop_map(Call::Flush),
        (rooms(), rooms()).prop_map(|(wants, obeys)| Call::Window { wants, obeys }),
        (any::<u64>(), keys()).prop_map(|(session, keys)| Call::Offer { session, keys }),
        (writes(), any::<u64>(), "[^\\p{C}\\p{Zl}\\p{Zp}]{0,30}").prop_map(|(write, at, source)| match write {
            Call::Write { holder, version, runs, sums } => Call::Pull { holder, version, runs, sums, at, source },
            other => other,
        }),
        holders().prop_map(Call::Follow),
        shapes().prop_map(|shape| Call::Status { shape }),
        shapes().prop_map(|shape| Call::Scrub { shape }),
        (shapes(), any::<bool>()).prop_map(|(shape, takes_over)| Call::Remove { shape, takes_over }),
        (shapes(), any::<bool>()).prop_map(|(shape, takes_over)| Call::Grow { shape, takes_over }),
        (shapes(), any::<bool>()).prop_map(|(shape, takes_over)| Call::MayGrow { shape, takes_over }),
        shapes().prop_map(|shape| Call::Agree { shape }),
        Just(Call::Look),
        lend.prop_map(|(holder, since, run, with_blocks)| Call::Lend { holder, since, run, with_blocks }),
    ]
}

fn statuses() -> impl Strategy<Value = Status> {
    let of_copy = (standings(), versions(), any::<bool>(), any::<Option<u32>>());
    let under_way = (any::<Option<u64>>(), any::<Option<u64>>());
    (of_copy, under_way, any::<[u64; 4]>()).prop_map(|(of_copy, (compared, scrubbed), used)| {
        let (standing, durable, has_store, writer_silent) = of_copy;
        let [memory, staging] = [[used[0], used[1]], [used[2], used[3]]].map(|[bytes, most]| Used { bytes, most });
        Status { standing, durable, has_store, writer_silent, compared, scrubbed, memory, staging }
    })
}

fn replies() -> impl Strategy<Value = Reply> {
    use Cause::*;
    let cause = prop::sample::select(vec![OutOfStep, NotYet, Shape, NoMemory, Damaged, Misuse, Lost, InUse]);
    prop_oneof![
        (standings(), rooms(), any::<Option<u32>>()).prop_map(|(standing, room, writer_silent)| Reply::Standing {
            standing,
            room,
            writer_silent
        }),
        Just(Reply::Created),
        rooms().prop_map(Reply::Granted),
        standings().prop_map(Reply::Promised),
        generations().prop_map(|by| Reply::Fenced { by }),
        any::<u64>().prop_map(|compared| Reply::Progress { compared }),
        versions().prop_map(|applied| Reply::Whole { applied }),
        (versions(), versions(), rooms()).prop_map(|(applied, durable, room)| Reply::Written {
            applied,
            durable,
            room
        }),
        any::<u64>().prop_map(|question| Reply::Confirmed { question }),
        (any::<u64>(), entries()).prop_map(|(number, entries)| Reply::Data { number, entries }),
        (versions(), entries()).prop_map(|(applied, entries)| Reply::Lent { applied, entries }),
        (any::<bool>(), any::<bool>()).prop_map(|(pulls, lends)| Reply::Reached { pulls, lends }),
        (any::<u64>(), keys()).prop_map(|(session, keys)| Reply::Attached { session, keys }),
        statuses().prop_map(|status| Reply::Status(Box::new(status))),
        (any::<[u64; 3]>(), any::<bool>()).prop_map(|([read, repaired, damaged], is_complete)| {
            Reply::Scrubbing(Findings { read, repaired, damaged, is_complete })
        }),
        any::<bool>().prop_map(|was_there| Reply::Removed { was_there }),
        any::<bool>().prop_map(|is_there| Reply::Grown { is_there }),
        (any::<u64>(), versions(), vec(any::<u8>(), 0..=MAX_MAP_BYTES))
            .prop_map(|(number, newest, zeros)| Reply::Mapped { number, newest, zeros }),
        (cause, "[^\\p{C}\\p{Zl}\\p{Zp}]{0,30}").prop_map(|(cause, text)| Reply::Refused { cause, text }),
    ]
}

/// Bytes of blocks that go with a reply.
fn data_of(reply: &Reply) -> usize {
    match reply {
        Reply::Data { entries, .. } | Reply::Lent { entries, .. } => entries.len() * BLOCK_BYTES,
        _ => 0,
    }
}

proptest! {
    #[test]
    fn a_call_comes_back_and_cut_at_any_byte_it_is_refused(call in calls(), cut: prop::sample::Index) {
        let mut front = Vec::new();
        let kind = call.encode(&mut front).unwrap();
        let data = call.blocks() * BLOCK_BYTES;
        prop_assert_eq!(Call::decode(kind, &front, data), Ok(call));
        prop_assert!(front.len() <= MAX_FRONT_BYTES);
        if !front.is_empty() {
            let cut = cut.index(front.len());
            prop_assert!(Call::decode(kind, &front[..cut], data).is_err());
        }
        prop_assert!(Call::decode(kind, &front, data + 1).is_err());
        front.push(0);
        prop_assert!(Call::decode(kind, &front, data).is_err());
    }

    #[test]
    fn a_reply_comes_back_and_cut_at_any_byte_it_is_refused(reply in replies(), cut: prop::sample::Index) {
        let mut front = Vec::new();
        let kind = reply.encode(&mut front).unwrap();
        let data = data_of(&reply);
        prop_assert_eq!(Reply::decode(kind, &front, data), Ok(reply));
        prop_assert!(front.len() <= MAX_FRONT_BYTES);
        if !front.is_empty() {
            prop_assert!(Reply::decode(kind, &front[..cut.index(front.len())], data).is_err());
        }
        prop_assert!(Reply::decode(kind, &front, data + BLOCK_BYTES).is_err());
        front.push(0);
        prop_assert!(Reply::decode(kind, &front, data).is_err());
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error(kind in 0..52_u16, blocks in 0..4_u16, front in vec(any::<u8>(), 0..200)) {
        fuzzing::message(&[&kind.to_le_bytes()[..], &blocks.to_le_bytes()[..], &front].concat());
    }
}

#[test]
fn a_write_says_what_its_data_are() {
    let holder = Holder { generation: Generation::NONE.next().unwrap(), writer: 1 };
    let version = holder.generation.start().next().unwrap();
    let encoded = |runs: &[(u64, u32)], sums: usize| {
        let runs = runs.iter().map(|&(first, count)| Run { first, count }).collect();
        let mut front = Vec::new();
        let kind = Call::Write { holder, version, runs, sums: vec![0; sums] }.encode(&mut front).unwrap();
        (kind, front)
    };
    let decoded = |runs: &[(u64, u32)], sums: usize, data: usize| {
        let (kind, front) = encoded(runs, sums);
        Call::decode(kind, &front, data * BLOCK_BYTES).map(|_| ())
    };
    assert_eq!(decoded(&[(3, 2), (9, 1)], 3, 3), Ok(()));
    for (runs, sums, data) in [
        (&[(3, 2), (9, 1)][..], 2, 2),
        (&[(3, 2), (9, 1)], 3, 2),
        (&[(3, 0)], 0, 0),
        (&[(3, 1), (9, 0)], 1, 1),
        (&[], 0, 0),
        (&[(3, u32::MAX), (9, u32::MAX)], 1, 1),
    ] {
        assert!(decoded(runs, sums, data).is_err(), "{runs:?}, {sums} sums, {data} blocks");
    }
    let (most, too_many) = (MOST_BLOCKS as u32, MOST_BLOCKS as u32 + 1);
    let mut front = Vec::new();
    for (count, is_read) in [(0, false), (1, true), (most, true), (too_many, false)] {
        front.clear();
        let kind = Call::Read { holder, number: 7, run: Run { first: 0, count } }.encode(&mut front).unwrap();
        assert_eq!(Call::decode(kind, &front, 0).is_ok(), is_read, "{count} blocks");
    }
    let (most, too_many) = (MOST_ENTRIES as u32, MOST_ENTRIES as u32 + 1);
    for (count, is_call) in [(0, false), (1, true), (most, true), (too_many, false)] {
        let run = Run { first: 0, count };
        for call in [Call::Zero { holder, version, run }, Call::Map { holder, number: 7, run }] {
            front.clear();
            let kind = call.encode(&mut front).unwrap();
            assert_eq!(Call::decode(kind, &front, 0).is_ok(), is_call, "{call:?}");
            assert!(Call::decode(kind, &front, BLOCK_BYTES).is_err(), "{call:?} with a block");
        }
    }
}

/// The seeds by name, in a fixed order.
fn seeds() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/volume_message");
    let seed = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    let mut seeds: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| seed(entry.unwrap())).collect();
    seeds.sort();
    seeds
}

#[test]
fn every_seed_holds() {
    for (name, bytes) in seeds() {
        println!("{name}"); // shown only when the body panics
        fuzzing::message(&bytes);
    }
}

/// Seeds that are refused at their first field would exercise little: each kind of message is there.
#[test]
fn the_seeds_hold_every_kind_of_message() {
    let mut kinds: Vec<u16> = seeds()
        .iter()
        .filter_map(|(_, bytes)| {
            let (head, front) = bytes.split_first_chunk::<4>()?;
            let kind = u16::from_le_bytes([head[0], head[1]]);
            let data = usize::from(u16::from_le_bytes([head[2], head[3]])) * BLOCK_BYTES;
            let is_message = Call::decode(kind, front, data).is_ok() || Reply::decode(kind, front, data).is_ok();
            is_message.then_some(kind)
        })
        .collect();
    kinds.dedup();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds, (1..=17).chain(19..=23).chain(33..=51).collect::<Vec<u16>>());
}

fn run(first: u64, count: u32) -> Run {
    Run { first, count }
}

#[test]
fn runs_that_touch_have_no_block_in_common() {
    for (one, other, expected) in [
        (run(3, 2), run(5, 1), false),
        (run(3, 2), run(4, 9), true),
        (run(0, 9), run(4, 1), true),
        (run(u64::MAX - 1, 9), run(0, 4), false),
    ] {
        assert_eq!((overlap(one, other), overlap(other, one)), (expected, expected), "{one:?} {other:?}");
    }
}

#[test]
fn the_last_write_is_found_by_any_of_its_runs() {
    let first = Generation::NONE.next().unwrap_or_default().start();
    let second = first.next().unwrap_or_default();
    let writes = [(first, vec![run(7, 1), run(0, 2)]), (second, vec![run(1, 1)])];
    let last = |run| last_write_of(run, writes.iter().map(|(version, runs)| (*version, &runs[..])));
    assert_eq!((last(run(0, 4)), last(run(0, 1)), last(run(6, 3))), (Some(second), Some(first), Some(first)));
    assert_eq!((last(run(2, 5)), newest([first, second, first]), newest([])), (None, second, Version::NONE));
}
