//! A rest: the writer is stopped, the faults are over, and the servers are compared.
//!
//! What must hold then:
//!
//! - A server that an operator took over is still a primary and has the operator's key.
//! - Every other server gets in step within [`SETTLE_TIME`]. A server that is a primary, because its sync failed, gets
//!   an agent as an operator would start it. So does one that follows the closed link of an agent that was killed, or
//!   that said that it could not tell the server anything. That agent must succeed, at the second try at the latest.
//! - No other server follows a closed link.
//! - All data, replid and offset are equal; `remora verify` agrees.
//! - Settings that agents change have their old values where no agent runs.

use std::time::{Duration, Instant};

use remora_bench::sync::Result;
use remora_lab::compare::{CALM_TIME, same_data};
use remora_lab::process;

use super::Soak;
use super::agents::tail;
use super::perform::TAKEN_KEY;
use super::script::{How, Seat, Who};

impl Soak<'_, '_> {
    /// Waits until all servers are in step, and compares them.
    pub(super) fn rest(&mut self) -> Result<()> {
        // Empty servers are equal too easily.
        if self.group.lacks_long_strings()? {
            self.group.fill(&mut self.random)?;
        }
        self.group.stop_writing();
        self.look()?;
        self.agents.check_for_panics()?;
        self.check_taken()?;
        let begun = Instant::now();
        self.wait_for_standby(SETTLE_TIME)?;
        for seat in Seat::ALL {
            self.settle(seat)?;
        }
        let settled = begun.elapsed();
        let mut words = Vec::new();
        for who in [Who::Standby, Who::Seat(Seat::C), Who::Seat(Seat::D)] {
            words.push(self.compare(who)?);
        }
        self.check_settings()?;
        self.rests += 1;
        self.totals.rests += 1;
        if self.rests.is_multiple_of(2) {
            words.push(self.verify()?);
        }
        let (settled, all) = (settled.as_secs_f64(), begun.elapsed().as_secs_f64());
        self.history
            .note(&format!("rest: {}; in step after {settled:.1} s, compared after {all:.1} s", words.join(", ")));
        Ok(())
    }

    /// A server that an operator took over must be left alone, also by an agent that ended since.
    fn check_taken(&mut self) -> Result<()> {
        for seat in Seat::ALL {
            if !std::mem::take(&mut self.taken[seat.index()]) {
                continue;
            }
            let who = Who::Seat(seat);
            let standing = self.group.standing(who)?;
            let key = self.group.server(who).client()?.text(&["GET", TAKEN_KEY])?;
            if standing.is_replica || key.is_empty() {
                let what =
                    format!("{seat} was taken over by an operator and changed since: {standing:?}, the key is {key:?}");
                return Err(what.into());
            }
        }
        Ok(())
    }

    /// Waits until the seat's server is in step, and starts agents for it where an operator would.
    fn settle(&mut self, seat: Seat) -> Result<()> {
        let who = Who::Seat(seat);
        let mut repairs = 0;
        self.until(&format!("{seat} to be in step"), SETTLE_TIME, |soak| {
            // An agent that has not been in step yet can change the server at any moment.
            if soak.agents.runs(seat) && !soak.agents.stays_in_step(seat) {
                return Ok(Err("its agent still runs".into()));
            }
            let standing = soak.group.standing(who)?;
            let follows_a_server = soak.group.is_server(&standing.follows);
            if standing.is_replica && (follows_a_server || soak.agents.runs(seat)) {
                let state = format!("{standing:?}");
                return Ok(if standing.is_up { Ok(()) } else { Err(state) });
            }
            if soak.agents.runs(seat) {
                return Ok(Err("its agent has not noticed yet that the server has left it".into()));
            }
            let end = soak.agents.last_end(seat);
            if standing.is_replica && !end.is_some_and(|end| end.may_leave_link) {
                let how = end.map_or("no agent has ended", |end| &end.how);
                return Err(
                    format!("{seat} follows {}, and no agent runs there (the last: {how})", standing.follows).into()
                );
            }
            if repairs == MOST_REPAIRS {
                return Err(format!(
                    "{repairs} agents in a row could not make {seat} a replica, and nothing disturbed them"
                )
                .into());
            }
            repairs += 1;
            soak.history.note(&format!("  {seat} {}: starting an agent", how_it_is(standing.is_replica)));
            soak.start_agent(seat, &How::plain())?;
            Ok(Err("its agent was started".into()))
        })
    }

    fn compare(&mut self, who: Who) -> Result<String> {
        self.look()?;
        let (primary, server) = (self.group.server(Who::Primary), self.group.server(who));
        let agreement = same_data(primary, server, CALM_TIME).map_err(|error| {
            let native = if who == Who::Standby { ", a replica of the servers' own" } else { "" };
            format!("{}{native}: {error}", self.group.name(who))
        })?;
        self.totals.comparisons += 1;
        Ok(format!("{} equal at {}", self.group.name(who), agreement.offset))
    }

    /// Settings that an agent changes for a sync.
    fn check_settings(&mut self) -> Result<()> {
        for seat in Seat::ALL {
            let may_differ = self.agents.last_end(seat).is_some_and(|end| end.may_leave_settings);
            if self.agents.runs(seat) || may_differ {
                continue;
            }
            let server = self.group.server(Who::Seat(seat));
            let expected = [("repl-diskless-load", self.plan.diskless_load[seat.index()]), ("masterauth", "")];
            for (name, expected) in expected {
                let present = server.configured(name)?;
                if present != expected {
                    return Err(format!(
                        "{seat}: the agent did not restore {name}: {present:?} instead of {expected:?}"
                    )
                    .into());
                }
            }
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<String> {
        let seats = [Who::Standby, Who::Seat(Seat::C), Who::Seat(Seat::D)];
        let who = seats[self.random.below(3) as usize];
        let more: &[&str] = if self.random.one_in(2) { &["--digest", "never"] } else { &[] };
        let (status, output) = self.agents.verify(self.group.server(Who::Primary), self.group.server(who), more)?;
        self.totals.verified += 1;
        if status.success() {
            return Ok(format!("verify {} 0", self.group.name(who)));
        }
        let (name, how) = (self.group.name(who), process::in_words(status));
        Err(format!("remora verify {} of {name} ended with {how}:\n{}", more.join(" "), tail(&output)).into())
    }
}

fn how_it_is(is_replica: bool) -> &'static str {
    if is_replica { "follows the closed link of an agent" } else { "is no replica" }
}

/// How long servers and agents may take until all are in step: `--retry-for` of an agent and the time of a sync, twice,
/// on a busy machine.
const SETTLE_TIME: Duration = Duration::from_secs(180);

/// How many agents may fail at a rest, one after the other: the first may meet what the last fault has caused.
const MOST_REPAIRS: u32 = 2;
