//! `remora volume remove`.

use remora_volume::client::{ClientOptions, Volume};

use super::failure::failure;
use super::file::VolumeFile;
use super::servers::Protection;
use crate::args::RemoveArgs;
use crate::exit::{Code, Failure};
use crate::progress;

/// Runs `remora volume remove`.
///
/// # Errors
/// A file cannot be used, a writer is at work, or a server may still have its copy.
pub(super) fn run(args: &RemoveArgs) -> Result<(), Failure> {
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
