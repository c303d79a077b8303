//! Copies: what a standby copies of another source's snapshots, when, and where the stream goes on behind a copy. Pure:
//! the simulation plays it.

use std::sync::Arc;

use remora_base::mutation::Mutation;
use remora_base::units::Size;
use remora_process::events;
use remora_protocol::Offer;
use remora_redis::ReplId;
use remora_server::{Facts, HostPort};
use remora_table::{Geometry, Origin, SealKey};

use super::capture::CaptureEvent;
use super::machine::Machine;
use super::tables::Copied;

/// What of the first source's snapshots is copied, and when.
#[derive(Debug)]
pub struct Copies<T> {
    first: HostPort,
    /// Offered, and neither copied nor given up.
    offered: Option<Arc<T>>,
    /// What is copied now.
    copying: Option<Arc<T>>,
    /// Why there is no conversation with the first one, or why what it offers cannot be copied; empty if all is well.
    trouble: String,
}

/// What is known of the standby and its server when it decides.
#[derive(Clone, Debug)]
pub struct Here {
    /// The server, as messages name it.
    pub server: String,
    /// The server's history.
    pub replid: Option<ReplId>,
    /// Other hosts read encrypted tables.
    pub is_sealed: bool,
    /// Other hosts read compressed tables.
    pub compresses: bool,
    /// Bytes of memory for one table; the error says why there is none.
    pub room: Result<u64, String>,
    /// The memory is being prepared for a snapshot.
    pub is_preparing: bool,
}

/// How a copy has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It is whole.
    Whole,
    /// Another conversation with the first one begins, whose offer is copied.
    Failed,
}

impl<T: AsRef<Offer>> Copies<T> {
    /// Nothing is copied yet. `first`: the first source.
    pub fn of(first: HostPort) -> Copies<T> {
        Copies { first, offered: None, copying: None, trouble: "it was not reached yet".to_owned() }
    }

    /// The first source.
    pub fn first(&self) -> &HostPort {
        &self.first
    }

    /// What stands in the way, in brackets; empty if nothing does.
    pub fn trouble_in_words(&self) -> String {
        if self.trouble.is_empty() { String::new() } else { format!(" ({})", self.trouble) }
    }

    /// What is copied now.
    pub fn copying(&self) -> Option<&Arc<T>> {
        self.copying.as_ref()
    }

    /// Whether [`Copies::look`] has anything to decide.
    pub fn has_an_offer(&self) -> bool {
        self.offered.is_some()
    }

    /// The first one offers a snapshot.
    pub fn offered(&mut self, offered: Arc<T>) {
        self.offered = Some(offered);
    }

    /// The conversation with the first one has ended, or none has begun.
    pub fn away(&mut self, why: String) {
        self.offered = None;
        self.trouble(why);
    }

    /// The generation that is copied from now on, if what the first one offers suits and no reader needs the present
    /// snapshot.
    pub fn look(&mut self, machine: &Machine, here: &Here) -> Option<u64> {
        let offered = self.offered.clone()?;
        let offer = (*offered).as_ref();
        if let Err(why) = suits(offer, here) {
            self.trouble(why);
            return None;
        }
        self.trouble.clear();
        let present = machine.status().snapshot.and_then(|snapshot| snapshot.origin());
        let is_newer = |present: Origin| Some(present.history) == offer.replid && present.offset >= offer.offset;
        if present.is_some_and(is_newer) {
            self.offered = None;
            return None;
        }
        if here.is_preparing || !machine.can_copy(offer.generation) {
            return None;
        }
        self.offered = None;
        let generation = offer.generation;
        self.copying = Some(offered);
        Some(generation)
    }

    /// What the end of a capture means: `None` if it was no copy, or goes on.
    pub fn ended(&mut self, event: &CaptureEvent) -> Option<End> {
        let (ended, how) = match event {
            CaptureEvent::Completed { generation, .. } => (*generation, End::Whole),
            CaptureEvent::Failed { generation, .. } => (*generation, End::Failed),
            _ => return None,
        };
        self.copying.take_if(|copying| (**copying).as_ref().generation == ended).map(|_| how)
    }

    /// Notes why the first one's snapshots cannot be copied, and logs it once.
    fn trouble(&mut self, why: String) {
        if self.trouble != why {
            tracing::warn!(event = events::STANDBY_WAITS, first = %self.first, "nothing is copied from the source {}: {why}", self.first);
            self.trouble = why;
        }
    }
}

