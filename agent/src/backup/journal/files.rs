//! Files: where a recorder's files of commands go. Each begins with a head, and ends with a whole command or
//! transaction.

use std::fmt::Debug;
use std::fs::File;
use std::io;

use super::super::moment::Moment;

/// Where the files go. Files follow one another without a gap.
pub(in super::super) trait Files: Debug + Send + Sync {
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
