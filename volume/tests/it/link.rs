//! A link to a server: what passes it arrives late, and not faster than its rate. A proxy in this process.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_messenger::Address;

/// Towards a server. What the server answers arrives `delay` later.
pub struct Link {
    at: SocketAddr,
    is_over: Arc<AtomicBool>,
    accepts: Option<JoinHandle<()>>,
}

impl Link {
    /// A link to `server` that carries `rate` bytes a second towards it.
    pub fn new(server: &Address, delay: Duration, rate: f64) -> Link {
        let Address::Tcp(server) = *server else { unreachable!("a server of these tests listens on TCP") };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let accepts = std::thread::spawn(move || {
            for client in listener.incoming() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                let (client, server) = (client.unwrap(), TcpStream::connect(server).unwrap());
                for stream in [&client, &server] {
                    stream.set_nodelay(true).unwrap();
                }
                // These end with the connection, whichever end ends it.
                pass(client.try_clone().unwrap(), server.try_clone().unwrap(), Duration::ZERO, rate);
                pass(server, client, delay, f64::INFINITY);
            }
        });
        Link { at, is_over, accepts: Some(accepts) }
    }

    pub fn address(&self) -> Address {
        Address::Tcp(self.at)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.at); // wakes the one that accepts
        self.accepts.take().unwrap().join().unwrap();
    }
}

/// Passes bytes on in one direction.
fn pass(mut from: TcpStream, mut to: TcpStream, delay: Duration, rate: f64) {
    // As much as a router keeps: beyond it the sender waits.
    let (pieces, due) = mpsc::sync_channel::<(Instant, Vec<u8>)>(256);
    std::thread::spawn(move || {
        let mut free = Instant::now();
        let mut buffer = vec![0; 16 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            free = free.max(Instant::now()) + Duration::from_secs_f64(length as f64 / rate);
            if pieces.send((free + delay, buffer[..length].to_vec())).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Read);
    });
    std::thread::spawn(move || {
        for (at, bytes) in due {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}
