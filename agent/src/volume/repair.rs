//! `remora volume repair`.

use std::time::{Duration, Instant};

use remora_volume::client::{ClientOptions, Error, Volume};
use remora_volume::message::ServerId;
use remora_volume::shape::BLOCK_BYTES;

use super::failure::failure;
use super::file::VolumeFile;
use super::servers::Protection;
use crate::args::{HostPort, RepairArgs};
use crate::exit::{Code, Failure};
use crate::progress::{self, Meter, Unit};
use crate::signals::Signals;
use crate::tasks::blocking;

/// How often it is looked how far the copies are.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

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
pub(super) async fn run(args: RepairArgs) -> Result<(), Failure> {
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
            () = tokio::time::sleep(LOOK_AGAIN) => {}
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
            Stage::CatchesUp(compared) => format!("the copy at {server} has compared {compared} blocks"),
            _ => format!("the copy at {server} cannot be taken back: its server does not answer, or refuses"),
        })
        .collect();
    let text = format!("the volume {name}: {}, and got no further for {time:?}", text.join("; "));
    Failure::new(Code::Volume, text).and("start that server, or wait longer with --wait")
}
