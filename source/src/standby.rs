//! Standby: copies the snapshots of another source, the first one, and serves them under the same generation.
//!
//! ```text
//!   the first ── offer ──▶ the task here ──▶ is it of our server's history, and does it fit? ── no: the log says why
//!       ║                                          │ yes, and no reader needs our present snapshot
//!       ║ slots, and the stream up to now          ▼
//!       ╚══════════════════════════════════▶ a capture, which copies (`capture/copied.rs`) ◀══ the stream from now on ══ our server
//! ```
//!
//! A copy has the first one's generation, and the same bytes in the same slots, also of a table that is sealed. So a
//! reader goes on here at the slot where it is. The stream comes from the source's own server, and the death of the
//! first one changes nothing about it.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use remora_fabric::TransportKind;
use remora_fabric::verbs::CompletionMode;
use remora_protocol::{Message, Phase, Progress};
use remora_reader::ReadOptions;
use remora_reader::addresses::Addresses;
use remora_reader::source::{Received, Session, Source as First, join};
use tokio::sync::Notify;
use tokio::sync::mpsc::Sender;

use super::capture::{CaptureEvent, Offered};
use super::copies::{Copies, End, Here};
use super::gauge::Gauge;
use super::machine::Event;
use super::{Incoming, Source};
use crate::options::{Compress, Options};
use remora_base::pace::Backoff;
use remora_base::units::Size;
use remora_conversation::tokens::Credentials;
use remora_conversation::transports::{RdmaEnd, RdmaRead, TransportChoice};
use remora_process::AbortOnDrop;
use remora_process::exit::Failure;
use remora_server::HostPort;

/// How often the first source is told how far the copy is.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// TCP connections for reading, as a replica's default.
const LANES: u8 = 1;

/// What the task tells the loop.
pub(crate) enum News {
    Offered(Box<Offered>),
    /// The conversation has ended, or none has begun.
    Away(String),
}

/// The loop's part.
pub(super) struct Standby {
    pub(super) copies: Copies<Offered>,
    shared: Arc<Shared>,
    _task: AbortOnDrop,
}

/// What the task is shown.
#[derive(Default)]
struct Shared {
    /// The generation that is copied now; 0: none.
    copying: AtomicU64,
    /// The copy has failed: another conversation begins.
    failed: Notify,
}

impl Standby {
    /// Begins to look after the first source. `None`: the options name none. `process`: this process's number.
    pub(super) fn begin(
        options: &Options,
        serves_at: String,
        process: u64,
        gauge: &Arc<Gauge>,
        tell: Sender<Incoming>,
    ) -> Option<Standby> {
        let first = options.first.clone()?;
        let shared = Arc::new(Shared::default());
        let task = Task {
            read: read_options(first.clone()),
            credentials: options.tokens.credentials(None),
            serves_at,
            process,
            gauge: gauge.clone(),
            shared: shared.clone(),
            tell,
        };
        let task = AbortOnDrop::new(&tokio::spawn(task.run()));
        Some(Standby { copies: Copies::of(first), shared, _task: task })
    }

    /// What the standby does, in words.
    pub(super) fn words(&self, source: &Source) -> String {
        let snapshot = source.machine.status().snapshot;
        let what = match (self.copies.copying(), snapshot.is_some_and(|snapshot| snapshot.is_sealed())) {
            (Some(_), _) => format!("{} of its snapshot are copied", Size::bytes(source.gauge.received())),
            (None, true) => "a whole snapshot is here".to_owned(),
            (None, false) => "no snapshot is here yet".to_owned(),
        };
        let behind = source.facts.offset.unwrap_or(0).saturating_sub(source.gauge.journal().1);
        let stream = match source.machine.status().stream {
            Some(_) => format!(", {} behind the server", Size::bytes(behind)),
            None => String::new(),
        };
        format!("standby of {}: {what}{stream}{}", self.copies.first(), self.copies.trouble_in_words())
    }
}

/// The task has news.
pub(super) fn told(source: &mut Source, news: News) {
    let Some(standby) = &mut source.standby else { return };
    match news {
        News::Offered(offered) => {
            standby.copies.offered(Arc::from(offered));
            // Its history may be newer than what is known of the server.
            source.learn();
        }
        News::Away(why) => {
            standby.copies.away(why);
        }
    }
}

