//! Relay: an agent's part in passing slots on: which lender it reads from, and what it lends itself. It follows
//! `reader/src/relay/`; the copy and its reader are the product's own.

use std::sync::Arc;
use std::time::Duration;

use remora_fabric::Memory;
use remora_protocol::{Join, LossCause, Message as Said, Offer, Relaying, Relays, Upstream};

use super::plan::RelayPlan;
use super::tables::Lent;
use super::wire::{End, Host};
use super::world::World;
use remora_delivery::simulated::{Copied, CopyWish, PeerLost, Whence};
use remora_reader::relay::Assignment;

/// How long a lender that cannot be reached is tried, and how long one may take to offer its copy: as in the product.
const REACH_LIMIT: Duration = Duration::from_secs(3);
const OFFER_LIMIT: Duration = Duration::from_secs(4);

/// The longest time that a conversation with a lender takes to begin, in milliseconds.
const BEGIN: u64 = 30;

/// See the module's text.
pub(super) struct Relay {
    agent: usize,
    host: Host,
    plan: RelayPlan,
    copy: Option<Copying>,
    /// The product's memory of what the source has said, and what it has said last in truth: the session to read from.
    assignment: Assignment,
    last_word: Option<(u64, Option<u64>)>,
    /// A lender that the source had taken away before it was read.
    withdrawn: Option<u64>,
    upstream: Option<Conversation>,
}

/// The copy that slots go into.
struct Copying {
    generation: u64,
    memory: Arc<Memory>,
    in_window: bool,
}

/// The conversation with the lender that the source has assigned.
struct Conversation {
    session: u64,
    /// The lending agent.
    lender: usize,
    began: Duration,
    /// When the lender is asked.
    due: Duration,
    is_read: bool,
}

/// What a look at the lender brings.
#[derive(Default)]
pub(super) struct News {
    pub(super) whence: Option<Whence>,
    /// For the source.
    pub(super) word: Option<Said>,
}

impl Relay {
    /// `link`: the agent's end of its server's link.
    pub(super) fn new(link: End, plan: RelayPlan) -> Relay {
        let agent = if let End::Link(agent, _) = link { agent } else { usize::MAX };
        Relay {
            agent,
            host: link.host(&[]),
            plan,
            copy: None,
            assignment: Assignment::default(),
            last_word: None,
            withdrawn: None,
            upstream: None,
        }
    }

    /// Opens the port for other agents, if slots are lent.
    pub(super) fn open(&self, world: &mut World) {
        if let Some(real) = world.memories.real.as_mut().filter(|_| self.plan.lends) {
            real.open_lender(self.agent, self.host, self.plan.lies);
        }
    }

    pub(super) fn close(&mut self, world: &mut World) {
        (self.copy, self.upstream) = (None, None);
        world.memories.real.iter_mut().for_each(|real| real.close_lender(self.agent));
    }

    /// Adds to a request what the source needs to know. A lender's port stands for its agent.
    pub(super) fn introduce(&self, request: Join) -> Join {
        let serves_at = if self.plan.lends { format!("10.9.0.0:{}", self.agent) } else { String::new() };
        Join { zone: self.plan.zone.to_owned(), relays: Some(Relays { serves_at }), ..request }
    }

    pub(super) fn wish(&self, kept: Option<Arc<Memory>>) -> CopyWish {
        CopyWish { slots: self.plan.slots, kept }
    }

    /// An offer has come, whose tables are connected next.
    pub(super) fn offered(&mut self, offer: &Offer) {
        self.assignment.offered();
        let session = offer.upstream.as_ref().map(|upstream| upstream.session);
        self.last_word = Some((offer.snapshot.generation, session));
    }

    /// Tables were connected: lends their copy, and reads from where the source has said last.
    pub(super) fn attached(
        &mut self,
        world: &mut World,
        offer: &Offer,
        copied: Option<Copied>,
        loaded: bool,
    ) -> Option<Whence> {
        let Some(Copied { memory, own, is_new }) = copied else {
            if !loaded {
                (self.copy, self.upstream) = (None, None);
            }
            return None;
        };
        let generation = offer.snapshot.generation;
        if is_new {
            self.upstream = None;
            if let Some(real) = &mut world.memories.real {
                real.lend(self.agent, generation, memory.clone(), own.slots);
            }
        }
        self.copy = Some(Copying { generation, memory, in_window: !offer.snapshot.retained });
        let upstream = self.assignment.of(offer);
        let session = upstream.as_ref().map(|upstream| upstream.session);
        if session.is_some() && self.last_word.is_some_and(|(of, word)| of == generation && word != session) {
            self.withdrawn = session;
        }
        self.read_from(world, upstream)
    }

