//! Why the lab could not do what a test asked of it.
//!
//! Sorted by who can act on it: the machine lacks something (run the set-up), a process did not do its part (read the
//! tail of what it wrote), a server refused a command (read its words), two servers differ (the very thing a test is for).

use std::fmt::Display;
use std::io;
use std::time::Duration;

/// Every way in which the lab fails. Tests mostly `unwrap` it: its `Display` is written to be read in a test's output.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This machine has not got a program or a right that the lab needs.
    #[error("this machine lacks {what}; {how}")]
    Missing {
        /// What is lacking.
        what: String,
        /// How to get it.
        how: String,
    },

    /// A process ended while it was still needed.
    #[error("{who} ended ({status}); the last it wrote:\n{tail}")]
    Ended {
        /// Program and process id.
        who: String,
        /// Exit status, in words.
        status: String,
        /// Last lines of its output.
        tail: String,
    },

    /// Something that was waited for did not happen in time.
    #[error("waited {waited:?} for {what}; the last that was seen:\n{tail}")]
    TooLate {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
        /// Last lines of output, or the last state seen.
        tail: String,
    },

    /// A server answered a command with an error.
    #[error("the server refused {command:?}: {reply}")]
    Refused {
        /// The command, shortened.
        command: String,
        /// The server's own words.
        reply: String,
    },

    /// A server answered a command with something else than that command's kind of answer.
    #[error("the server answered {command:?} with {reply}, which is no {wanted}")]
    Unexpected {
        /// The command, shortened.
        command: String,
        /// What came, shortened.
        reply: String,
        /// What was wanted.
        wanted: &'static str,
    },

    /// What came is not RESP.
    #[error("what the server sent is not RESP: {0}")]
    Garbled(String),

    /// Two servers do not hold the same data.
    #[error("{0}")]
    Different(String),

    /// The system refused something.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
}

/// The lab's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Says what was being done when the system refused it.
pub(crate) trait Doing<T> {
    /// Turns the system's error into ours; `doing` completes "could not …".
    fn doing<D: Display>(self, doing: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing<D: Display>(self, doing: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| Error::Io { doing: format!("could not {}", doing()), source: error.into() })
    }
}
