//! Needs: the commands by which a sync changes the replica's server, and whether the server would carry them out.
//!
//! They are asked for before the first change, by a dry run and by a sync alike. A server can lack one because its ACL
//! forbids it to our user, or because it was renamed. [`crate::server::permission`] says how it is asked.

use super::record::SAVE;
use super::target::Target;
use crate::args::{OnFailure, ReplicaArgs};
use crate::exit::Failure;
use crate::server::permission::{ALWAYS, Needed, Permission};
use crate::server::{Client, Facts, ServerUrl};

/// A command, and what a sync without it is.
struct Need {
    needed: Needed,
    /// Whether a sync with these options sends it.
    is_sent: fn(&ReplicaArgs) -> bool,
    /// What happens without it; `None`: there is no sync without it.
    without: Option<&'static str>,
}

/// Points the server at the link and at the primary, and detaches it.
pub(super) const FOLLOW: &str = "REPLICAOF";

/// Removes its keys.
pub(super) const EMPTY: &str = "FLUSHALL";

/// Ends its connection to its primary.
pub(super) const CUT: [&str; 4] = ["CLIENT", "KILL", "TYPE", "master"];

/// Writes its configuration file.
pub(super) const REWRITE: [&str; 2] = ["CONFIG", "REWRITE"];

/// Those of each sync by the link, but `CONFIG SET`, for which [`super::link_login`] asks because it can do without.
const NEEDS: [Need; 2] = [
    Need {
        needed: Needed {
            command: &[FOLLOW, "NO", "ONE"],
            refused_by_itself: &[FOLLOW, "remora", "remora"],
            since: ALWAYS,
        },
        is_sent: |_| true,
        without: None,
    },
    Need {
        needed: Needed { command: &[EMPTY], refused_by_itself: &[EMPTY, "remora"], since: ALWAYS },
        is_sent: |args| args.on_failure == OnFailure::Empty,
        without: Some("a sync that fails in its middle leaves a part of the data set there (--on-failure empty)"),
    },
];

const WRITE_THE_FILE: Needed = Needed { command: &REWRITE, refused_by_itself: &[], since: ALWAYS };

const CUT_THE_LINK: Needed =
    Needed { command: &CUT, refused_by_itself: &["CLIENT", "KILL", "ID", "remora"], since: ALWAYS };

/// Any setting stands for `save`, as the servers' rules name the command only.
const SET_SAVES: Needed = Needed {
    command: &["CONFIG", "SET", SAVE, ""],
    refused_by_itself: &["CONFIG", "SET", "remora", "remora"],
    since: ALWAYS,
};

/// Refuses a server that would not carry out a command of the sync, and warns of one that a sync can do without.
pub(super) async fn refuse_what_is_not_permitted(
    args: &ReplicaArgs,
    client: &mut Client,
    target: &Target,
) -> Result<(), Failure> {
    for need in NEEDS.iter().filter(|need| (need.is_sent)(args)) {
        match (need.needed.ask(client, &target.facts).await?, need.without) {
            (Permission::Refused(error), None) => return Err(Failure::from(error).and(UNTOUCHED)),
            (Permission::Refused(error), Some(without)) => tracing::warn!("{without}: {error}"),
            (Permission::Granted | Permission::Unknown, _) => {}
        }
    }
    Ok(())
}

/// Refuses a server whose configuration file is to be written and which does not permit that.
pub(super) async fn refuse_without_rewriting(client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    refuse_without(WRITE_THE_FILE, "--rewrite-config needs +config|rewrite there", client, facts).await
}

/// Refuses a server whose connection to its primary is to be cut and which does not permit that.
pub(super) async fn refuse_without_cutting(client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    refuse_without(CUT_THE_LINK, "--delivery intercept with --replace needs +client|kill there", client, facts).await
}

/// Refuses a server that saves by itself and does not permit that to be turned off (`--delivery file`).
pub(super) async fn refuse_without_turning_saves_off(client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    if client.config_bytes(SAVE).await?.is_none_or(|value| value.is_empty()) {
        return Ok(());
    }
    match SET_SAVES.ask(client, facts).await? {
        Permission::Refused(_) => Err(saves_stay_on(client.server().url())),
        Permission::Granted | Permission::Unknown => Ok(()),
    }
}

/// Why a server that saves by itself gets no file.
pub(super) fn saves_stay_on(url: &ServerUrl) -> Failure {
    Failure::refused(format!(
        "the server {url} does not let its saves be turned off, and would write over the file at its end: grant our user \
         +config|set there"
    ))
}

async fn refuse_without(needed: Needed, advice: &str, client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    match needed.ask(client, facts).await? {
        Permission::Refused(error) => Err(Failure::from(error).and(advice).and(UNTOUCHED)),
        Permission::Granted | Permission::Unknown => Ok(()),
    }
}

/// What a refusal leaves.
const UNTOUCHED: &str = "the server was not touched";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// A command that is sent and not asked for would be refused in the middle of a sync.
    #[test]
    fn every_command_that_changes_the_server_is_asked_for() {
        let sources = [
            include_str!("control.rs"),
            include_str!("driver/server/mod.rs"),
            include_str!("driver/server/leave.rs"),
            include_str!("driver/server/module.rs"),
            include_str!("driver/server/config_file.rs"),
            include_str!("attend/once.rs"),
        ];
        // Those that read, and those of the module, without which the sync goes by the link.
        let harmless = ["ROLE", "MULTI", "DISCARD", "EXEC", "REMORA.STATUS"];
        for source in sources {
            let product = source.split("#[cfg(test)]\nmod tests").next().unwrap();
            for sent in product.split("&[\"").skip(1) {
                let name = sent.split('"').next().unwrap();
                let is_command = name.len() > 2 && name.chars().all(|one| one.is_ascii_uppercase() || one == '.');
                assert!(!is_command || harmless.contains(&name), "{name} is not named by a constant of this file");
            }
        }
    }

    #[test]
    fn what_the_server_refuses_by_itself_is_the_same_command() {
        for needed in NEEDS.iter().map(|need| need.needed).chain([CUT_THE_LINK, SET_SAVES]) {
            let (sent, asked) = (needed.command, needed.refused_by_itself);
            assert!(asked.is_empty() || sent[0] == asked[0], "{sent:?}, {asked:?}");
        }
    }
}
