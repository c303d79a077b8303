//! How a volume is, and what is done about it: `remora volume status`, `scrub` and `repair`; and its life: `create`,
//! `format`, `grow` and `remove`.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::servers::{self, Opening, Protection, VolumeFile, failure, files_failure, shape};
use crate::args::{CreateArgs, FormatArgs, GrowArgs, HostPort, RemoveArgs, RepairArgs, ScrubArgs, VolumeStatusArgs};
use crate::exit::{Code, Failure};
use crate::progress::{self, Meter, Unit};
use crate::signals::Signals;
use crate::units::{Size, counted, readable};
use remora_files::names::New;
use remora_files::{Files, Purpose};
use remora_messenger::Address;
use remora_process::blocking;
use remora_volume::client::{ClientOptions, Error, Volume, new_id};
use remora_volume::rules::{ServerId, Standing, State};
use remora_volume::shape::{BLOCK_BYTES, Shape};
use remora_volume::wire::{Findings, Status};

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
pub(super) fn status(args: &VolumeStatusArgs) -> Result<(), Failure> {
    let protection = Protection::read(&args.protection)?;
    let VolumeFile { shape, servers: names } = VolumeFile::read(&args.file)?;
    let servers = protection.servers(&names)?;
    let options = ClientOptions { security: protection.of_connections()?, ..ClientOptions::default() };
    let statuses = Volume::statuses(shape, &servers, &options);
    let statuses = statuses.map_err(|error| Failure::local(error.to_string()))?;
    let remember = statuses.iter().flatten().filter(|status| status.standing.remembers()).count();
    let empty = statuses.iter().flatten().filter(|status| status.standing.state == State::Empty).count();
    let report = Report {
        id: shape.volume().to_string(),
        bytes: shape.blocks() * BLOCK_BYTES as u64,
        blocks: shape.blocks(),
        acknowledge: shape.copies().hold(),
        copies: names.iter().zip(statuses).map(|(name, status)| copy(name.to_string(), status)).collect(),
    };
    let told = match args.json {
        true => progress::print_json(&report),
        false => progress::print(&table(&report)),
    };
    let needed = shape.copies().promises();
    if remember < needed {
        let text = format!(
            "{} the volume, and {needed} are needed to open it: start the others, the lines above say which do not answer",
            if remember == 1 {
                "1 server answers and holds".into()
            } else {
                format!("{remember} servers answer and hold")
            }
        );
        let failure = Failure::new(Code::Volume, text);
        return Err(if empty > 0 { failure.and(&lost(empty, names.len())) } else { failure });
    }
    told
}

