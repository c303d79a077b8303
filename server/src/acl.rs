//! The ACL rules that allow the commands of each task.
//!
//! The help pages, `docs/reference/acl.md` and the message for `-NOPERM` use this one list.

use remora_redis::resp::Limits;

/// What a connection is for. It decides which ACL rules the message for a refusal names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// `remora source` on the server it copies from.
    Source,
    /// `remora replica` on the server it fills.
    Replica,
    /// `remora attend` on the server that it attends.
    Attend,
    /// `remora verify`, on either server.
    Verify,
    /// `remora load`.
    Load,
    /// `remora ready`, on a server and its primary.
    Ready,
    /// `remora plan`, on the primary.
    Plan,
    /// `remora cluster`, on every node.
    Cluster,
    /// `remora switch`, on both servers.
    Switch,
    /// Any command with `--sentinel`, at the Sentinels.
    Sentinel,
}

impl Task {
    /// All tasks.
    pub const ALL: [Self; 10] = [
        Self::Source,
        Self::Replica,
        Self::Attend,
        Self::Verify,
        Self::Load,
        Self::Ready,
        Self::Plan,
        Self::Cluster,
        Self::Switch,
        Self::Sentinel,
    ];

    /// The command that does the task.
    pub const fn command(self) -> &'static str {
        match self {
            Self::Source => "remora source",
            Self::Replica => "remora replica",
            Self::Attend => "remora attend",
            Self::Verify => "remora verify",
            Self::Load => "remora load",
            Self::Ready => "remora ready",
            Self::Plan => "remora plan",
            Self::Cluster => "remora cluster",
            Self::Switch => "remora switch",
            Self::Sentinel => "--sentinel",
        }
    }

    /// The rules, in the syntax of `ACL SETUSER <user>`. `+select` is needed for every database but 0, so the rules of
    /// commands that take a database have it.
    pub const fn rules(self) -> &'static str {
        match self {
            Self::Source => "+ping +info +replconf +psync +config|get",
            Self::Replica => "+ping +info +replicaof +config|get +config|set +flushall",
            Self::Attend => "+ping +info",
            Self::Verify => "~* +@read +ping +info +select +scan +memory|usage +function|list +debug",
            Self::Load => "~* +@write +ping +info +select",
            Self::Ready => "+ping +info",
            Self::Plan => "+ping +info",
            Self::Cluster => "+ping +info +cluster|info +cluster|nodes",
            Self::Switch => {
                "+ping +info +replicaof +multi +exec +client|pause +client|unpause +client|list +client|kill \
                 +client|setname +client|id +config|get +pubsub|numsub"
            }
            Self::Sentinel => "+ping +sentinel|get-master-addr-by-name +sentinel|replicas +sentinel|master",
        }
    }

    /// Which of the rules are optional, and what happens without them. Empty if all are needed.
    pub const fn optional(self) -> &'static str {
        match self {
            Self::Source => {
                "without +config|get settings that would get in the way are found out only when they do; with the module in the \
                 server: +remora.status +remora.arm +remora.disarm, and +remora.sweep for --module-capture sweep, +module|load for --load-module; beside Valkey 9 in cluster mode: +cluster|getslotmigrations; for --tune-server: +config|set; +failover ends a \
                 FAILOVER that waits for ever because only the source is attached"
            }
            Self::Replica => {
                "+flushall is not needed with --on-failure detached; +config|set is not needed where the server has a masterauth, which \
                 our link then asks for; with the module in the server: +remora.status +remora.load +multi +exec \
                 +discard; with --convert: +command; with --delivery intercept and --replace: +client|kill"
            }
            Self::Attend => {
                "without +config|get TLS to the primary is noticed only when the server connects; with --sentinel: +replicaof, for a \
                 server that no Sentinel knows yet; the user of the server's masteruser needs +info on the primary, besides +psync +replconf +ping"
            }
            Self::Verify => {
                "without +debug it reads and compares every value; without +memory|usage it reads each value in pieces"
            }
            Self::Load => "",
            Self::Cluster => {
                "on every node; +cluster|getslotmigrations on Valkey 9; for --write-nodes-conf: +cluster|myshardid where \
                 the server has it; for remora cluster sync: +cluster|meet +cluster|replicate +cluster|reset on the nodes that it \
                 names; for remora cluster migrate: these, what remora verify needs, +config|get +config|set +cluster|failover \
                 +cluster|forget +readonly on all nodes"
            }
            Self::Switch => {
                "on both servers; +multi +exec +client|pause +client|unpause at the old primary only; without +client|list \
                 +client|kill +client|setname +client|id what a switch that was ended has sent may be carried out late; without \
                 +pubsub|numsub it is not known whether Sentinels watch it; for --rewrite-config: +config|rewrite +multi +exec on both"
            }
            Self::Sentinel => "at the Sentinels; +sentinel|set for --extend-failover-timeout",
            Self::Ready => "on a replica's primary too, unless --link-only is given",
            Self::Plan => {
                "without +config|get it is not known how long the primary waits before it forks, and without ~* +randomkey \
                 +memory|usage +dump +strlen +select how much smaller the snapshot is than the data"
            }
        }
    }

    /// What an answer may be. A server may return a value of any length; a Sentinel lists replicas, of which each has
    /// some fifty short fields.
    pub(super) const fn limits(self) -> Limits {
        match self {
            Self::Sentinel => Limits { bulk_bytes: 1024, array_items: 256, depth: 2, line_bytes: 1024 },
            _ => Limits {
                bulk_bytes: Limits::BULK_BYTES,
                array_items: Limits::ARRAY_ITEMS,
                depth: Limits::DEPTH,
                line_bytes: Limits::LINE_BYTES,
            },
        }
    }

    /// What the names of the TLS options begin with, between `--` and `tls-`.
    pub(super) const fn tls_prefix(self) -> &'static str {
        match self {
            Self::Sentinel => "sentinel-",
            _ => "",
        }
    }

    /// A line below the paragraph of another task.
    pub fn help_beside(self) -> String {
        format!("With {}: {}\n  ({})\n", self.command(), self.rules(), self.optional())
    }

    /// The paragraph at the end of a help page.
    pub fn help(self) -> String {
        let mut text = format!(
            "ACL rules that the user needs on the server (ACL SETUSER <user> on ><password> …):\n  {}\n",
            self.rules()
        );
        if !self.optional().is_empty() {
            text.push_str(&format!("  ({})\n", self.optional()));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_lists_the_rules_of_every_task() {
        let manual = include_str!("../../docs/reference/acl.md");
        for task in Task::ALL {
            // A bar in a table cell is escaped there.
            let row = format!("| `{}` | `{}` |", task.command(), task.rules().replace('|', "\\|"));
            assert!(manual.contains(&row), "docs/reference/acl.md lacks {row}");
        }
    }
}
