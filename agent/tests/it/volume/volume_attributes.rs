//! Extended attributes, ACLs, files without a name, whiteouts and devices in a mounted volume, by system calls and by
//! programs.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use remora_lab::server::wait_until;
use remora_lab::{Agent, require};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;

use crate::kit::{Directory, LONG, ends};
use crate::volume::commands::Scene;
use crate::volume::volume_mount::{mount, mount_as};

/// A volume whose files are mounted.
struct Mounted {
    directory: Directory,
    mounted: Agent,
    file: String,
    scene: Scene,
}

impl Mounted {
    fn new(more: &[&str]) -> Mounted {
        let scene = Scene::new(None, &[]);
        let file = scene.create("attributes.volume");
        scene.end(&["format", &file, "--take-over"], 0);
        let (mounted, directory) = mount(&scene, &file, "mnt", &[&["--take-over"][..], more].concat());
        Mounted { directory, mounted, file, scene }
    }

    fn at(&self, name: &str) -> String {
        self.directory.at(name).to_str().unwrap().to_owned()
    }

    /// The host dies, and another one has the files.
    fn again(&mut self) {
        self.mounted.kill().unwrap();
        let (mounted, same) = mount(&self.scene, &self.file, "mnt", &["--take-over"]);
        self.mounted = mounted;
        std::mem::forget(same); // it is unmounted once
    }

    fn end(mut self) {
        self.mounted.signal(Signal::TERM).unwrap();
        ends(&mut self.mounted, 0);
    }
}

fn get(path: &str, name: &str) -> Result<Vec<u8>, Errno> {
    let mut value = vec![0; 64 << 10];
    let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice())?;
    value.truncate(length);
    Ok(value)
}

fn set(path: &str, name: &str, value: &[u8]) -> Result<(), Errno> {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
}

/// The names, in their order.
fn list(path: &str) -> Vec<String> {
    let mut list = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(path, list.as_mut_slice()).unwrap();
    let names = list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut names: Vec<_> = names.map(|name| String::from_utf8(name.to_vec()).unwrap()).collect();
    names.sort();
    names
}

