//! The options of RDMA, which both ends have some of: what can be typed.

use std::net::IpAddr;

use clap::{Args, ValueEnum};
use remora_fabric::verbs::addresses_of;

use crate::units::{Size, UnitError};

/// Which RDMA devices an end uses, and how its packets are marked.
#[derive(Clone, Debug, Default, Args)]
pub struct RdmaEnd {
    /// Use the RDMA device that has this address of ours; may be repeated, one for each port that is to be used.
    /// Default: a source uses the one with the address of --listen, a reader the one to which the system's routes lead.
    #[arg(long, value_name = "ADDR", help_heading = "RDMA")]
    pub rdma_address: Vec<IpAddr>,

    /// Use the RDMA device of this name, as `remora devices` lists it, by an address of each of its active ports; may
    /// be repeated.
    #[arg(long, value_name = "NAME", conflicts_with = "rdma_address", help_heading = "RDMA")]
    pub rdma_device: Vec<String>,

    /// Use only this port of the device that `--rdma-device` names.
    #[arg(long, value_name = "N", requires = "rdma_device", value_parser = clap::value_parser!(u8).range(1..), help_heading = "RDMA")]
    pub rdma_port: Option<u8>,

    /// Traffic class of what is sent by RoCE (the IP type-of-service byte), by which switches tell lossless traffic.
    #[arg(long, value_name = "N", help_heading = "RDMA")]
    pub rdma_traffic_class: Option<u8>,

    /// Service level of what is sent, 0 to 15: on InfiniBand it chooses the virtual lane, on RoCE the Ethernet
    /// priority. Default: the one that the subnet manager, or the traffic class, assigns.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=15), help_heading = "RDMA")]
    pub rdma_service_level: Option<u8>,
}

impl RdmaEnd {
    /// Whether an option names the device to use.
    pub fn is_named(&self) -> bool {
        !self.rdma_address.is_empty() || !self.rdma_device.is_empty()
    }

    /// The addresses of the devices that were named; none if none was.
    ///
    /// # Errors
    /// A device of that name, or its port, has no address of this host.
    pub fn addresses(&self) -> Result<Vec<IpAddr>, remora_fabric::Error> {
        let mut addresses = self.rdma_address.clone();
        for device in &self.rdma_device {
            addresses.extend(addresses_of(device, self.rdma_port)?);
        }
        Ok(addresses)
    }
}

/// How a source offers RDMA.
#[derive(Clone, Debug, Default, Args)]
pub struct RdmaOffer {
    /// Do not offer RDMA, also where there are devices. (Where a device is named it is an error if RDMA can't be had.)
    #[arg(long, conflicts_with_all = ["rdma_address", "rdma_device"], help_heading = "RDMA")]
    pub no_rdma: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub end: RdmaEnd,
}

/// How a reader, a replica or a probe, reads by RDMA.
#[derive(Clone, Debug, Args)]
pub struct RdmaRead {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub end: RdmaEnd,

    /// Queue pairs per table, 1 to 8: more where a network spreads its load by flow, or where several ports are to be
    /// used.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8), help_heading = "RDMA")]
    pub rdma_queue_pairs: u8,

    /// Pieces posted per queue pair, 1 to 1024. The number of buffers is another matter (see --memory).
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "RDMA")]
    pub rdma_queue_depth: u32,

    /// READs in flight per queue pair, 1 to 16; both devices' limits lower it.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..=16), help_heading = "RDMA")]
    pub rdma_reads: u8,

    /// Longer reads are cut into pieces of this size, so that connections take turns: 4KiB to 1GiB.
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = parse_piece, help_heading = "RDMA")]
    pub rdma_piece: Size,

    /// How to wait for the device: `polling` keeps a processor busy, `event` sleeps at once, `poll-then-arm` polls for
    /// a moment first.
    #[arg(long, value_name = "HOW", default_value = "poll-then-arm", help_heading = "RDMA")]
    pub rdma_completion: CompletionChoice,

    /// How long `poll-then-arm` polls before it sleeps, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=1_000_000), help_heading = "RDMA")]
    pub rdma_poll_us: u64,
}

/// How to wait for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompletionChoice {
    /// Ask again and again.
    Polling,
    /// Sleep until the device interrupts.
    Event,
    /// Ask for a while, then sleep.
    PollThenArm,
}

fn parse_piece(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    let fits = (LEAST_PIECE..=LARGEST_PIECE).contains(&size.get()) && size.get().is_multiple_of(LEAST_PIECE);
    if fits { Ok(size) } else { Err("whole pages from 4KiB to 1GiB are needed".into()) }
}

/// A page: below it the requests cost more than the bytes.
const LEAST_PIECE: u64 = 4 << 10;
/// Every device takes as much in one request.
const LARGEST_PIECE: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_pages_within_reason() {
        assert!(parse_piece("256KiB").is_ok());
        for wrong in ["0", "5000", "2GiB"] {
            assert!(parse_piece(wrong).is_err(), "{wrong}");
        }
    }
}
