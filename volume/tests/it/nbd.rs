//! A volume on three server processes, as a block device: what fio and QEMU find while servers are killed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use remora_lab::process::Process;
use remora_lab::{Random, require, scratch};
use remora_nbd::protocol::command;
use remora_nbd::{Address, ServerOptions};
use remora_volume::client::Volume;
use remora_volume::nbd::VolumeServer;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::cluster::{Remotes, options, until};

pub const BLOCKS: u64 = 8192; // 32 MiB

pub struct Served {
    pub remotes: Remotes,
    pub server: VolumeServer,
    folder: TempDir,
}

impl Served {
    fn new() -> Served {
        let remotes = Remotes::new(BLOCKS);
        let volume = remotes.open(&options());
        Served::of(remotes, volume)
    }

    /// A device of a volume with 32 MiB, for clients of this host, wherever its servers are.
    pub fn of(remotes: Remotes, volume: Volume) -> Served {
        assert_eq!(remotes.shape.blocks(), BLOCKS);
        let folder = scratch::folder("volume-nbd").unwrap();
        let address = Address::Unix(folder.path().join("nbd/socket"));
        let server = VolumeServer::start(volume, "volume", &ServerOptions::new(address)).unwrap();
        Served { remotes, server, folder }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///volume?socket={}", self.folder.path().join("nbd/socket").display())
    }

