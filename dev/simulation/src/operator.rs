//! Operator: faults, and what people and their scripts do to servers and agents while a sync goes on.

use std::time::Duration;

use super::check::{STOP_LIMIT, Watch};
use super::memory::Tables;
use super::oracle::LATE;
use super::plan::{Act, FIRST_REPLICA, PRIMARY, ReplicaPlan, SECOND, SourceOptions, Trap, UNREST, address};
use super::replica_agent::{ReplicaAgent, ReplicaOptions};
use super::run::Simulation;
use super::source_agent::SourceAgent;
use super::wire::{Address, Host, SOURCES, ServerId};
use super::world::Event;
use remora_conversation::transports::{RdmaRead, TransportChoice};
use remora_reader::ReadOptions;
use remora_replica::{OnFailure, Options};
use remora_server::{HostPort, Login, ServerUrl, TlsOptions};

/// How often it is looked whether all is well after the unrest, and how long that may take.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Of 256 writes of a schedule that has some, so many must not be applied late.
const LATE_OF_256: u8 = 12;
const WELL_LIMIT: Duration = Duration::from_secs(600);

/// The bytes of a flood: more than most backlogs hold.
const FLOOD: usize = 30_000;

/// How long servers may take to go on by themselves after the last agent was told to stop.
const FINAL_LIMIT: Duration = Duration::from_secs(60);

/// What the agent beside this server is asked to do.
fn options(id: ServerId, plan: &ReplicaPlan, sources: usize, replace: bool) -> Options {
    let Address { host, port } = address(PRIMARY);
    let server = Login {
        url: ServerUrl::tcp(format!("beside-{}", id.0), 6379),
        user: None,
        password_file: None,
        tls: TlsOptions::default(),
    };
    let listed: Vec<String> = SOURCES[..sources].iter().map(|(host, port)| format!("{host}:{port}")).collect();
    let Ok(source) = listed.join(",").parse() else { unreachable!("they are addresses") };
    let read = ReadOptions {
        source,
        transport: TransportChoice::Auto,
        lanes: 1,
        rdma: RdmaRead::default(),
        retry_for: Duration::from_secs(plan.retry_for),
    };
    Options {
        expected_primaries: vec![HostPort { host, port }],
        stay: plan.stay,
        replace,
        on_failure: if plan.keep_on_failure { OnFailure::Detached } else { OnFailure::Empty },
        ..Options::new(server, read)
    }
}

impl Simulation {
    /// The operator does the next thing.
    pub(super) fn operate(&mut self, number: usize) {
        let act = match self.plan.acts.get(number) {
            Some(&(_, act)) => act,
            None => return,
        };
        if let Some(until) = of(act).and_then(|id| self.world.blocked(id)) {
            return self.world.at(until, Event::Operator(number));
        }
        self.world.log(|| format!("OPERATOR {act:?}"));
        self.do_it(act);
    }

    fn later(&mut self, pause: Duration, act: Act) {
        let time = self.world.now + pause;
        self.plan.acts.push((time, act));
        self.world.at(time, Event::Operator(self.plan.acts.len() - 1));
    }

    /// Faults that follow a job.
    pub(super) fn spring_traps(&mut self) {
        for (server, job) in std::mem::take(&mut self.world.jobs) {
            let is_it = |trap: &Trap| trap.server == server && trap.job == job;
            if self.world.now >= UNREST {
                return;
            }
            if let Some(at) = self.plan.traps.iter().position(is_it) {
                let trap = self.plan.traps.swap_remove(at);
                self.world.count(&format!("trap: {job}"));
                trap.acts.into_iter().for_each(|(pause, act)| self.later(pause, act));
            }
        }
    }

