//! A disk as one file.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use remora_lab::Random;

use super::*;
use crate::Image;

fn opened(blocks: u64) -> (Arc<Memory>, Image) {
    let disk = Memory::new(blocks);
    let image = Image::open(Arc::clone(&disk) as Arc<dyn Disk>).unwrap();
    (disk, image)
}

fn bytes(image: &Image, at: u64, length: u32) -> Vec<u8> {
    wait(|done| image.read(at, length, done)).unwrap().concat()
}

#[test]
fn any_bytes_are_written_zeroed_and_read_as_in_a_plain_file() {
    let (disk, image) = opened(100);
    let mut plain = vec![0_u8; 100 * BLOCK_BYTES];
    let mut random = Random::new(remora_lab::random::seed("image"));
    for round in 0..2000 {
        let at = random.below(plain.len() as u64 - 1);
        let at = if random.one_in(3) { at / 4096 * 4096 } else { at / 512 * 512 };
        let length = random.between(1, 20_000).min(plain.len() as u64 - at);
        let part = at as usize..(at + length) as usize;
        if random.one_in(4) {
            plain[part].fill(0);
            wait(|done| image.zero(at, length, done)).unwrap();
        } else {
            let data = random.bytes(length as usize);
            plain[part].copy_from_slice(&data);
            wait(|done| image.write(at, data.into(), done)).unwrap();
        }
        let at = random.below(plain.len() as u64);
        let length = random.between(1, 30_000);
        let end = (at + length).min(plain.len() as u64);
        assert_eq!(bytes(&image, at, length as u32), plain[at as usize..end as usize], "round {round}");
    }
    assert!(
        disk.history().iter().any(|request| matches!(request, Request::Zero(_))),
        "whole blocks of zeros are not sent"
    );
    assert_eq!(bytes(&image, 100 << 12, 5), b"");
    assert!(wait(|done| image.write((100 << 12) - 1, Bytes::from_static(b"xy"), done)).is_err());
}

/// Sectors of the same blocks, as the kernel has them under way together.
#[test]
fn sectors_of_one_block_undo_nothing_of_each_other() {
    let disk = Memory::later(16, &[]);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                if !disk.finish() {
                    thread::yield_now();
                }
            }
        });
        let image = Image::open(Arc::clone(&disk) as Arc<dyn Disk>).unwrap();
        thread::scope(|scope| {
            for writer in 0..4_u64 {
                let image = &image;
                scope.spawn(move || {
                    for round in 1..60_u8 {
                        for sector in (writer..64).step_by(4) {
                            wait(|done| image.write(sector * 512, Bytes::from(vec![round; 512]), done)).unwrap();
                        }
                    }
                });
            }
        });
        assert!(bytes(&image, 0, 64 * 512).iter().all(|byte| *byte == 59));
        is_over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_volume_with_files_is_not_an_image() {
    let disk = formatted(BLOCKS);
    let opened = Image::open(Arc::clone(&disk) as Arc<dyn Disk>);
    assert!(matches!(opened.err(), Some(FilesError::HasFiles)));
}
