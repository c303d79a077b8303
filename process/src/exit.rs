//! How a command ends, and how long it waits before: one code per kind of failure, and one sentence that names the
//! thing and says what to do.
//!
//! The codes are an interface: scripts and service managers use them. The table is in `docs/reference/exit-codes.md`,
//! in every `--help`, and here; a test checks that the three agree. Codes above 100 belong to the shell and the runtime
//! (101: a panic, which is a bug).

use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::events;
use remora_base::files::PutError;
use remora_base::pace::Backoff;
use remora_server::sentinel::SentinelError;
use remora_server::{ServerError, SetupError};

/// The kind of a command's end. The numbers never change their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Code {
    /// The two compared servers do not hold the same data.
    Differs = 1,
    /// The command line is not valid.
    Usage = 2,
    /// Refused before anything was changed: a setting, a file or a server is not suitable.
    Refused = 3,
    /// The connection to a Redis or Valkey server failed, or the server refused the login or a command.
    Server = 4,
    /// The connection to the source agent failed, or the source refused the request.
    Source = 5,
    /// The sync failed after the replica's server was changed. The message gives the state in which it was left.
    SyncFailed = 6,
    /// SIGINT or SIGTERM stopped the command before it was done. The message gives the state in which things were left.
    Interrupted = 7,
    /// This host lacks a resource: memory, disk space, a port.
    Local = 8,
    /// Some keys changed faster than they could be compared; all others are the same.
    Undecided = 9,
    /// Too few servers of a volume answer, or they refuse the request.
    Volume = 10,
    /// Another writer has opened the volume. A service manager must not restart this one.
    Replaced = 11,
    /// Another writer has the volume open, and is at work. Nothing was changed.
    InUse = 12,
    /// A server is not ready for work.
    NotReady = 13,
    /// Another client has taken the replica's server over. A service manager must not restart this agent.
    TakenOver = 14,
    /// A copy of a volume is damaged, and was not taken back.
    Damaged = 15,
    /// The primary would not continue a server that starts on a fetched file. The file was not put in place.
    Stale = 16,
    /// The object store cannot be reached, or refuses a request.
    Store = 17,
    /// The old primary still takes the writes. If it is otherwise, the message says so.
    NotSwitched = 18,
    /// The switch is done, and the hook failed, or the Sentinels do not name the new primary, or a server has not noted
    /// its role.
    HookFailed = 19,
}

impl Code {
    /// All codes, in order.
    pub const ALL: [Self; 19] = [
        Self::Differs,
        Self::Usage,
        Self::Refused,
        Self::Server,
        Self::Source,
        Self::SyncFailed,
        Self::Interrupted,
        Self::Local,
        Self::Undecided,
        Self::Volume,
        Self::Replaced,
        Self::InUse,
        Self::NotReady,
        Self::TakenOver,
        Self::Damaged,
        Self::Stale,
        Self::Store,
        Self::NotSwitched,
        Self::HookFailed,
    ];

    /// The exit status of the process.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The code's meaning, in the words of the documentation.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Differs => "verify: the servers do not hold the same data",
            Self::Usage => "the command line is not valid",
            Self::Refused => "refused before anything was changed: a setting, a file or a server is not suitable",
            Self::Server => {
                "the connection to a Redis or Valkey server failed, or the server refused the login or a command"
            }
            Self::Source => {
                "the connection to the source agent failed, or the source refused the request (wrong token)"
            }
            Self::SyncFailed => "the sync failed; the message gives the state in which the replica's server was left",
            Self::Interrupted => "stopped by SIGINT or SIGTERM before the work was done",
            Self::Local => "this host lacks a resource: memory, disk space, a port",
            Self::Undecided => {
                "verify: some keys or libraries changed faster than they could be compared, all others are the same"
            }
            Self::Volume => "volume: too few of its servers answer, or a server refuses the request",
            Self::Replaced => "volume: another writer has opened it; do not restart this one without need",
            Self::InUse => "volume: another writer is at work, and --take-over was not given; nothing was changed",
            Self::NotReady => "ready: the server is not ready for work",
            Self::TakenOver => {
                "taken over: another client promoted the replica's server or pointed it elsewhere, and the agent left that in place"
            }
            Self::Damaged => "volume scrub: a copy is damaged and was not taken back; remora volume repair does it",
            Self::Stale => {
                "fetch, delivery by file: the primary would not continue a server that starts on the file, which was not put in place"
            }
            Self::Store => "backup and restore: the object store cannot be reached, or refuses a request",
            Self::NotSwitched => "switch: it did not happen; the message says which server takes the writes",
            Self::HookFailed => {
                "switch: it is done, but the hook failed, the Sentinels do not name the new primary, or a server has not \
                 noted its role (--rewrite-config)"
            }
        }
    }
}

