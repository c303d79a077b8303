//! Random changes against a plain map from paths to what they stand for, and every prefix of what was written.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use remora_volume::shape::BLOCK_BYTES;
use rustix::io::Errno;

use super::layout::{Area, CLUSTER_BYTES, Geometry, Head};
use super::log::{Found, Name, Place, Record, encode_frame, find_frame};
use super::tree::Tree;
use super::*;

/// Blocks as a copy has them after some of the writes.
#[derive(Clone)]
struct Copy(Vec<u8>);

impl Copy {
    fn new(geometry: Geometry) -> Copy {
        Copy(vec![0; (1 + 2 * geometry.area()) as usize * BLOCK_BYTES])
    }

    fn apply(&mut self, write: &BlocksToWrite) {
        let at = write.first as usize * BLOCK_BYTES;
        self.0[at..at + write.data.len()].copy_from_slice(&write.data);
    }

    fn load(&self) -> Result<Names, String> {
        let head = Head::parse(&self.0[..BLOCK_BYTES]).map_err(|error| error.to_string())?;
        let mut view = View::new(head);
        loop {
            let (first, most) = view.wants();
            let count = most.min(3);
            let at = first as usize * BLOCK_BYTES;
            let is_more =
                view.push(&self.0[at..at + count as usize * BLOCK_BYTES]).map_err(|error| error.to_string())?;
            if !is_more {
                return Names::of(view, head.geometry.blocks()).map_err(|error| error.to_string());
            }
            assert!(most > 0, "more than the area has");
        }
    }
}

/// Names, and everything that they had written.
struct World {
    names: Names,
    writes: Vec<BlocksToWrite>,
    /// The tree after this number of writes.
    states: Vec<(usize, Tree)>,
    now: i64,
}

fn load(writes: &[BlocksToWrite], geometry: Geometry) -> Result<Names, String> {
    let mut copy = Copy::new(geometry);
    writes.iter().for_each(|write| copy.apply(write));
    copy.load()
}

impl World {
    fn new(geometry: Geometry) -> World {
        let writes = Names::format(geometry, &New::default(), 5);
        let names = load(&writes, geometry).unwrap();
        let states = vec![(writes.len(), names.tree().clone())];
        World { names, writes, states, now: 1000 }
    }

    fn change<T>(&mut self, change: impl FnOnce(&mut Names, i64) -> Result<T, NamesError>) -> Result<T, NamesError> {
        self.now += 1;
        self.writes.extend(self.names.prepare());
        let result = change(&mut self.names, self.now);
        self.commit();
        result
    }

    fn commit(&mut self) {
        let written = self.names.commit();
        if let Some(blocks) = written {
            assert!(blocks.data.len() <= super::log::MOST_FRAME_BYTES + 2 * BLOCK_BYTES);
            self.writes.push(blocks);
            self.states.push((self.writes.len(), self.names.tree().clone()));
        }
        let step = self.names.step();
        assert!(step.iter().map(|blocks| blocks.data.len()).sum::<usize>() <= super::writer::MOST_STEP_BYTES);
        self.writes.extend(step);
    }

    /// A use of an inode is over, which nobody waits for.
    fn release(&mut self, ino: u64) {
        self.writes.extend(self.names.prepare());
        self.names.release(ino, 1).unwrap();
        match self.names.put_off() {
            true => self.writes.extend(self.names.step()),
            false => self.commit(),
        }
    }

    /// Every prefix of the writes is the names after one change, the last one that it has.
    fn check_prefixes(&self, geometry: Geometry) {
        let mut copy = Copy::new(geometry);
        let mut states = self.states.iter().peekable();
        let mut expected = None;
        for (count, write) in (1..).zip(&self.writes) {
            copy.apply(write);
            while states.peek().is_some_and(|(at, _)| *at <= count) {
                expected = states.next();
            }
            if let Some((_, tree)) = expected {
                let names = copy.load().unwrap_or_else(|error| panic!("after {count} writes: {error}"));
                assert!(names.tree() == tree, "after {count} of {} writes", self.writes.len());
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Make(String, bool),
    Link(String, String),
    Unlink(String),
    Rmdir(String),
    Rename(String, String, Rename),
    Set(String, u16),
    SetXattr(String, &'static str, usize),
    RemoveXattr(String, &'static str),
    RenameToWhiteout(String, String),
    CreateUnnamed(String, bool),
    Allocate(String, u64, u64),
    Resize(String, u64),
    Hold(String),
    ReleaseAll,
    Reopen,
}

fn paths() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec!["a", "b", "c", "long-name-of-a-file"]);
    prop::collection::vec(name, 1..4).prop_map(|names| names.join("/"))
}

fn xattrs() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["user.a", "trusted.overlay.opaque", "security.capability"])
}

fn steps() -> impl Strategy<Value = Step> {
    let how = prop::sample::select(vec![Rename::Replace, Rename::NoReplace, Rename::Exchange]);
    prop_oneof![
        6 => (paths(), any::<bool>()).prop_map(|(path, is_directory)| Step::Make(path, is_directory)),
        2 => (paths(), paths()).prop_map(|(path, to)| Step::Link(path, to)),
        2 => paths().prop_map(Step::Unlink),
        1 => paths().prop_map(Step::Rmdir),
        4 => (paths(), paths(), how).prop_map(|(path, to, how)| Step::Rename(path, to, how)),
        1 => (paths(), 0..0o10000_u16).prop_map(|(path, mode)| Step::Set(path, mode)),
        3 => (paths(), xattrs(), 0..300_usize).prop_map(|(path, name, length)| Step::SetXattr(path, name, length)),
        1 => (paths(), xattrs()).prop_map(|(path, name)| Step::RemoveXattr(path, name)),
        1 => (paths(), paths()).prop_map(|(path, to)| Step::RenameToWhiteout(path, to)),
        1 => (paths(), any::<bool>()).prop_map(|(path, is_linked)| Step::CreateUnnamed(path, is_linked)),
        3 => (paths(), 0..20_u64, 1..5_u64).prop_map(|(path, first, count)| Step::Allocate(path, first, count)),
        2 => (paths(), 0..20 * CLUSTER_BYTES).prop_map(|(path, size)| Step::Resize(path, size)),
        1 => paths().prop_map(Step::Hold),
        1 => Just(Step::ReleaseAll),
        1 => Just(Step::Reopen),
    ]
}

/// A path stands for a thing; several may stand for the same file.
#[derive(Default)]
struct Model {
    paths: BTreeMap<String, u64>,
    directories: BTreeSet<u64>,
    whiteouts: BTreeSet<u64>,
    /// The lengths of extended attributes of each thing.
    xattrs: BTreeMap<u64, BTreeMap<&'static str, usize>>,
}

impl Model {
    fn parent(path: &str) -> &str {
        path.rsplit_once('/').map_or("", |(parent, _)| parent)
    }

