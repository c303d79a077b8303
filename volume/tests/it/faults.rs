//! Servers that end and come back, and writers that are replaced.

use std::time::Duration;

use remora_volume::client::Error;
use remora_volume::writer::End;

use crate::cluster::{Cluster, until};
use crate::pattern::{Checker, content};

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_ends_under_load_is_missed_by_nobody_and_taken_back_without_its_memory() {
    let mut cluster = Cluster::new(3, 2, 500);
    let volume = cluster.open().unwrap();
    let mut checker = Checker::new(1);
    for round in 0..6 {
        (0..200).for_each(|_| assert!(checker.write(&volume)));
        let number = round % 3;
        cluster.end(number);
        (0..200).for_each(|_| assert!(checker.write(&volume)));
        checker.check(&volume);
        cluster.start(number);
        (0..200).for_each(|_| assert!(checker.write(&volume)));
        until("the copy is taken back", || cluster.is_whole(number));
    }
    volume.flush().unwrap();
    assert!(checker.check(&volume) > 400);
    assert_eq!(checker.ledger.lock().unwrap().acknowledgements, 6 * 600);
    // What the copies hold is the same, and the next writer finds it.
    drop(volume);
    let volume = cluster.open().unwrap();
    assert!(checker.check(&volume) > 400);
}

#[test]
fn writes_wait_below_the_number_that_must_hold_them_and_reads_go_on() {
    let mut cluster = Cluster::new(3, 2, 100);
    let volume = cluster.open().unwrap();
    let mut checker = Checker::new(2);
    (0..50).for_each(|_| assert!(checker.write(&volume)));
    volume.flush().unwrap();
    cluster.end(0);
    cluster.end(1);
    let before = checker.ledger.lock().unwrap().acknowledgements;
    // Not before both connections are known to be over: a read asks one that is left.
    checker.check(&volume);
    assert!(checker.write(&volume));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(checker.ledger.lock().unwrap().acknowledgements, before);
    cluster.start(0);
    // An empty server is taken in only after two others have confirmed, and one is left.
    std::thread::sleep(Duration::from_millis(500));
    assert!(!cluster.is_whole(0));
    assert_eq!(checker.ledger.lock().unwrap().acknowledgements, before);
}

/// Four times in a row, each time while the former writer has writes under way.
#[test]
fn a_second_writer_takes_over_and_the_first_one_acknowledges_nothing_more() {
    let cluster = Cluster::new(3, 2, 200);
    let mut checker = Checker::new(3);
    let mut volume = cluster.open().unwrap();
    for _ in 0..4 {
        let next = std::thread::scope(|scope| {
            let next = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                cluster.open().unwrap()
            });
            while volume.end().is_none() {
                checker.write(&volume);
            }
            next.join().unwrap()
        });
        assert!(matches!(volume.end(), Some(End::Fenced { .. })));
        assert!(matches!(volume.read(0, 1), Err(Error::Ended(End::Fenced { .. }))));
        assert!(matches!(volume.write(0, content(0, 1)), Err(Error::Ended(End::Fenced { .. }))));
        drop(volume); // completes what was under way
        let acknowledgements = checker.ledger.lock().unwrap().acknowledgements;
        assert!(checker.check(&next) > 100);
        checker.settle(&next);
        println!("{acknowledgements} writes were acknowledged, and none of them is missing");
        volume = next;
    }
    assert!(!checker.ledger.lock().unwrap().failures.is_empty(), "it was replaced while writes were under way");
}

#[test]
fn a_volume_whose_memory_is_gone_is_not_opened() {
    let mut cluster = Cluster::new(3, 2, 100);
    let volume = cluster.open().unwrap();
    volume.write(5, content(5, 1)).unwrap();
    volume.flush().unwrap();
    drop(volume);
    for number in [0, 1] {
        cluster.end(number);
        cluster.start(number);
    }
    let error = cluster.open().unwrap_err();
    assert!(matches!(error, Error::Ended(End::TooFew { found: 1, needed: 2 })), "{error}");
}

#[test]
fn a_wrong_token_opens_nothing() {
    let cluster = Cluster::new(1, 1, 10);
    let options = remora_volume::client::ClientOptions {
        security: remora_volume::Security::default(),
        copy_limit: Duration::from_secs(1),
        ..Default::default()
    };
    let opened = remora_volume::client::Volume::open(cluster.shape, &cluster.addresses, &options);
    assert!(matches!(opened, Err(Error::Ended(End::TooFew { found: 0, needed: 1 }))));
}
