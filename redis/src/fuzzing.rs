//! Properties that must hold for *any* bytes, as functions that panic if one does not.
//!
//! Each body is used three times: by the fuzz target of the same name (`dev/fuzz/`), by a property test below, and by
//! the replay of the seeds in `tests/corpus/<target>/`. An input that made a fuzzer find a crash is kept there.
//!
//! The oracle of most bodies is the same code on the same bytes with other cuts: the result must not depend on how the
//! network splits the bytes.
//!
//! Not part of the crate's interface: compiled only for tests and with the feature `fuzzing`.
#![allow(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use crate::aof::{Found, Manifest, Walker};
use crate::info::Info;
use crate::psync::{Payload, client, server};
use crate::rdb::{self, Head};
use crate::resp::{self, CommandDecoder, Decoder, Limits};
use crate::{Refusal, ReplId};

/// A body: panics if a property does not hold.
pub type Body = fn(&[u8]);

/// All bodies, with the names of their fuzz targets and seed folders.
pub const TARGETS: [(&str, Body); 11] = [
    ("resp_decode", resp_decode),
    ("command_decode", command_decode),
    ("psync_client", psync_client),
    ("psync_server", psync_server),
    ("rdb_head", rdb_head),
    ("rdb_scan", rdb_scan),
    ("rdb_convert", rdb_convert),
    ("rdb_reference", rdb_reference),
    ("info", info),
    ("aof_walk", aof_walk),
    ("aof_manifest", aof_manifest),
];

/// Inputs of up to this many bytes are tried with every single cut; the work grows with the square of the length.
const EVERY_CUT_BYTES: usize = 256;

/// Small limits, so that a fuzzer reaches each of them.
const TIGHT: Limits = Limits { bulk_bytes: 1 << 20, array_items: 1 << 16, depth: 4, line_bytes: 128 };

/// Frames are equal for every cut, survive encoding, and use memory only for bytes that arrived.
pub fn resp_decode(data: &[u8]) {
    let whole = decode(&[data]);
    for_each_cut(data, |parts| assert_eq!(decode(parts), whole));
    // The encodings are compared, not the frames: a lone carriage return in a status is encoded as a space.
    let wire = encoded(&whole.0);
    let (again, error) = decode(&[&wire]);
    assert_eq!((encoded(&again), error), (wire, None));
}

/// Borders are the same for every cut, and what ends at a border is whole by itself.
pub fn aof_walk(data: &[u8]) {
    let whole = walked(&[data]);
    for_each_cut(data, |parts| assert_eq!(walked(parts), whole));
    let (_, border, _) = whole;
    let (_, again, error) = walked(&[data.get(..border as usize).unwrap_or_default()]);
    assert_eq!((again, error), (border, None));
}

/// How many finds there are, the last border, and where an error is.
fn walked(parts: &[&[u8]]) -> (Vec<Found>, u64, Option<u64>) {
    let (mut walker, mut all) = (Walker::of_file(), Vec::new());
    for part in parts {
        let mut rest = *part;
        while !rest.is_empty() {
            match walker.feed(rest) {
                Ok((taken, found)) => {
                    rest = rest.get(taken..).unwrap_or_default();
                    all.extend(found);
                }
                Err(error) => return (all, walker.border(), Some(error.at)),
            }
        }
    }
    assert!(walker.border() <= walker.position());
    (all, walker.border(), None)
}

/// What is read survives writing, and leads to no other folder.
pub fn aof_manifest(data: &[u8]) {
    let Ok(manifest) = Manifest::parse(data) else { return };
    assert!(manifest.files.iter().all(|file| !file.name.contains('/')));
    assert_eq!(Manifest::parse(manifest.to_string().as_bytes()), Ok(manifest));
}

fn encoded(frames: &[resp::Frame]) -> Vec<u8> {
    let mut wire = Vec::new();
    frames.iter().for_each(|frame| resp::encode(&mut wire, frame));
    wire
}

