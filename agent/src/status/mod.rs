//! `remora status`: what a source holds and which replicas read from it, as a table, as JSON, or live on a terminal.
//! The names of states and units are in [`view`], which the page of `--metrics` shows too.

use std::collections::HashMap;
#[cfg(feature = "screen")]
use std::io::IsTerminal;
use std::time::Duration;

use tokio::signal::unix::Signal;

use crate::args::{AskArgs, HostPort, StatusArgs};
use crate::conversation::{Connection, Error};
use crate::exit::{Code, Failure};
use crate::units::{Size, counted};
use crate::{events, progress, signals};
use remora_metrics::view;
use remora_protocol::{GenerationStatus, Message, ReplicaStatus, Saving, StatusReport};

#[cfg(feature = "screen")]
mod screen;

/// How long a source may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Requests the status and prints it on stdout, repeatedly with `--watch`.
///
/// # Errors
/// The token file is not usable, or the source cannot be reached, refuses the request or does not answer.
pub async fn run(args: StatusArgs) -> Result<(), Failure> {
    let mut source = Asked::of(args.ask, args.watch.is_some()).await?;
    #[cfg(feature = "screen")]
    if let Some(pause) = args.watch.filter(|_| !args.json && std::io::stdout().is_terminal()) {
        return screen::watch(&mut source, pause).await;
    }
    loop {
        let report = source.report().await?;
        if args.json {
            progress::print_json(&report)?;
        } else {
            progress::print(&table(&report))?;
        }
        let Some(pause) = args.watch else { return Ok(()) };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = source.files_changed() => match source.connect_again().await {
                Ok(()) => tracing::info!(event = events::TOKENS_REREAD, "token files read again"),
                Err(failure) => tracing::error!(event = events::TOKENS_KEPT, "{failure}; the tokens read before stay valid"),
            }
        }
    }
}

/// A source that is asked again and again.
struct Asked {
    args: AskArgs,
    connection: Connection,
    /// Requests to read files again (SIGHUP); `None`: it is asked once.
    hangups: Option<Signal>,
}

impl Asked {
    async fn of(args: AskArgs, is_watched: bool) -> Result<Asked, Failure> {
        let hangups = if is_watched { Some(signals::hangups()?) } else { None };
        Ok(Asked { connection: connect(&args).await?, args, hangups })
    }

    async fn report(&mut self) -> Result<StatusReport, Failure> {
        ask(&mut self.connection, &self.args.source).await
    }

    /// Returns when a SIGHUP comes. Cancel-safe.
    async fn files_changed(&mut self) {
        let hung_up = match &mut self.hangups {
            Some(hangups) => hangups.recv().await,
            None => None,
        };
        if hung_up.is_none() {
            std::future::pending().await
        }
    }

    /// Connects with what is in the files now. After an error the present connection stays.
    async fn connect_again(&mut self) -> Result<(), Failure> {
        self.connection = connect(&self.args).await?;
        Ok(())
    }
}

async fn connect(args: &AskArgs) -> Result<Connection, Failure> {
    let HostPort { host, port } = &args.source;
    args.credentials()?.connect(host, *port).await.map_err(Error::of_source)
}

/// Asks a source how it stands.
///
/// # Errors
/// The source does not answer in time, or the connection has failed.
pub(crate) async fn ask(connection: &mut Connection, source: &HostPort) -> Result<StatusReport, Failure> {
    connection.send(Message::StatusQuery).await.map_err(Error::of_source)?;
    let answer = async {
        loop {
            if let Message::Status(report) = connection.receive().await.map_err(Error::of_source)? {
                return Ok(report);
            }
        }
    };
    tokio::time::timeout(ANSWER_LIMIT, answer).await.unwrap_or_else(|_| {
        let text = format!("the source {source} did not answer within {} s", ANSWER_LIMIT.as_secs());
        Err(Failure::new(Code::Source, text))
    })
}

pub(crate) fn table(report: &StatusReport) -> String {
    let mut text = format!("source     {}\n", view::source(report));
    match &report.generation {
        None => text.push_str(&format!("snapshot   {}\n", view::no_snapshot(report).join("; "))),
        Some(generation) => describe(generation, report.saving, &mut text),
    }
    text.push_str(&format!("base       {}\n", view::base(&report.base).join(", ")));
    text.push_str(&format!("so far     {}\n", view::totals(report).join(", ")));
    if let Some(upload) = view::measured_upload(report) {
        text.push_str(&format!("upload     {}\n", view::upload(upload).join(", ")));
    }
    if !report.last_failure.is_empty() {
        text.push_str(&format!("failed     the last snapshot: {}\n", report.last_failure));
    }
    if !report.replicas.is_empty() {
        text.push_str(&replicas(&report.replicas));
    }
    if report.replicas.iter().any(|replica| replica.serves || replica.reads_from.is_some()) {
        text.push_str("\nsource\n");
        Tree::of(&report.replicas).branch(None, 0, "", &mut text);
    }
    text
}

