//! Recorder: the replication stream as files of commands.
//!
//! A server that loads a file gets nothing that has no effect on data: `PING`, `REPLCONF`, `PUBLISH`, and what changes
//! the map of a cluster, where a restored node has another place. Their bytes stand in notes, which servers skip, so
//! that a file has every byte of the stream. An expiry that counts from the moment of its command (Redis 6.2) is
//! followed by the same as a time of the calendar, since the file is loaded much later. Before the first command of a
//! second stands how far the stream is, and which second it is: never within a transaction. A file never ends there
//! unless the process is killed. Seconds never go back within a file: where the clock of this host does, the next file
//! begins.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use remora_redis::aof::{Found, Relative, TIME_NOTE, Verb, Walker};
use remora_redis::rdb::crc64;
use remora_redis::resp;

use crate::commands_file::{ADDED, AofFile, AsideNote, HEAD_BYTES, Mark, NOTE_END};
use remora_base::units::Moment;
use remora_process::exit::Failure;

/// Bytes that wait for the file at most, besides the last chunk.
const WAITING_BYTES: usize = 1 << 20;

/// Writes a stream into [`Files`].
#[derive(Debug)]
pub(crate) struct Recorder {
    files: Arc<dyn Files>,
    walker: Walker,
    /// Whether the stream has selected a database since the snapshot.
    selected: bool,
    /// A command whose name has not arrived yet.
    pending: Vec<u8>,
    /// The command of which a part has arrived.
    verb: Option<Verb>,
    /// What the file has not got yet.
    waiting: Vec<u8>,
    /// What no server is to get, since the last effect.
    aside: Vec<u8>,
    /// How many of these bytes are whole commands outside of a transaction.
    aside_whole: usize,
    file: File,
    /// Length of the file.
    length: u64,
    /// Where the file can be cut: the end of the last whole command or transaction.
    border: u64,
    /// The database that is selected there.
    border_database: u64,
    /// The last second that was noted before it.
    border_noted: Moment,
    /// The last second that was noted.
    noted: Moment,
    /// The file has bytes that may not be on the disk.
    is_dirty: bool,
    /// Commands or many bytes of the stream have come since the last mark.
    marked: u64,
    /// Checksum of what the file has behind its head, with the first bytes that wait for it.
    sum: u64,
    /// How many of the waiting bytes it has.
    summed: usize,
    /// Checksum of what the file has behind its head up to the border.
    border_sum: u64,
    /// Where the last whole command or transaction ends that the files have, in the stream.
    taken: u64,
    /// Whether a script has come.
    has_script: bool,
    /// When it had all that the source had. `None`: before this process.
    in_step: Option<Instant>,
}

/// How much later than it was written a command may be recorded for which the time matters. Longer, and its time is not
/// known: the journal has none.
const LATE_LIMIT: Duration = Duration::from_secs(5);

/// A clock that goes back by no more than this is corrected: commands count for the last second until it has passed
/// again. Once more, and the seconds are noted anew.
const STEP_BACK_SECONDS: u64 = 2;

/// Bytes of the stream without a command after which a mark is worth its place.
const MARK_EVERY: u64 = 64 << 10;

/// Bytes that no server is to get, and that wait for a command with an effect: a `PING` alone is not worth a write.
const ASIDE_BYTES: usize = 64 << 10;

/// Why a stream could not be recorded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// The files cannot be written.
    #[error(transparent)]
    Disk(#[from] io::Error),
    /// The stream is not one of commands.
    #[error(transparent)]
    Stream(#[from] remora_redis::aof::WalkError),
    /// Keys would live longer than on the primary.
    #[error(
        "the stream has expiries that count from the moment of their command, as Redis 6.2 writes them, and it is not known when \
         those that came while the backup was away were written"
    )]
    TimeUnknown,
}

impl Recorder {
    /// Begins the first file, behind a snapshot at this offset.
    pub(crate) fn begin(files: Arc<dyn Files>, offset: u64) -> io::Result<Recorder> {
        let file = files.next(None, None, offset)?;
        Ok(Recorder::new(files, Walker::of_stream(offset + 1, 0), file))
    }

    fn new(files: Arc<dyn Files>, walker: Walker, (file, length): (File, u64)) -> Recorder {
        Recorder {
            files,
            selected: false,
            pending: Vec::new(),
            verb: None,
            waiting: Vec::new(),
            aside: Vec::new(),
            aside_whole: 0,
            file,
            length,
            border: length,
            border_database: walker.database(),
            border_noted: Moment::default(),
            noted: Moment::default(),
            is_dirty: false,
            marked: walker.position(),
            sum: 0,
            summed: 0,
            border_sum: 0,
            taken: walker.border(),
            has_script: false,
            in_step: Some(Instant::now()),
            walker: walker.keeping_keys(),
        }
    }

