//! One cell of the matrix, by fio, with the command line of [`super::seeds`].

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::cases::{Cell, Subject};
use super::place::Place;
use crate::cpu;
use crate::sync::Result;

/// What one run of fio says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// 10⁶ bytes a second. With writes to the page cache, the `fsync` at their end is part of the time.
    pub megabytes_per_second: f64,
    /// Requests.
    pub operations: f64,
    /// The 99th percentile of their time, in µs.
    pub p99_us: Option<f64>,
    /// Wall seconds.
    pub seconds: f64,
    /// Processor seconds of fio, and of all processes of the place.
    pub cpu_seconds: f64,
}

/// Writes the files of these numbers of jobs once, so that no cell pays for memory that is touched for the first
/// time, and none writes past the end of a file.
///
/// # Errors
/// fio fails.
pub fn fill(place: &Place, subject: Subject, jobs: &[u32], mib: u64) -> Result<()> {
    for jobs in jobs {
        let mut command = fio(place, subject, *jobs, mib);
        command.args(["--rw=write", "--bs=1m", "--direct=0", "--end_fsync=1"]);
        report(command)?;
    }
    Ok(())
}

/// Measures one cell for at most so long. Past the page cache the same files are used again and again for that time.
/// Otherwise each file is read or written once: a second lap would only be one of the page cache. fio drops it before.
///
/// # Errors
/// fio fails, or does not end.
pub fn measure(place: &Place, subject: Subject, cell: &Cell, mib: u64, time: Duration) -> Result<Measured> {
    let mut command = fio(place, subject, cell.jobs, mib);
    let word = cell.pattern.word();
    command.args([
        format!("--rw={word}"),
        format!("--bs={}", cell.block),
        format!("--direct={}", u8::from(cell.direct)),
    ]);
    command.arg(format!("--runtime={}ms", time.as_millis()));
    match (cell.direct, cell.pattern.writes()) {
        (true, _) => drop(command.arg("--time_based")),
        (false, true) => drop(command.arg("--end_fsync=1")),
        (false, false) => {}
    }
    let (before, own_before) = (place.cpu_seconds()?, cpu::of_ended_children()?);
    let said = report(command)?;
    let own = (cpu::of_ended_children()? - own_before).as_secs_f64();
    let cpu_seconds = place.cpu_seconds()? - before + own;
    let measured = read(&said, if cell.pattern.writes() { "write" } else { "read" });
    let measured = measured.ok_or_else(|| format!("fio printed no figures: {said}"))?;
    Ok(Measured { cpu_seconds, ..measured })
}

/// fio in that place: as many files as there are jobs, of `mib` megabytes in all.
fn fio(place: &Place, subject: Subject, jobs: u32, mib: u64) -> Command {
    let mut command = place.command("timeout");
    command.args([
        "--kill-after=5",
        &MOST_SECONDS.to_string(),
        "fio",
        "-iodepth",
        "1",
        "--thread",
        "--ioengine=libaio",
    ]);
    let size = (mib / u64::from(jobs)).max(1);
    command.arg(format!("--size={size}M")).arg(format!("--numjobs={jobs}"));
    command.args(["-group_reporting", "-name=testfile10"]);
    if subject == Subject::Nbdfuse {
        command.arg(format!("--filename={}", place.path().display())).arg(format!("--offset_increment={size}M"));
    } else {
        command.arg(format!("--directory={}", place.path().display()));
        // For each number of jobs others.
        command.arg(format!("--filename_format=$jobname.{jobs}.$jobnum"));
    }
    command.args(["--fallocate=none", "--randrepeat=0", "--output-format=json"]);
    command
}

/// Runs fio, and returns its report.
fn report(mut command: Command) -> Result<Value> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => {}
        Some(124 | 137) => return Err(format!("fio did not end within {MOST_SECONDS} s").into()),
        _ => return Err(format!("fio failed: {}", errors.lines().next().unwrap_or_default()).into()),
    }
    let json = said.find('{').map(|at| &said[at..]).ok_or_else(|| format!("fio printed no report: {errors}"))?;
    Ok(serde_json::from_str(json)?)
}

fn read(said: &Value, direction: &str) -> Option<Measured> {
    let figures = &said["jobs"][0][direction];
    let number = |name: &str| figures[name].as_f64().filter(|number| *number > 0.0);
    Some(Measured {
        megabytes_per_second: number("bw_bytes")? / 1e6,
        operations: number("total_ios")?,
        p99_us: figures["clat_ns"]["percentile"]["99.000000"].as_f64().map(|nanos| nanos / 1e3),
        seconds: number("runtime")? / 1e3,
        cpu_seconds: 0.0,
    })
}

/// Until fio has ended, with what it must write at the end. A rival that hangs must not stop the run.
const MOST_SECONDS: u32 = 60;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn figures_are_of_the_direction_that_was_asked_for() {
        let said = r#"{"jobs": [{"read": {"bw_bytes": 0}, "write": {"bw_bytes": 2000000, "total_ios": 20,
            "runtime": 500, "clat_ns": {"percentile": {"99.000000": 7500}}}}]}"#;
        let said: Value = serde_json::from_str(said).unwrap();
        let measured = read(&said, "write").unwrap();
        assert_eq!((measured.megabytes_per_second, measured.seconds, measured.p99_us), (2.0, 0.5, Some(7.5)));
        assert_eq!(read(&said, "read"), None);
    }
}
