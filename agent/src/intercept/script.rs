//! The rules, as a script for nft. Pure.

use crate::args::Cgroup;

/// How long an entry stands that is not renewed, in seconds. The agent renews it each second, and after a pause of some
/// seconds a killed agent's server goes to its primary by itself.
pub(crate) const ENTRY_SECONDS: u64 = 3;

/// The content of a datagram that removes an entry. One without content makes or renews it.
pub(crate) const REMOVING: &[u8] = &[0];

/// Bytes of a UDP header, which the length in it counts.
const UDP_HEADER: usize = 8;

/// Ports that may have an entry at a time: far more than a cluster without usual ports has nodes. An entry that is
/// renewed or has expired counts twice for a while. The kernel's memory grows with the entries that are there.
const ENTRIES: usize = 4096;

/// What the names of all tables begin with.
const PREFIX: &str = "remora_";

fn table(port: u16) -> String {
    format!("{PREFIX}{port}")
}

/// Whose connections are meant.
pub(super) enum Servers {
    /// Those of this user.
    User(u32),
    /// Those of this control group.
    Group(Cgroup),
}

/// Makes the rules for the agent at this port, and replaces those that were there, in one transaction.
///
/// The datagrams go from the agent's port to the port on loopback that is meant, and are dropped there: they reach no
/// program, and the agent learns from the refusal that the rules exist. Connections of other users, to other ports, or
/// without an entry are not changed. A connection that was established stays what it is.
pub(super) fn add(port: u16, server: &Servers, agent: u32) -> String {
    let table = table(port);
    let (renewing, removing) = (UDP_HEADER, UDP_HEADER + REMOVING.len());
    let server = match server {
        Servers::User(uid) => format!("meta skuid {uid}"),
        // The agent may be in the group too: its own connections must not come back to it.
        Servers::Group(group) => {
            format!("socket cgroupv2 level {} \"{}\" meta skuid != {agent}", group.level(), group.path())
        }
    };
    format!(
        "\
table inet {table} {{}}
delete table inet {table}
table inet {table} {{
  set wanted {{
    type inet_service
    flags dynamic, timeout
    timeout {ENTRY_SECONDS}s
    size {ENTRIES}
  }}
  chain heed {{
    type filter hook output priority filter; policy accept;
    meta skuid {agent} ip daddr 127.0.0.1 udp sport {port} udp length {renewing} update @wanted {{ udp dport }} drop
    meta skuid {agent} ip daddr 127.0.0.1 udp sport {port} udp length {removing} delete @wanted {{ udp dport }} drop
  }}
  chain intercept {{
    type nat hook output priority -100; policy accept;
    {server} tcp dport @wanted redirect to :{port}
  }}
}}
"
    )
}

/// Removes the rules for the agent at this port, if they are there.
pub(super) fn remove(port: u16) -> String {
    let table = table(port);
    format!("table inet {table} {{}}\ndelete table inet {table}\n")
}

/// Our tables in nft's list of tables.
pub(super) fn tables(listed: &str) -> Vec<String> {
    let names = listed.lines().filter_map(|line| line.trim().strip_prefix("table inet "));
    names.filter(|name| name.starts_with(PREFIX)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_tables_are_ours() {
        let listed = "table inet filter\ntable inet remora_7380\ntable ip remora_1\ntable inet remora_7381\n";
        assert_eq!(tables(listed), ["remora_7380", "remora_7381"]);
    }

    #[test]
    fn a_removing_datagram_is_longer_than_a_renewing_one() {
        let script = add(7380, &Servers::User(999), 998);
        assert!(script.contains("udp length 8 update") && script.contains("udp length 9 delete"), "{script}");
        assert!(script.contains("meta skuid 999 tcp dport @wanted redirect to :7380"), "{script}");
    }
}
