//! Introduction: gives memory to a server that has our module, so that the payload can refer to it.
//!
//! The descriptors pass over a local socket, whose address the server gets by a command. Both are used once. Not here:
//! the payload.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use remora_fabric::{Handover, View, shm::Place};
use remora_redis::rdb::reference::TICKET_BYTES;
use remora_table::LoadPage;

use remora_server::Client;
use remora_server::module::{field, yes_or_why};

/// The delivery's half of an introduction: the memory that the server's module was given.
pub(crate) struct GrantedMemory {
    /// The first field of the payload must contain this.
    pub(crate) ticket: [u8; TICKET_BYTES],
    /// The page on which the server counts.
    pub(crate) tally: LoadPage,
}

/// The half of the server's task: the descriptors and the command.
pub(crate) struct Introduction {
    /// The number of the introduction, so that a late answer is not taken for another's.
    pub(crate) number: u64,
    /// The descriptors, and the socket over which they pass. `None` in a simulation, which has no memory to pass.
    means: Option<(Handover, Vec<OwnedFd>)>,
    ticket: [u8; TICKET_BYTES],
    length: u64,
}

impl fmt::Debug for Introduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Introduction").field("number", &self.number).finish_non_exhaustive()
    }
}

/// What the server's module answered.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Whether it can set idle times.
    pub(crate) idle_times: bool,
    /// Whether it takes runs of small values (fast keys), or why not.
    pub(crate) fast_keys: Result<(), String>,
    /// Whether it wants to look at what it has loaded, before the snapshot ends.
    pub(crate) verify: bool,
}

/// How long the server may take to fetch the descriptors: it gets the command at once, but may be busy.
const HANDOVER_LIMIT: Duration = Duration::from_secs(3);

/// How long the command may take: the server first removes its keys, which takes long for a large data set.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);

/// Prepares both halves for this memory.
pub(crate) fn prepare(view: &View, number: u64) -> Result<(GrantedMemory, Introduction), String> {
    let text = |error: &dyn fmt::Display| format!("memory cannot be given to the server: {error}");
    let mut ticket = [0; TICKET_BYTES];
    getrandom::fill(&mut ticket).map_err(|error| text(&error))?;
    let tally = LoadPage::create().map_err(|error| text(&error))?;
    let page = tally.memory().as_fd().try_clone_to_owned().map_err(|error| text(&error))?;
    // A memfd that another user handed to this process for reading cannot be opened again, and need not be.
    let memory = view.reopen_read_only().or_else(|_| view.as_fd().try_clone_to_owned());
    let descriptors = vec![memory.map_err(|error| text(&error))?, page];
    let handover = Handover::bind(&Place::Abstract).map_err(|error| text(&error))?;
    Ok((
        GrantedMemory { ticket, tally },
        Introduction { number, means: Some((handover, descriptors)), ticket, length: view.length() },
    ))
}

impl Introduction {
    /// An introduction without memory.
    pub(crate) fn simulated(number: u64) -> Introduction {
        Introduction { number, means: None, ticket: [0; TICKET_BYTES], length: 0 }
    }

    /// Sends the command, and passes the descriptors. The server removes its keys.
    pub(crate) async fn perform(self, client: &mut Client) -> Result<Answer, String> {
        let Introduction { means, ticket, length, .. } = self;
        let ticket: String = ticket.iter().map(|byte| format!("{byte:02x}")).collect();
        let (mut address, mut secret, length) = (String::new(), String::new(), length.to_string());
        let giving = means.map(|(handover, descriptors)| {
            (address, secret) = (handover.address(), handover.secret());
            tokio::task::spawn_blocking(move || {
                let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                handover.give(&descriptors, HANDOVER_LIMIT)
            })
        });
        let command = ["REMORA.LOAD", &address, &secret, &ticket, &length, "FLUSH"];
        let frame = client.command_within(ANSWER_LIMIT, &command).await.map_err(|error| error.to_string())?;
        if let Some(giving) = giving {
            match giving.await {
                Ok(given) => given.map_err(|error| error.to_string())?,
                Err(error) => return Err(error.to_string()),
            }
        }
        let idle_times = match field(&frame, b"idle_times").as_deref() {
            Some("yes") => true,
            Some("no") => false,
            _ => return Err(format!("REMORA.LOAD was answered by {frame:?}, which does not say idle_times")),
        };
        let fast_keys = yes_or_why(field(&frame, b"fast_keys").as_deref());
        Ok(Answer { idle_times, fast_keys, verify: field(&frame, b"verify").as_deref() == Some("yes") })
    }
}
