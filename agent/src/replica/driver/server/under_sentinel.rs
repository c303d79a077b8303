//! Under Sentinel: what the agent does about fail-overs when it hands its server over, and until Sentinel looks after
//! the server by itself.

use std::time::Duration;

use tokio::time::Instant;

use super::Keeper;
use crate::events;
use crate::exit::{Code, Failure};
use crate::replica::control::{Expected, NotOurs};
use crate::replica::machine::Lapse;
use crate::replica::raised;
use crate::sentinel::guard;
use crate::server::Facts;

/// How long the agent stays until a Sentinel knows the server and the server is in step. Sentinels read the primary's
/// list of replicas every ten seconds.
const KNOWN_LIMIT: Duration = Duration::from_secs(25);

/// Pause between two looks.
const KNOWN_LOOK: Duration = Duration::from_millis(250);

impl Keeper {
    /// The primary is where Sentinel says, at this moment.
    pub(super) async fn find_the_primary(&mut self) -> Result<(), Failure> {
        let Some(finding) = self.primary.finding.clone() else { return Ok(()) };
        self.primary.move_to(&finding.for_the_hand_off().await?)?;
        tracing::info!(primary = %finding.last(), "Sentinel names the primary");
        Ok(())
    }

    /// The server follows another primary than it was told. Sentinel may have found it already, and taken it along.
    /// `how`: what became of it, if that is not so.
    pub(super) async fn taken_along(&mut self, how: String) -> Result<Facts, Lapse> {
        if self.primary.finding.is_none() {
            return Err(Lapse::TakenOver(how));
        }
        self.primary.find_again().await;
        let (host, port) = self.primary.address();
        let facts = self.control.still_ours(Expected::OneOf(&[(&host, port)])).await;
        facts.map_err(|_| Lapse::TakenOver(how))
    }

    /// Stays until a Sentinel knows the server as a replica: it takes only such ones along to another primary. If a
    /// fail-over comes before, the server is pointed at the new primary here. A signal ends the stay.
    pub(super) async fn stay_until_sentinel_knows_it(&mut self) -> Result<(), Failure> {
        let Some(finding) = self.primary.finding.clone() else { return Ok(()) };
        let until = Instant::now() + KNOWN_LIMIT;
        tracing::info!(
            event = events::SENTINEL_AWAITED,
            "the server is in step; staying until a Sentinel knows it, {} s at most",
            KNOWN_LIMIT.as_secs()
        );
        loop {
            let before = self.primary.address();
            self.primary.find_again().await;
            let now = self.primary.address();
            if before != now {
                self.point_at_the_new_primary(&before, &now).await?;
            }
            let is_in_step = self.primary_link().await.is_ok_and(|link| link.up);
            let url = self.control.server().url().clone();
            let known = guard::known(finding.sentinels(), &self.target.facts, &url).await;
            match known {
                Ok(Some(_)) if is_in_step && before == now => return Ok(()),
                _ if Instant::now() < until => {
                    if tokio::time::timeout(KNOWN_LOOK, self.watched.hurry.notified()).await.is_ok() {
                        tracing::warn!(
                            "stopped before a Sentinel knows the server: it is not taken along by a fail-over in the next ten \
                             seconds"
                        );
                        return Ok(());
                    }
                }
                _ => {
                    tracing::warn!(
                        "after {} s the server is not in step with the primary, or no Sentinel knows it as a replica yet: look \
                         at SENTINEL REPLICAS {} and at its link",
                        KNOWN_LIMIT.as_secs(),
                        finding.sentinels().name()
                    );
                    return Ok(());
                }
            }
        }
    }

    async fn point_at_the_new_primary(&mut self, before: &(String, u16), now: &(String, u16)) -> Result<(), Failure> {
        self.check_the_password().await?;
        let (before, now) = ((before.0.as_str(), before.1), (now.0.as_str(), now.1));
        tracing::warn!("a fail-over came with the hand-off: the server is pointed at {}:{}", now.0, now.1);
        match self.control.follow(now, Expected::OneOf(&[before, now])).await {
            Ok(_) => Ok(()),
            Err(NotOurs::TakenOver(how)) => {
                let url = self.control.server().url();
                Err(Failure::new(Code::TakenOver, format!("the server {url} {how}, after it was handed over")))
            }
            Err(NotOurs::Unknown(error)) => Err(error.into()),
        }
    }

    /// Puts the Sentinels' fail-over time back. The text goes on behind a sentence.
    pub(super) async fn lower_the_failover_timeout(&mut self) -> String {
        let finding = self.primary.finding.clone();
        raised::put_back(&mut self.record, finding.as_ref().map(|finding| finding.sentinels())).await
    }
}
