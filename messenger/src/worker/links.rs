//! The links of a worker: found by key, watched by the reactor, looked at when their time has come.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slotmap::{Key as _, KeyData, SlotMap, new_key_type};

use super::{Command, Context, Reactor};
use crate::buffer::Permit;
use crate::connection::{Common, Connection, HandshakeConfig, MAY_LEAVE_SEALS, MAY_LEAVE_SUMS, Negotiated};
use crate::error::LinkError;
use crate::frame::{Label, Limits, Preamble, Reader, Seals, Signal, Writer};
use crate::handshake::{Established, Handshake, Key, Opening, Role};
use crate::session::LinkId;
use crate::stack::{Link, Listener};

/// See the module's documentation.
pub(super) struct LinkTable {
    links: SlotMap<LinkKey, LinkState>,
    /// Links whose transport can be asked for something to do without a system call.
    polled: Vec<LinkKey>,
    /// Links that peers opened and that serve no session yet.
    unauthenticated: usize,
    timers: Timers<LinkKey>,
    pub(super) reactor: Reactor,
}

impl LinkTable {
    pub(super) fn new(reactor: Reactor) -> LinkTable {
        LinkTable {
            links: SlotMap::with_key(),
            polled: Vec::new(),
            unauthenticated: 0,
            timers: Timers::default(),
            reactor,
        }
    }

    /// Adds a link and has the reactor watch it. A link that the reactor does not take is given back.
    pub(super) fn insert(&mut self, mut link: LinkState, cx: &Context) -> Result<LinkKey, (Box<LinkState>, LinkError)> {
        link.interest = link.wanted();
        link.timer = None;
        let (is_polled, is_unauthenticated) = (link.is_polled, link.is_unauthenticated());
        let key = self.links.insert(link);
        let link = &self.links[key];
        if let Err(error) = self.reactor.add_link(key, link.link.descriptor(), link.interest)
            && let Some(link) = self.links.remove(key)
        {
            return Err((Box::new(link), LinkError::Io(error)));
        }
        self.unauthenticated += usize::from(is_unauthenticated);
        if is_polled {
            self.polled.push(key);
        }
        self.schedule(key, cx);
        Ok(key)
    }

    /// Takes a link out.
    pub(super) fn remove(&mut self, key: LinkKey) -> Option<LinkState> {
        let link = self.links.remove(key)?;
        self.unauthenticated -= usize::from(link.is_unauthenticated());
        self.reactor.remove_link(link.link.descriptor());
        self.polled.retain(|other| *other != key);
        Some(link)
    }

    /// Takes a link out that is of no use any more. The owner is told of a peer that never got a session.
    pub(super) fn end(&mut self, key: LinkKey, broken: &LinkError, cx: &Context) -> Option<LinkState> {
        let link = self.remove(key)?;
        tracing::debug!(peer = %link.link.peer(), %broken, "a link ends");
        if link.is_unauthenticated() {
            cx.common.dispatcher.rejected(&link.link.peer(), broken);
        }
        Some(link)
    }

    /// The link of a key that may be out of date.
    pub(super) fn find(&mut self, key: LinkKey) -> Option<&mut LinkState> {
        self.links.get_mut(key)
    }

    /// The link of a key that a session or another table holds. Such a key is valid; a missing link is a mistake of
    /// ours.
    pub(super) fn get_mut(&mut self, key: LinkKey) -> Option<&mut LinkState> {
        let link = self.links.get_mut(key);
        debug_assert!(link.is_some(), "{key:?} is held, but its link is gone");
        link
    }

    /// Makes a link that of a session. Returns what its handshake settled, if the session has not been told.
    pub(super) fn bind(&mut self, key: LinkKey, session: SessionKey, limits: Limits) -> Option<Box<Negotiated>> {
        let link = self.get_mut(key)?;
        let was_unauthenticated = link.is_unauthenticated();
        link.phase = Phase::Serving(session);
        link.deadline = None;
        link.reader.set_limits(limits);
        let negotiated = link.negotiated.take();
        self.unauthenticated -= usize::from(was_unauthenticated);
        negotiated
    }

