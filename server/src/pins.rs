//! Pins: a server keeps the part of its stream that a replica needs next, until the replica is there.
//!
//! ```text
//!   Pins ── ask ──▶ rules (no I/O, no clock) ── open ──▶ link: a connection that is not read
//! ```
//!
//! - [`Pins`]: the answer to a replica that wants to go to its primary, and what makes the answer stay true until it is
//!   there. [`Kept`]: the same for a server that is away for a while.
//! - Then come the rules, which decide, and the links, which hold the connections. A simulation has other links.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::{Backlog, Client, Facts, OutputLimit, Pipeline, Server, ServerError};
use remora_base::AbortOnDrop;
use remora_base::mutation::Mutation;
use remora_base::units::Size;
use remora_protocol::Phase;
use remora_redis::ReplId;
use remora_redis::resp::Frame;

/// Pins of one server.
#[derive(Debug)]
pub struct Pins(Book<Holder>);

impl Default for Pins {
    fn default() -> Self {
        Pins(Book::new(PinSizes::SERVERS))
    }
}

impl Pins {
    /// Whether the server would continue a replica at this position, for long enough that it can go there. The error
    /// says why not.
    pub async fn secure(&mut self, server: &Server, facts: &Facts, at: Position) -> Result<(), String> {
        let mut next = self.0.ask(Instant::now(), facts, &at);
        loop {
            match next {
                Next::Answer(answer) => return answer,
                Next::Open(request) => {
                    let how = (KEEP_LIMIT, self.0.sizes());
                    let outcome = open(server, facts, at.history, request.at, how).await;
                    next = self.0.opened(Instant::now(), facts, &at, request, outcome);
                }
            }
        }
    }

    /// No replica is on its way any more.
    pub fn release(&mut self) {
        self.0.release();
    }
}

/// What a server keeps of its stream, from an offset on, for one that is away.
#[derive(Debug)]
pub struct Kept(#[allow(dead_code, reason = "ends the link")] Pin<Holder>);

impl Kept {
    /// Has the server keep what comes after this offset, for this time at most. The error says why it does not.
    pub async fn after(
        server: &Server,
        history: ReplId,
        offset: u64,
        time: Duration,
    ) -> Result<Kept, Box<dyn std::error::Error + Send + Sync>> {
        let facts = Facts::from_info(&server.connect().await?.info("").await?);
        let pin = open(server, &facts, history, At::Offset(offset), (time, &PinSizes::SERVERS)).await?;
        if !pin.is_firm() {
            return Err(NoPin::Impossible("its history has too few bytes before that offset").into());
        }
        Ok(Kept(pin))
    }
}

// Pinning: which part of a server's stream is pinned, for how long, and what a replica is answered. No I/O and no
// clock.
//
// ```text
//   Position ── the history is another ──────────────────▶ no
//      ├────── a pin holds it ───────────────────────────▶ yes
//      ├────── a new pin: firm ──────────────────────────▶ yes
//      ├────── a new pin, not firm, or none is possible ─▶ what the estimate says: Facts::covers
//      └────── the server may drop it at any moment ─────▶ no, but the server's end is pinned: the replica stays on its
//                                                          link, passes that offset, asks again, and a pin holds it
// ```
//
// Each [`Next::Open`] is answered by one call of [`Book::opened`], which gives the next step.

/// Sizes in bytes by which pins are opened and trusted. A simulation has smaller ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinSizes {
    /// Bytes of the stream before the pinned offset that fill the sockets: several times what they take.
    pub prefill: u64,
    /// With fewer bytes before the offset, the sockets could take the offset itself: a Unix socket takes up to 208 KiB.
    pub firm: u64,
    /// The smallest backlog whose server is pinned: the blocks of a smaller one, of up to 64 KiB, are too coarse.
    pub least_backlog: u64,
    /// How far a replica may lag behind when it asks: some tenths of a second of very fast writes, or two long values.
    pub slack: u64,
}

impl PinSizes {
    /// Those for the servers.
    pub const SERVERS: PinSizes =
        PinSizes { prefill: 256 << 10, firm: 128 << 10, least_backlog: 512 << 10, slack: 8 << 20 };
}

/// How long a pin for a hand-off is kept at most: as long as that may take, and a little more.
pub const KEEP_LIMIT: Duration = Duration::from_secs(25);

/// The part of the server's `client-output-buffer-limit` that a pin may hold back. The rest is for what is written
/// between two looks.
const PART_OF_LIMIT: u64 = 2;

