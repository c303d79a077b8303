//! The speed of a network, measured by an independent program: iperf3.

use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Doing, Error, Result};
use crate::net::Host;
use crate::process::Process;
use crate::scratch;

/// Bytes per second that one TCP connection carries from one host to another; `None` for this machine's loopback.
///
/// # Errors
/// [`Error::Missing`] if iperf3 is not installed.
pub fn bandwidth(from_to: Option<(&Host, &Host)>, time: Duration) -> Result<f64> {
    let (from, to) = from_to.unzip();
    let address = to.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), Host::address).to_string();
    let port = scratch::free_port()?.to_string();
    let mut server = iperf3(to, &["-s", "-1", "-p", &port])?;
    server.stdout(Stdio::null()).stderr(Stdio::null());
    let (_server, _) = Process::start("iperf3", server).map_err(|error| missing(&error))?;

    let seconds = time.as_secs().max(1).to_string();
    let deadline = Instant::now() + START_TIME;
    loop {
        // The server does not say when it listens, so the client tries until it does.
        thread::sleep(TRY_EVERY);
        let mut client = iperf3(from, &["-c", &address, "-p", &port, "-t", &seconds, "-J"])?;
        let output = client.output().map_err(|error| missing(&error))?;
        if output.status.success() {
            return received(&output.stdout);
        }
        if Instant::now() > deadline {
            let tail = String::from_utf8_lossy(&output.stdout).into_owned();
            return Err(Error::TooLate { what: format!("iperf3 to reach {address}"), waited: START_TIME, tail });
        }
    }
}

fn iperf3(on: Option<&Host>, args: &[&str]) -> Result<Command> {
    let mut command = Command::new("iperf3");
    command.args(args).stdin(Stdio::null());
    if let Some(host) = on {
        host.enter(&mut command)?;
    }
    Ok(command)
}

fn received(json: &[u8]) -> Result<f64> {
    let report: serde_json::Value =
        serde_json::from_slice(json).map_err(std::io::Error::from).doing(|| "read iperf3")?;
    let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
    bits.map(|bits| bits / 8.0).ok_or_else(|| Error::Garbled(String::from_utf8_lossy(json).into_owned()))
}

fn missing(error: &dyn std::fmt::Display) -> Error {
    Error::Missing { what: format!("the program iperf3 ({error})"), how: "run `make setup`".into() }
}

/// How long the server may take to listen.
const START_TIME: Duration = Duration::from_secs(5);

/// Interval between two tries.
const TRY_EVERY: Duration = Duration::from_millis(50);
