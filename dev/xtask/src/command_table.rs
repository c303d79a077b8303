//! `xtask commands`: writes the table of commands of `remora_redis`, from what servers say of their commands.
//!
//! The table keeps what it has of releases that are not asked. What a command acts on, no server says: the table keeps
//! that too, and of a new command it has to be given (`--decide`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use remora_bench::sync::Result;
use remora_lab::commands::{self, Described};
use remora_lab::server::{Program, Server, project_root};
use remora_redis::commands::keys::Key;
use remora_redis::commands::{RELEASES, TABLE};

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
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

pub(crate) fn run(options: &Options) -> Result<()> {
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
        let described = commands::of(&server)?;
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
fn programs(options: &Options) -> Result<Vec<Program>> {
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
