//! The page of a source while three replicas read from it and from each other.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use remora_bench::sync::{Program, Result};
use remora_lab::browser::{Browser, View};
use remora_lab::server::project_root;
use remora_lab::workload::Options as Writes;
use remora_lab::{Agent, Kind, Server, Workload, http, scratch};
use sha2::{Digest as _, Sha256};

use super::made;
use crate::commands::{START_LIMIT, TOKEN, started};

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

const LONGEST: Duration = Duration::from_secs(180);
const VIEW: View = View { width: 1160, height: 720, is_dark: false };

/// The most bytes of one picture in the repository.
const MOST_BYTES: u64 = 150_000;

/// The files that say how the page looks, and where their digests at the time of the pictures are kept.
const FILES: [&str; 3] =
    ["agent/src/metrics/page/page.css", "agent/src/metrics/page/page.html", "agent/src/metrics/page/page.js"];
const DIGESTS: &str = "page.sha256";

pub(super) fn take(program: &Program, folder: &Path) -> Result<()> {
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
        let shown: serde_json::Value = serde_json::from_str(&http::get(metrics, "/status.json", "")?.text)?;
        let last = share(&shown, JOIN[JOIN.len() - 1].0);
        if began.elapsed() >= EARLIEST && last.is_some_and(|share| LAST_HOLDS.contains(&share)) {
            break;
        }
        if began.elapsed() > LONGEST {
            return Err(format!("the last replica never held {LAST_HOLDS:?} of the snapshot: {shown}").into());
        }
    }
    for (name, is_dark) in [("page-light.png", false), ("page-dark.png", true)] {
        // As high as the page is.
        let height = browser.evaluate("document.body.getBoundingClientRect().bottom")?.as_f64().unwrap_or(0.0);
        browser.resize(View { height: height.ceil() as u32, is_dark, ..VIEW })?;
        let path = folder.join(name);
        browser.picture(&path)?;
        made(&path, MOST_BYTES)?;
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

    use super::*;

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
