//! The simulated network: one on which nothing goes wrong, and one that delays, shuffles and tears as every real one may.

use remora_fabric::{
    Connector, Exporter,
    sim::{Faults, Network},
};

use crate::harness::Harness;

struct Sim(Network);

impl Harness for Sim {
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
