//! Pictures: those of the manual that show the program, made anew from the program itself.
//!
//! - [`take`]: the page of `--metrics` in a real browser, while three replicas read.
//! - [`record`]: the first part of `docs/tutorial.md`, run and recorded as an asciicast, a [`Cast`]; [`draw`]: such a
//!   recording as a drawing.
//!
//! Tests check what needs no servers: that the kept recording has the commands of the tutorial and the kept drawing is
//! that of the recording, that the page's files are those of its pictures, that the plots are those of the kept runs,
//! and that every picture that a page names is there.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remora_bench::sync::{Program, Result};
use remora_lab::browser::{Browser, View};
use remora_lab::server::project_root;
use remora_lab::workload::Options as Writes;
use remora_lab::{Agent, Kind, Net, Server, Workload, browser, scratch};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::process::{START_LIMIT, TOKEN, started};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Make these only.
    #[arg(long, value_delimiter = ',', default_value = "page,session")]
    only: Vec<Which>,

    /// The folder for the pictures; without it that of the manual.
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
}

/// A picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Which {
    /// The page of `--metrics`, light and dark.
    Page,
    /// The first part of the tutorial, recorded and drawn.
    Session,
    /// The drawing of the kept recording, which is not made anew.
    Drawing,
}

/// Makes the pictures.
pub(crate) fn run(options: &Options) -> Result<()> {
    let folder = options.to.clone().unwrap_or_else(|| project_root().join("docs/pictures"));
    std::fs::create_dir_all(&folder)?;
    for which in &options.only {
        match which {
            Which::Page => take(&Program::build()?, &folder)?,
            Which::Session => record(&Program::build()?, &folder)?,
            Which::Drawing => draw(&folder)?,
        }
    }
    Ok(())
}

/// Says what was made, and fails if it is too large for a repository.
fn made(path: &Path, most: u64) -> Result<()> {
    let bytes = std::fs::metadata(path)?.len();
    println!("{}: {} KB", path.display(), bytes.div_ceil(1000));
    match bytes <= most {
        true => Ok(()),
        false => Err(format!("{} has more than {most} bytes", path.display()).into()),
    }
}

// Session: the commands of the tutorial's first part, run in a network of their own and recorded.
//
// ```text
//   docs/tutorial.md ── commands ──▶ bash in a namespace, where their ports are free ── output, with times ──▶ five-minutes.cast
//   five-minutes.cast ── terminal ──▶ five-minutes.svg
// ```

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
fn record(program: &Program, folder: &Path) -> Result<()> {
    let commands = commands(&std::fs::read_to_string(project_root().join(PAGE))?)?;
    let cast = play(program, &commands)?;
    let path = folder.join(CAST);
    std::fs::write(&path, cast.text()?)?;
    made(&path, MOST_BYTES)?;
    draw(folder)
}

/// Draws the kept recording.
fn draw(folder: &Path) -> Result<()> {
    let cast = Cast::parse(&std::fs::read_to_string(folder.join(CAST))?)?;
    let path = folder.join(DRAWING);
    std::fs::write(&path, svg(&cast))?;
    made(&path, MOST_BYTES)
}

/// The lines of the block below the heading.
fn commands(page: &str) -> Result<Vec<String>> {
    let part = page.split_once(HEADING).ok_or("the tutorial has no such heading")?.1;
    let block = part.split("```").nth(1).ok_or("the tutorial has no commands there")?;
    // The rest of the fence's line names the language.
    Ok(block.lines().skip(1).filter(|line| !line.trim().is_empty()).map(str::to_owned).collect())
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

// Cast: a recording of a terminal, as an asciicast.

/// A recording: the first line of an asciicast, and its events.
#[derive(Clone, Debug, Default, PartialEq)]
struct Cast {
    head: Head,
    events: Vec<Event>,
}

/// The head of an asciicast of version 2.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Head {
    version: u8,
    width: usize,
    height: usize,
    title: String,
}

/// Seconds since the beginning, its kind (`o`: output), and what was written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Event(pub(super) f64, String, pub(super) String);