/// What a pin holds back at most where the server has no limit.
const BYTES_LIMIT: u64 = 512 << 20;

/// The pause after the first refused pin, and the longest after later ones: each refusal may start a fork.
const PAUSE: Duration = Duration::from_secs(5);

const PAUSE_LIMIT: Duration = Duration::from_secs(120);

/// Where a replica is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The history that it has executed.
    pub history: ReplId,
    /// The offset up to which.
    pub offset: u64,
    /// Bytes that the primary's clients write per second, as far as is known.
    pub rate: u64,
}

/// Where a pin begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// At the byte after this offset.
    Offset(u64),
    /// At the byte that the server writes next.
    End,
}

/// Why there is no pin.
#[derive(Debug, thiserror::Error)]
pub enum NoPin {
    /// The server has no shared buffer, or too small a backlog.
    #[error("{0}")]
    Impossible(&'static str),
    /// The server does not keep the offset for certain. Later it may.
    #[error("{0}")]
    NotKept(String),
    /// The server did not continue the stream, although its `INFO` said that it would. Trying again may begin forks.
    #[error(
        "the server {server} did not continue the stream at offset {at} for the link that would have pinned it: {answer}"
    )]
    Refused {
        /// Its address.
        server: String,
        /// The offset behind which it was asked to continue.
        at: u64,
        /// What it said instead.
        answer: String,
    },
    /// The connection failed.
    #[error("{0}")]
    Unreachable(String),
}

/// The part of a history that a link pins, once the server continues it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    history: ReplId,
    from: u64,
    is_firm: bool,
}

impl Extent {
    /// Where a link begins that pins this place, as the server is now.
    pub fn of(facts: &Facts, history: ReplId, at: At, sizes: &PinSizes) -> Result<Extent, NoPin> {
        if let Some(why) = facts.why_no_pin(sizes) {
            return Err(NoPin::Impossible(why));
        }
        let next = match at {
            At::Offset(offset) => offset.saturating_add(1),
            At::End => facts.backlog.map_or(0, |backlog| backlog.end()),
        };
        let Some(backlog) = facts.backlog.filter(|backlog| backlog.active && facts.continues(history, next)) else {
            return Err(NoPin::NotKept("the server does not continue this history".into()));
        };
        let safe = backlog.safe();
        if next < safe || next > backlog.end() {
            return Err(NoPin::NotKept(format!(
                "the server keeps offsets {} to {} for certain, and the replica needs {next}",
                backlog.kept(),
                backlog.end().saturating_sub(1)
            )));
        }
        let from = next.saturating_sub(sizes.prefill).max(safe);
        Ok(Extent { history, from, is_firm: next - from >= sizes.firm })
    }

    /// The offset that the link asks for.
    pub fn from(&self) -> u64 {
        self.from
    }

    /// Whether the server still keeps it, as it says itself. The link is not read, so that its end is not seen.
    fn is_kept(&self, facts: &Facts, sizes: &PinSizes) -> bool {
        let first = self.first(sizes);
        let backlog = facts.backlog.filter(|backlog| backlog.active);
        backlog.is_some_and(|backlog| backlog.first <= first) && facts.continues(self.history, first)
    }

    /// The first offset that the server keeps while the link is open.
    fn first(&self, sizes: &PinSizes) -> u64 {
        self.from.saturating_add(if self.is_firm { sizes.firm } else { 0 })
    }
}

/// A link that pins.
pub trait Link {
    /// Whether it is open, as far as its owner knows.
    fn is_open(&self) -> bool;
}

/// A part of the stream that a server keeps for as long as this lives, but within [`Bounds`].
#[derive(Debug)]
pub struct Pin<L> {
    extent: Extent,
    until: Instant,
    link: L,
}

impl<L: Link> Pin<L> {
    /// The server has continued the stream on this link, which is kept for this time.
    pub fn opened(now: Instant, extent: Extent, keep: Duration, link: L) -> Pin<L> {
        Pin { extent, until: now + keep, link }
    }

    /// Whether no write can move the backlog beyond the offset that was asked for. Otherwise the sockets may take some
    /// bytes of it, because the history has too few bytes before it.
    fn is_firm(&self) -> bool {
        self.extent.is_firm
    }

    /// Whether a replica whose next byte is the one after `offset` can continue there for as long as this pin lives.
    fn holds(&self, now: Instant, at: &Position, sizes: &PinSizes) -> bool {
        self.extent.history == at.history && at.offset.saturating_add(1) >= self.extent.first(sizes) && self.lives(now)
    }

