//! Shape: what of a volume never changes. Its identity, its size, and how many copies it has.

use std::fmt;

/// Bytes of a block: the unit that is written, checked and repaired.
pub const BLOCK_BYTES: usize = 4096;

/// The most blocks of a volume: 16 TiB. A copy must fit the memory of one server.
pub const MOST_BLOCKS: u64 = 1 << 32;

/// The identity of a volume: random, chosen when it is created. A volume that is created again has another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub [u8; 16]);

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What of a volume never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    volume: VolumeId,
    blocks: u64,
    copies: Copies,
}

impl Shape {
    /// A volume of that many blocks. `None` unless 1 ≤ `blocks` ≤ [`MOST_BLOCKS`].
    pub fn new(volume: VolumeId, blocks: u64, copies: Copies) -> Option<Shape> {
        (1..=MOST_BLOCKS).contains(&blocks).then_some(Shape { volume, blocks, copies })
    }

    /// Its identity.
    pub fn volume(self) -> VolumeId {
        self.volume
    }

    /// Its number of blocks.
    pub fn blocks(self) -> u64 {
        self.blocks
    }

    /// Its copies.
    pub fn copies(self) -> Copies {
        self.copies
    }
}

/// How many copies a volume has, and how many must hold a write before it is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    number: usize,
    hold: usize,
}

impl Copies {
    /// The most copies. More would cost the writer more bytes than they are worth.
    pub const MOST: usize = 5;

    /// A volume of `number` copies, of which `hold` must hold a write before it is acknowledged. `None` unless
    /// 1 ≤ `hold` ≤ `number` ≤ [`Copies::MOST`].
    pub fn new(number: usize, hold: usize) -> Option<Copies> {
        (1 <= hold && hold <= number && number <= Copies::MOST).then_some(Copies { number, hold })
    }

    /// The number of copies.
    pub fn number(self) -> usize {
        self.number
    }

    /// How many must hold a write.
    pub fn hold(self) -> usize {
        self.hold
    }

    /// How many servers must promise. At least one of them holds every acknowledged write, and any two writers that
    /// serve have asked a server in common.
    pub fn promises(self) -> usize {
        (self.number - self.hold + 1).max(self.hold)
    }
}
