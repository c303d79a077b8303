//! `remora backup` and `remora restore`: whole files with manifests, the commands since, and moments between.

pub(crate) mod bucket;
mod folder;
mod sealed;

use std::fmt::Display;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use remora_lab::contents::{Contents, differences};
use remora_lab::server::wait_until;
use remora_lab::{Agent, Client, Kind, Server};
use remora_redis::resp::Frame;
use serde_json::Value;

use crate::kit::{LONG, Scene, number, quick};

/// A source that takes another snapshot each time, as often as asked.
const ALWAYS_NEW: [&str; 4] = ["--max-age", "1s", "--fork-interval", "0s"];

impl Scene {
    fn set(&self, number: u64, value: &str) {
        self.primary.client().unwrap().ok(&["SET", &format!("moment {number}"), value]).unwrap();
    }

    /// Waits until all that the primary has written is recorded.
    fn wait_until_recorded(&self) {
        let wanted = number(&self.primary, "master_repl_offset");
        self.source.wait_for_status("the commands to be recorded", |status| {
            let backups = status["replicas"].as_array().unwrap().iter().filter(|replica| replica["name"] == "backup");
            let offsets = backups.filter_map(|replica| replica["applied_offset"].as_u64());
            offsets.max().is_some_and(|offset| offset >= wanted)
        });
    }

    /// All that the primary holds, which writes nothing more by itself, once all of it is recorded.
    fn quiet_contents(&self) -> Contents {
        let client = &mut self.primary.client().unwrap();
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
        if self.primary.kind().expires_hash_fields() {
            keep_fields(client);
        }
        let contents = Contents::of(client).unwrap();
        self.wait_until_recorded();
        contents
    }

    fn restore(&self, from: &str, more: &[&str]) -> String {
        self.stage.end(&[&["restore", from], more].concat(), 0)
    }
}

/// Takes the expiry from all fields of hashes, so that all that live are compared later.
fn keep_fields(client: &mut Client) {
    let texts = |frames: Vec<Frame>| frames.into_iter().filter_map(|frame| frame.into_bytes().ok());
    for database in 0..16 {
        client.ok(&["SELECT", &database.to_string()]).unwrap();
        for key in texts(client.list(&["KEYS", "*hash*"]).unwrap()) {
            if client.call(&[&b"TYPE"[..], &key]).unwrap().as_str() != Some("hash") {
                continue;
            }
            let fields: Vec<Vec<u8>> = texts(client.list(&[&b"HKEYS"[..], &key]).unwrap()).collect();
            // All of them may be over, and the hash still there.
            if fields.is_empty() {
                continue;
            }
            let count = fields.len().to_string().into_bytes();
            let words = [b"HPERSIST".to_vec(), key, b"FIELDS".to_vec(), count];
            client.call(&[&words[..], &fields].concat()).unwrap();
        }
    }
}

/// A server on these data that deletes nothing by itself: it waits for a primary.
fn load(kind: Kind, folder: &str, aof: bool) -> Server {
    let server = quick(kind).config("dir", folder).config("replicaof", "127.0.0.1 1");
    server.config("appendonly", if aof { "yes" } else { "no" }).start().unwrap()
}

/// Fails unless a server that was restored holds this, key by key. A digest would not do: one of a hash whose fields have
/// all expired counts its key, which a server that loads it does not have.
fn assert_holds(restored: &Server, contents: &Contents, what: impl Display) {
    let found = Contents::of(&mut restored.client().unwrap()).unwrap();
    let differences = differences(contents, &found, 10);
    assert!(!contents.is_empty() && differences.is_empty(), "{what}: primary / restored: {differences:#?}");
}

fn json(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Waits until the clock shows a later second, and returns it.
fn next_second() -> u64 {
    let before = now();
    wait_until("the next second", LONG, || Ok(if now() > before { Ok(()) } else { Err(String::new()) })).unwrap();
    now()
}

/// Waits until the agent has said this so often.
fn wait_for_lines(agent: &mut Agent, part: &str, times: usize) {
    wait_until("the agent to say it again", LONG, || {
        let (output, ended) = (agent.output(), agent.ended()?);
        assert!(ended.is_none(), "it has ended: {output}");
        Ok(if output.matches(part).count() >= times { Ok(()) } else { Err(output) })
    })
    .unwrap();
}
