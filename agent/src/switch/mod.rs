//! `remora switch`: a replica becomes the primary, and its primary follows it.
//!
//! ```text
//!   look ── both servers are looked at, nothing is changed ──▶ refused │ dry run: what would happen │ done already
//!     │
//!   sentinels ── the new one becomes the best replica, if Sentinels watch the old one
//!     │
//!   exchange ── the old primary pauses writes, and steps down; the new one is promoted when it holds all writes
//!     │            └─ not in time, or a signal: the old primary goes on
//!   sentinels ── name the new primary
//!     │
//!   hook ─── leads clients to the new primary
//!     │
//!   the old one's clients are closed, if that is wanted
//! ```
//!
//! - [`exchange`]: the order of the steps, and what is undone. Pure, and played by the simulation. **Start here.**
//!   It also has what both servers must be before.
//! - Here: the command, the program that leads clients, the orders that carry the steps out, and the primary's name at
//!   its Sentinels.
//!
//! A command that is killed leaves no pause behind, since the pause ends by the time that the server was given. Where
//! it stood, the servers say: the same command goes on there.

mod exchange;
#[cfg(test)]
mod model;

use std::path::Path;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::time::Duration;

use exchange::{Answer, Exchange, Mark, NOWHERE, Order, Position, Step};
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout};

use self::exchange::{End, Follower, Found, Open, Seen, Side, Why, full_copies, look};
use crate::args::{HostPort, SwitchArgs};
use crate::exit::{Code, Failure};
use crate::progress;
use crate::sentinel::{KnownReplica, Sentinels};
use crate::server::{Client, Facts, Role, Server, ServerError, ServerUrl, Task};
use crate::signals::Signals;
use crate::units::counted;
use remora_base::pace::Random;
use remora_redis::info::Info;
use remora_redis::resp::Frame;

/// What the connections are for.
const TASK: Task = Task::Switch;

/// Runs `remora switch`.
///
/// # Errors
/// The servers are not as they must be, or the switch did not happen. The message says where writes go.
pub async fn run(args: SwitchArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let looked = tokio::select! {
        found = look(&args) => found?,
        name = signals.next() => {
            return Err(Failure::new(Code::Interrupted, format!("stopped by {name}: nothing was changed")));
        }
    };
    let (mut ready, is_done) = match looked {
        // A former run may have ended before its clients were led.
        Found::Switched(ready) => (*ready, true),
        Found::Ready(ready) => (*ready, false),
    };
    let mut name = match args.sentinel.open()? {
        Some(sentinels) => Some(Name::look(sentinels, &mut ready).await?),
        None => None,
    };
    if is_done {
        let (old, new) = ready.urls();
        progress::print_line(&format!("{new} is the primary already, and {old} follows it"))?;
        if args.dry_run {
            return Ok(());
        }
        prepare(&mut name, &mut ready, &mut signals).await?;
        return finish(&args, &mut ready, &mut name).await;
    }
    if args.dry_run {
        let moves = name.as_ref().map_or_else(String::new, |name| format!("; {} would move with it", name.name()));
        return progress::print_line(&format!("{}{moves}", ready.would()));
    }
    for side in [Side::Old, Side::New] {
        ready.told(side).take_over().await?;
    }
    prepare(&mut name, &mut ready, &mut signals).await?;
    let outcome = perform(&mut ready, args.max_pause, &mut signals).await;
    // If it is open which one is the primary, the Sentinels may decide, and must choose the new one.
    if let (Some(name), End::Undone { .. }) = (&mut name, &outcome.end) {
        name.set_back(&mut ready.new, false).await;
    }
    let (pause, follows) = switched(&ready.urls(), args.max_pause, outcome)?;
    let mut report = Report::of(&mut ready, pause, follows).await;
    tracing::info!("{} is the primary, and {} {}", report.new, report.old, report.how_the_old_one_follows());
    let led = finish(&args, &mut ready, &mut name).await;
    report.sentinel_name = name.filter(Name::is_moved).map(|name| name.name().to_owned());
    let told = match args.json {
        true => progress::print_json(&report),
        false => progress::print_line(&report.text()),
    };
    led.and(told)
}

