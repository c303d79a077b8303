//! Content: reads and writes in all the ways that the system has. Names: directories, links, attributes.

use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use remora_lab::require;
use rustix::fs::{CWD, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

use crate::in_every_way;
use crate::pattern;

fn writable(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Around the sizes at which something changes: a page, what is copied or given away, the longest request.
#[test]
fn what_is_written_is_read() {
    in_every_way(|at, _| {
        for length in [0, 1, 4095, 4096, 4097, 65_535, 65_536, 131_073, 1 << 20, (1 << 20) + 1, 3_333_333] {
            let (path, content) = (at.join(format!("of-{length}")), pattern(length, length as u64));
            fs::write(&path, &content).unwrap();
            assert!(fs::read(&path).unwrap() == content, "{length} bytes");
            assert_eq!(fs::metadata(&path).unwrap().len(), length as u64);
        }
    });
}

#[test]
fn direct_requests_go_around_the_page_cache_and_agree_with_it() {
    in_every_way(|at, _| {
        let (path, content) = (at.join("direct"), pattern(2 << 20, 1));
        let mut direct = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(&path)
            .unwrap();
        direct.write_all(&content).unwrap();
        assert!(fs::read(&path).unwrap() == content);
        let mut expected = content;
        let buffered = writable(&path);
        for (place, length) in [(0, 4096), (4096, 8192), (1_000_000, 1 << 20), (5, 7)] {
            let piece = pattern(length, place);
            direct.write_all_at(&piece, place).unwrap();
            expected[place as usize..place as usize + length].copy_from_slice(&piece);
            let mut read = vec![0; length];
            buffered.read_exact_at(&mut read, place).unwrap();
            assert!(read == piece, "{length} bytes at {place}");
        }
        let piece = pattern(10_000, 77);
        buffered.write_all_at(&piece, 12_345).unwrap();
        expected[12_345..22_345].copy_from_slice(&piece);
        let mut read = vec![0; expected.len() + 10];
        direct.seek(SeekFrom::Start(0)).unwrap();
        let mut length = 0;
        while let count @ 1.. = direct.read(&mut read[length..]).unwrap() {
            length += count;
        }
        assert!(read[..length] == expected[..], "{length} bytes");
    });
}

#[test]
fn a_file_grows_by_appending_and_changes_its_length() {
    in_every_way(|at, _| {
        let path = at.join("log");
        let mut log = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        for line in 0..200 {
            writeln!(log, "line {line}").unwrap();
        }
        log.sync_all().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 200);
        let file = writable(&path);
        file.set_len(10).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"line 0\nlin");
        file.set_len(5000).unwrap();
        let content = fs::read(&path).unwrap();
        assert!(content.len() == 5000 && content[10..].iter().all(|byte| *byte == 0));
        drop(File::create(&path).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().len(), 0, "opened with O_TRUNC");
    });
}

#[test]
fn room_is_allocated_and_holes_are_made() {
    in_every_way(|at, _| {
        let file = writable(&at.join("holes"));
        file.write_all_at(&[7; 16_384], 0).unwrap();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, punch, 4096, 4096).unwrap();
        let mut content = vec![1; 16_384];
        file.read_exact_at(&mut content, 0).unwrap();
        assert!(content[4096..8192].iter().all(|byte| *byte == 0) && content[8192..].iter().all(|byte| *byte == 7));
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 100_000).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 100_000);
        assert!(file.metadata().unwrap().blocks() > 0);
        let refused = rustix::fs::fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096);
        assert_eq!(refused, Err(rustix::io::Errno::OPNOTSUPP));
        assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(5)).unwrap(), 100_000);
        assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(5)).unwrap(), 5);
        assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(100_000)), Err(rustix::io::Errno::NXIO));
    });
}

#[test]
fn an_unlinked_file_is_there_until_it_is_closed() {
    in_every_way(|at, files| {
        let path = at.join("open");
        let file = writable(&path);
        file.write_all_at(b"still here", 0).unwrap();
        let with_it = files.inodes();
        fs::remove_file(&path).unwrap();
        assert!(!path.exists());
        file.write_all_at(b"STILL", 0).unwrap();
        let mut content = [0; 10];
        file.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(&content, b"STILL here");
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        drop(file);
        crate::until("the kernel forgets it", || files.inodes() < with_it);
    });
}

#[test]
fn many_threads_use_it_at_once() {
    in_every_way(|at, _| {
        let shared = writable(&at.join("shared"));
        shared.set_len(8 << 16).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let shared = &shared;
                scope.spawn(move || {
                    let own = at.join(format!("own-{thread}"));
                    fs::create_dir(&own).unwrap();
                    for round in 0..20 {
                        let content = pattern(10_000 + round, thread);
                        let (first, second) = (own.join("first"), own.join("second"));
                        fs::write(&first, &content).unwrap();
                        fs::rename(&first, &second).unwrap();
                        assert!(fs::read(&second).unwrap() == content);
                        let piece = pattern(1 << 16, thread + round as u64);
                        shared.write_all_at(&piece, thread << 16).unwrap();
                        let mut read = vec![0; 1 << 16];
                        shared.read_exact_at(&mut read, thread << 16).unwrap();
                        assert!(read == piece, "thread {thread}");
                        fs::remove_file(&second).unwrap();
                    }
                    fs::remove_dir(&own).unwrap();
                });
            }
        });
    });
}

/// fio writes, reads and compares: by direct requests with several jobs on one file, and by mapped memory.
#[test]
#[ignore = "long: make test-all"]
fn fio_finds_what_it_has_written() {
    if require::fio().is_none() {
        return;
    }
    in_every_way(|at, _| {
        for engine in [&["--ioengine=psync", "--direct=1", "--numjobs=4", "--thread"][..], &["--ioengine=mmap"]] {
            let output = Command::new("fio")
                .args(["--name=verify", "--rw=randwrite", "--bsrange=4k-64k", "--size=4m", "--group_reporting"])
                .args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--fallocate=none"])
                // It would leave a file in the folder of these sources.
                .args(["--verify_state_save=0", "--directory"])
                .arg(at)
                .args(engine)
                .output()
                .unwrap();
            assert!(output.status.success(), "{engine:?}: {output:?}");
        }
    });
}

// Names: directories, links, attributes.

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