/// Runs a program, which must succeed. Returns what it has said.
fn run(program: &str, args: &[&str]) -> String {
    let ran = Command::new(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{program} {args:?}: {said} {}", String::from_utf8_lossy(&ran.stderr));
    said
}

/// Asks without room how long a value is, and the list.
const LENGTHS: &str = r"
import ctypes, os, sys
libc, path = ctypes.CDLL(None), os.fsencode(sys.argv[1])
print(libc.getxattr(path, b'user.a', None, 0), libc.listxattr(path, None, 0))
";

#[test]
fn extended_attributes_are_set_listed_removed_and_outlive_their_host() {
    let (Some(()), Some(_allowed)) = (require::root(), require::fuse_ring()) else { return };
    // By io_uring, and by the device.
    for ways in [&[][..], &["--no-ring"]] {
        let mut mounted = Mounted::new(ways);
        let file = mounted.at("file");
        fs::write(&file, "content").unwrap();
        assert_eq!((get(&file, "user.a"), list(&file)), (Err(Errno::NODATA), vec![]));
        let with = |name: &str, flags| rustix::fs::setxattr(&file, name, b"first", flags);
        assert_eq!(with("user.a", XattrFlags::REPLACE), Err(Errno::NODATA));
        assert_eq!(with("user.a", XattrFlags::CREATE), Ok(()));
        assert_eq!(with("user.a", XattrFlags::CREATE), Err(Errno::EXIST));
        assert_eq!(with("user.a", XattrFlags::REPLACE), Ok(()));
        let changed = fs::metadata(&file).unwrap();
        set(&file, "user.a", b"second\0 value").unwrap();
        let now = fs::metadata(&file).unwrap();
        assert!((now.ctime(), now.ctime_nsec()) > (changed.ctime(), changed.ctime_nsec()));
        assert_eq!((now.mtime(), now.mtime_nsec()), (changed.mtime(), changed.mtime_nsec()));
        for (name, value) in [("trusted.t", &b"t"[..]), ("security.s", b""), ("user.long", &[7; 7000])] {
            set(&file, name, value).unwrap();
            assert_eq!(get(&file, name).as_deref(), Ok(value));
        }
        // How long they are, and too little room.
        let all = "security.s\0trusted.t\0user.a\0user.long\0".len();
        assert_eq!(run("python3", &["-c", LENGTHS, &file]).trim(), format!("13 {all}"));
        assert_eq!(rustix::fs::getxattr(&file, "user.a", &mut [0; 12][..]), Err(Errno::RANGE));
        assert_eq!(rustix::fs::listxattr(&file, &mut vec![0; all - 1][..]), Err(Errno::RANGE));
        let names = ["security.s", "trusted.t", "user.a", "user.long"];
        assert_eq!(list(&file), names);
        // Limits: the kernel's, and the bound of an inode, as a file system of blocks says it.
        assert_eq!(set(&file, "user.more", &[1; 7000]), Err(Errno::NOSPC));
        assert_eq!(set(&file, "user.more", &vec![1; (64 << 10) + 1]), Err(Errno::TOOBIG));
        assert_eq!(set(&file, &format!("user.{}", "x".repeat(251)), b""), Err(Errno::RANGE));
        assert_eq!(set(&file, &format!("user.{}", "x".repeat(250)), b""), Ok(()));
        assert_eq!(set(&file, "user.", b""), Err(Errno::INVAL));
        assert_eq!(set(&file, "system.other", b""), Err(Errno::OPNOTSUPP));
        assert_eq!(rustix::fs::removexattr(&file, format!("user.{}", "x".repeat(250))), Ok(()));
        assert_eq!(rustix::fs::removexattr(&file, "user.more"), Err(Errno::NODATA));
        // Of links themselves, and of directories.
        std::os::unix::fs::symlink("file", mounted.at("link")).unwrap();
        assert_eq!(set(&mounted.at("link"), "user.a", b""), Err(Errno::PERM), "the kernel's rule");
        set(&mounted.at("link"), "trusted.l", b"link").unwrap();
        fs::create_dir(mounted.at("folder")).unwrap();
        set(&mounted.at("folder"), "user.f", b"folder").unwrap();
        // A name more, another name, another content.
        fs::hard_link(&file, mounted.at("other")).unwrap();
        fs::rename(&file, mounted.at("renamed")).unwrap();
        fs::write(mounted.at("other"), "new").unwrap();
        assert_eq!(list(&mounted.at("renamed")), names);

        mounted.again();
        assert_eq!(list(&mounted.at("other")), names);
        assert_eq!(get(&mounted.at("renamed"), "user.a").as_deref(), Ok(&b"second\0 value"[..]));
        assert_eq!(get(&mounted.at("link"), "trusted.l").as_deref(), Ok(&b"link"[..]));
        assert_eq!(get(&mounted.at("folder"), "user.f").as_deref(), Ok(&b"folder"[..]));
        // A host that only reads sees them, and what is changed.
        let more = ["--read-only", "--reads", "anywhere", "--security", "none", "--plaintext-network"];
        let (mut reader, copy) = mount_as(&mounted.scene, &mounted.file, "copy", &more, "files_mounted");
        let copied = format!("{}/renamed", copy.0);
        assert_eq!(list(&copied), names);
        assert_eq!(set(&copied, "user.a", b"x"), Err(Errno::ROFS));
        set(&mounted.at("other"), "user.a", b"third").unwrap();
        wait_until("the change", LONG, || {
            let found = get(&copied, "user.a");
            Ok(if found.as_deref() == Ok(&b"third"[..]) { Ok(()) } else { Err(format!("{found:?}")) })
        })
        .unwrap();
        reader.signal(Signal::TERM).unwrap();
        ends(&mut reader, 0);
        mounted.end();
    }
}

/// The names' room is bounded, and attributes are in it.
#[test]
fn attributes_that_fill_the_names_room_are_refused_and_nothing_else_is_lost() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut mounted = Mounted::new(&[]);
    let path = |mounted: &Mounted, number: usize| mounted.at(&format!("file-{number}"));
    let mut count = 0;
    let refused = loop {
        let made = fs::write(path(&mounted, count), "").map_err(|error| Errno::from_io_error(&error).unwrap());
        match made.and_then(|()| set(&path(&mounted, count), "user.a", &[7; 7000])) {
            Ok(()) => count += 1,
            Err(errno) => break errno,
        }
    };
    assert_eq!(refused, Errno::NOSPC);
    assert!((10..100).contains(&count), "{count} attributes of 7,000 bytes");
    mounted.again();
    for number in 0..count {
        assert_eq!(get(&path(&mounted, number), "user.a").as_deref(), Ok(&[7; 7000][..]), "{number}");
    }
    rustix::fs::removexattr(path(&mounted, 0), "user.a").unwrap();
    set(&path(&mounted, 1), "user.a", b"shorter").unwrap();
    set(&path(&mounted, 0), "user.b", &[8; 7000]).unwrap();
    mounted.end();
}

