//! Plan: what a seed chooses: the servers, how the agents are started, and what the operator does when.

use std::num::NonZeroU32;
use std::time::Duration;

use remora_fabric::sim::Random;

use super::wire::{Address, ServerId};

/// The server whose data the others are to get.
pub(super) const PRIMARY: ServerId = ServerId(0);

/// A replica of it that no agent touches. A source may stand beside it.
pub(super) const SECOND: ServerId = ServerId(1);

/// The servers that agents make replicas, from this number on.
pub(super) const FIRST_REPLICA: usize = 2;

/// The part of a schedule in which the operator does things.
pub(super) const UNREST: Duration = Duration::from_secs(60);

/// What stands in the place of the delivery thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// An actor that moves numbers of slots.
    Model,
    /// The real delivery, which reads real tables; `spool`: with a folder of slots that outlive the agent; `relay`: it
    /// passes slots on.
    Bytes { spool: bool, relay: Option<RelayPlan> },
}

/// How an agent passes slots on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RelayPlan {
    pub(super) lends: bool,
    /// What it lends has wrong bytes.
    pub(super) lies: bool,
    /// Slots of its copy.
    pub(super) slots: u32,
    pub(super) zone: &'static str,
}

/// One thing that the operator does, or that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    StartAgent(ServerId),
    StopAgent(ServerId),
    KillAgent(ServerId),
    /// All connections of an agent to its server end.
    KillClients(ServerId),
    /// The lane over which an agent reads breaks.
    BreakLane(ServerId),
    /// `REPLICAOF NO ONE`, and writes.
    Promote(ServerId),
    /// `REPLICAOF NO ONE` and back, at once: the server has another history then, and the agent does not see it
    /// detached.
    Reattach(ServerId),
    /// `REPLICAOF` the primary, by hand.
    PointAtPrimary(ServerId),
    /// `REPLICAOF` the second server, by hand.
    PointAtSecond(ServerId),
    /// `SHUTDOWN SAVE`, and a start.
    Restart(ServerId),
    /// A kill, and a start.
    Crash(ServerId),
    StartServer(ServerId),
    /// `BGSAVE`.
    Save(ServerId),
    /// The primary becomes a replica of the second server, which is promoted.
    SwitchRoles,
    SwitchBack,
    StopSource,
    KillSource,
    StartSource,
    /// The same for the second source.
    KillStandby,
    StartStandby,
    /// The hosts of both sources do not reach each other, or only slowly.
    CutSources,
    SlowSources,
    /// A server does not reach the second source.
    CutStandby,
    /// The source's name leads to the source of another primary.
    ForeignSource,
    /// Any connection breaks.
    CutConnection,
    /// The link of a server to an agent breaks, and what is under way is lost.
    CutLink(ServerId),
    /// Two hosts do not reach each other.
    CutHosts,
    /// Many writes at once.
    Burst,
    /// Writes of more bytes than the primary's backlog holds, at once: stands for one long value.
    LongWrite,
    /// Many writes at once: a link that was not sent them for a while gets them in many pieces.
    Flood,
    FlushPrimary,
    Quiet,
    /// Whether all is well by now.
    Look,
    StopAll,
    Final,
}

/// How one replica's server and its agents are.
#[derive(Clone, Debug)]
pub(super) struct ReplicaPlan {
    pub(super) module: bool,
    pub(super) valkey: bool,
    pub(super) idle_limit: Duration,
    pub(super) pace: Duration,
    /// It is a replica of the primary before its first agent starts.
    pub(super) follows_before: bool,
    /// It holds other keys before.
    pub(super) has_keys: bool,
    pub(super) stay: bool,
    pub(super) keep_on_failure: bool,
    pub(super) retry_for: u64,
    pub(super) mode: Mode,
    /// The server lacks a command of the stream.
    pub(super) lacks_a_command: bool,
}

/// How a source was started.
#[derive(Clone, Debug)]
pub(super) struct SourceOptions {
    pub(super) captured: ServerId,
    pub(super) announce: Address,
    pub(super) eager: bool,
    /// Slots that its memory holds, and whether it promises that they stay.
    pub(super) room: u64,
    pub(super) retained: bool,
    pub(super) journal: usize,
    pub(super) max_age: Duration,
    /// Agents that may load at the same time.
    pub(super) at_once: Option<NonZeroU32>,
    /// Which of the two addresses of sources it has.
    pub(super) place: usize,
    /// Set if it stands by for the source of the other place: for how long it takes no snapshot of its own.
    pub(super) standby: Option<Duration>,
}

