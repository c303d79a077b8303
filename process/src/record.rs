//! Record: the settings that the agent changes on its server. Each is written to a file before the change.
//!
//! A sync that ends restores the settings and removes the file. If the agent is killed, the file stays, and the next
//! agent for the same server restores them first. The file also names the link that the server was pointed at. A server
//! that follows the link of a killed agent, and holds nothing or half a data set, may be used again without
//! `--replace`.
//!
//! A setting is restored only while it has a value that an agent set. Any other value comes from an operator, and
//! stays. Only the settings in [`OURS`] are restored, so a forged file cannot change others.
//!
//! A source has a file of its own for its server, for the settings of `--tune-server`.
//!
//! The folder is `--state-dir`, else `$XDG_STATE_HOME/remora`, else `~/.local/state/remora`. The file can hold a
//! password (`masterauth`), so only its owner can read it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use remora_redis::resp::Frame;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::checked_json::{self, Checksum};
use crate::exit::{Code, Failure};
use remora_base::files::{self, Claim, Folder};
use remora_server::own_changes::Counted;
use remora_server::{Client, ServerError};

/// The settings that an agent changes. No other setting is ever restored.
const OURS: [&str; 6] = [DISKLESS_LOAD, LOGIN[0], LOGIN[1], SAVE, SYNC_DELAY, COMPRESSION];

/// How the server loads a snapshot.
pub const DISKLESS_LOAD: &str = "repl-diskless-load";

/// When the server saves its data by itself.
pub const SAVE: &str = "save";

/// The server's password for its primary: the name in Redis and Valkey, and Valkey's second name.
pub const LOGIN: [&str; 2] = ["masterauth", "primaryauth"];

/// How long the server waits, in seconds, before it forks for its first replica.
pub const SYNC_DELAY: &str = "repl-diskless-sync-delay";

/// Whether the server compresses the strings of a snapshot.
pub const COMPRESSION: &str = "rdbcompression";

/// The values of `repl-diskless-load` that agents set. Records of older agents do not say which one it was.
const DISKLESS_LOADS: [&str; 2] = ["on-empty-db", "flush-before-load"];

/// The contents of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    /// From 2 on, the file has a checksum.
    #[serde(default)]
    version: u32,
    settings: Vec<Setting>,
    /// The link that the server was pointed at, as `host:port`.
    link: Option<String>,
    /// The primary that the server followed before, as `host:port`.
    #[serde(default)]
    former: Option<String>,
    /// How often the server's configuration file had been written before the sync.
    #[serde(default)]
    rewrites: Option<Rewrites>,
    /// What the server had counted before the sync of errors and of keys that it removed by itself.
    #[serde(default)]
    counted: Option<Counted>,
    /// What the agent has raised at the Sentinels.
    #[serde(default)]
    raised: Option<Raised>,
    /// The file that the server is to be restarted on.
    #[serde(default)]
    placed: Option<Placed>,
}

/// A snapshot that was put in the place of a server's RDB file. The server was not seen in step on it yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// Where it is.
    pub file: PathBuf,
    /// Its number in the file system.
    pub inode: u64,
    /// Where the file is that was there before.
    pub former: Option<PathBuf>,
    /// The server's run that was to be restarted.
    pub run_id: Option<String>,
}

/// The fail-over time of a group, which the agent has raised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Raised {
    /// The name of the group.
    pub name: String,
    /// What the agent has set, in milliseconds.
    pub set: u64,
    /// What it was before, at each Sentinel.
    pub before: Vec<(String, u64)>,
}

/// How often a server had written its configuration file (`CONFIG REWRITE`) in one of its runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rewrites {
    /// Which run of the server.
    pub run_id: Option<String>,
    /// How often.
    pub calls: u64,
}

/// Writes the server's configuration file.
pub const REWRITE: [&str; 2] = ["CONFIG", "REWRITE"];

/// How `INFO commandstats` names the calls of `CONFIG REWRITE`, from Redis 7 on.
const REWRITE_CALLS: &str = "cmdstat_config|rewrite";