impl Cast {
    fn parse(text: &str) -> Result<Cast> {
        let mut lines = text.lines();
        let head = serde_json::from_str(lines.next().ok_or("the recording is empty")?)?;
        let events = lines.map(serde_json::from_str).collect::<std::result::Result<_, _>>()?;
        Ok(Cast { head, events })
    }

    fn text(&self) -> Result<String> {
        let mut text = serde_json::to_string(&self.head)? + "\n";
        for event in &self.events {
            text += &(serde_json::to_string(event)? + "\n");
        }
        Ok(text)
    }

    /// Adds a line. Times have milliseconds.
    fn add(&mut self, at: f64, line: &str) {
        self.events.push(Event((at * 1000.0).round() / 1000.0, "o".into(), format!("{line}\r\n")));
    }
}

// Terminal: a recording as one SVG that plays by itself, without a script: each line appears at its time, and the text
// moves up when the window is full. Where the reader wants no motion, it shows the end.

/// Pixels of a character and a line, and around the text.
const CHARACTER: f64 = 7.83;
const LINE: usize = 19;
const BORDER: usize = 18;
const BAR: usize = 34;

/// Pixels of a line below its letters' feet: those of the line above the window are not shown.
const BELOW: usize = 5;

/// Seconds for which the end stays.
const REST: f64 = 6.0;

/// One line of the terminal: when it appears, and what it is.
struct Shown<'a> {
    at: f64,
    class: &'static str,
    text: &'a str,
}

fn svg(cast: &Cast) -> String {
    let lines = lines(cast);
    let total = lines.last().map_or(0.0, |line| line.at) + REST;
    let (width, height) = (cast.head.width as f64 * CHARACTER, cast.head.height * LINE);
    let (whole_width, whole_height) = (width.ceil() as usize + 2 * BORDER, height + BAR + BORDER);
    let percent = |at: f64| format!("{:.2}%", at / total * 100.0);
    let (mut style, mut text) = (String::new(), String::new());
    let mut moves = String::from("0%{transform:none}");
    for (number, line) in lines.iter().enumerate() {
        let at = percent(line.at);
        let _ = write!(
            style,
            "@keyframes l{number}{{0%{{opacity:0}}{at},to{{opacity:1}}}}#l{number}{{animation-name:l{number}}}"
        );
        let y = (number + 1) * LINE - BELOW;
        let _ =
            writeln!(text, "<text id=\"l{number}\" class=\"{}\" y=\"{y}\">{}</text>", line.class, escaped(line.text));
        if let Some(above) = (number + 1).checked_sub(cast.head.height).filter(|above| *above > 0) {
            let _ = write!(moves, "{at}{{transform:translateY(-{}px)}}", above * LINE);
        }
    }
    let above = (lines.len().saturating_sub(cast.head.height)) * LINE;
    let _ = write!(moves, "to{{transform:translateY(-{above}px)}}");
    let title = escaped(&cast.head.title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {whole_width} {whole_height}\" role=\"img\" aria-label=\"{title}, in a terminal\">\n\
         <style>text{{font:13px ui-monospace,\"DejaVu Sans Mono\",Menlo,Consolas,monospace;white-space:pre;fill:#c9d7df}}\
         .c{{fill:#fff;font-weight:600}}.n{{fill:#6f8a99}}.t{{fill:#8ba0ae;font-family:system-ui,sans-serif;text-anchor:middle}}\
         #all{{transform:translateY(-{above}px)}}\
         @media(prefers-reduced-motion:no-preference){{#all{{animation:up {total:.1}s step-end infinite}}\
         #all text{{animation:{total:.1}s step-end infinite}}\
         @keyframes up{{{moves}}}{style}}}</style>\n\
         <rect width=\"{whole_width}\" height=\"{whole_height}\" rx=\"10\" fill=\"#0b1319\"/>\n\
         <circle cx=\"20\" cy=\"17\" r=\"5\" fill=\"#ff7a70\"/><circle cx=\"37\" cy=\"17\" r=\"5\" fill=\"#e0a646\"/>\
         <circle cx=\"54\" cy=\"17\" r=\"5\" fill=\"#4cc98a\"/>\n\
         <text class=\"t\" x=\"{}\" y=\"21\">{title}</text>\n\
         <svg x=\"{BORDER}\" y=\"{}\" width=\"{}\" height=\"{}\"><g id=\"all\">\n{text}</g></svg>\n</svg>\n",
        whole_width / 2,
        BAR + BELOW,
        whole_width - 2 * BORDER,
        height,
    )
}

