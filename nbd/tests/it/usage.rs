//! Requests and their answers, byte for byte.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;

use remora_nbd::memory::MemoryDevice;
use remora_nbd::protocol::command::{BLOCK_STATUS, CACHE, DISC, FLUSH, READ, TRIM, WRITE_ZEROES};

use crate::device::{Broken, LateDevice, Serving, until};
use crate::raw::{Client, Says, request};

const MIB: u32 = 1 << 20;

#[test]
fn what_was_written_is_read_and_holes_are_holes() {
    let serving = Serving::of(Arc::new(MemoryDevice::new(64 << 20)));
    for structured in [true, false] {
        let mut client = Client::new(&serving.socket, structured);
        let hole = |length: u32| if structured { Says::Hole(length) } else { Says::Data(vec![0; length as usize]) };
        let at = if structured { 0 } else { 32 << 20 };
        assert_eq!(client.says(READ, at, 5000), hole(5000));
        let content: Vec<u8> = (0..3 * MIB).map(|at| (at % 251) as u8).collect();
        client.write(1, at + 100, &content);
        assert_eq!(client.reply(0).says, Says::Done);
        assert_eq!(client.says(READ, at + 100, 3 * MIB), Says::Data(content.clone()));
        assert_eq!(client.says(WRITE_ZEROES, at + 200, MIB), Says::Done);
        assert_eq!(client.says(READ, at + 200, 2 * MIB), {
            let mut expected = content[100..100 + 2 * MIB as usize].to_vec();
            expected[..MIB as usize].fill(0);
            Says::Data(expected)
        });
        assert_eq!(client.says(TRIM, at, 8 * MIB), Says::Done);
        assert_eq!(client.says(READ, at, 8 * MIB), hole(8 * MIB));
        assert_eq!(client.says(CACHE, at, MIB), Says::Done);
        assert_eq!(client.says(FLUSH, 0, 0), Says::Done);
        assert!(matches!(client.says(READ, 64 << 20, 1), Says::Error(22) | Says::ErrorWith(22, _)));
    }
    let mut client = Client::new(&serving.socket, true);
    client.write(1, 20 << 20, &[1; 10]);
    client.reply(0);
    let mut status = |length: u32| client.says(BLOCK_STATUS, 19 << 20, length);
    assert_eq!(status(2 * MIB), Says::Extents(vec![(MIB, 3)]), "only one was asked for");
    client.ask(BLOCK_STATUS, 0, 5, 19 << 20, 2 * MIB);
    let extents = vec![(MIB, 3), (256 << 10, 0), (MIB - (256 << 10), 3)];
    assert_eq!(client.reply(0).says, Says::Extents(extents));
}

/// A device that asks others what its holes are, and answers later.
#[test]
fn holes_that_are_described_later_are_described_as_those_at_once() {
    let serving = Serving::of(Arc::new(LateDevice::new(1 << 20)));
    let mut client = Client::new(&serving.socket, true);
    client.write(1, 16 << 10, &[1; 8192]);
    assert_eq!(client.reply(0).says, Says::Done);
    assert_eq!(client.says(BLOCK_STATUS, 4096, 64 << 10), Says::Extents(vec![(12 << 10, 3)]), "only one was asked for");
    client.ask(BLOCK_STATUS, 0, 5, 4096, 64 << 10);
    assert_eq!(client.reply(0).says, Says::Extents(vec![(12 << 10, 3), (8 << 10, 0), (44 << 10, 3)]));
}