/// How long no server accepted writes, and whether the old primary follows; or why the roles were not changed.
fn switched((old, new): &(String, String), limit: Duration, outcome: Outcome) -> Result<(Duration, bool), Failure> {
    let Outcome { end, error, signal } = outcome;
    let because = error.map_or_else(String::new, |error| format!("{error}; "));
    let not_switched = |text: String| Err(Failure::new(Code::NotSwitched, text));
    match end {
        End::Switched { pause, follower } => {
            if let Some(name) = signal {
                tracing::warn!("{name} came too late to stop the switch");
            }
            match follower {
                Follower::InStep => {}
                Follower::NotYet => {
                    tracing::warn!("{old} does not follow {new} yet: its link is not up, and its log says why")
                }
                Follower::Lost => tracing::warn!(
                    "{because}whether {old} follows {new} is not known: if it comes back as a primary, send REPLICAOF to it"
                ),
            }
            Ok((pause, follower == Follower::InStep))
        }
        End::Undone { why: Why::Changed, stepped_down: false } => {
            not_switched(format!("somebody else has changed {old} or {new}, and they were left so: look at both"))
        }
        End::Undone { why, .. } => {
            let as_before = format!("{old} is the primary as before, and takes writes");
            match why {
                Why::Signal => {
                    let name = signal.unwrap_or("a signal");
                    Err(Failure::new(Code::Interrupted, format!("stopped by {name}; {as_before}")))
                }
                Why::NotInTime => not_switched(format!(
                    "{new} did not have all writes within {} s: {as_before}; try again when less is written, or with a longer \
                     --max-pause",
                    limit.as_secs_f64()
                )),
                Why::Lost(Side::Old) => {
                    not_switched(format!("{because}{as_before}, in {} s at the latest", limit.as_secs_f64()))
                }
                Why::Lost(Side::New) | Why::Refused(_) => not_switched(format!("{because}{as_before}")),
                Why::Changed => not_switched(format!("{new} was changed by somebody else: {as_before}")),
            }
        }
        End::Open(open) => {
            let again = "call the same command again, which finishes or undoes it";
            let (code, text) = match open {
                Open::StepDown => (
                    Code::Server,
                    format!("whether {old} has stepped down is not known, and {new} was not promoted: {again}"),
                ),
                Open::Promotion => (
                    Code::Server,
                    format!("{old} has stepped down, and whether {new} has become the primary is not known: {again}"),
                ),
                Open::TakeBack => (
                    Code::NotSwitched,
                    format!(
                        "{old} has stepped down, and could not be made the primary again; {new} was not promoted: {again}"
                    ),
                ),
                Open::Another => (
                    Code::NotSwitched,
                    format!(
                        "another switch, or somebody else, has changed {old} or {new} meanwhile, and decides which one is the primary: look \
                         at both"
                    ),
                ),
                Open::Apart => (
                    Code::NotSwitched,
                    format!(
                        "{old} has stepped down, and {new} does not hold what it does: somebody has changed them, or one was \
                         restarted; send REPLICAOF NO ONE to the one that is to take writes"
                    ),
                ),
            };
            Err(Failure::new(code, format!("{because}{text}")))
        }
    }
}

/// Makes the new one the best replica for the Sentinels, if there are some.
async fn prepare(name: &mut Option<Name>, ready: &mut Ready, signals: &mut Signals) -> Result<(), Failure> {
    let Some(name) = name else { return Ok(()) };
    let prepared = tokio::select! {
        prepared = name.make_best(&mut ready.new) => prepared,
        name = signals.next() => {
            Err(Failure::new(Code::Interrupted, format!("stopped by {name}: neither server has changed its role")))
        }
    };
    if prepared.is_err() {
        name.set_back(&mut ready.new, false).await;
    }
    prepared
}

