//! `remora snapshot mount`: a snapshot as a file that is copied while it arrives, checked, and loaded by another server.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::workload::fill_every_type;
use remora_lab::{Agent, Kind, Server, require};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::another_data_set::{ANOTHER, foreign, replaced};
use crate::kit::{
    Directory, LONG, Source, Stage, at_once, ends, fill, kinds_and_module, number, primary, says, with_or_without,
};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 16;

/// A source that takes four seconds for it.
const SLOWLY: [&str; 3] = ["--no-shm", "--upload-limit", "4MiB"];

/// A source that takes minutes for it.
const NEVER: [&str; 3] = ["--no-shm", "--upload-limit", "64KiB"];

struct Scene {
    stage: Stage,
    primary: Server,
    source: Source,
    /// Where the bytes are kept.
    spool: String,
}

impl Scene {
    fn new(primary: Server, options: &[&str]) -> Scene {
        let stage = Stage::new();
        let source = stage.source(&primary.url(), options);
        let spool = stage.path("spool");
        fs::create_dir(&spool).unwrap();
        Scene { stage, primary, source, spool }
    }

    /// Starts the command, and waits until the file is there.
    fn mount(&self, more: &[&str]) -> (Agent, Directory) {
        let directory = Directory::new(self.stage.path("mnt"));
        let (source, token) = (self.source.address.to_string(), self.source.token().display().to_string());
        let args = ["snapshot", "mount", "--source", &source, "--token-file", &token, "--spool", &self.spool];
        let mut mounted = self.stage.start(None, &[&args, &[directory.path()][..], more].concat());
        mounted.wait_for_event("snapshot_mounted", LONG).unwrap();
        (mounted, directory)
    }

    /// Nothing is left where the bytes were kept.
    fn assert_nothing_left(&self) {
        assert_eq!(fs::read_dir(&self.spool).unwrap().count(), 0);
    }
}

/// The server's own check of an RDB file.
fn assert_sound(kind: Kind, file: &Path) {
    let name = if kind == Kind::Redis7 { "redis-check-rdb" } else { "valkey-check-rdb" };
    let mut check = Command::new(kind.binary().unwrap());
    let checked = check.arg0(name).arg(file).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success() && said.contains("RDB looks OK"), "{}\n{said}", checked.status);
}

#[test]
#[ignore = "long: make test-all"]
fn a_snapshot_is_copied_while_it_arrives_checked_and_loaded_by_another_server() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    at_once(kinds_and_module(), |(kind, module)| {
        let server = with_or_without(primary(kind), module);
        fill(&server, MEBIBYTES, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let scene = Scene::new(server, &SLOWLY);
        let (mut mounted, directory) = scene.mount(&[]);
        let file = directory.at("dump.rdb");
        let early = fs::metadata(&file).unwrap().len();
        assert!(early < (MEBIBYTES << 20) as u64, "{early} bytes are there already");
        assert_eq!(early % 4096, 0);
        let clone = scene.stage.path("clone");
        fs::create_dir(&clone).unwrap();
        let copied = Command::new("cp").arg(&file).arg(format!("{clone}/dump.rdb")).status().unwrap();
        assert!(copied.success(), "{kind}: {}", mounted.output());
        mounted.wait_for_event("snapshot_arrived", LONG).unwrap();
        let bytes = fs::read(&file).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().len(), bytes.len() as u64);
        assert!(bytes.len() > MEBIBYTES << 20);
        assert!(fs::read(format!("{clone}/dump.rdb")).unwrap() == bytes, "{kind}");
        assert_sound(kind, &file);
        let (names, error) =
            (fs::read_dir(&directory.0).unwrap().count(), fs::write(directory.at("x"), "").unwrap_err());
        assert_eq!((names, error.raw_os_error()), (1, Some(Errno::ROFS.raw_os_error())));

        let loaded = Server::builder(kind).config("dir", &clone).config("save", "\"\"").start().unwrap();
        assert_eq!(loaded.digest().unwrap(), scene.primary.digest().unwrap(), "{kind}, module: {module}");
        assert_eq!(number(&scene.primary, "sync_full"), 1);
        scene.source.wait_for_status("nothing to read", |status| status["replicas"].as_array().unwrap().is_empty());

        // What has arrived needs the source no more.
        let Scene { source, spool, .. } = scene;
        source.stop();
        assert!(fs::read(&file).unwrap() == bytes);
        directory.unmount();
        says(&ends(&mut mounted, 0), &["unmounted"]);
        assert_eq!(fs::read_dir(&spool).unwrap().count(), 0);
    });
}

#[test]
fn shared_memory_and_a_snapshot_that_the_source_has_already() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, MEBIBYTES, 2);
        let mut scene = Scene::new(server, &["--eager"]);
        scene.source.wait_for_snapshot();
        let mut copies = Vec::new();
        for options in [&["--no-ring"][..], &["--transport", "tcp"]] {
            let (mut mounted, directory) = scene.mount(options);
            copies.push(fs::read(directory.at("dump.rdb")).unwrap());
            assert_sound(kind, &directory.at("dump.rdb"));
            mounted.signal(Signal::TERM).unwrap();
            says(&ends(&mut mounted, 0), &["unmounting"]);
            assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0, "an ordinary directory again");
        }
        assert!(copies[0] == copies[1] && copies[0].len() > MEBIBYTES << 20);
        assert_eq!(number(&scene.primary, "sync_full"), 1, "both have the snapshot that was there");
        scene.assert_nothing_left();
    }
}

