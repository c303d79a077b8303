//! The hand-off: the server goes from our link to the true primary, or back again if it does not get in step there.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use remora_protocol::Phase;

use super::{End, Flow, GO_ON, QUICK_TICK, Sync};
use crate::exit::{Code, Failure};
use crate::replica::delivery::Order;
use crate::server::ServerError;

/// How long a hand-off may take until the server is in step with the primary by itself.
const HAND_OFF_LIMIT: Duration = Duration::from_secs(20);

/// Hand-offs that may fail before we say that they always will.
const HAND_OFFS_LIMIT: u32 = 3;

/// How long the stream is held back for the server to come to the end of what it was given: some megabytes in its socket.
const HOLD_LIMIT: Duration = Duration::from_millis(500);

impl Sync {
    /// Holds the stream back until the server has carried out all that it was given.
    ///
    /// A Redis from 7.4 on blocks its link to the primary while a FLUSHDB or FLUSHALL runs in the background, and a REPLICAOF at that
    /// moment throws away the place where it would go on: it would ask the primary for a full copy (freeClient in networking.c
    /// caches no primary that is blocked).
    async fn settle(&mut self) -> Result<(), ServerError> {
        self.delivery.order(Order::Hold);
        let until = Instant::now() + HOLD_LIMIT;
        let mut before = None;
        while Instant::now() < until {
            tokio::time::sleep(QUICK_TICK).await;
            let blocked =
                self.control.client().await?.info("clients").await?.number::<u64>("blocked_clients").unwrap_or(0);
            let offset = self.control.replication().await?.offset;
            // Nothing was carried out since the last look, and in between the link was not blocked: there is nothing left.
            if offset == before && blocked == 0 {
                return Ok(());
            }
            before = offset;
        }
        tracing::debug!("the server has clients that are blocked, or is slow; it is handed over as it is");
        Ok(())
    }

    /// Points the server at the true primary and waits until it is in step there.
    pub(super) async fn hand_off(&mut self, why: &str) -> Flow {
        let now = Instant::now();
        self.moments.caught_up.get_or_insert(now);
        self.phase = Phase::HandOff;
        let (host, port) = (self.primary.host.clone(), self.primary.port);
        tracing::info!(primary = %format!("{host}:{port}"), "handing the server over: {why}");
        self.settle().await?;
        let link = (self.link.ip().to_string(), self.link.port());
        self.still_follows(&[(&link.0, link.1)]).await?;
        self.record.put_the_login_back(self.control.client().await?).await?;
        self.point_at((&host, port), (&link.0, link.1)).await?;
        let mut told_full = false;
        while now.elapsed() < HAND_OFF_LIMIT || told_full {
            tokio::time::sleep(QUICK_TICK).await;
            self.tell_progress_when_due().await;
            let facts = match self.control.replication().await {
                Ok(facts) => facts,
                Err(error) if error.is_passing() && now.elapsed() < HAND_OFF_LIMIT => continue,
                Err(error) => return Err(error.into()),
            };
            let Some(link) = facts.link.filter(|link| link.host == host && link.port == port) else {
                self.still_follows(&[(&host, port)]).await?;
                continue;
            };
            if link.up == Some(true) {
                self.moments.handed_over = Some(Instant::now());
                self.meter.acknowledged.set(facts.offset.unwrap_or(0));
                return Ok(ControlFlow::Break(End::HandedOver));
            }
            if link.syncing == Some(true) && !told_full {
                told_full = true;
                tracing::warn!(
                    "the server did not go on where it was and is taking a full copy of the primary by itself; its log says why. If the \
                     primary's backlog did not reach back far enough, raise repl-backlog-size there"
                );
            }
            if told_full && now.elapsed() > self.args.retry_for.max(HAND_OFF_LIMIT) {
                break;
            }
        }
        self.hand_off_failed().await
    }

    /// The server did not get in step with the primary: back to our link, where it was.
    pub(super) async fn hand_off_failed(&mut self) -> Flow {
        self.failed_hand_offs += 1;
        let (host, port) = (&self.primary.host, self.primary.port);
        if self.failed_hand_offs >= HAND_OFFS_LIMIT || self.source.is_none() {
            return Err(Failure::new(
                Code::SyncFailed,
                format!(
                    "the server {} holds the whole data set but does not get in step with the primary {host}:{port}; the logs of both \
                     servers say why",
                    self.control.server().url()
                ),
            ));
        }
        tracing::warn!("the server did not get in step with the primary {host}:{port}; back to our link, to try again");
        let primary = self.primary.clone();
        self.still_follows(&[(&primary.host, primary.port)]).await?;
        self.target.link_login.give(&mut self.record, self.control.client().await?).await?;
        let (host, port) = (self.link.ip().to_string(), self.link.port());
        self.point_at((&host, port), (&primary.host, primary.port)).await?;
        self.phase = Phase::CatchUp;
        self.missed = Some(Instant::now());
        self.asked_at = None;
        self.question_due = Instant::now() + HAND_OFF_LIMIT / 10;
        GO_ON
    }
}