    /// The source has assigned this lender for this generation.
    pub(super) fn assigned(
        &mut self,
        world: &mut World,
        generation: u64,
        upstream: Option<Upstream>,
    ) -> Option<Whence> {
        let is_ours = self.copy.as_ref().is_some_and(|copy| copy.generation == generation);
        self.assignment.assigned(generation, upstream.clone());
        self.last_word = Some((generation, upstream.as_ref().map(|upstream| upstream.session)));
        if is_ours { self.read_from(world, upstream) } else { None }
    }

    fn read_from(&mut self, world: &mut World, upstream: Option<Upstream>) -> Option<Whence> {
        let Some(Upstream { session, address, .. }) = upstream else {
            self.upstream = None;
            return Some(Whence::Source);
        };
        if self.upstream.as_ref().is_some_and(|present| present.session == session) {
            return None;
        }
        let lender = address.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(usize::MAX);
        let due = world.now + world.millis(BEGIN);
        self.upstream = Some(Conversation { session, lender, began: world.now, due, is_read: false });
        Some(Whence::Awaited)
    }

    /// Looks at the lender: asks for its copy, and notices its end.
    pub(super) fn look(&mut self, world: &mut World) -> News {
        let (Some(copy), Some(conversation)) = (&self.copy, &mut self.upstream) else { return News::default() };
        let Conversation { session, lender, began, due, is_read } = *conversation;
        let Some(real) = world.memories.real.as_mut().filter(|_| world.now >= due) else { return News::default() };
        let lost = |cause, text: &str| PeerLost { session, cause, text: text.to_string() };
        let Some(host) = real.host_of_lender(lender) else { return self.leave(lost(LossCause::Gone, "it is gone")) };
        if is_read {
            return News::default();
        }
        let (waited, is_cut) = (world.now - began, world.cut_until(self.host, host).is_some());
        let Some(real) = world.memories.real.as_mut().filter(|_| !is_cut) else {
            let gives_up = waited > REACH_LIMIT;
            return if gives_up { self.leave(lost(LossCause::Gone, "no way")) } else { News::default() };
        };
        match real.borrow(lender, copy.generation, &copy.memory) {
            Lent::Gone => self.leave(lost(LossCause::Gone, "its copy is gone")),
            Lent::NotYet if waited > OFFER_LIMIT => self.leave(lost(LossCause::Refused, "it offers nothing")),
            Lent::NotYet => News::default(),
            Lent::Copy(peer, slots) => {
                conversation.is_read = true;
                world.count("relay: a lender is read");
                News { whence: Some(Whence::Peer { session, peer, slots }), word: None }
            }
        }
    }

    fn leave(&mut self, lost: PeerLost) -> News {
        News { whence: Some(Whence::Left { session: lost.session }), word: self.lost(lost) }
    }

    /// The lender cannot be read any more. Returns the message for the source.
    pub(super) fn lost(&mut self, lost: PeerLost) -> Option<Said> {
        let PeerLost { session, cause, text } = lost;
        self.upstream.take_if(|present| present.session == session)?;
        let generation = self.copy.as_ref()?.generation;
        Some(Said::PeerLost { generation, session, cause, text })
    }

    /// All slots have arrived.
    pub(super) fn leave_upstream(&mut self) {
        self.upstream = None;
    }

    /// The copy has no more slots than the agent's memory has room for, and no lender is asked that was taken away.
    pub(super) fn within_limits(&self, relaying: &Relaying) -> Result<(), String> {
        if let Some(session) = self.withdrawn {
            return Err(format!("it asks a lender that the source had taken away (session {session})"));
        }
        let (slots, room) = (relaying.held.saturating_sub(relaying.oldest), self.plan.slots);
        if self.copy.is_some() && slots > u64::from(room) {
            return Err(format!("its copy holds {slots} slots and has room for {room}"));
        }
        Ok(())
    }

    /// Whether it has a copy.
    pub(super) fn has_a_copy(&self) -> bool {
        self.copy.is_some()
    }

    /// The first slot that the source must keep for this agent.
    pub(super) fn slots_below(&self, used: u64, held: u64) -> u64 {
        if self.copy.as_ref().is_some_and(|copy| copy.in_window) { used.max(held) } else { used }
    }
}
