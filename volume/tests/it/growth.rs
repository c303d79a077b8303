//! Volumes that are made larger: at every server, at some of them first, and at servers that end meanwhile.

use std::path::Path;
use std::time::Duration;

use remora_lab::Random;
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Left, Volume};
use remora_volume::rules::State;
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};
use remora_volume::wire::{Call, Findings, Reply};

use crate::cluster::{Checker, Cluster, Remotes, content, options, server_options, until, write_for};
use crate::processes::Small;
use crate::usage::Hand;

fn of(shape: Shape, blocks: u64) -> Shape {
    Shape::new(shape.volume(), blocks, shape.copies()).unwrap()
}

fn with_store(folder: &Path, number: usize) -> ServerOptions {
    ServerOptions { store: Some(folder.join(number.to_string())), ..server_options() }
}

/// Three servers, with stores if there is a folder.
fn cluster(blocks: u64, folder: Option<&Path>) -> Cluster {
    let Some(folder) = folder else { return Cluster::new(3, 2, blocks) };
    let mut cluster = Cluster::new(3, 2, blocks);
    for number in 0..3 {
        cluster.end(number);
        cluster.start_with(number, &with_store(folder, number));
    }
    Volume::create(cluster.shape, &cluster.addresses, &options()).unwrap();
    cluster
}

fn no_writer(shape: Shape, addresses: &[Address]) {
    until("the writer has gone", || {
        let statuses = Volume::statuses(shape, addresses, &options()).unwrap();
        statuses.iter().flatten().all(|status| status.writer_silent.is_none())
    });
}

fn grow(cluster: &Cluster, blocks: u64) -> Vec<Result<bool, String>> {
    let shapes = (cluster.shape, of(cluster.shape, blocks));
    Volume::grow(shapes, &cluster.addresses, &options(), |_, _| {}).unwrap()
}

/// Why no server has grown.
fn not_grown(cluster: &Cluster, blocks: u64) -> String {
    let shapes = (cluster.shape, of(cluster.shape, blocks));
    match Volume::grow(shapes, &cluster.addresses, &options(), |_, _| {}) {
        Err(Error::NotGrown { why, left }) if left == Left::default() => why,
        other => panic!("{other:?}"),
    }
}

/// What a test writes: some blocks, then zeros over some of them.
fn fill(volume: &Volume) {
    for first in (0..480).step_by(20) {
        volume.write(first, (first..first + 20).flat_map(|block| content(block, 1)).collect::<Vec<u8>>()).unwrap();
    }
    volume.zero(100, 50).unwrap();
    volume.flush().unwrap();
}

