//! Compression: whether and how the slots that replicas on other hosts read are compressed.
//!
//! ```text
//!   --compress lz4, zstd        each slot, if that saves a tenth of it
//!   --compress off              none
//!   --compress auto             link to replicas known? ── processor to spare? ── both methods tried on some slots
//!                                       │ no                     │ no                     │
//!                                       ╰──────── plain ◀────────┴───── plain is faster ──┴──▶ the faster one
//! ```
//!
//! [`Policy`] decides, without I/O: it is told how slots were stored and how long that took, what is known of the
//! [`link`], and what the [`processors`] have to spare. The thread that seals the snapshot asks it before each slot, so
//! compression never runs on a thread that the server waits for, and uses one processor at most.

pub(super) mod link;
pub(super) mod processors;

use std::fmt::Write;
use std::time::Duration;

use remora_table::{Method, StoredSlot};

pub(super) use self::link::Link;
use crate::args::CompressChoice;
use crate::units::Size;

/// Slots on which each method is tried: enough to see their speed and what the data are like.
const TRIAL_SLOTS: u64 = 4;

/// Slots after which the methods are tried again: other keys have other values. Of these, 8 are trials.
const TRY_AGAIN_SLOTS: u64 = 512;

/// Slots between two decisions by the same trials.
const DECIDE_SLOTS: u64 = 16;

/// Processors that the rest of the host must leave, so that one is compressing without taking it from the server. Half
/// of one: on a host with two, the server's fork child uses one.
const SPARE_PROCESSORS: f64 = 0.5;

/// What must be saved of the time that a slot takes. With less, what readers spend on decompressing is not worth it.
const WORTH: f64 = 0.9;

/// Bytes per second of links that one thread cannot keep up with, whatever it is fed: 12 Gb/s.
const FAST_LINK: u64 = 1_500_000_000;

/// What is known when the next slot is stored.
#[derive(Clone, Debug, Default)]
pub(super) struct World {
    /// The link to the replicas.
    pub(super) link: Link,
    /// Processors that the rest of the host leaves; `None`: not known.
    pub(super) spare: Option<f64>,
}

/// Decides for one snapshot.
pub(super) struct Policy {
    choice: CompressChoice,
    tried: [Tried; Method::ALL.len()],
    /// Slots since the methods were tried first, and at which number the next decision is due.
    slots: u64,
    due: u64,
    decided: Decision,
    /// Bytes of the snapshot so far, and how many are stored for them.
    plain: u64,
    stored: u64,
}

/// What a method has done.
#[derive(Clone, Copy, Debug, Default)]
struct Tried {
    slots: u64,
    plain: u64,
    stored: u64,
    took: Duration,
}

/// What is done with the next slots, and why.
#[derive(Clone, Debug, PartialEq)]
struct Decision {
    method: Option<Method>,
    why: String,
}

impl Tried {
    /// Plain bytes per second.
    fn speed(&self) -> f64 {
        self.plain as f64 / self.took.as_secs_f64().max(1e-9)
    }

    /// The share of the bytes that is stored.
    fn share(&self) -> f64 {
        self.stored as f64 / self.plain.max(1) as f64
    }

    /// Seconds for one byte: the compressor and the link work at the same time, and the slower one counts.
    fn cost(&self, link: u64) -> f64 {
        (1.0 / self.speed()).max(self.share() / link as f64)
    }
}

impl Policy {
    pub(super) fn new(choice: CompressChoice) -> Policy {
        let decided = Decision { method: None, why: "no slot yet".into() };
        Policy { choice, tried: Default::default(), slots: 0, due: 0, decided, plain: 0, stored: 0 }
    }

    /// How the next slot is compressed.
    pub(super) fn next(&mut self, world: &World) -> Option<Method> {
        let fixed = |method: Option<Method>| {
            let why = format!("--compress {}", method.map_or("off", Method::name));
            Decision { method, why }
        };
        match self.choice {
            CompressChoice::Off => self.decided = fixed(None),
            CompressChoice::Lz4 => self.decided = fixed(Some(Method::Lz4)),
            CompressChoice::Zstd => self.decided = fixed(Some(Method::Zstd)),
            CompressChoice::Auto => return self.automatic(world),
        }
        self.decided.method
    }

