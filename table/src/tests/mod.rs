//! Writers and readers against a plain oracle.
//!
//! [`peer`] is a peer whose reads are torn in every way, and has the readers that show that the checker would notice;
//! [`snapshot_model`] and [`journal_model`] apply random operations. A failing seed is printed; `REMORA_SEED=<seed>`
//! replays it.

#![allow(clippy::unwrap_used)]

mod copy;
mod examples;
mod journal_model;
mod peer;
mod sealed;
mod snapshot_model;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use remora_fabric::{Memory, Pages};
use remora_redis::ReplId;

use crate::layout::{ENTRY_WORDS, Entry, LINE_OFFSET, Line};
use crate::{
    Algorithm, Expectation, Geometry, Identity, Kind, Method, Origin, SealKey, SinkLayout, SnapshotSealer, State,
};

pub(super) const FIRST_OFFSET: u64 = 1000;

pub(super) fn identity(kind: Kind) -> Identity {
    Identity { kind, origin: origin() }
}

pub(super) fn origin() -> Origin {
    Origin { generation: 7, history: ReplId::try_from([b'a'; 40]).unwrap(), offset: FIRST_OFFSET }
}

pub(super) fn expect(geometry: Geometry) -> Expectation {
    Expectation::plain(origin(), geometry)
}

/// The key of a model's table: with half of the seeds it is plain, with a quarter each it has one of the ciphers.
pub(super) fn drawn_key(seed: u64) -> Option<SealKey> {
    let algorithm = match seed % 4 {
        1 => Algorithm::Aes256Gcm,
        3 => Algorithm::ChaCha20Poly1305,
        _ => return None,
    };
    Some(SealKey::new(algorithm, [7; SealKey::SECRET_BYTES]))
}

/// The sealer of a model's table: that of a sealed one, of one with compressed slots with two of eight seeds, or both.
/// `None`: readers read the plain one.
pub(super) fn drawn_sealer(
    plain: &Arc<Memory>,
    stored: &Arc<Memory>,
    geometry: Geometry,
    seed: u64,
) -> Option<SnapshotSealer> {
    let (plain, stored, key) = (Arc::clone(plain), Arc::clone(stored), drawn_key(seed));
    let identity = identity(Kind::Snapshot);
    let sealer = match (drawn_compressed(seed), &key) {
        (true, key) => SnapshotSealer::create_compressed(plain, stored, geometry, identity, key.as_ref()),
        (false, Some(key)) => SnapshotSealer::create(plain, stored, geometry, identity, key),
        (false, None) => return None,
    };
    Some(sealer.unwrap())
}

pub(super) fn drawn_compressed(seed: u64) -> bool {
    seed % 8 >= 6
}

/// Seals everything that is complete, each slot in another way.
pub(super) fn seal_all(sealer: &mut SnapshotSealer) {
    loop {
        let method = [None, Some(Method::Lz4), Some(Method::Zstd)][sealer.sealed_slots() as usize % 3];
        sealer.compress_with(method);
        if !sealer.pump().unwrap() {
            return;
        }
    }
}

/// What readers of the table with that seed expect, if they do not read the plain one.
pub(super) fn expect_of(geometry: Geometry, seed: u64) -> Expectation {
    let key = drawn_key(seed);
    expect_drawn(Kind::Snapshot, geometry, key.as_ref()).with_compressed_slots(drawn_compressed(seed))
}

/// What readers of a table with that key expect.
pub(super) fn expect_drawn(kind: Kind, geometry: Geometry, key: Option<&SealKey>) -> Expectation {
    key.map_or_else(|| expect(geometry), |key| Expectation::sealed(kind, origin(), geometry, key).unwrap())
}

/// What readers of the table that is sealed with [`key`] expect.
pub(super) fn expect_sealed(kind: Kind, geometry: Geometry) -> Expectation {
    Expectation::sealed(kind, origin(), geometry, &key()).unwrap()
}

pub(super) fn key() -> SealKey {
    SealKey::new(Algorithm::best(), [7; SealKey::SECRET_BYTES])
}

pub(super) fn memory(length: u64) -> Arc<Memory> {
    Arc::new(Memory::create("table-test", length, Pages::Small).unwrap())
}

/// Memory as a writer may get it: random bytes, and at some places a valid entry or line of another table.
pub(super) fn used_memory(geometry: &Geometry, random: &mut Random) -> Arc<Memory> {
    let memory = memory(geometry.memory_len());
    memory.write(0, &random.bytes(geometry.memory_len() as usize)).unwrap();
    let line = Line { published: random.below(1 << 20), retired: random.below(64), end: None, state: State::Open };
    for (at, word) in (LINE_OFFSET..).step_by(8).zip(line.to_words(None)) {
        memory.store_u64(at, word, Relaxed).unwrap();
    }
    for place in 0..u64::from(geometry.slots) {
        let number = place + u64::from(geometry.slots) * random.below(5);
        let (position, length) = (random.below(1 << 20), random.below(4097) as u32);
        let entry = Entry { writing: random.one_in(4), ..Entry::plain(number, position, length, random.next() as u32) };
        if random.one_in(3) {
            continue;
        }
        for (at, word) in
            (geometry.entry_offset(number)..).step_by(8).zip(entry.to_words(None).into_iter().take(ENTRY_WORDS))
        {
            memory.store_u64(at, word, Relaxed).unwrap();
        }
    }
    memory
}

/// A sink with this many slot buffers, and its layout.
pub(super) fn sink(geometry: Geometry, buffers: u32) -> (Arc<Memory>, SinkLayout) {
    let layout = SinkLayout { offset: 0, buffers };
    (memory(layout.length(&geometry)), layout)
}

/// Random numbers that repeat for a seed: splitmix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to `bound - 1`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(super) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(length).collect()
    }

    /// Bytes of which compressors make something; `compressible`: or as [`bytes`](Self::bytes).
    pub(super) fn text(&mut self, length: usize, compressible: bool) -> Vec<u8> {
        if !compressible {
            return self.bytes(length);
        }
        (0..length.div_ceil(8)).flat_map(|_| (self.below(50) * 0x0101_0101).to_be_bytes()).take(length).collect()
    }
}

/// Runs `body` with many seeds, or with the one in `REMORA_SEED`; prints the one that failed.
pub(super) fn for_seeds(count: u64, body: impl Fn(u64)) {
    let seeds = match std::env::var("REMORA_SEED") {
        Ok(seed) => vec![seed.parse().expect("REMORA_SEED is a number")],
        Err(_) => (0..count).collect(),
    };
    for seed in seeds {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(seed)));
        if let Err(panic) = outcome {
            eprintln!("failed with seed {seed}: replay with REMORA_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
