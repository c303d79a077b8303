//! What goes into the machine and what comes out of it: events, readings, actions, and the jobs of the server's task.

use std::time::Duration;

use remora_protocol::{Message, Offer, WaitCause};

use crate::exit::Failure;
use crate::reader::loss::Loss;
use crate::reader::source::Tables;
use crate::server::PinSizes;

/// What the machine must know once.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// How long to try again while the source or the server is unreachable (`--retry-for`).
    pub(crate) retry_for: Duration,
    /// How long other replicas may read slots here after the end of the sync (`--linger`).
    pub(crate) linger: Duration,
    /// Feed the server until stopped (`--stay`).
    pub(crate) stay: bool,
    /// The server's own connections to its primary are intercepted: it comes by itself, and is not told anything.
    pub(crate) intercepted: bool,
    /// Keys that the server holds may be removed (`--replace`).
    pub(crate) replace: bool,
    /// The server's address, for messages.
    pub(crate) server: String,
    /// The source's address, for messages.
    pub(crate) source: String,
    /// The primary's address, for messages.
    pub(crate) primary: String,
    /// The server's run id at the preflight.
    pub(crate) run_id: Option<String>,
    /// By which it is decided that the server is near enough to its primary.
    pub(crate) sizes: PinSizes,
}

/// Readings of the delivery and the relay at the moment of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The server holds the whole snapshot.
    pub(crate) loaded: bool,
    /// Bytes of payloads that were given to the server since the sync began.
    pub(crate) bytes_delivered: u64,
    /// Slots of the snapshot that have arrived and match their checksums.
    pub(crate) slots_held: u64,
    /// Offset of the last byte of the stream that has arrived.
    pub(crate) stream_fetched: u64,
    /// The stream is not read for now, because too much of it waits for the server: its end is not known.
    pub(crate) stream_paused: bool,
    /// Offset of the last byte of the stream that was given to the server.
    pub(crate) stream_delivered: u64,
    /// Other replicas that read slots here.
    pub(crate) readers: usize,
}

/// What happened.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// Time has passed.
    Tick,
    /// A signal asks the agent to stop.
    Stop { signal: &'static str },
    /// The session with the source reports.
    Source(SourceEvent),
    /// Connecting to the tables of an offer has succeeded or failed.
    Tables { attempt: u64, connected: Result<Tables, Failure> },
    /// The delivery thread reports.
    Delivery(DeliveryEvent),
    /// The server's task has done the job that it was given.
    Server(Report),
}

/// A report of the session with the source.
#[derive(Clone, Debug)]
pub(crate) enum SourceEvent {
    /// A new session began, as the machine asked.
    Connected,
    /// A new session could not be established.
    Unreachable(Loss),
    /// The session ended.
    Lost(Loss),
    /// The source has no snapshot to offer yet.
    Waiting { cause: WaitCause, text: String },
    /// A snapshot, or the rest of one.
    Offer(Box<Offer>),
    /// A generation has ended.
    GenerationGone { generation: u64, text: String },
    /// Whether the primary would continue the server at the offset of the last question.
    HandOffAnswer { covered: bool, text: String },
}

/// A report of the delivery thread.
#[derive(Clone, Debug)]
pub(crate) enum DeliveryEvent {
    /// The server has connected to the link and sent `PSYNC`.
    Asked,
    /// The server's module must be given memory.
    Introduce { number: u64 },
    /// The whole snapshot has arrived.
    Fetched,
    /// The whole snapshot was written to the server.
    PayloadSent,
    /// The server acknowledged an offset: it has loaded the snapshot.
    Loaded,
    /// The server's link ended; `loading` if it broke in the middle of the snapshot. A link that the delivery itself
    /// closed, because there is another snapshot to load, did not break.
    LinkLost { text: String, loading: bool },
    /// The tables can no longer be read.
    FeedLost { failure: Failure },
    /// The server's request needs another feed.
    FeedWanted,
    /// The delivery cannot continue.
    Fatal { failure: Failure },
}

