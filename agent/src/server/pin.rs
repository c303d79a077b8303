//! [`Pin`]: a link that keeps a server's backlog from an offset on, so that a replica can continue there whatever is
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
//! about 40 KB), and it continues [`PREFILL`] bytes before the offset: those fill the sockets.
//!
//! A `PSYNC` that the server cannot continue would begin a full copy. The pin therefore asks only for bytes that the
//! server keeps for certain, and a caller whose pin was refused once asks no more.

use std::time::{Duration, Instant};

use remora_redis::ReplId;
use remora_redis::resp::Frame;

use super::{Backlog, Client, Facts, OutputLimit, Server, ServerError};
use crate::tasks::AbortOnDrop;
use crate::units::Size;

/// Bytes of the stream before the pinned offset that fill the sockets: several times what they take.
const PREFILL: u64 = 256 << 10;

/// With fewer bytes before the offset, the sockets could take the offset itself: a Unix socket takes up to 208 KiB.
const FIRM: u64 = 128 << 10;

/// A pin of a server whose backlog is smaller is not tried: its blocks of up to 64 KiB are too coarse.
const LEAST_BACKLOG: u64 = 512 << 10;

/// How long a pin is kept at most: as long as a hand-off may take, and a little more.
const KEEP_LIMIT: Duration = Duration::from_secs(25);

/// How often the holder looks how much the pin holds back.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The part of the server's `client-output-buffer-limit` that a pin may hold back. The rest is for what is written
/// between two looks.
const PART_OF_LIMIT: u64 = 2;

/// What a pin holds back at most where the server has no limit.
const BYTES_LIMIT: u64 = 512 << 20;

/// How long the server may take to answer the pin's `PSYNC`. One that begins a full copy may answer nothing at all.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// A part of the stream that a server keeps for as long as this lives, but within [`KEEP_LIMIT`] and a limit in bytes.
#[derive(Debug)]
pub(super) struct Pin {
    from: u64,
    until: Instant,
    is_firm: bool,
    holder: tokio::task::JoinHandle<()>,
    _ends_with_this: AbortOnDrop,
}

/// Where a pin begins.
#[derive(Clone, Copy, Debug)]
pub(super) enum At {
    /// At the byte after this offset.
    Offset(u64),
    /// At the byte that the server writes next.
    End,
}

/// Why there is no pin.
#[derive(Debug, thiserror::Error)]
pub(super) enum PinError {
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
    Refused { server: String, at: u64, answer: String },
    /// The connection failed.
    #[error(transparent)]
    Server(#[from] ServerError),
}

impl Pin {
    /// Pins `history` of the server from this place on.
    pub(super) async fn open(server: &Server, facts: &Facts, history: ReplId, at: At) -> Result<Pin, PinError> {
        if !facts.shares_its_buffer() {
            return Err(PinError::Impossible("the server keeps its backlog apart from the buffers of its replicas"));
        }
        let mut link = server.connect_for_little().await?;
        link.set_timeout(ANSWER_LIMIT);
        // With `eof`, a server that would begin a full copy waits for its repl-diskless-sync-delay first, and does not
        // begin it if the link is closed by then.
        link.command(&["REPLCONF", "capa", "eof", "capa", "psync2"]).await?;
        // The question stands right before the request, so that little is written in between.
        let now = Facts::from_info(&link.info("replication").await?);
        let next = match at {
            At::Offset(offset) => offset.saturating_add(1),
            At::End => now.backlog.map_or(0, |backlog| backlog.end()),
        };
        let from = start(&now, history, next)?;
        let is_firm = next - from >= FIRM;
        let refused = |answer: String| PinError::Refused { server: server.url().to_string(), at: from, answer };
        match link.command(&["PSYNC", &history.to_string(), &from.to_string()]).await {
            Ok(Frame::Simple(text)) if text.starts_with(b"CONTINUE") => {}
            Ok(Frame::Simple(text)) => return Err(refused(String::from_utf8_lossy(&text).into_owned())),
            Ok(_) => return Err(refused("an answer that is not a status reply".into())),
            // The server may have begun a full copy, which ends with the connection.
            Err(error) => return Err(refused(error.to_string())),
        }
        let holder = tokio::spawn(hold(link, server.clone(), facts.clone(), from));
        let ends_with_this = AbortOnDrop::new(&holder);
        Ok(Pin { from, until: Instant::now() + KEEP_LIMIT, is_firm, holder, _ends_with_this: ends_with_this })
    }

    /// Whether a replica whose next byte is the one after `offset` can continue there for as long as this pin lives.
    pub(super) fn holds(&self, offset: u64) -> bool {
        offset.saturating_add(1) >= self.from.saturating_add(if self.is_firm { FIRM } else { 0 }) && self.lives()
    }

    /// Whether the link is open still, with some time left.
    pub(super) fn lives(&self) -> bool {
        !self.holder.is_finished() && self.until.saturating_duration_since(Instant::now()) > KEEP_LIMIT / 2
    }

