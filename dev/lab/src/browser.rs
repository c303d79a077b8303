//! Browser: Debian's Chromium without a window, driven through its debugging pipe, for pages that our programs serve.
//!
//! ```text
//!   Browser ── commands, answers and events: JSON, each ended by a zero byte ──▶ chromium --remote-debugging-pipe
//! ```

use std::collections::VecDeque;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::agent::Agent;
use crate::process::Process;
use crate::scratch;
use crate::server::{project_root, wait_until};
use crate::{Doing, Error, Result};

/// How long it may take to start, or to answer.
const LIMIT: Duration = Duration::from_secs(60);

/// The pause between looks for what a page should show.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A browser that shows one page. Dropping it kills it and removes its folder.
#[derive(Debug)]
pub struct Browser {
    pipe: UnixStream,
    process: Process,
    /// Bytes of an answer that is not whole yet.
    rest: Vec<u8>,
    events: VecDeque<Value>,
    session: String,
    asked: u64,
    folder: TempDir,
}

/// A page's size in pixels of its style, and its colours.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Its width.
    pub width: u32,
    /// Its height.
    pub height: u32,
    /// Whether it is dark.
    pub is_dark: bool,
}

/// The browser's program.
///
/// # Errors
/// It is not installed.
pub fn program() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("chromium")).find(|path| path.is_file());
    found.ok_or_else(|| Error::Missing { what: "a browser, chromium".into(), how: "run `make setup`".into() })
}

impl Browser {
    /// Opens a page.
    ///
    /// # Errors
    /// The browser is not installed, does not start, or does not answer.
    pub fn open(url: &str, view: View) -> Result<Browser> {
        let folder = scratch::folder("browser")?;
        let (ours, theirs) = UnixStream::pair().doing(|| "make a pair of sockets")?;
        ours.set_read_timeout(Some(LOOK_EVERY)).doing(|| "set a limit")?;
        let (input, output) = (theirs.try_clone().doing(|| "copy a socket")?, theirs);
        let log = fs::File::create(folder.path().join("log")).doing(|| "make the browser's log")?;
        // The browser reads commands from descriptor 3 and writes answers to 4. A shell moves them there.
        let mut command = Command::new("sh");
        command.args(["-c", "exec 3<&0 4>&1 0</dev/null 1>&2; exec \"$@\"", "sh"]).arg(program()?);
        command.args(OPTIONS).arg(format!("--user-data-dir={}", folder.path().join("profile").display()));
        command.env("HOME", folder.path()).stdin(Stdio::from(OwnedFd::from(input)));
        command.stdout(Stdio::from(OwnedFd::from(output))).stderr(Stdio::from(log));
        let (process, _) = Process::start("chromium", command)?;
        let mut browser = Browser {
            pipe: ours,
            process,
            rest: Vec::new(),
            events: VecDeque::new(),
            session: String::new(),
            asked: 0,
            folder,
        };
        let target = browser.ask("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        browser.session = text(&browser.ask("Target.attachToTarget", attach)?["sessionId"])?;
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.ask(domain, json!({}))?;
        }
        browser.resize(view)?;
        browser.ask("Page.navigate", json!({ "url": url }))?;
        Ok(browser)
    }

    /// Gives the page another size, or other colours.
    ///
    /// # Errors
    /// The browser does not answer.
    pub fn resize(&mut self, view: View) -> Result<()> {
        let View { width, height, is_dark } = view;
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.ask("Emulation.setDeviceMetricsOverride", size)?;
        let colours = json!({ "name": "prefers-color-scheme", "value": if is_dark { "dark" } else { "light" } });
        self.ask("Emulation.setEmulatedMedia", json!({ "features": [colours] })).map(drop)
    }

