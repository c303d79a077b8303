//! Migration: a server of the other family, or of an older version, becomes an exact replica (`--convert`), and the way
//! back is a partial resynchronisation.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use remora_lab::compare::{Contents, differences_of};
use remora_lab::server::wait_until;
use remora_lab::workload::{Abilities, Options, Workload, fill_with};
use remora_lab::{Kind, Server, require};

use crate::kit::{BACKLOG, LONG, Source, Stage, built_module, ends, number, primary, says, syncs};
use crate::sync::exact::assert_same_content;

/// Commands that the writer sends before and after a switch.
const WRITES: u64 = 2_000;

/// Names another number of thousands, for a long run (`make test-matrix THOUSANDS=700`).
const THOUSANDS: &str = "REMORA_THOUSANDS";

/// Commands a second. The writer adds data as long as a sync lasts, which lasts longer the more data there are.
const RATE: u64 = 1_000;
const LONG_RATE: u64 = 10_000;

/// By then the keys that the writer lets expire soon are gone.
const SHORT_LIVED: Duration = Duration::from_secs(6);

/// What both servers know.
pub(crate) fn of_both(one: &Server, other: &Server) -> Abilities {
    let of = |server: &Server| Abilities::of(&mut server.client().unwrap()).unwrap();
    of(one).and(of(other))
}

/// Thousands of commands in a long run.
fn thousands() -> Option<u64> {
    std::env::var(THOUSANDS).ok().map(|number| number.parse().unwrap())
}

/// Waits until the writer has sent its share.
fn wait_for_writes(writing: &Workload) {
    match thousands() {
        None => writing.wait_for(WRITES),
        Some(number) => (0..number).for_each(|_| writing.wait_for(1_000)),
    }
}

/// Writes every kind of change that both servers know.
pub(crate) fn writer(to: &Server, abilities: Abilities) -> Workload {
    let options = Options {
        big_bytes: 1 << 20,
        abilities: Some(abilities),
        ..Options::seeded(remora_lab::random::seed("workload"))
    };
    Workload::start(to.client().unwrap(), options.rate(if thousands().is_some() { LONG_RATE } else { RATE })).unwrap()
}

/// Makes `new` a replica of `old` under every kind of write, promotes it, lets the old one follow it, and goes back.
/// Full copies: one, for the source.
pub(crate) fn there_and_back(old: &Server, new: &Server) {
    let abilities = of_both(old, new);
    fill_with(&mut old.client().unwrap(), 7, abilities).unwrap();
    let writing = writer(old, abilities);
    wait_for_writes(&writing);
    let source = Source::start(old, &[]);
    let agent = source.replicate(new, &["--convert"]);
    drop(agent);
    wait_for_writes(&writing);
    writing.stop().unwrap();
    assert_same(old, new);
    assert_eq!(number(new, "unexpected_error_replies"), 0);
    source.stop();

    let copies = syncs(old).0;
    switch(old, new);
    let writing = writer(new, abilities);
    wait_for_writes(&writing);
    writing.stop().unwrap();
    assert_same(new, old);
    assert_eq!(syncs(new).0, 0, "the old primary follows without a full copy");
    switch(new, old);
    old.client().unwrap().ok(&["SET", "written last", "at the old primary"]).unwrap();
    assert_same(old, new);
    assert_eq!((syncs(old).0, syncs(new).0), (copies, 0), "the way back needs no full copy");
}

/// Promotes a replica, and has its primary follow it.
fn switch(primary: &Server, replica: &Server) {
    assert_same(primary, replica);
    let said = Stage::new().end(&["switch", "--from", &primary.url(), "--to", &replica.url()], 0);
    says(&said, &["without a full copy"]);
}

/// As [`assert_same_content`]; says what differs.
fn assert_same(primary: &Server, replica: &Server) {
    let compare = || catch_unwind(AssertUnwindSafe(|| assert_same_content(primary, replica)));
    let mut compared = compare();
    // A key that expires while it is read, or a moment apart (Redis 6.2 writes times that count from the command), is
    // gone when they are compared again.
    if compared.is_err() {
        std::thread::sleep(SHORT_LIVED);
        compared = compare();
    }
    if let Err(panic) = compared {
        let of = |server: &Server| Contents::of(&mut server.client().unwrap()).unwrap();
        eprintln!("primary / replica: {:#?}", differences_of(&of(primary), &of(replica), 20));
        resume_unwind(panic);
    }
}

fn both() -> Option<(Kind, Kind)> {
    Some((require::redis()?, require::valkey()?))
}

