//! Every byte of every file of a store is changed, one at a time: what is found then is right, or nothing is believed.

use std::sync::Arc;

use remora_fabric::memory::crc::crc32c;
use remora_lab::Random;

use super::files::{Failure, Files, Name};
use super::journal::{Journal, write_superblock};
use super::record::SLOT_BYTES;
use super::recovery;
use super::simulated::Simulated;
use crate::layout::Entry;
use crate::message::{Holder, Standing, State};
use crate::mutant::Mutant;
use crate::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
use crate::store::Store;
use crate::version::Generation;

const BLOCKS: u64 = 6;

/// Room for a few records.
const SEGMENT: u64 = 16 << 10;

/// How the process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    InPeace,
    Killed,
    /// After a pause, in which the superblock has said what is durable.
    PowerCut,
}

struct Written {
    device: Simulated,
    standing: Standing,
    blocks: Vec<(Entry, Vec<u8>)>,
}

fn shape() -> Shape {
    let shape = Copies::new(3, 2).and_then(|copies| Shape::new(VolumeId([1; 16]), BLOCKS, copies));
    shape.unwrap_or_else(|| unreachable!("a few blocks"))
}

/// A store with a checkpoint, records behind it, and a promise as its last event.
fn written(end: End) -> Result<Written, Failure> {
    let device = Arc::new(Simulated::new(1));
    let memory = Store::create(shape()).unwrap_or_else(|error| unreachable!("memory for a few blocks: {error}"));
    let mut version = Generation::NONE.next().unwrap_or_default().start();
    let mut standing = Standing { state: State::Whole, claim: version, applied: version, ..Standing::default() };
    let mut journal = recovery::create(Arc::clone(&device), shape(), SEGMENT, (9, [1; 16]), standing)?;
    let mut blocks = vec![(Entry::NONE, vec![0; BLOCK_BYTES]); BLOCKS as usize];
    let mut random = Random::new(3);
    for (number, block) in [0, 1, 2, 3, 0, 4, 1].into_iter().enumerate() {
        version = version.next().unwrap_or_default();
        // Whole blocks, a short text, and zeros.
        let mut bytes = random.bytes(BLOCK_BYTES);
        if block == 2 {
            bytes[20..].fill(0);
        }
        let is_zero = block == 3;
        let entry = if is_zero { Entry::zeros(version) } else { Entry::of(version, crc32c(&bytes)) };
        standing = Standing { applied: version, claim: version, ..standing };
        let part = [bytes.as_slice()];
        journal.append(standing, &[(block, entry)], if is_zero { &[] } else { &part })?;
        memory.put(block, entry, if is_zero { &[] } else { &bytes });
        blocks[block as usize] = (entry, if is_zero { vec![0; BLOCK_BYTES] } else { bytes });
        sync(&mut journal)?;
        if number == 4 {
            checkpoint(&mut journal, &memory)?;
        }
    }
    let promised = Holder { generation: Generation::NONE.next().unwrap_or_default(), writer: 77 };
    standing = Standing { promised: Some(promised), ..standing };
    journal.append(standing, &[], &[])?;
    sync(&mut journal)?;
    assert!(journal.is_unsaid(), "no record is behind the last one");
    if end != End::Killed {
        let superblock = journal.next_superblock(|superblock| superblock.is_clean = end == End::InPeace);
        write_superblock(&*device, superblock)?;
        assert!(!journal.is_unsaid());
    }
    if end == End::PowerCut {
        device.lock().cut_power();
    }
    drop(journal);
    let device = Arc::into_inner(device).unwrap_or_else(|| unreachable!("the journal has gone"));
    Ok(Written { device, standing, blocks })
}

fn sync(journal: &mut Journal<Simulated>) -> Result<(), Failure> {
    if let Some(sync) = journal.begin_sync() {
        sync.run()?;
        journal.synced(&sync);
    }
    Ok(())
}

fn checkpoint(journal: &mut Journal<Simulated>, memory: &Store) -> Result<(), Failure> {
    let Some((mut checkpoint, superblock)) = journal.begin_checkpoint() else { unreachable!("one is due") };
    checkpoint.announce(superblock)?;
    loop {
        let batch = checkpoint.next(journal, memory);
        if batch.is_empty() {
            break;
        }
        checkpoint.write(&batch)?;
    }
    checkpoint.sync()?;
    let superblock = checkpoint.superblock(journal);
    checkpoint.complete(superblock)?;
    checkpoint.end(journal);
    Ok(())
}

