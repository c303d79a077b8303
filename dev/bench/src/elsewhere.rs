//! `remora-bench elsewhere`: the measurements of this project on a machine that has nothing but the archive of
//! `dev/bench/elsewhere/pack`, in minutes, as one JSON.
//!
//! ```text
//!   floor        memcpy, a TCP stream, a disk                               here
//!   messenger    requests beside raw epoll and iperf3                       remora-bench messenger
//!   volume       writes and reads of a volume                               volume_requests
//!   network      syncs over cables of 10 Gb/s; only where it is root        remora-bench sync
//!   syncs        three shapes of data, 1, 3 and 8 replicas, every method    full_sync
//! ```
//!
//! Each part is a program of its own, gets a share of the time, and is ended if it takes longer. What fails is in the
//! JSON, with the reason, and the next part runs.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use remora_lab::process::Process;
use remora_lab::{net, scratch};
use serde_json::{Value, json};

use crate::Machine;
use crate::processors;
use crate::sync::{Result, available_memory};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Try everything with little data. Do not quote its figures.
    #[arg(long)]
    pub quick: bool,
    /// Minutes for everything.
    #[arg(long, default_value_t = 8.5)]
    pub minutes: f64,
    /// Divide the number of keys by this, in place of what suits the machine.
    #[arg(long)]
    pub divide: Option<u64>,
    /// Only these parts.
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// The file for the result.
    #[arg(default_value = "remora-bench.json")]
    pub json: PathBuf,
}

/// Runs the subcommand. Returns whether every part has figures.
pub fn run(options: &Options) -> Result<bool> {
    let begun = Instant::now();
    let end = begun + Duration::from_secs_f64(60.0 * options.minutes);
    let own = std::env::current_exe()?;
    let programs = own.parent().ok_or("this program has no folder")?;
    let commit = fs::read_to_string(programs.join("COMMIT")).unwrap_or_default();
    let folder = scratch::folder("elsewhere")?;
    let mut parts = serde_json::Map::new();
    let wants = |name: &str| options.only.is_empty() || options.only.iter().any(|only| only == name);
    let floor = if wants("floor") { floor(folder.path(), options.quick) } else { Value::Null };
    let is_root = rustix::process::geteuid().is_root();
    for part in PARTS.iter().filter(|part| wants(part.name)) {
        if part.name == NETWORK && !is_root {
            parts.insert(part.name.to_owned(), json!({ "left_out": "hosts of a test network need root" }));
            continue;
        }
        let left = end.saturating_duration_since(Instant::now());
        let limit = if options.quick { left } else { left.mul_f64(part.share) };
        let figures = part.run(programs, folder.path(), options, limit)?;
        parts.insert(part.name.to_owned(), figures);
    }
    let is_whole = parts.values().all(|part| part.get("figures").is_some() || part.get("left_out").is_some());
    let processors = processors::all().filter(|_| processors::are_apart());
    let result = json!({
        "commit": commit.trim(),
        "seconds_since_1970": SystemTime::UNIX_EPOCH.elapsed()?.as_secs(),
        "took_seconds": begun.elapsed().as_secs_f64(),
        "is_quick": options.quick,
        "machine": Machine::here(),
        "is_root": is_root,
        "processors_shared_out": processors,
        "floor": floor,
        "parts": parts,
    });
    fs::write(&options.json, serde_json::to_vec_pretty(&result)?)?;
    eprintln!("{:.0} s; the result is in {}", begun.elapsed().as_secs_f64(), options.json.display());
    Ok(is_whole)
}

/// A program, its arguments, and its share of the time that is left when it begins.
struct Part {
    name: &'static str,
    program: &'static str,
    words: &'static str,
    /// In addition, without and with `--quick`.
    whole: &'static str,
    quick: &'static str,
    share: f64,
}

impl Part {
    fn run(&self, programs: &Path, folder: &Path, options: &Options, limit: Duration) -> Result<Value> {
        let (begun, out) = (Instant::now(), folder.join(self.name));
        let mut command = Command::new(programs.join(self.program));
        command.args(self.words.split_whitespace());
        command.args(if options.quick { self.quick } else { self.whole }.split_whitespace());
        if self.program == SYNCS {
            command.args(["--divide", &options.divide.unwrap_or_else(|| divide(options.quick)).to_string()]);
        }
        if [SYNCS, SUITE].contains(&self.program) && self.name != "messenger" {
            let budget = limit.saturating_sub(SPARE).as_secs_f64() / 60.0;
            command.args(["--budget-minutes", &format!("{budget:.2}")]);
        }
        command.arg("--out").arg(&out);
        for (variable, file) in FILES {
            command.env(variable, programs.join(file));
        }
        command.env(processors::APART, "1");
        eprintln!("── {}, {:.0} s at most", self.name, limit.as_secs_f64());
        let (mut process, _) = Process::start(self.name, command)?;
        let ended = process.wait(limit)?;
        if ended.is_none() {
            process.kill()?;
        }
        let status = ended.map_or_else(|| "ended for want of time".to_owned(), |status| status.to_string());
        let mut figures = json!({ "seconds": begun.elapsed().as_secs_f64(), "ended": status });
        // Each keeps its run as it goes, in a folder of its own.
        let kept = fs::read_dir(&out).ok().and_then(|mut folders| folders.next()?.ok());
        if let Some(text) = kept.and_then(|folder| fs::read_to_string(folder.path().join("run.json")).ok()) {
            figures["figures"] = serde_json::from_str(&text)?;
        }
        Ok(figures)
    }
}

