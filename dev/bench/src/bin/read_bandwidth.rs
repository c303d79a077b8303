//! Read bandwidth from another process's region: shm against memcpy, tcp against iperf3, verbs against ib_read_bw.
//!
//! Each round measures every subject and its rival in turn, so that a slow minute of the machine affects both. Region
//! and sink are warm. The reader keeps `depth` reads outstanding and reads the region from front to back, each read
//! into its own place in the sink, as a replica fetches a table.
//!
//! ```text
//! cargo run --release -p remora-bench --bin read_bandwidth -- --rounds 5 --out bench/runs
//! ```

use std::{
    collections::VecDeque,
    hint::black_box,
    io,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Parser;
use remora_bench::source::{Ends, Source, SourceOptions, Stream, be_the_source_if_asked, iperf3, warm_memory};
use remora_bench::{Keep, Run, Sample, bytes, cpu};
use remora_fabric::{Completion, Memory, Peer, ReadRequest};

/// Read bandwidth of shm and tcp against memcpy and iperf3. Exits with 1 if a target ratio is missed.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds per measurement.
    #[arg(long, default_value_t = 1000)]
    millis: u64,
    /// Measure only these subjects.
    #[arg(long, value_delimiter = ',', default_value = "shm,tcp")]
    transports: Vec<String>,
    /// Sizes of a read, in KiB.
    #[arg(long, value_delimiter = ',', default_value = "4,64,1024,4096")]
    sizes_kib: Vec<u32>,
    /// Number of outstanding reads.
    #[arg(long, value_delimiter = ',', default_value = "1,16")]
    depths: Vec<usize>,
    /// Length of the region in MiB.
    #[arg(long, default_value_t = 512)]
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
        bench.round(round)?;
    }
    bench.compare();
    Ok(options.keep.finish(&bench.run)?)
}

struct Bench<'a> {
    options: &'a Options,
    run: Run,
    source: Source,
    sink: Arc<Memory>,
    /// The source of memcpy: ordinary memory of this process.
    plain: Vec<u8>,
    has_iperf3: bool,
}

impl Bench<'_> {
    fn new(options: &Options) -> Result<Bench<'_>, Box<dyn std::error::Error>> {
        let depth = options.depths.iter().copied().max().unwrap_or(1);
        let largest = u64::from(options.sizes_kib.iter().copied().max().unwrap_or(1024)) << 10;
        let region_bytes = options.region_mib << 20;
        if largest > region_bytes {
            return Err("a read does not fit into the region: give a larger --region-mib".into());
        }
        let wish = SourceOptions { region_bytes, depth, rdma: options.rdma.clone() };
        let run = Run::new("read_bandwidth", "GB/s");
        Ok(Bench {
            options,
            run,
            source: Source::start(&wish)?,
            sink: warm_memory("bench-sink", largest * depth as u64)?,
            plain: (0..region_bytes).map(|byte| (byte / 4096 % 251) as u8).collect(),
            has_iperf3: true,
        })
    }

    fn round(&mut self, round: usize) -> Result<(), Box<dyn std::error::Error>> {
        for size in self.options.sizes_kib.iter().map(|kib| kib << 10) {
            for depth in self.options.depths.iter().copied() {
                if self.measures("shm") {
                    let memcpy = self.memcpy(size, depth)?;
                    self.note("memcpy", size, depth, round, memcpy);
                    let mut peer = self.source.connect_shm(&self.sink)?;
                    let shm = self.read(peer.as_mut(), size, depth)?;
                    self.note("shm", size, depth, round, shm);
                }
                if self.measures("tcp") {
                    let mut peer = self.source.connect_tcp(&self.sink)?;
                    let tcp = self.read(peer.as_mut(), size, depth)?;
                    self.note("tcp", size, depth, round, tcp);
                }
                if self.measures("verbs") {
                    let rival = self.ib_read_bw(size, depth)?;
                    self.note("ib_read_bw", size, depth, round, rival);
                    let mut peer = self.source.connect_verbs(&self.sink)?;
                    let verbs = self.read(peer.as_mut(), size, depth)?;
                    self.note("verbs", size, depth, round, verbs);
                }
            }
            if self.measures("tcp") && self.has_iperf3 && size == IPERF3_BYTES {
                match iperf3(Duration::from_millis(self.options.millis), &["-l", "1M"])? {
                    Some(stream) => self.note("iperf3 -l", size, 0, round, stream.into()),
                    None => {
                        self.has_iperf3 = false;
                        let note =
                            "iperf3 IS NOT INSTALLED: tcp was measured without its rival, so no target is checked";
                        self.run.notes.push(note.to_owned());
                    }
                }
            }
        }
        Ok(())
    }

    fn measures(&self, transport: &str) -> bool {
        self.options.transports.iter().any(|name| name == transport)
    }

    /// Measures one of our transports.
    fn read(&mut self, peer: &mut dyn Peer, size: u32, depth: usize) -> Result<Figures, Box<dyn std::error::Error>> {
        let region_bytes = self.options.region_mib << 20;
        // A short warm-up, so that congestion windows are open and nothing happens for the first time.
        pump(peer, size, depth, region_bytes, Duration::from_millis(self.options.millis / 5))?;
        let (reader, source) = (cpu::of_self()?, self.source.cpu()?);
        let (count, elapsed) = pump(peer, size, depth, region_bytes, Duration::from_millis(self.options.millis))?;
        Ok(Figures {
            bytes: count,
            elapsed,
            reader_cpu: cpu::of_self()? - reader,
            source_cpu: self.source.cpu()? - source,
        })
    }

    /// Measures the rival of verbs, for about the same time. It does not report processor time.
    fn ib_read_bw(&self, size: u32, depth: usize) -> io::Result<Figures> {
        let trial = self.options.rdma.bandwidth(size, depth, 20)?;
        let count = trial * self.options.millis as f64 / 1e3 / f64::from(size);
        let rate = self.options.rdma.bandwidth(size, depth, count as u64)?;
        let elapsed = Duration::from_millis(self.options.millis);
        let bytes = (rate * elapsed.as_secs_f64()) as u64;
        Ok(Figures { bytes, elapsed, reader_cpu: Duration::ZERO, source_cpu: Duration::ZERO })
    }

    /// Measures the rival of shm: the same bytes, copied from private memory by the standard library.
    fn memcpy(&self, size: u32, depth: usize) -> io::Result<Figures> {
        let size = size as usize;
        let mut sink = vec![1; size * depth];
        let mut copy = |time: Duration| {
            let (began, mut count) = (Instant::now(), 0);
            let mut places = (0..depth).cycle();
            for from in self.plain.chunks_exact(size).cycle() {
                let place = places.next().unwrap_or_default() * size;
                if let Some(into) = sink.get_mut(place..place + size) {
                    into.copy_from_slice(black_box(from));
                    black_box(into);
                }
                count += size as u64;
                if count % CLOCK_BYTES < size as u64 && began.elapsed() >= time {
                    break;
                }
            }
            (count, began.elapsed())
        };
        copy(Duration::from_millis(self.options.millis / 5));
        let reader = cpu::of_self()?;
        let (bytes, elapsed) = copy(Duration::from_millis(self.options.millis));
        Ok(Figures { bytes, elapsed, reader_cpu: cpu::of_self()? - reader, source_cpu: Duration::ZERO })
    }

    fn note(&mut self, subject: &str, size: u32, depth: usize, round: usize, figures: Figures) {
        let gigabytes = figures.bytes as f64 / 1e9;
        let sample = Sample::new(subject, case(size, depth), round, gigabytes / figures.elapsed.as_secs_f64());
        let (reader, source) = (figures.reader_cpu.as_secs_f64(), figures.source_cpu.as_secs_f64());
        self.run.samples.push(sample.cost(reader, source, gigabytes));
    }

    fn compare(&mut self) {
        for size in self.options.sizes_kib.iter().map(|kib| kib << 10) {
            for depth in self.options.depths.iter().copied() {
                let ours = case(size, depth);
                if self.measures("shm") {
                    let promise = (size == 1 << 20).then_some(0.9);
                    self.run.compare(("shm", &ours), ("memcpy", &ours), promise);
                }
                if self.measures("verbs") {
                    let promise = (depth == 16 && (64 << 10..=1 << 20).contains(&size)).then_some(0.9);
                    self.run.compare(("verbs", &ours), ("ib_read_bw", &ours), promise);
                }
                if self.measures("tcp") && self.has_iperf3 && size == IPERF3_BYTES {
                    let promise = (depth == 16).then_some(0.9);
                    self.run.compare(("tcp", &ours), ("iperf3 -l", &case(size, 0)), promise);
                }
            }
        }
    }
}

