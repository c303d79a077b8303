use super::pair::Pair;
use super::serve::Answer;
use super::*;

#[test]
fn a_replica_gets_a_snapshot_and_then_the_stream() {
    let mut pair = Pair::new(2, 1000);
    pair.write(0, 3);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    pair.write(0, 20);
    assert!(pair.is_in_step(1, 0));
    assert_eq!((pair.servers[0].offset, pair.servers[1].full_copies), (200, (0, 1)));
}

#[test]
fn a_replica_that_comes_back_goes_on_where_it_was_if_the_backlog_reaches_back() {
    let mut pair = Pair::new(2, 1000);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    pair.follow(1, Some(7));
    pair.write(0, 50);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[0].full_copies.0, 1);
    pair.follow(1, Some(7));
    pair.write(0, 101);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[0].full_copies.0, 2, "the backlog was overrun");
}

#[test]
fn a_server_that_was_emptied_is_continued_unless_its_position_was_made_worthless() {
    let mut pair = Pair::new(2, 1000);
    pair.write(0, 3);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    pair.follow(1, Some(7));
    pair.servers[1].content = Content::EMPTY;
    pair.follow(1, Some(0));
    assert!(pair.servers[1].is_up() && !pair.is_in_step(1, 0), "the fault of a server emptied by a module");
    pair.follow(1, Some(7));
    pair.follow(1, None);
    pair.servers[1].content = Content::EMPTY;
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
}

#[test]
fn a_primary_that_was_shut_down_cleanly_goes_on_under_another_replid() {
    let mut pair = Pair::new(2, 1000);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    let before = pair.servers[0].replid;
    pair.stop(0, true);
    pair.on(0, Server::restart);
    assert_eq!(pair.servers[0].answer(Some((before, 51))), Answer::Continue);
    assert_eq!(pair.servers[0].answer(Some((before, 50))), Answer::Full, "no backlog outlives the process");
    pair.settle();
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[1].former, Some((before, 51)));
    assert_eq!(pair.servers[1].full_copies, (0, 1));
    pair.write(0, 5);
    assert!(pair.is_in_step(1, 0));
    pair.stop(0, false);
    pair.on(0, Server::restart);
    pair.settle();
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[1].full_copies, (0, 2), "a killed primary has lost what it wrote");
}

#[test]
fn a_promoted_server_goes_on_with_the_former_history_up_to_its_promotion() {
    let mut pair = Pair::new(3, 1000);
    pair.follow(1, Some(0));
    pair.follow(2, Some(1));
    pair.write(0, 5);
    assert!(pair.is_in_step(2, 0));
    let before = pair.servers[0].replid;
    pair.follow(1, None);
    assert_eq!(pair.servers[1].former, Some((before, 51)));
    pair.write(1, 2);
    pair.write(0, 3);
    assert_eq!(pair.servers[1].answer(Some((before, 51))), Answer::Continue);
    assert_eq!(pair.servers[1].answer(Some((before, 61))), Answer::Full);
    pair.settle();
    assert!(pair.is_in_step(2, 1) && pair.servers[2].full_copies.1 == 1);
    pair.follow(0, Some(1));
    assert!(pair.is_in_step(0, 1) && pair.servers[0].full_copies.1 == 1, "its writes are in no history of the other");
}
