//! Where the server module's library is: `remora module path`, and `remora source --load-module`.

use std::path::{Path, PathBuf};

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
            let path = find()?;
            progress::print_line(&path.display().to_string())
        }
    }
}

/// The path of the library that belongs to this program.
///
/// # Errors
/// The library is in none of the places where it is searched; the message names them.
pub fn find() -> Result<PathBuf, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::local(format!("cannot find out the path of this program: {error}")))?;
    let places = places(&program);
    places.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        let looked: Vec<String> = places.iter().map(|path| path.display().to_string()).collect();
        let text = format!(
            "there is no {LIBRARY} at {}: build it with `cargo build --release -p remora-module`, or put it beside this program",
            looked.join(" or ")
        );
        Failure::local(text)
    })
}

/// Where the library is searched: beside the program, as cargo builds it; as packages install it; and, for a test's
/// program, one folder up.
fn places(program: &Path) -> Vec<PathBuf> {
    let folder = program.parent().unwrap_or(Path::new("."));
    let above = folder.parent().unwrap_or(folder);
    vec![folder.join(LIBRARY), above.join("lib/remora").join(LIBRARY), above.join(LIBRARY)]
}

/// The file's name.
pub const LIBRARY: &str = "libremora_module.so";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_looked_for_beside_the_program_and_where_packages_put_it() {
        let places = places(Path::new("/usr/bin/remora"));
        assert_eq!(places[0], Path::new("/usr/bin/libremora_module.so"));
        assert_eq!(places[1], Path::new("/usr/lib/remora/libremora_module.so"));
    }
}