    /// Goes on behind this byte of the stream, with another file.
    pub(crate) fn go_on(files: Arc<dyn Files>, offset: u64, database: u64, noted: Moment) -> io::Result<Recorder> {
        let file = files.next(None, Some(database), offset)?;
        let recorder = Recorder::new(files, Walker::of_stream(offset + 1, database), file);
        Ok(Recorder { selected: true, noted, border_noted: noted, in_step: None, ..recorder })
    }

    /// Goes on in the last file, which is at this path, behind its last mark: what follows is cut off, and comes again.
    ///
    /// # Errors
    /// The file cannot be used, or has no mark.
    pub(crate) fn resume(files: Arc<dyn Files>, path: &Path) -> Result<Recorder, Failure> {
        let walk = AofFile::read(path, None)?;
        let Some(mark) = walk.mark else {
            return Err(Failure::refused(format!("{} has no mark from which to go on", path.display())));
        };
        let unusable = |error: io::Error| Failure::local(format!("{} cannot be used: {error}", path.display()));
        let file = File::options().read(true).write(true).open(path).map_err(unusable)?;
        // The head's own mark has a note of the head behind it.
        let ends = walk.mark_ends.max(HEAD_BYTES as u64);
        if file.metadata().map_err(unusable)?.len() < ends {
            return Err(unusable(io::Error::other("its head is cut off")));
        }
        file.set_len(ends).and_then(|()| file.sync_all()).map_err(unusable)?;
        let walker = Walker::of_stream(mark.offset + 1, walk.mark_database);
        let recorder = Recorder::new(files, walker, (file, ends));
        let noted = walk.mark_noted.unwrap_or_default();
        let sum = walk.mark_sum;
        Ok(Recorder { selected: true, noted, border_noted: noted, sum, border_sum: sum, in_step: None, ..recorder })
    }

    /// Where its files go, for messages.
    pub(crate) fn name(&self) -> String {
        self.files.name()
    }

    /// The byte of the stream that it needs next.
    pub(crate) fn next_byte(&self) -> u64 {
        self.walker.position()
    }

    /// The last byte of the stream that is recorded with its whole command and transaction.
    pub(crate) fn recorded(&self) -> u64 {
        self.taken.saturating_sub(1)
    }

    /// The last second that was noted.
    pub(crate) fn noted(&self) -> Moment {
        self.noted
    }

    /// Takes the next bytes of the stream, as they arrive.
    pub(crate) fn take_now(&mut self, bytes: &[u8]) -> Result<(), RecordError> {
        let is_known = self.in_step.is_some_and(|in_step| in_step.elapsed() < LATE_LIMIT);
        self.take(bytes, Moment::now(), is_known.then(milliseconds))
    }

    /// It has taken all that the source has now.
    pub(crate) fn is_in_step(&mut self) {
        self.in_step = Some(Instant::now());
    }

