//! Who lies for how long before it is destroyed. Pure: `site` says what lies here, and a worker's timer when to look.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Each lies for [`GRAVE_TIME`]. The first to come is the first to go.
#[derive(Debug)]
pub(super) struct Graves<G>(VecDeque<(Instant, G)>);

impl<G> Default for Graves<G> {
    fn default() -> Graves<G> {
        Graves(VecDeque::new())
    }
}

impl<G> Graves<G> {
    pub(super) fn lay(&mut self, now: Instant, grave: G) {
        self.0.push_back((now + GRAVE_TIME, grave));
    }

    /// When to look again; never, if nobody lies here.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.front().map(|(over, _)| *over)
    }

    /// Takes out those that have lain long enough.
    pub(super) fn take_over(&mut self, now: Instant) -> Vec<G> {
        let count = self.0.iter().take_while(|(over, _)| *over <= now).count();
        self.0.drain(..count).map(|(_, grave)| grave).collect()
    }
}

/// A card that was told to fail a queue pair has flushed it long before this.
const GRAVE_TIME: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Somebody who looks only when he was told to, and at nothing else, leaves nobody lying.
        #[test]
        fn who_looks_when_told_takes_each_out_once_in_time_and_not_before(pauses in proptest::collection::vec(0u64..500, 1..40)) {
            let mut graves = Graves::default();
            let mut now = Instant::now();
            let mut laid = Vec::new();
            let mut out = Vec::new();
            let look = |graves: &mut Graves<usize>, until: Option<Instant>, out: &mut Vec<(usize, Instant)>| {
                while let Some(at) = graves.next().filter(|at| until.is_none_or(|until| *at <= until)) {
                    let over = graves.take_over(at);
                    assert!(!over.is_empty(), "told to look for nothing");
                    out.extend(over.into_iter().map(|grave| (grave, at)));
                }
            };
            for (grave, pause) in pauses.iter().enumerate() {
                now += Duration::from_millis(*pause);
                look(&mut graves, Some(now), &mut out);
                graves.lay(now, grave);
                laid.push((grave, now + GRAVE_TIME));
            }
            look(&mut graves, None, &mut out);
            prop_assert_eq!(out, laid);
            prop_assert!(graves.next().is_none());
        }
    }
}
