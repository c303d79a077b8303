//! A pin: a link that keeps a server's backlog from an offset on, so that a replica can continue there whatever is
//! written meanwhile.
//!
//! Since Redis 7.0, and in every Valkey, the backlog and the output buffers of all replicas are one list of blocks. The
//! server drops a block only after every replica was sent it. A link that continues the stream and reads nothing
//! therefore keeps all blocks behind what the sockets hold, also beyond `repl-backlog-size`:
//!
//! ```text
//!            from            what the sockets hold      offset + 1
//!   ───────────┼──────────────────────┼─────────────────────┼──────────────── the stream ──▶
//!              └── PREFILL ───────────┴── the server's memory, kept while the pin is open
//! ```
//!
//! With usual sockets they would hold megabytes, and the pin would be firm only behind these: measured on loopback, 2.2
//! to 3.9 MB. The kernel sizes the server's send buffer by the segments and the window of the connection, and both are
//! the client's to choose. So this link has small segments and a small receive buffer (the server's socket then takes
//! about 40 KB), and it continues [`PinSizes::prefill`](PinSizes) bytes before the offset: those fill the
//! sockets.
//!
//! A `PSYNC` that the server cannot continue would begin a full copy. The pin therefore asks only for bytes that the
//! server keeps for certain, and a caller whose pin was refused once asks no more.

use std::time::{Duration, Instant};

use remora_redis::ReplId;
use remora_redis::resp::Frame;

use super::rules::{At, Bounds, Extent, Link, NoPin, Pin, PinSizes, Released};
use crate::{Client, Facts, OutputLimit, Pipeline, Server, ServerError};
use remora_base::AbortOnDrop;
use remora_base::units::Size;

/// How often the holder looks how much the pin holds back.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How often a server hears of the link: well within the time after which it closes a silent one (`repl-timeout`, 60 s
/// by default).
const ALIVE_EVERY: Duration = Duration::from_secs(15);

/// How long the server may take to answer the pin's `PSYNC`. One that begins a full copy may answer nothing at all.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The task that holds the connection, which ends with this.
#[derive(Debug)]
pub(super) struct Holder(tokio::task::JoinHandle<()>, #[allow(dead_code, reason = "ends the task")] AbortOnDrop);

impl Link for Holder {
    fn is_open(&self) -> bool {
        !self.0.is_finished()
    }
}

/// Pins `history` of the server from this place on, for the time `keep` at most.
pub(super) async fn open(
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
