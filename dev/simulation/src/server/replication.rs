//! Replication of a server, towards its replicas and towards its primary: the answers to `PSYNC`, forks, the link, the
//! two ways to load, and the stream.

use std::collections::VecDeque;
use std::time::Duration;

use remora_redis::ReplId;

use super::{Backlog, KINDS, Server, Step, fresh_id};
use crate::oracle::Content;
use crate::wire::{Ask, Conn, Effect, Message, Timer};

/// How long a replica waits for others that want the same snapshot.
const FORK_DELAY: Duration = Duration::from_millis(100);

/// `repl-timeout`, in crons.
const REPL_TIMEOUT: u32 = 60;

/// Slots that a reader takes before it must make room.
pub(crate) const WINDOW: u32 = 4;

/// Bytes that the sockets take of a link that its agent does not read: a thousandth of those of a pin.
const SOCKETS: usize = 40;

/// What a replica that was not sent the stream for a while is sent at a time, and the pause behind it.
const PIECE: usize = 512;
const PIECE_PAUSE: Duration = Duration::from_millis(10);

/// One replica.
pub(super) struct Reader {
    stage: Stage,
    ask: Ask,
    /// Slots that it can take.
    room: u32,
    /// Bytes of the stream that it was not sent yet: the last ones.
    pending: VecDeque<u8>,
    /// Bytes that its sockets still take although it reads nothing.
    sockets: usize,
    /// Crons without a slot for it, while it is given a snapshot.
    silent: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It waits for a fork.
    Waiting,
    /// It is given a snapshot.
    Snapshot,
    /// It has the snapshot, by a mark. The stream follows its acknowledgement.
    Loading,
    Online,
}

impl Reader {
    /// Keeps bytes for it, but those that its sockets take.
    fn keep(&mut self, bytes: &[u8]) {
        self.pending.extend(bytes);
        let taken = self.sockets.min(self.pending.len());
        self.pending.drain(..taken);
        self.sockets -= taken;
    }
}

/// A snapshot that is being written.
pub(super) struct Fork {
    pub(super) number: u64,
    content: Content,
    next: u64,
    /// The time for the next slot has come, and a reader has no room for it.
    is_held_up: bool,
}

/// What a server answers to `PSYNC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Full,
    Continue,
    Later,
}

impl Server {
    /// What this server answers to `PSYNC`, and nothing else happens.
    pub(crate) fn answer(&self, history: Option<(ReplId, u64)>) -> Answer {
        if self.is_loading() || (self.follows.is_some() && !self.is_up()) {
            return Answer::Later;
        }
        let Some((replid, next)) = history else { return Answer::Full };
        let is_known =
            replid == self.replid || self.former.is_some_and(|(former, end)| former == replid && next <= end);
        let is_held = self.backlog.as_ref().is_some_and(|backlog| backlog.covers(next));
        if is_known && is_held { Answer::Continue } else { Answer::Full }
    }

    pub(super) fn asked(&mut self, conn: Conn, history: Option<(ReplId, u64)>, ask: Ask, step: &mut Step<'_>) {
        let mut reader = Reader {
            stage: Stage::Online,
            ask,
            room: WINDOW,
            pending: VecDeque::new(),
            sockets: if ask == Ask::Unread { SOCKETS } else { 0 },
            silent: 0,
        };
        match (self.answer(history), history) {
            (Answer::Later, _) => {
                step.send(conn, Message::Later);
                return step.effects.push(Effect::Close(conn));
            }
            (Answer::Continue, Some((_, next))) => {
                step.send(conn, Message::Continue { replid: self.replid });
                let held = self.backlog.as_ref().map(|backlog| backlog.from(next)).unwrap_or_default();
                if ask == Ask::Unread {
                    reader.keep(&held);
                } else if !held.is_empty() {
                    step.send(conn, Message::Stream(held));
                }
            }
            _ => {
                reader.stage = Stage::Waiting;
                step.effects.push(Effect::NotContinued(conn));
                if self.backlog.is_none() {
                    // Without a backlog nothing has counted the writes: a new history begins.
                    self.replid = fresh_id(&mut self.ids);
                    self.former = None;
                    self.backlog = Some(Backlog::at(self.offset));
                    step.oracle.begin(self.replid, None, self.offset, self.content);
                }
                self.plan_fork(step);
            }
        }
        self.readers.insert(conn, reader);
    }