/// The lines of a recording, those that are too wide broken where the terminal breaks them.
fn lines(cast: &Cast) -> Vec<Shown<'_>> {
    let mut lines = Vec::new();
    for event in &cast.events {
        let whole = event.2.trim_end_matches(['\r', '\n']);
        let class = match whole {
            text if text.starts_with("$ ") => "c",
            text if text.starts_with("# ") => "n",
            _ => "o",
        };
        let mut rest = whole;
        loop {
            let end = rest.char_indices().nth(cast.head.width).map_or(rest.len(), |(at, _)| at);
            let (text, after) = rest.split_at(end);
            lines.push(Shown { at: event.0, class, text });
            if after.is_empty() {
                break;
            }
            rest = after;
        }
    }
    lines
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

// The page of a source while three replicas read from it and from each other.

/// The data: enough for some seconds at [`UPLOAD`].
const VALUES: u64 = 480;
const VALUE_BYTES: u64 = 1 << 20;

/// The source's limit, so that the replicas take long enough to be seen.
const UPLOAD: &str = "20MiB";

/// When each replica joins, in seconds after the first.
const JOIN: [(&str, u64); 3] = [("db2", 0), ("db3", 5), ("db4", 13)];

/// Seconds before the picture is taken, and the parts of the snapshot that the last replica may hold then.
const EARLIEST: Duration = Duration::from_secs(16);
const LAST_HOLDS: std::ops::Range<f64> = 0.25..0.6;

const LONGEST_SYNC: Duration = Duration::from_secs(180);
const VIEW: View = View { width: 1160, height: 720, is_dark: false };

/// The most bytes of one picture in the repository.
const MOST_PAGE_BYTES: u64 = 150_000;

/// The files that say how the page looks, and where their digests at the time of the pictures are kept.
const FILES: [&str; 3] = ["metrics/src/page/page.css", "metrics/src/page/page.html", "metrics/src/page/page.js"];
const DIGESTS: &str = "page.sha256";