    /// Has a link send what is written and then close.
    pub(super) fn leave(&mut self, key: LinkKey, deadline: Instant) {
        if let Some(link) = self.get_mut(key) {
            link.phase = Phase::Leaving;
            link.deadline = Some(deadline);
        }
    }

    /// Tells the reactor what a link waits for, when that has changed, and sets its timer.
    pub(super) fn update(&mut self, key: LinkKey, cx: &Context) -> Result<(), LinkError> {
        let Some(link) = self.links.get_mut(key) else {
            debug_assert!(false, "{key:?} is updated, but its link is gone");
            return Ok(());
        };
        let wanted = link.wanted();
        if link.interest != wanted {
            link.interest = wanted;
            self.reactor.change_link(key, link.link.descriptor(), wanted).map_err(LinkError::Io)?;
        }
        self.schedule(key, cx);
        Ok(())
    }

    /// Sets a link's timer, if it is not set for an earlier time.
    fn schedule(&mut self, key: LinkKey, cx: &Context) {
        let Some(link) = self.links.get_mut(key) else { return };
        let Some(next) = link.next_deadline(cx) else { return };
        if link.timer.is_none_or(|timer| next < timer) {
            link.timer = Some(next);
            self.timers.set(next, key);
        }
    }

    /// Ends the wait of a link whose time has come: the next one, and why it must end.
    pub(super) fn pop_expired(&mut self, cx: &Context) -> Option<(LinkKey, LinkError)> {
        while let Some((at, key)) = self.timers.pop(cx.now) {
            let Some(link) = self.links.get_mut(key).filter(|link| link.timer == Some(at)) else { continue };
            link.timer = None;
            if let Some(broken) = link.expired(cx) {
                return Some((key, broken));
            }
            self.schedule(key, cx);
        }
        let links = &self.links;
        self.timers.tidy(links.len(), |at, key| links.get(key).is_some_and(|link| link.timer == Some(at)));
        None
    }

    /// The earliest timer.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// The number of links that can be polled.
    pub(super) fn polled(&self) -> usize {
        self.polled.len()
    }

    /// The polled link of that index, if there is something to do on it.
    pub(super) fn poll_ready(&mut self, index: usize) -> Option<LinkKey> {
        let key = *self.polled.get(index)?;
        self.get_mut(key)?.has_something().then_some(key)
    }

    /// Prepares polled links for a sleep on their descriptors. Returns whether something came in the meantime.
    pub(super) fn arm(&mut self) -> bool {
        let links = &mut self.links;
        self.polled.iter().fold(false, |found, key| found | links.get_mut(*key).is_some_and(LinkState::arm))
    }

    /// Ends what [`LinkTable::arm`] began.
    pub(super) fn disarm(&mut self) {
        for key in &self.polled {
            if let Some(link) = self.links.get_mut(*key) {
                link.link.disarm();
            }
        }
    }

    /// How many links peers have opened that serve no session yet.
    pub(super) fn unauthenticated(&self) -> usize {
        self.unauthenticated
    }

    /// Links that send their last bytes.
    pub(super) fn leaving(&self) -> Vec<LinkKey> {
        let is_leaving = |link: &LinkState| matches!(link.phase, Phase::Leaving);
        self.links.iter().filter(|(_, link)| is_leaving(link)).map(|(key, _)| key).collect()
    }
}

// Accepts connections, and shares them out among the workers of the messenger.

/// The listeners of a worker.
#[derive(Default)]
pub(super) struct Acceptor {
    listeners: Vec<Box<dyn Listener>>,
}

/// Where an accepted connection goes.
pub(super) enum Accepted {
    /// This worker is to serve it.
    Here(Box<LinkState>),
    /// Another worker has it.
    Elsewhere,
}

impl Acceptor {
    /// Begins to accept there.
    pub(super) fn listen(&mut self, listener: Box<dyn Listener>, reactor: &Reactor) {
        match reactor.add_listener(self.listeners.len(), listener.descriptor()) {
            Ok(()) => self.listeners.push(listener),
            Err(error) => tracing::error!(address = %listener.address(), %error, "cannot listen"),
        }
    }