fn decode(parts: &[&[u8]]) -> (Vec<resp::Frame>, Option<resp::Error>) {
    let mut decoder = Decoder::new(TIGHT);
    let (mut frames, mut fed) = (Vec::new(), 0);
    for part in parts {
        decoder.feed(part);
        fed += part.len();
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Some(error)),
            }
        }
        // The factor is that of the shortest frames in the emptiest vector; see `Limits`.
        assert!(decoder.held_bytes() <= 32 * fed + 4096, "{} bytes held for {fed}", decoder.held_bytes());
    }
    (frames, None)
}

/// Commands are equal for every cut, are never empty, and survive encoding.
pub fn command_decode(data: &[u8]) {
    let whole = commands(&[data]);
    assert!(whole.0.iter().all(|words| !words.is_empty()));
    for_each_cut(data, |parts| assert_eq!(commands(parts), whole));
    let mut wire = Vec::new();
    whole.0.iter().for_each(|words| resp::command(&mut wire, words));
    assert_eq!(commands(&[&wire]), (whole.0, None));
}

fn commands(parts: &[&[u8]]) -> (Vec<Vec<Vec<u8>>>, Option<resp::Error>) {
    let mut decoder = CommandDecoder::new(Limits::HANDSHAKE);
    let mut commands = Vec::new();
    for part in parts {
        decoder.feed(part);
        loop {
            match decoder.next_command() {
                Ok(Some(words)) => commands.push(words),
                Ok(None) => break,
                Err(error) => return (commands, Some(error)),
            }
        }
    }
    (commands, None)
}

/// The handshake takes the same course for every cut of the answers, and consumes nothing of what follows it. The first
/// byte selects the options.
pub fn psync_client(data: &[u8]) {
    let Some((choice, answers)) = data.split_first() else { return };
    let whole = shake(*choice, &[answers]);
    for_each_cut(answers, |parts| assert_eq!(shake(*choice, parts), whole));
    if let Ok(consumed) = whole.end {
        let last_line = answers.get(..consumed).unwrap_or_default();
        assert!(last_line.ends_with(b"\n"), "the handshake ends with a line");
        let last_event = whole.events.last();
        use client::Event;
        assert!(matches!(last_event, Some(Event::Payload(_) | Event::Continue { .. } | Event::TwoChannels)));
    }
}

#[derive(Debug, PartialEq)]
struct Shaken {
    /// The number of bytes that the handshake consumed, or why it has not ended.
    end: Result<usize, Option<client::Error>>,
    output: Vec<u8>,
    events: Vec<client::Event>,
}

fn shake(choice: u8, parts: &[&[u8]]) -> Shaken {
    let mut client = client::Client::new(client::Options {
        resume: (choice & 1 != 0).then(|| (a_replid(), 7)),
        username: (choice & 2 != 0).then(|| "user".to_owned()),
        password: (choice & 4 != 0).then(|| "password".to_owned()),
        rdb_version: (choice & 8 != 0).then(|| "9.1.0".to_owned()),
        channel: match choice >> 4 & 3 {
            0 => client::Channel::Whole,
            1 => client::Channel::WholeOrStream,
            2 => client::Channel::Snapshot,
            _ => client::Channel::Stream { snapshot_client: 7 },
        },
    });
    let mut consumed = 0;
    let mut end = Err(None);
    for part in parts {
        match client.handle_input(part) {
            Ok(count) => consumed += count,
            Err(error) => end = Err(Some(without_excerpt(error))),
        }
    }
    if client.is_ended() {
        end = Ok(consumed);
    }
    let mut events: Vec<_> = std::iter::from_fn(|| client.poll_event()).collect();
    events.dedup();
    Shaken { end, output: client.take_output(), events }
}

/// The excerpt of an unknown peer's bytes in an error does depend on the cut.
fn without_excerpt(error: client::Error) -> client::Error {
    match error {
        client::Error::NotRedis { .. } => client::Error::NotRedis { received: String::new(), hint: "" },
        other => other,
    }
}

