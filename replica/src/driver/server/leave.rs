//! The ends of a sync: in which state the server is left, and the text that describes it.

use std::time::Duration;

use tokio::time::Instant;

use super::{Before, Keeper, is_copying};
use crate::control::{Expected, NotOurs};
use crate::machine::{Followed, Lapse, Leaving, Left};
use crate::options::OnFailure;
use crate::{exact, preflight};
use remora_base::units::counted;
use remora_process::exit::{Code, Failure};
use remora_process::{events, progress};
use remora_reader::parts::Meter;
use remora_server::{Facts, SETTLE_LIMIT, SETTLE_POLL, ServerError, sentinel};

/// How a server came to follow the primary.
enum Arrived {
    /// It was told just now.
    Told,
    /// It was told earlier.
    Follows,
    /// It was told earlier, and is taking a full copy.
    Copies,
}

impl Keeper {
    /// Restores all settings of a server that is a replica of the primary.
    pub(super) async fn finish(&mut self) -> Result<(), Failure> {
        let exact = self.judge().await;
        let finished = self.put_in_order().await;
        // What is wrong with the data comes before what is wrong with a setting.
        exact.and(finished)
    }

    /// Whether the server is an exact replica.
    async fn judge(&mut self) -> Result<(), Failure> {
        let server = self.control.server().url().to_string();
        let primary = self.primary.as_server();
        let found = exact::judge(self.control.client().await?, self.before.counted.as_ref(), Some(&primary)).await?;
        let outcome = found.outcome(&server);
        if outcome.is_err() {
            found.lines().iter().for_each(|line| progress::say(line));
        }
        self.watched.judgement.set(found);
        outcome
    }

    async fn put_in_order(&mut self) -> Result<(), Failure> {
        let settings = self.try_to_put_settings_back().await;
        settings.map_err(|error| Failure::from(error).and("a setting was not put back"))?;
        let lowered = self.lower_the_failover_timeout().await;
        if !lowered.is_empty() {
            tracing::warn!("the server follows the primary{lowered}");
        }
        self.stay_until_sentinel_knows_it().await?;
        if self.options.rewrite_config {
            let written = self.write_the_file().await;
            self.record.close();
            return written;
        }
        let file = self.write_the_file_again().await;
        if !file.is_empty() {
            tracing::warn!("the server follows the primary{file}");
        }
        self.record.close();
        Ok(())
    }

    /// Leaves the server in a safe state after a failure. Returns the state, whose text follows the failure's.
    pub(super) async fn leave(&mut self, how: Leaving) -> Left {
        let mut left = self.leave_so(how).await;
        left.text += &self.lower_the_failover_timeout().await;
        if how == Leaving::Untouched {
            return left;
        }
        if how == Leaving::ToPrimary && self.options.rewrite_config {
            left.text += &self.write_the_file().await.map_or_else(|failure| format!("; {failure}"), |()| String::new());
            return left;
        }
        left.text += &self.write_the_file_again().await;
        left
    }

    async fn leave_so(&mut self, how: Leaving) -> Left {
        match how {
            Leaving::Untouched => {
                let settings = self.put_settings_back_but_a_dead_links_login().await;
                Left::in_order(format!("the server was not touched{settings}"))
            }
            Leaving::AsItIs => Left::as_it_is(format!("the server is left as it is{}", self.put_settings_back().await)),
            Leaving::ToPrimary => self.leave_to_the_primary().await,
            Leaving::Alone => self.leave_alone().await,
            Leaving::Detached => self.give_back().await,
        }
    }

    /// Detaches a server that holds all data up to an offset, and cannot follow any further.
    async fn leave_alone(&mut self) -> Left {
        let left = self.leave_the_link(None).await;
        let settings = self.put_settings_back().await;
        Left::in_order(match left {
            Ok(_) => format!(
                "the server was detached (REPLICAOF NO ONE) and holds all that the primary had before it{settings}"
            ),
            Err(NotOurs::TakenOver(how)) => {
                return Left::as_it_is(format!("the server {how} and is left as it is{settings}"));
            }
            Err(NotOurs::Unknown(error)) => format!(
                "the server holds all that the primary had before it, and could not be told to leave our closed link {} ({error}): \
                 REPLICAOF NO ONE detaches it{settings}",
                self.link
            ),
        })
    }