/// What follows a switch: the Sentinels and the servers note the roles, and clients are led.
async fn finish(args: &SwitchArgs, ready: &mut Ready, name: &mut Option<Name>) -> Result<(), Failure> {
    let (old, new) = ready.urls();
    let mut led = Ok(());
    if let Some(name) = name {
        led = name.follow().await;
        // Where they have not moved the name, they may do it later, and must choose this one then.
        if led.is_ok() {
            name.set_back(&mut ready.new, true).await;
        }
    }
    let noted = if args.rewrite_config { note_roles(ready).await } else { Ok(()) };
    if let (Ok(()), Some(program)) = (&led, &args.hook) {
        led = run_hook(program, args.hook_timeout, (&old, &new)).await;
    }
    if led.is_ok() && args.close_clients {
        led = close_clients(ready).await;
    }
    led.map_err(|why| {
        let text = format!(
            "the switch is done: {new} is the primary; but {why}, so clients may still be at {old}: lead them by hand, or switch back"
        );
        Failure::new(Code::HookFailed, text)
    })?;
    noted.map_err(|why| {
        let text = format!("the switch is done: {new} is the primary; but {why}, and a restart there undoes it: send it CONFIG REWRITE when it can");
        Failure::new(Code::HookFailed, text)
    })
}

/// Has both servers note their roles.
///
/// # Errors
/// Why one has not, the old one first.
async fn note_roles(ready: &mut Ready) -> Result<(), String> {
    let mut noted = Ok(());
    for side in [Side::New, Side::Old] {
        let told = ready.told(side);
        if let Err(error) = told.command(&["CONFIG", "REWRITE"]).await {
            tracing::warn!(%error, "{} has not noted its role", told.url());
            noted = Err(format!("{} has not noted its role ({error})", told.url()));
        }
    }
    noted
}

/// Closes the connections of clients at the old primary, unless somebody has made it the primary again meanwhile.
async fn close_clients(ready: &mut Ready) -> Result<(), String> {
    let failed = |error: ServerError| format!("its clients' connections could not be closed ({error})");
    let seen = Seen::of(&ready.old.info("replication").await.map_err(failed)?);
    if seen.role != Some(Role::Replica) {
        return Err("the old one is no replica any more, and the connections of its clients were left alone".into());
    }
    let closed = ready.old.command(&["CLIENT", "KILL", "TYPE", "normal"]).await.map_err(failed)?;
    tracing::info!("closed {} of clients at {}", counted(closed.as_int().unwrap_or(0), "connection"), ready.old.url());
    Ok(())
}

/// What a switch has done.
#[derive(Debug, Serialize)]
struct Report {
    /// The address of the old primary.
    old: String,
    /// The address of the new one.
    new: String,
    /// Seconds during which the old primary accepted no writes and the new one not yet.
    pause_seconds: f64,
    /// The other replicas of the old primary. They stay with it, unless Sentinels make them follow the new one.
    others: Vec<String>,
    /// The primary's name at the Sentinels, if it has moved.
    sentinel_name: Option<String>,
    /// Whether the old primary's link to the new one was up at the end.
    follows: bool,
    /// Whether the old primary has continued at its offset: it needed no full copy. `None` if that is not known.
    continued: Option<bool>,
}

impl Report {
    async fn of(ready: &mut Ready, pause: Duration, follows: bool) -> Report {
        let copies = full_copies(ready.new.info("stats").await);
        Report {
            old: ready.old.url().to_string(),
            new: ready.new.url().to_string(),
            others: ready.others.clone(),
            pause_seconds: pause.as_secs_f64(),
            sentinel_name: None,
            follows,
            continued: copies.zip(ready.full_copies).filter(|_| follows).map(|(now, before)| now == before),
        }
    }