/// A replica is served the same for every cut of its commands, and the machine consumes nothing after the stream has
/// begun. The first byte selects options and answer, the second how many bytes precede the answer.
pub fn psync_server(data: &[u8]) {
    let [choice, before, words @ ..] = data else { return };
    let (before, after) = words.split_at(words.len().min(usize::from(*before)));
    let whole = serve(*choice, &[before], &[after]);
    for_each_cut(before, |parts| assert_eq!(serve(*choice, parts, &[after]), whole));
    for_each_cut(after, |parts| assert_eq!(serve(*choice, &[before], parts), whole));
}

#[derive(Debug, PartialEq)]
struct Served {
    error: Option<server::Error>,
    output: Vec<u8>,
    events: Vec<server::Event>,
    peer: server::PeerFacts,
}

fn serve(choice: u8, before: &[&[u8]], after: &[&[u8]]) -> Served {
    let access = match choice & 1 {
        0 => server::Access::Open,
        _ => server::Access::User { name: None, password: b"password".to_vec() },
    };
    let mut server = server::Server::new(server::Options { access });
    let mut error = feed(&mut server, before);
    let mut events = events_of(&mut server);
    let asked = matches!(events.last(), Some(server::Event::Psync { .. }));
    let streaming = asked && answer(&mut server, choice >> 1);
    let mut output = server.take_output();
    error = error.or(feed(&mut server, after));
    events.extend(events_of(&mut server));
    let late = server.take_output();
    assert!(!streaming || late.is_empty(), "nothing of ours may get into the stream");
    assert!(late.len() < 2 * server::OUTPUT_BYTES_MAX);
    output.extend(late);
    Served { error, output, events, peer: server.peer().clone() }
}

fn feed(server: &mut server::Server, parts: &[&[u8]]) -> Option<server::Error> {
    parts.iter().find_map(|part| server.handle_input(part).err())
}

/// Consecutive acknowledgements that arrive together become one event.
fn events_of(server: &mut server::Server) -> Vec<server::Event> {
    std::iter::from_fn(|| server.poll_event()).collect()
}

/// Answers `PSYNC`; true if the stream has begun.
fn answer(server: &mut server::Server, choice: u8) -> bool {
    server.keep_alive();
    match choice % 5 {
        0 => {
            server.full_resync(&a_replid(), 7);
            server.keep_alive();
            let mark = Payload::Mark([b'm'; 40]);
            let payload = if server.peer().eof { mark } else { Payload::Length(7) };
            server.payload(&payload);
            true
        }
        1 => {
            server.resume(&a_replid());
            true
        }
        2 => {
            server.refuse("no\r\n+OK");
            false
        }
        3 => {
            server.postpone("later");
            false
        }
        _ => {
            server.full_resync(&a_replid(), 7);
            server.refuse("broken promise");
            false
        }
    }
}

/// The head is the same for every length of the snapshot that is present, and survives encoding.
pub fn rdb_head(data: &[u8]) {
    let whole = Head::parse(data);
    for cut in 0..data.len().min(EVERY_CUT_BYTES) {
        match Head::parse(&data[..cut]) {
            Ok(None) => {}
            Ok(early) => assert_eq!(Ok(early), whole),
            Err(_) => assert!(whole.is_err()),
        }
    }
    if let Ok(Some((head, length))) = whole {
        assert!(length < data.len() && length <= Head::BYTES_MAX);
        let mut writer = rdb::Writer::new(11);
        head.aux.iter().for_each(|(name, value)| {
            writer.aux(name, value);
        });
        let again = Head::parse(&writer.finish());
        assert_eq!(again.ok().flatten().map(|(again, _)| again.aux), Some(head.aux));
    }
    if let Some(tail) = data.last_chunk() {
        assert_eq!(rdb::Tail::parse(*tail).is_ok(), tail[0] == rdb::OPCODE_EOF);
    }
}