    /// Whether the link is open still, with some time left.
    fn lives(&self, now: Instant) -> bool {
        self.link.is_open() && self.until.saturating_duration_since(now) > KEEP_LIMIT / 2
    }
}

/// When a link that pins is closed.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    extent: Extent,
    until: Instant,
    bytes: u64,
    sizes: PinSizes,
}

/// Why a link that pins is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// Its time is over.
    Late,
    /// It holds back this many bytes, half of what the server permits.
    TooMuch(u64),
    /// The server has dropped what it was to keep: it has closed the link, or has another history.
    Lost,
    /// The server is being shut down, and would wait for this link: it acknowledges nothing.
    Ends,
}

impl Bounds {
    /// Those of a link that is opened now.
    pub fn of(now: Instant, extent: Extent, keep: Duration, limit: &OutputLimit, sizes: &PinSizes) -> Bounds {
        let bytes = limit.least_within(keep).map_or(BYTES_LIMIT, |least| BYTES_LIMIT.min(least / PART_OF_LIMIT));
        Bounds { extent, until: now + keep, bytes, sizes: *sizes }
    }

    /// Whether the link's time is over.
    pub fn is_late(&self, now: Instant) -> bool {
        now >= self.until
    }

    /// Why the link is to be closed, as the server is now.
    pub fn look(&self, now: Instant, facts: &Facts) -> Option<Released> {
        if self.is_late(now) {
            return Some(Released::Late);
        }
        if !self.extent.is_kept(facts, &self.sizes) {
            return Some(Released::Lost);
        }
        if facts.ends().is_some() {
            return Some(Released::Ends);
        }
        let held = facts.backlog?.end().saturating_sub(self.extent.from);
        (held >= self.bytes).then_some(Released::TooMuch(held))
    }
}

/// What follows from a question.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// The answer; the error says why not.
    Answer(Result<(), String>),
    /// A pin is to be opened.
    Open(Request),
}

/// A pin that is to be opened.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// Where it begins.
    pub at: At,
    /// The answer where the pin does not give another one.
    otherwise: Result<(), String>,
    /// How far the replica is behind what the server keeps, if its end is to be pinned.
    behind: String,
}

/// The pins of one server, each for the replicas that go to it at about the same time.
#[derive(Debug)]
pub struct Book<L> {
    open: Vec<Pin<L>>,
    /// How often the server has refused a pin, and until when it is not asked for another one.
    refused: Option<(u32, Instant)>,
    sizes: PinSizes,
}

impl<L: Link> Book<L> {
    /// Has no pin yet.
    pub fn new(sizes: PinSizes) -> Book<L> {
        Book { open: Vec::new(), refused: None, sizes }
    }

    /// The sizes by which its pins are opened and trusted.
    pub fn sizes(&self) -> &PinSizes {
        &self.sizes
    }

    /// Whether the server, which has just said these facts, would continue a replica at this position, for long enough
    /// that it can go there.
    pub fn ask(&mut self, now: Instant, facts: &Facts, at: &Position) -> Next {
        if let Some(why) = facts.ends() {
            self.release();
            return Next::Answer(Err(why));
        }
        self.open.retain(|pin| pin.lives(now) && pin.extent.is_kept(facts, &self.sizes));
        let estimate = facts.covers(at.history, at.offset, at.rate);
        if !facts.continues(at.history, at.offset.saturating_add(1)) {
            return Next::Answer(estimate);
        }
        if self.open.iter().any(|pin| pin.holds(now, at, &self.sizes)) {
            return Next::Answer(Ok(()));
        }
        if Mutation::PinNotOpened.is_active() {
            return Next::Answer(estimate);
        }
        if self.is_paused(now) {
            return Next::Answer(estimate);
        }
        Next::Open(Request { at: At::Offset(at.offset), otherwise: estimate, behind: String::new() })
    }

    /// Whether the server is not asked for pins for now, because it has refused one.
    pub fn is_paused(&self, now: Instant) -> bool {
        self.refused.is_some_and(|(_, until)| now < until)
    }