/// Whether a snapshot can be copied into the memory here, and the stream behind it comes from the server here.
fn suits(offer: &Offer, here: &Here) -> Result<(), String> {
    let is_ours = offer.replid.is_some() && offer.replid == here.replid;
    if !is_ours && !Mutation::AnyHistoryCopied.is_active() {
        let named = |replid: Option<ReplId>| replid.map_or("none".to_owned(), |replid| replid.to_string());
        return Err(format!(
            "it has the history {}, and the server here, {}, has {}: both must have the same primary",
            named(offer.replid),
            here.server,
            named(here.replid)
        ));
    }
    if !offer.snapshot.retained {
        return Err("its snapshot is larger than its --memory, so that slots are reused: give it more".into());
    }
    let copied = copied(offer)?;
    if copied.key.is_some() != here.is_sealed {
        return Err(
            "one of both encrypts its tables and the other does not: give both the same --security, and each an \
                    address of the same network to --listen"
                .into(),
        );
    }
    if offer.snapshot.compressed != here.compresses {
        return Err("one of both compresses and the other does not: give both the same --compress".into());
    }
    let (needs, room) = (copied.geometry.memory_len(), here.room.clone()?);
    if needs > room {
        return Err(format!(
            "its table takes {}, and {} are here for one: give this source as much --memory",
            Size::bytes(needs),
            Size::bytes(room)
        ));
    }
    Ok(())
}

/// The table of an offer, as it is copied.
pub(super) fn copied(offer: &Offer) -> Result<Copied, String> {
    let geometry = Geometry { slot_size: offer.snapshot.slot_size, slots: offer.snapshot.slots };
    let geometry = geometry.checked().map_err(|error| error.to_string())?;
    let key = match &offer.snapshot.seal[..] {
        [] => None,
        seal => Some(SealKey::from_bytes(seal).map_err(|error| error.to_string())?),
    };
    Ok(Copied { generation: offer.generation, geometry, key })
}

/// Where the server is asked to continue the stream: at the byte behind what was copied of it, which ends at `end`.
///
/// # Errors
/// The server has said that it cannot continue there. It would have to take a snapshot if it were asked.
pub fn continues(facts: &Facts, history: ReplId, end: u64) -> Result<(ReplId, u64), String> {
    if !Mutation::CopyUnasked.is_active() {
        facts.covers(history, end, 0)?;
    }
    let present = facts.offset.filter(|_| Mutation::CopyLeavesAGap.is_active());
    Ok((history, present.unwrap_or(end).max(end) + 1))
}

