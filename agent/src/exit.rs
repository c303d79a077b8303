//! How a command of ours ends: one code per kind of trouble, and one sentence that names the thing and says what to do.
//!
//! The codes are an interface: scripts and service managers branch on them. The table stands in `docs/operating.md`, in every
//! `--help`, and here; a test keeps the three alike. Codes above 100 are left to the shell and the runtime (101: we panicked, a bug).

use std::{fmt, process::ExitCode};

/// What kind of end it was. The numbers never change their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Code {
    /// The two servers compared do not hold the same data.
    Differs = 1,
    /// The command line was not understood.
    Usage = 2,
    /// Refused before anything was touched: a setting, a file, or a server that is not fit for what was asked.
    Refused = 3,
    /// A Redis or Valkey server cannot be reached, or denies us.
    Server = 4,
    /// The source agent cannot be reached, or denies us.
    Source = 5,
    /// The sync failed after the replica's server had been touched; the message says in which state it was left.
    SyncFailed = 6,
    /// Stopped by SIGINT or SIGTERM before the work was done; the message says in which state things were left.
    Interrupted = 7,
    /// This machine lacks something: memory, disk space, a port.
    Local = 8,
    /// Some keys changed faster than they could be compared; all others are the same.
    Undecided = 9,
}

impl Code {
    /// Every code, in order, for tables.
    pub const ALL: [Self; 9] = [
        Self::Differs,
        Self::Usage,
        Self::Refused,
        Self::Server,
        Self::Source,
        Self::SyncFailed,
        Self::Interrupted,
        Self::Local,
        Self::Undecided,
    ];

    /// The number the process ends with.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// What it means, in the words of the documentation.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Differs => "verify: the servers do not hold the same data",
            Self::Usage => "the command line was not understood",
            Self::Refused => "refused before anything was touched: a setting, a file, or a server not fit for this",
            Self::Server => "a Redis or Valkey server cannot be reached, or denies us",
            Self::Source => "the source agent cannot be reached, or denies us (wrong token)",
            Self::SyncFailed => "the sync failed; the message says in which state the replica's server was left",
            Self::Interrupted => "stopped by SIGINT or SIGTERM before the work was done",
            Self::Local => "this machine lacks something: memory, disk space, a port",
            Self::Undecided => {
                "verify: some keys or libraries changed faster than they could be compared, all others are the same"
            }
        }
    }
}

/// The failed end of a command. Success has no type of its own: it is `Ok(())` and exit code 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What kind of trouble.
    pub code: Code,
    /// One sentence, without a full stop at its end: what happened to which thing, and what to do about it. Never a secret.
    pub message: String,
}

impl Failure {
    /// A failure of that kind with that sentence.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Nothing was touched, because what was asked for cannot be.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(Code::Refused, message)
    }

    /// This machine lacks something.
    pub fn local(message: impl Into<String>) -> Self {
        Self::new(Code::Local, message)
    }

    /// The same failure, with what the reader needs to know besides behind it.
    #[must_use]
    pub fn and(mut self, more: &str) -> Self {
        self.message.push_str("; ");
        self.message.push_str(more);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl From<Failure> for ExitCode {
    fn from(failure: Failure) -> Self {
        failure.code.number().into()
    }
}

/// The table for the foot of a help page: code 0 and the codes named.
pub fn help_table(codes: &[Code]) -> String {
    let mut table = String::from("Exit codes:\n  0  done\n");
    for code in codes {
        table.push_str(&format!("  {}  {}\n", code.number(), code.meaning()));
    }
    table
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_manual_lists_every_code_with_its_meaning() {
        let manual = include_str!("../../docs/operating.md");
        for code in Code::ALL {
            let row = format!("| {} | {} |", code.number(), code.meaning());
            assert!(manual.contains(&row), "docs/operating.md lacks {row}");
        }
    }

    #[test]
    fn no_two_codes_share_a_number_and_none_is_zero() {
        for (index, code) in Code::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(code.number()), index + 1);
        }
    }
}