impl Rewrites {
    /// How often the file was written since the server's start; `None` if the server does not count that.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn calls(client: &mut Client) -> Result<Option<u64>, ServerError> {
        let stats = client.info("commandstats").await?;
        if stats.iter().all(|(name, _)| !name.starts_with("cmdstat_")) {
            return Ok(None);
        }
        // Servers list only what was called. Before Redis 7 there is one line for all of CONFIG.
        let calls = stats.get(REWRITE_CALLS).and_then(|line| line.strip_prefix("calls="));
        let is_split = stats.iter().any(|(name, _)| name.starts_with("cmdstat_config|"));
        let calls = calls.and_then(|calls| calls.split(',').next()?.parse().ok());
        Ok(calls.or(is_split.then_some(0)))
    }
}

/// A setting that was changed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Stored")]
struct Setting {
    name: String,
    /// Its value before the sync.
    before: Value,
    /// The values that it was given.
    set: Vec<Value>,
}

/// The value of a setting: any bytes, such as those of a password.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredValue", into = "StoredValue")]
struct Value(Vec<u8>);

/// A value as the file has it.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum StoredValue {
    Text(String),
    /// Bytes that are no text.
    Bytes {
        bytes: Vec<u8>,
    },
}

impl From<StoredValue> for Value {
    fn from(stored: StoredValue) -> Value {
        match stored {
            StoredValue::Text(text) => Value(text.into_bytes()),
            StoredValue::Bytes { bytes } => Value(bytes),
        }
    }
}

impl From<Value> for StoredValue {
    fn from(Value(bytes): Value) -> StoredValue {
        match String::from_utf8(bytes) {
            Ok(text) => StoredValue::Text(text),
            Err(error) => StoredValue::Bytes { bytes: error.into_bytes() },
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value(text.as_bytes().to_vec())
    }
}

/// The formats of the file: older agents wrote pairs of a name and the former value.
#[derive(Deserialize)]
#[serde(untagged)]
enum Stored {
    Pair(String, String),
    Setting { name: String, before: Value, set: Vec<Value> },
}

impl From<Stored> for Setting {
    fn from(stored: Stored) -> Setting {
        match stored {
            Stored::Setting { name, before, set } => Setting { name, before, set },
            Stored::Pair(name, before) => {
                let values: &[&str] = if name == DISKLESS_LOAD { &DISKLESS_LOADS } else { &[] };
                Setting {
                    name,
                    before: Value::from(&*before),
                    set: values.iter().map(|text| Value::from(*text)).collect(),
                }
            }
        }
    }
}

/// Prints the name only: a value can be a password.
impl std::fmt::Debug for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setting").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The settings that this agent changed on one server, kept in a file.
// Larger than the bound: a method to note and one to read for each thing that outlives an agent.
pub struct Record {
    folder: Folder,
    name: String,
    /// The name by which an older agent left the file, as long as that file is there.
    old_name: Option<String>,
    contents: Contents,
    /// Whether the file holds entries that the contents no longer have.
    is_stale: bool,
    /// Keeps other agents away.
    _claim: Option<Claim>,
}

/// How long the guard of an agent that was killed holds the file: a few commands of the server.
const GUARD_LASTS: Duration = Duration::from_secs(2);

/// The version of the file that this program writes.
const VERSION: u32 = 2;

/// Bytes of the file that are read at most. A record has a few hundred.
const FILE_LIMIT: u64 = 64 * 1024;

/// Characters of the address in the name of a file, for people. File systems allow 255 bytes in a name.
const NAME_CHARS: usize = 100;

/// Bytes of the hash of the address in the name, which keep two servers apart.
const NAME_HASH_BYTES: usize = 8;

impl Record {
    /// The record for the server at that address; empty if there is none.
    pub fn open(state_dir: Option<&Path>, server: &str) -> Result<Record, Failure> {
        Record::read(folder(state_dir)?, server, None)
    }

    /// As [`Record::claim`], and waits a moment for the guard of an agent that was killed.
    pub async fn claim_after_a_guard(state_dir: Option<&Path>, server: &str) -> Result<Record, Failure> {
        let until = tokio::time::Instant::now() + GUARD_LASTS;
        loop {
            match Record::claim(state_dir, server) {
                Err(failure) if failure.code == Code::Refused && tokio::time::Instant::now() < until => {
                    tokio::time::sleep(GUARD_LASTS / 20).await;
                }
                claimed => return claimed,
            }
        }
    }

