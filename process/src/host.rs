//! What this host has: memory, threads and free space, and whether it is enough, before something fails for lack of it.
//!
//! A process that takes more memory than the machine or its control group can give is killed, without a word of its
//! own.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{fs, io, thread};

use rustix::fs::FsWord;

use crate::exit::Failure;
use remora_base::units::Size;

/// Refuses an option that asks for more memory than there is.
///
/// # Errors
/// Its text names the limit and the file that sets it, and the largest value that would do.
pub fn check_memory(option: &str, size: Size) -> Result<(), Failure> {
    let Some(limit) = Limit::of(Path::new("/")) else { return Ok(()) };
    limit.refuses(&format!("{option} {size}"), size.get()).map_or(Ok(()), |why| Err(Failure::local(why)))
}

/// Why the system may have refused memory that was asked for, and what to raise: ends the text of an error. Empty: no
/// limit of promises is set.
pub fn why_none() -> String {
    let address_space = rustix::process::getrlimit(rustix::process::Resource::As).current;
    why_none_of(Path::new("/"), address_space)
}

fn why_none_of(root: &Path, address_space: Option<u64>) -> String {
    let mut why = String::new();
    if let Some(bytes) = address_space {
        let size = Size::bytes((bytes >> 20) << 20);
        why.push_str(&format!("; this process may map {size} in all (ulimit -v, LimitAS= of systemd): raise that"));
    }
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    if read("proc/sys/vm/overcommit_memory").trim() == "2" {
        let memory = read("proc/meminfo");
        let figure = |name: &str| {
            let kibibytes = memory.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"))?;
            kibibytes.trim().parse::<u64>().ok()
        };
        why.push_str("; vm.overcommit_memory is 2 on this host: ");
        if let (Some(limit), Some(promised)) = (figure("CommitLimit:"), figure("Committed_AS:")) {
            let [limit, promised] = [limit, promised].map(|kibibytes| Size::mebibytes(kibibytes >> 10));
            why.push_str(&format!("{promised} of {limit} are promised: "));
        }
        why.push_str("raise vm.overcommit_ratio there, or set it to 0 or 1");
    }
    why
}

/// The tightest limit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limit {
    bytes: u64,
    /// The file of a control group; `None`: all memory of the machine.
    file: Option<PathBuf>,
}

impl Limit {
    /// Reads it below this root; `None` if the kernel does not say it.
    fn of(root: &Path) -> Option<Limit> {
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let files = groups.lines().flat_map(|line| limit_files(root, line));
        let groups = files.filter_map(|file| {
            // A group without a limit says `max`, or a number of pages that no machine has.
            let bytes = fs::read_to_string(&file).ok()?.trim().parse().ok()?;
            Some(Limit { bytes, file: Some(file) })
        });
        let total = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let total = total.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
        let total = total.and_then(|kibibytes| kibibytes.trim().parse::<u64>().ok());
        let machine = total.map(|kibibytes| Limit { bytes: kibibytes << 10, file: None });
        machine.into_iter().chain(groups).min_by_key(|limit| limit.bytes)
    }

    fn refuses(&self, option: &str, bytes: u64) -> Option<String> {
        if bytes <= self.bytes {
            return None;
        }
        let most = Size::bytes(((self.bytes / USABLE.1 * USABLE.0) >> 20) << 20);
        let whose = match &self.file {
            Some(file) => format!("the control group of this process may have {} ({})", self.shown(), file.display()),
            None => format!("this machine has {}", self.shown()),
        };
        Some(format!("{option} is more than there is: {whose}; give {most} at most, or raise that limit"))
    }

    fn shown(&self) -> Size {
        Size::bytes((self.bytes >> 20) << 20)
    }
}

/// The share of a limit that an option can have: the process needs some memory beside it.
const USABLE: (u64, u64) = (3, 4);

/// The files that limit a control group of this line of `/proc/self/cgroup`, and the groups above it. Inside of a
/// container a line may name a path of the host, which is not there: its own group is then the topmost.
fn limit_files(root: &Path, line: &str) -> Vec<PathBuf> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { return Vec::new() };
    let (top, names): (_, &[&str]) = match controllers {
        "" => ("sys/fs/cgroup", &["memory.max", "memory.high"]),
        _ if controllers.split(',').any(|one| one == "memory") => ("sys/fs/cgroup/memory", &["memory.limit_in_bytes"]),
        _ => return Vec::new(),
    };
    let top = root.join(top);
    let own = top.join(path.trim_start_matches('/'));
    let groups = own.ancestors().take_while(|folder| folder.starts_with(&top));
    groups.flat_map(|folder| names.iter().map(|name| folder.join(name))).collect()
}

