//! Browser: Debian's Chromium without a window, driven through its debugging pipe, for pages that our programs serve.
//!
//! ```text
//!   Browser ── commands, answers and events: JSON, each ended by a zero byte ──▶ chromium --remote-debugging-pipe
//! ```

use std::collections::VecDeque;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::error::{Doing, Error, Result};
use crate::process::Process;
use crate::scratch;

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
