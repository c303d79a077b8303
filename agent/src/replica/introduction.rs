//! Introduction: shows memory to a server that has our module, so that the snapshot it is sent may refer to it.
//!
//! Descriptors go by a local socket, and where that is goes by a command; both are of one use. Not here: what is sent afterwards.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use remora_fabric::{Handover, View, shm::Place};
use remora_redis::rdb::reference::TICKET_BYTES;
use remora_table::LoadPage;

use crate::server::Client;
use crate::server::module::field;

/// What the delivery keeps.
pub(super) struct Shown {
    /// What the first field must say.
    pub(super) ticket: [u8; TICKET_BYTES],
    /// On which the server counts.
    pub(super) tally: LoadPage,
}

/// What the control tells the server.
pub(super) struct Introduction {
    /// Which one, so that a late answer is not taken for another's.
    pub(super) number: u64,
    handover: Handover,
    descriptors: Vec<OwnedFd>,
    ticket: [u8; TICKET_BYTES],
    length: u64,
}

impl fmt::Debug for Introduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Introduction").field("number", &self.number).finish_non_exhaustive()
    }
}

/// What the server's module answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// It can set idle times.
    pub(super) idle_times: bool,
}

/// How long the server may take to fetch what is offered: it is told at once, but may be busy with something else.
const HANDOVER_LIMIT: Duration = Duration::from_secs(3);

/// How long it may take in all: it empties itself first, and a large data set takes its time.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);

/// Makes both halves, for this memory.
pub(super) fn prepare(view: &View, number: u64) -> Result<(Shown, Introduction), String> {
    let text = |error: &dyn fmt::Display| format!("memory can't be shown to the server: {error}");
    let mut ticket = [0; TICKET_BYTES];
    getrandom::fill(&mut ticket).map_err(|error| text(&error))?;
    let tally = LoadPage::create().map_err(|error| text(&error))?;
    let page = tally.memory().as_fd().try_clone_to_owned().map_err(|error| text(&error))?;
    // What was handed to us for reading may belong to another user, and then can't be opened again, nor needs to be.
    let memory = view.reopen_read_only().or_else(|_| view.as_fd().try_clone_to_owned());
    let descriptors = vec![memory.map_err(|error| text(&error))?, page];
    let handover = Handover::bind(&Place::Abstract).map_err(|error| text(&error))?;
    Ok((Shown { ticket, tally }, Introduction { number, handover, descriptors, ticket, length: view.length() }))
}

impl Introduction {
    /// Tells the server, and hands over what it asks for. The server is emptied by that.
    pub(super) async fn perform(self, client: &mut Client) -> Result<Answer, String> {
        let Introduction { handover, descriptors, ticket, length, .. } = self;
        let ticket: String = ticket.iter().map(|byte| format!("{byte:02x}")).collect();
        let handover = Arc::new(handover);
        let (address, secret, length) = (handover.address(), handover.secret(), length.to_string());
        let giving = tokio::task::spawn_blocking(move || {
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            handover.give(&descriptors, HANDOVER_LIMIT)
        });
        let command = ["REMORA.LOAD", &address, &secret, &ticket, &length, "FLUSH"];
        let frame = client.command_within(ANSWER_LIMIT, &command).await.map_err(|error| error.to_string())?;
        match giving.await {
            Ok(given) => given.map_err(|error| error.to_string())?,
            Err(error) => return Err(error.to_string()),
        }
        match field(&frame, b"idle_times").as_deref() {
            Some("yes") => Ok(Answer { idle_times: true }),
            Some("no") => Ok(Answer { idle_times: false }),
            _ => Err(format!("REMORA.LOAD was answered by {frame:?}, which does not say idle_times")),
        }
    }
}
