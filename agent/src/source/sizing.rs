//! Sizing: how the memory of a source is divided, and how long a snapshot will be. Pure.
//!
//! ```text
//!   --memory ─┬─ --journal-memory (a quarter) ──▶ journal   (half of it, if other hosts read a sealed one)
//!             └─ the rest ──────────────────────▶ snapshot  (half of it, if other hosts read a sealed or compressed one)
//! ```
//!
//! A source makes its tables so, and `remora plan` says beforehand what they will be.

use remora_table::Geometry;

use crate::args::{CompressChoice, SourceArgs};
use crate::exit::Failure;
use crate::server::Facts;
use crate::units::Size;

/// What a source is told about its memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Bytes in all.
    pub(crate) memory: u64,
    /// Bytes of the journal; `None`: the default share.
    pub(crate) journal: Option<u64>,
    /// Bytes of a slot.
    pub(crate) slot: u64,
    /// Other hosts read ciphertext.
    pub(crate) is_sealed: bool,
    pub(crate) compress: CompressChoice,
}

/// How the memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    pub(crate) snapshot: Geometry,
    pub(crate) journal: Geometry,
    /// How slots are compressed for other hosts.
    pub(crate) compress: CompressChoice,
    is_sealed: bool,
}

/// The journal's default share of the memory: one in this many bytes.
const JOURNAL_SHARE: u64 = 4;

/// The largest slot of the journal, in bytes: small enough that late readers lose little when the oldest slot is
/// overwritten, large enough that readers load entries seldom.
const JOURNAL_SLOT: u32 = 1 << 20;

impl Wanted {
    /// What the options of a source say.
    pub(super) fn of(args: &SourceArgs, is_sealed: bool) -> Wanted {
        Wanted {
            memory: args.memory.get(),
            journal: args.journal_memory.map(Size::get),
            slot: args.slot_size().get(),
            is_sealed,
            compress: args.compress,
        }
    }
}

impl Shares {
    /// Divides the memory.
    ///
    /// # Errors
    /// It is too small.
    pub(crate) fn of(wanted: &Wanted) -> Result<Shares, Failure> {
        let (total, is_sealed) = (wanted.memory, wanted.is_sealed);
        let journal = wanted.journal.unwrap_or(total / JOURNAL_SHARE);
        if journal >= total {
            let text = format!(
                "--journal-memory {} leaves nothing of --memory {} for the snapshot; set a smaller --journal-memory",
                Size::bytes(journal),
                Size::bytes(total)
            );
            return Err(Failure::refused(text));
        }
        let slot = |size: u64| u32::try_from(size).unwrap_or(u32::MAX);
        let compress = compressing(wanted.compress, is_sealed);
        // What other hosts read takes half of it.
        let (for_snapshot, for_journal) =
            ((total - journal) / copies(is_sealed, compress), journal / sealed(is_sealed));
        let journal_slot = slot((for_journal / 8).min(2 * u64::from(JOURNAL_SLOT))).next_power_of_two() / 2;
        Ok(Shares {
            snapshot: within(for_snapshot, slot(wanted.slot))?,
            journal: within(for_journal, journal_slot)?,
            compress,
            is_sealed,
        })
    }

    /// Whether other hosts read another snapshot than this host does.
    pub(super) fn is_twice(&self) -> bool {
        copies(self.is_sealed, self.compress) > 1
    }

    /// The bytes of all slots of the snapshot.
    pub(crate) fn ring(&self) -> u64 {
        ring(&self.snapshot)
    }

    /// Whether they hold the whole snapshot of this server, as far as its INFO tells.
    pub(crate) fn hold(&self, facts: &Facts) -> bool {
        expected(facts, self.snapshot) <= self.ring()
    }

    /// Bytes of memory that a snapshot of this length takes. Slots that are compressed for sure take less.
    pub(crate) fn in_use_by_a_snapshot(&self, bytes: u64) -> u64 {
        (self.snapshot.data_offset() + bytes.min(self.ring())) * copies(self.is_sealed, self.compress)
    }

    /// Bytes of memory that the journal takes when it is full.
    pub(crate) fn in_use_by_the_journal(&self) -> u64 {
        self.journal.memory_len() * sealed(self.is_sealed)
    }

    /// Bytes of the stream that the journal holds.
    pub(crate) fn journal_ring(&self) -> u64 {
        ring(&self.journal)
    }
}

fn copies(is_sealed: bool, compress: CompressChoice) -> u64 {
    if is_sealed || compress != CompressChoice::Off { 2 } else { 1 }
}

