//! The server with the clients that people use: libnbd's, with TLS too, QEMU's and fio's.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use remora_lab::process::Process;
use remora_lab::server::{Tls, certificates};
use remora_lab::{Random, require};
use remora_nbd::device::MemoryDevice;
use remora_nbd::{Address, Device, Server, ServerOptions};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::Value;

use crate::offer;
use crate::{LateDevice, Serving};

const MIB: usize = 1 << 20;

/// Runs a program in `folder`, and returns what it printed. It must succeed, and within half a minute.
pub fn run(folder: &Path, program: &str, arguments: &[&str]) -> String {
    match try_run(folder, program, arguments) {
        (true, said) => said,
        (false, said) => panic!("{program} {arguments:?} failed: {said}"),
    }
}

/// Whether it succeeded, and what it printed.
pub fn try_run(folder: &Path, program: &str, arguments: &[&str]) -> (bool, String) {
    let said = folder.join("said");
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    let file = fs::File::create(&said).unwrap();
    command.stdout(file.try_clone().unwrap()).stderr(file);
    let (mut process, _) = Process::start(program, command).unwrap();
    let status = process.wait(Duration::from_secs(30)).unwrap();
    let status = status.unwrap_or_else(|| panic!("{program} {arguments:?} runs for more than 30 s"));
    (status.success(), String::from_utf8_lossy(&fs::read(&said).unwrap()).into_owned())
}

fn devices(size: usize) -> [Arc<dyn Device>; 2] {
    [Arc::new(MemoryDevice::new(size as u64)), Arc::new(LateDevice::new(size))]
}

#[test]
fn nbdinfo_says_what_is_exported() {
    let Some(()) = require::nbd_clients() else { return };
    let [memory, late] = devices(8 * MIB);
    let serving = Serving::with(vec![offer("memory", memory), offer("late", late)], |_| {});
    let folder = serving.folder.path();
    let info: Value = serde_json::from_str(&run(folder, "nbdinfo", &["--json", "--list", &serving.uri()])).unwrap();
    let exports = info["exports"].as_array().unwrap();
    assert_eq!((&info["protocol"], exports.len()), (&"newstyle-fixed".into(), 2));
    for (export, (name, minimum, knows_holes)) in exports.iter().zip([("memory", 1, true), ("late", 4096, true)]) {
        assert_eq!(export["export-name"], name);
        assert_eq!(export["description"], format!("the {name} of a test"));
        assert_eq!(export["export-size"], 8 * MIB);
        assert_eq!(
            export["block_minimum"].as_u64().or(export["block_size_minimum"].as_u64()),
            Some(minimum),
            "{export}"
        );
        for can in ["can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero", "can_df", "can_cache"] {
            assert_eq!(export[can], true, "{can}");
        }
        assert_eq!(export["is_read_only"], false);
        assert_eq!(export["contexts"].as_array().is_some_and(|list| list.len() == 1), knows_holes, "{export}");
    }
}

#[test]
fn nbdcopy_copies_there_and_back() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(24 * MIB) {
        let serving = Serving::of(device);
        let (folder, uri) = (serving.folder.path(), serving.uri());
        let mut random = Random::new(remora_lab::random::seed("nbdcopy"));
        // A part of it is zeros, which are written as such.
        let mut content = random.bytes(24 * MIB);
        content[3 * MIB..10 * MIB].fill(0);
        fs::write(folder.join("there"), &content).unwrap();
        let many = ["--connections=4", "--requests=64"];
        run(folder, "nbdcopy", &[&many[..], &["--flush", "there", &uri]].concat());
        run(folder, "nbdcopy", &[&many[..], &["--request-size=1048576", &uri, "back"]].concat());
        assert!(fs::read(folder.join("back")).unwrap() == content);
        run(folder, "nbdcopy", &["--synchronous", &uri, "again"]);
        assert!(fs::read(folder.join("again")).unwrap() == content);
    }
}