/// The same strings are found for every cut of the snapshot, each is a record of its own, and nothing is found after
/// the end.
pub fn rdb_scan(data: &[u8]) {
    let whole = scan(&[data]);
    for_each_cut(data, |parts| assert_eq!(scan(parts), whole));
    let mut settled = 0;
    for found in &whole.0 {
        match found {
            rdb::Found::Text(text) => {
                assert!(settled <= text.begins && text.begins < text.value.start && text.value.start <= text.value.end);
                settled = text.value.end;
            }
            rdb::Found::Run(run) => {
                assert!(settled <= run.bytes.start && run.bytes.start < run.bytes.end);
                settled = run.bytes.end;
            }
            rdb::Found::End { at } => assert!(settled <= *at),
        }
    }
    let end = whole.0.iter().position(|found| matches!(found, rdb::Found::End { .. }));
    assert!(end.is_none_or(|end| end + 1 == whole.0.len()));
    // The same bytes as a collection: its type, and its value.
    if let Some((kind, bytes)) = data.split_first() {
        let _ = rdb::Collection { kind: *kind, bytes }.check();
    }
}

/// What is found, and whether it ends in an error. The excerpt in the error depends on how many bytes were present.
fn scan(parts: &[&[u8]]) -> (Vec<rdb::Found>, bool) {
    let (mut scanner, mut all) = (rdb::Scanner::new(0), Vec::new());
    for part in parts {
        let mut rest = *part;
        loop {
            let (taken, found) = match scanner.feed(rest) {
                Ok(fed) => fed,
                Err(_) => return (all, true),
            };
            rest = &rest[taken..];
            if found.is_none() {
                break;
            }
            all.extend(found);
        }
    }
    (all, false)
}

/// A snapshot is converted the same for every cut. What was converted is a snapshot that the target's scanner reads, with
/// as many keys, and that needs no further conversion. The first byte says for which target, and what is left out.
pub fn rdb_convert(data: &[u8]) {
    const FORMATS: [rdb::Format; 6] = [
        rdb::Format::REDIS_6,
        rdb::Format::REDIS_7_0,
        rdb::Format::COMMON,
        rdb::Format::REDIS_7_4,
        rdb::Format::REDIS_8_6,
        rdb::Format::VALKEY_9,
    ];
    let Some((choice, data)) = data.split_first() else { return };
    let format = FORMATS[usize::from(choice & 7) % FORMATS.len()];
    let bit = |bit: u8| choice & (1 << bit) != 0;
    let options = rdb::Options { drop_field_expiry: bit(3), skip_modules: bit(4), skip_functions: bit(5) };
    let whole = convert(&[data], format, options);
    for_each_cut(data, |parts| {
        let again = convert(parts, format, options);
        assert_eq!(again.is_some(), whole.is_some());
        if let (Some(again), Some(whole)) = (again, &whole) {
            assert_eq!(
                (again.0, again.1.done(), again.1.is_over()),
                (whole.0.clone(), whole.1.done(), whole.1.is_over())
            );
        }
    });
    let Some((converted, converter)) = whole.filter(|(_, converter)| converter.is_over()) else { return };
    let mut scanner = rdb::Scanner::new(u64::MAX);
    let (taken, end) = scanner.feed(&converted).expect("what was converted can be read");
    assert!(matches!(end, Some(rdb::Found::End { .. })) && converted.len() - taken == 8);
    let keys: Option<u64> = scanner.keys().map(|keys| keys.values().sum());
    let read = converter.done().keys;
    assert!(keys.is_none_or(|keys| if options.skip_modules { keys <= read } else { keys == read }));
    let (again, _) = convert(&[&converted], format, options).expect("what was converted is converted again");
    assert_eq!(again, converted, "nothing is left to convert");
}

fn convert(parts: &[&[u8]], format: rdb::Format, options: rdb::Options) -> Option<(Vec<u8>, rdb::Converter)> {
    let (mut converter, mut out) = (rdb::Converter::new(format, options), Vec::new());
    for part in parts {
        converter.convert(part, &mut out).ok()?;
    }
    Some((out, converter))
}

