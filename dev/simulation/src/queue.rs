//! Queue: what is to happen, by time.
// Stands alone: it knows nothing of the world.

use std::collections::BTreeMap;
use std::time::Duration;

/// When something happens: its time, a number that decides between things of one time, and the number of the call.
type When = (Duration, u64, u64);

/// Things to happen. They are large, so that only their places are sorted.
pub(super) struct Queue<T> {
    order: BTreeMap<When, usize>,
    things: Vec<Option<T>>,
    free: Vec<usize>,
    calls: u64,
}

impl<T> Queue<T> {
    pub(super) fn new() -> Queue<T> {
        Queue { order: BTreeMap::new(), things: Vec::new(), free: Vec::new(), calls: 0 }
    }

    /// Adds a thing. Of two at one time, the one with the smaller `tie` is the first, and else the one that came first.
    pub(super) fn add(&mut self, time: Duration, tie: u64, thing: T) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.things.push(None);
            self.things.len() - 1
        });
        self.things[place] = Some(thing);
        self.calls += 1;
        self.order.insert((time, tie, self.calls), place);
    }

    /// The time of the next thing.
    pub(super) fn next_time(&self) -> Option<Duration> {
        self.order.first_key_value().map(|(&(time, ..), _)| time)
    }

    /// Takes the next thing.
    pub(super) fn pop(&mut self) -> Option<(Duration, T)> {
        let ((time, ..), place) = self.order.pop_first()?;
        self.free.push(place);
        self.things[place].take().map(|thing| (time, thing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_come_by_time_then_by_tie_then_in_the_order_of_the_calls() {
        let (mut queue, second) = (Queue::new(), Duration::from_secs(1));
        for (time, tie, thing) in [(2, 0, "e"), (1, 7, "d"), (1, 0, "a"), (1, 0, "b"), (1, 3, "c")] {
            queue.add(second * time, tie, thing);
        }
        assert_eq!(queue.next_time(), Some(second));
        let first: Vec<_> = (0..3).filter_map(|_| queue.pop()).map(|(_, thing)| thing).collect();
        assert_eq!(first, ["a", "b", "c"]);
        queue.add(second, 0, "again");
        assert_eq!(queue.pop(), Some((second, "again")));
        assert_eq!((queue.pop(), queue.pop()), (Some((second, "d")), Some((second * 2, "e"))));
        assert_eq!((queue.pop(), queue.next_time()), (None, None));
    }
}
