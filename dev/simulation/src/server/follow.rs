//! Follow: a server towards its primary: the link, the two ways to load, and the stream.

use remora_redis::ReplId;

use super::{Backlog, KINDS, Server, Step};
use crate::oracle::Content;
use crate::wire::{Ask, Conn, Effect, Message, Timer};

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