    fn how_the_old_one_follows(&self) -> &'static str {
        match (self.follows, self.continued) {
            (false, _) => "does not follow it yet",
            (true, Some(true)) => "follows it without a full copy",
            (true, Some(false)) => {
                "follows it after a full copy: the new one's backlog did not reach back to the switch"
            }
            (true, None) => "follows it",
        }
    }

    fn text(&self) -> String {
        let Report { old, new, others, pause_seconds, sentinel_name, .. } = self;
        let how = self.how_the_old_one_follows();
        let named = sentinel_name.as_ref().map_or_else(String::new, |name| format!("\nit is {name} at the Sentinels"));
        let stay = match (&others[..], sentinel_name) {
            ([], _) => String::new(),
            (others, None) => format!("\nits other replicas stay behind it: {}", others.join(", ")),
            (others, Some(_)) => format!("\nthe Sentinels make the other replicas follow it: {}", others.join(", ")),
        };
        format!(
            "{new} is the primary since a pause of {:.0} ms; {old} {how}{named}{stay}\nback: remora switch --from {new} --to {old}",
            pause_seconds * 1000.0
        )
    }
}

// The program that leads clients to the new primary.

/// Pause between two looks whether the program has ended.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Runs the program with the addresses of the old and the new primary, and waits for its end. Its output is our stderr:
/// our stdout is for results.
///
/// # Errors
/// Why clients may not have been led there.
async fn run_hook(program: &Path, limit: Duration, (old, new): (&str, &str)) -> Result<(), String> {
    let named = format!("the hook {}", program.display());
    let mut command = Command::new(program);
    command.args([old, new]).stdin(Stdio::null()).stdout(std::io::stderr());
    let mut child = command.spawn().map_err(|error| format!("{named} could not be started ({error})"))?;
    let until = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("{named} has failed ({status})")),
            Err(error) => return Err(format!("{named} could not be waited for ({error})")),
            Ok(None) if Instant::now() >= until => {
                let _ = child.kill().and_then(|()| child.wait()); // it may have ended meanwhile
                let limit = limit.as_secs_f64();
                return Err(format!("{named} did not end within {limit} s and was killed (--hook-timeout)"));
            }
            Ok(None) => sleep(LOOK_EVERY).await,
        }
    }
}

// Orders: carries out the steps of an [`Exchange`] at two servers.
//
// Each order has a limit, and one that gets no answer is given up together with its connection. The next connection
// to that server closes the former ones there, those of other runs too: nothing of them is carried out late.

/// How long a server may take for one order, with the connection. Writes wait meanwhile, for `--max-pause` at most.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// The name of the connections of a switch, by which a later one finds them.
const NAME: &str = "remora-switch";

/// A server, and the connection by which it is told.
struct Told {
    server: Server,
    client: Option<Client>,
    /// Connections so far.
    connections: u64,
}

impl Told {
    fn new(client: Client) -> Told {
        Told { server: client.server().clone(), client: Some(client), connections: 1 }
    }

    fn url(&self) -> &ServerUrl {
        self.server.url()
    }

