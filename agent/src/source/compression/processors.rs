//! Processors: how many of them the rest of the host leaves to this process.

use std::fs;
use std::time::{Duration, Instant};

use crate::metrics::own_ticks;

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
pub(in crate::source) struct Processors {
    last: Option<(Instant, Ticks)>,
    spare: Option<f64>,
}

impl Processors {
    /// Processors that the rest of the host has left since the last look, in which this process may have worked.
    /// `None`: not known yet, or the system does not say.
    pub(in crate::source) fn spare(&mut self, now: Instant) -> Option<f64> {
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
