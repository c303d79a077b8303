//! Overlap: what requests of several blocks have in common. The rules know writes and reads by number only. Which write
//! a read must return, a client asks here.

// Stands alone: clients and servers ask it alike, and each of its rules has a mutant.

#[cfg(test)]
use crate::mutant::Mutant;
use crate::version::Version;
use crate::wire::Run;

/// Whether two runs have a block in common.
pub(crate) fn overlap(one: Run, other: Run) -> bool {
    #[cfg(test)]
    if Mutant::OverlapOfFirst.is_active() {
        return other.blocks().contains(&one.first);
    }
    one.first < other.blocks().end && other.first < one.blocks().end
}

/// The last one of these writes, given in their order, that has changed a block of a run.
pub(crate) fn last_write_of<'a>(
    run: Run,
    writes: impl DoubleEndedIterator<Item = (Version, &'a [Run])>,
) -> Option<Version> {
    let changes = |runs: &[Run]| {
        #[cfg(test)]
        if Mutant::FirstRunOnly.is_active() {
            return runs.first().is_some_and(|first| overlap(run, *first));
        }
        runs.iter().any(|other| overlap(run, *other))
    };
    writes.rev().find(|(_, runs)| changes(runs)).map(|(version, _)| version)
}

/// The last write of any of the blocks of which these versions are.
pub(crate) fn newest(versions: impl IntoIterator<Item = Version>) -> Version {
    let mut versions = versions.into_iter();
    #[cfg(test)]
    if Mutant::NewestOfFirst.is_active() {
        return versions.next().unwrap_or_default();
    }
    let first = versions.next().unwrap_or_default();
    versions.fold(first, Version::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::version::Generation;

    fn run(first: u64, count: u32) -> Run {
        Run { first, count }
    }

    #[test]
    fn runs_that_touch_have_no_block_in_common() {
        for (one, other, expected) in [
            (run(3, 2), run(5, 1), false),
            (run(3, 2), run(4, 9), true),
            (run(0, 9), run(4, 1), true),
            (run(u64::MAX - 1, 9), run(0, 4), false),
        ] {
            assert_eq!((overlap(one, other), overlap(other, one)), (expected, expected), "{one:?} {other:?}");
        }
    }

    #[test]
    fn the_last_write_is_found_by_any_of_its_runs() {
        let first = Generation::NONE.next().unwrap_or_default().start();
        let second = first.next().unwrap_or_default();
        let writes = [(first, vec![run(7, 1), run(0, 2)]), (second, vec![run(1, 1)])];
        let last = |run| last_write_of(run, writes.iter().map(|(version, runs)| (*version, &runs[..])));
        assert_eq!((last(run(0, 4)), last(run(0, 1)), last(run(6, 3))), (Some(second), Some(first), Some(first)));
        assert_eq!((last(run(2, 5)), newest([first, second, first]), newest([])), (None, second, Version::NONE));
    }
}
