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

mod script;

use std::io::Write;
use std::process::{Command, Output, Stdio};

use self::script::Servers;
pub(crate) use self::script::{ENTRY_SECONDS, REMOVING};
use crate::args::{InterceptAction, InterceptArgs};
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
            nft(&["-f", "-"], &script::add(add.listen_port, &servers, add.agent_uid))?;
            progress::say(&format!(
                "connections of {whose} can go to port {} of this host, as long as remora attend of user {} asks for them",
                add.listen_port, add.agent_uid
            ));
        }
        InterceptAction::Remove(remove) => {
            nft(&["-f", "-"], &script::remove(remove.listen_port))?;
        }
        InterceptAction::Show(_) => {
            let listed = nft(&["list", "tables", "inet"], "")?;
            let tables = script::tables(&listed);
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
        nft(&["-f", "-"], &script::add(port, &Servers::User(server_uid), agent_uid))?;
        Ok(Temporary { port })
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(failure) = nft(&["-f", "-"], &script::remove(self.port)) {
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
