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