/// A process that reads the file to its end.
fn reader(file: &Path) -> Child {
    Command::new("cat").arg(file).stdout(std::process::Stdio::null()).spawn().unwrap()
}

#[test]
fn what_does_not_arrive_is_an_error_and_never_the_end_and_a_waiting_reader_can_be_killed() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let server = primary(Kind::Redis7).start().unwrap();
    fill(&server, MEBIBYTES, 3);
    let mut scene = Scene::new(server, &NEVER);
    let (mut mounted, directory) = scene.mount(&["--retry-for", "1s"]);
    let file = directory.at("dump.rdb");
    let (mut killed, mut waits) = (reader(&file), reader(&file));
    std::thread::sleep(Duration::from_millis(300));
    assert!(killed.try_wait().unwrap().is_none() && waits.try_wait().unwrap().is_none(), "they wait for bytes");
    let began = Instant::now();
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    scene.source.agent.kill().unwrap();
    assert_eq!(waits.wait().unwrap().code(), Some(1), "an error, after {:?}", began.elapsed());
    says(&ends(&mut mounted, 5), &["--retry-for"]);
    assert!(!file.exists());
    scene.assert_nothing_left();
}

#[test]
fn another_snapshot_is_another_file_and_no_byte_of_it_is_in_the_one_before() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, MEBIBYTES, 4);
        let mut scene = Scene::new(server, &NEVER);
        let (mut mounted, directory) = scene.mount(&[]);
        let file = directory.at("dump.rdb");
        let before = File::open(&file).unwrap();
        let mut begin = [0; 1000];
        before.read_exact_at(&mut begin, 0).unwrap();
        scene.primary.client().unwrap().ok(&["SET", "one", "more"]).unwrap();
        scene.source.restart(&scene.primary); // with all of its upload
        mounted.wait_for_event("snapshot_arrived", LONG).unwrap();

        let rest = (&before).read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(rest.raw_os_error(), Some(Errno::IO.raw_os_error()));
        let mut again = [0; 1000];
        before.read_exact_at(&mut again, 0).unwrap();
        assert!(begin == again, "what had arrived is still there");
        drop(before);
        let whole = fs::read(&file).unwrap();
        assert!(whole.len() > MEBIBYTES << 20);
        assert_sound(kind, &file);
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
        scene.assert_nothing_left();
    }
}

#[test]
fn stopped_while_it_arrives_it_leaves_nothing_behind_and_the_source_knows() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let server = primary(Kind::Valkey9).start().unwrap();
    fill(&server, MEBIBYTES, 5);
    let scene = Scene::new(server, &NEVER);
    let (mut mounted, directory) = scene.mount(&["--name", "the backup"]);
    let mut waits = reader(&directory.at("dump.rdb"));
    scene.source.wait_for_status("its name", |status| status["replicas"][0]["name"] == "the backup");
    mounted.signal(Signal::INT).unwrap();
    assert_eq!(waits.wait().unwrap().code(), Some(1));
    says(&ends(&mut mounted, 0), &["SIGINT"]);
    wait_until("the source to forget it", Duration::from_secs(2), || {
        let status = scene.source.status();
        let is_gone = status["replicas"].as_array().unwrap().is_empty();
        Ok(if is_gone { Ok(()) } else { Err(status.to_string()) })
    })
    .unwrap();
    assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0);
    scene.assert_nothing_left();
}

#[test]
fn a_folder_without_room_ends_it_with_a_sentence() {
    let Some(()) = require::root() else { return };
    let server = primary(Kind::Redis7).start().unwrap();
    let scene = Scene::new(server, &[]);
    let (source, token) = (scene.source.address.to_string(), scene.source.token().display().to_string());
    let (missing, directory) = (scene.stage.path("missing"), scene.stage.path("spool"));
    let args = ["snapshot", "mount", "--source", &source, "--token-file", &token, "--retry-for", "0s"];
    says(&scene.stage.end(&[&args[..], &["--spool", &missing, &directory]].concat(), 8), &[&missing, "--spool"]);
}

#[test]
fn a_source_that_is_replaced_by_that_of_another_data_set_gives_the_file_nothing() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, MEBIBYTES, 6);
        let scene = Scene::new(server, &NEVER);
        let (mut mounted, directory) = scene.mount(&[]);
        let Scene { stage, primary, source, spool } = scene;
        let other = foreign(kind);
        let source = replaced(&stage, source, &other, &[]);
        mounted.wait_for_line(ANOTHER, LONG).unwrap();
        assert_eq!(number(&other, "sync_full"), 0, "{kind}: the foreign primary has forked");
        let source = replaced(&stage, source, &primary, &[]); // with all of its upload
        mounted.wait_for_event("snapshot_arrived", LONG).unwrap();
        let file = directory.at("dump.rdb");
        assert!(fs::metadata(&file).unwrap().len() > (MEBIBYTES << 20) as u64);
        assert_sound(kind, &file);
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
        Scene { stage, primary, source, spool }.assert_nothing_left();
    }
}
