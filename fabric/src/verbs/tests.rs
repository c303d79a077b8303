//! Tests of this transport alone: rights, keys, forks, and faults of cards and cables. The conformance suite tests what
//! is true of every transport. All but two run in the virtual machine that has devices, which the last test boots.

#![allow(clippy::unwrap_used)]

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use remora_lab::{RdmaVm, require};

use remora_rdma::{
    bindings as ffi,
    walkthrough::{send_and_receive, write_to_readable_memory},
};

use super::*;
use crate::{
    Completion, Denial, Error, Exporter, Memory, Pages, Peer, ReadError, ReadRequest, RegionId, RegionKey, Regions,
    Secret,
};

const ID: RegionId = RegionId { generation: 7, region: 1 };
const SESSION: u64 = 42;
const SECRET: Secret = [3; 32];
const REGION_BYTES: u64 = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn options_outside_their_range_are_refused_before_anything_is_opened() {
    let with = |change: fn(&mut VerbsOptions)| {
        let mut options = VerbsOptions::default();
        change(&mut options);
        options.check()
    };
    assert!(with(|_| {}).is_ok());
    let wrong: [fn(&mut VerbsOptions); 9] = [
        |options| options.queue_pairs = 9,
        |options| options.depth = 0,
        |options| options.queue_depth = 0,
        |options| options.reads_in_flight = 17,
        |options| options.piece_bytes = 5000,
        |options| options.retries = 7,
        |options| options.service_level = Some(16),
        |options| options.ack_timeout = 31,
        |options| options.connect_timeout = Duration::ZERO,
    ];
    for change in wrong {
        assert!(matches!(with(change), Err(Error::Misuse(_))));
    }
}

#[test]
fn a_machine_is_ready_or_says_what_is_missing_and_what_to_do() {
    let report = devices();
    match report.trouble {
        None => assert!(!report.devices.is_empty()),
        Some(sentence) => assert!(sentence.contains("; to use it, ") || sentence.contains("plug in"), "{sentence}"),
    }
    if report.devices.is_empty() {
        let error = VerbsConnector::new(VerbsOptions::default(), None, Vec::new()).err();
        assert!(matches!(error, Some(Error::NoRdma { .. })), "{error:?}");
    }
}

/// A source on node 1, and a reader on node 0.
struct World {
    exporter: VerbsExporter,
    memory: Arc<Memory>,
    sink: Arc<Memory>,
    options: VerbsOptions,
}

/// Options that detect a dead connection within a second.
fn quick() -> VerbsOptions {
    VerbsOptions { ack_timeout: 14, retries: 5, ..VerbsOptions::default() }
}

impl World {
    fn new(options: VerbsOptions) -> World {
        let exporter =
            VerbsExporter::listen(options.clone(), &[SocketAddr::new(RdmaVm::address(1).into(), 0)]).unwrap();
        let memory = filled(REGION_BYTES);
        exporter.export(ID, memory.clone()).unwrap();
        exporter.grant(SESSION, SECRET, Regions::All);
        World { exporter, memory, sink: empty(REGION_BYTES), options }
    }

    fn wait_for_connections(&self, wanted: usize) {
        until("the source to have let go of its connections", || self.exporter.connections() == wanted);
    }

    fn connect(&self) -> Result<VerbsPeer, Error> {
        connect_to(&self.exporter.key(ID).unwrap(), &self.options, &self.sink)
    }
}

fn connect_to(key: &RegionKey, options: &VerbsOptions, sink: &Arc<Memory>) -> Result<VerbsPeer, Error> {
    let connector = VerbsConnector::new(options.clone(), None, vec![RdmaVm::address(0).into()])?;
    connector.open(key, SESSION, &SECRET, sink.clone())
}

fn filled(length: u64) -> Arc<Memory> {
    let memory = empty(length);
    for page in 0..length / 4096 {
        memory.fill(page * 4096..(page + 1) * 4096, (page % 251) as u8).unwrap();
    }
    memory
}

