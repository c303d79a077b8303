//! Rivals that others wrote, as they are installed. Where one is missing, its column is missing, and the run says so.

use std::io;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::{Case, Outcome};

/// iperf3's rate with writes of the request's size: bytes per second in one direction, nothing answered, as an [`Outcome`]
/// whose requests are its writes. `None` if it is not installed.
///
/// # Errors
/// It cannot be run, or says what nobody understands.
pub fn iperf3(case: &Case, time: Duration) -> io::Result<Option<Outcome>> {
    let port = free_port()?.to_string();
    let server =
        Command::new("iperf3").args(["-s", "-1", "-p", &port]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let _server = match server {
        Ok(child) => Ends(child),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let seconds = time.as_secs().max(1).to_string();
    let (streams, length) = (case.connections.to_string(), case.request.to_string());
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20)); // until it listens
        let arguments = ["-c", "127.0.0.1", "-p", &port, "-t", &seconds, "-P", &streams, "-l", &length, "-J"];
        let output = Command::new("iperf3").args(arguments).output()?;
        if output.status.success() {
            return parse_iperf3(&output.stdout, case).map(Some);
        }
    }
    Err(io::Error::other("iperf3 does not reach its own server"))
}

fn parse_iperf3(json: &[u8], case: &Case) -> io::Result<Outcome> {
    let end: Value = serde_json::from_slice(json)?;
    let received = &end["end"]["sum_received"];
    let share = &end["end"]["cpu_utilization_percent"];
    let number = |value: &Value| value.as_f64().ok_or_else(|| io::Error::other("iperf3 says no figures"));
    let (bytes, seconds) = (number(&received["bytes"])?, number(&received["seconds"])?);
    Ok(Outcome {
        requests: (bytes / case.request as f64) as u64,
        seconds,
        latency: [0.0; 4],
        client_cpu: number(&share["host_total"])? / 100.0 * seconds,
        server_cpu: number(&share["remote_total"])? / 100.0 * seconds,
    })
}

/// A port that nobody listens on at the moment.
fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A child that is ended when we are done with it.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended by itself
        let _ = self.0.wait();
    }
}
