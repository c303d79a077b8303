//! Whether a snapshot is complete whose writer has ended.

use remora_fabric::View;

use crate::{
    error::Error,
    expectation::Expectation,
    layout::{HEAD_BYTES, Kind, State},
    publish::load_line,
};

/// The number of slots of the expected snapshot, if the memory has all of them, so that readers may be given it. No
/// process may write it any more. The bytes of the slots are not read: readers check each.
///
/// # Errors
/// It is another table than expected, or damaged.
pub fn snapshot_left(view: &View, expect: &Expectation) -> Result<Option<u64>, Error> {
    let geometry = expect.geometry.checked()?;
    if view.length() < geometry.memory_len() {
        return Err(Error::Layout(format!(
            "the memory has {} bytes, its table {}",
            view.length(),
            geometry.memory_len()
        )));
    }
    let mut bytes = [0; HEAD_BYTES];
    view.read(0, &mut bytes)?;
    expect.check(&bytes, Kind::Snapshot)?;
    // A line that was caught in the middle of a change was not the last one.
    let line = load_line(&view, expect.seal())?;
    let whole = line.filter(|line| line.state == State::Sealed && line.retired == 0);
    Ok(whole.map(|line| line.published.div_ceil(geometry.slot_bytes())))
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::tests::{Random, expect, identity, origin, used_memory};
    use crate::{Geometry, SnapshotWriter};

    const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 4 };

    #[test]
    fn only_a_complete_snapshot_of_that_generation_is_taken_as_whole() {
        let memory = used_memory(&GEOMETRY, &mut Random(1));
        assert!(snapshot_left(&memory, &expect(GEOMETRY)).is_err(), "there is no table yet");
        let mut writer = SnapshotWriter::create(memory.clone(), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
        assert_eq!(writer.append(&[7; 6000]).unwrap(), 6000);
        assert_eq!(snapshot_left(&memory, &expect(GEOMETRY)).unwrap(), None, "it is still being written");
        writer.finish(0).unwrap();
        assert_eq!(snapshot_left(&memory, &expect(GEOMETRY)).unwrap(), Some(2));
        let mut other = origin();
        other.generation += 1;
        let error = snapshot_left(&memory, &Expectation::plain(other, GEOMETRY)).unwrap_err();
        assert!(matches!(error, Error::WrongGeneration { .. }), "{error}");
        // One that reused slots no longer has its first ones.
        let mut writer = SnapshotWriter::create(memory.clone(), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
        assert_eq!(writer.append(&[7; 4 * 4096]).unwrap(), 4 * 4096);
        writer.retire(1);
        assert_eq!(writer.append(&[7; 4096]).unwrap(), 4096);
        writer.finish(0).unwrap();
        assert_eq!(snapshot_left(&memory, &expect(GEOMETRY)).unwrap(), None);
    }
}
