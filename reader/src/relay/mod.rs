//! Relay: from which replica slots are read, and what is lent to others. Independent of the server's state.

pub mod reader;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use remora_fabric::{Memory, TransportKind};
use remora_protocol::{Join, LossCause, Message, Offer, Relaying, Relays, TableOffer, Upstream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;

use self::reader::{LentCopy, RelayServer, UploadLimits};
use self::reader::{Lost, ReadFrom, Reading};
use crate::parts::Meter;
use crate::source::{Chosen, RelayWish, Source, Way, wish};
use crate::{ReadOptions, RelayOptions};
use remora_base::units::Size;
use remora_conversation::tokens::{Credentials, TokenFiles};
use remora_conversation::transports::{RdmaOffer, TransportChoice, TransportChoices, UploadLimit};
use remora_conversation::{Connection, Options, Protection};
use remora_process::events;
use remora_process::exit::Failure;

/// This replica's part in passing slots on: the peer that it reads from, and the copy that it lends.
pub struct Relay {
    read: ReadOptions,
    options: RelayOptions,
    credentials: Credentials,
    /// The name by which other replicas know this one.
    name: String,
    meter: Arc<Meter>,
    /// Whether slots may come from other replicas.
    takes_part: bool,
    /// The server that lends slots to other replicas.
    serving: Option<RelayServer>,
    /// The copy that slots go into now.
    copy: Option<Copying>,
    /// From where the source wants them read.
    assignment: Assignment,
    /// The replica that slots are read from, or will be.
    upstream: Option<(Upstream, Conversation)>,
}

struct Copying {
    generation: u64,
    memory: Arc<Memory>,
    slot_size: u32,
    /// Whether it holds ciphertext.
    is_sealed: bool,
    /// Whether the source reuses slots that all readers have passed.
    in_window: bool,
}

impl Relay {
    /// Begins to listen for other replicas, if slots are to be lent.
    /// `has_folder`: slots go into files that outlive the agent.
    ///
    /// # Errors
    /// The port cannot be used.
    pub async fn open(
        read: ReadOptions,
        options: RelayOptions,
        has_folder: bool,
        tokens: &TokenFiles,
        name: String,
        meter: Arc<Meter>,
        source: &Source,
    ) -> Result<Relay, Failure> {
        let takes_part = !has_folder && may_be_far(&read, &options, source);
        if options.serve_peers && !takes_part {
            tracing::warn!(
                "nothing is lent to other replicas: with --state-dir, or by shared memory, there is nothing to lend"
            );
        }
        if options.download_limit.is_some() && !takes_part {
            tracing::warn!(
                "--download-limit is not kept: with --state-dir, or by shared memory, slots are not taken from others"
            );
        }
        let bytes = |limit: Option<Size>| limit.map_or(0, Size::get);
        let serving = if takes_part && !options.no_serve_peers {
            let listen = options.peer_listen.unwrap_or_else(|| (source.local_address().ip(), 0).into());
            let limits = UploadLimits {
                in_all: bytes(options.upload_limit.rate()),
                per_peer: bytes(options.upload_limit_per_peer),
                in_background: options.upload_limit == UploadLimit::Auto,
            };
            Some(RelayServer::open(listen, tokens.keyring(), limits, tokens.security(), meter.clone()).await?)
        } else {
            None
        };
        let credentials = tokens.credentials(None);
        let (copy, assignment, upstream) = (None, Assignment::default(), None);
        Ok(Relay { read, options, credentials, name, meter, takes_part, serving, copy, assignment, upstream })
    }

    /// Adds to a request what the source needs to know: the zone, and how slots pass between this replica and others,
    /// if they do.
    pub fn introduce(&self, request: Join) -> Join {
        let serves_at = self.serving.as_ref().map(|serving| serving.address().to_string()).unwrap_or_default();
        let relays = self.takes_part.then_some(Relays { serves_at });
        Join { zone: self.options.zone.clone(), relays, ..request }
    }

    /// What the next feed must provide; `kept`: the memory of the copy that it can go on with.
    pub fn wish(&self, kept: Option<Arc<Memory>>) -> Option<RelayWish> {
        let download_rate = self.options.download_limit.map_or(0, Size::get);
        self.takes_part.then(|| RelayWish { serves: self.serving.is_some(), download_rate, kept })
    }

    /// The next report of the conversation with the upstream replica. Pending without one.
    pub async fn said(&mut self) -> Said {
        match &mut self.upstream {
            Some((_, conversation)) => conversation.said().await,
            None => std::future::pending().await,
        }
    }

    /// Notes that all slots have arrived.
    pub fn leave_upstream(&mut self) {
        self.upstream = None;
    }

    /// An offer has come, whose tables are connected next.
    pub fn offered(&mut self) {
        self.assignment.offered();
    }

    /// Tables were connected: lends their copy, and reads from where the source has said last. Returns what the
    /// delivery must know.
    pub fn attached(&mut self, offer: &Offer, chosen: &mut Chosen, loaded: bool) -> Option<ReadFrom> {
        let Some((memory, own, is_new)) = chosen.copy.take() else {
            // A replica that has loaded everything continues to lend its slots.
            if !loaded {
                self.copy = None;
                self.upstream = None;
            }
            return None;
        };
        let (generation, first_offset) = (offer.snapshot.generation, offer.snapshot.first_offset);
        let is_sealed = !offer.snapshot.seal.is_empty();
        if is_new {
            self.upstream = None;
            let may_lend = |serving: &&RelayServer| {
                let may = is_sealed || self.credentials.security.permits_plain_data(serving.address().ip());
                if !may {
                    tracing::warn!(
                        "nothing is lent to other replicas: the source's tables are not sealed (--security token)"
                    );
                }
                may
            };
            if let Some(serving) = self.serving.as_ref().filter(may_lend) {
                let by_rdma = chosen.kind == TransportKind::Verbs;
                let rdma = by_rdma.then(|| RdmaOffer { is_off: false, end: self.read.rdma.end.clone() });
                let keeps_all = offer.snapshot.retained && own.slots >= offer.snapshot.slots;
                let by_tcp = chosen.kind == TransportKind::Tcp;
                let memory = memory.clone();
                serving.lend(LentCopy { generation, memory, own, first_offset, keeps_all, rdma, by_tcp });
            }
        }
        let in_window = !offer.snapshot.retained;
        self.copy = Some(Copying { generation, memory, slot_size: own.slot_size, is_sealed, in_window });
        self.read_from(self.assignment.of(offer))
    }

    /// Reads from the upstream that the source has assigned for this generation.
    pub fn assigned(&mut self, generation: u64, upstream: Option<Upstream>) -> Option<ReadFrom> {
        let is_ours = self.copy.as_ref().is_some_and(|copy| copy.generation == generation);
        self.assignment.assigned(generation, upstream.clone());
        if is_ours { self.read_from(upstream) } else { None }
    }

    fn read_from(&mut self, upstream: Option<Upstream>) -> Option<ReadFrom> {
        let copy = self.copy.as_ref()?;
        let session = upstream.as_ref().map(|upstream| upstream.session);
        if let Some((before, _)) = self.upstream.take_if(|(_, present)| Some(present.session) != session) {
            tracing::info!(event = events::UPSTREAM_LEFT, peer = %before.name, "no more slots come from another replica: the source has said so");
        }
        let Some(upstream) = upstream else { return Some(ReadFrom::Source) };
        if self.upstream.is_some() {
            return None; // slots are read from there already
        }
        let goal = Goal {
            credentials: self.credentials.clone(),
            upstream: upstream.clone(),
            generation: copy.generation,
            name: self.name.clone(),
            wish: wish(&self.read, &self.credentials.security),
            memory: copy.memory.clone(),
            slot_size: copy.slot_size,
            is_sealed: copy.is_sealed,
        };
        self.upstream = Some((upstream, begin(goal)));
        Some(ReadFrom::Awaited)
    }

    /// The upstream replica cannot be read any more. Returns the message for the source, which assigns another.
    pub fn lost(&mut self, lost: Lost) -> Option<Message> {
        let Lost { session, cause, text } = lost;
        let (upstream, _) = self.upstream.take_if(|(_, present)| present.session == session)?;
        let name = &upstream.name;
        match cause {
            LossCause::Lied => {
                tracing::warn!(event = events::UPSTREAM_LEFT, peer = %name, "a replica passed on bytes that are not the source's: {text}")
            }
            _ => {
                tracing::info!(event = events::UPSTREAM_LEFT, peer = %name, "no more slots come from another replica: {text}")
            }
        }
        let generation = self.copy.as_ref()?.generation;
        Some(Message::PeerLost { generation, session, cause, text })
    }

    /// The first slot that the source must keep for this replica. What was copied out of a window is not needed there
    /// any more, though the server has yet to get it.
    pub fn slots_below(&self) -> u64 {
        let used = self.meter.slots_below.get();
        match &self.copy {
            Some(copy) if copy.in_window => used.max(self.meter.slots_held.get()),
            _ => used,
        }
    }

    /// What this replica reports to the source about its part in passing slots on.
    pub fn relaying(&self) -> Option<Relaying> {
        self.copy.as_ref()?;
        let reads_from = self.meter.reads_from.get();
        Some(Relaying {
            reads_from: (reads_from != 0).then_some(reads_from),
            oldest: self.meter.copy_oldest.get(),
            held: self.meter.slots_held.get(),
            is_full: self.meter.copy_full.get() > 0,
        })
    }

    /// Other replicas that read slots here.
    pub fn readers(&self) -> usize {
        self.serving.as_ref().map_or(0, RelayServer::readers)
    }
}

/// On the source's host nothing is passed on: replicas there read its memory in place.
fn may_be_far(read: &ReadOptions, options: &RelayOptions, source: &Source) -> bool {
    let is_local = source.address().ip() == source.local_address().ip();
    match read.transport {
        TransportChoice::Shm => false,
        TransportChoice::Tcp | TransportChoice::Verbs => true,
        TransportChoice::Auto => !is_local || options.serve_peers,
    }
}

// Upstream: the connection to the replica that the source assigned for slots: the conversation, its offer, its copy.
//
// ```text
//   source: ReadFrom{peer} ──▶ connect ── ReadPeer ──▶ PeerOffer ── data lanes ──▶ Reading, for the delivery
//                                │                                                        ▲
//                                └─ the conversation stays open while slots are read: Rate ┘  its end: Left
// ```
//
// A peer is authenticated as the source is: both ends prove that they hold the token, and lanes derive their secret
// from the conversation. Its bytes are accepted only if they match the source's checksums ([`reader`]).

/// Which peer to read, and into which memory.
struct Goal {
    credentials: Credentials,
    upstream: Upstream,
    generation: u64,
    /// The name of this replica.
    name: String,
    wish: TransportChoices,
    /// The memory of this replica's copy.
    memory: Arc<Memory>,
    slot_size: u32,
    /// The copy holds ciphertext, as the source's table does.
    is_sealed: bool,
}

/// A report of a conversation.
pub enum Said {
    /// For the delivery.
    ReadFrom(ReadFrom),
    /// The peer cannot be read.
    Lost(Lost),
}

/// How long a peer may take to offer its copy, which it may just be creating.
const OFFER_LIMIT: Duration = Duration::from_secs(4);

/// Time limit for connecting. Short: the source assigns only peers that report.
const REACH_LIMIT: Duration = Duration::from_secs(3);

/// Connecting to a peer, and the conversation with it afterwards. Dropping it ends both and discards its reports, which
/// could be taken for those of a later conversation with the same peer.
struct Conversation {
    /// The peer's session with the source.
    session: u64,
    task: AbortHandle,
    said: UnboundedReceiver<Said>,
}

impl Conversation {
    /// The next report. Pending for ever after [`Said::Lost`].
    async fn said(&mut self) -> Said {
        match self.said.recv().await {
            Some(said) => said,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Begins to connect.
fn begin(goal: Goal) -> Conversation {
    let session = goal.upstream.session;
    let (tell, said) = unbounded_channel();
    let task = tokio::spawn(async move {
        if let Err(lost) = converse(goal, &tell).await {
            let _ = tell.send(Said::Lost(lost));
        }
    });
    Conversation { session, task: task.abort_handle(), said }
}

/// Runs until the peer ends the conversation.
async fn converse(goal: Goal, tell: &UnboundedSender<Said>) -> Result<(), Lost> {
    let session = goal.upstream.session;
    let who = format!("{} at {}", goal.upstream.name, goal.upstream.address);
    let lost = |cause, text: String| Lost { session, cause, text: format!("the replica {who} {text}") };
    let gone = |error: remora_conversation::Error| lost(LossCause::Gone, error.to_string());
    let address: SocketAddr =
        goal.upstream.address.parse().map_err(|_| lost(LossCause::Refused, "has no valid address".into()))?;
    let options =
        Options { connect_timeout: REACH_LIMIT, ..goal.credentials.options_for_lender(&address.ip().to_string()) };
    let mut connection = goal.credentials.connect_with(address, &options).await.map_err(gone)?;
    let asked = Message::ReadPeer { generation: goal.generation, name: goal.name.clone() };
    connection.send(asked).await.map_err(gone)?;
    let offered = tokio::time::timeout(OFFER_LIMIT, offer(&mut connection, goal.generation)).await;
    let (table, rate) = match offered {
        Ok(offered) => offered.map_err(gone)?,
        Err(_) => return Err(lost(LossCause::Refused, format!("offered nothing for {} s", OFFER_LIMIT.as_secs()))),
    };
    if table.slot_size != goal.slot_size {
        return Err(lost(LossCause::Refused, "offers slots of another size".into()));
    }
    let way = Way::new(&connection, goal.wish.clone());
    let (reading, kind, protection) =
        reach(&goal, way, table, rate).await.map_err(|text| lost(LossCause::Gone, text))?;
    tracing::info!(
        event = events::UPSTREAM_READ,
        peer = %goal.upstream.name,
        address = %goal.upstream.address,
        transport = kind.name(),
        %protection,
        "reading slots from another replica"
    );
    let _ = tell.send(Said::ReadFrom(ReadFrom::Peer(reading)));
    loop {
        match connection.receive().await {
            Ok(Message::PeerOffer { rate, .. }) => {
                let _ = tell.send(Said::ReadFrom(ReadFrom::Rate { session, rate }));
            }
            Ok(_) => {}
            Err(error) => return Err(gone(error)),
        }
    }
}

async fn offer(connection: &mut Connection, wanted: u64) -> Result<(TableOffer, u64), remora_conversation::Error> {
    loop {
        if let Message::PeerOffer { generation, table, rate } = connection.receive().await?
            && generation == wanted
        {
            return Ok((table, rate));
        }
    }
}

/// Connects to the offered copy, over the best transport that both ends have.
async fn reach(
    goal: &Goal,
    way: Way,
    table: TableOffer,
    rate: u64,
) -> Result<(Reading, TransportKind, Protection), String> {
    let (memory, slots) = (goal.memory.clone(), table.slots);
    let is_sealed = goal.is_sealed;
    let connecting = tokio::task::spawn_blocking(move || {
        let (peer, kind) = way.reach(&table, is_sealed, &memory)?;
        Ok((peer, kind, way.protection(kind, is_sealed)))
    });
    let reached: Result<_, Failure> = connecting.await.map_err(|error| error.to_string())?;
    let (peer, kind, protection) = reached.map_err(|failure| failure.message)?;
    Ok((Reading { session: goal.upstream.session, peer, slots, rate }, kind, protection))
}

// Assignment: from which replica the source wants its slots read, in whichever order its words come.
//
// An offer names an upstream, and connecting its tables takes time. The source can name another one meanwhile
// (`ReadFrom`), since the first has left. What it has said last counts when the tables are connected.

/// The source's last word about where slots are read.
#[derive(Default)]
pub struct Assignment {
    /// What it has said since its last offer: the generation, and the upstream; `None`: the source itself.
    later: Option<(u64, Option<Upstream>)>,
}

impl Assignment {
    /// An offer has come, which says it anew.
    pub fn offered(&mut self) {
        self.later = None;
    }

    /// The source has assigned this upstream for this generation.
    pub fn assigned(&mut self, generation: u64, upstream: Option<Upstream>) {
        self.later = Some((generation, upstream));
    }

    /// Where the slots of this offer are read, whose tables are connected now; `None`: from the source itself.
    pub fn of(&self, offer: &Offer) -> Option<Upstream> {
        if remora_base::mutation::Mutation::AssignmentForgotten.is_active() {
            return offer.upstream.clone();
        }
        match &self.later {
            Some((generation, upstream)) if *generation == offer.snapshot.generation => upstream.clone(),
            _ => offer.upstream.clone(),
        }
    }
}
