//! Standby: copies the snapshots of another source, the first one, and serves them under the same generation.
//!
//! ```text
//!   the first ── offer ──▶ the task here ──▶ is it of our server's history, and does it fit? ── no: the log says why
//!       ║                                          │ yes, and no reader needs our present snapshot
//!       ║ slots, and the stream up to now          ▼
//!       ╚══════════════════════════════════▶ a capture, which copies (`capture/bases.rs`) ◀══ the stream from now on ══ our server
//! ```
//!
//! A copy has the first one's generation, and the same bytes in the same slots, also of a table that is sealed. So a
//! reader goes on here at the slot where it is. The stream comes from the source's own server, and the death of the
//! first one changes nothing about it.
//!
//! What is copied, when, and where the stream goes on behind a copy, is decided without I/O ([`Copies`]): the
//! simulation plays it.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use remora_base::mutation::Mutation;
use remora_base::pace::Backoff;
use remora_base::units::Size;
use remora_conversation::tokens::Credentials;
use remora_conversation::transports::{RdmaEnd, RdmaRead, TransportChoice};
use remora_fabric::TransportKind;
use remora_fabric::verbs::CompletionMode;
use remora_process::exit::Failure;
use remora_process::{AbortOnDrop, events};
use remora_protocol::{Message, Offer, Phase, Progress};
use remora_reader::ReadOptions;
use remora_reader::addresses::Addresses;
use remora_reader::source::{Received, Session, Source as First, join};
use remora_redis::ReplId;
use remora_server::{Facts, HostPort};
use remora_table::{Geometry, Origin, SealKey};
use tokio::sync::Notify;
use tokio::sync::mpsc::Sender;

use super::capture::{CaptureEvent, Offered};
use super::gauge::Gauge;
use super::machine::{Event, Machine};
use super::options::{Compress, Options};
use super::tables::Copied;
use super::{Incoming, Source};

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

/// What of the first source's snapshots is copied, and when.
#[derive(Debug)]
pub struct Copies<T> {
    first: HostPort,
    /// Offered, and neither copied nor given up.
    offered: Option<Arc<T>>,
    /// What is copied now.
    copying: Option<Arc<T>>,
    /// Why there is no conversation with the first one, or why what it offers cannot be copied; empty if all is well.
    trouble: String,
}

/// What is known of the standby and its server when it decides.
#[derive(Clone, Debug)]
pub struct Here {
    /// The server, as messages name it.
    pub server: String,
    /// The server's history.
    pub replid: Option<ReplId>,
    /// Other hosts read encrypted tables.
    pub is_sealed: bool,
    /// Other hosts read compressed tables.
    pub compresses: bool,
    /// Bytes of memory for one table; the error says why there is none.
    pub room: Result<u64, String>,
    /// The memory is being prepared for a snapshot.
    pub is_preparing: bool,
}

/// How a copy has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It is whole.
    Whole,
    /// Another conversation with the first one begins, whose offer is copied.
    Failed,
}

impl<T: AsRef<Offer>> Copies<T> {
    /// Nothing is copied yet. `first`: the first source.
    pub fn of(first: HostPort) -> Copies<T> {
        Copies { first, offered: None, copying: None, trouble: "it was not reached yet".to_owned() }
    }

    /// The first source.
    pub fn first(&self) -> &HostPort {
        &self.first
    }

    /// What stands in the way, in brackets; empty if nothing does.
    pub fn trouble_in_words(&self) -> String {
        if self.trouble.is_empty() { String::new() } else { format!(" ({})", self.trouble) }
    }

    /// What is copied now.
    pub fn copying(&self) -> Option<&Arc<T>> {
        self.copying.as_ref()
    }

    /// Whether [`Copies::look`] has anything to decide.
    pub fn has_an_offer(&self) -> bool {
        self.offered.is_some()
    }

    /// The first one offers a snapshot.
    pub fn offered(&mut self, offered: Arc<T>) {
        self.offered = Some(offered);
    }

