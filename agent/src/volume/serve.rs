//! `remora volume serve`.

use std::io::ErrorKind;

use remora_messenger::Address;
use remora_volume::server::{Server, ServerOptions};

use super::metrics::answer_server;
use super::servers::Protection;
use crate::args::{MetricsFileArgs, ServeArgs};
use crate::events;
use crate::exit::Failure;
use crate::host_memory;
use crate::metrics::{Agent, Watch};
use crate::service::Service;
use crate::signals::Signals;
use crate::tasks::blocking;

/// Runs `remora volume serve` until a signal.
///
/// # Errors
/// A file cannot be used, or the address cannot be listened at.
pub(super) async fn run(args: ServeArgs) -> Result<(), Failure> {
    host_memory::check("--memory", args.memory)?;
    let mut signals = Signals::catch()?;
    let (_watch, mut scrapes) = Watch::begin(Agent::Serve, &args.metrics, &MetricsFileArgs::default()).await?;
    let protection = Protection::read(&args.protection)?;
    let _rereading = protection.tokens.read_again_on_hangup()?;
    let (listen, security) = (protection.address("--listen", args.listen)?, protection.of_connections()?);
    let (memory, staging) = (args.memory.get(), args.staging.get());
    if args.lanes.is_some() {
        protection.check_plain("--lanes", std::slice::from_ref(&listen))?;
    }
    let options = ServerOptions {
        memory,
        staging,
        security,
        shm: !args.no_shm,
        lanes: args.lanes,
        rdma: protection.rdma(&args.rdma)?,
        store: args.store.clone(),
        ..ServerOptions::default()
    };
    let started = blocking(move || Ok(Server::start(&listen, &options)));
    let started = scrapes.meanwhile("the copies of the store are being read", started).await?;
    let server = started.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable => {
            Failure::local(format!("cannot listen on {}: {error}; set another address with --listen", args.listen))
        }
        ErrorKind::Unsupported => Failure::refused(error.to_string()),
        _ => Failure::local(format!("cannot start the server at {}: {error}", args.listen)),
    })?;
    let address = match server.address() {
        Address::Tcp(address) | Address::Tls(address) => *address,
        _ => args.listen,
    };
    let protection = protection.text(args.listen);
    let store = args.store.as_ref().map_or("none".to_owned(), |store| store.display().to_string());
    tracing::info!(event = events::VOLUME_SERVER_READY, listening = %address, memory = %args.memory, protection, store, "volume server ready");
    let service = Service::ready(&format!("serving volumes at {address}"));
    let signal = loop {
        tokio::select! {
            signal = signals.next() => break signal,
            scrape = scrapes.next() => answer_server(&server, scrape),
        }
    };
    drop(service);
    match args.store {
        Some(_) => tracing::info!("stopped by {signal}: the copies are in {store}"),
        None => tracing::info!("stopped by {signal}: the copies in this server's memory are gone"),
    }
    blocking(move || {
        server.stop();
        Ok(())
    })
    .await
}
