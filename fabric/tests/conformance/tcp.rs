//! TCP over the loopback: one lane and copies, all lanes with pages by reference, and TLS.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, LazyLock},
    thread,
};

use remora_fabric::{
    Connector, Denial, Error, Exporter, Memory, Pages, RegionId, Secret,
    tcp::{MAX_LANES_PER_PEER, SendMode, TcpConnector, TcpExporter, TcpOptions},
};

use remora_lab::tls::certificates;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
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

mod one_lane_with_tls {
    conformance!(super::Tls(super::TcpOptions::default()));
}

mod all_lanes_with_tls {
    conformance!(super::Tls(super::all_lanes_by_reference().0));
}

/// The same, with TLS on every lane.
struct Tls(TcpOptions);

impl Harness for Tls {
    const HAS_VIEW: bool = false;

    fn exporter(&self) -> Box<dyn Exporter> {
        let exporter = TcpExporter::new(self.0.clone(), None).unwrap();
        exporter.listen_tls("127.0.0.1:0", CONFIGS.0.clone()).unwrap();
        Box::new(exporter)
    }

    fn connector(&self) -> Box<dyn Connector> {
        Box::new(TcpConnector::new(self.0.clone(), None).unwrap().with_tls(CONFIGS.1.clone(), None))
    }
}

#[test]
fn an_attacker_who_terminates_the_tls_of_a_lane_gets_no_byte() {
    const SECRET: Secret = [3; 32];
    const ID: RegionId = RegionId { generation: 1, region: 1 };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Readers of this key reach the attacker.
    let exporter = TcpExporter::new(TcpOptions::default(), Some(listener.local_addr().unwrap())).unwrap();
    let source = exporter.listen_tls("127.0.0.1:0", CONFIGS.0.clone()).unwrap();
    exporter.export(ID, Arc::new(Memory::create("region", 4096, Pages::Small).unwrap())).unwrap();
    exporter.grant(1, SECRET);
    let attacker = thread::spawn(move || {
        // Even with the source's own certificate.
        let near = ServerConnection::new(CONFIGS.0.clone()).unwrap();
        let mut near = StreamOwned::new(near, listener.accept().unwrap().0);
        let far = ClientConnection::new(CONFIGS.1.clone(), "127.0.0.1".try_into().unwrap()).unwrap();
        let mut far = StreamOwned::new(far, TcpStream::connect(source).unwrap());
        // Hello, challenge, proof, and what answers the proof: the attacker passes each message on.
        let mut passed = 0;
        let mut bytes = [0; 4096];
        for _ in 0..2 {
            for forth in [true, false] {
                let count = if forth { near.read(&mut bytes) } else { far.read(&mut bytes) }.unwrap();
                if forth { far.write_all(&bytes[..count]) } else { near.write_all(&bytes[..count]) }.unwrap();
                passed += count;
            }
        }
        passed
    });
    let connector = TcpConnector::new(TcpOptions::default(), None).unwrap().with_tls(CONFIGS.1.clone(), None);
    let sink = Arc::new(Memory::create("sink", 4096, Pages::Small).unwrap());
    let refused = connector.connect(&exporter.key(ID).unwrap(), 1, &SECRET, sink).err();
    assert!(matches!(refused, Some(Error::Refused(Denial::NotGranted))), "{refused:?}");
    assert!(attacker.join().unwrap() > 100, "the attacker passed the messages on");
    assert_eq!(exporter.bytes_served(), 0);
}

/// Configurations of the source and of readers, which check its certificate and its name.
static CONFIGS: LazyLock<(Arc<ServerConfig>, Arc<ClientConfig>)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let (server, _) = certificates(folder.path(), &["127.0.0.1".parse().unwrap()]).unwrap();
    let pem = |path| CertificateDer::from_pem_file(path).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(pem(&server.ca)).unwrap();
    let provider = Arc::new(default_provider());
    let versions = [&rustls::version::TLS13];
    let key = PrivateKeyDer::from_pem_file(&server.key).unwrap();
    let at_source = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&versions).unwrap();
    let at_source = at_source.with_no_client_auth().with_single_cert(vec![pem(&server.certificate)], key).unwrap();
    let at_reader = ClientConfig::builder_with_provider(provider).with_protocol_versions(&versions).unwrap();
    let at_reader = at_reader.with_root_certificates(roots).with_no_client_auth();
    (Arc::new(at_source), Arc::new(at_reader))
});