fn take(program: &Program, folder: &Path) -> Result<()> {
    let scratch = scratch::folder("pictures")?;
    let server = Server::builder(Kind::Valkey9).config("repl-diskless-sync-delay", 0).start()?;
    program.load(&server, VALUES, VALUE_BYTES, false)?;
    let token = scratch::token_file(scratch.path())?.display().to_string();
    let metrics = SocketAddr::from(([127, 0, 0, 1], scratch::free_port()?));
    let (url, page) = (server.url(), metrics.to_string());
    let args = ["source", "--server", &url, "--listen", "127.0.0.1:0", TOKEN, &token, "--metrics", &page];
    let more = ["--upload-limit", UPLOAD, "--memory", "1GiB", "--journal-memory", "64MiB", "--no-shm"];
    let mut source = started(program, scratch.path(), &[&args[..], &more].concat())?;
    let line = source.wait_for_line("listening=", START_LIMIT)?;
    let address = line.split_whitespace().find_map(|word| word.strip_prefix("listening="));
    let address = address.ok_or("the source did not say where it listens")?.to_owned();
    let mut browser = Browser::open(&format!("http://{metrics}/"), VIEW)?;
    let writer =
        Workload::start(server.client()?, Writes { big_bytes: 0, flush: false, ..Writes::seeded(1).rate(2000) })?;
    let began = Instant::now();
    let mut replicas: Vec<(Server, Agent)> = Vec::new();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        if let Some((name, after)) = JOIN.get(replicas.len())
            && began.elapsed() >= Duration::from_secs(*after)
        {
            let server = Server::start(Kind::Valkey9)?;
            let url = server.url();
            let words = ["replica", "--server", &url, "--source", &address, TOKEN, &token, "--name", name, "--stay"];
            replicas.push((server, started(program, scratch.path(), &[&words[..], &["--transport", "tcp"]].concat())?));
        }
        let shown: serde_json::Value = serde_json::from_str(&browser::get(metrics, "/status.json", "")?.text)?;
        let last = share(&shown, JOIN[JOIN.len() - 1].0);
        if began.elapsed() >= EARLIEST && last.is_some_and(|share| LAST_HOLDS.contains(&share)) {
            break;
        }
        if began.elapsed() > LONGEST_SYNC {
            return Err(format!("the last replica never held {LAST_HOLDS:?} of the snapshot: {shown}").into());
        }
    }
    for (name, is_dark) in [("page-light.png", false), ("page-dark.png", true)] {
        // As high as the page is.
        let height = browser.evaluate("document.body.getBoundingClientRect().bottom")?.as_f64().unwrap_or(0.0);
        browser.resize(View { height: height.ceil() as u32, is_dark, ..VIEW })?;
        let path = folder.join(name);
        browser.picture(&path)?;
        made(&path, MOST_PAGE_BYTES)?;
    }
    std::fs::write(folder.join(DIGESTS), digests()?)?;
    let complaints = browser.complaints()?;
    drop(writer);
    match complaints.is_empty() {
        true => Ok(()),
        false => Err(format!("the browser complains: {complaints:?}").into()),
    }
}

/// The part of the snapshot that a replica holds. The status lists replicas in any order. `None`: it has not joined.
fn share(status: &serde_json::Value, name: &str) -> Option<f64> {
    status["replicas"].as_array()?.iter().find(|replica| replica["name"] == name)?["share"].as_f64()
}