    /// The root is the empty path.
    fn find(&self, path: &str) -> Result<u64, Errno> {
        if path.is_empty() {
            return Ok(ROOT);
        }
        let parent = self.find(Model::parent(path))?;
        if !self.directories.contains(&parent) && parent != ROOT {
            return Err(Errno::NOTDIR);
        }
        self.paths.get(path).copied().ok_or(Errno::NOENT)
    }

    fn is_directory(&self, thing: u64) -> bool {
        self.directories.contains(&thing)
    }

    fn check_file(&self, thing: u64) -> Result<(), Errno> {
        match () {
            () if self.is_directory(thing) => Err(Errno::ISDIR),
            () if self.whiteouts.contains(&thing) => Err(Errno::INVAL),
            () => Ok(()),
        }
    }

    fn is_empty(&self, path: &str) -> bool {
        !self.paths.keys().any(|other| other.starts_with(&format!("{path}/")))
    }

    fn rename(&mut self, path: &str, to: &str, how: Rename) -> Result<(), Errno> {
        let moved = self.find(path)?;
        self.find(Model::parent(to))?;
        let replaced = match self.find(to) {
            Err(Errno::NOENT) => None,
            found => Some(found?),
        };
        let within = |outer: &str, inner: &str| inner.starts_with(&format!("{outer}/"));
        if self.is_directory(moved) && within(path, to) {
            return Err(Errno::INVAL);
        }
        match (how, replaced) {
            (Rename::NoReplace, Some(_)) => return Err(Errno::EXIST),
            (Rename::Exchange, None) => return Err(Errno::NOENT),
            (_, Some(replaced)) if replaced == moved => return Ok(()),
            (Rename::Exchange, Some(replaced)) => {
                if self.is_directory(replaced) && within(to, path) {
                    return Err(Errno::INVAL);
                }
                let [one, other] = [self.take(path), self.take(to)];
                self.put(to, one);
                self.put(path, other);
                return Ok(());
            }
            (_, Some(replaced)) => {
                match (self.is_directory(moved), self.is_directory(replaced)) {
                    (true, false) => return Err(Errno::NOTDIR),
                    (false, true) => return Err(Errno::ISDIR),
                    (true, true) if !self.is_empty(to) => return Err(Errno::NOTEMPTY),
                    _ => {}
                }
                self.paths.remove(to);
            }
            (_, None) => {}
        }
        let taken = self.take(path);
        self.put(to, taken);
        Ok(())
    }

    /// A path and all below it, without its beginning.
    fn take(&mut self, path: &str) -> Vec<(String, u64)> {
        let below = |other: &str| {
            other.strip_prefix(path).filter(|rest| rest.is_empty() || rest.starts_with('/')).map(String::from)
        };
        let found: Vec<_> = self.paths.iter().filter_map(|(other, thing)| Some((below(other)?, *thing))).collect();
        self.paths.retain(|other, _| below(other).is_none());
        found
    }

