//! The command `remora`. Everything it does stands in the library, so that tests and benchmarks reach it too.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    remora_agent::commands::main()
}
