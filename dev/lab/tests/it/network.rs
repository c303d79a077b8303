//! Hosts of a test network reach each other until the cable is cut, and again once it is connected.

use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::{BitRate, Host, Loss, Net, Server, Shape, net, require};

const SOON: Duration = Duration::from_secs(60);

/// The payload of a packet of 1514 bytes: 1448, after the headers of Ethernet, IP and TCP with its time stamps.
const PAYLOAD_SHARE: f64 = 1448.0 / 1514.0;

/// A rate that every machine reaches, however busy it is.
const SLOWEST: BitRate = BitRate(100_000_000);

/// How long a connection may take. On a machine that is busy, a packet within it can take some hundred milliseconds.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// How often a measurement is repeated until it is within its limits.
const TRIES: u32 = 4;

#[test]
#[ignore = "long: make test-all"]
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
    assert!(here.within(|| std::net::TcpStream::connect_timeout(&replica.address(), CONNECT_LIMIT)).unwrap().is_err());
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
#[ignore = "long: make test-all"]
fn two_hosts_can_be_cut_from_each_other_and_from_no_other_host() {
    let Some(()) = require::namespaces() else { return };
    let net = Net::new().unwrap();
    let [one, two, three] = ["one", "two", "three"].map(|name| net.host(name).unwrap());
    let listener = two.within(|| std::net::TcpListener::bind((two.address(), 0)).unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let reach = move || std::net::TcpStream::connect_timeout(&address, CONNECT_LIMIT).is_ok();
    let reached = || [&one, &three].map(|host| host.within(reach).unwrap());
    assert_eq!(reached(), [true, true]);
    one.cut_from(&two).unwrap();
    assert_eq!(reached(), [false, true]);
    one.heal_from(&two).unwrap();
    assert_eq!(reached(), [true, true]);
}

#[test]
fn hosts_are_isolated_from_this_machine_and_from_other_networks() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let (one, other) = (Net::new().unwrap(), Net::new().unwrap());
    let server = Server::builder(kind).on(&one.host("server").unwrap()).start().unwrap();
    let address = server.address();
    let reach = move || std::net::TcpStream::connect_timeout(&address, CONNECT_LIMIT).is_ok();
    assert!(one.host("neighbour").unwrap().within(reach).unwrap());
    // The second network's own host of that number has the same address, and no process listens there.
    assert!(!other.host("stranger").unwrap().within(reach).unwrap());
    assert!(!reach());
}

#[test]
fn programs_of_a_host_run_on_its_processors_only() {
    let Some(()) = require::namespaces() else { return };
    let net = Net::new().unwrap();
    let processors = |host: &remora_lab::Host| {
        let mut nproc = std::process::Command::new("nproc");
        host.enter(&mut nproc).unwrap();
        String::from_utf8(nproc.output().unwrap().stdout).unwrap().trim().parse::<usize>().unwrap()
    };
    assert_eq!(processors(&net.host_on("one", 0..1).unwrap()), 1);
    let all = std::thread::available_parallelism().unwrap().get();
    assert_eq!(processors(&net.host("any").unwrap()), all);
}

#[test]
#[ignore = "long: make test-all"]
fn a_limited_cable_carries_its_rate_both_ways() {
    let Some(()) = require::shaping() else { return };
    let Some(()) = require::iperf3() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("here").unwrap(), net.host("there").unwrap());
    for rate in [SLOWEST, BitRate(1_000_000_000)] {
        let payload = rate.0 as f64 / 8.0 * PAYLOAD_SHARE;
        here.shape(Shape::bits(rate.0)).unwrap();
        for direction in [(&here, &there), (&there, &here)] {
            let share = carried(direction, payload) / payload;
            assert!(share < 1.07, "{rate}: {share} of its payload");
            // How much of a fast cable is used depends on what else this machine does.
            assert!(rate.0 > SLOWEST.0 || share > 0.5, "{rate}: {share} of its payload");
        }
    }
    here.shape(Shape::default()).unwrap();
    let freed = net::bandwidth(Some((&here, &there)), Duration::from_secs(1)).unwrap();
    let slowest = SLOWEST.0 as f64 / 8.0;
    assert!(freed > 1.5 * slowest, "without a limit it carries {freed} B/s, and {slowest} with one");
}

/// The nearest to `wanted` of a few measurements: on a busy machine a single one says little.
fn carried(direction: (&Host, &Host), wanted: f64) -> f64 {
    let mut best = 0.0_f64;
    for _ in 0..TRIES {
        let carried = net::bandwidth(Some(direction), Duration::from_secs(1)).unwrap();
        if (carried - wanted).abs() < (best - wanted).abs() {
            best = carried;
        }
        if (best / wanted - 1.0).abs() < 0.05 {
            break;
        }
    }
    best
}

