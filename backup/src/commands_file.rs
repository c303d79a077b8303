//! A file of commands (AOF): its head, its marks, its list, and how all of it, or a beginning up to a moment, is read
//! and checked.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use remora_redis::aof::{Found, Manifest as List, TIME_NOTE, Verb, Walker};
use remora_redis::rdb::crc64;
use remora_redis::resp;

use remora_base::files::open_to_read;
use remora_base::units::Moment;
use remora_process::checked_json::Checksum;
use remora_process::exit::Failure;

// AOF file: reads all of a file of commands, or up to a moment, and finds its last border and its last mark.

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// A file that was read.
#[derive(Debug)]
pub(crate) struct AofFile {
    /// Bytes up to the last border, or to the moment.
    pub(crate) used: u64,
    pub(crate) commands: u64,
    pub(crate) transactions: u64,
    /// Commands that change the map of a cluster: no backup has them any more.
    pub(crate) cluster: u64,
    pub(crate) first: Option<Moment>,
    pub(crate) last: Option<Moment>,
    /// The last mark before the end of what is used, and where it ends.
    pub(crate) mark: Option<Mark>,
    pub(crate) mark_ends: u64,
    /// How many databases a server needs for these commands.
    pub(crate) databases: u64,
    /// The database that is selected there.
    pub(crate) mark_database: u64,
    /// The last second that is named before it.
    pub(crate) mark_noted: Option<Moment>,
    /// Checksum of what is behind the head, up to there.
    pub(crate) mark_sum: u64,
    /// What of it no checksum covers; empty if all is covered up to the last mark.
    unchecked: String,
    /// Whether it names seconds.
    pub(crate) has_times: bool,
    /// The first second that it names, also where it is cut there.
    pub(crate) begins: Option<Moment>,
    pub(crate) end: End,
}

/// Where a file ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// At a border.
    Whole,
    /// Behind one. This is its length.
    Torn(u64),
    /// A later moment begins there.
    Cut,
}

/// Takes a part of a file: bytes of one command or note, and what has ended with them.
type PartOf<'a> = dyn FnMut(&[u8], Option<&Found>) -> Result<(), Failure> + 'a;

impl AofFile {
    /// Reads a file of commands up to the end of the second `until`.
    ///
    /// # Errors
    /// It cannot be read, or holds something else than commands.
    pub(crate) fn read(path: &Path, until: Option<Moment>) -> Result<AofFile, Failure> {
        AofFile::walk(path, until, &mut |_, _| Ok(()))
    }

