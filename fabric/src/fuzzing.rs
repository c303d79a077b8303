//! Properties that must hold for *any* bytes that a peer sends, as functions that panic if one does not.
//!
//! Each body is used three times: by the fuzz target of the same name (`dev/fuzz/`), by a property test below, and by
//! the replay of the seeds in `tests/corpus/<target>/`. An input that made a fuzzer find a crash is kept there.
//!
//! Not part of the crate's interface: compiled only for tests and with the feature `fuzzing`.
#![allow(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use crate::admission;
use crate::region::{RegionKey, TransportKind};
use crate::shm;
use crate::tcp;
#[cfg(feature = "verbs")]
use crate::verbs;

/// A body: panics if a property does not hold.
pub type Body = fn(&[u8]);

/// All bodies, with the names of their fuzz targets and seed folders.
pub const TARGETS: [(&str, Body); 3] = [
    ("fabric_region_key", region_key),
    ("fabric_lane_handshake", lane_handshake),
    ("fabric_tcp_messages", tcp_messages),
];

/// A key survives encoding, and so does what its transport reads from it.
pub fn region_key(data: &[u8]) {
    let Ok(key) = RegionKey::from_bytes(data.to_vec()) else { return };
    assert_eq!(key.as_bytes(), data);
    assert_eq!(RegionKey::new(key.transport(), key.id(), key.length(), key.body()).as_ref(), Ok(&key));
    match key.transport() {
        TransportKind::Sim => {}
        TransportKind::Shm => shm::check_key(&key),
        TransportKind::Tcp => tcp::check_key(&key),
        #[cfg(feature = "verbs")]
        TransportKind::Verbs => verbs::check_key(&key),
        #[cfg(not(feature = "verbs"))]
        TransportKind::Verbs => {}
    }
}

/// What is parsed as a hello, a challenge, a welcome, a refusal or a farewell survives encoding. The first byte selects
/// the transport.
pub fn lane_handshake(data: &[u8]) {
    let Some((choice, bytes)) = data.split_first() else { return };
    match choice % 3 {
        0 => {
            admission::check_parsers::<shm::Shm>(bytes);
            shm::check_farewell(bytes);
        }
        1 => admission::check_parsers::<tcp::Tcp>(bytes),
        #[cfg(feature = "verbs")]
        _ => {
            admission::check_parsers::<verbs::Verbs>(bytes);
            verbs::check_refusal(bytes);
        }
        #[cfg(not(feature = "verbs"))]
        _ => {}
    }
}

/// Requests and answers of a TCP lane survive encoding, and an accepted request is inside its region.
pub fn tcp_messages(data: &[u8]) {
    tcp::check_messages(data);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// The seeds of one target, with their names.
    fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
        let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let paths = files.map(|file| file.unwrap().path());
        let mut seeds: Vec<_> = paths.map(|path| (path.display().to_string(), std::fs::read(&path).unwrap())).collect();
        seeds.sort();
        seeds
    }

    #[test]
    fn every_seed_of_every_target_holds() {
        for (target, body) in TARGETS {
            let seeds = seeds(target);
            assert!(!seeds.is_empty(), "{target} has no seeds");
            for (name, data) in seeds {
                println!("{name}"); // shown only if the body panics
                body(&data);
            }
        }
    }

    /// Random bytes are refused at their first field, so most inputs are seeds with a few changed bytes.
    fn inputs() -> impl Strategy<Value = (usize, Vec<u8>)> {
        let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
        let at_random = (0..TARGETS.len(), prop::collection::vec(any::<u8>(), 0..200));
        let seeded = (0..TARGETS.len(), any::<prop::sample::Index>(), edits, any::<prop::sample::Index>());
        let damaged = seeded.prop_map(|(target, seed, edits, end)| {
            let seeds = seeds(TARGETS[target].0);
            let mut data = seed.get(&seeds).1.clone();
            for (place, byte) in edits {
                let place = place.index(data.len());
                data[place] = byte;
            }
            // One in four is cut.
            if end.index(4) == 0 {
                data.truncate(end.index(data.len()));
            }
            (target, data)
        });
        prop_oneof![1 => at_random, 3 => damaged]
    }

    proptest! {
        #[test]
        fn any_bytes_may_come_from_a_peer((target, data) in inputs()) {
            TARGETS[target].1(&data);
        }
    }
}
