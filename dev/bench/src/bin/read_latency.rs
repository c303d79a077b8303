//! Latency of single reads, one after the other: shm against memcpy, tcp against the simplest server over TCP.
//!
//! The rival of tcp is a loop of `read_exact` and `write_all` over a blocking socket, from private memory of the same
//! size, without generations, bounds, time-outs or more than one read at a time. It is the lowest possible cost of a
//! transport over two sockets.
//!
//! Each round measures every subject and its rival in turn. A figure is the median latency of a round; the 99th
//! percentile is a separate subject.
//!
//! ```text
//! cargo run --release -p remora-bench --bin read_latency -- --rounds 5 --out bench/runs
//! ```

use std::{
    hint::black_box,
    io::{Read, Write},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Parser;
use remora_bench::source::{Ends, Source, SourceOptions, be_the_source_if_asked, warm_memory};
use remora_bench::{Keep, Run, Sample, bytes, cpu, quantile};
use remora_fabric::{Completion, Memory, Peer, ReadRequest};

/// Latency of single reads of shm and tcp against memcpy and plain blocking sockets.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds per measurement.
    #[arg(long, default_value_t = 500)]
    millis: u64,
    /// Measure only these subjects.
    #[arg(long, value_delimiter = ',', default_value = "shm,tcp")]
    transports: Vec<String>,
    /// Sizes of a read, in bytes.
    #[arg(long, value_delimiter = ',', default_value = "64,4096,65536,1048576")]
    sizes: Vec<u32>,
    /// Length of the region in MiB.
    #[arg(long, default_value_t = 256)]
    region_mib: u64,
    #[command(flatten)]
    rdma: Ends,
    #[command(flatten)]
    keep: Keep,
}

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    be_the_source_if_asked();
    let options = Options::parse();
    let mut bench = Bench::new(&options)?;
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        for size in &options.sizes {
            bench.round(round, *size)?;
        }
    }
    bench.compare();
    Ok(options.keep.finish(&bench.run)?)
}

type Failure = Box<dyn std::error::Error>;

struct Bench<'a> {
    options: &'a Options,
    run: Run,
    source: Source,
    sink: Arc<Memory>,
    /// The source of memcpy: ordinary memory of this process.
    plain: Vec<u8>,
}

