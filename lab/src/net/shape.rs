//! What a cable is like: how fast, how long, how lossy, as calls of `tc` and `nft`. Only words; [`super::Host`] says them.

use std::str::FromStr;
use std::time::Duration;

/// How slow a cable is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Bytes per second each way, headers counted as on a wire. `None`: as fast as the machine.
    pub rate: Option<u64>,
    /// Added to each packet's way, each way. Needs the kernel's `netem`, which small kernels lack.
    pub delay: Option<Duration>,
}

impl Shape {
    /// A rate alone, in bytes per second.
    pub fn rate(bytes_per_second: u64) -> Shape {
        Shape { rate: Some(bytes_per_second), delay: None }
    }

    /// A rate alone, in bits per second, as networks are named: `Shape::bits(1_000_000_000)`.
    pub fn bits(bits_per_second: u64) -> Shape {
        Shape::rate(bits_per_second / 8)
    }

    /// The `tc` calls that bring it about: delay at the root, the rate below it. Nothing for a free cable.
    pub(super) fn queues(self, device: &str) -> Vec<Vec<String>> {
        let mut parent = vec!["root".to_owned()];
        let mut calls = Vec::new();
        let mut add = |parent: &[String], handle: &str, queue: String| {
            let mut call: Vec<String> = ["qdisc", "add", "dev", device].map(str::to_owned).to_vec();
            call.extend_from_slice(parent);
            call.extend(["handle".to_owned(), handle.to_owned()]);
            call.extend(queue.split(' ').map(str::to_owned));
            calls.push(call);
        };
        if let Some(delay) = self.delay {
            add(&parent, "1:", format!("netem delay {}us limit {DELAY_PACKETS}", delay.as_micros()));
            parent = vec!["parent".to_owned(), "1:1".to_owned()];
        }
        if let Some(rate) = self.rate {
            let queue = format!("tbf rate {}bit burst {BURST_BYTES} latency {QUEUE_MILLISECONDS}ms", rate * 8);
            add(&parent, "2:", queue);
        }
        calls
    }
}

/// How many packets a cable loses, each way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss(u32);

impl Loss {
    /// So many of a hundred, to a hundredth of a percent. `None` for what is no share of a hundred, and for some that would be none.
    pub fn percent(percent: f64) -> Option<Loss> {
        let parts = (percent * f64::from(LOSS_PARTS) / 100.0).round() as u32;
        ((0.0..=100.0).contains(&percent) && (percent == 0.0 || parts > 0)).then_some(Loss(parts))
    }

    /// The commands of `nft` that bring it about where `device` receives. What was said before is forgotten first.
    pub(super) fn rules(self, device: &str) -> String {
        let table = format!("table netdev loss-{device}");
        // "add" before "delete", as deleting what isn't there is an error.
        let forget = format!("add {table}; delete {table};");
        if self.0 == 0 {
            return forget;
        }
        let chain = format!("netdev loss-{device} in");
        format!(
            "{forget} add {table}; add chain {chain} {{ type filter hook ingress device \"{device}\" priority 0; }}; \
             add rule {chain} numgen random mod {LOSS_PARTS} <= {} drop",
            self.0 - 1
        )
    }
}

/// A rate as networks are named, in bits per second: `100mbit`, `1gbit`, `2.5gbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitRate(pub u64);

impl FromStr for BitRate {
    type Err = String;

    fn from_str(text: &str) -> Result<BitRate, String> {
        let wrong = || format!("{text:?} is no rate: write 100mbit, 1gbit or 2.5gbit");
        let (number, unit) = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)]
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
            .ok_or_else(wrong)?;
        let bits = number.parse::<f64>().map_err(|_| wrong())? * unit;
        // Below a packet a second nothing works, above a terabit it is a slip of the hand.
        if (1e4..=1e12).contains(&bits) { Ok(BitRate(bits as u64)) } else { Err(wrong()) }
    }
}

impl std::fmt::Display for BitRate {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 as f64 {
            bits if bits >= 1e9 => write!(to, "{} Gb/s", bits / 1e9),
            bits => write!(to, "{} Mb/s", bits / 1e6),
        }
    }
}

/// What may go at full speed before the rate is enforced: a few of the 64 KiB packets that a veth carries. With a quarter of
/// it 10 Gb/s were 6 (tried on two processors): the bucket was empty before the kernel's timer came back.
const BURST_BYTES: u32 = 256 << 10;

/// How long a packet may wait for its turn before it is dropped: some 2.5 MB at 1 Gb/s, as a switch's port has.
const QUEUE_MILLISECONDS: u32 = 20;

/// How many packets may be on their way at once: 10 Gbit/s × 100 ms in packets of 1500 bytes.
const DELAY_PACKETS: u32 = 83_000;

/// Losses are counted in hundredths of a percent.
const LOSS_PARTS: u32 = 10_000;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rates_are_read_as_networks_are_named() {
        assert_eq!("100mbit".parse(), Ok(BitRate(100_000_000)));
        assert_eq!("2.5gbit".parse::<BitRate>().unwrap().to_string(), "2.5 Gb/s");
        for wrong in ["", "fast", "100", "-1gbit", "0mbit", "9999999gbit", "NaNgbit"] {
            assert!(wrong.parse::<BitRate>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_share_of_loss_is_one_of_a_hundred() {
        assert_eq!(Loss::percent(1.5), Some(Loss(150)));
        for wrong in [-0.1, 100.1, f64::NAN] {
            assert_eq!(Loss::percent(wrong), None);
        }
    }

    #[test]
    fn a_free_cable_has_no_queue_of_ours() {
        assert!(Shape::default().queues("eth0").is_empty());
    }
}
