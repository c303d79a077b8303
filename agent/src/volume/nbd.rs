//! `remora volume nbd`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use remora_nbd::protocol::MAX_STRING_BYTES;
use remora_nbd::server::Bound;
use remora_nbd::{Address, ServerOptions, TlsConfig};
use remora_volume::client::{ReadCounts, Request, WriteCounts};
use remora_volume::files::Purpose;
use remora_volume::nbd::VolumeServer;
use remora_volume::wire::Run;

use super::failure::{ended, files_failure};
use super::opening::{IS_OPENED, Opening};
use crate::args::{MetricsFileArgs, NbdArgs, NbdTlsArgs};
use crate::conversation::certificate_roles::CertificateRoles;
use crate::conversation::certificates::{CertificateFiles, Certificates};
use crate::events;
use crate::exit::Failure;
use crate::metrics::{Agent, Watch};
use crate::service::Service;
use crate::signals::{self, Signals};
use crate::tasks::blocking;

/// How often the volume's end is looked for. Clients are told at once; this only ends the process.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Runs `remora volume nbd` until a signal, or until the volume has ended.
///
/// # Errors
/// A file or an address cannot be used, the volume cannot be opened, or it has ended.
pub(super) async fn run(args: NbdArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let (_watch, mut scrapes) = Watch::begin(Agent::Nbd, &args.metrics, &MetricsFileArgs::default()).await?;
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
            () = tokio::time::sleep(LOOK_AGAIN) => {
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
