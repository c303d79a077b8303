//! `remora replica`, `attend` and `intercept`: the jobs of [`remora_replica`] as commands.

use remora_metrics::{Agent, Watch};
use remora_replica::intercept::{self, Servers};
use remora_replica::{attend as attending, control};

use crate::args::{AttendArgs, InterceptAction, InterceptArgs, ReplicaArgs};
use crate::exit::Failure;
use crate::host;
use crate::progress;
use remora_process::blocking;

/// Runs `remora replica`, or its guard, as which the agent starts this command again.
///
/// # Errors
/// Why the server is not a replica; the message says in which state it was left.
pub async fn replica(args: ReplicaArgs) -> Result<(), Failure> {
    if control::is_guard() {
        // It puts a setting back, whatever became of the files that other options name.
        return control::run_guard(&args.server.login(), args.state_dir.as_deref()).await;
    }
    control::this_is_the_command();
    host::check_memory("--memory", args.memory)?;
    let (address, file) = (args.metrics.metrics, args.metrics_file.metrics_file.as_deref());
    let (watch, mut scrapes) = Watch::begin(Agent::Replica, address, file).await?;
    let outcome = match args.tokens().and_then(|tokens| Ok((args.options()?, tokens))) {
        Ok((options, tokens)) => remora_replica::run(options, tokens, &mut scrapes).await,
        Err(failure) => Err(failure),
    };
    watch.end(outcome).await
}

/// Runs `remora attend` until it is stopped.
///
/// # Errors
/// The server or the rules are not suitable, a port is taken, or a signal came in the middle of a sync.
pub async fn attend(args: AttendArgs) -> Result<(), Failure> {
    host::check_memory("--memory", args.memory)?;
    let (_watch, scrapes) = Watch::begin(Agent::Attend, args.metrics.metrics, None).await?;
    let tokens = args.tokens()?;
    attending::run(args.options()?, tokens, scrapes).await
}

/// Runs `remora intercept`.
///
/// # Errors
/// The program `nft` is missing, or refuses.
pub async fn intercept(args: InterceptArgs) -> Result<(), Failure> {
    blocking(move || act(&args.action)).await
}

fn act(action: &InterceptAction) -> Result<(), Failure> {
    match action {
        InterceptAction::Add(add) => {
            let (servers, whose) = match (add.server_uid, &add.server_cgroup) {
                (Some(uid), _) => (Servers::User(uid), format!("user {uid}")),
                (None, Some(group)) => (Servers::Group(group.clone()), format!("the control group {}", group.path())),
                (None, None) => return Err(Failure::refused("neither --server-uid nor --server-cgroup is given")),
            };
            intercept::add(add.listen_port, &servers, add.agent_uid)?;
            progress::say(&format!(
                "connections of {whose} can go to port {} of this host, as long as remora attend of user {} asks for them",
                add.listen_port, add.agent_uid
            ));
        }
        InterceptAction::Remove(remove) => intercept::remove(remove.listen_port)?,
        InterceptAction::Show(_) => {
            let shown = intercept::shown()?;
            if shown.is_empty() {
                progress::say("no connections are intercepted");
            }
            for rules in shown {
                progress::say(rules.trim_end());
            }
        }
    }
    Ok(())
}
