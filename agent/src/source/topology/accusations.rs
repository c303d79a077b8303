//! Accusations: replicas that report that a peer lent them wrong bytes, and what follows from their reports.
//!
//! The source does not see what one replica lends to another. A report may be false: the accuser may have bad memory,
//! or its operator wants the others to read from the source. So a report costs the peer the accuser as a reader, and no
//! other one. The second report, from an accuser that is independent of the first, bans the peer for all.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::Session;

/// The number of independent accusers after which no replica reads from a peer.
const ACCUSERS_FOR_A_BAN: usize = 2;

/// A replica as an accuser. Two accusers are independent if they are different witnesses.
///
/// A replica that connects again is the same witness, and so are all replicas of another host: they share their memory
/// and their operator. The replicas of the source's own host have one address, and are told apart by their names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Witness {
    /// All replicas at this address.
    Host(IpAddr),
    /// The replica of this name on the source's host.
    Local(String),
}

impl Witness {
    /// The replica of this name that connected from this address.
    pub(crate) fn new(address: IpAddr, name: &str) -> Witness {
        match address.to_canonical() {
            address if address.is_loopback() => Witness::Local(name.to_owned()),
            address => Witness::Host(address),
        }
    }
}

/// The accusers of each peer.
#[derive(Debug, Default)]
pub(in crate::source) struct Accusations {
    by_peer: BTreeMap<Session, BTreeSet<Witness>>,
}

impl Accusations {
    /// Notes a report. Further ones about a peer that is banned are not kept.
    pub(super) fn accuse(&mut self, peer: Session, witness: &Witness) {
        let accusers = self.by_peer.entry(peer).or_default();
        if accusers.len() < ACCUSERS_FOR_A_BAN {
            accusers.insert(witness.clone());
        }
    }

    /// Whether no replica may read from this peer.
    pub(in crate::source) fn is_banned(&self, peer: Session) -> bool {
        self.by_peer.get(&peer).is_some_and(|accusers| accusers.len() >= ACCUSERS_FOR_A_BAN)
    }

    /// Whether this reader may not read from the peer: the peer is banned, or the reader itself accused it.
    pub(super) fn bars(&self, peer: Session, reader: &Witness) -> bool {
        self.by_peer.get(&peer).is_some_and(|accusers| accusers.contains(reader)) || self.is_banned(peer)
    }
}