/// Begins to copy what the first one offers, if it suits and no reader needs the present snapshot.
///
/// # Errors
/// As those of the machine's actions.
pub(super) fn look(source: &mut Source) -> Result<(), Failure> {
    let Some(standby) = source.standby.as_mut().filter(|standby| standby.copies.has_an_offer()) else { return Ok(()) };
    let tables = &source.tables;
    let here = Here {
        server: source.captured.server().url().to_string(),
        replid: source.facts.replid,
        is_sealed: tables.is_sealed(),
        compresses: tables.compress() != Compress::Off,
        room: tables.own_shape(&source.options).map(|shape| shape.memory_len()),
        // The thread that prepares the memory writes it.
        is_preparing: source.preparation.is_under_way(),
    };
    let Some(generation) = standby.copies.look(&source.machine, &here) else { return Ok(()) };
    standby.shared.copying.store(generation, Relaxed);
    source.apply(Event::Copied { generation })
}

/// A copy has ended. Called with each event of a capture.
pub(super) fn capture_says(source: &mut Source, event: &CaptureEvent) {
    let Some(standby) = &mut source.standby else { return };
    if let Some(end) = standby.copies.ended(event) {
        standby.shared.copying.store(0, Relaxed);
        if end == End::Failed {
            standby.shared.failed.notify_one();
        }
    }
}

/// How the first one is read: over the network also on the same host, where shared memory has the plain table only.
fn read_options(first: HostPort) -> ReadOptions {
    ReadOptions {
        source: Addresses::from(first),
        transport: TransportChoice::Tcp,
        lanes: LANES,
        rdma: RdmaRead {
            end: RdmaEnd::default(),
            queue_pairs: 1,
            queue_depth: 1,
            reads: 1,
            piece: Size::mebibytes(1),
            completion: CompletionMode::PollThenArm,
        },
        retry_for: Duration::ZERO,
    }
}

/// The conversation with the first source, again and again.
struct Task {
    read: ReadOptions,
    credentials: Credentials,
    serves_at: String,
    process: u64,
    gauge: Arc<Gauge>,
    shared: Arc<Shared>,
    tell: Sender<Incoming>,
}

impl Task {
    async fn run(self) {
        let mut backoff = Backoff::from_system();
        loop {
            let is_over = Arc::new(AtomicBool::new(false));
            let Err(why) = self.converse(&is_over, &mut backoff).await;
            is_over.store(true, Relaxed);
            if self.tell.send(Incoming::First(News::Away(why))).await.is_err() {
                return;
            }
            tokio::time::sleep(backoff.next()).await;
        }
    }

    async fn converse(&self, is_over: &Arc<AtomicBool>, backoff: &mut Backoff) -> Result<Infallible, String> {
        let name = format!("standby {}", self.serves_at);
        let mut first = First::connect(&self.read, &self.credentials).await.map_err(|error| error.to_string())?;
        let plan = first.plan(&self.read, Some(&name), "").await.map_err(|failure| failure.message)?;
        if plan.process == self.process {
            return Err("that is this source itself: name the other one".into());
        }
        let way = first.way(&self.read);
        let mut session = Session::start(first, way.clone(), &self.read.source);
        session.send(Message::StandBy { serves_at: self.serves_at.clone() });
        session.send(Message::Join(join(Some(&name), &plan.server, None)));
        let (mut generation, mut due) = (None, tokio::time::interval(REPORT_EVERY));
        due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                received = session.received() => match received {
                    Received::Lost(loss) => return Err(loss.failure.message),
                    Received::Message(message) => if let Message::Offer(offer) = *message {
                        backoff.reset();
                        generation = Some(offer.generation);
                        let offered = Offered { offer, way: way.clone(), is_over: is_over.clone() };
                        let _ = self.tell.send(Incoming::First(News::Offered(Box::new(offered)))).await;
                    }
                },
                _ = due.tick() => if let Some(generation) = generation {
                    session.report(self.progress(generation), true);
                },
                () = self.shared.failed.notified() => return Err("the copy of its snapshot failed, and begins again".into()),
            }
        }
    }

    fn progress(&self, generation: u64) -> Progress {
        let copies = self.shared.copying.load(Relaxed) == generation;
        let slots = self.gauge.published_slots();
        Progress {
            generation,
            phase: if copies { Phase::Transfer } else { Phase::Stay },
            transport: Some(TransportKind::Tcp.code()),
            transport_why: String::new(),
            no_fast_keys: String::new(),
            slots_below: slots,
            slots_held: slots,
            bytes: self.gauge.received(),
            applied_offset: self.gauge.journal().1,
            relaying: None,
        }
    }
}
