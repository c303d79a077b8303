//! `remora volume grow`.

use remora_volume::client::{ClientOptions, Volume};
use remora_volume::shape::BLOCK_BYTES;

use super::failure::failure;
use super::file::{self, VolumeFile};
use super::servers::Protection;
use crate::args::GrowArgs;
use crate::exit::{Code, Failure};
use crate::progress::{self, Meter, Unit};

/// Runs `remora volume grow`.
///
/// # Errors
/// A file cannot be used, the size is smaller, a writer is at work, or a server's copy has not grown.
pub(super) fn run(args: &GrowArgs) -> Result<(), Failure> {
    let protection = Protection::read(&args.protection)?;
    let described = VolumeFile::read(&args.file)?;
    let (shape, names) = (described.shape, &described.servers);
    let (name, servers) = (args.file.display().to_string(), protection.servers(names)?);
    let larger = file::shape(shape.volume(), args.size.get(), shape.copies().number(), shape.copies().hold());
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
    // Fewer could not open the volume with the new size.
    let is_enough = has_it >= shape.copies().promises();
    if is_enough {
        prepared.replace()?;
        progress::say(&format!("{name}: the volume has {} bytes now", larger.blocks() * BLOCK_BYTES as u64));
    }
    if left.is_empty() && is_enough {
        return Ok(());
    }
    if left.is_empty() {
        left.push("too few servers have a copy".into());
    }
    let text = format!("the volume {name} has not grown everywhere: {}", left.join("; "));
    let bytes = shape.blocks() * BLOCK_BYTES as u64;
    let cure = match is_enough {
        true => "run the command again when these servers answer".to_owned(),
        false => format!("run the command again when these servers answer, or go back with --size {bytes}"),
    };
    Err(Failure::new(Code::Volume, text).and(&cure))
}
