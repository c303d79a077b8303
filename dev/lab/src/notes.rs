//! Lines about a test that appear although it passes. A runner hides what a test prints that passes, so each line is
//! also added to the file that `REMORA_TEST_NOTES` names, which `make test` and continuous integration print at their
//! end.

// Stands alone: `require` and the machine for RDMA, which it needs, both add lines.

use std::io::Write;

/// Reports that this test has passed with less proof than usual.
pub fn note(what: &str) {
    add(&format!("NOTE: {}: {what}", this_test()));
}

/// Prints a line, and adds it to the file of notes.
pub(crate) fn add(line: &str) {
    // Directly to the terminal: the harness hides `eprintln!` of a test that passes.
    let _ = std::io::stderr().lock().write_all(format!("\n{line}\n").as_bytes());
    let Some(file) = std::env::var_os("REMORA_TEST_NOTES") else { return };
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(&file);
    let written = opened.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("cannot add a line to {}: {error}", file.display()));
}

pub(crate) fn this_test() -> String {
    std::thread::current().name().unwrap_or("a test").to_owned()
}
