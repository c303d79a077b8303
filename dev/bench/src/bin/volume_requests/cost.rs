//! Cost: processor time of a write, and reads in memory beside `memcpy`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_bench::copies::{CopyServer, Place, new_volume};
use remora_bench::{Run, Sample, cpu};
use remora_volume::client::{ClientOptions, Volume};
use remora_volume::shape::BLOCK_BYTES;

use crate::load::{MIB_BLOCKS, fill};
use crate::{Failure, PROMISED, Scene, sample};

/// Volumes of one copy, and one 4 KiB write after the other.
pub(crate) struct Cost {
    subjects: Vec<(&'static str, CopyServer, Volume)>,
    span: Duration,
    _folder: tempfile::TempDir,
}

impl Cost {
    pub(crate) fn new(span: Duration) -> Result<Cost, Failure> {
        let folder = tempfile::tempdir()?;
        let socket = format!("shm:{}", folder.path().join("copy").display());
        let mut subjects = Vec::new();
        for (name, address) in [("by TCP", "tcp:127.0.0.1:0"), ("by shared memory", &socket)] {
            let server = CopyServer::start(address, Place::default())?;
            let volume = open(&server)?;
            subjects.push((name, server, volume));
        }
        Ok(Cost { subjects, span, _folder: folder })
    }
}

const WRITE_COST: &str = "write 4 KiB × 1, µs of processor";

/// For client and one server.
const WRITE_COST_LIMIT: f64 = 20.0;

impl Scene for Cost {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let mut samples = vec![sample(PROMISED, WRITE_COST, round, WRITE_COST_LIMIT)];
        let data = Bytes::from(vec![9; BLOCK_BYTES]);
        for (name, server, volume) in &self.subjects {
            let (client, served) = (cpu::of_self()?, server.process.cpu_seconds()?);
            let (began, mut count) = (Instant::now(), 0_u32);
            while began.elapsed() < self.span {
                volume.write(u64::from(count) * 7919 % BLOCKS, data.clone())?;
                count += 1;
            }
            let seconds = began.elapsed().as_secs_f64();
            let (client, served) = ((cpu::of_self()? - client).as_secs_f64(), server.process.cpu_seconds()? - served);
            let per_write = (client + served) * 1e6 / f64::from(count);
            let costs = Sample {
                reader_cpu_seconds: client,
                source_cpu_seconds: served,
                gigabytes: f64::from(count) * BLOCK_BYTES as f64 / 1e9,
                ..sample(name, WRITE_COST, round, per_write)
            };
            samples.extend([costs, sample(name, "write 4 KiB × 1, a second", round, f64::from(count) / seconds)]);
        }
        Ok(samples)
    }

    fn compare(&self, run: &mut Run) {
        for (name, ..) in &self.subjects {
            run.compare_less((name, WRITE_COST), (PROMISED, WRITE_COST), Some(1.0));
        }
    }
}

/// A volume of one copy, in memory that this process can map.
pub(crate) struct Reading {
    volume: Volume,
    _server: CopyServer,
    /// As much memory of this process, out of which `memcpy` copies.
    floor: Vec<u8>,
    span: Duration,
}

impl Reading {
    pub(crate) fn new(span: Duration) -> Result<Reading, Failure> {
        let server = CopyServer::start("tcp:127.0.0.1:0", Place::default())?;
        let volume = open(&server)?;
        Ok(Reading { volume, _server: server, floor: vec![7; BLOCKS as usize * BLOCK_BYTES], span })
    }

    /// Bytes a second of `read`, which gets a place of 1 MiB in turn.
    fn rate(&self, mut read: impl FnMut(u64) -> Result<(), Failure>) -> Result<f64, Failure> {
        let (began, mut count) = (Instant::now(), 0_u64);
        while began.elapsed() < self.span {
            read(count * 97 % (BLOCKS / u64::from(MIB_BLOCKS)))?;
            count += 1;
        }
        Ok(count as f64 * MIB_BYTES as f64 / began.elapsed().as_secs_f64())
    }
}

const MIB_BYTES: usize = MIB_BLOCKS as usize * BLOCK_BYTES;

const READ_RATE: &str = "read 1 MiB × 1, GB/s";
const IN_PLACE: &str = "in the server's memory";
const COPIED: &str = "memcpy";

/// Of what `memcpy` copies.
const READ_LEAST: f64 = 0.8;

impl Scene for Reading {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let before = self.volume.read_counts();
        let ours = self.rate(|place| {
            black_box(self.volume.read(place * u64::from(MIB_BLOCKS), MIB_BLOCKS)?);
            Ok(())
        })?;
        let after = self.volume.read_counts();
        if (after.far, after.asked) != (before.far, before.asked) {
            return Err(format!("reads were not answered out of the server's memory: {after:?}").into());
        }
        let mut into = vec![0; MIB_BYTES];
        let copied = self.rate(|place| {
            let from = place as usize * MIB_BYTES;
            into.copy_from_slice(&self.floor[from..from + MIB_BYTES]);
            black_box(&into);
            Ok(())
        })?;
        Ok([(IN_PLACE, ours), (COPIED, copied)].map(|(who, rate)| sample(who, READ_RATE, round, rate / 1e9)).into())
    }

    fn compare(&self, run: &mut Run) {
        run.compare((IN_PLACE, READ_RATE), (COPIED, READ_RATE), Some(READ_LEAST));
    }
}

fn open(server: &CopyServer) -> Result<Volume, Failure> {
    let servers = [server.address.clone()];
    let shape = new_volume(&servers, 1, BLOCKS)?;
    let volume = Volume::open(shape, &servers, &ClientOptions::default())?;
    fill(&volume)?;
    // Until the memory of the server is mapped.
    let (before, deadline) = (volume.read_counts().here, Instant::now() + MAPPED_LIMIT);
    while volume.read_counts().here == before {
        volume.read(0, 1)?;
        if Instant::now() > deadline {
            return Err("the server's memory cannot be read".into());
        }
    }
    Ok(volume)
}

/// 256 MiB: more than the processor's caches hold.
const BLOCKS: u64 = 64 * 1024;

/// Until a server's memory is mapped: a question, and passing a descriptor.
const MAPPED_LIMIT: Duration = Duration::from_secs(5);
