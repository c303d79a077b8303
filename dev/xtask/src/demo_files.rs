//! The demonstration of files in a volume: a Redis server with `appendfsync always` in a mounted volume, whose host is
//! killed. Another host mounts the files and starts a server on them, and every acknowledged write must be there.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use remora_bench::sync::{Program, Result};
use remora_lab::{Agent, Kind, Server};
use rustix::mount::UnmountFlags;
use serde::Serialize;

use crate::commands::{START_LIMIT, TOKEN, ended_well, started};
use crate::show::Screen;

/// What one client sees of the server.
#[derive(Serialize)]
pub(crate) struct Report {
    /// Median time of a SET, in microseconds, with the server's files on this machine's disk.
    disk_microseconds: f64,
    /// The same in the volume.
    volume_microseconds: f64,
    /// Writes that the server had acknowledged when its host was killed.
    acknowledged: u64,
    /// Those of them that the next server has.
    found: u64,
    /// From the death of the host until the next server has answered.
    back_after_seconds: f64,
}

/// Runs it on a new volume of these servers. `None`: this machine does not permit mounts, which is said.
pub(crate) fn run(
    screen: &Screen,
    program: &Program,
    (folder, servers): (&Path, &str),
    seconds: u8,
) -> Result<Option<Report>> {
    let is_permitted = rustix::process::geteuid().is_root();
    if !is_permitted || OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
        screen.say("NOT SHOWN: a server's files in a volume. Mounts need root and /dev/fuse");
        return Ok(None);
    }
    screen.say("a Redis server with `appendfsync always`: on this machine's disk, then in a volume that is mounted");
    let create = ["volume", "create", VOLUME, "--size", SIZE, "--servers", servers, TOKEN, "token"];
    ended_well(program, folder, &create)?;
    ended_well(program, folder, &["volume", "format", VOLUME, TOKEN, "token"])?;
    let span = Duration::from_secs(seconds.into());
    let disk = folder.join("disk");
    std::fs::create_dir(&disk)?;
    let disk_microseconds = median(&write(&server(&disk)?, span)?);
    let mut here = Mount::new(program, folder, "one")?;
    let mut first = server(&here.directory)?;
    let volume_microseconds = median(&write(&first, span)?);

    screen.say("its host is killed: another one mounts the files, and starts a server on them");
    let mut client = first.client()?;
    client.ok(&["FLUSHALL"])?;
    let (said, acknowledged) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        for number in 0_u64.. {
            if client.ok(&["SET", &key(number), &value(number)]).is_err() || said.send(()).is_err() {
                return;
            }
        }
    });
    std::thread::sleep(span);
    let died = Instant::now();
    here.mounted.kill()?;
    first.kill()?;
    writer.join().map_err(|_| "the client's thread has panicked")?;
    let acknowledged = acknowledged.into_iter().count() as u64;
    let there = Mount::new(program, folder, "two")?;
    let second = server(&there.directory)?;
    let mut client = second.client()?;
    client.text(&["PING"])?;
    let back_after_seconds = died.elapsed().as_secs_f64();
    let mut found = 0;
    for number in 0..acknowledged {
        let is_there = client.bytes(&["GET", &key(number)])?.is_some_and(|bytes| bytes == value(number).as_bytes());
        found += u64::from(is_there);
    }
    Ok(Some(Report { disk_microseconds, volume_microseconds, acknowledged, found, back_after_seconds }))
}

impl Report {
    pub(crate) fn text(&self) -> String {
        let Report { disk_microseconds, volume_microseconds, acknowledged, found, back_after_seconds } = self;
        format!(
            "\nA Redis server with appendfsync always, one client, median time of a SET: {disk_microseconds:.0} µs on this \
             machine's disk,\n{volume_microseconds:.0} µs in the volume. Its host was killed: {back_after_seconds:.2} s \
             later a server on another host answered, with {found} of\n{acknowledged} acknowledged writes.\n"
        )
    }

    /// # Errors
    /// An acknowledged write is missing.
    pub(crate) fn verdict(&self) -> Result<()> {
        match self.acknowledged - self.found {
            0 => Ok(()),
            missing => Err(format!("{missing} acknowledged writes are missing on the other host").into()),
        }
    }
}

/// The files of the volume at a directory. Nothing is mounted there afterwards.
struct Mount {
    mounted: Agent,
    directory: PathBuf,
}

impl Mount {
    fn new(program: &Program, folder: &Path, name: &str) -> Result<Mount> {
        let directory = folder.join(name);
        std::fs::create_dir(&directory)?;
        let args = ["volume", "mount", VOLUME, name, "--take-over", "--copy-timeout", "1s", TOKEN, "token"];
        let mut mount = Mount { mounted: started(program, folder, &args)?, directory };
        mount.mounted.wait_for_line("files mounted", START_LIMIT)?;
        Ok(mount)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.directory, UnmountFlags::DETACH); // what a killed process has left
    }
}

fn server(directory: &Path) -> Result<Server> {
    let builder = Server::builder(Kind::Redis7).config("dir", directory.display()).config("appendonly", "yes");
    Ok(builder.config("appendfsync", "always").start()?)
}

/// Sets keys one after the other. Returns how long each has taken.
fn write(server: &Server, span: Duration) -> Result<Vec<Duration>> {
    let mut client = server.client()?;
    let (begun, mut times) = (Instant::now(), Vec::new());
    for number in 0.. {
        let began = Instant::now();
        if began - begun > span {
            break;
        }
        client.ok(&["SET", &key(number), &value(number)])?;
        times.push(began.elapsed());
    }
    Ok(times)
}

/// In microseconds.
fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
}

fn key(number: u64) -> String {
    format!("key:{number}")
}

fn value(number: u64) -> String {
    format!("{number:064}")
}

const VOLUME: &str = "files.volume";

/// Of the volume for files. Each server has memory for it beside the volume of the block device.
const SIZE: &str = "32MiB";