    fn do_it(&mut self, act: Act) {
        let name = format!("{act:?}");
        self.world.count(&format!("act: {}", name.split('(').next().unwrap_or_default()));
        self.world.promises.act(self.world.now, act);
        match act {
            Act::StartAgent(id) => self.start_agent(id),
            Act::StopAgent(id) => self.with_agent(id, ReplicaAgent::stop),
            Act::KillAgent(id) => self.with_agent(id, ReplicaAgent::kill),
            Act::KillClients(id) => {
                if let Some(agent) = self.agent_of(id) {
                    self.watch.out_of_reach(&self.world, id);
                    self.world.kill_clients(agent);
                }
            }
            Act::BreakLane(id) => self.with_agent(id, ReplicaAgent::lose_feed),
            Act::Promote(id) => self.point(id, None),
            Act::Reattach(id) => self.reattach(id),
            Act::PointAtPrimary(id) => self.point(id, Some(PRIMARY)),
            Act::PointAtSecond(id) => self.point(id, Some(SECOND)),
            Act::Restart(id) | Act::Crash(id) => {
                self.watch.out_of_reach(&self.world, id);
                // A server that was promoted and restarts looks like one that only restarted.
                self.watch.given_back(id);
                self.world.stop_server(id, matches!(act, Act::Restart(_)));
            }
            Act::StartServer(id) => {
                self.watch.out_of_reach(&self.world, id);
                if !self.world.server(id).alive {
                    self.world.on(id, |server, step| server.restart(step));
                }
            }
            Act::Save(id) => self.world.servers[id.0].save(),
            Act::SwitchRoles => {
                self.point(SECOND, None);
                self.point(PRIMARY, Some(SECOND));
            }
            Act::SwitchBack => {
                self.point(PRIMARY, None);
                self.point(SECOND, Some(PRIMARY));
            }
            Act::StopSource | Act::KillSource => {
                let world = &mut self.world;
                let killed = act == Act::KillSource;
                let of_the_place = self.sources.iter_mut().filter(|source| source.options.place == 0);
                of_the_place.for_each(|source| source.stop(world, killed));
            }
            Act::StartSource => self.start_source(),
            Act::KillStandby => {
                let world = &mut self.world;
                let of_the_place = self.sources.iter_mut().filter(|source| source.options.place == 1);
                of_the_place.for_each(|source| source.stop(world, true));
            }
            Act::StartStandby => self.start_standby(),
            Act::CutSources | Act::SlowSources => {
                let time = self.world.millis(20_000);
                match act {
                    Act::CutSources => self.world.cut(Host::Source(0), Host::Source(1), time),
                    _ => self.world.slow(Host::Source(0), Host::Source(1), time),
                }
            }
            Act::CutStandby => {
                let server = ServerId(self.world.draw.below(self.world.servers.len() as u64) as usize);
                let time = self.world.millis(20_000);
                self.world.cut(Host::Server(server), Host::Source(1), time);
            }
            Act::ForeignSource => self.start_foreign_source(),
            Act::CutConnection => {
                let open = self.world.open_connections();
                if !open.is_empty() {
                    let at = self.world.draw.below(open.len() as u64) as usize;
                    self.world.cut_connection(open[at]);
                }
            }
            Act::CutLink(id) => self.world.lose_links(id),
            Act::CutHosts => {
                let number = self.world.servers.len() as u64;
                let one = ServerId(self.world.draw.below(number) as usize);
                let other = ServerId(self.world.draw.below(number) as usize);
                let other = if one == other { Host::Source(0) } else { Host::Server(other) };
                let time = self.world.millis(20_000);
                if other == Host::Source(0) {
                    self.world.late.cut(self.world.now, self.world.now + time);
                }
                self.world.cut(Host::Server(one), other, time);
            }
            Act::Burst => (0..100).for_each(|_| self.write(PRIMARY)),
            Act::LongWrite => self.write_bytes(self.plan.backlog + self.plan.backlog / 4),
            Act::Flood => self.write_bytes(FLOOD),
            Act::FlushPrimary => {
                let command = [8, super::oracle::FLUSH, 0, 0, 0, 0, 0, 0];
                self.world.on(PRIMARY, |server, step| server.write(&command, step));
            }
            Act::Quiet => self.quiet(),
            Act::Look => self.look(),
            Act::StopAll => {
                for number in FIRST_REPLICA..self.world.servers.len() {
                    self.with_agent(ServerId(number), ReplicaAgent::stop);
                }
                self.later(FINAL_LIMIT + STOP_LIMIT, Act::Final);
                self.later(LOOK_EVERY, Act::Look);
            }
            Act::Final => self.last_look(),
        }
    }

    // ---- agents ----