    fn put(&mut self, path: &str, things: Vec<(String, u64)>) {
        self.paths.extend(things.into_iter().map(|(rest, thing)| (format!("{path}{rest}"), thing)));
    }
}

/// The same by way of names.
fn walk(names: &Names, path: &str) -> Result<u64, NamesError> {
    path.split('/')
        .filter(|name| !name.is_empty())
        .try_fold(ROOT, |at, name| Ok(names.lookup(at, name.as_bytes())?.ino))
}

fn last(path: &str) -> &[u8] {
    path.rsplit('/').next().unwrap_or_default().as_bytes()
}

fn collect(names: &Names, ino: u64, path: &str, into: &mut BTreeMap<String, u64>) {
    let mut found = Vec::new();
    names
        .list(ino, 2, |entry| {
            found.push((String::from_utf8(entry.name.to_vec()).unwrap(), entry.ino, entry.kind));
            true
        })
        .unwrap();
    for (name, ino, kind) in found {
        let path = if path.is_empty() { name } else { format!("{path}/{name}") };
        if kind == Kind::Directory {
            collect(names, ino, &path, into);
        }
        into.insert(path, ino);
    }
}

/// Carries a step out on both, and returns what each says.
fn carry_out(world: &mut World, model: &mut Model, held: &mut Vec<u64>, step: &Step) -> [Result<(), Errno>; 2] {
    let found = |names: &Names, path: &str| walk(names, path);
    let (real, expected) = match step {
        Step::Make(path, is_directory) => {
            let kind = if *is_directory { NewKind::Directory } else { NewKind::File };
            let new = New { kind, mode: 0o640, uid: 1, gid: 2, umask: 0 };
            let made =
                world.change(|names, now| names.create(found(names, Model::parent(path))?, last(path), new, now));
            let expected = model.find(Model::parent(path)).and_then(|_| match model.find(path) {
                Ok(_) => Err(Errno::EXIST),
                Err(Errno::NOENT) => Ok(()),
                Err(error) => Err(error),
            });
            if let (Ok(attr), Ok(())) = (&made, &expected) {
                model.paths.insert(path.clone(), attr.ino);
                if *is_directory {
                    model.directories.insert(attr.ino);
                }
            }
            (made.map(drop), expected)
        }
        Step::Link(path, to) => {
            let real = world.change(|names, now| {
                let (ino, parent) = (found(names, path)?, found(names, Model::parent(to))?);
                names.link(ino, parent, last(to), now)
            });
            let expected = model.find(path).and_then(|thing| {
                model.find(Model::parent(to))?;
                if model.is_directory(thing) {
                    return Err(Errno::PERM);
                }
                match model.find(to) {
                    Ok(_) => Err(Errno::EXIST),
                    Err(Errno::NOENT) => Ok(thing),
                    Err(error) => Err(error),
                }
            });
            if let Ok(thing) = expected {
                model.paths.insert(to.clone(), thing);
            }
            (real.map(drop), expected.map(drop))
        }
        Step::Unlink(path) | Step::Rmdir(path) => {
            let is_unlink = matches!(step, Step::Unlink(_));
            let real = world.change(|names, now| {
                let parent = found(names, Model::parent(path))?;
                if is_unlink { names.unlink(parent, last(path), now) } else { names.rmdir(parent, last(path), now) }
            });
            let expected = model.find(path).and_then(|thing| match (is_unlink, model.is_directory(thing)) {
                (true, true) => Err(Errno::ISDIR),
                (false, false) => Err(Errno::NOTDIR),
                (false, true) if !model.is_empty(path) => Err(Errno::NOTEMPTY),
                _ => Ok(()),
            });
            if expected.is_ok() {
                model.paths.remove(path);
            }
            (real, expected)
        }
        Step::Rename(path, to, how) => {
            let real = world.change(|names, now| {
                let parent = found(names, Model::parent(path))?;
                names.lookup(parent, last(path))?;
                let to_parent = found(names, Model::parent(to))?;
                names.rename((parent, last(path)), (to_parent, last(to)), *how, now)
            });
            (real, model.rename(path, to, *how))
        }
        Step::Set(path, mode) => {
            let set = SetAttributes { mode: Some(*mode), modified: Some(SetTime::To(7)), ..SetAttributes::default() };
            let real = world.change(|names, now| names.set(found(names, path)?, set, now));
            (real, model.find(path).map(drop))
        }
        Step::SetXattr(path, name, length) => {
            let set = set_xattr(name.as_bytes(), &vec![b'x'; *length]);
            let real = world.change(|names, now| names.set_xattr(found(names, path)?, set, now));
            let expected = model.find(path);
            if let (Ok(thing), Ok(())) = (expected, real) {
                model.xattrs.entry(thing).or_default().insert(name, *length);
            }
            (real, expected.map(drop))
        }
        Step::RemoveXattr(path, name) => {
            let real = world.change(|names, now| names.remove_xattr(found(names, path)?, name.as_bytes(), now));
            let expected = model.find(path).and_then(|thing| {
                let removed = model.xattrs.get_mut(&thing).and_then(|xattrs| xattrs.remove(name));
                removed.map(drop).ok_or(Errno::NODATA)
            });
            (real, expected)
        }
        Step::RenameToWhiteout(path, to) => {
            let before = model.find(path);
            let real = world.change(|names, now| {
                let parent = found(names, Model::parent(path))?;
                names.lookup(parent, last(path))?;
                let to_parent = found(names, Model::parent(to))?;
                names.rename_to_whiteout((parent, last(path)), (to_parent, last(to)), Rename::Replace, (0, 0), now)
            });
            let expected = model.rename(path, to, Rename::Replace);
            // Two names of the same thing stay.
            if let (Ok(()), Ok(()), Err(Errno::NOENT), Ok(_)) = (real, expected, model.find(path), before) {
                let whiteout = walk(&world.names, path).unwrap();
                model.paths.insert(path.clone(), whiteout);
                model.whiteouts.insert(whiteout);
            }
            (real, expected)
        }
        Step::CreateUnnamed(path, is_linked) => {
            let new = New { kind: NewKind::File, mode: 0o666, uid: 1, gid: 2, umask: 0o22 };
            let real = world.change(|names, now| {
                let parent = found(names, Model::parent(path))?;
                names.create_unnamed(parent, new, *is_linked, now)
            });
            let expected = model.find(Model::parent(path)).and_then(|parent| {
                if parent == ROOT || model.is_directory(parent) { Ok(()) } else { Err(Errno::NOTDIR) }
            });
            if let (Ok(attr), Ok(())) = (real, expected) {
                assert_eq!((attr.links, attr.attributes.mode), (0, 0o644));
                let linked = world
                    .change(|names, now| names.link(attr.ino, found(names, Model::parent(path))?, last(path), now));
                let wanted = match model.find(path) {
                    _ if !is_linked => Err(Errno::NOENT),
                    Ok(_) => Err(Errno::EXIST),
                    Err(_) => Ok(()),
                };
                if linked != Err(NamesError::NoSpace) {
                    assert_eq!(linked.map(drop).map_err(NamesError::errno), wanted);
                }
                if linked.is_ok() {
                    model.paths.insert(path.clone(), attr.ino);
                }
                world.change(|names, _| names.release(attr.ino, 1)).unwrap();
                assert_eq!(world.names.attr(attr.ino).is_ok(), linked.is_ok());
            }
            (real.map(drop), expected)
        }
        Step::Allocate(path, first, count) => {
            let real = world.change(|names, now| {
                let ino = found(names, path)?;
                names.allocate(ino, *first..first + count)?;
                names.written(ino, (first + count) * CLUSTER_BYTES, now)?;
                names.settle(ino) // times that are only in memory are not in any prefix
            });
            let expected = model.find(path);
            (real, expected.and_then(|thing| model.check_file(thing)))
        }
        Step::Resize(path, size) => {
            let real = world.change(|names, now| names.resize(found(names, path)?, *size, now));
            let expected = model.find(path);
            (real, expected.and_then(|thing| model.check_file(thing)))
        }
        Step::Hold(path) => {
            let real = walk(&world.names, path).and_then(|ino| world.names.hold(ino).map(|attr| held.push(attr.ino)));
            (real, model.find(path).map(drop))
        }
        Step::ReleaseAll => {
            held.drain(..).for_each(|ino| world.release(ino));
            (Ok(()), Ok(()))
        }
        Step::Reopen => {
            held.clear();
            let geometry = world.names.head().geometry;
            world.names = load(&world.writes, geometry).unwrap();
            world.change(|names, _| names.remove_orphans(100)).unwrap();
            (Ok(()), Ok(()))
        }
    };
    [real.map_err(NamesError::errno), expected]
}

/// The smallest areas, so that images are written all the time.
fn small() -> Geometry {
    Geometry::with_area(4096, 8).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn names_are_what_a_map_of_paths_is_and_every_prefix_is_a_state(
        steps in prop::collection::vec(steps(), 1..250), area in 8..20_u64,
    ) {
        let geometry = Geometry::with_area(4096, area).unwrap();
        let mut world = World::new(geometry);
        let (mut model, mut held) = (Model::default(), Vec::new());
        for step in &steps {
            let [real, expected] = carry_out(&mut world, &mut model, &mut held, step);
            if real == Err(Errno::NOSPC) {
                break; // the areas are small
            }
            prop_assert_eq!(real, expected, "{:?}", step);
            let mut found = BTreeMap::new();
            collect(&world.names, ROOT, "", &mut found);
            prop_assert_eq!(&found, &model.paths, "{:?}", step);
        }
        for (path, ino) in &model.paths {
            let attr = world.names.attr(*ino).unwrap();
            let expected = match model.is_directory(*ino) {
                true => {
                    let inside = |other: &&String| Model::parent(other) == *path && model.is_directory(model.paths[*other]);
                    2 + model.paths.keys().filter(inside).count()
                }
                false => model.paths.values().filter(|other| *other == ino).count(),
            };
            prop_assert_eq!(attr.links as usize, expected, "{}", path);
            let found: BTreeMap<_, _> = world.names.xattrs(*ino).unwrap()
                .map(|name| (name.to_vec(), world.names.xattr(*ino, name).unwrap().len())).collect();
            let expected = model.xattrs.get(ino).cloned().unwrap_or_default();
            let expected = expected.into_iter().map(|(name, length)| (name.as_bytes().to_vec(), length));
            prop_assert_eq!(found, expected.collect(), "{}", path);
        }
        world.check_prefixes(geometry);
    }
}

/// Names of many files, until images have been written several times.
fn busy(geometry: Geometry, changes: u32) -> World {
    let mut world = World::new(geometry);
    let new = |kind| New { kind, mode: 0o600, uid: 0, gid: 0, umask: 0 };
    let directory = world.change(|names, now| names.create(ROOT, b"d", new(NewKind::Directory), now)).unwrap().ino;
    for number in 0..changes {
        // The later directory has a higher number than some of the files in it.
        if number == 30 {
            world.change(|names, now| names.create(ROOT, b"late", new(NewKind::Directory), now)).unwrap();
        }
        let name = format!("file-{}", u64::from(number) % (geometry.area() * 2)).into_bytes();
        let found = world.names.lookup(directory, &name).map(|attr| attr.ino);
        let ino = found.or_else(|_| {
            world.change(|names, now| names.create(directory, &name, new(NewKind::File), now)).map(|attr| attr.ino)
        });
        let ino = ino.unwrap();
        let first = u64::from(number % 7) * 2;
        world
            .change(|names, now| {
                names.allocate(ino, first..first + 1)?;
                names.written(ino, u64::from(number) * 100, now)?;
                names.settle(ino)
            })
            .unwrap();
        if let Ok(late) = world.names.lookup(ROOT, b"late") {
            let change = |names: &mut Names, now| match names.lookup(late.ino, &name) {
                Ok(_) => names.unlink(late.ino, &name, now),
                Err(_) => names.link(ino, late.ino, &name, now).map(drop),
            };
            world.change(change).unwrap();
        }
        match number % 11 {
            3 => world.change(|names, now| names.unlink(directory, &name, now)).unwrap(),
            5 => world.change(|names, _| names.unmap(ino, 1..9)).unwrap(),
            7 => world
                .change(|names, now| names.rename((directory, &name), (ROOT, &name), Rename::Replace, now))
                .unwrap(),
            _ => {}
        }
    }
    world
}

#[test]
#[ignore = "long: make test-all"]
fn images_are_written_while_names_change_and_every_prefix_is_a_state() {
    for area in [8, 9, 12, 33] {
        let geometry = Geometry::with_area(65536, area).unwrap();
        let world = busy(geometry, 3000);
        let heads = world.writes.iter().filter(|write| write.first == 0).count();
        assert!(heads > 5, "{heads} heads with areas of {area} blocks");
        world.check_prefixes(geometry);
    }
}

/// What an image has passed changes by entries that it has not passed: of a directory that comes last, and of one that
/// it is in the middle of.
#[test]
fn entries_that_an_image_has_not_passed_change_what_it_has() {
    let geometry = Geometry::with_area(65536, 16).unwrap();
    let mut world = World::new(geometry);
    let new = |kind| New { kind, mode: 0o600, uid: 0, gid: 0, umask: 0 };
    let name = |number: u64| format!("file-{number}-{}", "x".repeat(100)).into_bytes();
    let inodes: Vec<u64> = (0..80)
        .map(|number| {
            world.change(|names, now| names.create(ROOT, &name(number), new(NewKind::File), now)).unwrap().ino
        })
        .collect();
    let late = world.change(|names, now| names.create(ROOT, b"late", new(NewKind::Directory), now)).unwrap().ino;
    for round in 0..3000_u64 {
        let number = round * 7 % 80;
        let short = number.to_string().into_bytes();
        let change = |names: &mut Names, now| match (round % 3, names.lookup(late, &short)) {
            (0, _) => names
                .rename((ROOT, &name(number)), (ROOT, &name(number + 100)), Rename::Replace, now)
                .or_else(|_| names.rename((ROOT, &name(number + 100)), (ROOT, &name(number)), Rename::Replace, now)),
            (_, Ok(_)) => names.unlink(late, &short, now),
            (_, Err(_)) => names.link(inodes[number as usize], late, &short, now).map(drop),
        };
        world.change(change).unwrap();
    }
    world.check_prefixes(geometry);
}

/// In a copy the log ends at a write. Should it end anywhere else, that is noticed, or the names are those of before.
#[test]
#[ignore = "long: make test-all"]
fn a_log_that_is_cut_at_any_byte_is_a_prefix_or_damaged() {
    let geometry = small();
    let world = busy(geometry, 60);
    let mut copy = Copy::new(geometry);
    world.writes.iter().for_each(|write| copy.apply(write));
    let head = Head::parse(&copy.0[..BLOCK_BYTES]).unwrap();
    let area = geometry.area_at(head.area) as usize * BLOCK_BYTES;
    let (mut states, mut damaged) = (0, 0);
    for cut in head.image_bytes as usize..geometry.area_bytes() as usize {
        let mut cut_copy = copy.clone();
        cut_copy.0[area + cut..area + geometry.area_bytes() as usize].fill(0);
        match cut_copy.load() {
            Ok(names) => {
                states += 1;
                assert!(world.states.iter().any(|(_, tree)| tree == names.tree()), "cut at {cut}");
            }
            Err(_) => damaged += 1,
        }
    }
    assert!(states > 100 && damaged > 100, "{states} and {damaged}");
}

#[test]
fn a_changed_byte_of_an_area_is_damage_or_a_prefix() {
    let geometry = small();
    let world = busy(geometry, 60);
    let mut copy = Copy::new(geometry);
    world.writes.iter().for_each(|write| copy.apply(write));
    let head = Head::parse(&copy.0[..BLOCK_BYTES]).unwrap();
    let area = geometry.area_at(head.area) as usize * BLOCK_BYTES;
    for at in (0..geometry.area_bytes() as usize).step_by(3) {
        let mut damaged = copy.clone();
        damaged.0[area + at] ^= 0x40;
        if let Ok(names) = damaged.load() {
            assert!(world.states.iter().any(|(_, tree)| tree == names.tree()), "byte {at}");
        }
    }
}

#[test]
fn frames_of_an_earlier_lap_or_another_place_are_not_believed() {
    let mut frame = Vec::new();
    let place = Place { lap: 3, at: 64 };
    encode_frame(place, 9, &[Record::Gone { ino: 4 }], &mut frame);
    assert!(matches!(find_frame(place, &frame), Found::Frame { number: 9, .. }));
    assert_eq!(find_frame(Place { lap: 4, ..place }, &frame), Found::Other);
    assert_eq!(find_frame(Place { at: 65, ..place }, &frame), Found::Other);
    assert_eq!(find_frame(place, &[0; 64]), Found::Nothing);
    assert_eq!(find_frame(place, &frame[..20]), Found::Short(frame.len()));
}

fn attributes() -> Attributes {
    Attributes { mode: 0o644, uid: 1, gid: 2, accessed: 3, modified: 4, changed: 5 }
}

fn made(ino: u64, kind: Kind) -> Record {
    Record::Made { ino, kind, attributes: attributes(), device: 0, target: Box::default() }
}

fn named(parent: u64, ino: u64, name: &str) -> Record {
    let name: Name = name.as_bytes().into();
    Record::Named { parent, ino, time: 1, name }
}

/// What a hostile log could say: each is refused, and changes nothing.
#[test]
fn records_that_do_not_fit_are_refused() {
    let (directory, file) = (Kind::Directory, Kind::File);
    let run = |first, at, count| Run { first, at, count };
    let base = [
        made(1, directory),
        made(2, directory),
        made(3, directory),
        made(4, file),
        named(1, 2, "d"),
        named(2, 3, "e"),
        named(1, 4, "f"),
        Record::Mapped { ino: 4, run: run(0, 5, 3) },
    ];
    let mut tree = Tree::new(small());
    base.iter().for_each(|record| tree.apply(record).unwrap());
    tree.apply(&Record::Complete { next: 5 }).unwrap();
    let clusters = small().clusters();
    for record in [
        made(4, file),
        made(2, directory),
        made(u64::MAX, file),
        named(1, 9, "x"),
        named(1, 4, "d"),
        named(1, 3, "x"),
        named(1, 1, "x"),
        named(4, 3, "x"),
        named(9, 4, "x"),
        named(3, 2, "circle"),
        named(2, 2, "self"),
        Record::Unnamed { parent: 1, ino: 3, time: 1, name: b"d"[..].into() },
        Record::Gone { ino: 4 },
        Record::Gone { ino: 1 },
        Record::Gone { ino: 9 },
        Record::Complete { next: 9 },
        Record::Sized { ino: 2, size: 1, time: 1 },
        Record::Sized { ino: 4, size: MOST_FILE_BYTES + 1, time: 1 },
        Record::Mapped { ino: 4, run: run(2, 50, 1) },
        Record::Mapped { ino: 4, run: run(9, 7, 1) },
        Record::Mapped { ino: 4, run: run(9, 0, 0) },
        Record::Mapped { ino: 4, run: run(9, clusters, 1) },
        Record::Mapped { ino: 4, run: run(9, u32::MAX, u32::MAX) },
        Record::Mapped { ino: 4, run: run(u32::MAX, 60, 9) },
        Record::Mapped { ino: 2, run: run(9, 60, 1) },
        Record::Unmapped { ino: 2, first: 0, count: 1 },
        Record::Xattr { ino: 9, name: b"user.a"[..].into(), value: Box::default() },
        Record::Xattr { ino: 4, name: b"user.a"[..].into(), value: vec![0; MOST_XATTR_BYTES].into() },
        Record::NoXattr { ino: 4, name: b"user.a"[..].into() },
    ] {
        let before = tree.clone();
        assert!(tree.apply(&record).is_err(), "{record:?}");
        assert!(tree == before, "{record:?}");
    }
    // A circle within an image, where entries may come before what they stand for.
    let image = |records: &[Record]| {
        let mut tree = Tree::new(small());
        records.iter().try_for_each(|record| tree.apply(record))?;
        tree.apply(&Record::Complete { next: 9 })
    };
    let good = [made(1, directory), named(1, 2, "d"), made(2, directory)];
    assert_eq!(image(&good), Ok(()));
    for more in [
        vec![made(3, directory), made(4, directory), named(3, 4, "x"), named(4, 3, "y")],
        vec![named(2, 1, "root")],
        vec![named(1, 2, "again")],
        vec![named(1, 3, "nothing")],
        vec![made(3, directory), named(3, 4, "x"), made(4, file)],
        vec![made(9, file)],
        vec![
            made(3, file),
            made(4, file),
            Record::Mapped { ino: 3, run: run(0, 0, 2) },
            Record::Mapped { ino: 4, run: run(0, 1, 1) },
        ],
    ] {
        let records: Vec<Record> = good.iter().cloned().chain(more).collect();
        assert!(image(&records).is_err(), "{records:?}");
    }
}

#[test]
fn space_is_refused_before_anything_changes() {
    let geometry = Geometry::with_area(8 * 2 + 16 + 160, 8).unwrap();
    let mut world = World::new(geometry);
    let new = New { kind: NewKind::File, mode: 0o600, uid: 0, gid: 0, umask: 0 };
    let ino = world.change(|names, now| names.create(ROOT, b"f", new.clone(), now)).unwrap().ino;
    let all = u64::from(geometry.clusters());
    let before = world.names.tree().clone();
    assert_eq!(world.change(|names, _| names.allocate(ino, 0..all + 1).map(drop)), Err(NamesError::NoSpace));
    assert!(*world.names.tree() == before);
    world.change(|names, _| names.allocate(ino, 0..all).map(drop)).unwrap();
    assert_eq!(world.names.usage().free_blocks, 0);
    // What is freed is there at once if it is needed.
    world.change(|names, now| names.resize(ino, 0, now)).unwrap();
    world.change(|names, _| names.allocate(ino, 0..all).map(drop)).unwrap();
    // As many names as the areas have room for.
    let mut count = 0;
    let error = loop {
        let name = format!("another file, number {count}").into_bytes();
        let before = world.names.tree().clone();
        match world.change(|names, now| names.create(ROOT, &name, new.clone(), now)) {
            Ok(_) => count += 1,
            Err(error) => {
                assert!(*world.names.tree() == before);
                break error;
            }
        }
    };
    assert_eq!(error, NamesError::NoSpace);
    assert!((80..200).contains(&count), "{count} files");
    // Removing works, and makes room.
    world.change(|names, now| names.unlink(ROOT, b"another file, number 0", now)).unwrap();
    world.change(|names, now| names.create(ROOT, b"f2", new, now)).unwrap();
    world.check_prefixes(geometry);
}

fn set_xattr(name: &[u8], value: &[u8]) -> SetXattr {
    SetXattr { name: name.into(), value: value.into(), how: SetXattrHow::Any, drops_set_group_id: false }
}

fn new(kind: NewKind, mode: u16) -> New {
    New { kind, mode, uid: 0, gid: 0, umask: 0o22 }
}

#[test]
fn extended_attributes_are_there_or_not_as_they_are_asked_for() {
    let mut world = World::new(Geometry::of(4096).unwrap());
    let ino = world.change(|names, now| names.create(ROOT, b"f", new(NewKind::File, 0o666), now)).unwrap().ino;
    let mut set = |name: &[u8], value: &[u8], how| {
        world.change(|names, now| names.set_xattr(ino, SetXattr { how, ..set_xattr(name, value) }, now))
    };
    assert_eq!(set(b"user.a", b"1", SetXattrHow::Replace), Err(NamesError::NoXattr));
    assert_eq!(set(b"user.a", b"1", SetXattrHow::Create), Ok(()));
    assert_eq!(set(b"user.a", b"2", SetXattrHow::Create), Err(NamesError::Exists));
    assert_eq!(set(b"user.a", b"", SetXattrHow::Replace), Ok(()));
    for name in [&b"user."[..], b"trusted.", b"security.", b"user.\0", &[b"user.".as_slice(), &[b'x'; 251]].concat()] {
        assert_eq!(set(name, b"1", SetXattrHow::Any), Err(NamesError::Invalid), "{name:?}");
    }
    for name in [&b"system.nfs4_acl"[..], b"other", b"users.a"] {
        assert_eq!(set(name, b"1", SetXattrHow::Any), Err(NamesError::XattrNamespace), "{name:?}");
    }
    let most = MOST_XATTR_BYTES - b"user.a".len() - b"user.b".len() - 16;
    assert_eq!(set(b"user.b", &vec![7; most + 1], SetXattrHow::Any), Err(NamesError::XattrsTooLong));
    assert_eq!(set(b"user.b", &vec![7; most], SetXattrHow::Any), Ok(()));
    assert_eq!(set(b"user.c", b"", SetXattrHow::Any), Err(NamesError::XattrsTooLong));
    assert_eq!(world.names.xattr(ino, b"user.a"), Ok(&b""[..]));
    assert_eq!(world.names.xattrs(ino).unwrap().collect::<Vec<_>>(), [&b"user.a"[..], b"user.b"]);
    assert_eq!(world.change(|names, now| names.remove_xattr(ino, b"user.c", now)), Err(NamesError::NoXattr));
    world.change(|names, now| names.remove_xattr(ino, b"user.b", now)).unwrap();
    let asked = |name| world.names.xattr(ino, name).map(|_| ());
    assert_eq!(asked(b"user.b"), Err(NamesError::NoXattr));
    assert_eq!((asked(b"other"), asked(b"user.")), (Err(NamesError::XattrNamespace), Err(NamesError::Invalid)));
    // They take room for names, and give it back.
    let geometry = small();
    let mut world = World::new(geometry);
    let before = world.names.tree().image_bytes();
    let mut count = 0;
    let refused = loop {
        let made = world.change(|names, now| {
            let made = names.create(ROOT, format!("{count}").as_bytes(), new(NewKind::File, 0o666), now);
            made.and_then(|made| names.set_xattr(made.ino, set_xattr(b"user.a", &[7; 2000]), now))
        });
        match made {
            Ok(()) => count += 1,
            Err(error) => break error,
        }
    };
    assert_eq!((refused, count), (NamesError::NoSpace, 7), "in half of 32 KiB");
    for number in 0..=count {
        let _ = world.change(|names, now| names.unlink(ROOT, format!("{number}").as_bytes(), now));
    }
    assert_eq!(world.names.tree().image_bytes(), before);
    world.check_prefixes(geometry);
}

/// What was done at each step to permissions, as `acl(5)` and ext4 have it.
#[test]
fn access_control_lists_and_permission_bits_follow_each_other() {
    use super::inode::tests::list;
    const ACCESS: &[u8] = b"system.posix_acl_access";
    const DEFAULT: &[u8] = b"system.posix_acl_default";
    let mut world = World::new(Geometry::of(4096).unwrap());
    let directory = world.change(|names, now| names.create(ROOT, b"d", new(NewKind::Directory, 0o777), now)).unwrap();
    let file = world.change(|names, now| names.create(ROOT, b"f", new(NewKind::File, 0o2666), now)).unwrap().ino;
    assert_eq!(directory.attributes.mode, 0o755, "by the umask");
    let mode = |world: &World, ino| world.names.attr(ino).unwrap().attributes.mode;
    let value = |world: &World, ino, name| world.names.xattr(ino, name).map(<[u8]>::to_vec);
    let long = list(&[(1, 7), (2, 6), (4, 4), (0x10, 6), (0x20, 0)]);
    let set = |world: &mut World, ino, name, value: &[u8]| {
        world.change(|names, now| names.set_xattr(ino, set_xattr(name, value), now))
    };
    set(&mut world, file, ACCESS, &long).unwrap();
    assert_eq!((mode(&world, file), value(&world, file, ACCESS)), (0o2760, Ok(long.clone())), "the mask is shown");
    // The mask changes with chmod, and the owning group does not.
    let chmod = |mode| SetAttributes { mode: Some(mode), ..SetAttributes::default() };
    world.change(|names, now| names.set(file, chmod(0o644), now)).unwrap();
    let expected = list(&[(1, 6), (2, 6), (4, 4), (0x10, 4), (0x20, 4)]);
    assert_eq!((mode(&world, file), value(&world, file, ACCESS)), (0o644, Ok(expected)));
    // One that says no more than the bits do is not kept.
    set(&mut world, file, ACCESS, &list(&[(1, 7), (4, 5), (0x20, 1)])).unwrap();
    assert_eq!((mode(&world, file), value(&world, file, ACCESS)), (0o751, Err(NamesError::NoXattr)));
    assert_eq!(set(&mut world, file, ACCESS, b"rubbish"), Err(NamesError::Invalid));
    for name in [ACCESS, DEFAULT] {
        let removed = world.change(|names, now| names.remove_xattr(file, name, now));
        assert_eq!(removed, Ok(()), "one that is not there");
    }
    assert_eq!(set(&mut world, file, DEFAULT, &long), Err(NamesError::DefaultAcl));
    // A caller without the right to it loses the set-group-id bit.
    world.change(|names, now| names.set(file, chmod(0o2755), now)).unwrap();
    let kills = SetXattr { drops_set_group_id: true, ..set_xattr(ACCESS, &long) };
    world.change(|names, now| names.set_xattr(file, kills, now)).unwrap();
    assert_eq!(mode(&world, file), 0o760);
    // The default one is for what is made in the directory, without the umask.
    set(&mut world, directory.ino, DEFAULT, &long).unwrap();
    assert_eq!(mode(&world, directory.ino), 0o755);
    let make = |world: &mut World, name: &[u8], kind, mode| {
        world.change(|names, now| names.create(directory.ino, name, new(kind, mode), now)).unwrap()
    };
    let made = make(&mut world, b"f", NewKind::File, 0o666);
    let expected = list(&[(1, 6), (2, 6), (4, 4), (0x10, 6), (0x20, 0)]);
    assert_eq!((made.attributes.mode, value(&world, made.ino, ACCESS)), (0o660, Ok(expected)));
    assert_eq!(value(&world, made.ino, DEFAULT), Err(NamesError::NoXattr));
    let made = make(&mut world, b"d", NewKind::Directory, 0o777);
    assert_eq!((made.attributes.mode, value(&world, made.ino, DEFAULT)), (0o760, Ok(long.clone())));
    assert_eq!(value(&world, made.ino, ACCESS), Ok(long.clone()));
    let made = make(&mut world, b"l", NewKind::Symlink(b"f".to_vec()), 0o777);
    assert_eq!(value(&world, made.ino, ACCESS), Err(NamesError::NoXattr));
    let unnamed = world.change(|names, now| names.create_unnamed(directory.ino, new(NewKind::File, 0o640), true, now));
    assert_eq!(unnamed.unwrap().attributes.mode, 0o640);
    // A write by another takes what a program was trusted with.
    world.change(|names, now| names.set(file, chmod(0o6755), now)).unwrap();
    set(&mut world, file, b"security.capability", b"0123456789").unwrap();
    let drops = SetAttributes { drops_set_id: true, ..SetAttributes::default() };
    world.change(|names, now| names.set(file, drops, now)).unwrap();
    world.change(|names, _| names.drop_capabilities(file)).unwrap();
    assert_eq!((mode(&world, file), value(&world, file, b"security.capability")), (0o755, Err(NamesError::NoXattr)));
    world.check_prefixes(Geometry::of(4096).unwrap());
}

/// Attributes change while an image is written that has passed their inodes.
fn busy_xattrs() {
    let geometry = Geometry::with_area(65536, 16).unwrap();
    let mut world = World::new(geometry);
    let inodes: Vec<u64> = (0..40)
        .map(|number| {
            let name = format!("{number}").into_bytes();
            world.change(|names, now| names.create(ROOT, &name, new(NewKind::File, 0o600), now)).unwrap().ino
        })
        .collect();
    for round in 0..2000_usize {
        let ino = inodes[round * 7 % inodes.len()];
        let change = |names: &mut Names, now| match round % 5 {
            4 => names.remove_xattr(ino, b"user.a", now).or(Ok(())),
            _ => names.set_xattr(ino, set_xattr(b"user.a", &vec![round as u8; round % 200]), now),
        };
        world.change(change).unwrap();
    }
    let heads = world.writes.iter().filter(|write| write.first == 0).count();
    assert!(heads > 5, "{heads} heads");
    world.check_prefixes(geometry);
}

#[test]
fn extended_attributes_change_while_an_image_is_written() {
    use crate::Mutant;
    busy_xattrs();
    Mutant::set(Some(Mutant::XattrsNotPassedOn));
    let found = std::panic::catch_unwind(busy_xattrs);
    Mutant::set(None);
    assert!(found.is_err(), "the mutant lives");
}

/// Files that are held are removed, and released later.
fn busy_ends() {
    let geometry = Geometry::with_area(65536, 16).unwrap();
    let mut world = World::new(geometry);
    let name = |number: u64| format!("{number}-{}", "x".repeat(number as usize * 7 % 90)).into_bytes();
    let mut held = VecDeque::new();
    for number in 0..2000 {
        let made = world.change(|names, now| names.create(ROOT, &name(number), new(NewKind::File, 0o600), now));
        held.push_back((number, world.names.hold(made.unwrap().ino).unwrap().ino));
        if held.len() > 40 {
            for (number, ino) in held.drain(..number as usize % 40) {
                world.change(|names, now| names.unlink(ROOT, &name(number), now)).unwrap();
                world.release(ino);
            }
        }
    }
    let many: Vec<_> = held.drain(..).collect();
    many.iter().for_each(|(number, _)| {
        world.change(|names, now| names.unlink(ROOT, &name(*number), now)).unwrap();
    });
    let before = world.writes.len();
    many.iter().for_each(|(_, ino)| world.release(*ino));
    assert!(world.writes.len() <= before + 1, "{} writes for {} ends", world.writes.len() - before, many.len());
    world.commit();
    let heads = world.writes.iter().filter(|write| write.first == 0).count();
    assert!(heads > 5, "{heads} heads");
    world.check_prefixes(geometry);
}

#[test]
fn ends_of_inodes_wait_for_the_next_change_and_no_image_passes_them() {
    use crate::Mutant;
    busy_ends();
    Mutant::set(Some(Mutant::PutOffPastTheImage));
    let found = std::panic::catch_unwind(busy_ends);
    Mutant::set(None);
    assert!(found.is_err(), "the mutant lives");
}

#[test]
fn positions_of_a_directory_stay_while_it_changes() {
    let mut world = World::new(small());
    let new = New { kind: NewKind::File, mode: 0o600, uid: 0, gid: 0, umask: 0 };
    for number in 0..50 {
        world.change(|names, now| names.create(ROOT, format!("{number}").as_bytes(), new.clone(), now)).unwrap();
    }
    let mut seen = BTreeSet::new();
    let mut after = 0;
    for round in 0.. {
        let mut some = Vec::new();
        world
            .names
            .list(ROOT, after, |entry| {
                some.push((entry.name.to_vec(), entry.cookie));
                some.len() < 7
            })
            .unwrap();
        let Some((_, cookie)) = some.last() else { break };
        after = *cookie;
        assert!(some.iter().all(|(name, _)| seen.insert(name.clone())), "twice");
        world.change(|names, now| names.create(ROOT, format!("new-{round}").as_bytes(), new.clone(), now)).unwrap();
        if round == 2 {
            // What was seen goes away.
            let name = some[3].0.clone();
            world.change(|names, now| names.unlink(ROOT, &name, now)).unwrap();
        }
    }
    let expected = (0..50).map(|number| format!("{number}").into_bytes());
    assert!(expected.into_iter().all(|name| seen.contains(&name)) && seen.contains(&b".."[..]));
}

#[test]
fn a_volume_that_has_grown_has_more_clusters() {
    let geometry = Geometry::with_area(1024, 8).unwrap();
    let world = busy(geometry, 30);
    let mut copy = Copy::new(geometry);
    world.writes.iter().for_each(|write| copy.apply(write));
    let head = Head::parse(&copy.0[..BLOCK_BYTES]).unwrap();
    let mut view = View::new(head);
    let at = geometry.area_at(head.area) as usize * BLOCK_BYTES;
    assert!(!view.push(&copy.0[at..at + geometry.area_bytes() as usize]).unwrap());
    let names = Names::of(view.clone(), 2048).unwrap();
    let before = Names::of(view, 1024).unwrap().usage();
    assert_eq!(names.usage().free_blocks, before.free_blocks + 1024);
    assert_eq!(names.usage().free_inodes, before.free_inodes, "only an opening for writing moves the names");
    assert_eq!(names.head().geometry.blocks(), 2048);
}

/// The kernel does not ask for these, but nothing may rest on that.
#[test]
fn names_that_are_not_names_are_refused() {
    let mut world = World::new(small());
    let new = New { kind: NewKind::Directory, mode: 0o700, uid: 0, gid: 0, umask: 0 };
    let ino = world.change(|names, now| names.create(ROOT, b"d", new.clone(), now)).unwrap().ino;
    let before = world.names.tree().clone();
    for name in [&b"."[..], b"..", b"", b"a/b", b"a\0b", &[b'x'; 256]] {
        let errors = [
            world.change(|names, now| names.create(ino, name, new.clone(), now)).map(drop),
            world.change(|names, now| names.unlink(ino, name, now)),
            world.change(|names, now| names.rmdir(ino, name, now)),
            world.change(|names, now| names.rename((ino, name), (ROOT, b"x"), Rename::Replace, now)),
            world.change(|names, now| names.rename((ROOT, b"d"), (ino, name), Rename::Replace, now)),
            world.change(|names, now| names.rename((ROOT, b"d"), (ROOT, name), Rename::Exchange, now)),
        ];
        assert!(errors.iter().all(Result::is_err), "{name:?}: {errors:?}");
        assert!(*world.names.tree() == before, "{name:?}");
    }
}

mod by_command {
    use super::*;