// Host threads: whether the system gives this process the threads that every command needs.
//
// The runtime panics if it is refused a thread, and work that blocks would wait for a thread for ever. So a command
// starts some threads first, and ends if it cannot.

/// Threads at once: two of the runtime, some that wait in blocking calls, and those of data lanes and of a delivery.
const THREADS: usize = 8;

/// Bytes of the stack of a thread that only waits: limits of memory have messages of their own.
const STACK: usize = 64 << 10;

/// Checks that this many threads can be started.
///
/// # Errors
/// The system refuses one.
pub fn check_threads() -> Result<(), Failure> {
    start(THREADS).map_err(|error| no_thread(&error))
}

/// Starts threads that wait for each other, and ends them.
fn start(count: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    let pass = || drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
    thread::scope(|scope| {
        let closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
        let started = (0..count).try_for_each(|_| {
            let thread = thread::Builder::new().name("trial".into()).stack_size(STACK).spawn_scoped(scope, pass)?;
            drop(thread); // the scope waits for it
            Ok(())
        });
        drop(closed);
        started
    })
}

fn no_thread(error: &io::Error) -> Failure {
    Failure::local(format!(
        "cannot start {THREADS} threads: {error}; raise the limit of this user's processes (ulimit -u, LimitNPROC= of systemd) or of \
         the control group (pids.max, TasksMax= of systemd, the pod's limit of process ids)"
    ))
}

// Free space of a file system: whether something of a known length fits, before it is written.

/// File systems that may keep bytes in less room than they have: btrfs, ZFS and bcachefs compress.
const COMPRESSING: [FsWord; 3] = [0x9123_683e, 0x2fc1_2fc1, 0xca45_1a4e];

/// XFS, where the copy of a file may share its blocks with the original.
const XFS: FsWord = 0x5846_5342;

/// Refuses to write this many bytes into a folder whose file system certainly has no room for them. `what`: that is
/// written.
///
/// # Errors
/// Its text has both figures. A file system that does not say what it has is not judged, nor is one that compresses.
pub fn check_space(what: &str, folder: &Path, bytes: u64) -> Result<(), Failure> {
    let Ok(room) = rustix::fs::statvfs(folder) else { return Ok(()) };
    if rustix::fs::statfs(folder).is_ok_and(|of| COMPRESSING.contains(&of.f_type)) {
        return Ok(());
    }
    // Some blocks are for root only.
    let blocks = if rustix::process::geteuid().is_root() { room.f_bfree } else { room.f_bavail };
    why_no_space(what, folder, bytes, blocks.saturating_mul(room.f_frsize))
}

/// The same for copies of files in this place.
///
/// # Errors
/// As [`check_space`].
pub fn check_copies(what: &str, from: &Path, folder: &Path, bytes: u64) -> Result<(), Failure> {
    let device = |path: &Path| path.metadata().map(|found| found.dev()).ok();
    if device(from) == device(folder) && rustix::fs::statfs(folder).is_ok_and(|of| of.f_type == XFS) {
        return Ok(());
    }
    check_space(what, folder, bytes)
}