    /// The same, and hands over each part of it behind the head.
    fn walk(path: &Path, until: Option<Moment>, part_of: &mut PartOf<'_>) -> Result<AofFile, Failure> {
        let unreadable = |error: io::Error| Failure::refused(format!("{} cannot be read: {error}", path.display()));
        let mut file = open_to_read(path).map_err(unreadable)?;
        let mut walk = AofFile {
            used: 0,
            commands: 0,
            transactions: 0,
            cluster: 0,
            databases: 1,
            first: None,
            last: None,
            mark: None,
            mark_ends: 0,
            mark_database: 0,
            mark_noted: None,
            mark_sum: 0,
            unchecked: String::new(),
            has_times: false,
            begins: None,
            end: End::Whole,
        };
        // Counted as they come; they count when a border follows.
        let (mut commands, mut walker, mut piece) = (0, Walker::of_file(), vec![0; PIECE]);
        let mut sums = Sums::default();
        loop {
            let length = match file.read(&mut piece) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(unreadable(error)),
            };
            let mut rest = piece.get(..length).unwrap_or_default();
            while !rest.is_empty() {
                let fed = walker.feed(rest);
                let (taken, found) = fed.map_err(|error| Failure::refused(format!("{}: {error}", path.display())))?;
                let (part, after) = rest.split_at_checked(taken).unwrap_or((rest, &[]));
                rest = after;
                sums.take(part);
                if walker.position() > HEAD_BYTES as u64 {
                    part_of(part, found.as_ref())?;
                }
                match found {
                    Some(Found::Command { verb, .. }) => {
                        sums.line = sums.all;
                        commands += u64::from(!matches!(verb, Verb::Multi | Verb::Exec));
                        walk.transactions += u64::from(verb == Verb::Exec);
                        walk.cluster += u64::from(verb == Verb::Cluster);
                    }
                    Some(Found::Note(note)) => {
                        walk.compare(&note, &walker, &sums).map_err(|what| {
                            let at = walker.position();
                            Failure::refused(format!("{} is damaged before byte {at}: {what}", path.display()))
                        })?;
                        sums.line = sums.all;
                        if walk.note(&note, until, &walker, sums.all) {
                            walk.end = End::Cut;
                            return Ok(walk);
                        }
                    }
                    Some(Found::Verb(_)) | None => {}
                }
                if walker.border() > walk.used {
                    walk.used = walker.border();
                    walk.databases = walker.databases();
                    walk.commands += std::mem::take(&mut commands);
                }
            }
        }
        if walk.used < walker.position() {
            walk.end = End::Torn(walker.position());
        }
        if sums.head.len() < HEAD_BYTES && walk.unchecked.is_empty() {
            walk.unchecked = "it has no head".to_owned();
        }
        Ok(walk)
    }

    /// The first second that a file of commands names, if it names one.
    ///
    /// # Errors
    /// As [`AofFile::read`].
    pub(crate) fn first_second(path: &Path) -> Result<Option<Moment>, Failure> {
        Ok(AofFile::read(path, Some(Moment::default()))?.begins)
    }

    /// Compares a note's checksum, and the head's.
    fn compare(&mut self, note: &[u8], walker: &Walker, sums: &Sums) -> Result<(), String> {
        let mut unchecked = |what: &str| {
            if self.unchecked.is_empty() {
                self.unchecked = format!("{what} at byte {}", walker.position());
            }
        };
        if walker.position() <= HEAD_BYTES as u64 {
            let is_last_of_it = walker.position() == HEAD_BYTES as u64;
            let offset = self.mark.map_or(0, |mark| mark.offset);
            if is_last_of_it && sums.head != head(walker.database(), offset) {
                unchecked("the head is not one of ours, or was changed,");
            }
            return Ok(());
        }
        match Mark::parse(note) {
            Some(mark) if !mark.fits(sums.line) => return Err("its checksum does not match".to_owned()),
            Some(Mark { sum: None, .. }) => unchecked("a mark has no checksum"),
            None if ![TIME_NOTE, ASIDE].iter().any(|known| note.starts_with(known)) && note != ADDED_NOTE => {
                unchecked("a note is not one of ours, or was changed,")
            }
            Some(_) | None => {}
        }
        Ok(())
    }

    /// Refuses a file of ours of which a part has no checksum: that part was changed. What follows the last mark of the
    /// last file has none if the agent was killed.
    ///
    /// # Errors
    /// There is such a part.
    pub(crate) fn refuse_what_is_not_checked(&self, path: &Path, is_last: bool) -> Result<(), Failure> {
        let damaged = |what: &str| Err(Failure::refused(format!("{} is damaged: {what}", path.display())));
        if !self.unchecked.is_empty() {
            return damaged(&self.unchecked);
        }
        match self.end {
            End::Cut => Ok(()),
            _ if !is_last && self.mark_ends != self.used => damaged("no mark stands at its end"),
            End::Torn(length) if has_a_mark(path, (self.used, length), self.last_mark())? => {
                damaged(&format!("a mark follows what seems to be torn at byte {}", self.used))
            }
            End::Whole | End::Torn(_) => Ok(()),
        }
    }

    /// The offset of the last mark, and where it ends.
    fn last_mark(&self) -> (u64, u64) {
        (self.mark.map_or(0, |mark| mark.offset), self.mark_ends)
    }

    /// Takes a note. Returns whether it begins a later second.
    fn note(&mut self, note: &[u8], until: Option<Moment>, walker: &Walker, sum: u64) -> bool {
        if let Some(mark) = Mark::parse(note) {
            if !walker.is_in_transaction() {
                (self.mark, self.mark_ends, self.mark_sum) = (Some(mark), walker.border(), sum);
                (self.mark_database, self.mark_noted) = (walker.database(), self.last);
            }
            return false;
        }
        let digits = note.strip_prefix(TIME_NOTE).and_then(|digits| std::str::from_utf8(digits).ok());
        let Some(seconds) = digits.and_then(|digits| digits.trim().parse().ok()) else { return false };
        let moment = Moment::seconds(seconds);
        self.has_times = true;
        self.begins = self.begins.or(Some(moment));
        if until.is_some_and(|until| moment > until) {
            return true;
        }
        self.first = self.first.or(Some(moment));
        self.last = Some(moment);
        false
    }
}

