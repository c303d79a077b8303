//! Tail: what a copy has done and its store has not made durable yet.
//!
//! Everything that changes a copy is an event in its journal, in order. So what a power cut leaves is the copy as it
//! was after one of them, at or after the last one that was synced. What must not be undone is answered once it is.

use std::collections::VecDeque;

use crate::message::{Standing, State};
use crate::version::Version;

/// See the module's text. `W` is what waits for an event to be durable.
#[derive(Debug)]
pub(crate) struct Tail<W> {
    /// Events so far, and those of them that are durable.
    appended: u64,
    synced: u64,
    /// Up to where the copy is whole after each event that is not durable.
    whole: VecDeque<(u64, Version)>,
    durable: Version,
    waiting: VecDeque<(u64, W)>,
}

impl<W> Tail<W> {
    /// Everything up to this event is durable, and leaves the copy like this.
    pub(crate) fn at(event: u64, standing: Standing) -> Tail<W> {
        let durable = if standing.state == State::Whole { standing.applied } else { Version::NONE };
        Tail { appended: event, synced: event, whole: VecDeque::new(), durable, waiting: VecDeque::new() }
    }

    /// An event was appended. Events have ascending numbers.
    pub(crate) fn append(&mut self, event: u64, standing: Standing) {
        debug_assert!(event > self.appended, "event {event} after {}", self.appended);
        self.appended = event;
        if standing.state == State::Whole {
            self.whole.push_back((self.appended, standing.applied));
        } else {
            // It is whole again only after a later event, which is not durable.
            self.whole.clear();
            self.durable = Version::NONE;
        }
    }

    /// The last event.
    #[cfg(test)]
    pub(crate) fn appended(&self) -> u64 {
        self.appended
    }

    /// The last event that is durable.
    #[cfg(test)]
    pub(crate) fn synced(&self) -> u64 {
        self.synced
    }

    /// Up to which version the copy is whole, whatever happens.
    pub(crate) fn durable(&self) -> Version {
        self.durable
    }

    /// This waits until everything that was appended is durable. `Some`: it is.
    pub(crate) fn wait(&mut self, what: W) -> Option<W> {
        if self.synced == self.appended {
            return Some(what);
        }
        self.waiting.push_back((self.appended, what));
        None
    }

    /// Whether something waits.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Every event up to this one is durable. Returns what has waited for that.
    pub(crate) fn sync(&mut self, through: u64) -> Vec<W> {
        self.synced = self.synced.max(through);
        while let Some(&(event, version)) = self.whole.front()
            && event <= through
        {
            self.whole.pop_front();
            self.durable = version;
        }
        let ready = self.waiting.iter().take_while(|(event, _)| *event <= through).count();
        self.waiting.drain(..ready).map(|(_, what)| what).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::version::Generation;

    #[test]
    fn a_copy_is_durable_up_to_its_last_synced_event_since_it_is_whole() {
        let start = Generation::NONE.next().unwrap_or_default().start();
        let next = start.next().unwrap_or_default();
        let whole = |applied| Standing { state: State::Whole, applied, ..Standing::default() };
        let mut tail = Tail::at(4, whole(start));
        assert_eq!((tail.durable(), tail.wait("nothing")), (start, Some("nothing")));
        tail.append(6, whole(next));
        assert_eq!((tail.durable(), tail.wait("a flush")), (start, None));
        assert_eq!(tail.sync(5), Vec::<&str>::new());
        assert_eq!((tail.sync(6), tail.durable(), tail.is_awaited()), (vec!["a flush"], next, false));
        tail.append(7, Standing { state: State::Behind, ..whole(next) });
        assert_eq!(tail.durable(), Version::NONE);
        tail.append(9, whole(next));
        tail.sync(7);
        assert_eq!(tail.durable(), Version::NONE);
        tail.sync(9);
        assert_eq!((tail.durable(), tail.synced(), tail.appended()), (next, 9, 9));
    }
}