    fn start(&self, program: &str, arguments: &[&str]) -> Tool {
        Tool::start(self.folder.path(), program, arguments)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> String {
        self.start(program, arguments).succeeds()
    }

    /// Writes half of it at random for two seconds, with checksums, and reads it back.
    pub fn fio(&self) -> Tool {
        let target = format!("--uri={}", self.uri());
        let common =
            ["--name=x", "--ioengine=nbd", "--thread", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"];
        let shape = ["--rw=randwrite", "--bsrange=4k-64k", "--blockalign=4k", "--iodepth=16", "--offset=16m"];
        self.start("fio", &[&common[..], &shape, &["--size=16m", "--rate=8m", "--fsync=64", &target]].concat())
    }

    pub fn is_whole(&self) {
        until("every copy is whole again", || self.server.volume().members().len() == 3);
    }
}

/// A program that runs.
pub struct Tool {
    name: String,
    process: Process,
    said: std::path::PathBuf,
}

impl Tool {
    fn start(folder: &Path, program: &str, arguments: &[&str]) -> Tool {
        let name = format!("{program} {arguments:?}");
        let said = folder.join(format!("{program}.said"));
        let file = fs::File::create(&said).unwrap();
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder).stdin(Stdio::null());
        command.stdout(file.try_clone().unwrap()).stderr(file);
        Tool { process: Process::start(program, command).unwrap().0, name, said }
    }

    fn ends(mut self) -> (bool, String) {
        let status = self.process.wait(Duration::from_secs(30)).unwrap();
        let said = fs::read_to_string(&self.said).unwrap_or_default();
        (status.unwrap_or_else(|| panic!("{} runs for more than 30 s: {said}", self.name)).success(), said)
    }

    pub fn succeeds(self) -> String {
        let name = self.name.clone();
        let (is_well, said) = self.ends();
        assert!(is_well, "{name}: {said}");
        said
    }
}

#[test]
#[ignore = "long: make test-all"]
fn fio_and_qemu_find_what_they_wrote_while_servers_are_killed_and_come_back() {
    let Some(()) = require::nbd_clients() else { return };
    let mut served = Served::new();
    let uri = served.uri();
    let image = served.folder.path().join("image");
    let mut content = Random::new(remora_lab::random::seed("image")).bytes(32 << 20);
    content[12 << 20..20 << 20].fill(0);
    fs::write(&image, content).unwrap();

    // Half of it is written with checksums, for two seconds, of which one server lacks a part, and read back.
    let fio = served.fio();
    std::thread::sleep(Duration::from_millis(700));
    served.remotes.kill(0);
    until("its copy is left out", || served.server.volume().members().len() == 2);
    std::thread::sleep(Duration::from_millis(300));
    served.remotes.restart(0);
    served.is_whole();
    let said = fio.succeeds();
    assert!(said.contains("err= 0"), "{said}");

    // An image is written while another server is gone, and compared while the third one is.
    served.remotes.kill(1);
    served.run("nbdcopy", &["--connections=3", "--flush", "image", &uri]);
    served.remotes.restart(1);
    served.is_whole();
    served.remotes.kill(2);
    let said = served.run("qemu-img", &["compare", "-f", "raw", "-F", "raw", "image", &uri]);
    assert!(said.contains("identical"), "{said}");
}

/// A format with tables of its own, which are written and read back in small pieces; and an image there and back.
#[test]
#[ignore = "long: make test-all"]
fn a_disk_image_of_qemu_is_written_checked_and_copied_back_while_servers_are_killed() {
    let Some(()) = require::nbd_clients() else { return };
    let mut served = Served::new();
    let uri = served.uri();
    let [image, back] = ["image", "back"].map(|name| served.folder.path().join(name));
    let mut content = Random::new(remora_lab::random::seed("image")).bytes(24 << 20);
    content[4 << 20..9 << 20].fill(0);
    fs::write(&image, &content).unwrap();
    served.run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", "image", &uri]);
    served.remotes.kill(0);
    let said = served.run("qemu-img", &["check", "-f", "qcow2", &uri]);
    assert!(said.contains("No errors were found"), "{said}");
    let said = served.run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", "image", &uri]);
    assert!(said.contains("identical"), "{said}");
    // Pieces that are no blocks, across their borders, in the format and then below it.
    let odd = ["-c", "write -P 3 1000 9000", "-c", "read -P 3 1000 9000", "-c", "write -z 5000 512", "-c", "flush"];
    let seen = ["-c", "read -P 3 1000 4000", "-c", "read -P 0 5000 512", "-c", "read -P 3 5512 4488"];
    for format in ["qcow2", "raw"] {
        let said = served.run("qemu-io", &[&["-f", format][..], &odd, &seen, &[&uri]].concat());
        assert!(!said.contains("failed"), "{format}: {said}");
    }
    served.remotes.restart(0);
    served.is_whole();

    content.resize(BLOCKS as usize * 4096, 9);
    fs::write(&image, &content).unwrap();
    served.run("nbdcopy", &["--flush", "image", &uri]);
    served.remotes.kill(1);
    served.run("nbdcopy", &[&uri, "back"]);
    assert!(fs::read(&back).unwrap() == content, "the image is not what it was");
}

/// What `qemu-img map` and `nbdinfo --map` say: where each extent begins, and whether it is zeros.
fn holes(served: &Served) -> Vec<(u64, bool)> {
    let uri = served.uri();
    let json = |said: String| serde_json::from_str::<Vec<serde_json::Value>>(&said).unwrap();
    let qemu = json(served.run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]));
    let qemu = qemu.iter().map(|extent| {
        assert_eq!(extent["zero"].as_bool(), extent["data"].as_bool().map(|data| !data), "{extent}");
        (extent["start"].as_u64().unwrap(), extent["zero"] == true)
    });
    let qemu: Vec<_> = qemu.collect();
    let libnbd = json(served.run("nbdinfo", &["--map", "--json", &uri]));
    let libnbd = libnbd.iter().map(|extent| (extent["offset"].as_u64().unwrap(), extent["type"] == 3));
    assert_eq!(libnbd.collect::<Vec<_>>(), qemu);
    qemu
}

#[test]
#[ignore = "long: make test-all"]
fn a_sparse_image_is_copied_there_and_back_and_its_holes_are_found_while_servers_are_killed() {
    let Some(()) = require::nbd_clients() else { return };
    let mut served = Served::new();
    let (uri, mib) = (served.uri(), 1 << 20);
    assert_eq!(holes(&served), [(0, true)], "a new volume");
    let [image, back] = ["image", "back"].map(|name| served.folder.path().join(name));
    let mut random = Random::new(remora_lab::random::seed("sparse"));
    let mut content = vec![0; 32 * mib];
    for (from, to) in [(2 * mib, 3 * mib), (20 * mib, 20 * mib + 65536)] {
        content[from..to].copy_from_slice(&random.bytes(to - from));
    }
    let sparse = [(0, true), (2, false), (3, true), (20, false)].map(|(at, zero)| (at * mib as u64, zero));
    let sparse = [&sparse[..], &[(20 * mib as u64 + 65536, true)]].concat();
    fs::write(&image, &content).unwrap();

    // The device is full of something else before, so that zeros must be written.
    served.run("qemu-io", &["-f", "raw", "-c", "write -P 7 0 32M", &uri]);
    assert_eq!(holes(&served), [(0, false)]);
    let before = served.server.volume().write_counts().bytes;
    served.run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", "image", &uri]);
    let sent = served.server.volume().write_counts().bytes - before;
    assert!(sent < 4 * mib as u64, "{sent} bytes were sent to three servers for 1.1 MiB of data");
    assert_eq!(holes(&served), sparse);

    // Each server is new in turn. The others, and then it, say the same.
    for number in 0..3 {
        served.remotes.kill(number);
        until("its copy is left out", || served.server.volume().members().len() == 2);
        assert_eq!(holes(&served), sparse);
        served.remotes.restart(number);
        served.is_whole();
    }
    served.run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, "back"]);
    assert!(fs::read(&back).unwrap() == content, "the image is not what it was");
    let allocated = fs::metadata(&back).unwrap().blocks() * 512;
    assert!(allocated < 8 * mib as u64, "{allocated} bytes of the copy are not holes");
    let said = served.run("qemu-img", &["compare", "-f", "raw", "-F", "raw", "image", &uri]);
    assert!(said.contains("identical"), "{said}");
}

