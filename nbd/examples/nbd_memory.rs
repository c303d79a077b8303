//! Serves memory at a unix socket until its standard input ends: for trying clients.
//!
//! ```text
//! cargo run --release -p remora-nbd --example nbd_memory -- /tmp/nbd/socket 1024
//! nbdinfo 'nbd+unix:///?socket=/tmp/nbd/socket'
//! ```

use std::io::Read;
use std::sync::Arc;

use remora_nbd::device::MemoryDevice;
use remora_nbd::{Address, Offer, Server, ServerOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, mebibytes] = &arguments[..] else { return Err("give the socket's path, and a number of MiB".into()) };
    let device = Arc::new(MemoryDevice::new(mebibytes.parse::<u64>()? << 20));
    let offer = Offer { name: "memory".into(), description: "memory of this process".into(), device };
    let server = Server::start(vec![offer], &ServerOptions::new(Address::Unix(path.into())))?;
    println!("listening {}", server.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
