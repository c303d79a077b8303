//! AOF file: reads all of a file of commands, or up to a moment, and finds its last border and its last mark.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use remora_redis::aof::{Found, TIME_NOTE, Verb, Walker};

use super::mark::Mark;
use super::moment::Moment;
use crate::exit::Failure;

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// A file that was read.
#[derive(Debug)]
pub(super) struct AofFile {
    /// Bytes up to the last border, or to the moment.
    pub(super) used: u64,
    pub(super) commands: u64,
    pub(super) transactions: u64,
    /// Commands that change the map of a cluster: no backup has them any more.
    pub(super) cluster: u64,
    pub(super) first: Option<Moment>,
    pub(super) last: Option<Moment>,
    /// The last mark before the end of what is used, and where it ends.
    pub(super) mark: Option<Mark>,
    pub(super) mark_ends: u64,
    /// The database that is selected there.
    pub(super) mark_database: u64,
    /// The last second that is named before it.
    pub(super) mark_noted: Option<Moment>,
    /// Whether it names seconds.
    pub(super) has_times: bool,
    pub(super) end: End,
}

/// Where a file ends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// At a border.
    Whole,
    /// Behind one. This is its length.
    Torn(u64),
    /// A later moment begins there.
    Cut,
}

impl AofFile {
    /// Reads a file of commands up to the end of the second `until`.
    ///
    /// # Errors
    /// It cannot be read, or holds something else than commands.
    pub(super) fn read(path: &Path, until: Option<Moment>) -> Result<AofFile, Failure> {
        let unreadable = |error: io::Error| Failure::refused(format!("{} cannot be read: {error}", path.display()));
        let mut file = File::open(path).map_err(unreadable)?;
        if !file.metadata().map_err(unreadable)?.is_file() {
            return Err(Failure::refused(format!("{} is not a file", path.display())));
        }
        let mut walk = AofFile {
            used: 0,
            commands: 0,
            transactions: 0,
            cluster: 0,
            first: None,
            last: None,
            mark: None,
            mark_ends: 0,
            mark_database: 0,
            mark_noted: None,
            has_times: false,
            end: End::Whole,
        };
        // Counted as they come; they count when a border follows.
        let (mut commands, mut walker, mut piece) = (0, Walker::of_file(), vec![0; PIECE]);
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
                rest = rest.get(taken..).unwrap_or_default();
                match found {
                    Some(Found::Command { verb, .. }) => {
                        commands += u64::from(!matches!(verb, Verb::Multi | Verb::Exec));
                        walk.transactions += u64::from(verb == Verb::Exec);
                        walk.cluster += u64::from(verb == Verb::Cluster);
                    }
                    Some(Found::Note(note)) => {
                        if walk.note(&note, until, &walker) {
                            walk.end = End::Cut;
                            return Ok(walk);
                        }
                    }
                    Some(Found::Verb(_)) | None => {}
                }
                if walker.border() > walk.used {
                    walk.used = walker.border();
                    walk.commands += std::mem::take(&mut commands);
                }
            }
        }
        if walk.used < walker.position() {
            walk.end = End::Torn(walker.position());
        }
        Ok(walk)
    }

    /// Takes a note. Returns whether it begins a later second.
    fn note(&mut self, note: &[u8], until: Option<Moment>, walker: &Walker) -> bool {
        if let Some(mark) = Mark::parse(note) {
            if !walker.is_in_transaction() {
                (self.mark, self.mark_ends) = (Some(mark), walker.border());
                (self.mark_database, self.mark_noted) = (walker.database(), self.last);
            }
            return false;
        }
        let digits = note.strip_prefix(TIME_NOTE).and_then(|digits| std::str::from_utf8(digits).ok());
        let Some(seconds) = digits.and_then(|digits| digits.trim().parse().ok()) else { return false };
        let moment = Moment::seconds(seconds);
        self.has_times = true;
        if until.is_some_and(|until| moment > until) {
            return true;
        }
        self.first = self.first.or(Some(moment));
        self.last = Some(moment);
        false
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::resp::command;

    use super::*;

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
}
