//! Coverage: asks the primary itself whether it would continue the server.
//!
//! The source answers this question for the server that it captures. With `--announce` that can be a replica of the
//! primary, whose backlog says nothing of the primary's. The agent then asks the primary, with the address and the
//! login that its own server will use there. It does the same where the source is away.
//!
//! Where the server's own connections are intercepted, the primary is asked with the login that the server has used
//! there, and nothing pins its backlog. The source feeds the server for as long as the server comes nearer.
//!
//! A task holds the connection, so that the driver never waits for it. Only the newest question is answered. Where the
//! answer is yes, [`Pins`] keep what the server needs until this is dropped or asked again.

use std::time::{Duration, Instant};

use remora_redis::resp::Frame;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::args::HostPort;
use crate::growth::Growth;
use crate::replica::attend::passage::{self, Login};
use crate::replica::finding::Finding;
use crate::server::{Client, Facts, Pins, Position, Role, Server, ServerError, Stream};
use crate::tasks::AbortOnDrop;

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::server::{Credentials, Task, TlsOptions};

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
}
