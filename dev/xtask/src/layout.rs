//! Commands that learn from builds of servers: `xtask layout`, `asserting` and `commands`.
//!
//! `xtask layout` finds the layout of a build by watching it, for `module/builds/`. `remora module layout` does the
//! same for users, and keeps what it finds by the build's id. A build in that folder is known by its SHA-256, and
//! nobody has to look for it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::{fs, thread};

use clap::Args;

use crate::process::{cargo, succeed};
use remora_bench::sync::Result;
use remora_lab::server::{self, Described, Program, Server, project_root};
use remora_layout::build::Table;
use remora_layout::search::{Wanted, find};
use remora_redis::commands::{Key, RELEASES, TABLE};

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The server's program, or a script that becomes it by `exec`.
    program: PathBuf,
    /// Which package the program is from, for the first line of the file.
    #[arg(long, value_name = "WORDS")]
    package: String,
    /// The file to write; standard output without it.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let text = format!("# {}\n{}", options.package, learn(&options.program)?);
    match &options.out {
        None => print!("{text}"),
        Some(path) => fs::write(path, text)
            .map_err(|error| format!("the layout was not written to {}: {error}", path.display()))?,
    }
    Ok(())
}

/// The lines of the layout of that program, as files of `module/builds/` have them.
pub(crate) fn learn(program: &Path) -> Result<String> {
    let stop = AtomicBool::new(false);
    let found = find(&Wanted { program, called: None, debug_file: None, stop: &stop })?;
    if found.names != Table::Dynamic {
        return Err("the program does not show its functions: it was linked without -rdynamic".into());
    }
    // What follows from the program's SHA-256.
    let lines = found.text.lines().filter(|line| !line.starts_with("build = ") && !line.starts_with("names = "));
    Ok(lines.map(|line| format!("{line}\n")).collect())
}