    /// Takes the next bytes of the stream. `written`: when the primary wrote them, in milliseconds since 1970; `None`:
    /// that is not known.
    pub(crate) fn take(&mut self, bytes: &[u8], now: Moment, written: Option<u64>) -> Result<(), RecordError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (taken, found) = self.walker.feed(rest)?;
            let (part, after) = rest.split_at(taken);
            rest = after;
            match self.verb {
                None => self.pending.extend_from_slice(part),
                Some(verb) if verb.has_effect() => self.waiting.extend_from_slice(part),
                Some(_) => self.aside.extend_from_slice(part),
            }
            match found {
                Some(Found::Verb(verb)) => self.begun(verb, now)?,
                Some(Found::Command { verb, .. }) => {
                    if let Some(relative) = self.walker.relative() {
                        expire(&mut self.waiting, relative, written)?;
                    } else if self.walker.late().is_some() && verb == Verb::Other && !self.has_script {
                        self.has_script = true;
                        tracing::warn!(
                            "the stream has scripts as such (lua-replicate-commands is off at the primary): expiries that they \
                             set count from the moment at which the backup is restored"
                        );
                    }
                    self.ended(verb)?;
                }
                Some(Found::Note(_)) | None => {}
            }
            if self.aside.len() >= ASIDE_BYTES {
                self.put_aside();
            }
            if self.waiting.len() >= WAITING_BYTES {
                self.write()?;
            }
        }
        Ok(self.write()?)
    }

    /// A command has begun.
    fn begun(&mut self, verb: Verb, now: Moment) -> io::Result<()> {
        self.verb = Some(verb);
        let begun = std::mem::take(&mut self.pending);
        if !verb.has_effect() {
            self.aside.extend_from_slice(&begun);
            return Ok(());
        }
        if !self.walker.is_in_transaction() && now.get().saturating_add(STEP_BACK_SECONDS) < self.noted.get() {
            tracing::warn!(
                "the clock of this host went back from {} to {now}: the backup has the seconds between them twice, and remora restore \
                 --until asks which ones are meant",
                self.noted
            );
            self.roll()?;
            (self.noted, self.border_noted) = (Moment::default(), Moment::default());
        }
        if !self.walker.is_in_transaction() && now > self.noted {
            self.mark();
            self.waiting.extend_from_slice(TIME_NOTE);
            self.waiting.extend_from_slice(now.get().to_string().as_bytes());
            self.waiting.extend_from_slice(NOTE_END);
            self.noted = now;
        }
        self.put_aside();
        self.waiting.extend_from_slice(&begun);
        Ok(())
    }

    /// Notes what no server is to get. Behind what is whole of it is a border.
    fn put_aside(&mut self) {
        let mut aside = std::mem::take(&mut self.aside);
        let (whole, part) = aside.split_at_checked(self.aside_whole).unwrap_or((&aside, &[]));
        if !whole.is_empty() {
            AsideNote::write(whole, &mut self.waiting);
            self.at_border();
        }
        AsideNote::write(part, &mut self.waiting);
        aside.clear();
        (self.aside, self.aside_whole) = (aside, 0);
    }

    /// A command has ended.
    fn ended(&mut self, verb: Verb) -> io::Result<()> {
        self.verb = None;
        self.selected |= verb == Verb::Select;
        if self.walker.is_in_transaction() {
            return Ok(());
        }
        self.aside_whole = self.aside.len();
        self.at_border();
        self.taken = self.walker.border();
        (self.border_database, self.border_noted) = (self.walker.database(), self.noted);
        if self.files.is_due(self.border) { self.roll() } else { Ok(()) }
    }

    /// Ends the file, and begins the next one. Only at a border.
    fn roll(&mut self) -> io::Result<()> {
        self.mark();
        self.write()?;
        self.files.sync(&self.file)?;
        let (database, offset) = (self.database(), self.recorded());
        (self.file, self.length) = self.files.next(Some(self.finished()), database, offset)?;
        (self.border, self.is_dirty) = (self.length, false);
        (self.sum, self.summed, self.border_sum) = (0, 0, 0);
        Ok(())
    }

    /// The database at the border; `None` if the stream has not selected one since the snapshot.
    fn database(&self) -> Option<u64> {
        self.selected.then_some(self.border_database)
    }

    /// The file as one that ends at the border. Only once it does.
    fn finished(&self) -> Finished<'_> {
        let (bytes, offset, noted) = (self.length, self.recorded(), self.border_noted);
        Finished { file: &self.file, bytes, offset, database: self.database(), noted }
    }

    /// Notes how far the stream is. Only at a border.
    fn mark(&mut self) {
        self.put_aside();
        self.sum_up();
        Mark::behind(self.recorded(), self.sum).write(&mut self.waiting);
        self.at_border();
        self.marked = self.walker.border();
    }

    /// What has been taken ends at a border.
    fn at_border(&mut self) {
        self.sum_up();
        self.border = self.length + self.waiting.len() as u64;
        self.border_sum = self.sum;
    }

    /// Takes the waiting bytes into the checksum.
    fn sum_up(&mut self) {
        self.sum = crc64(self.sum, self.waiting.get(self.summed..).unwrap_or_default());
        self.summed = self.waiting.len();
    }

    fn write(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        self.is_dirty = true;
        self.file.write_all_at(&self.waiting, self.length)?;
        self.sum_up();
        self.length += self.waiting.len() as u64;
        self.waiting.clear();
        self.summed = 0;
        Ok(())
    }

    /// Brings what has been taken to the disk.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        let is_at_border = self.walker.is_between() && !self.walker.is_in_transaction();
        let passed = self.walker.position() - self.marked;
        if is_at_border && passed > 0 && (self.is_dirty || passed >= MARK_EVERY) {
            self.mark();
        }
        self.write()?;
        if self.is_dirty {
            self.files.sync(&self.file)?;
            self.is_dirty = false;
        }
        if is_at_border && self.files.is_due(self.border) { self.roll() } else { Ok(()) }
    }

    /// Ends the last file at a border, with a mark, on the disk.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.aside.truncate(self.aside_whole);
        self.write()?;
        if self.length > self.border {
            self.file.set_len(self.border)?;
            (self.length, self.sum) = (self.border, self.border_sum);
        }
        self.mark();
        self.write()?;
        self.files.end(self.finished())
    }
}

