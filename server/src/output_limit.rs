//! [`OutputLimit`]: how much a server holds back for one replica before it closes that replica's connection.

use std::fmt;
use std::time::Duration;

use super::{Client, Facts};
use remora_base::units::Size;

/// `client-output-buffer-limit` for replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLimit {
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
    pub const DEFAULT: OutputLimit =
        OutputLimit { hard: 256 << 20, soft: 64 << 20, soft_time: Duration::from_secs(60), is_known: false };

    /// Asks the server. `facts` must be fresh.
    pub async fn read(client: &mut Client, facts: &Facts) -> OutputLimit {
        let text = client.config_get("client-output-buffer-limit").await.ok().flatten();
        text.and_then(|text| OutputLimit::parse(&text)).unwrap_or(OutputLimit::DEFAULT).with_backlog(facts)
    }

    /// Bytes that the server holds back for a replica at most; `None` for no limit.
    pub fn hard(&self) -> Option<u64> {
        (self.hard > 0).then_some(self.hard)
    }

    /// The lowest limit that a buffer can reach within this time; `None` for no limit.
    pub fn least_within(&self, time: Duration) -> Option<u64> {
        let soft = (self.soft > 0 && self.soft_time < time).then_some(self.soft);
        self.hard().into_iter().chain(soft).min()
    }

    /// Whether there is no limit of either kind.
    pub fn is_none(&self) -> bool {
        self.hard == 0 && self.soft == 0
    }

    /// Reads the setting, as `CONFIG GET` returns it: `normal 0 0 0 slave 268435456 67108864 60 pubsub …`.
    pub fn parse(text: &str) -> Option<OutputLimit> {
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
    pub fn is_reached(&self, held: u64, took: Duration) -> bool {
        (self.hard > 0 && held >= self.hard) || (self.soft > 0 && held >= self.soft && took >= self.soft_time)
    }

    /// How long the buffer takes to reach the limit at this rate in bytes per second. `None`: it never does.
    pub fn time_at(&self, rate: u64) -> Option<Duration> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Backlog;

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
        assert_eq!(limit.least_within(Duration::from_secs(25)), Some(50));
        assert_eq!(limit.least_within(Duration::from_secs(10)), Some(100), "the soft one takes longer");
        let none = OutputLimit { hard: 0, soft: 0, ..limit };
        assert!(!none.is_reached(u64::MAX, Duration::MAX) && none.time_at(1).is_none());
        let backlog = Backlog { active: true, size: 500, first: 1, held: 1 };
        let facts = Facts { backlog: Some(backlog), ..Facts::default() };
        assert_eq!(limit.with_backlog(&facts).hard, 500);
        assert_eq!(none.with_backlog(&facts).hard, 0);
    }
}
