//! The primary's output buffer for the source, and its limit.
//!
//! If snapshot and stream share one connection, the primary holds the stream back until the source has read the
//! snapshot. It holds it in the output buffer of that connection. A windowed snapshot is read at the pace of the
//! slowest replica, so the buffer grows for as long as that takes. When it reaches `client-output-buffer-limit`, the
//! primary closes the connection and the snapshot has failed. Each further attempt ends in the same way.

use std::fmt;
use std::time::{Duration, Instant};

use crate::growth::Growth;
use crate::server::{Client, Facts};
use crate::units::Size;

/// `client-output-buffer-limit` for replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutputLimit {
    /// The server closes a connection whose buffer holds more bytes; 0 for no limit.
    hard: u64,
    /// The server closes a connection whose buffer has held more bytes for `soft_time`; 0 for no limit.
    soft: u64,
    soft_time: Duration,
    /// Whether the server has told it. Otherwise it is the servers' default.
    is_known: bool,
}

impl OutputLimit {
    /// The default of Redis and Valkey: `slave 256mb 64mb 60`.
    const DEFAULT: OutputLimit =
        OutputLimit { hard: 256 << 20, soft: 64 << 20, soft_time: Duration::from_secs(60), is_known: false };

    /// Reads the setting, as `CONFIG GET` returns it: `normal 0 0 0 slave 268435456 67108864 60 pubsub …`.
    fn parse(text: &str) -> Option<OutputLimit> {
        let mut words = text.split_ascii_whitespace().skip_while(|word| *word != "slave" && *word != "replica").skip(1);
        let mut number = || words.next()?.parse::<u64>().ok();
        let (hard, soft, seconds) = (number()?, number()?, number()?);
        Some(OutputLimit { hard, soft, soft_time: Duration::from_secs(seconds), is_known: true })
    }

    /// The servers do not apply a hard limit below the size of the backlog, whose memory the buffer shares.
    fn with_backlog(self, facts: &Facts) -> OutputLimit {
        let backlog = facts.backlog.map_or(0, |backlog| backlog.size);
        OutputLimit { hard: if self.hard == 0 { 0 } else { self.hard.max(backlog) }, ..self }
    }

    /// Whether a buffer that has grown to `held` bytes within `took` reaches the limit.
    fn is_reached(&self, held: u64, took: Duration) -> bool {
        (self.hard > 0 && held >= self.hard) || (self.soft > 0 && held >= self.soft && took >= self.soft_time)
    }

    /// How long the buffer takes to reach the limit at this rate in bytes per second. `None`: it never does.
    fn time_at(&self, rate: u64) -> Option<Duration> {
        let fill = |bytes: u64| (bytes > 0 && rate > 0).then(|| Duration::from_secs_f64(bytes as f64 / rate as f64));
        let soft = fill(self.soft).map(|filled| filled + self.soft_time);
        fill(self.hard).into_iter().chain(soft).min()
    }
}

impl fmt::Display for OutputLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.hard, self.soft) {
            (0, 0) => f.write_str("no limit")?,
            (hard, 0) => write!(f, "{}", Size::bytes(hard))?,
            (0, soft) => write!(f, "{} for {} s", Size::bytes(soft), self.soft_time.as_secs())?,
            (hard, soft) => {
                write!(f, "{}, or {} for {} s", Size::bytes(hard), Size::bytes(soft), self.soft_time.as_secs())?;
            }
        }
        if self.is_known { Ok(()) } else { f.write_str(" by default (CONFIG GET is not permitted)") }
    }
}

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
        let mut get = async |name| client.config_get(name).await.ok().flatten();
        let limit = get("client-output-buffer-limit").await.and_then(|text| OutputLimit::parse(&text));
        let two_channels = get("dual-channel-replication-enabled").await.is_some_and(|text| text == "yes");
        OutputBuffer { limit: limit.unwrap_or(OutputLimit::DEFAULT).with_backlog(facts), two_channels }
    }

    /// The limit, if a buffer that has grown to `held` bytes within `took` reaches it.
    pub(crate) fn reached(&self, held: u64, took: Duration) -> Option<OutputLimit> {
        self.limit.is_reached(held, took).then_some(self.limit)
    }

    /// A warning for the plan of a replica: a windowed snapshot of about `expected` bytes may reach the limit. Empty if
    /// it cannot.
    fn warning(&self, expected: u64, ring: u64, rate: u64) -> String {
        if self.two_channels || (self.limit.hard == 0 && self.limit.soft == 0) {
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
    use crate::server::Backlog;

    const SETTING: &str = "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60";

    #[test]
    fn the_limit_for_replicas_is_read_from_the_setting() {
        let limit = OutputLimit::parse(SETTING).unwrap();
        assert_eq!(OutputLimit { is_known: false, ..limit }, OutputLimit::DEFAULT);
        assert_eq!(OutputLimit::parse(&SETTING.replace("slave", "replica")), Some(limit));
        assert_eq!(limit.to_string(), "256 MiB, or 64 MiB for 60 s");
        for wrong in ["", "normal 0 0 0", "slave 1 2", "slave 1 2 x"] {
            assert_eq!(OutputLimit::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_limit_is_reached_at_once_or_after_a_time_and_never_below_the_backlog() {
        let limit = OutputLimit { hard: 100, soft: 50, soft_time: Duration::from_secs(10), is_known: true };
        let soon = Duration::from_secs(1);
        assert!(limit.is_reached(100, soon) && !limit.is_reached(99, soon));
        assert!(limit.is_reached(50, Duration::from_secs(10)) && !limit.is_reached(49, Duration::from_secs(99)));
        assert_eq!(limit.time_at(10), Some(Duration::from_secs(10)));
        assert_eq!(limit.time_at(0), None);
        let none = OutputLimit { hard: 0, soft: 0, ..limit };
        assert!(!none.is_reached(u64::MAX, Duration::MAX) && none.time_at(1).is_none());
        let backlog = Backlog { active: true, size: 500, first: 1, held: 1 };
        let facts = Facts { backlog: Some(backlog), ..Facts::default() };
        assert_eq!(limit.with_backlog(&facts).hard, 500);
        assert_eq!(none.with_backlog(&facts).hard, 0);
    }

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
