//! Upstream: the connection to the replica that the source assigned for slots: the conversation, its offer, its copy.
//!
//! ```text
//!   source: ReadFrom{peer} ──▶ connect ── ReadPeer ──▶ PeerOffer ── data lanes ──▶ Reading, for the delivery
//!                                │                                                        ▲
//!                                └─ the conversation stays open while slots are read: Rate ┘  its end: Left
//! ```
//!
//! A peer is authenticated as the source is: both ends prove that they hold the token, and lanes derive their secret
//! from the conversation. Its bytes are accepted only if they match the source's checksums ([`super::relay_reader`]).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use remora_fabric::{Memory, TransportKind};
use remora_protocol::{LossCause, Message, TableOffer, Upstream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;

use super::relay_reader::{Lost, ReadFrom, Reading};
use super::source::Way;
use crate::conversation::tokens::Credentials;
use crate::conversation::{Connection, Options, Protection};
use crate::events;
use crate::exit::Failure;
use crate::transports::TransportChoices;

/// Which peer to read, and into which memory.
pub(crate) struct Goal {
    pub(crate) credentials: Credentials,
    pub(crate) upstream: Upstream,
    pub(crate) generation: u64,
    /// The name of this replica.
    pub(crate) name: String,
    pub(crate) wish: TransportChoices,
    /// The memory of this replica's copy.
    pub(crate) memory: Arc<Memory>,
    pub(crate) slot_size: u32,
    /// The copy holds ciphertext, as the source's table does.
    pub(crate) is_sealed: bool,
}

/// A report of a conversation.
pub(crate) enum Said {
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
pub(crate) struct Conversation {
    /// The peer's session with the source.
    pub(crate) session: u64,
    task: AbortHandle,
    said: UnboundedReceiver<Said>,
}

impl Conversation {
    /// The next report. Pending for ever after [`Said::Lost`].
    pub(crate) async fn said(&mut self) -> Said {
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
pub(crate) fn begin(goal: Goal) -> Conversation {
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
    let gone = |error: crate::conversation::Error| lost(LossCause::Gone, error.to_string());
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

async fn offer(connection: &mut Connection, wanted: u64) -> Result<(TableOffer, u64), crate::conversation::Error> {
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
