//! Servers as processes of their own: killed, stopped and continued, while a checking writer goes on.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::cluster::{Remotes, options, until};
use crate::pattern::{Checker, all_are_whole, write_for};

#[test]
#[ignore = "long: make test-all"]
fn a_killed_server_is_hardly_noticed_and_taken_back_without_its_memory() {
    let mut servers = Remotes::new(2000);
    let mut checker = Checker::new(11);
    let volume = servers.open(&options());
    for number in [0, 1, 2] {
        write_for(&volume, &mut checker, Duration::from_millis(300));
        let longest = std::thread::scope(|scope| {
            let (volume, checker) = (&volume, &mut checker);
            let writer = scope.spawn(move || write_for(volume, checker, Duration::from_millis(600)));
            std::thread::sleep(Duration::from_millis(200));
            servers.kill(number);
            writer.join().unwrap()
        });
        println!("longest write while server {number} was killed: {longest:?}");
        assert!(longest < Duration::from_secs(1), "{longest:?}");
        checker.check(&volume);
        servers.restart(number);
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
    }
    let ledger = checker.ledger.lock().unwrap();
    println!("{} writes acknowledged", ledger.acknowledgements);
    assert!(ledger.failures.is_empty());
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_hangs_is_left_out_in_time_and_taken_back() {
    let mut servers = Remotes::new(2000);
    let mut checker = Checker::new(12);
    let options = options();
    let volume = servers.open(&options);
    write_for(&volume, &mut checker, Duration::from_millis(300));
    assert_eq!(volume.members().len(), 3);
    servers.servers[0].process.signal(Signal::STOP).unwrap();
    // The other two hold each write, until as much is under way at the one that hangs as it has room for. From then on
    // writes wait until it is left out.
    let longest = write_for(&volume, &mut checker, options.copy_limit + Duration::from_secs(1));
    println!("longest write while a server hung: {longest:?}");
    assert!(longest < options.copy_limit + Duration::from_millis(500), "{longest:?}");
    assert_eq!(volume.members().len(), 2);
    checker.check(&volume);
    servers.servers[0].process.signal(Signal::CONT).unwrap();
    all_are_whole(&volume, &mut checker);
    checker.check(&volume);
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
}

/// A read that was sent to a server that hangs is answered by another one.
#[test]
fn a_read_at_a_server_that_hangs_takes_the_time_limit_and_not_longer() {
    let mut servers = Remotes::new(100);
    let mut checker = Checker::new(13);
    let options = options();
    let volume = servers.open(&options);
    write_for(&volume, &mut checker, Duration::from_millis(100));
    for number in [0, 1, 2] {
        servers.servers[number].process.signal(Signal::STOP).unwrap();
        let began = Instant::now();
        checker.check(&volume);
        // Without the limit it would wait until the server goes on, which is later.
        assert!(began.elapsed() < options.copy_limit + BUSY, "{:?}", began.elapsed());
        servers.servers[number].process.signal(Signal::CONT).unwrap();
        all_are_whole(&volume, &mut checker);
    }
}

/// How much later than its limit a call may end on a busy machine.
const BUSY: Duration = Duration::from_secs(30);

/// The replaced writer is cut off from nothing: it still reaches every server.
#[test]
fn a_writer_that_hangs_while_it_is_replaced_acknowledges_nothing_more() {
    let servers = Remotes::new(500);
    let mut checker = Checker::new(14);
    let first = servers.open(&options());
    (0..500).for_each(|_| assert!(checker.write(&first)));
    let second = servers.open(&options());
    let acknowledged = checker.ledger.lock().unwrap().acknowledgements;
    (0..50).for_each(|_| {
        checker.write(&first);
    });
    until("the first writer has ended", || first.end().is_some());
    drop(first);
    let ledger = checker.ledger.lock().unwrap();
    // Between the promise and this count some of the first 500 may have been acknowledged, and none after.
    assert!(ledger.acknowledgements <= 500 && ledger.acknowledgements >= acknowledged);
    drop(ledger);
    checker.check(&second);
}