    /// Points a server at the primary whose data set was complete. Its own replication fetches the rest.
    async fn leave_to_the_primary(&mut self) -> Left {
        let before = self.primary.address();
        self.primary.find_again().await;
        let primary = format!("{}:{}", self.primary.host, self.primary.port);
        if let Err(failure) = self.check_the_password().await {
            tracing::warn!("{failure}");
            let settings = self.put_settings_back().await;
            return Left::in_order(format!(
                "the server holds a whole data set, and was not told to follow {primary}; where it still follows our closed \
                 link {}, REPLICAOF makes it follow another one{settings}",
                self.link
            ));
        }
        let told = self.point_at_the_primary_from_either(before).await;
        let settings = self.put_settings_back().await;
        Left::in_order(match told {
            Ok(Arrived::Told) => {
                format!("the server holds a whole data set and was told to follow {primary} by itself{settings}")
            }
            Ok(Arrived::Follows) => format!("the server follows {primary} by itself{settings}"),
            Ok(Arrived::Copies) => format!(
                "the server follows {primary} and is taking a full copy of the primary by itself, which replaces the data \
                 that it holds{settings}"
            ),
            Err(NotOurs::TakenOver(how)) => {
                return Left::as_it_is(format!("the server {how} and is left as it is{settings}"));
            }
            Err(NotOurs::Unknown(error)) => format!(
                "the server holds a whole data set, and could not be told to follow {primary} ({error}): where it still \
                 follows our closed link {}, REPLICAOF makes it follow the primary{settings}",
                self.link
            ),
        })
    }

    /// `before`: where the primary was when the server was last told.
    async fn point_at_the_primary_from_either(&mut self, before: (String, u16)) -> Result<Arrived, NotOurs> {
        let (host, port) = self.primary.address();
        let link = self.link();
        let either = [(link.0.as_str(), link.1), (host.as_str(), port), (before.0.as_str(), before.1)];
        let facts = self.control.still_ours(Expected::OneOf(&either)).await?;
        if facts.link.as_ref().is_some_and(|link| link.host == host && link.port == port) {
            return Ok(if is_copying(&facts) { Arrived::Copies } else { Arrived::Follows });
        }
        self.record.put_the_login_back(self.control.client().await?).await?;
        self.control.follow((&host, port), Expected::OneOf(&either)).await?;
        Ok(Arrived::Told)
    }

    /// The snapshot was not loaded. The server gets its former primary back, where it had one, and keeps its data where
    /// they are whole. It must not be taken for a replica of this primary, nor for a primary with all the keys.
    async fn give_back(&mut self) -> Left {
        Left::in_order(match self.try_to_give_back().await {
            Ok(left) => return left,
            Err(NotOurs::TakenOver(how)) => {
                let settings = self.put_settings_back().await;
                match self.is_as_before().await {
                    true => format!("the server does not follow the link, and is as it was before the sync{settings}"),
                    false => {
                        return Left::as_it_is(format!(
                            "the server {how}; it is left as it is, with what it had loaded until then{settings}"
                        ));
                    }
                }
            }
            Err(NotOurs::Unknown(error)) => {
                let holds = if self.keeps_its_data() { "holds what it held before" } else { "is not whole" };
                let back = match &self.before.primary {
                    Some((host, port)) => format!("REPLICAOF {host} {port} gives it its former primary back"),
                    None => "REPLICAOF NO ONE detaches it".into(),
                };
                format!(
                    "the server could not be told to leave our closed link {} ({error}): it is read-only and {holds}; {back}, \
                     and the next remora replica for it takes it as it is",
                    self.link
                )
            }
        })
    }

