//! The properties of a cable, rate, delay and loss, as calls of `tc` and `nft`. [`super::Host`] makes the calls.

use std::str::FromStr;
use std::time::Duration;

/// Rate and delay of a cable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Bytes per second each way, headers counted as on a wire. `None` for no limit.
    pub rate: Option<u64>,
    /// Delay of each packet, each way. Needs the kernel's `netem`, which small kernels lack.
    pub delay: Option<Duration>,
}

impl Shape {
    /// A shape with a rate only, in bytes per second.
    pub fn rate(bytes_per_second: u64) -> Shape {
        Shape { rate: Some(bytes_per_second), delay: None }
    }

    /// A shape with a rate only, in bits per second, the usual unit of networks: `Shape::bits(1_000_000_000)`.
    pub fn bits(bits_per_second: u64) -> Shape {
        Shape::rate(bits_per_second / 8)
    }

    /// The `tc` calls that create the shape: delay at the root, the rate below it. None for a cable without limits.
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

/// The share of packets that a cable loses, each way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss(u32);

impl Loss {
    /// A loss in percent, with a precision of hundredths. `None` if it is not a percentage, or rounds to zero without
    /// being zero.
    pub fn percent(percent: f64) -> Option<Loss> {
        let parts = (percent * f64::from(LOSS_PARTS) / 100.0).round() as u32;
        ((0.0..=100.0).contains(&percent) && (percent == 0.0 || parts > 0)).then_some(Loss(parts))
    }

    /// The `nft` commands that create the loss where `device` receives. They remove an earlier loss first.
    pub(super) fn rules(self, device: &str) -> String {
        let table = format!("table netdev loss-{device}");
        // "add" before "delete", because it is an error to delete a missing table.
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

/// A rate in bits per second, written as usual for networks: `100mbit`, `1gbit`, `2.5gbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitRate(pub u64);

impl FromStr for BitRate {
    type Err = String;

    fn from_str(text: &str) -> Result<BitRate, String> {
        let wrong = || format!("{text:?} is not a rate: write 100mbit, 1gbit or 2.5gbit");
        let (number, unit) = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)]
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
            .ok_or_else(wrong)?;
        let bits = number.parse::<f64>().map_err(|_| wrong())? * unit;
        // Below a packet a second nothing works; above a terabit it is a typing error.
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

/// Bytes that may be sent at full speed before the rate is enforced: a few of a veth's 64 KiB packets. With a quarter
/// of this size, 10 Gb/s were 6 (measured on two processors): the bucket was empty before the kernel's timer fired.
const BURST_BYTES: u32 = 256 << 10;

/// How long a packet may wait in the queue before it is dropped: about 2.5 MB at 1 Gb/s, as a switch's port has.
const QUEUE_MILLISECONDS: u32 = 20;

/// How many packets may be in transit at once: 10 Gbit/s × 100 ms in packets of 1500 bytes.
const DELAY_PACKETS: u32 = 83_000;

/// Losses are stored in hundredths of a percent.
const LOSS_PARTS: u32 = 10_000;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rates_are_parsed_in_the_units_of_networks() {
        assert_eq!("100mbit".parse(), Ok(BitRate(100_000_000)));
        assert_eq!("2.5gbit".parse::<BitRate>().unwrap().to_string(), "2.5 Gb/s");
        for wrong in ["", "fast", "100", "-1gbit", "0mbit", "9999999gbit", "NaNgbit"] {
            assert!(wrong.parse::<BitRate>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_loss_is_a_percentage() {
        assert_eq!(Loss::percent(1.5), Some(Loss(150)));
        for wrong in [-0.1, 100.1, f64::NAN] {
            assert_eq!(Loss::percent(wrong), None);
        }
    }

    #[test]
    fn an_unlimited_cable_has_no_queue() {
        assert!(Shape::default().queues("eth0").is_empty());
    }
}
