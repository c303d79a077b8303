//! Commands: append-only files, read to their end or to a moment.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use remora_redis::aof::FileKind;
use serde::Serialize;

use super::AofFolder;
use crate::commands_file::{AofFile, End};
use crate::manifest::checked_snapshot;
use crate::options::Pass;
use remora_base::moment::Moment;
use remora_process::exit::Failure;
use remora_process::rdb_file::RdbFile;

/// What the commands of a backup are.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Commands {
    /// Files that a server loads.
    pub(super) files: usize,
    /// Bytes of them, without the snapshot.
    pub(super) bytes: u64,
    pub(super) commands: u64,
    pub(super) transactions: u64,
    /// Commands that change the map of a cluster. A backup of an earlier release may have some.
    pub(super) cluster_changes: u64,
    /// The first and the last second that they name.
    #[serde(skip)]
    pub(super) first: Option<Moment>,
    #[serde(skip)]
    pub(super) last: Option<Moment>,
    /// The last byte of the stream at the last mark.
    #[serde(skip)]
    pub(super) offset: Option<u64>,
    /// Why some of the bytes are left out; empty if none are.
    pub(super) left_out: String,
    /// Bytes of the last file that are used.
    #[serde(skip)]
    pub(super) last_bytes: u64,
    /// The moment is the one after the clock went back: what stands before may be of later seconds.
    #[serde(skip)]
    pub(super) is_after_a_step: bool,
}

/// What the first bytes of a snapshot are.
const MAGICS: [&[u8]; 2] = [b"REDIS", b"VALKEY"];

/// Reads all files of a folder, up to the end of the second `until`. `pass`: which one, if the clock went back. Returns
/// the snapshot, if the base is one.
///
/// # Errors
/// A file cannot be read or is damaged, a file that others follow is cut off, no times are named although one is asked
/// for, or the second is there twice and `pass` does not say which one is meant.
pub(super) fn check(
    folder: &AofFolder,
    until: Option<Moment>,
    pass: Option<Pass>,
) -> Result<(Option<RdbFile>, Commands), Failure> {
    let (mut base, mut all) = (None, Commands::default());
    let mut has_times = false;
    let last_pass = until.map_or(Ok(None), |until| last_pass(folder, until))?;
    // What is behind the second, and yet before the file in which it is reached again.
    let is_before_last = |number| last_pass.as_ref().is_some_and(|last: &LastPass| number < last.file);
    for (number, file) in folder.manifest.files.iter().enumerate() {
        let path = folder.path.join(&file.name);
        all.files = number + 1;
        if file.kind == FileKind::Base && is_snapshot(&path)? {
            let rdb = checked_snapshot(&path)?;
            all.last_bytes = rdb.bytes;
            if let (Some(until), Some(last)) = (until.filter(|until| rdb.taken > *until), &last_pass) {
                all.is_after_a_step = last.is_meant(pass, until, folder)?;
            }
            base = Some(rdb);
            continue;
        }
        let is_last = number + 1 == folder.manifest.files.len();
        let mut read = AofFile::read(&path, until)?;
        if let (End::Cut, true, Some(until), Some(last)) = (&read.end, is_before_last(number), until, &last_pass)
            && last.is_meant(pass, until, folder)?
        {
            all.is_after_a_step = true;
            read = AofFile::read(&path, None)?;
        }
        if folder.is_checked {
            read.refuse_what_is_not_checked(&path, is_last)?;
        }
        has_times |= read.has_times;
        all.add(&read);
        match read.end {
            End::Whole => {}
            End::Cut => {
                let rest = folder.manifest.files.len() - number - 1;
                all.left_out =
                    format!("all behind byte {} of {}, and {rest} more files (--until)", read.used, file.name);
                break;
            }
            End::Torn(length) if is_last => {
                let torn = length - read.used;
                all.left_out =
                    format!("the last {torn} bytes of {}: they are no whole command or transaction", file.name);
            }
            End::Torn(_) => {
                return Err(Failure::refused(format!(
                    "{} ends in the middle of a command or transaction, and other files follow it: the backup is damaged",
                    path.display()
                )));
            }
        }
    }
    if until.is_some() && !has_times && all.commands > 0 {
        return Err(Failure::refused(format!(
            "{} does not say at which times its commands were run (aof-timestamp-enabled), so --until cannot be found",
            folder.path.display()
        )));
    }
    Ok((base, all))
}

/// Where a second is reached for the last time.
struct LastPass {
    /// The number of the file of commands.
    file: usize,
    /// The second with which that file begins.
    begins: Moment,
}

