//! A checking writer: each block says which write it is of, and the writer knows which of them were acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remora_lab::Random;
use remora_volume::client::{Error, Request, Volume};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::Run;

/// What block `block` holds after write `number`. Before the first one, zeros.
pub fn content(block: u64, number: u64) -> Vec<u8> {
    if number == 0 {
        return vec![0; BLOCK_BYTES];
    }
    let mut bytes = Random::new(number ^ block << 32).bytes(BLOCK_BYTES);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..16].copy_from_slice(&block.to_le_bytes());
    bytes
}

/// The write that a block is of. Panics if the block is not one that was written.
pub fn number_of(block: u64, bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes == content(block, number), "block {block} is not what write {number} has written");
    number
}

/// What a writer knows of each block.
#[derive(Default)]
pub struct Ledger {
    /// The last write that was submitted.
    submitted: BTreeMap<u64, u64>,
    /// The last write that was acknowledged.
    acknowledged: BTreeMap<u64, u64>,
    pub acknowledgements: u64,
    pub failures: Vec<Error>,
}

/// A writer of random blocks, and now and then of zeros.
pub struct Checker {
    pub ledger: Arc<Mutex<Ledger>>,
    random: Random,
    next: u64,
    /// Blocks that were written as zeros, with the numbers of these writes.
    zeros: BTreeSet<(u64, u64)>,
    /// The most blocks of a write.
    most: u64,
}

impl Checker {
    pub fn new(seed: u64) -> Checker {
        Checker::of(seed, 8)
    }

    /// A writer of up to `most` blocks at once.
    pub fn of(seed: u64, most: u64) -> Checker {
        Checker { ledger: Arc::default(), random: Random::new(seed), next: 1, zeros: BTreeSet::new(), most }
    }

    /// Submits a write. Returns whether the volume still took it.
    pub fn write(&mut self, volume: &Volume) -> bool {
        let number = self.next;
        self.next += 1;
        let blocks = volume.shape().blocks();
        let count = self.random.between(1, self.most.min(blocks));
        let first = self.random.below(blocks - count + 1);
        let request = if self.random.one_in(6) {
            self.zeros.extend((first..first + count).map(|block| (block, number)));
            Request::Zero(Run { first, count: count as u32 })
        } else {
            Request::write(first, (first..first + count).flat_map(|block| content(block, number)).collect::<Vec<u8>>())
        };
        for block in first..first + count {
            self.ledger.lock().unwrap().submitted.insert(block, number);
        }
        let ledger = Arc::clone(&self.ledger);
        let submitted = volume.submit(request, move |done| {
            let mut ledger = ledger.lock().unwrap();
            match done {
                Ok(_) => {
                    ledger.acknowledgements += 1;
                    for block in first..first + count {
                        let acknowledged = ledger.acknowledged.entry(block).or_default();
                        assert!(*acknowledged < number, "acknowledged in the order of the writes");
                        *acknowledged = number;
                    }
                }
                Err(error) => ledger.failures.push(error),
            }
        });
        submitted.is_ok()
    }

    /// The write that a block is of. Zeros do not say so: they are of the last such write up to `most`.
    fn number_of(&self, block: u64, bytes: &[u8], most: u64) -> u64 {
        match number_of(block, bytes) {
            0 => self.zeros.range((block, 0)..=(block, most)).next_back().map_or(0, |&(_, number)| number),
            number => number,
        }
    }

    /// Takes what the volume holds for acknowledged, once its writer was replaced: what was under way is now either there
    /// for good, or undone for good.
    pub fn settle(&self, volume: &Volume) {
        let mut ledger = self.ledger.lock().unwrap();
        for block in 0..volume.shape().blocks() {
            let most = ledger.submitted.get(&block).copied().unwrap_or_default();
            let number = self.number_of(block, &volume.read(block, 1).unwrap(), most);
            ledger.acknowledged.insert(block, number);
            ledger.submitted.insert(block, number);
        }
    }

    /// Reads every block. Each must be of the last write that was acknowledged, or of one submitted since. Returns
    /// how many were written.
    pub fn check(&self, volume: &Volume) -> usize {
        let blocks = volume.shape().blocks();
        let mut written = 0;
        for first in (0..blocks).step_by(64) {
            let count = 64.min(blocks - first) as u32;
            let (acknowledged, submitted) = {
                let ledger = self.ledger.lock().unwrap();
                (ledger.acknowledged.clone(), ledger.submitted.clone())
            };
            let data = volume.read(first, count).unwrap();
            for (block, bytes) in (first..).zip(data.chunks_exact(BLOCK_BYTES)) {
                let least = acknowledged.get(&block).copied().unwrap_or_default();
                let most = submitted.get(&block).copied().unwrap_or_default();
                let number = self.number_of(block, bytes, most);
                assert!((least..=most).contains(&number), "block {block} is of write {number}, not {least} to {most}");
                written += usize::from(number > 0);
            }
        }
        written
    }
}

/// How long a write took.
fn took(volume: &Volume, checker: &mut Checker) -> Duration {
    let began = Instant::now();
    assert!(checker.write(volume));
    volume.flush().unwrap();
    began.elapsed()
}

/// Writes for a while. Returns the longest time that an acknowledged write took.
pub fn write_for(volume: &Volume, checker: &mut Checker, time: Duration) -> Duration {
    let until = Instant::now() + time;
    let mut longest = Duration::ZERO;
    while Instant::now() < until {
        longest = longest.max(took(volume, checker));
    }
    longest
}

/// Waits until every copy is whole, while writes go on.
pub fn all_are_whole(volume: &Volume, checker: &mut Checker) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while volume.members().len() < 3 {
        assert!(Instant::now() < deadline, "a copy was not taken back within 30 s: {:?}", volume.members());
        took(volume, checker);
    }
}