    /// Whether what the server held before the sync is still there and whole. The delivery must have ended.
    fn keeps_its_data(&self) -> bool {
        self.before.is_kept(&self.watched.meter)
    }

    /// Whether the server follows what it followed before, and has its data. The command to follow the link may never
    /// have reached it.
    async fn is_as_before(&mut self) -> bool {
        let Ok(facts) = self.control.facts().await else { return false };
        let primary = facts.link.map(|link| (link.host, link.port));
        self.keeps_its_data() && facts.run_id == self.before.run_id && primary == self.before.primary
    }

    /// The primary that the server followed before the sync, or the one that has taken its place.
    async fn former_primary(&mut self) -> Option<(String, u16)> {
        let former = self.before.primary.clone()?;
        self.primary.find_again().await;
        if self.primary.finding.is_some() { Some(self.primary.address()) } else { Some(former) }
    }

    async fn try_to_give_back(&mut self) -> Result<Left, NotOurs> {
        let link = self.link();
        let facts = self.control.still_ours(Expected::OneOf(&[(&link.0, link.1)])).await?;
        let is_kept = self.keeps_its_data() && facts.run_id == self.before.run_id;
        match (is_kept, self.former_primary().await) {
            (true, Some((host, port))) => {
                // Straight from the link, so that its replication position stays valid, if it is. The login before: a
                // server whose login changes during a handshake takes the answers for those to other commands.
                self.record.put_the_login_back(self.control.client().await?).await?;
                self.leave_the_link(Some((&host, port))).await?;
                let settings = self.put_settings_back().await;
                Ok(Left::in_order(format!(
                    "the server follows its former primary {host}:{port} again and holds what it held before{settings}"
                )))
            }
            (true, None) => {
                self.leave_the_link(None).await?;
                let settings = self.put_settings_back().await;
                Ok(Left::in_order(format!("the server was detached and holds what it held before{settings}")))
            }
            (false, former) => self.detach(former).await,
        }
    }

    /// Points a server that follows the link at this primary, or detaches it, as soon as the server accepts that: one
    /// that is loading refuses commands until it has noticed that its link is gone. Gives back what the server was
    /// just before.
    async fn leave_the_link(&mut self, primary: Option<(&str, u16)>) -> Result<Facts, NotOurs> {
        let began = Instant::now();
        let link = self.link();
        let at_the_link = [(link.0.as_str(), link.1)];
        let at_the_link = Expected::OneOf(&at_the_link);
        loop {
            let left = match primary {
                Some(primary) => self.control.follow(primary, at_the_link).await,
                None => self.control.detach(at_the_link).await,
            };
            match left {
                Err(NotOurs::Unknown(error)) if began.elapsed() < SETTLE_LIMIT && !is_unreachable(&error) => {}
                left => return left,
            }
            tokio::time::sleep(SETTLE_POLL).await;
        }
    }

    /// The server's old data are gone, and the new ones are not whole.
    async fn detach(&mut self, former: Option<(String, u16)>) -> Result<Left, NotOurs> {
        let before = self.leave_the_link(None).await?;
        let began = Instant::now();
        while self.control.facts().await?.loading == Some(true) && began.elapsed() < SETTLE_LIMIT {
            tokio::time::sleep(SETTLE_POLL).await;
        }
        let settings = self.put_settings_back().await;
        let keys = self.control.still_ours(Expected::NoPrimary(&before)).await?.keys();
        if self.options.on_failure == OnFailure::Detached {
            let holds = match keys {
                0 => "is empty".to_string(),
                keys => format!("holds {}, perhaps not whole, open to writes", counted(keys, "key")),
            };
            return Ok(Left::in_order(format!("the server was detached and {holds}{settings}")));
        }
        if let Err(not_ours) = self.control.empty(Expected::NoPrimary(&before)).await {
            let NotOurs::Unknown(error) = not_ours else { return Err(not_ours) };
            return Ok(Left::in_order(format!(
                "the server was detached, but could not be emptied ({error}): it holds {}, perhaps not whole, open to \
                 writes{settings}",
                counted(keys, "key")
            )));
        }
        let Some((host, port)) = former else {
            return Ok(Left::in_order(format!("the server was detached and emptied{settings}")));
        };
        // Its position was given up by NO ONE: no primary continues it on nothing.
        Ok(Left::in_order(match self.control.follow((&host, port), Expected::NoPrimary(&before)).await {
            Ok(_) => format!(
                "the server was emptied and follows its former primary {host}:{port} again, which sends it a full copy\
                 {settings}"
            ),
            Err(NotOurs::TakenOver(how)) => {
                return Ok(Left::as_it_is(format!("the server was detached and emptied, and {how}{settings}")));
            }
            Err(NotOurs::Unknown(error)) => format!(
                "the server was detached and emptied, and could not be told to follow its former primary {host}:{port} \
                 ({error}){settings}"
            ),
        }))
    }

