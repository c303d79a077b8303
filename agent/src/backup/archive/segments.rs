//! Segments: the commands since a snapshot, as objects that never change.
//!
//! ```text
//!   recorder ──▶ a file without a name ── large enough, or old enough ──▶ object ──▶ commands.json says that it is there
//! ```
//!
//! A segment is a file of commands with a head of its own. While the snapshot still arrives, the files wait: the
//! database with which they begin is in the snapshot, and so is their backup's name.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_redis::rdb::crc64;

use super::super::head::{HEAD_BYTES, head};
use super::super::journal::files::{Files, Finished};
use super::super::manifest::Manifest;
use super::super::moment::Moment;
use super::super::rdb_file::RdbFile;
use super::super::store::put;
use super::layout::{Reached, reached_key, segment_key};
use super::{Archive, PIECE};
use crate::exit::Failure;

/// Where the commands of one backup go.
#[derive(Debug)]
pub(in super::super) struct Segments {
    archive: Arc<Archive>,
    /// A segment is sent when it is as old or as large as this.
    limits: Limits,
    state: Mutex<State>,
}

/// When a segment is sent.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Limits {
    pub(in super::super) age: Duration,
    pub(in super::super) bytes: u64,
}

#[derive(Debug)]
struct State {
    /// The name of the backup, once it has one.
    name: Option<String>,
    /// The database that the stream writes to until it selects one, once the snapshot has said it.
    database: Option<u64>,
    /// Files that have ended, and wait for the name.
    waiting: Vec<Ended>,
    /// The file that is written.
    present: Begun,
    reached: Reached,
}

/// What is known at a file's beginning.
#[derive(Clone, Copy, Debug)]
struct Begun {
    at: Instant,
    second: Moment,
    /// The offset in its head, if the database there is not known.
    unselected: Option<u64>,
}

/// A file that has ended.
#[derive(Debug)]
struct Ended {
    file: File,
    bytes: u64,
    begun: Begun,
    offset: u64,
    database: Option<u64>,
    noted: Moment,
}

impl Segments {
    /// Those of a backup that begins.
    pub(in super::super) fn new(archive: Arc<Archive>, limits: Limits) -> Segments {
        Segments::of(archive, limits, None, None, Reached::default())
    }

    /// Those of a backup that goes on.
    pub(in super::super) fn again(archive: Arc<Archive>, limits: Limits, name: String, reached: Reached) -> Segments {
        Segments::of(archive, limits, Some(name), Some(reached.database), reached)
    }

    fn of(
        archive: Arc<Archive>,
        limits: Limits,
        name: Option<String>,
        database: Option<u64>,
        reached: Reached,
    ) -> Segments {
        let present = Begun { at: Instant::now(), second: Moment::now(), unselected: None };
        let state = Mutex::new(State { name, database, waiting: Vec::new(), present, reached });
        Segments { archive, limits, state }
    }

    /// What it holds is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the snapshot that has arrived and the commands until now, and makes them a backup. Returns the manifest
    /// with its name.
    ///
    /// # Errors
    /// The store cannot be written to.
    pub(in super::super) fn publish(&self, rdb: &RdbFile, manifest: &Manifest) -> Result<Manifest, Failure> {
        let name = self.archive.free_name(manifest)?;
        let mut manifest = manifest.clone();
        manifest.name.clone_from(&name);
        self.archive.begin(&name)?;
        self.archive.send_snapshot(rdb, &mut manifest)?;
        let mut reached = Reached { offset: rdb.offset, database: rdb.stream_db, ..Reached::default() };
        loop {
            // Commands go on meanwhile.
            let waiting = std::mem::take(&mut self.state().waiting);
            if waiting.is_empty() {
                break;
            }
            self.send_all(waiting, &name, rdb.stream_db, &mut reached)?;
        }
        let mut state = self.state();
        let waiting = std::mem::take(&mut state.waiting);
        self.send_all(waiting, &name, rdb.stream_db, &mut reached)?;
        self.say(&name, &reached)?;
        self.archive.publish(&manifest)?;
        (state.name, state.database, state.reached) = (Some(name), Some(rdb.stream_db), reached);
        Ok(manifest)
    }

    fn send_all(&self, all: Vec<Ended>, name: &str, database: u64, reached: &mut Reached) -> Result<(), Failure> {
        all.into_iter().try_for_each(|ended| self.send(ended, name, database, reached))
    }