/// An ACL as the kernel has it: tag, permissions, ID.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    value
}

const NOBODY: u32 = u32::MAX;

const ACCESS: &str = "system.posix_acl_access";

const DEFAULT: &str = "system.posix_acl_default";

/// Opens a file of a directory as another user. Returns the error's number, or 0.
fn open_as(user: u32, directory: &str, name: &str, how: &str) -> i32 {
    const SCRIPT: &str = r#"
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
user = int(sys.argv[2])
os.setgroups([]); os.setgid(user); os.setuid(user)
try: os.open(sys.argv[3], getattr(os, sys.argv[4]), dir_fd=folder); print(0)
except OSError as error: print(error.errno)
"#;
    let said = run("python3", &["-c", SCRIPT, directory, &user.to_string(), name, how]);
    said.trim().parse().unwrap()
}

#[test]
fn access_control_lists_permit_and_forbid_as_they_say() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut mounted = Mounted::new(&[]);
    let (directory, file) = (mounted.directory.0.clone(), mounted.at("file"));
    fs::write(&file, "content").unwrap();
    let mode = |path: &str| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let chmod = |path: &str, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    chmod(&file, 0o600);
    let denied = Errno::ACCESS.raw_os_error();
    let (reads, writes) = ("O_RDONLY", "O_WRONLY");
    assert_eq!(open_as(1001, &directory, "file", reads), denied);
    let of_one =
        acl(&[(1, 6, NOBODY), (2, 6, 1001), (2, 0, 1002), (4, 0, NOBODY), (0x10, 6, NOBODY), (0x20, 4, NOBODY)]);
    set(&file, ACCESS, &of_one).unwrap();
    assert_eq!((mode(&file), get(&file, ACCESS)), (0o664, Ok(of_one)));
    assert_eq!(open_as(1001, &directory, "file", writes), 0);
    assert_eq!(open_as(1002, &directory, "file", reads), denied, "although all others may");
    assert_eq!((open_as(1003, &directory, "file", reads), open_as(1003, &directory, "file", writes)), (0, denied));
    // chmod changes the mask.
    chmod(&file, 0o644);
    let masked =
        acl(&[(1, 6, NOBODY), (2, 6, 1001), (2, 0, 1002), (4, 0, NOBODY), (0x10, 4, NOBODY), (0x20, 4, NOBODY)]);
    assert_eq!(get(&file, ACCESS).as_ref(), Ok(&masked));
    assert_eq!((open_as(1001, &directory, "file", reads), open_as(1001, &directory, "file", writes)), (0, denied));
    assert_eq!(list(&file), [ACCESS]);
    mounted.again();
    assert_eq!((get(&file, ACCESS), mode(&file)), (Ok(masked), 0o644));
    assert_eq!((open_as(1001, &directory, "file", reads), open_as(1002, &directory, "file", reads)), (0, denied));
    rustix::fs::removexattr(&file, ACCESS).unwrap();
    assert_eq!(open_as(1002, &directory, "file", reads), 0);
    // What is made in a directory with a default list has it, whatever the umask is.
    let folder = mounted.at("folder");
    fs::create_dir(&folder).unwrap();
    assert_eq!(set(&file, DEFAULT, &acl(&[(1, 7, NOBODY), (4, 5, NOBODY), (0x20, 0, NOBODY)])), Err(Errno::ACCESS));
    let default = acl(&[(1, 7, NOBODY), (2, 7, 1001), (4, 5, NOBODY), (0x10, 7, NOBODY), (0x20, 0, NOBODY)]);
    set(&folder, DEFAULT, &default).unwrap();
    const SCRIPT: &str = r#"
