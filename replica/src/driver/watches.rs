//! What the driver looks at while it waits: whether the primary would continue the server, whether the source's journal
//! is overwritten first, and what the server at the link says of itself.

use std::time::{Duration, Instant};

use remora_redis::resp::Frame;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{MissedTickBehavior, interval};

use crate::attend::passage::{self, Login};
use remora_base::pace::Growth;
use remora_base::units::{Size, counted};
use remora_process::{AbortOnDrop, events};
use remora_reader::data_set::Finding;
use remora_reader::parts::Meter;
use remora_server::own_changes::Counted;
use remora_server::{Client, Facts, HostPort, Pins, Position, Role, Server, ServerError, Stream};

// Coverage: asks the primary itself whether it would continue the server.
//
// The source answers this question for the server that it captures. With `--announce` that can be a replica of the
// primary, whose backlog says nothing of the primary's. The agent then asks the primary, with the address and the
// login that its own server will use there. It does the same where the source is away.
//
// Where the server's own connections are intercepted, the primary is asked with the login that the server has used
// there, and nothing pins its backlog. The source feeds the server for as long as the server comes nearer.
//
// A task holds the connection, so that the driver never waits for it. Only the newest question is answered. Where the
// answer is yes, [`Pins`] keep what the server needs until this is dropped or asked again.

/// How long the primary may take to answer. It is asked again a moment later.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// The channel over which Sentinels tell each other of the servers that they watch.
const SENTINELS_CHANNEL: &str = "__sentinel__:hello";

/// The shortest time over which a write rate is measured: over less, one burst would be taken for a rate.
const RATE_TIME: Duration = Duration::from_millis(100);

/// How long a server may come no nearer to its primary. The source's server is then cut off, or the primary's backlog
/// too small for what clients write: the primary gives the server what it lacks.
const NO_NEARER_LIMIT: Duration = Duration::from_secs(5);

/// The driver's end of the task that asks the primary.
pub(super) struct Coverage {
    questions: UnboundedSender<Position>,
    answers: UnboundedReceiver<Answer>,
    /// The number of the newest question.
    asked: u64,
    _task: AbortOnDrop,
}

struct Answer {
    number: u64,
    covered: Result<(), String>,
}

impl Coverage {
    /// `finding`: how to find the primary anew for each question. Nothing is connected before the first one.
    pub(super) fn start(primary: Server, finding: Option<Finding>) -> Coverage {
        Coverage::of(Asker { primary, finding, client: None, growth: Growth::default(), pins: Pins::default() })
    }

    /// Asks with the login by which the server has come to its primary.
    pub(super) fn start_as_the_server(login: Login) -> Coverage {
        Coverage::of(ByLogin { login, primary: None, growth: Growth::default(), nearing: Nearing::default() })
    }

    fn of(asker: impl Asks + Send + 'static) -> Coverage {
        let (questions, asked) = unbounded_channel();
        let (tell, answers) = unbounded_channel();
        let task = tokio::spawn(run(asker, asked, tell));
        Coverage { questions, answers, asked: 0, _task: AbortOnDrop::new(&task) }
    }

    /// Asks whether the primary covers this position. Answers to earlier questions are not given any more.
    pub(super) fn ask(&mut self, question: Position) {
        self.asked += 1;
        let _ = self.questions.send(question);
    }

    /// The answer to the newest question; the error says why the primary would not continue the server. Cancel-safe.
    pub(super) async fn answered(&mut self) -> Result<(), String> {
        while let Some(answer) = self.answers.recv().await {
            if answer.number == self.asked {
                return answer.covered;
            }
        }
        std::future::pending().await
    }
}

/// A way to ask the primary.
trait Asks {
    /// The error says why the primary would not continue the server.
    fn ask(&mut self, question: Position) -> impl Future<Output = Result<(), String>> + Send;
}

async fn run(mut asker: impl Asks, mut questions: UnboundedReceiver<Position>, tell: UnboundedSender<Answer>) {
    let mut number = 0;
    while let Some(mut question) = questions.recv().await {
        number += 1;
        while let Ok(newer) = questions.try_recv() {
            question = newer;
            number += 1;
        }
        let covered = asker.ask(question).await;
        if tell.send(Answer { number, covered }).is_err() {
            return;
        }
    }
}

/// The primary, and a connection to it that is made when it is first asked.
struct Asker {
    primary: Server,
    finding: Option<Finding>,
    client: Option<Client>,
    /// The primary's offset, for the write rate.
    growth: Growth,
    /// What the primary keeps for the server while that is on its way.
    pins: Pins,
}