/// Milliseconds since 1970, by this host's clock.
fn milliseconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// Appends the time of the calendar at which a key expires, behind the command that sets its expiry.
fn expire(waiting: &mut Vec<u8>, relative: Relative<'_>, written: Option<u64>) -> Result<(), RecordError> {
    // Of a command that fails everywhere nothing becomes.
    let Some(milliseconds) = relative.milliseconds else { return Ok(()) };
    let (Some(key), Some(written)) = (relative.key, written) else { return Err(RecordError::TimeUnknown) };
    let at = i64::try_from(written).unwrap_or(i64::MAX).saturating_add(milliseconds);
    waiting.extend_from_slice(ADDED);
    resp::command(waiting, &[&b"PEXPIREAT"[..], key, at.to_string().as_bytes()]);
    Ok(())
}

// Files: where a recorder's files of commands go. Each begins with a head, and ends with a whole command or
// transaction.

/// Where the files go. Files follow one another without a gap.
pub(crate) trait Files: Debug + Send + Sync {
    /// The place, for messages.
    fn name(&self) -> String;

    /// Whether a file of this length is to be followed by another one.
    fn is_due(&self, bytes: u64) -> bool;

    /// Begins the next file with a head. `before`: the file that it follows. `database`: the one that the stream has
    /// selected. `offset`: how far the stream is. Returns the file and its length.
    fn next(&self, before: Option<Finished<'_>>, database: Option<u64>, offset: u64) -> io::Result<(File, u64)>;

    /// Brings a file's data to where they outlive the process.
    fn sync(&self, file: &File) -> io::Result<()>;

    /// The last file has ended.
    fn end(&self, last: Finished<'_>) -> io::Result<()>;
}

/// A file that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished<'a> {
    pub(crate) file: &'a File,
    pub(crate) bytes: u64,
    /// The last byte of the stream in it.
    pub(crate) offset: u64,
    /// The database that is selected there; `None` if the stream has not selected one since the snapshot.
    pub(crate) database: Option<u64>,
    /// The last second that was noted.
    pub(crate) noted: Moment,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::PathBuf;

    use proptest::prelude::*;
    use remora_redis::resp::command;

    use super::*;
    use crate::commands_file::{reaches, write_stream};
    use crate::journal::sets::Place;

    impl Recorder {
        /// Takes bytes that were written at the beginning of that second.
        fn take_at(&mut self, bytes: &[u8], now: Moment) {
            self.take(bytes, now, Some(now.get() * 1000)).unwrap();
        }
    }

    fn recorder(folder: &Path, file_size: u64) -> Recorder {
        let place = Arc::new(Place::create(folder.to_owned(), file_size).unwrap());
        Recorder::begin(place, 100).unwrap()
    }

    fn resume(folder: &Path) -> Recorder {
        let (place, path) = Place::reopen(folder, 1 << 20).unwrap();
        Recorder::resume(Arc::new(place), &path).unwrap()
    }

    fn file(folder: &Path, number: u64) -> String {
        let path = folder.join(format!("appendonlydir/appendonly.aof.{number}.incr.aof"));
        String::from_utf8(std::fs::read(path).unwrap()).unwrap()
    }

    fn commands(all: &[&[&str]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        all.iter().for_each(|words| command(&mut bytes, words));
        bytes
    }

    fn aside(all: &[&[&str]]) -> Vec<u8> {
        let mut notes = Vec::new();
        AsideNote::write(&commands(all), &mut notes);
        notes
    }

    /// The stream behind offset 100 out of all files of commands, and its end.
    fn stream(folder: &Path) -> Result<(Vec<u8>, u64), Failure> {
        let path = |number| folder.join(format!("appendonlydir/appendonly.aof.{number}.incr.aof"));
        let files: Vec<PathBuf> = (1..).map(path).take_while(|path| path.exists()).collect();
        let out = tempfile::NamedTempFile::new().unwrap();
        let end = write_stream(&files, 100, (out.path(), out.as_file()), &|| true)?;
        assert_eq!(files.last().and_then(|last| reaches(last)), Some(end));
        Ok((std::fs::read(out.path()).unwrap(), end))
    }

    #[test]
    fn the_stream_is_recorded_without_what_has_no_effect_and_with_its_times() {
        let temporary = tempfile::tempdir().unwrap();
        for piece in [1, 7, 1000] {
            let folder = temporary.path().join(piece.to_string());
            std::fs::create_dir(&folder).unwrap();
            let mut recorder = recorder(&folder, 1 << 20);
            let first = commands(&[&["PING"], &["SELECT", "3"], &["SET", "a", "1"], &["REPLCONF", "GETACK", "*"]]);
            let second = commands(&[&["MULTI"], &["SET", "b", "2"], &["PUBLISH", "c", "SET"], &["EXEC"], &["PING"]]);
            let third = commands(&[&["PING"], &["DEL", "a"]]);
            for (at, bytes) in [(1000, &first), (1000, &second), (1002, &third)] {
                bytes.chunks(piece).for_each(|bytes| recorder.take_at(bytes, Moment::seconds(at)));
            }
            recorder.sync().unwrap();
            let all = first.len() + second.len() + third.len();
            assert_eq!((recorder.next_byte(), recorder.recorded()), (101 + all as u64, 100 + all as u64));
            let text = file(&folder, 1);
            let (head, body) = text.split_at(128);
            assert!(head.starts_with("*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n#REMORA:100\r\n# "), "{head:?}");
            let mut wanted = String::new();
            let mut put = |mark: Option<usize>, text: &[u8]| {
                if let Some(offset) = mark {
                    let mut note = Vec::new();
                    Mark::behind(offset as u64, crc64(0, wanted.as_bytes())).write(&mut note);
                    wanted += &String::from_utf8(note).unwrap();
                }
                wanted += std::str::from_utf8(text).unwrap();
            };
            let ping = "*1\r\n$4\r\nPING\r\n".len();
            put(None, &aside(&[&["PING"]]));
            put(Some(100 + ping), b"#TS:1000\r\n");
            put(None, &commands(&[&["SELECT", "3"], &["SET", "a", "1"]]));
            put(None, &aside(&[&["REPLCONF", "GETACK", "*"]]));
            put(None, &commands(&[&["MULTI"], &["SET", "b", "2"]]));
            put(None, &aside(&[&["PUBLISH", "c", "SET"]]));
            put(None, &commands(&[&["EXEC"]]));
            put(None, &aside(&[&["PING"], &["PING"]]));
            put(Some(100 + first.len() + second.len() + ping), b"#TS:1002\r\n");
            put(None, &commands(&[&["DEL", "a"]]));
            put(Some(100 + all), b"");
            assert_eq!(body, wanted, "in pieces of {piece}");
            assert_eq!(stream(&folder).unwrap(), ([first, second, third].concat(), recorder.recorded()));
        }
    }

    /// A part of a stream: with an effect or without, in a transaction or not, with a time that counts from its moment.
    fn parts() -> impl Strategy<Value = Vec<u8>> {
        let long = "x".repeat(2_000);
        let one = prop_oneof![
            Just(commands(&[&["PING"]])),
            Just(commands(&[&["REPLCONF", "GETACK", "*"]])),
            Just(commands(&[&["PUBLISH", "c", &long]])),
            Just(commands(&[&["SET", "a", "#REMORA:7\r\n#TS:1\r\n"]])),
            Just(commands(&[&["SET", "a", "1", "PX", "1500"]])),
            Just(commands(&[&["SELECT", "3"]])),
        ];
        let some = |least, most| prop::collection::vec(one.clone(), least..most).prop_map(|parts| parts.concat());
        prop_oneof![
            3 => some(1, 4),
            1 => some(0, 4).prop_map(|parts| [commands(&[&["MULTI"]]), parts, commands(&[&["EXEC"]])].concat()),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn files_have_every_byte_of_the_stream_whatever_it_is_and_whenever_the_recorder_is_killed(
            parts in prop::collection::vec(parts(), 1..20),
            steps in prop::collection::vec((1..4_000_usize, 0..5_u8, 0..3_u64), 1..40),
            file_size in 200..6_000_u64,
        ) {
            let sent = parts.concat();
            let temporary = tempfile::tempdir().unwrap();
            let place = Arc::new(Place::create(temporary.path().to_owned(), file_size).unwrap());
            let (mut recorder, mut second) = (Recorder::begin(place, 100).unwrap(), 1000);
            for (piece, what, passed) in steps {
                second += passed;
                let from = (recorder.next_byte() - 101) as usize;
                let bytes = &sent[from..sent.len().min(from + piece)];
                recorder.take_at(bytes, Moment::seconds(second));
                match what {
                    0 => recorder.sync().unwrap(),
                    1 => {
                        // Killed: the last file is cut behind its last mark, or the backup was ended in order.
                        if piece % 2 == 0 {
                            recorder.finish().unwrap();
                        }
                        let numbers = (1..).take_while(|number| {
                            temporary.path().join(format!("appendonlydir/appendonly.aof.{number}.incr.aof")).exists()
                        });
                        let list: String = std::iter::once("file b.rdb seq 1 type b\n".to_owned())
                            .chain(numbers.map(|n| format!("file appendonly.aof.{n}.incr.aof seq {n} type i\n")))
                            .collect();
                        std::fs::write(temporary.path().join("appendonlydir/appendonly.aof.manifest"), list).unwrap();
                        let (place, path) = Place::reopen(temporary.path(), file_size).unwrap();
                        recorder = Recorder::resume(Arc::new(place), &path).unwrap();
                    }
                    _ => {}
                }
                if what == 0 {
                    let (read, end) = stream(temporary.path()).unwrap();
                    prop_assert!(read[..] == sent[..(end - 100) as usize]);
                }
            }
            recorder.finish().unwrap();
            let (read, end) = stream(temporary.path()).unwrap();
            prop_assert_eq!(end, recorder.recorded());
            prop_assert!(read[..] == sent[..(end - 100) as usize]);
        }
    }

    #[test]
    fn a_file_that_lacks_bytes_of_the_stream_is_not_taken_for_it() {
        let temporary = tempfile::tempdir().unwrap();
        let mut recorder = recorder(temporary.path(), 1 << 20);
        recorder.take_at(&commands(&[&["SET", "a", "1"], &["PING"], &["SET", "b", "1"]]), Moment::seconds(5));
        recorder.finish().unwrap();
        let path = temporary.path().join("appendonlydir/appendonly.aof.1.incr.aof");
        let text = std::fs::read_to_string(&path).unwrap();
        let (head, body) = text.split_at(HEAD_BYTES);
        // As a program wrote it that left out what has no effect. Its checksums are right.
        let note = String::from_utf8(aside(&[&["PING"]])).unwrap();
        let (before, _) = body.split_once("#REMORA:1").map(|(before, _)| (before.to_owned(), ())).unwrap();
        let mut without = head.to_owned() + &before;
        let rest = body[before.len()..].replace(&note, "");
        let at = rest.rfind("#REMORA:").unwrap();
        without += &rest[..at];
        let mut mark = Vec::new();
        let sum = crc64(0, &without.as_bytes()[HEAD_BYTES..]);
        Mark::behind(recorder.recorded(), sum).write(&mut mark);
        without += std::str::from_utf8(&mark).unwrap();
        std::fs::write(&path, without).unwrap();
        AofFile::read(&path, None).unwrap().refuse_what_is_not_checked(&path, true).unwrap();
        let why = stream(temporary.path()).unwrap_err().message;
        assert!(why.contains("not have all bytes of the stream") && why.contains(path.to_str().unwrap()), "{why}");
    }

    #[test]
    fn files_are_followed_by_others_at_a_border_and_never_within_a_transaction() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(folder.path(), 300);
        let long = "x".repeat(200);
        recorder.take_at(&commands(&[&["SELECT", "7"], &["MULTI"], &["SET", "a", &long]]), Moment::seconds(5));
        recorder.take_at(&commands(&[&["SET", "b", &long], &["EXEC"], &["SET", "c", "1"]]), Moment::seconds(5));
        recorder.finish().unwrap();
        let (first, second) = (file(folder.path(), 1), file(folder.path(), 2));
        assert!(first.contains("EXEC\r\n#REMORA:"), "{first:?}");
        assert!(second.starts_with("*2\r\n$6\r\nSELECT\r\n$1\r\n7\r\n#REMORA:"), "{second:?}");
        assert!(second.contains("$1\r\nc\r\n"));
    }

    #[test]
    fn where_the_clock_goes_back_the_next_file_begins_and_no_second_within_a_file_is_less_than_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(folder.path(), 1 << 20);
        let mut sent = 0;
        // By an hour, within a transaction too, where no file ends; and by a second, which is corrected.
        for (second, words) in [
            (7200, &[&["SELECT", "3"][..], &["SET", "a", "1"]][..]),
            (7199, &[&["SET", "b", "1"]]),
            (7201, &[&["MULTI"], &["SET", "c", "1"]]),
            (3600, &[&["EXEC"], &["SET", "d", "1"]]),
            (3601, &[&["SET", "e", "1"]]),
            (7300, &[&["SET", "f", "1"]]),
        ] {
            let bytes = commands(words);
            sent += bytes.len() as u64;
            recorder.take_at(&bytes, Moment::seconds(second));
        }
        recorder.finish().unwrap();
        assert_eq!(recorder.recorded(), 100 + sent, "nothing is lost");
        let [first, second] = [1, 2].map(|number| file(folder.path(), number));
        let seconds = |text: &str| {
            let notes = text.lines().filter_map(|line| line.strip_prefix("#TS:")?.parse().ok());
            notes.collect::<Vec<u64>>()
        };
        assert_eq!((seconds(&first), seconds(&second)), (vec![7200, 7201], vec![3600, 3601, 7300]));
        assert!(first.contains("EXEC\r\n") && !first.contains("$1\r\nd\r\n"), "{first}");
        assert!(second.starts_with("*2\r\n$6\r\nSELECT\r\n$1\r\n3\r\n"), "{second}");
        for number in [1, 2] {
            let path = folder.path().join(format!("appendonlydir/appendonly.aof.{number}.incr.aof"));
            let read = AofFile::read(&path, None).unwrap();
            read.refuse_what_is_not_checked(&path, number == 2).unwrap();
        }
    }

    #[test]
    fn what_is_torn_at_the_end_is_cut_off_in_order_and_again_when_it_goes_on() {
        let temporary = tempfile::tempdir().unwrap();
        let shelf = temporary.path().join("set");
        std::fs::create_dir(&shelf).unwrap();
        let mut recorder = recorder(&shelf, 1 << 20);
        let whole = commands(&[&["SELECT", "2"], &["SET", "a", "1"]]);
        let torn = commands(&[&["MULTI"], &["SET", "b", "2"]]);
        recorder.take_at(&whole, Moment::seconds(5));
        recorder.take_at(&torn, Moment::seconds(5));
        assert!(file(&shelf, 1).ends_with("$1\r\n2\r\n"));
        recorder.sync().unwrap();
        // As after a kill: the list, and a file whose end is torn.
        std::fs::write(
            shelf.join("appendonlydir/appendonly.aof.manifest"),
            "file appendonly.aof.1.base.rdb seq 1 type b\nfile appendonly.aof.1.incr.aof seq 1 type i\n",
        )
        .unwrap();
        let mut again = resume(&shelf);
        assert_eq!((again.next_byte(), again.noted()), (101, Moment::seconds(0)), "at the last mark, the head's");
        again.take_at(&whole, Moment::seconds(9));
        again.take_at(&torn, Moment::seconds(9));
        again.finish().unwrap();
        let text = file(&shelf, 1);
        assert!(
            text.contains(&format!("$1\r\n1\r\n#REMORA:{}:", 100 + whole.len())) && text.ends_with("\r\n"),
            "{text:?}"
        );
        let mut last = resume(&shelf);
        assert_eq!(last.next_byte(), 101 + whole.len() as u64);
        last.take_at(&commands(&[&["SET", "z", "1"]]), Moment::seconds(9));
        last.finish().unwrap();
        let walk = AofFile::read(&shelf.join("appendonlydir/appendonly.aof.1.incr.aof"), None).unwrap();
        assert_eq!((walk.mark_database, walk.mark.unwrap().offset), (2, last.recorded()));
    }

    #[test]
    fn every_changed_byte_of_files_that_have_ended_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(folder.path(), 400);
        let long = "x".repeat(200);
        recorder.take_at(&commands(&[&["SELECT", "7"], &["SET", "a", &long]]), Moment::seconds(5));
        recorder.take_at(&commands(&[&["MULTI"], &["SET", "b", &long], &["EXEC"]]), Moment::seconds(6));
        recorder.sync().unwrap();
        recorder.take_at(&commands(&[&["PING"], &["SET", "c", "1", "PX", "7"]]), Moment::seconds(7));
        recorder.finish().unwrap();
        for (number, is_last) in [(1, false), (2, true)] {
            let path = folder.path().join(format!("appendonlydir/appendonly.aof.{number}.incr.aof"));
            let whole = std::fs::read(&path).unwrap();
            let read = || AofFile::read(&path, None).and_then(|read| read.refuse_what_is_not_checked(&path, is_last));
            read().unwrap();
            for at in 0..whole.len() {
                for bit in [0, 1, 6] {
                    let mut changed = whole.clone();
                    changed[at] ^= 1 << bit;
                    std::fs::write(&path, &changed).unwrap();
                    let Err(error) = read() else { panic!("byte {at} of {}, bit {bit}", whole.len()) };
                    assert!(error.message.contains(path.to_str().unwrap()), "byte {at}: {error}");
                }
            }
            std::fs::write(&path, &whole).unwrap();
        }
    }