import os, sys
os.umask(0o77)
os.chdir(sys.argv[1])
os.close(os.open('made', os.O_CREAT | os.O_WRONLY, 0o666))
os.mkdir('inside', 0o777)
os.mkfifo('pipe', 0o666)
fd = os.open('.', os.O_TMPFILE | os.O_WRONLY, 0o666)
os.link(f'/proc/self/fd/{fd}', 'linked', dst_dir_fd=os.open('.', os.O_RDONLY), follow_symlinks=True)
"#;
    run("python3", &["-c", SCRIPT, &folder]);
    let of_file = acl(&[(1, 6, NOBODY), (2, 7, 1001), (4, 5, NOBODY), (0x10, 6, NOBODY), (0x20, 0, NOBODY)]);
    for name in ["made", "pipe", "linked"] {
        let path = format!("{folder}/{name}");
        assert_eq!((mode(&path), get(&path, ACCESS)), (0o660, Ok(of_file.clone())), "{name}");
        assert_eq!(get(&path, DEFAULT), Err(Errno::NODATA));
    }
    let inside = format!("{folder}/inside");
    assert_eq!((mode(&inside), get(&inside, DEFAULT)), (0o770, Ok(default)));
    chmod(&folder, 0o755);
    assert_eq!((open_as(1001, &folder, "made", writes), open_as(1002, &folder, "made", reads)), (0, denied));
    // Without one, the umask counts.
    const PLAIN: &str = "import os, sys\nos.umask(0o27)\nos.close(os.open(sys.argv[1], os.O_CREAT, 0o666))";
    run("python3", &["-c", PLAIN, &mounted.at("plain")]);
    assert_eq!(mode(&mounted.at("plain")), 0o640);
    mounted.end();
}

/// A write by one who is not trusted takes what the file was trusted with. The mount is `nosuid`, but a copy of the file
/// is not.
#[test]
fn writes_take_capabilities_and_set_id_bits() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mounted = Mounted::new(&[]);
    let file = mounted.at("program");
    fs::write(&file, "program").unwrap();
    let mode = || fs::metadata(&file).unwrap().permissions().mode() & 0o7777;
    let trust = || fs::set_permissions(&file, fs::Permissions::from_mode(0o6777)).unwrap();
    let capability: Vec<u8> = [0x0200_0001_u32, 1 << 10, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    trust();
    set(&file, "security.capability", &capability).unwrap();
    assert_eq!(get(&file, "security.capability").as_ref(), Ok(&capability));
    // Root may leave the bits, and not the capabilities.
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(3).unwrap();
    assert_eq!((mode(), get(&file, "security.capability")), (0o6777, Err(Errno::NODATA)));
    const SCRIPT: &str = r#"
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
os.setgroups([]); os.setgid(1001); os.setuid(1001)
fd = os.open('program', os.O_WRONLY | (os.O_TRUNC if sys.argv[2] == 'cut' else 0), dir_fd=folder)
if sys.argv[2] == 'write': os.write(fd, b'other')
if sys.argv[2] == 'size': os.ftruncate(fd, 1)
print(oct(os.fstat(fd).st_mode))
"#;
    for way in ["write", "size", "cut"] {
        trust();
        set(&file, "security.capability", &capability).unwrap();
        assert_eq!(run("python3", &["-c", SCRIPT, &mounted.directory.0, way]).trim(), "0o100777", "{way}");
        assert_eq!((mode(), get(&file, "security.capability")), (0o777, Err(Errno::NODATA)), "{way}");
    }
    trust();
    set(&file, "security.capability", &capability).unwrap();
    std::os::unix::fs::chown(&file, Some(7), Some(7)).unwrap();
    assert_eq!((mode(), get(&file, "security.capability")), (0o777, Err(Errno::NODATA)), "chown");
    mounted.end();
}