fn empty(length: u64) -> Arc<Memory> {
    Arc::new(Memory::create("verbs-test", length, Pages::Small).unwrap())
}

fn read(tag: u64, offset: u64, length: u32) -> ReadRequest {
    ReadRequest { tag, offset, length, sink_offset: offset }
}

fn settle(peer: &mut VerbsPeer, count: usize) -> Vec<Completion> {
    let (begun, mut done) = (Instant::now(), Vec::new());
    while done.len() < count {
        assert!(begun.elapsed() < PATIENCE, "{} of {count} in {PATIENCE:?}", done.len());
        if peer.poll(&mut done).unwrap() == 0 {
            peer.wait(Duration::from_millis(100)).unwrap();
        }
    }
    done
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn ip(arguments: &[&str]) {
    assert!(Command::new("ip").args(arguments).status().unwrap().success(), "ip {arguments:?}");
}

/// The kernel's state of a device's only port.
fn port_state(device: &str) -> String {
    let report = devices();
    let port = report.devices.iter().find(|known| known.name == device).map(|known| known.ports[0].state.clone());
    port.unwrap_or_default()
}

fn until_retired(peer: &mut VerbsPeer) -> ReadError {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < PATIENCE, "not retired in {PATIENCE:?}");
        match peer.poll(&mut Vec::new()) {
            Ok(0) => peer.wait(Duration::from_millis(100)).unwrap(),
            Ok(_) => {}
            Err(Error::Retired(why)) => return why,
            Err(error) => panic!("{error}"),
        }
    }
}

fn assert_same(sink: &Memory, memory: &Memory) {
    assert_eq!(sink.crc32c(0..REGION_BYTES).unwrap(), memory.crc32c(0..REGION_BYTES).unwrap());
}

