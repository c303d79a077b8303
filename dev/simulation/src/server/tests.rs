#![allow(clippy::unwrap_used)]

use super::pair::Pair;
use super::serve::Answer;
use super::*;
use crate::wire::Ask;

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

/// A link that no server is at the other end of asks the first one.
const LINK: Conn = Conn(1_000_000);

fn asks(pair: &mut Pair, history: Option<(ReplId, u64)>, ask: Ask) {
    let psync = Message::Psync { history, login: String::new(), ask };
    pair.on(0, |server, step| server.receive(LINK, psync, step));
    pair.settle();
}

/// A primary with a replica and a full backlog of 1000 bytes, and the first offset and the end of that.
fn with_a_backlog(shares_its_buffer: bool) -> (Pair, u64, u64) {
    let mut pair = Pair::new(2, 1000);
    pair.servers[0].traits.shares_its_buffer = shares_its_buffer;
    pair.follow(1, Some(0));
    pair.write(0, 150);
    let (first, end) = pair.servers[0].backlog_range().unwrap();
    assert_eq!(end - first, 1000);
    (pair, first, end)
}

#[test]
fn a_link_that_is_not_read_keeps_a_shared_buffer_from_its_offset_on() {
    for shares in [true, false] {
        let (mut pair, _, end) = with_a_backlog(shares);
        let (replid, from) = (pair.servers[0].replid, end - 500);
        asks(&mut pair, Some((replid, from)), Ask::Unread);
        pair.write(0, 300);
        let kept = Answer::Continue;
        let expected = if shares { (from + 40, kept) } else { (end + 2000, Answer::Full) };
        let server = &pair.servers[0];
        assert_eq!((server.backlog_range().unwrap().0, server.answer(Some((replid, from + 40)))), expected);
        assert_eq!(server.kept_from(), expected.0);
        assert!(pair.is_in_step(1, 0), "the replica is sent everything");
        pair.on(0, |server, step| server.closed(LINK, step));
        assert_eq!(pair.servers[0].backlog_range().unwrap().0, end + 2000);
    }
}

#[test]
fn a_link_that_holds_back_too_much_is_closed() {
    let (mut pair, _, end) = with_a_backlog(true);
    let replid = pair.servers[0].replid;
    asks(&mut pair, Some((replid, end)), Ask::Unread);
    pair.write(0, 1004);
    assert_eq!(pair.servers[0].backlog_range().unwrap().0, end + 40, "10,000 bytes, and what the sockets took");
    pair.write(0, 1);
    assert_eq!(pair.servers[0].backlog_range().unwrap().0, end + 10_050 - 1000);
}

#[test]
fn a_backlog_is_over_full_while_a_link_was_not_sent_what_stands_behind_its_snapshot() {
    let (mut pair, _, end) = with_a_backlog(true);
    // It makes no room for the rest of the snapshot.
    asks(&mut pair, None, Ask::Stream);
    pair.write(0, 300);
    let server = &pair.servers[0];
    assert_eq!(server.backlog_range().unwrap(), (end, end + 3000));
    assert_eq!(server.kept_from(), end + 2000, "nothing promises that it stays");
    assert!(server.info().contains("repl_backlog_histlen:3000"));
    for _ in 0..6 {
        pair.on(0, |server, step| server.receive(LINK, Message::Room, step));
        pair.settle();
    }
    pair.on(0, |server, step| server.receive(LINK, Message::Ack { offset: 0 }, step));
    pair.settle();
    assert_eq!(pair.servers[0].backlog_range().unwrap(), (end + 2000, end + 3000));
}
