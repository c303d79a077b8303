//! Which sessions may read which regions of an exporter. Every transport asks here when it admits a connection, which
//! reads one region. Pure.

use std::collections::{BTreeSet, HashMap};

use crate::{Denial, RegionId, Secret};

/// The regions that a session may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Regions {
    /// Each region that is exported now or later.
    All,
    /// These.
    Only(BTreeSet<RegionId>),
}

impl Regions {
    /// These regions and no others.
    pub fn only(regions: impl IntoIterator<Item = RegionId>) -> Regions {
        Regions::Only(regions.into_iter().collect())
    }

    /// Whether this region is one of them.
    pub fn cover(&self, id: RegionId) -> bool {
        match self {
            Regions::All => true,
            Regions::Only(regions) => regions.contains(&id),
        }
    }
}

/// The grants of an exporter: at most one for each session.
#[derive(Debug, Default)]
pub(crate) struct Grants(HashMap<u64, Grant>);

#[derive(Debug)]
struct Grant {
    secret: Secret,
    regions: Regions,
}

impl Grants {
    /// Replaces the session's grant. Returns which of the session's connections the new one would not admit, by their
    /// region: the caller closes them.
    pub(crate) fn insert(
        &mut self,
        session: u64,
        secret: Secret,
        regions: Regions,
    ) -> impl Fn(RegionId) -> bool + use<> {
        let before = self.0.insert(session, Grant { secret, regions: regions.clone() });
        let is_other_secret = before.is_some_and(|before| before.secret != secret);
        move |id| is_other_secret || !regions.cover(id)
    }

    /// Ends the session's grant. The caller closes its connections.
    pub(crate) fn remove(&mut self, session: u64) {
        self.0.remove(&session);
    }

    /// The secret that the session must prove.
    pub(crate) fn secret(&self, session: u64) -> Option<&Secret> {
        self.0.get(&session).map(|grant| &grant.secret)
    }

    /// Whether the session, which has proved its secret, may read this region. Asked before it is told whether the
    /// region exists.
    ///
    /// # Errors
    /// [`Denial::Stale`] if it may read the region of another generation, [`Denial::NotGranted`] otherwise.
    pub(crate) fn permit(&self, session: u64, id: RegionId) -> Result<(), Denial> {
        match self.0.get(&session).map(|grant| &grant.regions) {
            Some(regions) if regions.cover(id) => Ok(()),
            Some(Regions::Only(regions)) if regions.iter().any(|other| other.region == id.region) => Err(Denial::Stale),
            _ => Err(Denial::NotGranted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(generation: u64, region: u32) -> RegionId {
        RegionId { generation, region }
    }

    #[test]
    fn a_session_may_read_what_its_last_grant_names_and_nothing_else() {
        let mut grants = Grants::default();
        assert_eq!((grants.secret(1), grants.permit(1, id(7, 0))), (None, Err(Denial::NotGranted)));
        let _ = grants.insert(1, [1; 32], Regions::only([id(7, 0), id(3, 1)]));
        let _ = grants.insert(2, [2; 32], Regions::All);
        for allowed in [id(7, 0), id(3, 1)] {
            assert_eq!(grants.permit(1, allowed), Ok(()));
        }
        assert_eq!(grants.permit(1, id(6, 0)), Err(Denial::Stale), "a key of an earlier generation");
        assert_eq!(grants.permit(1, id(7, 2)), Err(Denial::NotGranted));
        assert_eq!(grants.permit(2, id(7, 2)), Ok(()));
        let _ = grants.insert(1, [1; 32], Regions::only([id(8, 2)]));
        assert_eq!((grants.permit(1, id(7, 0)), grants.permit(1, id(8, 2))), (Err(Denial::NotGranted), Ok(())));
        grants.remove(1);
        assert_eq!(grants.permit(1, id(8, 2)), Err(Denial::NotGranted));
        assert_eq!(grants.permit(2, id(8, 2)), Ok(()));
    }

    #[test]
    fn a_new_grant_closes_the_connections_that_it_would_not_admit() {
        let mut grants = Grants::default();
        let closes = grants.insert(1, [1; 32], Regions::All);
        assert!(!closes(id(7, 0)));
        let closes = grants.insert(1, [1; 32], Regions::only([id(7, 0)]));
        assert!(!closes(id(7, 0)) && closes(id(7, 1)));
        let closes = grants.insert(1, [2; 32], Regions::only([id(7, 0)]));
        assert!(closes(id(7, 0)), "they have proved another secret");
    }
}