    /// Accepts the next connection of a listener and begins its handshake. `None`: there is none, or it failed.
    pub(super) fn accept(&mut self, index: usize, cx: &Context) -> Option<Accepted> {
        let listener = self.listeners.get_mut(index)?;
        let link = match listener.accept() {
            Ok(link) => link,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            Err(error) => {
                tracing::warn!(address = %listener.address(), %error, "cannot accept");
                return None;
            }
        };
        let link = match LinkState::called(link, &cx.common, cx.now) {
            Ok(link) => Box::new(link),
            Err(broken) => {
                tracing::warn!(%broken, "cannot begin a handshake");
                return None;
            }
        };
        let next = cx.common.next_worker.fetch_add(1, Ordering::Relaxed);
        let worker = cx.workers.get(next % cx.workers.len().max(1));
        match worker.filter(|worker| !Arc::ptr_eq(worker, &cx.inbox)) {
            Some(worker) => worker.post(Command::Take(link)),
            None => return Some(Accepted::Here(link)),
        }
        Some(Accepted::Elsewhere)
    }
}

/// Connections accepted in a row, after which other events have their turn.
pub(super) const ACCEPTS_PER_TURN: usize = 64;

// The state of one link: the handshake, then frames in and frames out. Also the keys that find links and sessions,
// timers, and how links end.
//
// What the frames mean is the session's business; a link only knows which session it serves.

/// A link and everything that is half done on it.
pub(crate) struct LinkState {
    pub(super) link: Box<dyn Link>,
    pub(super) phase: Phase,
    pub(super) reader: Reader,
    pub(super) writer: Writer,
    /// The frame whose head has been read.
    pub(super) incoming: Option<Incoming>,
    /// Bytes received and not yet read, because there is no room for the messages in them.
    pub(super) held: Vec<u8>,
    /// What the handshake settled, until a session has it.
    pub(super) negotiated: Option<Box<Negotiated>>,
    /// The mark of the key that the handshake proved.
    mark: u16,
    /// When the phase must be over.
    pub(super) deadline: Option<Instant>,
    /// Since when the peer has not taken any of the bytes written for it.
    stuck_since: Option<Instant>,
    /// The timer that is set.
    pub(super) timer: Option<Instant>,
    /// What epoll has been asked to report.
    pub(super) interest: Interest,
    /// The transport can be asked for something to do without a system call. It reports room to send by becoming
    /// readable: its descriptor is always writable.
    is_polled: bool,
}

/// What epoll is asked to report of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interest {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

/// What a link is there for.
pub(super) enum Phase {
    /// That session's connect has not completed.
    Calling(SessionKey),
    /// Both ends prove themselves. `output` is still to be sent; `session` is the one that called, if this end did.
    Handshaking { handshake: Box<Handshake<Key>>, output: Vec<u8>, session: Option<SessionKey> },
    /// The handshake is complete, and the peer has not said yet which session it means.
    Unbound,
    /// The link of that session.
    Serving(SessionKey),
    /// What is written is sent, then the link is closed.
    Leaving,
}

/// A frame whose head was read.
pub(super) enum Incoming {
    Signal(Signal),
    /// A message for which there is no room yet.
    Blocked(Preamble, Label),
    Message(Label, Permit),
}

impl LinkState {
    pub(super) fn new(mut link: Box<dyn Link>, phase: Phase, deadline: Instant) -> LinkState {
        LinkState {
            is_polled: link.poll_ready().is_some(),
            link,
            phase,
            reader: Reader::new(Limits::UNAUTHENTICATED, None),
            writer: Writer::new(true, None),
            incoming: None,
            held: Vec::new(),
            negotiated: None,
            mark: 0,
            deadline: Some(deadline),
            stuck_since: None,
            timer: None,
            interest: Interest { readable: true, writable: false },
        }
    }

    /// A link that a peer opened, with the handshake begun.
    pub(crate) fn called(link: Box<dyn Link>, common: &Common, now: Instant) -> Result<LinkState, LinkError> {
        let mut link = LinkState::new(link, Phase::Unbound, now + common.policy.opening_limit);
        link.begin_handshake(None, &common.handshake, now)?;
        Ok(link)
    }