    #[test]
    fn expiries_that_count_from_their_command_are_followed_by_times_of_the_calendar() {
        let temporary = tempfile::tempdir().unwrap();
        let sent = commands(&[
            &["SELECT", "0"],
            &["SET", "a", "1", "PX", "1500"],
            &["SET", "b", "1", "PXAT", "1764208000000"],
            &["MULTI"],
            &["expire", "c", "20"],
            &["restore", "d", "300", "payload", "replace"],
            &["EXEC"],
            &["restore", "e", "0", "payload"],
            &["expire", "f", "many"],
        ]);
        let kept = commands(&[
            &["SELECT", "0"],
            &["SET", "a", "1", "PX", "1500"],
            &["PEXPIREAT", "a", "1001500"],
            &["SET", "b", "1", "PXAT", "1764208000000"],
            &["MULTI"],
            &["expire", "c", "20"],
            &["PEXPIREAT", "c", "1020000"],
            &["restore", "d", "300", "payload", "replace"],
            &["PEXPIREAT", "d", "1000300"],
            &["EXEC"],
            &["restore", "e", "0", "payload"],
            &["expire", "f", "many"],
        ]);
        for piece in [1, 5, 1000] {
            let folder = temporary.path().join(piece.to_string());
            std::fs::create_dir(&folder).unwrap();
            let mut recorder = recorder(&folder, 1 << 20);
            sent.chunks(piece).for_each(|bytes| recorder.take_at(bytes, Moment::seconds(1000)));
            recorder.finish().unwrap();
            let text = file(&folder, 1);
            assert_eq!(text.matches("#REMORA-ADDED\r\n*3\r\n$9\r\nPEXPIREAT").count(), 3, "{text:?}");
            assert!(text.replace("#REMORA-ADDED\r\n", "").contains(std::str::from_utf8(&kept).unwrap()), "{text:?}");
            assert_eq!(stream(&folder).unwrap().0, sent);
            assert!(text.contains(&format!("#REMORA:{}:", 100 + sent.len())), "{text:?}");
        }
    }

