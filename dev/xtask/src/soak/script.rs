//! The script of a group: its settings and its events. Both depend on the seed only, so the same seed gives the same
//! script. When an event happens, and what the servers and agents are doing then, depends on the machine.

use std::fmt;
use std::time::Duration;

use remora_bench::sync::Result;
use remora_lab::{Kind, Random};
use rustix::process::Signal;

use super::Soak;

/// One of the two servers that Remora makes replicas of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seat {
    /// On the left host.
    C,
    /// On the right host.
    D,
}

impl Seat {
    /// Both seats.
    pub(super) const ALL: [Seat; 2] = [Seat::C, Seat::D];

    /// Its place in lists of both seats, and that of its host.
    pub(super) fn index(self) -> usize {
        match self {
            Seat::C => 0,
            Seat::D => 1,
        }
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// One of the servers, by what it is at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// The primary of the moment.
    Primary,
    /// Its replica by the servers' own replication, which can take over.
    Standby,
    /// A server that Remora makes a replica of.
    Seat(Seat),
}

impl Who {
    fn draw(random: &mut Random) -> Who {
        [Who::Primary, Who::Standby, Who::Seat(Seat::C), Who::Seat(Seat::D)][random.below(4) as usize]
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Who::Primary => f.write_str("the primary"),
            Who::Standby => f.write_str("the standby"),
            Who::Seat(seat) => write!(f, "{seat}"),
        }
    }
}

/// The options of a `remora replica`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct How {
    /// `--stay`.
    pub(super) stay: bool,
    /// How the agent reads.
    pub(super) transport: Transport,
    /// `--serve-peers`: the other agent can read from this one.
    pub(super) relay: bool,
    /// `--module-load off`.
    pub(super) module_off: bool,
    /// `--replace`. Without it, a server with data is refused.
    pub(super) replace: bool,
    /// `--on-failure detached`.
    pub(super) detached: bool,
}

impl How {
    /// What an operator types who wants the replica again and nothing else.
    pub(super) fn plain() -> How {
        How { stay: false, transport: Transport::Auto, relay: false, module_off: false, replace: true, detached: false }
    }

    fn draw(random: &mut Random) -> How {
        How {
            stay: random.one_in(2),
            transport: [Transport::Auto, Transport::Auto, Transport::Tcp, Transport::Shm][random.below(4) as usize],
            relay: random.one_in(4),
            module_off: random.one_in(3),
            replace: !random.one_in(10),
            detached: random.one_in(6),
        }
    }

    /// The options by which two agents that are started together feed each other.
    fn draw_relay(random: &mut Random) -> How {
        How { transport: Transport::Tcp, relay: true, replace: true, ..How::draw(random) }
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport = match self.transport {
            Transport::Auto => "auto",
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
        };
        write!(f, "{}, {transport}", if self.stay { "stay" } else { "once" })?;
        let more = [
            (self.relay, "serving peers"),
            (self.module_off, "module off"),
            (!self.replace, "without --replace"),
            (self.detached, "on failure detached"),
        ];
        more.iter().filter(|(given, _)| *given).try_for_each(|(_, words)| write!(f, ", {words}"))
    }
}

/// How an agent reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    /// The best that works.
    Auto,
    /// TCP.
    Tcp,
    /// Shared memory where the source is on the agent's host, else the best that works.
    Shm,
}

/// A setting that is changed for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    /// `timeout 1` on every server: idle clients are disconnected, also those of agents.
    Timeout,
    /// An output-buffer limit of the primary that a snapshot reaches.
    OutputBuffer,
    /// A backlog of the primary that covers no hand-off.
    Backlog,
}

