//! Passing slots on: whom we are sent to for them, what is lent to others, and how long after our own end.

use std::sync::Arc;
use std::time::Instant;

use remora_fabric::{Memory, TransportKind};
use remora_protocol::{LossCause, Message, Offer, Phase, Relaying, Relays, Upstream};

use super::{Flow, GO_ON, Sync, TICK};
use crate::args::{RdmaOffer, ReplicaArgs, TransportChoice};
use crate::conversation::Token;
use crate::exit::Failure;
use crate::progress;
use crate::replica::delivery::Order;
use crate::replica::relayed::{Lost, ReadFrom};
use crate::replica::serving::{Lending, Serving, UploadLimits};
use crate::replica::source::{Chosen, RelayWish, Source, wish};
use crate::replica::upstream::{self, Conversation, Goal, Said};
use crate::units::{Size, readable};

/// What a sync has to do with other replicas.
pub(super) struct Relay {
    /// Slots may come from others.
    takes_part: bool,
    /// The door for others, where there is one.
    serving: Option<Serving>,
    /// The copy that slots go into now.
    copy: Option<Copying>,
    /// Whom we read from, or are about to.
    upstream: Option<(Upstream, Conversation)>,
}

struct Copying {
    generation: u64,
    memory: Arc<Memory>,
    slot_size: u32,
    /// The source uses places again that everybody has passed.
    in_window: bool,
}

impl Relay {
    /// Opens the door, if there is to be one.
    pub(super) async fn open(args: &ReplicaArgs, token: &Arc<Token>, source: &Source) -> Result<Relay, Failure> {
        let takes_part = takes_part(args, source);
        let options = &args.relay;
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
            let limits =
                UploadLimits { in_all: bytes(options.upload_limit), per_peer: bytes(options.upload_limit_per_peer) };
            Some(Serving::open(listen, token.clone(), limits).await?)
        } else {
            None
        };
        Ok(Relay { takes_part, serving, copy: None, upstream: None })
    }

    /// What the source is told of it.
    pub(super) fn introduction(&self, args: &ReplicaArgs) -> Option<Relays> {
        let serves_at = self.serving.as_ref().map(|serving| serving.address().to_string()).unwrap_or_default();
        self.takes_part.then(|| Relays { serves_at, zone: args.relay.zone.clone() })
    }

    /// What is wanted of the next feed; `None`: nothing to do with others.
    pub(super) fn wish(&self, args: &ReplicaArgs, kept: Option<Arc<Memory>>) -> Option<RelayWish> {
        let download_rate = args.relay.download_limit.map_or(0, Size::get);
        self.takes_part.then(|| RelayWish { serves: self.serving.is_some(), download_rate, kept })
    }

    /// What comes of the way to the peer; nothing where there is none.
    pub(super) async fn said(&mut self) -> Said {
        match &mut self.upstream {
            Some((_, conversation)) => conversation.said().await,
            None => std::future::pending().await,
        }
    }

    /// Nothing more is wanted from anybody.
    pub(super) fn leave_upstream(&mut self) {
        self.upstream = None;
    }
}

/// On one host with the source there is nothing to pass on: everybody reads its memory in place.
fn takes_part(args: &ReplicaArgs, source: &Source) -> bool {
    let is_local = source.address().ip() == source.local_address().ip();
    let may_be_far = match args.transport {
        TransportChoice::Shm => false,
        TransportChoice::Tcp | TransportChoice::Verbs => true,
        TransportChoice::Auto => !is_local || args.relay.serve_peers,
    };
    may_be_far && args.state_dir.is_none()
}

impl Sync {
    /// A feed was connected: lends its copy, and goes where the offer sends us.
    pub(super) fn begin_relaying(&mut self, offer: &Offer, chosen: &mut Chosen) {
        let Some((memory, own, is_new)) = chosen.copy.take() else {
            if !self.delivery.progress().loaded {
                self.relay.copy = None;
                self.relay.upstream = None;
            }
            return; // who has loaded everything lends it as before
        };
        let (generation, first_offset) = (offer.snapshot.generation, offer.snapshot.first_offset);
        if is_new {
            self.relay.upstream = None;
            if let Some(serving) = &self.relay.serving {
                let by_rdma = chosen.kind == TransportKind::Verbs;
                let rdma = by_rdma.then(|| RdmaOffer { no_rdma: false, end: self.args.rdma.end.clone() });
                let keeps_all = offer.snapshot.retained && own.slots >= offer.snapshot.slots;
                serving.lend(Lending { generation, memory: memory.clone(), own, first_offset, keeps_all, rdma });
            }
        }
        let in_window = !offer.snapshot.retained;
        self.relay.copy = Some(Copying { generation, memory, slot_size: own.slot_size, in_window });
        self.read_from(offer.upstream.clone());
    }