    fn plan_fork(&mut self, step: &mut Step<'_>) {
        if self.fork.is_none() && !self.fork_is_due {
            self.fork_is_due = true;
            step.effects.push(Effect::After(FORK_DELAY, Timer::Fork { run: self.run }));
        }
    }

    pub(super) fn begin_fork(&mut self, step: &mut Step<'_>) {
        self.fork_is_due = false;
        let can_fork = !self.is_loading() && (self.follows.is_none() || self.is_up());
        let waiting: Vec<Conn> = self.readers_at(Stage::Waiting).collect();
        if waiting.is_empty() {
            return;
        }
        if !can_fork {
            return waiting.into_iter().for_each(|conn| self.drop_reader(conn, step));
        }
        self.forks += 1;
        self.full_copies.0 += 1;
        self.fork = Some(Fork { number: self.forks, content: self.content, next: 0, is_held_up: false });
        let (replid, offset) = (self.replid, self.offset);
        for conn in waiting {
            step.send(conn, Message::FullResync { replid, offset });
            if let Some(reader) = self.readers.get_mut(&conn) {
                reader.stage = Stage::Snapshot;
            }
        }
        self.await_slot(step);
    }

    fn await_slot(&mut self, step: &mut Step<'_>) {
        if let Some(fork) = &self.fork {
            step.effects.push(Effect::After(self.traits.pace, Timer::Slot { fork: fork.number }));
        }
    }

    fn readers_at(&self, stage: Stage) -> impl Iterator<Item = Conn> {
        self.readers.iter().filter(move |(_, reader)| reader.stage == stage).map(|(&conn, _)| conn)
    }

    pub(super) fn slot_is_due(&mut self, step: &mut Step<'_>) {
        if let Some(fork) = &mut self.fork {
            fork.is_held_up = true;
        }
        self.next_slot(step);
    }

    /// Writes the next slot to all readers of the snapshot, as soon as the slowest of them has room.
    pub(super) fn next_slot(&mut self, step: &mut Step<'_>) {
        let Some(fork) = &mut self.fork else { return };
        let reading: Vec<Conn> = {
            let reading = self.readers.iter().filter(|(_, reader)| reader.stage == Stage::Snapshot);
            reading.map(|(&conn, _)| conn).collect()
        };
        if reading.is_empty() {
            self.fork = None;
            return self.fork_ended(step);
        }
        let to_file = self.traits.saves_to_file;
        if !fork.is_held_up || (!to_file && reading.iter().any(|conn| self.readers[conn].room == 0)) {
            return;
        }
        fork.is_held_up = false;
        let slot = fork.content.slot(fork.next);
        fork.next += 1;
        let is_last = fork.next == self.traits.slots;
        let mut has_all = Vec::new();
        for conn in reading {
            let Some(reader) = self.readers.get_mut(&conn) else { continue };
            reader.silent = 0;
            if to_file {
                let slots = if is_last { 0..self.traits.slots } else { 0..0 };
                slots.for_each(|number| step.send(conn, Message::Slot(fork.content.slot(number))));
            } else {
                reader.room -= 1;
                step.send(conn, Message::Slot(slot));
            }
            if is_last {
                step.send(conn, Message::End);
                reader.stage = if to_file { Stage::Online } else { Stage::Loading };
                if reader.ask == Ask::SnapshotOnly {
                    self.readers.remove(&conn);
                    step.effects.push(Effect::Close(conn));
                } else if to_file {
                    has_all.push(conn);
                }
            }
        }
        has_all.into_iter().for_each(|conn| self.send_piece(conn, step));
        if is_last {
            self.fork = None;
            self.fork_ended(step);
        } else {
            self.await_slot(step);
        }
    }

    fn fork_ended(&mut self, step: &mut Step<'_>) {
        if self.readers_at(Stage::Waiting).next().is_some() {
            self.plan_fork(step);
        }
    }

    pub(super) fn has_room(&mut self, conn: Conn, step: &mut Step<'_>) {
        if let Some(reader) = self.readers.get_mut(&conn) {
            reader.room += 1;
            self.next_slot(step);
        }
    }