/// Two sources, of which one stands by for the other, or each for the other.
#[derive(Clone, Debug)]
pub(super) struct StandbyPlan {
    /// The second source.
    pub(super) source: SourceOptions,
    /// Agents know the first one's address only, until it tells them the second one's.
    pub(super) is_learned: bool,
    /// Which of the two serve in the end.
    pub(super) stay: [bool; 2],
}

/// See the module's text.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// The primary and the second server write the snapshots of syncs to files first.
    pub(super) saves_to_file: bool,
    pub(super) backlog: usize,
    pub(super) output_limit: usize,
    pub(super) slots: u64,
    pub(super) pace: Duration,
    pub(super) write_every: u64,
    pub(super) source: SourceOptions,
    pub(super) standby: Option<StandbyPlan>,
    pub(super) replicas: Vec<ReplicaPlan>,
    pub(super) acts: Vec<(Duration, Act)>,
    pub(super) traps: Vec<Trap>,
    /// There is another primary, with a data set of its own.
    pub(super) foreign: bool,
    /// Some writes must not be applied late.
    pub(super) has_late_commands: bool,
    /// The primary and the second server have private output buffers.
    pub(super) private_buffers: bool,
}

/// The stream of randomness that says which servers lack a command: apart, so that seeds choose the same otherwise.
const LACKING: u64 = 17;

/// The same for how many agents may load at once.
const TURNS: u64 = 18;

/// The same for a second source, which one schedule in this many has.
const STANDBY: u64 = 19;
const STANDBY_ONE_IN: u64 = 5;

/// What a standby is about to do when faults are placed.
const COPY_JOBS: [&str; 4] = ["Copy", "CopyRecords", "CopyLinked", "CopyWhole"];

/// Something that happens soon after an agent has begun with a job on its server.
#[derive(Clone, Debug)]
pub(super) struct Trap {
    pub(super) server: ServerId,
    /// The job's name.
    pub(super) job: &'static str,
    /// What happens, and how long after.
    pub(super) acts: Vec<(Duration, Act)>,
}

/// One schedule in this many has another primary, to whose source the source's name leads for a while.
const FOREIGN_ONE_IN: u64 = 8;

/// One schedule in this many has writes that must not be applied late.
const LATE_ONE_IN: u64 = 4;

/// One schedule in this many has a server that is reattached while it is handed over, within this number of
/// milliseconds after it begins to settle.
const REATTACHED_ONE_IN: u64 = 6;
const REATTACHED_WITHIN: u64 = 12;

/// One schedule in this many has primaries with private output buffers.
const PRIVATE_ONE_IN: u64 = 4;

/// One schedule in this many has primaries with a backlog that is too small for a pin, and of how many bytes.
const TINY_ONE_IN: u64 = 6;
const TINY: usize = 400;

/// One schedule in this many has writes that are longer than the primary's backlog.
const LONG_ONE_IN: u64 = 2;

/// One schedule in this many has agents with a real delivery.
const BYTES_ONE_IN: u64 = 16;

/// Of these, one in this many has agents that pass slots on to each other.
const RELAYS_ONE_IN: u64 = 2;

/// The jobs at which faults are placed.
const JOBS: [&str; 9] = [
    "Prepare",
    "Follow",
    "Introduce",
    "AskOffset",
    "Settle",
    "PointAtPrimary",
    "AskPrimaryLink",
    "ReturnToLink",
    "Leave",
];

pub(super) fn address(id: ServerId) -> Address {
    Address { host: format!("10.0.0.{}", id.0 + 1), port: 6379 }
}

impl Plan {
    /// Whether an agent has the real delivery.
    pub(super) fn has_a_real_delivery(&self) -> bool {
        self.replicas.iter().any(|replica| replica.mode != Mode::Model)
    }

    /// Whether links break that a real delivery feeds for long.
    #[cfg(test)]
    pub(super) fn cuts_real_links(&self) -> bool {
        self.acts.iter().any(|(_, act)| matches!(act, Act::CutLink(_)))
    }

    /// Whether a server lacks a command of the stream.
    #[cfg(test)]
    pub(super) fn has_a_server_that_lacks_a_command(&self) -> bool {
        self.replicas.iter().any(|replica| replica.lacks_a_command)
    }

    /// Whether there is a second source.
    #[cfg(test)]
    pub(super) fn has_a_standby(&self) -> bool {
        self.standby.is_some()
    }

