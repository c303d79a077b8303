//! What goes into the machine and what comes out of it: events, readings, actions, and the jobs of the server's task.

use std::time::Duration;

use remora_protocol::{Message, Offer, WaitCause};

use remora_process::exit::Failure;
use remora_reader::addresses::Loss;
use remora_reader::source::Tables;
use remora_server::PinSizes;

/// What the machine must know once.
#[derive(Clone, Debug)]
pub struct Rules {
    /// How long to try again while the source or the server is unreachable (`--retry-for`).
    pub retry_for: Duration,
    /// How long other replicas may read slots here after the end of the sync (`--linger`).
    pub linger: Duration,
    /// Feed the server until stopped (`--stay`).
    pub stay: bool,
    /// The server's own connections to its primary are intercepted: it comes by itself, and is not told anything.
    pub intercepted: bool,
    /// Keys that the server holds may be removed (`--replace`).
    pub replace: bool,
    /// The server's address, for messages.
    pub server: String,
    /// The source's address, for messages.
    pub source: String,
    /// The primary's address, for messages.
    pub primary: String,
    /// The server's run id at the preflight.
    pub run_id: Option<String>,
    /// By which it is decided that the server is near enough to its primary.
    pub sizes: PinSizes,
}

/// Readings of the delivery and the relay at the moment of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The server holds the whole snapshot.
    pub loaded: bool,
    /// Bytes of payloads that were given to the server since the sync began.
    pub bytes_delivered: u64,
    /// Slots of the snapshot that have arrived and match their checksums.
    pub slots_held: u64,
    /// Offset of the last byte of the stream that has arrived.
    pub stream_fetched: u64,
    /// The stream is not read for now, because too much of it waits for the server: its end is not known.
    pub stream_paused: bool,
    /// Offset of the last byte of the stream that was given to the server.
    pub stream_delivered: u64,
    /// Other replicas that read slots here.
    pub readers: usize,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// A signal asks the agent to stop.
    Stop {
        /// Its name.
        signal: &'static str,
    },
    /// The session with the source reports.
    Source(SourceEvent),
    /// Connecting to the tables of an offer has succeeded or failed.
    Tables {
        /// The number of [`Action::ConnectTables`].
        attempt: u64,
        /// The tables, or why they cannot be read.
        connected: Result<Tables, Failure>,
    },
    /// The delivery thread reports.
    Delivery(DeliveryEvent),
    /// The server's task has done the job that it was given.
    Server(Report),
}

/// A report of the session with the source.
#[derive(Clone, Debug)]
pub enum SourceEvent {
    /// A new session began, as the machine asked.
    Connected,
    /// A new session could not be established.
    Unreachable(Loss),
    /// The session ended.
    Lost(Loss),
    /// The source has no snapshot to offer yet.
    Waiting {
        /// What it waits for.
        cause: WaitCause,
        /// The source's own words.
        text: String,
    },
    /// A snapshot, or the rest of one.
    Offer(Box<Offer>),
    /// A generation has ended.
    GenerationGone {
        /// Its number.
        generation: u64,
        /// Why.
        text: String,
    },
    /// Whether the primary would continue the server at the offset of the last question.
    HandOffAnswer {
        /// It would.
        covered: bool,
        /// Why not.
        text: String,
    },
}

/// A report of the delivery thread.
#[derive(Clone, Debug)]
pub enum DeliveryEvent {
    /// The server has connected to the link and sent `PSYNC`.
    Asked,
    /// The server's module must be given memory.
    Introduce {
        /// Counts introductions.
        number: u64,
    },
    /// The whole snapshot has arrived.
    Fetched,
    /// The whole snapshot was written to the server.
    PayloadSent,
    /// The server acknowledged an offset: it has loaded the snapshot.
    Loaded,
    /// The server's link ended. A link that the delivery itself closed, because there is another snapshot to load, did
    /// not break.
    LinkLost {
        /// Why.
        text: String,
        /// It broke in the middle of the snapshot.
        loading: bool,
    },
    /// The tables can no longer be read.
    FeedLost {
        /// Why.
        failure: Failure,
    },
    /// The server's request needs another feed.
    FeedWanted,
    /// The delivery cannot continue.
    Fatal {
        /// Why.
        failure: Failure,
    },
}

/// One thing that the server's task does at a time. Each is answered by the [`Report`] of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Check that the server is as it was found, set what loading from the link needs, and look for the module.
    Prepare {
        /// The server was restarted: its run id is another one.
        after_restart: bool,
    },
    /// Point the server at the link.
    Follow {
        /// With a replication position that no primary knows.
        from_nothing: bool,
    },
    /// Give the module memory, for which it empties the server.
    Introduce {
        /// The number of [`DeliveryEvent::Introduce`].
        number: u64,
    },
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
pub enum Followed {
    /// The agent's link.
    Link,
    /// The primary.
    Primary,
}