/// The digests of the page's files, in the format of `sha256sum`.
fn digests() -> Result<String> {
    let mut text = String::new();
    for file in FILES {
        let digest = Sha256::digest(std::fs::read(project_root().join(file))?);
        let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        text += &format!("{digits}  {file}\n");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeSet;
    use std::fs;

    use remora_bench::suite::report;
    use remora_lab::scratch;

    use super::*;

    /// The pages that show pictures.
    fn pages() -> Vec<PathBuf> {
        let mut pages = vec![project_root().join("README.md"), project_root().join("bench/report.md")];
        let mut folders = vec![project_root().join("docs")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|kind| kind == "md") {
                    pages.push(path);
                }
            }
        }
        pages
    }

    /// The pictures that a text names, in Markdown or HTML.
    fn named(text: &str) -> Vec<&str> {
        let words = text.split(['(', ')', '"', '\n']);
        words.filter(|word| [".svg", ".png"].iter().any(|end| word.ends_with(end)) && !word.contains(' ')).collect()
    }

    #[test]
    fn pictures_are_found_in_markdown_and_html() {
        let text = "![Words (two)](a/b.svg) and [a link](c.md)\n<img src=\"d.png\" alt=\"of e.png\">";
        assert_eq!(named(text), ["a/b.svg", "d.png"]);
    }

    #[test]
    fn every_picture_that_a_page_names_is_there_and_none_is_left_over() {
        let mut shown = BTreeSet::new();
        for page in pages() {
            let text = fs::read_to_string(&page).unwrap();
            for name in named(&text) {
                let path = page.parent().unwrap().join(name);
                let path = path.canonicalize().unwrap_or_else(|error| panic!("{}: {name}: {error}", page.display()));
                shown.insert(path);
            }
        }
        assert!(shown.len() > 30, "{shown:?}");
        for folder in ["docs/pictures", "docs/plots"] {
            for entry in fs::read_dir(project_root().join(folder)).unwrap() {
                let path = entry.unwrap().path().canonicalize().unwrap();
                let is_picture = path.extension().is_some_and(|kind| kind == "svg" || kind == "png");
                assert!(!is_picture || shown.contains(&path), "no page shows {}", path.display());
            }
        }
    }

    #[test]
    fn the_plots_are_those_of_the_kept_runs() {
        let (root, scratch) = (project_root(), scratch::folder("plots").unwrap());
        let copy = |path: &str| scratch.path().join(path);
        fs::create_dir_all(copy("docs/plots")).unwrap();
        fs::create_dir_all(copy("bench")).unwrap();
        std::os::unix::fs::symlink(root.join("bench/runs"), copy("bench/runs")).unwrap();
        for page in ["docs/measured.md", "bench/report.md"] {
            fs::copy(root.join(page), copy(page)).unwrap();
        }
        let options = report::Options {
            runs: copy("bench/runs"),
            page: copy("bench/report.md"),
            measured: copy("docs/measured.md"),
            plots: copy("docs/plots"),
        };
        assert!(report::run(&options).unwrap());
        let how = "run `cargo run -p remora-bench --bin remora-bench -- report`";
        for page in ["docs/measured.md", "bench/report.md"] {
            let made = fs::read_to_string(copy(page)).unwrap().replace(&format!("{}/", scratch.path().display()), "");
            assert!(made == fs::read_to_string(root.join(page)).unwrap(), "{page} has other figures: {how}");
        }
        let mut plots = 0;
        for entry in fs::read_dir(copy("docs/plots")).unwrap() {
            let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
            let kept = fs::read(root.join("docs/plots").join(&name)).unwrap_or_default();
            assert!(fs::read(path).unwrap() == kept, "docs/plots/{} is another plot: {how}", name.display());
            plots += 1;
        }
        assert!(plots > 20, "{plots} plots");
    }

    #[test]
    fn a_picture_that_is_too_large_for_the_repository_is_an_error() {
        let folder = scratch::folder("made").unwrap();
        let path = folder.path().join("picture");
        fs::write(&path, [0; 1000]).unwrap();
        assert!(made(&path, 1000).is_ok());
        let why = made(&path, 999).unwrap_err().to_string();
        assert!(why.contains("999") && why.contains("picture"), "{why}");
    }

    #[test]
    fn the_commands_are_those_of_the_block_below_the_heading() {
        let page = format!(
            "```sh\nanother\n```\n{HEADING}\n\nWords.\n\n```sh\n# A remark.\n\nredis-server &\n```\n```\nlater\n```\n"
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
        assert!(svg(&cast) == kept(DRAWING), "run `make pictures ARGS=\"--only drawing\"`");
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

    #[test]
    fn a_recording_is_read_as_it_was_written() {
        let head = Head { version: 2, width: 80, height: 24, title: "Five \"minutes\"".into() };
        let mut cast = Cast { head, ..Cast::default() };
        cast.add(0.123_456, "$ remora status");
        cast.add(1.5, "db2  70 %\u{1b}[0m");
        let text = cast.text().unwrap();
        assert_eq!(text.lines().nth(1), Some(r#"[0.123,"o","$ remora status\r\n"]"#));
        assert_eq!(Cast::parse(&text).unwrap(), cast);
    }

    #[test]
    fn what_is_no_recording_is_refused() {
        let head = r#"{"version":2,"width":80,"height":24,"title":"t"}"#;
        assert!(Cast::parse(head).is_ok());
        for wrong in ["", "{}", &format!("{head}\n[0.1]"), &format!("{head}\n\n")] {
            assert!(Cast::parse(wrong).is_err(), "{wrong}");
        }
    }

    /// A recording of a terminal of this size, with a line each second.
    fn cast(width: usize, height: usize, lines: &[&str]) -> Cast {
        let mut cast = Cast { head: Head { version: 2, width, height, title: "a & b".into() }, ..Cast::default() };
        for (second, line) in lines.iter().enumerate() {
            cast.add(second as f64, line);
        }
        cast
    }

    #[test]
    fn a_wide_line_is_broken_where_the_terminal_breaks_it() {
        let cast = cast(4, 10, &["12345678", "äöüß5", "", "# a"]);
        let lines = lines(&cast);
        let seen: Vec<(&str, f64)> = lines.iter().map(|line| (line.text, line.at)).collect();
        assert_eq!(seen, [("1234", 0.0), ("5678", 0.0), ("äöüß", 1.0), ("5", 1.0), ("", 2.0), ("# a", 3.0)]);
    }

    #[test]
    fn commands_and_comments_differ_from_output_also_where_they_are_broken() {
        let cast = cast(6, 10, &["$ remora", "# a remark", "#no remark", "output"]);
        let classes: Vec<&str> = lines(&cast).iter().map(|line| line.class).collect();
        assert_eq!(classes, ["c", "c", "n", "n", "o", "o", "o"]);
    }

    #[test]
    fn each_line_appears_at_its_time_and_the_end_stays() {
        let svg = svg(&cast(20, 10, &["one", "two", "three"]));
        // Two seconds, and the rest.
        assert!(svg.contains("animation:8.0s step-end infinite"), "{svg}");
        for (line, at) in [(0, "0.00%"), (1, "12.50%"), (2, "25.00%")] {
            let appears = format!("@keyframes l{line}{{0%{{opacity:0}}{at},to{{opacity:1}}}}#l{line}{{");
            assert!(svg.contains(&appears), "{appears}: {svg}");
        }
        assert!(svg.contains("@keyframes up{0%{transform:none}to{transform:translateY(-0px)}}"), "{svg}");
    }

    #[test]
    fn text_moves_up_when_the_window_is_full_and_without_motion_its_end_is_shown() {
        let svg = svg(&cast(20, 2, &["one", "two", "three", "four"]));
        let (third, fourth) = (LINE, 2 * LINE);
        assert!(svg.contains(&format!("{{transform:translateY(-{third}px)}}")), "{svg}");
        let still = format!("#all{{transform:translateY(-{fourth}px)}}@media(prefers-reduced-motion:no-preference)");
        assert!(svg.contains(&still), "{svg}");
    }

    #[test]
    fn the_window_shows_whole_lines() {
        let svg = svg(&cast(20, 2, &["one", "two", "three"]));
        assert!(svg.contains(&format!("height=\"{}\"><g id=\"all\">", 2 * LINE)), "{svg}");
        // After a move by one line, the feet of the first line are above the window, and those of the third are in it.
        for (line, text) in ["one", "two", "three"].into_iter().enumerate() {
            let y = (line + 1) * LINE - BELOW;
            assert!(svg.contains(&format!("y=\"{y}\">{text}<")), "{svg}");
        }
    }

    #[test]
    fn signs_of_the_drawing_s_own_language_are_only_text() {
        let svg = svg(&cast(60, 10, &["$ cat <file> && echo \"</text><script>\""]));
        assert!(
            svg.contains("$ cat &lt;file&gt; &amp;&amp; echo &quot;&lt;/text&gt;&lt;script&gt;&quot;</text>"),
            "{svg}"
        );
        assert!(svg.contains("aria-label=\"a &amp; b, in a terminal\"") && !svg.contains("<script"), "{svg}");
    }

    #[test]
    fn a_recording_without_lines_is_an_empty_window() {
        let svg = svg(&cast(20, 10, &[]));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn a_replica_is_found_by_its_name_wherever_it_is_listed() {
        let status = serde_json::json!({"replicas": [
            {"name": "db4", "share": 0.3}, {"name": "db3", "share": null}, {"name": "db2", "share": 0.9},
        ]});
        assert_eq!((share(&status, "db4"), share(&status, "db2")), (Some(0.3), Some(0.9)));
        assert_eq!((share(&status, "db3"), share(&status, "db5")), (None, None), "not known, and not there");
        assert_eq!(share(&serde_json::json!({}), "db2"), None);
    }

    #[test]
    fn the_pictures_are_of_the_page_as_it_looks_now() {
        let kept = std::fs::read_to_string(project_root().join("docs/pictures").join(DIGESTS)).unwrap();
        assert!(kept == digests().unwrap(), "the page has changed: run `make pictures ARGS=\"--only page\"`");
    }
}
