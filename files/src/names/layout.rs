//! Layout: where the parts of a file system are in a volume.
//!
//! ```text
//! block 0   1        1 + area    1 + 2·area, next cluster
//! │ head    │ area 0 │ area 1    │ clusters: 16 blocks each, 64 KiB …
//! ```
//!
//! One of the areas is in use: an image of all names, and behind it the log of what has changed since. The other one is
//! where the next image goes. The head says which one it is. It is one block, so a write of it is all or nothing.
//!
//! A volume that has grown has room for more names when it is next opened for writing: larger areas are laid out in
//! clusters that are free, the last ones. The first image there has all names, and the head that names the larger areas
//! is written behind it. The room before the first cluster is not used from then on.

use remora_memory::crc::crc32c;
use remora_volume::shape::{BLOCK_BYTES, MOST_BLOCKS};

/// Blocks of a cluster, the unit in which files have space. With smaller ones, lists of them would be longer; with
/// larger ones, small files would take more.
pub const CLUSTER_BLOCKS: u64 = 16;

/// Bytes of a cluster.
pub const CLUSTER_BYTES: u64 = CLUSTER_BLOCKS * BLOCK_BYTES as u64;

/// First bytes of every head.
const MAGIC: [u8; 8] = *b"REMORAFS";

/// Changes with every change of the head or of a record. It is that of the oldest release that can read the files.
pub const VERSION: u32 = 1;

