//! Passing: a connection that the primary serves through the agent, and when the server can go on without the agent.
//!
//! ```text
//!   link up? ── INFO at the primary, with the server's login ──▶ would it continue the server from what it has executed?
//!      no: again in LOOK_EVERY                                      yes: handed back        no: the connection stays
//! ```
//!
//! The link is up as soon as the server has loaded. What clients have written since the fork still waits in the
//! primary's output buffer for this connection, and goes with it. So the connection is closed only when the primary's
//! backlog has the server's next byte, with room for what is written meanwhile: otherwise its end would cost a second
//! fork. Until then it stays in place and costs the copying of its bytes.

use std::time::Duration;

use remora_redis::ReplId;
use tokio::time::Instant;

use super::passage::{Login, ask};
use crate::server::{Facts, Stream};

/// How long the primary is asked at each look. A server catches up within seconds where it can.
const PATIENCE: Duration = Duration::from_secs(30);

/// Pause between two questions afterwards: the server may stay behind for as long as clients write.
const SLOW_LOOK: Duration = Duration::from_secs(5);

/// A connection that is passed on.
pub(super) struct Passing {
    login: Login,
    /// The primary, once it was asked.
    primary: Option<Stream>,
    up_since: Option<Instant>,
    /// Where the primary was when it was asked last.
    before: Option<(Instant, u64)>,
    due: Instant,
    is_told: bool,
}

impl Passing {
    pub(super) fn new(login: Login) -> Passing {
        Passing { login, primary: None, up_since: None, before: None, due: Instant::now(), is_told: false }
    }

    /// The server's link is up, and it has executed this history up to this offset. Whether its primary would continue
    /// it there over another connection.
    pub(super) async fn may_end(&mut self, history: Option<ReplId>, offset: u64) -> bool {
        let now = Instant::now();
        let is_late = now.duration_since(*self.up_since.get_or_insert(now)) > PATIENCE;
        if now < self.due {
            return false;
        }
        let asked = self.ask().await;
        let now = Instant::now();
        let covered = match (asked, history) {
            (Ok(primary), Some(history)) => self.covers(now, &primary, history, offset),
            (Ok(_), None) => Err(Some("the server does not name its history".to_owned())),
            (Err(why), _) => {
                self.primary = None;
                Err(Some(format!("the primary does not say what its backlog holds: {why}")))
            }
        };
        match covered {
            Ok(()) => true,
            Err(why) => {
                if let Some(why) = why.filter(|_| is_late && !std::mem::replace(&mut self.is_told, true)) {
                    tracing::warn!(
                        "the server's connection to its primary stays with the agent, as the primary would not continue the server over \
                         another one: {why}. If the agent ends now, the server takes another full copy"
                    );
                }
                if is_late {
                    self.due = now + SLOW_LOOK;
                }
                false
            }
        }
    }

    /// The error says why not; without a text it is not known yet, since nothing is known of the rate of the writes.
    fn covers(&mut self, now: Instant, primary: &Facts, history: ReplId, offset: u64) -> Result<(), Option<String>> {
        let at = primary.offset.unwrap_or(0);
        let (since, before) = self.before.replace((now, at)).ok_or(None)?;
        let rate = at.saturating_sub(before) as f64 / now.duration_since(since).as_secs_f64().max(0.001);
        primary.covers(history, offset, rate as u64).map_err(Some)
    }

    async fn ask(&mut self) -> Result<Facts, String> {
        let primary = match &mut self.primary {
            Some(primary) => primary,
            None => self.primary.insert(self.login.connect().await?),
        };
        ask(primary).await.map_err(|why| why.to_string())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::server::Backlog;

    /// A primary with a backlog of 1000 bytes up to this offset.
    fn primary(at: u64) -> Facts {
        let backlog = Backlog { active: true, size: 1000, first: at - 999, held: 1000 };
        Facts {
            replid: Some("a".repeat(40).parse().unwrap()),
            offset: Some(at),
            backlog: Some(backlog),
            ..Facts::default()
        }
    }

    #[tokio::test]
    async fn a_server_is_let_go_when_the_primary_has_its_next_byte_and_room_for_the_writes() {
        let history = "a".repeat(40).parse().unwrap();
        let mut passing = Passing::new(Login::nowhere());
        let mut now = Instant::now();
        let mut covers = |at, offset| {
            now += Duration::from_secs(1);
            passing.covers(now, &primary(at), history, offset)
        };
        assert_eq!(covers(100_000, 100_000), Err(None), "the rate is not known yet");
        assert!(covers(110_000, 50_000).is_err_and(|why| why.unwrap().contains("repl-backlog-size")), "it is behind");
        assert!(covers(120_000, 120_000).is_err(), "caught up, and 10 kB/s: 250 ms are more than the backlog has");
        assert_eq!(covers(120_100, 120_100), Ok(()));
        assert_eq!(covers(120_100, 119_200), Ok(()), "the oldest bytes, and no writes");
        assert!(covers(120_100, 119_000).is_err());
    }
}