/// What a server makes of the files. `Ok(true)`: it has found all of it. `Ok(false)`: it knows that it has not.
fn judge(written: &Written, device: Simulated, boot: u8) -> Result<bool, String> {
    let memory = Store::create(shape()).map_err(|error| error.to_string())?;
    let found = match recovery::recover(Arc::new(device), [boot; 16], SEGMENT, &memory) {
        Ok(found) => found,
        Err(Failure::Lost { path, why }) if path.starts_with("simulated/") && !why.is_empty() => return Ok(false),
        Err(failure) => return Err(format!("it is not said which file is damaged: {failure}")),
    };
    let is_behind = found.standing.state == State::Behind && found.lacks.is_some();
    let state = if is_behind { State::Behind } else { State::Whole };
    let expected = Standing { state, is_cut: found.standing.is_cut, ..written.standing };
    if found.standing != expected {
        return Err(format!("{:?} instead of {expected:?}", found.standing));
    }
    for (number, (entry, bytes)) in (0..).zip(&written.blocks) {
        let mut read = vec![0; BLOCK_BYTES];
        match memory.get(number, &mut read) {
            Ok(has) if has == *entry && read == *bytes => {}
            Err(_) if is_behind => {} // it is missing, and the copy says so
            other => return Err(format!("block {number} is {other:?} instead of {entry:?}")),
        }
    }
    Ok(!is_behind)
}

/// Places in a file of this length: every byte of what is dense, and some of the blocks' bodies and of zeros.
fn places(name: Name, length: usize) -> Vec<usize> {
    let is_dense = |at: usize| match name {
        Name::Superblock => at % SLOT_BYTES < 160,
        Name::Extents => at < 512,
        // Records begin at multiples of a sector: heads with their changes, and ends of blocks.
        Name::Segment(_) => at % 4096 < 160 || at % 512 < 4,
    };
    (0..length).filter(|&at| is_dense(at) || at % 89 == 0).collect()
}

#[test]
#[ignore = "long: make test-all"]
fn no_changed_byte_of_a_store_goes_unnoticed() {
    for end in [End::InPeace, End::Killed, End::PowerCut] {
        let written = written(end).unwrap_or_else(|failure| panic!("{failure}"));
        let boot = if end == End::PowerCut { 2 } else { 1 };
        assert_eq!(judge(&written, written.device.copy(), boot), Ok(true), "{end:?}: nothing was changed");
        let segments = written.device.segments().unwrap_or_default();
        let names = [Name::Superblock, Name::Extents].into_iter().chain(segments.into_iter().map(Name::Segment));
        let (mut found, mut refused) = (0, 0);
        for name in names {
            for at in places(name, written.device.length(name)) {
                for by in [1, 0x80] {
                    let device = written.device.copy();
                    device.change(name, at, by);
                    match judge(&written, device, boot) {
                        Ok(true) => found += 1,
                        Ok(false) => refused += 1,
                        Err(why) => panic!("{end:?}: byte {at} of {name}: {why}"),
                    }
                }
            }
        }
        println!("{end:?}: {found} changes were without effect, and {refused} were noticed");
        assert!(refused > 1000 && found > 100);
    }
}

/// The promise is the last record, and nothing says that it was synced.
#[test]
fn a_changed_record_that_is_taken_for_a_torn_one_is_found() {
    let written = written(End::Killed).unwrap_or_else(|failure| panic!("{failure}"));
    let last = written.device.segments().unwrap_or_default().into_iter().max().map(Name::Segment);
    let Some(name) = last else { unreachable!("there is a segment") };
    let change = |mutant| {
        Mutant::set(mutant);
        let judged = (0..written.device.length(name)).step_by(4).try_for_each(|at| {
            let device = written.device.copy();
            device.change(name, at, 1);
            judge(&written, device, 1).map(drop)
        });
        Mutant::set(None);
        judged
    };
    assert_eq!(change(None), Ok(()));
    assert!(change(Some(Mutant::RotIsTorn)).is_err());
}