    /// What came of a pin that was to be opened for a replica at this position.
    pub fn opened(
        &mut self,
        now: Instant,
        facts: &Facts,
        at: &Position,
        request: Request,
        outcome: Result<Pin<L>, NoPin>,
    ) -> Next {
        let Request { at: place, otherwise, behind } = request;
        let for_replica = matches!(place, At::Offset(_));
        match outcome {
            Ok(pin) => {
                let (is_firm, from) = (pin.extent.is_firm, pin.extent.first(&self.sizes));
                self.open.push(pin);
                match (for_replica, is_firm) {
                    (true, true) => Next::Answer(Ok(())),
                    (true, false) => Next::Answer(otherwise),
                    (false, _) => Next::Answer(Err(kept_from(from, &behind))),
                }
            }
            Err(NoPin::NotKept(behind)) if for_replica => {
                let mut ahead = self.open.iter().filter(|pin| pin.extent.history == at.history && pin.lives(now));
                if let Some(pin) = ahead.next() {
                    return Next::Answer(Err(kept_from(pin.extent.first(&self.sizes), &behind)));
                }
                let otherwise = Err(otherwise.err().unwrap_or_else(|| behind.clone()));
                if facts.replid != Some(at.history) {
                    return Next::Answer(otherwise);
                }
                // Clients may write faster than any position of a replica stays in the backlog, or longer values than
                // it holds. What is written from now on stays, and the replica gets there over its link.
                Next::Open(Request { at: At::End, otherwise, behind })
            }
            Err(refused @ NoPin::Refused { .. }) => {
                self.was_refused(now, &refused);
                Next::Answer(if for_replica { Err(refused.to_string()) } else { otherwise })
            }
            Err(why) => {
                tracing::debug!("the backlog cannot be pinned: {why}");
                Next::Answer(otherwise)
            }
        }
    }

    fn was_refused(&mut self, now: Instant, error: &NoPin) {
        let count = self.refused.map_or(0, |(count, _)| count);
        let pause = (PAUSE * 2_u32.saturating_pow(count)).min(PAUSE_LIMIT);
        tracing::warn!(
            "{error}; more was written between question and request than the backlog holds; next try in {} s",
            pause.as_secs()
        );
        self.refused = Some((count + 1, now + pause));
    }

    /// No replica is on its way any more.
    pub fn release(&mut self) {
        self.open.clear();
    }
}

/// What a replica is told that goes as soon as it has applied the stream up to what is pinned.
fn kept_from(first: u64, behind: &str) -> String {
    format!("{behind}; all from offset {first} on is kept for it, whatever is written, and no setting is needed")
}

/// The replicas that are on their way to a server, or want to go: what is pinned stays for them.
#[derive(Debug)]
pub struct Travellers<K>(BTreeSet<K>);

impl<K> Default for Travellers<K> {
    fn default() -> Self {
        Travellers(BTreeSet::new())
    }
}

impl<K: Ord> Travellers<K> {
    /// A replica has asked. It goes as soon as the answer is yes.
    pub fn asked(&mut self, replica: K) {
        self.0.insert(replica);
    }

    /// A replica is in this phase. Returns whether the pins are to be released: it was the last one on its way, and has
    /// arrived.
    #[must_use]
    pub fn is_in(&mut self, replica: &K, phase: Phase) -> bool {
        let has_arrived = phase == Phase::Done;
        let has_arrived = has_arrived || (phase == Phase::HandOff && Mutation::PinClosedEarly.is_active());
        has_arrived && self.left(replica)
    }

    /// A replica needs nothing of the server any more. Returns whether the pins are to be released.
    #[must_use]
    pub fn left(&mut self, replica: &K) -> bool {
        self.0.remove(replica) && self.0.is_empty()
    }
}

impl Facts {
    /// Why nothing of this server's stream can be pinned, whatever its offset is.
    pub fn why_no_pin(&self, sizes: &PinSizes) -> Option<&'static str> {
        if !self.shares_its_buffer() {
            return Some("the server keeps its backlog apart from the buffers of its replicas");
        }
        self.backlog
            .is_some_and(|backlog| backlog.size < sizes.least_backlog)
            .then_some("the server's backlog is too small")
    }
}

impl Backlog {
    /// The offset behind the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.first.saturating_add(self.held)
    }

    /// Bytes that the server keeps for certain, once it has written that many. It may hold more: what a replica was not
    /// sent yet stays for as long as that takes, which ends within milliseconds.
    fn capacity(&self) -> u64 {
        if Mutation::OverfullBelieved.is_active() {
            return self.size.max(self.held);
        }
        self.size
    }

    /// How many bytes the server can still write before it may drop the byte at `next`.
    pub(crate) fn room(&self, next: u64) -> u64 {
        next.saturating_add(self.capacity()).saturating_sub(self.end())
    }

    /// The first offset that the server keeps for certain.
    pub(crate) fn kept(&self) -> u64 {
        self.first.max(self.end().saturating_sub(self.capacity()))
    }

    /// The first offset that the server still keeps after it has written an eighth of its backlog, which is more than
    /// it writes within a few round trips.
    fn safe(&self) -> u64 {
        self.first.max(self.end().saturating_add(self.size / 8).saturating_sub(self.capacity()))
    }
}

