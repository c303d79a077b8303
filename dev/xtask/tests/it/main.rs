//! The developer commands, as a developer starts them, with a little data and for a short time.
#![allow(clippy::unwrap_used)]

mod demo;
mod one_build;
mod soak;

use std::process::Command;

/// `xtask` with these arguments, not started yet.
fn xtask(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(arguments);
    // The tests of the agents have built it, in the same run of cargo; if not, the command builds it.
    let remora = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("remora");
    if remora.exists() {
        command.env("REMORA", remora);
    }
    command
}
