//! Assignment: from which replica the source wants its slots read, in whichever order its words come.
//!
//! An offer names an upstream, and connecting its tables takes time. The source can name another one meanwhile
//! (`ReadFrom`), since the first has left. What it has said last counts when the tables are connected.

use remora_protocol::{Offer, Upstream};

/// The source's last word about where slots are read.
#[derive(Default)]
pub(crate) struct Assignment {
    /// What it has said since its last offer: the generation, and the upstream; `None`: the source itself.
    later: Option<(u64, Option<Upstream>)>,
}

impl Assignment {
    /// An offer has come, which says it anew.
    pub(crate) fn offered(&mut self) {
        self.later = None;
    }

    /// The source has assigned this upstream for this generation.
    pub(crate) fn assigned(&mut self, generation: u64, upstream: Option<Upstream>) {
        self.later = Some((generation, upstream));
    }

    /// Where the slots of this offer are read, whose tables are connected now; `None`: from the source itself.
    pub(crate) fn of(&self, offer: &Offer) -> Option<Upstream> {
        #[cfg(any(test, feature = "simulation"))]
        if crate::mutation::Mutation::AssignmentForgotten.is_active() {
            return offer.upstream.clone();
        }
        match &self.later {
            Some((generation, upstream)) if *generation == offer.snapshot.generation => upstream.clone(),
            _ => offer.upstream.clone(),
        }
    }
}