    /// Names the connection, and closes those of former switches.
    async fn take_over(&mut self) -> Result<(), ServerError> {
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

    async fn command(&mut self, words: &[&str]) -> Result<Frame, ServerError> {
        self.client().await?.command(words).await
    }

    async fn info(&mut self, section: &str) -> Result<Info, ServerError> {
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
struct Ready {
    old: Told,
    new: Told,
    /// Where the old one follows the new one: its address as the old one lists it among its replicas.
    listed: (String, u16),
    /// The other replicas of the old one, as it lists them. They stay with it.
    others: Vec<String>,
    /// A former run has ended between the steps: the old one has stepped down.
    is_between: bool,
    /// Both note their roles in their configuration files when they change them.
    notes_roles: bool,
    /// Full copies that the new one has served, before.
    full_copies: Option<u64>,
    /// Bytes that the new one has yet to execute.
    behind: u64,
}

impl Ready {
    /// What a switch would do.
    fn would(&self) -> String {
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
    fn others_stay(&self) -> String {
        match &self.others[..] {
            [] => String::new(),
            others => format!("; its other replicas stay behind it, and get all writes: {}", others.join(", ")),
        }
    }

    fn told(&mut self, side: Side) -> &mut Told {
        match side {
            Side::Old => &mut self.old,
            Side::New => &mut self.new,
        }
    }

    /// Both addresses: the old primary's, and the new one's.
    fn urls(&self) -> (String, String) {
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
    fn of(info: &Info) -> Seen {
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
    fn of(facts: &Facts) -> Option<Position> {
        Some(Position { history: facts.replid?, offset: facts.offset? })
    }
}

/// What has become of the two servers.
struct Outcome {
    end: End,
    /// Why an order was not carried out: the last such reason.
    error: Option<ServerError>,
    signal: Option<&'static str>,
}

/// Changes the roles of the two servers, or undoes it.
async fn perform(ready: &mut Ready, limit: Duration, signals: &mut Signals) -> Outcome {
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

// Sentinels: the name by which clients find the primary moves with the switch.
//
// ```text
//   before ── the new one becomes the best replica (replica-priority), and every Sentinel has seen that
//   switch ── in its own order, which waits for writes
//   after ─── SENTINEL FAILOVER: the Sentinels promote the best replica, which is the primary already, make the others
//             follow it, and name it to clients; the priority is set back
// ```
//
// A Sentinel's own fail-over does not wait for writes, and this one has none to wait for. A Sentinel that sees its
// primary as a replica, and is told nothing, begins a fail-over by itself some 20 seconds after
// `down-after-milliseconds`. So the priority stands before the switch begins: whatever ends this command, the
// Sentinels promote the new one, and no third server.

/// How long the Sentinels may take to see a priority: each of them asks its servers every ten seconds.
const SEEN_LIMIT: Duration = Duration::from_secs(40);

/// How long they may take to move the name. They need a few seconds, and one that has heard nothing is told by the
/// others every two seconds.
const MOVE_LIMIT: Duration = Duration::from_secs(60);

/// Pause between two looks at the Sentinels.
const ASK_SENTINELS_EVERY: Duration = Duration::from_millis(250);

/// The priority of the best replica. A replica of priority 0 is never promoted.
const BEST: u64 = 1;

/// The setting.
const PRIORITY: &str = "replica-priority";

/// A primary's name at its Sentinels, which is to move.
struct Name {
    sentinels: Sentinels,
    /// The runs of both servers, by which Sentinels tell of them whatever their addresses are.
    old_run: String,
    new_run: String,
    /// The priority that the new one has by its configuration.
    priority: u64,
    /// The priority that it needs to be the best, if that is another.
    needed: Option<u64>,
    is_moved: bool,
}

/// What one Sentinel says.
enum Sees {
    /// The new one is a replica.
    Replica { priority: u64, flags: String, others: Vec<(HostPort, u64)> },
    /// The old one is a replica, and the new one is not.
    Moved,
    /// Neither is.
    Neither,
}

impl Name {
    /// Looks at the Sentinels, and changes nothing.
    ///
    /// # Errors
    /// None answers, or one does not know the servers, or another replica must stay as good as the new one can be.
    async fn look(sentinels: Sentinels, ready: &mut Ready) -> Result<Name, Failure> {
        let (old_run, new_run) = (run_of(&mut ready.old).await?, run_of(&mut ready.new).await?);
        let priority = priority_of(&mut ready.new).await?.ok_or_else(|| {
            Failure::refused(format!("{} does not tell its {PRIORITY} (CONFIG GET)", ready.new.url()))
        })?;
        let mut name = Name { sentinels, old_run, new_run, priority, needed: None, is_moved: false };
        let (mut least, mut is_moved) = (None::<(u64, HostPort)>, true);
        for (sentinel, sees) in name.ask().await? {
            match sees {
                Sees::Moved => {}
                Sees::Neither => {
                    return Err(Failure::refused(format!(
                        "the Sentinel {sentinel} knows neither {} nor {} as a replica of {}: it finds them in the primary's INFO within ten \
                         seconds; --sentinel-name must be the name of this primary",
                        ready.new.url(),
                        ready.old.url(),
                        name.sentinels.name()
                    )));
                }
                Sees::Replica { flags, others, .. } => {
                    is_moved = false;
                    if flags.split(',').any(|flag| matches!(flag, "s_down" | "o_down" | "disconnected")) {
                        let text = format!("the Sentinel {sentinel} does not reach {} ({flags})", ready.new.url());
                        return Err(Failure::new(Code::NotSwitched, format!("{text}; nothing was changed")));
                    }
                    let others = others.into_iter().filter(|(_, priority)| *priority > 0);
                    least =
                        others.map(|(at, priority)| (priority, at)).chain(least).min_by_key(|(priority, _)| *priority);
                }
            }
        }
        name.is_moved = is_moved;
        name.needed = match least {
            _ if is_moved => None,
            None if priority > 0 => None,
            Some((least, _)) if priority > 0 && priority < least => None,
            Some((BEST, other)) => {
                return Err(Failure::refused(format!(
                    "the replica {other} has {PRIORITY} {BEST}, and the Sentinels would promote it as soon as {}: set a higher one there, \
                     or 0",
                    ready.new.url()
                )));
            }
            _ => Some(BEST),
        };
        Ok(name)
    }

    /// Whether the Sentinels name the new one.
    fn is_moved(&self) -> bool {
        self.is_moved
    }

    /// The name.
    fn name(&self) -> &str {
        self.sentinels.name()
    }

    /// Makes the new one the best replica. Ends when all Sentinels that answer have seen it.
    ///
    /// # Errors
    /// They have not, in time. The priority is as before.
    async fn make_best(&mut self, new: &mut Told) -> Result<(), Failure> {
        let Some(needed) = self.needed else { return Ok(()) };
        tracing::info!("{} gets {PRIORITY} {needed} until {} has moved", new.url(), self.name());
        new.command(&["CONFIG", "SET", PRIORITY, &needed.to_string()]).await?;
        let until = Instant::now() + SEEN_LIMIT;
        let mut late = String::new();
        while Instant::now() < until {
            let sees = self.ask().await;
            late.clear();
            for (sentinel, sees) in sees? {
                if !matches!(sees, Sees::Replica { priority, .. } if priority == needed) {
                    late = sentinel;
                }
            }
            if late.is_empty() {
                return Ok(());
            }
            sleep(ASK_SENTINELS_EVERY).await;
        }
        Err(Failure::new(
            Code::NotSwitched,
            format!(
                "the Sentinel {late} has not seen the new {PRIORITY} of {} within {} s; nothing else was changed",
                new.url(),
                SEEN_LIMIT.as_secs()
            ),
        ))
    }

    /// Sets the priority back, unless somebody has set another one meanwhile. Where the Sentinels had the server note
    /// its role, it notes this too.
    async fn set_back(&mut self, new: &mut Told, notes_it: bool) {
        let Some(needed) = self.needed else { return };
        // A Sentinel closes the connections of clients at the server that it promotes: the first one may be lost.
        let mut now = priority_of(new).await;
        if now.is_err() {
            now = priority_of(new).await;
        }
        if now.as_ref().is_ok_and(|now| *now != Some(needed)) {
            tracing::info!("{} has another {PRIORITY} by now, which stays", new.url());
            return;
        }
        let before = self.priority.to_string();
        let set = [&["CONFIG", "SET", PRIORITY, &before][..], &["CONFIG", "REWRITE"]];
        for words in &set[..if notes_it { 2 } else { 1 }] {
            match new.command(words).await {
                Err(error) if words[1] == "SET" => {
                    tracing::warn!("{} still has {PRIORITY} {BEST} in place of {before}: {error}", new.url());
                }
                Err(error) => tracing::debug!(%error, "the server has not written its configuration file"),
                Ok(_) => {}
            }
        }
    }

    /// Has the Sentinels name the new one, which is the primary by now.
    ///
    /// # Errors
    /// Why clients may still be sent to the old one.
    async fn follow(&mut self) -> Result<(), String> {
        if self.is_moved {
            return Ok(());
        }
        let mut refusals = Vec::new();
        for sentinel in self.sentinels.each() {
            match self.sentinels.fail_over(sentinel).await {
                Ok(()) => {
                    refusals.clear();
                    break;
                }
                Err(error) => refusals.push(error.to_string()),
            }
        }
        // Every Sentinel may have refused because one has begun a fail-over by itself: the name moves then, too.
        let until = Instant::now() + MOVE_LIMIT;
        loop {
            let sees = self.ask().await;
            match &sees {
                Ok(sees) if sees.iter().all(|(_, sees)| matches!(sees, Sees::Moved)) => {
                    self.is_moved = true;
                    return Ok(());
                }
                _ if Instant::now() < until => sleep(ASK_SENTINELS_EVERY).await,
                _ => {
                    let late = sees.into_iter().flatten().find(|(_, sees)| !matches!(sees, Sees::Moved));
                    let late =
                        late.map_or_else(|| "none answers".into(), |(sentinel, _)| format!("{sentinel} does not"));
                    refusals.push(late);
                    return Err(format!(
                        "the Sentinels do not name it as {} ({}); send SENTINEL FAILOVER {0} to one of them",
                        self.name(),
                        refusals.join("; ")
                    ));
                }
            }
        }
    }

    /// What each Sentinel says that answers.
    async fn ask(&self) -> Result<Vec<(String, Sees)>, Failure> {
        let (mut all, mut last) = (Vec::new(), None);
        for sentinel in self.sentinels.each() {
            match self.sentinels.replicas_at(sentinel).await {
                Ok(replicas) => all.push((sentinel.url().to_string(), self.seen(replicas))),
                Err(error) => last = Some(error),
            }
        }
        match last {
            Some(error) if all.is_empty() => Err(Failure::new(Code::Server, error.to_string())),
            Some(error) => {
                tracing::debug!(%error, "a Sentinel does not answer");
                Ok(all)
            }
            None => Ok(all),
        }
    }

    fn seen(&self, replicas: Vec<KnownReplica>) -> Sees {
        let (new, others): (Vec<_>, Vec<_>) = replicas.into_iter().partition(|replica| replica.run_id == self.new_run);
        match new.into_iter().next() {
            None if others.iter().any(|replica| replica.run_id == self.old_run) => Sees::Moved,
            None => Sees::Neither,
            Some(new) => Sees::Replica {
                priority: new.priority,
                flags: new.flags,
                others: others
                    .into_iter()
                    // The old one is listed too where a Sentinel has seen its new role.
                    .filter(|replica| replica.run_id != self.old_run)
                    .filter_map(|replica| Some((replica.address?, replica.priority)))
                    .collect(),
            },
        }
    }
}

/// The priority that a server has now. `None`: it does not tell it.
async fn priority_of(told: &mut Told) -> Result<Option<u64>, ServerError> {
    let pair = told.command(&["CONFIG", "GET", PRIORITY]).await?;
    Ok(pair.as_array().and_then(|pair| pair.get(1)?.as_str()?.parse().ok()))
}

async fn run_of(told: &mut Told) -> Result<String, Failure> {
    let url = told.url().to_string();
    let run = told.info("server").await?.get("run_id").map(str::to_owned);
    run.ok_or_else(|| Failure::new(Code::Server, format!("{url} does not tell its run_id (INFO server)")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    async fn ran(script: &str) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hook");
        let mut file = std::fs::File::options().create_new(true).write(true).mode(0o755).open(&program).unwrap();
        file.write_all(format!("#!/bin/sh\n{script}\n").as_bytes()).unwrap();
        drop(file);
        run_hook(&program, Duration::from_millis(300), ("redis://a:1", "redis://b:2")).await
    }

    #[tokio::test]
    async fn it_gets_both_addresses_and_its_failure_is_told() {
        assert_eq!(ran(r#"test "$1 $2" = "redis://a:1 redis://b:2""#).await, Ok(()));
        assert!(ran("exit 3").await.unwrap_err().contains("has failed (exit status: 3)"));
        assert!(ran("exec sleep 60").await.unwrap_err().contains("--hook-timeout"));
        let missing = run_hook(Path::new("/nowhere/hook"), Duration::from_secs(1), ("a", "b")).await;
        assert!(missing.unwrap_err().contains("could not be started"));
    }

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
