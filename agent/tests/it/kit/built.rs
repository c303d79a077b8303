//! Modules of the tests, for servers.

use std::path::Path;
use std::process::Command;

use super::Stage;

/// Builds a module from its one file beside the tests. Rust links through the C compiler, so every machine that builds
/// the tests has one.
pub(crate) fn built_module(stage: &Stage, name: &str) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/it/{name}.c"));
    let library = stage.path(&format!("{name}.so"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o", &library]).arg(source);
    let built = compiler.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}
