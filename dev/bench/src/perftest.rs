//! The rivals of RDMA: `ib_read_bw`, `ib_read_lat`, `ib_send_bw` and `ib_send_lat` of perftest, between the same
//! devices, in the same run.
//!
//! They measure the cards and libraries with as little other code as possible; the difference to a transport is the
//! cost of its own code. Each run starts a separate server and client, as perftest requires.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};

/// The two ends of a measurement over RDMA.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ends {
    /// Address of the source's device.
    #[arg(long)]
    pub rdma_source: Option<IpAddr>,
    /// Address of the reader's device.
    #[arg(long)]
    pub rdma_reader: Option<IpAddr>,
    /// Name of the source's device, for perftest.
    #[arg(long, default_value = "rxe1")]
    pub rdma_source_device: String,
    /// Name of the reader's device, for perftest.
    #[arg(long, default_value = "rxe0")]
    pub rdma_reader_device: String,
}

impl Ends {
    /// Bytes per second of READs of `size` bytes, `depth` of them in flight, `count` in all.
    ///
    /// # Errors
    /// perftest is not installed, or failed.
    pub fn bandwidth(&self, size: u32, depth: usize, count: u64) -> io::Result<f64> {
        let (depth, count) = (depth.to_string(), count.max(5).to_string());
        // Columns: bytes, iterations, peak, average in MiB/s, messages.
        let mebibytes = self.figure(3, "ib_read_bw", size, &["-t", &depth, "-o", &depth, "-n", &count])?;
        Ok(mebibytes * 1048576.0)
    }

    /// Bytes per second of SENDs of `size` bytes, `depth` of them posted, `count` in all.
    ///
    /// # Errors
    /// As for [`Ends::bandwidth`].
    pub fn send_bandwidth(&self, size: u32, depth: usize, count: u64) -> io::Result<f64> {
        let (depth, count) = (depth.to_string(), count.max(5).to_string());
        let mebibytes = self.figure(3, "ib_send_bw", size, &["-t", &depth, "-n", &count])?;
        Ok(mebibytes * 1048576.0)
    }

    /// The typical time of a SEND of `size` bytes, one way, in microseconds.
    ///
    /// # Errors
    /// As for [`Ends::bandwidth`].
    pub fn send_latency(&self, size: u32, count: u64) -> io::Result<f64> {
        self.figure(4, "ib_send_lat", size, &["-n", &count.max(5).to_string()])
    }

    /// The typical time of a READ of `size` bytes, in microseconds.
    ///
    /// # Errors
    /// As for [`Ends::bandwidth`].
    pub fn latency(&self, size: u32, count: u64) -> io::Result<f64> {
        // Columns: bytes, iterations, shortest, longest, typical, ...
        self.figure(4, "ib_read_lat", size, &["-n", &count.max(5).to_string()])
    }

    /// One column of the output. The clock's calibration sometimes fails on a busy machine, and then perftest prints
    /// `inf`: try again.
    fn figure(&self, number: usize, program: &str, size: u32, more: &[&str]) -> io::Result<f64> {
        let mut tried = Err(io::Error::other("never tried"));
        for _ in 0..TRIES {
            tried = column(&self.run(program, size, more)?, number);
            if tried.is_ok() {
                break;
            }
        }
        tried
    }

    /// Runs server and client, and returns the line of the client's table.
    fn run(&self, program: &str, size: u32, more: &[&str]) -> io::Result<String> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let command = |device: &str| {
            let mut command = Command::new(program);
            // -x 1: the GID of the IPv4 address; -F: no complaint about the processor's clock.
            command.args(["-d", device, "-x", "1", "-F", "-p", &port, "-s", &size.to_string()]).args(more);
            command
        };
        let mut server = command(&self.rdma_source_device);
        let _server = Reaped(server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let said = command(&self.rdma_reader_device).arg("127.0.0.1").output()?;
            let text = String::from_utf8_lossy(&said.stdout);
            let wanted = size.to_string();
            let found = text.lines().find(|line| line.split_whitespace().next() == Some(&wanted));
            match found {
                Some(line) if said.status.success() => return Ok(line.to_owned()),
                // Until the server listens.
                _ if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(100)),
                _ => {
                    let text = format!("{program} failed: {text}{}", String::from_utf8_lossy(&said.stderr));
                    return Err(io::Error::other(text));
                }
            }
        }
    }
}

/// Number of attempts if the first give no figure.
const TRIES: usize = 4;

/// How long perftest's server may take to listen.
const START_LIMIT: Duration = Duration::from_secs(20);

fn column(line: &str, number: usize) -> io::Result<f64> {
    let word = line.split_whitespace().nth(number).and_then(|word| word.parse::<f64>().ok());
    word.filter(|value| value.is_finite() && *value > 0.0)
        .ok_or_else(|| io::Error::other(format!("no figure in {line:?}")))
}

/// A child that ends with its owner.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