    /// A measurement: how much memory a million files take, and how long their opening. Run it alone, with `--ignored`.
    #[test]
    #[ignore = "a measurement"]
    fn a_million_files() {
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
        };
        let geometry = Geometry::of(1 << 28).unwrap();
        let mut copy = Copy::new(geometry);
        copy.0.fill(std::hint::black_box(0)); // its pages are there before
        let write = |copy: &mut Copy, writes: Vec<BlocksToWrite>| writes.iter().for_each(|write| copy.apply(write));
        write(&mut copy, Names::format(geometry, &New::default(), 5));
        let mut names = copy.load().unwrap();
        let began = (std::time::Instant::now(), resident());
        let mut longest = std::time::Duration::ZERO;
        for number in 0..1_000_000_u64 {
            let started = std::time::Instant::now();
            let new = New { kind: NewKind::File, mode: 0o600, uid: 0, gid: 0, umask: 0 };
            write(&mut copy, names.prepare());
            let parent = if number % 1000 == 0 {
                let new = New { kind: NewKind::Directory, ..new.clone() };
                names.create(ROOT, format!("directory-{number}").as_bytes(), new, 9).unwrap().ino
            } else {
                names.lookup(ROOT, format!("directory-{}", number - number % 1000).as_bytes()).unwrap().ino
            };
            let ino = names.create(parent, format!("file-{number:08}").as_bytes(), new, 9).unwrap().ino;
            names.allocate(ino, 0..1).unwrap();
            names.written(ino, 1000, 9).unwrap();
            write(&mut copy, names.commit().into_iter().collect());
            write(&mut copy, names.step());
            longest = longest.max(started.elapsed());
        }
        let bytes = (resident() - began.1) / 1_000_000;
        println!("{bytes} bytes each, {:?} in all, {longest:?} at most", began.0.elapsed());
        let began = std::time::Instant::now();
        let again = copy.load().unwrap();
        println!("opened in {:?}, an image of {} bytes", began.elapsed(), again.tree().image_bytes());
        assert!(again.tree() == names.tree());
    }
}

