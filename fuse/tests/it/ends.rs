//! How sessions end, and that no process is left waiting.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remora_fuse::answer::{Answer, Created, Done, Entry, KnownAttributes, Later, Reply};
use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::request::{Close, Create, GetAttributes, Lookup};
use remora_fuse::{EndError, Errno, FileSystem, MountOptions, Session, SessionOptions, StartError, Waits};
use remora_lab::{require, scratch};

use crate::by_each_transport;
use crate::options;
use crate::until;
use crate::{Elsewhere, Mounted, VALID};

fn memory() -> Arc<MemoryFileSystem> {
    Arc::new(MemoryFileSystem::new(VALID))
}

/// By hand. Other tests start processes, which have their files open for a moment.
fn unmount(at: &Path) {
    until("it is unmounted", || Command::new("umount").arg(at).stderr(Stdio::null()).status().unwrap().success());
}

fn is_mounted(at: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == at.to_str())
}

#[test]
fn a_dropped_session_leaves_an_ordinary_directory() {
    by_each_transport(|options| {
        let mounted = Mounted::with(memory(), options);
        fs::write(mounted.at().join("file"), "content").unwrap();
        let Mounted { folder, session } = mounted;
        assert!(is_mounted(folder.path()) && !session.wait(Duration::ZERO));
        drop(session);
        assert!(!is_mounted(folder.path()));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_file_system_in_use_is_written_back_and_taken_away() {
    by_each_transport(|options| {
        let files = memory();
        // The kernel begins by itself to write back, but cannot be done when the session ends.
        let slow =
            Elsewhere::new(Arc::clone(&files) as Arc<dyn FileSystem>, 2).with_slow_writes(Duration::from_secs(1));
        let options = &SessionOptions { write_back: true, ..options.clone() };
        let Mounted { folder, session } = Mounted::with(Arc::new(slow), options);
        let path = folder.path().join("file");
        // Whenever a descriptor of it is closed, the kernel writes a file back, also one of a child, or for a moment in
        // a shell. So another process has it, and has it as its output.
        let mut user = Command::new("sh")
            .args(["-c", "exec >\"$1\"; printf %10000s x; read line", "sh"])
            .arg(&path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        until("it is written", || fs::metadata(&path).is_ok_and(|found| found.len() == 10_000));
        assert_eq!(files.length(b"file"), Ok(0));
        let began = Instant::now();
        let ended = session.end();
        assert!(matches!(&ended, Err(EndError::Busy { directory }) if directory == folder.path()), "{ended:?}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert!(!is_mounted(folder.path()) && !path.exists());
        assert_eq!(files.length(b"file"), Ok(10_000));
        assert!(File::open(format!("/proc/{}/fd/1", user.id())).is_err(), "it can be used no more");
        drop(user.stdin.take());
        user.wait().unwrap();
    });
}

#[test]
fn it_is_noticed_when_others_unmount() {
    by_each_transport(|options| {
        let Mounted { folder, session } = Mounted::with(memory(), options);
        unmount(folder.path());
        assert!(session.wait(Duration::from_secs(10)));
        // What is mounted there by others meanwhile is not touched.
        let other = Session::start(folder.path(), memory(), options).unwrap();
        session.end().unwrap();
        assert!(is_mounted(folder.path()) && !other.wait(Duration::ZERO));
    });
}

#[test]
fn a_mount_is_found_where_it_is_when_a_folder_above_it_was_renamed() {
    by_each_transport(|options| {
        let folder = scratch::folder("fuse").unwrap();
        let (before, after) = (folder.path().join("before"), folder.path().join("after"));
        fs::create_dir_all(before.join("mount")).unwrap();
        let session = Session::start(&before.join("mount"), memory(), options).unwrap();
        fs::rename(&before, &after).unwrap();
        fs::write(after.join("mount/file"), "content").unwrap();
        // An ordinary directory of the former name is nobody's mount.
        fs::create_dir_all(before.join("mount")).unwrap();
        assert!(session.is_mounted() && is_mounted(&after.join("mount")));
        session.end().unwrap();
        assert!(!is_mounted(&after.join("mount")));
        assert_eq!(fs::read_dir(after.join("mount")).unwrap().count(), 0);
    });
}

/// Names that begin with `later` are not answered; for one that begins with `now` the call does not return.
struct Stuck {
    kept: Mutex<Vec<Later<Entry>>>,
    interrupted: Mutex<Vec<u64>>,
    hanging: AtomicUsize,
    free: Arc<Mutex<()>>,
}

impl FileSystem for Stuck {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        match asked.name {
            b"panic" => panic!("as a test wants"),
            b"dropped" => drop(answer),
            name if name.starts_with(b"later") => self.kept.lock().unwrap().push(answer.later()),
            name if name.starts_with(b"now") => {
                self.hanging.fetch_add(1, Ordering::Relaxed);
                drop(self.free.lock());
            }
            _ => answer.fail(Errno::NOENT),
        }
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        MemoryFileSystem::new(VALID).get_attributes(asked, answer);
    }

    fn interrupt(&self, unique: u64) {
        self.interrupted.lock().unwrap().push(unique);
        let mut kept = self.kept.lock().unwrap();
        if let Some(place) = kept.iter().position(|later| later.unique() == unique) {
            kept.swap_remove(place).fail(Errno::INTR);
        }
    }
}

fn stuck() -> (Arc<Stuck>, Arc<Mutex<()>>) {
    let free = Arc::new(Mutex::new(()));
    let (kept, interrupted, hanging) = (Mutex::default(), Mutex::default(), AtomicUsize::new(0));
    (Arc::new(Stuck { kept, interrupted, hanging, free: Arc::clone(&free) }), free)
}

#[test]
#[ignore = "long: make test-all"]
fn processes_that_wait_for_a_file_system_that_hangs_are_freed() {
    by_each_transport(|options| {
        let (file_system, free) = stuck();
        let held = free.lock().unwrap();
        let Mounted { folder, session } = Mounted::with(Arc::clone(&file_system) as Arc<dyn FileSystem>, options);
        let wait_for = |name: String| {
            let path = folder.path().join(name);
            std::thread::spawn(move || fs::metadata(path))
        };
        let mut waiting: Vec<_> = (0..3).map(|number| wait_for(format!("later-{number}"))).collect();
        until("they are asked", || file_system.kept.lock().unwrap().len() == 3);
        // As many as the device has threads, and one more. A ring's thread has those of its processor.
        waiting.extend((0..4).map(|number| wait_for(format!("now-{number}"))));
        until("calls hang", || file_system.hanging.load(Ordering::Relaxed) >= if options.ring { 1 } else { 3 });
        let began = Instant::now();
        let ended = session.end();
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        // A ring's other processors still serve.
        let is_expected = matches!(ended, Err(EndError::Unwritten { .. }))
            || options.ring && matches!(ended, Err(EndError::Busy { .. }));
        assert!(is_expected, "{ended:?}");
        assert!(!is_mounted(folder.path()));
        for thread in waiting {
            assert!(thread.join().unwrap().is_err());
        }
        // Answers that come too late go nowhere, and threads that hang no longer end.
        file_system.kept.lock().unwrap().drain(..).for_each(|later| later.fail(Errno::NOENT));
        drop(held);
        until("the threads end", || Arc::strong_count(&file_system) == 1);
    });
}

#[test]
fn a_dropped_answer_and_a_panic_are_errors() {
    by_each_transport(|options| {
        let Mounted { folder, session } = Mounted::with(stuck().0, options);
        let found = fs::metadata(folder.path().join("dropped")).unwrap_err();
        assert_eq!(found.raw_os_error(), Some(Errno::IO.raw_os_error()));
        assert!(fs::metadata(folder.path().join("panic")).is_err());
        assert!(session.wait(Duration::from_secs(10)), "what a panic has left is not used");
        assert!(fs::metadata(folder.path().join("other")).is_err());
        drop(session);
        assert!(!is_mounted(folder.path()));
    });
}

#[test]
fn a_killed_process_can_be_freed_by_an_interrupt() {
    by_each_transport(|options| {
        let (file_system, _) = stuck();
        let mounted = Mounted::with(Arc::clone(&file_system) as Arc<dyn FileSystem>, options);
        let mut process = Command::new("stat").arg(mounted.at().join("later")).stderr(Stdio::null()).spawn().unwrap();
        until("it is asked", || file_system.kept.lock().unwrap().len() == 1);
        process.kill().unwrap();
        until("it is interrupted", || !file_system.interrupted.lock().unwrap().is_empty());
        process.wait().unwrap();
        assert!(file_system.kept.lock().unwrap().is_empty());
    });
}

/// Names are not answered, and files are not closed, before their process is killed.
struct Waiting {
    waits: Waits,
    kept: Mutex<Vec<Box<dyn std::any::Any + Send>>>,
    given_up: Arc<AtomicUsize>,
    interrupted: AtomicUsize,
    files: MemoryFileSystem,
}

impl Waiting {
    fn keep<R: Reply + 'static>(&self, answer: Answer<'_, R>) {
        let given_up = Arc::clone(&self.given_up);
        let waiter = self.waits.wait(answer.later(), move || _ = given_up.fetch_add(1, Ordering::Relaxed));
        self.kept.lock().unwrap().push(Box::new(waiter));
    }
}

impl FileSystem for Waiting {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        match asked.name {
            b"later" => self.keep(answer),
            _ => self.files.lookup(asked, answer),
        }
    }

    fn flush(&self, _: Close, answer: Answer<'_, Done>) {
        self.keep(answer);
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        self.files.get_attributes(asked, answer);
    }

    fn create(&self, asked: Create<'_>, answer: Answer<'_, Created>) {
        self.files.create(asked, answer);
    }

    fn interrupt(&self, _: u64) {
        self.waits.interrupt();
        self.interrupted.fetch_add(1, Ordering::Relaxed);
    }
}

/// Handles a signal, and is ended by another one in a call that does not return: a name is asked for, or a file closed.
const HANDLES: &str = "
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
fd = os.open(sys.argv[1] + '/' + sys.argv[2], os.O_CREAT | os.O_WRONLY) if sys.argv[2] != 'later' else None
if fd is None: os.stat(sys.argv[1] + '/later')
os.kill(os.getpid(), signal.SIGTERM) if sys.argv[2] == 'ends' else os.close(fd)
";

#[test]
fn a_process_that_is_killed_while_it_waits_ends_and_one_that_handles_a_signal_waits_on() {
    by_each_transport(|options| {
        let (kept, given_up) = (Mutex::default(), Arc::<AtomicUsize>::default());
        let files = MemoryFileSystem::new(VALID);
        let (waits, interrupted) = (Waits::new().unwrap(), AtomicUsize::new(0));
        let waiting = Arc::new(Waiting { waits, kept, given_up, interrupted, files });
        let mounted = Mounted::with(Arc::clone(&waiting) as Arc<dyn FileSystem>, options);
        let given_up = || waiting.given_up.load(Ordering::Relaxed);
        // The last one is ended by itself, and its file is closed for it.
        for (number, call) in ["later", "closes", "ends"].into_iter().enumerate() {
            let mut command = Command::new("python3");
            let mut process = command.args(["-c", HANDLES]).arg(mounted.at()).arg(call).spawn().unwrap();
            until("it is asked", || waiting.kept.lock().unwrap().len() == number + 1);
            if call != "ends" {
                let id = rustix::process::Pid::from_child(&process);
                rustix::process::kill_process(id, rustix::process::Signal::USR1).unwrap();
                until("the file system is told", || waiting.interrupted.load(Ordering::Relaxed) > number);
                assert_eq!(given_up(), number, "a signal that is handled ends nothing");
                process.kill().unwrap();
            }
            until("it has ended", || process.try_wait().unwrap().is_some());
            until("it is said to be given up", || given_up() == number + 1);
        }
        waiting.kept.lock().unwrap().clear();
    });
}

mod by_command {
    use super::*;

    /// This test's other half: serves at the directory until it is killed.
    #[test]
    #[ignore = "run by another test"]
    fn serve_until_killed() {
        let Some(directory) = std::env::var_os("REMORA_FUSE_AT") else { return };
        let ring = std::env::var("REMORA_FUSE_RING").is_ok_and(|ring| ring == "true");
        let session = Session::start(Path::new(&directory), memory(), &SessionOptions { ring, ..options() }).unwrap();
        println!("serving");
        while !session.wait(Duration::from_secs(1)) {}
    }
}

#[test]
fn what_a_killed_process_leaves_is_taken_away_by_the_next() {
    by_each_transport(|options| {
        let folder = scratch::folder("fuse").unwrap();
        let killed = || {
            let mut server = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "ends::by_command::serve_until_killed", "--ignored", "--nocapture"])
                .env("REMORA_FUSE_AT", folder.path())
                .env("REMORA_FUSE_RING", options.ring.to_string())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(server.stdout.take().unwrap()).lines();
            assert!(lines.map_while(Result::ok).any(|line| line.contains("serving")));
            fs::write(folder.path().join("file"), "content").unwrap();
            let file = File::open(folder.path().join("file")).unwrap();
            server.kill().unwrap();
            server.wait().unwrap();
            file
        };
        let file = killed();
        assert!(file.metadata().is_err(), "no process waits for a server that is dead");
        // A ring is taken down a little after the process.
        let found = || fs::metadata(folder.path()).unwrap_err().raw_os_error();
        until("the connection is gone", || found() == Some(Errno::NOTCONN.raw_os_error()));
        // Of another kind, it is not ours to take away.
        let mount = MountOptions { subtype: "another".into(), ..MountOptions::default() };
        let refused =
            Session::start(folder.path(), memory(), &SessionOptions { mount, ..options.clone() }).err().unwrap();
        assert!(matches!(refused, StartError::Dead { .. }), "{refused}");
        assert!(refused.to_string().contains(&format!("umount {}", folder.path().display())), "{refused}");

        let session = Session::start(folder.path(), memory(), options).unwrap();
        fs::write(folder.path().join("next"), "content").unwrap();
        session.end().unwrap();
        assert!(!is_mounted(folder.path()), "both are gone");

        drop(killed());
        unmount(folder.path());

        // The next one waits for nothing: the kernel may still take down the ring of the one before.
        for _ in 0..20 {
            drop(killed());
            Session::start(folder.path(), memory(), options).unwrap().end().unwrap();
        }
    });
}

#[test]
fn what_cannot_be_mounted_is_said() {
    let Some(()) = require::fuse() else { return };
    let folder = scratch::folder("fuse").unwrap();
    let missing = folder.path().join("missing");
    let why = |at: &Path, options: &SessionOptions| Session::start(at, memory(), options).err().unwrap();
    let error = why(&missing, &options());
    assert!(matches!(&error, StartError::Directory { .. }) && error.to_string().contains("missing"), "{error}");
    fs::write(&missing, "").unwrap();
    assert!(matches!(why(&missing, &options()), StartError::Directory { .. }));
    for options in [
        SessionOptions { threads: 0, ..options() },
        SessionOptions { most_bytes: 5000, ..options() },
        SessionOptions { most_bytes: 2 << 20, ..options() },
        SessionOptions { mount: MountOptions { subtype: "a,b".into(), ..MountOptions::default() }, ..options() },
    ] {
        assert!(matches!(why(folder.path(), &options), StartError::Misuse(_)));
    }
    assert!(!is_mounted(folder.path()));
}
