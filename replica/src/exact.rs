//! Exact: the conditions under which a server is called an exact replica, in one place.
//!
//! ```text
//!   before the sync        while it runs                       in step with the primary
//!   settings, counts  ──▶  slots, checksums, offsets,   ──▶    judge(): counts since, keys    ──▶ all hold: done
//!                          history: a failure ends it         at one offset                  └─▶ one is broken: failed
//! ```
//!
//! A condition that is broken fails the sync, whatever else went well. One that cannot be checked (a server that does
//! not count, or does not tell) is said to be unknown. `--explain` prints each; docs/explanation/design.md says which
//! test breaks it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use remora_base::units::counted;
use remora_delivery::payload::command_names;
use remora_process::exit::{Code, Failure};
use remora_server::own_changes::{Counted, OwnChanges};
use remora_server::{Client, Facts, Server, ServerError};

/// One condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Condition {
    /// The primary has the history of the snapshot.
    History,
    /// The server has loaded every byte of the snapshot.
    Snapshot,
    /// The server has got every byte between the snapshot and the hand-off, and the primary has continued it there.
    Stream,
    /// The server has executed every command of the stream.
    Commands,
    /// The server has removed no key by itself.
    Evictions,
    /// No client writes to the server.
    Writes,
    /// At one offset the server holds as many keys as the primary, in each database.
    Keys,
}

impl Condition {
    /// All of them, in the order in which they are shown.
    pub(crate) const ALL: [Condition; 7] = [
        Condition::History,
        Condition::Snapshot,
        Condition::Stream,
        Condition::Commands,
        Condition::Evictions,
        Condition::Writes,
        Condition::Keys,
    ];

    /// The name in the summary.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Condition::History => "history",
            Condition::Snapshot => "snapshot",
            Condition::Stream => "stream",
            Condition::Commands => "commands",
            Condition::Evictions => "evictions",
            Condition::Writes => "writes",
            Condition::Keys => "keys",
        }
    }

    /// What it says.
    pub(crate) const fn meaning(self) -> &'static str {
        match self {
            Condition::History => "the primary has the history of the snapshot",
            Condition::Snapshot => {
                "every slot of the snapshot matched its checksum, and the server has loaded them all"
            }
            Condition::Stream => "the server got every byte of the stream, and its primary continued it there",
            Condition::Commands => "the server has executed every command of the stream",
            Condition::Evictions => "the server has removed no key by itself",
            Condition::Writes => "no client writes to the server",
            Condition::Keys => "at one offset both servers hold as many keys in each database",
        }
    }
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Holds,
    /// The server is not an exact replica.
    Broken,
    /// It could not be checked.
    Unknown,
}

/// What was found of one condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) condition: Condition,
    pub(crate) verdict: Verdict,
    /// Why, or by what.
    pub(crate) text: String,
}

/// What was found of all conditions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Exactness(Vec<Finding>);

/// What the server's task has found last, for the summary.
#[derive(Clone, Default)]
pub(super) struct Judgement(Arc<Mutex<Exactness>>);

