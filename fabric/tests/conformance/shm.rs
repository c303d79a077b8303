//! Shared memory: under an abstract name, and by a file in a folder.

use remora_fabric::{
    Connector, Exporter,
    shm::{Place, ShmConnector, ShmExporter, ShmOptions},
};

use crate::harness::Harness;

struct Shm(ShmOptions);

impl Harness for Shm {
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

/// The system's own folder for such things; each exporter takes a fresh name in it and removes it.
fn folder() -> Shm {
    Shm(ShmOptions { place: Place::Folder(std::env::temp_dir()), ..ShmOptions::default() })
}

mod by_abstract_name {
    conformance!(super::abstract_name());
}

mod by_folder {
    conformance!(super::folder());
}
