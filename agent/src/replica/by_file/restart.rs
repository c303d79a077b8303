//! Restart: the operator's command that restarts the server.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::tasks::blocking;
use crate::units::readable;

/// Pause between two looks whether the command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Bytes of its output that are logged. A server that logs there would fill our log with its own.
const OUTPUT_BYTES: u64 = 64 << 10;

/// Bytes of its output that are read at a time, and logged as one line at most.
const LINE_BYTES: usize = 4096;

/// Runs the command, and logs its output line by line. The error says how it failed.
///
/// The command does not end with this agent: a server between its end and its next start would stay away. So its output
/// goes into a file without a name, and not into a pipe, whose end would end the command too.
pub(super) async fn run(command: &str, limit: Duration) -> Result<(), String> {
    tracing::info!("restarting the server: {command}");
    let command = command.to_owned();
    let ended = blocking(move || Ok(run_here(&command, limit))).await;
    ended.map_err(|failure| failure.to_string())?
}

fn run_here(command: &str, limit: Duration) -> Result<(), String> {
    let failed = |error: io::Error| format!("the restart command cannot be run: {error}");
    let file = tempfile::tempfile().map_err(failed)?;
    let (out, errors) = (file.try_clone().map_err(failed)?, file.try_clone().map_err(failed)?);
    let started = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(errors)
        // Ctrl-C is for the agent.
        .process_group(0)
        .spawn();
    let mut child = started.map_err(failed)?;
    let (mut output, until) = (Output { file, read: 0 }, Instant::now() + limit);
    loop {
        let ended = child.try_wait().map_err(|error| format!("the restart command cannot be waited for: {error}"))?;
        output.log(ended.is_some());
        match ended {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("the restart command failed ({status}); its output is in the log")),
            None if Instant::now() >= until => {
                end(&child);
                return Err(format!(
                    "the restart command has not ended within {} (--restart-limit), and was told to; it must return when the \
                     server was started",
                    readable(limit)
                ));
            }
            None => std::thread::sleep(LOOK_EVERY),
        }
    }
}

/// Asks a command that has not been reaped, and all that it has started, to end.
fn end(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::TERM);
    }
}

/// The command's output.
struct Output {
    file: File,
    read: u64,
}

impl Output {
    /// Logs the lines that have come; at the end, the rest too.
    fn log(&mut self, is_last: bool) {
        let mut piece = [0; LINE_BYTES];
        while self.read < OUTPUT_BYTES {
            let piece = match self.file.read_at(&mut piece, self.read) {
                Ok(0) | Err(_) => return,
                Ok(bytes) => piece.get(..bytes).unwrap_or_default(),
            };
            let whole = piece.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
            let taken = match whole {
                Some(bytes) => bytes,
                None if is_last || piece.len() == LINE_BYTES => piece.len(),
                None => return,
            };
            for line in String::from_utf8_lossy(piece.get(..taken).unwrap_or_default()).lines() {
                tracing::info!("restart: {line}");
            }
            self.read += taken as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn the_end_of_the_command_counts_and_not_that_of_what_it_has_started() {
        let began = Instant::now();
        run_here("echo out; echo err >&2; sleep 20 & exit 0", LONG).unwrap();
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    }

    #[test]
    fn a_command_that_fails_or_does_not_end_says_so() {
        assert!(run_here("exit 3", LONG).unwrap_err().contains("exit status: 3"));
        assert!(run_here("/nowhere/systemctl", LONG).unwrap_err().contains("127"));
        let said = run_here("sleep 30", Duration::from_millis(50)).unwrap_err();
        assert!(said.contains("--restart-limit"), "{said}");
        run_here("yes | head -n 100000", LONG).unwrap();
    }

    #[test]
    fn output_is_taken_line_by_line_and_its_rest_at_the_end() {
        let file = tempfile::tempfile().unwrap();
        let mut output = Output { file: file.try_clone().unwrap(), read: 0 };
        file.write_all_at(b"one\ntwo\nthr", 0).unwrap();
        output.log(false);
        assert_eq!(output.read, 8);
        file.write_all_at(b"ee", 11).unwrap();
        output.log(true);
        assert_eq!(output.read, 13);
        file.write_all_at(&vec![b'x'; 1 << 20], 13).unwrap();
        output.log(true);
        assert!((OUTPUT_BYTES..OUTPUT_BYTES + LINE_BYTES as u64).contains(&output.read), "{}", output.read);
    }
}
