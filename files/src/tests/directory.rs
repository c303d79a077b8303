//! Random changes of files, here and in a directory of this machine.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::names::Rename;

#[derive(Clone, Debug)]
enum Step {
    Write { file: usize, offset: u64, length: usize },
    Append { file: usize, length: usize },
    Cut { file: usize, size: u64 },
    Punch { file: usize, offset: u64, length: u64, how: Allocate },
    Allocate { file: usize, offset: u64, length: u64, how: Allocate },
    Rename { file: usize, to: usize, how: Rename },
    Unlink { file: usize },
    Link { file: usize, to: usize },
    Fsync { file: usize },
    Reopen,
}

const FILES: usize = 4;

/// Offsets near the ends of blocks and clusters, and anywhere.
fn offsets() -> impl Strategy<Value = u64> {
    let near = (0..6_u64, prop::sample::select(vec![4096_u64, 65_536]), 0..5_u64)
        .prop_map(|(number, unit, around)| (number * unit + around).saturating_sub(2));
    prop_oneof![near, 0..300_000_u64]
}

fn steps() -> impl Strategy<Value = Step> {
    let file = 0..FILES;
    let length = prop_oneof![1..100_usize, 4000..4200_usize, 1..150_000_usize];
    let bytes = offsets().prop_map(|length| length.max(1)).boxed();
    let renames = prop::sample::select(vec![Rename::Replace, Rename::NoReplace, Rename::Exchange]);
    let punches = prop::sample::select(vec![Allocate::Punch, Allocate::ZeroKeep, Allocate::ZeroGrow]);
    let allocates = prop::sample::select(vec![Allocate::Keep, Allocate::Grow]);
    prop_oneof![
        4 => (file.clone(), offsets(), length.clone()).prop_map(|(file, offset, length)| Step::Write { file, offset, length }),
        4 => (file.clone(), length).prop_map(|(file, length)| Step::Append { file, length }),
        2 => (file.clone(), offsets()).prop_map(|(file, size)| Step::Cut { file, size }),
        2 => (file.clone(), offsets(), bytes.clone(), punches)
            .prop_map(|(file, offset, length, how)| Step::Punch { file, offset, length, how }),
        1 => (file.clone(), offsets(), bytes, allocates)
            .prop_map(|(file, offset, length, how)| Step::Allocate { file, offset, length, how }),
        1 => (file.clone(), file.clone(), renames).prop_map(|(file, to, how)| Step::Rename { file, to, how }),
        1 => file.clone().prop_map(|file| Step::Unlink { file }),
        1 => (file.clone(), file.clone()).prop_map(|(file, to)| Step::Link { file, to }),
        1 => file.prop_map(|file| Step::Fsync { file }),
        1 => Just(Step::Reopen),
    ]
}

fn name(file: usize) -> String {
    format!("file-{file}")
}

/// Files and what is in them.
fn contents(files: &Files) -> BTreeMap<String, Vec<u8>> {
    let mut found = Vec::new();
    files
        .readdir(ROOT, 2, |entry| {
            found.push((String::from_utf8(entry.name.to_vec()).unwrap(), entry.ino));
            true
        })
        .unwrap();
    found.into_iter().map(|(name, ino)| (name, files.all(ino))).collect()
}