/// The version of a head whose areas are not where `format` has put them.
const MOVED: u32 = 2;

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
    /// The first block of the areas; 1 as long as they are where `format` has put them.
    areas_at: u64,
    /// The first block of the first cluster.
    clusters_at: u64,
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
        if !(LEAST_NAMED_AREA..=MOST_AREA).contains(&area) {
            return None;
        }
        let clusters_at = (1 + 2 * area).next_multiple_of(CLUSTER_BLOCKS);
        Geometry { blocks, area, areas_at: 1, clusters_at }.checked()
    }

    fn checked(self) -> Option<Geometry> {
        let Geometry { blocks, area, areas_at, clusters_at } = self;
        if !(LEAST_NAMED_AREA..=MOST_AREA).contains(&area) {
            return None;
        }
        let is_cluster = |block: u64| block >= clusters_at && (block - clusters_at).is_multiple_of(CLUSTER_BLOCKS);
        let is_valid = blocks <= MOST_BLOCKS
            && clusters_at.is_multiple_of(CLUSTER_BLOCKS)
            && clusters_at >= CLUSTER_BLOCKS
            && clusters_at.checked_add(CLUSTER_BLOCKS).is_some_and(|end| end <= blocks);
        let has_areas = match areas_at {
            1 => 2 * area < clusters_at,
            at => is_cluster(at) && at.checked_add(2 * area).is_some_and(|end| end <= blocks),
        };
        (is_valid && has_areas).then_some(self)
    }

    /// The same, of a volume that has so many blocks now. `None`: these are too few.
    pub(super) fn of_larger(self, blocks: u64) -> Option<Geometry> {
        Geometry { blocks, ..self }.checked()
    }

    /// Whether a volume of this size that is formatted now gets areas that are larger by a quarter at least: less is
    /// not worth an image. `Some`: of how many clusters both are.
    pub(super) fn wants_room(self) -> Option<u32> {
        let best = (self.blocks / AREA_PART).clamp(LEAST_AREA, MOST_AREA);
        (best >= self.area + self.area.div_ceil(4)).then(|| (2 * best).div_ceil(CLUSTER_BLOCKS) as u32)
    }

    /// The same, with its areas in so many clusters from this one on.
    pub(super) fn moved(self, first: u32, clusters: u32) -> Option<Geometry> {
        let area = u64::from(clusters) * CLUSTER_BLOCKS / 2;
        Geometry { area: area.min(MOST_AREA), areas_at: self.cluster_at(first), ..self }.checked()
    }

    /// The clusters in which the areas are: the first one, and how many. `None`: they are before all clusters.
    pub(super) fn clusters_of_areas(self) -> Option<(u32, u32)> {
        let first = self.areas_at.checked_sub(self.clusters_at)? / CLUSTER_BLOCKS;
        Some((first as u32, (2 * self.area).div_ceil(CLUSTER_BLOCKS) as u32))
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
        self.areas_at + self.area * u64::from(area.0)
    }

    /// The most bytes of an image, without frames: half of an area, less a part for frames and the blocks' ends.
    pub(super) fn image_limit(self) -> u64 {
        self.area_bytes() / 32 * 15
    }

    /// An image is begun when the log has filled this part of its area: three of four.
    pub(super) fn image_begins_at(self) -> u64 {
        self.area_bytes() / 4 * 3
    }

    /// The number of clusters.
    pub fn clusters(self) -> u32 {
        // At most 2^32 blocks, so it fits.
        ((self.blocks - self.clusters_at) / CLUSTER_BLOCKS) as u32
    }

    /// The first block of a cluster.
    pub fn cluster_at(self, cluster: u32) -> u64 {
        self.clusters_at + u64::from(cluster) * CLUSTER_BLOCKS
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
/// `area` at 12 is the number of the area, at 24 the blocks of each. In version 2, the first block of the areas and
/// that of the clusters are at 64 and 72, and the checksum is at 80. The rest of the block is zeros.
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

/// Bytes of a head with something in them, and of one of areas that were moved.
const HEAD_BYTES: usize = 72;
const MOVED_BYTES: usize = HEAD_BYTES + 16;

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
        let Geometry { blocks, area, areas_at, clusters_at } = self.geometry;
        let is_moved = areas_at != 1;
        block.extend_from_slice(&(if is_moved { MOVED } else { VERSION }).to_le_bytes());
        block.extend_from_slice(&u32::from(self.area.0).to_le_bytes());
        let words = [blocks, area, self.lap, self.last_lap, self.image_bytes, self.first];
        let moved: &[u64] = if is_moved { &[areas_at, clusters_at] } else { &[] };
        words.iter().chain(moved).for_each(|word| block.extend_from_slice(&word.to_le_bytes()));
        debug_assert_eq!(block.len() + 8, if is_moved { MOVED_BYTES } else { HEAD_BYTES });
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
        let Some((bytes, _)) = block.split_first_chunk::<MOVED_BYTES>() else { return Err(HeadError::Damaged) };
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        if bytes[..8] != MAGIC {
            return Err(HeadError::Foreign);
        }
        let (version, area) = (word(8) as u32, (word(8) >> 32) as u32);
        let (geometry, length) = match version {
            VERSION => (Geometry::with_area(word(16), word(24)), HEAD_BYTES),
            MOVED => {
                let [blocks, area, areas_at, clusters_at] = [16, 24, 64, 72].map(word);
                let geometry = Geometry { blocks, area, areas_at, clusters_at }.checked();
                (geometry.filter(|geometry| geometry.areas_at != 1), MOVED_BYTES)
            }
            version => return Err(HeadError::Version(version)),
        };
        let geometry = geometry.ok_or(HeadError::Damaged)?;
        let [lap, last_lap, image_bytes, first] = [32, 40, 48, 56].map(word);
        let is_valid = word(length - 8) == u64::from(crc32c(&bytes[..length - 8]))
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
        let before = head(5000);
        let larger = before.geometry.of_larger(50_000).unwrap();
        let moved = larger.moved(larger.clusters() - 100, 100).unwrap();
        for (head, bytes) in [(before, HEAD_BYTES), (Head { geometry: moved, ..before }, MOVED_BYTES)] {
            let block = head.to_block();
            assert_eq!((block.len(), Head::parse(&block)), (BLOCK_BYTES, Ok(head)));
            for bit in 0..bytes * 8 {
                let mut block = block.clone();
                block[bit / 8] ^= 1 << (bit % 8);
                assert!(Head::parse(&block).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn what_is_not_a_head_is_told_apart() {
        let mut block = head(5000).to_block();
        assert_eq!(Head::parse(&[0; BLOCK_BYTES]), Err(HeadError::Empty));
        assert_eq!(Head::parse(&[0x53; BLOCK_BYTES]), Err(HeadError::Foreign));
        assert_eq!(Head::parse(&block[..20]), Err(HeadError::Damaged));
        block[8] = 3;
        assert_eq!(Head::parse(&block), Err(HeadError::Version(3)));
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
        assert_eq!(Geometry::with_area(u64::MAX, u64::MAX), None);
    }

    /// In a volume that has grown, the areas are in clusters of their own, and no other cluster has moved.
    #[test]
    fn larger_areas_are_in_clusters() {
        let small = Geometry::of(16_384).unwrap();
        assert_eq!((small.wants_room(), small.clusters_of_areas()), (None, None));
        let larger = small.of_larger(1 << 20).unwrap();
        let count = larger.wants_room().unwrap();
        let first = larger.clusters() - count;
        let moved = larger.moved(first, count).unwrap();
        assert_eq!((moved.area(), moved.wants_room()), ((1 << 20) / AREA_PART, None));
        assert_eq!(moved.clusters_of_areas(), Some((first, count)));
        assert_eq!(moved.area_at(Area(0)), moved.cluster_at(first));
        assert_eq!(moved.area_at(Area(1)) + moved.area(), moved.cluster_at(first + count - 1) + CLUSTER_BLOCKS);
        assert_eq!((moved.clusters(), moved.cluster_at(7)), (larger.clusters(), small.cluster_at(7)));
        assert_eq!(larger.moved(first + 1, count), None, "beyond the end");
        // The largest one, and one that is hardly larger.
        let most = small.of_larger(MOST_BLOCKS).unwrap();
        let count = most.wants_room().unwrap();
        assert_eq!(most.moved(most.clusters() - count, count).unwrap().area(), MOST_AREA);
        assert_eq!(small.of_larger(18_000).unwrap().wants_room(), None);
    }
}