    /// Whether a server is reattached while it is handed over.
    #[cfg(test)]
    pub(super) fn reattaches(&self) -> bool {
        let is_it = |(_, act): &(Duration, Act)| matches!(act, Act::Reattach(_));
        self.traps.iter().any(|trap| trap.acts.iter().any(is_it))
    }

    /// Whether something happens to an agent while it has a job on a server with the module.
    #[cfg(test)]
    pub(super) fn has_traps_at_a_module(&self) -> bool {
        let replica = |trap: &Trap| self.replicas.get(trap.server.0.checked_sub(FIRST_REPLICA)?);
        self.traps.iter().filter_map(replica).any(|replica| replica.module)
    }

    /// Whether writes are longer than the backlog, which is large enough to be pinned.
    #[cfg(test)]
    pub(super) fn has_long_writes_that_can_be_pinned(&self) -> bool {
        !self.private_buffers && self.backlog > TINY && self.acts.iter().any(|(_, act)| *act == Act::LongWrite)
    }

    /// Whether much is written during a snapshot, and the backlog holds what the source's link was not sent.
    #[cfg(test)]
    pub(super) fn floods_a_shared_buffer(&self) -> bool {
        let floods = |trap: &Trap| trap.acts.iter().any(|(_, act)| *act == Act::Flood);
        !self.private_buffers && self.output_limit > 1500 && self.traps.iter().any(floods)
    }

    /// Whether agents pass slots on to each other.
    #[cfg(test)]
    pub(super) fn has_relays(&self) -> bool {
        self.replicas.iter().any(|replica| matches!(replica.mode, Mode::Bytes { relay: Some(_), .. }))
    }

    /// The plan of a seed.
    pub(super) fn of(seed: u64) -> Plan {
        let mut draw = Random::split(seed, 0);
        let mut chance = |number: u64| draw.below(number) == 0;
        let beside_second = chance(4);
        let (eager, retained, small_journal, young) = (chance(3), !chance(4), chance(6), chance(5));
        let source = SourceOptions {
            captured: if beside_second { SECOND } else { PRIMARY },
            announce: address(PRIMARY),
            eager,
            room: 8 + draw.below(20),
            retained,
            journal: if small_journal { 2000 } else { 100_000 },
            max_age: Duration::from_secs(if young { 10 } else { 300 }),
            at_once: NonZeroU32::new(u32::from(Random::split(seed, TURNS).below(4) == 0)),
            place: 0,
            standby: None,
        };
        let number = 1 + draw.below(3) as usize;
        let mut replicas: Vec<ReplicaPlan> = (0..number).map(|_| ReplicaPlan::drawn(&mut draw)).collect();
        draw_modes(seed, &mut replicas);
        let mut lacking = Random::split(seed, LACKING);
        replicas.iter_mut().for_each(|replica| replica.lacks_a_command = lacking.below(8) == 0);
        let mut acts = acts(&mut draw, number);
        cut_links(seed, &replicas, &mut acts);
        let mut traps: Vec<Trap> = (0..draw.below(4)).map(|_| Trap::drawn(&mut draw, number)).collect();
        traps.extend(Trap::reattaching(seed, number));
        let foreign = lead_elsewhere(seed, &mut acts);
        write_long(seed, number, &mut acts, &mut traps);
        let mut source = source;
        let standby = stand_by(seed, &mut source, &mut replicas, &mut acts, &mut traps);
        let backlog = [1500, 6000, 40_000][draw.below(3) as usize];
        let is_tiny = Random::split(seed, 9).below(TINY_ONE_IN) == 0;
        let slow = draw.below(5) == 0;
        Plan {
            foreign,
            saves_to_file: Random::split(seed, 6).below(2) == 0,
            backlog: if is_tiny { TINY } else { backlog },
            output_limit: if draw.below(5) == 0 { 1500 } else { 1 << 20 },
            slots: 3 + draw.below(25),
            pace: Duration::from_millis(if slow { 300 + draw.below(1500) } else { 1 + draw.below(80) }),
            write_every: 40 + draw.below(200),
            source,
            has_late_commands: Random::split(seed, 7).below(LATE_ONE_IN) == 0 && standby.is_none(),
            standby,
            replicas,
            acts,
            traps,
            private_buffers: Random::split(seed, 8).below(PRIVATE_ONE_IN) == 0,
        }
    }
}

