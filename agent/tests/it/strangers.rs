//! Hosts without the token at the source's port. They cost the source little, and no replica waits for them.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use remora_lab::{Kind, Server, assert_same_data, require};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

use crate::kit::{Source, Stage, fill_keys, primary};

/// The strangers' address, another one than the replicas'.
const STRANGERS: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// Connections that strangers hold open without a word. The source has 64 places.
const SILENT: usize = 100;

/// The greatest number of descriptors that strangers may cost: 32 places with two each, 16 connections that are being
/// turned away, and some on their way.
const DESCRIPTORS: usize = 100;

/// Connects to the source from the strangers' address.
fn call(source: SocketAddr) -> rustix::io::Result<TcpStream> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &SocketAddr::new(STRANGERS, 0))?;
    connect(&socket, &source)?;
    Ok(socket.into())
}

/// Connections of a flood in each [`BEAT`]: 1,500 a second.
const BURST: usize = 30;
const BEAT: Duration = Duration::from_millis(20);

/// Connects 1,500 times a second until dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    made: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(source: SocketAddr) -> Flood {
        let (stop, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, counted) = (stop.clone(), made.clone());
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let beat = Instant::now() + BEAT;
                for _ in 0..BURST {
                    // One byte of a greeting: the source cannot know yet what the peer wants.
                    if call(source).is_ok_and(|mut stream| stream.write_all(b"R").is_ok()) {
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                }
                thread::sleep(beat.saturating_duration_since(Instant::now()));
            }
        });
        Flood { stop, made, thread: Some(thread) }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn descriptors(source: &Source) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", source.agent.pid())).unwrap().count()
}

/// A source of a primary with some keys, and a server.
fn setting(kind: Kind) -> (Server, Source, Server) {
    let server = primary(kind).start().unwrap();
    fill_keys(&server, 1000, "value");
    let source = Stage::new().source(&server.url(), &["--eager"]);
    (server, source, Server::start(kind).unwrap())
}

#[test]
fn silent_connections_of_one_address_keep_no_replica_of_another_one_out() {
    for kind in require::kinds() {
        let (primary, source, replica) = setting(kind);
        for byte in [&b"R"[..], b"REMORALN"] {
            let silent: Vec<_> = (0..SILENT).map(|_| call(source.address)).collect();
            silent.iter().flatten().for_each(|mut stream| drop(stream.write_all(byte)));
            let began = Instant::now();
            source.status();
            assert!(began.elapsed() < Duration::from_secs(1), "the status took {:?}", began.elapsed());
            source.replicate(&replica, &["--transport", "tcp", "--replace"]);
            assert_same_data(&primary, &replica);
        }
    }
}

#[test]
fn a_flood_of_connections_delays_no_replica_and_costs_few_descriptors() {
    for kind in require::kinds() {
        let (primary, source, replica) = setting(kind);
        source.status();
        let before = descriptors(&source);
        let flood = Flood::start(source.address);
        let (mut most, began) = (0, Instant::now());
        while began.elapsed() < Duration::from_secs(3) {
            most = most.max(descriptors(&source));
            let asked = Instant::now();
            source.status();
            assert!(asked.elapsed() < Duration::from_secs(1), "a status took {:?}", asked.elapsed());
        }
        let rate = flood.made.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64();
        assert!(rate > 500.0, "the flood was {rate:.0} connections a second, which is no flood");
        assert!(most <= before + DESCRIPTORS, "{before} descriptors before, {most} during the flood");
        source.replicate(&replica, &["--transport", "tcp"]);
        drop(flood);
        assert_same_data(&primary, &replica);
        let rejections = source.agent.output().matches("connection rejected").count();
        assert!(rejections <= 4, "{rejections} lines about rejected connections");
    }
}