/// With and without holes, at once and in parts of blocks.
#[test]
#[ignore = "long: make test-all"]
fn what_qemu_and_fio_have_zeroed_or_discarded_reads_as_zeros() {
    let Some(()) = require::nbd_clients() else { return };
    let served = Served::new();
    let uri = served.uri();
    let writes = ["write -P 5 0 4M", "write -z 64k 64k", "write -z -u 256k 1M", "discard 2M 1M", "write -z 3100k 1000"];
    let reads = ["read -P 5 0 64k", "read -P 0 64k 64k", "read -P 5 128k 128k", "read -P 0 256k 1M", "read -P 0 2M 1M"];
    let edges = ["read -P 5 3M 28k", "read -P 0 3100k 1000", "read -P 5 3175400 24", "read -P 5 3104k 900k", "flush"];
    let commands = [&writes[..], &reads, &edges].concat();
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let arguments: Vec<&str> = ["-f", "raw", "-d", "unmap"].into_iter().chain(commands).chain([&uri[..]]).collect();
    let said = served.run("qemu-io", &arguments);
    assert!(!said.contains("failed"), "{said}");
    let kib =
        [(0, false), (64, true), (128, false), (256, true), (1280, false), (2048, true), (3072, false), (4096, true)];
    assert_eq!(holes(&served), kib.map(|(at, zero)| (at << 10, zero)));

    // Fio discards each block of a part at random, while it writes another part and verifies that.
    served.run("qemu-io", &["-f", "raw", "-c", "write -P 5 8M 8M", &uri]);
    let target = format!("--uri={uri}");
    let trims = ["--name=x", "--ioengine=nbd", "--thread", "--rw=randtrim", "--bs=4k", "--iodepth=16"];
    let fio = served.fio();
    let said = served.run("qemu-io", &["-f", "raw", "-c", "read -P 5 8M 8M", &uri]);
    assert!(!said.contains("failed"), "{said}");
    served.run("timeout", &[&["30", "fio"][..], &trims, &["--size=6m", "--offset=9m", &target]].concat());
    let said = fio.succeeds();
    assert!(said.contains("err= 0"), "{said}");
    let reads = ["-c", "read -P 5 8M 1M", "-c", "read -P 0 9M 6M", "-c", "read -P 5 15M 1M"];
    let said = served.run("qemu-io", &[&["-f", "raw"][..], &reads, &[&uri]].concat());
    assert!(!said.contains("failed"), "{said}");
    let of_part = |&(at, _): &(u64, bool)| (8 << 20..16 << 20).contains(&at);
    let part: Vec<_> = holes(&served).into_iter().filter(of_part).collect();
    assert_eq!(part, [(8, false), (9, true), (15, false)].map(|(at, zero)| (at << 20, zero)));
}

/// A server hangs while a client writes, for longer than the others wait for it.
#[test]
#[ignore = "long: make test-all"]
fn fio_finds_what_it_wrote_while_a_server_hangs() {
    let Some(()) = require::nbd_clients() else { return };
    let mut served = Served::new();
    let fio = served.fio();
    std::thread::sleep(Duration::from_millis(500));
    served.remotes.servers[0].process.signal(Signal::STOP).unwrap();
    until("its copy is left out", || served.server.volume().members().len() == 2);
    served.remotes.servers[0].process.signal(Signal::CONT).unwrap();
    let said = fio.succeeds();
    assert!(said.contains("err= 0"), "{said}");
    served.is_whole();
}