/// Adds a second source, some times, and what happens to both.
fn stand_by(
    seed: u64,
    first: &mut SourceOptions,
    replicas: &mut [ReplicaPlan],
    acts: &mut Vec<(Duration, Act)>,
    traps: &mut Vec<Trap>,
) -> Option<StandbyPlan> {
    let mut draw = Random::split(seed, STANDBY);
    if draw.below(STANDBY_ONE_IN) > 0 {
        return None;
    }
    // What is copied is the model's slots.
    replicas.iter_mut().for_each(|replica| replica.mode = Mode::Model);
    let beside_second = draw.below(3) == 0;
    let waits = Duration::from_secs([3, 10, 30][draw.below(3) as usize]);
    let standby = Some(waits);
    let captured = if beside_second { SECOND } else { PRIMARY };
    if draw.below(3) == 0 {
        first.standby = Some(waits);
    }
    // Without that no snapshot can be copied.
    first.retained |= draw.below(4) > 0;
    let source = SourceOptions { captured, eager: false, place: 1, standby, ..first.clone() };
    let is_learned = draw.below(3) == 0;
    let stay = match draw.below(3) {
        0 => [true, false],
        1 if !is_learned => [false, true],
        _ => [true; 2],
    };
    acts.push((Duration::from_millis(draw.below(6000)), Act::StartStandby));
    for _ in 0..draw.below(6) {
        let time = Duration::from_secs(3) + Duration::from_millis(draw.below(45_000));
        let soon = time + Duration::from_millis(draw.below(9000));
        acts.extend(fault_of_a_source(&mut draw, time, soon));
    }
    for job in COPY_JOBS {
        for _ in 0..draw.below(3) {
            let time = Duration::from_millis(draw.below(30));
            let soon = time + Duration::from_millis(draw.below(4000));
            let faults = fault_of_a_source(&mut draw, time, soon);
            traps.push(Trap { server: captured, job, acts: faults });
        }
    }
    // While servers load.
    for (replica, number) in replicas.iter_mut().zip(FIRST_REPLICA..) {
        if draw.below(2) == 0 {
            replica.pace += Duration::from_millis(draw.below(300));
            let (time, soon) = (Duration::from_millis(draw.below(1500)), Duration::from_secs(2 + draw.below(9)));
            let acts = vec![(time, Act::KillSource), (time + soon, Act::StartSource)];
            traps.push(Trap { server: ServerId(number), job: "Follow", acts });
        }
    }
    Some(StandbyPlan { source, is_learned, stay })
}

/// A fault of a source, its servers or the ways between them, and its end.
fn fault_of_a_source(draw: &mut Random, time: Duration, soon: Duration) -> Vec<(Duration, Act)> {
    match draw.below(10) {
        0..=2 => vec![(time, Act::KillSource), (soon, Act::StartSource)],
        3 => vec![(time, Act::StopSource), (soon, Act::StartSource)],
        4 => vec![(time, Act::KillStandby), (soon, Act::StartStandby)],
        5 => vec![(time, Act::CutSources)],
        6 => vec![(time, Act::SlowSources)],
        7 => vec![(time, Act::CutStandby)],
        8 => vec![(time, Act::Restart(PRIMARY)), (soon, Act::StartServer(PRIMARY))],
        _ => vec![(time, Act::LongWrite), (time, Act::LongWrite)],
    }
}

/// Has the source's name lead to another primary's source for a while, some times. Returns whether it does.
fn lead_elsewhere(seed: u64, acts: &mut Vec<(Duration, Act)>) -> bool {
    let mut draw = Random::split(seed, 6);
    if draw.below(FOREIGN_ONE_IN) > 0 {
        return false;
    }
    for _ in 0..1 + draw.below(3) {
        let time = Duration::from_secs(2) + Duration::from_millis(draw.below(40_000));
        acts.push((time, Act::ForeignSource));
        acts.push((time + Duration::from_millis(500 + draw.below(12_000)), Act::StartSource));
    }
    true
}

/// Writes more than the backlog holds at once: at any time, and while servers go to their primary.
fn write_long(seed: u64, replicas: usize, acts: &mut Vec<(Duration, Act)>, traps: &mut Vec<Trap>) {
    let mut draw = Random::split(seed, 10);
    if draw.below(LONG_ONE_IN) > 0 {
        return;
    }
    for _ in 0..draw.below(12) {
        acts.push((Duration::from_secs(1) + Duration::from_millis(draw.below(40_000)), Act::LongWrite));
    }
    for number in 0..replicas {
        let server = ServerId(FIRST_REPLICA + number);
        for job in ["AskOffset", "Settle", "PointAtPrimary"] {
            if draw.below(2) == 0 {
                let time = Duration::from_millis(draw.below(20));
                traps.push(Trap { server, job, acts: vec![(time, Act::LongWrite)] });
            }
        }
        if draw.below(2) == 0 {
            // While the source receives the snapshot: its link is sent the stream behind it.
            traps.push(Trap { server, job: "Prepare", acts: vec![(Duration::ZERO, Act::Flood)] });
        }
    }
}