    /// The session that it serves or will serve.
    pub(super) fn session(&self) -> Option<SessionKey> {
        match &self.phase {
            Phase::Calling(session) | Phase::Serving(session) => Some(*session),
            Phase::Handshaking { session, .. } => *session,
            Phase::Unbound | Phase::Leaving => None,
        }
    }

    /// Whether a peer opened it and it has no session yet.
    fn is_unauthenticated(&self) -> bool {
        matches!(self.phase, Phase::Unbound | Phase::Handshaking { session: None, .. })
    }

    /// Whether it is not read, because there is no room for the message that comes next.
    pub(super) fn is_blocked(&self) -> bool {
        matches!(self.incoming, Some(Incoming::Blocked(..)))
    }

    /// When it must be looked at, whatever happens until then.
    fn next_deadline(&self, cx: &Context) -> Option<Instant> {
        let stuck = self.stuck_since.map(|since| since + cx.common.policy.silence_limit);
        self.deadline.into_iter().chain(stuck).min()
    }

    /// Why it must end now, if it must.
    pub(super) fn expired(&self, cx: &Context) -> Option<LinkError> {
        if self.stuck_since.is_some_and(|since| since + cx.common.policy.silence_limit <= cx.now) {
            return Some(LinkError::TooSlow("take what was sent"));
        }
        self.deadline.is_some_and(|deadline| deadline <= cx.now).then_some(LinkError::TooSlow(super::OPENING))
    }