/// The failure of a command. Success is `Ok(())` and exit code 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind of failure.
    pub code: Code,
    /// One sentence without a full stop: what happened to which thing, and what to do about it. It never contains a
    /// secret.
    pub message: String,
    /// Whether the same attempt may succeed later although no operator does anything: the command waits for that within
    /// its time limit. Never true for [`Code::Usage`] and [`Code::Refused`].
    pub passes: bool,
}

impl Failure {
    /// A failure of this kind with this sentence.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), passes: false }
    }

    /// A failure whose cause may pass by itself.
    pub fn passing(code: Code, message: impl Into<String>) -> Self {
        Self::new(code, message).that_passes(true)
    }

    /// The same failure; `passes`: whether its cause may pass by itself. What is refused does not change by itself.
    #[must_use]
    pub fn that_passes(self, passes: bool) -> Self {
        let is_final = matches!(self.code, Code::Usage | Code::Refused);
        debug_assert!(!(passes && is_final), "refused, and yet it passes: {}", self.message);
        Self { passes: passes && !is_final, ..self }
    }

    /// A failure before anything was changed, because the request is not possible.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(Code::Refused, message)
    }

    /// A failure because this host lacks a resource.
    pub fn local(message: impl Into<String>) -> Self {
        Self::new(Code::Local, message)
    }

    /// The same failure with additional text at the end of its sentence.
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

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Self {
        Self::new(Code::Refused, error.to_string())
    }
}

impl From<ServerError> for Failure {
    fn from(error: ServerError) -> Self {
        Self::new(Code::Server, error.to_string()).that_passes(error.is_passing())
    }
}

impl From<SentinelError> for Failure {
    fn from(error: SentinelError) -> Self {
        Self::new(Code::Server, error.to_string()).that_passes(error.is_passing())
    }
}

impl From<PutError> for Failure {
    fn from(error: PutError) -> Self {
        match error {
            PutError::Exists(_) => Self::refused(error.to_string()),
            PutError::Failed { .. } => Self::local(error.to_string()),
        }
    }
}

impl From<Failure> for ExitCode {
    fn from(failure: Failure) -> Self {
        failure.code.number().into()
    }
}

/// The table at the end of a help page: code 0 and the codes named.
pub fn help_table(codes: &[Code]) -> String {
    let mut table = String::from("Exit codes:\n  0  done\n");
    for code in codes {
        table.push_str(&format!("  {}  {}\n", code.number(), code.meaning()));
    }
    table
}

// Patience: how long a command waits for what passes by itself, before it gives up.
//
// A server that starts, loads or is busy, a source that is being restarted, Sentinels that do not answer yet: no
// operator has to do anything, so the command tries again. It says what it waits for when that changes, and every half
// minute. What does not pass ends it at once.

/// The longest pause between two attempts: a server that is started beside the agent is not waited for much longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How often the same cause is said again.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// The option that limits most waits.
pub const RETRY_FOR: &str = "--retry-for";

/// Failures that follow each other.
pub struct Patience {
    limit: Duration,
    /// The option that gives the limit.
    option: &'static str,
    backoff: Backoff,
    since: Option<Instant>,
    said: Option<(Instant, String)>,
}