impl Judgement {
    /// Notes what was found.
    pub(super) fn set(&self, found: Exactness) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = found;
    }

    /// What was found last.
    pub(super) fn get(&self) -> Exactness {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Exactness {
    fn add(&mut self, condition: Condition, verdict: Verdict, text: impl Into<String>) {
        self.0.push(Finding { condition, verdict, text: text.into() });
    }

    /// Adds what a sync that came this far has proved.
    #[must_use]
    pub(super) fn proved(mut self, replid: &str, snapshot_offset: u64, hand_off_offset: u64) -> Exactness {
        self.add(Condition::History, Verdict::Holds, replid);
        self.add(Condition::Snapshot, Verdict::Holds, format!("at offset {snapshot_offset}"));
        self.add(Condition::Stream, Verdict::Holds, format!("from offset {snapshot_offset} to {hand_off_offset}"));
        self.0.sort_by_key(|finding| finding.condition as u8);
        self
    }

    /// Fails if a condition is broken.
    ///
    /// # Errors
    /// The server is not an exact replica, and why.
    pub(crate) fn outcome(&self, server: &str) -> Result<(), Failure> {
        let broken: Vec<_> = self.0.iter().filter(|found| found.verdict == Verdict::Broken).collect();
        if broken.is_empty() {
            return Ok(());
        }
        let why: Vec<_> = broken.iter().map(|found| found.text.as_str()).collect();
        Err(Failure::new(Code::SyncFailed, format!("the server {server} is not an exact replica: {}", why.join("; "))))
    }

    /// A line for each condition.
    pub(crate) fn lines(&self) -> Vec<String> {
        let line = |found: &Finding| {
            let Finding { condition, verdict, text } = found;
            let verdict = match verdict {
                Verdict::Holds => "holds",
                Verdict::Broken => "broken",
                Verdict::Unknown => "unknown",
            };
            let text = if text.is_empty() {
                condition.meaning().to_owned()
            } else {
                format!("{}: {text}", condition.meaning())
            };
            format!("  {:<10} {verdict:<8} {text}", condition.name())
        };
        self.0.iter().map(line).collect()
    }
}

/// What will be checked, for a run that changes nothing.
pub(crate) fn what_will_be_checked() -> impl Iterator<Item = String> {
    Condition::ALL.into_iter().map(|condition| format!("  {:<10} {}", condition.name(), condition.meaning()))
}

/// Looks at the server, which is in step with the primary.
///
/// # Errors
/// The server does not answer.
pub(crate) async fn judge(
    client: &mut Client,
    before: Option<&Counted>,
    primary: Option<&Server>,
) -> Result<Exactness, ServerError> {
    let mut found = Exactness::default();
    if remora_base::mutation::Mutation::ErrorsUnheard.is_active() {
        return Ok(found);
    }
    let now = Counted::read(client).await?;
    let since = now.since(before.unwrap_or(&Counted::default()));
    match since.unexpected {
        None => found.add(Condition::Commands, Verdict::Unknown, "it does not count them (unexpected_error_replies)"),
        Some(0) if before.is_some_and(|before| !now.is_of_the_run_of(before)) => {
            let text = "it was restarted during the sync, and what it had counted before is not known";
            found.add(Condition::Commands, Verdict::Unknown, text);
        }
        Some(0) => found.add(Condition::Commands, Verdict::Holds, ""),
        Some(count) => {
            let text = could_not_execute(count, &names_of(client, &since, primary).await);
            found.add(Condition::Commands, Verdict::Broken, text);
        }
    }
    let own = OwnChanges::read(client).await?;
    let limit = own.as_ref().and_then(OwnChanges::of_the_limit);
    match (since.evicted, limit) {
        (Some(0), None) => found.add(Condition::Evictions, Verdict::Holds, ""),
        (Some(0), Some(what)) => found.add(Condition::Evictions, Verdict::Holds, format!("but it {what}")),
        (None, _) => found.add(Condition::Evictions, Verdict::Unknown, "it does not count them (evicted_keys)"),
        (Some(count), what) => {
            let what = what.map_or_else(String::new, |what| format!(": it {what}"));
            let text = format!("it has removed {} by itself since the sync began{what}", counted(count, "key"));
            found.add(Condition::Evictions, Verdict::Broken, text);
        }
    }
    match own {
        Some(own) if own.is_writable => {
            let text = "replica-read-only no: clients may write to it, also while it is a replica";
            found.add(Condition::Writes, Verdict::Unknown, text);
        }
        Some(_) => found.add(Condition::Writes, Verdict::Holds, ""),
        None => found.add(Condition::Writes, Verdict::Unknown, "it does not tell its settings (CONFIG GET)"),
    }
    let (verdict, text) = match primary {
        Some(primary) => compare_keys(client, primary).await?,
        None => (Verdict::Unknown, "the primary is not known".to_owned()),
    };
    found.add(Condition::Keys, verdict, text);
    Ok(found)
}

fn could_not_execute(count: u64, names: &[String]) -> String {
    let commands = counted(count, "command");
    let names = match names {
        [] => String::new(),
        names => format!(" ({})", names.join(", ")),
    };
    format!(
        "it could not execute {commands} of its primary's stream{names}; its log shows them (\"sending an error to its \
         primary\"): let it execute them (rename-command, modules), and make it a replica again with --replace"
    )
}

/// Names for the commands that failed, as far as they can be found: those that the server counted as failed, and those
/// that the primary has and the server lacks.
async fn names_of(client: &mut Client, since: &Counted, primary: Option<&Server>) -> Vec<String> {
    let mut names: Vec<String> = since.failed_commands().into_iter().map(str::to_ascii_uppercase).collect();
    if let Some(primary) = primary
        && let Ok(mut primary) = primary.connect().await
    {
        let lacking = lacking_commands(&mut primary, client).await;
        names.extend(lacking.into_iter().map(|name| format!("it lacks {}", name.to_ascii_uppercase())));
    }
    names.truncate(MOST_NAMES);
    names
}

/// The writing commands that the primary has and the server lacks: other versions, modules, or renamed ones. Empty if
/// one of them does not tell.
pub(crate) async fn lacking_commands(primary: &mut Client, server: &mut Client) -> Vec<String> {
    let (theirs, ours) = (writing_commands(primary).await, writing_commands(server).await);
    match (theirs, ours) {
        (Some(theirs), Some(ours)) => theirs.difference(&ours).cloned().collect(),
        _ => Vec::new(),
    }
}

async fn writing_commands(client: &mut Client) -> Option<BTreeSet<String>> {
    command_names(client.command(&["COMMAND", "LIST", "FILTERBY", "ACLCAT", "write"]).await.ok()?)
}

/// Compares the numbers of keys at a moment at which both servers have the same offset. `INFO` has the offset and the
/// numbers of one moment.
async fn compare_keys(client: &mut Client, primary: &Server) -> Result<(Verdict, String), ServerError> {
    let asked = async { primary.connect().await };
    let mut primary = match asked.await {
        Ok(primary) => primary,
        Err(error) => return Ok((Verdict::Unknown, format!("the primary is not asked: {error}"))),
    };
    let (began, mut differing) = (Instant::now(), None);
    loop {
        let theirs = match Facts::read_as_one(&mut primary).await {
            Ok(facts) => facts,
            Err(error) => return Ok((Verdict::Unknown, format!("the primary does not say: {error}"))),
        };
        let ours = Facts::read_as_one(client).await?;
        if theirs.replid.is_some() && theirs.replid == ours.replid && theirs.offset == ours.offset {
            let offset = theirs.offset.unwrap_or(0);
            match different_keys(&theirs, &ours) {
                None => return Ok((Verdict::Holds, format!("{} at offset {offset}", counted(theirs.keys(), "key")))),
                // Seen at two offsets, or for a while at one, it is no accident of the moment.
                Some(text) if differing.is_some() && began.elapsed() > CERTAIN_AFTER => {
                    return Ok((Verdict::Broken, format!("at offset {offset} {text}")));
                }
                Some(text) => differing = Some(text),
            }
        }
        if began.elapsed() > KEYS_LIMIT && differing.is_none() || began.elapsed() > 2 * KEYS_LIMIT {
            let text = "the primary was written to all the time, so that the offsets were never equal";
            return Ok((Verdict::Unknown, text.to_owned()));
        }
        tokio::time::sleep(KEYS_POLL).await;
    }
}

/// How the numbers of keys differ. Left out are databases with fields of hashes that expire: Valkey 9 keeps a hash
/// whose last field has expired as a key, and its snapshots leave it out. Of keys that expire nothing is said: a server
/// that starts on a file leaves out those whose time is over.
fn different_keys(primary: &Facts, server: &Facts) -> Option<String> {
    let numbers: BTreeSet<_> = primary.databases.iter().chain(&server.databases).map(|held| held.number).collect();
    let lasting = |facts: &Facts, number| {
        let held = facts.databases.iter().find(|held| held.number == number);
        held.map_or((0, 0), |held| (held.keys.saturating_sub(held.expires), held.field_expires))
    };
    numbers.into_iter().find_map(|number| {
        let ((theirs, fields), (ours, our_fields)) = (lasting(primary, number), lasting(server, number));
        let differ = fields == 0 && our_fields == 0 && theirs != ours;
        differ
            .then(|| format!("the primary holds {theirs} keys that do not expire in database {number}, and it {ours}"))
    })
}

/// How long the offsets may differ until nothing is said of the keys: some round trips, as the hand-off waits for it.
const KEYS_LIMIT: Duration = Duration::from_millis(250);

/// Pause between two looks.
const KEYS_POLL: Duration = Duration::from_millis(2);

/// For how long numbers must differ.
const CERTAIN_AFTER: Duration = Duration::from_millis(50);

/// Names that a message has at most.
const MOST_NAMES: usize = 8;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::info::Info;

    use super::*;

    fn facts(keyspace: &str) -> Facts {
        Facts::from_info(&Info::parse(keyspace.replace(' ', "\r\n").as_bytes()))
    }

    #[test]
    fn every_condition_is_shown_once_and_has_a_test_in_the_design() {
        let mut found = Exactness::default();
        for condition in Condition::ALL {
            found.add(condition, Verdict::Holds, "");
        }
        let design = include_str!("../../docs/explanation/design.md");
        for (line, condition) in found.lines().iter().zip(Condition::ALL) {
            assert!(line.contains(condition.name()) && line.contains(condition.meaning()), "{line}");
            let row = format!("| `{}` | {} | `", condition.name(), condition.meaning());
            assert!(design.contains(&row), "docs/explanation/design.md lacks {row}");
        }
        found.outcome("s").unwrap();
    }

    #[test]
    fn one_broken_condition_fails_the_sync_and_an_unknown_one_does_not() {
        let mut found = Exactness::default();
        found.add(Condition::Keys, Verdict::Unknown, "not asked");
        found.outcome("s").unwrap();
        found.add(Condition::Commands, Verdict::Broken, could_not_execute(2, &["it lacks FLUSHALL".to_owned()]));
        let failure = found.clone().outcome("s").unwrap_err();
        assert_eq!(failure.code, Code::SyncFailed);
        assert!(failure.message.contains("2 commands") && failure.message.contains("FLUSHALL"), "{failure}");
        let names: Vec<_> = found.proved("abc", 0, 0).0.iter().map(|found| found.condition.name()).collect();
        assert_eq!(names, ["history", "snapshot", "stream", "commands", "keys"]);
    }

    #[test]
    fn keys_count_where_no_field_expires_and_not_those_that_expire() {
        let primary = facts("db0:keys=12,expires=2 db3:keys=5,expires=0");
        for (server, differs) in [
            ("db0:keys=12,expires=2 db3:keys=5,expires=0", false),
            ("db0:keys=11,expires=1 db3:keys=5,expires=0", false),
            ("db0:keys=12,expires=1 db3:keys=5,expires=0", true),
            ("db0:keys=12,expires=2", true),
            ("db0:keys=12,expires=2 db3:keys=4,expires=0", true),
            ("db0:keys=12,expires=2 db3:keys=4,expires=0,keys_with_volatile_items=1", false),
            ("db0:keys=12,expires=2 db3:keys=5,expires=0 db9:keys=1,expires=0", true),
        ] {
            assert_eq!(different_keys(&primary, &facts(server)).is_some(), differs, "{server}");
        }
    }
}
