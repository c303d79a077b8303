//! The life of a volume: `remora volume create`, `format`, `grow` and `remove`.

use remora_files::names::New;
use remora_files::{Files, Purpose};
use remora_volume::client::{ClientOptions, Volume, new_id};
use remora_volume::shape::BLOCK_BYTES;

use super::file::{self, VolumeFile, shape};
use super::opening::{Opening, failure, files_failure};
use super::servers::Protection;
use crate::args::{CreateArgs, FormatArgs, GrowArgs, RemoveArgs};
use crate::exit::{Code, Failure};
use crate::progress::{self, Meter, Unit};
use crate::signals::Signals;
use crate::units::counted;

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