/// Checksums of what has been read.
#[derive(Default)]
struct Sums {
    /// The first bytes of the file.
    head: Vec<u8>,
    /// Of all behind the head.
    all: u64,
    /// The same up to the last command or note.
    line: u64,
}

impl Sums {
    fn take(&mut self, bytes: &[u8]) {
        let of_head = bytes.len().min(HEAD_BYTES - self.head.len());
        let (of_head, rest) = bytes.split_at(of_head);
        self.head.extend_from_slice(of_head);
        self.all = crc64(self.all, rest);
    }
}

/// Whether there is a mark of this file between these bytes of it. `marked`: the offset of the last one before them,
/// and where it ends. A value may have a line that looks like a mark; the offset of one is within what the file can
/// hold.
fn has_a_mark(path: &Path, (from, to): (u64, u64), (marked, mark_ends): (u64, u64)) -> Result<bool, Failure> {
    let unreadable = |error: io::Error| Failure::refused(format!("{} cannot be read: {error}", path.display()));
    let mut file = File::open(path).map_err(unreadable)?;
    file.seek(io::SeekFrom::Start(from)).map_err(unreadable)?;
    let mut lines = BufReader::with_capacity(PIECE, file.take(to.saturating_sub(from)));
    let possible = marked..=marked.saturating_add(to.saturating_sub(mark_ends));
    let mut line = Vec::new();
    loop {
        // A longer line is no mark, and is read in pieces: the next one may begin with anything.
        let is_whole = line.last().is_none_or(|last| *last == b'\n');
        line.clear();
        let read = (&mut lines).take(MARK_BYTES_MAX).read_until(b'\n', &mut line).map_err(unreadable)?;
        if read == 0 {
            return Ok(false);
        }
        // Its end may be what was changed.
        let colon = line.iter().skip(BEGIN.len()).position(|byte| *byte == b':').map_or(0, |colon| BEGIN.len() + colon);
        let text = line.get(..=colon + SUM_DIGITS).filter(|text| is_whole && text.len() + NOTE_END.len() <= line.len());
        let mark = text.and_then(Mark::parse);
        if mark.is_some_and(|mark| mark.sum.is_some() && possible.contains(&mark.offset)) {
            return Ok(true);
        }
    }
}

/// The longest mark, with its end: 20 digits of an offset, and a checksum.
const MARK_BYTES_MAX: u64 = (BEGIN.len() + 20 + 1 + SUM_DIGITS + NOTE_END.len()) as u64;

// Mark: a note in a file of commands that says how far the stream is there, and has a checksum of what stands before.
//
// ```text
//   head (128 bytes)   commands …   #REMORA:307366:8c1c6b2f307366aa   #TS:…   commands …   #REMORA:…
//   has no checksum    ╰────────── the checksum is of all from the end of the head to here, and of the offset ───╯
// ```
//
// Servers and their tools skip notes that they do not know. A backup that is started again goes on at the last mark.

/// The end of a note.
pub(crate) const NOTE_END: &[u8] = b"\r\n";

/// How far the stream is: everything up to this offset is in front of the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) offset: u64,
    /// Checksum of all that stands before, behind the head, and of the mark's own offset. `None` in a head, and in
    /// files of older programs.
    pub(crate) sum: Option<u64>,
}

