//! How the events of a script are carried out.
//!
//! Each event ends with its fault over: the network is whole, frozen processes continue, settings have their old
//! values. What the fault has caused goes on: agents try again, servers resynchronise, and the next event meets that.

use std::time::Duration;

use remora_bench::sync::Result;
use rustix::process::Signal;

use super::Soak;
use super::script::{Event, How, Seat, Setting, Who};

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
