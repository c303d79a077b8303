//! Relay: from which replica slots are read, and what is lent to others. Independent of the server's state.

use std::sync::Arc;

use remora_fabric::{Memory, TransportKind};
use remora_protocol::{LossCause, Message, Offer, Relaying, Relays, Upstream};

use super::assignment::Assignment;
use super::meter::Meter;
use super::relay_reader::{Lost, ReadFrom};
use super::relay_server::{LentCopy, RelayServer, UploadLimits};
use super::source::{Chosen, RelayWish, Source, wish};
use super::upstream::{self, Conversation, Goal, Said};
use crate::args::{RdmaOffer, ReadArgs, RelayArgs, TransportChoice, UploadLimit};
use crate::conversation::tokens::{Credentials, TokenFiles};
use crate::events;
use crate::exit::Failure;
use crate::units::Size;

/// This replica's part in passing slots on: the peer that it reads from, and the copy that it lends.
pub(crate) struct Relay {
    read: ReadArgs,
    options: RelayArgs,
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
    pub(crate) async fn open(
        read: ReadArgs,
        options: RelayArgs,
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

    /// What the source needs to know. `None` if no slots pass between this replica and others.
    pub(crate) fn introduction(&self) -> Option<Relays> {
        let serves_at = self.serving.as_ref().map(|serving| serving.address().to_string()).unwrap_or_default();
        self.takes_part.then(|| Relays { serves_at, zone: self.options.zone.clone() })
    }

    /// What the next feed must provide; `kept`: the memory of the copy that it can go on with.
    pub(crate) fn wish(&self, kept: Option<Arc<Memory>>) -> Option<RelayWish> {
        let download_rate = self.options.download_limit.map_or(0, Size::get);
        self.takes_part.then(|| RelayWish { serves: self.serving.is_some(), download_rate, kept })
    }

    /// The next report of the conversation with the upstream replica. Pending without one.
    pub(crate) async fn said(&mut self) -> Said {
        match &mut self.upstream {
            Some((_, conversation)) => conversation.said().await,
            None => std::future::pending().await,
        }
    }

    /// Notes that all slots have arrived.
    pub(crate) fn leave_upstream(&mut self) {
        self.upstream = None;
    }

    /// An offer has come, whose tables are connected next.
    pub(crate) fn offered(&mut self) {
        self.assignment.offered();
    }

    /// Tables were connected: lends their copy, and reads from where the source has said last. Returns what the
    /// delivery must know.
    pub(crate) fn attached(&mut self, offer: &Offer, chosen: &mut Chosen, loaded: bool) -> Option<ReadFrom> {
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
                let rdma = by_rdma.then(|| RdmaOffer { no_rdma: false, end: self.read.rdma.end.clone() });
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
    pub(crate) fn assigned(&mut self, generation: u64, upstream: Option<Upstream>) -> Option<ReadFrom> {
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
        self.upstream = Some((upstream, upstream::begin(goal)));
        Some(ReadFrom::Awaited)
    }

    /// The upstream replica cannot be read any more. Returns the message for the source, which assigns another.
    pub(crate) fn lost(&mut self, lost: Lost) -> Option<Message> {
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
    pub(crate) fn slots_below(&self) -> u64 {
        let used = self.meter.slots_below.get();
        match &self.copy {
            Some(copy) if copy.in_window => used.max(self.meter.slots_held.get()),
            _ => used,
        }
    }

    /// What this replica reports to the source about its part in passing slots on.
    pub(crate) fn relaying(&self) -> Option<Relaying> {
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
    pub(crate) fn readers(&self) -> usize {
        self.serving.as_ref().map_or(0, RelayServer::readers)
    }
}

/// On the source's host nothing is passed on: replicas there read its memory in place.
fn may_be_far(read: &ReadArgs, options: &RelayArgs, source: &Source) -> bool {
    let is_local = source.address().ip() == source.local_address().ip();
    match read.transport {
        TransportChoice::Shm => false,
        TransportChoice::Tcp | TransportChoice::Verbs => true,
        TransportChoice::Auto => !is_local || options.serve_peers,
    }
}