/// Something that is done to the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Starts an agent, or stops the one that runs.
    Start(Seat, How),
    /// Starts agents for both seats that can read from each other.
    StartBoth(How),
    /// Stops an agent as an operator does, or starts one if none runs.
    Stop(Seat),
    /// Kills an agent, and starts another one after a pause.
    Kill(Seat, Duration, How),
    /// Freezes an agent for a while.
    PauseAgent(Seat, Duration),
    /// Stops the source, and starts it again after a pause.
    RestartSource {
        /// By `kill -9`.
        kill: bool,
        /// The pause.
        pause: Duration,
    },
    /// Freezes the source for a while.
    PauseSource(Duration),
    /// Starts the source anew: beside the primary, or beside the standby with `--announce`.
    MoveSource {
        /// Beside the standby.
        to_standby: bool,
    },
    /// Shuts the primary down with its data saved, and starts it again.
    RestartPrimary,
    /// Kills the primary, which has saved nothing since its last shutdown, and starts it again after a pause.
    KillPrimary(Duration),
    /// Promotes the standby, and demotes the former primary after it has taken writes for this time.
    Promote(Duration),
    /// Ends the standby and starts it again.
    RestartStandby {
        /// By `SHUTDOWN SAVE` and not by `kill -9`.
        saved: bool,
    },
    /// Ends a server that Remora makes a replica of, and starts it again.
    RestartReplica {
        /// The server.
        seat: Seat,
        /// By `SHUTDOWN SAVE` and not by `kill -9`.
        saved: bool,
    },
    /// Cuts the network between the hosts for a while.
    Cut {
        /// For this time.
        pause: Duration,
        /// The standby is promoted meanwhile, and the former primary demoted when the network is whole again.
        promote: bool,
    },
    /// Breaks connections of a server: those of `CLIENT KILL TYPE`.
    Disconnect(Who, &'static str),
    /// Freezes a server for a while.
    PauseServer(Who, Duration),
    /// An operator makes a replica a primary (`REPLICAOF NO ONE`) and writes to it.
    TakeOver(Seat),
    /// An operator makes a replica follow the primary by the servers' own replication.
    Redirect(Seat),
    /// Empties the primary.
    FlushAll,
    /// Swaps two databases of the primary.
    SwapDatabases(u64, u64),
    /// Writes long strings.
    Fill,
    /// Changes a setting for a while.
    Set(Setting, Duration),
    /// Moves keys between the primary and another primary by `MIGRATE`, as resharding does.
    Reshard,
}

impl Event {
    /// The next event of a script.
    pub(super) fn draw(random: &mut Random) -> Event {
        let mut point = random.below(WEIGHTS.iter().map(|(weight, _)| weight).sum());
        for (weight, draw) in WEIGHTS {
            match point.checked_sub(*weight) {
                Some(rest) => point = rest,
                None => return draw(random),
            }
        }
        Event::Fill
    }

    /// The name of its kind, for counts.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Event::Start(..) => "start or stop an agent",
            Event::StartBoth(_) => "start two agents that feed each other",
            Event::Stop(_) => "stop or start an agent",
            Event::Kill(..) => "kill an agent",
            Event::PauseAgent(..) => "freeze an agent",
            Event::RestartSource { kill: false, .. } => "restart the source",
            Event::RestartSource { kill: true, .. } => "kill the source",
            Event::PauseSource(_) => "freeze the source",
            Event::MoveSource { .. } => "move the source",
            Event::RestartPrimary => "restart the primary",
            Event::KillPrimary(_) => "kill the primary",
            Event::Promote(_) => "promote the standby",
            Event::RestartStandby { .. } => "restart the standby",
            Event::RestartReplica { .. } => "restart a replica",
            Event::Cut { promote: false, .. } => "cut the network",
            Event::Cut { promote: true, .. } => "cut the network and promote",
            Event::Disconnect(..) => "break connections",
            Event::PauseServer(..) => "freeze a server",
            Event::TakeOver(_) => "take a replica over",
            Event::Redirect(_) => "point a replica at the primary",
            Event::FlushAll => "FLUSHALL",
            Event::SwapDatabases(..) => "SWAPDB",
            Event::Fill => "write long strings",
            Event::Set(..) => "change a setting for a while",
            Event::Reshard => "move keys by MIGRATE",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind();
        match self {
            Event::Start(seat, how) | Event::Kill(seat, _, how) => write!(f, "{kind}: {seat} ({how})"),
            Event::StartBoth(how) => write!(f, "{kind} ({how})"),
            Event::Stop(seat) | Event::TakeOver(seat) | Event::Redirect(seat) => write!(f, "{kind}: {seat}"),
            Event::PauseAgent(seat, pause) => write!(f, "{kind}: {seat}, {pause:?}"),
            Event::RestartSource { pause, .. } | Event::PauseSource(pause) | Event::KillPrimary(pause) => {
                write!(f, "{kind}: {pause:?}")
            }
            Event::MoveSource { to_standby } => {
                write!(f, "{kind} to the {}", if *to_standby { "standby" } else { "primary" })
            }
            Event::Promote(overlap) => write!(f, "{kind}; the former primary takes writes for {overlap:?}"),
            Event::RestartStandby { saved } => {
                write!(f, "{kind} {}", if *saved { "with its data" } else { "by kill -9" })
            }
            Event::RestartReplica { seat, saved } => {
                write!(f, "{kind}: {seat} {}", if *saved { "with its data" } else { "by kill -9" })
            }
            Event::Cut { pause, .. } => write!(f, "{kind}: {pause:?}"),
            Event::Disconnect(who, what) => write!(f, "{kind} of {who}: {what}"),
            Event::PauseServer(who, pause) => write!(f, "{kind}: {who}, {pause:?}"),
            Event::SwapDatabases(one, other) => write!(f, "{kind} {one} {other}"),
            Event::Set(setting, pause) => write!(f, "{kind}: {setting:?}, {pause:?}"),
            Event::RestartPrimary | Event::FlushAll | Event::Fill | Event::Reshard => f.write_str(kind),
        }
    }
}

