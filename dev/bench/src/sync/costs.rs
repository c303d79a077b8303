//! What a server has used so far, as it reports itself: processor time to the microsecond, bytes.

use remora_lab::{Client, Result};
use serde::Serialize;

/// Counters that are read before and after; the difference is the cost.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Costs {
    /// Processor seconds, including those of ended children.
    pub(crate) cpu: f64,
    /// Bytes sent.
    pub(crate) sent: u64,
    /// Bytes received from a primary.
    pub(crate) received: u64,
    /// Children forked.
    pub(crate) forks: u64,
    /// Full copies that replicas asked for and got (`sync_full`).
    pub(crate) full_copies: u64,
    /// Bytes that the last child and its parent have copied on write.
    pub(crate) copied: u64,
}

impl Costs {
    pub(crate) fn read(client: &mut Client) -> Result<Costs> {
        let text = client.bytes(&["INFO", "cpu", "stats", "persistence"])?.unwrap_or_default();
        let info = remora_redis::info::Info::parse(&text);
        let seconds = |name| info.number::<f64>(name).unwrap_or_default();
        Ok(Costs {
            cpu: CPU_FIELDS.into_iter().map(seconds).sum(),
            sent: info.number("total_net_output_bytes").unwrap_or_default(),
            received: info.number("total_net_repl_input_bytes").unwrap_or_default(),
            forks: info.number("total_forks").unwrap_or_default(),
            full_copies: info.number("sync_full").unwrap_or_default(),
            copied: info.number("rdb_last_cow_size").unwrap_or_default(),
        })
    }

    pub(crate) fn since(self, before: Costs) -> Costs {
        Costs {
            cpu: self.cpu - before.cpu,
            sent: self.sent.saturating_sub(before.sent),
            received: self.received.saturating_sub(before.received),
            forks: self.forks.saturating_sub(before.forks),
            full_copies: self.full_copies.saturating_sub(before.full_copies),
            // This counter is not a sum but the value of the last child: zero if none was forked meanwhile.
            copied: if self.forks > before.forks { self.copied } else { 0 },
        }
    }
}

const CPU_FIELDS: [&str; 4] = ["used_cpu_user", "used_cpu_sys", "used_cpu_user_children", "used_cpu_sys_children"];
