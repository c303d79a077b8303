//! Flushing: what is durable. A flush is complete when as many whole copies as must hold a write say that everything up
//! to the last write before it is durable there.
//!
//! A copy without a store says that what it has applied is durable. It is not asked: its answers to writes say it.

use std::collections::{BTreeMap, BTreeSet};

use super::Action;
use super::Writer;
use crate::message::{Request, ServerId};
#[cfg(test)]
use crate::mutant::Mutant;
use crate::version::Version;

/// What is known of the copies' durability.
#[derive(Debug, Default)]
pub(super) struct Flushing {
    /// What is durable at each member.
    durable: BTreeMap<ServerId, Version>,
    /// The last write before the last flush that each was asked for.
    asked: BTreeMap<ServerId, Version>,
    /// Servers that have a store: they once had applied what was not durable.
    stores: BTreeSet<ServerId>,
    /// The last write before the last flush.
    wanted: Version,
    /// The last write that is durable at enough copies.
    flushed: Version,
}

impl Flushing {
    /// A member has answered.
    pub(super) fn answered(&mut self, server: ServerId, applied: Version, durable: Version) {
        if durable < applied {
            self.stores.insert(server);
        }
        self.durable.insert(server, durable);
    }

    /// A server is out, and what it was asked is not answered.
    pub(super) fn lost(&mut self, server: ServerId) {
        self.durable.remove(&server);
        self.asked.remove(&server);
    }

    /// Whether a copy that was sent the writes up to `sent` must be asked: it has not all of them that is wanted, and
    /// its answers to writes will not say it.
    fn must_ask(&mut self, server: ServerId, applied: Version, sent: Version) -> bool {
        let wanted = self.wanted.min(sent);
        let durable = self.durable.get(&server).copied().unwrap_or_default();
        let is_store = self.stores.contains(&server) || (applied >= wanted && durable < applied);
        let is_asked = self.asked.get(&server).is_some_and(|&asked| asked >= wanted);
        let must = is_store && !is_asked && durable < wanted;
        if must {
            self.asked.insert(server, wanted);
        }
        must
    }
}

impl Writer {
    /// Begins a flush of every write so far. Returns the last one: [`Action::Flushed`] says when it is durable, unless
    /// [`Writer::flushed_through`] says so already.
    pub fn flush(&mut self) -> Version {
        if self.flushed_through() < self.last {
            self.flushing.wanted = self.last;
            self.go_on_flushing();
        }
        self.last
    }

    /// The last write that is durable at as many copies as must hold it.
    pub fn flushed_through(&self) -> Version {
        self.flushing.flushed
    }

    /// Asks those members whose stores lack what is wanted, and says what has become durable.
    pub(super) fn go_on_flushing(&mut self) {
        self.flushed();
        let Some(holder) = self.holder else { return };
        if self.flushing.flushed >= self.flushing.wanted {
            return;
        }
        for (applied, server) in self.parts.whole() {
            // A copy that lacks space is sent what it has refused after this question.
            let sent = if self.is_short_of_space(server) { applied } else { self.last };
            if self.flushing.must_ask(server, applied, sent) {
                self.send(server, Request::Flush(holder));
            }
        }
    }

    pub(super) fn flushed(&mut self) {
        let hold = self.copies.hold();
        #[cfg(test)]
        let hold = if Mutant::FlushedEarly.is_active() { hold - 1 } else { hold };
        let durable_at = |(_, server)| self.flushing.durable.get(&server).copied().unwrap_or_default();
        let mut durable: Vec<Version> = self.parts.whole().into_iter().map(durable_at).collect();
        durable.sort_unstable_by(|a, b| b.cmp(a));
        let held = hold.checked_sub(1).and_then(|last| durable.get(last)).copied();
        if let Some(held) = held.filter(|&held| held > self.flushing.flushed) {
            self.flushing.flushed = held;
            self.actions.push_back(Action::Flushed(held));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Answer, Standing, State};
    use crate::shape::Copies;

    /// A writer that serves with two copies, which have stores.
    fn serving() -> Writer {
        let copies = Copies::new(2, 2).unwrap_or_else(|| unreachable!("two copies"));
        let mut writer = Writer::open(copies, 5);
        let whole = Standing { state: State::Whole, ..Standing::default() };
        let servers = [0, 1].map(ServerId);
        servers.iter().for_each(|&server| writer.answered(server, Answer::Standing(whole)));
        servers.iter().for_each(|&server| writer.answered(server, Answer::Promised(whole)));
        let start = writer.generation().unwrap_or_default().start();
        let marked = Answer::Written { applied: start, durable: start };
        servers.iter().for_each(|&server| writer.answered(server, marked));
        assert!(writer.is_serving() && writer.flushed_through() == start);
        writer
    }

    #[test]
    fn a_flush_asks_stores_once_and_is_complete_when_enough_copies_are_durable() {
        let mut writer = serving();
        let (before, holder) = (writer.flushed_through(), writer.holder());
        let Some((write, holder)) = writer.write().zip(holder) else { unreachable!("it serves") };
        assert_eq!(writer.flush(), write);
        let sent = |writer: &mut Writer| {
            let actions: Vec<_> = std::iter::from_fn(|| writer.poll_action()).collect();
            let of = |action| match action {
                Action::Send(server, Request::Flush(by)) if by == holder => Some(server.0),
                _ => None,
            };
            (actions.iter().filter_map(|&action| of(action)).collect::<Vec<_>>(), actions.last().copied())
        };
        assert_eq!(sent(&mut writer).0, [0_usize; 0], "a copy may have no store");
        writer.answered(ServerId(0), Answer::Written { applied: write, durable: before });
        assert_eq!(sent(&mut writer).0, [0], "this one has");
        writer.answered(ServerId(0), Answer::Written { applied: write, durable: before });
        writer.answered(ServerId(0), Answer::Written { applied: write, durable: write });
        assert_eq!(sent(&mut writer).0, [0_usize; 0], "once");
        writer.answered(ServerId(1), Answer::Written { applied: write, durable: write });
        assert_eq!(sent(&mut writer).1, Some(Action::Flushed(write)));
        assert_eq!((writer.flush(), writer.flushed_through()), (write, write));
        assert_eq!(sent(&mut writer), (vec![], None));
    }
}
