//! What a journal holds whose writer has ended, at any point of its work.

use std::sync::Arc;

use remora_fabric::View;

use super::{in_place::InPlace, track::Track};
use crate::{error::Error, expectation::Expectation};

/// Passes all bytes of a journal from `start` on to `take`, in order. No process may write it any more. An append that
/// its writer did not complete is not there: readers could not have got it either.
///
/// # Errors
/// It is another table than expected, no longer reaches back to `start`, or is damaged; and what `take` fails with.
pub fn journal_left<E: From<Error>>(
    view: &Arc<View>,
    expect: Expectation,
    start: u64,
    mut take: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let geometry = expect.geometry.checked()?;
    let mut memory = InPlace::new(view.clone(), &geometry)?;
    let mut track = Track::new(expect, start);
    while !track.is_at_end() {
        // It fails after some attempts if its writer ended in the middle of a change of the line.
        memory.look(&mut track)?;
        while let Some(chunk) = track.take() {
            take(&chunk.bytes)?;
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_fabric::Memory;

    use super::*;
    use crate::tests::{FIRST_OFFSET, Random, expect, identity, used_memory};
    use crate::{Geometry, JournalWriter, Kind};

    const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 4 };

    fn view(memory: &Memory) -> Arc<View> {
        Arc::new(View::open(memory.as_fd().try_clone_to_owned().unwrap(), memory.length()).unwrap())
    }

    fn left(memory: &Memory, start: u64) -> Result<Vec<u8>, Error> {
        let mut found = Vec::new();
        journal_left(&view(memory), expect(GEOMETRY), start, |bytes| {
            found.extend_from_slice(bytes);
            Ok::<_, Error>(())
        })?;
        Ok(found)
    }

    #[test]
    fn all_bytes_from_the_offset_on_are_found_after_every_append_and_after_an_abort() {
        for seed in 0..20 {
            let mut random = Random(seed);
            let memory = used_memory(&GEOMETRY, &mut random);
            let mut writer = JournalWriter::create(memory.clone(), GEOMETRY, identity(Kind::Journal)).unwrap();
            let mut truth = Vec::new();
            assert_eq!(left(&memory, FIRST_OFFSET + 1).unwrap(), b"", "nothing was appended");
            for _ in 0..80 {
                let length = 1 + random.below(900) as usize;
                let bytes = random.bytes(length);
                writer.append(&bytes).unwrap();
                truth.extend_from_slice(&bytes);
                let skip = (writer.first_offset() - FIRST_OFFSET - 1) as usize;
                assert_eq!(left(&memory, writer.first_offset()).unwrap(), &truth[skip..], "seed {seed}");
            }
            assert_eq!(left(&memory, writer.end_offset() - 1).unwrap(), &truth[truth.len() - 1..]);
            assert_eq!(left(&memory, writer.end_offset()).unwrap(), b"");
            let error = left(&memory, FIRST_OFFSET + 1).unwrap_err();
            assert!(matches!(error, Error::Overrun { .. }), "the first bytes were overwritten: {error}");
            writer.abort();
            assert_eq!(left(&memory, writer.end_offset() - 1).unwrap(), &truth[truth.len() - 1..]);
        }
    }

    #[test]
    fn what_its_writer_did_not_publish_is_not_there_and_damage_is_found() {
        let memory = used_memory(&GEOMETRY, &mut Random(3));
        let mut writer = JournalWriter::create(memory.clone(), GEOMETRY, identity(Kind::Journal)).unwrap();
        writer.append(b"published").unwrap();
        // A writer that was killed between the bytes of a record and the line.
        memory.write(GEOMETRY.slot_offset(0) + 8 + 9, &[0xff; 64]).unwrap();
        assert_eq!(left(&memory, FIRST_OFFSET + 1).unwrap(), b"published");
        memory.write(GEOMETRY.slot_offset(0) + 8, b"P").unwrap();
        left(&memory, FIRST_OFFSET + 1).unwrap_err();
        // A writer that was killed in the middle of a change of the line.
        let memory = used_memory(&GEOMETRY, &mut Random(4));
        JournalWriter::create(memory.clone(), GEOMETRY, identity(Kind::Journal)).unwrap();
        memory.write(crate::layout::LINE_OFFSET, &[1]).unwrap();
        left(&memory, FIRST_OFFSET + 1).unwrap_err();
    }
}
