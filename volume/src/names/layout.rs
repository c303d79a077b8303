//! Layout: where the parts of a file system are in a volume.
//!
//! ```text
//! block 0   1        1 + area    1 + 2·area, next cluster
//! │ head    │ area 0 │ area 1    │ clusters: 16 blocks each, 64 KiB …
//! ```
//!
//! One of the areas is in use: an image of all names, and behind it the log of what has changed since. The other one is
//! where the next image goes. The head says which one it is. It is one block, so a write of it is all or nothing.

use remora_fabric::memory::crc::crc32c;

use crate::shape::{BLOCK_BYTES, MOST_BLOCKS};

/// Blocks of a cluster, the unit in which files have space. With smaller ones, lists of them would be longer; with
/// larger ones, small files would take more.
pub const CLUSTER_BLOCKS: u64 = 16;

/// Bytes of a cluster.
pub const CLUSTER_BYTES: u64 = CLUSTER_BLOCKS * BLOCK_BYTES as u64;

/// First bytes of every head.
const MAGIC: [u8; 8] = *b"REMORAFS";

/// Changes with every change of the head or of a record.
pub const VERSION: u32 = 1;

/// Of this number of parts of a volume, each area is one.
const AREA_PART: u64 = 64;

/// The least blocks of an area: 256 KiB, room for about a thousand files.
const LEAST_AREA: u64 = 64;

/// The most blocks of an area: 512 MiB, room for about two million files.
const MOST_AREA: u64 = 128 << 10;

/// The least blocks of an area that a head may name. It holds a few frames.
const LEAST_NAMED_AREA: u64 = 8;

/// The least blocks of a volume with files: 4 MiB.
pub const LEAST_BLOCKS: u64 = 1024;

/// The sizes of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    blocks: u64,
    area: u64,
}

impl Geometry {
    /// For a volume of this number of blocks. `None`: it is too small.
    pub fn of(blocks: u64) -> Option<Geometry> {
        if blocks < LEAST_BLOCKS {
            return None;
        }
        Geometry::with_area(blocks, (blocks / AREA_PART).clamp(LEAST_AREA, MOST_AREA))
    }

    /// With areas of this number of blocks. `None`: no cluster is left, or an area is too small or too large.
    pub fn with_area(blocks: u64, area: u64) -> Option<Geometry> {
        let geometry = Geometry { blocks, area };
        let is_valid = blocks <= MOST_BLOCKS && (LEAST_NAMED_AREA..=MOST_AREA).contains(&area);
        (is_valid && geometry.first_of_clusters() + CLUSTER_BLOCKS <= blocks).then_some(geometry)
    }

    /// The blocks of the volume when it was last opened for writing.
    pub fn blocks(self) -> u64 {
        self.blocks
    }

    /// Blocks of an area.
    pub fn area(self) -> u64 {
        self.area
    }

    /// Bytes of an area.
    pub fn area_bytes(self) -> u64 {
        self.area * BLOCK_BYTES as u64
    }

    /// The first block of an area.
    pub fn area_at(self, area: Area) -> u64 {
        1 + self.area * u64::from(area.0)
    }

    /// The most bytes of an image, without frames: half of an area, less a part for frames and the blocks' ends.
    pub(super) fn image_limit(self) -> u64 {
        self.area_bytes() / 32 * 15
    }

    /// An image is begun when the log has filled this part of its area: three of four.
    pub(super) fn image_begins_at(self) -> u64 {
        self.area_bytes() / 4 * 3
    }

    fn first_of_clusters(self) -> u64 {
        (1 + 2 * self.area).next_multiple_of(CLUSTER_BLOCKS)
    }

    /// The number of clusters.
    pub fn clusters(self) -> u32 {
        // At most 2^32 blocks, so it fits.
        ((self.blocks - self.first_of_clusters()) / CLUSTER_BLOCKS) as u32
    }

    /// The first block of a cluster.
    pub fn cluster_at(self, cluster: u32) -> u64 {
        self.first_of_clusters() + u64::from(cluster) * CLUSTER_BLOCKS
    }
}

/// One of the two areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area(u8);

impl Area {
    /// The first one.
    pub const FIRST: Area = Area(0);

    /// The other one.
    pub fn other(self) -> Area {
        Area(1 - self.0)
    }
}

/// Which area is in use.
///
/// ```text
/// 0       8         12     16       24     32           40    48            56      64         72
/// │ magic │ version │ area │ blocks │ area │ lap in use │ lap │ image bytes │ first │ CRC-32C of what is before │
/// ```
///
/// `area` at 12 is the number of the area, at 24 the blocks of each. The rest of the block is zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The sizes of the parts.
    pub geometry: Geometry,
    /// The area in use.
    pub area: Area,
    /// Which use of an area this is. Each has its own number, and frames of another one have other checksums.
    pub lap: u64,
    /// The highest lap that was begun, perhaps without an end.
    pub last_lap: u64,
    /// Where the image in the area ends, and the log begins.
    pub image_bytes: u64,
    /// The number of the first frame of the log.
    pub first: u64,
}