/// The replicas by the replica that they read from; `None`: the source.
struct Tree<'a> {
    readers: HashMap<Option<u64>, Vec<&'a ReplicaStatus>>,
    names: HashMap<u64, &'a str>,
}

impl<'a> Tree<'a> {
    fn of(replicas: &'a [ReplicaStatus]) -> Tree<'a> {
        let names: HashMap<u64, &str> =
            replicas.iter().map(|replica| (replica.session, replica.name.as_str())).collect();
        let mut readers = HashMap::<_, Vec<_>>::new();
        for replica in replicas {
            // A replica whose upstream has just left is drawn below the source until it is assigned another one.
            let above = replica.reads_from.filter(|session| names.contains_key(session));
            readers.entry(above).or_default().push(replica);
        }
        Tree { readers, names }
    }

    /// Draws the replicas that read from `from`, each with its own readers below it. Each is drawn once, so that a
    /// damaged report with a ring ends too.
    fn branch(&mut self, from: Option<u64>, level: usize, indent: &str, text: &mut String) {
        let readers = self.readers.remove(&from).unwrap_or_default();
        let above = from.and_then(|from| self.names.get(&from).copied());
        for (number, reader) in readers.iter().enumerate() {
            let is_last = number + 1 == readers.len();
            let (edge, below) = if is_last { ("└─", "   ") } else { ("├─", "│  ") };
            let upstream = match above {
                Some(name) if level >= INDENTED_LEVELS => format!("  reads from {name},"),
                _ => String::new(),
            };
            text.push_str(&format!("{indent}{edge} {}{upstream}{}\n", reader.name, serves(reader)));
            let below = if level < INDENTED_LEVELS { format!("{indent}{below}") } else { indent.to_owned() };
            self.branch(Some(reader.session), level + 1, &below, text);
        }
    }
}

/// Levels of the tree that are indented. One chain may have a thousand, and would be a thousand times three columns
/// wide. A replica below these levels has the name of the one that it reads from.
const INDENTED_LEVELS: usize = 24;

/// What other replicas can read from this one, as text.
fn serves(replica: &ReplicaStatus) -> String {
    let zone = if replica.zone.is_empty() { String::new() } else { format!(", zone {}", replica.zone) };
    let what = match (replica.serves, replica.oldest_slot) {
        (false, _) => "serves nothing".to_owned(),
        (true, 0) => format!("serves {}", counted(replica.slots_held, "slot")),
        (true, oldest) => format!("serves slots {oldest} to {}", replica.slots_held.saturating_sub(1)),
    };
    format!("  {what}{zone}")
}

fn describe(generation: &GenerationStatus, saving: Option<Saving>, text: &mut String) {
    let (state, length) = (view::state(generation.state), view::snapshot(generation).join(", "));
    let length = length.trim_end_matches(", ");
    let seconds = generation.capture_millis as f64 / 1000.0;
    text.push_str(&format!(
        "snapshot   generation {}, {state}: {length} in {}, {seconds:.3} s to take by {}, {} old\n",
        generation.generation,
        counted(generation.published_slots, "slot"),
        generation.capture,
        view::seconds(generation.age_seconds),
    ));
    if let Some(saving) = saving {
        text.push_str(&format!("           the server has saved {}\n", view::saved(saving)));
    }
    if !generation.no_fast_keys.is_empty() {
        text.push_str(&format!("           without fast keys: {}\n", generation.no_fast_keys));
    }
    text.push_str(&format!("           compression {}\n", generation.compression));
    text.push_str(&format!(
        "           {}:{}{}\n",
        generation.replid,
        generation.offset_start,
        if generation.windowed { ", windowed: no late joiners" } else { "" }
    ));
    let (first, last) = (generation.journal_first, generation.offset_now);
    text.push_str(&match view::held(generation) {
        0 => format!("stream     nothing behind offset {last} yet\n"),
        held => format!("stream     from {first} to {last} ({} held)\n", Size::bytes(held)),
    });
    text.push_str(&format!("memory     {}\n", view::in_use(generation)));
}

fn replicas(replicas: &[ReplicaStatus]) -> String {
    let width = replicas.iter().map(|replica| replica.name.chars().count()).max().unwrap_or(0).max("replica".len());
    let mut text = format!(
        "\n{:<width$}  {:<9} {:<5} {:>7} {:>12} {:>11} {:>12} {:>8} {:>7}  {}\n",
        "replica", "phase", "by", "percent", "rate", "left", "lag", "joined", "silent", "protection"
    );
    for replica in replicas {
        text.push_str(&format!(
            "{:<width$}  {:<9} {:<5} {:>7} {:>12} {:>11} {:>12} {:>8} {:>7}  {}\n",
            replica.name,
            replica.phase,
            replica.transport,
            view::percent(replica),
            view::reading(replica),
            view::left(replica),
            view::lag(replica),
            view::seconds(replica.joined_seconds),
            view::seconds(replica.silent_seconds),
            replica.protection,
        ));
        if replica.transport.is_empty() && !replica.transport_why.is_empty() {
            text.push_str(&format!("{:<width$}  waits: {}\n", "", replica.transport_why));
        } else if !replica.transport_why.is_empty() {
            text.push_str(&format!(
                "{:<width$}  over {}, as {}\n",
                "",
                view::medium(&replica.transport),
                replica.transport_why
            ));
        }
        if !replica.no_fast_keys.is_empty() {
            text.push_str(&format!("{:<width$}  without fast keys: {}\n", "", replica.no_fast_keys));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use remora_metrics::sample::{replica, report};
    use remora_protocol::{Advance, Basis, GenerationState, Length};

    #[test]
    fn a_snapshot_that_is_taken_says_how_far_how_fast_and_how_long() {
        let mut taken = report(Vec::new());
        taken.saving = Some(Saving { keys: 20_000, keys_total: 50_000 });
        let generation = taken.generation.as_mut().expect("a snapshot");
        (generation.state, generation.snapshot_bytes) = (GenerationState::Capturing, 240 << 20);
        generation.length = Length { bytes: 600 << 20, basis: Basis::Keys };
        generation.advance =
            Advance { percent_permille: Some(400), rate_bytes_per_s: 120 << 20, left_seconds: Some(3) };
        let words = "being taken: 240 MiB of about 600 MiB, 40.0 %, 120 MiB/s, 3.0 s left in 937 slots";
        let text = table(&taken);
        assert!(
            text.contains(words) && text.contains("\n           the server has saved 40.0 % of 50000 keys\n"),
            "{text}"
        );
        let view = view::View::of(&taken);
        assert_eq!(view.facts[0].value, "240 MiB of about 600 MiB");
        assert!(view.facts[0].more.starts_with("40.0 %, 120 MiB/s, 3.0 s left, being taken, by psync"), "{view:?}");
        assert_eq!(view.facts[0].share.map(|share| share.of_one), Some(0.4));
        // The server saves to a file first: there is no snapshot yet.
        taken.generation = None;
        let text = table(&taken);
        assert!(text.contains("snapshot   requested; the server has saved 40.0 % of 50000 keys to a file"), "{text}");
    }

    #[test]
    fn the_snapshot_says_how_it_is_compressed() {
        let text = table(&report(Vec::new()));
        assert!(
            text.contains("\n           compression zstd: --compress zstd; 25.0 % of the snapshot is stored\n"),
            "{text}"
        );
    }

    #[test]
    fn who_reads_from_whom_is_drawn_as_a_tree() {
        let mut east = replica(4, "d", Some(1));
        (east.zone, east.oldest_slot) = ("east".into(), 3);
        let all = [replica(1, "a", None), replica(2, "b", Some(1)), replica(3, "c", Some(2)), east];
        let mut text = String::new();
        Tree::of(&all).branch(None, 0, "", &mut text);
        let drawn = "\
└─ a  serves 10 slots
   ├─ b  serves 10 slots
   │  └─ c  serves 10 slots
   └─ d  serves slots 3 to 9, zone east
";
        assert_eq!(text, drawn);
    }

    #[test]
    fn one_whose_peer_is_gone_hangs_below_the_source_and_a_ring_ends() {
        let mut text = String::new();
        Tree::of(&[replica(1, "a", Some(9))]).branch(None, 0, "", &mut text);
        assert_eq!(text, "└─ a  serves 10 slots\n");
        let ring = [replica(1, "a", Some(2)), replica(2, "b", Some(1))];
        Tree::of(&ring).branch(Some(1), 0, "", &mut text);
        assert!(text.lines().count() <= 2 + remora_protocol::MAX_REPLICAS);
    }

    #[test]
    fn a_chain_of_a_thousand_is_drawn_in_lines_of_a_usual_width() {
        let from = |session: u64| session.checked_sub(1).filter(|above| *above > 0);
        let all: Vec<_> = (1..=1000).map(|session| replica(session, &format!("db{session}"), from(session))).collect();
        let mut text = String::new();
        Tree::of(&all).branch(None, 0, "", &mut text);
        assert_eq!(text.lines().count(), 1000);
        assert!(text.lines().all(|line| line.chars().count() < 140), "{text}");
        assert!(text.contains("└─ db24  serves 10 slots\n"), "{text}");
        assert!(text.contains("└─ db1000  reads from db999,  serves 10 slots\n"), "{text}");
    }
}
