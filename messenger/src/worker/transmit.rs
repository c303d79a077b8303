//! From messages to bytes: moves queued messages to their session, performs what the session wants, writes frames and
//! sends them.

use std::collections::VecDeque;

use super::Context;
use super::keys::SessionKey;
use super::link::LinkState;
use super::links::LinkTable;
use super::sessions::SessionEntry;
use crate::connection::Queued;
use crate::error::LinkError;
use crate::session::{Outgoing, Payload};
use crate::signal::{Label, MESSAGE};

/// Sends for the sessions of a worker, one at a time.
#[derive(Default)]
pub(super) struct Transmitter {
    /// Messages on their way from a connection's queue to its session. Kept, so that the two queues trade their memory.
    queued: VecDeque<Queued>,
}

impl Transmitter {
    /// Moves what the owner has queued to the session.
    pub(super) fn take_queued(&mut self, entry: &mut SessionEntry, cx: &Context) {
        entry.connection.take_queued(&mut self.queued);
        // The session may be over. The owner is told by that, not by each message.
        let _ = entry.session.send_all(&mut self.queued, cx.now);
    }

    /// Sends everything that a session has to send, as far as its peer takes it, and performs what it asks for
    /// meanwhile.
    pub(super) fn settle(&mut self, key: SessionKey, entry: &mut SessionEntry, links: &mut LinkTable, cx: &Context) {
        loop {
            self.take_queued(entry, cx);
            entry.perform(key, links, cx);
            let Some(link) = entry.link else { return };
            match write(entry, links, cx) {
                Ok(true) => {}
                Ok(false) => return,
                Err(broken) => entry.end_link(link, broken, links, cx),
            }
        }
    }

    /// Sends what the owner has queued, if the peer has received everything before. Performs nothing. `false`: the
    /// session must be settled.
    pub(super) fn send_now(&mut self, entry: &mut SessionEntry, links: &mut LinkTable, cx: &Context) -> bool {
        let sends_now = entry.link.and_then(|link| links.find(link)).is_some_and(|link| link.link.sends_now());
        if !sends_now || !entry.session.is_quiet() {
            return false;
        }
        self.take_queued(entry, cx);
        // A link that breaks is found broken again by the worker, which tells the session.
        while let Ok(more) = write(entry, links, cx) {
            if !more {
                return true;
            }
        }
        false
    }
}

/// Writes and sends a share. Returns whether there may be more.
fn write(entry: &mut SessionEntry, links: &mut LinkTable, cx: &Context) -> Result<bool, LinkError> {
    let Some(key) = entry.link else { return Ok(false) };
    let Some(link) = links.get_mut(key) else { return Ok(false) };
    let more = fill(entry, link);
    let was_blocked = link.interest.writable;
    let flushed = link.flush(cx.now)?;
    if flushed == was_blocked {
        links.update(key, cx)?;
    }
    Ok(flushed && more)
}

/// Writes frames until enough is written, or there is nothing more (then it returns false).
fn fill(entry: &mut SessionEntry, link: &mut LinkState) -> bool {
    while link.writer.len() < WRITE_AHEAD_BYTES {
        match entry.session.poll_transmit() {
            Some(Outgoing::Signal(signal)) => link.say(signal),
            Some(Outgoing::Message { number, heard, message }) => {
                let message = match message {
                    Payload::Owned(Queued { message, .. }) => message,
                    Payload::Kept(Queued { message, .. }) => message.clone(),
                };
                let label = Label { number, heard, transaction: message.transaction, kind: message.kind };
                let bodies = [message.front, message.middle, message.data];
                link.writer.frame(MESSAGE, &label.encode(), bodies, usize::from(message.alignment));
            }
            None => return false,
        }
    }
    true
}

/// What is written before it is sent. The send buffer of a loopback connection takes about as much at once.
const WRITE_AHEAD_BYTES: usize = 256 * 1024;