    pub(super) fn acknowledged(&mut self, conn: Conn, step: &mut Step<'_>) {
        let Some(reader) = self.readers.get_mut(&conn) else { return };
        if reader.stage == Stage::Loading {
            reader.stage = Stage::Online;
            self.send_piece(conn, step);
        }
    }

    /// Sends the next bytes to a replica that was not sent the stream for a while.
    pub(super) fn send_piece(&mut self, conn: Conn, step: &mut Step<'_>) {
        let Some(reader) = self.readers.get_mut(&conn).filter(|reader| reader.ask != Ask::Unread) else { return };
        let length = reader.pending.len().min(PIECE);
        if length > 0 {
            step.send(conn, Message::Stream(reader.pending.drain(..length).collect()));
        }
        if !reader.pending.is_empty() {
            step.effects.push(Effect::After(PIECE_PAUSE, Timer::Piece { conn }));
        }
        self.trim();
    }

    /// Gives bytes of the stream to the replicas. One whose output buffer is full is disconnected.
    pub(super) fn feed_readers(&mut self, bytes: &[u8], step: &mut Step<'_>) {
        let limit = self.output_limit();
        let mut full = Vec::new();
        for (&conn, reader) in &mut self.readers {
            match reader.stage {
                Stage::Waiting => {}
                Stage::Online if reader.ask == Ask::Stream && reader.pending.is_empty() => {
                    step.effects.push(Effect::Send(conn, Message::Stream(bytes.to_vec())));
                }
                Stage::Snapshot | Stage::Loading if reader.ask == Ask::SnapshotOnly => {}
                Stage::Snapshot | Stage::Loading | Stage::Online => {
                    reader.keep(bytes);
                    if reader.pending.len() > limit {
                        step.effects.push(Effect::Overflowed(conn));
                        full.push(conn);
                    }
                }
            }
        }
        full.into_iter().for_each(|conn| self.drop_reader(conn, step));
    }

    /// What the server holds back for a replica at most: never less than the backlog's size.
    pub(crate) fn output_limit(&self) -> usize {
        self.traits.output_limit.max(self.traits.backlog_bytes)
    }

    /// Drops what no replica needs of what is beyond the backlog's size.
    pub(super) fn trim(&mut self) {
        let unsent = self.readers.values().map(|reader| reader.pending.len());
        let unsent = unsent.max().filter(|_| self.traits.shares_its_buffer).unwrap_or(0);
        let limit = self.traits.backlog_bytes.max(unsent);
        self.backlog.iter_mut().for_each(|backlog| backlog.trim(limit));
    }

    /// The first offset that stays in the backlog for the next moment: by its size, or because it is pinned.
    pub(crate) fn kept_from(&self) -> u64 {
        let Some(backlog) = &self.backlog else { return u64::MAX };
        let pins = self.readers.values().filter(|reader| reader.ask == Ask::Unread && reader.stage == Stage::Online);
        let pinned = pins.map(|reader| reader.pending.len()).max().filter(|_| self.traits.shares_its_buffer);
        let kept = self.traits.backlog_bytes.max(pinned.unwrap_or(0)) as u64;
        backlog.first.max(backlog.end().saturating_sub(kept))
    }

    /// The first offset in the backlog, and the one behind the last.
    pub(crate) fn backlog_range(&self) -> Option<(u64, u64)> {
        self.backlog.as_ref().map(|backlog| (backlog.first, backlog.end()))
    }

    fn drop_reader(&mut self, conn: Conn, step: &mut Step<'_>) {
        if self.readers.remove(&conn).is_some() {
            self.trim();
            step.effects.push(Effect::Close(conn));
            self.next_slot(step);
        }
    }

    /// Disconnects all replicas, so that they learn of another history.
    pub(super) fn drop_readers(&mut self, step: &mut Step<'_>) {
        let readers: Vec<Conn> = self.readers.keys().copied().collect();
        readers.into_iter().for_each(|conn| self.drop_reader(conn, step));
    }