/// The last file that begins before or in this second. Within a file seconds only grow, so what is before this file and
/// of a later second shows that the clock went back.
fn last_pass(folder: &AofFolder, until: Moment) -> Result<Option<LastPass>, Failure> {
    for (number, file) in folder.manifest.files.iter().enumerate().rev() {
        let path = folder.path.join(&file.name);
        if file.kind == FileKind::Base && is_snapshot(&path)? {
            continue;
        }
        if let Some(begins) = AofFile::first_second(&path)?.filter(|begins| *begins <= until) {
            return Ok(Some(LastPass { file: number, begins }));
        }
    }
    Ok(None)
}

impl LastPass {
    /// Whether this one is meant, of several.
    ///
    /// # Errors
    /// It is not said.
    fn is_meant(&self, pass: Option<Pass>, until: Moment, folder: &AofFolder) -> Result<bool, Failure> {
        match pass {
            Some(pass) => Ok(pass == Pass::Last),
            None => Err(Failure::refused(format!(
                "{} has the second {until} twice: the clock of the host that wrote it went back, to {}. Give --until-pass first \
                 for the data before it went back, or --until-pass last for those after",
                folder.path.display(),
                self.begins
            ))),
        }
    }
}

fn is_snapshot(path: &Path) -> Result<bool, Failure> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(6).read_to_end(&mut bytes));
    read.map_err(|error| Failure::refused(format!("{} cannot be read: {error}", path.display())))?;
    Ok(MAGICS.iter().any(|magic| bytes.starts_with(magic)))
}

impl Commands {
    fn add(&mut self, file: &AofFile) {
        self.bytes += file.used;
        self.commands += file.commands;
        self.transactions += file.transactions;
        self.cluster_changes += file.cluster;
        self.first = self.first.or(file.first);
        self.last = file.last.or(self.last);
        self.offset = file.mark.map(|mark| mark.offset).or(self.offset);
        self.last_bytes = file.used;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::aof::{Manifest, NamedFile};
    use remora_redis::resp::command;

    use super::*;

    /// A folder with these files of commands: each key is set in that second.
    fn folder(at: &Path, files: &[&[(u64, &str)]]) -> AofFolder {
        let mut named = Vec::new();
        for (number, commands) in (1..).zip(files) {
            let mut text = Vec::new();
            for (second, key) in *commands {
                text.extend_from_slice(format!("#TS:{second}\r\n").as_bytes());
                command(&mut text, &[&b"SET"[..], key.as_bytes(), b"1"]);
            }
            let name = format!("appendonly.aof.{number}.incr.aof");
            std::fs::write(at.join(&name), text).unwrap();
            named.push(NamedFile { name, number, kind: FileKind::Incremental });
        }
        AofFolder { path: at.to_owned(), list: String::new(), manifest: Manifest { files: named }, is_checked: false }
    }

    #[test]
    fn a_second_that_is_there_twice_is_refused_until_it_is_said_which_one_is_meant() {
        let temporary = tempfile::tempdir().unwrap();
        let files: &[&[(u64, &str)]] =
            &[&[(1000, "a")], &[(4000, "b"), (5000, "c")], &[(2000, "d"), (3000, "e")], &[(6000, "f")]];
        let folder = folder(temporary.path(), files);
        let commands = |until: u64, pass| {
            let read = check(&folder, Some(Moment::seconds(until)), pass);
            read.map(|(_, commands)| commands.commands).map_err(|failure| failure.message)
        };
        // Before the clock had reached it, and after it had passed the highest one again.
        for pass in [None, Some(Pass::First), Some(Pass::Last)] {
            assert_eq!(commands(1500, pass), Ok(1));
            assert_eq!(commands(5500, pass), Ok(5));
            assert_eq!(commands(9000, pass), Ok(6));
        }
        for (until, first, last) in [(2000, 1, 4), (2500, 1, 4), (4000, 2, 5), (4999, 2, 5)] {
            let refused = commands(until, None).unwrap_err();
            let moment = Moment::seconds(until).to_string();
            assert!(refused.contains(&moment) && refused.contains("--until-pass first"), "{refused}");
            assert_eq!(commands(until, Some(Pass::First)), Ok(first), "{until}");
            assert_eq!(commands(until, Some(Pass::Last)), Ok(last), "{until}");
        }
    }

    #[test]
    fn where_the_clock_never_went_back_no_second_is_in_question() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = folder(temporary.path(), &[&[(10, "a"), (20, "b")], &[(20, "c"), (30, "d")]]);
        for (until, count) in [(9, 0), (10, 1), (20, 3), (25, 3), (30, 4)] {
            let (_, commands) = check(&folder, Some(Moment::seconds(until)), None).unwrap();
            assert_eq!(commands.commands, count, "{until}");
        }
    }
}
