//! The connections at the source that have not proved a session yet: how many there may be, and which one gives way.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
    time::Instant,
};

use crate::{
    Denial,
    admission::{Admission, Limits, Verdict},
};

/// Connections without a proof, by the name of each connection's id.
pub(super) struct Unproved {
    admission: Admission,
    /// The place of each connection.
    places: HashMap<usize, u64>,
}

impl Unproved {
    pub(super) fn new() -> Unproved {
        Unproved { admission: Admission::new(LIMITS), places: HashMap::new() }
    }

    /// Finds a place for the connection `name` from this address. Returns the name of the connection that the caller
    /// has to close for it, if there is one.
    ///
    /// All connections whose address is not known share the places of one address.
    ///
    /// # Errors
    /// [`Denial::Busy`] if there is no place.
    pub(super) fn enter(&mut self, now: Instant, name: usize, peer: Option<IpAddr>) -> Result<Option<usize>, Denial> {
        let peer = peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let Verdict::Admitted { place, instead } = self.admission.admit(now, peer) else { return Err(Denial::Busy) };
        let gives_way = self.places.iter().find_map(|(&name, &of)| (Some(of) == instead).then_some(name));
        self.places.retain(|_, of| Some(*of) != instead);
        self.places.insert(name, place);
        Ok(gives_way)
    }

    /// Frees a connection's place, if it has one: it has proved its session, or has ended.
    pub(super) fn leave(&mut self, name: usize) {
        if let Some(place) = self.places.remove(&name) {
            self.admission.leave(place);
        }
    }
}

/// Connections without a proof. They can thus not exclude readers with a grant: each of them ends at the handshake
/// time-out. One address has half of them, enough for a reader that opens all its queue pairs again at once.
const LIMITS: Limits = Limits { total: 64, per_address: 32 };

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::admission::GRACE;

    fn host(number: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, number]))
    }

    #[test]
    fn connections_of_one_address_leave_places_for_others_and_the_oldest_gives_way() {
        let (mut unproved, start) = (Unproved::new(), Instant::now());
        for name in 0..LIMITS.per_address {
            assert_eq!(unproved.enter(start, name, host(1)), Ok(None));
        }
        assert_eq!(unproved.enter(start, 100, host(1)), Err(Denial::Busy));
        assert_eq!(unproved.enter(start, 101, host(2)), Ok(None));
        assert_eq!(unproved.enter(start + GRACE, 102, host(1)), Ok(Some(0)));
        assert_eq!(unproved.enter(start + GRACE, 103, host(1)), Ok(Some(1)));
    }

    #[test]
    fn a_flood_never_replaces_a_connection_of_another_address_or_one_that_has_left() {
        let (mut unproved, start) = (Unproved::new(), Instant::now());
        unproved.enter(start, 1, host(2)).unwrap();
        unproved.enter(start, 2, host(1)).unwrap();
        unproved.leave(2);
        let flood = (0..5000).map(|number| (number, start + GRACE * (number / 10)));
        let replaced: Vec<usize> =
            flood.filter_map(|(number, now)| unproved.enter(now, 10 + number as usize, host(1)).ok()?).collect();
        assert!(replaced.len() > 400 && replaced.iter().all(|&name| name >= 10), "{replaced:?}");
        assert_eq!(unproved.places.len(), unproved.admission.waiting());
    }

    #[test]
    fn connections_without_a_known_address_share_the_places_of_one() {
        let (mut unproved, start) = (Unproved::new(), Instant::now());
        for name in 0..LIMITS.per_address {
            assert_eq!(unproved.enter(start, name, None), Ok(None));
        }
        assert_eq!(unproved.enter(start, 100, None), Err(Denial::Busy));
        unproved.leave(7);
        assert_eq!(unproved.enter(start, 100, None), Ok(None));
    }
}