    /// The same as [`Record::open`], and keeps other agents from the server until the record is dropped. Keeps them
    /// from the whole folder if that is `--state-dir`, where the slots of one sync are.
    pub fn claim(state_dir: Option<&Path>, server: &str) -> Result<Record, Failure> {
        let folder = folder(state_dir)?;
        let [name, _] = file_names(server);
        let lock = name.replace(".json", ".lock");
        let (claim, path) = match state_dir {
            Some(path) => (folder.claim(), path.to_path_buf()),
            None => (folder.claim_file(&lock), folder.path_of(&lock)),
        };
        match claim.map_err(|cause| unusable(&path, &cause))? {
            Some(claim) => Record::read(folder, server, Some(claim)),
            None if state_dir.is_some() => Err(Failure::refused(format!(
                "another remora replica works with the state folder {}: name another one with --state-dir, or stop that agent",
                path.display()
            ))),
            None => Err(Failure::refused(format!(
                "another remora replica works on the server {server} (it has locked {}): stop that agent first",
                path.display()
            ))),
        }
    }

    /// The record of what a source has changed on the server at that address; `None` if another source holds it.
    pub fn of_a_source(state_dir: Option<&Path>, server: &str) -> Result<Option<Record>, Failure> {
        let (folder, key) = (folder(state_dir)?, of_source(server));
        let lock = file_names(&key)[0].replace(".json", ".lock");
        let claim = folder.claim_file(&lock).map_err(|cause| unusable(&folder.path_of(&lock), &cause))?;
        claim.map(|claim| Record::read(folder, &key, Some(claim))).transpose()
    }

    /// Whether settings are changed.
    pub fn has_settings(&self) -> bool {
        !self.contents.settings.is_empty()
    }

    /// Whether the server's login to its primary is changed.
    pub fn has_login(&self) -> bool {
        self.login().is_some()
    }

    /// Whether the server has a password of its own for its primary, which is changed.
    pub fn has_password(&self) -> bool {
        self.login().is_some_and(|login| !login.before.0.is_empty())
    }

    fn login(&self) -> Option<&Setting> {
        self.contents.settings.iter().find(|setting| LOGIN.contains(&&*setting.name))
    }

    fn read(folder: Folder, server: &str, claim: Option<Claim>) -> Result<Record, Failure> {
        let [name, old_name] = file_names(server);
        let read = |name: &str| folder.read(name, FILE_LIMIT).map_err(|cause| unusable(&folder.path_of(name), &cause));
        let (text, old_name) = match read(&name)? {
            Some(text) => (Some(text), None),
            None => {
                let text = read(&old_name)?;
                let there = text.is_some().then_some(old_name);
                (text, there)
            }
        };
        let contents = match text.as_deref() {
            None | Some([]) => Contents::default(),
            Some(text) => Contents::parse(text).map_err(|what| {
                let file = folder.path_of(old_name.as_ref().unwrap_or(&name));
                Failure::refused(format!(
                    "the record file {} is damaged ({what}): it says which settings of the server an agent has changed, and what they \
                     were; compare masterauth, save and repl-diskless-load of the server with its configuration, and remove the file",
                    file.display()
                ))
            })?,
        };
        Ok(Record { folder, name, old_name, contents, is_stale: false, _claim: claim })
    }

    /// Whether an agent that did not finish pointed the server at this address.
    pub fn is_our_link(&self, host: &str, port: u16) -> bool {
        self.contents.link.as_deref() == Some(&format!("{host}:{port}"))
    }

    /// Writes the link's address to the file. Call it before `REPLICAOF`.
    pub fn note_link(&mut self, host: &str, port: u16) -> Result<(), Failure> {
        self.contents.link = Some(format!("{host}:{port}"));
        self.save()
    }

    /// The primary that the server followed before an agent changed it, as the last agent has noted it.
    pub fn former(&self) -> Option<(String, u16)> {
        let (host, port) = self.contents.former.as_deref()?.rsplit_once(':')?;
        Some((host.to_string(), port.parse().ok()?))
    }

    /// Notes the primary that the server follows before the sync. Written with the link.
    pub fn note_former(&mut self, primary: Option<(&str, u16)>) {
        self.contents.former = primary.map(|(host, port)| format!("{host}:{port}"));
    }

    /// What the agent has raised at the Sentinels.
    pub fn raised(&self) -> Option<&Raised> {
        self.contents.raised.as_ref()
    }

    /// Writes to the file what the agent raises at the Sentinels. Call it before.
    pub fn note_raised(&mut self, raised: Option<Raised>) -> Result<(), Failure> {
        self.contents.raised = raised;
        self.save()
    }