    /// What an expression gives in the page.
    ///
    /// # Errors
    /// The browser does not answer, or the expression fails.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let asked = json!({ "expression": expression, "returnByValue": true });
        let answer = self.ask("Runtime.evaluate", asked)?;
        match answer.get("exceptionDetails") {
            None => Ok(answer["result"]["value"].clone()),
            Some(why) => Err(Error::Garbled(format!("{expression}: {why}"))),
        }
    }

    /// Waits until the page's text, as it is seen, fulfils this.
    ///
    /// # Errors
    /// The browser does not answer, or the text does not.
    pub fn wait_for_text(&mut self, what: &str, within: Duration, is: impl Fn(&str) -> bool) -> Result<String> {
        let deadline = Instant::now() + within;
        loop {
            let seen = self.evaluate("document.body ? document.body.innerText : ''")?;
            let seen = seen.as_str().unwrap_or_default().to_owned();
            if is(&seen) {
                return Ok(seen);
            }
            if Instant::now() >= deadline {
                return Err(Error::TooLate { what: what.to_owned(), waited: within, tail: seen });
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// A picture of the page, as PNG.
    ///
    /// # Errors
    /// The browser does not answer, or the file cannot be written.
    pub fn picture(&mut self, to: &Path) -> Result<()> {
        let answer = self.ask("Page.captureScreenshot", json!({ "format": "png", "optimizeForSpeed": false }))?;
        let bytes = STANDARD.decode(text(&answer["data"])?).map_err(|error| Error::Garbled(error.to_string()))?;
        fs::write(to, bytes).doing(|| format!("write {}", to.display()))
    }

    /// What the page's console and the browser's log have said so far: errors, and what a policy has refused.
    ///
    /// # Errors
    /// The browser does not answer.
    pub fn complaints(&mut self) -> Result<Vec<String>> {
        self.evaluate("0")?;
        let is_complaint = |event: &&Value| {
            let method = event["method"].as_str().unwrap_or_default();
            ["Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"].contains(&method)
        };
        Ok(self.events.iter().filter(is_complaint).map(|event| event["params"].to_string()).collect())
    }

    /// Sends a command and waits for its answer.
    fn ask(&mut self, method: &str, params: Value) -> Result<Value> {
        self.asked += 1;
        let mut message = json!({ "id": self.asked, "method": method, "params": params });
        if !self.session.is_empty() {
            message["sessionId"] = Value::from(self.session.clone());
        }
        let doing = || format!("ask the browser for {method}");
        self.pipe.write_all(format!("{message}\0").as_bytes()).doing(doing)?;
        let deadline = Instant::now() + LIMIT;
        loop {
            while let Some(end) = self.rest.iter().position(|byte| *byte == 0) {
                let message: Vec<u8> = self.rest.drain(..=end).collect();
                let message: Value = serde_json::from_slice(&message[..end])
                    .map_err(|error| Error::Garbled(format!("the browser: {error}")))?;
                if message["id"].as_u64() != Some(self.asked) {
                    self.events.push_back(message);
                } else if let Some(error) = message.get("error") {
                    return Err(Error::Refused { command: method.to_owned(), reply: error.to_string() });
                } else {
                    return Ok(message["result"].clone());
                }
            }
            let mut bytes = [0; 64 << 10];
            match self.pipe.read(&mut bytes) {
                Ok(0) => return Err(self.gone()),
                Ok(length) => self.rest.extend_from_slice(&bytes[..length]),
                Err(error)
                    if [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::Interrupted].contains(&error.kind()) =>
                {
                    if Instant::now() >= deadline {
                        let (what, tail) = (format!("the browser's answer to {method}"), self.log());
                        return Err(Error::TooLate { what, waited: LIMIT, tail });
                    }
                }
                Err(error) => return Err(error).doing(doing),
            }
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn gone(&mut self) -> Error {
        let status = self.process.wait(LIMIT).ok().flatten();
        let status = status.map_or_else(|| "it has closed its pipe".to_owned(), crate::process::in_words);
        Error::Ended { who: self.process.who(), status, tail: self.log() }
    }
}

fn text(value: &Value) -> Result<String> {
    value.as_str().map(str::to_owned).ok_or_else(|| Error::Garbled(format!("the browser: {value} is not a text")))
}

/// Without a window, a GPU or questions to the network. Its sandbox needs rights that root in a container lacks; it
/// shows only pages of this machine.
const OPTIONS: [&str; 9] = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
];

// One question by HTTP, for pages that our programs and Prometheus serve.

/// How long an answer may take.
const HTTP_LIMIT: Duration = Duration::from_secs(30);

/// Asks for a page, by HTTP/1.0: the answer ends with the connection. `accept`: the header of that name; empty: none.
/// Returns the status, the head, and the text.
///
/// # Errors
/// The server cannot be reached, or what it answers is not HTTP.
pub fn get(address: SocketAddr, path: &str, accept: &str) -> Result<Page> {
    let asked = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, HTTP_LIMIT)?;
        stream.set_read_timeout(Some(HTTP_LIMIT))?;
        let accept = if accept.is_empty() { String::new() } else { format!("Accept: {accept}\r\n") };
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n{accept}\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    let answer = asked().doing(|| format!("get http://{address}{path}"))?;
    let parts = answer.split_once("\r\n\r\n").and_then(|(head, text)| {
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some(Page { status, head: head.to_owned(), text: text.to_owned() })
    });
    parts.ok_or(Error::Garbled(answer))
}

/// What a server answers.
#[derive(Clone, Debug)]
pub struct Page {
    /// Its code, such as 200.
    pub status: u16,
    /// The status line and the headers.
    pub head: String,
    /// The page.
    pub text: String,
}

/// A text as part of an address.
pub(crate) fn quoted(text: &str) -> String {
    let quote = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(quote).collect()
}

// Prometheus: the real one, on loopback, with a folder of its own, and its tool.

/// Where `make setup` puts it.
const IN_PROJECT: &str = ".cache/prometheus";

/// How long it may take to start.
const START_TIME: Duration = Duration::from_secs(60);

/// Ports that are tried: another process may take one before Prometheus does.
const TRIES: usize = 3;

/// A running Prometheus. Dropping it kills it and removes its folder.
#[derive(Debug)]
pub struct Prometheus {
    agent: Agent,
    address: SocketAddr,
    _folder: TempDir,
}

/// A program of the package, `prometheus` or `promtool`.
///
/// # Errors
/// It is not there.
pub fn prometheus_program(name: &str) -> Result<PathBuf> {
    let path = project_root().join(IN_PROJECT).join(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(Error::Missing { what: format!("the program {name}"), how: "run `make setup`".into() })
}

/// Runs promtool with these arguments in a folder, and gives it a text to read.
///
/// # Errors
/// It is not there, or cannot be run.
pub fn promtool(folder: &Path, args: &[&str], input: &str) -> Result<Output> {
    let mut command = Command::new(prometheus_program("promtool")?);
    command.args(args).current_dir(folder).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = || -> std::io::Result<Output> {
        let mut child = crate::process::spawn(command)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A tool that reads nothing has closed it.
            let _ = stdin.write_all(input.as_bytes());
        }
        child.wait_with_output()
    };
    ran().doing(|| "run promtool".to_owned())
}

impl Prometheus {
    /// Starts one that scrapes these addresses each second, as this job, and has these rules.
    ///
    /// # Errors
    /// It is not there, or does not start.
    pub fn start(job: &str, targets: &[SocketAddr], rules: &Path) -> Result<Prometheus> {
        let mut tries = 1;
        loop {
            match Prometheus::try_start(job, targets, rules) {
                Err(error) if tries < TRIES && error.to_string().contains("address already in use") => tries += 1,
                started => return started,
            }
        }
    }

    fn try_start(job: &str, targets: &[SocketAddr], rules: &Path) -> Result<Prometheus> {
        let folder = scratch::folder("prometheus")?;
        let address = SocketAddr::from(([127, 0, 0, 1], scratch::free_port()?));
        // JSON is YAML.
        let config = serde_json::json!({
            "global": { "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s" },
            "rule_files": [rules],
            "scrape_configs": [{
                "job_name": job,
                "static_configs": [{ "targets": targets.iter().map(SocketAddr::to_string).collect::<Vec<_>>() }],
            }],
        });
        let file = folder.path().join("prometheus.yml");
        fs::write(&file, config.to_string()).doing(|| format!("write {}", file.display()))?;
        let mut command = Command::new(prometheus_program("prometheus")?);
        command.current_dir(folder.path()).args([
            format!("--config.file={}", file.display()),
            format!("--storage.tsdb.path={}", folder.path().join("data").display()),
            format!("--web.listen-address={address}"),
            "--log.level=warn".to_owned(),
        ]);
        let mut agent = Agent::run(command)?;
        wait_until("Prometheus to start", START_TIME, || {
            if let Some(status) = agent.ended()? {
                let (who, tail) = ("prometheus".to_owned(), agent.output());
                return Err(Error::Ended { who, status: crate::process::in_words(status), tail });
            }
            Ok(match get(address, "/-/ready", "") {
                Ok(page) if page.status == 200 => Ok(()),
                Ok(page) => Err(page.text),
                Err(error) => Err(error.to_string()),
            })
        })?;
        Ok(Prometheus { agent, address, _folder: folder })
    }

    /// What it has written to its log.
    pub fn log(&self) -> String {
        self.agent.output()
    }

    /// What an expression gives now: the list of `result`, each with `metric` and `value`.
    ///
    /// # Errors
    /// It does not answer, or does not accept the expression.
    pub fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let path = format!("/api/v1/query?query={}", quoted(expression));
        let data = self.ask(&path)?;
        Ok(data["result"].as_array().cloned().unwrap_or_default())
    }

    /// The value of an expression that gives one.
    ///
    /// # Errors
    /// As [`Prometheus::query`]; or it gives none, or several.
    pub fn value(&self, expression: &str) -> Result<f64> {
        let found = self.query(expression)?;
        let value = match &*found {
            [one] => one["value"][1].as_str().and_then(|value| value.parse().ok()),
            _ => None,
        };
        value.ok_or_else(|| Error::Garbled(format!("{expression} gives {found:?}")))
    }

    /// What a page of the API has under `data`.
    ///
    /// # Errors
    /// It does not answer, or answers with an error.
    pub fn ask(&self, path: &str) -> Result<Value> {
        let page = get(self.address, path, "")?;
        let answer: Value = serde_json::from_str(&page.text).map_err(|_| Error::Garbled(page.text.clone()))?;
        if answer["status"] == "success" { Ok(answer["data"].clone()) } else { Err(Error::Garbled(page.text)) }
    }
}