    /// Sends a file. `database`: the one of a stream that has not selected any.
    fn send(&self, ended: Ended, name: &str, database: u64, reached: &mut Reached) -> Result<(), Failure> {
        let unreadable = |error: io::Error| Failure::local(format!("{}: {error}", self.archive.spool().display()));
        if let Some(offset) = ended.begun.unselected {
            ended.file.write_all_at(&head(database, offset), 0).map_err(unreadable)?;
        }
        let sealed = self.archive.sealed(Part::of(&ended.file, ended.bytes)).map_err(unreadable)?;
        let (file, bytes) = sealed.as_ref().map_or((&ended.file, ended.bytes), |(file, bytes)| (file, *bytes));
        let crc = checksum(&mut Part::of(file, bytes)).map_err(unreadable)?;
        let key = segment_key(name, reached.segments + 1, ended.begun.second, crc, sealed.is_some());
        let sent = self.archive.send(&key, Part::of(file, bytes), bytes, None)?;
        if sent != (bytes, crc) {
            return Err(unreadable(io::Error::other("a file without a name has changed")));
        }
        *reached = Reached {
            segments: reached.segments + 1,
            offset: ended.offset,
            database: ended.database.unwrap_or(database),
            noted_seconds: ended.noted,
            ..Reached::default()
        };
        Ok(())
    }

    /// Says how far the segments reach.
    fn say(&self, name: &str, reached: &Reached) -> Result<(), Failure> {
        self.archive.check_writer()?;
        let json = reached.to_json()?;
        put(self.archive.store(), &reached_key(name), &json)
    }

    /// Takes the present file as one that has ended.
    fn ended(&self, state: &mut State, file: Finished<'_>) -> io::Result<()> {
        let Finished { file, bytes, offset, database, noted } = file;
        let ended = Ended { file: file.try_clone()?, bytes, begun: state.present, offset, database, noted };
        let (Some(name), Some(known)) = (state.name.clone(), state.database) else {
            state.waiting.push(ended);
            return Ok(());
        };
        let mut reached = state.reached.clone();
        let sent = self.archive.check_writer().and_then(|()| self.send(ended, &name, known, &mut reached));
        sent.and_then(|()| self.say(&name, &reached)).map_err(io::Error::other)?;
        state.reached = reached;
        Ok(())
    }
}

impl Files for Segments {
    fn name(&self) -> String {
        self.archive.store().address(self.state().name.as_deref().unwrap_or_default())
    }

    fn is_due(&self, bytes: u64) -> bool {
        if bytes >= self.limits.bytes {
            return true;
        }
        let state = self.state();
        bytes > HEAD_BYTES as u64 && state.name.is_some() && state.present.at.elapsed() >= self.limits.age
    }

    fn next(&self, before: Option<Finished<'_>>, database: Option<u64>, offset: u64) -> io::Result<(File, u64)> {
        let mut state = self.state();
        if let Some(before) = before {
            self.ended(&mut state, before)?;
        }
        let mut file = tempfile::tempfile_in(self.archive.spool())?;
        let known = database.or(state.database);
        file.write_all(&head(known.unwrap_or(0), offset))?;
        let unselected = if known.is_none() { Some(offset) } else { None };
        state.present = Begun { at: Instant::now(), second: Moment::now(), unselected };
        Ok((file, HEAD_BYTES as u64))
    }

    fn sync(&self, _: &File) -> io::Result<()> {
        // A file without a name outlives nothing.
        Ok(())
    }

    fn end(&self, last: Finished<'_>) -> io::Result<()> {
        let mut state = self.state();
        // A head and a mark say nothing new.
        if last.offset <= state.reached.offset && state.name.is_some() {
            return Ok(());
        }
        self.ended(&mut state, last)
    }
}

/// The bytes of a file, from its beginning, whatever its position is.
struct Part<'a> {
    file: &'a File,
    at: u64,
    bytes: u64,
}

impl Part<'_> {
    fn of(file: &File, bytes: u64) -> Part<'_> {
        Part { file, at: 0, bytes }
    }
}

impl Read for Part<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(usize::try_from(self.bytes - self.at).unwrap_or(usize::MAX));
        let length = self.file.read_at(into.get_mut(..most).unwrap_or_default(), self.at)?;
        self.at += length as u64;
        Ok(length)
    }
}

fn checksum(from: &mut impl Read) -> io::Result<u64> {
    let (mut crc, mut piece) = (0, vec![0; PIECE]);
    loop {
        match from.read(&mut piece) {
            Ok(0) => return Ok(crc),
            Ok(length) => crc = crc64(crc, piece.get(..length).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
