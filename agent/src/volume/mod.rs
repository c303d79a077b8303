//! `remora volume`: blocks in the memory of other hosts, as [`remora_volume`] keeps them.
//!
//! - `servers`: what a client must know of a volume, what protects connections, and where the servers of a volume are;
//!   how a volume is opened for writing; `remora volume serve`, and what is shown to those who watch. **Start here.**
//! - Here: the clients of a volume that stay: `remora volume mount` and `remora volume nbd`.
//! - `health`: the other subcommands.

mod health;
mod servers;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use remora_files::Purpose;
use remora_files::mount::{
    AtEnd, Contents, FollowedFiles, MountError, Mounted, MountedFiles, MountedImage, mount_options,
};
use remora_fuse::{EndError, SessionOptions};
use remora_nbd::protocol::MAX_STRING_BYTES;
use remora_nbd::server::Bound;
use remora_nbd::{Address, ServerOptions, TlsConfig};
use remora_process::blocking;
use remora_volume::client::{ReadCounts, Request, Volume, WriteCounts};
use remora_volume::nbd::VolumeServer;
use remora_volume::wire::Run;
use remora_volume::writer::End;

use crate::args::{MountArgs, NbdArgs, NbdTlsArgs, VolumeAction, VolumeArgs};
use crate::conversation::security::{CertificateFiles, CertificateRoles, Certificates};
use crate::events;
use crate::exit::Failure;
use crate::metrics::{Agent, Scrape, Scrapes, Watch};
use crate::service::Service;
use crate::signals::{self, Signals};
use servers::{IS_OPENED, Opening, Shown, ended, files_failure};

/// Runs `remora volume`.
///
/// # Errors
/// What the subcommand says.
pub async fn run(args: VolumeArgs) -> Result<(), Failure> {
    match args.action {
        VolumeAction::Serve(args) => servers::run(args).await,
        VolumeAction::Create(args) => blocking(move || health::create(&args)).await,
        VolumeAction::Status(args) => blocking(move || health::status(&args)).await,
        VolumeAction::Scrub(args) => blocking(move || health::scrub(&args)).await,
        VolumeAction::Repair(args) => health::repair(args).await,
        VolumeAction::Grow(args) => blocking(move || health::grow(&args)).await,
        VolumeAction::Remove(args) => blocking(move || health::remove(&args)).await,
        VolumeAction::Nbd(args) => nbd(args).await,
        VolumeAction::Format(args) => health::format(args).await,
        VolumeAction::Mount(args) => mount(args).await,
    }
}

/// How often the end of the volume or of the mount is looked for. Processes are told at once; this only ends this one.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Runs `remora volume mount` until a signal, until the files are unmounted, or until the volume has ended.
///
/// # Errors
/// The volume or its files cannot be opened, the directory cannot be mounted at or is in use at the end, or the volume
/// has ended.
async fn mount(args: MountArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let (_watch, mut scrapes) = Watch::begin(Agent::Mount, args.metrics.metrics, None).await?;
    let opening = Opening::read(&args.writer)?;
    let (name, shown) = (opening.name().to_owned(), opening.shown());
    let options = SessionOptions {
        mount: mount_options(&name, args.read_only, !args.private),
        ring: !args.no_ring,
        ..SessionOptions::default()
    };
    let (of, directory) = (name.clone(), args.directory.clone());
    let at = &args.directory;
    // Before a writer is ended for it.
    let (looked, mounts) = (directory.clone(), options.mount.clone());
    let checked = blocking(move || {
        remora_fuse::mount::check(&looked, &mounts).map_err(|error| Failure::local(error.to_string()))
    });
    checked.await?;
    let at_end = if args.unmount_at_end { AtEnd::Unmount } else { AtEnd::Leave };
    if args.read_only {
        let opened = opening.open_read_only(&mut signals, move |volume| {
            let counter = volume.counter();
            let mounted = FollowedFiles::mount(Box::new(volume), &directory, &options);
            Ok((mounted.map_err(|error| mount_failure(&of, error))?, counter))
        });
        let ((mounted, counter), _rereading) = scrapes.meanwhile(IS_OPENED, opened).await?;
        tracing::info!(event = events::FILES_MOUNTED, volume = %name, directory = %at.display(), transport = ?mounted.transport(),
            "files mounted read-only");
        let answer = |scrape| shown.answer_reader(counter.counts(), scrape);
        let over = until_over(&mut signals, at, || None, |limit| mounted.wait(limit), &mut scrapes, answer).await;
        let ended = blocking(move || match over {
            Over::Unserved if mounted.is_mounted() => Err(unserved(mounted.abandon(at_end))),
            _ => mounted.end(at_end).map_err(|error| Failure::local(error.to_string())),
        });
        return ended.await;
    }
    let ahead = if args.write_through { 0 } else { usize::try_from(args.ahead.get()).unwrap_or(usize::MAX / 2) };
    if args.image {
        let opened = opening.open(&mut signals, Purpose::Device, move |volume| {
            let volume = Arc::new(volume);
            let mounted = MountedImage::mount(Arc::clone(&volume), &directory, &options);
            Ok((mounted.map_err(|error| mount_failure(&of, error))?, volume))
        });
        let ((mounted, volume), _rereading) = scrapes.meanwhile(IS_OPENED, opened).await?;
        tracing::info!(event = events::IMAGE_MOUNTED, volume = %name, file = %at.join("image").display(), transport = ?mounted.transport(),
            "image mounted");
        return serve((&shown, at, at_end), &mut signals, mounted, volume, &mut scrapes).await;
    }
    let opened = opening.open(&mut signals, Purpose::Files, move |volume| {
        let volume = Arc::new(volume);
        let mounted = MountedFiles::mount(Arc::clone(&volume), &directory, ahead, &options);
        Ok((mounted.map_err(|error| mount_failure(&of, error))?, volume))
    });
    let ((mounted, volume), _rereading) = scrapes.meanwhile(IS_OPENED, opened).await?;
    tracing::info!(event = events::FILES_MOUNTED, volume = %name, directory = %at.display(), transport = ?mounted.transport(), "files mounted");
    serve((&shown, at, at_end), &mut signals, mounted, volume, &mut scrapes).await
}

