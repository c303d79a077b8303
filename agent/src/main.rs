//! The command `remora`. All of it is in the library, so that tests and benchmarks can use it too.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    remora_agent::commands::main()
}