impl Patience {
    /// Waits for this long in all. `option`: by which the user has given the limit.
    pub fn new(limit: Duration, option: &'static str) -> Patience {
        Patience { limit, option, backoff: Backoff::from_system(), since: None, said: None }
    }

    /// The pause before the next attempt, after this failure at this time.
    ///
    /// # Errors
    /// The failure does not pass, or such failures have lasted for too long.
    pub fn after(&mut self, now: Instant, failure: Failure) -> Result<Duration, Failure> {
        let since = *self.since.get_or_insert(now);
        let waited = now.saturating_duration_since(since);
        if !failure.passes || self.limit.is_zero() {
            return Err(failure);
        }
        let Some(left) = self.limit.checked_sub(waited).filter(|left| !left.is_zero()) else {
            return Err(failure.and(&format!("tried for {} s ({})", waited.as_secs(), self.option)));
        };
        let is_news = self
            .said
            .as_ref()
            .is_none_or(|(at, text)| *text != failure.message || now.saturating_duration_since(*at) >= SAY_EVERY);
        if is_news {
            tracing::warn!(
                event = events::RETRYING,
                "{failure}; trying again for {} s at most ({})",
                left.as_secs().max(1),
                self.option
            );
            self.said = Some((now, failure.message));
        }
        Ok(self.backoff.next().min(LONGEST_PAUSE).min(left))
    }

    /// Tries until an attempt succeeds.
    ///
    /// # Errors
    /// As [`Patience::after`].
    pub async fn keep_trying<T>(&mut self, mut attempt: impl AsyncFnMut() -> Result<T, Failure>) -> Result<T, Failure> {
        loop {
            match attempt().await {
                Ok(done) => {
                    self.overcome();
                    return Ok(done);
                }
                Err(failure) => {
                    let pause = self.after(Instant::now(), failure)?;
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// An attempt has succeeded: the next failure begins a new wait.
    pub fn overcome(&mut self) {
        (self.since, self.said) = (None, None);
        self.backoff.reset();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::{Code, *};

    #[test]
    fn the_manual_lists_every_code_with_its_meaning() {
        let manual = include_str!("../../docs/reference/exit-codes.md");
        for code in Code::ALL {
            let row = format!("| {} | {} |", code.number(), code.meaning());
            assert!(manual.contains(&row), "docs/reference/exit-codes.md lacks {row}");
        }
    }

    /// Words for a state that passes by itself.
    const PASSING: [&str; 12] = [
        "yet",
        "not now",
        "try again",
        "at the moment",
        "LOADING",
        "is loading",
        "is busy",
        "is down",
        "under way",
        "timed out",
        "does not answer",
        "cannot be reached",
    ];

    /// The sources below this folder, without their tests.
    fn sources(folder: &std::path::Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
                found.push((path.display().to_string(), product.to_owned()));
            }
        }
    }

    /// The call with which the text begins, up to its closing bracket.
    fn call_at(text: &str) -> &str {
        let mut depth = 0;
        let end = text.bytes().position(|byte| {
            depth += i32::from(byte == b'(') - i32::from(byte == b')');
            byte == b')' && depth == 0
        });
        &text[..end.unwrap_or(text.len())]
    }

    #[test]
    fn what_is_refused_does_not_change_by_itself_at_any_place() {
        let mut all = Vec::new();
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let crates = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path().join("src"));
        crates.filter(|folder| folder.is_dir()).for_each(|folder| sources(&folder, &mut all));
        let mut places = 0;
        for (path, text) in &all {
            for call in ["Failure::refused(", "Failure::new(Code::Refused"] {
                for (at, _) in text.match_indices(call) {
                    places += 1;
                    let sentence = call_at(&text[at..]);
                    let word = PASSING.iter().find(|word| sentence.contains(**word));
                    assert!(word.is_none(), "{path}: code 3 for what passes ({word:?}): {sentence}");
                }
            }
        }
        assert!(places > 100, "{places} places were found");
    }

    #[test]
    fn what_passes_keeps_its_code_and_what_is_refused_never_passes() {
        assert!(Failure::passing(Code::Source, "it is away").and("tried").passes);
        assert!(!Failure::refused("too small").that_passes(false).passes);
    }

    #[test]
    fn an_error_of_a_server_keeps_its_words_and_says_whether_it_passes() {
        let refused = |text: &str| {
            let error = ServerError::Refused {
                server: "redis://a:1".into(),
                command: "INFO".into(),
                kind: remora_server::RefusalKind::Other,
                text: text.into(),
                task: remora_server::Task::Source,
            };
            (error.to_string(), Failure::from(error))
        };
        for (text, passes) in [("LOADING Redis is loading the dataset in memory", true), ("NOAUTH log in", false)] {
            let (words, failure) = refused(text);
            assert_eq!(failure, Failure::new(Code::Server, words).that_passes(passes));
        }
        let wrong = SetupError::UserWithoutPassword { user: "me".into() };
        assert_eq!(Failure::from(wrong).code, Code::Refused);
    }

    #[test]
    fn a_file_that_is_in_the_way_is_refused_and_what_the_system_refuses_is_this_host_s() {
        let exists = PutError::Exists("/a/b".into());
        assert_eq!(Failure::from(exists), Failure::refused("/a/b exists by now; replace it by --replace"));
        let failed = PutError::Failed {
            path: "/a/b".into(),
            step: " cannot be written",
            cause: std::io::ErrorKind::StorageFull.into(),
        };
        let failure = Failure::from(failed);
        assert_eq!((failure.code, failure.message.starts_with("/a/b cannot be written: ")), (Code::Local, true));
    }

    #[test]
    fn no_two_codes_share_a_number_and_none_is_zero() {
        for (index, code) in Code::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(code.number()), index + 1);
        }
    }