    /// Disconnects replicas that have taken no slot for `repl-timeout`.
    pub(super) fn drop_silent(&mut self, step: &mut Step<'_>) {
        let mut silent = Vec::new();
        for (&conn, reader) in self.readers.iter_mut().filter(|(_, reader)| reader.stage == Stage::Snapshot) {
            reader.silent += 1;
            if reader.silent > REPL_TIMEOUT {
                silent.push(conn);
            }
        }
        silent.into_iter().for_each(|conn| self.drop_reader(conn, step));
    }

    /// The number of replicas.
    pub(super) fn reader_count(&self) -> usize {
        self.readers.len()
    }
}

/// A replica's link to its primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// The replica has no link. It connects again at its next cron.
    Down,
    Dialing,
    /// `PSYNC` was sent.
    Asked(Conn),
    /// A snapshot is on its way.
    Copying(Copying),
    Up(Conn),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Copying {
    conn: Conn,
    replid: ReplId,
    offset: u64,
    slots: Vec<u64>,
    /// The old data set is gone, and commands are refused.
    is_loading: bool,
    /// The mark has come, or as many bytes as were announced.
    is_whole: bool,
    /// Bytes of the stream that came behind the snapshot while it was loaded. They wait in the socket.
    behind: Vec<u8>,
}

impl Link {
    pub(super) fn conn(&self) -> Option<Conn> {
        match self {
            Link::Down | Link::Dialing => None,
            Link::Asked(conn) | Link::Up(conn) => Some(*conn),
            Link::Copying(copying) => Some(copying.conn),
        }
    }

    pub(super) fn is_loading(&self) -> bool {
        matches!(self, Link::Copying(copying) if copying.is_loading)
    }

    pub(super) fn is_copying(&self) -> bool {
        matches!(self, Link::Copying(_))
    }
}

impl Server {
    pub(super) fn dial(&mut self, step: &mut Step<'_>) {
        let Some(to) = self.follows.clone() else { return };
        self.attempt += 1;
        self.link = Link::Dialing;
        step.effects.push(Effect::Dial { to, attempt: self.attempt });
    }

    /// The connection that was dialed is there, or could not be made.
    pub(crate) fn dialed(&mut self, attempt: u64, conn: Option<Conn>, step: &mut Step<'_>) {
        let is_wanted = self.alive && attempt == self.attempt && self.link == Link::Dialing;
        match conn {
            Some(conn) if is_wanted => {
                let history = self.cached.map(|(replid, offset)| (replid, offset + 1));
                let login = self.settings.get("masterauth").cloned().unwrap_or_default();
                step.send(conn, Message::Psync { history, login, ask: Ask::Stream });
                self.link = Link::Asked(conn);
            }
            Some(conn) => step.effects.push(Effect::Close(conn)),
            None if is_wanted => self.link = Link::Down,
            None => {}
        }
    }

    /// Ends the link. The position is kept if the link was up.
    pub(super) fn leave_the_link(&mut self, step: &mut Step<'_>) {
        self.attempt += 1;
        match std::mem::replace(&mut self.link, Link::Down) {
            Link::Down | Link::Dialing => {}
            Link::Asked(conn) => step.effects.push(Effect::Close(conn)),
            Link::Copying(copying) => {
                if copying.is_loading {
                    self.content = Content::EMPTY;
                }
                step.effects.push(Effect::Close(copying.conn));
            }
            Link::Up(conn) => {
                self.cached = Some((self.replid, self.offset));
                self.rest.clear();
                step.effects.push(Effect::Close(conn));
            }
        }
    }

    pub(super) fn look_after_the_link(&mut self, step: &mut Step<'_>) {
        match (&self.link, &self.follows) {
            (Link::Down, Some(_)) => self.dial(step),
            (Link::Up(conn), _) => step.effects.push(Effect::Send(*conn, Message::Ack { offset: self.offset })),
            _ => {}
        }
    }

    pub(super) fn primary_said(&mut self, conn: Conn, message: Message, step: &mut Step<'_>) {
        if self.link.conn() != Some(conn) {
            return;
        }
        match message {
            Message::FullResync { replid, offset } => {
                let (slots, behind) = (Vec::new(), Vec::new());
                let (is_loading, is_whole) = (false, false);
                self.link = Link::Copying(Copying { conn, replid, offset, slots, is_loading, is_whole, behind });
            }
            Message::Slot(slot) => self.slot(slot, step),
            Message::End => self.end(step),
            Message::Continue { replid } => self.continued(conn, replid, step),
            Message::Stream(bytes) => self.stream(&bytes, step),
            Message::Later => {
                self.link = Link::Down;
                step.effects.push(Effect::Close(conn));
            }
            Message::Psync { .. } | Message::Ack { .. } | Message::Room | Message::Agents(_) => {}
        }
    }