/// The server's own way to its primary, and a connection that is made when it is first needed.
struct ByLogin {
    login: Login,
    primary: Option<Stream>,
    growth: Growth,
    nearing: Nearing,
}

impl Asks for ByLogin {
    async fn ask(&mut self, question: Position) -> Result<(), String> {
        let (facts, now) = (self.facts().await, Instant::now());
        let (behind, covered) = match facts {
            Ok(facts) => {
                let rate = facts.offset.and_then(|offset| self.growth.look(now, offset, RATE_TIME));
                let rate = rate.map_or(question.rate, |rate| rate as u64);
                let behind = facts.offset.unwrap_or(0).saturating_sub(question.offset);
                (behind, facts.covers(question.history, question.offset, rate))
            }
            Err(why) => {
                self.primary = None;
                // It may be replaced: only a server on its way to it is looked at for that.
                (u64::MAX, Err(format!("the primary does not say what its backlog holds: {why}")))
            }
        };
        match covered {
            Err(why) if self.nearing.is_over(now, behind) => {
                tracing::warn!("the server comes no nearer to its primary ({why}): the primary gives it what it lacks");
                Ok(())
            }
            covered => covered,
        }
    }
}

impl ByLogin {
    async fn facts(&mut self) -> Result<Facts, String> {
        let primary = match &mut self.primary {
            Some(primary) => primary,
            None => self.primary.insert(self.login.connect().await?),
        };
        passage::ask(primary).await.map_err(|why| why.to_string())
    }
}

/// How near a server has come to its primary, in bytes, and when.
#[derive(Debug, Default)]
struct Nearing(Option<(Instant, u64)>);

impl Nearing {
    /// Notes how many bytes the server is behind. Whether it has come no nearer for [`NO_NEARER_LIMIT`].
    fn is_over(&mut self, now: Instant, behind: u64) -> bool {
        match self.0 {
            Some((since, nearest)) if behind >= nearest => now.duration_since(since) > NO_NEARER_LIMIT,
            _ => {
                self.0 = Some((now, behind));
                false
            }
        }
    }
}

impl Asks for Asker {
    async fn ask(&mut self, question: Position) -> Result<(), String> {
        let at = self.find().await?;
        let primary = self.primary.url().to_string();
        let no_answer = |cause: String| format!("the primary {primary} does not answer: {cause}");
        let facts = match tokio::time::timeout(ANSWER_LIMIT, self.facts()).await {
            Ok(Ok(facts)) => facts,
            Ok(Err(error)) => return Err(no_answer(error.to_string())),
            Err(_) => return Err(no_answer(format!("nothing within {} s", ANSWER_LIMIT.as_secs()))),
        };
        let rate = self.rate(Instant::now(), facts.offset).unwrap_or(question.rate);
        if self.finding.is_some() && facts.role != Some(Role::Primary) {
            return Err(format!("{primary} is not a primary: a fail-over is under way"));
        }
        // Sentinel would list the link that pins among the replicas, without an end.
        if at.is_none() && !self.is_watched().await {
            return self.pins.secure(&self.primary, &facts, Position { rate, ..question }).await;
        }
        facts.covers(question.history, question.offset, rate)?;
        if let Some((finding, at)) = self.finding.as_ref().zip(at) {
            finding.covered(&at);
        }
        Ok(())
    }
}

impl Asker {
    /// Asks the Sentinels where the primary is, if there are any.
    async fn find(&mut self) -> Result<Option<HostPort>, String> {
        let Some(finding) = &self.finding else { return Ok(None) };
        let found = tokio::time::timeout(ANSWER_LIMIT, finding.ask()).await;
        let at = match found {
            Ok(Ok(at)) => at,
            Ok(Err(failure)) => return Err(failure.to_string()),
            Err(_) => return Err(format!("no Sentinel has answered within {} s", ANSWER_LIMIT.as_secs())),
        };
        if self.primary.url().host_and_port() != Some((at.host.as_str(), at.port)) {
            self.primary = self.primary.at(&at.host, at.port);
            (self.client, self.growth, self.pins) = (None, Growth::default(), Pins::default());
        }
        Ok(Some(at))
    }

    async fn facts(&mut self) -> Result<Facts, ServerError> {
        let mut client = match self.client.take().filter(Client::is_usable) {
            Some(client) => client,
            None => self.primary.connect().await?,
        };
        // The version says whether the backlog can be pinned, and stands in another section.
        let facts = Facts::from_info(&client.info("").await?);
        self.client = Some(client);
        Ok(facts)
    }

