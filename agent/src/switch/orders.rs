//! Orders: carries out the steps of an [`Exchange`] at two servers.
//!
//! Each order has a limit, and one that gets no answer is given up together with its connection. The next connection
//! to that server closes the former ones there, those of other runs too: nothing of them is carried out late.

use std::pin::pin;
use std::time::Duration;

use remora_base::random::Random;
use remora_redis::info::Info;
use remora_redis::resp::Frame;
use tokio::time::{Instant, sleep, timeout};

use super::exchange::{self, Answer, End, Exchange, Mark, NOWHERE, Order, Position, Seen, Side, Step};
use crate::server::{Client, Facts, Server, ServerError, ServerUrl};
use crate::signals::Signals;

/// How long a server may take for one order, with the connection. Writes wait meanwhile, for `--max-pause` at most.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// The name of the connections of a switch, by which a later one finds them.
const NAME: &str = "remora-switch";

/// A server, and the connection by which it is told.
pub(super) struct Told {
    server: Server,
    client: Option<Client>,
    /// Connections so far.
    connections: u64,
}

impl Told {
    pub(super) fn new(client: Client) -> Told {
        Told { server: client.server().clone(), client: Some(client), connections: 1 }
    }

    pub(super) fn url(&self) -> &ServerUrl {
        self.server.url()
    }

    /// Names the connection, and closes those of former switches.
    pub(super) async fn take_over(&mut self) -> Result<(), ServerError> {
        let url = self.url().to_string();
        match close_predecessors(self.client().await?).await {
            Err(error) if error.refusal().is_some() => {
                tracing::warn!("what another switch has sent to {url} may still be carried out: {error}");
                Ok(())
            }
            other => other,
        }
    }

    async fn client(&mut self) -> Result<&mut Client, ServerError> {
        if self.client.as_ref().is_none_or(|client| !client.is_usable()) {
            self.client = None;
            let mut client = self.server.connect().await?;
            match close_predecessors(&mut client).await {
                Err(error) if error.refusal().is_none() => return Err(error),
                _ => {}
            }
            self.client = Some(client);
            self.connections += 1;
        }
        // It was set above.
        self.client.as_mut().ok_or_else(|| unreachable!())
    }

    /// Checks that the connection by which the server was looked at last is still there. No other one takes its place.
    ///
    /// # Errors
    /// It is lost.
    fn same(&mut self, command: &str) -> Result<(), ServerError> {
        match self.client.as_ref().is_some_and(Client::is_usable) {
            true => Ok(()),
            false => Err(ServerError::Lost {
                server: self.url().to_string(),
                command: command.into(),
                cause: std::io::Error::from(std::io::ErrorKind::NotConnected),
            }),
        }
    }

    pub(super) async fn command(&mut self, words: &[&str]) -> Result<Frame, ServerError> {
        self.client().await?.command(words).await
    }

    pub(super) async fn info(&mut self, section: &str) -> Result<Info, ServerError> {
        self.client().await?.info(section).await
    }

    async fn transaction(&mut self, commands: &[&[&str]]) -> Result<Vec<Result<Frame, ServerError>>, ServerError> {
        let done = self.client().await?.transaction(commands).await;
        if done.is_err() {
            self.client = None; // it may be in the middle of one
        }
        done
    }

    /// Follows another server, or none.
    async fn follow(&mut self, words: &[&str], notes_it: bool) -> Result<(), ServerError> {
        if !notes_it {
            return self.command(words).await.map(drop);
        }
        // Whether it could write its file is told later.
        let answers = self.transaction(&[words, &["CONFIG", "REWRITE"]]).await?;
        answers.into_iter().next().transpose().map(drop)
    }
}

/// Two servers that can change their roles, or have.
pub(super) struct Ready {
    pub(super) old: Told,
    pub(super) new: Told,
    /// Where the old one follows the new one: its address as the old one lists it among its replicas.
    pub(super) listed: (String, u16),
    /// The other replicas of the old one, as it lists them. They stay with it.
    pub(super) others: Vec<String>,
    /// A former run has ended between the steps: the old one has stepped down.
    pub(super) is_between: bool,
    /// Both note their roles in their configuration files when they change them.
    pub(super) notes_roles: bool,
    /// Full copies that the new one has served, before.
    pub(super) full_copies: Option<u64>,
    /// Bytes that the new one has yet to execute.
    pub(super) behind: u64,
}