// A pin: a link that keeps a server's backlog from an offset on, so that a replica can continue there whatever is
// written meanwhile.
//
// Since Redis 7.0, and in every Valkey, the backlog and the output buffers of all replicas are one list of blocks. The
// server drops a block only after every replica was sent it. A link that continues the stream and reads nothing
// therefore keeps all blocks behind what the sockets hold, also beyond `repl-backlog-size`:
//
// ```text
//            from            what the sockets hold      offset + 1
//   ───────────┼──────────────────────┼─────────────────────┼──────────────── the stream ──▶
//              └── PREFILL ───────────┴── the server's memory, kept while the pin is open
// ```
//
// With usual sockets they would hold megabytes, and the pin would be firm only behind these: measured on loopback, 2.2
// to 3.9 MB. The kernel sizes the server's send buffer by the segments and the window of the connection, and both are
// the client's to choose. So this link has small segments and a small receive buffer (the server's socket then takes
// about 40 KB), and it continues [`PinSizes::prefill`](PinSizes) bytes before the offset: those fill the
// sockets.
//
// A `PSYNC` that the server cannot continue would begin a full copy. The pin therefore asks only for bytes that the
// server keeps for certain, and a caller whose pin was refused once asks no more.

/// How often the holder looks how much the pin holds back.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How often a server hears of the link: well within the time after which it closes a silent one (`repl-timeout`, 60 s
/// by default).
const ALIVE_EVERY: Duration = Duration::from_secs(15);

