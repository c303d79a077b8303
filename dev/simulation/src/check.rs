//! Check: what must hold in every schedule.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::oracle::Content;
use super::plan::FIRST_REPLICA;
use super::replica_agent::ReplicaAgent;
use super::server::{Changed, Server};
use super::wire::{Address, ServerId};
use super::world::{Change, World};

/// The time between an agent's look at a server and its change there. Both are commands on one connection; a server
/// that is busy lets the second wait.
const LOOK_LASTS: Duration = Duration::from_millis(300);

/// How long an agent may take from its signal to its end.
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(75);

/// How long a server may follow the link of an agent that has ended.
const LEFT_LIMIT: Duration = Duration::from_secs(3);

/// A server whose connections were cut by force within this time before an agent's end may have been out of its reach.
const OUT_OF_REACH: Duration = Duration::from_secs(60);

/// See the module's text.
#[derive(Default)]
pub(super) struct Watch {
    /// When the operator took a server over, and the number of agents by then.
    taken_over: BTreeMap<ServerId, (Duration, usize)>,
    /// When an agent last asked which primary its server follows.
    looked: BTreeMap<(usize, ServerId), Duration>,
    /// The servers that took a full copy at that moment.
    seen_copying: BTreeSet<(usize, ServerId)>,
    /// When an agent first asked which primary its server follows.
    first_looked: BTreeMap<(usize, ServerId), Duration>,
    /// When a server or its clients were last ended by force.
    out_of_reach: BTreeMap<ServerId, Duration>,
    /// When an agent first changed a server, what the server held then, and how many full copies it had applied.
    touched: BTreeMap<(usize, ServerId), (Duration, Content, u64)>,
    /// When an agent began to hand its server over.
    handing_over: BTreeMap<(usize, ServerId), Duration>,
}

impl Watch {
    pub(super) fn taken_over(&mut self, world: &World, id: ServerId, agents: usize) {
        self.taken_over.insert(id, (world.now, agents));
    }

    pub(super) fn is_taken_over(&self, id: ServerId) -> bool {
        self.taken_over.contains_key(&id)
    }

    /// The server is an agent's again.
    pub(super) fn given_back(&mut self, id: ServerId) {
        self.taken_over.remove(&id);
    }

    pub(super) fn out_of_reach(&mut self, world: &World, id: ServerId) {
        self.out_of_reach.insert(id, world.now);
    }

    /// A client has changed a server.
    pub(super) fn changed(&mut self, world: &World, agents: &[ReplicaAgent], change: &Change) -> Result<(), String> {
        let Some(number) = change.agent else { return Ok(()) };
        let (id, now) = (change.server, world.now);
        let key = (number, id);
        match &change.changed {
            Changed::Looked => {
                self.looked.insert(key, now);
                if world.server(id).is_copying() {
                    self.seen_copying.insert(key);
                } else {
                    self.seen_copying.remove(&key);
                }
                self.first_looked.entry(key).or_insert(now);
                return Ok(());
            }
            Changed::Nothing | Changed::Setting => return Ok(()),
            Changed::Follows { .. } | Changed::Emptied => {}
        }
        let Some(agent) = agents.get(number) else { return Ok(()) };
        self.full_copy_was_left(world, agent, change)?;
        let server = world.server(id);
        let held = (now, server.content, server.full_copies.1);
        let untouched = self.touched.insert(key, held).is_none_or(|before| {
            self.touched.insert(key, before);
            false
        });
        let Some(&(since, before)) = self.taken_over.get(&id) else { return Ok(()) };
        let as_found = matches!(&change.changed, Changed::Follows { before, .. } if *before == agent.found);
        // The agent was started before the operator's command, and found the server as the command had left it.
        let came_later = self.first_looked.get(&key).is_some_and(|first| *first > since);
        if untouched && as_found {
            // The operator has made it again what the agent found, so it is the agent's from now on.
            self.taken_over.remove(&id);
            return Ok(());
        }
        if number >= before || came_later {
            return Ok(());
        }
        let look = self.looked.get(&key).copied().unwrap_or_default();
        let (server, command) = (id.0, &change.command);
        if look > since {
            return Err(format!(
                "agent {number} says {command} to server {server}, which the operator took over before the agent's last look"
            ));
        }
        if now > look + LOOK_LASTS {
            return Err(format!(
                "agent {number} says {command} to server {server}, which the operator took over, without a look right before"
            ));
        }
        // Between a look and the change there is time for a command of the operator, which is then undone. What the
        // operator wrote is there.
        self.taken_over.remove(&id);
        self.touched.insert(key, held);
        Ok(())
    }

    /// A server that takes a full copy of its primary is left alone for as long as the agent was told to bear. A copy
    /// can begin between the agent's look and its command.
    fn full_copy_was_left(&mut self, world: &World, agent: &ReplicaAgent, change: &Change) -> Result<(), String> {
        let Changed::Follows { before, was_copying } = &change.changed else { return Ok(()) };
        let link = format!("REPLICAOF {} {}", agent.link.host, agent.link.port);
        let key = (agent.index, change.server);
        if change.command != link {
            self.handing_over.insert(key, world.now);
            return Ok(());
        }
        let Some(&since) = self.handing_over.get(&key) else { return Ok(()) };
        let bears = agent.options.args.read.retry_for.saturating_sub(Duration::from_secs(2));
        let is_early = world.now < since + bears && agent.stopped.is_none();
        let was_seen = *was_copying && self.seen_copying.contains(&key);
        if was_seen && is_early && before.as_ref() != Some(&agent.link) {
            let (number, server) = (agent.index, change.server.0);
            return Err(format!("agent {number} ends the full copy that server {server} takes by itself"));
        }
        Ok(())
    }

