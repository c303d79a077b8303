//! `remora volume nbd`.

use std::net::SocketAddr;
use std::time::Duration;

use remora_nbd::{Address, ServerOptions};
use remora_volume::client::{ClientOptions, Error, Volume};
use remora_volume::nbd::VolumeServer;
use remora_volume::writer::End;

use super::blocking;
use super::file::VolumeFile;
use super::servers::Protection;
use crate::args::NbdArgs;
use crate::exit::{Code, Failure};
use crate::signals::Signals;

/// How often the volume's end is looked for. Clients are told at once; this only ends the process.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Runs `remora volume nbd` until a signal, or until the volume has ended.
///
/// # Errors
/// A file or an address cannot be used, the volume cannot be opened, or it has ended.
pub(super) async fn run(args: NbdArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let protection = Protection::read(&args.protection)?;
    let _rereading = protection.tokens.read_again_on_hangup()?;
    let VolumeFile { shape, servers } = VolumeFile::read(&args.file)?;
    let name = args.file.display().to_string();
    let door = door(&args)?;
    let options = ClientOptions {
        security: protection.of_connections()?,
        copy_limit: args.copy_timeout,
        take_over: args.take_over,
        ..ClientOptions::default()
    };
    let opening = name.clone();
    let opened = blocking(move || {
        let servers = protection.servers(&servers)?;
        let volume = Volume::open(shape, &servers, &options).map_err(|error| failure(&opening, &error))?;
        VolumeServer::start(volume, &args.export, &ServerOptions::new(door))
            .map_err(|error| Failure::local(error.to_string()))
    });
    let server = tokio::select! {
        opened = opened => opened?,
        // The thread ends with the process. It has changed nothing but who may write.
        signal = signals.next() => {
            return Err(Failure::new(Code::Interrupted, format!("stopped by {signal} before {name} was open")));
        }
    };
    let address = server.address().map(Address::to_string).unwrap_or_default();
    tracing::info!(volume = %name, listening = address, "volume open");
    let end = loop {
        tokio::select! {
            signal = signals.next() => {
                tracing::info!("stopped by {signal}; what was acknowledged is in the volume");
                break None;
            }
            () = tokio::time::sleep(LOOK_AGAIN) => {
                if let Some(end) = server.volume().end() {
                    break Some(end);
                }
            }
        }
    };
    blocking(move || {
        drop(server);
        Ok(())
    })
    .await?;
    end.map_or(Ok(()), |end| Err(failure(&name, &Error::Ended(end))))
}

/// Where NBD clients connect.
fn door(args: &NbdArgs) -> Result<Address, Failure> {
    match (&args.socket, args.listen) {
        (Some(path), _) => Ok(Address::Unix(path.clone())),
        (None, Some(listen)) if listen.ip().to_canonical().is_loopback() => Ok(Address::Tcp(listen)),
        (None, listen) => Err(Failure::refused(not_loopback(listen))),
    }
}

fn not_loopback(listen: Option<SocketAddr>) -> String {
    let listen = listen.map_or(String::new(), |listen| format!(" {listen}"));
    format!("--listen{listen} is not loopback: NBD clients there would need no secret; use --socket, or loopback")
}

/// How a volume ended, and what to do.
fn failure(name: &str, error: &Error) -> Failure {
    let (code, cure) = match error {
        Error::Ended(End::Fenced { .. }) => (Code::Replaced, ""),
        Error::InUse { .. } => (Code::InUse, "; --take-over replaces it at once"),
        _ => (Code::Volume, ""),
    };
    Failure::new(code, format!("the volume {name}: {error}{cure}"))
}