#[test]
fn a_volume_that_another_writer_has_opened_answers_that_it_is_shut_down() {
    let Some(()) = require::nbd_clients() else { return };
    let served = Served::new();
    let uri = served.uri();
    let zeros = ["-f", "raw", "-c", "write -P 5 0 64k", "-c", "write -z 4k 8k", "-c", "discard 32k 4k", "-c", "flush"];
    let reads = ["-c", "read -P 5 0 4k", "-c", "read -P 0 4k 8k", "-c", "read -P 5 12k 20k", "-c", "read -P 0 32k 4k"];
    let said = served.run("qemu-io", &[&zeros[..], &["-d", "unmap"], &reads, &[&uri]].concat());
    assert!(!said.contains("failed"), "{said}");
    // The servers are on this host, so their memory is soon read without them.
    until("a read is answered by the connection's own thread", || {
        served.run("qemu-io", &["-f", "raw", "-c", "read -P 5 0 4k", "-c", "read -P 0 32k 4k", &uri]);
        served.server.volume().read_counts().here > 0
    });
    let other = served.remotes.open(&options());
    for request in ["read -P 5 0 4k", "write -P 6 0 64k"] {
        let (_, said) = served.start("qemu-io", &["-f", "raw", "-c", request, &uri]).ends();
        assert!(said.contains("shutdown"), "{request}: {said}");
    }
    assert_eq!(other.read(0, 1).unwrap(), vec![5; 4096]);
    assert!(served.server.volume().end().is_some());
}

/// Two of three servers hang, so nothing is acknowledged and the client's requests wait. The end of the device does
/// not.
#[test]
fn a_device_ends_although_its_volume_waits() {
    let mut served = Served::new();
    let Some(Address::Unix(socket)) = served.server.address().cloned() else { panic!("a unix socket") };
    for server in &mut served.remotes.servers[1..] {
        server.process.signal(Signal::STOP).unwrap();
    }
    let client = write_a_lot(&socket);
    std::thread::sleep(Duration::from_millis(300));
    let Served { remotes, server, folder } = served;
    let began = Instant::now();
    drop(server);
    // The servers would hang for ever.
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    client.join().unwrap();
    drop((remotes, folder));
}

/// A client that writes more than the volume takes without acknowledging it.
fn write_a_lot(socket: &Path) -> std::thread::JoinHandle<()> {
    use std::io::{Read, Write};
    let mut stream = UnixStream::connect(socket).unwrap();
    std::thread::spawn(move || {
        let mut said = [0; 18 + 8 + 2];
        stream.read_exact(&mut said[..18]).unwrap();
        // Flags, and the old way to choose the first export: without zeros behind the answer.
        stream.write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]].concat()).unwrap();
        stream.read_exact(&mut said[18..]).unwrap();
        let mut write = Vec::new();
        let request = remora_nbd::request::Request { flags: 0, command: 1, cookie: 1, offset: 0, length: 1 << 20 };
        request.encode(&mut write);
        write.resize(write.len() + (1 << 20), 7);
        while stream.write_all(&write).is_ok() {} // until the server ends
    })
}

/// A client that asks for no block sizes, as old kernels and firmware are: it takes the first export, and whatever
/// request it likes.
struct Plain(UnixStream);

impl Plain {
    fn connect(socket: &Path) -> Plain {
        use std::io::{Read, Write};
        let mut stream = UnixStream::connect(socket).unwrap();
        let mut said = [0; 18 + 8 + 2];
        stream.read_exact(&mut said[..18]).unwrap();
        stream.write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]].concat()).unwrap();
        stream.read_exact(&mut said[18..]).unwrap();
        Plain(stream)
    }

    /// What a request reads, or its error.
    fn ask(&mut self, command: u16, flags: u16, at: u64, length: usize, data: &[u8]) -> Result<Vec<u8>, u32> {
        use std::io::{Read, Write};
        let mut bytes = Vec::new();
        let request = remora_nbd::request::Request { flags, command, cookie: 9, offset: at, length: length as u32 };
        request.encode(&mut bytes);
        bytes.extend_from_slice(data);
        self.0.write_all(&bytes).unwrap();
        let mut head = [0; 16];
        self.0.read_exact(&mut head).unwrap();
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        let mut read = vec![0; if command == command::READ && error == 0 { length } else { 0 }];
        self.0.read_exact(&mut read).unwrap();
        if error == 0 { Ok(read) } else { Err(error) }
    }
}

