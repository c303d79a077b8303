//! Links: what the source's loop observes of the links to the replicas, for the decision how slots are compressed.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use remora_fabric::TransportKind;

use super::Source;
use super::compression::Link;
use super::compression::link::{Measure, Said, said_by_interface};
use super::machine::Session;
use crate::args::CompressChoice;
use crate::units::Size;

/// What was observed.
#[derive(Debug, Default)]
pub(super) struct Links {
    measure: Measure,
    /// The last rate that was measured.
    measured: Option<u64>,
    /// What the interface on the way to each replica says.
    said: BTreeMap<Session, Option<Said>>,
}

impl Links {
    /// A snapshot begins, after that many bytes were served in all.
    pub(super) fn begin(&mut self, served: u64) {
        self.measure.begin(served);
    }
}

/// Looks at the replicas that read from the source, and shows the threads that compress what the link is like.
pub(super) fn look(source: &mut Source) {
    if source.tables.compress() != CompressChoice::Auto {
        return;
    }
    let direct = source.machine.status().replicas.iter().filter_map(|(session, replica)| {
        let peer = source.sessions.get(session).filter(|peer| !peer.is_local)?;
        let is_by_tcp = replica.transport().is_none_or(|kind| kind == TransportKind::Tcp);
        let reads_here = !replica.is_loaded() && source.topology.reads_from(*session).is_none();
        (is_by_tcp && reads_here).then_some((*session, peer.address.ip()))
    });
    let direct: BTreeMap<Session, IpAddr> = direct.collect();
    let links = &mut source.links;
    links.said.retain(|session, _| direct.contains_key(session));
    for (session, address) in &direct {
        links.said.entry(*session).or_insert_with(|| said_by_interface(*address));
    }
    let stored = source.gauge.stored_bytes();
    if let Some(rate) = links.measure.look(Instant::now(), source.exports.bytes_served(), stored, direct.len()) {
        links.measured = Some(rate);
    }
    let limit = source.args.upload_limit.rate().map(|limit| Said { rate: limit.get(), by: "--upload-limit".into() });
    let said = limit.into_iter().chain(links.said.values().flatten().cloned()).min_by_key(|said| said.rate);
    let joined = source.machine.status().replicas.len();
    source.gauge.show_link(Link { joined, readers: direct.len(), said, measured: links.measured });
}

/// How slots are compressed for replicas on other hosts, in words.
pub(super) fn compression(source: &Source) -> String {
    let stored = source.gauge.compression();
    match (source.tables.compress(), source.args.compress) {
        (CompressChoice::Off, CompressChoice::Auto) => {
            let memory = Size::bytes(source.tables.ring());
            format!(
                "off: the tables are not encrypted, and compressed slots would need {memory} more; --compress lz4 or \
                     zstd compresses them"
            )
        }
        (CompressChoice::Off, _) => "off: --compress off".into(),
        _ => stored,
    }
}
