//! Assignments: which agent reads from which other one, as the product's topology decides it. It follows
//! `source/mod.rs`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use remora_protocol::{LossCause, Message as Said, Phase, Progress, Relays, Upstream};

use super::source_agent::SourceAgent;
use super::wire::{Conn, End};
use super::world::World;
use crate::source::machine::Session;
use crate::source::topology::{Assignment, Joining, Topology, Witness};

/// The topology, and what the agents have said of themselves.
#[derive(Default)]
pub(super) struct Assignments {
    topology: Topology,
    relays: BTreeMap<Session, (Relays, Witness)>,
}

impl Assignments {
    /// An agent joins, which passes slots on or does not.
    pub(super) fn introduce(&mut self, world: &World, conn: Conn, session: Session, relays: Option<Relays>) {
        self.relays.remove(&session);
        let number = match world.end(conn, 0) {
            Some(End::Replica(_, server)) => server.0 as u8,
            _ => 0,
        };
        let witness = Witness::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number + 1)), "");
        self.relays.extend(relays.map(|relays| (session, (relays, witness))));
    }
}

impl SourceAgent {
    /// The agent from which one is to read the snapshot's slots; `None`: the source.
    pub(super) fn place_for(&mut self, world: &mut World, generation: u64, session: Session) -> Option<Upstream> {
        let replica = self.machine.status().replica(session)?;
        let (relays, witness) = self.assignments.relays.get(&session)?.clone();
        if replica.is_loaded() {
            return None;
        }
        let first = replica.held_slots(generation);
        let joining = Joining { serves: !relays.serves_at.is_empty(), zone: relays.zone, witness, first };
        let from = self.assignments.topology.join(world.instant(), generation, session, joining);
        let spliced = self.assignments.topology.spliced();
        self.assign(world, &spliced);
        self.upstream(from?)
    }

    fn upstream(&self, session: Session) -> Option<Upstream> {
        let (relays, _) = self.assignments.relays.get(&session)?;
        let name = self.machine.status().replica(session)?.name.clone();
        Some(Upstream { session, name, address: relays.serves_at.clone() })
    }

    fn assign(&mut self, world: &mut World, assignments: &[Assignment]) {
        let Some(generation) = self.machine.status().generation() else { return };
        for &Assignment { reader, from } in assignments {
            let upstream = from.and_then(|from| self.upstream(from));
            world.count("relay: another upstream");
            self.say(world, reader, Said::ReadFrom { generation, upstream });
        }
    }

    pub(super) fn relaying(&mut self, world: &World, session: Session, progress: &Progress) {
        if let Some(at) = progress.relaying {
            let is_done = progress.phase > Phase::Transfer;
            self.assignments.topology.progress(world.instant(), session, at, progress.bytes, is_done);
        }
    }

    pub(super) fn peer_lost(
        &mut self,
        world: &mut World,
        reader: Session,
        generation: u64,
        peer: Session,
        cause: LossCause,
    ) {
        world.count(&format!("relay: {cause:?}"));
        if self.machine.status().offered(reader) == Some(generation) {
            let moved = self.assignments.topology.lost(reader, peer, cause);
            self.assign(world, &moved);
        }
    }

    /// A session has ended, or is to end.
    pub(super) fn lends_no_more(&mut self, world: &mut World, session: Session) {
        let moved = self.assignments.topology.gone(session);
        self.assign(world, &moved);
    }

    pub(super) fn no_assignments(&mut self) {
        self.assignments.topology.clear();
    }

    pub(super) fn look_at_assignments(&mut self, world: &mut World) {
        let generation = self.machine.status().generation();
        let snapshot = generation.and_then(|generation| world.memories.snapshot((self.index, generation)));
        let published = snapshot.map_or(0, |snapshot| snapshot.published());
        let moved = self.assignments.topology.tick(world.instant(), published);
        self.assign(world, &moved);
    }
}