impl Bench<'_> {
    fn new(options: &Options) -> Result<Bench<'_>, Failure> {
        let region_bytes = options.region_mib << 20;
        let largest = u64::from(options.sizes.iter().copied().max().unwrap_or(1));
        if largest == 0 || largest > region_bytes {
            return Err("a read must have bytes and fit into the region: give a larger --region-mib".into());
        }
        let wish = SourceOptions { region_bytes, depth: 1, rdma: options.rdma.clone() };
        Ok(Bench {
            options,
            run: Run::new("read_latency", "µs"),
            source: Source::start(&wish)?,
            sink: warm_memory("bench-sink", largest)?,
            plain: (0..region_bytes).map(|byte| (byte / 4096 % 251) as u8).collect(),
        })
    }

    fn round(&mut self, round: usize, size: u32) -> Result<(), Failure> {
        let mut completions = Vec::with_capacity(1);
        let (measures_shm, measures_tcp) = (self.measures("shm"), self.measures("tcp"));
        if measures_shm {
            let mut into = vec![1; size as usize];
            let memcpy = self.options.time(|offset| {
                let from = self.plain.get(offset as usize..).and_then(|rest| rest.get(..size as usize));
                black_box(&mut into).copy_from_slice(black_box(from.ok_or("beyond the memory")?));
                Ok(())
            });
            self.note("memcpy", size, round, memcpy?, 0.0);
            let mut peer = self.source.connect_shm(&self.sink)?;
            let shm = self.options.time(|offset| read_one(peer.as_mut(), offset, size, &mut completions))?;
            self.note("shm", size, round, shm, 0.0);
        }
        if measures_tcp {
            let mut stream = self.source.connect_plain()?;
            let mut into = vec![0; size as usize];
            let before = self.source.cpu()?;
            let plain = self.options.time(|_| {
                stream.write_all(&size.to_le_bytes())?;
                Ok(stream.read_exact(&mut into)?)
            })?;
            let source_cpu = (self.source.cpu()? - before).as_secs_f64();
            self.note("plain tcp", size, round, plain, source_cpu);
            let mut peer = self.source.connect_tcp(&self.sink)?;
            let before = self.source.cpu()?;
            let tcp = self.options.time(|offset| read_one(peer.as_mut(), offset, size, &mut completions))?;
            let source_cpu = (self.source.cpu()? - before).as_secs_f64();
            self.note("tcp", size, round, tcp, source_cpu);
        }
        if self.measures("verbs") {
            // Its typical time stands for the median; it does not report processor time.
            let micros = self.options.rdma.latency(size, LATENCY_READS)?;
            let rival = Figures { sorted_micros: vec![micros], reader_cpu: Duration::ZERO };
            self.note("ib_read_lat", size, round, rival, 0.0);
            let mut peer = self.source.connect_verbs(&self.sink)?;
            let before = self.source.cpu()?;
            // The rival reads the same place each time.
            let verbs = self.options.time(|_| read_one(peer.as_mut(), 0, size, &mut completions))?;
            let source_cpu = (self.source.cpu()? - before).as_secs_f64();
            self.note("verbs", size, round, verbs, source_cpu);
        }
        Ok(())
    }

    fn measures(&self, transport: &str) -> bool {
        self.options.transports.iter().any(|name| name == transport)
    }

    fn note(&mut self, subject: &str, size: u32, round: usize, figures: Figures, source_cpu_seconds: f64) {
        let Figures { sorted_micros, reader_cpu } = figures;
        let gigabytes = sorted_micros.len() as f64 * f64::from(size) / 1e9;
        for (percent, suffix) in [(0.5, ""), (0.99, ", p99")] {
            let value = quantile(&sorted_micros, percent).unwrap_or(f64::NAN);
            let sample = Sample::new(subject, format!("{}{suffix}", bytes(size.into())), round, value);
            self.run.samples.push(sample.cost(reader_cpu.as_secs_f64(), source_cpu_seconds, gigabytes));
        }
    }

    /// The ratio is a multiple of the rival's time: smaller is better.
    fn compare(&mut self) {
        for size in &self.options.sizes {
            let case = bytes((*size).into());
            for (ours, rival) in [("shm", "memcpy"), ("tcp", "plain tcp"), ("verbs", "ib_read_lat")] {
                if self.measures(ours) {
                    let promise = (ours == "verbs").then_some(VERBS_AT_MOST);
                    self.run.compare_less((ours, &case), (rival, &case), promise);
                }
            }
        }
    }
}

/// The result of one measurement.
struct Figures {
    sorted_micros: Vec<f64>,
    reader_cpu: Duration,
}

impl Options {
    /// Calls `read` at one offset after the other until the time is over. The clock is read once per read: a read lasts
    /// from the end of the previous one to its own, as in perftest, so that the time includes the loop.
    fn time(&self, mut read: impl FnMut(u64) -> Result<(), Failure>) -> Result<Figures, Failure> {
        let region_bytes = self.region_mib << 20;
        let time = Duration::from_millis(self.millis);
        let step = u64::from(self.sizes.iter().copied().max().unwrap_or(1));
        let mut micros = Vec::with_capacity(EXPECTED_READS);
        let cpu_before = cpu::of_self()?;
        let began = Instant::now();
        let (mut offset, mut before) = (0, began);
        while before.duration_since(began) < time {
            read(offset)?;
            let now = Instant::now();
            micros.push(now.duration_since(before).as_nanos() as f64 / 1e3);
            before = now;
            offset += step;
            if offset + step > region_bytes {
                offset = 0;
            }
        }
        let reader_cpu = cpu::of_self()? - cpu_before;
        micros.sort_by(f64::total_cmp);
        Ok(Figures { sorted_micros: micros, reader_cpu })
    }
}

fn read_one(peer: &mut dyn Peer, offset: u64, length: u32, completions: &mut Vec<Completion>) -> Result<(), Failure> {
    if peer.post_read(&[ReadRequest { tag: 1, offset, length, sink_offset: 0 }])? != 1 {
        return Err("the peer did not take a single read".into());
    }
    while peer.poll(completions)? == 0 {
        peer.wait(Duration::from_secs(1))?;
    }
    for completion in completions.drain(..) {
        completion.result?;
    }
    Ok(())
}

/// Capacity for the times of this many reads, so that no read pays for an allocation.
const EXPECTED_READS: usize = 1 << 20;

/// Target for a single READ, in multiples of ib_read_lat's time: the rest is bounds, credits and time-outs, which
/// ib_read_lat lacks.
const VERBS_AT_MOST: f64 = 1.15;

/// READs of one run of ib_read_lat.
const LATENCY_READS: u64 = 1000;
