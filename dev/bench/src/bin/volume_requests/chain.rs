//! Chain: large writes of three copies over cables of 1 Gb/s, by each way.

use std::time::Duration;

use remora_bench::copies::{CopyServer, Place, new_volume};
use remora_bench::{Run, Sample};
use remora_lab::{Host, Net, Shape as Cable};
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Volume, Writes};
use remora_volume::shape::{BLOCK_BYTES, Shape};

use crate::load::{MIB_BLOCKS, fill, rate};
use crate::{Failure, PROMISED, Scene, sample};

/// A writer's host, and three with a server each.
pub(crate) struct Cables {
    writer: Host,
    _servers: Vec<(Host, CopyServer)>,
    addresses: Vec<Address>,
    shape: Shape,
    span: Duration,
}

impl Cables {
    pub(crate) fn new(span: Duration) -> Result<Cables, Failure> {
        let net = Net::new()?;
        let host = |name: &str| {
            let host = net.host(name)?;
            host.shape(Cable::bits(GIGABIT))?;
            Ok::<Host, Failure>(host)
        };
        let writer = host("writer")?;
        let mut servers = Vec::new();
        for name in ["first", "second", "third"] {
            let host = host(name)?;
            let place = Place { host: Some(&host), is_far: true };
            let server = CopyServer::start(&format!("tcp:{}:0", host.address()), place)?;
            servers.push((host, server));
        }
        let addresses: Vec<Address> = servers.iter().map(|(_, server)| server.address.clone()).collect();
        let made = writer.within(|| {
            let shape = new_volume(&addresses, HELD, BLOCKS).map_err(|error| error.to_string())?;
            let volume = Volume::open(shape, &addresses, &ClientOptions::default());
            volume.and_then(|volume| fill(&volume)).map_err(|error| error.to_string())?;
            Ok::<Shape, String>(shape)
        })?;
        Ok(Cables { writer, _servers: servers, addresses, shape: made?, span })
    }

    /// Bytes a second, and bytes that leave the writer's host for each byte that is written.
    fn by(&self, writes: Writes) -> Result<(f64, f64), Failure> {
        let options = ClientOptions { writes, ..ClientOptions::default() };
        let measured = self.writer.within(|| {
            let volume = Volume::open(self.shape, &self.addresses, &options).map_err(|error| error.to_string())?;
            // Until the servers pull, and the window has grown.
            rate(&volume, MIB_BLOCKS, WARM).map_err(|error| error.to_string())?;
            let counts = volume.write_counts();
            if (counts.pulled > 0) != (writes != Writes::Inline) {
                return Err(format!("the blocks took another way than {writes}: {counts:?}"));
            }
            let before = self.writer.traffic().map_err(|error| error.to_string())?;
            let written = volume.write_counts();
            let rate = rate(&volume, MIB_BLOCKS, self.span).map_err(|error| error.to_string())?;
            let sent = self.writer.traffic().map_err(|error| error.to_string())?.since(before).sent;
            let counts = volume.write_counts();
            // Each write counts once for each of three servers.
            let writes = (counts.inline + counts.pulled - written.inline - written.pulled) / 3;
            Ok((rate, sent as f64 / (writes * u64::from(MIB_BLOCKS) * BLOCK_BYTES as u64) as f64))
        })?;
        Ok(measured?)
    }
}

impl Scene for Cables {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let mut samples = vec![sample(PROMISED, BYTES_OUT, round, CHAIN_BYTES_MOST)];
        for (name, writes) in [(INLINE, Writes::Inline), (STAR, Writes::Pulled), (CHAIN, Writes::Chain)] {
            let (rate, bytes) = self.by(writes)?;
            samples.extend([sample(name, WRITES, round, rate / 1e6), sample(name, BYTES_OUT, round, bytes)]);
        }
        Ok(samples)
    }

    fn compare(&self, run: &mut Run) {
        run.compare((CHAIN, WRITES), (STAR, WRITES), Some(CHAIN_RATE_LEAST));
        run.compare((CHAIN, WRITES), (INLINE, WRITES), None);
        run.compare_less((CHAIN, BYTES_OUT), (PROMISED, BYTES_OUT), Some(1.0));
    }
}

const INLINE: &str = "inline";
const STAR: &str = "pulled by each server";
const CHAIN: &str = "along a chain";

const WRITES: &str = "write 1 MiB, three copies, two hold it, 1 Gb/s, MB/s";
const BYTES_OUT: &str = "bytes out of the writer's host for each byte";

const CHAIN_RATE_LEAST: f64 = 2.5;
const CHAIN_BYTES_MOST: f64 = 1.1;

const GIGABIT: u64 = 1_000_000_000;

/// Copies that hold a write before it is answered.
const HELD: usize = 2;

/// 128 MiB.
const BLOCKS: u64 = 32 * 1024;

/// The outbox is reached in a second, and a window that grows has doubled a few times.
const WARM: Duration = Duration::from_millis(1500);