#[test]
#[ignore = "long: make test-all"]
fn valkey_becomes_redis_and_goes_back_without_another_copy() {
    let Some((redis, valkey)) = both() else { return };
    let (old, new) = (primary(valkey).start().unwrap(), primary(redis).start().unwrap());
    there_and_back(&old, &new);
}

#[test]
#[ignore = "long: make test-all"]
fn redis_becomes_valkey_and_goes_back_without_another_copy() {
    let Some((redis, valkey)) = both() else { return };
    let (old, new) = (primary(redis).start().unwrap(), primary(valkey).start().unwrap());
    there_and_back(&old, &new);
}

/// One command for the sync and the comparison, and one for each switch, as docs/how-to/migrate.md has them.
#[test]
fn one_command_migrates_and_another_one_switches_there_and_back() {
    let Some((redis, valkey)) = both() else { return };
    migrates_and_switches(redis, valkey);
}

#[test]
#[ignore = "long: make test-all"]
fn one_command_migrates_from_valkey_and_another_one_switches_there_and_back() {
    let Some((redis, valkey)) = both() else { return };
    migrates_and_switches(valkey, redis);
}

fn migrates_and_switches(from: Kind, to: Kind) {
    let stage = Stage::new();
    let (old, new) = (primary(from).start().unwrap(), primary(to).start().unwrap());
    let abilities = of_both(&old, &new);
    fill_with(&mut old.client().unwrap(), 3, abilities).unwrap();
    old.configure("timeout", "77").unwrap();
    old.client().unwrap().ok(&["ACL", "SETUSER", "of-the-old-one"]).unwrap();
    let writing = writer(&old, abilities);
    wait_for_writes(&writing);
    let (one, other) = (old.url(), new.url());
    let said = stage.end(&["migrate", "--dry-run", "--from", &one, "--to", &other], 0);
    says(&said, &["of-the-old-one", "timeout \"77\" and \"0\"", "nothing was touched"]);
    assert_eq!(new.fact("role").unwrap(), "master");
    let mut migrates = stage.start(None, &["migrate", "--log-json", "--from", &one, "--to", &other]);
    // The comparison of what is written meanwhile has no end on a busy machine.
    migrates.wait_for_line(r#""event":"handing_over""#, LONG).unwrap();
    writing.stop().unwrap();
    says(&ends(&mut migrates, 0), &["is an exact replica of", "next: remora switch --from"]);
    // Again: there is nothing to copy.
    says(&stage.end(&["migrate", "--from", &one, "--to", &other], 0), &["no sync is needed", "exact replica"]);
    let copies = syncs(&old).0;
    stage.end(&["switch", "--from", &one, "--to", &other], 0);
    let writing = writer(&new, abilities);
    wait_for_writes(&writing);
    writing.stop().unwrap();
    stage.end(&["switch", "--from", &other, "--to", &one], 0);
    assert_same(&old, &new);
    assert_eq!((syncs(&old).0, syncs(&new).0), (copies, 0));
}

#[test]
#[ignore = "long: make test-all"]
fn a_migration_reads_from_a_source_that_runs_already() {
    let Some((redis, valkey)) = both() else { return };
    let (old, new) = (primary(redis).start().unwrap(), primary(valkey).start().unwrap());
    fill_with(&mut old.client().unwrap(), 5, of_both(&old, &new)).unwrap();
    let source = Source::start(&old, &[]);
    let (address, token) = (source.address.to_string(), source.token().display().to_string());
    let ends = ["--from", &old.url(), "--to", &new.url()].map(String::from);
    let words = ["migrate", &ends[0], &ends[1], &ends[2], &ends[3], "--source", &address, "--token-file", &token];
    says(&Stage::new().end(&words, 0), &["is an exact replica of"]);
    assert_eq!(syncs(&old).0, 1);
    assert_same(&old, &new);
    source.stop();
}

#[test]
fn a_migration_that_is_refused_ends_with_the_agents_code_and_leaves_no_process() {
    let Some((redis, valkey)) = both() else { return };
    let stage = Stage::new();
    let (old, new) = (primary(valkey).start().unwrap(), primary(redis).start().unwrap());
    new.client().unwrap().ok(&["SET", "own", "data"]).unwrap();
    let said = stage.end(&["migrate", "--from", &old.url(), "--to", &new.url()], 3);
    says(&said, &["--replace", "the replica agent has failed"]);
    says(&stage.end(&["migrate", "--from", &old.url(), "--to", &old.url()], 3), &["the same server"]);
    // Killed, it leaves no source behind.
    let mut agent = stage.start(None, &["migrate", "--replace", "--from", &old.url(), "--to", &new.url()]);
    let connected = |server: &Server| server.client()?.text(&["CLIENT", "LIST"]).map(|list| list.lines().count());
    wait_until("the agents at work", LONG, || {
        let count = connected(&old)?;
        Ok(if count > 1 { Ok(()) } else { Err(format!("{count} connections")) })
    })
    .unwrap();
    agent.kill().unwrap();
    wait_until("the source to end", LONG, || {
        let count = connected(&old)?;
        Ok(if count == 1 { Ok(()) } else { Err(format!("{count} connections")) })
    })
    .unwrap();
}

#[test]
fn what_the_server_cannot_hold_is_refused_before_it_is_touched_or_left_out_if_asked() {
    let Some((redis, valkey)) = both() else { return };
    let (old, new) = (primary(valkey).start().unwrap(), primary(redis).start().unwrap());
    let client = &mut old.client().unwrap();
    client.ok(&["SET", "string", "value"]).unwrap();
    client.int(&["HSET", "hash", "field", "value", "other", "value"]).unwrap();
    let source = Source::start(&old, &[]);
    new.client().unwrap().ok(&["SET", "own", "data"]).unwrap();
    // Without the option, the versions alone are a reason.
    says(&ends(&mut source.replica(&new, &["--replace"]), 3), &["RDB version", "--convert"]);
    client.call(&["HPEXPIREAT", "hash", "4102444800000", "FIELDS", "1", "field"]).unwrap();
    for more in [&["--convert", "--replace"][..], &["--convert", "--replace", "--dry-run"]] {
        says(&ends(&mut source.replica(&new, more), 3), &["fields that expire", "1 hash"]);
    }
    // The command that made them is known to the primary's counters.
    let more = ["--convert", "--replace", "--leave-out", "field-expiry"];
    says(&ends(&mut source.replica(&new, &more), 3), &["HPEXPIREAT", "CONFIG RESETSTAT"]);
    assert_eq!(new.client().unwrap().bytes(&["GET", "own"]).unwrap(), Some(b"data".to_vec()));
    client.ok(&["CONFIG", "RESETSTAT"]).unwrap();
    says(&ends(&mut source.replica(&new, &more), 0), &["left out: a hash whose fields expire", "hash"]);
    let read = |name: &str| new.client().unwrap().list(&["HVALS", name]).unwrap().len();
    assert_eq!((read("hash"), new.client().unwrap().bytes(&["GET", "own"]).unwrap()), (2, None));
}

/// A key of a module's type is found in the middle of the snapshot only. The server loads from a file then.
#[test]
fn a_refusal_in_the_middle_of_the_snapshot_costs_the_server_nothing() {
    let Some((redis, valkey)) = both() else { return };
    let stage = Stage::new();
    let old = primary(valkey).config("loadmodule", built_module(&stage, "typed")).start().unwrap();
    let client = &mut old.client().unwrap();
    client.ok(&["SET", "string", "value"]).unwrap();
    client.ok(&["TYPED.SET", "typed", "1"]).unwrap();
    let new = primary(redis).start().unwrap();
    new.client().unwrap().ok(&["SET", "own", "data"]).unwrap();
    let source = Source::start(&old, &[]);
    says(
        &ends(&mut source.replica(&new, &["--convert", "--replace"]), 3),
        &["module type", "typed", "--leave-out module-keys"],
    );
    let read = |name: &str| new.client().unwrap().bytes(&["GET", name]).unwrap();
    assert_eq!((read("own"), read("string")), (Some(b"data".to_vec()), None));
    assert_eq!(new.fact("role").unwrap(), "master");
    let more = ["--convert", "--replace", "--leave-out", "module-keys"];
    // It is no exact replica then, and the sync says so.
    let said = ends(&mut source.replica(&new, &more), 6);
    says(
        &said,
        &["left out: a value of the module type", "not an exact replica", "the primary holds 2 keys", "and it 1"],
    );
    assert_eq!((read("own"), read("string")), (None, Some(b"value".to_vec())));
}

#[test]
fn a_command_that_the_server_does_not_know_ends_the_sync_before_it() {
    let Some((redis, valkey)) = both() else { return };
    for words in
        [&["SET", "conditional", "new", "IFEQ", "old"][..], &["HSETEX", "hash", "EX", "100", "FIELDS", "1", "f", "v"]]
    {
        let (old, new) = (primary(valkey).start().unwrap(), primary(redis).start().unwrap());
        let client = &mut old.client().unwrap();
        client.ok(&["SET", "conditional", "old"]).unwrap();
        let source = Source::start(&old, &[]);
        let mut agent = source.replica(&new, &["--convert", "--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        client.ok(&["SET", "before", "it"]).unwrap();
        client.call(words).unwrap();
        client.ok(&["SET", "after", "it"]).unwrap();
        says(&ends(&mut agent, 3), &[words[0], "which the server does not know", "offset"]);
        let read = |name: &str| new.client().unwrap().bytes(&["GET", name]).unwrap();
        assert_eq!((read("before"), read("after")), (Some(b"it".to_vec()), None), "{words:?}");
        assert_eq!(new.fact("role").unwrap(), "master", "it is detached");
        assert_eq!(number(&new, "unexpected_error_replies"), 0);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_older_redis_follows_a_newer_valkey_over_tcp_and_from_a_state_directory() {
    let Some((redis, valkey)) = both() else { return };
    let old = primary(valkey).config("repl-backlog-size", BACKLOG).start().unwrap();
    let plain = [Server::builder(redis).start().unwrap(), Server::builder(redis).start().unwrap()];
    let abilities = of_both(&old, &plain[0]);
    fill_with(&mut old.client().unwrap(), 11, abilities).unwrap();
    let source = Source::start(&old, &[]);
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state").display().to_string();
    let mut agents = [
        source.replica(&plain[0], &["--convert", "--transport", "tcp"]),
        source.replica(&plain[1], &["--convert", "--state-dir", &state]),
    ];
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    for replica in &plain {
        replica.wait_for_link(LONG).unwrap();
        assert_same(&old, replica);
    }
    assert_eq!(syncs(&old).0, 1, "one snapshot for both");
}

mod by_command {
    use std::collections::BTreeMap;
    use std::fmt::Write as _;

    use remora_lab::server::{Program, project_root};

    use super::*;
    use crate::fleet::versions::{builder, programs};

    /// Where the table is written. It is kept as COMPAT.md.
    const TABLE: &str = "target/COMPAT.md";

    /// What stands above it.
    const HEAD: &str = "\
# Which server becomes which

Written by `make test-matrix`, which plays each pair that this machine has servers for. Each cell is one run: the server of the row is filled with all types and encodings that both know, and the
tests' random writer (`dev/lab/src/workload/`) writes to it, as far as both know its commands. The server of the column becomes its replica by `remora replica --convert`, follows it by its own replication, and takes its place by `remora
switch`. It is written to, and the first one takes its place back. After each step all data of both are compared by `remora verify`, and no server may have served a full copy but the one for the
source, nor have failed to execute a command.

**yes**: all of that. What the server of a column cannot hold at all is refused before anything is changed: [docs/how-to/migrate.md](docs/how-to/migrate.md#what-is-refused).

";

    /// A family and the first two numbers of a version.
    fn release(program: &Program) -> String {
        let [major, minor, _] = program.version();
        format!("{} {major}.{minor}", program.family())
    }

    fn dotted(program: &Program) -> String {
        program.version().map(|number| number.to_string()).join(".")
    }

    #[test]
    #[ignore = "a quarter of an hour for a dozen of releases: make test-matrix"]
    fn every_release_becomes_every_other_and_goes_back() {
        // The newest of each release.
        let releases: BTreeMap<String, Program> =
            programs().into_iter().map(|program| (release(&program), program)).collect();
        let names: Vec<&String> = releases.keys().collect();
        let columns = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" | ");
        let versions = releases.values().map(|program| format!("{} {}", program.family(), dotted(program)));
        let versions = versions.collect::<Vec<_>>().join(", ");
        let mut table =
            format!("{HEAD}Servers: {versions}.\n\n| from \\ to | {columns} |\n|---|{}\n", "---|".repeat(names.len()));
        let mut bad = Vec::new();
        for (from, old) in &releases {
            let _ = write!(table, "| {from} |");
            for (to, new) in &releases {
                if from == to {
                    table.push_str(" |");
                    continue;
                }
                let played = catch_unwind(AssertUnwindSafe(|| {
                    there_and_back(&builder(old).start().unwrap(), &builder(new).start().unwrap());
                }));
                println!("{from} to {to} and back: {}", if played.is_ok() { "exact" } else { "NOT exact" });
                table.push_str(if played.is_ok() { " yes |" } else { " **no** |" });
                if played.is_err() {
                    bad.push(format!("{from} to {to}"));
                }
            }
            table.push('\n');
        }
        let path = project_root().join(TABLE);
        std::fs::write(&path, &table).unwrap();
        println!("{table}\nwritten to {}", path.display());
        assert!(bad.is_empty(), "{bad:?}");
    }
}
