//! What is asked of a volume without opening it: how its copies stand, and their removal.

use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Volume, new_id};
use remora_volume::message::State;
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};
use remora_volume::wire::Status;

use crate::cluster::{Cluster, options, server_options, until};

fn statuses(shape: Shape, addresses: &[Address]) -> Vec<Status> {
    let statuses = Volume::statuses(shape, addresses, &options()).unwrap();
    statuses.into_iter().map(Result::unwrap).collect()
}

fn memory_used(shape: Shape, addresses: &[Address]) -> Vec<u64> {
    statuses(shape, addresses).iter().map(|status| status.memory.bytes).collect()
}

#[test]
fn a_status_says_what_is_used_and_how_long_the_writer_was_silent() {
    let folder = tempfile::tempdir().unwrap();
    let store = Some(folder.path().to_owned());
    let cluster = Cluster::with(1, 1, 1000, &ServerOptions { store, ..server_options() });
    let before = statuses(cluster.shape, &cluster.addresses)[0];
    assert!(before.has_store && before.standing.state == State::Whole && before.writer_silent.is_none());
    assert!((1000 * 4096..1100 * 4096).contains(&before.memory.bytes), "{before:?}");
    assert_eq!((before.memory.most, before.staging.bytes), (1 << 30, 0));
    let volume = cluster.open().unwrap();
    volume.write(0, vec![1; 10 * BLOCK_BYTES]).unwrap();
    volume.flush().unwrap();
    let during = statuses(cluster.shape, &cluster.addresses)[0];
    assert!(during.writer_silent.is_some_and(|silent| silent < 10_000), "{during:?}");
    assert_eq!(during.durable, during.standing.applied);
    assert!(during.staging.bytes >= 4 << 20 && during.staging.most == 256 << 20, "{during:?}");
    drop(volume);
    until("the writer has gone", || statuses(cluster.shape, &cluster.addresses)[0].writer_silent.is_none());
    // A volume that no server knows.
    let unknown = Shape::new(new_id().unwrap(), 10, Copies::new(1, 1).unwrap()).unwrap();
    assert_eq!(statuses(unknown, &cluster.addresses)[0].standing.state, State::Empty);
}

#[test]
fn a_removed_volume_leaves_neither_memory_nor_files_and_one_with_a_writer_is_removed_by_consent_only() {
    let folder = tempfile::tempdir().unwrap();
    let store = Some(folder.path().join("0"));
    let mut cluster = Cluster::new(3, 2, 500);
    cluster.end(0);
    cluster.start_with(0, &ServerOptions { store: store.clone(), ..server_options() });
    let volume = cluster.open().unwrap();
    volume.write(0, vec![1; 10 * BLOCK_BYTES]).unwrap();
    until("all have it", || volume.members().len() == 3);
    let copy = folder.path().join("0").join(cluster.shape.volume().to_string());
    assert!(copy.is_dir());
    let courteous = ClientOptions { take_over: false, ..options() };
    let refused = Volume::remove(cluster.shape, &cluster.addresses, &courteous);
    assert!(matches!(refused, Err(Error::InUse { .. })), "{refused:?}");
    volume.write(0, vec![2; BLOCK_BYTES]).unwrap();
    assert_eq!(volume.members().len(), 3);
    drop(volume);
    until("the writer has gone", || {
        statuses(cluster.shape, &cluster.addresses).iter().all(|status| status.writer_silent.is_none())
    });

    let removed = Volume::remove(cluster.shape, &cluster.addresses, &courteous).unwrap();
    assert_eq!(removed, [Ok(true), Ok(true), Ok(true)]);
    assert!(!copy.exists());
    assert_eq!(memory_used(cluster.shape, &cluster.addresses), [0; 3]);
    assert!(statuses(cluster.shape, &cluster.addresses).iter().all(|status| status.standing.state == State::Empty));
    assert!(cluster.open().is_err());
    let again = Volume::remove(cluster.shape, &cluster.addresses, &courteous).unwrap();
    assert_eq!(again, [Ok(false), Ok(false), Ok(false)]);
    // It stays away after a restart.
    cluster.end(0);
    cluster.start_with(0, &ServerOptions { store, ..server_options() });
    assert_eq!(statuses(cluster.shape, &cluster.addresses)[0].standing.state, State::Empty);
}

#[test]
fn a_volume_is_removed_from_a_writer_at_work_if_that_is_wanted() {
    let cluster = Cluster::new(3, 2, 500);
    let volume = cluster.open().unwrap();
    volume.write(0, vec![1; 10 * BLOCK_BYTES]).unwrap();
    until("all are members", || volume.members().len() == 3);
    let removed = Volume::remove(cluster.shape, &cluster.addresses, &ClientOptions { take_over: true, ..options() });
    assert_eq!(removed.unwrap(), [Ok(true), Ok(true), Ok(true)]);
    until("the writer has ended", || volume.end().is_some());
    assert_eq!(memory_used(cluster.shape, &cluster.addresses), [0; 3]);
}

#[test]
fn a_volume_that_one_server_does_not_make_is_removed_at_the_others() {
    let small = ServerOptions { memory: 1 << 20, ..server_options() };
    let anywhere = format!("tcp:{}:0", crate::cluster::own_loopback()).parse().unwrap();
    let servers: Vec<_> = [&server_options(), &server_options(), &small]
        .into_iter()
        .map(|options| Server::start(&anywhere, options).unwrap())
        .collect();
    let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
    let shape = Shape::new(new_id().unwrap(), 1000, Copies::new(3, 2).unwrap()).unwrap();
    let failed = Volume::create(shape, &addresses, &options());
    let Err(Error::NotCreated { server, left, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!((server, left.0.len()), (addresses[2].to_string(), 0));
    assert_eq!(memory_used(shape, &addresses), [0; 3]);

    // One that is there already is left alone.
    let two = &addresses[..2];
    let shape = Shape::new(new_id().unwrap(), 100, Copies::new(2, 1).unwrap()).unwrap();
    Volume::create(shape, two, &options()).unwrap();
    assert!(Volume::create(shape, two, &options()).is_err());
    assert!(statuses(shape, two).iter().all(|status| status.standing.state == State::Whole));
}