#[test]
fn bytes_that_a_host_sends_are_counted_at_its_cable() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let net = Net::new().unwrap();
    let (client, server) = (net.host("client").unwrap(), net.host("server").unwrap());
    let redis = Server::builder(kind).on(&server).start().unwrap();
    let before = (client.traffic().unwrap(), server.traffic().unwrap());
    let address = remora_lab::Address::Tcp(redis.address());
    let mut connection = client.within(|| remora_lab::Client::connect(&address)).unwrap().unwrap();
    connection.ok(&["SET", "big", &"x".repeat(10_000_000)]).unwrap();
    let (sent, received) =
        (client.traffic().unwrap().since(before.0).sent, server.traffic().unwrap().since(before.1).received);
    assert!((10_000_000..10_600_000).contains(&sent), "{sent}");
    // Except for what the systems at both ends send by themselves (IPv6's neighbours and groups, about 90 bytes each).
    assert!(sent.abs_diff(received) < 2_000, "{sent} sent, {received} received");
    // What stays on the host does not cross its cable.
    let before = server.traffic().unwrap();
    redis.client().unwrap().ok(&["SET", "big", &"x".repeat(10_000_000)]).unwrap();
    assert!(server.traffic().unwrap().since(before).sent < 10_000);
}

#[test]
fn a_lossy_cable_loses_and_a_mended_one_does_not() {
    let Some(()) = require::loss() else { return };
    let Some(kind) = require::redis() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("here").unwrap(), net.host("there").unwrap());
    let server = Server::builder(kind).on(&there).start().unwrap();
    let reach = || {
        let connect = || std::net::TcpStream::connect_timeout(&server.address(), Duration::from_millis(300)).is_ok();
        here.within(connect).unwrap()
    };
    there.lossy(Loss::percent(100.0).unwrap()).unwrap();
    assert!(!reach());
    there.lossy(Loss::percent(5.0).unwrap()).unwrap();
    // TCP compensates: all bytes arrive, later.
    let address = remora_lab::Address::Tcp(server.address());
    let mut client = wait_until("a connection", SOON, || {
        Ok(here.within(|| remora_lab::Client::connect(&address))?.map_err(|error| error.to_string()))
    })
    .unwrap();
    // The system counts a megabyte as about thirty packets, so one attempt in five loses none.
    let lost = |_| {
        client.ok(&["SET", "big", &"x".repeat(1_000_000)]).unwrap();
        assert_eq!(server.client().unwrap().int(&["STRLEN", "big"]).unwrap(), 1_000_000);
        let counters = here.within(|| std::fs::read_to_string("/proc/thread-self/net/snmp")).unwrap().unwrap();
        retransmitted(&counters) > 0
    };
    assert!((0..40).any(lost), "nothing was retransmitted");

    there.lossy(Loss::default()).unwrap();
    wait_until("a connection over the mended cable", SOON, || Ok(reach().then_some(()).ok_or("none".into()))).unwrap();
}

/// `Tcp: … RetransSegs …` of /proc/net/snmp: a line of names, a line of figures.
fn retransmitted(snmp: &str) -> u64 {
    let mut lines = snmp.lines().filter(|line| line.starts_with("Tcp:")).map(str::split_whitespace);
    let (names, figures) = (lines.next().unwrap(), lines.next().unwrap());
    names.zip(figures).find(|(name, _)| *name == "RetransSegs").unwrap().1.parse().unwrap()
}

/// A cable with a delay.
const FAR: Shape = Shape { rate: None, delay: Some(Duration::from_millis(20)) };

/// On a kernel without `netem`, the delay is measured in the virtual machine, whose kernel has it.
#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn a_delay_holds_and_an_error_names_the_missing_netem() {
    let Some(()) = require::shaping() else { return };
    match Net::new().unwrap().host("probe").unwrap().shape(FAR) {
        Ok(()) => in_the_machine::a_delay_holds(),
        Err(error) => {
            assert!(error.to_string().contains("netem"), "{error}");
            let Some(machine) = require::rdma_vm() else { return };
            assert_eq!(machine.run_ignored_tests("network::in_the_machine", 1), 1);
        }
    }
}

mod in_the_machine {
    use super::*;

    #[test]
    #[ignore = "runs in the RDMA machine"]
    pub(super) fn a_delay_holds() {
        let Some(()) = require::delay() else { return };
        let net = Net::new().unwrap();
        let (here, there) = (net.host("here").unwrap(), net.host("there").unwrap());
        there.shape(FAR).unwrap();
        let listener = there.within(|| std::net::TcpListener::bind((there.address(), 0))).unwrap().unwrap();
        let address = listener.local_addr().unwrap();
        let begun = Instant::now();
        drop(here.within(|| std::net::TcpStream::connect(address)).unwrap().unwrap());
        assert!(begun.elapsed() >= Duration::from_millis(40), "the round trip took {:?}", begun.elapsed());
    }
}

#[test]
fn a_slow_cable_has_the_rate_that_was_set() {
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
