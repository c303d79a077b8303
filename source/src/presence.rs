//! Presence: what the server does differently because the source's links are attached to it as a replica's, and what
//! the source does about it.
//!
//! ```text
//!   INFO server, replication, twice a second ──▶ shutdown_in_milliseconds: the links are closed, the server ends
//!                                            ──▶ neither that, nor a server: they may come back
//!                                            ──▶ master_failover_state, and no replica to take over: FAILOVER ABORT
//! ```
//!
//! A server of Redis 7.0 or later waits before it ends until each replica has acknowledged all that was written, for
//! `shutdown-timeout`. A source acknowledges nothing (docs/decisions/0002-acknowledge-nothing.md). So it closes its
//! links as soon as it has all bytes. They stay closed until the server has ended, or says that it goes on (`SHUTDOWN
//! ABORT`).
//!
//! A server refuses `FAILOVER` without a replica. It takes a source for one, pauses its clients' writes, and waits for
//! a replica that never comes. The source then ends the fail-over, if its user may do that.
//!
//! The questions go over the connection that the source has to the server anyway, one at a time, and only while a link
//! is attached or was closed for this reason.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_redis::info::Info;

use super::{Incoming, Source};
use remora_process::events;
use remora_server::{Client, Facts, RefusalKind, ServerError};

/// How often the server is asked. A server looks ten times a second whether its replicas have caught up, and clients'
/// writes wait meanwhile.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// How long after its `shutdown-timeout` a server that answers nothing is taken to be ending: the time of its last
/// save.
const SAVE_LIMIT: Duration = Duration::from_secs(60);

/// Whether the links of the source are to leave the server. The capture threads read it, and the source's loop writes.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    leaves_at: Mutex<Option<u64>>,
    /// The offset that the server has named last, and when.
    offset: Mutex<Option<(Instant, u64)>>,
}

/// How long what a server has said of its offset is believed: some questions may be lost.
const OFFSET_LIMIT: Duration = Duration::from_secs(5);

impl Presence {
    /// The offset at which the stream's link is to leave; all other links leave at once. `None`: they stay.
    pub(crate) fn leaves_at(&self) -> Option<u64> {
        *self.leaves_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn leave_at(&self, offset: Option<u64>) {
        *self.leaves_at.lock().unwrap_or_else(PoisonError::into_inner) = offset;
    }

    /// Notes the offset of the server's last byte.
    pub(crate) fn note_offset(&self, now: Instant, offset: u64) {
        *self.offset.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, offset));
    }

    /// Whether the server has just said that it has written no byte behind this offset.
    pub(crate) fn has_no_more(&self, now: Instant, offset: u64) -> bool {
        let said = *self.offset.lock().unwrap_or_else(PoisonError::into_inner);
        said.is_some_and(|(when, last)| last <= offset && now.saturating_duration_since(when) < OFFSET_LIMIT)
    }
}

/// The looks at the server, and what followed from them.
#[derive(Debug, Default)]
pub(super) struct Lookout {
    shared: Arc<Presence>,
    is_open: bool,
    next: Option<Instant>,
    watch: Watch,
}

impl Lookout {
    /// What captures are given.
    pub(super) fn shared(&self) -> Arc<Presence> {
        self.shared.clone()
    }

    /// Whether the server is to be asked now.
    fn asks(&mut self, now: Instant) -> bool {
        let is_due = !self.is_open && self.next.is_none_or(|next| next <= now);
        if is_due {
            (self.is_open, self.next) = (true, Some(now + ASK_EVERY));
        }
        is_due
    }
}

/// What one look has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// The server's own words.
    Said(Said),
    /// There is no such server any more, or one that has just started.
    Gone,
    /// It is not known.
    Silent,
}

/// What a server says of its end and of fail-overs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    shutdown_in: Option<Duration>,
    offset: u64,
    /// `FAILOVER` waits for a replica that has caught up.
    fails_over: bool,
    /// `FAILOVER` has chosen a replica that does not listen. At offset 0 each replica has caught up.
    goes_nowhere: bool,
    /// Replicas that could take over: they have told a port at which they listen.
    promotable: usize,
    /// The others: sources, and links of agents.
    others: usize,
}

