//! The session with the source: a task that sends what it is given and reports what arrives.
//!
//! Messages are few and keep their order. Reports of progress are many and each makes the one before it void, so only
//! the newest waits to be sent: a source that reads slowly costs no memory here. A report that says what the last one
//! said is sent twice a second only: a source may have a thousand replicas that stay.

use std::time::{Duration, Instant};

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

/// How often a report that says nothing new is sent. The source assigns other upstreams to the readers of a replica
/// that reports nothing for two seconds.
const UNCHANGED_EVERY: Duration = Duration::from_millis(500);

/// The newest report, and when it was made.
type Newest = Option<(Progress, Instant)>;

/// The driver's end. Dropping it ends the session without a last message.
pub(super) struct Session {
    messages: UnboundedSender<Outgoing>,
    progress: watch::Sender<Newest>,
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

    /// Sends this report as soon as there is room, unless there is a newer one by then, or it says nothing new.
    pub(super) fn report(&self, progress: Progress) {
        let now = Instant::now();
        self.progress.send_if_modified(|newest| is_due(newest, progress, now));
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
    mut newest: watch::Receiver<Newest>,
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
async fn report(sender: &Sender, newest: &mut watch::Receiver<Newest>) {
    let progress = newest.borrow_and_update().clone();
    if let Some((progress, _)) = progress {
        let _ = sender.send(Message::Progress(progress)).await;
    }
}

/// Whether this report is to be sent. It replaces the newest one then.
fn is_due(newest: &mut Newest, progress: Progress, now: Instant) -> bool {
    let is_known = newest
        .as_ref()
        .is_some_and(|(known, sent)| *known == progress && now.saturating_duration_since(*sent) < UNCHANGED_EVERY);
    if !is_known {
        *newest = Some((progress, now));
    }
    !is_known
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

#[cfg(test)]
mod tests {
    use remora_protocol::Phase;

    use super::*;

    #[test]
    fn a_report_that_says_nothing_new_is_sent_twice_a_second() {
        let at = |applied_offset| Progress {
            generation: 1,
            phase: Phase::Stay,
            transport: None,
            transport_why: String::new(),
            slots_below: 0,
            slots_held: 0,
            bytes: 0,
            applied_offset,
            relaying: None,
        };
        let (mut newest, begin) = (None, Instant::now());
        let times = (0..60).map(|turn| begin + Duration::from_millis(50 * turn));
        let sent = times.clone().filter(|now| is_due(&mut newest, at(7), *now)).count();
        assert_eq!(sent, 6, "in three seconds");
        let sent = times.enumerate().filter(|(turn, now)| is_due(&mut newest, at(8 + *turn as u64), *now)).count();
        assert_eq!(sent, 60, "each says something new");
    }
}