/// Breaks the links of servers that a real delivery feeds for long, while much is under way.
fn cut_links(seed: u64, replicas: &[ReplicaPlan], acts: &mut Vec<(Duration, Act)>) {
    let mut draw = Random::split(seed, 5);
    for (replica, number) in replicas.iter().zip(FIRST_REPLICA..) {
        let times = if replica.stay && replica.mode != Mode::Model { draw.below(4) } else { 0 };
        for _ in 0..times {
            let time = Duration::from_secs(12) + Duration::from_millis(draw.below(38_000));
            acts.push((time, Act::Burst));
            acts.push((time + Duration::from_millis(draw.below(150)), Act::CutLink(ServerId(number))));
        }
    }
}

/// Chooses the agents with a real delivery. Their schedules take much longer, so that most schedules have none.
fn draw_modes(seed: u64, replicas: &mut [ReplicaPlan]) {
    let mut draw = Random::split(seed, 3);
    if draw.below(BYTES_ONE_IN) > 0 {
        return;
    }
    for replica in replicas.iter_mut() {
        let (bytes, spool) = (draw.below(4) > 0, draw.below(3) == 0);
        if bytes {
            replica.mode = Mode::Bytes { spool, relay: None };
        }
    }
    let mut draw = Random::split(seed, 4);
    if draw.below(RELAYS_ONE_IN) > 0 {
        return;
    }
    // All take part, so that there are chains.
    for replica in replicas {
        let relay = RelayPlan {
            lends: draw.below(4) > 0,
            lies: draw.below(5) == 0,
            slots: 2 + draw.below(30) as u32,
            zone: if draw.below(4) == 0 { "far" } else { "" },
        };
        replica.mode = Mode::Bytes { spool: false, relay: Some(relay) };
    }
}

#[cfg(test)]
impl Plan {
    /// Whether a primary may lose its history while a server is on its way to it, and sends its data slowly then.
    pub(super) fn may_copy_for_long_at_the_hand_off(&self) -> bool {
        let on_the_way = ["Settle", "PointAtPrimary", "AskPrimaryLink"];
        let is_lost = |act: &Act| matches!(act, Act::Crash(id) | Act::Restart(id) if *id == PRIMARY);
        let lasts = |pace: Duration| pace * self.slots as u32 > Duration::from_secs(20);
        self.traps.iter().any(|trap| {
            let replica = trap.server.0.checked_sub(FIRST_REPLICA).and_then(|number| self.replicas.get(number));
            on_the_way.contains(&trap.job)
                && trap.acts.iter().any(|(_, act)| is_lost(act))
                && (lasts(self.pace) || replica.is_some_and(|replica| lasts(replica.pace)))
        })
    }
}

impl Trap {
    fn reattaching(seed: u64, replicas: usize) -> Option<Trap> {
        let mut draw = Random::split(seed, 8);
        let server = ServerId(FIRST_REPLICA + draw.below(replicas as u64) as usize);
        let acts = vec![(Duration::from_millis(draw.below(REATTACHED_WITHIN)), Act::Reattach(server))];
        (draw.below(REATTACHED_ONE_IN) == 0).then_some(Trap { server, job: "Settle", acts })
    }

    fn drawn(draw: &mut Random, replicas: usize) -> Trap {
        let server = ServerId(FIRST_REPLICA + draw.below(replicas as u64) as usize);
        let job = JOBS[draw.below(JOBS.len() as u64) as usize];
        let most = if draw.below(3) == 0 { 4000 } else { 50 };
        let time = Duration::from_millis(draw.below(most));
        let soon = time + Duration::from_millis(1 + draw.below(3000));
        let acts = match draw.below(11) {
            0..=2 => vec![(time, Act::KillAgent(server)), (soon, Act::PointAtPrimary(server))],
            3 => vec![(time, Act::StopAgent(server))],
            4 => vec![(time, Act::Promote(server)), (soon, Act::StopAgent(server))],
            5 => vec![(time, Act::Crash(server)), (soon, Act::StartServer(server))],
            6 => vec![(time, Act::Restart(PRIMARY)), (soon, Act::StartServer(PRIMARY))],
            7 | 8 => vec![(time, Act::Crash(PRIMARY)), (soon, Act::StartServer(PRIMARY))],
            9 => vec![(time, Act::KillSource), (soon, Act::StartSource)],
            _ => vec![(time, Act::KillClients(server))],
        };
        Trap { server, job, acts }
    }
}

