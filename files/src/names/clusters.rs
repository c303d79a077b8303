//! Clusters: which of them are free. A bit for each.
//!
//! What is freed rests before it is used again. A read that is under way may still be of it; and a host that follows
//! the volume learns of the change only at its next look. The log needs no rest: what frees a cluster is written before
//! what uses it again, and every copy is a prefix.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// How long freed clusters rest while others are free, in milliseconds: longer than a host that follows goes without a
/// look.
pub(super) const REST_MS: u64 = 30_000;

/// Clusters that a file gets beside each other if it can, so that several files that grow at the same time do not have
/// every other one: 1 MiB.
const TOGETHER: u32 = 16;

/// Places that are looked at for one search, in a volume whose free clusters are scattered.
const MOST_LOOKS: u32 = 256;

/// See the module's text.
#[derive(Clone, Debug)]
pub(crate) struct Clusters {
    /// A bit for each, the lowest one first. Set: it is used, or rests, or is not there.
    words: Vec<u64>,
    number: u32,
    free: u32,
    /// Where the search for free ones begins.
    next: u32,
    rest: Rest,
}

#[derive(Clone, Debug, Default)]
struct Rest {
    /// In the order in which they were freed.
    spaces: VecDeque<Resting>,
    count: u32,
    /// Reads under way, by the number of the change before which they began.
    reads: BTreeMap<u64, u32>,
    change: u64,
}

#[derive(Clone, Copy, Debug)]
struct Resting {
    space: Space,
    since_ms: u64,
    change: u64,
}

const BITS: u32 = u64::BITS;

