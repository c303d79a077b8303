//! Shape: what of a volume never changes. Its identity, its size, and how many copies it has.

use std::fmt;

#[cfg(test)]
use crate::mutant::Mutant;

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

// Size: how many blocks a copy has, and how many it had before a growth that is not agreed yet.
//
// ```text
//                  grow                      agree, or a promise to a writer of the new size
//   agreed ─────────────────▶ not agreed ─────────────────────────────────────────────────▶ agreed
//      ▲                          │
//      └──────────────────────────┘
//        a writer of the former size opens the volume, or the command goes back
// ```
//
// The command that makes a volume larger has every copy grow, then writes the size into the volume's file, then tells
// the servers. It or a server can vanish between any two of these steps. The file decides: a writer opens the volume
// with the size of the file, so a copy that has grown waits for the first writer. One of the former size: the growth
// never took place, and the copy goes back. One of the new size: it did.
//
// A copy that was away while the others grew has the former size, agreed. The writer that serves has the promises of
// so many copies of the new size that no writer of another size can serve, so it has that copy grow.

/// How many blocks a copy has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    blocks: u64,
    /// What it had before it grew, as long as that is not agreed: fewer.
    former: Option<u64>,
}

/// What a writer finds that opens the volume with a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    /// The copy has that size.
    Same,
    /// The copy has grown and nobody has agreed to it: it goes back to that size first.
    GoesBack,
    /// The copy has another size.
    Other,
}

impl Size {
    /// As a store has kept it. `former`: the size was not agreed.
    pub(crate) fn kept(blocks: u64, former: Option<u64>) -> Size {
        #[cfg(test)]
        let former = former.filter(|_| !Mutant::FormerSizeForgotten.is_active());
        Size { blocks, former: former.filter(|former| (1..blocks).contains(former)) }
    }

    /// The blocks that the copy has.
    #[cfg(test)]
    pub(crate) fn blocks(self) -> u64 {
        self.blocks
    }

    /// What it had before a growth that is not agreed.
    pub(crate) fn former(self) -> Option<u64> {
        self.former
    }

    /// The last size that was agreed. No block behind it was ever written.
    fn least(self) -> u64 {
        self.former.unwrap_or(self.blocks)
    }

    /// A writer opens the volume with this size.
    pub(crate) fn opened_with(self, blocks: u64) -> Opened {
        match self.former {
            _ if blocks == self.blocks => Opened::Same,
            Some(former) if (former..self.blocks).contains(&blocks) => Opened::GoesBack,
            _ => Opened::Other,
        }
    }

    /// Whether the command may have the copy take this size: not less than was agreed.
    pub(crate) fn may_become(self, blocks: u64) -> bool {
        blocks >= self.least()
    }

    /// It has taken this size.
    pub(crate) fn becomes(self, blocks: u64) -> Size {
        let least = self.least();
        Size { blocks, former: Some(least).filter(|least| *least < blocks) }
    }

    /// The size is agreed: the command has said so, or a writer that has it was promised.
    pub(crate) fn agree(&mut self) {
        #[cfg(test)]
        if Mutant::GrowthNotAgreed.is_active() {
            return;
        }
        self.former = None;
    }
}