    fn automatic(&mut self, world: &World) -> Option<Method> {
        let link = match self.usable(world) {
            Ok(link) => link,
            Err(why) => {
                self.decided = Decision { method: None, why };
                self.due = self.slots;
                return None;
            }
        };
        if self.slots >= TRY_AGAIN_SLOTS {
            (self.slots, self.due, self.tried) = (0, 0, Default::default());
        }
        let least_tried = Method::ALL.into_iter().min_by_key(|method| self.tried(*method).slots);
        if let Some(method) = least_tried.filter(|method| self.tried(*method).slots < TRIAL_SLOTS) {
            self.due = self.slots;
            return Some(method);
        }
        if self.slots >= self.due {
            self.due = self.slots + DECIDE_SLOTS;
            self.decided = self.decide(link, &world.link);
        }
        self.decided.method
    }

    /// The rate of the link, if compressing may be of use.
    fn usable(&self, world: &World) -> Result<u64, String> {
        let link = world.link.rate().map_err(str::to_owned)?;
        if link >= FAST_LINK {
            return Err(format!("the link is faster than one compressing thread ({})", world.link));
        }
        match world.spare {
            Some(spare) if spare < SPARE_PROCESSORS => {
                Err(format!("the host has no processor to spare ({spare:.1} are left)"))
            }
            _ => Ok(link),
        }
    }

    fn tried(&self, method: Method) -> &Tried {
        &self.tried[index(method)]
    }

    fn decide(&self, link: u64, of: &Link) -> Decision {
        let cost = |method: &Method| self.tried(*method).cost(link);
        let mut why = String::new();
        for method in Method::ALL {
            let tried = self.tried(method);
            // Writing to a string cannot fail.
            let _ = write!(
                why,
                "{method} leaves {:.0} % at {}/s, ",
                tried.share() * 100.0,
                Size::bytes(tried.speed() as u64)
            );
        }
        let _ = write!(why, "{of}");
        let best = Method::ALL.into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
        Decision { method: best.filter(|best| cost(best) <= WORTH / link as f64), why }
    }

    /// A slot was stored, in this time.
    pub(super) fn stored(&mut self, slot: StoredSlot, took: Duration) {
        self.slots += 1;
        self.plain += u64::from(slot.plain);
        self.stored += u64::from(slot.stored);
        if let Some(method) = slot.wanted {
            let tried = &mut self.tried[index(method)];
            tried.slots += 1;
            tried.plain += u64::from(slot.plain);
            tried.stored += u64::from(slot.stored);
            tried.took += took;
        }
    }

    /// Bytes that are stored for the snapshot so far.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.stored
    }

    /// What is done, and why: for people.
    pub(super) fn text(&self) -> String {
        let method = self.decided.method.map_or("off", Method::name);
        let share = match self.plain {
            0 => String::new(),
            plain => format!("; {:.1} % of the snapshot is stored", self.stored as f64 * 100.0 / plain as f64),
        };
        format!("{method}: {}{share}", self.decided.why)
    }

    /// The method that is used now.
    pub(super) fn method(&self) -> Option<Method> {
        self.decided.method
    }
}

