//! `remora volume serve`.

use remora_messenger::Address;
use remora_volume::server::{Server, ServerOptions};

use super::blocking;
use super::servers::Protection;
use crate::args::ServeArgs;
use crate::exit::Failure;
use crate::signals::Signals;

/// Runs `remora volume serve` until a signal.
///
/// # Errors
/// A file cannot be used, or the address cannot be listened at.
pub(super) async fn run(args: ServeArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let protection = Protection::read(&args.protection)?;
    let _rereading = protection.tokens.read_again_on_hangup()?;
    let (listen, security) = (protection.address("--listen", args.listen)?, protection.of_connections()?);
    let options =
        ServerOptions { memory: args.memory.get(), staging: args.staging.get(), security, ..ServerOptions::default() };
    let server = Server::start(&listen, &options).map_err(|error| {
        Failure::local(format!("cannot listen on {}: {error}; set another address with --listen", args.listen))
    })?;
    let address = match server.address() {
        Address::Tcp(address) | Address::Tls(address) => *address,
        _ => args.listen,
    };
    let protection = protection.text(args.listen);
    tracing::info!(listening = %address, memory = %args.memory, protection, "volume server ready");
    let signal = signals.next().await;
    tracing::info!("stopped by {signal}: the copies in this server's memory are gone");
    blocking(move || {
        server.stop();
        Ok(())
    })
    .await
}