fn why_no_space(what: &str, folder: &Path, bytes: u64, free: u64) -> Result<(), Failure> {
    if bytes <= free {
        return Ok(());
    }
    let (bytes, free) = (Size::bytes(bytes), Size::bytes(free));
    let text = format!("{what} needs {bytes}, and the file system of {} has {free} left: make room", folder.display());
    Err(Failure::local(text))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::exit::Code;

    /// A root with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal:       16303588 kB\nMemFree: 1 kB\n");

    fn limit(files: &[(&str, &str)]) -> Option<(u64, Option<String>)> {
        let root = root(&[&[MACHINE], files].concat());
        let limit = Limit::of(root.path())?;
        Some((limit.bytes, limit.file.map(|file| file.strip_prefix(root.path()).unwrap().display().to_string())))
    }

    #[test]
    fn the_tightest_group_counts_in_both_versions() {
        let machine = Some((16_303_588 << 10, None));
        let of = |bytes, file: &str| Some((bytes, Some(file.to_owned())));
        assert_eq!(limit(&[]), machine);
        let v2 = ("proc/self/cgroup", "0::/kubepods/pod1/c1\n");
        let no_limit = ("sys/fs/cgroup/kubepods/pod1/c1/memory.max", "max\n");
        assert_eq!(limit(&[v2, no_limit]), machine);
        let above = ("sys/fs/cgroup/kubepods/pod1/memory.max", "314572800\n");
        assert_eq!(limit(&[v2, no_limit, above]), of(314_572_800, "sys/fs/cgroup/kubepods/pod1/memory.max"));
        let high = ("sys/fs/cgroup/kubepods/pod1/c1/memory.high", "209715200\n");
        let file = "sys/fs/cgroup/kubepods/pod1/c1/memory.high";
        assert_eq!(limit(&[v2, no_limit, above, high]), of(209_715_200, file));
        // In a container.
        let own = ("sys/fs/cgroup/memory.max", "1000000000");
        assert_eq!(limit(&[("proc/self/cgroup", "0::/\n"), own]), of(1_000_000_000, "sys/fs/cgroup/memory.max"));
        let v1 = ("proc/self/cgroup", "12:cpu,cpuacct:/\n8:memory:/docker/abc\n");
        let none = ("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit(&[v1, none]), machine);
        let unseen = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "314572800\n");
        assert_eq!(limit(&[v1, unseen]), of(314_572_800, "sys/fs/cgroup/memory/memory.limit_in_bytes"));
    }

    #[test]
    fn limits_of_promises_are_named_where_they_are_set() {
        let strict = ("proc/sys/vm/overcommit_memory", "2\n");
        let memory = ("proc/meminfo", "CommitLimit:     8388608 kB\nCommitted_AS:    7340032 kB\n");
        let why = |files: &[(&str, &str)], most| why_none_of(root(files).path(), most);
        assert_eq!(why(&[("proc/sys/vm/overcommit_memory", "1\n"), memory], None), "");
        let said = why(&[strict, memory], None);
        assert!(said.contains("vm.overcommit_memory is 2") && said.contains("7 GiB of 8 GiB are promised"), "{said}");
        assert!(why(&[strict], None).contains("raise vm.overcommit_ratio"));
        let said = why(&[], Some(1 << 30));
        assert!(said.contains("may map 1 GiB in all (ulimit -v"), "{said}");
    }

    #[test]
    fn files_of_any_content_are_no_limit_and_no_panic() {
        for text in ["", ":", "::", "0::", "0::/../../../..", "x:memory:\u{0}", "5:memory", "\n\n"] {
            let machine = Some((16_303_588 << 10, None));
            assert_eq!(limit(&[("proc/self/cgroup", text), ("sys/fs/cgroup/memory.max", "-1")]), machine, "{text:?}");
        }
        assert_eq!(Limit::of(root(&[("proc/meminfo", "MemTotal: much")]).path()), None);
    }

    #[test]
    fn a_refusal_names_the_limit_the_file_and_what_would_do() {
        let file = Some(PathBuf::from("/sys/fs/cgroup/memory.max"));
        let limit = Limit { bytes: 300 << 20, file };
        assert_eq!(limit.refuses("--memory 256 MiB", 256 << 20), None);
        let said = limit.refuses("--memory 1 GiB", 1 << 30).unwrap();
        assert_eq!(
            said,
            "--memory 1 GiB is more than there is: the control group of this process may have 300 MiB \
             (/sys/fs/cgroup/memory.max); give 225 MiB at most, or raise that limit"
        );
        let machine = Limit { bytes: 2 << 30, file: None };
        assert!(machine.refuses("--memory 3 GiB", 3 << 30).unwrap().contains("this machine has 2 GiB; give "));
    }

    #[test]
    fn threads_are_started_at_once_and_ended() {
        start(0).unwrap();
        start(64).unwrap();
        check_threads().unwrap();
    }

    #[test]
    fn a_refusal_names_the_limits_that_may_be_too_low() {
        let refused = no_thread(&io::Error::from_raw_os_error(11));
        assert_eq!(refused.code, crate::exit::Code::Local);
        for word in ["ulimit -u", "LimitNPROC=", "pids.max", "TasksMax="] {
            assert!(refused.message.contains(word), "{refused}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_both_figures() {
        let folder = Path::new("/data");
        assert!(why_no_space("the snapshot", folder, 3 << 30, 3 << 30).is_ok());
        let refused = why_no_space("the snapshot", folder, 3 << 30, 1 << 30).unwrap_err();
        assert_eq!(refused.code, Code::Local);
        assert_eq!(refused.message, "the snapshot needs 3 GiB, and the file system of /data has 1 GiB left: make room");
    }

    #[test]
    fn a_real_file_system_is_asked_and_one_that_is_not_there_is_not_judged() {
        let folder = tempfile::tempdir().unwrap();
        check_space("nothing", folder.path(), 0).unwrap();
        // This test may run on one that compresses.
        let is_judged = rustix::fs::statfs(folder.path()).is_ok_and(|of| !COMPRESSING.contains(&of.f_type));
        assert_eq!(check_space("everything", folder.path(), u64::MAX).is_err(), is_judged);
        assert_eq!(check_copies("everything", Path::new("/proc"), folder.path(), u64::MAX).is_err(), is_judged);
        check_space("everything", Path::new("/nowhere"), u64::MAX).unwrap();
    }
}
