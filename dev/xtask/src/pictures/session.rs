//! Session: the commands of the tutorial's first part, run in a network of their own and recorded.
//!
//! ```text
//!   docs/tutorial.md ── commands ──▶ bash in a namespace, where their ports are free ── output, with times ──▶ five-minutes.cast
//!   five-minutes.cast ── terminal ──▶ five-minutes.svg
//! ```

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use remora_bench::sync::{Program, Result};
use remora_lab::server::project_root;
use remora_lab::{Net, scratch};

use super::cast::{Cast, Head};
use super::made;
use super::terminal;

/// The page, and the heading of the part that is recorded.
const PAGE: &str = "docs/tutorial.md";
const HEADING: &str = "## The first replica";

const CAST: &str = "five-minutes.cast";
const DRAWING: &str = "five-minutes.svg";

/// How a command's end is told from its output.
const MARK: char = '\u{1}';

/// How long one command may take.
const LONGEST: Duration = Duration::from_secs(60);

/// The pause before a command or a remark.
const TYPING: Duration = Duration::from_secs(2);

/// The most bytes of a recording or its drawing in the repository.
const MOST_BYTES: u64 = 60_000;

/// Seconds of a pause in the recording: before a command, before a line from the background, and the longest between
/// two lines.
const TYPED: f64 = 0.9;
const SAID: f64 = 0.1;
const LONGEST_PAUSE: f64 = 1.5;

/// Runs the commands, and keeps their recording and its drawing.
pub(super) fn record(program: &Program, folder: &Path) -> Result<()> {
    let commands = commands(&std::fs::read_to_string(project_root().join(PAGE))?)?;
    let cast = play(program, &commands)?;
    let path = folder.join(CAST);
    std::fs::write(&path, cast.text()?)?;
    made(&path, MOST_BYTES)?;
    draw(folder)
}

/// Draws the kept recording.
pub(super) fn draw(folder: &Path) -> Result<()> {
    let cast = Cast::parse(&std::fs::read_to_string(folder.join(CAST))?)?;
    let path = folder.join(DRAWING);
    std::fs::write(&path, terminal::svg(&cast))?;
    made(&path, MOST_BYTES)
}

/// The lines of the block below the heading.
fn commands(page: &str) -> Result<Vec<String>> {
    let part = page.split_once(HEADING).ok_or("the tutorial has no such heading")?.1;
    let block = part.split("```").nth(1).ok_or("the tutorial has no commands there")?;
    Ok(block.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect())
}

fn play(program: &Program, commands: &[String]) -> Result<Cast> {
    let (scratch, net) = (scratch::folder("session")?, Net::new()?);
    let mut shell = Command::new("bash");
    shell.args(["--noprofile", "--norc"]).current_dir(scratch.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let tools = program.path().parent().ok_or("the program has no folder")?;
    let path = std::env::var("PATH").unwrap_or_default();
    shell.env("PATH", format!("{}:{path}", tools.display())).env("NO_COLOR", "1").env("COLUMNS", WIDTH.to_string());
    let host = net.host("demo")?;
    host.enter(&mut shell)?;
    let mut child = remora_lab::process::spawn(shell)?;
    let mut input = child.stdin.take().ok_or("no input")?;
    let output = child.stdout.take().ok_or("no output")?;
    let (tell, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
            if tell.send((Instant::now(), line)).is_err() {
                return;
            }
        }
    });
    writeln!(input, "exec 2>&1")?;
    let title = HEADING.trim_start_matches(['#', ' ']).into();
    let mut cast = Cast { head: Head { version: 2, width: WIDTH, height: HEIGHT, title }, ..Cast::default() };
    let mut now = 0.0;
    let outcome = commands.iter().try_for_each(|command| -> Result<()> {
        // A person needs this long for the next line, and a source in the background for its start.
        std::thread::sleep(TYPING);
        for (_, line) in lines.try_iter().filter(|(_, line)| !line.trim().is_empty()) {
            now += SAID;
            cast.add(now, line.trim_end());
        }
        now += if command.starts_with('#') { LONGEST_PAUSE } else { TYPED };
        let shown = if command.starts_with('#') { command.clone() } else { format!("$ {command}") };
        cast.add(now, &shown);
        if command.starts_with('#') {
            return Ok(());
        }
        // The mark has a line of its own, also behind output without an end of line.
        writeln!(input, "{command}\nprintf '\\n\\001%d\\n' $?")?;
        let mut since = Instant::now();
        loop {
            let (at, line) = lines.recv_timeout(LONGEST).map_err(|_| format!("`{command}` takes too long"))?;
            now += (at - since).as_secs_f64().min(LONGEST_PAUSE);
            since = at;
            match line.split_once(MARK) {
                Some((_, "0")) => return Ok(()),
                Some((_, code)) => return Err(format!("`{command}` failed ({code})").into()),
                None if line.trim().is_empty() => {}
                None => cast.add(now, line.trim_end()),
            }
        }
    });
    // The servers are daemons, which do not end with the shell.
    for port in ["7001", "7002"] {
        let _ = writeln!(input, "redis-cli -p {port} shutdown nosave");
    }
    let _ = writeln!(input, "kill $(jobs -p); wait; exit");
    drop(input);
    child.wait()?;
    outcome.map(|()| cast)
}

