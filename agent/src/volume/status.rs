//! `remora volume status`.

use remora_volume::client::{ClientOptions, Volume};
use remora_volume::message::{Standing, State};
use remora_volume::shape::BLOCK_BYTES;
use serde::Serialize;

use super::file::VolumeFile;
use super::servers::Protection;
use crate::args::VolumeStatusArgs;
use crate::exit::{Code, Failure};
use crate::units::Size;

/// The state of a volume, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Report {
    id: String,
    bytes: u64,
    acknowledge: usize,
    copies: Vec<Copy>,
}

/// One copy.
#[derive(Debug, Serialize)]
struct Copy {
    server: String,
    /// `whole`, `behind`, `empty`, or `unknown` if the server does not answer.
    state: &'static str,
    /// The generation of the writer that the server obeys; 0 before the first.
    generation: u32,
    /// The last write that it has applied, as generation and number.
    applied: String,
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
    let standings = Volume::standings(shape, &servers, &options);
    let standings = standings.map_err(|error| Failure::local(error.to_string()))?;
    let remember = standings.iter().flatten().filter(|standing| standing.remembers()).count();
    let report = Report {
        id: shape.volume().to_string(),
        bytes: shape.blocks() * BLOCK_BYTES as u64,
        acknowledge: shape.copies().hold(),
        copies: names.iter().zip(standings).map(|(name, standing)| copy(name.to_string(), standing)).collect(),
    };
    if args.json {
        let text = serde_json::to_string(&report).map_err(|error| Failure::local(error.to_string()))?;
        println!("{text}");
    } else {
        print!("{}", table(&report));
    }
    let needed = shape.copies().promises();
    if remember < needed {
        let text = format!("{remember} servers that hold the volume answer, and {needed} are needed to open it");
        return Err(Failure::new(Code::Volume, text));
    }
    Ok(())
}

fn copy(server: String, standing: Result<Standing, String>) -> Copy {
    match standing {
        Ok(Standing { state, promised, applied, .. }) => Copy {
            server,
            state: match state {
                State::Whole => "whole",
                State::Behind => "behind",
                State::Empty => "empty",
            },
            generation: promised.map_or(0, |holder| holder.generation.number()),
            applied: applied.to_string(),
            error: String::new(),
        },
        Err(error) => Copy { server, state: "unknown", generation: 0, applied: String::new(), error },
    }
}

fn table(report: &Report) -> String {
    let Report { id, bytes, acknowledge, copies } = report;
    let mut text = format!(
        "volume     {id}, {}, {} copies, writes acknowledged at {acknowledge}\n",
        Size::bytes(*bytes),
        copies.len()
    );
    for Copy { server, state, generation, applied, error } in copies {
        match error.is_empty() {
            true => text.push_str(&format!("{state:<10} {server}, writer {generation}, applied {applied}\n")),
            false => text.push_str(&format!("{state:<10} {server}: {error}\n")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_answer_is_named_with_its_reason() {
        let copies = vec![
            copy("a:1".into(), Ok(Standing { state: State::Whole, ..Standing::default() })),
            copy("b:2".into(), Err("connection refused".into())),
        ];
        let text = table(&Report { id: "00".into(), bytes: 1 << 20, acknowledge: 2, copies });
        assert!(text.contains("whole      a:1, writer 0"), "{text}");
        assert!(text.contains("unknown    b:2: connection refused"), "{text}");
    }
}
