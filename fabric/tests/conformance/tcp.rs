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