impl ReplicaPlan {
    fn drawn(draw: &mut Random) -> ReplicaPlan {
        let mut chance = |number: u64| draw.below(number) == 0;
        let (module, valkey, idle, stay, keep) = (chance(3), chance(2), chance(3), chance(3), chance(4));
        let follows_before = chance(2);
        let has_keys = chance(4);
        ReplicaPlan {
            module,
            valkey,
            idle_limit: Duration::from_secs(if idle { 3 + draw.below(4) } else { 0 }),
            pace: Duration::from_millis(if draw.below(6) == 0 { 400 + draw.below(2000) } else { 1 + draw.below(60) }),
            follows_before,
            has_keys,
            stay,
            keep_on_failure: keep,
            retry_for: [5, 30, 120][draw.below(3) as usize],
            mode: Mode::Model,
            lacks_a_command: false,
        }
    }
}

/// What happens during the unrest.
fn acts(draw: &mut Random, replicas: usize) -> Vec<(Duration, Act)> {
    let mut acts = vec![];
    let mut at = |time: Duration, act: Act| acts.push((time, act));
    let millis = |draw: &mut Random, most: u64| Duration::from_millis(draw.below(most));
    let source = millis(draw, 3000);
    at(source, Act::StartSource);
    for number in 0..replicas {
        let time = Duration::from_secs(1) + millis(draw, 12_000);
        at(time, Act::StartAgent(ServerId(FIRST_REPLICA + number)));
    }
    let number = draw.below(9);
    for _ in 0..number {
        let time = Duration::from_secs(2) + millis(draw, 50_000);
        let of = ServerId(FIRST_REPLICA + draw.below(replicas as u64) as usize);
        let soon = time + millis(draw, 6000);
        match draw.below(26) {
            0 => at(time, Act::StopAgent(of)),
            // Stopped, killed or pointed elsewhere at once: what an operator's script does.
            1 | 2 => {
                at(time, Act::Promote(of));
                let end = if draw.below(2) == 0 { Act::StopAgent(of) } else { Act::KillAgent(of) };
                at(time + millis(draw, 3000), end);
            }
            3..=6 => {
                at(time, Act::KillAgent(of));
                let next = if draw.below(3) == 0 { Act::StartAgent(of) } else { Act::PointAtPrimary(of) };
                at(time + millis(draw, 3000), next);
            }
            7 => at(time, Act::KillClients(of)),
            8 => at(time, Act::BreakLane(of)),
            9 => at(time, Act::Promote(of)),
            10 => {
                at(time, if draw.below(2) == 0 { Act::PointAtPrimary(of) } else { Act::PointAtSecond(of) });
                at(time + millis(draw, 3000), Act::StopAgent(of));
            }
            11 => {
                at(time, Act::Restart(of));
                at(soon, Act::StartServer(of));
            }
            12 => {
                at(time, Act::Crash(of));
                at(soon, Act::StartServer(of));
            }
            13..=15 => {
                at(time, Act::Restart(PRIMARY));
                at(soon, Act::StartServer(PRIMARY));
            }
            16 => {
                at(time, Act::Crash(PRIMARY));
                at(soon, Act::StartServer(PRIMARY));
            }
            17 => at(time, Act::Save(PRIMARY)),
            18 => {
                at(time, Act::SwitchRoles);
                at(soon + millis(draw, 10_000), Act::SwitchBack);
            }
            19 => {
                at(time, Act::Promote(SECOND));
                at(soon + millis(draw, 10_000), Act::PointAtPrimary(SECOND));
            }
            20 => {
                let end = if draw.below(2) == 0 { Act::StopSource } else { Act::KillSource };
                at(time, end);
                at(soon, Act::StartSource);
            }
            21 | 22 => at(time, Act::CutConnection),
            23 => at(time, Act::CutHosts),
            24 => at(time, Act::Burst),
            _ => at(time, Act::FlushPrimary),
        }
    }
    acts.push((UNREST, Act::Quiet));
    acts
}
