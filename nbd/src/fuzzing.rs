//! The bodies of the fuzz targets, which `cargo test` runs on every seed: any bytes must end in an answer or an error,
//! never in a panic or an endless loop.

use std::sync::Arc;

use crate::handshake::{Error, Handshake, Session, Step, Tls};
use crate::protocol::{
    Asked, CHUNK_BYTES, Extent, Failure, OPTION_REPLY_MAGIC, SIMPLE_BYTES, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
    option,
};
use crate::request::{Op, Request};
use crate::{Export, Geometry};

/// The body of a target.
pub type Body = fn(&[u8]);

/// The targets by name.
pub const TARGETS: [(&str, Body); 2] = [("nbd_handshake", handshake), ("nbd_requests", requests)];

/// Negotiates: the first byte says whether TLS is required. In whatever pieces the bytes arrive, the answers are the
/// same, and each is a reply to its option.
pub fn handshake(bytes: &[u8]) {
    let Some((&mode, input)) = bytes.split_first() else { return };
    let tls = if mode & 1 == 0 { Tls::Off } else { Tls::Required };
    let whole = negotiate(tls, input, input.len().max(1));
    for piece in [1, 7] {
        assert_eq!(negotiate(tls, input, piece), whole, "in pieces of {piece} bytes");
    }
}

/// What was said, and how it ended: `None` if more bytes are needed.
fn negotiate(tls: Tls, input: &[u8], piece: usize) -> (Vec<u8>, Option<Result<Step, Error>>) {
    let mut handshake = Handshake::new(exports(), tls);
    let (mut answers, mut at, mut end) = (Vec::new(), 0, piece.min(input.len()));
    loop {
        let mut answer = Vec::new();
        let result = handshake.receive(&input[at..end], &mut answer);
        answers.extend_from_slice(&answer);
        match result {
            Ok((0, Step::More)) if end == input.len() => return (answers, None),
            Ok((0, Step::More)) => end = (end + piece).min(input.len()),
            Ok((consumed, Step::Next)) => {
                assert!(consumed > 0, "an option without bytes");
                let asked = if consumed == 4 { None } else { Some(&input[at + 8..at + 12]) };
                assert!(are_replies(&answer, asked), "not replies to {asked:?}: {answer:?}");
                at += consumed;
            }
            Ok((consumed, Step::StartTls)) => {
                at += consumed;
                end = (at + piece).min(input.len());
                handshake.tls_started();
            }
            // In the clear behind STARTTLS. Here it plays what arrives inside.
            Err(Error::BeforeTls { bytes }) => {
                at = end - bytes;
                handshake.tls_started();
            }
            Ok((_, Step::Serve(session))) => {
                assert!(session.export < exports().len() && (session.structured || !session.allocation));
                return (answers, Some(Ok(Step::Serve(session))));
            }
            ended => return (answers, Some(ended.map(|(_, step)| step))),
        }
    }
}

fn are_replies(mut answer: &[u8], asked: Option<&[u8]>) -> bool {
    let mut number = 0;
    while let Some((head, rest)) = answer.split_first_chunk::<20>() {
        let length = u32::from_be_bytes([head[16], head[17], head[18], head[19]]) as usize;
        if head[..8] != OPTION_REPLY_MAGIC.to_be_bytes() || Some(&head[8..12]) != asked || rest.len() < length {
            return false;
        }
        answer = &rest[length..];
        number += 1;
    }
    let is_choice = asked == Some(&option::EXPORT_NAME.to_be_bytes());
    answer.is_empty() && (number > 0) == asked.is_some() && !is_choice
}

fn exports() -> Arc<[Export]> {
    let first = Geometry { has_status: true, fast_zero: true, ..Geometry::of_blocks(1 << 30, 1) };
    let export = |name: &str, geometry| Export { name: name.into(), description: "for tests".into(), geometry };
    [export("first", first), export("second", Geometry::of_blocks(1 << 20, 4096))].into()
}