    /// Whether Sentinels watch the primary: they subscribe to a channel there. Where the agent may not ask, none does.
    async fn is_watched(&mut self) -> bool {
        let Some(client) = &mut self.client else { return false };
        let asked = client.command(&["PUBSUB", "NUMSUB", SENTINELS_CHANNEL]);
        match tokio::time::timeout(ANSWER_LIMIT, asked).await {
            Ok(Ok(Frame::Array(counts))) => matches!(counts.last(), Some(Frame::Integer(1..))),
            _ => false,
        }
    }

    /// Bytes that the primary's clients have written per second since it was last asked.
    fn rate(&mut self, now: Instant, offset: Option<u64>) -> Option<u64> {
        self.growth.look(now, offset?, RATE_TIME).map(|rate| rate as u64)
    }
}

// Outrun: foresees that the source's journal will be overwritten before the server can read on in it.
//
// The stream is read ahead into the agent's memory up to a limit. From then on the journal fills, and the snapshot
// must be loaded before the journal comes round. The rates of both say minutes before whether it will.

/// The time over which the two rates are measured.
const JOURNAL_RATE_TIME: Duration = Duration::from_secs(2);

/// How near the end must be for a warning while the length of the snapshot is not known.
const NEAR: Duration = Duration::from_secs(60);

/// What is watched. Bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// What the source has written to its journal since that began.
    written: u64,
    /// What it can write until what is needed next is held no more.
    left: u64,
    /// What has arrived of the snapshot.
    arrived: u64,
    /// The whole snapshot; `None` while it is not known.
    whole: Option<u64>,
}

/// Watches one sync.
#[derive(Debug, Default)]
pub(super) struct Outrun {
    written: Growth,
    arrived: Growth,
    is_told: bool,
}

impl Outrun {
    /// Takes a look at a sync whose server has not loaded yet, and warns, once.
    pub(super) fn watch(&mut self, now: Instant, meter: &Meter) {
        if meter.stream_paused.get() == 0 {
            return;
        }
        let seen = Seen {
            written: meter.journal_written.get(),
            left: meter.journal_left.get(),
            arrived: meter.bytes_fetched.get().max(meter.bytes_delivered.get()),
            whole: Some(meter.bytes_known.get()).filter(|_| meter.slots_total.get() > 0),
        };
        if let Some(warning) = self.look(now, seen) {
            tracing::warn!("{warning}");
        }
    }

    /// A warning, once, if the journal will be overwritten too early.
    fn look(&mut self, now: Instant, seen: Seen) -> Option<String> {
        if self.is_told || seen.written == 0 {
            return None;
        }
        let arrives = self.arrived.look(now, seen.arrived, JOURNAL_RATE_TIME);
        let written = self.written.look(now, seen.written, JOURNAL_RATE_TIME)?;
        let (left, needed) = (time(seen.left, written)?, seen.whole.zip(arrives));
        let needed = needed.map(|(whole, rate)| time(whole.saturating_sub(seen.arrived), rate));
        let is_outrun = match needed {
            Some(Some(needed)) => left < needed,
            Some(None) | None => left < NEAR,
        };
        if !is_outrun {
            return None;
        }
        self.is_told = true;
        let transfer = match needed.flatten() {
            Some(needed) => format!("the transfer takes about {} s more", needed.as_secs()),
            None => "the end of the transfer is not known".to_owned(),
        };
        Some(format!(
            "clients write {}/s, so the source will have overwritten the stream that follows this snapshot in about {} s, and \
             {transfer}: the sync will start over then. Give the source more --journal-memory, or a faster link to it",
            Size::bytes(written as u64),
            left.as_secs()
        ))
    }
}

/// How long these bytes take at this rate. `None`: for ever.
fn time(bytes: u64, rate: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(bytes as f64 / rate).ok()
}

// Listening: a server that stays at the link is asked for its own word each second, so that a command that it could
// not execute is told at once, and not only at the end of the stay.

/// How often the server is asked.
const LISTEN_EVERY: Duration = Duration::from_secs(1);

/// Asks the server until the handle is dropped. It changes nothing.
pub(super) fn start(server: Server) -> AbortOnDrop {
    AbortOnDrop::new(&tokio::spawn(listen(server)))
}

