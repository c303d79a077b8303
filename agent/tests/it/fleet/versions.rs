//! Versions: of servers, on each of which the main job is done (`make test-matrix`), and of agents, which either work
//! together or say that they do not, before anything is touched.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use remora_agent::conversation::Token;
use remora_lab::server::{Builder, Program, project_root};
use remora_lab::{Agent, Server, assert_same_data, fill_every_type, require};
use remora_messenger::handshake::{Handshake, HandshakeError, Opening, Versions};
use remora_protocol::{NEWEST_VERSION, OLDEST_VERSION};

use crate::kit::{
    BACKLOG, LONG, Source, Stage, assert_untouched, ends, fill_keys, load, primary, says, steady_writer, syncs,
};
use crate::sync::exact::assert_same_content;
use crate::sync::exact::assert_table_knows;

// ---- servers -------------------------------------------------------------------------------------------------------

/// Names programs, and folders with programs in them, with colons between.
const SERVERS: &str = "REMORA_SERVERS";

/// Where the set-up puts servers of several versions.
const IN_PROJECT: &str = ".cache/servers/versions";

/// Where the table is written.
const TABLE: &str = "target/versions.md";

/// Commands that the writer must send before the replicas are made, and again before they are compared.
const WRITES_MEANWHILE: u64 = 2_000;

/// The first version of Redis whose modules can do what ours needs.
const MODULE_FROM: [u32; 3] = [7, 0, 0];

pub(crate) fn builder(program: &Program) -> Builder {
    let builder = Server::builder(program.kind()).program(program);
    builder.config("repl-diskless-sync-delay", 0).config("repl-backlog-size", BACKLOG).config("rdbcompression", "no")
}

fn start(program: &Program, module: bool) -> Server {
    let builder = builder(program);
    if module { builder.module("").unwrap().start() } else { builder.start() }.unwrap()
}

/// The main job: two replicas out of one snapshot, one over shared memory and one over TCP, of a primary with every type
/// that is written to meanwhile. They are handed over, and are exact.
fn two_exact_replicas(of: &Program, on: &Program, module: bool) {
    let (primary, replicas) = (start(of, module), [start(on, module), start(on, module)]);
    fill_every_type(&mut primary.client().unwrap(), 7).unwrap();
    load(&primary, 30, 300_000);
    let before = syncs(&primary);
    let mut source = Source::start(&primary, &["--memory", "256MiB", "--module-capture", "walk"]);
    let writer = steady_writer(&primary);
    writer.wait_for(WRITES_MEANWHILE);
    let mut agents =
        [source.replica(&replicas[0], &["--transport", "shm"]), source.replica(&replicas[1], &["--transport", "tcp"])];
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    writer.wait_for(WRITES_MEANWHILE);
    writer.stop().unwrap();
    for replica in &replicas {
        if of.version() == on.version() {
            assert_same_data(&primary, replica);
        } else {
            assert_same_content(&primary, replica);
        }
    }
    if module {
        let said = source.agent.wait_for_event("snapshot_completed", LONG).unwrap();
        says(&said, &["method=the module"]);
        says(&agents[0].output(), &["out of shared memory"]);
    }
    let after = syncs(&primary);
    let (copies, continued) = (after.0 - before.0, after.1 - before.1);
    // Before 7.0 the writer's expiries count from their commands: the replica that joins second may need its own copy.
    let is_enough = if of.version() < [7, 0, 0] { (1..=2).contains(&copies) } else { copies == 1 };
    assert!(is_enough && continued == 2, "{copies} copies, {continued} continuations for two replicas");
    one_that_joins_late(&primary, of, on, &source, module);
}

/// How much later than the writes before it the late replica joins: more than the tolerance with which expiries are
/// compared where a server does not tell them exactly.
const LATE: Duration = Duration::from_secs(4);

/// A replica that joins some seconds after expiries of all forms were set. Redis before 7.0 writes them into its stream
/// as they were given, so that another snapshot is taken.
fn one_that_joins_late(primary: &Server, of: &Program, on: &Program, source: &Source, module: bool) {
    let mut client = primary.client().unwrap();
    let payload = {
        client.ok(&["SET", "late:1", "1", "EX", "600"]).unwrap();
        client.bytes(&["DUMP", "late:1"]).unwrap().unwrap()
    };
    client.call(&[&b"RESTORE"[..], b"late:2", b"600000", &payload]).unwrap();
    for command in [
        "SETEX late:3 600 1",
        "PSETEX late:4 600000 1",
        "SET late:5 1",
        "EXPIRE late:5 600",
        "SET late:6 1",
        "GETEX late:6 EX 600",
        "EVAL redis.call('SET','late:7','1','EX','600') 0",
        "MULTI",
        "SET late:8 1 PX 600000",
        "PEXPIRE late:5 500000",
        "EXEC",
    ] {
        client.call(&command.split(' ').collect::<Vec<_>>()).unwrap();
    }
    std::thread::sleep(LATE);
    let (before, late) = (syncs(primary), start(on, module));
    source.replicate(&late, &[]);
    if of.version() == on.version() {
        assert_same_data(primary, &late);
    } else {
        assert_same_content(primary, &late);
    }
    let counts_from_now = of.version() < [7, 0, 0];
    assert_eq!(syncs(primary).0 - before.0, u64::from(counts_from_now), "a snapshot for the late replica");
}

