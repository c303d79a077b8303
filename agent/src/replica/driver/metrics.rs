//! Metrics: what a sync shows to those who watch it, out of its machine and its meters.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use remora_protocol::Phase;

use super::Driver;
use crate::metrics::register as all;
use crate::metrics::{Families, Scrape, Scrapes};

/// From now on the driver answers these questions.
pub(in crate::replica) fn watch(driver: &mut Driver, scrapes: Scrapes) {
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
    let source = driver.args.read.source.to_string();
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