/// Clients beside each other, each with bytes of its own that begin and end within blocks: what one writes, zeroes and
/// discards there undoes nothing of its neighbours, and is what a plain array of bytes has, through the loss of a
/// server.
#[test]
fn clients_that_send_parts_of_blocks_find_what_an_array_of_bytes_has() {
    const CLIENTS: usize = 4;
    /// Some blocks and a part of one; the last one has an odd number of bytes.
    const OWN: [usize; CLIENTS] = [512, 2 * 4096 + 512, 3 * 4096 + 1536, 4096 + 77];
    let mut served = Served::new();
    let Some(Address::Unix(socket)) = served.server.address().cloned() else { panic!("a unix socket") };
    let seed = remora_lab::random::seed("parts of blocks");
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let contents = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let from = 4096 * 7 + 512 + OWN[..client].iter().sum::<usize>();
                let (socket, is_over) = (&socket, &is_over);
                scope.spawn(move || {
                    let (mut plain, mut random) = (Plain::connect(socket), Random::new(seed + client as u64));
                    let mut has = vec![0; OWN[client]];
                    for step in 0.. {
                        if step >= 300 && is_over.load(std::sync::atomic::Ordering::Relaxed) {
                            break;
                        }
                        // Often at the ends, where neighbours are, and in whole sectors.
                        let unit = if random.one_in(4) || client == CLIENTS - 1 { 1 } else { 512 };
                        let at =
                            if random.one_in(3) { 0 } else { random.below((has.len() / unit) as u64) as usize * unit };
                        let most = (has.len() - at) / unit;
                        let length =
                            if random.one_in(3) { most } else { random.between(1, most as u64) as usize } * unit;
                        let (offset, fua) = ((from + at) as u64, u16::from(random.one_in(8)));
                        let part = at..at + length;
                        match random.below(6) {
                            0..=2 => {
                                let data = random.bytes(length);
                                plain.ask(command::WRITE, fua, offset, length, &data).unwrap();
                                has[part].copy_from_slice(&data);
                            }
                            3 => {
                                plain.ask(command::WRITE_ZEROES, fua, offset, length, &[]).unwrap();
                                has[part].fill(0);
                            }
                            4 => {
                                plain.ask(command::TRIM, fua, offset, length, &[]).unwrap();
                                let (first, last) =
                                    ((from + at).div_ceil(4096) * 4096, (from + at + length) / 4096 * 4096);
                                if first < last {
                                    has[first - from..last - from].fill(0);
                                }
                            }
                            _ => {
                                plain.ask(command::FLUSH, 0, 0, 0, &[]).unwrap();
                                let read = plain.ask(command::READ, 0, offset, length, &[]).unwrap();
                                assert!(read == has[part], "seed {seed}, client {client}, step {step}");
                            }
                        }
                    }
                    has
                })
            })
            .collect();
        served.remotes.kill(1);
        until("its copy is left out", || served.server.volume().members().len() == 2);
        served.remotes.restart(1);
        until("every copy is whole again", || served.server.volume().members().len() == 3);
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).collect::<Vec<_>>().concat()
    });
    let expected = [vec![0; 512], contents].concat();
    let length = expected.len();
    let mut plain = Plain::connect(&socket);
    assert!(plain.ask(command::READ, 0, 4096 * 7, length, &[]).unwrap() == expected, "seed {seed}");
    let behind = plain.ask(command::READ, 0, (4096 * 7 + length) as u64, 9000, &[]).unwrap();
    assert!(behind.iter().all(|byte| *byte == 0), "nothing was written there");
    // What reaches beyond the end is refused, whole blocks or not.
    let end = BLOCKS * 4096;
    assert!(plain.ask(command::WRITE, 0, end - 512, 512, &[7; 512]).is_ok());
    assert_eq!(plain.ask(command::WRITE, 0, end - 512, 1024, &[7; 1024]), Err(28));
    assert_eq!(plain.ask(command::READ, 0, end - 100, 101, &[]), Err(22));
    assert_eq!(plain.ask(command::READ, 0, end - 1024, 1024, &[]).unwrap(), [[0; 512], [7; 512]].concat());
    // Clients that ask are told of whole blocks.
    let said = served.run("nbdinfo", &[&served.uri()]);
    assert!(said.contains("block_size_minimum: 4096") && said.contains("block_size_preferred: 4096"), "{said}");
}
