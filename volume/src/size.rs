//! Size: how many blocks a copy has, and how many it had before a growth that is not agreed yet.
//!
//! ```text
//!                  grow                      agree, or a promise to a writer of the new size
//!   agreed ─────────────────▶ not agreed ─────────────────────────────────────────────────▶ agreed
//!      ▲                          │
//!      └──────────────────────────┘
//!        a writer of the former size opens the volume, or the command goes back
//! ```
//!
//! The command that makes a volume larger has every copy grow, then writes the size into the volume's file, then tells
//! the servers. It or a server can vanish between any two of these steps. The file decides: a writer opens the volume
//! with the size of the file, so a copy that has grown waits for the first writer. One of the former size: the growth
//! never took place, and the copy goes back. One of the new size: it did.
//!
//! A copy that was away while the others grew has the former size, agreed. The writer that serves has the promises of
//! so many copies of the new size that no writer of another size can serve, so it has that copy grow.

#[cfg(test)]
use crate::mutant::Mutant;

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