/// A cell of the table.
enum Cell {
    Good,
    /// Why it is not offered.
    Absent(&'static str),
    Bad(String),
}

impl Cell {
    fn of(job: impl FnOnce()) -> Cell {
        match catch_unwind(AssertUnwindSafe(job)) {
            Ok(()) => Cell::Good,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                Cell::Bad(text.unwrap_or_else(|| "a panic without a text".into()))
            }
        }
    }

    fn text(&self) -> &str {
        match self {
            Cell::Good => "yes",
            Cell::Absent(why) => why,
            Cell::Bad(_) => "**NO**",
        }
    }
}

/// The server programs to try: those of the variable, or else those of the set-up.
pub(crate) fn programs() -> Vec<Program> {
    let named: Vec<PathBuf> = match std::env::var_os(SERVERS) {
        Some(list) => std::env::split_paths(&list).collect(),
        None => {
            let kinds = require::kinds().into_iter().map(|kind| kind.binary().unwrap());
            [project_root().join(IN_PROJECT)].into_iter().filter(|path| path.is_dir()).chain(kinds).collect()
        }
    };
    let mut all: Vec<Program> = named.iter().flat_map(|path| Program::all(path).unwrap()).collect();
    all.sort_by_key(|program| (program.family().to_owned(), program.version()));
    all
}

/// Where a program is from, as a reader of the table knows it.
fn origin(program: &Program) -> String {
    let path = program.path();
    match path.parent().and_then(Path::file_name).filter(|_| path.starts_with(project_root().join(".cache/servers"))) {
        Some(folder) => folder.to_string_lossy().into_owned(),
        None => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
    }
}

/// Whether a program is linked statically: such a server crashes when it loads a module, any module. The name of the
/// dynamic loader is near the beginning of all others. (A script starts another program.)
fn is_static(program: &Program) -> bool {
    let mut beginning = vec![0; 64 << 10];
    let length = std::fs::File::open(program.path()).unwrap().read(&mut beginning).unwrap();
    let beginning = &beginning[..length];
    beginning.starts_with(b"\x7fELF")
        && !["ld-linux", "ld-musl"]
            .iter()
            .any(|name| beginning.windows(name.len()).any(|window| window == name.as_bytes()))
}

// ---- agents --------------------------------------------------------------------------------------------------------

/// The version before the oldest that this release speaks.
const BEFORE: Versions = Versions { oldest: OLDEST_VERSION - 1, newest: OLDEST_VERSION - 1 };

const OURS: Versions = Versions { oldest: OLDEST_VERSION, newest: NEWEST_VERSION };

fn opening() -> Opening {
    Opening { versions: BEFORE, features: 0, nonce: [7; 32] }
}

/// Plays one end of a handshake over a connection until it fails or the peer has closed.
fn play(mut handshake: Handshake<&Token>, mut stream: TcpStream) -> Option<HandshakeError> {
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut bytes = [0; 512];
    loop {
        stream.write_all(&handshake.take_output()).unwrap();
        let length = stream.read(&mut bytes).unwrap_or(0);
        if length == 0 {
            return None;
        }
        if let Err(error) = handshake.handle_input(&bytes[..length]) {
            // What follows an error may be a refusal.
            let _ = stream.write_all(&handshake.take_output());
            return Some(error);
        }
    }
}

#[test]
fn a_replica_of_the_version_before_is_refused_by_name_and_costs_the_primary_nothing() {
    let Some(kind) = require::valkey() else { return };
    let primary = primary(kind).start().unwrap();
    let source = Source::start(&primary, &[]);
    let token = Token::read_file(source.token()).unwrap();
    let old = Handshake::caller(vec![&token], opening(), Instant::now(), LONG);
    let refused = play(old, TcpStream::connect(source.address).unwrap());
    assert_eq!(refused, Some(HandshakeError::NoCommonVersion { theirs: OURS, ours: BEFORE }));
    assert_eq!(syncs(&primary), (0, 0));
    // A replica of this release is served as before.
    fill_keys(&primary, 100, "x");
    let replica = Server::start(kind).unwrap();
    source.replicate(&replica, &[]);
    assert_same_data(&primary, &replica);
}