#[test]
fn files_without_a_name_get_one_or_are_gone() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut mounted = Mounted::new(&[]);
    let directory = mounted.directory.0.clone();
    let open = |flags| {
        let flags = OFlags::TMPFILE | OFlags::RDWR | flags;
        rustix::fs::open(&directory, flags, Mode::from_raw_mode(0o640)).unwrap()
    };
    let link = |file: &std::os::fd::OwnedFd, name: &str| {
        rustix::fs::linkat(file.as_fd(), "", CWD, format!("{directory}/{name}"), AtFlags::EMPTY_PATH)
    };
    let (named, unnamed, exclusive) = (open(OFlags::empty()), open(OFlags::empty()), open(OFlags::EXCL));
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    for file in [&named, &unnamed, &exclusive] {
        rustix::io::write(file, b"content").unwrap();
        assert_eq!(rustix::fs::fstat(file).unwrap().st_nlink, 0);
    }
    assert_eq!(link(&exclusive, "exclusive"), Err(Errno::NOENT));
    link(&named, "named").unwrap();
    assert_eq!(link(&unnamed, "named"), Err(Errno::EXIST));
    link(&named, "twice").unwrap();
    assert_eq!(rustix::fs::fstat(&named).unwrap().st_nlink, 2);
    drop((named, unnamed, exclusive));
    mounted.again();
    let mut names: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["named", "twice"]);
    assert_eq!(fs::read(mounted.at("twice")).unwrap(), b"content");
    mounted.end();
}

fn is_whiteout(path: &str) -> bool {
    let found = fs::symlink_metadata(path).unwrap();
    found.file_type().is_char_device() && found.rdev() == 0
}

#[test]
fn devices_and_whiteouts_have_names() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut mounted = Mounted::new(&[]);
    let make = |path: &str, kind, device| rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(0o600), device);
    make(&mounted.at("whiteout"), FileType::CharacterDevice, 0).unwrap();
    let device = rustix::fs::makedev(259, 70_000);
    make(&mounted.at("disk"), FileType::BlockDevice, device).unwrap();
    fs::write(mounted.at("moved"), "moved").unwrap();
    fs::write(mounted.at("replaced"), "replaced").unwrap();
    let rename = |mounted: &Mounted, from: &str, to: &str, flags| {
        rustix::fs::renameat_with(CWD, mounted.at(from), CWD, mounted.at(to), flags)
    };
    let (noreplace, exchange) = (RenameFlags::NOREPLACE, RenameFlags::EXCHANGE);
    assert_eq!(rename(&mounted, "moved", "replaced", RenameFlags::WHITEOUT | noreplace), Err(Errno::EXIST));
    assert_eq!(rename(&mounted, "moved", "replaced", RenameFlags::WHITEOUT | exchange), Err(Errno::INVAL));
    rename(&mounted, "moved", "replaced", RenameFlags::WHITEOUT).unwrap();
    for is_again in [false, true] {
        if is_again {
            mounted.again();
        }
        assert!(is_whiteout(&mounted.at("whiteout")) && is_whiteout(&mounted.at("moved")), "{is_again}");
        let disk = fs::metadata(mounted.at("disk")).unwrap();
        assert!(disk.file_type().is_block_device() && disk.rdev() == device);
        assert_eq!(fs::read(mounted.at("replaced")).unwrap(), b"moved");
    }
    // The mount is `nodev`.
    let opened = fs::File::open(mounted.at("disk")).unwrap_err();
    assert_eq!(opened.raw_os_error(), Some(Errno::ACCESS.raw_os_error()));
    fs::remove_file(mounted.at("moved")).unwrap();
    mounted.end();
}