    /// Whether the connect has completed.
    pub(super) fn finish_call(&mut self) -> Result<bool, LinkError> {
        match self.link.finish_call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            answered => answered.map(|()| true).map_err(LinkError::Unreachable),
        }
    }

    /// Begins the handshake: as the end that called for `session`, otherwise as the end that was called.
    pub(super) fn begin_handshake(
        &mut self,
        session: Option<SessionKey>,
        config: &HandshakeConfig,
        now: Instant,
    ) -> Result<(), LinkError> {
        let opening = Opening { versions: config.versions, features: config.features(), nonce: random()? };
        let limit = self.deadline.map_or(std::time::Duration::ZERO, |deadline| deadline.saturating_duration_since(now));
        let keys = config.keys.keys();
        let mut handshake = match session {
            Some(_) => Handshake::caller(keys, opening, now, limit),
            None => Handshake::called(keys, opening, u64::from_le_bytes(random()?), now, limit),
        };
        let output = handshake.take_output();
        self.phase = Phase::Handshaking { handshake: Box::new(handshake), output, session };
        Ok(())
    }

    /// Continues the handshake as far as bytes allow. Returns what both ends agreed on once it is complete.
    pub(super) fn continue_handshake(&mut self) -> Result<Option<Established>, LinkError> {
        let Phase::Handshaking { handshake, output, .. } = &mut self.phase else { return Ok(None) };
        loop {
            if output.is_empty() && self.link.has_unsent() {
                let _ = self.link.send(&[]); // a broken link is found by receiving
            }
            while !output.is_empty() {
                match self.link.send(&[IoSlice::new(output)]) {
                    Ok(sent) => drop(output.drain(..sent)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(LinkError::Io(error)),
                }
            }
            if let Some(established) = handshake.poll_established() {
                self.mark = handshake.proved().mark();
                return Ok(Some(established));
            }
            let mut piece = [0; HANDSHAKE_PIECE_BYTES];
            match self.link.receive(&mut [IoSliceMut::new(&mut piece)]) {
                Ok(0) => return Err(LinkError::Ended),
                Ok(count) => {
                    // Received bytes mean that a secure channel is complete.
                    if let Some(binding) = self.link.channel_binding().map_err(LinkError::Io)? {
                        handshake.bind(&binding);
                    }
                    let outcome = handshake.handle_input(&piece[..count]);
                    output.extend(handshake.take_output());
                    if let Err(error) = outcome {
                        let _ = self.link.send(&[IoSlice::new(output)]); // a refusal, if it can be sent at once
                        return Err(error.into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(LinkError::Io(error)),
            }
        }
    }

    /// The handshake is complete: frames from here on.
    pub(super) fn establish(&mut self, established: &mut Established) {
        let summed = established.features() & MAY_LEAVE_SUMS == 0;
        let sealed = established.features() & MAY_LEAVE_SEALS == 0;
        let seals = |of: Role| sealed.then(|| Seals::new(&established.key(), of));
        self.writer = Writer::new(summed, seals(established.role()));
        self.reader = Reader::new(Limits::UNAUTHENTICATED, seals(established.role().peer()));
        self.negotiated = Some(Box::new(Negotiated {
            number: established.session(),
            key: established.key(),
            version: established.version(),
            mark: self.mark,
            local: self.link.local(),
            certificate: self.link.peer_certificate().map(Into::into),
        }));
        self.held = established.take_rest();
    }

    /// Sends what is written. Returns whether everything is sent; otherwise the peer takes no more at present.
    pub(super) fn flush(&mut self, now: Instant) -> Result<bool, LinkError> {
        while !self.writer.is_empty() {
            let sent = match self.writer.only_piece() {
                Some(piece) => self.link.send(&[IoSlice::new(piece)]),
                None => {
                    let mut slices = [IoSlice::new(&[]); SLICES_PER_SEND];
                    let count = self.writer.slices(&mut slices);
                    self.link.send(&slices[..count])
                }
            };
            match sent {
                Ok(sent) => {
                    self.writer.sent(sent);
                    self.stuck_since = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stuck_since.get_or_insert(now);
                    return Ok(false);
                }
                Err(error) => return Err(LinkError::Io(error)),
            }
        }
        self.send_on(now)
    }

    /// Sends what the link took and could not pass on. Returns whether everything is sent.
    fn send_on(&mut self, now: Instant) -> Result<bool, LinkError> {
        if self.link.has_unsent() {
            match self.link.send(&[]) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(LinkError::Io(error)),
                _ => {}
            }
        }
        let is_stuck = self.link.has_unsent();
        self.stuck_since = is_stuck.then(|| self.stuck_since.unwrap_or(now));
        Ok(!is_stuck)
    }

    /// Writes a signal behind what is written already.
    pub(super) fn say(&mut self, signal: Signal) {
        let (tag, head, length) = signal.encode();
        self.writer.frame(tag, &head[..length], Default::default(), 1);
    }

    /// Whether there is something to do, asked without a system call. Bytes to receive are nothing to do while the link
    /// is not read.
    pub(super) fn has_something(&mut self) -> bool {
        self.link.poll_ready() == Some(true) && !self.is_idle()
    }

    /// Prepares for a sleep on the descriptor. Returns whether there is something to do first.
    pub(super) fn arm(&mut self) -> bool {
        self.link.arm() && !self.is_idle()
    }

    fn is_idle(&self) -> bool {
        self.is_blocked() && self.writer.is_empty()
    }

    /// What epoll should report.
    pub(super) fn wanted(&self) -> Interest {
        match &self.phase {
            // A socket's connect has completed when it is writable; some of the other transports know only readable.
            Phase::Calling(_) => Interest { readable: true, writable: true },
            Phase::Handshaking { output, .. } => {
                let writable = (!output.is_empty() || self.link.has_unsent()) && !self.is_polled;
                Interest { readable: true, writable }
            }
            _ => Interest {
                readable: !self.is_blocked(),
                writable: (!self.writer.is_empty() || self.link.has_unsent()) && !self.is_polled,
            },
        }
    }

    /// Sends the last bytes, then reads and drops what comes until the peer closes.
    ///
    /// A socket that is closed with unread bytes in it takes back what it has yet to deliver. So the peer closes first.
    pub(super) fn leave(&mut self, now: Instant) -> Result<(), LinkError> {
        if !self.flush(now)? {
            return Ok(());
        }
        let mut rest = [0; PIECE_BYTES];
        loop {
            match self.link.receive(&mut [IoSliceMut::new(&mut rest)]) {
                Ok(0) => return Err(LinkError::Ended),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(LinkError::Io(error)),
            }
        }
    }
}

fn random<const N: usize>() -> Result<[u8; N], LinkError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|_| LinkError::Io(io::Error::other("no random bytes from the system")))?;
    Ok(bytes)
}

