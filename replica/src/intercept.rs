//! Intercept: the rules by which a server's connections to its primary come to `remora attend`.
//!
//! ```text
//!   add (once, with CAP_NET_ADMIN) ──▶ nft: table inet remora_PORT
//!   attend (no rights) ── a datagram each second ──▶ heed: a timed entry for the primary's port
//!   server ── connects ──▶ redirect: entry ? ──▶ 127.0.0.1:PORT, the agent
//!                                            └─▶ its primary: without an entry nothing is changed
//! ```
//!
//! Only `add` and `remove` need rights. Without an agent that renews the entries, the rules change nothing: so they
//! can stay.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use remora_process::exit::Failure;

/// Makes rules that send connections of this server to the agent of this user at this port, or replaces them.
///
/// # Errors
/// The server and the agent are one user, or nft cannot be run or refuses.
pub fn add(port: u16, servers: &Servers, agent_uid: u32) -> Result<(), Failure> {
    if *servers == Servers::User(agent_uid) {
        return Err(one_user("--server-uid and --agent-uid", agent_uid));
    }
    nft(&["-f", "-"], &add_script(port, servers, agent_uid)).map(|_| ())
}

/// Removes the rules for the agent at this port, if they are there.
///
/// # Errors
/// nft cannot be run or refuses.
pub fn remove(port: u16) -> Result<(), Failure> {
    nft(&["-f", "-"], &remove_script(port)).map(|_| ())
}

/// The rules that are there, with the entries of agents, as nft shows them: a text for each agent.
///
/// # Errors
/// nft cannot be run or refuses.
pub fn shown() -> Result<Vec<String>, Failure> {
    let listed = nft(&["list", "tables", "inet"], "")?;
    tables(&listed).into_iter().map(|table| nft(&["list", "table", "inet", &table], "")).collect()
}

/// Rules for one run, which go with it. If the process is killed they stay, and change nothing.
pub(crate) struct Temporary {
    port: u16,
}

impl Temporary {
    /// Makes rules that send the connections of this user to the agent at this port.
    ///
    /// # Errors
    /// Both are one user, or nft cannot be run or refuses.
    pub(crate) fn add(port: u16, server_uid: u32, agent_uid: u32) -> Result<Temporary, Failure> {
        if server_uid == agent_uid {
            return Err(one_user("the server and this agent", server_uid));
        }
        nft(&["-f", "-"], &add_script(port, &Servers::User(server_uid), agent_uid))?;
        Ok(Temporary { port })
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(failure) = nft(&["-f", "-"], &remove_script(self.port)) {
            tracing::warn!(
                "{failure}; remora intercept remove removes the rules, which change nothing without an agent"
            );
        }
    }
}

/// Why there can be no rules for one user's server and agent.
fn one_user(which: &str, uid: u32) -> Failure {
    Failure::refused(format!(
        "{which} are both {uid}: the agent's own connections to the primary would come back to it; run the agent as another user \
         than the server"
    ))
}

/// Runs nft, which ends within milliseconds, and returns what it prints.
fn nft(args: &[&str], script: &str) -> Result<String, Failure> {
    let no_program = |error: std::io::Error| {
        Failure::local(format!(
            "the program nft cannot be run: {error}; install nftables (Debian's and Fedora's package of that name)"
        ))
    };
    let mut child = Command::new("nft")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(no_program)?;
    if let Some(mut input) = child.stdin.take() {
        // If nft has ended already, its own words say why.
        let _ = input.write_all(script.as_bytes());
    }
    let Output { status, stdout, stderr } = child.wait_with_output().map_err(no_program)?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&stderr);
    let said = said.lines().next().unwrap_or("no message").to_owned();
    Err(Failure::refused(format!(
        "nft refuses the rules: {said}; they need CAP_NET_ADMIN in the server's network namespace, and nft 1.0 or later"
    )))
}

// The rules, as a script for nft. Pure.

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

/// A control group (cgroup v2), by its path below the root of the hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup(String);

/// The longest path: nft takes no longer text.
const CGROUP_CHARS: usize = 255;

impl Cgroup {
    /// The group at a path, as in `/proc/PID/cgroup`; `None` if nft could not be given it.
    pub fn at(path: &str) -> Option<Cgroup> {
        let path = path.strip_prefix("0::").unwrap_or(path).trim_matches('/');
        let is_name = |name: &str| {
            let printable = name.chars().all(|letter| letter.is_ascii_graphic() && letter != '"' && letter != '\\');
            !name.is_empty() && name != "." && name != ".." && printable
        };
        (path.split('/').all(is_name) && path.len() <= CGROUP_CHARS).then(|| Cgroup(path.to_owned()))
    }

    /// The path, without a slash at either end.
    pub fn path(&self) -> &str {
        &self.0
    }

    /// How deep it is: 1 is a group right below the root.
    fn level(&self) -> usize {
        self.0.split('/').count()
    }
}

fn table(port: u16) -> String {
    format!("{PREFIX}{port}")
}

/// Whose connections are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
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
fn add_script(port: u16, server: &Servers, agent: u32) -> String {
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
fn remove_script(port: u16) -> String {
    let table = table(port);
    format!("table inet {table} {{}}\ndelete table inet {table}\n")
}

/// Our tables in nft's list of tables.
fn tables(listed: &str) -> Vec<String> {
    let names = listed.lines().filter_map(|line| line.trim().strip_prefix("table inet "));
    names.filter(|name| name.starts_with(PREFIX)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_control_group_is_a_path_that_nft_can_be_given() {
        let table = [("system.slice/redis.service", 2), ("/a/", 1), ("0::/kubepods/pod-1/c@2", 3)];
        for (text, level) in table {
            assert_eq!(Cgroup::at(text).unwrap().level(), level, "{text}");
        }
        for wrong in ["", "/", "a//b", "a/../b", "a\" drop", "a\nb", "a b", "ü", &"a".repeat(256)] {
            assert!(Cgroup::at(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn only_our_tables_are_ours() {
        let listed = "table inet filter\ntable inet remora_7380\ntable ip remora_1\ntable inet remora_7381\n";
        assert_eq!(tables(listed), ["remora_7380", "remora_7381"]);
    }

    #[test]
    fn a_removing_datagram_is_longer_than_a_renewing_one() {
        let script = add_script(7380, &Servers::User(999), 998);
        assert!(script.contains("udp length 8 update") && script.contains("udp length 9 delete"), "{script}");
        assert!(script.contains("meta skuid 999 tcp dport @wanted redirect to :7380"), "{script}");
    }
}