    /// The conversation with the first one has ended, or none has begun.
    pub fn away(&mut self, why: String) {
        self.offered = None;
        self.trouble(why);
    }

    /// The generation that is copied from now on, if what the first one offers suits and no reader needs the present
    /// snapshot.
    pub fn look(&mut self, machine: &Machine, here: &Here) -> Option<u64> {
        let offered = self.offered.clone()?;
        let offer = (*offered).as_ref();
        if let Err(why) = suits(offer, here) {
            self.trouble(why);
            return None;
        }
        self.trouble.clear();
        let present = machine.status().snapshot.and_then(|snapshot| snapshot.origin());
        let is_newer = |present: Origin| Some(present.history) == offer.replid && present.offset >= offer.offset;
        if present.is_some_and(is_newer) {
            self.offered = None;
            return None;
        }
        if here.is_preparing || !machine.can_copy(offer.generation) {
            return None;
        }
        self.offered = None;
        let generation = offer.generation;
        self.copying = Some(offered);
        Some(generation)
    }

    /// What the end of a capture means: `None` if it was no copy, or goes on.
    pub fn ended(&mut self, event: &CaptureEvent) -> Option<End> {
        let (ended, how) = match event {
            CaptureEvent::Completed { generation, .. } => (*generation, End::Whole),
            CaptureEvent::Failed { generation, .. } => (*generation, End::Failed),
            _ => return None,
        };
        self.copying.take_if(|copying| (**copying).as_ref().generation == ended).map(|_| how)
    }

    /// Notes why the first one's snapshots cannot be copied, and logs it once.
    fn trouble(&mut self, why: String) {
        if self.trouble != why {
            tracing::warn!(event = events::STANDBY_WAITS, first = %self.first, "nothing is copied from the source {}: {why}", self.first);
            self.trouble = why;
        }
    }
}

/// Whether a snapshot can be copied into the memory here, and the stream behind it comes from the server here.
///
/// The history alone says whose data it has. `remora attend` takes the server's process for an answer too, since a
/// primary may begin its first history after it was asked, and since the attended server's own `PSYNC` proves the rest.
/// A copy has nothing but the history by which its bytes and the server's stream are one. The server's facts are read
/// again with each offer, so that a history which has just begun is known a moment later.
fn suits(offer: &Offer, here: &Here) -> Result<(), String> {
    let is_ours = offer.replid.is_some() && offer.replid == here.replid;
    if !is_ours && !Mutation::AnyHistoryCopied.is_active() {
        let named = |replid: Option<ReplId>| replid.map_or("none".to_owned(), |replid| replid.to_string());
        return Err(format!(
            "it has the history {}, and the server here, {}, has {}: both must have the same primary",
            named(offer.replid),
            here.server,
            named(here.replid)
        ));
    }
    if !offer.snapshot.retained {
        return Err("its snapshot is larger than its --memory, so that slots are reused: give it more".into());
    }
    let copied = copied(offer)?;
    if copied.key.is_some() != here.is_sealed {
        return Err(
            "one of both encrypts its tables and the other does not: give both the same --security, and each an \
                    address of the same network to --listen"
                .into(),
        );
    }
    if offer.snapshot.compressed != here.compresses {
        return Err("one of both compresses and the other does not: give both the same --compress".into());
    }
    let (needs, room) = (copied.geometry.memory_len(), here.room.clone()?);
    if needs > room {
        return Err(format!(
            "its table takes {}, and {} are here for one: give this source as much --memory",
            Size::bytes(needs),
            Size::bytes(room)
        ));
    }
    Ok(())
}

