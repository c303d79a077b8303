//! The session with the source: a task that sends what it is given and reports what arrives.
//!
//! Messages are few and keep their order. Reports of progress are many and each makes the one before it void, so only
//! the newest waits to be sent: a source that reads slowly costs no memory here. A report that says what the last one
//! said is sent twice a second only: a source may have a thousand replicas that stay. One that only counts slots that
//! the source retains is sent four times a second.

use std::time::{Duration, Instant};

use remora_protocol::{Message, Phase, Progress, RefusalCode};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::machine::Loss;
use super::source::{Source, Way, failure};
use crate::conversation::{Error, Fault, Receiver, Sender};
use crate::exit::Failure;
use crate::tasks::AbortOnDrop;

/// How long the last messages may take, the closing of the session included.
const LEAVE_LIMIT: Duration = Duration::from_secs(3);

/// How often a report that says nothing new is sent. The source assigns other upstreams to the readers of a replica
/// that reports nothing for two seconds.
const UNCHANGED_EVERY: Duration = Duration::from_millis(500);

/// How often a report is sent that counts more slots of a snapshot that the source retains, and says nothing else that
/// is new. No writer waits for the readers of such a snapshot. Each report wakes the source: of eight replicas at
/// twenty reports a second it took 0.4 processor seconds in fifteen. The source measures rates over a second, and
/// compares replicas at a time of which both have told.
const RETAINED_EVERY: Duration = Duration::from_millis(250);

/// The newest report, and when it was made.
type Newest = Option<(Progress, Instant)>;

/// The driver's end. Dropping it ends the session without a last message.
pub(crate) struct Session {
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
pub(crate) enum Received {
    Message(Box<Message>),
    Lost(Loss),
}

impl Session {
    pub(crate) fn start(source: Source, way: Way) -> Session {
        let (sender, receiver) = source.split();
        let (messages, queued) = unbounded_channel();
        let (progress, newest) = watch::channel(None);
        let (tell, events) = unbounded_channel();
        let task = tokio::spawn(run(sender, receiver, queued, newest, tell));
        let end = AbortOnDrop::new(&task);
        Session { messages, progress, events, way, task, _end: end }
    }

    /// Queues a message. One that cannot be sent is dropped: the end of the session is reported.
    pub(crate) fn send(&self, message: Message) {
        let _ = self.messages.send(Outgoing::Message(message));
    }

    /// Sends this report as soon as there is room, unless there is a newer one by then, or it says too little that is
    /// new. `is_retained`: the source keeps all slots of the snapshot that the report is about.
    pub(crate) fn report(&self, progress: Progress, is_retained: bool) {
        let now = Instant::now();
        self.progress.send_if_modified(|newest| is_due(newest, progress, is_retained, now));
    }

    /// The parameters for connecting to offered tables.
    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    /// The next message, or the end of the session. Cancel-safe.
    pub(crate) async fn received(&mut self) -> Received {
        match self.events.recv().await {
            Some(received) => received,
            None => {
                let failure = Failure::local("the source's session ended unexpectedly; this is a bug of remora");
                Received::Lost(Loss::passing(failure))
            }
        }
    }

