//! Display: how far a sync is, for its operator: one bar or line at a time.
//!
//! ```text
//!   the source waits for a server that saves to a file    "127.0.0.1:6379 saves"         keys
//!   the snapshot arrives                                  "transfer to 127.0.0.1:7001"   bytes that have arrived
//!   all has arrived, the server loads it                  "load into 127.0.0.1:7001"     bytes that it was given
//! ```
//!
//! What has arrived is what the source shows of this replica, too.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use remora_protocol::{Basis, Expected, Length, Phase};

use super::Driver;
use super::watches::Outrun;
use remora_metrics::{Families, Scrape, Scrapes, register as all};
use remora_process::progress::tracker::{Look, Tracker, known};
use remora_process::progress::{Meter, Unit};
use remora_reader::meter::Meter as Counters;

/// When progress is shown next, and where.
pub(super) struct Display {
    pub(super) due: Instant,
    shown: Option<(Step, Meter)>,
    /// Bytes of the snapshot that have arrived.
    arrived: Tracker,
    expected: Expected,
    pub(super) outrun: Outrun,
    /// The questions of those who watch.
    pub(super) scrapes: Scrapes,
}

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Saving,
    Transfer,
    Load,
}

/// How the sync stands.
pub(super) struct Standing<'a> {
    pub(super) server: &'a str,
    pub(super) primary: &'a str,
    /// The generation of the tables that are read; `None`: the agent waits for an offer.
    pub(super) generation: Option<u64>,
    /// Whether the server was pointed at the link.
    pub(super) follows_link: bool,
    pub(super) loaded: bool,
}

impl Display {
    pub(super) fn new(now: Instant) -> Display {
        Display {
            due: now,
            shown: None,
            arrived: Tracker::default(),
            expected: Expected::default(),
            outrun: Outrun::default(),
            scrapes: Scrapes::default(),
        }
    }

    /// The source has said what it expects of the snapshot.
    pub(super) fn expect(&mut self, expected: Expected) {
        self.expected = expected;
    }

    /// How far the transfer is.
    pub(super) fn transfer(&self, now: Instant) -> Look {
        self.arrived.look(now)
    }

    /// Shows how far the sync is.
    pub(super) fn show(&mut self, now: Instant, counters: &Counters, standing: &Standing<'_>) {
        let arrived = counters.bytes_fetched.get().max(counters.bytes_delivered.get());
        let length = self.length(counters, standing.generation);
        self.arrived.reach(now, arrived, length);
        let saving = self.expected.saving.filter(|_| standing.generation.is_none() && !standing.follows_link);
        let due = match saving {
            _ if standing.loaded => None,
            Some(saving) => Some((Step::Saving, saving.keys, known(saving.keys_total))),
            None if !standing.follows_link => None,
            None if !self.arrived.is_whole() => Some((Step::Transfer, arrived, length)),
            None => Some((Step::Load, counters.bytes_delivered.get(), length))
                .filter(|(_, given, length)| *given < length.bytes),
        };
        // The end of a transfer is shown before what follows it.
        if let Some((Step::Transfer, meter)) = &self.shown {
            meter.expect(length);
            meter.set(arrived);
        }
        let Some((step, position, length)) = due else { return self.leave() };
        if self.shown.as_ref().is_none_or(|(shown, _)| *shown != step) {
            self.leave();
            let (label, unit) = match step {
                Step::Saving => (format!("{} saves", standing.primary), Unit::Count("key")),
                Step::Transfer => (format!("transfer to {}", standing.server), Unit::Bytes),
                Step::Load => (format!("load into {}", standing.server), Unit::Bytes),
            };
            self.shown = Some((step, Meter::start_from(label, unit, position, length)));
        }
        if let Some((_, meter)) = &self.shown {
            meter.expect(length);
            meter.set(position);
        }
    }

    /// Nothing is shown any more. The last line of what ended stays.
    pub(super) fn finish(&mut self) {
        if let Some((_, meter)) = self.shown.take() {
            meter.finish();
        }
    }

    /// Goes on to what is shown next. Of what did not end no line stays.
    fn leave(&mut self) {
        match self.shown.take() {
            Some((Step::Transfer, meter)) if meter.is_whole() => meter.finish(),
            Some((Step::Load, meter)) => meter.finish(),
            _ => {}
        }
    }

    /// The length of the snapshot: the table says it at its end, and the source before.
    fn length(&self, counters: &Counters, generation: Option<u64>) -> Length {
        if counters.slots_total.get() > 0 {
            return known(counters.bytes_known.get());
        }
        let expected = Some(self.expected).filter(|expected| Some(expected.generation) == generation);
        // Counters of an earlier snapshot may be there for a moment.
        expected.map(|expected| expected.length).filter(|length| length.basis != Basis::Unknown).unwrap_or_default()
    }
}

// Metrics: what a sync shows to those who watch it, out of its machine and its meters.

/// From now on the driver answers these questions.
pub(crate) fn watch(driver: &mut Driver, scrapes: Scrapes) {
    driver.display.scrapes = scrapes;
}

/// Answers one.
pub(super) fn answer(driver: &Driver, mut scrape: Scrape) {
    show(driver, &mut scrape.families);
    let server = &driver.facts.server;
    scrape.answer(match driver.machine.phase() {
        Some(Phase::Stay | Phase::Done) => None,
        Some(phase) => Some(format!("{server} is not in step yet: its sync is in phase {phase}")),
        None => Some(format!("the sync of {server} has failed")),
    });
}

