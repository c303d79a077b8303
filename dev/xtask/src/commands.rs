//! The command `remora` in the folder of a demonstration.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use remora_bench::sync::{Program, Result};
use remora_lab::Agent;

/// Starts a command.
pub(crate) fn started(program: &Program, folder: &Path, args: &[&str]) -> Result<Agent> {
    let mut command = Command::new(program.path());
    command.args(args).current_dir(folder);
    Ok(Agent::run(command)?)
}

/// Runs a command to its end, and returns what it says.
pub(crate) fn ended_well(program: &Program, folder: &Path, args: &[&str]) -> Result<String> {
    ended_within(START_LIMIT, program, folder, args)
}

/// The same for a command that takes as long as there are data.
pub(crate) fn ended_within(limit: Duration, program: &Program, folder: &Path, args: &[&str]) -> Result<String> {
    let mut agent = started(program, folder, args)?;
    agent.wait_for_success(limit)?;
    Ok(agent.stdout())
}

/// The option before the file with the secret.
pub(crate) const TOKEN: &str = "--token-file";

/// A command on a busy machine.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(60);