/// What a mark begins with.
pub(crate) const BEGIN: &str = "#REMORA:";

/// Digits of a checksum.
const SUM_DIGITS: usize = 16;

impl Mark {
    /// A mark without a checksum, as heads have it.
    pub(crate) fn of_a_head(offset: u64) -> Mark {
        Mark { offset, sum: None }
    }

    /// A mark behind bytes with this checksum.
    pub(crate) fn behind(offset: u64, before: u64) -> Mark {
        Mark { offset, sum: Some(crc64(before, format!("{BEGIN}{offset}:").as_bytes())) }
    }

    /// Reads a note; `None` if it is another one.
    pub(crate) fn parse(note: &[u8]) -> Option<Mark> {
        let text = std::str::from_utf8(note).ok()?.strip_prefix(BEGIN)?;
        let (digits, sum) = match text.split_once(':') {
            Some((digits, sum)) if sum.len() == SUM_DIGITS => (digits, Some(u64::from_str_radix(sum, 16).ok()?)),
            Some(_) => return None,
            None => (text, None),
        };
        let offset = digits.parse().ok().filter(|offset| *offset <= remora_redis::MAX_OFFSET)?;
        Some(Mark { offset, sum })
    }

    /// Whether the checksum is that of bytes with this checksum before it. True if it has none.
    pub(crate) fn fits(self, before: u64) -> bool {
        self.sum.is_none() || self == Mark::behind(self.offset, before)
    }

    /// Appends the note.
    pub(crate) fn write(self, out: &mut Vec<u8>) {
        let sum = self.sum.map_or_else(String::new, |sum| format!(":{sum:016x}"));
        out.extend_from_slice(format!("{BEGIN}{}{sum}", self.offset).as_bytes());
        out.extend_from_slice(NOTE_END);
    }
}

// Aside: notes with what no server is to get, so that a file has every byte of the stream.
//
// ```text
//   the stream   SET a 1          PING            MULTI  SET b 2  PUBLISH c d     EXEC
//   the file     SET a 1   #REMORA-ASIDE:Kj…      MULTI  SET b 2  #REMORA-ASIDE:… EXEC
// ```

/// What a note begins with that has bytes of the stream.
const ASIDE: &[u8] = b"#REMORA-ASIDE:";

/// Bytes of the stream in one note. In base 64 and with its beginning it is shorter than the servers' longest line,
/// 1,024 bytes (`AOF_ANNOTATION_LINE_MAX_LEN`).
const ASIDE_PIECE: usize = 720;

/// The note before a command that is not of the stream.
pub(crate) const ADDED: &[u8] = b"#REMORA-ADDED\r\n";
const ADDED_NOTE: &[u8] = b"#REMORA-ADDED";

/// Notes with what no server is to get.
pub(crate) struct AsideNote;

impl AsideNote {
    /// Appends notes with all of these bytes.
    pub(crate) fn write(bytes: &[u8], out: &mut Vec<u8>) {
        for piece in bytes.chunks(ASIDE_PIECE) {
            out.extend_from_slice(ASIDE);
            out.extend_from_slice(STANDARD.encode(piece).as_bytes());
            out.extend_from_slice(NOTE_END);
        }
    }

    /// The bytes of a note; `None` if it is another one, or damaged.
    fn parse(note: &[u8]) -> Option<Vec<u8>> {
        STANDARD.decode(note.strip_prefix(ASIDE)?).ok()
    }
}

// Stream: the bytes of the stream out of files of commands that follow one another.

