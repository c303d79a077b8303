//! Names: directories, links, attributes.

use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes, Permissions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, FileType, FlockOperation, Mode, RenameFlags, XattrFlags};
use rustix::io::Errno;

use crate::mounted::in_every_way;

/// More names than one answer holds, with and without their attributes.
#[test]
#[ignore = "long: make test-all"]
fn a_long_directory_is_listed_once() {
    in_every_way(|at, _| {
        let folder = at.join("many");
        fs::create_dir(&folder).unwrap();
        let name = |number: usize| format!("{number}-{}", "n".repeat(number % 200));
        (0..1000).for_each(|number| drop(File::create(folder.join(name(number))).unwrap()));
        for _ in 0..2 {
            let listed: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()).collect();
            assert!(listed.iter().all(|entry| entry.metadata().unwrap().is_file()));
            let names: BTreeSet<String> = listed.iter().map(|e| e.file_name().into_string().unwrap()).collect();
            assert_eq!((listed.len(), names), (1000, (0..1000).map(name).collect()));
        }
        assert_eq!(fs::remove_dir(&folder).unwrap_err().kind(), std::io::ErrorKind::DirectoryNotEmpty);
        fs::remove_dir_all(&folder).unwrap();
        assert!(!folder.exists());
    });
}

#[test]
fn renames_obey_their_flags() {
    in_every_way(|at, _| {
        let [a, b, folder] = ["a", "b", "folder"].map(|name| at.join(name));
        fs::write(&a, "a").unwrap();
        fs::write(&b, "b").unwrap();
        fs::create_dir(&folder).unwrap();
        let rename = |from, to, flags| rustix::fs::renameat_with(CWD, from, CWD, to, flags);
        assert_eq!(rename(&a, &b, RenameFlags::NOREPLACE), Err(Errno::EXIST));
        rename(&a, &b, RenameFlags::EXCHANGE).unwrap();
        assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (b"b".to_vec(), b"a".to_vec()));
        let inside = folder.join("c");
        rename(&a, &inside, RenameFlags::NOREPLACE).unwrap();
        assert_eq!(rename(&a, &b, RenameFlags::EXCHANGE), Err(Errno::NOENT));
        fs::rename(&inside, &b).unwrap();
        assert_eq!(fs::read(&b).unwrap(), b"b");
        assert_eq!(rename(&b, &inside, RenameFlags::WHITEOUT), Err(Errno::INVAL));
        let other = at.join("other");
        fs::create_dir_all(other.join("deep")).unwrap();
        fs::rename(other.join("deep"), folder.join("deep")).unwrap();
        assert_eq!((fs::metadata(&other).unwrap().nlink(), fs::metadata(&folder).unwrap().nlink()), (2, 3));
        assert!(fs::rename(&folder, folder.join("deep/inside")).is_err(), "a directory moves into itself");
    });
}

#[test]
fn links_of_both_kinds_lead_to_a_file() {
    in_every_way(|at, _| {
        let [file, hard, soft] = ["file", "hard", "soft"].map(|name| at.join(name));
        fs::write(&file, "content").unwrap();
        fs::hard_link(&file, &hard).unwrap();
        let (of_file, of_hard) = (fs::metadata(&file).unwrap(), fs::metadata(&hard).unwrap());
        assert_eq!((of_file.ino(), of_hard.nlink()), (of_hard.ino(), 2));
        symlink("hard", &soft).unwrap();
        assert_eq!(fs::read_link(&soft).unwrap().to_str(), Some("hard"));
        fs::remove_file(&file).unwrap();
        assert_eq!(fs::read_to_string(&soft).unwrap(), "content");
        assert_eq!(fs::metadata(&hard).unwrap().nlink(), 1);
        let long = "t".repeat(4095);
        symlink(&long, at.join("long")).unwrap();
        assert_eq!(fs::read_link(at.join("long")).unwrap().to_str(), Some(&*long));
    });
}

#[test]
fn attributes_are_kept() {
    in_every_way(|at, _| {
        let path = at.join("file");
        let file = File::create(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::chown(&path, Some(1234), Some(5678)).unwrap();
        let modified = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
        let accessed = SystemTime::UNIX_EPOCH - Duration::new(5, 1);
        file.set_times(FileTimes::new().set_modified(modified).set_accessed(accessed)).unwrap();
        for _ in 0..2 {
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o640, 1234, 5678));
            assert_eq!((found.modified().unwrap(), found.accessed().unwrap()), (modified, accessed));
            assert!(found.ctime() > 1_700_000_000);
        }
        let root = fs::metadata(at).unwrap();
        assert!(root.is_dir() && root.ino() == 1);
        let free = rustix::fs::statvfs(at).unwrap();
        assert_eq!((free.f_blocks, free.f_namemax), (1 << 20, 255));
    });
}

#[test]
fn what_is_not_supported_is_refused() {
    in_every_way(|at, _| {
        let path = at.join("file");
        let file = File::create(&path).unwrap();
        let refused = rustix::fs::setxattr(&path, "user.name", b"value", XattrFlags::empty());
        assert_eq!(refused, Err(Errno::OPNOTSUPP));
        let pipe = rustix::fs::mknodat(CWD, at.join("pipe"), FileType::Fifo, Mode::RWXU, 0);
        assert_eq!(pipe, Err(Errno::PERM));
        rustix::fs::mknodat(CWD, at.join("made"), FileType::RegularFile, Mode::RWXU, 0).unwrap();
        assert!(fs::metadata(at.join("made")).unwrap().is_file());
        assert!(!fs::metadata(at.join("made")).unwrap().file_type().is_fifo());
        drop(File::create(at.join("n".repeat(255))).unwrap());
        let too_long = File::create(at.join("n".repeat(256))).unwrap_err();
        assert_eq!(too_long.raw_os_error(), Some(Errno::NAMETOOLONG.raw_os_error()));
        assert_eq!(File::create_new(&path).unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
        // The kernel keeps locks.
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        let second = File::open(&path).unwrap();
        assert_eq!(rustix::fs::flock(&second, FlockOperation::NonBlockingLockExclusive), Err(Errno::AGAIN));
    });
}