    /// Whether no write can move the backlog beyond the offset that was asked for. Otherwise the sockets may take some
    /// bytes of it, because the history has too few bytes before it.
    pub(super) fn is_firm(&self) -> bool {
        self.is_firm
    }
}

/// Where a link begins that pins the byte at `next`.
fn start(facts: &Facts, history: ReplId, next: u64) -> Result<u64, PinError> {
    let Some(backlog) = facts.backlog.filter(|backlog| backlog.active && facts.continues(history, next)) else {
        return Err(PinError::NotKept("the server does not continue this history".into()));
    };
    if backlog.size < LEAST_BACKLOG {
        return Err(PinError::Impossible("the server's backlog is smaller than 512 KiB"));
    }
    let safe = backlog.safe();
    if next < safe || next > backlog.end() {
        return Err(PinError::NotKept(format!(
            "the server keeps offsets {} to {} for certain, and the replica needs {next}",
            backlog.kept(),
            backlog.end().saturating_sub(1)
        )));
    }
    Ok(next.saturating_sub(PREFILL).max(safe))
}

/// Keeps a link open that reads nothing, within the limits.
async fn hold(link: Client, server: Server, facts: Facts, from: u64) {
    let until = Instant::now() + KEEP_LIMIT;
    let mut client = server.connect().await.ok();
    let limit = match client.as_mut() {
        Some(client) => OutputLimit::read(client, &facts).await,
        None => OutputLimit::DEFAULT,
    };
    let bytes = limit.hard().map_or(BYTES_LIMIT, |hard| BYTES_LIMIT.min(hard / PART_OF_LIMIT));
    while Instant::now() < until {
        tokio::time::sleep(LOOK_EVERY).await;
        // A server that gives no answer is asked no more. The time limit stays.
        let Some(asked) = client.as_mut() else { continue };
        let Ok(info) = asked.info("replication").await else {
            client = None;
            continue;
        };
        let held = Facts::from_info(&info).offset.unwrap_or(0).saturating_sub(from);
        if held >= bytes {
            tracing::info!(
                server = %server.url(),
                "releasing the backlog at {}: half of what the server holds back for a replica (client-output-buffer-limit)",
                Size::bytes(held)
            );
            break;
        }
    }
    drop(link);
}

impl Server {
    /// Connects like [`Server::connect`], over a connection whose sockets hold few bytes at both ends.
    async fn connect_for_little(&self) -> Result<Client, ServerError> {
        self.connect_with(super::client::Sockets::Small).await
    }
}

impl Backlog {
    /// The offset behind the last byte.
    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(self.held)
    }

    /// The first offset that the server keeps for certain. It may hold more: what a replica was not sent yet stays for
    /// as long as that takes, which ends within milliseconds.
    pub(super) fn kept(&self) -> u64 {
        self.first.max(self.end().saturating_sub(self.size))
    }

    /// The first offset that the server still keeps after it has written an eighth of its backlog, which is more than
    /// it writes within a few round trips.
    fn safe(&self) -> u64 {
        self.first.max(self.end().saturating_add(self.size / 8).saturating_sub(self.size))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::server::{Family, Version};

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

    fn start_at(facts: &Facts, offset: u64) -> Result<u64, PinError> {
        start(facts, replid("a"), offset.saturating_add(1))
    }

    #[test]
    fn a_pin_begins_before_the_offset_and_behind_what_the_server_may_drop() {
        let facts_now = facts(10 * MIB, MIB);
        assert_eq!(start_at(&facts_now, 11 * MIB - 1).unwrap(), 11 * MIB - PREFILL);
        let safe = 10 * MIB + MIB / 8;
        assert_eq!(start_at(&facts_now, safe + 9).unwrap(), safe);
        assert_eq!(start_at(&facts_now, safe - 1).unwrap(), safe);
        assert!(matches!(start_at(&facts_now, safe - 2), Err(PinError::NotKept(_))));
        assert!(matches!(start_at(&facts_now, 11 * MIB), Err(PinError::NotKept(_))), "beyond the end");
    }

    #[test]
    fn what_a_server_holds_beyond_its_backlog_is_not_believed() {
        // 26 MB are held because the source's link has not read them yet.
        let facts_now = facts(10 * MIB, 26 * MIB);
        assert!(matches!(start_at(&facts_now, 11 * MIB), Err(PinError::NotKept(_))));
        assert!(matches!(start_at(&facts_now, 35 * MIB), Err(PinError::NotKept(_))));
        assert_eq!(start_at(&facts_now, 36 * MIB - 1).unwrap(), 36 * MIB - PREFILL);
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
        assert!(matches!(start_at(&Facts { backlog, ..facts(1, 0) }, 500), Err(PinError::Impossible(_))));
    }

    #[test]
    fn no_figure_of_a_server_overflows() {
        for (first, held) in [(u64::MAX, u64::MAX), (0, u64::MAX), (u64::MAX, 0)] {
            for offset in [0, u64::MAX - 1, u64::MAX] {
                let _ = start_at(&facts(first, held), offset);
            }
        }
    }
}
