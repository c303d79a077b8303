//! `remora volume create`.

use remora_volume::client::{ClientOptions, Volume, new_id};

use super::file::{VolumeFile, shape};
use super::servers::Protection;
use crate::args::CreateArgs;
use crate::exit::{Code, Failure};
use crate::progress;

/// Runs `remora volume create`.
///
/// # Errors
/// An option or a file is not right, or a server did not make its copy.
pub(super) fn run(args: &CreateArgs) -> Result<(), Failure> {
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
        return Err(Failure::new(Code::Volume, format!("the volume was not made: {error}")));
    }
    let hold = shape.copies().hold();
    progress::say(&format!("{}: {}, {copies} copies, writes acknowledged at {hold}", args.file.display(), args.size));
    Ok(())
}
