//! How fast this end receives over the link by which it sends.
//!
//! An end that passes on what it receives sends at least as fast. TCP tells round-trip times only, and the
//! acknowledgements of what is sent wait behind what is received: a link that this end's own reception fills looks
//! like one that others fill, and sending less would not shorten that queue.

use std::time::{Duration, Instant};

/// The rate of a count of received bytes. The count grows in steps: a slot counts when all of it has arrived.
#[derive(Debug, Default)]
pub(super) struct Reception {
    /// Bytes per second; 0 while nothing arrives.
    rate: f64,
    /// The count when its rate was last taken, and when that was.
    mark: Option<(Instant, u64)>,
    /// When it last grew, and to what.
    grew: Option<(Instant, u64)>,
}

impl Reception {
    /// Takes the present count. A lower one than before is that of a new transfer.
    pub(super) fn note(&mut self, now: Instant, count: u64) {
        let (since, marked) = *self.mark.get_or_insert((now, count));
        let (grew, last) = *self.grew.get_or_insert((now, count));
        if count < last {
            *self = Reception { mark: Some((now, count)), grew: Some((now, count)), ..Reception::default() };
        } else if count > last {
            self.grew = Some((now, count));
            let lasted = now.saturating_duration_since(since);
            if lasted >= MEASURED_OVER {
                self.rate = count.saturating_sub(marked) as f64 / lasted.as_secs_f64();
                self.mark = self.grew;
            }
        } else if now.saturating_duration_since(grew) > OVER_AFTER {
            self.rate = 0.0;
            self.mark = Some((now, count));
        }
    }

    /// Bytes per second.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }
}

/// A rate is that of at least this time: some slots at the rates where it matters.
const MEASURED_OVER: Duration = Duration::from_millis(300);

/// Nothing more is received if the count has not grown for this long.
const OVER_AFTER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_whole_slots_and_ends_with_them() {
        let (mut reception, start) = (Reception::default(), Instant::now());
        let slot = 4 << 20;
        for milliseconds in 0..3_000 {
            // A slot each 160 ms: 26 MB/s.
            reception.note(start + Duration::from_millis(milliseconds), milliseconds / 160 * slot);
            if milliseconds > 500 {
                let rate = reception.rate() / (slot as f64 / 0.16);
                assert!((0.95..1.05).contains(&rate), "{rate} at {milliseconds} ms");
            }
        }
        reception.note(start + Duration::from_millis(4_500), 2_999 / 160 * slot);
        assert!(reception.rate() == 0.0);
        reception.note(start + Duration::from_millis(5_000), slot);
        assert!(reception.rate() == 0.0, "a new copy begins");
        reception.note(start + Duration::from_millis(5_500), 3 * slot);
        assert!((reception.rate() - 4.0 * slot as f64).abs() < 1.0);
    }
}