fn index(method: Method) -> usize {
    match method {
        Method::Lz4 => 0,
        Method::Zstd => 1,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const MIB: u64 = 1 << 20;
    /// 1 Gb/s.
    const GIGABIT: u64 = 125_000_000;

    fn world(rate: u64) -> World {
        World { link: Link::of_rate(rate), spare: Some(1.0) }
    }

    /// Slots of 1 MiB. For each method: the share that is stored, and microseconds.
    struct Data {
        lz4: (f64, u64),
        zstd: (f64, u64),
    }

    const JSON: Data = Data { lz4: (0.35, 1600), zstd: (0.2, 2500) };
    const RANDOM: Data = Data { lz4: (1.0, 500), zstd: (1.0, 800) };

    /// Lets a policy store that many slots, and returns how each was to be compressed.
    fn run(policy: &mut Policy, world: &World, data: &Data, slots: usize) -> Vec<Option<Method>> {
        let mut how = Vec::new();
        for _ in 0..slots {
            let wanted = policy.next(world);
            let (share, micros) = match wanted {
                None => (1.0, 400),
                Some(Method::Lz4) => data.lz4,
                Some(Method::Zstd) => data.zstd,
            };
            let stored = (MIB as f64 * share) as u32;
            let slot = StoredSlot { wanted, method: wanted.filter(|_| share < 0.9), plain: MIB as u32, stored };
            policy.stored(slot, Duration::from_micros(micros));
            how.push(wanted);
        }
        how
    }

    fn last(world: &World, data: &Data) -> (Option<Method>, String) {
        let mut policy = Policy::new(CompressChoice::Auto);
        let how = run(&mut policy, world, data, 100);
        (how[99], policy.text())
    }

    #[test]
    fn auto_takes_the_method_with_which_compressor_and_link_together_are_fastest() {
        // At 1 Gb/s the link decides, at 2 Gb/s the compressor, and at 5 Gb/s LZ4's 655 MB/s are hardly faster.
        assert_eq!(last(&world(GIGABIT), &JSON).0, Some(Method::Zstd));
        assert_eq!(last(&world(2 * GIGABIT), &JSON).0, Some(Method::Lz4));
        assert_eq!(last(&world(5 * GIGABIT), &JSON).0, None);
        let (how, text) = last(&world(20 * GIGABIT), &JSON);
        assert!(how.is_none() && text.contains("faster than one compressing thread"), "{text}");
    }

    #[test]
    fn auto_leaves_alone_what_does_not_shrink_and_tries_again_now_and_then() {
        let mut policy = Policy::new(CompressChoice::Auto);
        let how = run(&mut policy, &world(GIGABIT), &RANDOM, TRY_AGAIN_SLOTS as usize);
        assert_eq!(how.iter().flatten().count() as u64, 2 * TRIAL_SLOTS, "only the trials");
        assert!(policy.text().starts_with("off: lz4 leaves 100 %"), "{}", policy.text());
        // Values of another kind follow.
        let how = run(&mut policy, &world(GIGABIT), &JSON, 100);
        assert_eq!(how[99], Some(Method::Zstd));
    }

    #[test]
    fn auto_waits_for_a_link_that_is_known_and_a_processor_that_is_idle() {
        let mut policy = Policy::new(CompressChoice::Auto);
        let unknown = World { link: Link::unknown(1), spare: Some(2.0) };
        assert!(run(&mut policy, &unknown, &JSON, 50).iter().all(Option::is_none));
        assert!(policy.text().contains("not known yet"), "{}", policy.text());
        let how = run(&mut policy, &world(GIGABIT), &JSON, 50);
        assert_eq!((how[0], how[49]), (Some(Method::Lz4), Some(Method::Zstd)));
        let busy = World { spare: Some(0.2), ..world(GIGABIT) };
        assert!(run(&mut policy, &busy, &JSON, 50).iter().all(Option::is_none));
        assert!(policy.text().contains("no processor to spare"), "{}", policy.text());
        assert_eq!(run(&mut policy, &world(GIGABIT), &JSON, 20)[19], Some(Method::Zstd), "it is idle again");
        let nearby = World { link: Link::unknown(0), spare: None };
        assert!(run(&mut policy, &nearby, &JSON, 50).iter().all(Option::is_none));
        assert!(policy.text().contains("no replica"), "{}", policy.text());
    }

    #[test]
    fn a_named_method_is_used_for_every_slot_whatever_the_link() {
        for (choice, method) in [
            (CompressChoice::Lz4, Some(Method::Lz4)),
            (CompressChoice::Zstd, Some(Method::Zstd)),
            (CompressChoice::Off, None),
        ] {
            let mut policy = Policy::new(choice);
            let nothing = World { link: Link::unknown(0), spare: Some(0.0) };
            assert!(run(&mut policy, &nothing, &JSON, 20).iter().all(|how| *how == method));
            assert!(policy.text().contains("--compress"), "{}", policy.text());
        }
        let mut policy = Policy::new(CompressChoice::Zstd);
        run(&mut policy, &world(GIGABIT), &JSON, 10);
        assert_eq!(policy.text(), "zstd: --compress zstd; 20.0 % of the snapshot is stored");
        assert!(policy.stored_bytes() < 3 * MIB);
    }
}
