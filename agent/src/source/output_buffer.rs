//! The primary's output buffer for the source, and its limit.
//!
//! If snapshot and stream share one connection, the primary holds the stream back until the source has read the
//! snapshot. It holds it in the output buffer of that connection. A windowed snapshot is read at the pace of the
//! slowest replica, so the buffer grows for as long as that takes. When it reaches `client-output-buffer-limit`, the
//! primary closes the connection and the snapshot has failed. Each further attempt ends in the same way.

use std::time::{Duration, Instant};

use crate::growth::Growth;
use crate::server::{Client, Facts, OutputLimit};
use crate::units::Size;

/// What the server holds back for a source, and what limits it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputBuffer {
    limit: OutputLimit,
    /// Whether the server sends snapshot and stream over two connections, so that it holds nothing back.
    two_channels: bool,
}

impl OutputBuffer {
    /// Asks the server. `facts` must be fresh.
    pub(crate) async fn read(client: &mut Client, facts: &Facts) -> OutputBuffer {
        let limit = OutputLimit::read(client, facts).await;
        let two_channels = client.config_get("dual-channel-replication-enabled").await.ok().flatten();
        OutputBuffer { limit, two_channels: two_channels.is_some_and(|text| text == "yes") }
    }

    /// The limit, if a buffer that has grown to `held` bytes within `took` reaches it.
    pub(crate) fn reached(&self, held: u64, took: Duration) -> Option<OutputLimit> {
        self.limit.is_reached(held, took).then_some(self.limit)
    }

    /// A warning for the plan of a replica: a windowed snapshot of about `expected` bytes may reach the limit. Empty if
    /// it cannot.
    fn warning(&self, expected: u64, ring: u64, rate: u64) -> String {
        if self.two_channels || self.limit.is_none() {
            return String::new();
        }
        let bound = match self.limit.time_at(rate) {
            None => "a snapshot fails if more than that is written while the replicas read it".to_owned(),
            Some(time) => format!(
                "at the {}/s that clients write now it is reached after {} s, so the slowest replica must read {}/s or more",
                Size::bytes(rate),
                time.as_secs(),
                Size::bytes((expected as f64 / time.as_secs_f64().max(1e-3)) as u64)
            ),
        };
        format!(
            "the data set (about {}) does not fit in the source's memory for the snapshot ({}), so the primary holds back what clients \
             write until the replicas have read it; its client-output-buffer-limit for replicas is {}: {bound}; {REMEDY}",
            Size::bytes(expected),
            Size::bytes(ring),
            self.limit
        )
    }
}

/// What to do about the limit.
pub(crate) const REMEDY: &str = "raise the limit on the primary, give the source more --memory, or set \
    dual-channel-replication-enabled yes on a Valkey primary";

/// The source's last look at its primary: the output buffer, and how fast clients write.
#[derive(Default)]
pub(super) struct OutputWatch {
    buffer: Option<OutputBuffer>,
    growth: Growth,
    /// Bytes per second between the last two looks.
    rate: u64,
}

impl OutputWatch {
    /// Two looks that are less apart give no rate.
    const SPAN: Duration = Duration::from_millis(500);

    /// The server was asked.
    pub(super) fn learned(&mut self, now: Instant, facts: &Facts, buffer: OutputBuffer) {
        self.buffer = Some(buffer);
        if let Some(rate) = facts.offset.and_then(|offset| self.growth.look(now, offset, Self::SPAN)) {
            self.rate = rate as u64;
        }
    }

    /// A warning for the plan of a replica; empty if the plan needs no warning.
    pub(super) fn warning(&self, expected: u64, ring: u64) -> String {
        self.buffer.map_or_else(String::new, |buffer| buffer.warning(expected, ring, self.rate))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SETTING: &str = "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60";

    #[test]
    fn a_warning_names_the_limit_the_time_and_the_pace_that_is_needed() {
        let limit = OutputLimit::parse(SETTING).unwrap();
        let buffer = OutputBuffer { limit, two_channels: false };
        let text = buffer.warning(10 << 30, 1 << 30, 32 << 20);
        for part in ["client-output-buffer-limit", "256 MiB, or 64 MiB for 60 s", "after 8 s", "1.25 GiB/s", "--memory"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(buffer.warning(10 << 30, 1 << 30, 0).contains("while the replicas read it"));
        assert_eq!(OutputBuffer { two_channels: true, ..buffer }.warning(1, 1, 1), "");
    }

    #[test]
    fn the_write_rate_follows_from_two_looks() {
        let (mut watch, start) = (OutputWatch::default(), Instant::now());
        let buffer = OutputBuffer { limit: OutputLimit::DEFAULT, two_channels: false };
        let at = |offset| Facts { offset: Some(offset), ..Facts::default() };
        watch.learned(start, &at(1000), buffer);
        watch.learned(start + Duration::from_secs(2), &at(5000), buffer);
        assert_eq!(watch.rate, 2000);
        watch.learned(start + Duration::from_secs(3), &at(0), buffer);
        assert_eq!(watch.rate, 0);
    }
}