/// Whether a snapshot at this offset can be copied beside a journal that begins with this byte.
///
/// # Errors
/// The stream between the two is lost.
pub fn reaches(journal_first: u64, offset: u64) -> Result<(), String> {
    if journal_first > offset + 1 {
        return Err("the journal here does not reach back to its snapshot any more".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::{Duration, Instant};

    use remora_protocol::Announce;
    use remora_redis::info::Info;

    use remora_base::pace::Backoff;

    use super::*;
    use crate::capture::CaptureError;
    use crate::gauge::Reading;
    use crate::machine::{Event, Rules};
    use crate::parts::plan_of;

    const SLOT: u32 = 1 << 20;

    struct Offers(Offer);

    impl AsRef<Offer> for Offers {
        fn as_ref(&self) -> &Offer {
            &self.0
        }
    }

    fn replid(digit: char) -> ReplId {
        digit.to_string().repeat(40).parse().unwrap()
    }

    /// A server with 100 bytes of stream from offset 901 on, of which it keeps all.
    fn server(digit: char) -> Facts {
        let text = format!(
            "# Replication\r\nrole:master\r\nmaster_replid:{}\r\nmaster_repl_offset:1000\r\nrepl_backlog_active:1\r\n\
             repl_backlog_size:1000\r\nrepl_backlog_first_byte_offset:901\r\nrepl_backlog_histlen:100\r\n",
            replid(digit)
        );
        Facts::from_info(&Info::parse(text.as_bytes()))
    }

    fn offer(digit: char, generation: u64, offset: u64) -> Offer {
        let primary = Announce { host: String::new(), port: 0, tls: false, source_sees_as: String::new() };
        let plan = plan_of(&server(digit), primary, 0, 1);
        let mut snapshot = plan.snapshot.clone();
        (snapshot.generation, snapshot.slot_size, snapshot.slots, snapshot.retained) = (generation, SLOT, 9, true);
        Offer { generation, offset, snapshot, ..plan }
    }

    fn here() -> Here {
        Here {
            server: "redis://s:1".into(),
            replid: Some(replid('a')),
            is_sealed: false,
            compresses: false,
            room: Ok(u64::from(SLOT) * 64),
            is_preparing: false,
        }
    }

    fn machine() -> (Machine, Instant) {
        let now = Instant::now();
        let rules = Rules {
            max_age: Duration::from_secs(60),
            max_replicas: 3,
            stall_limit: Duration::from_secs(60),
            fork_interval: Duration::ZERO,
            slot_bytes: u64::from(SLOT),
            repeat_messages: Duration::ZERO,
            at_once: None,
            standby: Some(Duration::MAX),
        };
        (Machine::new(now, rules, Backoff::seeded(1), 70, false), now)
    }

    fn copies() -> Copies<Offers> {
        Copies::of(HostPort { host: "first".into(), port: 7379 })
    }

    #[test]
    fn what_suits_is_copied_once_and_what_does_not_is_named() {
        let (machine, _) = machine();
        let (at, yes) = (|offer| Arc::new(Offers(offer)), offer('a', 5, 950));
        let mut copies = copies();
        assert_eq!(copies.look(&machine, &here()), None);
        copies.offered(at(yes.clone()));
        assert_eq!(copies.look(&machine, &Here { is_preparing: true, ..here() }), None);
        assert_eq!((copies.look(&machine, &here()), copies.look(&machine, &here())), (Some(5), None));
        assert!(copies.trouble.is_empty() && copies.copying().is_some() && !copies.has_an_offer());

        let windowed =
            Offer { snapshot: remora_protocol::TableOffer { retained: false, ..yes.snapshot.clone() }, ..yes.clone() };
        let unknown = Offer { replid: None, ..yes.clone() };
        let cases = [
            (offer('b', 5, 950), here(), "both must have the same primary"),
            (unknown, here(), "both must have the same primary"),
            (yes.clone(), Here { replid: None, ..here() }, "both must have the same primary"),
            (windowed, here(), "slots are reused"),
            (yes.clone(), Here { is_sealed: true, ..here() }, "--security"),
            (yes.clone(), Here { compresses: true, ..here() }, "--compress"),
            (yes.clone(), Here { room: Ok(u64::from(SLOT)), ..here() }, "as much --memory"),
            (yes.clone(), Here { room: Err("no memory at all".into()), ..here() }, "no memory at all"),
        ];
        for (offer, here, why) in cases {
            let mut copies = self::copies();
            copies.offered(at(offer));
            assert_eq!(copies.look(&machine, &here), None, "{why}");
            assert!(copies.trouble.contains(why), "{}", copies.trouble);
            assert!(copies.has_an_offer(), "the server here may get that history yet");
            copies.away("gone".into());
            assert!(!copies.has_an_offer());
        }
    }

    #[test]
    fn a_copy_ends_with_its_own_capture() {
        let (machine, _) = machine();
        let failed = |generation| CaptureEvent::Failed { generation, error: CaptureError::First("gone".into()) };
        for (event, end) in
            [(failed(5), End::Failed), (CaptureEvent::Completed { generation: 5, bytes: 1 }, End::Whole)]
        {
            let mut copies = copies();
            copies.offered(Arc::new(Offers(offer('a', 5, 950))));
            assert_eq!(copies.ended(&event), None, "nothing is copied yet");
            assert_eq!(copies.look(&machine, &here()), Some(5));
            assert_eq!(copies.ended(&failed(4)), None);
            assert_eq!((copies.ended(&event), copies.ended(&event)), (Some(end), None));
        }
    }

    #[test]
    fn the_newer_of_two_snapshots_is_kept() {
        for (offered, is_copied) in [(949, false), (950, false), (951, true)] {
            let (mut machine, now) = machine();
            let mut tell = |event| machine.apply(now, Reading::default(), event);
            tell(Event::Copied { generation: 5 });
            tell(Event::Capture(CaptureEvent::Started { generation: 5, replid: replid('a'), offset: 950 }));
            tell(Event::Capture(CaptureEvent::Completed { generation: 5, bytes: 1 }));
            let mut copies = copies();
            copies.offered(Arc::new(Offers(offer('a', 6, offered))));
            assert_eq!(copies.look(&machine, &here()), is_copied.then_some(6));
            assert!(!copies.has_an_offer());
        }
    }

    #[test]
    fn the_server_is_asked_for_the_byte_behind_the_copied_part_if_it_has_that() {
        let a = replid('a');
        for end in [900, 950, 1000] {
            assert_eq!(continues(&server('a'), a, end), Ok((a, end + 1)));
        }
        for end in [0, 899, 1001] {
            assert!(continues(&server('a'), a, end).is_err(), "{end}");
        }
        assert!(continues(&server('b'), a, 950).is_err());
        assert!(reaches(951, 950).is_ok() && reaches(1, 950).is_ok() && reaches(952, 950).is_err());
    }
}
