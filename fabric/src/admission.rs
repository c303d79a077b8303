//! Admission: which connections may wait for their proof. Pure: the caller hands the time in, and closes connections.
//!
//! ```text
//!   a connection ── its address has a place ──────────────────────▶ Admitted
//!                ── no place, the oldest one has had its time ────▶ Admitted, and the oldest one gives way
//!                ── no place, each one is younger than the grace ─▶ Full
//! ```
//!
//! A peer that has proved nothing costs a place, and places are few. So each address has a part of them only, and where
//! they are used up the oldest connection gives way to the newest. A peer that holds the token needs a few round trips
//! for its proof. One that connects and stays silent holds its place until the next peer wants it. A flood from one
//! address takes the places of that address, and no others.
//!
//! An address stands for its network: an IPv6 host usually has 2^64 addresses.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// How long a connection keeps its place in any case: a proof takes two round trips, and a slow link has 50 ms for
/// each.
pub const GRACE: Duration = Duration::from_millis(100);

/// Connections that may wait for their proof, by address and in all.
#[derive(Debug)]
pub struct Admission {
    /// By number, and so by age.
    places: BTreeMap<u64, Place>,
    next: u64,
    limits: Limits,
}

/// How many connections may wait for their proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// From all addresses.
    pub total: usize,
    /// From one address, or one IPv6 network of 64 bits.
    pub per_address: usize,
}

/// The answer to a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has the place of this number. If `instead` names another place, the caller closes that connection.
    Admitted {
        /// The number of the new place.
        place: u64,
        /// The place that was given up for it.
        instead: Option<u64>,
    },
    /// There is no place. A moment later there is.
    Full,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    network: Network,
    since: Instant,
}

/// An IPv4 address, or the first 64 bits of an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Network {
    V4([u8; 4]),
    V6([u8; 8]),
}

impl Network {
    fn of(address: IpAddr) -> Network {
        match address.to_canonical() {
            IpAddr::V4(address) => Network::V4(address.octets()),
            IpAddr::V6(address) => Network::V6(prefix(address)),
        }
    }
}

fn prefix(address: Ipv6Addr) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = address.octets();
    [a, b, c, d, e, f, g, h]
}

impl Admission {
    /// No connection waits.
    pub fn new(limits: Limits) -> Admission {
        Admission { places: BTreeMap::new(), next: 0, limits }
    }

    /// Finds a place for a connection from this address.
    pub fn admit(&mut self, now: Instant, peer: IpAddr) -> Verdict {
        let network = Network::of(peer);
        let instead = match self.oldest_that_must_give_way(network) {
            None => None,
            Some((number, since)) if now.saturating_duration_since(since) >= GRACE => Some(number),
            Some(_) => return Verdict::Full,
        };
        if let Some(number) = instead {
            self.places.remove(&number);
        }
        let place = self.next;
        self.next += 1;
        self.places.insert(place, Place { network, since: now });
        Verdict::Admitted { place, instead }
    }

    /// Frees a place: the connection has proved itself, or has ended. A place that was given up stays free.
    pub fn leave(&mut self, place: u64) {
        self.places.remove(&place);
    }

    /// How many connections wait.
    pub fn waiting(&self) -> usize {
        self.places.len()
    }

    /// The connection that a new one from this network replaces. `None` if there is a place for both.
    fn oldest_that_must_give_way(&self, network: Network) -> Option<(u64, Instant)> {
        let counts = self.counts();
        if counts.get(&network).is_some_and(|count| *count >= self.limits.per_address) {
            return self.oldest_of(network);
        }
        if self.places.len() < self.limits.total {
            return None;
        }
        let most = counts.values().copied().max().unwrap_or(0);
        // Of the networks with the most places, the one whose connection has waited longest.
        let crowded = counts.into_iter().filter(|(_, count)| *count == most);
        crowded.filter_map(|(network, _)| self.oldest_of(network)).min()
    }

    fn oldest_of(&self, network: Network) -> Option<(u64, Instant)> {
        let (number, place) = self.places.iter().find(|(_, place)| place.network == network)?;
        Some((*number, place.since))
    }

