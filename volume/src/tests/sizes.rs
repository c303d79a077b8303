//! Sizes: volumes that grow while commands are killed at each of their steps, servers are cut off and restarted, and
//! writers open the volume in between, with its file or with one of before.

use remora_lab::Random;

use crate::mutant::Mutant;
use crate::shape::{Copies, Opened, Size};
use crate::tests::{self, Counts};

/// A server's copy, and its store if it has one.
#[derive(Clone, Copy, Debug)]
struct Server {
    /// `None`: it has lost it.
    size: Option<Size>,
    has_store: bool,
    is_reached: bool,
    /// Blocks from this one on were never written.
    end: u64,
}

/// How far the command is.
#[derive(Clone, Debug)]
enum Command {
    No,
    /// These servers, from this one on, are still to be asked to take the size; these copies have.
    Growing {
        larger: u64,
        next: usize,
        grown: Vec<usize>,
    },
    /// It goes back.
    Back {
        left: Vec<usize>,
    },
    /// The size is in the file. These servers are still to be told.
    Agreeing {
        next: usize,
    },
}

struct World {
    copies: Copies,
    servers: Vec<Server>,
    command: Command,
    /// The size in the volume's file, and those that it had.
    file: u64,
    earlier: Vec<u64>,
    /// A writer with an earlier file has served, or a copy has gone back for one, or beside the command, or was lost
    /// while another one was away: the command is run again then.
    was_stale: bool,
    /// The largest size with which a writer has served.
    served: u64,
    /// Every acknowledged write is before this block.
    acknowledged: u64,
}

impl World {
    fn new(random: &mut Random) -> World {
        let number = random.between(1, 5) as usize;
        let copies = Copies::new(number, random.between(1, number as u64) as usize).unwrap_or_else(|| unreachable!());
        let size = Some(Size::kept(FIRST, None));
        let server = |_| Server { size, has_store: !random.one_in(4), is_reached: true, end: 0 };
        World {
            copies,
            servers: (0..number).map(server).collect(),
            command: Command::No,
            file: FIRST,
            earlier: vec![FIRST],
            was_stale: false,
            served: FIRST,
            acknowledged: 0,
        }
    }

    fn step(&mut self, random: &mut Random, counts: &mut Counts) -> Option<String> {
        let number = random.below(self.servers.len() as u64) as usize;
        match random.below(12) {
            0 => self.servers[number].is_reached = false,
            1 | 2 => self.servers[number].is_reached = true,
            3 => self.restart(number),
            4 => {
                if !matches!(self.command, Command::No) {
                    *counts.entry("a command that was killed").or_default() += 1;
                }
                self.command = Command::No;
            }
            5..9 => self.go_on(random, counts),
            9 | 10 => return self.open(self.file, random, counts),
            _ => {
                let stale = self.earlier[random.below(self.earlier.len() as u64) as usize];
                return self.open(stale, random, counts);
            }
        }
        None
    }

    /// The next step of the command.
    fn go_on(&mut self, random: &mut Random, counts: &mut Counts) {
        let enough = self.copies.promises();
        self.command = match std::mem::replace(&mut self.command, Command::No) {
            Command::No => {
                let larger = self.file + random.between(1, 3);
                let may = |server: &Server| server.size.is_none_or(|size| size.may_become(larger));
                match self.servers.iter().filter(|server| server.is_reached).all(may) {
                    true => Command::Growing { larger, next: 0, grown: Vec::new() },
                    false => Command::No,
                }
            }
            Command::Growing { larger, next, mut grown } if next < self.servers.len() => {
                let has_memory = !random.one_in(10);
                match self.servers[next].takes(larger, has_memory) {
                    Some(true) => grown.push(next),
                    Some(false) => return self.command = Command::Back { left: grown },
                    None => {}
                }
                Command::Growing { larger, next: next + 1, grown }
            }
            Command::Growing { grown, .. } if grown.len() < enough => Command::Back { left: grown },
            Command::Growing { larger, .. } => {
                self.earlier.push(self.file);
                self.file = larger;
                *counts.entry("a size that was agreed").or_default() += 1;
                Command::Agreeing { next: 0 }
            }
            Command::Back { mut left } => match left.pop() {
                Some(number) => {
                    *counts.entry("a copy that the command took back").or_default() += 1;
                    let _ = self.servers[number].takes(self.file, true); // it may be cut off
                    Command::Back { left }
                }
                None => Command::No,
            },
            Command::Agreeing { next } if next < self.servers.len() => {
                self.servers[next].is_told(self.file);
                Command::Agreeing { next: next + 1 }
            }
            Command::Agreeing { .. } => Command::No,
        };
        if Mutant::AgreedBeforeTheFile.is_active()
            && let Command::Growing { larger, ref grown, .. } = self.command
        {
            grown.iter().for_each(|number| self.servers[*number].is_told(larger));
        }
    }

    fn restart(&mut self, number: usize) {
        let server = &mut self.servers[number];
        server.size = server.size.filter(|_| server.has_store).map(|size| Size::kept(size.blocks(), size.former()));
        let is_lost = server.size.is_none();
        self.was_stale |= is_lost;
    }