async fn listen(server: Server) {
    let (mut client, mut before) = (None, None::<Counted>);
    let mut due = interval(LISTEN_EVERY);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        let now = match look(&server, &mut client).await {
            Ok(now) => now,
            Err(error) => {
                tracing::debug!("{error}; asked again");
                client = None;
                continue;
            }
        };
        let since = before.as_ref().map(|before| now.since(before)).unwrap_or_default();
        if let Some(count) = since.unexpected.filter(|count| *count > 0) {
            tracing::warn!(
                event = events::COMMANDS_FAILED,
                "the server {} could not execute {} of its primary's stream, and is not an exact replica any more; \
                 its log names them, and the agent will end with code 6",
                server.url(),
                counted(count, "command")
            );
        }
        if let Some(count) = since.evicted.filter(|count| *count > 0) {
            let keys = counted(count, "key");
            tracing::warn!("the server {} has removed {keys} by itself, as its memory is full", server.url());
        }
        before = Some(now);
    }
}

async fn look(server: &Server, client: &mut Option<Client>) -> Result<Counted, ServerError> {
    let client = match client {
        Some(client) if client.is_usable() => client,
        other => other.insert(server.connect().await?),
    };
    Ok(Counted::of(&client.info("stats").await?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remora_server::{Credentials, Task, TlsOptions};

    #[test]
    fn a_server_is_fed_on_for_as_long_as_it_comes_nearer() {
        let (start, mut nearing) = (Instant::now(), Nearing::default());
        let mut is_over = |seconds: u64, behind: u64| nearing.is_over(start + Duration::from_secs(seconds), behind);
        assert!(!is_over(0, 900) && !is_over(4, 800) && !is_over(8, 700), "it comes nearer");
        assert!(!is_over(13, 750), "and not, for a moment");
        assert!(is_over(14, 701));
        assert!(!is_over(15, 600), "nearer than ever");
    }

    #[test]
    fn the_write_rate_is_the_primarys_own_once_it_was_asked_twice() {
        let url = "redis://127.0.0.1:1".parse().unwrap();
        let primary = Server::new(url, Credentials::default(), &TlsOptions::default(), Task::Replica).unwrap();
        let mut asker =
            Asker { primary, finding: None, client: None, growth: Growth::default(), pins: Pins::default() };
        let start = Instant::now();
        assert_eq!(asker.rate(start, None), None);
        assert_eq!(asker.rate(start, Some(1000)), None);
        assert_eq!(asker.rate(start + RATE_TIME / 2, Some(9000)), None, "too short a time");
        assert_eq!(asker.rate(start + Duration::from_secs(2), Some(5000)), Some(2000));
        assert_eq!(asker.rate(start + Duration::from_secs(4), Some(5000)), Some(0));
        assert_eq!(asker.rate(start + Duration::from_secs(5), Some(10)), Some(0), "a primary that restarted");
    }

    const MIB: u64 = 1 << 20;

    /// Looks once a second at a journal of 100 MiB that grows by `stream` MiB a second, beside a transfer of 1000 MiB.
    /// Gives the second of the warning.
    fn warned_at(stream: u64, transfer: u64, is_known: bool) -> Option<u64> {
        let (start, mut outrun) = (Instant::now(), Outrun::default());
        (0..1000 / transfer.max(1)).find(|second| {
            let seen = Seen {
                written: (1 + second * stream) * MIB,
                left: (100 * MIB).saturating_sub(second * stream * MIB),
                arrived: second * transfer * MIB,
                whole: is_known.then_some(1000 * MIB),
            };
            outrun.look(start + Duration::from_secs(*second), seen).is_some()
        })
    }

    #[test]
    fn a_transfer_that_is_slower_than_the_journal_fills_is_warned_of_at_once_and_once() {
        assert_eq!(warned_at(2, 10, true), Some(2), "50 s of journal, 100 s of transfer");
        assert_eq!(warned_at(1, 50, true), None, "100 s of journal, 20 s of transfer");
        assert_eq!(warned_at(0, 10, true), None, "nobody writes");
        assert_eq!(warned_at(1, 0, true), Some(42), "nothing arrives: a minute before");
        assert_eq!(warned_at(1, 10, false), Some(42), "the length is not known: a minute before");
    }

    #[test]
    fn the_warning_names_both_times_and_what_to_do() {
        let (start, mut outrun) = (Instant::now(), Outrun::default());
        let seen = |second: u64| Seen {
            written: (1 + 2 * second) * MIB,
            left: (100 - 2 * second) * MIB,
            arrived: 10 * second * MIB,
            whole: Some(1000 * MIB),
        };
        assert_eq!(outrun.look(start, seen(0)), None);
        let text = outrun.look(start + Duration::from_secs(2), seen(2)).unwrap();
        for part in ["2 MiB/s", "in about 48 s", "about 98 s more", "--journal-memory"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(outrun.look(start + Duration::from_secs(9), seen(9)), None, "once");
    }
}