fn check(volume: &Volume, blocks: u64) {
    for first in (0..blocks).step_by(20) {
        let expected: Vec<u8> = (first..first + 20)
            .flat_map(|block| content(block, u64::from(block < 480 && !(100..150).contains(&block))))
            .collect();
        assert!(volume.read(first, 20).unwrap() == expected, "blocks from {first}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_volume_that_grows_keeps_every_block_and_its_servers_have_them_again() {
    let folder = tempfile::tempdir().unwrap();
    for stores in [None, Some(folder.path())] {
        let mut cluster = cluster(500, stores);
        let before = cluster.shape;
        let volume = cluster.open().unwrap();
        fill(&volume);
        until("all have it", || volume.members().len() == 3);
        drop(volume);
        let promised = |cluster: &Cluster| {
            let standings = Volume::standings(cluster.shape, &cluster.addresses, &options()).unwrap();
            standings.into_iter().map(Result::unwrap).collect::<Vec<_>>()
        };
        no_writer(before, &cluster.addresses);
        let standings = promised(&cluster);
        assert_eq!(grow(&cluster, 1500), [Ok(true), Ok(true), Ok(true)]);
        assert_eq!(grow(&cluster, 1500), [Ok(true), Ok(true), Ok(true)], "again");

        // As soon as it is agreed the size of before is refused, and what to do is said.
        let agreed = Volume::agree(of(before, 1500), &cluster.addresses, &options()).unwrap();
        assert_eq!(agreed, [Ok(true), Ok(true), Ok(true)]);
        assert!(cluster.open().is_err());
        let refused = Volume::standings(before, &cluster.addresses, &options()).unwrap()[0].clone().unwrap_err();
        assert!(refused.contains("another size") && refused.contains("remora volume grow"), "{refused}");
        let refused = Volume::grow((of(before, 1500), before), &cluster.addresses, &options(), |_, _| {});
        assert!(matches!(&refused, Err(Error::NotGrown { why, .. }) if why.contains("larger")), "{refused:?}");

        cluster.shape = of(before, 1500);
        assert_eq!(promised(&cluster), standings, "what was promised and written is as before");
        let volume = cluster.open().unwrap();
        check(&volume, 1500);
        volume.write(1490, content(1490, 0)).unwrap();
        volume.write(1499, content(1499, 7)).unwrap();
        assert!(volume.write(1500, content(1500, 7)).is_err());
        volume.flush().unwrap();
        until("all have it", || volume.members().len() == 3);
        let found = Volume::scrub(cluster.shape, &cluster.addresses, &options(), |_, _| {}).unwrap();
        let well = Findings { read: 1500, repaired: 0, damaged: 0, is_complete: true };
        assert_eq!(found, [Ok(well), Ok(well), Ok(well)]);
        drop(volume);
        let Some(folder) = stores else { continue };

        // All at once: nothing but the stores is left.
        (0..3).for_each(|number| cluster.end(number));
        for number in 0..3 {
            let names = std::fs::read_dir(folder.join(number.to_string())).unwrap();
            let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort_unstable();
            let mut expected = vec![before.volume().to_string(), "lock".to_owned()];
            expected.sort_unstable();
            assert_eq!(names, expected, "the smaller store is removed");
            // What a growth leaves that was interrupted.
            let left = folder.join(number.to_string()).join(format!("{}.grown", before.volume()));
            std::fs::create_dir(&left).unwrap();
            std::fs::write(left.join("extents"), "half").unwrap();
            cluster.start_with(number, &with_store(folder, number));
            assert!(!left.exists());
        }
        let volume = cluster.open().unwrap();
        assert!(volume.read(1499, 1).unwrap() == content(1499, 7));
        volume.write(1499, vec![0; BLOCK_BYTES]).unwrap();
        check(&volume, 1500);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_volume_grows_under_a_writer_only_if_that_is_wanted_and_that_writer_ends() {
    let cluster = cluster(500, None);
    let volume = cluster.open().unwrap();
    fill(&volume);
    until("all have it", || volume.members().len() == 3);
    let (larger, courteous) = (of(cluster.shape, 600), ClientOptions { take_over: false, ..options() });
    let refused = Volume::grow((cluster.shape, larger), &cluster.addresses, &courteous, |_, _| {});
    assert!(matches!(refused, Err(Error::InUse { .. })), "{refused:?}");
    // Nor does a server that is asked as if it had been left behind.
    let refused = Volume::grow((larger, larger), &cluster.addresses, &courteous, |_, _| {}).unwrap();
    assert!(refused.iter().all(|answer| answer.as_ref().unwrap_err().contains("a writer is at work")), "{refused:?}");
    volume.write(0, content(0, 1)).unwrap();
    assert_eq!(volume.members().len(), 3);

    let willing = ClientOptions { take_over: true, ..options() };
    let grown = Volume::grow((cluster.shape, larger), &cluster.addresses, &willing, |_, _| {}).unwrap();
    assert_eq!(grown, [Ok(true), Ok(true), Ok(true)]);
    assert!(volume.write(0, content(0, 2)).is_err(), "it was replaced");
    let volume = Volume::open(larger, &cluster.addresses, &options()).unwrap();
    check(&volume, 600);
}

/// The command is killed before any step, after each server that has grown, after the size is in the file, and after
/// the servers were told: a writer with the file opens the volume, and every copy has the size of the file. The other
/// size is refused from then on, also out of a store.
#[test]
#[ignore = "long: make test-all"]
fn a_command_that_is_killed_at_any_step_leaves_a_volume_that_opens_with_the_size_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    for (step, stores) in (0..=5).flat_map(|step| [(step, false), (step, true)]) {
        let folder = stores.then(|| folder.path().join(step.to_string()));
        let mut cluster = cluster(500, folder.as_deref());
        let volume = cluster.open().unwrap();
        fill(&volume);
        until("all have it", || volume.members().len() == 3);
        volume.flush().unwrap();
        drop(volume);
        let (before, larger) = (cluster.shape, of(cluster.shape, 700));
        no_writer(before, &cluster.addresses);
        (0..step.min(3)).for_each(|number| grow_one(larger, cluster.servers[number].as_ref().unwrap()));
        if step == 5 {
            let agreed = Volume::agree(larger, &cluster.addresses, &options()).unwrap();
            assert_eq!(agreed, [Ok(true), Ok(true), Ok(true)]);
        }
        if let Some(folder) = &folder {
            (0..3).for_each(|number| cluster.end(number));
            (0..3).for_each(|number| cluster.start_with(number, &with_store(folder, number)));
        }
        let (file, other) = if step < 4 { (before, larger) } else { (larger, before) };
        if step == 0 || step == 5 {
            Volume::open(other, &cluster.addresses, &options()).unwrap_err();
        }
        cluster.shape = file;
        let volume = cluster.open().unwrap();
        until("all have the size of the file", || volume.members().len() == 3);
        check(&volume, file.blocks());
        volume.write(file.blocks() - 1, content(file.blocks() - 1, 0)).unwrap();
        drop(volume);
        Volume::open(other, &cluster.addresses, &options()).unwrap_err();
        assert!(cluster.open().is_ok());
    }
}

/// Servers vanish between the question whether they can grow and the growth: with too few left the others go back.
#[test]
fn a_size_that_too_few_servers_take_is_given_up_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = cluster(500, Some(folder.path()));
    let volume = cluster.open().unwrap();
    fill(&volume);
    until("all have it", || volume.members().len() == 3);
    drop(volume);
    no_writer(cluster.shape, &cluster.addresses);
    cluster.end(1);
    cluster.end(2);
    let why = not_grown(&cluster, 700);
    assert!(why.contains("too few") && why.contains(&cluster.addresses[2].to_string()), "{why}");
    assert!(Volume::standings(cluster.shape, &cluster.addresses, &options()).unwrap()[0].is_ok(), "it has gone back");
    cluster.start_with(1, &with_store(folder.path(), 1));
    check(&cluster.open().unwrap(), 500);
}

#[test]
fn a_server_that_was_away_grows_when_it_is_back_beside_a_writer_which_takes_it_in() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = cluster(500, Some(folder.path()));
    let volume = cluster.open().unwrap();
    fill(&volume);
    drop(volume);
    cluster.end(2);
    let grown = grow(&cluster, 700);
    assert_eq!(grown[..2], [Ok(true), Ok(true)]);
    assert!(grown[2].is_err(), "{grown:?}");
    cluster.start_with(2, &with_store(folder.path(), 2));

    cluster.shape = of(cluster.shape, 700);
    let volume = cluster.open().unwrap();
    volume.write(650, content(650, 3)).unwrap();
    until("the third one grows, and is taken in", || volume.members().len() == 3);
    let courteous = ClientOptions { take_over: false, ..options() };
    let shapes = (cluster.shape, cluster.shape);
    let grown = Volume::grow(shapes, &cluster.addresses, &courteous, |_, _| {}).unwrap();
    assert_eq!(grown, [Ok(true), Ok(true), Ok(true)], "again, beside the writer");
    assert!(cluster.is_whole(2));
    volume.write(650, vec![0; BLOCK_BYTES]).unwrap();
    check(&volume, 700);
}

/// A server without a copy has nothing to promise, and does not count.
#[test]
fn a_server_without_a_copy_takes_the_new_size_from_the_next_writer() {
    let mut cluster = cluster(500, None);
    let volume = cluster.open().unwrap();
    fill(&volume);
    drop(volume);
    cluster.end(0);
    cluster.start(0);
    assert_eq!(grow(&cluster, 520), [Ok(false), Ok(true), Ok(true)]);
    cluster.shape = of(cluster.shape, 520);
    let volume = cluster.open().unwrap();
    until("it is taken in", || volume.members().len() == 3);
    check(&volume, 520);
    // Other numbers of copies are another volume's.
    let other = Shape::new(cluster.shape.volume(), 900, Copies::new(3, 1).unwrap()).unwrap();
    let refused = Volume::grow((other, other), &cluster.addresses, &options(), |_, _| {}).unwrap();
    assert!(refused.iter().all(Result::is_err), "{refused:?}");
}

#[test]
fn a_full_device_refuses_the_growth_and_the_copy_is_as_before() {
    // The copy fits, and a larger one beside it does not.
    let Some(small) = Small::new(24 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = cluster(500, Some(folder.path()));
    cluster.end(0);
    let shape = cluster.shape;
    let store = ServerOptions { store: Some(small.path().into()), ..server_options() };
    cluster.start_with(0, &store);
    let volume = cluster.open().unwrap();
    fill(&volume);
    until("it is taken in", || volume.members().len() == 3);
    drop(volume);
    let why = not_grown(&cluster, 4000);
    assert!(why.contains("the store") && why.contains("are free"), "{why}");
    assert_eq!(std::fs::read_dir(small.path()).unwrap().count(), 2, "the lock and the copy");
    let sizes = Volume::standings(shape, &cluster.addresses, &options()).unwrap();
    assert!(sizes.iter().all(Result::is_ok), "no copy has grown: {sizes:?}");
    let standing = cluster.servers[0].as_ref().unwrap().standing(shape.volume()).unwrap();
    assert_eq!(standing.state, State::Whole);
    // So do a server's bounds.
    let mut bounded = Cluster::with(1, 1, 500, &ServerOptions { memory: 5 << 20, ..server_options() });
    let why = not_grown(&bounded, 1000);
    assert!(why.contains("no memory") && why.contains("--memory"), "{why}");
    assert!(bounded.open().is_ok(), "{why}");
    bounded.end(0);
}

/// One of three servers has no memory for the new size: nothing changes, whichever one it is. Copies that have grown
/// all the same, as a client that was killed in between leaves them, go back to the size that the volume has, also
/// after a restart out of a store; but not if they have data behind it.
#[test]
#[ignore = "long: make test-all"]
fn a_size_that_one_server_refuses_is_no_size_and_there_is_a_way_back_from_it() {
    let folder = tempfile::tempdir().unwrap();
    for stores in [None, Some(folder.path())] {
        for short in 0..3 {
            let folder = stores.map(|folder| folder.join(short.to_string()));
            let mut cluster = cluster(500, folder.as_deref());
            let options_of = |number| match &folder {
                Some(folder) => with_store(folder, number),
                None => server_options(),
            };
            cluster.end(short);
            cluster.start_with(short, &ServerOptions { memory: 5 << 20, ..options_of(short) });
            let volume = cluster.open().unwrap();
            fill(&volume);
            until("all have it", || volume.members().len() == 3);
            volume.flush().unwrap();
            drop(volume);
            no_writer(cluster.shape, &cluster.addresses);
            let why = not_grown(&cluster, 1000);
            assert!(why.contains(&cluster.addresses[short].to_string()) && why.contains("no memory"), "{why}");

            // One has grown, and nothing else knows of it.
            let one = (short + 1) % 3;
            grow_one(of(cluster.shape, 1000), cluster.servers[one].as_ref().unwrap());
            let stood = |cluster: &Cluster| {
                let standings = Volume::standings(cluster.shape, &cluster.addresses, &options()).unwrap();
                standings.iter().filter(|standing| standing.is_ok()).count()
            };
            assert_eq!(stood(&cluster), 2);
            if folder.is_some() {
                cluster.end(one);
                cluster.start_with(one, &options_of(one));
            }
            let shapes = (cluster.shape, cluster.shape);
            let back = Volume::grow(shapes, &cluster.addresses, &options(), |_, _| {}).unwrap();
            assert_eq!((back, stood(&cluster)), (vec![Ok(true), Ok(true), Ok(true)], 3));
            let volume = cluster.open().unwrap();
            until("all have it", || volume.members().len() == 3);
            check(&volume, 500);
        }
    }
    // A size that a writer has used is not given up.
    let mut cluster = cluster(500, None);
    assert_eq!(grow(&cluster, 1000), [Ok(true), Ok(true), Ok(true)]);
    let before = cluster.shape;
    cluster.shape = of(before, 1000);
    let volume = cluster.open().unwrap();
    volume.write(999, content(999, 1)).unwrap();
    until("all have it", || volume.members().len() == 3);
    drop(volume);
    no_writer(cluster.shape, &cluster.addresses);
    let refused = Volume::grow((before, before), &cluster.addresses, &options(), |_, _| {}).unwrap();
    assert!(refused.iter().all(|answer| answer.as_ref().unwrap_err().contains("has used it")), "{refused:?}");
    assert!(cluster.open().unwrap().read(999, 1).unwrap() == content(999, 1));
}

/// Has one server's copy grow, as a client does that ends before it asks the next one.
fn grow_one(larger: Shape, server: &Server) {
    let grown = Hand::new(server).ask(&Call::Grow { shape: larger, takes_over: true }, 0);
    assert!(matches!(grown, Some(Reply::Grown { is_there: true })), "{grown:?}");
}

/// Servers are killed while they copy, and again while they go back. Each has one of the two sizes then, and a writer
/// with the former one opens the volume; then the command is run again.
#[test]
#[ignore = "long: make test-all"]
fn servers_that_are_killed_while_they_grow_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(4000, Some(folder.path()));
    let (mut checker, mut random) = (Checker::new(61), Random::new(61));
    let mut of_both = [0, 0];
    for round in 1..=6_u64 {
        let volume = servers.open(&options());
        checker.settle(&volume);
        write_for(&volume, &mut checker, Duration::from_millis(300));
        volume.flush().unwrap();
        drop(volume);
        let (shape, larger) = (servers.shape, of(servers.shape, 4000 + 1000 * round));
        let addresses = servers.addresses();
        no_writer(shape, &addresses);
        std::thread::scope(|scope| {
            let growing = scope.spawn(|| Volume::grow((shape, larger), &addresses, &options(), |_, _| {}));
            std::thread::sleep(Duration::from_micros(random.below(150_000)));
            (0..3).for_each(|number| servers.kill(number));
            let _ = growing.join().unwrap(); // too few have grown, or enough
        });
        (0..3).for_each(|number| servers.restart(number));
        let of_before = Volume::standings(shape, &servers.addresses(), &options()).unwrap();
        let has_grown = of_before.iter().filter(|standing| standing.is_err()).count();
        of_both[0] += 3 - has_grown;
        of_both[1] += has_grown;
        let addresses = servers.addresses();
        if round % 2 == 0 {
            std::thread::scope(|scope| {
                let opening = scope.spawn(|| drop(Volume::open(shape, &addresses, &options())));
                std::thread::sleep(Duration::from_micros(random.below(100_000)));
                (0..3).for_each(|number| servers.kill(number));
                opening.join().unwrap();
            });
            (0..3).for_each(|number| servers.restart(number));
            let volume = servers.open(&options());
            until("all have the size of before", || volume.members().len() == 3);
            assert!(checker.check(&volume) > 0);
            drop(volume);
            no_writer(shape, &servers.addresses());
        }
        let grown = Volume::grow((shape, larger), &servers.addresses(), &options(), |_, _| {}).unwrap();
        assert_eq!(grown, [Ok(true), Ok(true), Ok(true)], "round {round}");
        servers.shape = larger;
        let volume = servers.open(&options());
        assert!(checker.check(&volume) > 0);
    }
    println!("killed before and after the copy had the new size: {of_both:?}");
}
