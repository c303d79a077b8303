//! The ends: done, stopped or failed; in which state the server is left, and what is said about it.

use std::ops::ControlFlow;
use std::time::Instant;

use remora_protocol::{Message, Outcome, Phase};

use super::{End, Flow, Sync, TICK};
use crate::cli::OnFailure;
use crate::exit::{Code, Failure};
use crate::progress;
use crate::replica::SETTLE_LIMIT;
use crate::replica::report::Summary;
use crate::server::{Facts, ServerError};

impl Sync {
    pub(super) async fn stopped(&mut self, signal: &'static str) -> Flow {
        let loaded = self.delivery.progress().loaded;
        if loaded {
            return match self.hand_off("we were stopped").await? {
                ControlFlow::Break(_) => Ok(ControlFlow::Break(End::Stopped(signal))),
                ControlFlow::Continue(()) => Err(Failure::new(Code::Interrupted, format!("stopped by {signal}"))),
            };
        }
        Err(Failure::new(Code::Interrupted, format!("stopped by {signal}")))
    }

    pub(super) async fn end_well(mut self, end: End) -> Result<(), Failure> {
        if let Err(error) = self.record.put_back(&mut self.client).await {
            return Err(Failure::from(error).and("the server is a replica now, but a setting was not put back"));
        }
        let summary = self.summary();
        self.phase = Phase::Done;
        self.tell_progress().await;
        self.delivery.stop(true);
        self.record.close();
        let published = self.publish(&summary);
        self.linger().await;
        if let Some(source) = self.source.take() {
            let text = format!("{} follows the primary at offset {}", self.server.url(), summary.hand_off_offset);
            source.leave(Message::Leave { outcome: Outcome::HandedOver, text }).await;
        }
        published?;
        match end {
            End::HandedOver => Ok(()),
            // To stop is the ordinary end of a stay.
            End::Stopped(_) if self.args.stay => Ok(()),
            End::Stopped(signal) => {
                let text = format!("stopped by {signal}; the sync was far enough to be finished first");
                Err(Failure::new(Code::Interrupted, text))
            }
        }
    }

    /// Says how it went, to people and to programs.
    fn publish(&self, summary: &Summary) -> Result<(), Failure> {
        if let Some(path) = &self.args.json {
            let text = serde_json::to_string_pretty(summary).unwrap_or_default();
            std::fs::write(path, text).map_err(|error| {
                Failure::local(format!("{} can't be written: {error}; the sync itself is done", path.display()))
            })?;
        }
        summary.lines().iter().for_each(|line| progress::say(line));
        Ok(())
    }

    pub(super) fn summary(&self) -> Summary {
        let origin = self.delivery.progress().origin;
        let snapshot_offset = origin.as_ref().map_or(0, |origin| origin.offset);
        let mut summary = Summary {
            server: self.server.url().to_string(),
            primary: format!("{}:{}", self.primary.host, self.primary.port),
            replid: origin.map(|origin| origin.replid).unwrap_or_default(),
            snapshot_offset,
            hand_off_offset: self.meter.acknowledged.get(),
            transport: self.transport.map_or("none", remora_fabric::TransportKind::name).to_string(),
            delivery: if self.meter.by_module.get() > 0 { "module" } else { "link" }.to_string(),
            referred_bytes: self.meter.referred.get(),
            snapshot_bytes: self.meter.bytes_delivered.get(),
            stream_bytes: self.meter.stream_delivered.get().saturating_sub(snapshot_offset),
            snapshot_seconds: 0.0,
            transfer_seconds: 0.0,
            load_seconds: 0.0,
            catch_up_seconds: 0.0,
            hand_off_seconds: 0.0,
            total_seconds: 0.0,
            interruptions: self.interruptions,
        };
        summary.time(&self.moments, self.moments.handed_over.unwrap_or_else(Instant::now));
        summary
    }

    /// Leaves the server in a sane state after a failure, and says in which.
    pub(super) async fn clean_up(mut self, failure: Failure) -> Failure {
        let loaded = self.delivery.progress().loaded;
        self.delivery.stop(false);
        let left = if !self.redirected {
            format!("the server was not touched{}", self.put_settings_back().await)
        } else if self.taken_away {
            format!("the server is left as it is{}", self.put_settings_back().await)
        } else if loaded {
            self.leave_to_the_primary().await
        } else {
            self.detach().await
        };
        if let Some(source) = self.source.take() {
            let outcome = if failure.code == Code::Interrupted { Outcome::Stopped } else { Outcome::Failed };
            source.leave(Message::Leave { outcome, text: failure.message.clone() }).await;
        }
        failure.and(&left)
    }

    /// The data set is whole: the server's own replication can make good the rest.
    pub(super) async fn leave_to_the_primary(&mut self) -> String {
        let (host, port) = (self.primary.host.clone(), self.primary.port);
        let told = self.client.command(&["REPLICAOF", &host, &port.to_string()]).await;
        let settings = self.put_settings_back().await;
        match told {
            Ok(_) => {
                format!("the server holds a whole data set and was told to follow {host}:{port} by itself{settings}")
            }
            Err(error) => format!(
                "the server holds a whole data set and follows our closed link {}: {error}{settings}",
                self.link
            ),
        }
    }

    /// The data set is not whole: nobody shall take it for one.
    pub(super) async fn detach(&mut self) -> String {
        match self.try_detach().await {
            Ok(left) => left,
            Err(error) => format!(
                "the server could not be detached from our closed link {} ({error}): it is read-only and not whole; REPLICAOF NO ONE \
                 detaches it, and the next remora replica for it takes it as it is",
                self.link
            ),
        }
    }

    pub(super) async fn try_detach(&mut self) -> Result<String, ServerError> {
        // A server that is loading refuses commands until it has noticed that its link is gone.
        let began = Instant::now();
        loop {
            match self.client.command(&["REPLICAOF", "NO", "ONE"]).await {
                Ok(_) => break,
                Err(error) if began.elapsed() > SETTLE_LIMIT => return Err(error),
                Err(ServerError::Refused { .. }) => {}
                Err(_) => self.client = self.server.connect().await?,
            }
            tokio::time::sleep(TICK).await;
        }
        while Facts::read(&mut self.client).await?.loading == Some(true) && began.elapsed() < SETTLE_LIMIT {
            tokio::time::sleep(TICK).await;
        }
        let keys = Facts::read(&mut self.client).await?.keys();
        let settings = self.put_settings_back().await;
        let left = match self.args.on_failure {
            // Nothing was given to it: what it holds, it held before.
            _ if self.meter.bytes_delivered.get() == 0 && self.broken_loads == 0 => {
                "the server was detached and holds what it held before".to_string()
            }
            OnFailure::Empty => {
                self.client.command(&["FLUSHALL"]).await?;
                "the server was detached and emptied".to_string()
            }
            OnFailure::Detached if keys == 0 => "the server was detached and is empty".to_string(),
            OnFailure::Detached => {
                format!("the server was detached and holds {keys} keys, perhaps not whole, open to writes")
            }
        };
        Ok(format!("{left}{settings}"))
    }

    pub(super) async fn put_settings_back(&mut self) -> String {
        match self.record.put_back(&mut self.client).await {
            Ok(()) => String::new(),
            Err(error) => format!("; a setting could not be put back ({error}), the next remora replica for it will"),
        }
    }
}
