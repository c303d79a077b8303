//! Link: how fast bytes go from this host to the replicas that read from the source.
//!
//! What the network interface says of its speed is known before the first byte is sent. It says nothing of the rest of
//! the way, and virtual interfaces say nothing or anything. So the rate is measured too, while replicas lag behind what
//! is stored for them: then the link is what they wait for. The lower of the two counts.

use std::fmt;
use std::fs;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::growth::Growth;
use crate::units::Size;

/// What is known of the link to replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::source) struct Link {
    /// Replicas that have joined, wherever they are.
    pub(in crate::source) joined: usize,
    /// Those of them on other hosts that read from the source by TCP.
    pub(in crate::source) readers: usize,
    /// What the interface says, or what the source is limited to.
    pub(in crate::source) said: Option<Said>,
    /// What a replica received when it lagged behind, bytes per second.
    pub(in crate::source) measured: Option<u64>,
}

/// A rate that is not measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::source) struct Said {
    /// Bytes per second.
    pub(in crate::source) rate: u64,
    /// Who says so: an interface or an option.
    pub(in crate::source) by: String,
}

impl Link {
    /// Bytes per second, or why that is not known.
    pub(in crate::source) fn rate(&self) -> Result<u64, &'static str> {
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
    pub(super) fn of_rate(rate: u64) -> Link {
        Link { joined: 1, readers: 1, said: Some(Said { rate, by: "eth0".into() }), measured: None }
    }

    /// A link of which nothing is known but this number of readers.
    #[cfg(test)]
    pub(super) fn unknown(readers: usize) -> Link {
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
pub(in crate::source) struct Measure {
    growth: Growth,
    /// Bytes served before the present snapshot.
    before: u64,
}

impl Measure {
    /// A snapshot begins, after that many bytes were served in all.
    pub(in crate::source) fn begin(&mut self, served: u64) {
        *self = Measure { growth: Growth::default(), before: served };
    }

    /// Takes a look: bytes served in all, bytes stored of this snapshot, and the replicas that read it. Returns what
    /// each receives per second, if all that time they lagged behind.
    pub(in crate::source) fn look(&mut self, now: Instant, served: u64, stored: u64, readers: usize) -> Option<u64> {
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
pub(in crate::source) fn said_by_interface(peer: IpAddr) -> Option<Said> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

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
}
