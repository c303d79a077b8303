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
//! [`Policy`] decides, without I/O: it is told how slots were stored and how long that took, what is known of the link
//! to the readers ([`Link`]), and what the processors have to spare ([`Processors`]). The thread that seals the
//! snapshot asks it before each slot, so compression never runs on a thread that the server waits for, and uses one
//! processor at most.

use std::fmt::{self, Write};
use std::fs;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use remora_table::{Method, StoredSlot};

use crate::options::Compress;
use remora_base::pace::Growth;
use remora_base::units::Size;
use remora_metrics::own_ticks;

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
    choice: Compress,
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
    pub(super) fn new(choice: Compress) -> Policy {
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
            Compress::Off => self.decided = fixed(None),
            Compress::Lz4 => self.decided = fixed(Some(Method::Lz4)),
            Compress::Zstd => self.decided = fixed(Some(Method::Zstd)),
            Compress::Auto => return self.automatic(world),
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

// How fast bytes go from this host to the replicas that read from the source.
//
// What the network interface says of its speed is known before the first byte is sent. It says nothing of the rest of
// the way, and virtual interfaces say nothing or anything. So the rate is measured too, while replicas lag behind what
// is stored for them: then the link is what they wait for. The lower of the two counts.

/// What is known of the link to replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Link {
    /// Replicas that have joined, wherever they are.
    pub(super) joined: usize,
    /// Those of them on other hosts that read from the source by TCP.
    pub(super) readers: usize,
    /// What the interface says, or what the source is limited to.
    pub(super) said: Option<Said>,
    /// What a replica received when it lagged behind, bytes per second.
    pub(super) measured: Option<u64>,
}

/// A rate that is not measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Said {
    /// Bytes per second.
    pub(super) rate: u64,
    /// Who says so: an interface or an option.
    pub(super) by: String,
}

impl Link {
    /// Bytes per second, or why that is not known.
    pub(super) fn rate(&self) -> Result<u64, &'static str> {
        self.known().map(|(rate, _)| rate)
    }

    /// The rate, and who says so.
    fn known(&self) -> Result<(u64, &str), &'static str> {
        let said = self.said.as_ref().map(|said| (said.rate, said.by.as_str()));
        let measured = self.measured.map(|rate| (rate, "measured"));
        let known = said.into_iter().chain(measured).min_by_key(|(rate, _)| *rate);
        match (self.readers, self.joined) {
            (0, 0) => Ok(known.unwrap_or((ASSUMED_RATE, "assumed, as no replica has joined yet"))),
            (0, _) => Err("no replica on another host reads from the source by TCP"),
            _ => known.ok_or("the rate of the link to the replicas is not known yet"),
        }
    }

    #[cfg(test)]
    fn of_rate(rate: u64) -> Link {
        Link { joined: 1, readers: 1, said: Some(Said { rate, by: "eth0".into() }), measured: None }
    }

    /// A link of which nothing is known but this number of readers.
    #[cfg(test)]
    fn unknown(readers: usize) -> Link {
        Link { joined: 1, readers, ..Link::default() }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Ok((rate, by)) => write!(to, "the link has {}/s ({by})", Size::bytes(rate)),
            Err(why) => to.write_str(why),
        }
    }
}

/// What is assumed for a snapshot that is taken before the first replica joins: 1 Gb/s. Nothing waits for it then.
const ASSUMED_RATE: u64 = 125_000_000;

/// Bytes that must be stored for a replica and not sent yet, so that it is the link that it waits for: more than a
/// reader asks for at once, and the buffers of its connections.
const LAG_BYTES: u64 = 24 << 20;

/// The least time over which the rate is measured. A link whose sender is shaped sends a burst first.
const MEASURE_SPAN: Duration = Duration::from_millis(300);

/// Bytes per second below which replicas are not slow but idle: their servers have begun to load, or ask for nothing.
const LEAST_RATE: u64 = 1 << 20;

