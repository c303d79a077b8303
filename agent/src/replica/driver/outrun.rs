//! Outrun: foresees that the source's journal will be overwritten before the server can read on in it.
//!
//! The stream is read ahead into the agent's memory up to a limit. From then on the journal fills, and the snapshot
//! must be loaded before the journal comes round. The rates of both say minutes before whether it will.

use std::time::{Duration, Instant};

use crate::growth::Growth;
use crate::replica::meter::Meter;
use crate::units::Size;

/// The time over which the two rates are measured.
const RATE_TIME: Duration = Duration::from_secs(2);

/// How near the end must be for a warning while the length of the snapshot is not known.
const NEAR: Duration = Duration::from_secs(60);

/// What is watched. Bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// What the source has written to its journal since that began.
    written: u64,
    /// What it can write until what is needed next is held no more.
    left: u64,
    /// What has arrived of the snapshot.
    arrived: u64,
    /// The whole snapshot; `None` while it is not known.
    whole: Option<u64>,
}

/// Watches one sync.
#[derive(Debug, Default)]
pub(super) struct Outrun {
    written: Growth,
    arrived: Growth,
    is_told: bool,
}

impl Outrun {
    /// Takes a look at a sync whose server has not loaded yet, and warns, once.
    pub(super) fn watch(&mut self, now: Instant, meter: &Meter) {
        if meter.stream_paused.get() == 0 {
            return;
        }
        let seen = Seen {
            written: meter.journal_written.get(),
            left: meter.journal_left.get(),
            arrived: meter.bytes_fetched.get().max(meter.bytes_delivered.get()),
            whole: Some(meter.bytes_known.get()).filter(|_| meter.slots_total.get() > 0),
        };
        if let Some(warning) = self.look(now, seen) {
            tracing::warn!("{warning}");
        }
    }

    /// A warning, once, if the journal will be overwritten too early.
    fn look(&mut self, now: Instant, seen: Seen) -> Option<String> {
        if self.is_told || seen.written == 0 {
            return None;
        }
        let arrives = self.arrived.look(now, seen.arrived, RATE_TIME);
        let written = self.written.look(now, seen.written, RATE_TIME)?;
        let (left, needed) = (time(seen.left, written)?, seen.whole.zip(arrives));
        let needed = needed.map(|(whole, rate)| time(whole.saturating_sub(seen.arrived), rate));
        let is_outrun = match needed {
            Some(Some(needed)) => left < needed,
            Some(None) | None => left < NEAR,
        };
        if !is_outrun {
            return None;
        }
        self.is_told = true;
        let transfer = match needed.flatten() {
            Some(needed) => format!("the transfer takes about {} s more", needed.as_secs()),
            None => "the end of the transfer is not known".to_owned(),
        };
        Some(format!(
            "clients write {}/s, so the source will have overwritten the stream that follows this snapshot in about {} s, and \
             {transfer}: the sync will start over then. Give the source more --journal-memory, or a faster link to it",
            Size::bytes(written as u64),
            left.as_secs()
        ))
    }
}

/// How long these bytes take at this rate. `None`: for ever.
fn time(bytes: u64, rate: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(bytes as f64 / rate).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Looks once a second at a journal of 100 MiB that grows by `stream` MiB a second, beside a transfer of 1000 MiB.
    /// Gives the second of the warning.
    fn warned_at(stream: u64, transfer: u64, is_known: bool) -> Option<u64> {
        let (start, mut outrun) = (Instant::now(), Outrun::default());
        (0..1000 / transfer.max(1)).find(|second| {
            let seen = Seen {
                written: (1 + second * stream) * MIB,
                left: (100 * MIB).saturating_sub(second * stream * MIB),
                arrived: second * transfer * MIB,
                whole: is_known.then_some(1000 * MIB),
            };
            outrun.look(start + Duration::from_secs(*second), seen).is_some()
        })
    }

    #[test]
    fn a_transfer_that_is_slower_than_the_journal_fills_is_warned_of_at_once_and_once() {
        assert_eq!(warned_at(2, 10, true), Some(2), "50 s of journal, 100 s of transfer");
        assert_eq!(warned_at(1, 50, true), None, "100 s of journal, 20 s of transfer");
        assert_eq!(warned_at(0, 10, true), None, "nobody writes");
        assert_eq!(warned_at(1, 0, true), Some(42), "nothing arrives: a minute before");
        assert_eq!(warned_at(1, 10, false), Some(42), "the length is not known: a minute before");
    }

    #[test]
    fn the_warning_names_both_times_and_what_to_do() {
        let (start, mut outrun) = (Instant::now(), Outrun::default());
        let seen = |second: u64| Seen {
            written: (1 + 2 * second) * MIB,
            left: (100 - 2 * second) * MIB,
            arrived: 10 * second * MIB,
            whole: Some(1000 * MIB),
        };
        assert_eq!(outrun.look(start, seen(0)), None);
        let text = outrun.look(start + Duration::from_secs(2), seen(2)).unwrap();
        for part in ["2 MiB/s", "in about 48 s", "about 98 s more", "--journal-memory"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(outrun.look(start + Duration::from_secs(9), seen(9)), None, "once");
    }
}
