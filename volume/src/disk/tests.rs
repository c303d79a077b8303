//! Random plays of a copy and its store on a simulated device, until it loses its power, its process, or its bits. When
//! the power fails, the device loses what was not synced, sector by sector; syncs fail, and space ends.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::memory::crc::crc32c;
use remora_lab::Random;

use super::journal::{Journal, SLOT_BYTES, Superblock, Sync, write_superblock};
use super::recovery::{self, Batch, Checkpoint, Found};
use super::{Failure, Files, Name};
use crate::layout::{Entry, Store};
use crate::rules::{Generation, Holder, Mutant, Standing, State, Version};
use crate::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
use crate::tests::{self, play_for};

/// How long plays are played, if [`tests::time`] is not told otherwise.
const USUAL: Duration = Duration::from_secs(8);

/// Lives of one store.
const LIVES: usize = 5;

/// Some blocks, so that records meet and entries share a sector.
const BLOCKS: u64 = 6;

/// Room for a few records.
const SEGMENT: u64 = 16 << 10;

type Content = BTreeMap<u64, Entry>;

enum Step {
    Announcing(Checkpoint<Simulated>, Superblock),
    Copying(Checkpoint<Simulated>, Option<Batch>),
    /// All is copied; waits until everything up to this event is durable.
    Waiting(Checkpoint<Simulated>, u64),
    Synced(Checkpoint<Simulated>),
    Counting(Checkpoint<Simulated>, Superblock),
}

struct Play {
    random: Random,
    device: Arc<Simulated>,
    memory: Store,
    journal: Option<Journal<Simulated>>,
    standing: Standing,
    content: Content,
    /// The copy after each event of this life.
    history: BTreeMap<u64, (Standing, Content)>,
    /// Events that did not happen because the device was full. A power cut can bring one back, before a sync.
    refused: Vec<(u64, (Standing, Content))>,
    /// What the journal has said is durable.
    durable: u64,
    /// What each record says was durable before it, and what the last durable one says.
    said: BTreeMap<u64, u64>,
    evident: u64,
    sync: Option<Sync<Simulated>>,
    checkpoint: Option<Step>,
    boot: u8,
    counts: BTreeMap<&'static str, u64>,
}

fn shape() -> Shape {
    let copies = Copies::new(3, 2).unwrap_or_else(|| unreachable!("three copies"));
    Shape::new(VolumeId([1; 16]), BLOCKS, copies).unwrap_or_else(|| unreachable!("a few blocks"))
}

/// The block that a write leaves. Each sector of it is unlike those of other writes.
fn block(block: u64, version: Version) -> Vec<u8> {
    Random::new(version.word() ^ block << 32).bytes(BLOCK_BYTES)
}