/// Measures the link by what leaves it.
#[derive(Debug, Default)]
pub(super) struct Measure {
    growth: Growth,
    /// Bytes served before the present snapshot.
    before: u64,
}

impl Measure {
    /// A snapshot begins, after that many bytes were served in all.
    pub(super) fn begin(&mut self, served: u64) {
        *self = Measure { growth: Growth::default(), before: served };
    }

    /// Takes a look: bytes served in all, bytes stored of this snapshot, and the replicas that read it. Returns what
    /// each receives per second, if all that time they lagged behind.
    pub(super) fn look(&mut self, now: Instant, served: u64, stored: u64, readers: usize) -> Option<u64> {
        let each = served.saturating_sub(self.before) / readers.max(1) as u64;
        if readers == 0 || stored.saturating_sub(each) < LAG_BYTES {
            self.growth = Growth::default();
            return None;
        }
        let rate = self.growth.look(now, served, MEASURE_SPAN)? as u64 / readers as u64;
        (rate >= LEAST_RATE).then_some(rate)
    }
}

/// The most bytes of a routing table that are read. A host with more routes than that is a router of the Internet.
const ROUTES_LIMIT: u64 = 1 << 20;

/// What the interface on the way to this address says of its speed. `None`: it says nothing, as virtual ones do.
pub(super) fn said_by_interface(peer: IpAddr) -> Option<Said> {
    let name = match peer.to_canonical() {
        IpAddr::V4(peer) => route_v4(&table("/proc/net/route")?, peer),
        IpAddr::V6(peer) => route_v6(&table("/proc/net/ipv6_route")?, peer),
    }?;
    let speed = fs::read_to_string(Path::new("/sys/class/net").join(&name).join("speed")).ok()?;
    Some(Said { rate: parse_speed(&speed)?, by: name })
}

fn table(path: &str) -> Option<String> {
    let mut text = String::new();
    fs::File::open(path).ok()?.take(ROUTES_LIMIT).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Bytes per second of a speed in Mb/s. -1 is that of an interface that does not know.
fn parse_speed(text: &str) -> Option<u64> {
    let megabits = text.trim().parse::<i64>().ok().and_then(|speed| u64::try_from(speed).ok())?;
    (1..=MOST_MEGABITS).contains(&megabits).then_some(megabits * 125_000)
}

/// The most that an interface is believed, in Mb/s: some say 2^32 - 1.
const MOST_MEGABITS: u64 = 10_000_000;

/// The interface of the most specific route to this address, in a table as `/proc/net/route`.
fn route_v4(table: &str, peer: Ipv4Addr) -> Option<String> {
    let routes = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // Numbers stand in the memory's order of bytes.
        let number = |at: usize| Some(u32::from_str_radix(fields.get(at)?, 16).ok()?.swap_bytes());
        let (to, mask) = (number(1)?, number(7)?);
        let metric: u32 = fields.get(6)?.parse().ok()?;
        let fits = u32::from(peer) & mask == to;
        fits.then(|| (mask.leading_ones(), u32::MAX - metric, (*fields.first().unwrap_or(&"")).to_owned()))
    });
    routes.max().map(|(_, _, name)| name)
}

/// The same of a table as `/proc/net/ipv6_route`.
fn route_v6(table: &str, peer: Ipv6Addr) -> Option<String> {
    let routes = table.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let to = u128::from_str_radix(fields.first()?, 16).ok()?;
        let length = u32::from_str_radix(fields.get(1)?, 16).ok().filter(|length| *length <= 128)?;
        let metric = u32::from_str_radix(fields.get(5)?, 16).ok()?;
        let name = *fields.get(9)?;
        let shift = 128 - length;
        let fits = length == 0 || u128::from(peer) >> shift == to >> shift;
        // A reject route leads to lo.
        (fits && name != "lo").then(|| (length, u32::MAX - metric, name.to_owned()))
    });
    routes.max().map(|(_, _, name)| name)
}

// How many processors the rest of the host leaves to this process.

/// The least time between two looks: ticks are 10 ms long.
const SPAN: Duration = Duration::from_millis(250);