/// Reads requests: the first byte says what kind of export it is. What is allowed is inside the export and of whole
/// blocks, and every reply to it has the length that its head says.
pub fn requests(bytes: &[u8]) {
    let Some((&mode, mut input)) = bytes.split_first() else { return };
    let bit = |number: u8| mode & 1 << number != 0;
    let session = Session { export: 0, structured: bit(0), allocation: bit(0) && bit(1) };
    let geometry = Geometry {
        read_only: bit(2),
        fast_zero: bit(3),
        has_status: true,
        ..Geometry::of_blocks(1 << 20, if bit(4) { 4096 } else { 1 })
    };
    while let Some((head, rest)) = input.split_first_chunk() {
        let Ok(request) = Request::decode(head) else { return };
        let mut again = Vec::new();
        request.encode(&mut again);
        assert_eq!(again, head, "two encodings of {request:?}");
        let result = request.check(&geometry, &session);
        if let Ok(op) = &result {
            assert!(is_allowed(&request, *op, &geometry), "{request:?} is allowed as {op:?}");
        }
        let Request { cookie, offset, length, .. } = request;
        replies(&Asked { cookie, offset, length: length & 0xffff, structured: session.structured }, result.err());
        input = rest.get(request.payload()..).unwrap_or_default();
    }
}

fn is_allowed(request: &Request, op: Op, geometry: &Geometry) -> bool {
    let (first, length) = (u128::from(request.offset), u128::from(request.length));
    let block = u128::from(geometry.accepted);
    let is_inside = length > 0 && first + length <= u128::from(geometry.size);
    let is_whole = first % block == 0 && length % block == 0;
    match op {
        Op::Flush | Op::Disconnect => true,
        Op::Write { .. } | Op::Zero(_) | Op::Trim { .. } => is_inside && is_whole && !geometry.read_only,
        Op::Read | Op::Status { .. } | Op::Nothing => is_inside && is_whole,
    }
}

fn replies(asked: &Asked, failure: Option<Failure>) {
    let mut out = Vec::new();
    asked.done(&mut out);
    asked.hole(&mut out);
    asked.data(&mut out);
    out.resize(out.len() + asked.length as usize, 1);
    if let Some(failure) = &failure {
        asked.fail(failure, &mut out);
    }
    if asked.structured {
        asked.extents(&[Extent { length: asked.length, flags: 0 }; 3], &mut out);
    }
    // Done, hole and data have no chunk, or have one; simple replies to reads have bytes behind them.
    let read = if asked.structured { 0 } else { asked.length as usize };
    let mut rest = &out[..];
    for behind in [0, read, read, 0, 0] {
        if !rest.is_empty() {
            rest = &rest[reply_bytes(rest, asked.cookie) + behind..];
        }
    }
    assert!(rest.is_empty(), "{} bytes behind the replies to {asked:?}", rest.len());
}

fn reply_bytes(bytes: &[u8], cookie: u64) -> usize {
    let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| bytes[at + byte]));
    assert_eq!(bytes[8..16], cookie.to_be_bytes());
    match word(0) {
        SIMPLE_REPLY_MAGIC => SIMPLE_BYTES,
        STRUCTURED_REPLY_MAGIC => CHUNK_BYTES + word(16) as usize,
        magic => panic!("a reply begins with {magic:#x}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let mut seeds: Vec<_> =
            entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect();
        seeds.sort();
        seeds
    }

    #[test]
    fn every_seed_holds() {
        for (target, body) in TARGETS {
            assert!(!seeds(target).is_empty());
            for (name, bytes) in seeds(target) {
                println!("{target} {name}"); // shown only when the body panics
                body(&bytes);
            }
        }
    }

    proptest! {
        /// Seeds with a few bytes changed get further than random bytes.
        #[test]
        fn a_damaged_seed_holds(pick in any::<prop::sample::Index>(), damage in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8)) {
            for (target, body) in TARGETS {
                let seeds = seeds(target);
                let mut bytes = pick.get(&seeds).1.clone();
                for (place, value) in &damage {
                    *place.get_mut(&mut bytes) = *value;
                }
                body(&bytes);
            }
        }

        #[test]
        fn any_bytes_hold(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            TARGETS.iter().for_each(|(_, body)| body(&bytes));
        }
    }
}
