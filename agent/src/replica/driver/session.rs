//! The session with the source: a task that sends what it is given and reports what arrives.
//!
//! Messages are few and keep their order. Reports of progress are many and each makes the one before it void, so only
//! the newest waits to be sent: a source that reads slowly costs no memory here.

use std::time::Duration;

use remora_protocol::{Message, Progress, RefusalCode};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::conversation::{Error, Fault, Receiver, Sender};
use crate::exit::Failure;
use crate::replica::machine::Loss;
use crate::replica::source::{Source, Way, failure};
use crate::tasks::AbortOnDrop;

/// How long the last messages may take, the closing of the session included.
const LEAVE_LIMIT: Duration = Duration::from_secs(3);

/// The driver's end. Dropping it ends the session without a last message.
pub(super) struct Session {
    messages: UnboundedSender<Outgoing>,
    progress: watch::Sender<Option<Progress>>,
    events: UnboundedReceiver<Received>,
    way: Way,
    task: JoinHandle<()>,
    _end: AbortOnDrop,
}

enum Outgoing {
    Message(Message),
    /// The last message. The session closes when it has arrived.
    Last(Message),
}

/// A message or the end of the session.
pub(super) enum Received {
    Message(Box<Message>),
    Lost(Loss),
}

impl Session {
    pub(super) fn start(source: Source, way: Way) -> Session {
        let (sender, receiver) = source.split();
        let (messages, queued) = unbounded_channel();
        let (progress, newest) = watch::channel(None);
        let (tell, events) = unbounded_channel();
        let task = tokio::spawn(run(sender, receiver, queued, newest, tell));
        let end = AbortOnDrop::new(&task);
        Session { messages, progress, events, way, task, _end: end }
    }

    /// Queues a message. One that cannot be sent is dropped: the end of the session is reported.
    pub(super) fn send(&self, message: Message) {
        let _ = self.messages.send(Outgoing::Message(message));
    }

    /// Sends this report as soon as there is room, unless there is a newer one by then.
    pub(super) fn report(&self, progress: Progress) {
        self.progress.send_replace(Some(progress));
    }

    /// The parameters for connecting to offered tables.
    pub(super) fn way(&self) -> &Way {
        &self.way
    }

    /// The next message, or the end of the session. Cancel-safe.
    pub(super) async fn received(&mut self) -> Received {
        match self.events.recv().await {
            Some(received) => received,
            None => {
                let failure = Failure::local("the source's session ended unexpectedly; this is a bug of remora");
                Received::Lost(Loss { passes: true, stalled: false, failure })
            }
        }
    }

    /// Sends the newest report and this message, and closes the session when they have arrived.
    pub(super) async fn leave(self, message: Message) {
        let Session { messages, task, _end: end, .. } = self;
        let _ = messages.send(Outgoing::Last(message));
        // The source may be gone, or slow: the sync is over either way.
        let _ = tokio::time::timeout(LEAVE_LIMIT, task).await;
        drop(end);
    }
}

async fn run(
    sender: Sender,
    mut receiver: Receiver,
    mut queued: UnboundedReceiver<Outgoing>,
    mut newest: watch::Receiver<Option<Progress>>,
    tell: UnboundedSender<Received>,
) {
    loop {
        tokio::select! {
            biased;
            outgoing = queued.recv() => match outgoing {
                // The next read reports that the session has ended.
                Some(Outgoing::Message(message)) => drop(sender.send(message).await),
                Some(Outgoing::Last(message)) => {
                    report(&sender, &mut newest).await;
                    let _ = sender.send(message).await;
                    return sender.finish(receiver).await;
                }
                None => return,
            },
            received = receiver.receive() => {
                let received = match received {
                    Ok(message) => Received::Message(Box::new(message)),
                    Err(error) => Received::Lost(loss(error)),
                };
                let is_over = matches!(received, Received::Lost(_));
                if tell.send(received).is_err() || is_over {
                    return;
                }
            },
            changed = newest.changed() => match changed {
                Ok(()) => report(&sender, &mut newest).await,
                Err(_) => return,
            },
        }
    }
}

/// Sends the newest report.
async fn report(sender: &Sender, newest: &mut watch::Receiver<Option<Progress>>) {
    let progress = newest.borrow_and_update().clone();
    if let Some(progress) = progress {
        let _ = sender.send(Message::Progress(progress)).await;
    }
}

/// The meaning of a conversation's error for the sync.
fn loss(error: Error) -> Loss {
    let stalled = matches!(error.fault, Fault::Refused { code: RefusalCode::Stalled, .. });
    Loss { passes: error.fault.may_pass(), stalled, failure: failure(error) }
}

/// The meaning of a failed attempt to connect to the source again. Another attempt may always succeed: the peer has not
/// proved that it holds the token, so any host on the way could have sent its refusal.
pub(super) fn unreachable(error: Error) -> Loss {
    Loss { passes: true, ..loss(error) }
}