    /// A server that follows the link needs the link's login.
    pub(super) async fn put_settings_back_but_the_login(&mut self) -> Result<(), Lapse> {
        self.verify(Followed::Link).await?;
        self.record.put_back_but_the_login(self.control.client().await?).await?;
        Ok(())
    }

    async fn try_to_put_settings_back(&mut self) -> Result<(), ServerError> {
        self.record.put_back(self.control.client().await?).await
    }

    async fn put_settings_back(&mut self) -> String {
        said_of(self.try_to_put_settings_back().await)
    }

    /// A server that still follows the dead link of an agent before us keeps the login for it: with another one it
    /// would give its real password to what listens there.
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

impl Before {
    /// Whether the server still holds what it held before the sync, if it has run all the time and was given what the
    /// meter says. A server empties itself when it has read the header of a payload, unless it loads aside: then when
    /// it has read the end.
    fn is_kept(&self, meter: &Meter) -> bool {
        let is_given = meter.bytes_given.get() > 0;
        let is_given_all = meter.end_given.get() > 0;
        !self.emptied && (!is_given || (self.loads_aside && !is_given_all))
    }
}

fn is_unreachable(error: &ServerError) -> bool {
    matches!(error, ServerError::Unreachable { .. })
}

fn said_of(put_back: Result<(), ServerError>) -> String {
    match put_back {
        Ok(()) => String::new(),
        Err(error) => format!("; a setting could not be put back ({error}), the next remora replica for it will"),
    }
}

// Under Sentinel: what the agent does about fail-overs when it hands its server over, and until Sentinel looks after
// the server by itself.

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
            let known = sentinel::known(finding.sentinels(), &self.target.facts, &url).await;
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
        preflight::put_back(&mut self.record, finding.as_ref().map(|finding| finding.sentinels())).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(bytes: u64, end: bool) -> Meter {
        let meter = Meter::default();
        meter.bytes_given.set(bytes);
        meter.end_given.set(end.into());
        meter
    }

    #[test]
    fn a_server_that_was_given_nothing_holds_what_it_held() {
        for loads_aside in [true, false] {
            assert!(Before { loads_aside, ..Before::default() }.is_kept(&given(0, false)));
        }
    }

    #[test]
    fn a_server_that_the_module_may_have_emptied_does_not() {
        for loads_aside in [true, false] {
            let before = Before { loads_aside, emptied: true, ..Before::default() };
            assert!(!before.is_kept(&given(0, false)) && !before.is_kept(&given(1, false)));
        }
    }

    #[test]
    fn a_server_that_was_given_the_header_of_a_payload_holds_its_data_only_if_it_loads_aside() {
        let direct = Before::default();
        let aside = Before { loads_aside: true, ..Before::default() };
        assert!(!direct.is_kept(&given(40, false)) && aside.is_kept(&given(40, false)));
        assert!(!direct.is_kept(&given(4000, true)) && !aside.is_kept(&given(4000, true)), "it has replaced them");
    }
}