/// The table of an offer, as it is copied.
pub(super) fn copied(offer: &Offer) -> Result<Copied, String> {
    let geometry = Geometry { slot_size: offer.snapshot.slot_size, slots: offer.snapshot.slots };
    let geometry = geometry.checked().map_err(|error| error.to_string())?;
    let key = match &offer.snapshot.seal[..] {
        [] => None,
        seal => Some(SealKey::from_bytes(seal).map_err(|error| error.to_string())?),
    };
    Ok(Copied { generation: offer.generation, geometry, key })
}

/// Where the server is asked to continue the stream: at the byte behind what was copied of it, which ends at `end`.
///
/// # Errors
/// The server has said that it cannot continue there. It would have to take a snapshot if it were asked.
pub fn continues(facts: &Facts, history: ReplId, end: u64) -> Result<(ReplId, u64), String> {
    if !Mutation::CopyUnasked.is_active() {
        facts.covers(history, end, 0)?;
    }
    let present = facts.offset.filter(|_| Mutation::CopyLeavesAGap.is_active());
    Ok((history, present.unwrap_or(end).max(end) + 1))
}

/// Whether a snapshot at this offset can be copied beside a journal that begins with this byte.
///
/// # Errors
/// The stream between the two is lost.
pub fn reaches(journal_first: u64, offset: u64) -> Result<(), String> {
    if journal_first > offset + 1 {
        return Err("the journal here does not reach back to its snapshot any more".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::{Duration, Instant};

    use remora_protocol::Announce;
    use remora_redis::info::Info;

    use remora_base::pace::Backoff;

    use super::*;
    use crate::capture::CaptureError;
    use crate::gauge::Reading;
    use crate::machine::{Event, Rules};
    use crate::parts::plan_of;

    const SLOT: u32 = 1 << 20;

    struct Offers(Offer);

    impl AsRef<Offer> for Offers {
        fn as_ref(&self) -> &Offer {
            &self.0
        }
    }

    fn replid(digit: char) -> ReplId {
        digit.to_string().repeat(40).parse().unwrap()
    }

    /// A server with 100 bytes of stream from offset 901 on, of which it keeps all.
    fn server(digit: char) -> Facts {
        let text = format!(
            "# Replication\r\nrole:master\r\nmaster_replid:{}\r\nmaster_repl_offset:1000\r\nrepl_backlog_active:1\r\n\
             repl_backlog_size:1000\r\nrepl_backlog_first_byte_offset:901\r\nrepl_backlog_histlen:100\r\n",
            replid(digit)
        );
        Facts::from_info(&Info::parse(text.as_bytes()))
    }

    fn offer(digit: char, generation: u64, offset: u64) -> Offer {
        let primary = Announce { host: String::new(), port: 0, tls: false, source_sees_as: String::new() };
        let plan = plan_of(&server(digit), primary, 0, 1);
        let mut snapshot = plan.snapshot.clone();
        (snapshot.generation, snapshot.slot_size, snapshot.slots, snapshot.retained) = (generation, SLOT, 9, true);
        Offer { generation, offset, snapshot, ..plan }
    }

    fn here() -> Here {
        Here {
            server: "redis://s:1".into(),
            replid: Some(replid('a')),
            is_sealed: false,
            compresses: false,
            room: Ok(u64::from(SLOT) * 64),
            is_preparing: false,
        }
    }

    fn machine() -> (Machine, Instant) {
        let now = Instant::now();
        let rules = Rules {
            max_age: Duration::from_secs(60),
            max_replicas: 3,
            stall_limit: Duration::from_secs(60),
            fork_interval: Duration::ZERO,
            slot_bytes: u64::from(SLOT),
            repeat_messages: Duration::ZERO,
            at_once: None,
            standby: Some(Duration::MAX),
        };
        (Machine::new(now, rules, Backoff::seeded(1), 70, false), now)
    }

    fn copies() -> Copies<Offers> {
        Copies::of(HostPort { host: "first".into(), port: 7379 })
    }

    #[test]
    fn what_suits_is_copied_once_and_what_does_not_is_named() {
        let (machine, _) = machine();
        let (at, yes) = (|offer| Arc::new(Offers(offer)), offer('a', 5, 950));
        let mut copies = copies();
        assert_eq!(copies.look(&machine, &here()), None);
        copies.offered(at(yes.clone()));
        assert_eq!(copies.look(&machine, &Here { is_preparing: true, ..here() }), None);
        assert_eq!((copies.look(&machine, &here()), copies.look(&machine, &here())), (Some(5), None));
        assert!(copies.trouble.is_empty() && copies.copying().is_some() && !copies.has_an_offer());

        let windowed =
            Offer { snapshot: remora_protocol::TableOffer { retained: false, ..yes.snapshot.clone() }, ..yes.clone() };
        let unknown = Offer { replid: None, ..yes.clone() };
        let cases = [
            (offer('b', 5, 950), here(), "both must have the same primary"),
            (unknown, here(), "both must have the same primary"),
            (yes.clone(), Here { replid: None, ..here() }, "both must have the same primary"),
            (windowed, here(), "slots are reused"),
            (yes.clone(), Here { is_sealed: true, ..here() }, "--security"),
            (yes.clone(), Here { compresses: true, ..here() }, "--compress"),
            (yes.clone(), Here { room: Ok(u64::from(SLOT)), ..here() }, "as much --memory"),
            (yes.clone(), Here { room: Err("no memory at all".into()), ..here() }, "no memory at all"),
        ];
        for (offer, here, why) in cases {
            let mut copies = self::copies();
            copies.offered(at(offer));
            assert_eq!(copies.look(&machine, &here), None, "{why}");
            assert!(copies.trouble.contains(why), "{}", copies.trouble);
            assert!(copies.has_an_offer(), "the server here may get that history yet");
            copies.away("gone".into());
            assert!(!copies.has_an_offer());
        }
    }

    #[test]
    fn a_copy_ends_with_its_own_capture() {
        let (machine, _) = machine();
        let failed = |generation| CaptureEvent::Failed { generation, error: CaptureError::First("gone".into()) };
        for (event, end) in
            [(failed(5), End::Failed), (CaptureEvent::Completed { generation: 5, bytes: 1 }, End::Whole)]
        {
            let mut copies = copies();
            copies.offered(Arc::new(Offers(offer('a', 5, 950))));
            assert_eq!(copies.ended(&event), None, "nothing is copied yet");
            assert_eq!(copies.look(&machine, &here()), Some(5));
            assert_eq!(copies.ended(&failed(4)), None);
            assert_eq!((copies.ended(&event), copies.ended(&event)), (Some(end), None));
        }
    }

    #[test]
    fn the_newer_of_two_snapshots_is_kept() {
        for (offered, is_copied) in [(949, false), (950, false), (951, true)] {
            let (mut machine, now) = machine();
            let mut tell = |event| machine.apply(now, Reading::default(), event);
            tell(Event::Copied { generation: 5 });
            tell(Event::Capture(CaptureEvent::Started { generation: 5, replid: replid('a'), offset: 950 }));
            tell(Event::Capture(CaptureEvent::Completed { generation: 5, bytes: 1 }));
            let mut copies = copies();
            copies.offered(Arc::new(Offers(offer('a', 6, offered))));
            assert_eq!(copies.look(&machine, &here()), is_copied.then_some(6));
            assert!(!copies.has_an_offer());
        }
    }

    #[test]
    fn the_server_is_asked_for_the_byte_behind_the_copied_part_if_it_has_that() {
        let a = replid('a');
        for end in [900, 950, 1000] {
            assert_eq!(continues(&server('a'), a, end), Ok((a, end + 1)));
        }
        for end in [0, 899, 1001] {
            assert!(continues(&server('a'), a, end).is_err(), "{end}");
        }
        assert!(continues(&server('b'), a, 950).is_err());
        assert!(reaches(951, 950).is_ok() && reaches(1, 950).is_ok() && reaches(952, 950).is_err());
    }
}