impl Play {
    fn new(seed: u64) -> Result<Play, String> {
        let random = Random::new(seed);
        let device = Arc::new(Simulated::new(seed ^ 0x5eed));
        let memory = Store::create(shape()).map_err(|error| error.to_string())?;
        let start = Generation::NONE.next().unwrap_or_default().start();
        let standing = Standing { state: State::Whole, claim: start, applied: start, ..Standing::default() };
        let journal = recovery::create(Arc::clone(&device), shape(), SEGMENT, (seed, [1; 16]), standing);
        let journal = journal.map_err(|failure| failure.to_string())?;
        let event = journal.appended();
        Ok(Play {
            random,
            device,
            memory,
            journal: Some(journal),
            standing,
            content: Content::new(),
            history: BTreeMap::from([(event, (standing, Content::new()))]),
            refused: Vec::new(),
            said: BTreeMap::new(),
            evident: 0,
            durable: event,
            sync: None,
            checkpoint: None,
            boot: 1,
            counts: BTreeMap::new(),
        })
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Lives, deaths and recoveries.
    fn play(&mut self) -> Result<(), String> {
        for _ in 0..LIVES {
            for _ in 0..self.random.below(150) {
                match self.step() {
                    Ok(()) => {}
                    Err(Failure::Full { .. }) => self.count("the device was full"),
                    Err(Failure::Lost { .. }) => return self.lost(),
                }
            }
            if !self.end()? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), Failure> {
        match self.random.below(100) {
            0..=44 => self.append(),
            45..=54 => {
                if self.sync.is_none() {
                    self.sync = self.journal.as_mut().and_then(Journal::begin_sync);
                }
                Ok(())
            }
            55..=69 => self.run_sync(),
            70..=97 => self.checkpoint(),
            98 => {
                let is_full = self.random.one_in(2);
                self.device.lock().is_full = is_full;
                Ok(())
            }
            _ => {
                let fails = self.random.one_in(20);
                self.device.lock().fails_sync = fails;
                Ok(())
            }
        }
    }

    fn append(&mut self) -> Result<(), Failure> {
        let Some(version) = self.standing.applied.next() else { return Ok(()) };
        let (mut changes, mut bytes) = (Vec::new(), Vec::new());
        for _ in 0..self.random.below(4) {
            let at = self.random.below(BLOCKS);
            match self.random.below(8) {
                0 => changes.push((at, Entry::NONE)),
                1 | 2 => changes.push((at, Entry::zeros(version))),
                _ => {
                    let written = block(at, version);
                    changes.push((at, Entry::of(version, crc32c(&written))));
                    bytes.push(written);
                }
            }
        }
        let state = if self.random.one_in(10) { State::Behind } else { State::Whole };
        let standing = Standing { state, applied: version, claim: version, ..self.standing };
        let Some(journal) = &mut self.journal else { return Ok(()) };
        let (before, number) = (journal.appended(), journal.next());
        let parts: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        let appended = journal.append(standing, &changes, &parts);
        if appended.is_err() {
            assert_eq!(journal.appended(), before);
            let mut content = self.content.clone();
            content.extend(changes.iter().copied());
            self.refused.push((number, (standing, content)));
        }
        let event = appended?;
        self.said.insert(event, self.durable);
        let mut parts = parts.into_iter();
        for (at, entry) in changes {
            self.memory.put(at, entry, if entry.has_bytes() { parts.next().unwrap_or_default() } else { &[] });
            self.content.insert(at, entry);
        }
        self.standing = standing;
        self.history.insert(event, (standing, self.content.clone()));
        Ok(())
    }

    fn run_sync(&mut self) -> Result<(), Failure> {
        let (Some(sync), Some(journal)) = (self.sync.take(), &mut self.journal) else { return Ok(()) };
        sync.run()?;
        journal.synced(&sync);
        self.durable = sync.through;
        self.evident = self.said.get(&self.durable).copied().unwrap_or_default();
        Ok(())
    }

    /// One step, so that the power can fail between any two.
    fn checkpoint(&mut self) -> Result<(), Failure> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        let next = match self.checkpoint.take() {
            None => journal.begin_checkpoint().map(|(checkpoint, superblock)| Step::Announcing(checkpoint, superblock)),
            Some(Step::Announcing(checkpoint, superblock)) => {
                checkpoint.announce(superblock)?;
                Some(Step::Copying(checkpoint, None))
            }
            Some(Step::Copying(checkpoint, Some(batch))) => {
                if let Err(failure) = checkpoint.write(&batch) {
                    checkpoint.give_up(journal);
                    return Err(failure);
                }
                Some(Step::Copying(checkpoint, None))
            }
            Some(Step::Copying(mut checkpoint, None)) => {
                let batch = checkpoint.next(journal, &self.memory);
                let event = journal.appended();
                Some(match batch.is_empty() {
                    true => Step::Waiting(checkpoint, event),
                    false => Step::Copying(checkpoint, Some(batch)),
                })
            }
            Some(Step::Waiting(checkpoint, event)) if journal.is_synced(event) => {
                checkpoint.sync()?;
                Some(Step::Synced(checkpoint))
            }
            Some(Step::Synced(checkpoint)) => {
                let superblock = checkpoint.superblock(journal);
                Some(Step::Counting(checkpoint, superblock))
            }
            Some(Step::Counting(checkpoint, superblock)) => {
                checkpoint.complete(superblock)?;
                checkpoint.end(journal);
                self.count("a checkpoint");
                None
            }
            waiting => waiting,
        };
        self.checkpoint = next;
        Ok(())
    }

    /// The store has failed. No process believes it, and no power cut takes what was durable.
    fn lost(&mut self) -> Result<(), String> {
        self.count("a store was lost");
        if let Some(mut journal) = self.journal.take() {
            journal.lose();
        }
        self.device.lock().is_full = false;
        if self.random.one_in(2) {
            return match self.recover() {
                Err(Failure::Lost { .. }) => Ok(()),
                Ok(_) => Err("a store that had failed was believed".into()),
                Err(other) => Err(other.to_string()),
            };
        }
        self.device.lock().cut_power();
        self.boot += 1;
        match self.recover() {
            Err(Failure::Lost { .. }) => Ok(()),
            Ok(found) => self.check(&found, true, false, true),
            Err(other) => Err(other.to_string()),
        }
    }

    fn recover(&mut self) -> Result<Found<Simulated>, Failure> {
        self.memory = Store::create(shape()).unwrap_or_else(|error| unreachable!("memory for a few blocks: {error}"));
        recovery::recover(Arc::clone(&self.device), [self.boot; 16], SEGMENT, &self.memory)
    }

    /// A life ends, and another one begins. Returns whether the play goes on.
    fn end(&mut self) -> Result<bool, String> {
        (self.sync, self.checkpoint) = (None, None);
        let mut is_cut = false;
        match self.random.below(4) {
            0 => self.count("a process ended"),
            1 => {
                // In peace; then the power may fail.
                self.device.lock().is_full = false;
                self.device.lock().fails_sync = false;
                let Some(mut journal) = self.journal.take() else { return Ok(false) };
                let mut close = || -> Result<(), Failure> {
                    // A sync that was under way is done again.
                    let _ = journal.begin_sync();
                    for segment in self.device.segments().unwrap_or_default() {
                        let _ = self.device.sync(super::Name::Segment(segment));
                    }
                    let _ = self.device.sync_folder();
                    let superblock = journal.next_superblock(|superblock| superblock.is_clean = true);
                    write_superblock(&*self.device, superblock)
                };
                close().map_err(|failure| failure.to_string())?;
                self.durable = journal.appended();
                if self.random.one_in(2) {
                    self.device.lock().cut_power();
                    self.boot += 1;
                }
                self.count("a process was stopped");
            }
            _ => {
                self.device.lock().cut_power();
                self.boot += 1;
                is_cut = true;
                self.count("a power cut");
            }
        }
        self.device.lock().is_full = false;
        self.device.lock().fails_sync = false;
        let mut rotten = None;
        if self.random.one_in(6) {
            rotten = self.device.lock().rot();
            self.count("a bit was changed");
        }
        // The recovery, which the power may interrupt.
        let mut is_interrupted = false;
        if self.random.one_in(3) {
            let left = self.random.below(25);
            self.device.lock().left = Some(left);
            is_interrupted = self.recover().is_err();
            if is_interrupted {
                self.device.lock().cut_power();
                self.boot += 1;
                is_cut = true;
                self.count("a recovery was interrupted");
            } else {
                is_interrupted = true; // a life without an event
            }
            self.device.lock().left = None;
        }
        match self.recover() {
            Ok(found) => {
                let what = |why| format!("{why}; a changed bit: {rotten:?}, interrupted: {is_interrupted}");
                self.check(&found, is_cut, rotten.is_some(), is_interrupted).map_err(what)?;
                if found.lacks.is_some() || (rotten.is_some() && found.standing.state == State::Behind) {
                    self.count("damage was found");
                    return Ok(false);
                }
                self.standing = found.standing;
                let event = found.journal.appended();
                self.history = BTreeMap::from([(event, (self.standing, self.content.clone()))]);
                (self.durable, self.evident, self.journal) = (event, event, Some(found.journal));
                Ok(true)
            }
            Err(Failure::Lost { .. }) if rotten.is_some() => {
                self.count("damage was found");
                Ok(false)
            }
            Err(failure) => Err(format!("not recovered: {failure}")),
        }
    }

    /// What was found is the copy after an event that is not before the last one that was durable.
    fn check(
        &mut self,
        found: &Found<Simulated>,
        is_cut: bool,
        is_rotten: bool,
        is_interrupted: bool,
    ) -> Result<(), String> {
        if let Some(lacks) = &found.lacks {
            return match (is_rotten, found.standing.state) {
                (true, State::Behind) => Ok(()),
                _ => Err(format!("{lacks}, and the copy is {:?}", found.standing)),
            };
        }
        if is_rotten && found.standing.state == State::Behind {
            return Ok(()); // the recovery before this one has said so
        }
        if is_cut && !is_interrupted && !found.is_cut {
            return Err("a power cut is not said".into());
        }
        let last = self.history.keys().last().copied().unwrap_or_default();
        let refused = std::mem::take(&mut self.refused);
        // What has rotted since the last sync looks like a torn tail.
        let first = if is_cut { self.durable } else { last };
        let first = if is_rotten { first.min(self.evident) } else { first };
        let is_that = |event: u64, (standing, content): &(Standing, Content)| {
            let is_here = is_interrupted || event == found.last;
            let same = Standing { is_cut: false, ..*standing } == Standing { is_cut: false, ..found.standing };
            is_here && same && (0..BLOCKS).all(|at| self.is_in(at, content))
        };
        let refused =
            refused.iter().filter(|(event, _)| is_cut && *event > self.durable).map(|(event, copy)| (event, copy));
        let mut copies = self.history.range(first..).chain(refused);
        let Some((&event, (_, content))) = copies.find(|&(&event, copy)| is_that(event, copy)) else {
            let expected = self.history.get(&found.last).map(|(_, content)| content.clone()).unwrap_or_default();
            let here = |at| (at, self.memory.entry(at), expected.get(&at), self.is_in(at, &expected));
            let blocks: Vec<_> = (0..BLOCKS).map(here).filter(|(.., is_same)| !is_same).collect();
            return Err(format!("event {} of {first}.. is found, as {:?} with {blocks:?}", found.last, found.standing));
        };
        if event < last {
            *self.counts.entry("a tail was cut off").or_default() += 1;
        }
        self.content = content.clone();
        Ok(())
    }

    /// Whether memory has what an event has left of a block.
    fn is_in(&self, at: u64, content: &Content) -> bool {
        let expected = content.get(&at).copied().unwrap_or_default();
        let mut bytes = vec![0; BLOCK_BYTES];
        let is_same = self.memory.get(at, &mut bytes) == Ok(expected);
        let zeros = [0; BLOCK_BYTES].to_vec();
        is_same && bytes == if expected.is_zero || !expected.is_written() { zeros } else { block(at, expected.version) }
    }
}

fn play(seed: u64, counts: &mut BTreeMap<&'static str, u64>) -> Option<String> {
    let mut play = match Play::new(seed) {
        Ok(play) => play,
        Err(error) => return Some(error),
    };
    let finding = play.play().err();
    for (what, count) in play.counts {
        *counts.entry(what).or_default() += count;
    }
    finding
}

#[test]
fn a_copy_is_found_as_it_was_at_or_after_the_last_sync() {
    let first = remora_lab::random::seed("stores");
    let (played, counts) = play_for(tests::time(USUAL), first, "a store", play);
    println!("{played} plays, {counts:?}");
    let reached = [
        "a checkpoint",
        "a power cut",
        "a process ended",
        "a process was stopped",
        "a recovery was interrupted",
        "a store was lost",
        "a tail was cut off",
        "damage was found",
        "the device was full",
    ];
    assert!(reached.iter().all(|what| counts.contains_key(what)), "{counts:?}");
}

/// A rule that is taken out is found missing.
fn is_found(mutant: Mutant) {
    is_found_from(0, mutant);
}

/// Most rules are found missing within some hundred plays. `first` saves the others some thousand.
fn is_found_from(first: u64, mutant: Mutant) {
    let began = Instant::now();
    for seed in first.. {
        Mutant::set(Some(mutant));
        let finding = play(seed, &mut BTreeMap::new());
        Mutant::set(None);
        if let Some(finding) = finding {
            assert_eq!(play(seed, &mut BTreeMap::new()), None, "without the mutant");
            println!("{mutant:?}: seed {seed}: {finding}");
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{mutant:?} was not found from seed {first} to {seed}");
    }
}

#[test]
fn a_segment_that_is_removed_before_its_blocks_are_synced_is_found() {
    is_found(Mutant::ExtentsNotSynced);
}

#[test]
fn a_tail_that_is_not_cleared_is_found() {
    is_found(Mutant::TailNotCleared);
}

#[test]
fn a_synced_record_that_is_taken_for_the_end_is_found() {
    is_found(Mutant::RotIsTheEnd);
}

#[test]
fn a_store_that_is_believed_after_a_failed_sync_is_found() {
    is_found(Mutant::LostIsBelieved);
}

#[test]
fn a_segment_whose_name_is_not_synced_is_found() {
    is_found(Mutant::NameNotSynced);
}

#[test]
fn a_number_of_an_event_that_is_used_again_is_found() {
    is_found_from(12_600, Mutant::NumberUsedAgain);
}

#[test]
fn zeros_that_are_judged_by_their_bytes_are_found() {
    is_found(Mutant::ZerosAreJudged);
}

// Every byte of every file of a store is changed, one at a time: what is found then is right, or nothing is believed.

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

const SECTOR: usize = 512;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Simulated(Mutex<Device>);

#[derive(Clone, Debug)]
pub(super) struct Device {
    random: Random,
    bodies: Vec<Body>,
    /// What processes see, and what is durable: the body of each name.
    names: BTreeMap<Name, usize>,
    durable: BTreeMap<Name, usize>,
    pub(super) fails_sync: bool,
    pub(super) is_full: bool,
    /// Operations until the power fails.
    pub(super) left: Option<u64>,
}

/// A file, whatever its name.
#[derive(Clone, Debug, Default)]
struct Body {
    /// What processes see.
    seen: Vec<u8>,
    durable: Vec<u8>,
    /// What was written to each sector since the last sync.
    pending: BTreeMap<usize, Vec<[u8; SECTOR]>>,
}

impl Body {
    fn note(&mut self, from: usize, to: usize) {
        for sector in from / SECTOR..to.div_ceil(SECTOR) {
            let mut bytes = [0; SECTOR];
            let seen = self.seen.get(sector * SECTOR..).unwrap_or_default();
            let has = seen.len().min(SECTOR);
            bytes[..has].copy_from_slice(&seen[..has]);
            self.pending.entry(sector).or_default().push(bytes);
        }
    }

    /// Some of what is pending becomes durable.
    fn settle(&mut self, random: &mut Random) {
        self.durable.resize(self.seen.len(), 0);
        for (sector, versions) in std::mem::take(&mut self.pending) {
            let chosen = random.below(versions.len() as u64 + 1) as usize;
            let at = sector * SECTOR;
            if let (Some(version), Some(into)) = (versions.get(chosen), self.durable.get_mut(at..at + SECTOR)) {
                into.copy_from_slice(version);
            }
        }
    }
}

impl Simulated {
    pub(super) fn new(seed: u64) -> Simulated {
        Simulated(Mutex::new(Device {
            random: Random::new(seed),
            bodies: Vec::new(),
            names: BTreeMap::new(),
            durable: BTreeMap::new(),
            fails_sync: false,
            is_full: false,
            left: None,
        }))
    }

    /// Another device with the same content.
    pub(super) fn copy(&self) -> Simulated {
        Simulated(Mutex::new(self.lock().clone()))
    }

    /// Bytes of a file.
    pub(super) fn length(&self, name: Name) -> usize {
        self.lock().body(name).map_or(0, |body| body.seen.len())
    }

    /// A byte changes by itself.
    pub(super) fn change(&self, name: Name, at: usize, by: u8) {
        let mut device = self.lock();
        let Ok(body) = device.body(name) else { unreachable!("{name} is there") };
        for bytes in [&mut body.durable, &mut body.seen] {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= by;
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Device> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One operation more.
    fn operate(&self) -> io::Result<MutexGuard<'_, Device>> {
        let mut device = self.lock();
        match &mut device.left {
            Some(0) => return Err(io::Error::other("the power has failed")),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(device)
    }
}

impl Device {
    fn body(&mut self, name: Name) -> io::Result<&mut Body> {
        let number = self.names.get(&name).copied();
        number.and_then(|number| self.bodies.get_mut(number)).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The power fails, and comes back.
    pub(super) fn cut_power(&mut self) {
        let mut names = BTreeMap::new();
        for name in self.names.keys().chain(self.durable.keys()) {
            let kept = if self.random.one_in(2) { self.names.get(name) } else { self.durable.get(name) };
            // A name that did not change has one meaning.
            names.extend(kept.map(|&number| (*name, number)));
        }
        for body in &mut self.bodies {
            if self.random.one_in(8) && body.durable.is_empty() {
                body.seen.clear(); // not even its length
            }
            body.settle(&mut self.random);
            body.seen.clone_from(&body.durable);
        }
        (self.names, self.durable) = (names.clone(), names);
        (self.fails_sync, self.is_full, self.left) = (false, false, None);
    }

    /// A bit changes by itself.
    pub(super) fn rot(&mut self) -> Option<String> {
        let names: Vec<Name> = self.names.keys().copied().collect();
        let name = *names.get(self.random.below(names.len() as u64) as usize)?;
        let bit = self.random.below(8);
        let mut at = self.random.word();
        let body = self.body(name).ok()?;
        // Where something is.
        let used: Vec<usize> = (0..body.durable.len()).filter(|&at| body.durable.get(at) != Some(&0)).collect();
        at %= used.len().max(1) as u64;
        let at = *used.get(at as usize)?;
        for bytes in [&mut body.durable, &mut body.seen] {
            *bytes.get_mut(at)? ^= 1 << bit;
        }
        Some(format!("{name} at {at}"))
    }
}

impl Files for Simulated {
    fn create(&self, name: Name, bytes: u64) -> io::Result<()> {
        let mut device = self.operate()?;
        if device.is_full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let number = device.bodies.len();
        device.bodies.push(Body { seen: vec![0; bytes as usize], ..Body::default() });
        device.names.insert(name, number);
        Ok(())
    }

    fn segments(&self) -> io::Result<Vec<u64>> {
        let device = self.operate()?;
        let number = |name: &Name| match name {
            Name::Segment(number) => Some(*number),
            _ => None,
        };
        Ok(device.names.keys().filter_map(number).collect())
    }

    fn read(&self, name: Name, at: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut device = self.operate()?;
        let seen = device.body(name)?.seen.get(at as usize..).unwrap_or_default();
        let has = seen.len().min(into.len());
        into[..has].copy_from_slice(&seen[..has]);
        Ok(has)
    }

    fn write(&self, name: Name, at: u64, parts: &[&[u8]]) -> io::Result<()> {
        let mut device = self.operate()?;
        let mut bytes = parts.concat();
        let is_full = device.is_full && matches!(name, Name::Segment(_));
        if is_full {
            let some = device.random.below(bytes.len() as u64) as usize;
            bytes.truncate(some);
        }
        let body = device.body(name)?;
        let (from, to) = (at as usize, at as usize + bytes.len());
        if body.seen.len() < to {
            body.seen.resize(to, 0);
        }
        body.seen[from..to].copy_from_slice(&bytes);
        body.note(from, to);
        if is_full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn clear(&self, name: Name, from: u64) -> io::Result<()> {
        let mut device = self.operate()?;
        let body = device.body(name)?;
        let (from, to) = ((from as usize).min(body.seen.len()), body.seen.len());
        body.seen[from..].fill(0);
        body.note(from, to);
        Ok(())
    }

    fn sync(&self, name: Name) -> io::Result<()> {
        let mut device = self.operate()?;
        let fails = std::mem::take(&mut device.fails_sync);
        let mut random = device.random.clone();
        let body = device.body(name)?;
        if fails {
            // As Linux does: the pages count as written from now on, and are still seen.
            body.settle(&mut random);
            device.random = random;
            return Err(io::Error::other("the device has failed"));
        }
        body.durable.clone_from(&body.seen);
        body.pending.clear();
        Ok(())
    }

    fn sync_folder(&self) -> io::Result<()> {
        let mut device = self.operate()?;
        device.durable = device.names.clone();
        Ok(())
    }

    fn remove(&self, name: Name) -> io::Result<()> {
        self.operate()?.names.remove(&name).map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn path(&self, name: Name) -> String {
        format!("simulated/{name}")
    }
}
