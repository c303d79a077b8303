//! `remora module path`: where the server module's library is.

use crate::args::{ModuleArgs, ModuleQuestion};
use crate::exit::Failure;
use crate::progress;

/// Runs `remora module`.
///
/// # Errors
/// The library is not found, or stdout cannot be written.
pub fn run(args: &ModuleArgs) -> Result<(), Failure> {
    match args.question {
        ModuleQuestion::Path => {
            let path = remora_server::module::library().map_err(|error| Failure::local(error.to_string()))?;
            progress::print_line(&path.display().to_string())
        }
    }
}