/// What `cp --archive` copies is all there: attributes, lists, links, pipes, devices, times.
#[test]
fn copies_by_cp_have_everything() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mounted = Mounted::new(&[]);
    let from = mounted.at("from");
    fs::create_dir(&from).unwrap();
    let at = |name: &str| format!("{from}/{name}");
    fs::write(at("file"), "content").unwrap();
    set(&at("file"), "user.a", b"value").unwrap();
    set(&at("file"), "trusted.b", b"").unwrap();
    let of_one = acl(&[(1, 6, NOBODY), (2, 6, 1001), (4, 4, NOBODY), (0x10, 6, NOBODY), (0x20, 0, NOBODY)]);
    set(&at("file"), ACCESS, &of_one).unwrap();
    set(&from, DEFAULT, &of_one).unwrap();
    fs::hard_link(at("file"), at("link")).unwrap();
    std::os::unix::fs::symlink("file", at("symlink")).unwrap();
    run("mkfifo", &[&at("pipe")]);
    run("mknod", &[&at("whiteout"), "c", "0", "0"]);
    run("touch", &["--date", "2001-02-03 04:05:06.7", &at("file")]);
    run("cp", &["--archive", &from, &mounted.at("to")]);
    let to = |name: &str| format!("{}/{name}", mounted.at("to"));
    assert_eq!(list(&to("file")), [ACCESS, "trusted.b", "user.a"]);
    assert_eq!((get(&to("file"), ACCESS), get(&mounted.at("to"), DEFAULT)), (Ok(of_one.clone()), Ok(of_one)));
    assert!(is_whiteout(&to("whiteout")));
    let metadata = |path: String| fs::symlink_metadata(path).unwrap();
    assert!(metadata(to("pipe")).file_type().is_fifo() && metadata(to("symlink")).file_type().is_symlink());
    assert_eq!(metadata(to("file")).nlink(), 2);
    assert_eq!(metadata(to("file")).mtime_nsec(), 700_000_000);
    mounted.end();
}

/// A mount of an overlay, which is taken away at the end.
struct Overlay(String);

impl Overlay {
    fn new(lower: &str, upper: &str, work: &str, at: &str) -> Overlay {
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        let options = std::ffi::CString::new(options).unwrap();
        rustix::mount::mount("overlay", at, "overlay", MountFlags::empty(), &*options).unwrap();
        Overlay(at.to_owned())
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&*self.0, UnmountFlags::DETACH); // the test may have failed before
    }
}

#[test]
fn an_overlay_has_its_upper_layer_in_the_mount() {
    let (Some(()), Some(()), Some(())) = (require::root(), require::fuse(), require::overlay()) else { return };
    let mut mounted = Mounted::new(&[]);
    let (lower, merged) = (mounted.scene.stage.path("lower"), mounted.scene.stage.path("merged"));
    for directory in [&lower, &merged, &mounted.at("upper"), &mounted.at("work")] {
        fs::create_dir(directory).unwrap();
    }
    for name in ["kept", "removed", "changed", "moved", "folder/inside"] {
        let path = Path::new(&lower).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    let start = |mounted: &Mounted| Overlay::new(&lower, &mounted.at("upper"), &mounted.at("work"), &merged);
    let at = |name: &str| format!("{merged}/{name}");
    let overlay = start(&mounted);
    fs::remove_file(at("removed")).unwrap();
    fs::write(at("changed"), "by the upper layer").unwrap();
    fs::rename(at("moved"), at("elsewhere")).unwrap();
    fs::remove_dir_all(at("folder")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("folder/new"), "new").unwrap();
    set(&at("kept"), "user.a", b"value").unwrap();
    drop(overlay);
    for name in ["removed", "moved"] {
        assert!(is_whiteout(&mounted.at(&format!("upper/{name}"))), "{name}");
    }
    assert_eq!(get(&mounted.at("upper/folder"), "trusted.overlay.opaque").as_deref(), Ok(&b"y"[..]));
    mounted.again();
    let overlay = start(&mounted);
    let mut names: Vec<_> = fs::read_dir(&merged).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["changed", "elsewhere", "folder", "kept"]);
    assert_eq!(fs::read_to_string(at("changed")).unwrap(), "by the upper layer");
    assert_eq!(fs::read_to_string(at("elsewhere")).unwrap(), "moved");
    assert_eq!(fs::read_dir(at("folder")).unwrap().count(), 1);
    assert_eq!(get(&at("kept"), "user.a").as_deref(), Ok(&b"value"[..]));
    assert_eq!(fs::read_to_string(at("kept")).unwrap(), "kept");
    drop(overlay);
    mounted.end();
}