    fn counts(&self) -> BTreeMap<Network, usize> {
        let mut counts = BTreeMap::new();
        for place in self.places.values() {
            *counts.entry(place.network).or_default() += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { total: 8, per_address: 3 };

    fn host(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    fn admitted(verdict: Verdict) -> Option<(u64, Option<u64>)> {
        match verdict {
            Verdict::Admitted { place, instead } => Some((place, instead)),
            Verdict::Full => None,
        }
    }

    #[test]
    fn a_flood_from_one_address_replaces_only_connections_of_that_address() {
        let (mut admission, start) = (Admission::new(LIMITS), Instant::now());
        let (other, _) = admitted(admission.admit(start, host(2))).unwrap();
        for millis in 0..1000 {
            let verdict = admission.admit(start + Duration::from_millis(millis), host(1));
            assert!(admitted(verdict).is_none_or(|(_, instead)| instead != Some(other)));
        }
        assert_eq!(admission.waiting(), 4);
        assert!(matches!(admission.admit(start, host(3)), Verdict::Admitted { instead: None, .. }));
    }

    #[test]
    fn a_connection_has_time_for_its_proof_before_it_gives_way_to_the_next() {
        let (mut admission, start) = (Admission::new(LIMITS), Instant::now());
        let places: Vec<_> = (0..3).map(|_| admitted(admission.admit(start, host(1))).unwrap().0).collect();
        assert_eq!(admission.admit(start + GRACE - Duration::from_millis(1), host(1)), Verdict::Full);
        let late = admission.admit(start + GRACE, host(1));
        assert_eq!(admitted(late).unwrap().1, Some(places[0]));
    }

    #[test]
    fn when_all_places_are_taken_the_address_with_the_most_gives_one_up() {
        let (mut admission, start) = (Admission::new(LIMITS), Instant::now());
        let silent = |admission: &mut Admission, number| admitted(admission.admit(start, host(number))).unwrap().0;
        let lone: Vec<_> = (1..=2).map(|number| silent(&mut admission, number)).collect();
        let crowd: Vec<_> = [3, 4, 3, 4, 3, 4].map(|number| silent(&mut admission, number)).into();
        let (_, instead) = admitted(admission.admit(start + GRACE, host(9))).unwrap();
        assert_eq!(instead, Some(crowd[0]));
        assert!(!lone.contains(&instead.unwrap()));
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_share_their_places() {
        let (mut admission, start) = (Admission::new(LIMITS), Instant::now());
        for number in 0..3 {
            let address: Ipv6Addr = format!("2001:db8::{number}").parse().unwrap();
            assert!(admitted(admission.admit(start, address.into())).is_some());
        }
        assert_eq!(admission.admit(start, "2001:db8::ffff".parse().unwrap()), Verdict::Full);
        assert!(admitted(admission.admit(start, "2001:db8:0:1::1".parse().unwrap())).is_some());
        // A socket for both families shows IPv4 peers as mapped addresses.
        for peer in ["::ffff:10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1"] {
            assert!(admitted(admission.admit(start, peer.parse().unwrap())).is_some());
        }
        assert_eq!(admission.admit(start, host(1)), Verdict::Full);
    }

    proptest! {
        #[test]
        fn places_stay_within_their_limits_and_no_connection_gives_way_early(
            steps in proptest::collection::vec((0u8..12, 0u64..60, any::<bool>()), 1..300)
        ) {
            let (mut admission, mut now) = (Admission::new(LIMITS), Instant::now());
            let mut held: BTreeMap<u64, (u8, Instant)> = BTreeMap::new();
            for (number, millis, leaves) in steps {
                now += Duration::from_millis(millis);
                if let Some(place) = held.keys().next().copied().filter(|_| leaves) {
                    admission.leave(place);
                    held.remove(&place);
                }
                if let Verdict::Admitted { place, instead } = admission.admit(now, host(number)) {
                    if let Some((_, since)) = instead.and_then(|instead| held.remove(&instead)) {
                        prop_assert!(now - since >= GRACE);
                    }
                    prop_assert!(held.insert(place, (number, now)).is_none());
                }
                prop_assert_eq!(admission.waiting(), held.len());
                prop_assert!(held.len() <= LIMITS.total);
                for host in 0..12 {
                    prop_assert!(held.values().filter(|(of, _)| *of == host).count() <= LIMITS.per_address);
                }
            }
        }
    }
}