impl Ready {
    /// What a switch would do.
    pub(super) fn would(&self) -> String {
        let (old, new, (host, port)) = (self.old.url(), self.new.url(), &self.listed);
        match self.is_between {
            true => format!("{old} has stepped down: the switch would be finished or undone; nothing was changed"),
            false => format!(
                "{new} can become the primary in the place of {old}, which lists it as {host}:{port}; it is {} bytes of the \
                 stream behind{}; nothing was changed",
                self.behind,
                self.others_stay()
            ),
        }
    }

    /// What becomes of the other replicas; empty if there are none.
    pub(super) fn others_stay(&self) -> String {
        match &self.others[..] {
            [] => String::new(),
            others => format!("; its other replicas stay behind it, and get all writes: {}", others.join(", ")),
        }
    }

    pub(super) fn told(&mut self, side: Side) -> &mut Told {
        match side {
            Side::Old => &mut self.old,
            Side::New => &mut self.new,
        }
    }

    /// Both addresses: the old primary's, and the new one's.
    pub(super) fn urls(&self) -> (String, String) {
        (self.old.url().to_string(), self.new.url().to_string())
    }
}

async fn close_predecessors(client: &mut Client) -> Result<(), ServerError> {
    if !exchange::closes_predecessors() {
        return Ok(());
    }
    client.command(&["CLIENT", "SETNAME", NAME]).await?;
    let own = client.command(&["CLIENT", "ID"]).await?.as_int();
    let list = client.command(&["CLIENT", "LIST", "TYPE", "normal"]).await?;
    for id in named(list.as_str().unwrap_or_default()).filter(|id| id.parse().ok() != own) {
        client.command(&["CLIENT", "KILL", "ID", id]).await?;
    }
    Ok(())
}

/// The ids of the connections with that name in a `CLIENT LIST`.
fn named(list: &str) -> impl Iterator<Item = &str> {
    list.lines().filter_map(|line| {
        let get = |key: &str| line.split(' ').find_map(|word| word.strip_prefix(key));
        get("id=").filter(|_| get("name=") == Some(NAME))
    })
}

impl Seen {
    /// Takes it from `INFO replication`.
    pub(super) fn of(info: &Info) -> Seen {
        let facts = Facts::from_info(info);
        Seen {
            role: facts.role,
            at: Position::of(&facts),
            is_linked: facts.link.as_ref().is_some_and(|link| link.up == Some(true)),
            mark: facts.link.filter(|link| link.host == NOWHERE).map(|link| link.port),
            by: 0,
        }
    }
}

impl Position {
    pub(super) fn of(facts: &Facts) -> Option<Position> {
        Some(Position { history: facts.replid?, offset: facts.offset? })
    }
}

/// What has become of the two servers.
pub(super) struct Outcome {
    pub(super) end: End,
    /// Why an order was not carried out: the last such reason.
    pub(super) error: Option<ServerError>,
    pub(super) signal: Option<&'static str>,
}

/// Changes the roles of the two servers, or undoes it.
pub(super) async fn perform(ready: &mut Ready, limit: Duration, signals: &mut Signals) -> Outcome {
    let (now, mark) = (Instant::now().into_std(), mark());
    let (mut exchange, mut step) = match ready.is_between {
        true => Exchange::resume(now, limit, mark),
        false => Exchange::begin(now, limit, mark),
    };
    let (mut error, mut signal) = (None, None);
    loop {
        if let Step::End(end) = step {
            return Outcome { end, error, signal };
        }
        let answer = {
            let mut done = pin!(take(ready, step, limit));
            loop {
                tokio::select! {
                    answer = &mut done => break answer,
                    name = signals.next() => {
                        signal = Some(name);
                        exchange.signal();
                    }
                }
            }
        };
        let answer = answer.unwrap_or_else(|failed| {
            let answer = if failed.refusal().is_some() { Answer::Refused } else { Answer::Lost };
            tracing::debug!("{step:?}: {failed}");
            error = Some(failed);
            answer
        });
        step = exchange.next(Instant::now().into_std(), answer);
    }
}

/// Draws the mark of a run.
fn mark() -> Mark {
    let drawn = Random::from_system().draw() % u64::from(Mark::MAX);
    Mark::try_from(1 + drawn).unwrap_or(Mark::MAX)
}