/// What the machine itself does: GB/s of `memcpy` by one thread, and of one TCP stream; of a disk that is below the
/// folder for temporary files, GB/s and how often a second a small write is on it.
fn floor(folder: &Path, is_quick: bool) -> Value {
    let (bytes, time) = if is_quick { (64 << 20, 1) } else { (512 << 20, 3) };
    let copied = {
        let (from, mut to) = (vec![7_u8; bytes], vec![0_u8; bytes]);
        to.copy_from_slice(&from); // which touches it
        let (begun, mut count) = (Instant::now(), 0.0);
        while begun.elapsed() < Duration::from_secs(1) {
            to.copy_from_slice(black_box(&from));
            black_box(&to);
            count += 1.0;
        }
        count * bytes as f64 / begun.elapsed().as_secs_f64()
    };
    let stream = net::bandwidth(None, Duration::from_secs(time)).map_err(|error| error.to_string());
    let disk = disk(&folder.join("disk"), bytes).map_err(|error| error.to_string());
    let (disk, disk_error) = (disk.as_ref().ok(), disk.as_ref().err());
    json!({
        "memcpy_gb_per_second": copied / 1e9,
        "tcp_stream_gb_per_second": stream.as_ref().ok().map(|rate| rate / 1e9),
        "tcp_stream_error": stream.as_ref().err(),
        "disk_gb_per_second": disk.map(|(rate, _)| rate / 1e9),
        "disk_small_writes_per_second": disk.map(|(_, writes)| writes),
        "disk_error": disk_error,
        "folder": folder,
    })
}

/// Bytes a second of a large file that is on the disk at the end, and small writes that are there one after the other.
fn disk(path: &Path, bytes: usize) -> io::Result<(f64, f64)> {
    let (mut file, block) = (File::create(path)?, vec![5_u8; 1 << 20]);
    let begun = Instant::now();
    for _ in 0..bytes / block.len() {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    let rate = bytes as f64 / begun.elapsed().as_secs_f64();
    let (begun, mut count) = (Instant::now(), 0.0);
    while begun.elapsed() < Duration::from_secs(1) {
        file.write_all(&block[..4096])?;
        file.sync_data()?;
        count += 1.0;
    }
    Ok((rate, count / begun.elapsed().as_secs_f64()))
}

/// By what the number of keys is divided: eight replicas fit into half of the memory, and a round into the time.
fn divide(is_quick: bool) -> u64 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    match available_memory().unwrap_or_default() >> 30 {
        _ if is_quick => 100,
        gibibytes if processors >= 8 && gibibytes >= 24 => 4,
        gibibytes if gibibytes >= 8 => 16,
        _ => 50,
    }
}

/// What the programs find beside them, by the variables that name it.
const FILES: [(&str, &str); 4] = [
    ("REMORA", "remora"),
    ("REMORA_REDIS_SERVER", "redis-server"),
    ("REMORA_VALKEY_SERVER", "valkey-server"),
    ("REMORA_LAB_LAYOUTS", "layouts"),
];

const SYNCS: &str = "full_sync";
const SUITE: &str = "remora-bench";
const NETWORK: &str = "network";

/// In this order: the last one gets all that the others leave.
const PARTS: [Part; 4] = [
    Part {
        name: "messenger",
        program: SUITE,
        words: "messenger --stacks tcp,shm",
        whole: "--rounds 2 --millis 500",
        quick: "--rounds 1 --millis 100",
        share: 0.2,
    },
    Part {
        name: "volume",
        program: "volume_requests",
        words: "",
        whole: "--rounds 2 --millis 500",
        quick: "--rounds 1 --millis 100",
        share: 0.2,
    },
    Part {
        name: NETWORK,
        program: SUITE,
        words: "sync --networks 10gbit --replicas 1,3,8 --compare never \
                --methods own-best,own-together,remora-relay,remora-relay-sealed,remora-module-relay",
        whole: "--rounds 1 --values 64",
        quick: "--rounds 1 --values 3 --servers valkey",
        share: 0.3,
    },
    Part {
        name: "syncs",
        program: SYNCS,
        words: "--methods \
                own-default,own-best,own-together,own-dual,remora-shm,remora-module,remora-tcp,remora-tcp-sealed",
        whole: "--rounds 3 --replicas 1,3,8",
        quick: "--rounds 1 --replicas 1,3 --servers valkey",
        share: 1.0,
    },
];

/// What a part may take beyond its time: one sync and a comparison that have begun.
const SPARE: Duration = Duration::from_secs(25);