/// Writes the stream behind this offset out of these files, up to their last mark, while `goes_on` says so. Returns the
/// offset of its last byte.
///
/// # Errors
/// A file cannot be read, is damaged, or does not have all bytes of the stream; `out` cannot be written; or it does not
/// go on.
pub(crate) fn write_stream(
    files: &[PathBuf],
    offset: u64,
    (out_path, out): (&Path, &File),
    goes_on: &dyn Fn() -> bool,
) -> Result<u64, Failure> {
    let out = BufWriter::with_capacity(PIECE, out);
    let mut stream = Stream { path: out_path, out, end: offset, marked: offset };
    for (number, path) in files.iter().enumerate() {
        let failed = |what: String| Failure::refused(format!("{}: {what}", path.display()));
        let (mut item, mut is_added) = (Item::Next, false);
        let mut part_of = |part: &[u8], found: Option<&Found>| {
            if !goes_on() {
                return Err(failed("its reader ends".to_owned()));
            }
            if item == Item::Next {
                item = if part.starts_with(b"#") { Item::Note } else { Item::Command };
            }
            if item == Item::Command && !is_added {
                stream.put(part)?;
            }
            match found {
                Some(Found::Command { .. }) => (item, is_added) = (Item::Next, false),
                Some(Found::Note(note)) => {
                    item = Item::Next;
                    is_added = note == ADDED_NOTE;
                    stream.note(note, failed)?;
                }
                Some(Found::Verb(_)) | None => {}
            }
            Ok(())
        };
        let read = AofFile::walk(path, None, &mut part_of)?;
        read.refuse_what_is_not_checked(path, number + 1 == files.len())?;
    }
    stream.finish(offset)
}

/// What a part belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Item {
    /// To what begins with it.
    Next,
    Note,
    Command,
}

/// The stream that is written.
struct Stream<'a> {
    /// Where it is written to.
    path: &'a Path,
    out: BufWriter<&'a File>,
    /// The last byte that was written.
    end: u64,
    /// The same at the last mark.
    marked: u64,
}

