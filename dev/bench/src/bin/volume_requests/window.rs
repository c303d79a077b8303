//! Window: how much may be under way, over a link whose answers are late.
//!
//! A published measurement of buffered writes over RDMA lost 30 to 58 % because 32 packets may be under way there. A
//! packet has 128 KiB, so that is 4 MiB. A cable of 10 Gb/s whose answers are 5 ms late holds 6.25 MB. Two processors
//! do not carry 10 Gb/s through client, link and server, so this link has 2 Gb/s and answers that are 25 ms late,
//! which is as much under way. 32 jobs with 1 MiB each are 256 packets: more than the small window takes, and fewer
//! than the large one.

use std::time::Duration;

use remora_bench::copies::new_volume;
use remora_bench::{Run, Sample};
use remora_lab::link::Link;
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Volume};
use remora_volume::server::{Server, ServerOptions};

use crate::load::{fill, rate};
use crate::{Failure, PROMISED, Scene, sample};

/// A volume for each window, on one server behind the link.
pub(crate) struct Windows {
    volumes: Vec<(&'static str, Volume)>,
    server: Server,
    _link: Link,
    staging: u64,
    span: Duration,
}

impl Windows {
    pub(crate) fn new(span: Duration) -> Result<Windows, Failure> {
        let options = ServerOptions { shm: false, ..ServerOptions::default() };
        let server = Server::start(&"tcp:127.0.0.1:0".parse()?, &options)?;
        let Address::Tcp(at) = *server.address() else { return Err("a server without a port".into()) };
        let link = Link::new(at, DELAY, RATE)?;
        let mut volumes = Vec::new();
        for size in [SMALL, LARGE, ADAPTIVE] {
            let shape = new_volume(&[server.address().clone()], 1, BLOCKS)?;
            let settings = ClientOptions { window: size.parse()?, ..ClientOptions::default() };
            let volume = Volume::open(shape, &[Address::Tcp(link.address())], &settings)?;
            fill(&volume)?;
            rate(&volume, PACKET_BLOCKS, span)?; // until the window has grown
            volumes.push((size, volume));
        }
        Ok(Windows { volumes, server, _link: link, staging: options.staging, span })
    }
}

impl Scene for Windows {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let mut samples = Vec::new();
        for (size, volume) in &self.volumes {
            samples.push(sample(size, WRITES, round, rate(volume, PACKET_BLOCKS, self.span)? / 1e6));
        }
        let (_, most) = self.server.staging();
        samples.push(sample(SERVER, STAGING, round, most as f64 / f64::from(1 << 20)));
        samples.push(sample(PROMISED, STAGING, round, self.staging as f64 / f64::from(1 << 20)));
        Ok(samples)
    }

    fn compare(&self, run: &mut Run) {
        run.compare((ADAPTIVE, WRITES), (LARGE, WRITES), Some(ADAPTIVE_LEAST));
        run.compare_less((SMALL, WRITES), (LARGE, WRITES), Some(SMALL_MOST));
        run.compare_less((SERVER, STAGING), (PROMISED, STAGING), Some(1.0));
    }
}

const SMALL: &str = "fixed:32";
const LARGE: &str = "fixed:1024";
const ADAPTIVE: &str = "adaptive";
const SERVER: &str = "the server";

const WRITES: &str = "write 128 KiB, 2 Gb/s and answers after 25 ms, MB/s";
const STAGING: &str = "most that writers had under way, MiB";

/// The adaptive window loses next to nothing, and the small one loses what the published measurement lost.
const ADAPTIVE_LEAST: f64 = 0.95;
const SMALL_MOST: f64 = 0.7;

/// The link.
const RATE: f64 = 250e6;
const DELAY: Duration = Duration::from_millis(25);

/// 128 KiB.
const PACKET_BLOCKS: u32 = 32;

/// 64 MiB.
const BLOCKS: u64 = 16 * 1024;