#[test]
fn a_source_of_the_version_before_is_named_at_once_and_the_server_is_left_as_it_is() {
    let Some(kind) = require::valkey() else { return };
    let (stage, replica) = (Stage::new(), Server::start(kind).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let token = Token::read_file(&stage.token).unwrap();
    let mut agent = stage.replica(&replica.url(), address, &[]);
    let stream = listener.accept().unwrap().0;
    let seen = play(Handshake::called(vec![&token], opening(), 1, Instant::now(), LONG), stream);
    assert_eq!(seen, Some(HandshakeError::NoCommonVersion { theirs: OURS, ours: BEFORE }));
    let said = ends(&mut agent, 5);
    says(&said, &[&format!("speaks version {BEFORE} of the control protocol, this end {OURS}"), "upgrade the older"]);
    assert_untouched(&replica);
}

/// Names the command `remora` of another release.
const OTHER: &str = "REMORA_OTHER";

/// Starts the command of one release with these arguments.
fn run(program: &Path, stage: &Stage, args: &[&str]) -> Agent {
    let mut command = Command::new(program);
    command.args(args).env("XDG_STATE_HOME", stage.folder());
    Agent::run(command).unwrap()
}

mod by_command {
    use super::*;

    #[test]
    #[ignore = "minutes for each dozen of servers: make test-matrix"]
    fn the_main_job_is_done_on_every_server() {
        let programs = programs();
        assert!(!programs.is_empty(), "no server program: make setup, or name some by {SERVERS}");
        let mut table = String::from(
            "| server | folder | exact replicas | with the module | replicas on the newest |\n|---|---|---|---|---|\n",
        );
        let mut bad = Vec::new();
        for program in &programs {
            let began = Instant::now();
            if let Cell::Bad(why) = Cell::of(|| assert_table_knows(&start(program, false), program)) {
                bad.push(why);
            }
            let newest = programs.iter().rev().find(|other| other.family() == program.family()).unwrap();
            let offers_module = program.family() != "Redis" || program.version() >= MODULE_FROM;
            let cells = [
                Cell::of(|| two_exact_replicas(program, program, false)),
                match (offers_module, is_static(program)) {
                    (false, _) => Cell::Absent("not offered"),
                    (true, true) => Cell::Absent("loads no module"),
                    (true, false) => Cell::of(|| two_exact_replicas(program, program, true)),
                },
                match newest.version() > program.version() {
                    true => Cell::of(|| two_exact_replicas(program, newest, false)),
                    false => Cell::Absent("is the newest"),
                },
            ];
            let [same, module, newer] = cells.each_ref().map(Cell::text);
            let line = format!("| {program} | {} | {same} | {module} | {newer} |", origin(program));
            println!("{line} {:.0} s", began.elapsed().as_secs_f64());
            let _ = writeln!(table, "{line}");
            for cell in cells {
                if let Cell::Bad(why) = cell {
                    println!("{program}: {why}");
                    bad.push(format!("{program}: {why}"));
                }
            }
        }
        let path = project_root().join(TABLE);
        std::fs::write(&path, &table).unwrap();
        println!("{table}\nwritten to {}", path.display());
        assert!(bad.is_empty(), "{}", bad.join("\n"));
    }

    #[test]
    #[ignore = "needs the command of another release: make test-matrix OTHER=/path/to/remora"]
    fn agents_of_another_release_make_an_exact_replica_or_are_refused_before_anything_is_touched() {
        let other = PathBuf::from(std::env::var_os(OTHER).unwrap_or_else(|| panic!("{OTHER} names no program")));
        let this = PathBuf::from(env!("CARGO_BIN_EXE_remora"));
        let kind = require::valkey().unwrap();
        for (at_source, at_replica) in [(&this, &this), (&other, &this), (&this, &other)] {
            let stage = Stage::new();
            let (primary, replica) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
            fill_every_type(&mut primary.client().unwrap(), 7).unwrap();
            let (token, from, to) = (stage.token.display().to_string(), primary.url(), replica.url());
            let args = ["source", "--server", &from, "--listen", "127.0.0.1:0", "--token-file", &token];
            let mut source = run(at_source, &stage, &args);
            let ready = source.wait_for_line("listening=", LONG).unwrap();
            let address = ready.split_whitespace().find_map(|word| word.strip_prefix("listening=")).unwrap().to_owned();
            let args = ["replica", "--server", &to, "--source", &address, "--token-file", &token];
            let mut agent = run(at_replica, &stage, &args);
            let ended = agent.wait(LONG).unwrap();
            let pair = format!("source {}, replica {}", at_source.display(), at_replica.display());
            match ended.code() {
                Some(0) => {
                    assert_same_data(&primary, &replica);
                    println!("{pair}: an exact replica");
                }
                code => {
                    assert!(at_source != at_replica, "{pair}: {code:?}\n{}", agent.output());
                    says(&agent.output(), &["of the control protocol", "upgrade the older of the two"]);
                    assert_untouched(&replica);
                    println!("{pair}: refused before anything was touched ({code:?})");
                }
            }
        }
    }
}
