//! Coverage: asks the primary itself whether it would continue the server.
//!
//! The source answers this question for the server that it captures. With `--announce` that can be a replica of the
//! primary, whose backlog says nothing of the primary's. The agent then asks the primary, with the address and the
//! login that its own server will use there. It does the same where the source is away.
//!
//! A task holds the connection, so that the driver never waits for it. Only the newest question is answered. Where the
//! answer is yes, [`Pins`] keep what the server needs until this is dropped or asked again.

use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::args::HostPort;
use crate::growth::Growth;
use crate::replica::attend::passage::{self, Login};
use crate::replica::finding::Finding;
use crate::server::{Client, Facts, Pins, Position, Role, Server, Stream};
use crate::tasks::AbortOnDrop;

/// How long the primary may take to answer. It is asked again a moment later.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// The shortest time over which a write rate is measured: over less, one burst would be taken for a rate.
const RATE_TIME: Duration = Duration::from_millis(100);

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
    pub(super) fn start(primary: Asked, finding: Option<Finding>) -> Coverage {
        let (questions, asked) = unbounded_channel();
        let (tell, answers) = unbounded_channel();
        let asker = Asker { primary, finding, growth: Growth::default(), pins: Pins::default() };
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

async fn run(mut asker: Asker, mut questions: UnboundedReceiver<Position>, tell: UnboundedSender<Answer>) {
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
pub(super) enum Asked {
    /// At an address, with the login that the server will use there.
    At { server: Server, client: Option<Client> },
    /// As a server that is attended has logged in to it.
    As { login: Login, connection: Option<Stream> },
}

impl Asked {
    pub(super) fn at(server: Server) -> Asked {
        Asked::At { server, client: None }
    }

    pub(super) fn of(login: Login) -> Asked {
        Asked::As { login, connection: None }
    }

    /// What the primary says of itself. The version says whether its backlog can be pinned, and stands in another
    /// section than its position.
    async fn facts(&mut self) -> Result<Facts, String> {
        match self {
            Asked::At { server, client } => {
                let connected = match client.take().filter(Client::is_usable) {
                    Some(connected) => Ok(connected),
                    None => server.connect().await,
                };
                let mut connected = connected.map_err(|error| error.to_string())?;
                let facts = Facts::from_info(&connected.info("").await.map_err(|error| error.to_string())?);
                *client = Some(connected);
                Ok(facts)
            }
            Asked::As { login, connection } => {
                let mut connected = match connection.take() {
                    Some(connected) => connected,
                    None => login.connect().await?,
                };
                let facts = passage::ask(&mut connected).await?;
                *connection = Some(connected);
                Ok(facts)
            }
        }
    }
}

struct Asker {
    primary: Asked,
    finding: Option<Finding>,
    /// The primary's offset, for the write rate.
    growth: Growth,
    /// What the primary keeps for the server while that is on its way.
    pins: Pins,
}

impl Asker {
    async fn ask(&mut self, question: Position) -> Result<(), String> {
        let at = self.find().await?;
        let facts = match tokio::time::timeout(ANSWER_LIMIT, self.primary.facts()).await {
            Ok(Ok(facts)) => facts,
            Ok(Err(error)) => return Err(format!("the primary does not answer: {error}")),
            Err(_) => return Err(format!("the primary has not answered within {} s", ANSWER_LIMIT.as_secs())),
        };
        let rate = self.rate(Instant::now(), facts.offset).unwrap_or(question.rate);
        if let Some((finding, at)) = self.finding.as_ref().zip(at) {
            if facts.role != Some(Role::Primary) {
                return Err(format!("{}:{} is not a primary: a fail-over is under way", at.host, at.port));
            }
            // Sentinel would list the link that pins among the replicas, without an end.
            facts.covers(question.history, question.offset, rate)?;
            finding.covered(&at);
            return Ok(());
        }
        match &self.primary {
            Asked::At { server, .. } => self.pins.secure(server, &facts, Position { rate, ..question }).await,
            Asked::As { .. } => facts.covers(question.history, question.offset, rate),
        }
    }

    /// Asks the Sentinels where the primary is, if there are any.
    async fn find(&mut self) -> Result<Option<HostPort>, String> {
        let Some(finding) = &self.finding else { return Ok(None) };
        let found = tokio::time::timeout(ANSWER_LIMIT, finding.ask()).await;
        let at = match found {
            Ok(Ok(at)) => at,
            Ok(Err(failure)) => return Err(failure.to_string()),
            Err(_) => return Err(format!("no Sentinel has answered within {} s", ANSWER_LIMIT.as_secs())),
        };
        if let Asked::At { server, client } = &mut self.primary
            && server.url().host_and_port() != Some((at.host.as_str(), at.port))
        {
            (*server, *client) = (server.at(&at.host, at.port), None);
            (self.growth, self.pins) = (Growth::default(), Pins::default());
        }
        Ok(Some(at))
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
    fn the_write_rate_is_the_primarys_own_once_it_was_asked_twice() {
        let url = "redis://127.0.0.1:1".parse().unwrap();
        let primary = Server::new(url, Credentials::default(), &TlsOptions::default(), Task::Replica).unwrap();
        let primary = Asked::at(primary);
        let mut asker = Asker { primary, finding: None, growth: Growth::default(), pins: Pins::default() };
        let start = Instant::now();
        assert_eq!(asker.rate(start, None), None);
        assert_eq!(asker.rate(start, Some(1000)), None);
        assert_eq!(asker.rate(start + RATE_TIME / 2, Some(9000)), None, "too short a time");
        assert_eq!(asker.rate(start + Duration::from_secs(2), Some(5000)), Some(2000));
        assert_eq!(asker.rate(start + Duration::from_secs(4), Some(5000)), Some(0));
        assert_eq!(asker.rate(start + Duration::from_secs(5), Some(10)), Some(0), "a primary that restarted");
    }
}
