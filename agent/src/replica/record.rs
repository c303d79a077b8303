//! Record: what was changed on the replica's server, written down before it is changed, and put back from there.
//!
//! A sync that ends puts things back by itself. One that is killed leaves this file behind, and the next agent for the same
//! server puts things back first. The file also says which link the server was told to follow: a server that follows a
//! dead link of ours, and holds nothing or half a data set, may be taken again without `--replace`.
//!
//! The folder is `--state-dir`, else `$XDG_STATE_HOME/remora`, else `~/.local/state/remora`.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::once_settled;
use crate::exit::Failure;
use crate::server::{Client, ServerError};

/// The contents of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    /// Settings and their values before the sync.
    settings: Vec<(String, String)>,
    /// The link that the server was told to follow, as `host:port`.
    link: Option<String>,
}

/// See the module's text.
pub(super) struct Record {
    path: PathBuf,
    contents: Contents,
}

/// A file of ours has a few hundred bytes.
const FILE_LIMIT: u64 = 64 * 1024;

impl Record {
    /// The record for the server at that address; empty if there is none.
    pub(super) fn open(state_dir: Option<&Path>, server: &str) -> Result<Record, Failure> {
        let folder = state_dir.map_or_else(default_folder, Path::to_path_buf);
        let name: String = server.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let path = folder.join(format!("server-{name}.json"));
        fs::create_dir_all(&folder).map_err(|cause| unusable(&folder, &cause))?;
        let mut text = Vec::new();
        let contents = match File::open(&path) {
            Ok(file) => {
                file.take(FILE_LIMIT).read_to_end(&mut text).map_err(|cause| unusable(&path, &cause))?;
                // A file cut short by a crash was written before anything was changed: there is nothing to put back.
                serde_json::from_slice(&text).unwrap_or_default()
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Contents::default(),
            Err(error) => return Err(unusable(&path, &error)),
        };
        Ok(Record { path, contents })
    }

    /// Whether the server was told to follow this address by an agent that did not finish.
    pub(super) fn is_our_link(&self, host: &str, port: u16) -> bool {
        self.contents.link.as_deref() == Some(&format!("{host}:{port}"))
    }

    /// Writes down the link, before the server hears of it.
    pub(super) fn note_link(&mut self, host: &str, port: u16) -> Result<(), Failure> {
        self.contents.link = Some(format!("{host}:{port}"));
        self.save()
    }

    /// Sets a setting on the server, after writing down what it was. Gives back whether the server took it.
    pub(super) async fn change(
        &mut self,
        client: &mut Client,
        name: &str,
        before: &str,
        value: &str,
    ) -> Result<bool, Failure> {
        if before == value {
            return Ok(true);
        }
        self.contents.settings.push((name.to_string(), before.to_string()));
        self.save()?;
        match once_settled(client, &["CONFIG", "SET", name, value]).await {
            Ok(_) => Ok(true),
            Err(ServerError::Refused { .. }) => {
                self.contents.settings.pop();
                self.save()?;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Puts the settings back.
    pub(super) async fn put_back(&mut self, client: &mut Client) -> Result<(), ServerError> {
        if self.contents.settings.is_empty() {
            return Ok(());
        }
        while let Some((name, value)) = self.contents.settings.last().cloned() {
            once_settled(client, &["CONFIG", "SET", &name, &value]).await?;
            tracing::debug!(%name, %value, "a setting of the server is put back");
            self.contents.settings.pop();
        }
        // Until the file says so too, putting back once more does no harm.
        let _ = self.save();
        Ok(())
    }

    /// All is as it was: the file goes.
    pub(super) fn close(&self) {
        if self.contents.settings.is_empty() {
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Replaces the file in one step, so that it is never half written.
    fn save(&self) -> Result<(), Failure> {
        let fresh = self.path.with_extension("new");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&fresh)?;
            file.write_all(&serde_json::to_vec_pretty(&self.contents)?)?;
            file.sync_all()?;
            fs::rename(&fresh, &self.path)
        };
        write().map_err(|cause| unusable(&self.path, &cause))
    }
}

fn default_folder() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    from("XDG_STATE_HOME")
        .or_else(|| from("HOME").map(|home| home.join(".local/state")))
        .unwrap_or_else(|| PathBuf::from("/var/lib"))
        .join("remora")
}

fn unusable(path: &Path, cause: &std::io::Error) -> Failure {
    Failure::local(format!(
        "the state directory can't be used: {}: {cause}; make room there or name another folder with --state-dir",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_record_outlives_the_agent_that_wrote_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::open(Some(folder.path()), "redis://127.0.0.1:1").unwrap();
        record.contents.settings.push(("repl-diskless-load".into(), "disabled".into()));
        record.note_link("127.0.0.1", 4321).unwrap();
        drop(record);
        let again = Record::open(Some(folder.path()), "redis://127.0.0.1:1").unwrap();
        assert!(again.is_our_link("127.0.0.1", 4321) && !again.is_our_link("127.0.0.1", 4322));
        assert_eq!(again.contents.settings.len(), 1);
        let other = Record::open(Some(folder.path()), "redis://127.0.0.1:2").unwrap();
        assert_eq!(other.contents, Contents::default());
    }

    #[test]
    fn a_record_cut_short_is_an_empty_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::open(Some(folder.path()), "x").unwrap();
        record.note_link("h", 1).unwrap();
        fs::write(&record.path, b"{\"settings\": [").unwrap();
        assert_eq!(Record::open(Some(folder.path()), "x").unwrap().contents, Contents::default());
    }
}
