//! `remora intercept`: the rules by which a server's connections to its primary come to `remora attend`.
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

use crate::args::{Cgroup, InterceptAction, InterceptArgs};
use crate::exit::Failure;
use crate::progress;
use crate::tasks::blocking;

/// Runs `remora intercept`.
///
/// # Errors
/// The program `nft` is missing, or refuses.
pub async fn run(args: InterceptArgs) -> Result<(), Failure> {
    blocking(move || act(&args.action)).await
}

fn act(action: &InterceptAction) -> Result<(), Failure> {
    match action {
        InterceptAction::Add(add) => {
            let (servers, whose) = match (add.server_uid, &add.server_cgroup) {
                (Some(uid), _) if uid == add.agent_uid => {
                    return Err(one_user("--server-uid and --agent-uid", uid));
                }
                (Some(uid), _) => (Servers::User(uid), format!("user {uid}")),
                (None, Some(group)) => (Servers::Group(group.clone()), format!("the control group {}", group.path())),
                (None, None) => return Err(Failure::refused("neither --server-uid nor --server-cgroup is given")),
            };
            nft(&["-f", "-"], &add_script(add.listen_port, &servers, add.agent_uid))?;
            progress::say(&format!(
                "connections of {whose} can go to port {} of this host, as long as remora attend of user {} asks for them",
                add.listen_port, add.agent_uid
            ));
        }
        InterceptAction::Remove(remove) => {
            nft(&["-f", "-"], &remove_script(remove.listen_port))?;
        }
        InterceptAction::Show(_) => {
            let listed = nft(&["list", "tables", "inet"], "")?;
            let tables = tables(&listed);
            if tables.is_empty() {
                progress::say("no connections are intercepted");
            }
            for table in tables {
                progress::say(nft(&["list", "table", "inet", &table], "")?.trim_end());
            }
        }
    }
    Ok(())
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

fn table(port: u16) -> String {
    format!("{PREFIX}{port}")
}

/// Whose connections are meant.
enum Servers {
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
    use super::*;

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
