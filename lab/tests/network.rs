//! Hosts of a test network reach each other until the cable is cut, and again once it is mended.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::{Net, Server, Shape, require};

const SOON: Duration = Duration::from_secs(60);

#[test]
fn a_cut_cable_takes_the_link_between_two_servers_down_and_a_mended_one_brings_it_back() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let fast = |host| Server::builder(kind).config("repl-timeout", 2).config("repl-ping-replica-period", 1).on(host);
    let primary = fast(&here).config("repl-diskless-sync-delay", 0).start().unwrap();
    let replica = fast(&there).start().unwrap();

    replica.replicate(&primary).unwrap();
    replica.wait_for_link(SOON).unwrap();
    there.cut().unwrap();
    assert!(
        here.within(|| std::net::TcpStream::connect_timeout(&replica.address(), Duration::from_millis(300)))
            .unwrap()
            .is_err()
    );
    primary.client().unwrap().ok(&["SET", "written", "meanwhile"]).unwrap();
    wait_until("the primary to miss its replica", SOON, || {
        let count = primary.fact("connected_slaves")?;
        Ok(if count == "0" { Ok(()) } else { Err(count) })
    })
    .unwrap();

    there.heal().unwrap();
    wait_until("the write to arrive", SOON, || {
        let value = replica.client()?.text(&["GET", "written"])?;
        Ok(if value == "meanwhile" { Ok(()) } else { Err(value) })
    })
    .unwrap();
    assert_eq!(primary.fact("sync_full").unwrap(), "1");
}

#[test]
fn hosts_are_strangers_to_this_machine_and_to_other_networks() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let (one, other) = (Net::new().unwrap(), Net::new().unwrap());
    let server = Server::builder(kind).on(&one.host("server").unwrap()).start().unwrap();
    let address = server.address();
    let reach = move || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(300)).is_ok();
    assert!(one.host("neighbour").unwrap().within(reach).unwrap());
    // The second network's own host of that number has the same address, and nobody listens there.
    assert!(!other.host("stranger").unwrap().within(reach).unwrap());
    assert!(!reach());
}

#[test]
fn a_slow_cable_is_as_slow_as_it_was_told() {
    let Some(()) = require::shaping() else { return };
    let Some(kind) = require::redis() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("client").unwrap(), net.host("server").unwrap());
    let server = Server::builder(kind).on(&there).start().unwrap();
    there.shape(Shape::rate(4 << 20)).unwrap();
    let address = remora_lab::Address::Tcp(server.address());
    let mut client = here.within(|| remora_lab::Client::connect(&address)).unwrap().unwrap();
    let begun = Instant::now();
    client.ok(&["SET", "big", &"x".repeat(4 << 20)]).unwrap();
    let seconds = begun.elapsed().as_secs_f64();
    assert!((0.7..5.0).contains(&seconds), "4 MiB at 4 MiB/s took {seconds} s");
}