/// Columns and lines of the terminal.
const WIDTH: usize = 118;
const HEIGHT: usize = 30;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_commands_are_those_of_the_block_below_the_heading() {
        let page = format!(
            "```\nanother\n```\n{HEADING}\n\nWords.\n\n```\n# A remark.\n\nredis-server &\n```\n```\nlater\n```\n"
        );
        assert_eq!(commands(&page).unwrap(), ["# A remark.", "redis-server &"]);
        assert!(commands("```\nredis-server\n```").is_err(), "no heading");
        assert!(commands(HEADING).is_err(), "no block");
    }

    fn kept(name: &str) -> String {
        std::fs::read_to_string(project_root().join("docs/pictures").join(name)).unwrap()
    }

    #[test]
    fn the_recording_has_the_commands_of_the_tutorial() {
        let page = std::fs::read_to_string(project_root().join(PAGE)).unwrap();
        let commands = commands(&page).unwrap();
        assert!(commands.len() > 10, "{commands:?}");
        let cast = Cast::parse(&kept(CAST)).unwrap();
        let said: Vec<&str> = cast.events.iter().map(|event| event.2.trim_end()).collect();
        // Servers print lines that begin like comments.
        let is_typed = |line: &&&str| line.starts_with("$ ") || commands.iter().any(|command| command == *line);
        let recorded = said.iter().filter(is_typed);
        let recorded: Vec<&str> = recorded.map(|line| line.trim_start_matches("$ ")).collect();
        assert_eq!(recorded, commands, "{PAGE} has changed: run `make pictures ARGS=\"--only session\"`");
        let version = format!("remora {}", env!("CARGO_PKG_VERSION"));
        assert!(said.iter().any(|line| line.contains(&version)), "it is of another version: {said:?}");
        assert_eq!(cast.text().unwrap(), kept(CAST));
        assert!(cast.events.is_sorted_by(|one, next| one.0 <= next.0), "its time goes back");
    }

    #[test]
    fn the_drawing_is_that_of_the_recording() {
        let cast = Cast::parse(&kept(CAST)).unwrap();
        assert!(terminal::svg(&cast) == kept(DRAWING), "run `make pictures ARGS=\"--only drawing\"`");
    }

    #[test]
    fn no_path_of_the_machine_is_in_it() {
        for name in [CAST, DRAWING] {
            let text = kept(name);
            for wrong in ["/tmp/", "/root", "/home/"] {
                assert!(!text.contains(wrong), "{name}: {wrong}");
            }
        }
    }
}