/// The result of one measurement.
struct Figures {
    bytes: u64,
    elapsed: Duration,
    reader_cpu: Duration,
    source_cpu: Duration,
}

/// Reads for `time`, `depth` reads at a time. Returns the number of bytes, and the time until the last of them.
fn pump(
    peer: &mut dyn Peer,
    size: u32,
    depth: usize,
    region_bytes: u64,
    time: Duration,
) -> Result<(u64, Duration), Box<dyn std::error::Error>> {
    let began = Instant::now();
    let (mut offset, mut count, mut outstanding, mut since_clock) = (0, 0, 0, 0);
    let mut is_over = false;
    let mut places: VecDeque<u64> = (0..depth as u64).collect();
    let mut reads = Vec::with_capacity(depth);
    let mut completions: Vec<Completion> = Vec::with_capacity(depth);
    while !is_over || outstanding > 0 {
        reads.clear();
        while let Some(place) = places.pop_front().filter(|_| !is_over) {
            reads.push(ReadRequest { tag: place, offset, length: size, sink_offset: place * u64::from(size) });
            offset += u64::from(size);
            if offset + u64::from(size) > region_bytes {
                offset = 0;
            }
        }
        let accepted = peer.post_read(&reads)?;
        places.extend(reads.iter().skip(accepted).map(|read| read.tag));
        outstanding += accepted;
        completions.clear();
        if peer.poll(&mut completions)? == 0 {
            peer.wait(Duration::from_secs(1))?;
        }
        for completion in &completions {
            count += u64::from(completion.result?);
            since_clock += u64::from(size);
            places.push_back(completion.tag);
        }
        outstanding -= completions.len();
        if since_clock >= CLOCK_BYTES {
            since_clock = 0;
            is_over = began.elapsed() >= time;
        }
    }
    Ok((count, began.elapsed()))
}

impl From<Stream> for Figures {
    fn from(stream: Stream) -> Figures {
        let [elapsed, reader_cpu, source_cpu] =
            [stream.seconds, stream.receiver_cpu, stream.sender_cpu].map(Duration::from_secs_f64);
        Figures { bytes: stream.bytes as u64, elapsed, reader_cpu, source_cpu }
    }
}

/// The name of a cell; depth 0 is a stream without requests.
fn case(size: u32, depth: usize) -> String {
    match depth {
        0 => bytes(size.into()),
        depth => format!("{} × {depth}", bytes(size.into())),
    }
}

/// The length of iperf3's writes, `-l 1M`.
const IPERF3_BYTES: u32 = 1 << 20;

/// Number of polls between two reads of the clock.
const CLOCK_BYTES: u64 = 8 << 20;
