//! Processors as a test decides them: an agent gets a `/proc/stat` of its own. Then it does not matter to the agent
//! what else this machine does.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// What the processors do, by the file that an agent finds at `/proc/stat`: a copy of this machine's, whose first line
/// a thread writes again and again until this is dropped.
pub(crate) struct Processors {
    file: PathBuf,
    over: Arc<AtomicBool>,
    writer: Option<JoinHandle<io::Result<()>>>,
}

impl Processors {
    /// All of them are idle. The file is made in `folder`.
    pub(crate) fn idle(folder: &Path) -> Processors {
        Processors::counting(folder, |ticks| stat(0, ticks))
    }

    /// Other programs use all of them. The file is made in `folder`.
    pub(crate) fn busy(folder: &Path) -> Processors {
        Processors::counting(folder, |ticks| stat(ticks, 0))
    }

    fn counting(folder: &Path, line: fn(u64) -> String) -> Processors {
        let path = folder.join("stat");
        let real = fs::read_to_string("/proc/stat").unwrap();
        let (_, others) = real.split_once('\n').unwrap();
        fs::write(&path, line(0) + others).unwrap();
        // Each write goes into the same file: what is mounted over `/proc/stat` is the file, not its name.
        let file = File::options().write(true).open(&path).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let writer = thread::spawn(move || {
            for ticks in (TICKS..).step_by(TICKS as usize) {
                thread::sleep(PAUSE);
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                file.write_all_at(line(ticks).as_bytes(), 0)?;
            }
            Ok(())
        });
        Processors { file: path, over, writer: Some(writer) }
    }

    /// A command that runs `program` where `/proc/stat` is this file, in a mount namespace that ends with it. Arguments
    /// that are added are the program's. Ask [`require::root`] for it first.
    ///
    /// [`require::root`]: remora_lab::require::root
    pub(crate) fn shown_to(&self, program: &str) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", "mount --bind \"$0\" /proc/stat && exec \"$@\""]);
        command.arg(&self.file).arg(program);
        command
    }
}

impl Drop for Processors {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let written = self.writer.take().map(JoinHandle::join);
        assert!(thread::panicking() || matches!(written, Some(Ok(Ok(())))), "{}: {written:?}", self.file.display());
    }
}

/// The first line of the file, always of the same length.
fn stat(user: u64, idle: u64) -> String {
    format!("cpu  {user:020} 0 0 {idle:020} 0 0 0 0 0 0\n")
}

/// Time between two writes: a fifth of that between two looks of an agent.
const PAUSE: Duration = Duration::from_millis(50);

/// Ticks of 10 ms that pass with each write: far more than the agent itself uses meanwhile.
const TICKS: u64 = 100_000;
