//! Random plays of a copy and its store on a simulated device, until it loses its power, its process, or its bits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::memory::crc::crc32c;
use remora_lab::Random;

use super::checkpoint::{Batch, Checkpoint};
use super::files::{Failure, Files};
use super::journal::{Journal, Sync, write_superblock};
use super::record::Superblock;
use super::recovery::{self, Found};
use super::simulated::Simulated;
use crate::layout::Entry;
use crate::message::{Standing, State};
use crate::mutant::Mutant;
use crate::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
use crate::store::Store;
use crate::tests::plays::{self, play_for};
use crate::version::{Generation, Version};

/// How long plays are played, if [`plays::time`] is not told otherwise.
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
                        let _ = self.device.sync(super::files::Name::Segment(segment));
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
    let (played, counts) = play_for(plays::time(USUAL), first, "a store", play);
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
