//! Latest: which of several Sentinels knows best where the primary is.
//!
//! A Sentinel that was cut off, or has just started, names the primary of before a fail-over until another Sentinel
//! tells it. Each fail-over has a higher configuration epoch than the one before, and a majority of the Sentinels
//! agrees on it: the Sentinels themselves follow the highest that they hear of.

use crate::args::HostPort;

/// What a Sentinel says about the primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) address: HostPort,
    /// The epoch of its configuration. `None` where the user may not ask for it.
    pub(super) epoch: Option<u64>,
}

/// The address in the latest configuration, and the place in the list of the Sentinel that has named it: of several
/// with the same configuration, the first in the list.
pub(super) fn of(told: &[(usize, Told)]) -> Option<(usize, HostPort)> {
    let (at, latest) = told.iter().max_by_key(|(at, told)| (told.epoch, std::cmp::Reverse(*at)))?;
    let late = told.iter().filter(|(_, told)| told.address != latest.address).count();
    if late > 0 {
        tracing::info!(primary = %latest.address, late, "the Sentinels disagree; the latest configuration counts");
    }
    Some((*at, latest.address.clone()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn told(at: usize, port: u16, epoch: Option<u64>) -> (usize, Told) {
        let address = format!("10.0.0.1:{port}").parse().unwrap();
        (at, Told { address, epoch })
    }

    #[test]
    fn the_highest_epoch_wins_wherever_it_stands_and_whatever_comes_first() {
        let (old, new, unsure) = (told(0, 1, Some(9)), told(1, 2, Some(10)), told(2, 3, None));
        for list in [[&old, &new, &unsure], [&unsure, &new, &old], [&new, &unsure, &old]] {
            let list: Vec<_> = list.into_iter().cloned().collect();
            assert_eq!(of(&list).unwrap().0, 1);
            assert_eq!(of(&list).unwrap().1.port, 2);
        }
        // Epochs are numbers: the highest is not the one that a text would put last.
        assert_eq!(of(&[told(0, 1, Some(99)), told(1, 2, Some(100))]).unwrap().0, 1);
    }

    #[test]
    fn of_equal_ones_the_first_in_the_list_counts_and_one_without_an_epoch_last() {
        assert_eq!(of(&[told(2, 3, Some(4)), told(1, 2, Some(4))]).unwrap().0, 1);
        assert_eq!(of(&[told(0, 1, None), told(1, 2, Some(0))]).unwrap().0, 1);
        assert_eq!(of(&[told(1, 2, None), told(0, 1, None)]).unwrap().0, 0);
        assert_eq!(of(&[]), None);
    }
}