#[test]
fn areas_are_found_by_their_numbers() {
    assert_eq!(Area::FIRST.other().other(), Area::FIRST);
    assert!(small().area_at(Area::FIRST) == 1 && small().area_at(Area::FIRST.other()) == 9);
}

fn records() -> impl Strategy<Value = Record> {
    let (ino, time) = (1..8_u64, any::<i64>());
    let name = prop::sample::select(vec!["a", "b", "c"]).prop_map(|name| Name::from(name.as_bytes()));
    let kinds = [Kind::File, Kind::Directory, Kind::Directory, Kind::Symlink, Kind::Fifo, Kind::CharacterDevice];
    let kind = prop::sample::select(kinds.to_vec());
    let xattr = prop::sample::select(vec![&b"user.a"[..], b"user.b"]).prop_map(Box::<[u8]>::from);
    let target = |kind| if kind == Kind::Symlink { Box::from(*b"target") } else { Box::default() };
    prop_oneof![
        4 => (ino.clone(), kind).prop_map(move |(ino, kind)| {
            let device = if kind == Kind::CharacterDevice { 7 } else { 0 };
            Record::Made { ino, kind, attributes: attributes(), device, target: target(kind) }
        }),
        1 => ino.clone().prop_map(|ino| Record::Gone { ino }),
        4 => (ino.clone(), ino.clone(), time, name.clone())
            .prop_map(|(parent, ino, time, name)| Record::Named { parent, ino, time, name }),
        1 => (ino.clone(), ino.clone(), time, name)
            .prop_map(|(parent, ino, time, name)| Record::Unnamed { parent, ino, time, name }),
        1 => ino.clone().prop_map(|ino| Record::Set { ino, attributes: attributes() }),
        1 => (ino.clone(), any::<u64>(), time).prop_map(|(ino, size, time)| Record::Sized { ino, size: size >> 12, time }),
        2 => (ino.clone(), 0..9_u32, 0..9_u32, 0..4_u32)
            .prop_map(|(ino, first, at, count)| Record::Mapped { ino, run: Run { first, at, count } }),
        2 => (ino.clone(), xattr.clone(), prop::collection::vec(any::<u8>(), 0..9))
            .prop_map(|(ino, name, value)| Record::Xattr { ino, name, value: value.into() }),
        1 => (ino.clone(), xattr).prop_map(|(ino, name)| Record::NoXattr { ino, name }),
        1 => (ino, 0..9_u32, any::<u32>()).prop_map(|(ino, first, count)| Record::Unmapped { ino, first, count }),
    ]
}

proptest! {
    /// What was not written by this program ends in names that are right, or is refused.
    #[test]
    fn any_records_are_names_or_refused(
        image in prop::collection::vec(prop::collection::vec(records(), 1..4), 0..6),
        log in prop::collection::vec(prop::collection::vec(records(), 1..4), 0..6),
    ) {
        let root = vec![made(1, Kind::Directory), made(2, Kind::Directory), named(1, 2, "d")];
        let end = vec![Record::Complete { next: 8 }];
        let image: Vec<_> = [root].into_iter().chain(image).chain([end]).collect();
        fuzzing::area(&fuzzing::encode_area(&image, &log));
    }

    #[test]
    fn records_come_back(record in records()) {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        prop_assert_eq!(bytes.len(), record.bytes());
        prop_assert_eq!(Record::decode(&mut bytes.as_slice()), Ok(record));
        for cut in 0..bytes.len() {
            prop_assert!(Record::decode(&mut &bytes[..cut]).is_err());
        }
    }
}