    #[test]
    fn the_map_of_a_cluster_is_left_out_and_what_removes_keys_of_a_slot_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(folder.path(), 1 << 20);
        let kept = commands(&[&["SET", "a", "1"], &["cluster", "flushslot", "7", "sync"], &["DEL", "a"]]);
        let sent = commands(&[
            &["SET", "a", "1"],
            &["CLUSTER", "SETSLOT", "7", "NODE", "x"],
            &["CLUSTER", "SYNCSLOTS", "ESTABLISH", "SOURCE", "y"],
            &["cluster", "flushslot", "7", "sync"],
            &["SPUBLISH", "c", "m"],
            &["DEL", "a"],
        ]);
        sent.chunks(3).for_each(|bytes| recorder.take_at(bytes, Moment::seconds(5)));
        recorder.finish().unwrap();
        let text = file(folder.path(), 1);
        let read: String = text.split_inclusive("\r\n").filter(|line| !line.starts_with("#REMORA-ASIDE:")).collect();
        assert!(read.contains(&format!("#TS:5\r\n{}", String::from_utf8(kept).unwrap())), "{text:?}");
        assert_eq!(stream(folder.path()).unwrap().0, sent);
        assert_eq!(recorder.recorded(), 100 + sent.len() as u64);
    }

    #[test]
    fn an_expiry_of_an_unknown_time_ends_the_files_before_its_transaction() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(folder.path(), 1 << 20);
        let whole = commands(&[&["SET", "a", "1"]]);
        recorder.take(&whole, Moment::seconds(5), None).unwrap();
        let late = commands(&[&["MULTI"], &["SET", "b", "2"], &["EXPIRE", "b", "7"], &["EXEC"]]);
        let error = recorder.take(&late, Moment::seconds(5), None).unwrap_err();
        assert!(matches!(error, RecordError::TimeUnknown), "{error}");
        recorder.finish().unwrap();
        assert_eq!(recorder.recorded(), 100 + whole.len() as u64);
        let text = file(folder.path(), 1);
        assert!(text.contains(&format!("$1\r\n1\r\n#REMORA:{}:", 100 + whole.len())), "{text:?}");
    }
}
