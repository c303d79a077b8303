//! `cargo run -p remora-structure`: the check of `make check`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    match remora_structure::check(std::env::args().any(|argument| argument == "--ties")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("remora-structure: {error}");
            ExitCode::FAILURE
        }
    }
}