impl Stream<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.end += bytes.len() as u64;
        self.out.write_all(bytes).map_err(|error| unwritable(self.path, error))
    }

    /// Takes a note of a file; `failed` names that file.
    ///
    /// # Errors
    /// It is damaged, or not all bytes before it are there. Its bytes cannot be written.
    fn note(&mut self, note: &[u8], failed: impl Fn(String) -> Failure) -> Result<(), Failure> {
        if note.starts_with(ASIDE) {
            let bytes = AsideNote::parse(note);
            return self.put(&bytes.ok_or_else(|| failed("a note with bytes of the stream is damaged".to_owned()))?);
        }
        match Mark::parse(note) {
            Some(mark) if mark.offset != self.end => Err(failed(format!(
                "it does not have all bytes of the stream: a mark stands at offset {}, and they end at {}",
                mark.offset, self.end
            ))),
            Some(_) => {
                self.marked = self.end;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Cuts off what is behind the last mark.
    fn finish(self, begins: u64) -> Result<u64, Failure> {
        let unwritable = |error| unwritable(self.path, error);
        let file = self.out.into_inner().map_err(|error| unwritable(error.into_error()))?;
        file.set_len(self.marked.saturating_sub(begins)).map_err(unwritable)?;
        Ok(self.marked)
    }
}

/// The disk of this path is full, or does not work.
fn unwritable(path: &Path, error: io::Error) -> Failure {
    Failure::local(format!("the stream of a backup cannot be written to {}: {error}", path.display()))
}

/// The bytes at the end of a file in which its last mark is looked for: what a second brings in most cases.
const TAIL_BYTES: u64 = 1 << 20;

/// How far a file of commands reaches at least, by the last mark near its end, else by the one in its head; `None` if
/// it has neither, or cannot be read. A line of a value that looks like a mark costs an attempt to use the file.
pub(crate) fn reaches(path: &Path) -> Option<u64> {
    let mut file = open_to_read(path).ok()?;
    let mark_of = |line: &[u8]| Mark::parse(line.strip_suffix(b"\r")?);
    let from = file.metadata().ok()?.len().saturating_sub(TAIL_BYTES);
    file.seek(io::SeekFrom::Start(from)).ok()?;
    let mut tail = Vec::new();
    (&mut file).take(TAIL_BYTES).read_to_end(&mut tail).ok()?;
    // What has no end yet is not read.
    let mut lines = tail.split(|byte| *byte == b'\n').rev().skip(1);
    if let Some(mark) = lines.find_map(|line| mark_of(line).filter(|mark| mark.sum.is_some())) {
        return Some(mark.offset);
    }
    let mut head = [0; HEAD_BYTES];
    file.read_exact_at(&mut head, 0).ok()?;
    head.split(|byte| *byte == b'\n').find_map(mark_of).map(|mark| mark.offset)
}

// Head: the beginning of a file of commands, always of the same length: each file is loaded by itself, from database 0
// on.

/// Bytes at the beginning of each file of commands: which database, how far the stream is, and a note with a checksum
/// of both that fills the rest. Enough for both with their longest numbers, so that the database can be put in later.
pub(crate) const HEAD_BYTES: usize = 128;

/// The head of a file that begins in this database, behind this offset of the stream.
pub(crate) fn head(database: u64, offset: u64) -> Vec<u8> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    resp::command(&mut head, &["SELECT", &database.to_string()]);
    Mark::of_a_head(offset).write(&mut head);
    let sum = format!("# {:016x}", crc64(0, &head));
    head.extend_from_slice(sum.as_bytes());
    let fill = HEAD_BYTES.saturating_sub(head.len() + NOTE_END.len());
    head.extend(std::iter::repeat_n(b' ', fill));
    head.extend_from_slice(NOTE_END);
    head
}

// List: the list of an append-only file's parts, with a checksum in a comment, which servers skip.

/// What stands before the checksum.
const COMMENT: &str = "# remora crc64 ";

/// The text of a list, with its checksum.
pub(crate) fn checked_list(list: &List) -> String {
    let text = list.to_string();
    let crc = crc64(0, text.as_bytes());
    format!("{text}{COMMENT}{crc:016x}\n")
}

/// Compares the checksum of such a text.
pub(crate) fn check(text: &[u8]) -> Checksum {
    let comment = COMMENT.as_bytes();
    let Some(at) = text.windows(comment.len()).rposition(|window| window == comment) else { return Checksum::Missing };
    let (before, rest) = text.split_at(at);
    let wanted = format!("{COMMENT}{:016x}\n", crc64(0, before));
    if rest == wanted.as_bytes() { Checksum::Right } else { Checksum::Wrong }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_process::exit::Code;
    use remora_redis::resp::command;

    use super::*;

    #[test]
    fn a_full_disk_is_named_also_in_the_middle_of_a_note_and_the_file_is_not_blamed() {
        let path = Path::new("/dev/full");
        let full = File::options().write(true).open(path).unwrap();
        let mut stream = Stream { path, out: BufWriter::with_capacity(8, &full), end: 0, marked: 0 };
        let mut note = Vec::new();
        AsideNote::write(&commands(&[&["PUBLISH", "c", "d"]]), &mut note);
        let blamed = |what| Failure::refused(format!("the file: {what}"));
        let failure = stream.note(note.strip_suffix(NOTE_END).unwrap(), blamed).unwrap_err();
        assert_eq!(failure.code, Code::Local);
        assert!(failure.message.contains("cannot be written to /dev/full: No space left"), "{failure}");
        let damaged = stream.note(b"#REMORA-ASIDE:?", blamed).unwrap_err();
        assert_eq!(damaged.code, Code::Refused);
    }

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    fn commands(all: &[&[&str]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        all.iter().for_each(|words| command(&mut bytes, words));
        bytes
    }

    #[test]
    fn a_moment_ends_before_the_first_later_second_and_never_in_a_transaction() {
        let first = [b"#TS:100\r\n", &commands(&[&["SET", "a", "1"]])[..]].concat();
        let second = [b"#TS:102\r\n", &commands(&[&["MULTI"], &["SET", "b", "2"]])[..], b"#TS:103\r\n"].concat();
        let third = commands(&[&["SET", "c", "3"], &["EXEC"]]);
        let all = file(&[&first[..], &second, &third, b"#TS:104\r\n"].concat());
        let at = |seconds| {
            let walk = AofFile::read(all.path(), Some(Moment::seconds(seconds))).unwrap();
            (walk.used as usize, walk.commands, walk.end == End::Cut)
        };
        let whole = first.len() + second.len() + third.len();
        assert_eq!(at(99), (0, 0, true));
        assert_eq!((at(100), at(101)), ((first.len(), 1, true), (first.len(), 1, true)));
        // The transaction was not over when 102 was.
        assert_eq!(at(102), (first.len() + 9, 1, true));
        assert_eq!(at(103), (whole, 3, true));
        assert_eq!(at(104), (whole + 9, 3, false));
    }

    #[test]
    fn what_is_torn_ends_at_the_last_border_and_damage_is_an_error() {
        let good = commands(&[&["SET", "a", "1"]]);
        for torn in [&b"*3\r\n$3\r\nSE"[..], &commands(&[&["MULTI"], &["SET", "b", "2"]])] {
            let walk = AofFile::read(file(&[&good[..], torn].concat()).path(), None).unwrap();
            assert_eq!((walk.used as usize, walk.commands), (good.len(), 1));
            assert_eq!(walk.end, End::Torn((good.len() + torn.len()) as u64));
        }
        let error = AofFile::read(file(&[&good[..], b"junk"].concat()).path(), None).unwrap_err();
        assert!(error.message.contains(&format!("byte {}", good.len())), "{error}");
        assert!(AofFile::read(Path::new("/dev/zero"), None).is_err());
        let walk = AofFile::read(file(b"").path(), None).unwrap();
        assert_eq!((walk.used, walk.end), (0, End::Whole));
    }

    #[test]
    fn a_mark_is_read_as_it_was_written_and_other_notes_are_none() {
        for mark in [Mark::of_a_head(307_366), Mark::behind(307_366, 42)] {
            let mut out = Vec::new();
            mark.write(&mut out);
            assert_eq!(Mark::parse(out.strip_suffix(NOTE_END).unwrap()), Some(mark));
            assert!(mark.fits(42));
        }
        assert!(!Mark::behind(307_366, 42).fits(43));
        assert!(!Mark { offset: 307_367, ..Mark::behind(307_366, 42) }.fits(42));
        for other in [
            &b"#TS:1"[..],
            b"#REMORA:",
            b"#REMORA:x",
            b"#REMORA:99999999999999999999",
            b"#REMORA:-1",
            b"#REMORA:1:2",
            b"#REMORA:1:gggggggggggggggg",
            b"\xFF",
        ] {
            assert_eq!(Mark::parse(other), None, "{other:?}");
        }
    }

    #[test]
    fn how_far_a_file_reaches_is_known_by_its_end_or_else_by_its_head() {
        let mut bytes = head(3, 70);
        assert_eq!(reaches(file(&bytes).path()), Some(70));
        Mark::behind(90, 1).write(&mut bytes);
        bytes.extend_from_slice(b"#REMORA:99:000000000000000");
        assert_eq!(reaches(file(&bytes).path()), Some(90), "what has no end is no mark");
        bytes.resize(bytes.len() + TAIL_BYTES as usize, b'x');
        assert_eq!(reaches(file(&bytes).path()), Some(70));
        assert_eq!(reaches(file(b"SET a 1").path()), None);
        assert_eq!(reaches(Path::new("/dev/zero")), None);
    }

    #[test]
    fn a_head_has_the_same_length_whatever_its_numbers() {
        for (database, offset) in [(0, 0), (i32::MAX as u64, remora_redis::MAX_OFFSET)] {
            assert_eq!(head(database, offset).len(), HEAD_BYTES);
        }
    }

    #[test]
    fn every_changed_byte_of_a_list_is_found_and_servers_skip_the_checksum() {
        let list = List::parse(b"file a.1.base.rdb seq 1 type b\nfile a.1.incr.aof seq 1 type i\n").unwrap();
        let text = checked_list(&list);
        assert_eq!((check(text.as_bytes()), List::parse(text.as_bytes()).unwrap()), (Checksum::Right, list.clone()));
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] ^= 1;
            assert_ne!(check(&changed), Checksum::Right, "byte {at}");
        }
        assert_eq!(check(list.to_string().as_bytes()), Checksum::Missing);
    }
}