/// Hundreds of requests in one piece, cut anywhere, are answered, and those that are wrong harm no other.
#[test]
fn requests_may_arrive_in_any_pieces() {
    let serving = Serving::of(Arc::new(MemoryDevice::new(1 << 20)));
    let mut all = Vec::new();
    for number in 0..300u64 {
        all.extend_from_slice(&request(1, 0, number * 3, number * 1000, 1000));
        all.extend_from_slice(&[number as u8; 1000]);
        all.extend_from_slice(&request(1, 0, number * 3 + 1, 1 << 20, 100)); // beyond the end
        all.extend_from_slice(&[0xff; 100]);
        all.extend_from_slice(&request(READ, 0, number * 3 + 2, number * 1000 + 300, 7));
    }
    for piece in [7919, 28, 1 << 20] {
        let mut client = Client::new(&serving.socket, true);
        let mut sending = client.stream.try_clone().unwrap();
        let bytes = all.clone();
        let sender = std::thread::spawn(move || bytes.chunks(piece).for_each(|part| sending.write_all(part).unwrap()));
        for number in 0..300u64 {
            let replies: Vec<_> = (0..3).map(|_| client.reply(0)).collect();
            assert_eq!(replies.iter().map(|reply| reply.cookie % 3).collect::<Vec<_>>(), [0, 1, 2]);
            assert_eq!(replies[0].says, Says::Done);
            assert!(matches!(replies[1].says, Says::ErrorWith(28, _)), "{:?}", replies[1]);
            assert_eq!(replies[2].says, Says::Data(vec![number as u8; 7]));
        }
        sender.join().unwrap();
    }
}

#[test]
fn answers_come_in_the_order_in_which_the_device_gives_them() {
    let device = Arc::new(LateDevice::new(4 << 20));
    let serving = Serving::of(Arc::clone(&device) as _);
    let mut client = Client::new(&serving.socket, true);
    device.hold(true);
    for number in 0..100u64 {
        client.write(number, number * 4096, &[number as u8; 4096]);
    }
    until("all are under way", || device.under_way() == 100);
    client.ask(FLUSH, 0, 1000, 0, 0);
    assert_eq!(client.reply(0).cookie, 1000, "what is answered at once waits for nothing");
    device.hold(false);
    let cookies: Vec<u64> = (0..100).map(|_| client.reply(0).cookie).collect();
    assert_ne!(cookies, (0..100).collect::<Vec<_>>(), "the device works in any order");
    assert_eq!(cookies.into_iter().collect::<BTreeSet<_>>(), (0..100).collect());
    for number in 0..100u64 {
        assert_eq!(client.says(READ, number * 4096, 4096), Says::Data(vec![number as u8; 4096]));
    }
    let long: Vec<u8> = (0..3 << 20).map(|at| (at % 241) as u8).collect();
    client.write(1, 4096, &long);
    assert_eq!(client.reply(0).says, Says::Done);
    assert_eq!(client.says(READ, 4096, 3 << 20), Says::Data(long));
}

/// What a client asked for before it said good-bye is done before the connection ends.
#[test]
fn a_good_bye_waits_for_what_is_under_way() {
    let device = Arc::new(LateDevice::new(1 << 20));
    let serving = Serving::of(Arc::clone(&device) as _);
    let mut client = Client::new(&serving.socket, true);
    device.hold(true);
    client.write(1, 0, &[7; 4096]);
    client.ask(DISC, 0, 2, 0, 0);
    until("the write is under way", || device.under_way() == 1);
    device.hold(false);
    assert_eq!(client.reply(0).says, Says::Done);
    assert!(client.is_over());
}

/// Whatever a device does, its clients are answered.
#[test]
fn a_device_that_does_not_answer_has_failed() {
    let serving = Serving::of(Arc::new(Broken));
    let mut client = Client::new(&serving.socket, true);
    let eio = |says: Says| matches!(says, Says::ErrorWith(5, _));
    for at in [0, 512, 1024, 1536] {
        assert!(eio(client.says(READ, at, 512)), "{at}");
    }
    assert_eq!(client.says(READ, 2048, 512), Says::ErrorWith(12, "no memory for this read".into()));
    for command in [FLUSH, TRIM, WRITE_ZEROES, BLOCK_STATUS] {
        let length = if command == FLUSH { 0 } else { 512 };
        assert!(eio(client.says(command, 0, length)), "{command}");
    }
    assert!(eio(client.says(BLOCK_STATUS, 512, 512)), "later, and nothing");
    client.write(1, 0, &[0; 512]);
    assert_eq!(client.reply(0).says, Says::ErrorWith(108, "the volume has ended".into()));
}