    /// Whether a payload is loaded while it arrives. If not, it is written to a file first.
    fn loads_from_the_link(&self) -> bool {
        match self.settings.get("repl-diskless-load").map(String::as_str) {
            Some("flush-before-load") => true,
            Some("on-empty-db") => self.content == Content::EMPTY,
            _ => false,
        }
    }

    fn slot(&mut self, slot: u64, step: &mut Step<'_>) {
        let from_the_link = self.loads_from_the_link();
        let Link::Copying(copying) = &mut self.link else { return };
        copying.slots.push(slot);
        let conn = copying.conn;
        let begins = copying.slots.len() == 1 && from_the_link;
        copying.is_loading |= begins;
        if copying.is_loading {
            self.content = Content::broken(&copying.slots);
        }
        if begins {
            self.attach(step);
        }
        step.send(conn, Message::Room);
    }

    /// From here on the old data set and the old position are gone.
    fn attach(&mut self, step: &mut Step<'_>) {
        self.cached = None;
        self.backlog = None;
        self.drop_readers(step);
    }

    fn end(&mut self, step: &mut Step<'_>) {
        let Link::Copying(copying) = &mut self.link else { return };
        let (conn, was_loading) = (copying.conn, copying.is_loading);
        (copying.is_loading, copying.is_whole) = (true, true);
        let takes = if was_loading { 1 } else { copying.slots.len() as u32 };
        self.content = Content::broken(&copying.slots);
        if !was_loading {
            self.attach(step);
        }
        step.effects.push(Effect::After(self.traits.pace * takes, Timer::Loaded { conn }));
    }

    pub(super) fn loaded(&mut self, conn: Conn, step: &mut Step<'_>) {
        let Link::Copying(copying) = &mut self.link else { return };
        if copying.conn != conn || !copying.is_whole {
            return;
        }
        let behind = std::mem::take(&mut copying.behind);
        self.full_copies.1 += 1;
        self.content = Content::of_slots(&copying.slots, self.traits.slots);
        self.refused_from.clear();
        (self.replid, self.offset) = (copying.replid, copying.offset);
        self.former = None;
        self.backlog = Some(Backlog::at(self.offset));
        self.rest.clear();
        self.link = Link::Up(conn);
        step.send(conn, Message::Ack { offset: self.offset });
        self.stream(&behind, step);
    }

    fn continued(&mut self, conn: Conn, replid: ReplId, step: &mut Step<'_>) {
        let (Link::Asked(_), Some((cached, offset))) = (&self.link, self.cached) else { return };
        if replid != cached {
            self.former = Some((cached, offset + 1));
            self.drop_readers(step);
        }
        (self.replid, self.offset, self.cached) = (replid, offset, None);
        self.backlog.get_or_insert_with(|| Backlog::at(offset));
        self.rest.clear();
        self.link = Link::Up(conn);
        step.send(conn, Message::Ack { offset });
    }

    /// Executes the whole commands that have come, and passes them on.
    fn stream(&mut self, bytes: &[u8], step: &mut Step<'_>) {
        if let Link::Copying(copying) = &mut self.link {
            copying.behind.extend_from_slice(bytes);
        }
        if !matches!(self.link, Link::Up(_)) {
            return;
        }
        self.rest.extend_from_slice(bytes);
        while let Some(&length) = self.rest.first() {
            let length = usize::from(length.max(2));
            if self.rest.len() < length {
                return;
            }
            let command: Vec<u8> = self.rest.drain(..length).collect();
            let is_lacked = Content::EMPTY.after(&command).0 >> 8 & KINDS == 0;
            if self.traits.lacks_a_command && is_lacked {
                self.errors += 1;
                let run = self.run;
                self.refused_from.extend(self.follows.clone().map(|from| (from, run)));
            } else {
                self.content = self.content.after(&command);
            }
            self.offset += command.len() as u64;
            self.pass_on(&command, step);
        }
    }
}