    /// The file that the server is to be restarted on.
    pub fn placed(&self) -> Option<&Placed> {
        self.contents.placed.as_ref()
    }

    /// Writes to the file which file the server is to be restarted on. Call it before the file gets its name.
    pub fn note_placed(&mut self, placed: Option<Placed>) -> Result<(), Failure> {
        self.contents.placed = placed;
        self.save()
    }

    /// What was last noted of the server's configuration file.
    pub fn rewrites(&self) -> Option<&Rewrites> {
        self.contents.rewrites.as_ref()
    }

    /// What was last noted of the server's counts.
    pub fn counted(&self) -> Option<&Counted> {
        self.contents.counted.as_ref()
    }

    /// Notes what the server had counted before the sync. Written with the link.
    pub fn note_counted(&mut self, counted: Counted) {
        self.contents.counted = Some(counted);
    }

    /// Notes how often the file was written before the sync. Written with the link.
    pub fn note_rewrites(&mut self, rewrites: Option<Rewrites>) {
        self.contents.rewrites = rewrites;
    }

    /// The value that a setting had before agents changed it; `present` is its value now.
    pub fn original(&self, name: &str, present: &[u8]) -> Vec<u8> {
        let ours = self.contents.settings.iter().find(|setting| setting.name == name && setting.is_ours(present));
        ours.map_or(present, |setting| &setting.before.0).to_vec()
    }