impl Clusters {
    pub(super) fn new(number: u32) -> Clusters {
        let mut words = vec![0; number.div_ceil(BITS) as usize];
        if let (Some(last), 1..) = (words.last_mut(), number % BITS) {
            *last = u64::MAX << (number % BITS);
        }
        Clusters { words, number, free: number, next: 0, rest: Rest::default() }
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// What can be used, at once or after a rest.
    pub(super) fn free(&self) -> u32 {
        self.free + self.rest.count
    }

    /// What can be used at once.
    pub(super) fn ready(&self) -> u32 {
        self.free
    }

    fn is_free(&self, cluster: u32) -> bool {
        cluster < self.number && self.words[(cluster / BITS) as usize] >> (cluster % BITS) & 1 == 0
    }

    /// `false`: not all of them were free. Then nothing has changed.
    pub(super) fn take(&mut self, space: Space) -> bool {
        let Some(end) = space.at.checked_add(space.count).filter(|end| *end <= self.number) else { return false };
        if !(space.at..end).all(|cluster| self.is_free(cluster)) {
            return false;
        }
        (space.at..end).for_each(|cluster| self.words[(cluster / BITS) as usize] |= 1 << (cluster % BITS));
        self.free -= space.count;
        true
    }

    /// They are free at once: nothing reads them.
    pub(super) fn give(&mut self, space: Space) {
        let clusters = space.at..space.at + space.count; // they were taken, so they are there
        clusters.for_each(|cluster| self.words[(cluster / BITS) as usize] &= !(1 << (cluster % BITS)));
        self.free += space.count;
    }

    /// They are free after a rest.
    pub(super) fn give_later(&mut self, space: Space, now_ms: u64) {
        self.rest.spaces.push_back(Resting { space, since_ms: now_ms, change: self.rest.change });
        self.rest.count += space.count;
        self.rest.change += 1;
    }

    /// A read begins. Returns what to say at its end.
    pub(super) fn begin_read(&mut self) -> u64 {
        *self.rest.reads.entry(self.rest.change).or_default() += 1;
        self.rest.change
    }

    /// A read is over.
    pub(super) fn end_read(&mut self, change: u64) {
        if let Some(reads) = self.rest.reads.get_mut(&change) {
            *reads -= 1;
            if *reads == 0 {
                self.rest.reads.remove(&change);
            }
        }
    }

    /// Whether some of those that rest may be free once a read is over.
    pub(super) fn wait_for_reads(&self) -> bool {
        self.rest.count > 0 && !self.rest.reads.is_empty()
    }

    /// Ends rests: those that were long enough; and if fewer than `needed` are free, earlier ones too.
    pub(super) fn end_rests(&mut self, needed: u64, now_ms: u64) {
        let first_read = self.rest.reads.keys().next().copied().unwrap_or(u64::MAX);
        while let Some(Resting { space, since_ms, change }) = self.rest.spaces.front().copied() {
            let is_over = now_ms.saturating_sub(since_ms) >= REST_MS || u64::from(self.free) < needed;
            // A read that began at `change` may be of what was freed by that change.
            if !is_over || first_read <= change {
                return;
            }
            self.rest.spaces.pop_front();
            self.rest.count -= space.count;
            self.give(space);
        }
    }

    /// Up to `wanted` free neighbours: at `goal` if that is free, otherwise where [`TOGETHER`] are, otherwise any.
    pub(super) fn find(&mut self, goal: Option<u32>, wanted: u32) -> Option<Space> {
        if let Some(goal) = goal.filter(|goal| self.is_free(*goal)) {
            return Some(self.measure(goal, wanted));
        }
        let room = wanted.max(TOGETHER);
        let (mut best, mut looks): (Option<Space>, _) = (None, 0);
        let (mut at, mut left) = (self.next, self.number);
        while left > 0 {
            let Some(found) = self.next_free(at) else {
                left = left.saturating_sub(self.number - at);
                at = 0;
                continue;
            };
            left = left.saturating_sub(found - at);
            let space = self.measure(found, room);
            if best.is_none_or(|best| best.count < space.count) && left > 0 {
                best = Some(space);
            }
            looks += 1;
            if space.count == room || left == 0 || looks == MOST_LOOKS {
                break;
            }
            left = left.saturating_sub(space.count);
            at = found + space.count;
            if at >= self.number {
                at = 0;
            }
        }
        let space = best?;
        // Another file begins behind the room of this one.
        self.next = if space.at + space.count < self.number { space.at + space.count } else { 0 };
        Some(Space { count: space.count.min(wanted), ..space })
    }

    /// The first free one at or behind a place.
    fn next_free(&self, at: u32) -> Option<u32> {
        let mut word = (at / BITS) as usize;
        let mut free = !*self.words.get(word)? & u64::MAX << (at % BITS);
        while free == 0 {
            word += 1;
            free = !*self.words.get(word)?;
        }
        Some(word as u32 * BITS + free.trailing_zeros())
    }

    /// The last free ones of which so many are neighbours.
    pub(super) fn find_last(&self, count: u32) -> Option<Space> {
        let (mut at, mut found) = (self.number, 0);
        while at > 0 && found < count {
            at -= 1;
            if self.is_free(at) {
                found += 1;
            } else {
                found = 0;
                let word = (at / BITS) as usize;
                if self.words[word] == u64::MAX {
                    at = word as u32 * BITS; // none of them is free
                }
            }
        }
        (found == count && count > 0).then_some(Space { at, count })
    }

    fn measure(&self, at: u32, most: u32) -> Space {
        let count = (0..most).take_while(|count| self.is_free(at + count)).count();
        Space { at, count: count as u32 }
    }

    /// The volume has more clusters now.
    pub(super) fn grow(&mut self, number: u32) {
        let mut larger = Clusters::new(number);
        larger.words.iter_mut().zip(&self.words).for_each(|(larger, word)| *larger |= word);
        // What was not there.
        if !self.number.is_multiple_of(BITS) {
            let word = (self.number / BITS) as usize;
            let beyond = u64::MAX << (self.number % BITS);
            let is_last = word + 1 == larger.words.len() && !number.is_multiple_of(BITS);
            let missing = if is_last { u64::MAX << (number % BITS) } else { 0 };
            larger.words[word] = larger.words[word] & !beyond | missing;
        }
        larger.free = self.free + (number - self.number);
        larger.rest = std::mem::take(&mut self.rest);
        larger.next = self.next;
        *self = larger;
    }
}

// Which clusters a file has. Where it has none there is a hole, which reads as zeros.

/// Neighbouring clusters of a file that are neighbours in the volume too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first one, in the file.
    pub first: u32,
    /// The first one, in the volume.
    pub at: u32,
    /// How many.
    pub count: u32,
}

impl Run {
    /// The clusters of the file.
    pub fn clusters(self) -> Range<u64> {
        u64::from(self.first)..u64::from(self.first) + u64::from(self.count)
    }

    /// Where they are in the volume.
    pub(super) fn space(self) -> Space {
        Space { at: self.at, count: self.count }
    }

    /// What it has of these clusters of the file.
    fn part(self, clusters: &Range<u64>) -> Option<Run> {
        let start = clusters.start.max(self.first.into());
        let end = clusters.end.min(self.clusters().end);
        // Both are within the run.
        (start < end).then(|| {
            let skipped = (start - u64::from(self.first)) as u32;
            Run { first: self.first + skipped, at: self.at + skipped, count: (end - start) as u32 }
        })
    }