    /// A writer opens the volume with this size, writes, and ends.
    fn open(&mut self, blocks: u64, random: &mut Random, counts: &mut Counts) -> Option<String> {
        let mut has = Vec::new();
        for (number, server) in self.servers.iter_mut().enumerate().filter(|(_, server)| server.is_reached) {
            let Some(size) = server.size else { continue };
            match size.opened_with(blocks) {
                Opened::Same => has.push(number),
                Opened::GoesBack => {
                    if server.end > blocks {
                        return Some(format!("a copy goes back to {blocks} blocks and has data up to {}", server.end));
                    }
                    *counts.entry("a copy that goes back by itself").or_default() += 1;
                    server.size = Some(size.becomes(blocks));
                    self.was_stale |= blocks < self.file || !matches!(self.command, Command::No);
                    has.push(number);
                }
                Opened::Other => {}
            }
        }
        if has.len() < self.copies.promises() {
            return None;
        }
        has.iter().for_each(|number| self.servers[*number].is_told(blocks));
        if blocks < self.served {
            return Some(format!("a writer of {blocks} blocks serves after one of {}", self.served));
        }
        if self.acknowledged > blocks {
            return Some(format!("block {} was acknowledged, and a writer serves {blocks}", self.acknowledged - 1));
        }
        self.served = blocks;
        self.was_stale |= blocks < self.file;
        *counts.entry("a writer that serves").or_default() += 1;
        for server in self.servers.iter_mut().filter(|server| server.is_reached) {
            let is_other = server.size.is_some_and(|size| size.blocks() != blocks);
            if is_other && server.takes(blocks, true) == Some(true) {
                *counts.entry("a copy that a writer has grow").or_default() += 1;
                server.is_told(blocks);
            }
        }
        // It writes up to a block, at as many copies as must hold it, or at fewer and dies.
        let end = random.between(1, blocks);
        let holds = random.below(has.len() as u64 + 1) as usize;
        has.iter().take(holds).for_each(|number| self.servers[*number].end = self.servers[*number].end.max(end));
        if holds >= self.copies.hold() {
            self.acknowledged = self.acknowledged.max(end);
        }
        None
    }

    /// All servers are back, and no command is at work: a writer with the file serves, and no copy has another size.
    fn settle(&mut self, random: &mut Random, counts: &mut Counts) -> Option<String> {
        self.command = Command::No;
        self.servers.iter_mut().for_each(|server| server.is_reached = true);
        let has = self.servers.iter().filter(|server| server.size.is_some()).count();
        if has < self.copies.promises() {
            return None;
        }
        if self.was_stale {
            // A writer of the former size has come between the command and the servers. The command says so.
            let file = self.file;
            for server in &mut self.servers {
                let _ = server.takes(file, true); // one without memory has no copy
            }
        }
        if let Some(finding) = self.open(self.file, random, counts) {
            return Some(finding);
        }
        let sizes: Vec<_> = self.servers.iter().filter_map(|server| server.size).collect();
        let is_right = self.served == self.file && sizes.iter().all(|size| *size == Size::kept(self.file, None));
        (!is_right).then(|| format!("the file says {}, and copies have {sizes:?}", self.file))
    }
}

impl Server {
    /// It is asked to take a size. Whether it has; `None`: it does not answer, or has no copy.
    fn takes(&mut self, blocks: u64, has_memory: bool) -> Option<bool> {
        let size = self.size.filter(|_| self.is_reached)?;
        let may = size.blocks() == blocks || has_memory && size.may_become(blocks) && self.end <= blocks;
        if may && size.blocks() != blocks {
            self.size = Some(size.becomes(blocks));
        }
        Some(may)
    }

    /// It is told that its size is agreed, by the command or by a writer.
    fn is_told(&mut self, blocks: u64) {
        let size = self.size.as_mut().filter(|size| self.is_reached && size.blocks() == blocks);
        size.into_iter().for_each(Size::agree);
    }
}

const FIRST: u64 = 4;

/// Plays one schedule.
fn play(seed: u64, counts: &mut Counts) -> Option<String> {
    let mut random = Random::new(seed);
    let mut world = World::new(&mut random);
    for _ in 0..random.between(10, 120) {
        if let Some(finding) = world.step(&mut random, counts) {
            return Some(finding);
        }
    }
    world.settle(&mut random, counts)
}

#[test]
fn a_volume_that_grows_has_the_size_of_its_file_whatever_vanishes() {
    let time = tests::time(std::time::Duration::from_secs(1));
    let (seeds, counts) = tests::play_for(time, remora_lab::random::seed("sizes"), "sizes", play);
    let all = [
        "a command that was killed",
        "a copy that a writer has grow",
        "a copy that goes back by itself",
        "a copy that the command took back",
        "a size that was agreed",
        "a writer that serves",
    ];
    assert!(seeds < 100 || all.iter().all(|what| counts.contains_key(what)), "{seeds} seeds: {counts:?}");
}

#[test]
fn each_rule_about_sizes_is_missed_if_it_is_taken_out() {
    for mutant in [Mutant::FormerSizeForgotten, Mutant::GrowthNotAgreed, Mutant::AgreedBeforeTheFile] {
        Mutant::set(Some(mutant));
        let found = (0..20_000).find_map(|seed| play(seed, &mut Counts::new()));
        Mutant::set(None);
        assert!(found.is_some(), "{mutant:?}");
    }
}
