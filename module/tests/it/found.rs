//! Layouts that were found: builds that no list has, tried, verified, refused and marked.
//!
//! Such a build is a copy of the lab's server with some bytes behind its end: its SHA-256 is of no list, and its build
//! id is the same.

use std::cell::OnceCell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use remora_lab::server::{Builder, Program, wait_until};
use remora_lab::{Kind, Server, require};
use remora_layout::build::Names;
use remora_layout::search::{Layout, Wanted, find};
use remora_layout::{Build, folder};
use remora_redis::rdb::reference::Word;

use crate::fast::{answer, load_plainly, magic, mixed, offered, records, runs};
use crate::fields;
use crate::library;
use crate::wait_for_link;
use crate::{LONG, Primary, Shown};

/// A server's program that is in no list, and a folder for layouts.
struct Unlisted {
    kind: Kind,
    folder: tempfile::TempDir,
    program: PathBuf,
    found: OnceCell<Layout>,
}

impl Unlisted {
    fn of(kind: Kind) -> Unlisted {
        let folder = tempfile::tempdir().unwrap();
        let running = Server::start(kind).unwrap();
        // What runs: a script may have started it.
        let exe = PathBuf::from(format!("/proc/{}/exe", running.pid()));
        let name = kind.binary().unwrap().file_name().unwrap().to_owned();
        let mut bytes = fs::read(exe).unwrap();
        bytes.extend_from_slice(b"a build that no list has");
        let program = folder.path().join(name);
        fs::write(&program, bytes).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Unlisted { kind, folder, program, found: OnceCell::new() }
    }

    fn layouts(&self) -> PathBuf {
        self.folder.path().join("layouts")
    }

    fn search(&self) -> &Layout {
        let stop = AtomicBool::new(false);
        let wanted = Wanted { program: &self.program, called: None, debug_file: None, stop: &stop };
        self.found.get_or_init(|| find(&wanted).unwrap())
    }

    /// Finds the layout, and keeps it as `change` makes it.
    fn keep(&self, change: impl Fn(&str) -> String) -> Build {
        let found = self.search();
        folder::keep(&self.layouts(), &found.build, &change(&found.text)).unwrap();
        found.build.clone()
    }

    fn builder(&self) -> Builder {
        let way = if self.kind == Kind::Redis7 { "on-empty-db" } else { "flush-before-load" };
        let words = format!("{} layouts {}", library().display(), self.layouts().display());
        let program = Program::at(&self.program).unwrap();
        Server::builder(self.kind)
            .program(&program)
            .config("loadmodule", words)
            .config("repl-diskless-load", way)
            .config("enable-debug-command", "yes")
    }

    fn start(&self) -> Server {
        self.builder().start().unwrap()
    }
}

fn state(server: &Server) -> (String, String) {
    (server.fact("remora_fast_keys").unwrap(), server.fact("remora_fast_keys_layout").unwrap())
}

/// The server loads the records in the fast way, in a load that it wants to verify or not. `spoil`: words before its
/// look. Returns whether it took all of it.
fn load(server: &Server, all: &[u8], verify: bool, spoil: &[Word<'_>]) -> Result<(), String> {
    let shown = Shown::of(all);
    let mut primary = Primary::of(server);
    let reply = shown.offered_to(server, &[]).unwrap();
    assert_eq!(answer(&reply, "fast_keys"), "yes", "{}", server.log());
    assert_eq!(answer(&reply, "verify"), if verify { "yes" } else { "no" });
    primary.send(&magic(server.kind()));
    primary.send(&shown.hello());
    shown.wait_for(1);
    let mut done = 1;
    for words in runs(0, all, 0).chunks(3) {
        primary.send(&fields(words));
        done += 1;
    }
    shown.wait_for(done);
    if !spoil.is_empty() {
        primary.send(&fields(spoil));
        done += 1;
        shown.wait_for(done);
    }
    primary.send(&fields(&[Word::Verify]));
    wait_until("the module to look", LONG, || {
        let over = shown.page.done() > done || shown.page.refusal().is_some();
        Ok(if over { Ok(()) } else { Err(format!("{} of {done}", shown.page.done())) })
    })
    .unwrap();
    if let Some(why) = shown.page.refusal() {
        primary.wait_for_the_end();
        return Err(why);
    }
    primary.end();
    wait_for_link(server, "up");
    Ok(())
}

#[test]
fn a_found_layout_is_tried_and_its_first_load_is_verified() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let server = unlisted.start();
        let (why, from) = state(&server);
        assert!(why.contains("this build of the server is not known") && why.contains("remora module layout"), "{why}");
        assert_eq!(from, "none");
        // A server that runs finds the layout at its next load.
        let build = unlisted.keep(str::to_owned);
        assert_eq!(folder::marked(&unlisted.layouts(), &build), None);
        let all = mixed(kind, 11, 4000);
        load(&server, &all, true, &[]).unwrap();
        assert_eq!(state(&server), ("yes".into(), "found, verified".into()), "{}", server.log());
        let own = Server::builder(kind).config("enable-debug-command", "yes").start().unwrap();
        load_plainly(&own, &[(0, all)]);
        assert_eq!(server.digest().unwrap(), own.digest().unwrap(), "{kind}");
        server.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        server.client().unwrap().ok(&["FLUSHALL"]).unwrap();
        load(&server, &records(12, 500), false, &[]).unwrap();
    }
}

