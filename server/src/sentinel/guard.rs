//! Guard: whether Sentinel would take a replica back in the middle of its sync.
//!
//! A Sentinel that knows a replica makes it follow the primary again when the replica has shown another one, such as
//! our link, for `failover-timeout` (`+fix-slave-config` in the servers' sentinel.c). It makes a replica that follows
//! none follow the primary within seconds (`+convert-to-slave`). A server that no Sentinel knows is left alone:
//! Sentinel finds replicas in the primary's `INFO`, and a new one is there after the hand-off only.

use std::time::Duration;

use super::{Group, KnownReplica, SentinelError, Sentinels};
use crate::{Facts, ServerUrl};
use remora_base::units::{Size, readable};

/// Data per second that a sync surely takes: a fifth to a tenth of what was measured, since the values may be small and
/// the machine busy.
const SURE_RATE: u64 = 32 << 20;

/// The part of `failover-timeout` that a sync may take: Sentinels see the server's change some seconds late, and their
/// clocks are not ours.
const PART: f64 = 0.8;

/// What stands in the way of a sync of a server that Sentinel knows.
pub struct Known {
    /// The group.
    pub group: Group,
}

/// Whether the Sentinels know this server as a replica.
pub async fn known(sentinels: &Sentinels, facts: &Facts, url: &ServerUrl) -> Result<Option<Known>, SentinelError> {
    let replicas = sentinels.replicas().await?;
    match replicas.iter().any(|replica| is_it(replica, facts, url)) {
        true => Ok(Some(Known { group: sentinels.group().await? })),
        false => Ok(None),
    }
}

/// Whether Sentinel means this server by that replica.
pub fn is_it(replica: &KnownReplica, facts: &Facts, url: &ServerUrl) -> bool {
    let is_same_run = !replica.run_id.is_empty() && facts.run_id.as_deref() == Some(replica.run_id.as_str());
    let at = replica.address.as_ref().map(|at| (at.host.as_str(), at.port));
    is_same_run || (at.is_some() && at == url.host_and_port())
}

/// How long a sync of this much data by our link takes at most, if the agent reads at most `limit` bytes per second.
pub fn longest(data: u64, limit: Option<Size>) -> Duration {
    let rate = limit.map_or(SURE_RATE, |limit| limit.get().clamp(1, SURE_RATE));
    Duration::from_secs(data / rate + 1)
}

impl Known {
    /// Whether Sentinel would take the server back before a sync of this length ends.
    pub fn is_too_late(&self, longest: Duration) -> bool {
        longest > self.group.failover_timeout.mul_f64(PART)
    }

    /// The `failover-timeout` with which a sync of this length is not taken back.
    pub fn timeout_for(&self, longest: Duration) -> Duration {
        longest.div_f64(PART).max(self.group.failover_timeout) + Duration::from_secs(1)
    }

    /// Why the server is refused.
    pub fn refusal(&self, name: &str, data: u64, longest: Duration) -> String {
        format!(
            "Sentinel knows it as a replica of {name}, and makes it follow the primary again after failover-timeout ({}), while a \
             sync of {} by the link may take {}: let remora attend intercept its connections, which changes nothing that \
             Sentinel sees; or give --extend-failover-timeout; or raise the time by SENTINEL SET {name} failover-timeout {} at \
             every Sentinel",
            readable(self.group.failover_timeout),
            Size::bytes(data),
            readable(longest),
            self.timeout_for(longest).as_millis()
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn known(seconds: u64) -> Known {
        Known { group: Group { failover_timeout: Duration::from_secs(seconds), others: 2 } }
    }

    #[test]
    fn a_sync_may_take_four_fifths_of_the_failover_timeout() {
        let size = |seconds: u64| longest(SURE_RATE * seconds, None);
        assert!(!known(180).is_too_late(size(143)) && known(180).is_too_late(size(144)));
        assert!(known(180).is_too_late(longest(1 << 30, Some(Size::mebibytes(4)))), "slower by --download-limit");
        assert_eq!(longest(SURE_RATE, Some(Size::mebibytes(1000))), size(1), "never faster than what is sure");
        let text = known(180).refusal("mymaster", 10 << 30, longest(10 << 30, None));
        for word in ["mymaster", "10 GiB", "remora attend", "--extend-failover-timeout"] {
            assert!(text.contains(word), "{text}");
        }
        let raised = known(180).timeout_for(size(500));
        assert!(size(500) < raised.mul_f64(PART));
    }

    #[test]
    fn a_server_is_known_by_its_run_or_by_its_address() {
        let url = "redis://10.0.0.2:6380".parse().unwrap();
        let facts = Facts { run_id: Some("a".into()), ..Facts::default() };
        let replica = |address: Option<&str>, run_id: &str| KnownReplica {
            address: address.map(|address| address.parse().unwrap()),
            run_id: run_id.into(),
            flags: String::new(),
            priority: 100,
        };
        assert!(is_it(&replica(None, "a"), &facts, &url) && is_it(&replica(Some("10.0.0.2:6380"), ""), &facts, &url));
        assert!(!is_it(&replica(Some("10.0.0.2:6381"), ""), &facts, &url));
        assert!(!is_it(&replica(None, ""), &Facts::default(), &"unix:///s".parse().unwrap()));
    }
}
