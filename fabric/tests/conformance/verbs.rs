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
