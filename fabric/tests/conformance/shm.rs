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