/// Ticks of all processors since the boot, and of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    all: u64,
    idle: u64,
    own: u64,
}

/// Looks at the processors now and then.
#[derive(Debug, Default)]
pub(super) struct Processors {
    last: Option<(Instant, Ticks)>,
    spare: Option<f64>,
}

impl Processors {
    /// Processors that the rest of the host has left since the last look, in which this process may have worked.
    /// `None`: not known yet, or the system does not say.
    pub(super) fn spare(&mut self, now: Instant) -> Option<f64> {
        if self.last.is_some_and(|(then, _)| now.saturating_duration_since(then) < SPAN) {
            return self.spare;
        }
        let Some(ticks) = read() else { return self.spare };
        if let Some((_, before)) = self.last {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            self.spare = between(before, ticks, processors).or(self.spare);
        }
        self.last = Some((now, ticks));
        self.spare
    }
}

/// The processors that were left between two looks, of those that this process may use.
fn between(before: Ticks, after: Ticks, processors: usize) -> Option<f64> {
    let grown = |of: fn(&Ticks) -> u64| of(&after).saturating_sub(of(&before)) as f64;
    let all = grown(|ticks| ticks.all);
    if all == 0.0 {
        return None;
    }
    let left = grown(|ticks| ticks.idle) + grown(|ticks| ticks.own);
    Some((left / all).min(1.0) * processors as f64)
}

fn read() -> Option<Ticks> {
    parse(&fs::read_to_string("/proc/stat").ok()?, own_ticks()?)
}

/// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
fn parse(stat: &str, own: u64) -> Option<Ticks> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let fields: Vec<u64> = fields.take(8).filter_map(|field| field.parse().ok()).collect();
    let idle = fields.get(3)? + fields.get(4).copied().unwrap_or(0);
    Some(Ticks { all: fields.iter().sum(), idle, own })
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
        let mut policy = Policy::new(Compress::Auto);
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
        let mut policy = Policy::new(Compress::Auto);
        let how = run(&mut policy, &world(GIGABIT), &RANDOM, TRY_AGAIN_SLOTS as usize);
        assert_eq!(how.iter().flatten().count() as u64, 2 * TRIAL_SLOTS, "only the trials");
        assert!(policy.text().starts_with("off: lz4 leaves 100 %"), "{}", policy.text());
        // Values of another kind follow.
        let how = run(&mut policy, &world(GIGABIT), &JSON, 100);
        assert_eq!(how[99], Some(Method::Zstd));
    }

    #[test]
    fn auto_waits_for_a_link_that_is_known_and_a_processor_that_is_idle() {
        let mut policy = Policy::new(Compress::Auto);
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
        for (choice, method) in
            [(Compress::Lz4, Some(Method::Lz4)), (Compress::Zstd, Some(Method::Zstd)), (Compress::Off, None)]
        {
            let mut policy = Policy::new(choice);
            let nothing = World { link: Link::unknown(0), spare: Some(0.0) };
            assert!(run(&mut policy, &nothing, &JSON, 20).iter().all(|how| *how == method));
            assert!(policy.text().contains("--compress"), "{}", policy.text());
        }
        let mut policy = Policy::new(Compress::Zstd);
        run(&mut policy, &world(GIGABIT), &JSON, 10);
        assert_eq!(policy.text(), "zstd: --compress zstd; 20.0 % of the snapshot is stored");
        assert!(policy.stored_bytes() < 3 * MIB);
    }

    const V4: &str = "\
    Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
    eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
    eth1\t0001000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
    eth2\t0001000A\t00000000\t0001\t0\t0\t50\t00FFFFFF\t0\t0\t0
    eth3\t0701000A\t00000000\t0005\t0\t0\t9\tFFFFFFFF\t0\t0\t0
    ";

    const V6: &str = "\
    fd000000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth1
    00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0
    00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
    ";

    #[test]
    fn the_most_specific_route_counts_and_then_the_least_metric() {
        let v4 = |peer: &str| route_v4(V4, peer.parse().unwrap()).unwrap();
        assert_eq!([v4("192.0.2.1"), v4("10.0.1.9"), v4("10.0.1.7")], ["eth0", "eth1", "eth3"]);
        let v6 = |peer: &str| route_v6(V6, peer.parse().unwrap()).unwrap();
        assert_eq!([v6("fd00::9"), v6("2001:db8::1")], ["eth1", "eth0"]);
        assert_eq!(route_v4("", Ipv4Addr::LOCALHOST), None);
        assert_eq!(route_v4("nonsense\nmore of it", Ipv4Addr::LOCALHOST), None);
    }

    #[test]
    fn an_interface_that_does_not_know_its_speed_says_nothing() {
        assert_eq!(parse_speed("1000\n"), Some(125_000_000));
        for nothing in ["-1\n", "0", "", "4294967295", "fast"] {
            assert_eq!(parse_speed(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn the_lower_of_what_is_said_and_what_is_measured_counts() {
        let said = Link::of_rate(1000 << 20);
        assert_eq!((said.rate(), said.to_string()), (Ok(1000 << 20), "the link has 1000 MiB/s (eth0)".into()));
        let slower = Link { measured: Some(100 << 20), ..said.clone() };
        assert_eq!(slower.to_string(), "the link has 100 MiB/s (measured)");
        assert_eq!(Link { measured: Some(2000 << 20), ..said }.rate(), Ok(1000 << 20));
        assert!(Link::unknown(1).rate().is_err() && Link::unknown(0).rate().is_err());
        let eager = Link::default();
        assert_eq!(eager.rate(), Ok(ASSUMED_RATE), "a snapshot before the first replica");
        assert!(eager.to_string().contains("assumed"), "{eager}");
    }

    #[test]
    fn a_link_is_measured_only_while_replicas_lag_behind() {
        let (mut measure, start) = (Measure::default(), Instant::now());
        let mut at = |millis: u64, served: u64, stored: u64, readers: usize| {
            measure.look(start + Duration::from_millis(millis), served << 20, stored << 20, readers)
        };
        assert_eq!(at(0, 0, 100, 0), None, "no replica reads");
        assert_eq!(at(100, 0, 100, 1), None, "the first look");
        assert_eq!(at(200, 10, 100, 1), None, "too short");
        assert_eq!(at(600, 50, 150, 1), Some(100 << 20));
        assert_eq!(at(1000, 190, 200, 1), None, "it has caught up");
        assert_eq!(at(1100, 190, 400, 1), None, "the first look since");
        assert_eq!(at(1600, 190, 400, 1), None, "it is idle");
        assert_eq!(at(2100, 290, 500, 2), Some(100 << 20), "each of two gets half");
        measure.begin(290 << 20);
        assert_eq!(measure.look(start, 290 << 20, 10 << 20, 1), None);
        assert_eq!(measure.before, 290 << 20);
    }

    #[test]
    fn what_others_use_is_not_left_and_what_we_use_is() {
        let before = parse("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 2\n", 50).unwrap();
        assert_eq!(before, Ticks { all: 1000, idle: 800, own: 50 });
        let after = |text: &str, own| between(before, parse(text, own).unwrap(), 2);
        // Of 100 ticks others have used 50, we 25, and 25 were idle, of two processors.
        assert_eq!(after("cpu  175 0 100 815 10 0 0 0", 75), Some(1.0));
        assert_eq!(after("cpu  200 0 100 800 0 0 0 0", 50), Some(0.0));
        assert_eq!(after("cpu  100 0 100 800 0 0 0 0", 50), None, "no tick has passed");
        assert_eq!(parse("intr 5", 0), None);
    }

    #[test]
    fn this_host_says_something() {
        let mut processors = Processors::default();
        let now = Instant::now();
        assert_eq!(processors.spare(now), None);
        std::thread::sleep(Duration::from_millis(30));
        let spare = processors.spare(now + SPAN);
        assert!(spare.is_none_or(|spare| (0.0..=4096.0).contains(&spare)), "{spare:?}");
    }
}