/// Every field is found by its name, and the fields survive encoding.
pub fn info(data: &[u8]) {
    let info = Info::parse(data);
    let mut text = String::new();
    for (name, value) in info.iter() {
        assert_eq!(info.get(name), Some(value));
        text.push_str(&format!("{name}:{value}\r\n"));
    }
    assert!(info.replicas().count() <= info.iter().count());
    assert_eq!(Info::parse(text.as_bytes()), info);
    assert!(!Refusal::new("INFO", data).to_string().is_empty());
}

fn a_replid() -> ReplId {
    ReplId::parse(&[b'a'; 40]).expect("forty hexadecimal digits are a replid")
}

/// Calls `check` with the data byte by byte and, if it is short enough, in two parts for every possible cut.
fn for_each_cut(data: &[u8], mut check: impl FnMut(&[&[u8]])) {
    let bytes: Vec<&[u8]> = data.chunks(1).collect();
    check(&bytes);
    if data.len() <= EVERY_CUT_BYTES {
        (0..=data.len()).map(|cut| data.split_at(cut)).for_each(|(left, right)| check(&[left, right]));
    }
}

/// The words of a field of references end at the first error, and those before it survive encoding.
pub fn rdb_reference(data: &[u8]) {
    let (mut wire, mut failed) = (Vec::new(), false);
    for word in rdb::reference::words(data) {
        assert!(!failed, "a word after an error");
        match word {
            Ok(word) => word.encode(&mut wire),
            Err(_) => failed = true,
        }
    }
    let parsed: Result<Vec<_>, _> = rdb::reference::words(&wire).collect();
    let mut again = Vec::new();
    parsed.unwrap_or_default().iter().for_each(|word| word.encode(&mut again));
    assert_eq!(again, wire);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;

    /// The seeds of one target, with their names.
    fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
        let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut seeds: Vec<_> = files
            .map(|file| file.unwrap().path())
            .map(|path| (path.display().to_string(), std::fs::read(&path).unwrap()))
            .collect();
        seeds.sort();
        seeds
    }

    #[test]
    fn every_seed_of_every_target_holds() {
        for (target, body) in TARGETS {
            let seeds = seeds(target);
            assert!(!seeds.is_empty(), "{target} has no seeds");
            for (name, data) in seeds {
                // Printed only if the body panics.
                println!("{name}");
                body(&data);
            }
        }
    }

    /// A seed with a few bytes changed, duplicated or removed.
    fn damaged_seeds(target: &'static str) -> impl Strategy<Value = Vec<u8>> {
        let seeds: Vec<Vec<u8>> = seeds(target).into_iter().map(|(_, data)| data).collect();
        let edits = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 0..6);
        (prop::sample::select(seeds), edits).prop_map(|(mut data, edits)| {
            for (place, byte, edit) in edits.into_iter().filter(|_| !data.is_empty()).collect::<Vec<_>>() {
                let place = place.index(data.len().max(1)).min(data.len().saturating_sub(1));
                match edit {
                    0 if data.len() > 1 => drop(data.remove(place)),
                    1 => data.insert(place, byte),
                    2 => data.extend_from_within(place..),
                    _ => data[place] = byte,
                }
            }
            data.truncate(2 * EVERY_CUT_BYTES);
            data
        })
    }

    macro_rules! property {
        ($($name:ident: $target:ident;)*) => {
            proptest! {
                #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
                $(
                    #[test]
                    fn $name(
                        data in prop_oneof![
                            1 => proptest::collection::vec(any::<u8>(), 0..200),
                            3 => damaged_seeds(stringify!($target)),
                        ]
                    ) {
                        $target(&data);
                    }
                )*
            }
        };
    }

    property! {
        any_bytes_may_come_from_a_server: resp_decode;
        any_bytes_may_come_from_a_client: command_decode;
        any_bytes_may_answer_our_handshake: psync_client;
        any_bytes_may_ask_for_a_handshake: psync_server;
        any_bytes_may_be_taken_for_a_snapshot: rdb_head;
        any_bytes_may_be_taken_for_records: rdb_scan;
        any_bytes_may_be_taken_for_references: rdb_reference;
        any_bytes_may_be_taken_for_info: info;
    }
}