/// Serves what is mounted of a volume until one of the two is over, or a signal comes.
async fn serve<T: Contents>(
    (shown, directory, at_end): (&Shown, &Path, AtEnd),
    signals: &mut Signals,
    mounted: Mounted<T>,
    volume: Arc<Volume>,
    scrapes: &mut Scrapes,
) -> Result<(), Failure> {
    let answer = |scrape| shown.answer(&volume, scrape);
    let over = until_over(signals, directory, || volume.end(), |limit| mounted.wait(limit), scrapes, answer).await;
    let failure = match over {
        Over::Volume(end) => Some(ended(shown, &volume, end)),
        _ => None,
    };
    let closed = blocking(move || {
        let local = |ended: Result<(), EndError>| ended.map_err(|error| Failure::local(error.to_string()));
        let closed = match over {
            Over::Volume(_) => local(mounted.abandon(at_end)),
            Over::Unserved if mounted.is_mounted() => Err(unserved(mounted.abandon(at_end))),
            Over::Unserved | Over::Signal => local(mounted.end(at_end)),
        };
        drop(volume);
        closed
    });
    let closed = closed.await;
    match failure {
        None => closed,
        Some(failure) if at_end == AtEnd::Leave => Err(failure.and(&format!("{} {LEFT}", directory.display()))),
        Some(failure) => Err(failure),
    }
}

/// What the user is told of a mount that is left.
const LEFT: &str = "stays mounted, and every use of it fails, until this command is started again or it is unmounted";

/// The kernel asks nothing any more, and nobody has unmounted it.
fn unserved(left: Result<(), EndError>) -> Failure {
    let why = left.err().map(|error| format!(": {error}")).unwrap_or_default();
    Failure::local(format!("the kernel's connection has failed, or another process has aborted it{why}"))
}

/// Why a mount is over.
#[derive(Clone, Copy)]
enum Over {
    Signal,
    /// The volume has ended.
    Volume(End),
    /// It was unmounted, or its connection has failed.
    Unserved,
}

/// Waits for a signal, for the end of the mount, or for that of the volume.
async fn until_over(
    signals: &mut Signals,
    directory: &Path,
    end: impl Fn() -> Option<End>,
    wait: impl Fn(Duration) -> bool,
    scrapes: &mut Scrapes,
    answer: impl Fn(Scrape),
) -> Over {
    let _service = Service::ready(&format!("mounted at {}", directory.display()));
    loop {
        tokio::select! {
            signal = signals.next() => {
                tracing::info!("stopped by {signal}: unmounting");
                return Over::Signal;
            }
            scrape = scrapes.next() => answer(scrape),
            () = tokio::time::sleep(LOOK_AGAIN) => {
                if let Some(end) = end() {
                    return Over::Volume(end);
                }
                if wait(Duration::ZERO) {
                    tracing::info!(directory = %directory.display(), "unmounted");
                    return Over::Unserved;
                }
            }
        }
    }
}

/// Why the files of the volume with this name are not mounted, and what to do.
fn mount_failure(name: &str, error: MountError) -> Failure {
    match error {
        MountError::Files(error) => files_failure(name, &error),
        MountError::Session(error) => Failure::local(error.to_string()),
        MountError::Thread(_) => Failure::local(error.to_string()),
    }
}

/// How often the volume's end is looked for. Clients are told at once; this only ends the process.
const LOOK_AGAIN_AT_SERVERS: Duration = Duration::from_millis(100);

