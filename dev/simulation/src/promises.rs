//! Promises: a replica that is told to go to its primary is continued there. What the model servers really keep says
//! whether a promise was true when it was given, and was kept.

use std::collections::BTreeMap;
use std::time::Duration;

use remora_redis::ReplId;

use super::plan::Act;
use super::server::Server;
use super::wire::{Conn, End, ServerId};
use remora_replica::parts::driver::PIN_SIZES;

/// How long a promise is kept, as far as nothing is disturbed: a little less than a pin lives at least.
const KEPT_FOR: Duration = Duration::from_secs(12);

/// What happened this long before can still have an effect: a message that is under way.
const MARGIN: Duration = Duration::from_secs(1);

/// What a replica was promised, and how the primary was then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promise {
    pub(super) primary: ServerId,
    pub(super) replid: ReplId,
    pub(super) at: Duration,
    pub(super) next: u64,
    pub(super) end: u64,
    /// The primary kept the replica's next byte, for longer than another link needs.
    pub(super) was_kept: bool,
    /// A pin was possible there.
    pub(super) is_possible: bool,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Promises {
    of: BTreeMap<ServerId, Promise>,
    /// Links that were to pin: when they asked, and where the server was.
    pins: BTreeMap<Conn, (Duration, ReplId, u64)>,
    /// When something last happened that can break a promise.
    disturbed: Duration,
    pub(super) finding: Option<String>,
}

impl Promises {
    /// A replica is told to go.
    pub(super) fn given(&mut self, to: ServerId, promise: Promise, primary: &Server) {
        if !promise.was_kept && promise.next < primary.kept_from() {
            self.finding.get_or_insert(format!(
                "server {} is told to go to its primary at offset {}, which the primary may drop at any moment: it keeps {} on",
                to.0,
                promise.next,
                primary.kept_from()
            ));
        }
        self.of.insert(to, promise);
    }

    /// Something may break a promise.
    pub(super) fn disturbed(&mut self, until: Duration) {
        self.disturbed = self.disturbed.max(until);
    }

    /// The operator does something.
    pub(super) fn act(&mut self, now: Duration, act: Act) {
        let is_harmless = matches!(
            act,
            Act::StartAgent(_)
                | Act::BreakLane(_)
                | Act::Save(_)
                | Act::Burst
                | Act::LongWrite
                | Act::Flood
                | Act::FlushPrimary
                | Act::Look
                | Act::Final
        );
        if !is_harmless {
            self.disturbed(now);
        }
    }

    /// A link asks to be continued so that it pins.
    pub(super) fn pin_asked(&mut self, conn: Conn, now: Duration, server: &Server) {
        let end = server.backlog_range().map_or(0, |(_, end)| end);
        self.pins.insert(conn, (now, server.replid, end));
    }

    /// A server does not continue the one at the other end.
    pub(super) fn not_continued(&mut self, now: Duration, server: &Server, conn: Conn, asks: End) {
        let end = server.backlog_range().map_or(0, |(_, end)| end);
        let is_undisturbed = |since: Duration, replid: ReplId| {
            self.disturbed + MARGIN < since && server.replid == replid && server.follows.is_none()
        };
        let finding = match asks {
            End::Pin(..) => self.pins.get(&conn).and_then(|&(since, replid, before)| {
                let is_as_asked =
                    is_undisturbed(since, replid) && (end - before) <= server.traits.backlog_bytes as u64 / 8;
                is_as_asked
                    .then(|| "a link that was to pin asked for what the primary does not keep for certain".to_string())
            }),
            End::Server(replica) => self.of.get(&replica).and_then(|promise| {
                let written = end.saturating_sub(promise.end) + PIN_SIZES.prefill;
                let is_bounded = written < server.output_limit() as u64 / 2;
                let is_soon = now < promise.at + KEPT_FOR;
                let is_it = promise.primary == server.traits.id && promise.is_possible && is_bounded && is_soon;
                (is_it && is_undisturbed(promise.at, promise.replid)).then(|| {
                    format!(
                        "server {} was told at {:?} to go to its primary at offset {}, and takes a full copy there",
                        replica.0, promise.at, promise.next
                    )
                })
            }),
            _ => None,
        };
        self.finding = self.finding.take().or(finding);
    }
}