// `xtask asserting`: fast keys in a server that checks itself, by its assertions and by AddressSanitizer.
//
// ```text
//   source package, unpacked ──make──▶ server without optimization ──layout──▶ where it keeps its tables
//                                                │                                      │
//                                                └──────── the module's tests ◀─────────┘
// ```
//
// The folder of the source is not changed: a copy is built. A server with AddressSanitizer has the C library's
// allocator, so it has no active defragmentation. `--defragment` builds one with assertions and its own jemalloc
// instead, and tries that.

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct AssertingOptions {
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

pub(crate) fn run_asserting(options: &AssertingOptions) -> Result<()> {
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
    fs::write(&file, format!("# built from {}\n{}", name.display(), learn(&program)?))?;
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

// `xtask commands`: writes the table of commands of `remora_redis`, from what servers say of their commands.
//
// The table keeps what it has of releases that are not asked. What a command acts on, no server says: the table keeps
// that too, and of a new command it has to be given (`--decide`).

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct CommandsOptions {
    /// Servers to ask: programs, and folders with programs in them.
    #[arg(required = true)]
    servers: Vec<PathBuf>,
    /// What a new command acts on, as NAME=EFFECT: one of the effects in `redis/src/commands/mod.rs`, as
    /// `getex=Expiry(Options(2))`.
    #[arg(long, value_name = "NAME=EFFECT")]
    decide: Vec<String>,
    /// Change nothing; fail if the table differs.
    #[arg(long)]
    check: bool,
}

const FILE: &str = "redis/src/commands/table.rs";

/// Families whose releases the table tells apart.
const FAMILIES: [&str; 2] = ["Redis", "Valkey"];

/// Commands that stand in streams although no server says so by a flag.
const ALSO: [&str; 16] = [
    "cluster|setslot",
    "cluster|syncslots",
    "eval",
    "evalsha",
    "exec",
    "multi",
    "pfcount",
    "ping",
    "publish",
    "replconf",
    "script",
    "script|flush",
    "script|load",
    "select",
    "spublish",
    "xgroup",
];

/// A release: family, and the first two numbers.
type Version = (String, u32, u32);

/// A row as far as it is known.
struct Row {
    arity: i64,
    writes: bool,
    effect: Option<String>,
    keys: Vec<Key>,
    releases: Vec<Version>,
}

pub(crate) fn run_commands(options: &CommandsOptions) -> Result<()> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for command in TABLE {
        let releases = command.releases.iter();
        let row = Row {
            arity: command.arity.into(),
            writes: command.writes,
            effect: Some(format!("{:?}", command.effect)),
            keys: command.keys.to_vec(),
            releases: releases.map(|release| (release.family.to_owned(), release.major, release.minor)).collect(),
        };
        rows.insert(command.name.to_owned(), row);
    }
    let mut versions: Vec<Version> =
        RELEASES.iter().map(|release| (release.family.to_owned(), release.major, release.minor)).collect();
    for program in programs(options)? {
        let version = (program.family().to_owned(), program.version()[0], program.version()[1]);
        println!("{program}: {}", program.path().display());
        let server = Server::builder(program.kind()).program(&program).start()?;
        let described = server::of(&server)?;
        if !versions.contains(&version) {
            versions.push(version.clone());
        }
        for command in described {
            merge(&mut rows, command, &version);
        }
    }
    versions.sort();
    decide(&mut rows, &options.decide)?;
    let made = text(&rows, &versions);
    let file = project_root().join(FILE);
    match (options.check, std::fs::read_to_string(&file)? == made) {
        (_, true) => println!("{FILE} has all of it"),
        (true, false) => return Err(format!("{FILE} differs: run this without --check and review the change").into()),
        (false, false) => std::fs::write(file, made)?,
    }
    Ok(())
}

/// The servers, by family and version; the last of a release is asked last.
fn programs(options: &CommandsOptions) -> Result<Vec<Program>> {
    let mut all = Vec::new();
    for path in &options.servers {
        // A server runs in a folder of its own. A link stays one: the name decides what the program does.
        all.extend(Program::all(&std::path::absolute(path)?)?);
    }
    all.retain(|program| FAMILIES.contains(&program.family()));
    all.sort_by_key(|program| (program.version(), program.family().to_owned()));
    Ok(all)
}

/// Takes what a server says of a command. Arity and keys are those of the newest server that is asked.
fn merge(rows: &mut BTreeMap<String, Row>, command: Described, version: &Version) {
    let is_wanted = command.writes() || command.has("may_replicate") || ALSO.contains(&command.name.as_str());
    if !is_wanted && !rows.contains_key(&command.name) {
        return;
    }
    let row = rows.entry(command.name.clone()).or_insert_with(|| Row {
        arity: 0,
        writes: false,
        effect: None,
        keys: Vec::new(),
        releases: Vec::new(),
    });
    let is_newest = row.releases.iter().all(|(_, major, minor)| (*major, *minor) <= (version.1, version.2));
    if is_newest {
        row.keys.clone_from(&command.keys);
        // Vector sets of some builds say nothing of theirs.
        if row.arity == 0 || command.arity != -1 {
            row.arity = command.arity;
        }
    }
    row.writes |= command.writes();
    if !row.releases.contains(version) {
        row.releases.push(version.clone());
    }
}

fn decide(rows: &mut BTreeMap<String, Row>, decisions: &[String]) -> Result<()> {
    for decision in decisions {
        let (name, effect) = decision.split_once('=').ok_or_else(|| format!("{decision} is not NAME=EFFECT"))?;
        let row = rows.get_mut(name).ok_or_else(|| format!("{name} is not a command of these servers"))?;
        row.effect = Some(effect.to_owned());
    }
    let undecided = rows.iter().filter(|(_, row)| row.effect.is_none()).map(|(name, _)| name.as_str());
    match undecided.collect::<Vec<_>>() {
        names if names.is_empty() => Ok(()),
        names => {
            Err(format!("what do these act on, besides the data set? --decide NAME=EFFECT: {}", names.join(" ")).into())
        }
    }
}

fn text(rows: &BTreeMap<String, Row>, versions: &[Version]) -> String {
    let mut text = String::from(
        "//! The table. Written by `cargo xtask commands`; what a command acts on is decided by people.\n\
         #![allow(unused_imports)] // which of the words are used depends on the servers\n\n\
         use super::Effect::{Cluster, Data, Expiry, FieldExpiry, Frame, Link, Publish, Script, ScriptCache};\n\
         use super::Expiry::{At as Argument, Options, OptionsBehindPairs, Restore};\n\
         use super::Unit::{Milliseconds, Seconds};\n\
         use super::keys::Access::{Change, Overwrite, Read, Remove, Unsaid};\n\
         use super::keys::Begin::{Anywhere, At, Behind};\n\
         use super::keys::Find::{Anything, Counted, Range};\n\
         use super::keys::{Access, Begin, Find, Key};\n\
         use super::{Command, Effect, Release, Releases};\n\n\
         /// The releases that the table tells apart.\n\
         #[rustfmt::skip]\n\
         pub const RELEASES: &[Release] = &[\n",
    );
    for (family, major, minor) in versions {
        _ = writeln!(text, "    Release {{ family: {family:?}, major: {major}, minor: {minor} }},");
    }
    text.push_str("];\n\n/// Every command that can stand in a replication stream of these releases, by name.\n#[rustfmt::skip]\n");
    text.push_str("pub static TABLE: &[Command] = &[\n");
    for (name, row) in rows {
        let bits: u32 = (0..)
            .zip(versions)
            .filter(|(_, version)| row.releases.contains(version))
            .map(|(at, _): (u32, _)| 1 << at)
            .sum();
        let keys: Vec<String> = row.keys.iter().map(key).collect();
        let effect = row.effect.as_deref().unwrap_or_default().replace("Expiry(At(", "Expiry(Argument(");
        let (arity, writes) = (row.arity, row.writes);
        _ = writeln!(text, "    row({name:?}, {arity}, {writes}, {effect}, &[{}], {bits:#x}),", keys.join(", "));
    }
    text.push_str(
        "];\n\n\
         const fn row(\n    name: &'static str,\n    arity: i8,\n    writes: bool,\n    effect: Effect,\n    \
         keys: &'static [Key],\n    releases: u32,\n) -> Command {\n    \
         Command { name, arity, writes, effect, keys, releases: Releases(releases) }\n}\n\n\
         const fn key(access: Access, begin: Begin, find: Find) -> Key {\n    \
         Key { access, begin, find, is_not_key: false, is_incomplete: false }\n}\n",
    );
    text
}

/// A key as the table writes it.
fn key(key: &Key) -> String {
    let Key { access, begin, find, is_not_key, is_incomplete } = key;
    match (is_not_key, is_incomplete) {
        (false, false) => format!("key({access:?}, {begin:?}, {find:?})"),
        _ => format!(
            "Key {{ is_not_key: {is_not_key}, is_incomplete: {is_incomplete}, ..key({access:?}, {begin:?}, {find:?}) }}"
        ),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    /// The kept files are of several builds; those of the lab's servers are found by watching them.
    #[test]
    #[ignore = "long: make test-all"]
    fn the_layouts_of_the_labs_servers_are_found_again() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../module/builds");
        let kept: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
            .map(|text| text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect())
            .collect();
        for kind in remora_lab::require::kinds() {
            let learned = super::learn(&kind.binary().unwrap()).unwrap();
            assert!(kept.contains(&learned), "{kind}: no file of module/builds has\n{learned}");
        }
    }
}