    /// What every server says of itself is true.
    pub(super) fn servers(world: &mut World) -> Result<(), String> {
        let touched = std::mem::take(&mut world.touched);
        let is_able = |server: &&Server| server.is_up() && server.refused_from.is_empty();
        for server in touched.into_iter().map(|id| world.server(id)).filter(is_able) {
            let is_foreign = |id: ServerId| server.traits.id != id && server.replid == world.server(id).replid;
            if world.foreign.is_some_and(is_foreign) {
                return Err(format!("server {} was given the data set of another primary", server.traits.id.0));
            }
            let expected = world.oracle.expected(server.replid, server.offset);
            if expected != Some(server.content) {
                return Err(format!(
                    "server {} says that it is in step at offset {} of {}, and holds {:x?} instead of {expected:x?}",
                    server.traits.id.0, server.offset, server.replid, server.content
                ));
            }
        }
        Ok(())
    }

    /// No memory grows beyond its limit: rings and journals of sources, and copies that are lent.
    pub(super) fn memory(world: &World, agents: &[ReplicaAgent]) -> Result<(), String> {
        world.memories.within_limits()?;
        agents
            .iter()
            .filter(|agent| agent.is_running())
            .try_for_each(|agent| agent.within_limits().map_err(|text| format!("agent {}: {text}", agent.index)))
    }

    /// Agents end after their signal, and leave no server behind on their link.
    pub(super) fn agents(&self, world: &World, agents: &[ReplicaAgent]) -> Result<(), String> {
        for agent in agents {
            let number = agent.index;
            if agent.ended == Some(world.now) {
                self.ended(world, agent)?;
            }
            if let (Some(stopped), None) = (agent.stopped, agent.ended)
                && world.now > stopped + STOP_LIMIT
            {
                return Err(format!("agent {number} was told to stop {STOP_LIMIT:?} ago and runs"));
            }
            let Some(ended) = agent.ended.filter(|_| !agent.killed) else { continue };
            let server = world.server(agent.options.server);
            let follows = server.alive && server.follows.as_ref() == Some(&agent.link);
            let cut = self.out_of_reach.get(&agent.options.server);
            let was_in_reach = cut.is_none_or(|&cut| cut + OUT_OF_REACH < ended);
            if follows && was_in_reach && world.now > ended + LEFT_LIMIT {
                let outcome = &agent.outcome;
                return Err(format!(
                    "server {} follows agent {number}, which has ended: {outcome:?}",
                    agent.options.server.0
                ));
            }
        }
        Ok(())
    }

    /// What an agent says at its end of the data that it leaves is true.
    pub(super) fn ended(&self, world: &World, agent: &ReplicaAgent) -> Result<(), String> {
        let (number, id) = (agent.index, agent.options.server);
        let Some(&(since, held, copies)) = self.touched.get(&(number, id)) else { return Ok(()) };
        // What came from a primary since the hand-off is no matter of the agent.
        let is_of_a_server = |from: &Address| world.servers.iter().any(|server| server.traits.address == *from);
        let refused = world.server(id).refused_in_this_run().any(|from| !is_of_a_server(from));
        if agent.outcome == Some(Ok(())) && refused {
            return Err(format!(
                "agent {number} says that all is well, and server {} could not execute its stream",
                id.0
            ));
        }
        if !world.server(id).refused_from.is_empty() {
            return Ok(());
        }
        let says = |text: &str| matches!(&agent.outcome, Some(Err(failure)) if failure.message.contains(text));
        let restarted = self.out_of_reach.get(&id).is_some_and(|&cut| cut >= since);
        // A server that its former primary has continued meanwhile holds what it held before, and the writes since
        // then. The link may be down again.
        let server = world.server(id);
        let is_exact = world.oracle.expected(server.replid, server.offset) == Some(server.content);
        let is_continued = is_exact && server.full_copies.1 == copies;
        let is_as_before = server.content == held || is_continued;
        if says("holds what it held before") && !is_as_before && !restarted && !self.is_taken_over(id) {
            return Err(format!(
                "agent {number} says that server {} holds what it held before, which is not so: it held {held:x?} at {since:?}, \
                 and holds {:x?}",
                id.0, server.content
            ));
        }
        Ok(())
    }

    /// Whether every server is an exact replica of the primary at this address, or fed by an agent that stays.
    pub(super) fn all_is_well(world: &World, primary: &Address, agents: &[ReplicaAgent]) -> Result<(), String> {
        let feeds = |agent: &ReplicaAgent| world.server(agent.options.server).follows.as_ref() == Some(&agent.link);
        let is_at_work = |agent: &&ReplicaAgent| agent.is_running() && !(agent.options.args.stay && feeds(agent));
        if let Some(agent) = agents.iter().find(is_at_work) {
            return Err(format!("agent {} is still at work long after the last fault", agent.index));
        }
        for server in world.servers[FIRST_REPLICA..].iter().filter(|server| Some(server.traits.id) != world.foreign) {
            let fed = agents.iter().any(|agent| agent.is_running() && server.follows.as_ref() == Some(&agent.link));
            let follows = server.follows.as_ref() == Some(primary) || fed;
            let last = agents.iter().rfind(|agent| agent.options.server == server.traits.id);
            let was_interrupted = last.is_some_and(ReplicaAgent::was_interrupted);
            if was_interrupted && server.follows.is_none() {
                continue; // the signal came before it had loaded, and the agent has detached it
            }
            if !server.is_up() || !follows {
                return Err(format!(
                    "server {} is not in step long after the last fault: it follows {:?}",
                    server.traits.id.0, server.follows
                ));
            }
        }
        Ok(())
    }
}
