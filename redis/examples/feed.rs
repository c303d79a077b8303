//! Makes a replica of a snapshot file: the primary's whole side in one blocking loop.
//!
//! ```sh
//! cargo run -p remora-redis --example feed -- /tmp/copy.rdb     # prints the address it listens on
//! redis-cli -p 6380 REPLICAOF 127.0.0.1 <port>
//! redis-cli -p 6380 REPLICAOF <the snapshot's true primary>     # +CONTINUE, if its backlog still reaches back that far
//! ```
//!
//! Not a tool: one replica, no TLS, no stream after the snapshot. It shows what a driver of [`Server`] has to do. Its
//! counterpart is `snapshot.rs`, which creates such a file.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::server::{Event, Options, Server};
use remora_redis::rdb::Head;

fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::args().nth(1).ok_or("usage: feed FILE")?;
    let snapshot = std::fs::read(&file)?;
    let (head, _) = Head::parse(&snapshot)?.ok_or("the file is shorter than a snapshot's head")?;
    let replid = head.replid().ok_or("the snapshot names no replid")?;
    let offset = head.offset().ok_or("the snapshot names no offset")?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("listening on {}", listener.local_addr()?);
    let (mut stream, _) = listener.accept()?;
    serve(&mut stream, &snapshot, replid, offset)
}

/// Serves the link until the replica closes it, as it does at `REPLICAOF` to another primary.
fn serve(stream: &mut TcpStream, snapshot: &[u8], replid: ReplId, offset: u64) -> Result<(), Box<dyn Error>> {
    let mut server = Server::new(Options::default());
    let mut buffer = [0; 16 * 1024];
    loop {
        let received = stream.read(&mut buffer)?;
        if received == 0 {
            println!("the replica closed the connection");
            return Ok(());
        }
        server.handle_input(&buffer[..received])?;
        let mut body: &[u8] = &[];
        while let Some(event) = server.poll_event() {
            println!("{event:?}");
            if let Event::Psync { .. } = event {
                println!("{:?}", server.peer());
                server.full_resync(&replid, offset);
                server.payload(&Payload::Length(snapshot.len() as u64));
                body = snapshot;
            }
        }
        stream.write_all(&server.take_output())?;
        stream.write_all(body)?;
    }
}