/// What servers without a copy mean for a volume that cannot be opened.
fn lost(empty: usize, all: usize) -> String {
    let rest = match all - empty {
        0 => "no server has a copy any more, so what the volume held is gone: remove it, and create another one",
        _ => "what the volume holds is at the others, which must come back with their copies",
    };
    let are = if empty == 1 { "is" } else { "are" };
    format!("{empty} of {all} servers {are} empty: without --store a server's copy ends with its process; {rest}")
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
        "volume     {id}, {}, {}, writes acknowledged at {acknowledge}\n",
        Size::bytes(*bytes),
        counted(copies.len(), "copy")
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

/// Runs `remora volume scrub`.
///
/// # Errors
/// A file cannot be used, a server does not scrub its copy, or damage is left.
pub(super) fn scrub(args: &ScrubArgs) -> Result<(), Failure> {
    let protection = Protection::read(&args.protection)?;
    let VolumeFile { shape, servers: names } = VolumeFile::read(&args.file)?;
    let (name, servers) = (args.file.display().to_string(), protection.servers(&names)?);
    let options = ClientOptions { security: protection.of_connections()?, ..ClientOptions::default() };
    let bytes = shape.blocks() * BLOCK_BYTES as u64;
    let meter = Meter::start("scrub", Unit::Bytes, Some(bytes * servers.len() as u64));
    let mut read = vec![0; servers.len()];
    let found = Volume::scrub(shape, &servers, &options, |server, findings| {
        if let Some(read) = read.get_mut(server) {
            *read = findings.read;
        }
        meter.set(read.iter().sum::<u64>() * BLOCK_BYTES as u64);
    });
    let found = found.map_err(|error| failure(&name, &error))?;
    meter.finish();
    let (mut damaged, mut failed, mut text) = (Vec::new(), Vec::new(), String::new());
    for (number, (server, found)) in names.iter().zip(found).enumerate() {
        match found {
            Ok(Findings { read, repaired, damaged: bad, .. }) => {
                text.push_str(&format!(
                    "{server}: {} read, {repaired} repaired in its store, {bad} damaged in memory\n",
                    counted(read, "block")
                ));
                if bad > 0 {
                    damaged.push(number);
                }
            }
            Err(why) => failed.push(format!("{server}: {why}")),
        }
    }
    let told = progress::print(&text);
    let left = wait_for_writer(shape, &servers, &options, damaged);
    if !left.is_empty() {
        let left: Vec<_> = left.iter().filter_map(|number| names.get(*number)).map(ToString::to_string).collect();
        let text = format!("the volume {name}: the copy at {} lacks blocks that were damaged", left.join(" and "));
        return Err(Failure::new(Code::Damaged, text).and("no writer has taken it back: run remora volume repair"));
    }
    if !failed.is_empty() {
        return Err(Failure::new(Code::Volume, format!("the volume {name} was not scrubbed at {}", failed.join("; "))));
    }
    told
}

/// Waits until the writer that is at work, if one is, has taken these copies back. Returns those that are left.
fn wait_for_writer(shape: Shape, servers: &[Address], options: &ClientOptions, mut damaged: Vec<usize>) -> Vec<usize> {
    let (mut compared, mut since) = (None, Instant::now());
    while !damaged.is_empty() {
        let statuses = Volume::statuses(shape, servers, options).unwrap_or_default();
        let status = |number: usize| statuses.get(number).and_then(|status| status.as_ref().ok());
        damaged.retain(|number| !status(*number).is_some_and(|status| status.standing.state == State::Whole));
        let is_writer_there = statuses.iter().flatten().any(|Status { writer_silent, .. }| writer_silent.is_some());
        let now: Vec<_> = damaged.iter().map(|number| status(*number).and_then(|status| status.compared)).collect();
        if compared.as_ref() != Some(&now) {
            (compared, since) = (Some(now), Instant::now());
        }
        if !is_writer_there || since.elapsed() >= PATIENCE {
            break;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    damaged
}

/// A writer tries a server again within five seconds, and then the catch-up goes on.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often servers are asked whether a copy is whole again.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// How often it is looked how far the copies are.
const LOOK_AGAIN_AT_COPIES: Duration = Duration::from_millis(100);

/// How far a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Whole,
    /// The number of blocks that it has compared.
    CatchesUp(u64),
    /// Its server is tried again from time to time.
    Away,
}

/// Runs `remora volume repair` until all copies are whole.
///
/// # Errors
/// A file cannot be used, the volume cannot be opened, or a copy gets no further.
pub(super) async fn repair(args: RepairArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let protection = Protection::read(&args.protection)?;
    let _rereading = protection.tokens.read_again_on_hangup()?;
    let VolumeFile { shape, servers: names } = VolumeFile::read(&args.file)?;
    let name = args.file.display().to_string();
    let options = ClientOptions {
        security: protection.of_connections()?,
        copy_limit: args.copy_timeout,
        take_over: args.take_over,
        ..ClientOptions::default()
    };
    let (opening, at) = (name.clone(), names.clone());
    let opened = blocking(move || {
        let servers = protection.servers(&at)?;
        Volume::open(shape, &servers, &options).map_err(|error| failure(&opening, &error))
    });
    let interrupted = |signal| {
        let text = format!("stopped by {signal}: copies of {name} may lack writes as before, and are no worse");
        Failure::new(Code::Interrupted, text)
    };
    let volume = tokio::select! {
        opened = opened => opened?,
        // The thread ends with the process. It has changed nothing but who may write.
        signal = signals.next() => return Err(interrupted(signal)),
    };
    let copies = names.len() as u64;
    let meter = Meter::start("repair", Unit::Bytes, Some(shape.blocks() * BLOCK_BYTES as u64 * copies));
    let (mut before, mut since) = (Vec::new(), Instant::now());
    let result = loop {
        let stages = stages(&volume, names.len());
        meter.set(stages.iter().map(|stage| done(*stage, shape.blocks())).sum::<u64>() * BLOCK_BYTES as u64);
        if let Some(end) = volume.end() {
            break Err(failure(&name, &Error::Ended(end)));
        }
        if stages.iter().all(|stage| *stage == Stage::Whole) {
            break Ok(());
        }
        if stages != before {
            (before, since) = (stages, Instant::now());
        } else if since.elapsed() >= args.wait {
            break Err(stuck(&name, &names, &before, args.wait));
        }
        tokio::select! {
            signal = signals.next() => break Err(interrupted(signal)),
            () = tokio::time::sleep(LOOK_AGAIN_AT_COPIES) => {}
        }
    };
    let is_well = result.is_ok();
    let flushed = blocking(move || {
        // What a copy with a store has taken is safe before the command says so.
        let flushed = if is_well { volume.flush() } else { Ok(()) };
        drop(volume);
        Ok(flushed)
    });
    let flushed = flushed.await?;
    result?;
    flushed.map_err(|error| failure(&name, &error))?;
    meter.finish();
    progress::say(&format!("{name}: all {copies} copies are whole"));
    Ok(())
}

fn stages(volume: &Volume, copies: usize) -> Vec<Stage> {
    let members = volume.members();
    let stage = |server| match volume.compared(server) {
        _ if members.contains(&server) => Stage::Whole,
        Some(compared) => Stage::CatchesUp(compared),
        None => Stage::Away,
    };
    (0..copies).map(ServerId).map(stage).collect()
}

fn done(stage: Stage, blocks: u64) -> u64 {
    match stage {
        Stage::Whole => blocks,
        Stage::CatchesUp(compared) => compared.min(blocks),
        Stage::Away => 0,
    }
}

/// No copy got any further for so long.
fn stuck(name: &str, servers: &[HostPort], stages: &[Stage], time: Duration) -> Failure {
    let not_whole: Vec<_> = servers.iter().zip(stages).filter(|(_, stage)| **stage != Stage::Whole).collect();
    let text: Vec<_> = not_whole
        .iter()
        .map(|(server, stage)| match stage {
            Stage::CatchesUp(compared) => format!("the copy at {server} has compared {}", counted(*compared, "block")),
            _ => format!("the copy at {server} cannot be taken back: its server does not answer, or refuses"),
        })
        .collect();
    let text = format!("the volume {name}: {}, and got no further for {time:?}", text.join("; "));
    Failure::new(Code::Volume, text).and("start that server, or wait longer with --wait")
}

// The life of a volume: `remora volume create`, `format`, `grow` and `remove`.

/// Runs `remora volume create`.
///
/// # Errors
/// An option or a file is not right, or a server did not make its copy.
pub(super) fn create(args: &CreateArgs) -> Result<(), Failure> {
    let protection = Protection::read(&args.protection)?;
    let usage = |text: String| Failure::new(Code::Usage, text);
    let copies = args.servers.len();
    let twice = args.servers.iter().enumerate().find(|(at, server)| args.servers[..*at].contains(server));
    if let Some((_, server)) = twice {
        return Err(usage(format!("--servers names {server} twice: two copies on one server are lost together")));
    }
    let id = new_id().map_err(|error| Failure::local(error.to_string()))?;
    let shape = shape(id, args.size.get(), copies, args.acknowledge.unwrap_or(copies / 2 + 1)).map_err(usage)?;
    let servers = protection.servers(&args.servers)?;
    let options = ClientOptions { security: protection.of_connections()?, ..ClientOptions::default() };
    // First: a volume without a file could not be opened, and its memory would be lost until the servers end.
    let file = VolumeFile { shape, servers: args.servers.clone() };
    file.write(&args.file)?;
    if let Err(error) = Volume::create(shape, &servers, &options) {
        let _ = std::fs::remove_file(&args.file);
        return Err(Failure::new(
            Code::Volume,
            format!(
                "the volume was not made: {error}; every server of --servers must run (remora volume serve) and have room"
            ),
        ));
    }
    let hold = shape.copies().hold();
    let copies = counted(copies, "copy");
    progress::say(&format!("{}: {}, {copies}, writes acknowledged at {hold}", args.file.display(), args.size));
    Ok(())
}

/// Runs `remora volume format`.
///
/// # Errors
/// The volume cannot be opened, or holds something.
pub(super) async fn format(args: FormatArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let opening = Opening::read(&args.writer)?;
    let name = opening.name().to_owned();
    let of = name.clone();
    let purpose = Purpose::Format { force: args.force };
    let made = opening.open(&mut signals, purpose, move |volume| {
        let root =
            New { uid: rustix::process::getuid().as_raw(), gid: rustix::process::getgid().as_raw(), ..New::default() };
        Files::format(&volume, &root, args.force).map_err(|error| files_failure(&of, &error))
    });
    made.await?;
    progress::say(&format!("{name}: an empty file system; mount it with `remora volume mount`"));
    Ok(())
}

/// Runs `remora volume grow`.
///
/// # Errors
/// A file cannot be used, the size is smaller, a writer is at work, or a server's copy has not grown.
pub(super) fn grow(args: &GrowArgs) -> Result<(), Failure> {
    let protection = Protection::read(&args.protection)?;
    let described = VolumeFile::read(&args.file)?;
    let (shape, names) = (described.shape, &described.servers);
    let (name, servers) = (args.file.display().to_string(), protection.servers(names)?);
    let larger = servers::shape(shape.volume(), args.size.get(), shape.copies().number(), shape.copies().hold());
    let usage = |text: String| Failure::new(Code::Usage, text);
    let larger = larger.map_err(|why| usage(format!("--size: {why}")))?;
    if larger.blocks() < shape.blocks() {
        let bytes = shape.blocks() * BLOCK_BYTES as u64;
        return Err(usage(format!("--size: {name} has {bytes} bytes, and a volume does not become smaller")));
    }
    // Before a writer is ended for it.
    let prepared = VolumeFile { shape: larger, servers: names.clone() }.prepare(&args.file)?;
    let security = protection.of_connections()?;
    let options = ClientOptions { security, take_over: args.take_over, ..ClientOptions::default() };
    let blocks = shape.blocks() * servers.len() as u64;
    let meter = Meter::start("grow", Unit::Bytes, Some(blocks * BLOCK_BYTES as u64));
    let mut copied = vec![0; servers.len()];
    let grown = Volume::grow((shape, larger), &servers, &options, |server, blocks| {
        if let Some(copied) = copied.get_mut(server) {
            *copied = blocks;
        }
        meter.set(copied.iter().sum::<u64>() * BLOCK_BYTES as u64);
    });
    let grown = grown.map_err(|error| failure(&name, &error))?;
    meter.finish();
    let (mut has_it, mut left) = (0, Vec::new());
    for (server, grown) in names.iter().zip(grown) {
        match grown {
            Ok(true) => {
                has_it += 1;
                progress::say(&format!("{server}: the copy has the new size"));
            }
            Ok(false) => progress::say(&format!("{server}: there is no copy; the next writer makes one")),
            Err(why) => left.push(format!("{server}: {why}")),
        }
    }
    // With the size of before: fewer could not open the volume.
    if has_it < shape.copies().promises() {
        left.push("too few servers have a copy of this size".into());
        let text = format!("the volume {name}: {}", left.join("; "));
        return Err(Failure::new(Code::Volume, text).and("run the command again when these servers answer"));
    }
    prepared.replace()?;
    progress::say(&format!("{name}: the volume has {} bytes now", larger.blocks() * BLOCK_BYTES as u64));
    // A server that is not told learns it from the next writer.
    let agreed = Volume::agree(larger, &servers, &options).map_err(|error| failure(&name, &error))?;
    let other = names.iter().zip(&agreed).filter(|(_, agreed)| matches!(agreed, Err(why) if why.contains("another")));
    left.extend(
        other.map(|(server, _)| format!("{server}: a writer of the former size has opened the volume meanwhile")),
    );
    if left.is_empty() {
        return Ok(());
    }
    let text = format!("the volume {name} has not grown everywhere: {}", left.join("; "));
    let cure = "the next writer has their copies grow when these servers answer; or run the command again then";
    Err(Failure::new(Code::Volume, text).and(cure))
}

/// Runs `remora volume remove`.
///
/// # Errors
/// A file cannot be used, a writer is at work, or a server may still have its copy.
pub(super) fn remove(args: &RemoveArgs) -> Result<(), Failure> {
    let protection = Protection::read(&args.protection)?;
    let VolumeFile { shape, servers: names } = VolumeFile::read(&args.file)?;
    let (name, servers) = (args.file.display().to_string(), protection.servers(&names)?);
    let security = protection.of_connections()?;
    let options = ClientOptions { security, take_over: args.take_over, ..ClientOptions::default() };
    let removed = Volume::remove(shape, &servers, &options).map_err(|error| failure(&name, &error))?;
    let mut left = Vec::new();
    for (server, removed) in names.iter().zip(removed) {
        match removed {
            Ok(true) => progress::say(&format!("{server}: the copy is removed")),
            Ok(false) => progress::say(&format!("{server}: there was no copy")),
            Err(why) => left.push(format!("{server} may still have its copy: {why}")),
        }
    }
    if !left.is_empty() {
        let text = format!("the volume {name}: {}", left.join("; "));
        return Err(Failure::new(Code::Volume, text).and("its file is kept, so that the command can be run again"));
    }
    std::fs::remove_file(&args.file).map_err(|error| {
        Failure::local(format!("no server has a copy any more, and {name} cannot be removed: {error}"))
    })?;
    progress::say(&format!("{name}: the volume and its file are removed"));
    Ok(())
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