/// More than a frame of the handshake.
const HANDSHAKE_PIECE_BYTES: usize = 512;

/// Pieces per vectored send. Two per message with data, and one behind the last: all that is written ahead in messages
/// of 4 KiB goes in one call. A call for the rest would cost a segment of its own, and at the peer another waking.
const SLICES_PER_SEND: usize = 128;

// The keys by which a worker finds its links and its sessions. A key that is out of date finds nothing.

new_key_type! {
    /// A link of a worker. A key is never used for two links.
    pub(crate) struct LinkKey;
}

impl LinkKey {
    /// The same as a session knows it.
    pub(super) fn id(self) -> LinkId {
        LinkId(self.data().as_ffi())
    }

    pub(super) fn of(id: LinkId) -> LinkKey {
        LinkKey::from_raw(id.0)
    }

    pub(super) fn from_raw(raw: u64) -> LinkKey {
        KeyData::from_ffi(raw).into()
    }
}

new_key_type! {
    /// A session of a worker. A key is never used for two sessions.
    pub(crate) struct SessionKey;
}

impl SessionKey {
    /// The session of a connection, as its worker has noted it there.
    pub(super) fn of(connection: &Connection) -> SessionKey {
        KeyData::from_ffi(connection.session_key()).into()
    }
}

// A timer heap. An entry is not removed when its deadline moves: the owner sets another one, and ignores the stale
// entry when it fires.

/// Deadlines with a key each, the earliest first.
pub(crate) struct Timers<K>(BinaryHeap<Reverse<(Instant, K)>>);

impl<K: Ord + Copy> Default for Timers<K> {
    fn default() -> Timers<K> {
        Timers(BinaryHeap::new())
    }
}

impl<K: Ord + Copy> Timers<K> {
    /// Adds a deadline.
    pub(crate) fn set(&mut self, at: Instant, name: K) {
        self.0.push(Reverse((at, name)));
    }

    /// The earliest deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes an entry whose deadline has passed.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<(Instant, K)> {
        if self.next()? > now {
            return None;
        }
        self.0.pop().map(|Reverse(entry)| entry)
    }

    /// Removes stale entries if there are many more entries than keys. `meant` is the number of keys in use.
    pub(crate) fn tidy(&mut self, meant: usize, is_meant: impl Fn(Instant, K) -> bool) {
        if self.0.len() > ENTRIES_PER_NAME * meant + ENTRIES_ALWAYS {
            self.0.retain(|Reverse((at, name))| is_meant(*at, *name));
        }
    }
}

/// Stale entries are cheap; removing them costs a walk over the heap.
const ENTRIES_PER_NAME: usize = 4;

const ENTRIES_ALWAYS: usize = 1024;

// How links end in good order: what is written is sent, then the peer closes first.

/// How long the last bytes of a link may take to be sent.
pub(super) const LEAVING_LIMIT: Duration = Duration::from_secs(1);

/// How often links that are leaving are looked at while the worker stops.
pub(super) const LEAVING_PACE: Duration = Duration::from_millis(5);

/// One read of what a peer sends to an end that no longer reads it.
const PIECE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn a_key_never_finds_what_came_later_to_its_place() {
        let mut links: SlotMap<LinkKey, &str> = SlotMap::with_key();
        let first = links.insert("first");
        assert_eq!(links.remove(first), Some("first"));
        let second = links.insert("second");
        assert_eq!((links.get(first), links.get(second)), (None, Some(&"second")));
        assert_eq!(links.remove(first), None);
        assert_eq!((links.len(), links.keys().collect::<Vec<_>>()), (1, vec![second]));
    }

    #[test]
    fn a_key_survives_the_ways_through_epoll_and_a_session() {
        let mut links: SlotMap<LinkKey, ()> = SlotMap::with_key();
        let key = links.insert(());
        assert_eq!(LinkKey::from_raw(key.data().as_ffi()), key);
        assert_eq!(LinkKey::of(key.id()), key);
        assert_eq!(links.get(LinkKey::from_raw(u64::MAX)), None);
    }
}