    /// Sends the newest report and this message, and closes the session when they have arrived.
    pub(crate) async fn leave(self, message: Message) {
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
fn is_due(newest: &mut Newest, progress: Progress, is_retained: bool, now: Instant) -> bool {
    let pause = match newest {
        Some((known, _)) if *known == progress => UNCHANGED_EVERY,
        Some((known, _)) if is_retained && only_counts(known, &progress) => RETAINED_EVERY,
        _ => Duration::ZERO,
    };
    let is_due = newest.as_ref().is_none_or(|(_, sent)| now.saturating_duration_since(*sent) >= pause);
    if is_due {
        *newest = Some((progress, now));
    }
    is_due
}

/// Whether a report differs from the one before only in how much of the snapshot the replica has.
fn only_counts(before: &Progress, report: &Progress) -> bool {
    let reads_from = |report: &Progress| report.relaying.map(|relaying| relaying.reads_from);
    let Progress { slots_below, slots_held, bytes, relaying, .. } = report.clone();
    matches!(report.phase, Phase::Transfer | Phase::Load)
        && reads_from(before) == reads_from(report)
        && *report == Progress { slots_below, slots_held, bytes, relaying, ..before.clone() }
}

/// The meaning of a conversation's error for the sync.
fn loss(error: Error) -> Loss {
    let is = |wanted| matches!(error.fault, Fault::Refused { code, .. } if code == wanted);
    let (stalled, history_gone) = (is(RefusalCode::Stalled), is(RefusalCode::HistoryGone));
    Loss { passes: error.fault.may_pass(), stalled, history_gone, failure: failure(error) }
}

/// The meaning of a failed attempt to connect to the source again. Another attempt may always succeed: the peer has not
/// proved that it holds the token, so any host on the way could have sent its refusal.
pub(crate) fn unreachable(error: Error) -> Loss {
    Loss { passes: true, ..loss(error) }
}

#[cfg(test)]
mod tests {
    use remora_protocol::Relaying;

    use super::*;

    const REPORT: Progress = Progress {
        generation: 1,
        phase: Phase::Transfer,
        transport: None,
        transport_why: String::new(),
        no_fast_keys: String::new(),
        slots_below: 0,
        slots_held: 0,
        bytes: 0,
        applied_offset: 0,
        relaying: None,
    };

    /// How many of the reports that the driver makes in three seconds, one each 50 ms, are sent.
    fn sent(newest: &mut Newest, is_retained: bool, report: impl Fn(u64) -> Progress) -> usize {
        let begin = newest.as_ref().map_or_else(Instant::now, |(_, sent)| *sent + Duration::from_millis(50));
        let is_sent = |turn: &u64| is_due(newest, report(*turn), is_retained, begin + Duration::from_millis(50 * turn));
        (0..60).filter(is_sent).count()
    }

    #[test]
    fn a_report_that_says_nothing_new_is_sent_twice_a_second() {
        let (mut newest, at) = (None, |applied_offset| Progress { phase: Phase::Stay, applied_offset, ..REPORT });
        assert_eq!(sent(&mut newest, false, |_| at(7)), 6);
        assert_eq!(sent(&mut newest, false, |turn| at(8 + turn)), 60, "each says something new");
        assert_eq!(sent(&mut newest, true, |turn| at(99 + turn)), 60, "the offset is not a count of slots");
    }

    #[test]
    fn a_report_that_counts_slots_which_the_source_retains_is_sent_four_times_a_second() {
        let relaying = |held| Some(Relaying { held, ..Relaying::default() });
        let at = |count| Progress { slots_held: count, bytes: count, relaying: relaying(count), ..REPORT };
        assert_eq!(sent(&mut None, true, at), 12);
        assert_eq!(sent(&mut None, false, at), 60, "the writer of a window waits for its readers");
        let loads = |count| Progress { phase: Phase::Load, slots_below: count, ..REPORT };
        assert_eq!(sent(&mut None, true, loads), 12);
    }

    #[test]
    fn a_report_of_another_phase_or_upstream_is_sent_at_once() {
        let upstream = |reads_from| Some(Relaying { reads_from, ..Relaying::default() });
        let before = Progress { relaying: upstream(Some(1)), ..REPORT };
        let news = [
            Progress { phase: Phase::Load, ..before.clone() },
            Progress { relaying: upstream(None), ..before.clone() },
            Progress { relaying: None, ..before.clone() },
            Progress { generation: 2, ..before.clone() },
            Progress { transport: Some(1), ..before.clone() },
        ];
        for report in news {
            let now = Instant::now();
            let mut newest = Some((before.clone(), now));
            assert!(is_due(&mut newest, report.clone(), true, now), "{report:?}");
        }
    }
}