mod in_the_machine {
    use super::*;

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_read_outside_the_region_is_stopped_by_the_sources_card_too() {
        let world = World::new(quick());
        let mut peer = world.connect().unwrap();
        // As a reader that does not check its ranges.
        peer.set_length(u64::MAX);
        assert_eq!(
            peer.post_read(&[ReadRequest { tag: 1, offset: REGION_BYTES - 10, length: 20, sink_offset: 0 }]).unwrap(),
            1
        );
        assert_eq!(until_retired(&mut peer), ReadError::Denied(Denial::Revoked));
        let mut another = world.connect().unwrap();
        assert_eq!(another.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        assert_eq!(settle(&mut another, 1)[0].result, Ok(REGION_BYTES as u32));
        assert_same(&world.sink, &world.memory);
    }

    /// A reader that has the session, the key and the right to read, and writes.
    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_write_of_a_reader_is_refused_and_the_memory_is_unchanged() {
        let world = World::new(quick());
        let mut peer = world.connect().unwrap();
        let before = world.memory.crc32c(0..REGION_BYTES).unwrap();
        world.sink.fill(0..REGION_BYTES, 0xEE).unwrap();
        peer.post_write(4096, 100_000);
        // Soft-RoCE refuses the request because of the queue pair's rights, before it looks at the region's.
        until_retired(&mut peer);
        assert_eq!(world.memory.crc32c(0..REGION_BYTES).unwrap(), before);
        let mut another = world.connect().unwrap();
        assert_eq!(another.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        assert_eq!(settle(&mut another, 1)[0].result, Ok(REGION_BYTES as u32));
        assert_same(&world.sink, &world.memory);

        // The registration refuses it too, for itself.
        let (status, is_unchanged) =
            write_to_readable_memory(RdmaVm::address(1).into(), RdmaVm::address(0).into()).unwrap();
        assert_eq!((status, is_unchanged), (ffi::IBV_WC_REM_ACCESS_ERR, true));
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_locked_memory_limit_that_is_too_low_is_named_with_its_remedies() {
        // Root may lock what it likes, by a capability.
        let mut command = Command::new("prlimit");
        let test = "verbs::tests::by_command::a_source_that_may_lock_little_memory";
        command.args([&format!("--memlock={LITTLE}"), "setpriv", "--bounding-set", "-ipc_lock"]);
        command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--ignored", "--nocapture"]);
        let ran = command.output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_stale_key_opens_nothing() {
        let world = World::new(quick());
        let mut peer = world.connect().unwrap();
        peer.spoil_keys();
        assert_eq!(peer.post_read(&[read(1, 0, 100)]).unwrap(), 1);
        assert_eq!(until_retired(&mut peer), ReadError::Denied(Denial::Revoked));
    }

    /// A reader without a session that has guessed the key reads nothing: its queue pair has no rights before the
    /// proof.
    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn before_the_proof_even_the_right_key_opens_nothing() {
        let world = World::new(quick());
        let friend = world.connect().unwrap();
        let address = world.exporter.addresses()[0];
        let status =
            reader::read_without_proof(&world.options, RdmaVm::address(0).into(), address, ID, friend.remote());
        assert!(status.unwrap() != ffi::IBV_WC_SUCCESS);
        world.exporter.withdraw(SESSION);
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_source_that_is_killed_in_the_middle_of_reads_retires_the_peer() {
        let (mut source, key) = source_process();
        let sink = empty(REGION_BYTES);
        let mut peer = connect_to(&key, &quick(), &sink).unwrap();
        let reads: Vec<ReadRequest> = (0..16).map(|tag| read(tag, 0, REGION_BYTES as u32)).collect();
        assert_eq!(peer.post_read(&reads).unwrap(), 16);
        settle(&mut peer, 1);
        source.kill().unwrap();
        source.wait().unwrap();
        let begun = Instant::now();
        assert_eq!(until_retired(&mut peer), ReadError::PeerGone);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }

    /// One-sided: the source's process does nothing while its memory is read.
    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn reading_a_quarter_gibibyte_costs_the_sources_process_next_to_nothing() {
        const ROUNDS: u64 = (256 << 20) / REGION_BYTES;
        let (mut source, key) = source_process();
        let sink = empty(REGION_BYTES);
        let mut peer = connect_to(&key, &VerbsOptions::default(), &sink).unwrap();
        let before = cpu_nanos(source.id());
        for tag in 0..ROUNDS {
            assert_eq!(peer.post_read(&[read(tag, 0, REGION_BYTES as u32)]).unwrap(), 1);
            assert_eq!(settle(&mut peer, 1)[0].result, Ok(REGION_BYTES as u32));
        }
        assert!(before > 0, "it has a meter: starting took some");
        let used = Duration::from_nanos(cpu_nanos(source.id()) - before);
        println!("the source's process used {used:?} of processor time while 256 MiB were read");
        assert!(used < Duration::from_millis(20), "{used:?}");
        source.kill().unwrap();
        source.wait().unwrap();
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_cable_that_is_pulled_retires_the_peer_and_plugged_in_again_serves_the_next() {
        let world = World::new(VerbsOptions { connect_timeout: PATIENCE, ..quick() });
        let mut peer = world.connect().unwrap();
        cable(1, false);
        assert_eq!(peer.post_read(&[read(1, 0, 100_000)]).unwrap(), 1);
        let why = until_retired(&mut peer);
        cable(1, true);
        assert_eq!(why, ReadError::PeerGone);
        let mut next = world.connect().unwrap();
        assert_eq!(next.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        assert_eq!(settle(&mut next, 1)[0].result, Ok(REGION_BYTES as u32));
        assert_same(&world.sink, &world.memory);
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_thousand_connections_leave_nothing_behind() {
        const CONNECTIONS: usize = 1000;
        let world = World::new(VerbsOptions { connect_timeout: PATIENCE, ..VerbsOptions::default() });
        drop(world.connect().unwrap());
        // Objects of that connection which the source still holds must not be counted.
        world.wait_for_connections(0);
        let held = || {
            let entries = |folder: &str| std::fs::read_dir(folder).unwrap().count();
            [entries("/proc/self/fd"), entries("/proc/self/task")]
        };
        let before = held();
        for number in 0..CONNECTIONS {
            let mut peer = world.connect().unwrap();
            if number % 100 == 0 {
                assert_eq!(peer.post_read(&[read(1, 0, 5000)]).unwrap(), 1);
                assert_eq!(settle(&mut peer, 1)[0].result, Ok(5000));
            }
        }
        world.wait_for_connections(0);
        let begun = Instant::now();
        // A thread of an earlier test that has just ended may still be listed.
        let is_back = || held().iter().zip(&before).all(|(now, then)| now <= then);
        while !is_back() && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(is_back(), "before: {before:?}, after: {:?} (descriptors, threads)", held());
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn small_reads_of_neighbours_are_one_request_scattered_over_their_places() {
        const COUNT: u64 = 16;
        let world = World::new(quick());
        let mut peer = world.connect().unwrap();
        // Neighbours in the region, in reverse order in the sink.
        let place = |number: u64| (COUNT - 1 - number) * 1000;
        let reads: Vec<ReadRequest> = (0..COUNT)
            .map(|number| ReadRequest {
                tag: number,
                offset: 4000 + number * 600,
                length: 600,
                sink_offset: place(number),
            })
            .collect();
        assert_eq!(peer.post_read(&reads).unwrap(), reads.len());
        let mut tags: Vec<u64> = settle(&mut peer, reads.len()).iter().map(|done| done.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..COUNT).collect::<Vec<_>>(), "each read completes by itself");
        assert_eq!(peer.requests_posted(), COUNT / u64::from(MAX_SCATTER));
        for read in reads {
            let (mut got, mut wanted) = ([0; 600], [0; 600]);
            world.sink.read(read.sink_offset, &mut got).unwrap();
            world.memory.read(read.offset, &mut wanted).unwrap();
            assert_eq!(got, wanted, "{read:?}");
        }
        // Reads that are not neighbours, and large ones, are requests of their own.
        let apart: Vec<ReadRequest> = (0..4).map(|number| read(number, number * 2000, 600)).collect();
        let large: Vec<ReadRequest> = (0..4).map(|number| read(number, number * 64_000, 64_000)).collect();
        for reads in [apart, large] {
            let before = peer.requests_posted();
            assert_eq!(peer.post_read(&reads).unwrap(), 4);
            assert!(settle(&mut peer, 4).iter().all(|done| done.result.is_ok()));
            assert_eq!(peer.requests_posted() - before, 4, "{reads:?}");
        }
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn what_was_chosen_is_what_the_card_says_of_the_queue_pair() {
        let options = VerbsOptions { service_level: Some(5), traffic_class: Some(104), reads_in_flight: 7, ..quick() };
        let world = World::new(options);
        let peer = world.connect().unwrap();
        let attributes = peer.attributes(ffi::IBV_QP_AV | ffi::IBV_QP_TIMEOUT | ffi::IBV_QP_RETRY_CNT);
        // Soft-RoCE accepts the service level but does not keep it.
        assert_eq!(attributes.ah_attr.grh.traffic_class, 104);
        assert_eq!((attributes.timeout, attributes.retry_cnt), (14, 5));
        assert_eq!(attributes.max_rd_atomic, 8, "the device counts in powers of two");
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_device_is_found_by_its_name_and_its_address_by_the_device() {
        let found = rdma_addresses().unwrap();
        for node in [0, 1] {
            let wanted = RdmaAddress { address: RdmaVm::address(node).into(), device: format!("rxe{node}"), port: 1 };
            assert!(found.contains(&wanted), "{wanted:?} is not in {found:?}");
        }
        assert_eq!(addresses_of("rxe1", Some(1)).unwrap(), [RdmaVm::address(1)]);
        for (device, port) in [("rxe1", Some(2)), ("mlx5_0", None)] {
            let error = addresses_of(device, port).unwrap_err().to_string();
            assert!(error.contains(device) && error.contains("rxe0 port 1 (10.77.0.1)"), "{error}");
        }
    }

    /// The transfer uses one port if the other is unreachable.
    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_port_that_is_out_of_reach_is_left_out_and_the_others_carry_the_transfer() {
        let ports: Vec<SocketAddr> = [2, 1].map(|node| SocketAddr::new(RdmaVm::address(node).into(), 0)).to_vec();
        let exporter = VerbsExporter::listen(quick(), &ports).unwrap();
        let memory = filled(REGION_BYTES);
        exporter.export(ID, memory.clone()).unwrap();
        exporter.grant(SESSION, SECRET, Regions::All);
        let options = VerbsOptions { queue_pairs: 4, connect_timeout: Duration::from_secs(3), ..quick() };
        let local = [3, 0].map(|node| RdmaVm::address(node).into()).to_vec();
        let sink = empty(REGION_BYTES);
        let key = exporter.key(ID).unwrap();
        let connector = VerbsConnector::new(options, None, local).unwrap();
        let mut both = connector.open(&key, SESSION, &SECRET, sink.clone()).unwrap();
        assert_eq!(both.devices(), ["rxe3", "rxe0", "rxe3", "rxe0"]);
        cable(2, false);
        assert_eq!(both.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        let why = until_retired(&mut both);
        let left = connector.open(&key, SESSION, &SECRET, sink.clone());
        cable(2, true);
        assert_eq!(why, ReadError::PeerGone);
        let mut left = left.unwrap();
        assert_eq!(left.devices(), ["rxe0", "rxe0"]);
        assert_eq!(left.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        assert_eq!(settle(&mut left, 1)[0].result, Ok(REGION_BYTES as u32));
        assert_same(&sink, &memory);
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_port_that_goes_down_and_comes_up_while_nothing_is_read_ends_nothing() {
        let world = World::new(VerbsOptions { connect_timeout: PATIENCE, ..quick() });
        let mut peer = world.connect().unwrap();
        let device = world.exporter.raw_devices().remove(0);
        let before = device.events();
        ip(&["link", "set", "eth1", "down"]);
        until("the port's going down to be heard of", || device.events().ports_down > before.ports_down);
        ip(&["link", "set", "eth1", "up"]);
        until("the port to be active", || port_state("rxe1") == "ACTIVE");
        assert_eq!(peer.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        assert_eq!(settle(&mut peer, 1)[0].result, Ok(REGION_BYTES as u32));
        assert_same(&world.sink, &world.memory);
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn an_address_that_changes_is_heard_of_and_another_one_serves_the_next() {
        let world = World::new(VerbsOptions { connect_timeout: PATIENCE, ..quick() });
        let device = world.exporter.raw_devices().remove(0);
        let before = device.events();
        ip(&["addr", "add", "10.77.0.77/24", "dev", "eth1"]);
        until("the new address to be heard of", || device.events().addresses_changed > before.addresses_changed);
        assert!(
            rdma_addresses().unwrap().iter().any(|at| at.address.to_string() == "10.77.0.77" && at.device == "rxe1")
        );
        let mut peer = world.connect().unwrap();
        assert_eq!(peer.post_read(&[read(1, 0, 5000)]).unwrap(), 1);
        assert_eq!(settle(&mut peer, 1)[0].result, Ok(5000), "readers by the old address are not disturbed");
        ip(&["addr", "del", "10.77.0.77/24", "dev", "eth1"]);
        assert!(!rdma_addresses().unwrap().iter().any(|at| at.address.to_string() == "10.77.0.77"));
    }

    /// As with a card that fails, and works again after a reset.
    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_device_that_dies_takes_its_readers_along_and_the_next_one_is_offered_at_the_same_address() {
        let world = World::new(VerbsOptions { connect_timeout: PATIENCE, ..quick() });
        world.exporter.prepare(&world.memory).unwrap();
        let key = world.exporter.key(ID).unwrap();
        let mut peer = connect_to(&key, &world.options, &world.sink).unwrap();
        let failed = world.exporter.raw_devices().remove(0);
        assert_eq!(peer.post_read(&[read(1, 0, 5000)]).unwrap(), 1);
        settle(&mut peer, 1);
        failed.mark_failed();
        assert_eq!(until_retired(&mut peer), ReadError::PeerGone);
        until("the source to offer nothing by RDMA", || world.exporter.key(ID).is_err());
        world.wait_for_connections(0);
        // Memory can be exported meanwhile: it waits for a device.
        let another = RegionId { region: 2, ..ID };
        world.exporter.export(another, filled(8192)).unwrap();
        assert!(world.exporter.key(another).is_err());
        failed.mark_working();
        until("the source to offer RDMA again", || world.exporter.key(ID).is_ok());
        // With the old key, whose address and port have not changed.
        let mut next = connect_to(&key, &world.options, &world.sink).unwrap();
        assert_eq!(next.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        assert_eq!(settle(&mut next, 1)[0].result, Ok(REGION_BYTES as u32));
        assert_same(&world.sink, &world.memory);
        let mut of_another = connect_to(&world.exporter.key(another).unwrap(), &world.options, &world.sink).unwrap();
        assert_eq!(of_another.post_read(&[read(1, 0, 8192)]).unwrap(), 1);
        assert_eq!(settle(&mut of_another, 1)[0].result, Ok(8192));
    }

    /// A process that forks must not pay for registered memory, and its child must not lose it.
    #[test]
    #[ignore = "runs in the RDMA machine"]
    #[allow(unsafe_code)] // fork(2)
    fn a_process_that_has_registered_memory_forks_at_once_and_its_child_sees_the_bytes() {
        let world = World::new(quick());
        let large = filled(256 << 20);
        world.exporter.export(RegionId { region: 2, ..ID }, large.clone()).unwrap();
        let mut peer = world.connect().unwrap();
        let begun = Instant::now();
        // SAFETY: The child, which has this thread alone, reads memory and calls `_exit`: no lock, no allocation, no
        // destructor.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut bytes = [0; 8];
            let seen = large.read(200 << 20, &mut bytes).is_ok() && bytes == [(((200u64 << 20) / 4096) % 251) as u8; 8];
            // SAFETY: Ends the child without running destructors of the parent's objects.
            unsafe { libc::_exit(i32::from(!seen)) };
        }
        let took = begun.elapsed();
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: The child is our own and was not waited for; the status is a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child saw the bytes");
        println!("forking with 256 MiB registered took {took:?}");
        assert!(took < Duration::from_millis(400), "copied eagerly, it takes a second here: {took:?}");
        // The card reads what is written afterwards.
        world.memory.fill(0..4096, 0xAB).unwrap();
        assert_eq!(peer.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        assert_eq!(settle(&mut peer, 1)[0].result, Ok(REGION_BYTES as u32));
        assert_same(&world.sink, &world.memory);
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_message_is_sent_and_received_and_one_that_is_too_long_is_an_error_on_both_sides() {
        let mut steps = Vec::new();
        let walked = send_and_receive(RdmaVm::address(1).into(), RdmaVm::address(0).into(), |step| steps.push(step));
        walked.unwrap_or_else(|error| panic!("{error} after {steps:#?}"));
        let steps = steps.join("\n");
        for words in ["by rxe0", "one message, both sides", "the listener has \"local", "the caller \"remote"] {
            assert!(steps.contains(words), "{words:?} is not in:\n{steps}");
        }
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn several_queue_pairs_over_several_ports_carry_one_transfer() {
        let ports: Vec<SocketAddr> = [1, 2].map(|node| SocketAddr::new(RdmaVm::address(node).into(), 0)).to_vec();
        let exporter = VerbsExporter::listen(quick(), &ports).unwrap();
        let memory = filled(REGION_BYTES);
        exporter.prepare(&memory).unwrap();
        exporter.export(ID, memory.clone()).unwrap();
        exporter.grant(SESSION, SECRET, Regions::All);
        assert_eq!(exporter.devices().len(), 2);
        let options = VerbsOptions { queue_pairs: 4, piece_bytes: 64 << 10, ..quick() };
        let local = [0, 3].map(|node| RdmaVm::address(node).into()).to_vec();
        let sink = empty(REGION_BYTES);
        let connector = VerbsConnector::new(options, None, local).unwrap();
        let mut peer = connector.open(&exporter.key(ID).unwrap(), SESSION, &SECRET, sink.clone()).unwrap();
        assert_eq!(peer.devices(), ["rxe0", "rxe3", "rxe0", "rxe3"]);
        assert_eq!(peer.post_read(&[read(1, 0, REGION_BYTES as u32)]).unwrap(), 1);
        assert_eq!(settle(&mut peer, 1)[0].result, Ok(REGION_BYTES as u32));
        assert_same(&sink, &memory);
        exporter.revoke(ID);
        assert!(Arc::strong_count(&memory) > 1, "prepared memory stays registered for the next region");
        exporter.forget(&memory);
        assert_eq!(Arc::strong_count(&memory), 1, "forgotten memory is not pinned");
    }
}

/// Bytes that [`by_command::a_source_that_may_lock_little_memory`] may lock.
const LITTLE: u64 = 64 << 10;

mod by_command {
    use super::*;

    /// Proves nothing, so it is outside of `in_the_machine`, whose tests are counted.
    #[test]
    #[ignore = "started by other tests, as a separate process"]
    fn source_in_a_separate_process() {
        let world = World::new(quick());
        let key: String = world.exporter.key(ID).unwrap().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        println!("\nkey={key}");
        // Until this process is killed, or the process that started it has ended.
        let _ = std::io::stdin().lines().next();
    }

    #[test]
    #[ignore = "started by another test, as a separate process with a low limit"]
    fn a_source_that_may_lock_little_memory() {
        let address = SocketAddr::new(RdmaVm::address(1).into(), 0);
        let exporter = VerbsExporter::listen(quick(), &[address]).unwrap();
        let refused = exporter.prepare(&filled(REGION_BYTES)).unwrap_err();
        let said = refused.to_string();
        for words in ["4194304 bytes of memory cannot be locked", "limit is 65536 bytes", "ulimit -l", "LimitMEMLOCK"] {
            assert!(said.contains(words), "{words:?} is not in: {said}");
        }
        assert!(matches!(refused, Error::NoRdma { .. }), "{refused:?}");
    }
}

/// A source in its own process, and the key to its region.
fn source_process() -> (Child, RegionKey) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = "verbs::tests::by_command::source_in_a_separate_process";
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let key = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("key=").map(str::to_owned)).unwrap();
    let bytes = (0..key.len()).step_by(2).map(|at| u8::from_str_radix(&key[at..at + 2], 16).unwrap()).collect();
    (child, RegionKey::from_bytes(bytes).unwrap())
}

/// Processor time of all threads of a process in nanoseconds: the first number of each thread's `schedstat`.
fn cpu_nanos(pid: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |thread: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(thread.path().join("schedstat")).unwrap();
        stat.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    threads.map(|thread| of(thread.unwrap())).sum()
}

/// Unplugs a node's cable from the bridge, or plugs it in.
fn cable(node: u8, plugged: bool) {
    let to: &[&str] = if plugged { &["master", "br0"] } else { &["nomaster"] };
    ip(&[&["link", "set", &format!("port{node}")], to].concat());
}

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn rights_keys_forks_and_faults_hold_in_the_virtual_machine() {
    let Some(machine) = require::rdma_vm() else { return };
    let passed = machine.nodes(4).run_ignored_tests("verbs::tests::in_the_machine", 1);
    assert_eq!(passed, 19);
}
