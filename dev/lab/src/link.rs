//! Link: a slow way to a server. What passes it arrives late, and not faster than its rate. A proxy in this process,
//! since cables with delays ([`crate::net`]) need a kernel that has them.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Doing, Result};

/// A link towards a server. What the server answers arrives later.
#[derive(Debug)]
pub struct Link {
    at: SocketAddr,
    is_over: Arc<AtomicBool>,
    accepts: Option<JoinHandle<()>>,
}

impl Link {
    /// A link to `server` that carries `rate` bytes a second towards it. The server's answers arrive `delay` later.
    pub fn new(server: SocketAddr, delay: Duration, rate: f64) -> Result<Link> {
        let doing = || format!("make a slow link to {server}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).doing(doing)?;
        let at = listener.local_addr().doing(doing)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let accepts = std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                // A client whose connection cannot be passed on sees it end.
                let _ = connect(client, server, delay, rate);
            }
        });
        Ok(Link { at, is_over, accepts: Some(accepts) })
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.at
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.at); // wakes the thread that accepts
        if let Some(accepts) = self.accepts.take() {
            let _ = accepts.join(); // a panic was reported where it happened
        }
    }
}

/// Passes a connection on. The threads end with it, whichever end ends it.
fn connect(client: TcpStream, server: SocketAddr, delay: Duration, rate: f64) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    pass(client.try_clone()?, server.try_clone()?, Duration::ZERO, rate);
    pass(server, client, delay, f64::INFINITY);
    Ok(())
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
