//! Why the lab could not do what a test asked of it.
//!
//! Sorted by who can act on it: the machine lacks something (run the set-up), a process failed (read the end of its
//! output), a server refused a command (read its answer), two servers differ (which is what the test looks for).

use std::fmt::Display;
use std::io;
use std::time::Duration;

/// Every error of the lab. Tests mostly `unwrap` it; its `Display` is written for a test's output.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This machine lacks a program or a right that the lab needs.
    #[error("this machine lacks {what}; {how}")]
    Missing {
        /// What is missing.
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
        /// The last lines of its output.
        tail: String,
    },

    /// An expected event did not happen in time.
    #[error("waited {waited:?} for {what}; the last that was seen:\n{tail}")]
    TooLate {
        /// The expected event.
        what: String,
        /// How long the lab waited.
        waited: Duration,
        /// Last lines of output, or the last state seen.
        tail: String,
    },

    /// A server answered a command with an error.
    #[error("the server refused {command:?}: {reply}")]
    Refused {
        /// The command, shortened.
        command: String,
        /// The server's answer.
        reply: String,
    },

    /// A server answered a command with an unexpected type.
    #[error("the server answered {command:?} with {reply}, which is no {wanted}")]
    Unexpected {
        /// The command, shortened.
        command: String,
        /// The answer, shortened.
        reply: String,
        /// The expected type.
        wanted: &'static str,
    },

    /// An answer is not RESP, or not what was asked for.
    #[error("what the server sent is not understood: {0}")]
    Garbled(String),

    /// Two servers do not hold the same data.
    #[error("{0}")]
    Different(String),

    /// A system call failed.
    #[error("{doing}: {source}")]
    Io {
        /// What the lab was doing.
        doing: String,
        /// The system's error.
        source: io::Error,
    },
}

/// The result of the lab's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds to an error of the system what was being done.
pub(crate) trait Doing<T> {
    /// Converts the system's error; `doing` completes "could not …".
    fn doing<D: Display>(self, doing: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing<D: Display>(self, doing: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| Error::Io { doing: format!("could not {}", doing()), source: error.into() })
    }
}