fn sealed(is_sealed: bool) -> u64 {
    if is_sealed { 2 } else { 1 }
}

/// The bytes of all slots of a table.
pub(super) fn ring(geometry: &Geometry) -> u64 {
    u64::from(geometry.slot_size) * u64::from(geometry.slots)
}

/// The largest table within these bytes.
pub(super) fn within(budget: u64, slot_size: u32) -> Result<Geometry, Failure> {
    Geometry::within(budget, slot_size)
        .map_err(|error| Failure::refused(format!("--memory is too small for its slots: {error}")))
}

/// How slots are compressed. Where nothing is sealed, other hosts read the plain table, and `auto` leaves it at that:
/// compressed slots would need as much memory again.
fn compressing(choice: CompressChoice, is_sealed: bool) -> CompressChoice {
    match choice {
        CompressChoice::Auto if !is_sealed => CompressChoice::Off,
        choice => choice,
    }
}

/// An upper estimate of the snapshot's size in bytes, from the server's INFO. Data take more bytes in memory than in a
/// snapshot, except for large values, which take about as many.
pub(crate) fn expected(facts: &Facts, geometry: Geometry) -> u64 {
    let dataset = facts.used_memory_dataset.or(facts.used_memory).unwrap_or(0);
    dataset.saturating_add(dataset / 16).saturating_add(2 * u64::from(geometry.slot_size))
}

/// The least memory in bytes of which this is true, in whole MiB; `None` if there is none.
pub(crate) fn least_memory(is_enough: impl Fn(u64) -> bool) -> Option<u64> {
    let mebibytes = |count: u64| count << 20;
    let mut high = LEAST_MEBIBYTES;
    while !is_enough(mebibytes(high)) {
        if high >= MOST_MEBIBYTES {
            return None;
        }
        high *= 2;
    }
    let mut low = (high / 2).max(LEAST_MEBIBYTES - 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if is_enough(mebibytes(middle)) { high = middle } else { low = middle }
    }
    Some(mebibytes(high))
}

/// The least memory of an agent.
const LEAST_MEBIBYTES: u64 = 16;

/// More than any host has.
const MOST_MEBIBYTES: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const WANTED: Wanted =
        Wanted { memory: 1 << 30, journal: None, slot: 1 << 20, is_sealed: false, compress: CompressChoice::Auto };

    #[test]
    fn what_other_hosts_read_takes_half_where_it_is_another_table() {
        let plain = Shares::of(&WANTED).unwrap();
        let sealed = Shares::of(&Wanted { is_sealed: true, ..WANTED }).unwrap();
        let packed = Shares::of(&Wanted { compress: CompressChoice::Zstd, ..WANTED }).unwrap();
        assert_eq!((plain.is_twice(), sealed.is_twice(), packed.is_twice()), (false, true, true));
        assert_eq!((plain.compress, sealed.compress), (CompressChoice::Off, CompressChoice::Auto));
        assert_eq!((plain.ring() >> 20, sealed.ring() >> 20, packed.ring() >> 20), (767, 383, 383));
        assert!(sealed.journal_ring() < plain.journal_ring() && packed.journal_ring() == plain.journal_ring());
        for shares in [plain, sealed, packed] {
            let full = shares.in_use_by_a_snapshot(u64::MAX) + shares.in_use_by_the_journal();
            assert!(full <= WANTED.memory && full > WANTED.memory - (8 << 20), "{full}");
        }
    }

    #[test]
    fn a_journal_of_any_size_has_slots() {
        for memory in [16 << 20, 1 << 30, 64 << 30, 65 << 30, 1 << 40] {
            let shares = Shares::of(&Wanted { memory, slot: 1 << 20, ..WANTED }).unwrap();
            assert!((1 << 17..=JOURNAL_SLOT).contains(&shares.journal.slot_size), "{memory}: {:?}", shares.journal);
        }
    }

    #[test]
    fn a_journal_that_leaves_nothing_is_refused() {
        let why = |wanted| Shares::of(&wanted).unwrap_err().message;
        assert!(why(Wanted { journal: Some(1 << 30), ..WANTED }).contains("set a smaller --journal-memory"));
        assert!(why(Wanted { memory: 1 << 20, ..WANTED }).contains("too small for its slots"));
    }

    #[test]
    fn the_least_memory_is_the_border() {
        for border in [1, 16, 17, 1000, 4096, 123_456] {
            assert_eq!(least_memory(|memory| memory >= border << 20), Some(border.max(16) << 20), "{border}");
        }
        assert_eq!(least_memory(|_| false), None);
    }
}
