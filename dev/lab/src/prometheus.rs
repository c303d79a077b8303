//! Prometheus: the real one, on loopback, with a folder of its own, and its tool.

use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::agent::Agent;
use crate::error::{Doing, Error, Result};
use crate::http;
use crate::scratch;
use crate::server::{project_root, wait_until};

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
pub fn program(name: &str) -> Result<PathBuf> {
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
    let mut command = Command::new(program("promtool")?);
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
        let mut command = Command::new(program("prometheus")?);
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
            Ok(match http::get(address, "/-/ready", "") {
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
        let path = format!("/api/v1/query?query={}", http::quoted(expression));
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
        let page = http::get(self.address, path, "")?;
        let answer: Value = serde_json::from_str(&page.text).map_err(|_| Error::Garbled(page.text.clone()))?;
        if answer["status"] == "success" { Ok(answer["data"].clone()) } else { Err(Error::Garbled(page.text)) }
    }
}
