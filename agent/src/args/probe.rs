//! The arguments of `remora probe`.

use std::time::Duration;

use clap::Args;

use super::{AskArgs, RdmaRead, TransportChoice};
use crate::{
    exit::{self, Code},
    units::{Size, UnitError, parse_duration},
};

/// The arguments of `remora probe`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct ProbeArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ask: AskArgs,

    /// Print one JSON object instead of the tables.
    #[arg(long)]
    pub json: bool,

    /// Measure this transport only; `auto` measures each of them.
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "What to measure")]
    pub transport: TransportChoice,

    /// Bytes of one read, 1 to 4MiB; several values are separated by commas.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_read, default_value = "8,64,512,4KiB,64KiB,256KiB,1MiB,4MiB", help_heading = "What to measure")]
    pub sizes: Vec<Size>,

    /// Reads in flight at once, 1 to 16; several values are separated by commas. A replica has up to 16.
    #[arg(long, value_name = "DEPTHS", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=16), default_value = "1,4,16", help_heading = "What to measure")]
    pub depths: Vec<u8>,

    /// How long to read each size at each depth, 1ms to 10s.
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_time, help_heading = "What to measure")]
    pub time: Duration,

    /// Time limit of all measurements, without connecting. Figures that are missing then are left out. Up to 1h.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_limit, help_heading = "What to measure")]
    pub limit: Duration,

    /// TCP connections for reading.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=4), help_heading = "TCP")]
    pub lanes: u8,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaRead,
}

fn parse_read(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    if (1..=LARGEST_READ).contains(&size.get()) { Ok(size) } else { Err("a read has 1 byte to 4MiB".into()) }
}

fn parse_time(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_millis(1), Duration::from_secs(10), "the time must be 1ms to 10s")
}

fn parse_limit(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_millis(100), Duration::from_secs(3600), "the time must be 100ms to 1h")
}

fn within(text: &str, least: Duration, most: Duration, sentence: &str) -> Result<Duration, String> {
    let time = parse_duration(text).map_err(|error| error.to_string())?;
    if (least..=most).contains(&time) { Ok(time) } else { Err(sentence.into()) }
}

/// The most bytes that a replica reads by one request.
const LARGEST_READ: u64 = 4 << 20;

const ABOUT: &str = "\
Measures the latency and the bandwidth of reads of a source's memory, over shared memory, RDMA and TCP, for reads of 8 bytes to 4 MiB \
and 1 to 16 reads at once. The source needs no data and takes no snapshot: it exports a scratch region of 64 MiB, and revokes it when \
the probe ends. For a transport that cannot be used, the probe prints the reason. The probe keeps the network busy while it runs.";

fn more() -> String {
    format!(
        "\
Examples:
  All transports, as tables:
    remora probe --source 10.0.0.5:7379 --token-file token
  RDMA by one device, whole slots, for a script:
    remora probe --source 10.0.0.5:7379 --token-file token --transport verbs \\
      --rdma-device mlx5_0 --sizes 4MiB --depths 16 --time 1s --json

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Source, Code::Interrupted, Code::Local])
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_kept_within_what_can_be_measured() {
        assert!(parse_read("1").is_ok() && parse_read("4MiB").is_ok());
        assert!(parse_read("0").is_err() && parse_read("5MiB").is_err());
        assert!(parse_time("100ms").is_ok() && parse_time("11s").is_err() && parse_time("0").is_err());
        assert!(parse_limit("1h").is_ok() && parse_limit("2h").is_err());
    }
}