/// The state in which a server is left after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
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
pub enum Report {
    /// `true` if the server's module can load the snapshot.
    Prepared(Result<bool, Lapse>),
    /// The server was pointed at the link.
    Followed(Result<(), NotFollowed>),
    /// The module was introduced to memory.
    Introduced {
        /// The job's number.
        number: u64,
        /// What came of it.
        outcome: Introduced,
    },
    /// All settings but the login are as they were.
    SettingsPutBack(Result<(), Lapse>),
    /// The offset that the server has applied.
    Offset(Result<u64, Failure>),
    /// The server, over a new connection.
    Looked(Result<Look, Failure>),
    /// The server has the link's login.
    LoginGiven(Result<(), Failure>),
    /// The server follows whom it should.
    Verified(Result<(), Lapse>),
    /// The server has applied what it was given.
    Settled(Result<(), Failure>),
    /// The server was pointed at the primary.
    PointedAtPrimary(Result<(), Lapse>),
    /// The state of its link to the primary.
    PrimaryLink(Result<PrimaryLink, NoAnswer>),
    /// The server was pointed at the link again.
    ReturnedToLink(Result<(), Lapse>),
    /// All settings are as they were.
    Finished(Result<(), Failure>),
    /// How the server was left after a failure.
    Left(Left),
    /// The task has ended without being asked to, which is a bug.
    Ended,
}

impl Report {
    /// Whether this is the report of that job.
    pub fn answers(&self, job: Job) -> bool {
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
    pub fn is_take_over(&self) -> bool {
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
pub struct Left {
    /// Describes the state.
    pub text: String,
    /// It was left as it is because another client has taken it over.
    pub taken_over: bool,
}

impl Left {
    /// A server that was put in order.
    pub fn in_order(text: impl Into<String>) -> Left {
        Left { text: text.into(), taken_over: false }
    }

    /// A server that another client has taken over.
    pub fn as_it_is(text: impl Into<String>) -> Left {
        Left { text: text.into(), taken_over: true }
    }
}

/// Why a job on the server was not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lapse {
    /// Another client has changed the server; the text goes on behind the server's name.
    TakenOver(String),
    /// It failed.
    Failed(Failure),
}

/// Why the server was not pointed at the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotFollowed {
    /// The server permits no transaction. It was not changed.
    NoTransaction(String),
    /// It failed.
    Failed {
        /// Why.
        lapse: Lapse,
        /// The server may follow the link nevertheless.
        told: bool,
    },
}

/// The result of [`Job::Introduce`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Introduced {
    /// The module has answered, and the delivery gets the answer.
    Done {
        /// The server's keys are gone.
        emptied: bool,
    },
    /// The server's position had become valid again and was given up once more: its link ends, and it is introduced
    /// when it comes back.
    AgainFromNothing,
    /// The position cannot be given up: the module is not used.
    NotUsed,
    /// It was cancelled. The module may have begun to empty the server.
    Cancelled,
    /// It failed.
    Failed(Lapse),
}

/// The server, seen over a new connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// Its run id, if it says one.
    pub run_id: Option<String>,
    /// What it follows.
    pub follows: Follows,
    /// It loads a data set.
    pub loading: bool,
    /// Keys of all its databases.
    pub keys: u64,
    /// What keeps a server that follows the link from coming to it, as far as that is known.
    pub trouble: String,
}

/// What the server follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follows {
    /// No primary.
    Nothing,
    /// The agent's link.
    Link,
    /// Another address.
    Another,
}

/// The server's link to the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrimaryLink {
    /// The server follows the primary.
    pub is_followed: bool,
    /// The link is up.
    pub up: bool,
    /// The server takes a full copy.
    pub syncing: bool,
    /// The offset that the server has applied.
    pub offset: u64,
}

/// The server did not answer a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoAnswer {
    /// It may answer later without an operator.
    pub passes: bool,
    /// What it said.
    pub failure: Failure,
}

/// An action for the driver. The driver must not wait: a long operation reports an [`Event`].
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Connect to the source; ends with [`SourceEvent::Connected`] or [`SourceEvent::Unreachable`].
    ConnectSource,
    /// Ask the source for what is still needed.
    Join,
    /// Connect to the tables of this offer; ends with [`Event::Tables`].
    ConnectTables {
        /// Counts offers.
        attempt: u64,
        /// What the source offers.
        offer: Box<Offer>,
    },
    /// Give the tables of this attempt to the delivery.
    Attach {
        /// The number of [`Action::ConnectTables`].
        attempt: u64,
    },
    /// Ask whether the primary would continue the server at this offset: the source, or the primary itself. Ends with
    /// [`SourceEvent::HandOffAnswer`], unless the source is lost first.
    AskHandOff {
        /// The snapshot's number.
        generation: u64,
        /// The offset that the server has applied.
        offset: u64,
    },
    /// Report the progress to the source now.
    TellProgress,
    /// Order the delivery to refer to shared memory, or not to.
    UseModule(bool),
    /// Report the result of this introduction to the delivery.
    EndIntroduction {
        /// Its number.
        number: u64,
    },
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
    /// End the delivery.
    StopDelivery {
        /// Its spool is not needed any more.
        done: bool,
    },
    /// Report how the sync went.
    Publish,
    /// Log that this number of replicas still read here.
    SayLingering {
        /// How many.
        readers: usize,
    },
    /// The end, after this last message to the source.
    End {
        /// How the sync went.
        outcome: Result<(), Failure>,
        /// For the source.
        last: Box<Message>,
    },
}
