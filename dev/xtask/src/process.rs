//! Other programs that a command runs to their end: cargo, `remora` in the folder of a demonstration, a model.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use remora_bench::sync::{Program, Result};
use remora_lab::Agent;

/// The cargo that started this program.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs a command, whose output is shown.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|error| format!("{command:?} could not be started: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?} failed ({status})").into()) }
}

/// Runs a command, and returns what it has printed.
pub(crate) fn said(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|error| format!("{command:?} could not be started: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

// The command `remora` in the folder of a demonstration.

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

// Scale: prints the table of 1,000 replicas in racks that docs/explanation/relay.md shows. The model is a test of the
// agent.

/// The test that prints the table.
const TABLE: &str = "source::topology::scale::by_command::table";

/// Runs the model and prints its table.
pub(crate) fn print_scale() -> Result<()> {
    let mut command = cargo();
    command.args(["test", "--locked", "--quiet", "--package", "remora-agent", "--lib", "--", "--exact", TABLE]);
    let status = command.args(["--ignored", "--nocapture"]).status()?;
    if status.success() { Ok(()) } else { Err(format!("the model {TABLE} failed: {status}").into()) }
}