type Draw = fn(&mut Random) -> Event;

/// How often each event occurs, relative to the others.
const WEIGHTS: &[(u64, Draw)] = &[
    (30, |random| Event::Start(seat(random), How::draw(random))),
    (8, |random| Event::StartBoth(How::draw_relay(random))),
    (6, |random| Event::Stop(seat(random))),
    (6, |random| Event::Kill(seat(random), short(random), How::draw(random))),
    (4, |random| Event::PauseAgent(seat(random), long(random))),
    (8, |random| Event::RestartSource { kill: random.one_in(2), pause: short(random) }),
    (4, |random| Event::PauseSource(long(random))),
    (6, |random| Event::MoveSource { to_standby: random.one_in(3) }),
    (5, |_| Event::RestartPrimary),
    (4, |random| Event::KillPrimary(short(random))),
    (8, |random| Event::Promote(Duration::from_millis(random.below(400)))),
    (3, |random| Event::RestartStandby { saved: random.one_in(2) }),
    (5, |random| Event::RestartReplica { seat: seat(random), saved: random.one_in(2) }),
    (8, |random| Event::Cut { pause: long(random), promote: random.one_in(3) }),
    (6, |random| {
        let types: [&'static str; 3] = ["replica", "master", "normal"];
        Event::Disconnect(Who::draw(random), types[random.below(3) as usize])
    }),
    (6, |random| Event::PauseServer(Who::draw(random), long(random))),
    (4, |random| Event::TakeOver(seat(random))),
    (4, |random| Event::Redirect(seat(random))),
    (3, |_| Event::FlushAll),
    (3, |random| Event::SwapDatabases(random.below(16), random.below(16))),
    (5, |_| Event::Fill),
    (6, |random| {
        let settings = [Setting::Timeout, Setting::OutputBuffer, Setting::Backlog];
        Event::Set(settings[random.below(3) as usize], long(random))
    }),
    (4, |_| Event::Reshard),
];

fn seat(random: &mut Random) -> Seat {
    Seat::ALL[random.below(2) as usize]
}

/// A pause that no time-out notices.
fn short(random: &mut Random) -> Duration {
    Duration::from_millis(random.below(2_000))
}

/// A pause that some time-outs notice, and sometimes all of them: see [`Plan::repl_timeout`] and [`STALL_TIMEOUT`].
fn long(random: &mut Random) -> Duration {
    let most = if random.one_in(6) { 20_000 } else { 5_000 };
    Duration::from_millis(random.between(200, most))
}

/// The pause after an event. Often there is hardly any, so that an event meets the effects of the one before.
pub(super) fn pause(random: &mut Random) -> Duration {
    let most = [50, 1_000, 4_000][random.below(3) as usize];
    Duration::from_millis(random.below(most))
}

/// The number of events until the next rest.
pub(super) fn events_until_rest(random: &mut Random) -> u64 {
    random.between(3, 8)
}

/// The settings of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Which of the four servers have the module: A, B, C and D.
    pub(super) modules: [bool; 4],
    /// `repl-backlog-size`.
    pub(super) backlog: &'static str,
    /// `repl-timeout`, in seconds.
    pub(super) repl_timeout: u64,
    /// `repl-diskless-load` of C and D.
    pub(super) diskless_load: [&'static str; 2],
    /// Whether the agents of C and D have a `--state-dir`. The record file is in it, so it stays the same for all
    /// agents of a server.
    pub(super) state_dirs: [bool; 2],
    /// `--upload-limit` of the source, so that transfers over TCP take seconds.
    pub(super) upload_limit: Option<&'static str>,
    /// `key-load-delay` of C and D in microseconds for each key, so that loads take seconds.
    pub(super) load_delay: u64,
    /// Whether A and B send snapshot and stream over two connections, which only Valkey can.
    pub(super) dual_channel: bool,
    /// `--memory` of the source. The small one holds no snapshot, so snapshots are windowed.
    pub(super) source_memory: &'static str,
}

impl Plan {
    /// The settings of the group with this script.
    pub(super) fn draw(kind: Kind, random: &mut Random) -> Plan {
        // "disabled" keeps the old data until the file is complete; the others lose them at once, or keep both.
        let loads = ["disabled", "on-empty-db", "swapdb"];
        let mut load = || loads[random.below(3) as usize];
        Plan {
            diskless_load: [load(), load()],
            modules: std::array::from_fn(|_| random.one_in(2)),
            backlog: ["1mb", "16mb", "64mb"][random.below(3) as usize],
            repl_timeout: [10, 20][random.below(2) as usize],
            state_dirs: [random.one_in(4), random.one_in(4)],
            upload_limit: random.one_in(2).then_some("8MiB"),
            load_delay: [0, 40][random.below(2) as usize],
            dual_channel: random.one_in(2) && kind == Kind::Valkey9,
            source_memory: ["24MiB", "192MiB", "192MiB"][random.below(3) as usize],
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with: Vec<&str> =
            ["A", "B", "C", "D"].into_iter().zip(self.modules).filter(|(_, has)| *has).map(|(name, _)| name).collect();
        let modules = if with.is_empty() { "no server".to_owned() } else { with.join(", ") };
        let [c, d] = self.diskless_load;
        write!(
            f,
            "module in {modules}; backlog {}; repl-timeout {}; repl-diskless-load {c} in C, {d} in D; source memory {}",
            self.backlog, self.repl_timeout, self.source_memory
        )?;
        let more = [
            (self.upload_limit.is_some(), "slow transfers"),
            (self.load_delay > 0, "slow loads"),
            (self.state_dirs[0], "state folder for C"),
            (self.state_dirs[1], "state folder for D"),
            (self.dual_channel, "dual channel"),
        ];
        more.iter().filter(|(given, _)| *given).try_for_each(|(_, words)| write!(f, "; {words}"))
    }
}

/// `--stall-timeout` of the source, below the `repl-timeout` of every plan.
pub(super) const STALL_TIMEOUT: &str = "5s";

// How the events of a script are carried out.
//
// Each event ends with its fault over: the network is whole, frozen processes continue, settings have their old
// values. What the fault has caused goes on: agents try again, servers resynchronise, and the next event meets that.

impl Soak<'_, '_> {
    /// Carries out an event.
    pub(super) fn perform(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Start(seat, how) => self.start_or_stop(*seat, how),
            Event::StartBoth(how) => Seat::ALL
                .into_iter()
                .try_for_each(|seat| if self.agents.runs(seat) { Ok(()) } else { self.start_agent(seat, how) }),
            Event::Stop(seat) => self.start_or_stop(*seat, &How::plain()),
            Event::Kill(seat, pause, how) => self.kill_agent(*seat, *pause, how),
            Event::PauseAgent(seat, pause) => {
                self.agents.signal(*seat, Signal::STOP)?;
                let passed = self.pass(*pause);
                self.agents.signal(*seat, Signal::CONT)?;
                passed
            }
            Event::RestartSource { kill, pause } => {
                self.agents.end_source(*kill, self.totals, self.history)?;
                self.pass(*pause)?;
                self.ensure_source(false)
            }
            Event::PauseSource(pause) => {
                self.agents.signal_source(Signal::STOP)?;
                let passed = self.pass(*pause);
                self.agents.signal_source(Signal::CONT)?;
                passed
            }
            Event::MoveSource { to_standby } => {
                self.agents.end_source(false, self.totals, self.history)?;
                self.ensure_source(*to_standby)
            }
            Event::RestartPrimary => self.restart(Who::Primary, true),
            Event::KillPrimary(pause) => {
                self.group.server_mut(Who::Primary).kill()?;
                // Not `pass`, which would report the server as missing.
                std::thread::sleep(*pause);
                self.restart(Who::Primary, false)
            }
            Event::Promote(overlap) => self.promote(*overlap),
            Event::RestartStandby { saved } => {
                self.restart(Who::Standby, *saved)?;
                self.follow_primary(Who::Standby)
            }
            Event::RestartReplica { seat, saved } => {
                self.restart(Who::Seat(*seat), *saved)?;
                self.taken[seat.index()] = false;
                Ok(())
            }
            Event::Cut { pause, promote } => self.cut(*pause, *promote),
            Event::Disconnect(who, what) => self.group.tell(*who, &["CLIENT", "KILL", "TYPE", what]).map(drop),
            Event::PauseServer(who, pause) => {
                self.group.server_mut(*who).pause()?;
                let passed = self.pass(*pause);
                self.group.server_mut(*who).resume()?;
                passed
            }
            Event::TakeOver(seat) => self.take_over(*seat),
            Event::Redirect(seat) => {
                self.taken[seat.index()] = false;
                self.group.follow_primary(Who::Seat(*seat)).map(drop)
            }
            Event::FlushAll => self.group.tell(Who::Primary, &["FLUSHALL"]).map(drop),
            Event::SwapDatabases(one, other) => {
                self.group.tell(Who::Primary, &["SWAPDB", &one.to_string(), &other.to_string()]).map(drop)
            }
            Event::Fill => self.group.fill(&mut self.random),
            Event::Set(setting, pause) => self.set(*setting, *pause),
            Event::Reshard => self.reshard(),
        }
    }

    /// Moves keys to and fro while a replica is made.
    fn reshard(&mut self) -> Result<()> {
        if !self.agents.runs(Seat::C) {
            self.start_agent(Seat::C, &How::plain())?;
        }
        let mut moved = 0;
        for _ in 0..MOVES {
            moved += self.group.reshard(&mut self.random)?;
            self.pass(MOVE_PAUSE)?;
        }
        self.history.note(&format!("  {moved} keys moved"));
        Ok(())
    }

    fn start_or_stop(&mut self, seat: Seat, how: &How) -> Result<()> {
        if self.agents.runs(seat) {
            self.history.note(&format!("  {seat} has an agent: stopping it"));
            return self.agents.stop(seat);
        }
        self.start_agent(seat, how)
    }

    /// Starts an agent for a seat that has none.
    pub(super) fn start_agent(&mut self, seat: Seat, how: &How) -> Result<()> {
        self.ensure_source(false)?;
        // From here on the server is the agent's again, if it is given `--replace`.
        self.taken[seat.index()] &= !how.replace;
        self.agents.start(seat, self.group.server(Who::Seat(seat)), how, self.history)
    }

    fn kill_agent(&mut self, seat: Seat, pause: Duration, how: &How) -> Result<()> {
        self.agents.kill(seat)?;
        self.pass(pause)?;
        if self.agents.runs(seat) { Ok(()) } else { self.start_agent(seat, how) }
    }

    fn restart(&mut self, who: Who, saved: bool) -> Result<()> {
        if who == Who::Primary {
            self.group.stop_writing();
        }
        let server = self.group.server_mut(who);
        Ok(if saved { server.restart_saved(RESTART_TIME) } else { server.restart() }?)
    }

    /// Makes a server follow the primary. A server that is loading refuses that for a while.
    fn follow_primary(&mut self, who: Who) -> Result<()> {
        let what = format!("{} to accept REPLICAOF", self.group.name(who));
        self.until(&what, COMMAND_TIME, |soak| {
            Ok(if soak.group.follow_primary(who)? { Ok(()) } else { Err("it is loading".into()) })
        })
    }

    /// A standby that is loading cannot be promoted, and one without a link would lose more than an operator accepts.
    pub(super) fn wait_for_standby(&mut self, within: Duration) -> Result<()> {
        self.until("the standby's link to the primary", within, |soak| {
            let standing = soak.group.standing(Who::Standby)?;
            Ok(if standing.is_up { Ok(()) } else { Err(format!("{standing:?}")) })
        })
    }

    fn promote(&mut self, overlap: Duration) -> Result<()> {
        self.wait_for_standby(STANDBY_TIME)?;
        self.promote_standby(overlap)?;
        self.follow_primary(Who::Standby)
    }

    /// Promotes the standby. The former primary takes writes for `overlap`, which the new one never gets. The caller
    /// demotes it.
    fn promote_standby(&mut self, overlap: Duration) -> Result<()> {
        self.until("the standby to accept REPLICAOF NO ONE", COMMAND_TIME, |soak| {
            let done = soak.group.tell(Who::Standby, &["REPLICAOF", "NO", "ONE"])?;
            Ok(if done { Ok(()) } else { Err("it is loading".into()) })
        })?;
        self.pass(overlap)?;
        self.group.stop_writing();
        self.group.swap_roles();
        self.history.note(&format!("  {} is the primary", self.group.name(Who::Primary)));
        self.group.write(&mut self.random)
    }

    fn cut(&mut self, time: Duration, promote: bool) -> Result<()> {
        if promote {
            self.wait_for_standby(STANDBY_TIME)?;
        }
        self.group.cut(true)?;
        if !self.group.has_network() {
            for who in [Who::Primary, Who::Standby] {
                self.group.tell(who, &["CLIENT", "KILL", "TYPE", "replica"])?;
            }
        }
        let passed = self.apart(time, promote);
        self.group.cut(false)?;
        passed?;
        if promote { self.follow_primary(Who::Standby) } else { Ok(()) }
    }

    /// What happens while the network is cut.
    fn apart(&mut self, time: Duration, promote: bool) -> Result<()> {
        self.pass(time / 2)?;
        if promote {
            self.promote_standby(time / 4)?;
        }
        self.pass(time / 2)
    }

    fn take_over(&mut self, seat: Seat) -> Result<()> {
        // An agent that is in the middle of a sync, or has just been started, can come a moment later: then the server
        // is the agent's.
        let is_safe = !self.agents.runs(seat) || self.agents.stays_in_step(seat);
        let who = Who::Seat(seat);
        if self.group.tell(who, &["REPLICAOF", "NO", "ONE"])? {
            self.taken[seat.index()] = is_safe && self.group.tell(who, &["SET", TAKEN_KEY, "an operator's"])?;
        }
        Ok(())
    }

    fn set(&mut self, setting: Setting, time: Duration) -> Result<()> {
        let all = [Who::Primary, Who::Standby, Who::Seat(Seat::C), Who::Seat(Seat::D)];
        let (name, small, whole) = match setting {
            Setting::Timeout => ("timeout", "1", "0"),
            Setting::OutputBuffer => ("client-output-buffer-limit", "replica 1mb 256kb 1", "replica 256mb 64mb 60"),
            Setting::Backlog => ("repl-backlog-size", "16kb", self.plan.backlog),
        };
        let servers = if setting == Setting::Timeout { &all[..] } else { &all[..1] };
        let set = |soak: &mut Self, value: &str| -> Result<()> {
            for who in servers {
                let what = format!("{} to accept CONFIG SET", soak.group.name(*who));
                soak.until(&what, COMMAND_TIME, |soak| {
                    let done = soak.group.tell(*who, &["CONFIG", "SET", name, value])?;
                    Ok(if done { Ok(()) } else { Err("it is loading".into()) })
                })?;
            }
            Ok(())
        };
        set(self, small)?;
        self.pass(time)?;
        set(self, whole)
    }
}

/// The key that an operator writes to a server that was taken over.
pub(super) const TAKEN_KEY: &str = "soak:taken-over";

/// How often keys are moved to and fro, and the pause in between: together about the time of a sync.
const MOVES: u32 = 5;
const MOVE_PAUSE: Duration = Duration::from_millis(200);

/// Time limit for a shutdown that saves some 50 MB on a busy machine, and for a command that a loading server refuses.
const RESTART_TIME: Duration = Duration::from_secs(60);
const COMMAND_TIME: Duration = Duration::from_secs(60);

/// Time limit for the link of the standby: it notices after `repl-timeout` that its primary is gone, and may need a
/// full copy.
const STANDBY_TIME: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_seed_gives_the_same_script_again() {
        let script = |seed| {
            let mut random = Random::new(seed);
            let plan = Plan::draw(Kind::Valkey9, &mut random);
            let events: Vec<Event> = (0..100).map(|_| Event::draw(&mut random)).collect();
            (plan, events)
        };
        assert_eq!(script(7), script(7));
        assert_ne!(script(7), script(8));
    }

    #[test]
    fn every_kind_of_event_occurs_in_an_hour() {
        let mut random = Random::new(1);
        let kinds: BTreeSet<&str> = (0..500).map(|_| Event::draw(&mut random).kind()).collect();
        // The two kinds of a cut, and of a restarted source, have one weight each.
        assert_eq!(kinds.len(), WEIGHTS.len() + 2, "{kinds:?}");
    }
}
