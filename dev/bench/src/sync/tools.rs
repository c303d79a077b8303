//! Tools: programs of others that people copy servers with, each with the settings that suit it best.
//!
//! ```text
//!   redis-cli --rdb   SYNC ───▶ a file in the replica's folder ──▶ the server starts on it as a replica
//!                                                                └─▶ PSYNC, +CONTINUE
//!   RedisShake 4      PSYNC ──▶ a file ──▶ commands, 1024 under way ──▶ a server of its own, not a replica
//! ```
//!
//! RedisShake is in no package registry of Debian, Rust or Python, and the Go module proxy does not serve it (its
//! module is named `RedisShake`, which is not its address), so the set-up does not bring it: `REMORA_REDIS_SHAKE` names
//! the program.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::{Agent, Server};

use super::Result;

/// What one replica received, and how long the parts took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Made {
    /// Until the file had arrived; for a tool without a file of ours, until the end.
    pub(crate) arrived: Duration,
    /// Until the server had started on it.
    pub(crate) loaded: Duration,
    /// Processor seconds of the tool.
    pub(crate) cpu: f64,
}

/// How long a tool may take.
const LONGEST: Duration = Duration::from_secs(30 * 60);

/// How long a server may take to start on a file.
pub(crate) const LONGEST_START: Duration = Duration::from_secs(30 * 60);

/// What names RedisShake's program.
const SHAKE_VARIABLE: &str = "REMORA_REDIS_SHAKE";

/// RedisShake's program.
///
/// # Errors
/// None is named, or it is not there; the text says what to do.
pub(crate) fn shake_program() -> std::result::Result<PathBuf, String> {
    let named = std::env::var_os(SHAKE_VARIABLE).map(PathBuf::from);
    match named {
        None => Err(format!("{SHAKE_VARIABLE} names no program, and no package registry that the set-up uses has it")),
        Some(path) if !path.is_file() => Err(format!("{SHAKE_VARIABLE}: {} is not a file", path.display())),
        Some(path) => Ok(path),
    }
}

/// Fetches a snapshot for each of these servers by `redis-cli --rdb`, and starts each on its file as a replica, all at
/// once. Its default settings are its best: it has none that matters here.
pub(crate) fn by_rdb_file(primary: &Server, replicas: &mut [Server], begun: Instant) -> Result<Vec<Made>> {
    at_once(replicas, |replica| {
        let address = primary.address();
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let folder = replica.folder().to_owned();
        let file = folder.join(RDB_FILE);
        let mut command = Command::new("redis-cli");
        command.args(["-h", &host, "-p", &port, "--rdb"]).arg(&file);
        let cpu = run(command, replica)?;
        let arrived = begun.elapsed();
        // The replication id and offset in the file let the server continue from there, if it starts as a replica.
        replica.configure_file(&format!("replicaof {host} {port}\ndbfilename {RDB_FILE}"))?;
        replica.restart()?;
        Ok(Made { arrived, loaded: begun.elapsed(), cpu })
    })
}

/// The name of the file in the folder of a replica's server.
const RDB_FILE: &str = "fetched.rdb";

/// Has RedisShake copy to each of these servers, all at once, and waits until all commands are answered.
pub(crate) fn by_shake(primary: &Server, replicas: &mut [Server], begun: Instant) -> Result<Vec<Made>> {
    let program = shake_program()?;
    at_once(replicas, |replica| {
        let folder = replica.folder().join("shake");
        std::fs::create_dir_all(&folder)?;
        let file = folder.join("shake.toml");
        std::fs::write(&file, shake_settings(primary, replica, &folder))?;
        let mut command = Command::new(&program);
        command.arg(&file).current_dir(&folder);
        let cpu = run(command, replica)?;
        let took = begun.elapsed();
        Ok(Made { arrived: took, loaded: took, cpu })
    })
}

/// Its best settings where nothing is written meanwhile; the names are those of its `shake.toml`. `try_diskless` takes
/// the snapshot from the primary's child without a file at the primary; without `sync_aof` it ends when all is copied,
/// and otherwise never. Answers are not turned off (`off_reply`): without them nothing says that the commands were
/// carried out.
fn shake_settings(primary: &Server, replica: &Server, folder: &Path) -> String {
    format!(
        "[sync_reader]\naddress = \"{}\"\nsync_rdb = true\nsync_aof = false\ntry_diskless = true\n\n\
         [redis_writer]\naddress = \"{}\"\noff_reply = false\n\n\
         [advanced]\ndir = \"{}\"\nncpu = 0\nlog_level = \"warn\"\npipeline_count_limit = 1024\n",
        primary.address(),
        replica.address(),
        folder.join("data").display(),
    )
}

/// Runs a tool on the replica's host to its end. Returns its processor seconds.
fn run(mut command: Command, replica: &Server) -> Result<f64> {
    if let Some(host) = replica.host() {
        host.enter(&mut command)?;
    }
    let mut tool = Agent::run(command)?;
    tool.wait_for_success(LONGEST)?;
    Ok(tool.cpu_seconds()?)
}

/// Does this for all servers at once.
fn at_once(replicas: &mut [Server], make: impl Fn(&mut Server) -> Result<Made> + Sync) -> Result<Vec<Made>> {
    let make = &make;
    thread::scope(|scope| {
        let threads: Vec<_> = replicas.iter_mut().map(|replica| scope.spawn(move || make(replica))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread that runs a tool panicked")?).collect()
    })
}
