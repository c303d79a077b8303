//! Runs: which clusters a file has. Where it has none there is a hole, which reads as zeros.

use std::ops::Range;

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
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

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
