//! Files: where a recorder's files of commands go. Each begins with a head, and ends with a whole command or
//! transaction.

use std::fmt::Debug;
use std::fs::File;
use std::io;

use remora_redis::resp;

use super::super::mark::{Mark, NOTE_END};
use super::super::moment::Moment;

/// Where the files go. Files follow one another without a gap.
pub(in super::super) trait Files: Debug + Send + Sync {
    /// The place, for messages.
    fn name(&self) -> String;

    /// Whether a file of this length is to be followed by another one.
    fn is_due(&self, bytes: u64) -> bool;

    /// Begins the next file with a head. `before`: the file that it follows. `database`: the one that the stream has
    /// selected. Returns the file and its length.
    fn next(&self, before: Option<Finished<'_>>, database: Option<u64>, mark: Mark) -> io::Result<(File, u64)>;

    /// Brings a file's data to where they outlive the process.
    fn sync(&self, file: &File) -> io::Result<()>;

    /// The last file has ended.
    fn end(&self, last: Finished<'_>) -> io::Result<()>;
}

/// A file that has ended.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Finished<'a> {
    pub(in super::super) file: &'a File,
    pub(in super::super) bytes: u64,
    /// The last byte of the stream in it.
    pub(in super::super) offset: u64,
    /// The database that is selected there; `None` if the stream has not selected one since the snapshot.
    pub(in super::super) database: Option<u64>,
    /// The last second that was noted.
    pub(in super::super) noted: Moment,
}

/// Bytes at the beginning of each file of commands: which database, how far the stream is, and a note that fills the
/// rest. Enough for both with their longest numbers, so that the database can be put in later.
pub(in super::super) const HEAD_BYTES: usize = 128;

/// The beginning of a file of commands, always of the same length: each is loaded by itself, from database 0 on.
pub(in super::super) fn head(database: u64, mark: Mark) -> Vec<u8> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    resp::command(&mut head, &["SELECT", &database.to_string()]);
    mark.write(&mut head);
    let fill = HEAD_BYTES.saturating_sub(head.len() + 1 + NOTE_END.len());
    head.push(b'#');
    head.extend(std::iter::repeat_n(b' ', fill));
    head.extend_from_slice(NOTE_END);
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_has_the_same_length_whatever_its_numbers() {
        for (database, offset) in [(0, 0), (i32::MAX as u64, remora_redis::MAX_OFFSET)] {
            assert_eq!(head(database, Mark { offset }).len(), HEAD_BYTES);
        }
    }
}
