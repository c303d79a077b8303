//! The body of the fuzz target, which `cargo test` runs on every seed: any bytes must end in a value or an error, never
//! in a panic or an endless loop.

use crate::Message;

/// Decodes a message: the first byte is its tag, the others are its payload. What decodes must encode to the same
/// bytes.
pub fn message(bytes: &[u8]) {
    let Some((&tag, payload)) = bytes.split_first() else {
        return;
    };
    let Ok(message) = Message::decode(tag, payload) else {
        return;
    };
    let mut again = Vec::new();
    assert_eq!(message.encode(&mut again), Ok(tag));
    assert_eq!(again, payload, "two encodings of {}", message.name());
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::fs;
    use std::path::Path;

    /// The seeds by name, in a fixed order.
    fn seeds() -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/protocol_message");
        let seed = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
        let mut seeds: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| seed(entry.unwrap())).collect();
        seeds.sort();
        seeds
    }

    #[test]
    fn every_seed_holds() {
        for (name, bytes) in seeds() {
            println!("{name}"); // shown only when the body panics
            message(&bytes);
        }
    }

    /// Seeds that are refused at their first field would exercise little: each kind of message is there, under its
    /// name.
    #[test]
    fn the_seeds_hold_every_kind_of_message() {
        let decoded = |(name, bytes): &(String, Vec<u8>)| {
            let (tag, payload) = bytes.split_first()?;
            let message = Message::decode(*tag, payload).ok()?;
            assert_eq!(message.name().to_lowercase(), name.replace('-', ""));
            Some(message.tag())
        };
        assert_eq!(seeds().iter().filter_map(decoded).count(), 20);
    }
}
