//! The conformance suite: one set of tests for all transports.
//!
//! `suite` says what must be true, by means of the traits only; `harness` is what a transport provides, and helpers;
//! the other modules are the transports. A new one is a new module with a [`Harness`](harness::Harness) and one line.

#![allow(clippy::unwrap_used)]

mod suite;

#[macro_use]
mod harness {
    //! What a transport provides, and what the tests of the suite need: a small world with one region in it.

    use std::{
        process::Command,
        sync::Arc,
        time::{Duration, Instant},
    };

    use remora_fabric::{
        Completion, Connector, Error, Exporter, Memory, Pages, Peer, ReadError, ReadRequest, RegionId, Regions, Secret,
        sim::Random,
    };

    /// One transport under test.
    pub(crate) trait Harness {
        /// A new source.
        fn exporter(&self) -> Box<dyn Exporter>;
        /// A reader's connector to such sources.
        fn connector(&self) -> Box<dyn Connector>;
        /// Whether a peer of this transport gives a view of the region's memory.
        const HAS_VIEW: bool;
    }

    /// Makes a test of each function of the suite, for the transport of the expression.
    macro_rules! conformance {
    ($harness:expr $(, #[$attribute:meta])?) => {
        conformance!($harness, [$(#[$attribute])?];
            bytes_arrive_exactly_at_any_offset_and_length
            one_read_can_fetch_the_whole_region
            reads_see_bytes_written_after_connecting
            a_view_shows_the_region_itself
            a_full_queue_accepts_fewer_and_recovers
            every_accepted_read_completes_exactly_once_whatever_happens
            a_range_outside_the_region_is_denied_and_the_peer_lives
            an_offset_that_overflows_is_denied_and_the_peer_lives
            a_read_of_no_bytes_completes_with_none
            a_place_outside_the_sink_is_refused_at_once
            a_region_has_one_name_once
            a_key_of_a_stale_generation_is_refused
            a_key_of_an_unknown_region_is_refused
            a_key_of_another_transport_is_refused
            a_wrong_secret_is_refused_just_as_no_grant_is
            a_new_grant_replaces_the_old_secret
            a_withdrawn_grant_cuts_this_session_alone
            a_reader_with_a_grant_for_one_region_cannot_read_another
            a_narrower_grant_cuts_the_readers_of_other_regions
            a_region_revoked_mid_read_ends_the_peer
            revoking_a_region_leaves_the_readers_of_others_alone
            an_exporter_dropped_mid_read_ends_the_peer
            a_source_that_is_gone_can_not_be_reached
            a_closed_peer_cancels_what_is_outstanding
            a_reader_that_does_not_poll_delays_no_other_reader
            many_readers_at_once_each_get_their_bytes
            the_armed_descriptor_becomes_readable_when_bytes_arrive
            the_armed_descriptor_becomes_readable_when_the_region_is_revoked
            waiting_ends_by_its_time_out
        );

        #[test]
        $(#[$attribute])?
        fn many_peers_come_and_go_and_leave_no_descriptor_or_thread() {
            let name = concat!(module_path!(), "::many_peers_come_and_go_and_leave_no_descriptor_or_thread");
            crate::harness::in_own_process(name, || {
                crate::suite::many_peers_come_and_go_and_leave_no_descriptor_or_thread(&$harness)
            });
        }
    };
    ($harness:expr, $attributes:tt; $($sentence:ident)*) => {
        $(conformance!(@one $harness, $attributes, $sentence);)*
    };
    (@one $harness:expr, [$(#[$attribute:meta])?], $sentence:ident) => {
            #[test]
            $(#[$attribute])?
            fn $sentence() {
                crate::suite::$sentence(&$harness);
            }
    };
}

    /// Runs a test alone in its own process, so that it can count what the process holds.
    pub(crate) fn in_own_process(test: &str, body: impl FnOnce()) {
        const ALONE: &str = "REMORA_CONFORMANCE_ALONE";
        if std::env::var_os(ALONE).is_some() {
            return body();
        }
        let (_crate, test) = test.split_once("::").unwrap();
        let this_program = std::env::current_exe().unwrap();
        let run = Command::new(this_program)
            .args(["--exact", test, "--nocapture", "--include-ignored"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let (said, complained) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success(), "{said}\n{complained}");
        assert!(said.contains("1 passed"), "the test was not found under its name {test}: {said}");
    }

    /// A source that exports one region of random bytes to one session, and a reader with a sink.
    pub(crate) struct World {
        /// The source's end, until a test drops it.
        pub(crate) exporter: Option<Box<dyn Exporter>>,
        pub(crate) connector: Box<dyn Connector>,
        pub(crate) memory: Arc<Memory>,
        pub(crate) sink: Arc<Memory>,
        /// The content of the region.
        pub(crate) truth: Vec<u8>,
    }

    pub(crate) const SIZE: u64 = 1 << 20;
    pub(crate) const ID: RegionId = RegionId { generation: 7, region: 1 };
    pub(crate) const SESSION: u64 = 42;
    pub(crate) const SECRET: Secret = [0x5e; 32];

    /// Time limit of each wait: far above what a loaded machine needs.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

    impl World {
        pub(crate) fn new(harness: &impl Harness) -> World {
            let mut truth = vec![0; SIZE as usize];
            Random::new(SIZE).fill(&mut truth);
            let memory = memory();
            memory.write(0, &truth).unwrap();
            let exporter = harness.exporter();
            exporter.export(ID, memory.clone()).unwrap();
            exporter.grant(SESSION, SECRET, Regions::All);
            World { exporter: Some(exporter), connector: harness.connector(), memory, sink: memory_of(SIZE), truth }
        }

        pub(crate) fn exporter(&self) -> &dyn Exporter {
            self.exporter.as_deref().unwrap()
        }

        /// The usual reader.
        pub(crate) fn peer(&self) -> Box<dyn Peer> {
            self.peer_of(SESSION, ID, self.sink.clone())
        }

        /// A reader of its own session, as each replica is: a transport may limit what one session holds.
        pub(crate) fn peer_of_new_session(&self, number: u64, sink: Arc<Memory>) -> Box<dyn Peer> {
            let session = SESSION + 1000 + number;
            self.exporter().grant(session, SECRET, Regions::only([ID]));
            self.peer_of(session, ID, sink)
        }

        pub(crate) fn peer_of(&self, session: u64, id: RegionId, sink: Arc<Memory>) -> Box<dyn Peer> {
            let key = self.exporter().key(id).unwrap();
            self.connector.connect(&key, session, &SECRET, sink).unwrap()
        }

        /// Checks that a read of `length` bytes at `offset` by this peer returns the right bytes.
        pub(crate) fn assert_reads(&self, peer: &mut dyn Peer, offset: u64, length: u32) {
            self.sink.fill(0..u64::from(length), 0).unwrap();
            assert_eq!(peer.post_read(&[read(99, offset, length, 0)]).unwrap(), 1);
            assert_eq!(settle(peer, 1), [Completion { tag: 99, result: Ok(length) }]);
            let mut bytes = vec![0; length as usize];
            self.sink.read(0, &mut bytes).unwrap();
            assert!(bytes == self.truth[offset as usize..][..length as usize], "the bytes that arrived");
        }
    }

    pub(crate) fn memory() -> Arc<Memory> {
        memory_of(SIZE)
    }

    pub(crate) fn memory_of(length: u64) -> Arc<Memory> {
        Arc::new(Memory::create("conformance", length, Pages::Small).unwrap())
    }

    pub(crate) fn read(tag: u64, offset: u64, length: u32, sink_offset: u64) -> ReadRequest {
        ReadRequest { tag, offset, length, sink_offset }
    }

    /// Polls until `count` reads have completed.
    pub(crate) fn settle(peer: &mut dyn Peer, count: usize) -> Vec<Completion> {
        let begun = Instant::now();
        let mut completions = Vec::new();
        while completions.len() < count {
            assert!(begun.elapsed() < PATIENCE, "{} of {count} reads completed in {PATIENCE:?}", completions.len());
            if peer.poll(&mut completions).unwrap() == 0 {
                peer.wait(Duration::from_millis(100)).unwrap();
            }
        }
        completions
    }

    /// Polls until the peer is retired; returns the completions before, and the reason.
    pub(crate) fn until_retired(peer: &mut dyn Peer) -> (Vec<Completion>, ReadError) {
        let begun = Instant::now();
        let mut completions = Vec::new();
        loop {
            assert!(begun.elapsed() < PATIENCE, "the peer was not retired in {PATIENCE:?}");
            match peer.poll(&mut completions) {
                Ok(0) => peer.wait(Duration::from_millis(100)).unwrap(),
                Ok(_) => {}
                Err(Error::Retired(why)) => return (completions, why),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

mod shm {
    //! Shared memory: with an abstract name, and with a file in a folder.

    use remora_fabric::{
        Connector, Exporter,
        shm::{Place, ShmConnector, ShmExporter, ShmOptions},
    };

    use crate::harness::Harness;

    struct Shm(ShmOptions);

    impl Harness for Shm {
        const HAS_VIEW: bool = true;

        fn exporter(&self) -> Box<dyn Exporter> {
            Box::new(ShmExporter::bind(self.0.clone()).unwrap())
        }

        fn connector(&self) -> Box<dyn Connector> {
            Box::new(ShmConnector::new())
        }
    }

    fn abstract_name() -> Shm {
        Shm(ShmOptions::default())
    }

    /// The system's temporary folder; each exporter uses a random name in it and removes its file.
    fn folder() -> Shm {
        Shm(ShmOptions { place: Place::Folder(std::env::temp_dir()), ..ShmOptions::default() })
    }

    mod by_abstract_name {
        conformance!(super::abstract_name());
    }

    mod by_folder {
        conformance!(super::folder());
    }
}

mod sim {
    //! The simulated network: one without faults, and one that delays, reorders and tears reads as real ones may.

    use remora_fabric::{
        Connector, Exporter,
        sim::{Faults, Network},
    };

    use crate::harness::Harness;

    struct Sim(Network);

    impl Harness for Sim {
        const HAS_VIEW: bool = false;

        fn exporter(&self) -> Box<dyn Exporter> {
            Box::new(self.0.exporter())
        }

        fn connector(&self) -> Box<dyn Connector> {
            Box::new(self.0.connector())
        }
    }

    mod calm {
        conformance!(super::Sim(super::Network::new(1, super::Faults::none())));
    }

    mod honest {
        conformance!(super::Sim(super::Network::new(2, super::Faults::honest())));
    }

    /// The canaries: each of these networks breaks one promise, and must fail the suite.
    mod broken {
        use remora_fabric::sim::Chance;

        use super::{Faults, Network, Sim};
        use crate::suite;

        fn broken(faults: Faults) -> Sim {
            Sim(Network::new(3, faults))
        }

        #[test]
        #[should_panic(expected = "PeerGone")]
        fn a_network_that_loses_its_peers_fails_the_suite() {
            let network = broken(Faults { lost_peer: Chance::percent(30), ..Faults::none() });
            suite::bytes_arrive_exactly_at_any_offset_and_length(&network);
        }

        #[test]
        #[should_panic(expected = "Unreachable")]
        fn a_network_that_is_unreachable_fails_the_suite() {
            let network = broken(Faults { failed_connect: Chance::ALWAYS, ..Faults::none() });
            suite::one_read_can_fetch_the_whole_region(&network);
        }

        #[test]
        #[should_panic(expected = "TimedOut")]
        fn a_network_that_swallows_answers_fails_the_suite() {
            let network = broken(Faults { lost_answer: Chance::ALWAYS, ..Faults::none() });
            suite::a_read_of_no_bytes_completes_with_none(&network);
        }
    }
}

mod tcp {
    //! TCP over the loopback: one lane and copies, and all lanes with pages by reference.

    use remora_fabric::{
        Connector, Exporter,
        tcp::{MAX_LANES_PER_PEER, SendMode, TcpConnector, TcpExporter, TcpOptions},
    };

    use crate::harness::Harness;

    struct Tcp(TcpOptions);

    impl Harness for Tcp {
        const HAS_VIEW: bool = false;

        fn exporter(&self) -> Box<dyn Exporter> {
            let exporter = TcpExporter::new(self.0.clone(), None).unwrap();
            exporter.listen("127.0.0.1:0").unwrap();
            Box::new(exporter)
        }

        fn connector(&self) -> Box<dyn Connector> {
            Box::new(TcpConnector::new(self.0.clone(), None).unwrap())
        }
    }

    fn all_lanes_by_reference() -> Tcp {
        Tcp(TcpOptions { lanes: MAX_LANES_PER_PEER, send: SendMode::File, ..TcpOptions::default() })
    }

    mod one_lane {
        conformance!(super::Tcp(super::TcpOptions::default()));
    }

    mod all_lanes_by_sendfile {
        conformance!(super::all_lanes_by_reference());
    }
}

#[cfg(feature = "verbs")]
mod verbs {
    //! RDMA: polling, sleeping, and several queue pairs. Without devices the suite runs in a virtual machine that has some,
    //! which the one test that is not ignored boots.

    use std::net::SocketAddr;

    use remora_fabric::{
        Connector, Exporter,
        verbs::{CompletionMode, VerbsConnector, VerbsExporter, VerbsOptions},
    };
    use remora_lab::{RdmaVm, require};

    use crate::harness::Harness;

    struct Verbs(VerbsOptions);

    impl Verbs {
        fn new(options: VerbsOptions) -> Verbs {
            let verbs = Verbs(options);
            // What the libraries keep open is opened first, so that it is not counted as a leak.
            drop((verbs.exporter(), verbs.connector()));
            verbs
        }
    }

    /// Source and reader are two nodes, so that messages cross a network.
    impl Harness for Verbs {
        const HAS_VIEW: bool = false;

        fn exporter(&self) -> Box<dyn Exporter> {
            let address = SocketAddr::new(RdmaVm::address(1).into(), 0);
            Box::new(VerbsExporter::listen(self.0.clone(), &[address]).unwrap())
        }

        fn connector(&self) -> Box<dyn Connector> {
            let local = vec![RdmaVm::address(0).into()];
            Box::new(VerbsConnector::new(self.0.clone(), None, local).unwrap())
        }
    }

    mod in_the_machine {
        use super::*;

        mod polling {
            use super::*;

            conformance!(
                Verbs::new(VerbsOptions { completion: CompletionMode::Polling, ..VerbsOptions::default() }),
                #[ignore = "runs in the RDMA machine"]
            );
        }

        mod sleeping_with_two_queue_pairs {
            use super::*;

            conformance!(
                Verbs::new(VerbsOptions {
                    completion: CompletionMode::Event,
                    queue_pairs: 2,
                    queue_depth: 3,
                    piece_bytes: 64 << 10,
                    ..VerbsOptions::default()
                }),
                #[ignore = "runs in the RDMA machine"]
            );
        }

        mod default_options {
            use super::*;

            conformance!(Verbs::new(VerbsOptions::default()), #[ignore = "runs in the RDMA machine"]);
        }
    }

    #[test]
    #[ignore = "long: needs the machine with RDMA devices"]
    fn the_suite_holds_for_rdma_in_the_virtual_machine() {
        let Some(machine) = require::rdma_vm() else { return };
        let machine = machine.nodes(2);
        let passed = machine.run_ignored_tests("verbs::in_the_machine", 2);
        assert!(passed >= 3 * 28, "{passed} sentences");
    }
}