async fn take(ready: &mut Ready, step: Step, limit: Duration) -> Result<Answer, ServerError> {
    let order = match step {
        Step::Do(order) => order,
        Step::Wait(time) => {
            sleep(time).await;
            return Ok(Answer::Waited);
        }
        Step::End(_) => return Ok(Answer::Done),
    };
    if let Ok(done) = timeout(ANSWER_LIMIT, carry_out(ready, order, limit)).await {
        return done;
    }
    let told = ready.told(order.to());
    told.client = None;
    Err(ServerError::TimedOut { server: told.url().to_string(), command: order.name().into(), limit: ANSWER_LIMIT })
}

async fn carry_out(ready: &mut Ready, order: Order, limit: Duration) -> Result<Answer, ServerError> {
    let (host, port) = (ready.listed.0.clone(), ready.listed.1.to_string());
    let notes_roles = ready.notes_roles;
    let told = ready.told(order.to());
    if order.changes_a_role() {
        told.same(order.name())?;
    }
    match order {
        Order::Look(_) => {
            let info = told.info("replication").await?;
            return Ok(Answer::Seen(Seen { by: told.connections, ..Seen::of(&info) }));
        }
        Order::Pause => {
            let limit = limit.as_millis().max(1).to_string();
            told.command(&["CLIENT", "PAUSE", &limit, "WRITE"]).await?;
        }
        Order::StepDown(mark) => {
            let mark = mark.to_string();
            let commands: [&[&str]; 3] =
                [&["INFO", "replication"], &["REPLICAOF", NOWHERE, &mark], &["CONFIG", "REWRITE"]];
            let mut answers = told.transaction(&commands[..if notes_roles { 3 } else { 2 }]).await?.into_iter();
            let (said, stepped) = (answers.next().transpose()?, answers.next().transpose()?);
            let before = Seen::of(&Info::parse(said.as_ref().and_then(Frame::as_str).unwrap_or_default().as_bytes()));
            return Ok(stepped.map_or(Answer::Lost, |_| Answer::SteppedDown(before)));
        }
        Order::Follow => told.follow(&["REPLICAOF", &host, &port], notes_roles).await?,
        Order::Promote | Order::TakeBack => told.follow(&["REPLICAOF", "NO", "ONE"], notes_roles).await?,
        Order::Release => _ = told.command(&["CLIENT", "UNPAUSE"]).await?,
    }
    Ok(Answer::Done)
}

impl Order {
    /// As the server knows it.
    fn name(self) -> &'static str {
        match self {
            Order::Pause => "CLIENT PAUSE",
            Order::Look(_) => "INFO",
            Order::StepDown(_) | Order::Follow | Order::Promote | Order::TakeBack => "REPLICAOF",
            Order::Release => "CLIENT UNPAUSE",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connections_of_other_switches_are_found_by_their_name() {
        let list = "id=3 addr=127.0.0.1:1 name= user=remora-switch\nid=14 addr=127.0.0.1:2 name=remora-switch age=1\n\
                    id=15 addr=127.0.0.1:3 name=remora-switch2 age=1\n";
        assert_eq!(named(list).collect::<Vec<_>>(), ["14"]);
    }

    #[test]
    fn a_server_says_where_it_is() {
        let seen = |text: &str| Seen::of(&Info::parse(text.as_bytes()));
        let replid = "dc4a64ca756501f822cac70337e6c3488b20932f";
        let replica = format!(
            "role:slave\r\nmaster_host:a\r\nmaster_port:1\r\nmaster_link_status:up\r\nslave_repl_offset:7\r\n\
             master_replid:{replid}\r\nmaster_repl_offset:9\r\n"
        );
        let at = replid.parse().ok().map(|history| Position { history, offset: 7 });
        assert!(at.is_some());
        assert_eq!(
            seen(&replica),
            Seen { role: Some(crate::server::Role::Replica), at, is_linked: true, mark: None, by: 0 }
        );
        assert_eq!(
            seen("role:master\r\n"),
            Seen { role: Some(crate::server::Role::Primary), at: None, is_linked: false, mark: None, by: 0 }
        );
        let stepped_down = "role:slave\r\nmaster_host:192.0.2.1\r\nmaster_port:77\r\nmaster_link_status:down\r\n";
        assert_eq!(seen(stepped_down).mark, Some(77));
    }
}