/// A program that does not show its functions: the layout says where they are.
#[test]
fn functions_are_used_where_the_layout_says_they_are() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let program = remora_layout::Program::read(&unlisted.program).unwrap();
        let names = Names::of(&program, None).unwrap();
        let family = unlisted.search().family;
        let places: Vec<(&str, u64)> =
            family.functions().into_iter().map(|name| (name, names.offset(name).unwrap())).collect();
        let lines: String = places.iter().map(|(name, offset)| format!("at.{name} = {offset}\n")).collect();
        unlisted.keep(|text| format!("{text}{lines}"));
        let server = unlisted.start();
        load(&server, &mixed(kind, 13, 500), true, &[]).unwrap();
        assert_eq!(state(&server).0, "yes");
        // A function in the place of another: refused by its name, whether the child crashes or not.
        for (name, other) in
            [("sdsnewlen", "sdsfree"), ("dbAddRDBLoad", "setExpire"), ("rdbLoadObject", "createStringObject")]
        {
            let offset = |wanted: &str| places.iter().find(|(name, _)| *name == wanted).unwrap().1;
            let (from, to) = (format!("at.{name} = {}\n", offset(name)), format!("at.{name} = {}\n", offset(other)));
            unlisted.keep(|text| format!("{text}{}", lines.replace(&from, &to)));
            let server = unlisted.start();
            let (reply, shown) = offered(&server);
            assert_eq!(reply, shown);
            assert!(shown.starts_with("no: a trial in a forked child failed"), "{kind} {name}: {shown}");
            assert!(shown.contains(name) && shown.contains("build-id-"), "{kind} {name}: {shown}");
            assert_eq!(server.client().unwrap().text(&["PING"]).unwrap(), "PONG");
        }
        // A place that is no code.
        unlisted.keep(|text| format!("{text}at.sdsnewlen = 1\n"));
        assert!(state(&unlisted.start()).0.contains("the layout has no place for sdsnewlen"));
    }
}

#[test]
fn a_wrong_layout_is_refused_by_the_trial_and_the_server_lives_on() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let found = unlisted.search();
        for name in ["server.dbnum", "server.keys_loaded", "server.db", "db.keys", "table.used", "table.exponents"] {
            let line = found.text.lines().find(|line| line.starts_with(&format!("{name} = "))).unwrap();
            let offset: usize = line.rsplit_once(' ').unwrap().1.parse().unwrap();
            let wrong = found.text.replace(&format!("{line}\n"), &format!("{name} = {}\n", offset + 16));
            folder::keep(&unlisted.layouts(), &found.build, &wrong).unwrap();
            let server = unlisted.start();
            let (reply, shown) = offered(&server);
            assert_eq!(reply, shown);
            assert!(shown.starts_with("no: a trial in a forked child failed"), "{kind} {name}: {shown}");
            assert_eq!(server.client().unwrap().text(&["PING"]).unwrap(), "PONG");
        }
    }
}

#[test]
fn a_file_that_others_can_write_is_refused_until_that_is_mended() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let build = unlisted.keep(str::to_owned);
        let file = folder::file(&unlisted.layouts(), &build);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        let server = unlisted.start();
        let (why, from) = state(&server);
        assert!(why.contains("others may write it (mode 0666)") && from == "none", "{why}");
        assert!(server.log().contains("others may write it"), "{}", server.log());
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(offered(&server), ("yes".into(), "yes".into()));
        // Of another build, or version.
        let text = fs::read_to_string(&file).unwrap();
        for (line, why) in [("build = ", "the layout is of the build"), ("version = ", "the layout is of version")] {
            fs::write(&file, text.replace(line, &format!("{line}x"))).unwrap();
            assert!(state(&unlisted.start()).0.contains(why));
        }
    }
}

/// What was loaded is not what the module finds: the load fails, and no process tries that build again.
#[test]
fn a_load_that_is_different_marks_its_build() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let build = unlisted.keep(str::to_owned);
        let server = unlisted.start();
        let all = b"\x00\x01a\x01b\x00\x01c\x01d";
        // Another value for a key of a run.
        let spoil = [
            Word::Text { database: 0, key: b"a", length: 1, expires_ms: None, usage: None },
            Word::Piece { offset: 9, length: 1 },
        ];
        let why = load(&server, all, true, &spoil).unwrap_err();
        assert!(why.contains("the key \"a\" has another value"), "{why}");
        let (shown, _) = state(&server);
        assert!(shown.starts_with("no: a load in this build was not as it should be"), "{shown}");
        let mark = folder::marked(&unlisted.layouts(), &build).unwrap();
        assert!(mark.contains("the key \"a\" has another value"), "{mark}");
        assert_eq!(server.client().unwrap().text(&["PING"]).unwrap(), "PONG");
        // Another process, and one that ran before the mark was made.
        let running = unlisted.start();
        assert!(state(&running).0.contains("is marked as one that failed"), "{}", state(&running).0);
        unlisted.keep(str::to_owned);
        assert_eq!(offered(&running), ("yes".into(), "yes".into()));
        folder::mark(&unlisted.layouts(), &build, "another server has found it wrong").unwrap();
        assert!(offered(&running).0.contains("another server has found it wrong"));
    }
}