/// One thing that the server's task does at a time. Each is answered by the [`Report`] of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    /// Check that the server is as it was found, set what loading from the link needs, and look for the module.
    Prepare { after_restart: bool },
    /// Point the server at the link; `from_nothing`: with a replication position that no primary knows.
    Follow { from_nothing: bool },
    /// Give the module memory, for which it empties the server.
    Introduce { number: u64 },
    /// Restore all settings but the login, if the server follows the link.
    PutSettingsBack,
    /// Ask for the offset that the server has applied.
    AskOffset,
    /// Look at the server over a new connection.
    Look,
    /// Give the server the link's login again.
    GiveLogin,
    /// Check which primary the server follows.
    Verify(Followed),
    /// Wait until the server has applied what it was given.
    Settle,
    /// Restore the login and point the server from the link at the primary.
    PointAtPrimary,
    /// Ask for the state of the server's link to the primary.
    AskPrimaryLink,
    /// Set the link's login and point the server from the primary at the link.
    ReturnToLink,
    /// Restore all settings of a server that is a replica.
    Finish,
    /// Put the server in order after a failure.
    Leave(Leaving),
}

/// An address that the server may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Followed {
    Link,
    Primary,
}

/// The state in which a server is left after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// It was never pointed at the link.
    Untouched,
    /// Another client has taken it over.
    AsItIs,
    /// Its data set is complete: its own replication fetches the rest.
    ToPrimary,
    /// Its data set is complete up to an offset, behind which the primary's stream has what it does not know: it keeps
    /// its data, and follows no primary.
    Alone,
    /// Its data set is incomplete, or still what it was before: it gets its former primary back, or is detached.
    Detached,
}

/// The result of a [`Job`].
#[derive(Clone, Debug)]
pub(crate) enum Report {
    /// `true` if the server's module can load the snapshot.
    Prepared(Result<bool, Lapse>),
    Followed(Result<(), NotFollowed>),
    Introduced {
        number: u64,
        outcome: Introduced,
    },
    SettingsPutBack(Result<(), Lapse>),
    Offset(Result<u64, Failure>),
    Looked(Result<Look, Failure>),
    LoginGiven(Result<(), Failure>),
    Verified(Result<(), Lapse>),
    Settled(Result<(), Failure>),
    PointedAtPrimary(Result<(), Lapse>),
    PrimaryLink(Result<PrimaryLink, NoAnswer>),
    ReturnedToLink(Result<(), Lapse>),
    Finished(Result<(), Failure>),
    Left(Left),
    /// The task has ended without being asked to, which is a bug.
    Ended,
}

impl Report {
    /// Whether this is the report of that job.
    pub(crate) fn answers(&self, job: Job) -> bool {
        matches!(
            (self, job),
            (Report::Prepared(_), Job::Prepare { .. })
                | (Report::Followed(_), Job::Follow { .. })
                | (Report::Introduced { .. }, Job::Introduce { .. })
                | (Report::SettingsPutBack(_), Job::PutSettingsBack)
                | (Report::Offset(_), Job::AskOffset)
                | (Report::Looked(_), Job::Look)
                | (Report::LoginGiven(_), Job::GiveLogin)
                | (Report::Verified(_), Job::Verify(_))
                | (Report::Settled(_), Job::Settle)
                | (Report::PointedAtPrimary(_), Job::PointAtPrimary)
                | (Report::PrimaryLink(_), Job::AskPrimaryLink)
                | (Report::ReturnedToLink(_), Job::ReturnToLink)
                | (Report::Finished(_), Job::Finish)
                | (Report::Left(_), Job::Leave(_))
        )
    }

    /// Another client has taken the server over.
    pub(crate) fn is_take_over(&self) -> bool {
        let lapse = match self {
            Report::Prepared(Err(lapse))
            | Report::Followed(Err(NotFollowed::Failed { lapse, .. }))
            | Report::Introduced { outcome: Introduced::Failed(lapse), .. }
            | Report::SettingsPutBack(Err(lapse))
            | Report::Verified(Err(lapse))
            | Report::PointedAtPrimary(Err(lapse))
            | Report::ReturnedToLink(Err(lapse)) => lapse,
            _ => return false,
        };
        matches!(lapse, Lapse::TakenOver(_))
    }
}

