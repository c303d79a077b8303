//! The ends: done, stopped or failed; in which state the server is left, and what is said about it.

use std::ops::ControlFlow;
use std::time::Instant;

use remora_protocol::{Message, Outcome, Phase};

use super::{End, Flow, Sync, TICK};
use crate::args::OnFailure;
use crate::exit::{Code, Failure};
use crate::progress;
use crate::replica::SETTLE_LIMIT;
use crate::replica::control::{Expected, NotOurs};
use crate::replica::report::Summary;
use crate::server::ServerError;

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
        if let Err(error) = self.try_to_put_settings_back().await {
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
            let text =
                format!("{} follows the primary at offset {}", self.control.server().url(), summary.hand_off_offset);
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
            server: self.control.server().url().to_string(),
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
            format!("the server was not touched{}", self.put_settings_back_but_a_dead_links_login().await)
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

    /// The data set is complete: the server's own replication fetches the rest.
    pub(super) async fn leave_to_the_primary(&mut self) -> String {
        let (host, port) = (self.primary.host.clone(), self.primary.port);
        let told = self.point_at_the_primary().await;
        let settings = self.put_settings_back().await;
        match told {
            Ok(()) => {
                format!("the server holds a whole data set and was told to follow {host}:{port} by itself{settings}")
            }
            Err(NotOurs::TakenOver(how)) => format!("the server {how} and is left as it is{settings}"),
            Err(NotOurs::Unknown(error)) => format!(
                "the server holds a whole data set and follows our closed link {}: {error}{settings}",
                self.link
            ),
        }
    }

    async fn point_at_the_primary(&mut self) -> Result<(), NotOurs> {
        let (host, port) = (self.primary.host.clone(), self.primary.port);
        let link = (self.link.ip().to_string(), self.link.port());
        let either = [(link.0.as_str(), link.1), (host.as_str(), port)];
        self.control.still_ours(Expected::OneOf(&either)).await?;
        self.record.put_the_login_back(self.control.client().await?).await?;
        self.control.follow((&host, port), Expected::OneOf(&either)).await
    }

    /// The data set is incomplete: the server must not be taken for a replica, nor for a primary with all the keys.
    pub(super) async fn detach(&mut self) -> String {
        match self.try_detach().await {
            Ok(left) => left,
            Err(NotOurs::TakenOver(how)) => {
                let settings = self.put_settings_back().await;
                format!("the server {how}; it is left as it is, with what it had loaded until then{settings}")
            }
            Err(NotOurs::Unknown(error)) => format!(
                "the server could not be detached from our closed link {} ({error}): it is read-only and not whole; REPLICAOF NO ONE \
                 detaches it, and the next remora replica for it takes it as it is",
                self.link
            ),
        }
    }

    async fn try_detach(&mut self) -> Result<String, NotOurs> {
        // A server that is loading refuses commands until it has noticed that its link is gone.
        let began = Instant::now();
        let link = (self.link.ip().to_string(), self.link.port());
        let before = loop {
            let facts = self.control.still_ours(Expected::OneOf(&[(&link.0, link.1)])).await?;
            match self.control.command(&["REPLICAOF", "NO", "ONE"]).await {
                Ok(_) => break facts,
                Err(error) if began.elapsed() > SETTLE_LIMIT => return Err(error.into()),
                Err(error @ ServerError::Unreachable { .. }) => return Err(error.into()),
                Err(_) => {}
            }
            tokio::time::sleep(TICK).await;
        };
        while self.control.facts().await?.loading == Some(true) && began.elapsed() < SETTLE_LIMIT {
            tokio::time::sleep(TICK).await;
        }
        let settings = self.put_settings_back().await;
        let keys = self.control.still_ours(Expected::NoPrimary(&before)).await?.keys();
        let left = match self.args.on_failure {
            // Nothing was given to it: what it holds, it held before.
            _ if self.meter.bytes_delivered.get() == 0 && self.broken_loads == 0 && !self.emptied => {
                "the server was detached and holds what it held before".to_string()
            }
            OnFailure::Empty => {
                self.control.command(&["FLUSHALL"]).await?;
                "the server was detached and emptied".to_string()
            }
            OnFailure::Detached if keys == 0 => "the server was detached and is empty".to_string(),
            OnFailure::Detached => {
                format!("the server was detached and holds {keys} keys, perhaps not whole, open to writes")
            }
        };
        Ok(format!("{left}{settings}"))
    }

    /// During a stay the server may come to our link again: it needs the login for it until the hand-off.
    pub(super) async fn try_to_put_settings_back_but_the_login(&mut self) -> Result<(), ServerError> {
        self.record.put_back_but_the_login(self.control.client().await?).await
    }

    pub(super) async fn try_to_put_settings_back(&mut self) -> Result<(), ServerError> {
        self.record.put_back(self.control.client().await?).await
    }

    pub(super) async fn put_settings_back(&mut self) -> String {
        said_of(self.try_to_put_settings_back().await)
    }

    /// A server that still follows the dead link of an agent before us keeps the login for it: with another one it would give its real
    /// password to what listens there.
    async fn put_settings_back_but_a_dead_links_login(&mut self) -> String {
        if !self.target.unfinished {
            return self.put_settings_back().await;
        }
        match self.control.client().await {
            Ok(client) => said_of(self.record.put_back_but_the_login(client).await),
            Err(error) => said_of(Err(error)),
        }
    }
}

fn said_of(put_back: Result<(), ServerError>) -> String {
    match put_back {
        Ok(()) => String::new(),
        Err(error) => format!("; a setting could not be put back ({error}), the next remora replica for it will"),
    }
}
