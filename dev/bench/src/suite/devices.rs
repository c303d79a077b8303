//! `remora-bench devices`: the speed of disk, networks and fabric, measured by independent tools, with the fabric
//! beside them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use remora_lab::{RdmaVm, scratch};
use serde_json::Value;

use super::Common;
use super::kept::Kept;
use super::network::Network;
pub use super::points::DevicePoint as Point;
use super::report::tables;
use crate::sync::Result;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Networks, as for `sync`.
    #[arg(long, value_delimiter = ',', default_value = "100mbit,1gbit,10gbit,loopback")]
    pub networks: Vec<Network>,
    /// MiB that fio writes and reads, bypassing the page cache.
    #[arg(long, default_value_t = 1024)]
    pub disk_mib: u64,
    /// Leave out the reads over RDMA, which need an emulated machine (dev/lab/rdma-vm) and a minute or two.
    #[arg(long)]
    pub no_rdma: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: Common,
}

/// Runs the subcommand.
///
/// # Errors
/// The run could not be kept. A missing tool is noted.
pub fn run(options: &Options) -> Result<bool> {
    let mut kept = Kept::begin("devices", options.common.label.as_deref());
    for round in 0..options.common.rounds {
        for direction in ["write", "read"] {
            let device = format!("disk, {direction}, 1 MiB at a time, past the cache");
            note_or_add(&mut kept, &device, "fio", round, fio(direction, options.disk_mib));
        }
        for network in &options.networks {
            let measured = network.place(1).and_then(|place| network.measure(&place));
            let measured = measured.map(|link| link.bytes_per_second);
            note_or_add(&mut kept, &format!("TCP, {network}"), "iperf3", round, measured);
        }
    }
    note_or_add_all(&mut kept, "the fabric's reads", fabric(options.common.rounds));
    if !options.no_rdma {
        kept.note("RDMA is Soft-RoCE in an emulated machine: compare its figures only with each other.");
        note_or_add_all(&mut kept, "RDMA", rdma(options.common.rounds));
    }
    let summary = tables::devices(&[&kept]);
    kept.keep(options.common.out.as_deref(), &summary)?;
    print!("{summary}");
    Ok(true)
}

fn note_or_add_all(kept: &mut Kept<Point>, what: &str, measured: Result<Vec<Figure>>) {
    match measured {
        Ok(figures) => {
            for (device, tool, round, rate) in figures {
                note_or_add(kept, &device, &tool, round, Ok(rate));
            }
        }
        Err(error) => kept.note(format!("{what}: not measured: {error}")),
    }
}

fn note_or_add(kept: &mut Kept<Point>, device: &str, tool: &str, round: usize, measured: Result<f64>) {
    match measured {
        Ok(bytes_per_second) => {
            eprintln!("{device}: {:.1} MB/s", bytes_per_second / 1e6);
            kept.points.push(Point { device: device.into(), tool: tool.into(), round, bytes_per_second });
        }
        Err(error) => kept.note(format!("{device}: not measured: {error}")),
    }
}

/// Bytes per second of one fio job, in a file in the temporary folder.
fn fio(direction: &str, mib: u64) -> Result<f64> {
    let folder = scratch::folder("fio")?;
    let arguments = [
        "--name=remora",
        "--filename=data",
        "--bs=1M",
        "--iodepth=8",
        "--ioengine=libaio",
        "--direct=1",
        "--output-format=json",
    ];
    let mut command = Command::new("fio");
    command.args(arguments).arg(format!("--rw={direction}")).arg(format!("--size={mib}M")).current_dir(folder.path());
    let output = command.output().map_err(|error| format!("the program fio: {error}; run `make setup`"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    fio_rate(&output.stdout, direction).ok_or_else(|| "fio printed no rate".into())
}

fn fio_rate(json: &[u8], direction: &str) -> Option<f64> {
    let report: Value = serde_json::from_slice(json).ok()?;
    report["jobs"][0][direction]["bw_bytes"].as_f64().filter(|rate| *rate > 0.0)
}

/// Device, tool, round, bytes per second.
type Figure = (String, String, usize, f64);

/// Runs the fabric's own benchmark with its rivals: reads of 1 MiB, sixteen outstanding.
fn fabric(rounds: usize) -> Result<Vec<Figure>> {
    let program = read_bandwidth()?;
    let folder = scratch::folder("fabric")?;
    let json = folder.path().join("read_bandwidth.json");
    let mut command = Command::new(program);
    command.args(["--sizes-kib", "1024", "--depths", "16", "--rounds", &rounds.to_string(), "--json"]).arg(&json);
    command.stdout(std::process::Stdio::null());
    // It exits with 1 if a target ratio is missed; the figures are complete all the same.
    remora_lab::process::spawn(command)?.wait()?;
    read_fabric(&json)
}

/// The same over RDMA, beside ib_read_bw, between two devices of an emulated machine.
fn rdma(rounds: usize) -> Result<Vec<Figure>> {
    let program = read_bandwidth()?;
    let folder = scratch::folder("fabric")?;
    let json = folder.path().join("verbs.json");
    let machine = RdmaVm::ready()?.nodes(2).limit(RDMA_TIME).writable(folder.path());
    let (reader, source) = (RdmaVm::address(0).to_string(), RdmaVm::address(1).to_string());
    let rounds = rounds.to_string();
    let (program, out) = (program.to_string_lossy(), json.to_string_lossy());
    let what = ["--transports", "verbs", "--rdma-reader", &reader, "--rdma-source", &source];
    let how = ["--sizes-kib", "1024", "--depths", "16", "--region-mib", "64", "--rounds", &rounds, "--json", &out];
    let ran = machine.run(&[[program.as_ref()].as_slice(), &what, &how].concat())?;
    if !json.is_file() {
        return Err(String::from_utf8_lossy(&ran.stderr).trim().to_owned().into());
    }
    let figures = read_fabric(&json)?;
    let emulated = |(device, tool, round, rate)| (format!("{device}, emulated"), tool, round, rate);
    Ok(figures.into_iter().map(emulated).collect())
}

fn read_bandwidth() -> Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name("read_bandwidth");
    if program.is_file() {
        return Ok(program);
    }
    Err(format!("{} is missing: build all programs of remora-bench", program.display()).into())
}

fn read_fabric(json: &Path) -> Result<Vec<Figure>> {
    let run: crate::Run = serde_json::from_slice(&std::fs::read(json)?)?;
    let figure = |sample: &crate::Sample| {
        let device = match sample.subject.as_str() {
            "memcpy" | "iperf3 -l" | "ib_read_bw" => format!("{}, beside the fabric's reads", sample.subject),
            transport => format!("fabric's read by {transport}"),
        };
        (device, "read_bandwidth".to_owned(), sample.round, sample.value * 1e9)
    };
    Ok(run.samples.iter().map(figure).collect())
}

/// Time limit for booting an emulated machine and measuring in it.
const RDMA_TIME: Duration = Duration::from_secs(240);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_of_the_requested_direction() {
        let json = br#"{"jobs":[{"read":{"bw_bytes":0},"write":{"bw_bytes":123}}]}"#;
        assert_eq!(
            (fio_rate(json, "write"), fio_rate(json, "read"), fio_rate(b"no", "read")),
            (Some(123.0), None, None)
        );
    }
}