/// Bytes of a head with something in them.
const HEAD_BYTES: usize = 72;

/// Why block 0 is not the head of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// It was never written, or is all zeros.
    #[error("the volume has no file system yet: make one with `remora volume format`")]
    Empty,
    /// It holds something else.
    #[error("the volume holds something other than files: its first block is not the head of a file system")]
    Foreign,
    /// It has another version.
    #[error("the files in the volume have format {0}, this program has {VERSION}: use the release that made them")]
    Version(u32),
    /// It is damaged.
    #[error("the head of the file system is damaged")]
    Damaged,
}

impl Head {
    /// The block.
    pub fn to_block(self) -> Vec<u8> {
        let mut block = Vec::with_capacity(BLOCK_BYTES);
        block.extend_from_slice(&MAGIC);
        block.extend_from_slice(&VERSION.to_le_bytes());
        block.extend_from_slice(&u32::from(self.area.0).to_le_bytes());
        let words = [self.geometry.blocks, self.geometry.area, self.lap, self.last_lap, self.image_bytes, self.first];
        words.iter().for_each(|word| block.extend_from_slice(&word.to_le_bytes()));
        debug_assert_eq!(block.len() + 8, HEAD_BYTES);
        let check = u64::from(crc32c(&block));
        block.extend_from_slice(&check.to_le_bytes());
        block.resize(BLOCK_BYTES, 0);
        block
    }

    /// Parses block 0.
    ///
    /// # Errors
    /// [`HeadError`].
    pub fn parse(block: &[u8]) -> Result<Head, HeadError> {
        if block.iter().all(|byte| *byte == 0) {
            return Err(HeadError::Empty);
        }
        let Some((bytes, _)) = block.split_first_chunk::<HEAD_BYTES>() else { return Err(HeadError::Damaged) };
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        if bytes[..8] != MAGIC {
            return Err(HeadError::Foreign);
        }
        let (version, area) = (word(8) as u32, (word(8) >> 32) as u32);
        if version != VERSION {
            return Err(HeadError::Version(version));
        }
        let geometry = Geometry::with_area(word(16), word(24)).ok_or(HeadError::Damaged)?;
        let [lap, last_lap, image_bytes, first] = [32, 40, 48, 56].map(word);
        let is_valid = word(64) == u64::from(crc32c(&bytes[..HEAD_BYTES - 8]))
            && area < 2
            && lap <= last_lap
            && last_lap < u64::MAX
            && first < u64::MAX / 2
            && image_bytes <= geometry.area_bytes();
        let head = Head { geometry, area: Area(area as u8), lap, last_lap, image_bytes, first };
        is_valid.then_some(head).ok_or(HeadError::Damaged)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn head(blocks: u64) -> Head {
        let geometry = Geometry::of(blocks).unwrap();
        Head { geometry, area: Area(1), lap: 7, last_lap: 9, image_bytes: 100, first: 33 }
    }

    #[test]
    fn heads_come_back_and_every_changed_bit_is_found() {
        let head = head(5000);
        let block = head.to_block();
        assert_eq!((block.len(), Head::parse(&block)), (BLOCK_BYTES, Ok(head)));
        for bit in 0..HEAD_BYTES * 8 {
            let mut block = block.clone();
            block[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::parse(&block).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn what_is_not_a_head_is_told_apart() {
        let mut block = head(5000).to_block();
        assert_eq!(Head::parse(&[0; BLOCK_BYTES]), Err(HeadError::Empty));
        assert_eq!(Head::parse(&[0x53; BLOCK_BYTES]), Err(HeadError::Foreign));
        assert_eq!(Head::parse(&block[..20]), Err(HeadError::Damaged));
        block[8] = 2;
        assert_eq!(Head::parse(&block), Err(HeadError::Version(2)));
    }

    /// Parts neither overlap nor leave the volume.
    #[test]
    fn parts_follow_each_other() {
        for blocks in [LEAST_BLOCKS, 1025, 131_072, 131_087, MOST_BLOCKS] {
            let geometry = Geometry::of(blocks).unwrap();
            assert_eq!(geometry.area_at(Area(1)), geometry.area_at(Area(0)) + geometry.area());
            assert!(geometry.cluster_at(0) >= geometry.area_at(Area(1)) + geometry.area());
            assert_eq!(geometry.cluster_at(0) % CLUSTER_BLOCKS, 0);
            let end = geometry.cluster_at(geometry.clusters() - 1) + CLUSTER_BLOCKS;
            assert!(end <= blocks && end + CLUSTER_BLOCKS > blocks, "{blocks}");
        }
        assert_eq!((Geometry::of(LEAST_BLOCKS - 1), Geometry::with_area(20, 8)), (None, None));
    }
}