    fn is_before(self, next: Run) -> bool {
        self.clusters().end == u64::from(next.first)
            && u64::from(self.at) + u64::from(self.count) == u64::from(next.at)
            && self.count.checked_add(next.count).is_some()
    }
}

/// Neighbouring clusters of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    /// The first one.
    pub(super) at: u32,
    /// How many.
    pub(super) count: u32,
}

/// The runs of a file, in their order. Most files have one, for which no further memory is needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Runs {
    /// A file without clusters.
    #[default]
    None,
    /// One run.
    One(Run),
    /// Several runs.
    Several(Vec<Run>),
}

impl Runs {
    /// All of them.
    pub(super) fn as_slice(&self) -> &[Run] {
        match self {
            Runs::None => &[],
            Runs::One(run) => std::slice::from_ref(run),
            Runs::Several(runs) => runs,
        }
    }

    /// The clusters that they have.
    pub(super) fn count(&self) -> u64 {
        self.as_slice().iter().map(|run| u64::from(run.count)).sum()
    }

    /// What there is of these clusters of the file.
    pub(super) fn within(&self, clusters: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        let runs = self.as_slice();
        let first = runs.partition_point(|run| run.clusters().end <= clusters.start);
        runs[first..].iter().map_while(move |run| run.part(&clusters))
    }

    /// The parts of these clusters of the file that have none.
    pub(super) fn holes(&self, clusters: Range<u64>) -> Vec<Range<u64>> {
        let mut holes = Vec::new();
        let mut at = clusters.start;
        for run in self.within(clusters.clone()) {
            if at < run.clusters().start {
                holes.push(at..run.clusters().start);
            }
            at = run.clusters().end;
        }
        if at < clusters.end {
            holes.push(at..clusters.end);
        }
        holes
    }

    /// The last run that begins before a cluster of the file.
    pub(super) fn before(&self, cluster: u64) -> Option<Run> {
        let runs = self.as_slice();
        runs[..runs.partition_point(|run| u64::from(run.first) < cluster)].last().copied()
    }

    /// Adds a run. `false`: the file has a cluster there already.
    pub(super) fn add(&mut self, run: Run) -> bool {
        let runs = self.as_slice();
        let place = runs.partition_point(|other| other.first < run.first);
        let (before, after) = (place.checked_sub(1).map(|place| runs[place]), runs.get(place).copied());
        let is_free = before.is_none_or(|before| before.clusters().end <= u64::from(run.first))
            && after.is_none_or(|after| run.clusters().end <= u64::from(after.first));
        if !is_free {
            return false;
        }
        self.change(|runs| match (before, after) {
            (Some(before), _) if before.is_before(run) => {
                runs[place - 1].count += run.count;
                if after.is_some_and(|after| runs[place - 1].is_before(after)) {
                    runs[place - 1].count += runs.remove(place).count;
                }
            }
            (_, Some(after)) if run.is_before(after) => runs[place] = Run { count: run.count + after.count, ..run },
            _ => runs.insert(place, run),
        });
        true
    }

    /// Removes what there is of these clusters of the file, and returns it.
    pub(super) fn remove(&mut self, clusters: Range<u64>) -> Vec<Run> {
        let removed: Vec<Run> = self.within(clusters.clone()).collect();
        if removed.is_empty() {
            return removed;
        }
        let runs = self.as_slice();
        let first = runs.partition_point(|run| run.clusters().end <= clusters.start);
        let left = runs[first].part(&(0..clusters.start));
        let last = first + removed.len() - 1;
        let right = runs[last].part(&(clusters.end..u64::MAX));
        self.change(|runs| _ = runs.splice(first..=last, left.into_iter().chain(right)));
        removed
    }

