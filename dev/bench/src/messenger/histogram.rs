//! A histogram of times with boxes of growing size: to within 3 % from a nanosecond to an hour, in a fixed 10 KiB,
//! without a lock.

use std::time::Duration;

/// Counts of times.
#[derive(Clone)]
pub struct Histogram {
    boxes: Vec<u64>,
    count: u64,
    sum: Duration,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { boxes: vec![0; BOXES], count: 0, sum: Duration::ZERO }
    }
}

impl Histogram {
    /// Counts one time.
    pub fn record(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.boxes[box_of(nanos).min(BOXES - 1)] += 1;
        self.count += 1;
        self.sum += time;
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Histogram) {
        self.boxes.iter_mut().zip(&other.boxes).for_each(|(ours, theirs)| *ours += theirs);
        self.count += other.count;
        self.sum += other.sum;
    }

    /// The number of times counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean; zero if no time was counted.
    pub fn mean(&self) -> Duration {
        self.sum.checked_div(u32::try_from(self.count).unwrap_or(u32::MAX)).unwrap_or_default()
    }

    /// The time below which the share `q` of all times is.
    pub fn quantile(&self, q: f64) -> Duration {
        let wanted = (q * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let found = self.boxes.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        Duration::from_nanos(found.map_or(0, middle_of))
    }
}

/// Sixteen boxes for each doubling.
fn box_of(nanos: u64) -> usize {
    let doubling = nanos.max(STEPS).ilog2() - STEPS.ilog2();
    (u64::from(doubling) * STEPS + (nanos >> doubling)) as usize
}

fn middle_of(at: usize) -> u64 {
    let at = at as u64;
    let doubling = (at / STEPS).saturating_sub(1);
    let low = (at - doubling * STEPS) << doubling;
    low + ((1 << doubling) >> 1)
}

const STEPS: u64 = 16;
/// The greatest time is 2^44 ns, about five hours.
const BOXES: usize = 16 * 42;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact_to_within_their_boxes() {
        let mut histogram = Histogram::default();
        (1..=100_000).for_each(|nanos| histogram.record(Duration::from_nanos(nanos)));
        for (q, truth) in [(0.5, 50_000.0), (0.99, 99_000.0), (0.001, 100.0)] {
            let found = histogram.quantile(q).as_nanos() as f64;
            assert!((found / truth - 1.0).abs() < 0.07, "{q}: {found}");
        }
        assert_eq!(histogram.mean(), Duration::from_nanos(50_000));
    }
}
