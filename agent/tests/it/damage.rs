//! Damage: a path between source and replica that changes bytes. The checksums find it, and a sync that cannot get past
//! it ends in time and names it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::{Server, require};

use crate::kit::{Source, Stage, ends, load, primary, says};

/// Chunks of this size are slots: messages, lines, entries and records of a quiet primary are smaller.
const LARGE: usize = 16 << 10;

/// A TCP proxy that changes one byte of every large chunk that the source sends. Its threads end with their connections.
struct Proxy {
    address: SocketAddr,
    damaged: Arc<AtomicUsize>,
}

impl Proxy {
    fn start(source: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let damaged = Arc::new(AtomicUsize::new(0));
        let counted = damaged.clone();
        thread::spawn(move || {
            for replica in listener.incoming().map_while(Result::ok) {
                let Ok(source) = TcpStream::connect(source) else { return };
                let (from, to) = (replica.try_clone().unwrap(), source.try_clone().unwrap());
                thread::spawn(move || forward(from, to, |_| {}));
                let counted = counted.clone();
                thread::spawn(move || {
                    forward(source, replica, |chunk| {
                        if chunk.len() >= LARGE {
                            let middle = chunk.len() / 2;
                            chunk[middle] ^= 0x20;
                            counted.fetch_add(1, Relaxed);
                        }
                    });
                });
            }
        });
        Proxy { address, damaged }
    }
}

/// Copies one direction until it ends, and ends both connections.
fn forward(mut from: TcpStream, mut to: TcpStream, change: impl Fn(&mut [u8])) {
    let mut chunk = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut chunk) {
        change(&mut chunk[..length]);
        if to.write_all(&chunk[..length]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[test]
fn damage_that_does_not_stop_ends_in_time_and_is_named() {
    for kind in require::kinds() {
        let primary = primary(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        load(&primary, 8, 1 << 20);
        let (source, stage) = (Source::start(&primary, &["--memory", "64MiB"]), Stage::new());
        // Into a copy that others may read, and into files.
        for more in [vec![], vec!["--state-dir".to_owned(), stage.path("state")]] {
            let (server, proxy) = (Server::start(kind).unwrap(), Proxy::start(source.address));
            let more: Vec<&str> = more.iter().map(String::as_str).collect();
            let at = proxy.address.to_string();
            let args =
                ["replica", "--server", &server.url(), "--source", &at, "--retry-for", "5s", "--transport", "tcp"];
            let token = ["--token-file", source.token().to_str().unwrap()];
            let began = Instant::now();
            let mut agent = stage.start(None, &[&args[..], &token, &more].concat());
            let output = ends(&mut agent, 5);
            let took = began.elapsed();
            says(&output, &["is damaged", &format!("the source {at}"), "tried for 5 s (--retry-for)"]);
            assert!(took > Duration::from_secs(5) && took < Duration::from_secs(30), "{took:?}");
            assert!(proxy.damaged.load(Relaxed) > 1);
            assert_eq!(server.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
        }
    }
}