    /// The source sends us elsewhere.
    pub(super) fn sent_to(&mut self, generation: u64, upstream: Option<Upstream>) -> Flow {
        if self.relay.copy.as_ref().is_some_and(|copy| copy.generation == generation) {
            self.read_from(upstream);
        }
        GO_ON
    }

    fn read_from(&mut self, upstream: Option<Upstream>) {
        let Some(copy) = &self.relay.copy else { return };
        let Some(upstream) = upstream else {
            self.delivery.order(Order::ReadFrom(ReadFrom::Source));
            self.relay.upstream = None;
            return;
        };
        if self.relay.upstream.as_ref().is_some_and(|(_, conversation)| conversation.session == upstream.session) {
            return; // there already
        }
        self.delivery.order(Order::ReadFrom(ReadFrom::Awaited));
        let goal = Goal {
            token: self.token.clone(),
            upstream: upstream.clone(),
            generation: copy.generation,
            name: self.args.name.clone().unwrap_or_else(|| self.control.server().url().to_string()),
            wish: wish(&self.args),
            memory: copy.memory.clone(),
            slot_size: copy.slot_size,
        };
        self.relay.upstream = Some((upstream, upstream::begin(goal)));
    }

    /// The conversation with a peer has something to say.
    pub(super) async fn peer_said(&mut self, said: Said) -> Flow {
        match said {
            Said::ReadFrom(whom) => {
                self.delivery.order(Order::ReadFrom(whom));
                GO_ON
            }
            Said::Lost(lost) => {
                self.delivery.order(Order::ReadFrom(ReadFrom::Left { session: lost.session }));
                self.peer_lost(lost).await
            }
        }
    }

    /// A peer can't be read any more: the source is told, and says from whom else.
    pub(super) async fn peer_lost(&mut self, lost: Lost) -> Flow {
        let Lost { session, cause, text } = lost;
        let Some((upstream, _)) = self.relay.upstream.take_if(|(_, present)| present.session == session) else {
            return GO_ON;
        };
        let name = &upstream.name;
        match cause {
            LossCause::Lied => {
                tracing::warn!(peer = %name, "a replica passed on bytes that are not the source's: {text}")
            }
            _ => tracing::info!(peer = %name, "slots come from another replica no more: {text}"),
        }
        let Some(generation) = self.relay.copy.as_ref().map(|copy| copy.generation) else { return GO_ON };
        if let Some(source) = &mut self.source {
            // A source that is gone shows itself when it is listened to.
            let _ = source.send(Message::PeerLost { generation, session, cause, text }).await;
        }
        GO_ON
    }

    /// The first slot that the source must keep for us. What is copied out of a window needs to be there no longer, though our own server has
    /// yet to be given it.
    pub(super) fn slots_below(&self) -> u64 {
        let used = self.meter.slots_below.get();
        match &self.relay.copy {
            Some(copy) if copy.in_window => used.max(self.meter.slots_held.get()),
            _ => used,
        }
    }

    /// What the source is told of our part.
    pub(super) fn relaying(&self) -> Option<Relaying> {
        self.relay.copy.as_ref()?;
        let reads_from = self.meter.reads_from.get();
        Some(Relaying {
            reads_from: (reads_from != 0).then_some(reads_from),
            oldest: self.meter.copy_oldest.get(),
            held: self.meter.slots_held.get(),
            is_full: self.meter.copy_full.get() > 0,
        })
    }

    /// Our own server is done; others may still read from us.
    pub(super) async fn linger(&mut self) {
        let Some(readers) = self.readers() else { return };
        let limit = self.args.relay.linger;
        let plural = if readers == 1 { "replica reads" } else { "replicas read" };
        progress::say(&format!(
            "{readers} {plural} slots from here still: lending them for {} at most (--linger)",
            readable(limit)
        ));
        self.phase = Phase::Done;
        let began = Instant::now();
        while began.elapsed() < limit && self.readers().is_some() {
            tokio::select! {
                _ = self.signals.0.recv() => return,
                _ = self.signals.1.recv() => return,
                () = tokio::time::sleep(TICK) => {}
            }
            self.tell_progress_when_due().await;
        }
        tracing::info!(
            seconds = began.elapsed().as_secs(),
            left = self.readers().unwrap_or(0),
            "slots are lent no more"
        );
    }

    /// How many read from us; `None`: nobody.
    fn readers(&self) -> Option<usize> {
        let serving = self.relay.serving.as_ref()?;
        Some(serving.readers()).filter(|readers| *readers > 0)
    }
}