    fn change(&mut self, change: impl FnOnce(&mut Vec<Run>)) {
        let mut runs = match std::mem::take(self) {
            Runs::None => Vec::new(),
            Runs::One(run) => vec![run],
            Runs::Several(runs) => runs,
        };
        change(&mut runs);
        *self = match runs[..] {
            [] => Runs::None,
            [run] => Runs::One(run),
            _ => Runs::Several(runs),
        };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn space(at: u32, count: u32) -> Space {
        Space { at, count }
    }

    fn count(clusters: &Clusters) -> u32 {
        (0..clusters.number).filter(|cluster| clusters.is_free(*cluster)).count() as u32
    }

    #[test]
    fn what_is_taken_is_not_found_and_all_is_found() {
        for number in [1, 63, 64, 65, 200] {
            let mut clusters = Clusters::new(number);
            let mut found = 0;
            while let Some(space) = clusters.find(None, 7) {
                assert!(clusters.take(space) && !clusters.take(space), "{space:?} of {number}");
                found += space.count;
            }
            assert_eq!((found, clusters.free(), count(&clusters)), (number, 0, 0));
            clusters.give(space(number - 1, 1));
            assert_eq!(clusters.find(None, 7), Some(space(number - 1, 1)));
        }
    }

    #[test]
    fn files_that_grow_at_the_same_time_stay_together() {
        let mut clusters = Clusters::new(1000);
        let mut files = [None, None];
        for _ in 0..TOGETHER {
            for last in &mut files {
                let found = clusters.find(last.map(|last: u32| last + 1), 1).unwrap();
                assert!(clusters.take(found) && last.is_none_or(|last| found.at == last + 1), "{found:?}");
                *last = Some(found.at);
            }
        }
    }

    #[test]
    fn what_is_freed_rests_as_long_as_others_are_free() {
        let mut clusters = Clusters::new(100);
        assert!(clusters.take(space(0, 90)));
        clusters.give_later(space(0, 10), 1000);
        clusters.end_rests(10, 1000 + REST_MS - 1);
        assert_eq!((clusters.ready(), clusters.free()), (10, 20));
        clusters.end_rests(11, 1000);
        assert_eq!((clusters.ready(), clusters.free()), (20, 20));
        clusters.give_later(space(10, 5), 2000);
        clusters.end_rests(1, 2000 + REST_MS);
        assert_eq!(clusters.ready(), 25);
    }

    #[test]
    fn what_a_read_may_be_of_is_not_given_out() {
        let mut clusters = Clusters::new(100);
        assert!(clusters.take(space(0, 100)));
        let early = clusters.begin_read();
        clusters.give_later(space(0, 10), 0);
        let late = clusters.begin_read();
        clusters.give_later(space(10, 10), 0);
        clusters.end_rests(100, REST_MS);
        assert_eq!(clusters.ready(), 0);
        clusters.end_read(early);
        clusters.end_rests(100, REST_MS);
        assert_eq!(clusters.ready(), 10);
        clusters.end_read(late);
        clusters.end_rests(100, REST_MS);
        assert_eq!(clusters.ready(), 20);
    }

    #[test]
    fn a_larger_volume_has_more() {
        for (before, after) in [(1, 2), (63, 65), (64, 128), (10, 50), (100, 100), (70, 1000)] {
            let mut clusters = Clusters::new(before);
            assert!(clusters.take(space(0, 1)));
            clusters.grow(after);
            assert_eq!((clusters.free(), count(&clusters), clusters.is_free(0)), (after - 1, after - 1, false));
        }
    }

    proptest! {
        /// Against a map from each cluster of the file to its place.
        #[test]
        fn runs_are_what_a_map_of_clusters_is(steps in prop::collection::vec((0..40_u32, 0..40_u32, 1..12_u32, any::<bool>()), 1..60)) {
            let (mut runs, mut model) = (Runs::default(), BTreeMap::new());
            for (first, at, count, adds) in steps {
                let clusters = u64::from(first)..u64::from(first + count);
                let there: Vec<u64> = clusters.clone().filter(|cluster| model.contains_key(cluster)).collect();
                let holes: Vec<u64> = runs.holes(clusters.clone()).into_iter().flatten().collect();
                prop_assert_eq!(holes.len() + there.len(), count as usize);
                prop_assert!(holes.iter().all(|cluster| !model.contains_key(cluster)));
                if adds {
                    prop_assert_eq!(runs.add(Run { first, at, count }), there.is_empty());
                    if there.is_empty() {
                        model.extend(clusters.clone().zip(at..));
                    }
                } else {
                    let removed: u64 = runs.remove(clusters.clone()).iter().map(|run| u64::from(run.count)).sum();
                    prop_assert_eq!(removed, there.len() as u64);
                    there.iter().for_each(|cluster| _ = model.remove(cluster));
                }
                let found: BTreeMap<u64, u32> =
                    runs.as_slice().iter().flat_map(|run| run.clusters().zip(run.at..)).collect();
                prop_assert_eq!(&found, &model);
                // Neighbours are one run.
                prop_assert!(runs.as_slice().windows(2).all(|pair| !pair[0].is_before(pair[1])));
                prop_assert_eq!(runs.before(first.into()).map(|run| run.first),
                    runs.as_slice().iter().map(|run| run.first).filter(|other| *other < first).max());
            }
        }
    }
}
