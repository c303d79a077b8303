//! The RDMA options of source and replica, and of the ends of a volume.

use std::net::IpAddr;

use clap::{Args, ValueEnum};
use remora_fabric::verbs::addresses_of;

use crate::units::{Size, UnitError};

/// Which RDMA devices an end uses, and how its packets are marked.
#[derive(Clone, Debug, Default, Args)]
pub struct RdmaEnd {
    /// Use the RDMA device that has this local address; may be repeated, once per port. Default: a source uses the
    /// device with the address of --listen, a reader the one to which the system's routes lead. What belongs to
    /// volumes (a server's copies, a writer's large writes) is offered only by devices that are named, and without
    /// encryption: that needs `--security none` and `--plaintext-network`.
    #[arg(long, value_name = "ADDR", help_heading = "RDMA")]
    pub rdma_address: Vec<IpAddr>,

    /// Use the RDMA device with this name, as `remora devices` lists it, by an address of each of its active ports; may
    /// be repeated.
    #[arg(long, value_name = "NAME", conflicts_with = "rdma_address", help_heading = "RDMA")]
    pub rdma_device: Vec<String>,

    /// Use only this port of the device that `--rdma-device` names.
    #[arg(long, value_name = "N", requires = "rdma_device", value_parser = clap::value_parser!(u8).range(1..), help_heading = "RDMA")]
    pub rdma_port: Option<u8>,

    /// Traffic class of RoCE packets (the IP type-of-service byte), by which switches recognise lossless traffic.
    #[arg(long, value_name = "N", help_heading = "RDMA")]
    pub rdma_traffic_class: Option<u8>,

    /// Service level of packets, 0 to 15: on InfiniBand it chooses the virtual lane, on RoCE the Ethernet priority.
    /// Default: the one that the subnet manager, or the traffic class, assigns.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=15), help_heading = "RDMA")]
    pub rdma_service_level: Option<u8>,
}

impl RdmaEnd {
    /// Whether an option names the device to use.
    pub fn is_named(&self) -> bool {
        !self.rdma_address.is_empty() || !self.rdma_device.is_empty()
    }

    /// The addresses of the named devices; empty if none was named.
    ///
    /// # Errors
    /// The named device, or its port, has no address of this host.
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
    /// Do not offer RDMA even if there are devices. (If an option names a device and RDMA is not available, that is an
    /// error.)
    #[arg(long, conflicts_with_all = ["rdma_address", "rdma_device"], help_heading = "RDMA")]
    pub no_rdma: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub end: RdmaEnd,
}

/// How a reader (a replica or a probe) reads over RDMA.
#[derive(Clone, Debug, Args)]
pub struct RdmaRead {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub end: RdmaEnd,

    /// Queue pairs per table, 1 to 8: more for a network that spreads its load by flow, or to use several ports.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8), help_heading = "RDMA")]
    pub rdma_queue_pairs: u8,

    /// Pieces posted per queue pair, 1 to 1024. The number of buffers follows from --memory.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "RDMA")]
    pub rdma_queue_depth: u32,

    /// READs in flight per queue pair, 1 to 16; the limits of both devices can lower it.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..=16), help_heading = "RDMA")]
    pub rdma_reads: u8,

    /// Reads that are longer are cut into pieces of this size, so that connections take turns: 4KiB to 1GiB.
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
    /// Poll without pause.
    Polling,
    /// Sleep until the device interrupts.
    Event,
    /// Poll for a while, then sleep.
    PollThenArm,
}

fn parse_piece(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    let fits = (LEAST_PIECE..=LARGEST_PIECE).contains(&size.get()) && size.get().is_multiple_of(LEAST_PIECE);
    if fits { Ok(size) } else { Err("the size must be whole pages, 4KiB to 1GiB".into()) }
}

/// The smallest piece, one page: below it the requests cost more than the bytes.
const LEAST_PIECE: u64 = 4 << 10;
/// The largest piece: every device accepts it in one request.
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
