//! `remora volume scrub`.

use std::time::{Duration, Instant};

use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Volume};
use remora_volume::message::State;
use remora_volume::shape::{BLOCK_BYTES, Shape};
use remora_volume::wire::{Findings, Status};

use super::failure::failure;
use super::file::VolumeFile;
use super::servers::Protection;
use crate::args::ScrubArgs;
use crate::exit::{Code, Failure};
use crate::progress::{self, Meter, Unit};

/// Runs `remora volume scrub`.
///
/// # Errors
/// A file cannot be used, a server does not scrub its copy, or damage is left.
pub(super) fn run(args: &ScrubArgs) -> Result<(), Failure> {
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
                    "{server}: {read} blocks read, {repaired} repaired in its store, {bad} damaged in memory\n"
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
