//! The layer over RDMA, in the virtual machine that has devices: every size, cuts, receivers that hold messages, very
//! little memory, links that come and go. These tests are ignored on the host; the last test boots the machine once and
//! has this program run them.

use std::net::SocketAddr;
use std::time::Duration;

use remora_lab::{RdmaVm, require};
use remora_messenger::stack::rdma::RdmaOptions;
use remora_messenger::{Address, Options, Policy, Polling, SendError};

use super::kit;
use super::kit::*;

/// Server and client are different nodes, so that traffic crosses a wire.
const SERVER: u8 = 1;
const CLIENT: u8 = 0;

fn server_address() -> Address {
    Address::Rdma(SocketAddr::new(RdmaVm::address(SERVER).into(), 0))
}

fn options(rdma: RdmaOptions) -> Options {
    Options { rdma: RdmaOptions { local: Some(RdmaVm::address(CLIENT).into()), ..rdma }, ..Options::default() }
}

mod in_the_machine {
    use super::*;

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_question_is_answered_whatever_its_size_and_however_both_wait() {
        for polling in [Polling::Event, Polling::Adaptive(Duration::from_micros(50))] {
            let options = Options { polling, ..options(RdmaOptions::default()) };
            let sizes = [0, 1, 100, 1025, 8150, 8192, 65_535, 65_536, 262_145, 5_000_000];
            kit::a_question_is_answered(&server_address(), &options, &sizes, 50);
        }
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn it_works_with_hardly_any_memory_too() {
        let tiny = RdmaOptions {
            message_bytes: 512,
            initial_credits: 1,
            max_credits: 2,
            receive_bytes: 1 << 20,
            send_bytes: 1 << 20,
            rendezvous_bytes: 1 << 20,
            ..RdmaOptions::default()
        };
        let sizes = [0, 1, 10_000, 70_000, 300_000, 2_000_000];
        kit::a_question_is_answered(&server_address(), &options(tiny), &sizes, 50);
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_lossless_client_sends_everything_once_although_its_links_are_cut() {
        let options = options(RdmaOptions::default());
        kit::everything_arrives_once_although_links_are_cut(&server_address(), &options, 20_000, 500, 10);
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_receiver_that_holds_messages_is_never_overrun() {
        let (options, while_held) = (options(RdmaOptions::default()), Duration::from_millis(100));
        kit::a_receiver_that_holds_messages_is_never_overrun(&server_address(), &options, 40, while_held);
    }

    /// Twice as many links, in generations, as there is memory for at once: memory of ended links must come back.
    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn the_memory_of_ended_links_serves_new_ones() {
        // 512 receives, of which a link takes 13.
        let little = RdmaOptions { receive_bytes: 4 << 20, max_credits: 32, ..RdmaOptions::default() };
        let options = options(little);
        let server = end_with(Policy::stateless_server(), &options, Recorder { echoes: true, ..Recorder::default() });
        let address = server.messenger.listen(&server_address()).unwrap();
        for round in 0..8 {
            let client = end_with(Policy::lossy_client(), &options, Recorder::default());
            let connections: Vec<_> = (0..10).map(|_| client.messenger.connect(&address)).collect();
            for connection in &connections {
                (0..100).for_each(|number| connection.send(numbered(number)).unwrap());
            }
            until("all answers", || client.recorder.received().len() == 1000);
            for (at, connection) in connections.iter().enumerate() {
                match (at + round) % 3 {
                    0 => connection.abort(),
                    1 => connection.cut(),
                    _ => connection.close(),
                }
            }
            until("all ends", || {
                client.recorder.callbacks().iter().filter(|callback| **callback != Callback::Connected).count() == 10
            });
        }
    }

    /// A queue pair that has ended is destroyed, together with the epoll instance by which it is counted, although
    /// nothing else happens.
    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn retired_queue_pairs_are_destroyed_without_any_traffic() {
        let options = options(RdmaOptions::default());
        let server = end_with(Policy::stateless_server(), &options, Recorder::default());
        let address = server.messenger.listen(&server_address()).unwrap();
        let client = end_with(Policy::lossy_client(), &options, Recorder::default());
        let connect = |count: usize| -> Vec<_> { (0..count).map(|_| client.messenger.connect(&address)).collect() };
        let stays = connect(1);
        until("the first link", || client.recorder.callbacks().len() == 1);
        let wires = || {
            let links =
                std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
            links.filter(|link| link.as_os_str() == "anon_inode:[eventpoll]").count()
        };
        let before = wires();
        let connections = connect(10);
        until("all links", || client.recorder.callbacks().len() == 11);
        assert_eq!(wires(), before + 20);
        connections.iter().for_each(remora_messenger::Connection::abort);
        until("all graves to be empty", || wires() == before);
        drop(stays);
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn a_lossy_client_is_notified_when_its_server_ends_and_when_it_does_not_exist() {
        let options = options(RdmaOptions::default());
        let server = end_with(Policy::stateless_server(), &options, Recorder::default());
        let address = server.messenger.listen(&server_address()).unwrap();
        let client = end_with(Policy::lossy_client(), &options, Recorder::default());
        let connection = client.messenger.connect(&address);
        connection.send(numbered(1)).unwrap();
        until("the message", || server.recorder.received() == [1]);
        server.messenger.stop();
        until("the end", || client.recorder.callbacks().len() == 2);
        until("no more messages", || matches!(connection.send(numbered(2)), Err(SendError::Over(_))));
        let absent = client.messenger.connect(&address);
        until("no answer", || matches!(absent.send(numbered(3)), Err(SendError::Over(_))));
    }

    #[test]
    #[ignore = "runs in the RDMA machine"]
    fn peers_call_each_other_back_and_find_their_way_between_workers() {
        let options = Options { workers: 3, ..options(RdmaOptions::default()) };
        let ends = [(); 2].map(|()| end_with(quick(Policy::lossless_peer()), &options, Recorder::default()));
        let addresses = ends.each_ref().map(|end| end.messenger.listen(&server_address()).unwrap());
        let connections = [0, 1].map(|at: usize| ends[at].messenger.connect(&addresses[1 - at]));
        for round in 0..300 {
            connections.iter().for_each(|connection| connection.send(numbered(round)).unwrap());
            if round % 50 == 7 {
                connections[round as usize % 2].cut();
            }
        }
        for end in &ends {
            until("all messages", || end.recorder.received().len() == 300);
            assert!(end.recorder.received().into_iter().eq(0..300));
            assert!(!end.recorder.callbacks().iter().any(|callback| matches!(callback, Callback::Reset { .. })));
        }
    }
}

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn the_layer_holds_over_rdma_in_the_virtual_machine() {
    let Some(machine) = require::rdma_vm() else { return };
    let machine = machine.nodes(2);
    let passed = machine.run_ignored_tests("in_the_machine", 1);
    assert_eq!(passed, 8);
}

#[test]
fn without_rdma_listening_fails_with_what_is_missing() {
    // In a separate process in which RDMA is disabled, so that it also holds on a machine with devices.
    const DISABLE: &str = "REMORA_RDMA_DISABLE";
    if std::env::var_os(DISABLE).is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "rdma::without_rdma_listening_fails_with_what_is_missing"]).env(DISABLE, "1");
        let run = alone.output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&run.stderr));
        return;
    }
    let client = end(Policy::lossy_client(), Recorder::default());
    let refused = client.messenger.listen(&"rdma:127.0.0.1:0".parse().unwrap()).unwrap_err();
    assert!(refused.to_string().contains("RDMA is not available"), "{refused}");
}