    fn agent_of(&self, id: ServerId) -> Option<usize> {
        self.replicas.iter().rposition(|agent| agent.options.server == id && agent.is_running())
    }

    fn with_agent(&mut self, id: ServerId, what: impl FnOnce(&mut ReplicaAgent, &mut super::world::World)) {
        if let Some(agent) = self.agent_of(id) {
            what(&mut self.replicas[agent], &mut self.world);
        }
    }

    fn start_agent(&mut self, id: ServerId) {
        if self.agent_of(id).is_some() {
            return;
        }
        self.watch.given_back(id);
        let plan = self.plan.replicas[id.0 - FIRST_REPLICA].clone();
        // After the unrest nothing is to be refused.
        let replace = plan.follows_before || self.world.now >= UNREST;
        let sources = if self.plan.standby.as_ref().is_some_and(|standby| !standby.is_learned) { 2 } else { 1 };
        let args = options(id, &plan, sources, replace);
        let folder = self.folder.clone();
        let number = self.replicas.len();
        let agent =
            ReplicaAgent::start(&mut self.world, number, ReplicaOptions { server: id, args, folder, mode: plan.mode });
        self.replicas.push(agent);
    }

    /// The source ends without a word, and another one listens at its address.
    fn start_foreign_source(&mut self) {
        let Some(captured) = self.world.foreign.filter(|&id| self.world.server(id).alive) else { return };
        let world = &mut self.world;
        let of_the_place = self.sources.iter_mut().filter(|source| source.options.place == 0);
        of_the_place.for_each(|source| source.stop(world, true));
        // Its announcement is what the right one says: only the history tells them apart.
        let options = SourceOptions { captured, eager: true, ..self.plan.source.clone() };
        let source = SourceAgent::start(&mut self.world, self.sources.len(), options);
        self.sources.push(source);
    }

    fn start_source(&mut self) {
        let (foreign, world) = (self.world.foreign, &mut self.world);
        let foreign = self.sources.iter_mut().filter(|source| Some(source.options.captured) == foreign);
        foreign.for_each(|source| source.stop(world, true));
        if self.sources.iter().any(|source| source.is_running && source.options.place == 0) {
            return;
        }
        if !self.world.server(self.plan.source.captured).alive {
            return self.later(Duration::from_secs(2), Act::StartSource);
        }
        let source = SourceAgent::start(&mut self.world, self.sources.len(), self.plan.source.clone());
        self.sources.push(source);
    }

    fn start_standby(&mut self) {
        let Some(standby) = self.plan.standby.clone() else { return };
        if self.sources.iter().any(|source| source.is_running && source.options.place == 1) {
            return;
        }
        if !self.world.server(standby.source.captured).alive {
            return self.later(Duration::from_secs(2), Act::StartStandby);
        }
        let source = SourceAgent::start(&mut self.world, self.sources.len(), standby.source);
        self.sources.push(source);
    }

    // ---- servers ----

    /// `REPLICAOF` by hand.
    fn point(&mut self, id: ServerId, to: Option<ServerId>) {
        let server = self.world.server(id);
        if !server.alive || server.is_loading() {
            return;
        }
        let to = to.map(address);
        if id.0 >= FIRST_REPLICA {
            if server.follows == to {
                return; // nothing that an agent could notice
            }
            self.watch.taken_over(&self.world, id, self.replicas.len());
        }
        self.world.on(id, |server, step| server.replicaof(to, step));
        self.write(id);
    }

    /// `REPLICAOF NO ONE`, and then what the server follows, in one transaction.
    fn reattach(&mut self, id: ServerId) {
        let server = self.world.server(id);
        if !server.alive || server.is_loading() || server.follows.is_none() {
            return;
        }
        self.world.on(id, |server, step| {
            let to = server.follows.clone();
            server.replicaof(None, step);
            server.replicaof(to, step);
        });
    }

    fn write(&mut self, id: ServerId) {
        let length = 8 + self.world.draw.below(40) as usize;
        let mut command = vec![0; length];
        self.world.draw.fill(&mut command);
        let is_late = self.plan.has_late_commands && command[2] < LATE_OF_256;
        (command[0], command[1]) = (length as u8, if is_late { LATE } else { 1 });
        let before = self.world.server(id).offset;
        self.world.on(id, |server, step| server.write(&command, step));
        let (server, now) = (self.world.server(id), self.world.now);
        let (replid, offset) = (server.replid, server.offset);
        if is_late && offset > before {
            self.world.late.wrote(id, replid, offset, now);
        }
    }

