//! `remora volume status`.

use std::time::Duration;

use remora_volume::client::{ClientOptions, Volume};
use remora_volume::message::{Standing, State};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::Status;
use serde::Serialize;

use super::file::VolumeFile;
use super::servers::Protection;
use crate::args::VolumeStatusArgs;
use crate::exit::{Code, Failure};
use crate::progress;
use crate::units::{Size, readable};

/// The state of a volume, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Report {
    id: String,
    bytes: u64,
    /// Blocks of 4 KiB in each copy.
    blocks: u64,
    acknowledge: usize,
    copies: Vec<Copy>,
}

/// One copy.
#[derive(Debug, Default, Serialize)]
struct Copy {
    server: String,
    /// `whole`, `behind`, `empty`, or `unknown` if the server does not answer.
    state: &'static str,
    /// The generation of the writer that the server obeys; 0 before the first.
    generation: u32,
    /// The last write that it has applied, as generation and number.
    applied: String,
    /// The last write that the copy has whatever happens to its server's process and power; the same as `applied` if it
    /// has no store.
    durable: String,
    /// Whether the copy has a store.
    has_store: bool,
    /// Whether the server has lost power, and the copy may lack writes that were acknowledged and never flushed.
    is_cut: bool,
    /// How long the writer that the server obeys has been silent, in milliseconds; `null`: it is not connected.
    writer_silent_ms: Option<u32>,
    /// Blocks that the catch-up under way has compared; `null`: none is under way.
    catch_up_blocks: Option<u64>,
    /// Blocks that the scrub under way has read; `null`: none is under way.
    scrub_blocks: Option<u64>,
    /// Bytes of the server's memory that copies and stagings use, and that it lends.
    memory_used: u64,
    memory: u64,
    /// Bytes that all writers may have under way at the server at present, and at most.
    staging_used: u64,
    staging: u64,
    /// Why the server does not answer; empty if it does.
    error: String,
}

/// Runs `remora volume status`.
///
/// # Errors
/// A file cannot be used, or so few servers answer that the volume could not be opened.
pub(super) fn run(args: &VolumeStatusArgs) -> Result<(), Failure> {
    let protection = Protection::read(&args.protection)?;
    let VolumeFile { shape, servers: names } = VolumeFile::read(&args.file)?;
    let servers = protection.servers(&names)?;
    let options = ClientOptions { security: protection.of_connections()?, ..ClientOptions::default() };
    let statuses = Volume::statuses(shape, &servers, &options);
    let statuses = statuses.map_err(|error| Failure::local(error.to_string()))?;
    let remember = statuses.iter().flatten().filter(|status| status.standing.remembers()).count();
    let report = Report {
        id: shape.volume().to_string(),
        bytes: shape.blocks() * BLOCK_BYTES as u64,
        blocks: shape.blocks(),
        acknowledge: shape.copies().hold(),
        copies: names.iter().zip(statuses).map(|(name, status)| copy(name.to_string(), status)).collect(),
    };
    let told = match args.json {
        true => {
            let text = serde_json::to_string(&report).map_err(|error| Failure::local(error.to_string()))?;
            progress::print_line(&text)
        }
        false => progress::print(&table(&report)),
    };
    let needed = shape.copies().promises();
    if remember < needed {
        let text = format!("{remember} servers that hold the volume answer, and {needed} are needed to open it");
        return Err(Failure::new(Code::Volume, text));
    }
    told
}

fn copy(server: String, status: Result<Status, String>) -> Copy {
    let status = match status {
        Ok(status) => status,
        Err(error) => return Copy { server, state: "unknown", error, ..Copy::default() },
    };
    let Standing { state, promised, applied, is_cut, .. } = status.standing;
    Copy {
        server,
        state: match state {
            State::Whole => "whole",
            State::Behind => "behind",
            State::Empty => "empty",
        },
        generation: promised.map_or(0, |holder| holder.generation.number()),
        applied: applied.to_string(),
        durable: status.durable.to_string(),
        has_store: status.has_store,
        is_cut,
        writer_silent_ms: status.writer_silent,
        catch_up_blocks: status.compared,
        scrub_blocks: status.scrubbed,
        memory_used: status.memory.bytes,
        memory: status.memory.most,
        staging_used: status.staging.bytes,
        staging: status.staging.most,
        error: String::new(),
    }
}

fn table(report: &Report) -> String {
    let Report { id, bytes, blocks, acknowledge, copies } = report;
    let mut text = format!(
        "volume     {id}, {}, {} copies, writes acknowledged at {acknowledge}\n",
        Size::bytes(*bytes),
        copies.len()
    );
    for copy in copies {
        let Copy { server, state, generation, applied, durable, error, .. } = copy;
        if !error.is_empty() {
            text.push_str(&format!("{state:<10} {server}: {error}\n"));
            continue;
        }
        let kept = if copy.has_store { format!("durable {durable}") } else { "in memory only".to_owned() };
        text.push_str(&format!("{state:<10} {server}, writer {generation}, applied {applied}, {kept}"));
        if copy.is_cut {
            text.push_str(", may lack writes since a power cut");
        }
        for (what, at) in [("catches up", copy.catch_up_blocks), ("is scrubbed", copy.scrub_blocks)] {
            if let Some(at) = at {
                text.push_str(&format!(", {what}: {} %", at * 100 / (*blocks).max(1)));
            }
        }
        let silent = copy.writer_silent_ms.map(|silent| Duration::from_millis(silent.into()));
        let heard = silent.map_or("no writer".to_owned(), |silent| format!("writer heard {} ago", readable(silent)));
        let [memory_used, memory, staging_used, staging] =
            [copy.memory_used, copy.memory, copy.staging_used, copy.staging].map(Size::bytes);
        text.push_str(&format!(
            "\n           {heard}; server's memory {memory_used} of {memory}, under way {staging_used} of {staging}\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use remora_volume::wire::Used;

    use super::*;

    #[test]
    fn a_server_that_does_not_answer_is_named_with_its_reason() {
        let copies =
            vec![copy("a:1".into(), Ok(status(State::Whole))), copy("b:2".into(), Err("connection refused".into()))];
        let text = table(&Report { id: "00".into(), bytes: 1 << 20, blocks: 256, acknowledge: 2, copies });
        assert!(text.contains("whole      a:1, writer 0"), "{text}");
        assert!(text.contains("in memory only\n           no writer; server's memory 0 B of 0 B"), "{text}");
        assert!(text.contains("unknown    b:2: connection refused"), "{text}");
    }

    #[test]
    fn what_is_under_way_is_shown_with_its_share() {
        let behind = Status {
            compared: Some(64),
            scrubbed: Some(128),
            has_store: true,
            writer_silent: Some(1500),
            memory: Used { bytes: 1 << 20, most: 4 << 20 },
            ..status(State::Behind)
        };
        let copies = vec![copy("a:1".into(), Ok(behind))];
        let text = table(&Report { id: "00".into(), bytes: 1 << 20, blocks: 256, acknowledge: 1, copies });
        for words in ["durable", "catches up: 25 %", "is scrubbed: 50 %", "writer heard 1.5 s ago", "1 MiB of 4 MiB"] {
            assert!(text.contains(words), "{words:?} is not in:\n{text}");
        }
    }

    fn status(state: State) -> Status {
        Status { standing: Standing { state, ..Standing::default() }, ..Status::default() }
    }
}