    fn passing() -> Failure {
        Failure::passing(Code::Server, "the server loads")
    }

    #[test]
    fn what_passes_is_waited_for_as_long_as_the_option_says() {
        let (began, mut patience) = (Instant::now(), Patience::new(Duration::from_secs(10), RETRY_FOR));
        for second in 0..10 {
            let pause = patience.after(began + Duration::from_secs(second), passing()).unwrap();
            assert!(pause <= Duration::from_secs(10 - second) && pause <= LONGEST_PAUSE, "{pause:?}");
        }
        let over = patience.after(began + Duration::from_secs(10), passing()).unwrap_err();
        assert_eq!(over.message, "the server loads; tried for 10 s (--retry-for)");
        assert_eq!(over.code, Code::Server);
    }

    #[test]
    fn a_wait_begins_anew_after_a_success() {
        let (began, mut patience) = (Instant::now(), Patience::new(Duration::from_secs(10), RETRY_FOR));
        assert!(patience.after(began, passing()).is_ok());
        patience.overcome();
        assert!(patience.after(began + Duration::from_secs(15), passing()).is_ok());
        assert!(patience.after(began + Duration::from_secs(26), passing()).is_err());
    }

    #[test]
    fn what_does_not_pass_and_what_has_no_time_ends_at_once_in_its_own_words() {
        let now = Instant::now();
        let ends = Failure::new(Code::Server, "the password is wrong");
        assert_eq!(Patience::new(Duration::from_secs(10), RETRY_FOR).after(now, ends.clone()), Err(ends));
        assert_eq!(Patience::new(Duration::ZERO, RETRY_FOR).after(now, passing()), Err(passing()));
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_go_on_until_one_succeeds() {
        let mut left = 3;
        let mut patience = Patience::new(Duration::from_secs(10), RETRY_FOR);
        let done = patience.keep_trying(async || {
            left -= 1;
            if left == 0 { Ok(7) } else { Err(passing()) }
        });
        assert_eq!(done.await, Ok(7));
    }
}