    /// Writes the value `before` the sync to the file, then changes the setting on the server. Returns whether the
    /// server accepted the change.
    pub async fn change(
        &mut self,
        client: &mut Client,
        name: &str,
        before: &[u8],
        value: &[u8],
    ) -> Result<bool, Failure> {
        let saved = self.contents.settings.clone();
        match self.contents.settings.iter_mut().find(|setting| setting.name == name) {
            None if before == value => return Ok(true),
            None => self.contents.settings.push(Setting {
                name: name.to_string(),
                before: Value(before.to_vec()),
                set: vec![Value(value.to_vec())],
            }),
            Some(setting) => {
                setting.before = Value(before.to_vec());
                if !setting.is_ours(value) {
                    setting.set.push(Value(value.to_vec()));
                }
            }
        }
        self.save()?;
        match client.command_once_settled(&[b"CONFIG".as_slice(), b"SET", name.as_bytes(), value]).await {
            Ok(_) => Ok(true),
            Err(ServerError::Refused { .. }) => {
                self.contents.settings = saved;
                self.save()?;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Restores all settings.
    pub async fn put_back(&mut self, client: &mut Client) -> Result<(), ServerError> {
        self.put_back_those(client, |_| true).await?;
        self.save_if_stale();
        Ok(())
    }

    /// Restores all settings but the server's login to its primary, which the link still needs.
    pub async fn put_back_but_the_login(&mut self, client: &mut Client) -> Result<(), ServerError> {
        self.put_back_those(client, |name| !LOGIN.contains(&name)).await?;
        self.save_if_stale();
        Ok(())
    }

    /// Restores only the server's login to its primary. The file is written later, to keep the hand-off short. Until
    /// then it names a value that the server no longer has. An agent that reads it leaves the setting as it is.
    pub async fn put_the_login_back(&mut self, client: &mut Client) -> Result<(), ServerError> {
        self.put_back_those(client, |name| LOGIN.contains(&name)).await
    }

    async fn put_back_those(&mut self, client: &mut Client, wanted: impl Fn(&str) -> bool) -> Result<(), ServerError> {
        let mut at = self.contents.settings.len();
        while at > 0 {
            at -= 1;
            let setting = self.contents.settings[at].clone();
            if wanted(&setting.name) {
                setting.put_back(client).await?;
                self.contents.settings.remove(at);
                self.is_stale = true;
            }
        }
        Ok(())
    }

    /// Removes the file. All settings have been restored.
    pub fn close(&self) {
        let Contents { settings, raised, placed, .. } = &self.contents;
        if settings.is_empty() && raised.is_none() && placed.is_none() {
            let _ = self.folder.remove(&self.name);
            self.remove_the_old_file();
        }
    }

    /// Writes the file if settings were restored since it was last written.
    pub fn save_if_stale(&mut self) {
        // An entry too many does no harm: a setting with another value is left as it is.
        if self.is_stale && self.save().is_ok() {
            self.is_stale = false;
        }
    }

    fn save(&mut self) -> Result<(), Failure> {
        let write = |text: serde_json::Result<Vec<u8>>| self.folder.replace(&self.name, &text?);
        write(checked_json::to_json(&Contents { version: VERSION, ..self.contents.clone() }))
            .map_err(|cause| unusable(&self.folder.path_of(&self.name), &cause))?;
        self.remove_the_old_file();
        self.old_name = None;
        Ok(())
    }

    fn remove_the_old_file(&self) {
        if let Some(name) = &self.old_name {
            let _ = self.folder.remove(name);
        }
    }
}

impl Contents {
    fn parse(text: &[u8]) -> Result<Contents, String> {
        let contents: Contents = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        match checked_json::check(text) {
            Checksum::Right => Ok(contents),
            Checksum::Missing if contents.version < VERSION => Ok(contents),
            Checksum::Missing | Checksum::Wrong => Err("its checksum does not match".to_owned()),
        }
    }
}

impl Setting {
    /// Whether an agent gave the setting this value.
    fn is_ours(&self, value: &[u8]) -> bool {
        self.set.iter().any(|set| set.0 == value)
    }

    /// Restores the setting's former value if its present value is one that an agent set.
    async fn put_back(&self, client: &mut Client) -> Result<(), ServerError> {
        let Setting { name, before, .. } = self;
        if !OURS.contains(&name.as_str()) {
            tracing::warn!(%name, "the record file names a setting that no agent changes; it is not put back");
            return Ok(());
        }
        let Some(present) = present(client, name).await? else {
            tracing::warn!(%name, "the server does not know a setting of the record file; it is not put back");
            return Ok(());
        };
        if self.is_ours(&present) {
            client.command_once_settled(&[b"CONFIG".as_slice(), b"SET", name.as_bytes(), &before.0]).await?;
            tracing::debug!(%name, "a setting of the server is put back");
        } else if present != before.0 {
            tracing::info!(%name, "a setting of the server was changed by another client meanwhile; it is left as it is");
        }
        Ok(())
    }
}

/// Whether a source has left a record for the server at that address. Creates no folder.
pub fn is_left_by_a_source(state_dir: Option<&Path>, server: &str) -> bool {
    let folder = state_dir.map_or_else(default_folder, Path::to_path_buf);
    let [name, _] = file_names(&of_source(server));
    folder.join(name).exists()
}

/// The present value of a setting; `None` if the server does not know it.
pub async fn present(client: &mut Client, name: &str) -> Result<Option<Vec<u8>>, ServerError> {
    let Frame::Array(pair) = client.command_once_settled(&["CONFIG", "GET", name]).await? else { return Ok(None) };
    match pair.into_iter().nth(1) {
        Some(Frame::Bulk(value)) => Ok(Some(value)),
        _ => Ok(None),
    }
}

/// The name of the file for the server at that address, and the name that older agents used. With the older name,
/// addresses that differ only in punctuation had the same file.
fn file_names(server: &str) -> [String; 2] {
    let plain: String = server.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let hash: String = Sha256::digest(server)[..NAME_HASH_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
    let short: String = plain.chars().take(NAME_CHARS).collect();
    [format!("server-{short}-{hash}.json"), format!("server-{plain}.json")]
}

/// The address under which a source's record is kept: a replica's agent may have one for the same server.
fn of_source(server: &str) -> String {
    format!("source of {server}")
}

fn folder(state_dir: Option<&Path>) -> Result<Folder, Failure> {
    let path = state_dir.map_or_else(default_folder, Path::to_path_buf);
    Folder::open(&path).map_err(|cause| unusable(&path, &cause))
}

fn default_folder() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    from("XDG_STATE_HOME")
        .or_else(|| from("HOME").map(|home| home.join(".local/state")))
        .unwrap_or_else(|| PathBuf::from("/var/lib"))
        .join("remora")
}

fn unusable(path: &Path, cause: &std::io::Error) -> Failure {
    if files::is_unsafe(cause) {
        return Failure::refused(format!("the state directory is not safe to use: {cause}"));
    }
    Failure::local(format!(
        "the state directory can't be used: {}: {cause}; make room there or name another folder with --state-dir",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;

    fn setting(name: &str, before: &str, set: &[&str]) -> Setting {
        Setting { name: name.into(), before: before.into(), set: set.iter().map(|text| Value::from(*text)).collect() }
    }

    fn path(record: &Record) -> PathBuf {
        record.folder.path_of(&record.name)
    }

    #[test]
    fn a_record_outlives_the_agent_that_wrote_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::open(Some(folder.path()), "redis://127.0.0.1:1").unwrap();
        record.contents.settings.push(setting("repl-diskless-load", "disabled", &["on-empty-db"]));
        record.note_link("127.0.0.1", 4321).unwrap();
        drop(record);
        let again = Record::open(Some(folder.path()), "redis://127.0.0.1:1").unwrap();
        assert!(again.is_our_link("127.0.0.1", 4321) && !again.is_our_link("127.0.0.1", 4322));
        assert_eq!(again.contents.settings, [setting("repl-diskless-load", "disabled", &["on-empty-db"])]);
        let other = Record::open(Some(folder.path()), "redis://127.0.0.1:2").unwrap();
        assert_eq!(other.contents, Contents::default());
    }

    #[test]
    fn every_changed_byte_of_a_record_is_found_and_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::open(Some(folder.path()), "x").unwrap();
        record.contents.settings.push(setting("masterauth", "hunter2", &["5ec4e7"]));
        record.note_link("h", 1).unwrap();
        let path = path(&record);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(&path, &changed).unwrap();
            let Err(failure) = Record::open(Some(folder.path()), "x") else { panic!("byte {at}") };
            assert!(failure.message.contains(path.to_str().unwrap()), "byte {at}: {failure}");
        }
        fs::write(&path, b"{\"settings\": [").unwrap();
        assert!(Record::open(Some(folder.path()), "x").is_err());
        fs::write(&path, b"").unwrap();
        assert_eq!(Record::open(Some(folder.path()), "x").unwrap().contents, Contents::default());
    }

    #[test]
    fn values_are_kept_as_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let values =
            [&b"\xFF\x80"[..], b"\"quoted\" 'twice' \\", b" with spaces\r\nand lines\n", b"a\0b\0", b"", b"text"];
        for bytes in values {
            let mut record = Record::open(Some(folder.path()), "x").unwrap();
            let set = vec![Value(b"ours".to_vec()), Value(bytes.to_vec())];
            record.contents.settings = vec![Setting { name: "masterauth".into(), before: Value(bytes.to_vec()), set }];
            record.note_link("h", 1).unwrap();
            let again = Record::open(Some(folder.path()), "x").unwrap();
            assert_eq!(again.contents.settings, record.contents.settings, "{bytes:?}");
            assert_eq!(again.original("masterauth", b"ours"), bytes);
            assert_eq!(again.original("masterauth", b"other"), b"other");
        }
    }

    #[test]
    fn two_servers_never_share_a_record() {
        let folder = tempfile::tempdir().unwrap();
        let long = "x".repeat(300);
        let names = ["redis://db-1:1", "redis://db_1:1", "redis://db:1/1", long.as_str(), &long[1..]];
        for name in names {
            Record::open(Some(folder.path()), name).unwrap().note_link(name, 1).unwrap();
        }
        for name in names {
            assert!(Record::open(Some(folder.path()), name).unwrap().is_our_link(name, 1), "{name}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), names.len());
    }

    #[test]
    fn a_record_of_an_older_agent_is_read_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let old = folder.path().join("server-redis___h_1.json");
        let text = r#"{"settings": [["repl-diskless-load", "disabled"], ["masterauth", "x"]], "link": "127.0.0.1:9"}"#;
        fs::write(&old, text).unwrap();
        let mut record = Record::open(Some(folder.path()), "redis://h:1").unwrap();
        assert!(record.is_our_link("127.0.0.1", 9));
        assert_eq!(record.original("repl-diskless-load", b"on-empty-db"), b"disabled");
        assert_eq!(record.original("repl-diskless-load", b"swapdb"), b"swapdb");
        assert_eq!(record.original("masterauth", b"x"), b"x", "no older agent changed it");
        record.note_link("127.0.0.1", 10).unwrap();
        assert!(!old.exists());
        assert!(Record::open(Some(folder.path()), "redis://h:1").unwrap().is_our_link("127.0.0.1", 10));
    }

    #[test]
    fn a_record_does_not_show_its_values() {
        let shown = format!("{:?}", setting("masterauth", "hunter2", &["5ec4e7"]));
        assert!(shown.contains("masterauth") && !shown.contains("hunter2") && !shown.contains("5ec4e7"), "{shown}");
    }
}