fn contents_of(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

struct Both {
    disk: Arc<Memory>,
    files: Files,
    directory: TempDir,
    /// Makes the bytes of each write different.
    seed: u8,
}

impl Both {
    fn new() -> Both {
        let disk = formatted(BLOCKS);
        Both { files: open(&disk), disk, directory: tempfile::tempdir().unwrap(), seed: 0 }
    }

    fn inode(&self, file: usize) -> u64 {
        let found = self.files.lookup(ROOT, name(file).as_bytes());
        found.map_or_else(|_| self.files.make(ROOT, &name(file)), |attr| attr.ino)
    }

    fn file(&self, file: usize) -> fs::File {
        let path = self.directory.path().join(name(file));
        fs::File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        self.seed = self.seed.wrapping_add(7) | 1;
        (0..length).map(|at| self.seed.wrapping_add((at / 251) as u8)).collect()
    }

    fn carry_out(&mut self, step: &Step) {
        match *step {
            Step::Write { file, offset, length } => {
                let data = self.bytes(length);
                self.file(file).write_all_at(&data, offset).unwrap();
                self.files.put(self.inode(file), offset, &data);
            }
            Step::Append { file, length } => {
                let (data, real) = (self.bytes(length), self.file(file));
                real.write_all_at(&data, real.metadata().unwrap().len()).unwrap();
                let ino = self.inode(file);
                self.files.put(ino, self.files.getattr(ino).unwrap().size, &data);
            }
            Step::Cut { file, size } => {
                self.file(file).set_len(size).unwrap();
                self.files.cut(self.inode(file), size);
            }
            Step::Punch { file, offset, length, how } => {
                let real = self.file(file);
                if how == Allocate::ZeroGrow {
                    real.set_len(real.metadata().unwrap().len().max(offset + length)).unwrap();
                }
                let end = real.metadata().unwrap().len().min(offset + length);
                real.write_all_at(&vec![0; end.saturating_sub(offset) as usize], offset).unwrap();
                let ino = self.inode(file);
                wait(|done| self.files.fallocate(ino, offset, length, how, done)).unwrap();
            }
            Step::Allocate { file, offset, length, how } => {
                let real = self.file(file);
                if how == Allocate::Grow {
                    real.set_len(real.metadata().unwrap().len().max(offset + length)).unwrap();
                }
                let ino = self.inode(file);
                wait(|done| self.files.fallocate(ino, offset, length, how, done)).unwrap();
            }
            Step::Rename { file, to, how } => {
                let [from, to] = [name(file), name(to)];
                let paths = [&from, &to].map(|name| self.directory.path().join(name));
                let flags = match how {
                    Rename::Replace => rustix::fs::RenameFlags::empty(),
                    Rename::NoReplace => rustix::fs::RenameFlags::NOREPLACE,
                    Rename::Exchange => rustix::fs::RenameFlags::EXCHANGE,
                };
                let real = rustix::fs::renameat_with(rustix::fs::CWD, &paths[0], rustix::fs::CWD, &paths[1], flags);
                let ours = wait(|done| self.files.rename((ROOT, from.as_bytes()), (ROOT, to.as_bytes()), how, done));
                assert_eq!(ours.map_err(|error| error.errno()), real);
            }
            Step::Unlink { file } => {
                let real = rustix::fs::unlink(self.directory.path().join(name(file)));
                let ours = wait(|done| self.files.unlink(ROOT, name(file).as_bytes(), done));
                assert_eq!(ours.map_err(|error| error.errno()), real);
            }
            Step::Link { file, to } => {
                let ino = self.inode(file);
                drop(self.file(file));
                let real =
                    rustix::fs::link(self.directory.path().join(name(file)), self.directory.path().join(name(to)));
                let ours = wait(|done| self.files.link(ino, ROOT, name(to).as_bytes(), done));
                assert_eq!(ours.map(drop).map_err(|error| error.errno()), real);
            }
            Step::Fsync { file } => {
                drop(self.file(file));
                let ino = self.inode(file);
                wait(|done| self.files.fsync(ino, false, done)).unwrap();
            }
            Step::Reopen => {
                self.disk = Memory::after(BLOCKS, &self.disk.history(), false);
                self.files = open(&self.disk);
            }
        }
    }

    /// Whatever beginning of a step's writes is left, each byte is the one of before or of after it; and a file that is
    /// longer than before has all bytes of after.
    fn check_beginnings(
        &self,
        start: usize,
        before: &BTreeMap<String, Vec<u8>>,
        after: &BTreeMap<String, Vec<u8>>,
        step: &Step,
    ) {
        let history = self.disk.history();
        for end in start..=history.len() {
            let found = contents(&reopened(BLOCKS, &history[..end]));
            for (name, data) in &found {
                let empty = Vec::new();
                let [old, new] = [before, after].map(|contents| contents.get(name).unwrap_or(&empty));
                assert!(
                    [old.len(), new.len(), 0].contains(&data.len()),
                    "{name} after {end} of {}: {step:?}",
                    history.len()
                );
                if data.len() > old.len() && matches!(step, Step::Write { .. } | Step::Append { .. }) {
                    assert!(data == new, "{name} is longer after {end} of {}: {step:?}", history.len());
                }
                let byte = |data: &[u8], at| data.get(at).copied().unwrap_or(0);
                let is_either = (0..data.len()).all(|at| [byte(old, at), byte(new, at)].contains(&data[at]));
                // A rename changes which file it is, at once.
                let is_swapped = matches!(step, Step::Rename { .. } | Step::Link { .. } | Step::Unlink { .. });
                assert!(is_either || (is_swapped && (data == old || data == new)), "{name} after {end}: {step:?}");
            }
            let names: Vec<_> = found.keys().collect();
            let is_known = names == before.keys().collect::<Vec<_>>() || names == after.keys().collect::<Vec<_>>();
            assert!(is_known, "{names:?} after {end}: {step:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn files_are_what_those_of_this_machine_are(steps in prop::collection::vec(steps(), 1..60)) {
        let mut both = Both::new();
        for step in &steps {
            both.carry_out(step);
            prop_assert!(contents(&both.files) == contents_of(both.directory.path()), "{:?}", step);
        }
        let again = reopened(BLOCKS, &both.disk.history());
        prop_assert!(contents(&again) == contents_of(both.directory.path()), "opened again");
        prop_assert_eq!(again.statfs(), both.files.statfs());
    }

    #[test]
    #[ignore = "long: make test-all"]
    fn every_beginning_of_what_was_written_is_files_of_before_or_after_a_step(steps in prop::collection::vec(steps(), 1..12)) {
        let mut both = Both::new();
        for step in &steps {
            // A file that a step needs is made before.
            if let Step::Write { file, .. } | Step::Append { file, .. } | Step::Cut { file, .. } | Step::Punch { file, .. }
                | Step::Allocate { file, .. } | Step::Link { file, .. } | Step::Fsync { file } = step
            {
                drop(both.file(*file));
                both.inode(*file);
            }
            let before = contents(&both.files);
            let start = both.disk.history().len();
            both.carry_out(step);
            let after = contents(&both.files);
            if !matches!(step, Step::Reopen) {
                both.check_beginnings(start, &before, &after, step);
            }
        }
    }
}
