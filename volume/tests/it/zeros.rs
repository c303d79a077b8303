//! Zeros without bytes: written, read, mapped, kept, and taken by copies that were away.

use std::os::unix::fs::MetadataExt;
use std::sync::mpsc;
use std::time::Duration;

use remora_volume::client::{Error, Request, Volume};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::{MOST_ENTRIES, Run};

use crate::cluster::{Cluster, Remotes, options, until};
use crate::pattern::content;

const BLOCKS: u64 = 20_000; // 78 MiB: more than one write of zeros takes

/// Longer than any answer takes.
const LONG: Duration = Duration::from_secs(20);

/// Writes the beginning, then zeros over a part of it, a block within that, and many blocks that were never written.
fn write_some(volume: &Volume) {
    let data: Vec<u8> = (0..600).flat_map(|block| content(block, 1)).collect();
    volume.write(0, data).unwrap();
    volume.zero(100, 300).unwrap();
    volume.write(200, content(200, 2)).unwrap();
    volume.zero(1000, MOST_ENTRIES as u32).unwrap();
}

/// Which blocks [`write_some`] has left with bytes.
fn has_bytes(block: u64) -> bool {
    block == 200 || (0..100).contains(&block) || (400..600).contains(&block)
}

fn is_there(volume: &Volume) {
    let zeros = volume.map(0, 10_000).unwrap();
    for (block, is_zero) in (0..).zip(zeros) {
        assert_eq!(is_zero, !has_bytes(block), "block {block}");
    }
    let read = volume.read(0, 700).unwrap();
    for (block, bytes) in (0..).zip(read.chunks_exact(BLOCK_BYTES)) {
        let number = if block == 200 { 2 } else { u64::from(has_bytes(block)) };
        assert!(bytes == content(block, number), "block {block} is not of write {number}");
    }
}

#[test]
fn zeros_are_read_and_mapped_and_no_bytes_of_them_are_sent() {
    let cluster = Cluster::new(3, 2, BLOCKS);
    let volume = cluster.open().unwrap();
    assert!(volume.map(3, 13).unwrap() == [true; 13], "a new volume is zeros");
    write_some(&volume);
    is_there(&volume);
    // Blocks of zeros that were sent have bytes, and it is not looked whether these are zeros.
    volume.write(150, vec![0; BLOCK_BYTES]).unwrap();
    assert_eq!(volume.map(149, 3).unwrap(), [true, false, true]);
    let before = volume.write_counts();
    volume.zero(0, MOST_ENTRIES as u32).unwrap();
    until("each server was sent it", || volume.write_counts().inline >= before.inline + 3);
    let sent = volume.write_counts().bytes - before.bytes;
    assert!(sent < 1000, "{sent} bytes were sent for 64 MiB of zeros");
    assert_eq!(volume.map(0, 600).unwrap(), [true; 600]);
    assert!(volume.read(0, 600).unwrap() == vec![0; 600 * BLOCK_BYTES]);
    let too_many = MOST_ENTRIES as u32 + 1;
    assert!(matches!(volume.zero(0, too_many), Err(Error::Misuse)) && matches!(volume.map(0, 0), Err(Error::Misuse)));
    assert!(matches!(volume.zero(BLOCKS - 1, 2), Err(Error::OutOfBounds { .. })));
}

/// Zeros that are under way are under way for a reader in the memory of this host, too.
#[test]
#[ignore = "long: make test-all"]
fn a_read_behind_zeros_does_not_return_what_was_there_before() {
    let cluster = Cluster::new(3, 2, BLOCKS);
    let volume = cluster.open().unwrap();
    let run = Run { first: 5, count: 40 };
    until("a copy is read without asking", || {
        volume.read(0, 1).unwrap();
        volume.read_counts().here > 0
    });
    for round in 1..200 {
        volume.write(5, (0..40).flat_map(|block| content(block, round)).collect::<Vec<u8>>()).unwrap();
        let (done, is_done) = mpsc::channel();
        volume.submit(Request::Zero(run), move |result| done.send(result).unwrap()).unwrap();
        let zeros = vec![0; 40 * BLOCK_BYTES];
        if let Some(read) = volume.try_read(run).unwrap() {
            assert!(read == zeros, "round {round}: what was there before the zeros");
        }
        assert!(volume.read(5, 40).unwrap() == zeros, "round {round}");
        is_done.recv_timeout(LONG).unwrap().unwrap();
    }
}

/// Every server is new in turn, and takes what the others have. It says the same then.
#[test]
fn a_server_without_its_memory_takes_zeros_as_zeros() {
    let mut cluster = Cluster::new(3, 2, BLOCKS);
    let volume = cluster.open().unwrap();
    write_some(&volume);
    for number in 0..3 {
        cluster.end(number);
        until("its copy is left out", || volume.members().len() == 2);
        cluster.start(number);
        until("its copy is whole again", || volume.members().len() == 3);
        is_there(&volume);
    }
}

/// The journal's records of zeros, and what a checkpoint makes of them.
#[test]
#[ignore = "long: make test-all"]
fn zeros_are_in_the_stores_of_servers_that_are_killed_together() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(BLOCKS, Some(folder.path()));
    let volume = servers.open(&options());
    write_some(&volume);
    drop(volume);
    let restart = |servers: &mut Remotes| {
        (0..3).for_each(|number| servers.kill(number));
        (0..3).for_each(|number| servers.restart(number));
    };
    restart(&mut servers);
    let volume = servers.open(&options());
    is_there(&volume);
    // More than a segment, so that a checkpoint moves the zeros to the extents.
    let oldest_segment = || {
        let store = folder.path().join("0").join(volume.shape().volume().to_string());
        let names = std::fs::read_dir(store).unwrap().map(|entry| entry.unwrap());
        let segments: Vec<_> =
            names.filter(|entry| entry.file_name().to_string_lossy().starts_with("journal-")).collect();
        let numbers =
            segments.iter().filter_map(|entry| entry.file_name().to_str()?.strip_prefix("journal-")?.parse().ok());
        (numbers.min().unwrap_or(0_u64), segments[0].metadata().unwrap().size())
    };
    let (first, bytes) = oldest_segment();
    let data: Vec<u8> = (0..1000).flat_map(|block| content(18_000 + block, 3)).collect();
    for _ in 0..=bytes / (1000 * BLOCK_BYTES as u64) {
        volume.write(18_000, data.clone()).unwrap();
    }
    until("a checkpoint is complete", || oldest_segment().0 > first);
    is_there(&volume);
    drop(volume);
    restart(&mut servers);
    is_there(&servers.open(&options()));
}