impl Said {
    fn of(info: &Info) -> Said {
        let facts = Facts::from_info(info);
        let is_promotable = |line: &str| !line.split(',').any(|pair| pair == "port=0");
        let is_replica = |name: &str| {
            let number = name.strip_prefix("slave").unwrap_or_default();
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        Said {
            shutdown_in: facts.shutdown_in,
            // A replica sends its own replicas what it has of its primary's stream.
            offset: info.number("master_repl_offset").unwrap_or(0),
            fails_over: info.get("master_failover_state") == Some("waiting-for-sync"),
            goes_nowhere: info.get("master_failover_state") == Some("failover-in-progress")
                && info.get("master_port") == Some("0"),
            promotable: info.iter().filter(|(name, line)| is_replica(name) && is_promotable(line)).count(),
            others: info.iter().filter(|(name, line)| is_replica(name) && !is_promotable(line)).count(),
        }
    }
}

/// What follows from the looks. No I/O and no clock.
#[derive(Debug, Default)]
struct Watch {
    /// Until when a server that says nothing is taken to be ending; `None` if it is not.
    ends_until: Option<Instant>,
    /// Whether a replica could have taken over before a fail-over was requested; `None` if it is not known.
    had_promotable: Option<bool>,
    /// The fail-over that is requested now was answered.
    is_answered: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The links leave, that of the stream when it has all up to this offset.
    Leave(u64),
    /// They may come back.
    Return,
    /// `FAILOVER ABORT`.
    EndFailover,
}

impl Watch {
    fn saw(&mut self, now: Instant, look: Look) -> Option<Order> {
        let said = match look {
            Look::Said(said) => said,
            Look::Silent if self.ends_until.is_none_or(|until| now < until) => return None,
            Look::Silent | Look::Gone => {
                Said { promotable: usize::from(self.had_promotable == Some(true)), ..Said::default() }
            }
        };
        if let Some(left) = said.shutdown_in {
            let is_known = self.ends_until.replace(now + left + SAVE_LIMIT).is_some();
            return (!is_known).then_some(Order::Leave(said.offset));
        }
        if self.ends_until.take().is_some() {
            return Some(Order::Return);
        }
        if said.goes_nowhere {
            return (!std::mem::replace(&mut self.is_answered, true)).then_some(Order::EndFailover);
        }
        if !said.fails_over {
            (self.had_promotable, self.is_answered) = (Some(said.promotable > 0), false);
            return None;
        }
        // A server that fails over accepts no new replica: the source was there before.
        let is_ours = self.had_promotable != Some(true) && said.promotable == 0 && said.others > 0;
        (is_ours && !std::mem::replace(&mut self.is_answered, true)).then_some(Order::EndFailover)
    }
}

/// Asks the server when that is due: while a link of the source is attached to it, or keeps away from it.
pub(super) fn look(source: &mut Source) {
    let is_away = source.questions.presence.shared.leaves_at().is_some();
    if (source.threads.hold_links() || is_away) && source.questions.presence.asks(Instant::now()) {
        ask(source);
    }
}

/// Asks in the background. The connection limits the time.
fn ask(source: &Source) {
    let (client, server) = (source.questions.client.clone(), source.captured.server());
    let sections: &[&str] =
        if source.facts.shares_its_buffer() { &["server", "replication"] } else { &["replication"] };
    let incoming = source.incoming.clone();
    tokio::spawn(async move {
        let mut client = client.lock().await;
        let said = match client.as_mut() {
            Some(open) => open.info_of(sections).await.ok(),
            None => None,
        };
        let asked = match said {
            Some(info) => Ok(info),
            // The answer of a new connection says whether there is a server.
            None => {
                *client = None;
                match server.connect().await {
                    Ok(fresh) => client.insert(fresh).info_of(sections).await,
                    Err(error) => Err(error),
                }
            }
        };
        drop(client);
        let look = match &asked {
            Ok(info) => Look::Said(Said::of(info)),
            Err(error) if is_gone(error) => Look::Gone,
            Err(_) => Look::Silent,
        };
        let _ = incoming.send(Incoming::Presence(look)).await;
    });
}

/// Whether the process that was asked before does not run any more.
fn is_gone(error: &ServerError) -> bool {
    match error {
        ServerError::Unreachable { cause, .. } => {
            matches!(cause.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
        }
        other => other.refusal() == Some(RefusalKind::Loading),
    }
}

/// The answer to a question has come.
pub(super) fn saw(source: &mut Source, look: Look) {
    let lookout = &mut source.questions.presence;
    let now = Instant::now();
    lookout.is_open = false;
    if let Look::Said(said) = look {
        lookout.shared.note_offset(now, said.offset);
    }
    match lookout.watch.saw(now, look) {
        None => {}
        Some(Order::Leave(offset)) => {
            tracing::info!(
                offset,
                "the server is being shut down, and waits for its replicas; the source closes its links"
            );
            lookout.shared.leave_at(Some(offset));
        }
        Some(Order::Return) => {
            tracing::info!("the server has ended, or goes on (SHUTDOWN ABORT); the source connects again");
            lookout.shared.leave_at(None);
        }
        Some(Order::EndFailover) => end_failover(source),
    }
}

/// Ends a fail-over that the server has accepted because it takes the source for a replica.
fn end_failover(source: &Source) {
    let client = source.questions.client.clone();
    tokio::spawn(async move {
        let mut client = client.lock().await;
        let Some(open) = client.as_mut() else { return };
        match open.command(&["FAILOVER", "ABORT"]).await {
            Ok(_) => tracing::warn!(
                event = events::FAILOVER_ENDED,
                "a client requested FAILOVER at the server, which has no replica that could take over. The server would have refused it \
                 without this source, and waited for ever with it, so the source has ended the fail-over (FAILOVER ABORT)"
            ),
            Err(error) => tracing::warn!(
                event = events::FAILOVER_WAITS,
                %error,
                "a client requested FAILOVER at the server, which has no replica that could take over: clients' writes wait until \
                 a client sends FAILOVER ABORT. The source does that if its user has +failover"
            ),
        }
    });
}

/// Warns of a setting that counts the source: writes are let through that no server but the primary has.
pub(super) async fn warn_of_min_replicas(client: &mut Client) {
    const SETTING: &str = "min-replicas-to-write";
    let least = match client.config_get(SETTING).await {
        Ok(value) => value.and_then(|text| text.parse::<u32>().ok()).unwrap_or(0),
        // Without CONFIG GET the server's INFO says that there is one: it counts good replicas only then.
        Err(_) => match client.info("replication").await {
            Ok(info) => u32::from(info.get("min_slaves_good_slaves").is_some()),
            Err(_) => 0,
        },
    };
    if least > 0 {
        tracing::warn!(
            least,
            "the server has {SETTING}, and counts a source among its replicas while one is attached: it then accepts writes with one \
             replica fewer. Raise the setting by one for that time if it matters"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Look {
        Look::Said(Said::of(&Info::parse(text.replace(' ', "\r\n").as_bytes())))
    }

    #[test]
    fn the_links_leave_a_server_that_ends_and_come_back_when_it_has_ended_or_goes_on() {
        let (now, ends) = (Instant::now(), said("shutdown_in_milliseconds:9000 master_repl_offset:70"));
        for over in [said("master_repl_offset:70"), Look::Gone] {
            let mut watch = Watch::default();
            assert_eq!(watch.saw(now, said("master_repl_offset:60")), None);
            assert_eq!(watch.saw(now, Look::Silent), None);
            assert_eq!(watch.saw(now, ends), Some(Order::Leave(70)));
            assert_eq!(watch.saw(now, ends), None, "once");
            assert_eq!(watch.saw(now, Look::Silent), None, "it saves");
            assert_eq!(watch.saw(now, over), Some(Order::Return));
            assert_eq!(watch.saw(now, over), None);
            assert_eq!(watch.saw(now, ends), Some(Order::Leave(70)), "the next one");
            let late = now + Duration::from_secs(9) + SAVE_LIMIT;
            assert_eq!(watch.saw(late, Look::Silent), Some(Order::Return), "nothing waits without end");
        }
        // The deadline has passed, and the server is not through yet.
        assert_eq!(
            Watch::default().saw(now, said("shutdown_in_milliseconds:-3 master_repl_offset:7")),
            Some(Order::Leave(7))
        );
    }

    #[test]
    fn a_failover_is_ended_if_only_a_source_made_it_possible() {
        let now = Instant::now();
        let (source, replica) =
            ("slave0:ip=::1,port=0,state=online,offset=0,lag=1", "slave1:ip=::1,port=7,state=online,offset=9,lag=0");
        let failing =
            |replicas: &str| said(&format!("master_failover_state:waiting-for-sync connected_slaves:2 {replicas}"));
        let calm = |replicas: &str| said(&format!("master_failover_state:no-failover {replicas}"));
        let both = format!("{source} {replica}");
        let mut watch = Watch::default();
        assert_eq!(watch.saw(now, failing("")), None, "no source is attached");
        for _ in 0..2 {
            assert_eq!(watch.saw(now, calm(source)), None);
            assert_eq!(watch.saw(now, failing(source)), Some(Order::EndFailover));
            assert_eq!(watch.saw(now, failing(source)), None, "once");
        }
        let nowhere = said("master_failover_state:failover-in-progress role:slave master_host:::1 master_port:0");
        assert_eq!(watch.saw(now, calm(source)), None);
        assert_eq!(watch.saw(now, nowhere), Some(Order::EndFailover));
        assert_eq!(watch.saw(now, nowhere), None, "once");
        assert_eq!(watch.saw(now, said("master_failover_state:failover-in-progress role:slave master_port:7")), None);
        assert_eq!(watch.saw(now, calm(source)), None);
        assert_eq!(watch.saw(now, failing(&both)), None, "a replica has come");
        assert_eq!(watch.saw(now, calm(&both)), None);
        assert_eq!(watch.saw(now, failing(source)), None, "the replica may come back, as without a source");
    }

    #[test]
    fn one_question_is_asked_at_a_time() {
        let (mut lookout, now) = (Lookout::default(), Instant::now());
        assert!(lookout.asks(now) && !lookout.asks(now + ASK_EVERY));
        lookout.is_open = false;
        assert!(!lookout.asks(now + ASK_EVERY / 2) && lookout.asks(now + ASK_EVERY));
    }
}