/// Adds all values.
pub(super) fn show(driver: &Driver, families: &mut Families) {
    let (machine, meter, summary) = (&driver.machine, &driver.meter, driver.summary());
    let source = driver.options.read.source.to_string();
    families.info(&all::SYNC, [&*summary.server, &*summary.primary, &*source, &*summary.transport, &*summary.delivery]);
    let phases =
        [Phase::Waiting, Phase::Transfer, Phase::Load, Phase::CatchUp, Phase::HandOff, Phase::Stay, Phase::Done];
    let names = phases.map(|phase| phase.to_string());
    let present = machine.phase().map(|phase| phase.to_string());
    families.states(&all::SYNC_PHASE, names.each_ref().map(String::as_str), present.as_deref());
    let started = SystemTime::now() - Instant::now().saturating_duration_since(machine.moments().joined);
    families.gauge(&all::SYNC_STARTED, started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    families.gauges(
        &all::SYNC_PHASE_DURATION,
        [
            (["snapshot"], summary.snapshot_seconds),
            (["transfer"], summary.transfer_seconds),
            (["load"], summary.load_seconds),
            (["catch-up"], summary.catch_up_seconds),
            (["hand-off"], summary.hand_off_seconds),
        ],
    );
    families.whether(&all::SYNC_SOURCE_UP, driver.session.is_some());
    let (held, slots) = (meter.slots_held.get(), meter.slots_total.get());
    // The server's module takes bytes that the agent has not fetched.
    let fetched = meter.bytes_fetched.get().max(meter.bytes_delivered.get());
    let (stream_fetched, acknowledged) = (meter.stream_fetched.get(), meter.acknowledged.get());
    for (family, value) in [
        (&all::SYNC_KNOWN, meter.bytes_known.get()),
        (&all::SYNC_FETCHED, fetched),
        (&all::SYNC_DELIVERED, meter.bytes_delivered.get()),
        (&all::SYNC_REFERRED, summary.referred_bytes),
        (&all::SYNC_SLOTS, slots),
        (&all::SYNC_HELD, held),
        (&all::SYNC_OFFSET, summary.snapshot_offset),
        (&all::SYNC_STREAM_FETCHED, stream_fetched),
        (&all::SYNC_STREAM_DELIVERED, meter.stream_delivered.get()),
        (&all::SYNC_ACKNOWLEDGED, acknowledged),
        (&all::SYNC_READERS, driver.relay.readers() as u64),
    ] {
        families.number(family, value);
    }
    let transfer = driver.display.transfer(Instant::now());
    families.gauge(&all::SYNC_PROGRESS, transfer.advance().ratio().unwrap_or(0.0));
    families.gauge(&all::SYNC_RATE, transfer.rate.unwrap_or(0.0));
    if let Some(left) = transfer.left {
        families.gauge(&all::SYNC_LEFT, left.as_secs_f64());
    }
    families.number(&all::SYNC_EXPECTED, transfer.length.bytes);
    if acknowledged > 0 {
        families.number(&all::SYNC_LAG, stream_fetched.saturating_sub(acknowledged));
    }
    families.counter(&all::SYNC_INTERRUPTIONS, machine.interruptions().into());
    families.counter(&all::SYNC_STRANGERS, summary.strangers);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use remora_protocol::Saving;

    use super::*;

    fn standing(generation: Option<u64>, follows_link: bool) -> Standing<'static> {
        Standing { server: "b:1", primary: "a:1", generation, follows_link, loaded: false }
    }

    fn step(display: &Display) -> Option<Step> {
        display.shown.as_ref().map(|(step, _)| *step)
    }

    #[test]
    fn a_sync_is_shown_from_the_servers_file_to_the_end_of_the_load() {
        remora_process::progress::configure(true);
        let (start, counters) = (Instant::now(), Counters::default());
        let mut display = Display::new(start);
        let at = |second: u64, display: &mut Display, standing: &Standing<'_>| {
            display.show(start + Duration::from_secs(second), &counters, standing);
            (step(display), display.transfer(start + Duration::from_secs(second)).permille)
        };
        assert_eq!(at(0, &mut display, &standing(None, false)), (None, None));
        let saving = Some(Saving { keys: 5, keys_total: 10 });
        display.expect(Expected { generation: 7, saving, ..Expected::default() });
        assert_eq!(at(1, &mut display, &standing(None, false)).0, Some(Step::Saving));
        let length = Length { bytes: 1000, basis: Basis::Keys };
        display.expect(Expected { generation: 7, length, saving });
        counters.bytes_fetched.set(250);
        assert_eq!(at(2, &mut display, &standing(Some(7), true)), (Some(Step::Transfer), Some(250)));
        // The source expects something of a later snapshot.
        display.expect(Expected { generation: 8, length: Length { bytes: 10, ..length }, saving });
        assert_eq!(at(3, &mut display, &standing(Some(7), true)), (Some(Step::Transfer), None));
        counters.slots_total.set(4);
        counters.bytes_known.set(900);
        assert_eq!(at(4, &mut display, &standing(Some(7), true)), (Some(Step::Transfer), Some(277)));
        counters.bytes_fetched.set(900);
        assert_eq!(at(5, &mut display, &standing(Some(7), true)), (Some(Step::Load), Some(1000)));
        counters.bytes_delivered.set(900);
        assert_eq!(at(6, &mut display, &standing(Some(7), true)), (None, Some(1000)));
    }
}