    /// The primary's clients write this many bytes at once.
    fn write_bytes(&mut self, bytes: usize) {
        for _ in 0..=bytes / 255 {
            let mut command = [0; 255];
            self.world.draw.fill(&mut command);
            (command[0], command[1]) = (255, 1);
            self.world.on(PRIMARY, |server, step| server.write(&command, step));
        }
    }

    /// The clients of every primary write, and come again.
    pub(super) fn writes(&mut self) {
        for number in 0..self.world.servers.len() {
            if number == PRIMARY.0 || !self.world.one_in(4) {
                // A replica refuses it, and only agents use the servers of replicas until the operator does.
                let is_used = number < FIRST_REPLICA || self.watch.is_taken_over(ServerId(number));
                if is_used {
                    self.write(ServerId(number));
                }
            }
        }
        let pause = self.world.millis(2 * self.plan.write_every) * self.world.calm_factor();
        self.world.after(pause + Duration::from_millis(1), Event::Write);
    }

    // ---- after the unrest ----

    /// Puts right what the operator did. From here on nothing happens but writes.
    fn quiet(&mut self) {
        self.world.heal();
        self.world.memories.real.iter().for_each(Tables::calm);
        // With so low a limit a slow snapshot never succeeds.
        self.world.servers.iter_mut().for_each(|server| server.traits.output_limit = 1 << 20);
        for number in 0..self.world.servers.len() {
            self.do_it(Act::StartServer(ServerId(number)));
        }
        self.do_it(Act::SwitchBack);
        match self.plan.standby.as_ref().map(|standby| standby.stay) {
            None => self.do_it(Act::StartSource),
            Some([first, second]) => {
                self.do_it(if first { Act::StartSource } else { Act::KillSource });
                self.do_it(if second { Act::StartStandby } else { Act::KillStandby });
            }
        }
        self.later(LOOK_EVERY, Act::Look);
    }

    /// Starts agents for servers that are not in step; ends the schedule when all are.
    fn look(&mut self) {
        let primary = address(PRIMARY);
        let is_late = self.world.now > UNREST + WELL_LIMIT;
        let is_stopping = self.plan.acts.iter().any(|(_, act)| *act == Act::StopAll);
        match Watch::all_is_well(&self.world, &primary, &self.replicas) {
            Ok(()) if is_stopping => {
                if self.replicas.iter().all(|agent| !agent.is_running()) {
                    return self.last_look();
                }
            }
            Ok(()) => return self.later(Duration::from_millis(500), Act::StopAll),
            Err(text) if is_late && !is_stopping => return self.found(text),
            Err(_) if !is_stopping => self.help(),
            Err(_) => {}
        }
        self.later(LOOK_EVERY, Act::Look);
    }

    /// Starts an agent for each server that has none and is not in step.
    fn help(&mut self) {
        for number in FIRST_REPLICA..FIRST_REPLICA + self.plan.replicas.len() {
            let id = ServerId(number);
            let server = self.world.server(id);
            let is_well = server.is_up() && server.follows == Some(address(PRIMARY));
            // One that takes a full copy by itself is left alone.
            let helps_itself = server.is_copying() && server.follows == Some(address(PRIMARY));
            if !is_well && !helps_itself && self.agent_of(id).is_none() {
                self.start_agent(id);
            }
        }
    }

    fn last_look(&mut self) {
        if let Err(text) = Watch::all_is_well(&self.world, &address(PRIMARY), &self.replicas) {
            return self.found(text);
        }
        if self.replicas.iter().any(ReplicaAgent::is_running) {
            return self.found("an agent runs long after it was told to stop".to_string());
        }
        self.is_over = true;
    }
}

/// The server that an act is about.
fn of(act: Act) -> Option<ServerId> {
    match act {
        Act::Promote(id) | Act::Reattach(id) | Act::PointAtPrimary(id) | Act::PointAtSecond(id) | Act::Save(id) => {
            Some(id)
        }
        _ => None,
    }
}
