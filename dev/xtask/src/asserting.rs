//! `xtask asserting`: fast keys in a server that checks itself, by its assertions and by AddressSanitizer.
//!
//! ```text
//!   source package, unpacked ──make──▶ server without optimization ──layout──▶ where it keeps its tables
//!                                                │                                      │
//!                                                └──────── the module's tests ◀─────────┘
//! ```
//!
//! The folder of the source is not changed: a copy is built. A server with AddressSanitizer has the C library's
//! allocator, so it has no active defragmentation. `--defragment` builds one with assertions and its own jemalloc
//! instead, and tries that.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, thread};

use clap::Args;
use remora_bench::sync::Result;

use crate::layout;
use crate::process::{cargo, succeed};

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The folder of a server's source: of `apt-get source redis`, for example.
    source: PathBuf,
    /// Where copies are built and kept.
    #[arg(long, value_name = "FOLDER", default_value = ".cache/asserting")]
    cache: PathBuf,
    /// Try active defragmentation, in a server with its own jemalloc and without AddressSanitizer.
    #[arg(long)]
    defragment: bool,
}

/// The tests that are run: loads, everything that servers do with their tables, and random commands on twins.
const TESTS: &[&str] = &["fast::", "twins::every_command_is_answered_alike_afterwards", "asserting::"];

/// The tests of a server that can defragment.
const DEFRAGMENTING: &[&str] = &["fast::", "defragmenting::"];

pub(crate) fn run(options: &Options) -> Result<()> {
    let source = fs::canonicalize(&options.source)
        .map_err(|error| format!("the folder {} cannot be read: {error}", options.source.display()))?;
    let name = source.file_name().ok_or("the folder of the source has no name")?;
    fs::create_dir_all(&options.cache)?;
    let mut copy = fs::canonicalize(&options.cache)?.join(name);
    if options.defragment {
        copy.as_mut_os_string().push("-defragmenting");
    }
    let (program, variable) = build(&source, &copy, options.defragment)?;
    let file = copy.join("remora.layout");
    fs::write(&file, format!("# built from {}\n{}", name.display(), layout::learn(&program)?))?;
    let mut tests = cargo();
    tests.args(["test", "--locked", "-p", "remora-module", "--test", "it", "--", "--include-ignored", "--nocapture"]);
    // One after the other: such a server is slow, and its trial has a time limit.
    tests
        .args(if options.defragment { DEFRAGMENTING } else { TESTS })
        .args(["--test-threads=1", "--skip", "for_long"])
        .env("REMORA_LAYOUT", &file)
        .env(variable, &program);
    // The server keeps much until its end on purpose.
    succeed(tests.env("ASAN_OPTIONS", "detect_leaks=0"))
}

/// Builds a copy, or takes the one that was built before. Returns its program, and the variable that gives it to tests.
fn build(source: &Path, copy: &Path, defragment: bool) -> Result<(PathBuf, &'static str)> {
    let is_valkey = source.join("src/valkeymodule.h").exists();
    let (name, flags, variable) = match is_valkey {
        true => ("valkey-server", "SERVER_CFLAGS", "REMORA_VALKEY_SERVER"),
        false => ("redis-server", "REDIS_CFLAGS", "REMORA_REDIS_SERVER"),
    };
    if !source.join("src/server.h").exists() {
        return Err(format!("{} is not the source of a server: it has no src/server.h", source.display()).into());
    }
    let program = copy.join("src").join(name);
    if !program.exists() {
        if copy.exists() {
            // Of a build that did not end.
            fs::remove_dir_all(copy)?;
        }
        succeed(Command::new("cp").args(["-r", "--"]).arg(source).arg(copy))?;
        let jobs = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut make = Command::new("make");
        make.arg("-C").arg(copy.join("src")).arg(format!("-j{jobs}"));
        make.args(if defragment { &["MALLOC=jemalloc"][..] } else { &["MALLOC=libc", "SANITIZER=address"] });
        make.args(["OPTIMIZATION=-O0", &format!("{flags}=-DDEBUG_ASSERTIONS=1"), name]);
        succeed(&mut make)?;
    }
    if !is_valkey {
        return Ok((program, variable));
    }
    // Most of Valkey's assertions are a setting.
    let script = copy.join("asserting-server");
    fs::write(&script, format!("#!/bin/sh\nexec '{}' \"$@\" --enable-debug-assert yes\n", program.display()))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    Ok((script, variable))
}