/// Runs `remora volume nbd` until a signal, or until the volume has ended.
///
/// # Errors
/// A file or an address cannot be used, the volume cannot be opened, or it has ended.
async fn nbd(args: NbdArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let (_watch, mut scrapes) = Watch::begin(Agent::Nbd, args.metrics.metrics, None).await?;
    let mut door = ServerOptions::new(door(&args)?);
    let certificates = certificates(&args.tls)?;
    door.tls = certificates.clone().map(tls);
    let _replacing = certificates.map(|own| signals::on_hangup(move || own.read_again())).transpose()?;
    let opening = Opening::read(&args.writer)?;
    let (name, shown) = (opening.name().to_owned(), opening.shown());
    // Before a writer is ended for it.
    if args.export.len() > MAX_STRING_BYTES {
        return Err(Failure::refused(format!("--export: a name has at most {MAX_STRING_BYTES} bytes")));
    }
    let bound = Bound::new(&door).map_err(|error| Failure::local(error.to_string()))?;
    let of = name.clone();
    let opened = opening.open(&mut signals, Purpose::Device, move |volume| {
        let read = |run: Run| volume.request(Request::Read(run)).map_err(|error| error.to_string());
        let checked = Purpose::Device.check(volume.shape().blocks(), read);
        checked.map_err(|error| files_failure(&of, &error))?;
        VolumeServer::serve(volume, &args.export, bound).map_err(|error| Failure::local(error.to_string()))
    });
    let (server, _rereading) = scrapes.meanwhile(IS_OPENED, opened).await?;
    let address = server.address().map(Address::to_string).unwrap_or_default();
    tracing::info!(event = events::VOLUME_OPEN, volume = %name, listening = address, "volume open");
    let service = Service::ready(&format!("serving NBD clients at {address}"));
    let end = loop {
        tokio::select! {
            signal = signals.next() => {
                tracing::info!("stopped by {signal}; what was acknowledged is in the volume");
                break None;
            }
            scrape = scrapes.next() => shown.answer(server.volume(), scrape),
            () = tokio::time::sleep(LOOK_AGAIN_AT_SERVERS) => {
                if let Some(end) = server.volume().end() {
                    break Some(end);
                }
            }
        }
    };
    drop(service);
    let (ReadCounts { here, far, asked }, WriteCounts { inline, pulled, .. }) =
        (server.volume().read_counts(), server.volume().write_counts());
    tracing::info!(here, far, asked, inline, pulled, "how blocks were read and written");
    let failure = end.map(|end| ended(&shown, server.volume(), end));
    blocking(move || {
        drop(server);
        Ok(())
    })
    .await?;
    failure.map_or(Ok(()), Err)
}

/// Where NBD clients connect.
fn door(args: &NbdArgs) -> Result<Address, Failure> {
    match (&args.socket, args.listen) {
        (Some(path), _) => Ok(Address::Unix(path.clone())),
        (None, Some(listen)) if args.tls.tls_cert.is_some() || listen.ip().to_canonical().is_loopback() => {
            Ok(Address::Tcp(listen))
        }
        (None, Some(listen)) => Err(Failure::refused(format!(
            "--listen {listen} is not loopback: NBD clients there would need no secret; use --tls-cert, --socket, or \
             loopback"
        ))),
        (None, None) => {
            let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
            let folder = socket_folder(runtime, rustix::process::geteuid().is_root())?;
            let file = &args.writer.file;
            let name = file.file_stem().unwrap_or(file.as_os_str());
            let mut name = name.to_owned();
            name.push(".nbd");
            Ok(Address::Unix(folder.join(name)))
        }
    }
}

/// The folder for sockets that only this user reaches. The server makes it if it is missing.
fn socket_folder(runtime: Option<PathBuf>, is_root: bool) -> Result<PathBuf, Failure> {
    match runtime.filter(|folder| folder.is_absolute()) {
        Some(folder) => Ok(folder.join("remora")),
        None if is_root => Ok("/run/remora".into()),
        None => Err(Failure::refused("this user has no XDG_RUNTIME_DIR: say with --socket where NBD clients connect")),
    }
}

/// The certificates for NBD clients; `None`: there is no TLS.
fn certificates(args: &NbdTlsArgs) -> Result<Option<Arc<Certificates>>, Failure> {
    let NbdTlsArgs { tls_cert: Some(chain), tls_key: Some(key), tls_ca: Some(authorities) } = args.clone() else {
        return Ok(None);
    };
    let options = ["--tls-cert", "--tls-key", "--tls-ca"];
    let files = CertificateFiles { chain, key, authorities, options };
    Ok(Some(Arc::new(Certificates::read(files, CertificateRoles::default())?)))
}

/// What a server does with them.
fn tls(certificates: Arc<Certificates>) -> TlsConfig {
    TlsConfig::new(move || {
        let mut config = certificates.server();
        Arc::make_mut(&mut config).alpn_protocols.clear(); // NBD has none
        config
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use super::*;

    #[test]
    fn a_socket_without_a_path_is_in_the_folder_of_its_user() {
        let folder = |runtime: Option<&str>, is_root| socket_folder(runtime.map(PathBuf::from), is_root);
        assert_eq!(folder(Some("/run/user/7"), false).unwrap(), Path::new("/run/user/7/remora"));
        assert_eq!(folder(None, true).unwrap(), Path::new("/run/remora"));
        for runtime in [None, Some("relative")] {
            assert!(folder(runtime, false).unwrap_err().message.contains("--socket"));
        }
    }
}
