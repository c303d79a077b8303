//! Shape: what of a volume never changes. Its identity, its size, and how many copies it has.

use std::fmt;

#[cfg(test)]
use crate::rules::Mutant;

/// Bytes of a block: the unit that is written, checked and repaired.
pub const BLOCK_BYTES: usize = 4096;

/// The most blocks of a volume: 16 TiB. A copy must fit the memory of one server.
pub const MOST_BLOCKS: u64 = 1 << 32;

/// The identity of a volume: random, chosen when it is created. A volume that is created again has another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub [u8; 16]);

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What of a volume never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    volume: VolumeId,
    blocks: u64,
    copies: Copies,
}

impl Shape {
    /// A volume of that many blocks. `None` unless 1 ≤ `blocks` ≤ [`MOST_BLOCKS`].
    pub fn new(volume: VolumeId, blocks: u64, copies: Copies) -> Option<Shape> {
        (1..=MOST_BLOCKS).contains(&blocks).then_some(Shape { volume, blocks, copies })
    }

    /// Its identity.
    pub fn volume(self) -> VolumeId {
        self.volume
    }

    /// Its number of blocks.
    pub fn blocks(self) -> u64 {
        self.blocks
    }

    /// Its copies.
    pub fn copies(self) -> Copies {
        self.copies
    }
}

/// How many copies a volume has, and how many must hold a write before it is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    number: usize,
    hold: usize,
}

impl Copies {
    /// The most copies. More would cost the writer more bytes than they are worth.
    pub const MOST: usize = 5;

    /// A volume of `number` copies, of which `hold` must hold a write before it is acknowledged. `None` unless
    /// 1 ≤ `hold` ≤ `number` ≤ [`Copies::MOST`].
    pub fn new(number: usize, hold: usize) -> Option<Copies> {
        (1 <= hold && hold <= number && number <= Copies::MOST).then_some(Copies { number, hold })
    }

    /// The number of copies.
    pub fn number(self) -> usize {
        self.number
    }

    /// How many must hold a write.
    pub fn hold(self) -> usize {
        self.hold
    }

    /// How many servers must promise. At least one of them holds every acknowledged write, and any two writers that
    /// serve have asked a server in common.
    pub fn promises(self) -> usize {
        (self.number - self.hold + 1).max(self.hold)
    }
}

// Size: how many blocks a copy has, and how many it had before a growth that is not agreed yet.
//
// ```text
//                  grow                      agree, or a promise to a writer of the new size
//   agreed ─────────────────▶ not agreed ─────────────────────────────────────────────────▶ agreed
//      ▲                          │
//      └──────────────────────────┘
//        a writer of the former size opens the volume, or the command goes back
// ```
//
// The command that makes a volume larger has every copy grow, then writes the size into the volume's file, then tells
// the servers. It or a server can vanish between any two of these steps. The file decides: a writer opens the volume
// with the size of the file, so a copy that has grown waits for the first writer. One of the former size: the growth
// never took place, and the copy goes back. One of the new size: it did.
//
// A copy that was away while the others grew has the former size, agreed. The writer that serves has the promises of
// so many copies of the new size that no writer of another size can serve, so it has that copy grow.

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

/// Sizes: volumes that grow while commands are killed at each of their steps, servers are cut off and restarted, and
/// writers open the volume in between, with its file or with one of before.
#[cfg(test)]
mod tests {
    use remora_lab::Random;

    use super::{Copies, Opened, Size};
    use crate::rules::Mutant;
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
        /// A writer with an earlier file has served, or a copy has gone back for one, or beside the command, or was
        /// lost while another one was away: the command is run again then.
        was_stale: bool,
        /// The largest size with which a writer has served.
        served: u64,
        /// Every acknowledged write is before this block.
        acknowledged: u64,
    }

    impl World {
        fn new(random: &mut Random) -> World {
            let number = random.between(1, 5) as usize;
            let copies =
                Copies::new(number, random.between(1, number as u64) as usize).unwrap_or_else(|| unreachable!());
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
                            return Some(format!(
                                "a copy goes back to {blocks} blocks and has data up to {}",
                                server.end
                            ));
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

        /// All servers are back, and no command is at work: a writer with the file serves, and no copy has another
        /// size.
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
}
