//! Scale: prints the table of 1,000 replicas in racks that docs/explanation/relay.md shows. The model is a test of the
//! agent.

use remora_bench::sync::Result;

use crate::process::cargo;

/// The test that prints the table.
const TABLE: &str = "source::topology::scale::by_command::table";

/// Runs the model and prints its table.
pub(crate) fn run() -> Result<()> {
    let mut command = cargo();
    command.args(["test", "--locked", "--quiet", "--package", "remora-agent", "--lib", "--", "--exact", TABLE]);
    let status = command.args(["--ignored", "--nocapture"]).status()?;
    if status.success() { Ok(()) } else { Err(format!("the model {TABLE} failed: {status}").into()) }
}