#[test]
fn nbdinfo_and_qemu_find_the_holes() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(8 * MIB) {
        let serving = Serving::of(device);
        let (folder, uri) = (serving.folder.path(), serving.uri());
        run(folder, "qemu-io", &["-f", "raw", "-c", "write -P 9 2M 1M", &uri]);
        let map: Value = serde_json::from_str(&run(folder, "nbdinfo", &["--map", "--json", &uri])).unwrap();
        let extents: Vec<_> =
            map.as_array().unwrap().iter().map(|e| (e["offset"].clone(), e["type"].clone())).collect();
        let expected = [(0, 3), (2 * MIB, 0), (3 * MIB, 3)].map(|(at, kind)| (Value::from(at), Value::from(kind)));
        assert_eq!(extents, expected);
        let map = run(folder, "qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
        let map: Value = serde_json::from_str(&map).unwrap();
        let extents: Vec<_> = map
            .as_array()
            .unwrap()
            .iter()
            .map(|e| (e["start"].clone(), e["zero"].clone(), e["data"].clone()))
            .collect();
        let expected = [(0, true), (2 * MIB, false), (3 * MIB, true)];
        assert_eq!(extents, expected.map(|(at, zero)| (Value::from(at), Value::from(zero), Value::from(!zero))));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn qemu_makes_images_on_it_and_finds_them_whole() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(32 * MIB) {
        let serving = Serving::of(device);
        let (folder, uri) = (serving.folder.path(), serving.uri());
        let content = Random::new(remora_lab::random::seed("qemu")).bytes(16 * MIB);
        fs::write(folder.join("image"), [&content[..], &vec![0; 16 * MIB]].concat()).unwrap();
        run(folder, "qemu-img", &["convert", "-n", "-W", "-f", "raw", "-O", "raw", "image", &uri]);
        run(folder, "qemu-img", &["compare", "-f", "raw", "-F", "raw", "image", &uri]);
        run(folder, "qemu-img", &["create", "-f", "qcow2", &uri, "16M"]);
        fs::write(folder.join("half"), &content).unwrap();
        run(folder, "qemu-img", &["convert", "-n", "-m", "8", "-W", "-f", "raw", "-O", "qcow2", "half", &uri]);
        run(folder, "qemu-img", &["check", "-f", "qcow2", &uri]);
        run(folder, "qemu-img", &["compare", "-f", "raw", "-F", "qcow2", "half", &uri]);
    }
}

/// Requests that are smaller than the device's blocks are QEMU's to split; zeros, holes and flags are ours.
#[test]
fn qemu_io_reads_what_it_wrote() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(16 * MIB) {
        let serving = Serving::of(device);
        let commands = [
            "write -P 1 0 1M",
            "write -P 2 -f 4096 512",
            "aio_write -P 3 2M 3M",
            "aio_write -P 4 6M 64k",
            "aio_flush",
            "write -z 2M 1M",
            "write -z -u 4M 512k",
            "discard 6M 64k",
            "flush",
            "read -P 1 0 4096",
            "read -P 2 4096 512",
            "read -P 1 4608 100k",
            "read -P 0 2M 1M",
            "read -P 3 3M 1M",
            "read -P 0 4M 512k",
            "read -P 3 4608k 512k",
            "read -P 0 6M 64k",
        ];
        let uri = serving.uri();
        let mut arguments = vec!["-f", "raw", "-t", "writeback", "-d", "unmap"];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        arguments.push(&uri);
        let said = run(serving.folder.path(), "qemu-io", &arguments);
        assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    }
}

/// Several connections write their parts of one device, with checksums, and read them back.
#[test]
#[ignore = "long: make test-all"]
fn fio_verifies_what_many_connections_write() {
    let Some(()) = require::nbd_clients() else { return };
    for device in devices(32 * MIB) {
        let serving = Serving::of(device);
        let uri = format!("--uri={}", serving.uri());
        let common =
            ["--ioengine=nbd", &uri, "--thread", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"];
        let shape = ["--rw=randwrite", "--bsrange=4k-256k", "--blockalign=4k", "--iodepth=32", "--size=8m"];
        let jobs = ["--name=verify", "--numjobs=4", "--offset_increment=8m", "--group_reporting"];
        let said = run(serving.folder.path(), "fio", &[&common[..], &shape, &jobs].concat());
        assert!(said.contains("err= 0"), "{said}");
        let shape = ["--rw=randrw", "--bs=4k", "--iodepth=16", "--size=8m", "--fsync=8"];
        let said = run(serving.folder.path(), "fio", &[&common[..], &shape, &["--name=both"]].concat());
        assert!(said.contains("err= 0"), "{said}");
    }
}

// The server with TLS, and libnbd's clients.

/// With `asks`, clients must have a certificate of the same authority.
fn config(tls: &Tls, asks: bool) -> Arc<ServerConfig> {
    let certificate = CertificateDer::from_pem_file(&tls.certificate).unwrap();
    let key = PrivateKeyDer::from_pem_file(&tls.key).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&tls.ca).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let config = if asks {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build().unwrap();
        config.with_client_cert_verifier(verifier)
    } else {
        config.with_no_client_auth()
    };
    Arc::new(config.with_single_cert(vec![certificate], key).unwrap())
}

#[test]
#[ignore = "long: make test-all"]
fn clients_with_the_authority_copy_over_tls_and_others_get_nothing() {
    let Some(()) = require::nbd_clients() else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (server_tls, client_tls) = certificates(folder, &[]).unwrap();
    let content = Random::new(remora_lab::random::seed("tls")).bytes(12 << 20);
    fs::write(folder.join("there"), &content).unwrap();
    let with = client_tls.libnbd_folder(folder, "with", true).unwrap();
    let without = client_tls.libnbd_folder(folder, "without", false).unwrap();
    for asks in [false, true] {
        let mut options = ServerOptions::new(Address::Tcp("127.0.0.1:0".parse().unwrap()));
        options.tls = Some(config(&server_tls, asks).into());
        let devices = [
            offer("memory", Arc::new(MemoryDevice::new(12 << 20))),
            offer("late", Arc::new(LateDevice::new(12 << 20))),
        ];
        let server = Server::start(devices.to_vec(), &options).unwrap();
        let Address::Tcp(address) = server.address() else { panic!("not a port") };
        for export in ["memory", "late"] {
            let uri = |folder: &str| format!("nbds://{address}/{export}?tls-certificates={folder}");
            run(folder, "nbdcopy", &["--connections=2", "there", &uri(&with)]);
            run(folder, "nbdcopy", &["--connections=2", "--request-size=1048576", &uri(&with), "back"]);
            assert!(fs::read(folder.join("back")).unwrap() == content);
            let (is_well, said) = try_run(folder, "nbdinfo", &[&uri(&without)]);
            assert_eq!(is_well, !asks, "{said}");
        }
        let (is_well, said) = try_run(folder, "nbdinfo", &[&format!("nbd://{address}/memory")]);
        assert!(!is_well && said.contains("TLS"), "{said}");
    }
}