/// How long the server may take to answer the pin's `PSYNC`. One that begins a full copy may answer nothing at all.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The task that holds the connection, which ends with this.
#[derive(Debug)]
struct Holder(tokio::task::JoinHandle<()>, #[allow(dead_code, reason = "ends the task")] AbortOnDrop);

impl Link for Holder {
    fn is_open(&self) -> bool {
        !self.0.is_finished()
    }
}

/// Pins `history` of the server from this place on, for the time `keep` at most.
async fn open(
    server: &Server,
    facts: &Facts,
    history: ReplId,
    at: At,
    (keep, sizes): (Duration, &PinSizes),
) -> Result<Pin<Holder>, NoPin> {
    // Before a connection is made: where it is not possible, the first question says so.
    Extent::of(facts, history, at, sizes).map(drop).or_else(passes_later)?;
    let unreachable = |error: ServerError| NoPin::Unreachable(error.to_string());
    let mut link = server.connect_for_little().await.map_err(unreachable)?;
    link.set_timeout(ANSWER_LIMIT);
    // With `eof`, a server that would begin a full copy waits for its repl-diskless-sync-delay first, and does not
    // begin it if the link is closed by then.
    link.command(&["REPLCONF", "capa", "eof", "capa", "psync2"]).await.map_err(unreachable)?;
    // The question stands right before the request, so that little is written in between.
    let info = link.info("replication").await.map_err(unreachable)?;
    let now = Facts { family: facts.family, version: facts.version, ..Facts::from_info(&info) };
    let extent = Extent::of(&now, history, at, sizes)?;
    let from = extent.from();
    let refused = |answer: String| NoPin::Refused { server: server.url().to_string(), at: from, answer };
    match link.command(&["PSYNC", &history.to_string(), &from.to_string()]).await {
        Ok(Frame::Simple(text)) if text.starts_with(b"CONTINUE") => {}
        Ok(Frame::Simple(text)) => return Err(refused(String::from_utf8_lossy(&text).into_owned())),
        Ok(_) => return Err(refused("an answer that is not a status reply".into())),
        // The server may have begun a full copy, which ends with the connection.
        Err(error) => return Err(refused(error.to_string())),
    }
    let opened = Instant::now();
    let task = tokio::spawn(hold(link, server.clone(), facts.clone(), (opened, extent, keep, *sizes)));
    let ends_with_this = AbortOnDrop::new(&task);
    Ok(Pin::opened(opened, extent, keep, Holder(task, ends_with_this)))
}

/// What a server keeps changes from moment to moment, and is asked for once more right before the request.
fn passes_later(why: NoPin) -> Result<(), NoPin> {
    if matches!(why, NoPin::NotKept(_)) { Ok(()) } else { Err(why) }
}

/// Keeps a link open that reads nothing, within its bounds.
async fn hold(
    mut link: Client,
    server: Server,
    facts: Facts,
    (opened, extent, keep, sizes): (Instant, Extent, Duration, PinSizes),
) {
    let mut client = server.connect().await.ok();
    let limit = match client.as_mut() {
        Some(client) => OutputLimit::read(client, &facts).await,
        None => OutputLimit::DEFAULT,
    };
    let bounds = Bounds::of(opened, extent, keep, &limit, &sizes);
    let mut alive = opened;
    while !bounds.is_late(Instant::now()) {
        tokio::time::sleep(LOOK_EVERY).await;
        if alive.elapsed() >= ALIVE_EVERY {
            alive = Instant::now();
            if let Err(error) = acknowledge(&mut link, extent).await {
                tracing::debug!("the link that pins has ended: {error}");
                break;
            }
        }
        // A server that gives no answer is asked no more. The time limit stays.
        let Some(asked) = client.as_mut() else { continue };
        let Ok(info) = asked.info_of(&["server", "replication"]).await else {
            client = None;
            continue;
        };
        match bounds.look(Instant::now(), &Facts::from_info(&info)) {
            None => continue,
            Some(Released::TooMuch(held)) => tracing::info!(
                server = %server.url(),
                "releasing the backlog at {}: half of what the server holds back for a replica (client-output-buffer-limit)",
                Size::bytes(held)
            ),
            Some(Released::Lost) => tracing::info!(
                server = %server.url(),
                "the server has dropped what a link was to keep for replicas on their way: it has closed the link, or its history \
                 has changed"
            ),
            Some(Released::Ends) => tracing::info!(
                server = %server.url(),
                "the server is being shut down: the link that keeps its backlog for replicas is closed"
            ),
            Some(Released::Late) => {}
        }
        break;
    }
    drop(link);
}

/// Says what a replica says that has applied nothing since it was continued.
async fn acknowledge(link: &mut Client, extent: Extent) -> Result<(), ServerError> {
    let mut said = Pipeline::default();
    said.push(&["REPLCONF", "ACK", &extent.from().saturating_sub(1).to_string()]);
    link.send(said.as_bytes()).await
}

impl Server {
    /// Connects like [`Server::connect`], over a connection whose sockets hold few bytes at both ends.
    async fn connect_for_little(&self) -> Result<Client, ServerError> {
        self.connect_with(crate::client::Sockets::Small).await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::{Family, Version};

    const MIB: u64 = 1 << 20;

    fn replid(digit: &str) -> ReplId {
        digit.repeat(40).parse().unwrap()
    }

    /// A Redis 7 with a backlog of 1 MiB.
    fn facts(first: u64, held: u64) -> Facts {
        let backlog = Backlog { active: true, size: MIB, first, held };
        let version = Some(Version { major: 7, minor: 0, patch: 15 });
        Facts { version, replid: Some(replid("a")), backlog: Some(backlog), ..Facts::default() }
    }

    fn start_at(facts: &Facts, offset: u64) -> Result<u64, NoPin> {
        Extent::of(facts, replid("a"), At::Offset(offset), &PinSizes::SERVERS).map(|extent| extent.from())
    }

    #[test]
    fn a_pin_begins_before_the_offset_and_behind_what_the_server_may_drop() {
        let facts_now = facts(10 * MIB, MIB);
        assert_eq!(start_at(&facts_now, 11 * MIB - 1).unwrap(), 11 * MIB - PinSizes::SERVERS.prefill);
        let safe = 10 * MIB + MIB / 8;
        assert_eq!(start_at(&facts_now, safe + 9).unwrap(), safe);
        assert_eq!(start_at(&facts_now, safe - 1).unwrap(), safe);
        assert!(matches!(start_at(&facts_now, safe - 2), Err(NoPin::NotKept(_))));
        assert!(matches!(start_at(&facts_now, 11 * MIB), Err(NoPin::NotKept(_))), "beyond the end");
    }

    #[test]
    fn what_a_server_holds_beyond_its_backlog_is_not_believed() {
        // 26 MB are held because the source's link has not read them yet.
        let facts_now = facts(10 * MIB, 26 * MIB);
        assert!(matches!(start_at(&facts_now, 11 * MIB), Err(NoPin::NotKept(_))));
        assert!(matches!(start_at(&facts_now, 35 * MIB), Err(NoPin::NotKept(_))));
        assert_eq!(start_at(&facts_now, 36 * MIB - 1).unwrap(), 36 * MIB - PinSizes::SERVERS.prefill);
    }

    #[test]
    fn a_young_history_is_pinned_from_its_beginning() {
        assert_eq!(start_at(&facts(1000, 500), 1400).unwrap(), 1000);
        assert_eq!(start_at(&facts(1000, 0), 999).unwrap(), 1000);
    }

    #[test]
    fn a_server_with_private_buffers_or_a_tiny_backlog_cannot_be_pinned() {
        let shares = |family, major, minor| {
            let version = Some(Version { major, minor, patch: 0 });
            Facts { family, version, ..facts(1, 1000) }.shares_its_buffer()
        };
        assert!(!shares(Family::Redis, 6, 2) && shares(Family::Redis, 7, 0) && shares(Family::Valkey, 7, 2));
        assert!(!Facts { version: None, ..facts(1, 1000) }.shares_its_buffer());
        let backlog = Some(Backlog { active: true, size: 16 << 10, first: 1, held: 1000 });
        assert!(matches!(start_at(&Facts { backlog, ..facts(1, 0) }, 500), Err(NoPin::Impossible(_))));
    }

    #[test]
    fn no_figure_of_a_server_overflows() {
        for (first, held) in [(u64::MAX, u64::MAX), (0, u64::MAX), (u64::MAX, 0)] {
            for offset in [0, u64::MAX - 1, u64::MAX] {
                let _ = start_at(&facts(first, held), offset);
            }
        }
    }

    /// A link that stays open, or does not.
    #[derive(Clone, Debug, Default)]
    struct Line(std::rc::Rc<std::cell::Cell<bool>>);

    impl Link for Line {
        fn is_open(&self) -> bool {
            !self.0.get()
        }
    }

    fn position(offset: u64) -> Position {
        Position { history: replid("a"), offset, rate: 0 }
    }

    /// Asks a book, and opens what it wants opened.
    fn ask(book: &mut Book<Line>, now: Instant, facts: &Facts, at: Position) -> Result<(), String> {
        let mut next = book.ask(now, facts, &at);
        loop {
            match next {
                Next::Answer(answer) => return answer,
                Next::Open(request) => {
                    let extent = Extent::of(facts, at.history, request.at, &PinSizes::SERVERS);
                    let outcome = extent.map(|extent| Pin::opened(now, extent, KEEP_LIMIT, Line::default()));
                    next = book.opened(now, facts, &at, request, outcome);
                }
            }
        }
    }

    #[test]
    fn a_replica_that_is_behind_waits_for_what_is_pinned_and_goes_then() {
        let (mut book, now) = (Book::new(PinSizes::SERVERS), Instant::now());
        let why = ask(&mut book, now, &facts(20 * MIB, MIB), position(15 * MIB)).unwrap_err();
        let first = 21 * MIB - PinSizes::SERVERS.prefill + PinSizes::SERVERS.firm;
        assert!(
            why.contains(&format!("all from offset {first} on is kept")) && !why.contains("repl-backlog-size"),
            "{why}"
        );
        // More was written than the backlog holds. The server keeps it for the link.
        let later = facts(21 * MIB - PinSizes::SERVERS.prefill, 9 * MIB);
        assert!(ask(&mut book, now, &later, position(first - 2)).is_err());
        assert_eq!(book.open.len(), 1, "one pin is enough");
        assert_eq!(ask(&mut book, now, &later, position(first - 1)), Ok(()));
        assert!(
            ask(&mut book, now + KEEP_LIMIT / 2, &later, position(first - 1)).is_err(),
            "its time is too short now"
        );
    }

    #[test]
    fn a_pin_that_was_closed_holds_nothing() {
        let (now, at) = (Instant::now(), position(21 * MIB - 1));
        let later = facts(21 * MIB - PinSizes::SERVERS.prefill, 10 * MIB);
        let opened = || {
            let mut book = Book::new(PinSizes::SERVERS);
            ask(&mut book, now, &facts(20 * MIB, MIB), at).unwrap();
            assert_eq!(ask(&mut book, now, &later, at), Ok(()));
            book
        };
        let mut book = opened();
        book.open.iter().for_each(|pin| pin.link.0.set(true));
        assert!(ask(&mut book, now, &later, at).is_err(), "by its owner");
        let mut book = opened();
        book.release();
        assert!(ask(&mut book, now, &later, at).is_err());
        assert!(ask(&mut opened(), now, &facts(30 * MIB, MIB), at).is_err(), "by the server");
    }

    #[test]
    fn a_refused_pin_makes_the_estimate_decide_for_a_while() {
        let (mut book, now, at) = (Book::<Line>::new(PinSizes::SERVERS), Instant::now(), position(21 * MIB - 1));
        let facts = facts(20 * MIB, MIB);
        let Next::Open(request) = book.ask(now, &facts, &at) else { panic!("no pin is wanted") };
        let refused = NoPin::Refused { server: "it".into(), at: 7, answer: "FULLRESYNC".into() };
        let Next::Answer(Err(why)) = book.opened(now, &facts, &at, request, Err(refused)) else { panic!("a yes") };
        assert!(why.contains("FULLRESYNC"), "{why}");
        assert_eq!(book.ask(now + PAUSE / 2, &facts, &at), Next::Answer(Ok(())));
        assert!(matches!(book.ask(now + PAUSE, &facts, &at), Next::Open(_)));
    }

    #[test]
    fn a_link_is_closed_for_its_time_its_bytes_or_because_the_server_keeps_nothing_for_it() {
        let (now, limit) = (Instant::now(), OutputLimit::parse("slave 0 16777216 5").unwrap());
        let facts_now = facts(20 * MIB, MIB);
        let extent = Extent::of(&facts_now, replid("a"), At::Offset(21 * MIB - 1), &PinSizes::SERVERS).unwrap();
        let bounds = Bounds::of(now, extent, KEEP_LIMIT, &limit, &PinSizes::SERVERS);
        let (from, first) = (extent.from(), extent.first(&PinSizes::SERVERS));
        let kept = |held| facts(from, held);
        assert_eq!(bounds.look(now, &kept(7 * MIB)), None);
        assert_eq!(bounds.look(now, &kept(8 * MIB)), Some(Released::TooMuch(8 * MIB)), "half of the soft limit");
        assert_eq!(bounds.look(now + KEEP_LIMIT, &kept(MIB)), Some(Released::Late));
        assert_eq!(bounds.look(now, &facts(first, MIB)), None, "the sockets have taken what is before");
        assert_eq!(bounds.look(now, &facts(first + 1, MIB)), Some(Released::Lost), "the server has closed the link");
        let promoted = Facts { replid: Some(replid("b")), ..kept(MIB) };
        assert_eq!(bounds.look(now, &promoted), Some(Released::Lost));
        let none = OutputLimit::parse("slave 0 0 0").unwrap();
        let bounds = Bounds::of(now, extent, KEEP_LIMIT, &none, &PinSizes::SERVERS);
        assert_eq!(bounds.look(now, &kept(BYTES_LIMIT)), Some(Released::TooMuch(BYTES_LIMIT)));
    }

    #[test]
    fn a_server_that_is_being_shut_down_is_left_and_no_replica_is_sent_to_it() {
        let (mut book, now, at) = (Book::new(PinSizes::SERVERS), Instant::now(), position(21 * MIB - 1));
        let running = facts(20 * MIB, MIB);
        ask(&mut book, now, &running, at).unwrap();
        let extent = Extent::of(&running, at.history, At::Offset(at.offset), &PinSizes::SERVERS).unwrap();
        let bounds = Bounds::of(now, extent, KEEP_LIMIT, &OutputLimit::DEFAULT, &PinSizes::SERVERS);
        let ending = Facts { shutdown_in: Some(Duration::from_secs(9)), ..running.clone() };
        assert_eq!(bounds.look(now, &running), None);
        assert_eq!(bounds.look(now, &ending), Some(Released::Ends));
        assert!(ask(&mut book, now, &ending, at).unwrap_err().contains("shut down"));
        assert!(book.open.is_empty());
        assert_eq!(ask(&mut book, now, &running, at), Ok(()), "it was called off (SHUTDOWN ABORT)");
    }

    #[test]
    fn pins_are_released_when_the_last_replica_has_arrived_and_not_before() {
        let mut travellers = Travellers::default();
        assert!(!travellers.left(&1), "one that has not asked");
        travellers.asked(1);
        // The second one asks while the first one is on its way: its answer is not there yet.
        travellers.asked(2);
        assert!(!travellers.is_in(&1, Phase::HandOff));
        assert!(!travellers.is_in(&1, Phase::Done));
        assert!(travellers.is_in(&2, Phase::Done));
        assert!(!travellers.is_in(&2, Phase::Done));
    }
}