/// The state in which the server was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    /// Describes the state.
    pub(crate) text: String,
    /// It was left as it is because another client has taken it over.
    pub(crate) taken_over: bool,
}

impl Left {
    /// A server that was put in order.
    pub(crate) fn in_order(text: impl Into<String>) -> Left {
        Left { text: text.into(), taken_over: false }
    }

    /// A server that another client has taken over.
    pub(crate) fn as_it_is(text: impl Into<String>) -> Left {
        Left { text: text.into(), taken_over: true }
    }
}

/// Why a job on the server was not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lapse {
    /// Another client has changed the server; the text goes on behind the server's name.
    TakenOver(String),
    Failed(Failure),
}

/// Why the server was not pointed at the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotFollowed {
    /// The server permits no transaction. It was not changed.
    NoTransaction(String),
    /// It failed; `told` if the server may follow the link nevertheless.
    Failed { lapse: Lapse, told: bool },
}

/// The result of [`Job::Introduce`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Introduced {
    /// The module has answered, and the delivery gets the answer; `emptied`: the server's keys are gone.
    Done {
        emptied: bool,
    },
    /// The server's position had become valid again and was given up once more: its link ends, and it is introduced
    /// when it comes back.
    AgainFromNothing,
    /// The position cannot be given up: the module is not used.
    NotUsed,
    /// It was cancelled. The module may have begun to empty the server.
    Cancelled,
    Failed(Lapse),
}

/// The server, seen over a new connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) run_id: Option<String>,
    pub(crate) follows: Follows,
    pub(crate) loading: bool,
    pub(crate) keys: u64,
    /// What keeps a server that follows the link from coming to it, as far as that is known.
    pub(crate) trouble: String,
}

/// What the server follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follows {
    Nothing,
    Link,
    Another,
}

/// The server's link to the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrimaryLink {
    /// The server follows the primary.
    pub(crate) is_followed: bool,
    pub(crate) up: bool,
    /// The server takes a full copy.
    pub(crate) syncing: bool,
    pub(crate) offset: u64,
}

/// The server did not answer a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoAnswer {
    /// It may answer later without an operator.
    pub(crate) passes: bool,
    pub(crate) failure: Failure,
}

/// An action for the driver. The driver must not wait: a long operation reports an [`Event`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    /// Connect to the source; ends with [`SourceEvent::Connected`] or [`SourceEvent::Unreachable`].
    ConnectSource,
    /// Ask the source for what is still needed.
    Join,
    /// Connect to the tables of this offer; ends with [`Event::Tables`].
    ConnectTables { attempt: u64, offer: Box<Offer> },
    /// Give the tables of this attempt to the delivery.
    Attach { attempt: u64 },
    /// Ask whether the primary would continue the server at this offset: the source, or the primary itself. Ends with
    /// [`SourceEvent::HandOffAnswer`], unless the source is lost first.
    AskHandOff { generation: u64, offset: u64 },
    /// Report the progress to the source now.
    TellProgress,
    /// Order the delivery to refer to shared memory, or not to.
    UseModule(bool),
    /// Report the result of this introduction to the delivery.
    EndIntroduction { number: u64 },
    /// Close the link of a server whose snapshot will never be whole.
    GiveUpLoad,
    /// Have the server that has loaded load another snapshot; ends with [`DeliveryEvent::FeedWanted`].
    LoadAgain,
    /// Give the server no more of the stream.
    HoldStream,
    /// Have the server's task do this.
    Server(Job),
    /// End the introduction that the server's task is at.
    CancelIntroduction,
    /// Have the server's task wait for nothing more before it finishes: the server follows the primary.
    Hurry,
    /// End the delivery; `done`: its spool is not needed any more.
    StopDelivery { done: bool },
    /// Report how the sync went.
    Publish,
    /// Log that this number of replicas still read here.
    SayLingering { readers: usize },
    /// The end, after this last message to the source.
    End { outcome: Result<(), Failure>, last: Box<Message> },
}
