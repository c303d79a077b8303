//! Lines about a test that appear although it passes.

use std::io::Write;

/// Reports that this test has passed with less proof than usual, such as at the second attempt. The line is printed,
/// and added to the file that `REMORA_TEST_NOTES` names: continuous integration prints that file at its end.
pub fn note(what: &str) {
    note_of(&this_test(), what);
}

/// [`note`] of another test.
pub fn note_of(test: &str, what: &str) {
    let line = format!("NOTE: {test}: {what}");
    print(&line);
    let Some(file) = std::env::var_os("REMORA_TEST_NOTES") else { return };
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(&file);
    let written = opened.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("cannot add a line to {}: {error}", file.display()));
}

pub(crate) fn this_test() -> String {
    std::thread::current().name().unwrap_or("a test").to_owned()
}

/// Prints directly to the terminal: the harness hides `eprintln!` of a test that passes.
pub(crate) fn print(line: &str) {
    let _ = std::io::stderr().lock().write_all(format!("\n{line}\n").as_bytes());
}
